/** A process that dies around the journal and the commit: afterwards the replica is exactly at one generation. */
import { type Point, runPoints } from './crash-runs.ts';

const AFTER = [
  'replica.journal.committed',
  'replica.journal.durable',
  'replica.phase1.applied',
  'replica.phase1.durable',
  'replica.phase2.applied',
  'replica.phase2.durable',
  'replica.commit.mid',
  'replica.commit.before_durable',
  'replica.commit.durable',
];
const POINTS: Point[] = [
  { at: 'replica.journal.before_sync', held: '1-1' },
  { at: 'replica.journal.before', held: '1-1' },
  ...AFTER.map((at): Point => ({ at, held: '1-2' })),
  { at: 'replica.journal.before', held: '1-1', full: true },
  { at: 'replica.commit.mid', held: '1-2', full: true },
];
runPoints(POINTS);
