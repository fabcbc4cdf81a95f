/** A process that dies at every point of an apply: afterwards the replica is exactly at one generation (A5, D35). */
import { spawnSync } from 'node:child_process';
import fs from 'node:fs';
import os from 'node:os';
import path from 'node:path';
import t from 'tap';
import { fill } from './crash-change.ts';
import { indexFaults, picture, world } from './support.ts';

t.setTimeout(300_000);

const child = path.join(import.meta.dirname, 'crash-child.ts');

interface Point {
  at: string;
  /** which generation is held after recovery */
  held: '1-1' | '1-2';
  full?: boolean;
}

const BEFORE: Point[] = [
  { at: 'replica.journal.before_sync', held: '1-1' },
  { at: 'replica.journal.before', held: '1-1' },
];
const AFTER: string[] = [
  'replica.journal.committed',
  'replica.journal.durable',
  'apply.take.before',
  'apply.take.before:4',
  'apply.take.after',
  'apply.take.after:7',
  'replica.phase1.applied',
  'replica.phase1.durable',
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
  'replica.phase2.applied',
  'replica.phase2.durable',
  'replica.commit.mid',
  'replica.commit.before_durable',
  'replica.commit.durable',
];
const POINTS: Point[] = [
  ...BEFORE,
  ...AFTER.map((at): Point => ({ at, held: '1-2' })),
  { at: 'replica.journal.before', held: '1-1', full: true },
  { at: 'apply.put.before_rename:3', held: '1-2', full: true },
  { at: 'replica.commit.mid', held: '1-2', full: true },
];

for (const { at, held, full } of POINTS)
  t.test(`${at}${full ? ' in a full sync' : ''}: held afterwards ${held}`, async (t) => {
    const folder = fs.mkdtempSync(path.join(os.tmpdir(), 'sv-crash-'));
    const first = await world({ folder });
    fill(first.source.root);
    await first.source.seal();
    await first.sync();
    t.equal(first.replica.status().generation, '1-1');
    const old = picture(first.live);
    await first.replica.stop();
    first.store.close();

    const died = spawnSync(process.execPath, [child, folder, full ? 'full' : 'difference'], {
      env: { ...process.env, SIMPLE_VOLUME_CRASH_AT: at },
      encoding: 'utf8',
    });
    t.ok(died.signal === 'SIGKILL' || died.status === 137, `died there (${died.status} ${died.stderr})`);

    const w = await world({ folder });
    t.teardown(() => w.close());
    t.same(w.replica.status().conditions, []);
    t.equal(w.replica.status().generation, held);
    t.same(picture(w.live), held === '1-1' ? old : picture(w.source.root));
    t.same(await indexFaults(w), []);
    t.same(fs.readdirSync(w.incoming), []);
    // and it goes on from there
    await w.source.seal();
    await w.source.seal();
    fs.writeFileSync(path.join(w.source.root, 'after'), 'the crash');
    await w.source.seal();
    await w.sync({ full: true });
    t.same(w.replica.status().conditions, []);
    t.same(picture(w.live), picture(w.source.root));
    t.end();
  });
