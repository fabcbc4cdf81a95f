import { mkdtempSync, readFileSync, rmSync, statSync, writeFileSync } from 'node:fs';
import { tmpdir } from 'node:os';
import { join } from 'node:path';
import { DatabaseSync } from 'node:sqlite';
import t from 'tap';
import { encodeRecord, Flag, Kind, LARGE, pathOf, type RecordFields, seqOf } from '../../lib/core/record.ts';
import { rowsOf } from '../../lib/source/collect.ts';
import { type OpenStore, openVolumeStore } from '../../lib/store/volume-store.ts';

const b = (s: string): Buffer => Buffer.from(s, 'latin1');
const rec = (path: string, seq = 1, f: Partial<RecordFields> = {}): Buffer =>
  encodeRecord({
    kind: Kind.file,
    path: b(path),
    size: 5,
    seq,
    flags: Flag.hash,
    hash: Buffer.alloc(32, 1),
    ...f,
  });
const paths = (rows: Iterable<{ record: Buffer }>): string[] =>
  [...rows].map((r) => pathOf(r.record).toString('latin1'));

interface Opened {
  store: OpenStore;
  dir: string;
  synced: string[];
}
function open(
  t: { teardown(fn: () => unknown): unknown },
  dir = mkdtempSync(join(tmpdir(), 'sv-store-')),
): Opened {
  const synced: string[] = [];
  const store = openVolumeStore(dir, 'ns', 'vol', {
    syncFile: async (p) => {
      synced.push(p.toString());
    },
  });
  t.teardown(() => rmSync(dir, { recursive: true, force: true }));
  return { store, dir, synced };
}

t.test('rows come back byte by byte, in memcmp order of whole paths; the root is one of them', async (t) => {
  const { store } = open(t);
  t.teardown(() => store.close());
  const names = ['', 'a', 'a-b', 'a/x', 'a/x/y', 'a0', '\xff\xfe', 'e\u00cc'];
  await store.transaction(() => {
    for (const n of [...names].reverse()) store.put(rec(n), 2n ** 64n - 1n, null);
  });
  t.strictSame(paths(store.page(null, 100)), ['', 'a', 'a-b', 'a/x', 'a/x/y', 'a0', 'e\u00cc', '\xff\xfe']);
  t.strictSame(paths(store.page(b('a'), 2)), ['a-b', 'a/x']);
  t.strictSame(paths(store.page(null, 100, b('a'))), ['a/x', 'a/x/y']);
  t.strictSame(paths(store.page(b('a/x'), 100, b('a'))), ['a/x/y']);
  t.equal(store.get(b('a-b'))?.copyIno, 2n ** 64n - 1n, 'inodes of 64 bits');
  t.ok(store.get(b('a'))?.record.equals(rec('a')));
  t.equal(store.get(b('nope')), undefined);
  store.setCopy(b('a'), 5n);
  t.equal(store.get(b('a'))?.copyIno, 5n);
});

t.test('children of a directory without a walk through what lies below them', async (t) => {
  const { store } = open(t);
  t.teardown(() => store.close());
  await store.transaction(() => {
    for (const n of ['', 'd', 'd/a', 'd/a-b', 'd/b', 'd.x', 'z']) store.put(rec(n), 1n, null);
    for (let i = 0; i < 1500; i++) store.put(rec(`d/a/${i}`), 1n, null);
  });
  t.strictSame(paths(rowsOf(store, b('d'), false)), ['d', 'd/a', 'd/a-b', 'd/b']);
  t.strictSame(paths(rowsOf(store, b(''), false)), ['', 'd', 'd.x', 'z']);
  t.equal(paths(rowsOf(store, b('d'), true)).length, 1504);
  t.equal(paths(rowsOf(store, b(''), true)).length, 1507);
});

t.test('totals follow puts, replacements, removals and roll-backs', async (t) => {
  const { store, dir } = open(t);
  await store.transaction(() => {
    store.put(rec('a'), 1n, null);
    store.put(rec('d', 1, { kind: Kind.directory, size: 0 }), 1n, null);
    store.put(rec('a', 1, { size: 9 }), 1n, null);
  });
  t.strictSame(store.totals(), { entries: 2, bytes: 9 });
  await t.rejects(
    store.transaction(() => {
      store.put(rec('b'), 1n, null);
      throw new Error('no');
    }),
    /no/,
  );
  t.strictSame(store.totals(), { entries: 2, bytes: 9 });
  t.equal(store.get(b('b')), undefined);
  await store.transaction(() => store.remove(b('a'), 2));
  t.strictSame(store.totals(), { entries: 1, bytes: 0 });
  store.close();
  const again = open(t, dir).store;
  t.strictSame(again.totals(), { entries: 1, bytes: 0 });
  again.close();
});

t.test('differences: changed rows and removed paths, in order, few and many', async (t) => {
  const { store } = open(t);
  t.teardown(() => store.close());
  const many = 25_000;
  await store.transaction(async (breathe) => {
    for (let i = 0; i < many; i++) {
      store.put(rec(`f${String(i).padStart(6, '0')}`, i < 10 ? 3 : 1), 1n, null);
      await breathe();
    }
    store.put(rec('', 3, { kind: Kind.directory, size: 0 }), 1n, null);
    store.put(rec('gone'), 1n, null);
  });
  await store.transaction(() => store.remove(b('gone'), 3));
  t.strictSame(paths(store.changedSince(2, null, 100)), [
    '',
    ...Array.from({ length: 10 }, (_, i) => `f00000${i}`),
    'gone',
  ]);
  t.strictSame(paths(store.changedSince(2, b('f000008'), 1)), ['f000009']);
  t.equal(store.changedSince(2, null, 100).at(-1)?.record[4], Kind.absent);
  t.strictSame(store.changedSince(3, null, 100), []);
  let seen = 0;
  let last = '';
  const begin = performance.now();
  for (let after: Buffer | null = null; ; ) {
    const rows = store.changedSince(0, after, 256);
    for (const p of paths(rows)) {
      if (seen > 0 && p <= last) t.fail('out of order');
      last = p;
      seen++;
    }
    if (rows.length < 256) break;
    after = pathOf((rows.at(-1) as { record: Buffer }).record);
  }
  t.equal(seen, many + 2);
  t.ok(performance.now() - begin < 10_000, 'pages of a large difference do not cost the whole of it');
});

t.test('a path that comes back is no removed path any more', async (t) => {
  const { store } = open(t);
  t.teardown(() => store.close());
  await store.transaction(() => store.put(rec('a', 1), 1n, null));
  await store.transaction(() => store.remove(b('a'), 2));
  await store.transaction(() => store.put(rec('a', 3), 1n, null));
  t.strictSame(
    store.changedSince(1, null, 10).map((r) => [r.record[4], seqOf(r.record)]),
    [[Kind.file, 3]],
  );
});

t.test('runs: the union since a generation, null as soon as one change is not known', async (t) => {
  const { store } = open(t);
  t.teardown(() => store.close());
  const big = (seq: number): Buffer => rec('big', seq, { size: 2 * LARGE });
  const change = (seq: number, runs: { offset: number; length: number }[] | null) =>
    store.transaction(() => {
      store.put(big(seq), 1n, Buffer.alloc(512));
      store.putRuns(b('big'), seq, runs);
    });
  await change(1, null);
  await change(2, [{ offset: 0, length: 4096 }]);
  await change(3, [{ offset: 4096, length: 4096 }]);
  t.strictSame(store.runsSince(b('big'), 1), [{ offset: 0, length: 8192 }]);
  t.strictSame(store.runsSince(b('big'), 2), [{ offset: 4096, length: 4096 }]);
  t.strictSame(store.runsSince(b('big'), 3), []);
  t.equal(store.runsSince(b('big'), 0), null);
  t.equal(store.runsSince(b('other'), 1), null);
  await store.transaction(() => store.prune(2));
  t.equal(store.horizon(), 2);
  t.equal(store.runsSince(b('big'), 1), null, 'older than the horizon');
  t.strictSame(store.runsSince(b('big'), 2), [{ offset: 4096, length: 4096 }]);
  t.equal(store.chunks(b('big'))?.length, 512);
  await store.transaction(() => store.remove(b('big'), 4));
  await store.transaction(() => store.put(big(5), 1n, null));
  t.equal(store.runsSince(b('big'), 3), null, 'a new file of that name has no past');
  t.equal(store.chunks(b('big')), undefined);
});

t.test('hard-link groups', async (t) => {
  const { store } = open(t);
  t.teardown(() => store.close());
  const group = 2n ** 63n + 1n;
  await store.transaction(() => {
    store.put(rec('b', 1, { linkGroup: group }), 1n, null);
    store.put(rec('a', 1, { linkGroup: group }), 1n, null);
    store.put(rec('c'), 1n, null);
  });
  t.strictSame(paths(store.linkGroup(group)), ['a', 'b']);
  t.strictSame(store.linkGroup(0n), []);
});

t.test('a snapshot stays what it was', async (t) => {
  const { store } = open(t);
  t.teardown(() => store.close());
  await store.transaction(() => store.put(rec('a', 1), 1n, null));
  const snapshot = store.snapshot();
  await store.transaction(() => {
    store.put(rec('a', 2), 1n, null);
    store.put(rec('b', 2), 1n, null);
    store.setMeta('x', 1);
  });
  t.strictSame(
    snapshot.page(null, 10).map((r) => seqOf(r.record)),
    [1],
  );
  t.equal(snapshot.meta('x'), undefined);
  t.strictSame(snapshot.totals(), { entries: 1, bytes: 5 });
  t.equal(store.meta('x'), 1);
  snapshot.close();
});

t.test('100,000 rows in one transaction leave the event loop air, and others wait their turn', async (t) => {
  const { store, dir } = open(t);
  t.teardown(() => store.close());
  // On the clock of this thread: what other programs take does not count.
  const used = (): number => {
    const { user, system } = process.threadCpuUsage();
    return (user + system) / 1000;
  };
  let longest = 0;
  let last = used();
  let ticks = 0;
  let timer = setImmediate(function tick(): void {
    const now = used();
    longest = Math.max(longest, now - last);
    last = now;
    ticks++;
    timer = setImmediate(tick);
  });
  let order = '';
  const first = store.transaction(async (breathe) => {
    for (let i = 0; i < 100_000; i++) {
      store.put(rec(`f${i}`), 1n, null);
      await breathe();
    }
    order += 'a';
  });
  const second = store.transaction(() => {
    order += 'b';
  });
  await Promise.all([first, second]);
  await store.transaction(async (breathe) => {
    for (let i = 0; i < 100_000; i++) {
      store.remove(b(`f${i}`), 2);
      await breathe();
    }
  });
  await store.transaction(() => store.prune(2));
  await store.settled();
  clearImmediate(timer);
  t.equal(order, 'ab');
  t.strictSame({ ...store.db.prepare('SELECT count(*) AS n FROM removed').get() }, { n: 0 }, 'swept');
  t.ok(statSync(join(dir, 'state.db')).size > 4_000_000, 'and the log is in the file');
  t.ok(ticks > 100);
  // slices of 8 ms, commits of 20; before, 130 for the checkpoint and 80 for what fell below the horizon
  t.ok(longest < 60, `longest ${Math.round(longest)} ms`);
});

t.test(
  'durable() flushes the log, and a grown log goes into the file with the flushes around it',
  async (t) => {
    const { store, dir, synced } = open(t);
    await store.transaction(() => store.put(rec('a'), 1n, null));
    await store.durable();
    t.strictSame(synced, [join(dir, 'state.db-wal')]);
    synced.length = 0;
    for (let round = 0; round < 3; round++)
      await store.transaction(() => {
        for (let i = 0; i < 12_000; i++) store.put(rec(`file-${round}-${i}`), 1n, null);
      });
    await store.transaction(() => undefined);
    t.ok(synced.filter((p) => p.endsWith('state.db')).length >= 1, 'the file is flushed');
    t.strictSame(synced.slice(0, 2), [join(dir, 'state.db-wal'), join(dir, 'state.db')], 'the log before it');
    t.ok(statSync(join(dir, 'state.db')).size > 1_000_000);
    // what is in the file and the log is all there is
    const copy = mkdtempSync(join(tmpdir(), 'sv-store-'));
    t.teardown(() => rmSync(copy, { recursive: true, force: true }));
    for (const name of ['state.db', 'state.db-wal'])
      writeFileSync(join(copy, name), readFileSync(join(dir, name)));
    const other = open(t, copy).store;
    t.equal(other.totals().entries, 36_001);
    t.strictSame({ ...other.db.prepare('PRAGMA integrity_check').get() }, { integrity_check: 'ok' });
    other.close();
    store.close();
  },
);

t.test('generations, newest first; those of an ended line can be dropped', async (t) => {
  const { store } = open(t);
  t.teardown(() => store.close());
  for (const seq of [1, 2, 3])
    store.addGeneration({
      epoch: 1,
      seq,
      sealedAt: 1000 + seq,
      quiescent: seq === 2,
      entries: 1,
      bytes: 2,
      changed: 3,
    });
  t.strictSame(
    store.generations(2).map((g) => [g.seq, g.quiescent]),
    [
      [3, false],
      [2, true],
    ],
  );
  store.dropGenerationsAfter(1);
  t.strictSame(
    store.generations(9).map((g) => g.seq),
    [1],
  );
});

t.test('a damaged or newer file is a clear error of this volume', async (t) => {
  const { store, dir } = open(t);
  store.close();
  writeFileSync(join(dir, 'state.db'), Buffer.alloc(8192, 0x41));
  t.throws(() => open(t, dir), { code: 'INTERNAL', message: /ns\/vol.*state\.db/ });
  rmSync(join(dir, 'state.db'));
  const db = new DatabaseSync(join(dir, 'state.db'));
  db.exec('PRAGMA user_version=99');
  db.close();
  t.throws(() => open(t, dir), { message: /version 99.*newer agent/ });
});
