/**
 * Random sequences of changes to a source, each state replicated by a difference (sometimes over several states,
 * sometimes with a failed pull, a drifted replica or a full sync in between): tree and index must be exact each time.
 */
import fs from 'node:fs';
import path from 'node:path';
import t from 'tap';
import { indexFaults, picture, world } from './support.ts';

t.setTimeout(240_000);

/** mulberry32: small, seeded, good enough to choose what to do next */
function random(seed: number): (n: number) => number {
  let a = seed;
  return (n) => {
    a = (a + 0x6d2b79f5) | 0;
    let x = Math.imul(a ^ (a >>> 15), 1 | a);
    x = (x + Math.imul(x ^ (x >>> 7), 61 | x)) ^ x;
    return ((x ^ (x >>> 14)) >>> 0) % n;
  };
}

const SEEDS = process.env.SEEDS ? process.env.SEEDS.split(',').map(Number) : [1, 2, 3, 4, 5, 6];
const STEPS = 12;

for (const seed of SEEDS)
  t.test(`seed ${seed}`, async (t) => {
    const w = await world();
    t.teardown(() => w.close());
    const rnd = random(seed);
    const root = w.source.root;
    const pick = <T>(list: T[]): T | undefined => list[rnd(list.length || 1)];
    const all = (kind: 'file' | 'directory' | 'any', at = ''): string[] => {
      const out: string[] = kind === 'directory' ? [at] : [];
      for (const e of fs.readdirSync(path.join(root, at), { withFileTypes: true })) {
        const rel = at ? `${at}/${e.name}` : e.name;
        if (e.isDirectory()) out.push(...(kind === 'any' ? [rel] : []), ...all(kind, rel));
        else if (kind !== 'directory' && (kind === 'any' || e.isFile())) out.push(rel);
      }
      return out;
    };
    // names around the order of '/': '-', '.', '0'
    const newName = (): string => {
      const dir = pick(all('directory')) ?? '';
      const name = `${'abc'[rnd(3)]}${['', '-', '.x', '0', '~'][rnd(5)]}`;
      return dir ? `${dir}/${name}` : name;
    };
    const free = (rel: string): boolean =>
      !fs.existsSync(path.join(root, rel)) && !fs.lstatSync(path.join(root, rel), { throwIfNoEntry: false });
    const at = (rel: string): string => path.join(root, rel);
    const moved = (from: string, to: string): void => {
      w.source.moves.set(to, from);
    };
    const actions: (() => void)[] = [
      () => {
        const n = newName();
        if (free(n)) fs.writeFileSync(at(n), Buffer.alloc(rnd(3000), rnd(256)));
      },
      () => {
        const n = newName();
        if (free(n)) fs.mkdirSync(at(n), { mode: 0o700 + rnd(64) });
      },
      () => {
        const n = newName();
        if (free(n)) fs.symlinkSync(`../${'xyz'[rnd(3)]}`, at(n));
      },
      () => {
        const n = newName();
        if (free(n)) fs.writeFileSync(at(n), Buffer.alloc(1_100_000 + rnd(500_000), rnd(256)));
      },
      () => {
        const f = pick(all('file'));
        if (f) fs.appendFileSync(at(f), `more ${rnd(1000)}`);
      },
      () => {
        const f = pick(all('file').filter((n) => fs.statSync(at(n)).size > 1_048_576));
        if (!f) return;
        const fd = fs.openSync(at(f), 'r+');
        fs.writeSync(fd, `patched ${rnd(1000)}`, rnd(1_000_000));
        if (rnd(3) === 0) fs.ftruncateSync(fd, 1_048_576 + rnd(600_000));
        fs.closeSync(fd);
      },
      () => {
        const f = pick(all('any'));
        if (f) fs.rmSync(at(f), { recursive: true });
      },
      () => {
        const f = pick(all('file'));
        const n = newName();
        if (!f || !free(n)) return;
        fs.renameSync(at(f), at(n));
        moved(f, n);
      },
      () => {
        const d = pick(all('directory').filter((n) => n !== ''));
        const n = newName();
        if (!d || !free(n) || n.startsWith(`${d}/`)) return;
        const inside = all('file', d);
        fs.renameSync(at(d), at(n));
        for (const f of inside) moved(f, n + f.slice(d.length));
      },
      () => {
        const f = pick(all('file'));
        const n = newName();
        if (f && free(n)) fs.linkSync(at(f), at(n));
      },
      () => {
        // a link that is broken: the same content, two files
        const f = pick(all('file').filter((n) => fs.statSync(at(n)).nlink > 1));
        if (!f) return;
        fs.copyFileSync(at(f), at('tmp'));
        fs.renameSync(at('tmp'), at(f));
      },
      () => {
        const f = pick(all('file'));
        if (f) fs.chmodSync(at(f), 0o400 + rnd(0o400));
      },
      () => {
        const f = pick(all('any'));
        if (f) fs.lutimesSync(at(f), 1, 1_000_000 + rnd(1_000_000) + 0.25);
      },
      () => {
        // one thing becomes another
        const f = pick(all('any'));
        if (!f) return;
        fs.rmSync(at(f), { recursive: true });
        const kind = rnd(3);
        if (kind === 0) fs.writeFileSync(at(f), 'a file now');
        else if (kind === 1) fs.symlinkSync('elsewhere', at(f));
        else {
          fs.mkdirSync(at(f));
          fs.writeFileSync(path.join(at(f), 'b'), 'inside');
        }
      },
      () => {
        // two files change places
        const a = pick(all('file'));
        const b = pick(all('file'));
        if (!a || !b || a === b) return;
        fs.renameSync(at(a), at('tmp'));
        fs.renameSync(at(b), at(a));
        fs.renameSync(at('tmp'), at(b));
        moved(b, a);
        moved(a, b);
      },
    ];
    for (let step = 0; step < STEPS; step++) {
      w.source.moves.clear();
      for (let n = 1 + rnd(12); n > 0; n--) (actions[rnd(actions.length)] as () => void)();
      await w.source.seal();
      if (rnd(4) === 0) continue;
      if (rnd(5) === 0) {
        // somebody was in the replica's tree
        const files = w.store.page(null, 1000).length;
        if (files > 1)
          fs.rmSync(path.join(w.live, fs.readdirSync(w.live)[0] ?? 'none'), { recursive: true, force: true });
        await w.sync({ full: true });
      } else await w.sync({ full: rnd(6) === 0 });
      const { conditions, generation } = w.replica.status();
      if (conditions.length > 0) {
        t.same(conditions, [], `step ${step}`);
        return;
      }
      t.equal(generation, `1-${w.source.newest.generation.seq}`);
      if (!t.same(picture(w.live), picture(root), `tree of step ${step}`)) return;
      if (!t.same(await indexFaults(w), [], `index of step ${step}`)) return;
    }
  });
