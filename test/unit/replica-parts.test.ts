import fs from 'node:fs';
import os from 'node:os';
import path from 'node:path';
import t from 'tap';
import { encodeOp, Op } from '../../lib/core/lists.ts';
import { DEFAULT_POLICY } from '../../lib/core/policy.ts';
import {
  CHUNK,
  encodeRecord,
  Flag,
  flagsOf,
  Kind,
  LARGE,
  modeOf,
  pathOf,
  sizeOf,
  targetOf,
} from '../../lib/core/record.ts';
import {
  asRow,
  contentState,
  differingChunks,
  fullChunks,
  type Have,
  metaSame,
  NOTHING,
  sparseBytes,
} from '../../lib/replica/content.ts';
import { Directories } from '../../lib/replica/directories.ts';
import { Freshness } from '../../lib/replica/freshness.ts';
import { FullRuns } from '../../lib/replica/full-runs.ts';
import { bindMountsOf } from '../../lib/replica/mounts.ts';
import { NameCheck, tryName } from '../../lib/replica/names.ts';
import { withOverrides } from '../../lib/replica/overrides.ts';
import { entriesOfFile, Spool } from '../../lib/replica/spool.ts';
import { mustKeepOld, policyKey } from '../../lib/replica/sync.ts';

const P = (s: string): Buffer => Buffer.from(s);

t.test('mounts: a bind mount of the volume is found, whatever else is mounted', (t) => {
  const info = (...more: string[]): string =>
    [
      '22 1 8:1 / / rw - ext4 /dev/sda1 rw',
      '30 22 8:2 / /data rw shared:1 - ext4 /dev/sdb1 rw',
      '31 22 8:2 / /host/data rw - ext4 /dev/sdb1 rw',
      ...more,
      '',
    ].join('\n');
  const live = '/data/pool/games/world';
  t.same(bindMountsOf(info(), live), [], 'the pool itself does not count, nor a second sight of it');
  const pod = '/var/lib/kubelet/pods/1/volumes/x/mount';
  t.same(bindMountsOf(info(`40 22 8:2 /pool/games/world ${pod} rw - ext4 /dev/sdb1 rw`), live), [pod]);
  t.same(bindMountsOf(info(`40 22 8:2 /pool/games/world/sub ${pod} rw - ext4 /dev/sdb1 rw`), live), [pod]);
  t.same(bindMountsOf(info(`40 22 8:2 /pool/games/world-2 ${pod} rw - ext4 /dev/sdb1 rw`), live), []);
  t.same(
    bindMountsOf(info(`40 22 8:9 /pool/games/world ${pod} rw - ext4 /dev/sdc1 rw`), live),
    [],
    'another disk',
  );
  t.same(bindMountsOf(info('40 22 8:2 /pool/games/world /mnt/with\\040blank rw - ext4 /dev/sdb1 rw'), live), [
    '/mnt/with blank',
  ]);
  t.same(
    bindMountsOf(info(`40 30 8:2 /pool/games/world ${live} rw - ext4 /dev/sdb1 rw`), live),
    [live],
    'bound onto itself',
  );
  // a pool that is itself a bind mount, as in a container
  const inside = [
    '50 1 8:2 /pool /pool rw - ext4 /dev/sdb1 rw',
    `51 1 8:2 /pool/games/world ${pod} rw - ext4 x rw`,
  ].join('\n');
  t.same(bindMountsOf(inside, '/pool/games/world'), [pod]);
  t.same(bindMountsOf('22 1 8:1 / / rw - ext4 x rw\n23 22 8:1 /p/v /m rw - ext4 x rw', '/p/v'), ['/m']);
  t.same(bindMountsOf('', '/p/v'), []);
  t.end();
});

t.test('directories: set again once, children before parents, only where something changed', async (t) => {
  const out: string[] = [];
  const record = (p: string): Buffer => encodeRecord({ kind: Kind.directory, path: P(p) });
  const d = new Directories(
    (p) => (p.toString() === 'unknown' ? null : record(p.toString())),
    async (r) => void out.push(pathOf(r).toString() || '.'),
  );
  const at = async (p: string, kind: 'dir' | 'file', due = false): Promise<void> => {
    await d.at(P(p));
    if (kind === 'dir') d.add(P(p), record(p), due);
  };
  await at('', 'dir');
  await at('a', 'dir');
  await at('a-b', 'file');
  await at('a/x', 'dir', true);
  await at('a/x/y', 'file');
  d.touch(P('a/x'));
  // not brought by the walk: a difference names only the file in it
  await at('a/z/f', 'file');
  d.touch(P('a/z'));
  await at('b', 'dir');
  d.touch(P(''));
  await at('c', 'file');
  t.same(out, ['a/x', 'a/z']);
  await d.finish();
  t.same(out, ['a/x', 'a/z', '.'], 'a and b had nothing');
  out.length = 0;
  d.add(P('gone'), null, false);
  d.touch(P('gone'));
  d.touch(P('unknown'));
  await d.finish();
  t.same(out, [], 'what goes away or is unknown gets nothing');
});

const file = (more: object = {}): Buffer =>
  encodeRecord({
    kind: Kind.file,
    flags: Flag.hash,
    mode: 0o644,
    size: 5,
    mtimeNs: 7n,
    ino: 1n,
    ctimeNs: 9n,
    hash: Buffer.alloc(32, 1),
    path: P('f'),
    ...more,
  });
const have = (more: Partial<Have>): Have => ({ ...NOTHING, ...more });

t.test('A4: size and mtime never stand for content, inode and ctime with them do', (t) => {
  const want = file({ ino: 0n, ctimeNs: 0n });
  t.equal(contentState(want, NOTHING, true, true), 'other');
  t.equal(contentState(want, have({ disk: file(), row: file() }), true, true), 'same');
  t.equal(contentState(want, have({ disk: file({ ctimeNs: 10n }), row: file() }), true, true), 'ask');
  t.equal(contentState(want, have({ disk: file({ ino: 2n }), row: file() }), false, true), 'ask');
  t.equal(contentState(want, have({ disk: file() }), true, true), 'ask', 'no row');
  t.equal(
    contentState(want, have({ disk: file(), row: file() }), true, false),
    'ask',
    'the index is not believed',
  );
  t.equal(contentState(want, have({ disk: file({ size: 6 }) }), true, true), 'other');
  const other = file({ hash: Buffer.alloc(32, 2) });
  t.equal(contentState(want, have({ disk: file(), row: other }), true, true), 'other');
  t.equal(contentState(want, have({ disk: file(), row: file(), hashed: other }), true, true), 'other');
  t.equal(contentState(want, have({ disk: file(), hashed: file() }), true, true), 'same');
  t.equal(
    contentState(want, have({ disk: file(), hashed: file({ flags: 0 }) }), true, true),
    'other',
    'no hash, no word',
  );
  const large = file({ size: LARGE });
  t.equal(
    contentState(large, have({ disk: file({ size: LARGE + 1 }) }), true, true),
    'ask',
    'to pull only chunks',
  );
  t.equal(contentState(large, have({ disk: file({ size: LARGE + 1 }) }), false, true), 'other');
  t.end();
});

t.test('metadata: what is not known on the disk is not taken as equal', (t) => {
  const want = file({ xattrs: P('x') });
  t.equal(metaSame(want, have({ disk: file(), diskComplete: false })), false);
  t.equal(metaSame(want, have({ disk: file(), diskComplete: false, row: file({ xattrs: P('x') }) })), true);
  t.equal(metaSame(want, have({ disk: file(), diskComplete: true, row: file({ xattrs: P('x') }) })), false);
  t.equal(metaSame(want, have({ disk: file(), hashed: file({ xattrs: P('x') }) })), true);
  t.equal(metaSame(file(), have({ disk: file({ mode: 0o600 }) })), false);
  t.equal(metaSame(file(), have({ disk: file({ uid: 1 }) })), false);
  t.equal(metaSame(file(), have({ disk: file({ mtimeNs: 8n }) })), false);
  t.equal(metaSame(file(), NOTHING), false);
  t.end();
});

t.test('chunks: differing ones as pairs, sparse lists over a base', (t) => {
  const chunk = (n: number): Buffer => Buffer.alloc(16, n);
  const list = (...n: number[]): Buffer => Buffer.concat(n.map(chunk));
  const size = 3 * CHUNK + 10;
  t.same(differingChunks({ chunks: list(1, 2, 3, 4), size }, { chunks: list(1, 9, 8, 4), size }), {
    pairs: [1, 2],
    bytes: 2 * CHUNK,
  });
  t.same(differingChunks({ chunks: list(1, 2), size: 2 * CHUNK }, { chunks: list(9, 2, 3, 4), size }), {
    pairs: [0, 1, 2, 2],
    bytes: 2 * CHUNK + 10,
  });
  t.same(
    differingChunks({ chunks: list(1, 2, 3, 4), size }, { chunks: list(1, 2), size: 2 * CHUNK }).pairs,
    [],
  );
  const sparse = (at: number[], n: number[]): Buffer =>
    Buffer.concat(
      at.map((i, k) => {
        const b = Buffer.alloc(20);
        b.writeUInt32LE(i, 0);
        chunk(n[k] as number).copy(b, 4);
        return b;
      }),
    );
  const r = file({ size, flags: Flag.hash | Flag.chunksSparse, chunks: sparse([1, 3], [9, 8]) });
  t.equal(sparseBytes(r), CHUNK + 10);
  t.same(fullChunks(r, list(1, 2, 3, 4)), list(1, 9, 3, 8));
  t.same(fullChunks(r, list(1, 2, 3)), list(1, 9, 3, 8), 'the file grew by a chunk that is named');
  t.equal(fullChunks(r, list(1, 2)), null, 'a chunk beyond the base that nobody named');
  t.equal(fullChunks(r, undefined), null);
  t.same(
    fullChunks(file({ size, flags: Flag.chunksFull, chunks: list(1, 2, 3, 4) }), undefined),
    list(1, 2, 3, 4),
  );
  t.equal(fullChunks(file(), undefined), null);
  const row = asRow(file({ flags: Flag.hash | Flag.moved | Flag.large, target: P('old'), chunks: list(1) }));
  t.equal(flagsOf(row), Flag.hash | Flag.large);
  t.equal(targetOf(row).length, 0);
  t.equal(row.readUInt32LE(108), 0);
  const link = encodeRecord({ kind: Kind.symlink, path: P('l'), target: P('to'), size: 2 });
  t.equal(targetOf(asRow(link)).toString(), 'to');
  t.equal(sizeOf(asRow(link)), 2);
  t.end();
});

t.test('overrides: owner and modes, executable bits stay, links have no mode', (t) => {
  const o = { ownerUid: 5, ownerGid: null, fileMode: 0o640, dirMode: 0o2770 };
  const over = (more: object): Buffer => withOverrides(file(more), o);
  t.equal(modeOf(over({ mode: 0o600 })), 0o640);
  t.equal(modeOf(over({ mode: 0o711 })), 0o751);
  t.equal(modeOf(over({ kind: Kind.directory, mode: 0o700 })), 0o2770);
  t.equal(modeOf(over({ kind: Kind.symlink, mode: 0o777 })), 0o777);
  t.equal(over({ uid: 9, gid: 8 }).readUInt32LE(8), 5);
  t.equal(over({ uid: 9, gid: 8 }).readUInt32LE(12), 8);
  const same = file({ uid: 5, mode: 0o640 });
  t.equal(withOverrides(same, o), same);
  const none = encodeRecord({ kind: Kind.absent, path: P('x') });
  t.equal(withOverrides(none, o), none);
  t.end();
});

t.test('freshness: kept at most every ten seconds, and at the end', (t) => {
  let boot = 100_000;
  const clock = { boot: () => boot, now: () => 5_000_000 + boot, setTimeout: () => ({ cancel() {} }) };
  const f = new Freshness(clock, 'b');
  t.equal(f.toSave(true), null);
  f.advance(99_000);
  t.same(f.toSave(false), { bootId: 'b', bootMs: 99_000, wallMs: 5_099_000 });
  boot += 5000;
  f.advance(104_000);
  t.equal(f.toSave(false), null);
  t.match(f.toSave(true), { bootMs: 104_000 });
  boot += 10_000;
  t.equal(f.toSave(false), null, 'nothing new');
  f.advance(114_000);
  t.match(f.toSave(false), { bootMs: 114_000 });
  f.advance(Number.NaN);
  t.equal(f.at, 114_000);
  f.forget();
  t.equal(f.ageMs, null);
  t.end();
});

t.test('full syncs: an outcome after three failures, the last hundred are remembered', (t) => {
  const runs = new FullRuns();
  runs.start('a');
  runs.failed('x', false);
  runs.failed('x', false);
  t.match(runs.get('a'), { state: 'running', error: 'x' });
  runs.failed('y', false);
  t.match(runs.get('a'), { state: 'failed', error: 'y' });
  t.equal(runs.current, null);
  runs.start('b');
  runs.failed('z', false);
  runs.done('1-2');
  t.same(runs.get('b'), { id: 'b', state: 'done', generation: '1-2' });
  runs.start('c');
  runs.failed('cancelled', true);
  t.match(runs.get('c'), { state: 'failed' });
  for (let i = 0; i < 120; i++) {
    runs.start(`n${i}`);
    runs.done('1-1');
  }
  t.equal(runs.get('a'), null);
  t.ok(runs.get('n119'));
  runs.done('no effect');
  runs.failed('no effect', true);
  t.end();
});

t.test('A21: what is kept when a full comparison takes things away', (t) => {
  const held = { generation: '1-1' } as never;
  const plan = (removed: number, destroys: number) => ({ removed, destroys });
  t.equal(mustKeepOld(plan(6, 6), { base: null }, held, 11), true, 'more than half');
  t.equal(mustKeepOld(plan(5, 5), { base: null }, held, 11), false, 'half');
  t.equal(mustKeepOld(plan(1, 1), { base: null }, null, 0), true, 'nobody knows where it came from');
  t.equal(mustKeepOld(plan(9, 0), { base: null }, held, 10), false, 'nothing on the disk is concerned');
  t.equal(
    mustKeepOld(plan(9, 9), { base: { epoch: 1, seq: 1 } }, held, 10),
    false,
    'a difference was guarded at the source',
  );
  t.end();
});

t.test('a change of filter or overrides is a change, other parts of a policy are not', (t) => {
  const key = policyKey(DEFAULT_POLICY);
  t.equal(policyKey({ ...DEFAULT_POLICY, requiredPaths: ['x'] }), key);
  for (const change of [
    { includePaths: ['x'] },
    { excludePaths: ['x'] },
    { pruneExcluded: true },
    { ownerUid: 0 },
    { fileMode: 0 },
  ])
    t.not(policyKey({ ...DEFAULT_POLICY, ...change }), key);
  t.end();
});

t.test('names: a file system that takes all is not asked for each; another one is', async (t) => {
  const dir = fs.mkdtempSync(path.join(os.tmpdir(), 'sv-names-'));
  t.teardown(() => fs.rmSync(dir, { recursive: true }));
  const real = new NameCheck(dir);
  t.equal(await real.refuses(P('a/b')), null);
  t.equal(await real.refuses(Buffer.alloc(4096, 0x61)), 'ENAMETOOLONG');
  t.equal(await tryName(dir, Buffer.alloc(256, 0x61)), 'ENAMETOOLONG');
  await t.rejects(tryName(path.join(dir, 'missing'), P('x')), { code: 'ENOENT' });
  const asked: string[] = [];
  const picky = new NameCheck(dir, async (_d, name) => {
    asked.push(name.toString('latin1'));
    return name.includes(0x3a) ? 'EINVAL' : null;
  });
  t.equal(await picky.refuses(P('a/b:c')), 'EINVAL');
  t.equal(await picky.refuses(P('a:/b')), null, 'the parts above have entries of their own');
  t.equal(asked.at(-1), 'b');
});

t.test('spool: short in memory, long in a file, forwards and backwards', async (t) => {
  const dir = fs.mkdtempSync(path.join(os.tmpdir(), 'sv-spool-'));
  t.teardown(() => fs.rmSync(dir, { recursive: true }));
  const op = (n: number): Buffer =>
    encodeOp(Op.remove, encodeRecord({ kind: Kind.absent, path: P(`${n}`.padStart(200, 'p')) }), n);
  for (const count of [0, 1, 10, 3000]) {
    const s = new Spool(path.join(dir, 'file'));
    for (let n = 0; n < count; n++) await s.add(op(n));
    t.equal(fs.existsSync(path.join(dir, 'file')), count === 3000);
    t.equal(s.count, count);
    const forward: Buffer[] = [];
    for await (const e of s.entries()) forward.push(Buffer.from(e));
    const whole = Buffer.concat(forward);
    t.ok(whole.equals(Buffer.concat(Array.from({ length: count }, (_, n) => op(n)))));
    t.equal(s.bytes, whole.length);
    const back: Buffer[] = [];
    for await (const piece of s.reversedPieces()) back.push(piece);
    t.ok(
      Buffer.concat(back).equals(Buffer.concat(Array.from({ length: count }, (_, n) => op(count - 1 - n)))),
    );
    fs.writeFileSync(path.join(dir, 'whole'), whole);
    let n = 0;
    for await (const e of entriesOfFile(path.join(dir, 'whole'))) if (e.equals(op(n))) n++;
    t.equal(n, count);
    if (count > 0) {
      fs.writeFileSync(path.join(dir, 'cut'), whole.subarray(0, whole.length - 1));
      await t.rejects(async () => {
        for await (const _ of entriesOfFile(path.join(dir, 'cut')));
      }, /cut short/);
    }
    await s.remove();
    t.notOk(fs.existsSync(path.join(dir, 'file')));
  }
  const long = Buffer.alloc(700_000);
  long.writeUInt32LE(long.length, 0);
  fs.writeFileSync(path.join(dir, 'long'), Buffer.concat([op(1), long, op(2)]));
  const sizes: number[] = [];
  for await (const e of entriesOfFile(path.join(dir, 'long'))) sizes.push(e.length);
  t.same(sizes, [op(1).length, 700_000, op(2).length]);
});
