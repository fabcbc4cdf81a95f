/** A process that dies between any two moves of an apply: afterwards the replica is exactly at the new generation. */
import { type Point, runPoints } from './crash-runs.ts';

const POINTS = [
  'apply.take.before',
  'apply.take.before:4',
  'apply.take.after',
  'apply.take.after:7',
  'apply.phase2.begin',
  'apply.remove.after',
  'apply.remove.after:4',
  'apply.rmdir.after:2',
  'apply.mkdir.after:2',
  'apply.put.before_rename',
  'apply.put.before_rename:6',
  'apply.put.after_rename',
  'apply.put.after_rename:9',
  'apply.patch.mid',
  'apply.patch.mid:2',
  'apply.patch.after',
  'apply.patch.after:2',
  'apply.meta.after',
  'apply.before_out',
  'apply.end',
];
runPoints([
  ...POINTS.map((at): Point => ({ at, held: '1-2' })),
  { at: 'apply.put.before_rename:3', held: '1-2', full: true },
]);
