import fs from 'node:fs';
import path from 'node:path';
import t from 'tap';
import { parseGeneration } from '../../lib/core/generation.ts';
import { Kind, kindOf, pathOf } from '../../lib/core/record.ts';
import { native } from '../../lib/native/load.ts';
import type { Native } from '../../lib/native/types.ts';
import { picture, put, settled, until, world } from './support.ts';

t.test('A29: freshness only moves forward, and only with what is held', async (t) => {
  const w = await world();
  t.teardown(() => w.close());
  put(w.source.root, 'f', '1');
  const first = await w.source.seal();
  w.replica.beat(first, true, 999_000);
  t.equal(w.replica.status().freshAgeMs, null, 'nothing is held yet');
  await w.sync({ echo: 990_000 });
  t.equal(w.replica.status().freshAgeMs, 10_000);
  w.replica.beat(first, true, 980_000);
  t.equal(w.replica.status().freshAgeMs, 10_000, 'an older value changes nothing');
  w.replica.beat(first, false, 999_000);
  t.equal(w.replica.status().freshAgeMs, 10_000, 'the source has something pending');
  w.replica.beat(first, true, 1_000_001);
  t.equal(w.replica.status().freshAgeMs, 10_000, 'a clock of the future is no clock of this boot');
  w.replica.beat(first, true, null);
  t.equal(w.replica.status().freshAgeMs, 10_000);
  w.replica.beat(first, true, 999_000);
  t.equal(w.replica.status().freshAgeMs, 1000);
  const second = { epoch: 1, seq: 2 };
  w.clock.pass(5000);
  w.replica.beat(second, true, 1_004_000);
  t.match(w.replica.status(), { freshAgeMs: 6000, state: 'behind', wanted: '1-2' });
});

t.test('B1: an idle volume stays fresh by the beat alone', async (t) => {
  const w = await world();
  t.teardown(() => w.close());
  put(w.source.root, 'f', '1');
  const g = await w.source.seal();
  await w.sync({ echo: w.clock.boot() });
  for (let i = 0; i < 1000; i++) {
    const echo = w.clock.boot();
    w.clock.pass(10_000);
    w.replica.beat(g, true, echo);
  }
  t.equal(w.replica.status().freshAgeMs, 10_000);
});

t.test(
  'B2: freshness survives a restart of the agent exactly, a reboot by the wall clock, which it says',
  async (t) => {
    const w = await world();
    t.teardown(() => w.close());
    put(w.source.root, 'f', '1');
    const g = await w.source.seal();
    await w.sync({ echo: 995_000 });
    w.clock.pass(1000);
    await w.restart();
    t.equal(w.replica.status().freshAgeMs, 6000);
    t.same(w.replica.status().conditions, []);

    await w.replica.stop();
    w.clock.bootMs = 3000;
    w.clock.wallMs += 60_000;
    await w.restart({ bootId: 'boot-2' });
    t.equal(w.replica.status().freshAgeMs, 66_000);
    t.match(w.replica.status().conditions, [{ type: 'FreshnessByWallClock' }]);
    w.replica.beat(g, true, 2500);
    t.equal(w.replica.status().freshAgeMs, 500);
    t.same(w.replica.status().conditions, []);

    await w.replica.stop();
    w.clock.wallMs -= 3_600_000;
    await w.restart({ bootId: 'boot-3' });
    t.equal(w.replica.status().freshAgeMs, null, 'a wall clock that was set back says nothing');
  },
);

t.test('an echo counts only when what it was said of is held', async (t) => {
  const w = await world();
  t.teardown(() => w.close());
  put(w.source.root, 'f', '1');
  await w.source.seal();
  await w.sync({ generation: { epoch: 1, seq: 2 }, echo: 999_000 });
  t.equal(w.replica.status().generation, '1-1');
  t.equal(w.replica.status().freshAgeMs, null);
  put(w.source.root, 'f', '2');
  await w.source.seal();
  await until(() => w.replica.status().state === 'idle');
  t.equal(w.replica.status().freshAgeMs, 1000);
});

t.test('a replica serves what it holds: the whole, and differences from what it knows', async (t) => {
  const w = await world();
  t.teardown(() => w.close());
  await t.rejects(w.replica.open(), { code: 'NOTHING_SEALED' });
  put(w.source.root, 'a', '1');
  put(w.source.root, 'b', '1');
  await w.source.seal();
  await w.source.seal();
  await w.sync();
  put(w.source.root, 'a', '2');
  fs.rmSync(path.join(w.source.root, 'b'));
  await w.source.seal();
  await w.sync();
  t.equal(w.replica.canDiffFrom(parseGeneration('1-2')), true);
  t.equal(
    w.replica.canDiffFrom(parseGeneration('1-1')),
    false,
    'what was removed before the full sync is not known',
  );
  t.equal(w.replica.canDiffFrom(parseGeneration('2-2')), false);
  const served = await w.replica.open();
  t.same(served.generation, { epoch: 1, seq: 3 });
  t.equal(served.strict, true);
  t.equal(served.root.toString(), w.live);
  const names = served.index.changedSince(2, null, 10).map((r) => `${kindOf(r.record)} ${pathOf(r.record)}`);
  t.same(names, [`${Kind.directory} `, `${Kind.file} a`, `${Kind.absent} b`]);
  served.release();
  served.release();
});

/** The addon, with an apply that waits to be let go. */
function slowApply(): { native: Native; entered(): boolean; go(): void } {
  let enter = false;
  let release: () => void = () => undefined;
  const gate = new Promise<void>((r) => (release = r));
  return {
    native: {
      ...native,
      apply: async (o) => {
        enter = true;
        if (o.phase === 2) await gate;
        return native.apply(o);
      },
    },
    entered: () => enter,
    go: release,
  };
}

t.test(
  'A15, A16: a promotion waits for an apply that has begun, and nothing is served meanwhile',
  async (t) => {
    const slow = slowApply();
    const w = await world({ native: slow.native });
    t.teardown(() => w.close());
    put(w.source.root, 'f', '1');
    await w.source.seal();
    w.replica.sync(w.request());
    await until(slow.entered);
    t.equal(w.replica.status().state, 'applying');
    await t.rejects(w.replica.open(), { code: 'APPLYING' });
    await t.rejects(w.replica.promote(2, 30), { code: 'APPLYING' }, 'not within the time');
    t.equal(w.replica.epoch(), 1);
    const promoted = w.replica.promote(2);
    setTimeout(slow.go, 20);
    t.same(await promoted, { epoch: 1, seq: 1 });
    t.same(picture(w.live), picture(w.source.root));
    t.equal(w.replica.epoch(), 2);
  },
);

t.test('after a promotion that failed the replica goes on', async (t) => {
  const slow = slowApply();
  const w = await world({ native: slow.native });
  t.teardown(() => w.close());
  put(w.source.root, 'f', '1');
  await w.source.seal();
  w.replica.sync(w.request());
  await until(slow.entered);
  await t.rejects(w.replica.promote(2, 10), { code: 'APPLYING' });
  slow.go();
  await settled(w.replica);
  await until(() => w.replica.status().generation === '1-1');
  put(w.source.root, 'g', '2');
  await w.source.seal();
  await w.sync();
  t.equal(w.replica.status().generation, '1-2');
});

t.test(
  'an apply that cannot be finished: not promoted; compared as a whole when a source is there',
  async (t) => {
    let broken = true;
    const w = await world({
      native: {
        ...native,
        apply: async (o) => {
          if (o.phase === 2 && broken) {
            // half of it is done
            fs.writeFileSync(path.join(o.root.toString(), 'f'), 'half');
            throw Object.assign(new Error('EIO: input/output error'), { code: 'EIO' });
          }
          return native.apply(o);
        },
      },
    });
    t.teardown(() => w.close());
    put(w.source.root, 'f', '1');
    await w.source.seal();
    await w.sync();
    t.equal(w.replica.status().state, 'error');
    await t.rejects(w.replica.promote(2), { code: 'APPLYING' });
    await t.rejects(w.replica.open(), { code: 'APPLYING' });
    broken = false;
    await until(() => w.replica.status().state === 'idle');
    t.same(picture(w.live), picture(w.source.root));
  },
);

t.test('a volume that was never replicated here can become active', async (t) => {
  const w = await world();
  t.teardown(() => w.close());
  t.equal(await w.replica.promote(1), null);
  t.throws(() => w.replica.sync(w.request()), { code: 'VOLUME_ACTIVE' });
});
