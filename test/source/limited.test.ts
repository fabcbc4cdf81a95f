/** More than one batch takes in: the walk goes on where it stopped, and nothing is lost between two batches. */
import {
  appendFileSync,
  linkSync,
  mkdirSync,
  readdirSync,
  renameSync,
  rmSync,
  unlinkSync,
  writeFileSync,
} from 'node:fs';
import { join } from 'node:path';
import t from 'tap';
import { Kind, pathOf, recordsIn } from '../../lib/core/record.ts';
import type { IndexReader } from '../../lib/core/store.ts';
import { native } from '../../lib/native/load.ts';
import type { Native } from '../../lib/native/types.ts';
import type { SourceDeps } from '../../lib/source/source-volume.ts';
import { makeRig, QUICK, type Rig, treeDifferences, until } from './support.ts';

t.setTimeout(0);

const fill = (live: string, folders: number, files: number): void => {
  for (let d = 0; d < folders; d++) {
    mkdirSync(join(live, `d${d}`));
    for (let f = 0; f < files; f++) writeFileSync(join(live, `d${d}`, `f${f}`), `${d} ${f}`);
  }
};
const same = (rig: Rig): string[] => treeDifferences(rig.live, rig.data);
const entriesOf = (live: string): number => readdirSync(live, { recursive: true }).length + 1;

/** The addon with a scanner that counts, and stage calls that can be watched. */
function counting(): { native: Native; scanned: number; open: number; onStage: (() => void) | null } {
  const c = {
    scanned: 0,
    open: 0,
    onStage: null as (() => void) | null,
    native: new Proxy(native, {
      get(target, key) {
        if (key === 'stage')
          return (...args: Parameters<Native['stage']>) => {
            c.onStage?.();
            return target.stage(...args);
          };
        if (key !== 'scan') return target[key as keyof Native];
        return (...args: Parameters<Native['scan']>) => {
          const scanner = target.scan(...args);
          c.open++;
          return {
            async next(bytes: number) {
              const piece = await scanner.next(bytes);
              if (piece) for (const _ of recordsIn(piece)) c.scanned++;
              return piece;
            },
            close() {
              c.open--;
              scanner.close();
            },
          };
        };
      },
    }) as Native,
  };
  return c;
}

async function begun(
  t: { teardown(fn: () => unknown): unknown },
  content: (live: string) => void,
  batchLimit: number,
  more: Partial<SourceDeps> = {},
  policy = QUICK,
): Promise<{ rig: Rig; counted: ReturnType<typeof counting> }> {
  const counted = counting();
  const rig = makeRig({ deps: { native: counted.native, batchLimit, ...more } });
  t.teardown(() => rig.close());
  content(rig.live);
  await rig.source.recover();
  await rig.source.start(policy, 1);
  return { rig, counted };
}

t.test('a first copy scans each entry once, however many batches it takes', async (t) => {
  const { rig, counted } = await begun(t, (live) => fill(live, 20, 300), 600);
  const pages = { rows: 0 };
  const page = rig.store.page.bind(rig.store);
  rig.store.page = (...args: Parameters<IndexReader['page']>) => {
    const rows = page(...args);
    pages.rows += rows.length;
    return rows;
  };
  await rig.source.flush();
  const entries = entriesOf(rig.live);
  t.equal(entries, 6021);
  t.ok(counted.scanned < entries * 1.3, `${counted.scanned} entries scanned of ${entries}`);
  t.ok(pages.rows < entries * 1.3, `${pages.rows} index rows read`);
  t.strictSame(rig.source.generation(), { epoch: 1, seq: 1 });
  t.strictSame(same(rig), []);
  t.ok(rig.source.complete());
  t.equal(counted.open, 0, 'no scanner is left open');
});

t.test('what changes behind and ahead of the walk is all in the first generation', async (t) => {
  const { rig, counted } = await begun(t, (live) => fill(live, 20, 30), 100);
  let n = 0;
  counted.onStage = () => {
    n++;
    t.notOk(rig.source.complete(), 'not complete between two batches');
    const at = (d: number, f: string): string => join(rig.live, `d${d}`, f);
    if (n === 2) {
      appendFileSync(at(0, 'f1'), 'behind');
      unlinkSync(at(0, 'f2'));
      writeFileSync(at(0, 'new'), 'behind');
      linkSync(at(0, 'f3'), at(9, 'link ahead'));
      linkSync(at(9, 'f3'), at(0, 'link behind'));
      renameSync(join(rig.live, 'd8'), join(rig.live, 'a-moved-behind'));
      renameSync(join(rig.live, 'd1'), join(rig.live, 'z-moved-ahead'));
      rmSync(join(rig.live, 'd7'), { recursive: true });
    }
  };
  await rig.source.flush();
  counted.onStage = null;
  await rig.source.flush();
  t.ok(n > 3);
  t.strictSame(same(rig), []);
  t.equal(await rig.source.audit(0), 0);
});

t.test('a batch that fails in the middle of the walk loses nothing of it (A1)', async (t) => {
  const { rig, counted } = await begun(t, (live) => fill(live, 20, 30), 100);
  let n = 0;
  counted.onStage = () => {
    if (++n === 4) throw Object.assign(new Error('EIO: test'), { code: 'EIO' });
  };
  await until('the first generation', () => rig.source.generation() !== null);
  await rig.source.flush();
  t.ok(n > 4);
  t.strictSame(same(rig), []);
  t.equal(counted.open, 0);
});

t.test('a stop in the middle of the walk closes it; the next start begins anew', async (t) => {
  const { rig, counted } = await begun(t, (live) => fill(live, 20, 30), 100);
  await until('some of it is there', () => rig.store.totals().entries > 150);
  await rig.source.stop();
  t.equal(counted.open, 0);
  t.equal(rig.source.generation(), null);
  await rig.source.start(QUICK, 1);
  await rig.source.flush();
  t.strictSame(same(rig), []);
});

t.test(
  'a tree that was emptied unseen is held by its first piece; a deletion that was seen goes on',
  async (t) => {
    const { rig } = await begun(t, (live) => fill(live, 10, 50), 100);
    await rig.source.flush();
    for (let d = 0; d < 8; d++) rmSync(join(rig.live, `d${d}`), { recursive: true });
    await rig.source.flush();
    t.strictSame(rig.source.status().conditions, []);
    t.strictSame(same(rig), []);
    await rig.source.stop();
    for (const d of ['d8', 'd9']) rmSync(join(rig.live, d), { recursive: true });
    await rig.source.start(QUICK, 1);
    await t.rejects(rig.source.flush(), { code: 'HELD' });
    t.match(rig.source.status().conditions, [{ type: 'MassDelete' }]);
    await rig.source.force('MassDelete');
    await rig.source.flush();
    t.strictSame(same(rig), []);
  },
);

t.test('a required path that the walk has not reached yet is not missing', async (t) => {
  const policy = { ...QUICK, requiredPaths: ['d9/f29'] };
  const { rig } = await begun(t, (live) => fill(live, 10, 30), 50, {}, policy);
  await rig.source.flush();
  t.strictSame(rig.source.status().conditions, []);
  t.strictSame(rig.source.generation(), { epoch: 1, seq: 1 });
  await rig.source.stop();
  unlinkSync(join(rig.live, 'd9/f29'));
  await rig.source.start(policy, 1);
  await t.rejects(rig.source.flush(), { code: 'HELD' });
  t.match(rig.source.status().conditions, [{ type: 'RequiredPathMissing' }]);
});

t.test('a file that cannot be read at the beginning of the walk is still known at its end', async (t) => {
  const base = await begun(t, (live) => fill(live, 10, 30), 5000);
  await base.rig.source.flush();
  await base.rig.source.stop();
  const counted = counting();
  const real = counted.native.stat.bind(native);
  let broken = true;
  const flawed = new Proxy(counted.native, {
    get(target, key) {
      if (key !== 'stat') return target[key as keyof Native];
      return async (root: Buffer, paths: Buffer) => {
        const out = await real(root, paths);
        for (const r of recordsIn(out))
          if (broken && pathOf(r).equals(Buffer.from('d0/f1'))) {
            r[4] = Kind.unreadable;
            r.writeUInt32LE(5, 8);
          }
        return out;
      };
    },
  }) as Native;
  const rig = makeRig({ base: base.rig.base, deps: { native: flawed, batchLimit: 50 } });
  t.teardown(() => rig.close());
  // as after a promotion: the copy is put together anew
  rig.store.deleteMeta('copies');
  await rig.source.recover();
  await rig.source.start(QUICK, 2);
  await rig.source.flush().catch(() => undefined);
  t.match(rig.source.status().conditions, [{ type: 'Unreadable', paths: ['d0/f1'] }]);
  t.not(rig.source.generation()?.epoch, 2, 'no generation that promises a file that nobody can get');
  t.notOk(rig.source.complete());
  broken = false;
  await rig.source.stop();
  await rig.source.start(QUICK, 2);
  await rig.source.flush();
  t.strictSame(rig.source.generation(), { epoch: 2, seq: 2 });
  t.strictSame(same(rig), []);
});

t.test('an idle volume is not walked, and a change reads what changed (C12)', async (t) => {
  const { rig, counted } = await begun(t, (live) => fill(live, 20, 100), 100_000);
  await rig.source.flush();
  const first = counted.scanned;
  t.ok(first >= 2021);
  await new Promise((resolve) => setTimeout(resolve, 1500));
  t.equal(counted.scanned, first, 'many debounces later nothing has been looked at again');
  appendFileSync(join(rig.live, 'd3/f7'), 'x');
  await until('the change is sealed', () => rig.sealed.length === 2);
  t.ok(counted.scanned - first <= 2, `${counted.scanned - first} entries scanned for one change`);
  t.strictSame(same(rig), []);
});

t.test('a burst of many more files than a batch takes in arrives whole (C13)', async (t) => {
  const { rig } = await begun(t, () => {}, 600);
  await rig.source.flush();
  fill(rig.live, 10, 500); // as tar would unpack it, while batches run
  await rig.source.flush();
  t.strictSame(same(rig), []);
  t.ok(rig.sealed.length >= 2);
  t.ok(rig.source.complete());
  t.strictSame(rig.source.status().conditions, []);
});
