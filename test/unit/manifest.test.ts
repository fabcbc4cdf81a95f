import { createHash } from 'node:crypto';
import { readFile, writeFile } from 'node:fs/promises';
import path from 'node:path';
import fc from 'fast-check';
import t from 'tap';
import {
  LIMITS,
  type ManifestHeader,
  ManifestReader,
  ManifestWriter,
  TRAILER,
} from '../../lib/core/manifest.ts';
import {
  CHUNK_HASH,
  EMPTY,
  encodeRecord,
  Flag,
  Kind,
  pathOf,
  type RecordFields,
} from '../../lib/core/record.ts';

// Any 32-byte hash will do here; the agents use BLAKE3 of the addon.
const hashFile = async (file: Buffer, length?: number): Promise<Buffer> =>
  createHash('sha256')
    .update((await readFile(file)).subarray(0, length))
    .digest();

type Head = Omit<ManifestHeader, 'count' | 'bytes'>;
const FULL: Head = {
  namespace: 'default',
  volume: 'world',
  generation: { epoch: 1, seq: 9 },
  base: null,
  lineage: [[1, 1]],
  quiescent: true,
};
const DIFF: Head = { ...FULL, base: { epoch: 1, seq: 4 } };
const dir = (p: string | Buffer, f: Partial<RecordFields> = {}): Buffer =>
  encodeRecord({ kind: Kind.directory, mode: 0o755, path: Buffer.from(p), ...f });
const file = (p: string | Buffer, f: Partial<RecordFields> = {}): Buffer =>
  encodeRecord({ kind: Kind.file, flags: Flag.hash, mode: 0o644, size: 5, path: Buffer.from(p), ...f });
const link = (p: string, target: string): Buffer =>
  encodeRecord({
    kind: Kind.symlink,
    size: target.length,
    path: Buffer.from(p),
    target: Buffer.from(target),
  });
const gone = (p: string): Buffer => encodeRecord({ kind: Kind.absent, path: Buffer.from(p) });
const root = dir('');

let number = 0;
async function write(dirname: string, head: Head, records: Buffer[]): Promise<Buffer> {
  const at = Buffer.from(path.join(dirname, `manifest-${number++}`));
  const writer = await ManifestWriter.create(at, head);
  for (const r of records) await writer.add(r);
  await writer.finish(hashFile);
  return at;
}
async function readPaths(at: Buffer, batch?: number): Promise<string[]> {
  const reader = await ManifestReader.open(at, { hashPrefix: hashFile });
  try {
    const out: string[] = [];
    for await (const { first, records } of reader.batches(batch)) {
      if (first !== out.length) throw new Error('ordinals do not follow');
      for (const r of records) out.push(pathOf(r).toString('latin1'));
    }
    return out;
  } finally {
    await reader.close();
  }
}

t.test('what was written is read again, in batches of any size, more than once', async (t) => {
  const chunks = Buffer.alloc(32 * CHUNK_HASH, 7);
  const records = [
    root,
    dir('a'),
    file('a-b'),
    dir('a.d'),
    file('a.d/x'),
    file('a/big', { size: 2 * 1024 * 1024, flags: Flag.hash | Flag.chunksFull, chunks }),
    file(Buffer.from([0x61, 0x2f, 0xff, 0xfe])),
    link('l', '../../../etc/passwd'),
  ];
  const at = await write(t.testdir(), FULL, records);
  const paths = records.map((r) => pathOf(r).toString('latin1'));
  for (const batch of [1, 4, 113, 600, 1 << 18])
    t.same(await readPaths(at, batch), paths, `batches of ${batch}`);
  const reader = await ManifestReader.open(at, {
    hashPrefix: hashFile,
    expect: { namespace: 'default', volume: 'world', base: null },
  });
  t.equal(reader.header.count, 8);
  t.equal(reader.header.bytes, 5 + 5 + 2 * 1024 * 1024 + 5);
  for (let i = 0; i < 2; i++) for await (const b of reader.batches()) t.same(b.records, records);
  await reader.close();
});

t.test('a manifest of another volume, generation or base is refused', async (t) => {
  const at = await write(t.testdir(), DIFF, []);
  const open = (expect: object) => ManifestReader.open(at, { expect }).then((r) => r.close());
  await t.rejects(open({ volume: 'other' }), { code: 'MANIFEST_INVALID', message: /default\/world/ });
  await t.rejects(open({ generation: { epoch: 1, seq: 8 } }), { message: /generation 1-9/ });
  await t.rejects(open({ base: null }), { message: /base is 1-4/ });
  await open({ base: { epoch: 1, seq: 4 }, generation: { epoch: 1, seq: 9 } });
});

const big = 2 * 1024 * 1024;
const sparse = (...indexes: number[]): Buffer =>
  Buffer.concat(
    indexes.map((i) => {
      const b = Buffer.alloc(20);
      b.writeUInt32LE(i, 0);
      return b;
    }),
  );
const hostile: [string, Head, Buffer[], RegExp][] = [
  ["'..' as a name", FULL, [root, file('..')], /'\.\.'/],
  ["'..' in the middle", FULL, [root, dir('a'), file('a/../../etc/passwd')], /'\.\.'/],
  ["'.' as a component", FULL, [root, file('./a')], /'\.'/],
  ['an absolute path', FULL, [root, file('/etc/passwd')], /absolute/],
  ['an empty component', DIFF, [file('a//b')], /empty path component/],
  ['a slash at the end', DIFF, [file('a/')], /empty path component/],
  ['a NUL byte', DIFF, [file('a\0b')], /NUL/],
  ['a component of 256 bytes (D7)', DIFF, [file('x'.repeat(256))], /longer than 255/],
  ['a path over 4096 bytes', DIFF, [file(`${'abc/'.repeat(1024)}de`)], /longer than 4096/],
  ['a path twice', FULL, [root, file('a'), file('a')], /path twice/],
  ['paths out of order', FULL, [root, file('b'), file('a')], /out of order/],
  ['order by name instead of by path', FULL, [root, dir('a'), file('a/x'), file('a-b')], /out of order/],
  ['a child of a symlink (D14)', FULL, [root, link('a', '/'), file('a/etc')], /below something/],
  ['a child of a file', FULL, [root, file('a'), file('a/x')], /below something/],
  [
    'a grandchild of a symlink in a difference',
    DIFF,
    [link('a', '/'), file('a-b'), file('a/b/c')],
    /below something/,
  ],
  ['a child of a removed directory', DIFF, [gone('a'), file('a/b')], /below something/],
  ['an entry without its directory', FULL, [root, file('a/x')], /without its directory/],
  ['no root', FULL, [dir('a')], /without its directory/],
  ['an empty full manifest', FULL, [], /not even the root/],
  ['a root that is a symlink', FULL, [link('', '/')], /root is not a directory/],
  ['a removed root', DIFF, [gone('')], /root is not a directory/],
  ['a removed path in a full manifest', FULL, [root, gone('a')], /removed path/],
  ['a device', FULL, [root, encodeRecord({ kind: Kind.special, path: Buffer.from('sda') })], /kind 4/],
  ['an unknown kind', FULL, [root, encodeRecord({ kind: 77 as Kind, path: Buffer.from('x') })], /kind 77/],
  ['a size of 2^63', DIFF, [file('a', { size: 2 ** 63 })], /header.bytes/],
  ['a size on a directory', FULL, [dir('', { size: 4096 })], /size on a directory/],
  ['an inode number', DIFF, [file('a', { ino: 5n })], /inode/],
  ['a seq from the future', DIFF, [file('a', { seq: 10 })], /newer than the generation/],
  ['a file without a hash', DIFF, [file('a', { flags: 0 })], /without a hash/],
  ['a large file without chunks', DIFF, [file('a', { size: big })], /must have one chunk list/],
  ['chunks on a small file', DIFF, [file('a', { chunks: Buffer.alloc(16), flags: 3 })], /small file/],
  [
    'too few chunks',
    DIFF,
    [file('a', { size: big, flags: 3, chunks: Buffer.alloc(31 * 16) })],
    /does not match the size/,
  ],
  [
    'too many chunks',
    DIFF,
    [file('a', { size: big, flags: 3, chunks: Buffer.alloc(33 * 16) })],
    /does not match the size/,
  ],
  [
    'changed chunks in a full manifest',
    FULL,
    [root, file('a', { size: big, flags: 5, chunks: sparse(1) })],
    /full manifest/,
  ],
  [
    'changed chunks beyond the size',
    DIFF,
    [file('a', { size: big, flags: 5, chunks: sparse(1, 32) })],
    /beyond the size/,
  ],
  [
    'changed chunks out of order',
    DIFF,
    [file('a', { size: big, flags: 5, chunks: sparse(2, 2) })],
    /out of order/,
  ],
  [
    'changed chunks cut short',
    DIFF,
    [file('a', { size: big, flags: 5, chunks: Buffer.alloc(19) })],
    /cut short/,
  ],
  ['both chunk lists', DIFF, [file('a', { size: big, flags: 7, chunks: sparse(1) })], /one chunk list/],
  ['an empty symlink', FULL, [root, link('l', '')], /symlink text/],
  ['a symlink of 4096 bytes', FULL, [root, link('l', 'x'.repeat(4096))], /symlink text/],
  ['a symlink with NUL', FULL, [root, link('l', 'a\0b')], /symlink text/],
  ['a target on a plain file', DIFF, [file('a', { target: Buffer.from('b') })], /target on a file/],
  ['moved from outside', DIFF, [file('a', { flags: 17, target: Buffer.from('../b') })], /moved from/],
  [
    'moved in a full manifest',
    FULL,
    [root, file('a', { flags: 17, target: Buffer.from('b') })],
    /full manifest/,
  ],
  [
    'xattrs cut short',
    DIFF,
    [file('a', { xattrs: Buffer.from([9, 0, 1, 0, 0, 0, 65]) })],
    /xattrs cut short/,
  ],
  ['a security xattr', DIFF, [file('a', { xattrs: xattr('security.capability', 'x') })], /not carried/],
  ['a trusted xattr', DIFF, [file('a', { xattrs: xattr('trusted.x', 'x') })], /not carried/],
  [
    'xattrs out of order',
    DIFF,
    [file('a', { xattrs: Buffer.concat([xattr('user.b', ''), xattr('user.a', '')]) })],
    /out of order/,
  ],
  [
    '64 KiB of xattrs and more',
    DIFF,
    [file('a', { xattrs: xattr('user.b', 'x'.repeat(65_536)) })],
    /65536 bytes of xattrs/,
  ],
  ['a link group on a directory', DIFF, [dir('a', { linkGroup: 4n })], /link group/],
];
function xattr(name: string, value: string): Buffer {
  const b = Buffer.alloc(6);
  b.writeUInt16LE(Buffer.byteLength(name), 0);
  b.writeUInt32LE(Buffer.byteLength(value), 2);
  return Buffer.concat([b, Buffer.from(name), Buffer.from(value)]);
}

t.test('a hostile manifest is refused, and the message says why', async (t) => {
  const at = t.testdir();
  for (const [name, head, records, message] of hostile)
    await t.rejects(
      write(at, head, records).then((f) => readPaths(f)),
      { code: 'MANIFEST_INVALID', message },
      name,
    );
});

t.test('a hostile header is refused', async (t) => {
  const at = t.testdir();
  const heads: [string, Head, RegExp][] = [
    ['base newer than the generation', { ...FULL, base: { epoch: 1, seq: 10 } }, /not an ancestor/],
    [
      'base of a line that was replaced',
      {
        ...FULL,
        generation: { epoch: 2, seq: 9 },
        lineage: [
          [1, 1],
          [2, 5],
        ],
        base: { epoch: 1, seq: 7 },
      },
      /not an ancestor/,
    ],
    [
      'lineage that descends',
      {
        ...FULL,
        lineage: [
          [2, 1],
          [1, 1],
        ],
      },
      /must ascend/,
    ],
    ['lineage without the generation', { ...FULL, lineage: [[1, 10]] }, /does not hold/],
    ['no lineage', { ...FULL, lineage: [] }, /lineage/],
  ];
  for (const [name, head, message] of heads)
    await t.rejects(
      write(at, head, [root]).then((f) => readPaths(f)),
      { code: 'MANIFEST_INVALID', message },
      name,
    );
  const good = await readFile(await write(at, FULL, [root]));
  const edited = async (edit: (b: Buffer) => Buffer): Promise<void> => {
    const f = Buffer.from(path.join(at, `edited-${number++}`));
    await writeFile(f, edit(Buffer.from(good)));
    const r = await ManifestReader.open(f);
    try {
      for await (const _ of r.batches());
    } finally {
      await r.close();
    }
  };
  const put =
    (change: (b: Buffer) => void) =>
    (b: Buffer): Buffer => {
      change(b);
      return b;
    };
  const text = (from: string, to: string) => (b: Buffer) => {
    const i = b.indexOf(from);
    b.write(to, i);
    return b;
  };
  await t.rejects(edited(text('"count":1', '"count":2')), { message: /the header says 2/ });
  await t.rejects(edited(text('"count":1', '"count":0')), { message: /more entries/ });
  await t.rejects(edited(text('"bytes":0', '"bytes":7')), { message: /the header says 7/ });
  await t.rejects(edited(text('"count":1', '"count":x')), { message: /not JSON/ });
  await t.rejects(edited(text('SVMF', 'SVMX')), { message: /not a manifest/ });
  await t.rejects(edited(put((b) => b.writeUInt16LE(2, 4))), { message: /version 2/ });
  await t.rejects(edited(put((b) => b.writeUInt32LE(0xffffffff, 8))), { message: /header larger/ });
  await t.rejects(edited(put((b) => b.writeUInt32LE(b.length, 8))), { message: /cut short/ });
  const recordAt = good.length - TRAILER - root.length;
  const oneFile = await readFile(await write(at, DIFF, [file('a')]));
  oneFile.writeBigUInt64LE(1n << 60n, oneFile.length - TRAILER - file('a').length + 16);
  await t.rejects(
    edited(() => oneFile),
    { message: /beyond 2\^53/ },
  );
  await t.rejects(edited(put((b) => b.writeUInt32LE(0xffffffff, recordAt))), {
    message: /record of 4294967295 bytes/,
  });
  await t.rejects(edited(put((b) => b.writeUInt32LE(0, recordAt))), { message: /record of 0 bytes/ });
  await t.rejects(edited(put((b) => b.writeUInt32LE(200, recordAt))), { message: /cut short/ });
  await t.rejects(edited(put((b) => b.writeUInt32LE(8, recordAt + 96))), { message: /do not add up/ });
});

t.test('cut short anywhere, or one byte flipped anywhere: refused', async (t) => {
  const at = t.testdir();
  const whole = await readFile(await write(at, FULL, [root, dir('a'), file('a/x'), link('l', 'a/x')]));
  const f = Buffer.from(path.join(at, 'damaged'));
  for (let n = 0; n < whole.length; n += 1) {
    await writeFile(f, whole.subarray(0, n));
    await t.rejects(readPaths(f), { code: 'MANIFEST_INVALID' }, `cut to ${n}`);
    const flipped = Buffer.from(whole);
    flipped[n] = (flipped[n] as number) ^ 0x20;
    await writeFile(f, flipped);
    await t.rejects(readPaths(f), { code: 'MANIFEST_INVALID' }, `byte ${n}`);
  }
});

t.test('parents are found whatever lies between them and their children', async (t) => {
  const at = t.testdir();
  const name = fc.stringMatching(/^[a!\-./0]{1,12}$/);
  await fc.assert(
    fc.asyncProperty(fc.array(name, { maxLength: 30 }), async (names) => {
      const dirs = new Set<string>(['']);
      for (const n of names) {
        const parts = n.split('/').filter((p) => p !== '' && p !== '.' && p !== '..');
        for (let i = 1; i <= parts.length; i++) dirs.add(parts.slice(0, i).join('/'));
      }
      const sorted = [...dirs].map((d) => Buffer.from(d)).sort(Buffer.compare);
      const paths = await readPaths(
        await write(
          at,
          FULL,
          sorted.map((d) => dir(d)),
        ),
      );
      t.same(paths, sorted.map(String));
    }),
    { numRuns: 200 },
  );
});

t.test('limits that the formats name', async (t) => {
  t.equal(LIMITS.count, 2 ** 31 - 1);
  t.equal(EMPTY.length, 0);
  const at = t.testdir();
  const longest = `${'abc/'.repeat(1023)}abcd`;
  t.same(await readPaths(await write(at, DIFF, [file('x'.repeat(255)), gone('y')])), ['x'.repeat(255), 'y']);
  t.same(await readPaths(await write(at, DIFF, [file(longest)])), [longest]);
  t.same(
    await readPaths(
      await write(at, DIFF, [file('a'), gone('a/b'), file('m', { flags: 17, target: Buffer.from('old') })]),
    ),
    ['a', 'a/b', 'm'],
    'a directory that became a file, and a moved file',
  );
});
