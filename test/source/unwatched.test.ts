/** Directories without a watch (C7, D28): found by scans, and nothing is claimed that no scan has proven. */
import { mkdirSync, readFileSync, rmSync, writeFileSync } from 'node:fs';
import { join } from 'node:path';
import { setTimeout as sleep } from 'node:timers/promises';
import t from 'tap';
import { makeRig, QUICK, type Rig, type RigOptions, treeDifferences, until } from './support.ts';

t.setTimeout(0);

interface Told {
  generation: string;
  quiescent: boolean;
  asOf: number;
}

async function started(
  t: { teardown(fn: () => unknown): unknown },
  maxWatches: number,
  deps: RigOptions['deps'] = {},
): Promise<{ rig: Rig; cuts: number[]; told: Told[] }> {
  const cuts: number[] = [];
  const told: Told[] = [];
  const rig = makeRig({
    watcher: { maxWatches },
    deps: {
      onCut: (cut) => void cuts.push(cut),
      onSealed: (g, quiescent, _caughtUp, asOf) =>
        void told.push({ generation: `${g.epoch}-${g.seq}`, quiescent, asOf }),
      ...deps,
    },
  });
  t.teardown(() => rig.close());
  for (let i = 0; i < 10; i++) mkdirSync(join(rig.live, `d${i}/in/deep`), { recursive: true });
  await rig.source.recover();
  await rig.source.start(QUICK, 1);
  await rig.source.flush();
  return { rig, cuts, told };
}
const same = (rig: Rig): string[] => treeDifferences(rig.live, rig.data);

t.test('the condition names the sysctl, its value and the number that is needed', async (t) => {
  const { rig } = await started(t, 6);
  const limit = Number(readFileSync('/proc/sys/fs/inotify/max_user_watches', 'utf8'));
  const [condition] = rig.source.status().conditions;
  t.equal(rig.source.status().watch.unwatched, 31 - 6, 'directories below one without a watch count too');
  t.equal(condition?.type, 'WatchBudgetExhausted');
  t.match(condition?.message, new RegExp(`25 directories .* ${limit} of fs\\.inotify\\.max_user_watches`));
  const asked = Number(/sysctl -w fs\.inotify\.max_user_watches=(\d+)/.exec(condition?.message ?? '')?.[1]);
  t.ok(asked >= limit + 25, `${asked}`);
});

t.test('what a batch of events seals is as of the last scan, not of its own cut', async (t) => {
  const { rig, cuts, told } = await started(t, 6);
  t.strictSame(
    told,
    [{ generation: '1-1', quiescent: false, asOf: cuts[0] }],
    'the start compares everything',
  );
  t.equal(rig.source.holdsAsOf(), cuts[0]);
  writeFileSync(join(rig.live, 'd9/in/deep/unseen'), 'no event tells of it');
  writeFileSync(join(rig.live, 'seen'), 'an event does');
  await rig.source.flush();
  t.equal(told.at(-1)?.generation, '1-2');
  t.equal(told.at(-1)?.asOf, cuts[0]);
  t.equal(told.at(-1)?.quiescent, false, 'a point in time cannot be claimed');
  t.notOk(rig.source.complete());
  t.not(same(rig).length, 0);
});

t.test('a scan that finds nothing proves that all is held as of its start', async (t) => {
  const { rig, cuts, told } = await started(t, 6);
  await rig.source.flush();
  const before = cuts.length;
  t.equal(await rig.source.audit(0), 0);
  const began = cuts[before] as number;
  await until('the proof', () => rig.source.holdsAsOf() === began);
  t.equal(told.length, 1, 'without another generation');
  t.notOk(rig.source.complete(), 'that is not the same as complete now');
});

t.test('a scan that finds something proves it once that is sealed', async (t) => {
  const { rig, cuts, told } = await started(t, 6);
  writeFileSync(join(rig.live, 'd9/in/deep/unseen'), 'found by the scan');
  const before = cuts.length;
  t.ok((await rig.source.audit(0)) > 0);
  const began = cuts[before] as number;
  await until('the generation', () => told.length === 2);
  await rig.source.flush();
  t.strictSame(same(rig), []);
  t.equal(rig.source.holdsAsOf(), began);
});

t.test('a change during the scan is not covered by it', async (t) => {
  const { rig, cuts } = await started(t, 6);
  const before = cuts.length;
  const scan = rig.source.audit(300);
  await sleep(100);
  const began = cuts[before] as number;
  // the one piece of this small tree has been read by now
  writeFileSync(join(rig.live, 'd9/in/deep/late'), 'after the walk came by');
  await scan;
  await until('the proof', () => rig.source.holdsAsOf() === began);
  t.not(same(rig).length, 0);
  t.ok((await rig.source.audit(0)) > 0, 'the next one finds it');
  await rig.source.flush();
  t.strictSame(same(rig), []);
});

t.test('a batch that fails after a scan does not take the proof for given', async (t) => {
  const { rig, cuts } = await started(t, 6);
  const first = rig.source.holdsAsOf();
  writeFileSync(join(rig.live, 'd9/in/deep/unseen'), 'x');
  rmSync(join(rig.paths.shadow, 'slots'), { recursive: true });
  writeFileSync(join(rig.paths.shadow, 'slots'), 'not a folder');
  const before = cuts.length;
  await rig.source.audit(0);
  await rig.source.flush().catch(() => undefined);
  t.equal(rig.source.holdsAsOf(), first);
  rmSync(join(rig.paths.shadow, 'slots'));
  mkdirSync(join(rig.paths.shadow, 'slots'));
  await until('it is tried again', () => same(rig).length === 0);
  await rig.source.flush();
  t.equal(rig.source.holdsAsOf(), cuts[before]);
});

t.test('when there are watches again, one scan more and the volume is complete', async (t) => {
  const { rig } = await started(t, 16);
  t.ok(rig.source.status().watch.unwatched > 0);
  writeFileSync(join(rig.live, 'd9/in/deep/unseen'), 'written while nobody watched');
  for (let i = 0; i < 6; i++) rmSync(join(rig.live, `d${i}`), { recursive: true });
  await rig.source.flush();
  await rig.watcher.retry();
  await rig.watcher.barrier();
  t.equal(rig.source.status().watch.unwatched, 0);
  t.notOk(rig.source.complete(), 'what happened while nobody watched is not known yet');
  await rig.source.audit(0);
  await rig.source.flush();
  await until('complete', () => rig.source.complete());
  t.strictSame(same(rig), []);
  t.strictSame(rig.source.status().conditions, []);
  writeFileSync(join(rig.live, 'd9/in/deep/seen'), 'an event tells');
  await until('and so it goes on', () => same(rig).length === 0);
});

t.test('the scans begin to come often when the watches run out, not at the next far-off one', async (t) => {
  const timers: number[] = [];
  const { clock } = await import('./support.ts');
  const { rig } = await started(t, 35, {
    auditMs: 900_000,
    clock: {
      ...clock,
      setTimeout(fn, ms) {
        timers.push(ms);
        return clock.setTimeout(fn, ms);
      },
    },
  });
  t.strictSame(rig.source.status().conditions, []);
  t.ok(timers.includes(900_000));
  t.notOk(timers.includes(60_000));
  for (let i = 0; i < 10; i++) mkdirSync(join(rig.live, `more${i}`));
  await rig.source.flush();
  t.match(rig.source.status().conditions, [{ type: 'WatchBudgetExhausted', message: /every 60 s/ }]);
  t.ok(timers.includes(60_000));
});
