import t from 'tap';
import { KEEP_OLD, Op, SlotKind } from '../../lib/core/lists.ts';
import {
  encodeRecord,
  Flag,
  Kind,
  LARGE,
  pathOf,
  type RecordFields,
  seqOf,
  sizeOf,
} from '../../lib/core/record.ts';
import { companionsOf, coveredBy, databaseOf, isBelow, keyOf, parentOf } from '../../lib/source/paths.ts';
import {
  makePlan,
  type Pending,
  type Plan,
  splitChunks,
  underName,
  withChunks,
} from '../../lib/source/plan.ts';

const rec = (path: string, f: Partial<RecordFields> = {}): Buffer =>
  encodeRecord({
    kind: Kind.file,
    path: Buffer.from(path),
    size: 5,
    mode: 0o644,
    mtimeNs: 10n,
    ino: 7n,
    flags: Flag.hash,
    hash: Buffer.alloc(32, 1),
    seq: 1,
    ...f,
  });
const dirRec = (path: string, f: Partial<RecordFields> = {}): Buffer =>
  rec(path, { kind: Kind.directory, size: 0, flags: 0, hash: Buffer.alloc(32), ...f });
const p = (
  change: Pending['change'],
  base: Buffer | null,
  now: Buffer | null,
  more: Partial<Pending> = {},
): Pending => ({
  path: pathOf((now ?? base) as Buffer),
  change,
  base: base ? { record: base, copyIno: 100n } : undefined,
  record: (now ?? base) as Buffer,
  chunks: null,
  slot: 0,
  slotKind: SlotKind.none,
  runs: null,
  movedFrom: null,
  taken: false,
  leader: null,
  explained: true,
  staged: true,
  ...more,
});
const NAME = Object.fromEntries(Object.entries(Op).map(([name, n]) => [n, name]));
const ops = (plan: Plan): string[] =>
  plan.ops.map((o) => {
    const argLen = o.readUInt32LE(8);
    const record = o.subarray(20 + argLen);
    const arg = o.subarray(20, 20 + argLen).toString();
    return `${NAME[o[4] as number]}${(o[5] as number) & KEEP_OLD ? '+keep' : ''} ${pathOf(record)}${arg ? ` <- ${arg}` : ''}`;
  });
const plan = (
  pending: Pending[],
  more: { pinned?: boolean; shadow?: boolean; rows?: Buffer[] } = {},
): Plan => {
  let slot = 50;
  return makePlan(pending, {
    seq: 2,
    shadow: more.shadow ?? true,
    pinned: more.pinned ?? false,
    lookup: (path) => {
      const record = [dirRec(''), ...(more.rows ?? [])].find((r) => pathOf(r).equals(path));
      return record && { record, copyIno: 100n };
    },
    newSlot: () => slot++,
  });
};
const changed = { hash: Buffer.alloc(32, 2), mtimeNs: 11n };
const whole = { slot: 1, slotKind: SlotKind.whole };

t.test('operations come in the binding order, directories last and deepest first', async (t) => {
  const made = plan([
    p('directory', null, dirRec('new')),
    p('directory', null, dirRec('new/sub')),
    p('content', null, rec('new/sub/f'), whole),
    p('gone', rec('old/x'), null),
    p('gone', dirRec('old'), null),
    p('gone', dirRec('old/deep'), null),
    p('content', rec('m'), rec('m', { mode: 0o600 })),
  ]);
  t.strictSame(ops(made), [
    'remove old/x',
    'rmdir old/deep',
    'rmdir old',
    'mkdir new',
    'mkdir new/sub',
    'put new/sub/f',
    'meta m',
    'meta new/sub',
    'meta new',
    'meta ',
  ]);
  t.match(made, { changed: 4, removed: 3, moved: 0, hasTakes: false });
});

t.test('replacing a file sets the time of its directory again, which nobody changed', async (t) => {
  const made = plan([p('content', rec('d/f'), rec('d/f', changed), whole)], {
    rows: [dirRec('d', { mtimeNs: 3n })],
  });
  t.strictSame(ops(made), ['put d/f', 'meta d']);
  t.equal(made.changed, 1, 'the directory is no change');
});

t.test('what is pinned is kept (A17)', async (t) => {
  const big = { size: LARGE, flags: Flag.hash | Flag.large };
  const made = plan(
    [
      p('content', rec('a'), rec('a', changed), whole),
      p('content', rec('big', big), rec('big', { ...big, ...changed }), {
        slot: 2,
        slotKind: SlotKind.patch,
        runs: [],
      }),
      p('gone', rec('c'), null),
    ],
    { pinned: true },
  );
  t.strictSame(ops(made), ['remove+keep c', 'put+keep a', 'patchCopy+keep big', 'meta ']);
});

t.test('patched in place only without a reader and with a single name (D12)', async (t) => {
  const big = { size: LARGE, flags: Flag.hash | Flag.large };
  const patch = { slot: 2, slotKind: SlotKind.patch, runs: [{ offset: 0, length: 4096 }] };
  t.strictSame(ops(plan([p('content', rec('b', big), rec('b', { ...big, ...changed }), patch)])), [
    'patch b',
  ]);
  const linked = { ...big, linkGroup: 7n };
  const leader = p('content', rec('b', linked), rec('b', { ...linked, ...changed }), patch);
  const other = p('content', rec('c', linked), rec('c', { ...linked, ...changed }), { leader });
  t.strictSame(ops(plan([leader, other])), ['patchCopy b', 'link c <- b', 'meta ']);
});

t.test('a link is made once; a change through one name needs no more', async (t) => {
  const g = { linkGroup: 7n };
  const leader = p('content', rec('a', g), rec('a', { ...g, mode: 0o600 }));
  const other = p('content', rec('b', g), rec('b', { ...g, mode: 0o600 }), { leader });
  t.strictSame(ops(plan([leader, other])), ['meta a']);
  const fresh = p('content', null, rec('c', g), { leader });
  t.strictSame(ops(plan([leader, fresh])), ['link c <- a', 'meta a', 'meta ']);
});

t.test('a rename takes the file aside first, over a name in use too', async (t) => {
  const a = p('gone', rec('a', { ino: 1n }), null, { taken: true });
  const b2 = p('content', rec('b', { ino: 2n }), rec('b', { ino: 1n }), { movedFrom: a, taken: true });
  const c = p('content', null, rec('c', { ino: 2n }), { movedFrom: b2 });
  const made = plan([a, b2, c]);
  t.strictSame(ops(made), ['take a', 'take b', 'put b', 'put c', 'meta ']);
  t.match(made, { hasTakes: true, moved: 2, removed: 1 });
});

t.test('one kind of thing in place of another (C4)', async (t) => {
  t.strictSame(ops(plan([p('content', dirRec('x'), rec('x'), whole), p('gone', rec('x/y'), null)])), [
    'remove x/y',
    'rmdir x',
    'put x',
    'meta ',
  ]);
  t.strictSame(ops(plan([p('directory', rec('x'), dirRec('x'))])), [
    'remove x',
    'mkdir x',
    'meta x',
    'meta ',
  ]);
  t.strictSame(
    ops(plan([p('symlink', rec('x'), rec('x', { kind: Kind.symlink, target: Buffer.from('t') }))])),
    ['symlink x', 'meta '],
  );
});

t.test('rows of an unchanged state keep their generation', async (t) => {
  const made = plan([
    p('identity', dirRec('d'), dirRec('d', { ino: 99n })),
    p('content', rec('f'), rec('f', { ino: 99n, seq: 0 })),
  ]);
  t.strictSame(ops(made), []);
  t.strictSame(
    made.puts.map((x) => seqOf(x.record)),
    [1, 1],
  );
  t.equal(made.changed, 0);
});

t.test('live consistency plans rows only', async (t) => {
  const made = plan([p('content', rec('f'), rec('f', changed)), p('gone', rec('g'), null)], {
    shadow: false,
  });
  t.strictSame(ops(made), []);
  t.match(made, { changed: 1, removed: 1 });
  t.equal(made.puts[0]?.copyIno, 0n);
});

t.test('runs: what a changed size cuts off or adds has changed', async (t) => {
  const of = (before: number, after: number, runs: { offset: number; length: number }[]) =>
    plan([
      p('content', rec('b', { size: before, flags: Flag.hash }), rec('b', { size: after, ...changed }), {
        slot: 2,
        slotKind: SlotKind.patch,
        runs,
      }),
    ]).puts[0]?.runs;
  const M = LARGE;
  t.strictSame(of(M, M, [{ offset: 0, length: 4096 }]), [{ offset: 0, length: 4096 }]);
  t.strictSame(of(2 * M, M, []), [{ offset: M, length: M }]);
  t.strictSame(of(M, 3 * M, [{ offset: 0, length: 4096 }]), [
    { offset: 0, length: 4096 },
    { offset: M, length: 2 * M },
  ]);
  t.equal(of(100, M, []), null, 'the version before had no chunks: not known');
});

t.test('a plan that rests on what is not there is refused before anything happens', async (t) => {
  t.throws(() => plan([p('content', null, rec('f'))]), /based on/);
  t.throws(() => plan([p('content', rec('f'), rec('f', changed), { taken: true })]), /based on/);
  t.throws(() => plan([p('content', null, rec('f'), { movedFrom: p('gone', rec('g'), null) })]), /origin/);
});

t.test('chunk lists leave and come back', async (t) => {
  const chunks = Buffer.alloc(32, 9);
  const full = encodeRecord({
    kind: Kind.file,
    path: Buffer.from('f'),
    size: LARGE,
    flags: Flag.hash | Flag.large | Flag.chunksFull,
    chunks,
  });
  const split = splitChunks(full);
  t.ok(split.chunks?.equals(chunks));
  t.equal(split.record.readUInt32LE(108), 0);
  t.ok(withChunks(split.record, chunks).equals(full));
  const renamed = underName(full, Buffer.from('another/name'));
  t.equal(pathOf(renamed).toString(), 'another/name');
  t.equal(sizeOf(renamed), LARGE);
  t.equal(renamed.readUInt32LE(0), renamed.length);
});

t.test('paths', async (t) => {
  const b = (s: string): Buffer => Buffer.from(s);
  t.equal(parentOf(b('a/b/c'))?.toString(), 'a/b');
  t.equal(parentOf(b('a'))?.toString(), '');
  t.equal(parentOf(b('')), null);
  t.ok(isBelow(b('a/b'), b('a')));
  t.notOk(isBelow(b('a-b'), b('a')));
  t.notOk(isBelow(b('a'), b('a')));
  t.ok(isBelow(b('x'), b('')));
  t.ok(coveredBy(b('a/b/c'), new Set(['a'])));
  t.ok(coveredBy(b('a'), new Set([''])));
  t.notOk(coveredBy(b('ab/c'), new Set(['a'])));
  t.not(keyOf(b('é')), keyOf(b('e\u0301')), 'bytes, not letters (D1)');
  t.equal(databaseOf(b('x/app.db-wal'))?.toString(), 'x/app.db');
  t.equal(databaseOf(b('x/-wal')), null);
  t.equal(databaseOf(b('app.db')), null);
  t.strictSame(companionsOf(b('d')).map(String), ['d-journal', 'd-wal', 'd-shm']);
});
