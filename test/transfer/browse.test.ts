import path from 'node:path';
import fc from 'fast-check';
import t from 'tap';
import type { ServedGeneration, ServedVolume } from '../../lib/core/parts.ts';
import { EMPTY, encodeRecord, Flag, Kind, pathOf } from '../../lib/core/record.ts';
import { openVolumeStore } from '../../lib/store/volume-store.ts';
import { childrenOf, Views } from '../../lib/transfer/browse.ts';
import { clock, startLab } from './support.ts';

const deps = { syncFile: async () => undefined };
const parent = (p: string): string => p.slice(0, Math.max(0, p.lastIndexOf('/')));

t.test(
  'children of a directory are what a full look would find, whatever the names (real store)',
  async (t) => {
    const store = openVolumeStore(path.join(t.testdir(), 's'), 'default', 'world', deps);
    t.teardown(() => store.close());
    const name = fc.stringMatching(/^[a!\-./0\xff]{1,14}$/);
    await fc.assert(
      fc.asyncProperty(
        fc.array(name, { maxLength: 40 }),
        fc.integer({ min: 1, max: 5 }),
        async (names, limit) => {
          const paths = new Set<string>(['']);
          for (const n of names) {
            const parts = n.split('/').filter((p) => p !== '' && p !== '.' && p !== '..');
            for (let i = 1; i <= parts.length; i++) paths.add(parts.slice(0, i).join('/'));
          }
          await store.transaction(() => {
            for (const row of store.page(null, 10_000)) store.remove(pathOf(row.record), 1);
            for (const p of paths)
              store.put(
                encodeRecord({ kind: Kind.directory, path: Buffer.from(p, 'latin1'), seq: 1 }),
                0n,
                null,
              );
          });
          for (const d of paths) {
            const want = [...paths].filter((p) => p !== '' && parent(p) === d).sort();
            const got = [...childrenOf(store, Buffer.from(d, 'latin1'), limit)].map((r) =>
              pathOf(r.record).toString('latin1'),
            );
            t.same(got, want, { names, d, limit } as never);
          }
        },
      ),
      { numRuns: 60 },
    );
  },
);

t.test('large sub-trees are skipped, not read', async (t) => {
  const store = openVolumeStore(path.join(t.testdir(), 's'), 'default', 'world', deps);
  t.teardown(() => store.close());
  await store.transaction(() => {
    const put = (kind: Kind, p: string): void =>
      store.put(
        encodeRecord({ kind, path: Buffer.from(p), flags: kind === Kind.file ? Flag.hash : 0, seq: 1 }),
        1n,
        null,
      );
    put(Kind.directory, '');
    for (let d = 0; d < 20; d++) {
      put(Kind.directory, `d${d}`);
      for (let f = 0; f < 1000; f++) put(Kind.file, `d${d}/${f}`);
    }
    put(Kind.file, 'z');
  });
  let rows = 0;
  const index = {
    page: (after: Buffer | null, limit: number, below?: Buffer) => {
      const found = store.page(after, limit, below);
      rows += found.length;
      return found;
    },
  } as typeof store;
  t.equal([...childrenOf(index, EMPTY, 64)].length, 21);
  t.ok(rows <= 21 * 64 + 64, `${rows} rows read of 20,022`);
});

t.test('a folder of 10,000 names on the real store: quick, and little memory', async (t) => {
  const lab = await startLab(t.testdir());
  const store = openVolumeStore(path.join(t.testdirName, 's'), 'default', 'world', deps);
  t.teardown(async () => {
    await lab.close();
    store.close();
  });
  await store.transaction(() => {
    store.put(encodeRecord({ kind: Kind.directory, path: EMPTY, seq: 1 }), 0n, null);
    for (let i = 0; i < 10_000; i++)
      store.put(
        encodeRecord({ kind: Kind.file, flags: Flag.hash, size: i, path: Buffer.from(`file-${i}`), seq: 1 }),
        1n,
        null,
      );
  });
  const served: ServedGeneration = {
    generation: { epoch: 1, seq: 1 },
    lineage: [[1, 1]],
    quiescent: true,
    index: store.snapshot(),
    root: Buffer.from(lab.volume.root),
    retired: null,
    strict: false,
    runsSince: () => null,
    closeIndex: () => undefined,
    release: () => served.index.close(),
  };
  lab.volume.current = served.generation;
  lab.volume.open = async () => served;
  const ask = async (): Promise<string> =>
    (await lab.fetch('/browse/default/world/', { method: 'PROPFIND', headers: { depth: '1' } })).text();
  await ask();
  const started = performance.now();
  const before = process.memoryUsage().rss;
  const text = await ask();
  const ms = performance.now() - started;
  t.equal(text.match(/<D:response>/g)?.length, 10_001);
  t.ok(ms < 5000, `${Math.round(ms)} ms`);
  t.ok(process.memoryUsage().rss - before < 100 * 1024 * 1024);
  t.comment(
    `${Math.round(ms)} ms, ${Math.round((process.memoryUsage().rss - before) / 1024 / 1024)} MiB more, the client in the same process included`,
  );
});

t.test('views: shared while current, one opening for many requests, given back once', async (t) => {
  let opened = 0;
  let released = 0;
  let fail: Error | null = null;
  let seq = 1;
  const volume = {
    namespace: 'default',
    volume: 'world',
    generation: () => ({ epoch: 1, seq }),
    open: async () => {
      await new Promise((r) => setTimeout(r, 5));
      if (fail) throw fail;
      opened++;
      return { generation: { epoch: 1, seq }, release: () => released++ } as unknown as ServedGeneration;
    },
  } as unknown as ServedVolume;
  const views = new Views(clock, 30);
  const many = await Promise.all(Array.from({ length: 10 }, () => views.acquire(volume)));
  t.equal(opened, 1);
  seq = 2;
  const newer = await views.acquire(volume);
  t.equal(opened, 2);
  for (const v of many) v.release();
  t.equal(released, 1, 'the old one with its last user');
  newer.release();
  newer.release();
  t.equal(released, 1, 'the newest lingers');
  const again = await views.acquire(volume);
  t.equal(opened, 2, 'and is used again');
  again.release();
  await new Promise((r) => setTimeout(r, 80));
  t.equal(released, 2);
  fail = new Error('applying');
  await t.rejects(views.acquire(volume), fail);
  fail = null;
  const last = await views.acquire(volume);
  let aborted = 0;
  last.onStop(() => {
    aborted++;
    last.release();
  });
  await views.close();
  t.equal(aborted, 1);
  t.equal(released, opened);
});
