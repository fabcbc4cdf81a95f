/** Large files that never hold still: read seldom, never forgotten, never called complete, taken at once by a flush. */
import {
  appendFileSync,
  closeSync,
  linkSync,
  openSync,
  readFileSync,
  rmSync,
  writeFileSync,
  writeSync,
} from 'node:fs';
import { join } from 'node:path';
import { setTimeout as sleep } from 'node:timers/promises';
import t from 'tap';
import type { Clock } from '../../lib/core/parts.ts';
import { native } from '../../lib/native/load.ts';
import type { Native } from '../../lib/native/types.ts';
import { clock, makeRig, QUICK, type Rig, treeDifferences, until } from './support.ts';

t.setTimeout(0);

const FAST = 20;
/** Twenty times as fast, so that a back-off of a minute takes three seconds. */
const fast: Clock = {
  boot: () => clock.boot() * FAST,
  now: clock.now,
  setTimeout: (fn, ms) => clock.setTimeout(fn, ms / FAST),
};

/** The addon, for which some names change whenever they are read. */
function restless(names: Set<string>): {
  native: Native;
  attempts: { path: string; at: number; retries: number }[];
} {
  const attempts: { path: string; at: number; retries: number }[] = [];
  return {
    attempts,
    native: new Proxy(native, {
      get(target, key) {
        if (key !== 'stage') return target[key as keyof Native];
        return async (...[options, items]: Parameters<Native['stage']>) => {
          const ids = new Set<number>();
          for (let at = 0; at < items.length; at += items.readUInt32LE(at)) {
            const path = items.subarray(at + 24, at + 24 + items.readUInt32LE(at + 20)).toString();
            if (!names.has(path)) continue;
            ids.add(items.readUInt32LE(at + 4));
            attempts.push({ path, at: fast.boot(), retries: options.retries ?? 3 });
          }
          const out = await target.stage(options, items);
          for (let at = 0; at < out.length; at += out.readUInt32LE(at))
            if (ids.has(out.readUInt32LE(at + 4))) {
              out[at + 8] = 2;
              out[at + 9] = 0;
            }
          return out;
        };
      },
    }) as Native,
  };
}

async function started(
  t: { teardown(fn: () => unknown): unknown },
  names: Set<string>,
): Promise<{ rig: Rig; attempts: ReturnType<typeof restless>['attempts'] }> {
  const { native, attempts } = restless(names);
  const rig = makeRig({ deps: { native, clock: fast } });
  t.teardown(() => rig.close());
  writeFileSync(join(rig.live, 'big'), Buffer.alloc(2 << 20, 1));
  writeFileSync(join(rig.live, 'small'), 'small');
  await rig.source.recover();
  await rig.source.start(QUICK, 1);
  await until('the first generation', () => rig.source.generation() !== null);
  return { rig, attempts };
}
const scribble = (rig: Rig): void => {
  const fd = openSync(join(rig.live, 'big'), 'r+');
  writeSync(fd, `${Math.random()}`, 5000);
  closeSync(fd);
};
const hot = (rig: Rig): string[] =>
  rig.source.status().conditions.flatMap((c) => (c.type === 'Hot' ? (c.paths ?? []) : []));

t.test(
  'a large file that is written all the time is read less and less often, at least every minute',
  async (t) => {
    const names = new Set<string>();
    const { rig, attempts } = await started(t, names);
    names.add('big');
    const writer = setInterval(() => scribble(rig), 5);
    t.teardown(() => clearInterval(writer));
    await until('it is seen', () => attempts.length > 0);
    const began = fast.boot();
    await until('200 s', () => fast.boot() - began > 200_000, 30_000);
    clearInterval(writer);
    const pauses = attempts.slice(1).map((a, i) => a.at - (attempts[i] as { at: number }).at);
    // 2, 4, 8, 16, 32, 60, 60: two attempts each
    t.ok(attempts.length >= 5 && attempts.length <= 9, `${attempts.length} readings in 200 s`);
    t.ok(
      attempts.every((a) => a.retries <= 1),
      'of at most two attempts',
    );
    t.ok(Math.max(...pauses) < 75_000, `${pauses.map(Math.round)}`);
    t.strictSame(hot(rig), ['big']);
    t.notOk(rig.source.complete());
  },
);

t.test('the others go on meanwhile, but no generation is called a point in time or caught up', async (t) => {
  const names = new Set<string>();
  const { rig, attempts } = await started(t, names);
  const old = readFileSync(join(rig.data, 'big'));
  names.add('big');
  scribble(rig);
  await until('it is hot', () => hot(rig).length === 1);
  const before = rig.source.holdsAsOf() ?? 0;
  for (let i = 0; i < 3; i++) {
    const count = rig.sealed.length;
    appendFileSync(join(rig.live, 'small'), 'more');
    await until('sealed', () => rig.sealed.length > count);
    t.match(rig.sealed.at(-1), { quiescent: false, caughtUp: false });
    t.equal(rig.source.holdsAsOf(), before, 'as of the time before it was written to');
    t.notOk(rig.source.complete());
    t.strictSame(hot(rig), ['big'], 'still named');
  }
  t.ok(attempts.length <= 3);
  t.ok(readFileSync(join(rig.data, 'big')).equals(old), 'its last version stays');
});

t.test('it is taken as soon as it holds still, without another event', async (t) => {
  const names = new Set<string>();
  const { rig } = await started(t, names);
  names.add('big');
  scribble(rig);
  await until('it is hot', () => hot(rig).length === 1);
  names.clear();
  await until('taken', () => hot(rig).length === 0, 20_000);
  t.strictSame(treeDifferences(rig.live, rig.data), []);
  await until('complete', () => rig.source.complete());
});

t.test('a flush waits for no back-off: the last state of a stopped application is sealed', async (t) => {
  const names = new Set<string>();
  const { rig, attempts } = await started(t, names);
  names.add('big');
  const writer = setInterval(() => scribble(rig), 5);
  await until('it waits for long', () => attempts.length >= 4, 20_000);
  clearInterval(writer);
  names.clear();
  const { quiescent } = await rig.source.flush();
  t.strictSame(treeDifferences(rig.live, rig.data), []);
  t.equal(quiescent, true);
  t.strictSame(hot(rig), []);
});

t.test('removed, or with another name, while it waits', async (t) => {
  const names = new Set<string>();
  const { rig } = await started(t, names);
  linkSync(join(rig.live, 'big'), join(rig.live, 'link'));
  await rig.source.flush();
  names.add('big').add('link');
  scribble(rig);
  await until('both are hot', () => hot(rig).length === 2);
  rmSync(join(rig.live, 'big'));
  await until('one is gone', () => hot(rig).length === 1);
  rmSync(join(rig.live, 'link'));
  await until('all is gone', () => rig.source.complete(), 20_000);
  t.strictSame(treeDifferences(rig.live, rig.data), []);
});

t.test('small files are tried again with every batch', async (t) => {
  const names = new Set<string>();
  const { rig, attempts } = await started(t, names);
  names.add('small');
  appendFileSync(join(rig.live, 'small'), 'x');
  await until('tried often', () => attempts.length > 8, 20_000);
  names.clear();
  await until('taken', () => rig.source.complete());
  await sleep(1);
  t.strictSame(treeDifferences(rig.live, rig.data), []);
});
