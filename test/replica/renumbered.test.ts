/**
 * Hard links after a promotion: the new source numbers the groups by inodes of its own, and its numbers may be any
 * of the old source's. The replicas hold rows with the old ones.
 */
import fs from 'node:fs';
import path from 'node:path';
import t, { type Test } from 'tap';
import { indexFaults, picture, type World, world } from './support.ts';

t.setTimeout(240_000);

/** The next source, which numbers `files` (any one name of each group) as `numbers` says. */
function promote(w: World, epoch: number, numbers: Record<string, bigint>): void {
  w.source.promote(epoch);
  const map = new Map(
    Object.entries(numbers).map(([file, number]) => [
      fs.statSync(path.join(w.source.root, file), { bigint: true }).ino,
      number,
    ]),
  );
  w.source.groupOf = (ino) => map.get(ino) ?? ino;
}

async function linked(
  t: Test,
): Promise<{ w: World; at: (p: string) => string; check: (what: string) => Promise<void> }> {
  const w = await world();
  t.teardown(() => w.close());
  const at = (p: string): string => path.join(w.source.root, p);
  fs.mkdirSync(at('d'));
  for (const group of ['g', 'h', 'k']) {
    fs.writeFileSync(at(`${group}1`), `the content of ${group}`);
    fs.linkSync(at(`${group}1`), at(`${group}2`));
    fs.linkSync(at(`${group}1`), at(`d/${group}3`));
  }
  fs.writeFileSync(at('single'), 'one name');
  w.source.groupOf = (ino) => numbers.get(ino) ?? ino;
  const numbers = new Map(
    ['g1', 'h1', 'k1'].map((f, i) => [fs.statSync(at(f), { bigint: true }).ino, BigInt(i + 1)]),
  );
  await w.source.seal();
  await w.sync();
  return {
    w,
    at,
    async check(what) {
      await w.source.seal();
      const { differences } = w.source.counts;
      await w.sync();
      t.equal(w.source.counts.differences, differences + 1, `${what}: by a difference`);
      t.same(w.replica.status().conditions, [], what);
      t.same(picture(w.live), picture(w.source.root), `${what}: tree`);
      t.same(await indexFaults(w), [], `${what}: index`);
    },
  };
}

t.test('numbers that change places between groups', async (t) => {
  const { w, check } = await linked(t);
  promote(w, 2, { g1: 2n, h1: 3n, k1: 1n });
  await check('rotated');
  t.equal(w.source.counts.ordinals, 4, 'nothing was pulled again');
});

t.test('a new name of an old group, with the first generation and with the next one', async (t) => {
  const { w, at, check } = await linked(t);
  fs.linkSync(at('g1'), at('d/g4'));
  promote(w, 2, { g1: 2n, h1: 1n, k1: 9n });
  await check('first');
  fs.linkSync(at('h1'), at('h4'));
  await check('next');
  t.equal(w.source.counts.ordinals, 4, 'nothing was pulled again');
});

t.test('one of three names goes, and a new one comes a generation later', async (t) => {
  const { w, at, check } = await linked(t);
  fs.rmSync(at('g1'));
  promote(w, 2, { g2: 7n, h1: 1n, k1: 2n });
  await check('one less');
  fs.linkSync(at('g2'), at('g5'));
  await check('one more');
  fs.appendFileSync(at('d/g3'), ' changed');
  await check('changed through one name');
  t.equal(w.source.counts.ordinals, 5, 'only the change was pulled');
});

t.test("a file whose old number is another group's new one", async (t) => {
  const { w, at, check } = await linked(t);
  // h falls apart into single files, its number goes to a group that is new; g's goes to k, with g's content
  fs.rmSync(at('h2'));
  fs.rmSync(at('d/h3'));
  fs.writeFileSync(at('new1'), 'the content of h');
  fs.linkSync(at('new1'), at('new2'));
  fs.writeFileSync(at('k1'), 'the content of g');
  promote(w, 2, { new1: 2n, k1: 1n, g1: 3n });
  await check('numbers taken over');
  fs.linkSync(at('new1'), at('new3'));
  fs.linkSync(at('k1'), at('k4'));
  await check('more names');
  fs.rmSync(at('g1'));
  fs.rmSync(at('g2'));
  await check('one name is left');
});

t.test('a replica that missed the first generation of the epoch', async (t) => {
  const { w, at, check } = await linked(t);
  promote(w, 2, { g1: 3n, h1: 1n, k1: 2n });
  await w.source.seal();
  fs.rmSync(at('g1'));
  fs.linkSync(at('h1'), at('g1'));
  await w.source.seal();
  fs.rmSync(at('d/k3'));
  fs.linkSync(at('k1'), at('k5'));
  await check('two generations later');
});

t.test('two promotions in a row', async (t) => {
  const { w, at, check } = await linked(t);
  promote(w, 2, { g1: 2n, h1: 3n, k1: 1n });
  await w.source.seal();
  promote(w, 3, { g1: 1n, h1: 2n, k1: 3n });
  fs.rmSync(at('h2'));
  await check('back at the first numbers');
  fs.linkSync(at('h1'), at('h7'));
  await check('one more name');
});

const SEEDS = process.env.SEEDS ? process.env.SEEDS.split(',').map(Number) : [1, 2, 3, 4, 5, 6, 7, 8];
for (const seed of SEEDS)
  t.test(`random changes and promotions, seed ${seed}`, async (t) => {
    const w = await world();
    t.teardown(() => w.close());
    let a = seed * 7919;
    const rnd = (n: number): number => {
      a = (Math.imul(a ^ (a >>> 15), 0x2c1b3c6d) + 0x6d2b79f5) | 0;
      return ((a ^ (a >>> 12)) >>> 0) % n;
    };
    const at = (p: string): string => path.join(w.source.root, p);
    const names = Array.from({ length: 14 }, (_, i) => `n${i}`);
    const there = (): string[] => names.filter((n) => fs.existsSync(at(n)));
    const free = (): string[] => names.filter((n) => !fs.existsSync(at(n)));
    const pick = (list: string[]): string | undefined => list[rnd(list.length || 1)];
    let epoch = 1;
    for (let step = 0; step < 25; step++) {
      for (let n = 1 + rnd(5); n > 0; n--) {
        const from = pick(there());
        const to = pick(free());
        const what = rnd(6);
        // few contents, so that groups are told apart by their numbers only
        if (what === 0 && to) fs.writeFileSync(at(to), `content ${rnd(2)}`);
        else if (what <= 2 && from && to) fs.linkSync(at(from), at(to));
        else if (what === 3 && from) fs.rmSync(at(from));
        else if (what === 4 && from) fs.writeFileSync(at(from), `content ${rnd(2)}`);
        else if (what === 5 && from && to) fs.renameSync(at(from), at(to));
      }
      if (rnd(3) === 0) {
        // small numbers, so that they meet those of before
        const inodes = [...new Set(there().map((n) => fs.statSync(at(n), { bigint: true }).ino))];
        const numbers = inodes.map((_, i) => BigInt(i + 1)).sort(() => rnd(3) - 1);
        const map = new Map(inodes.map((ino, i) => [ino, numbers[i] as bigint]));
        let next = 100n * BigInt(step + 1);
        w.source.groupOf = (ino) => {
          if (!map.has(ino)) map.set(ino, next++);
          return map.get(ino) as bigint;
        };
        w.source.promote(++epoch);
      }
      await w.source.seal();
      if (rnd(3) === 0) continue;
      await w.sync({ full: rnd(12) === 0 });
      t.same(w.replica.status().conditions, []);
      if (!t.same(picture(w.live), picture(w.source.root), `tree of step ${step}`)) return;
      if (!t.same(await indexFaults(w), [], `index of step ${step}`)) return;
    }
  });
