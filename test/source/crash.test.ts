/** A crash at any named point of a seal: afterwards the shadow is exactly a generation, and no change is lost. */
import { execFileSync, spawnSync } from 'node:child_process';
import {
  appendFileSync,
  chmodSync,
  closeSync,
  linkSync,
  mkdirSync,
  openSync,
  readdirSync,
  renameSync,
  rmSync,
  symlinkSync,
  unlinkSync,
  writeFileSync,
  writeSync,
} from 'node:fs';
import { join } from 'node:path';
import t from 'tap';
import { makeBase, makeRig, QUICK, treeDifferences } from './support.ts';

t.setTimeout(0); // the runner limits the file as a whole

const POINTS = [
  'seal.ops',
  'seal.synced',
  'seal.committed',
  'seal.durable',
  'apply.take.before',
  'apply.take.after',
  'seal.taken',
  'seal.phase2',
  'apply.phase2.begin',
  'apply.retire.after',
  'apply.remove.after',
  'apply.rmdir.after',
  'apply.mkdir.after',
  'apply.put.before_rename',
  'apply.put.after_rename',
  'apply.put.after_rename:4',
  'apply.patch.mid',
  'apply.patch.after',
  'apply.meta.after',
  'apply.before_out',
  'apply.end',
  'seal.applied',
  'seal.noted',
];

/** A sealed volume, and a second state of it that has every kind of operation. */
async function prepare(): Promise<{ base: string; before: string }> {
  const base = makeBase();
  const live = join(base, 'live');
  for (const d of ['keep', 'goes/deep', 'moves']) mkdirSync(join(live, d), { recursive: true });
  for (let i = 0; i < 6; i++) writeFileSync(join(live, 'keep', `f${i}`), `one ${i}`);
  writeFileSync(join(live, 'goes/deep/x'), 'x');
  writeFileSync(join(live, 'moves/m'), 'moved');
  for (const [name, fill] of [
    ['big', 1],
    ['pair', 2],
  ] as const)
    writeFileSync(join(live, name), Buffer.alloc(2 << 20, fill));
  linkSync(join(live, 'pair'), join(live, 'pair2'));
  symlinkSync('one', join(live, 'link'));
  const rig = makeRig({ base });
  await rig.source.start(QUICK, 1);
  await rig.source.flush();
  await rig.source.stop();
  await rig.watcher.close();
  rig.store.close();
  // the first generation's tree, to compare with
  const before = join(base, 'before');
  execFileSync('cp', ['-a', live, before]);

  writeFileSync(join(live, 'keep/f0'), 'two');
  unlinkSync(join(live, 'keep/f1'));
  chmodSync(join(live, 'keep/f2'), 0o600);
  rmSync(join(live, 'goes'), { recursive: true });
  renameSync(join(live, 'moves/m'), join(live, 'keep/m'));
  rmSync(join(live, 'moves'), { recursive: true });
  writeFileSync(join(live, 'moves'), 'a file now');
  mkdirSync(join(live, 'new/deep'), { recursive: true });
  writeFileSync(join(live, 'new/deep/n'), 'n');
  for (const name of ['big', 'pair']) {
    const fd = openSync(join(live, name), 'r+');
    writeSync(fd, Buffer.alloc(9000, 9), 0, 9000, 300_000);
    closeSync(fd);
  }
  appendFileSync(join(live, 'big'), 'tail');
  rmSync(join(live, 'link'));
  symlinkSync('two', join(live, 'link'));
  return { base, before };
}

/** With a reader, replaced files are set aside: other steps only here. */
const PINNED = POINTS.filter((p) => /take|retire|remove|put|patch|durable/.test(p));

for (const mode of ['free', 'pinned'])
  for (const point of mode === 'free' ? POINTS : PINNED)
    t.test(`crash at ${point}${mode === 'pinned' ? ' while a reader has the generation' : ''}`, async (t) => {
      // hard links and inodes do not survive a copy, so each case makes its own state
      const { base, before } = await prepare();
      t.teardown(() => rmSync(base, { recursive: true, force: true }));
      const child = spawnSync(process.execPath, [join(import.meta.dirname, 'crash-child.ts'), base, mode], {
        env: { ...process.env, SIMPLE_VOLUME_CRASH_AT: point },
        encoding: 'utf8',
        timeout: 60_000,
      });
      const reached = child.signal === 'SIGKILL' || child.status === 137;
      if (!reached) {
        t.equal(child.status, 0, child.stderr);
        t.ok(
          (mode === 'free' && point === 'apply.retire.after') ||
            (mode === 'pinned' && point.startsWith('apply.patch.after')),
          `${point} is reached`,
        );
      }
      const rig = makeRig({ base });
      t.teardown(() => rig.close());
      await rig.source.recover();
      const generation = rig.source.generation() as { seq: number };
      const sealed = !['seal.ops', 'seal.synced'].includes(point) && generation.seq === 2;
      if (['seal.ops', 'seal.synced'].includes(point)) t.equal(generation.seq, 1, 'not sealed: the old one');
      else t.equal(generation.seq, 2, 'sealed: the new one');
      t.strictSame(
        treeDifferences(sealed ? rig.live : before, rig.data),
        [],
        'the shadow is exactly that generation',
      );
      t.strictSame(readdirSync(join(rig.paths.shadow, 'slots')), [], 'no slot is left');
      t.strictSame(
        readdirSync(join(rig.paths.shadow, 'retired')),
        [],
        'nothing is kept for readers of before',
      );
      await rig.source.start(QUICK, 1);
      await rig.source.flush();
      t.strictSame(treeDifferences(rig.live, rig.data), [], 'and the next batch has all the rest');
      t.strictSame(rig.source.generation(), { epoch: 1, seq: 2 });
      t.equal(await rig.source.audit(0), 0);
      for (const row of rig.store.page(null, 100)) t.not(row.copyIno, 0n);
    });
