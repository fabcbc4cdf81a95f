/** The addon's border of packs, slots and plans: a tree is served, received and applied; misuse has its codes. */
import { execFileSync } from 'node:child_process';
import * as fs from 'node:fs';
import path from 'node:path';
import t from 'tap';
import {
  decodeApplied,
  decodeRuns,
  decodeStageResults,
  decodeUnpackResults,
  encodeOp,
  encodePackItems,
  encodePaths,
  encodeStageItems,
  encodeUnpackItems,
  Op,
  SlotKind,
  UnpackStatus,
} from '../../lib/core/lists.ts';
import {
  chunksOf,
  decodeRecord,
  encodeRecord,
  hashOf,
  inoOf,
  Kind,
  kindOf,
  mtimeNsOf,
  pathOf,
  recordsIn,
  sizeOf,
  withFields,
} from '../../lib/core/record.ts';
import { native } from '../../lib/native/load.ts';
import type { NativeError } from '../../lib/native/types.ts';

const b = (s: string): Buffer => Buffer.from(s);
const code = async (p: Promise<unknown>): Promise<string> => {
  try {
    await p;
  } catch (error) {
    return (error as NativeError).code;
  }
  return '';
};

function places(dir: string): Record<'source' | 'replica' | 'slots' | 'staged' | 'ops' | 'out', string> {
  const at = (name: string): string => path.join(dir, name);
  const p = {
    source: at('source'),
    replica: at('replica'),
    slots: at('slots'),
    staged: at('staged'),
    ops: at('ops'),
    out: at('out'),
  };
  for (const name of ['source', 'replica', 'slots', 'staged'] as const) fs.mkdirSync(p[name]);
  return p;
}

/** Records of files with hash and chunks, by staging them without a copy. */
async function described(root: string, names: Buffer[]): Promise<Buffer[]> {
  const items = encodeStageItems(names.map((name, id) => ({ id, slot: id, patch: false, path: name })));
  const out = await native.stage({ root: b(root), slots: b(root), base: null, hashOnly: true }, items);
  return decodeStageResults(out).map((r) => {
    t.equal(r.status, 0);
    return r.record;
  });
}

const travelling = (r: Buffer): Buffer => withFields(r, { ino: 0n, ctimeNs: 0n });

async function transfer(
  from: string,
  slots: string,
  items: { ordinal: number; slot: number; record: Buffer }[],
): Promise<ReturnType<typeof decodeUnpackResults>> {
  const reader = native.createPackReader({
    root: b(from),
    retired: null,
    seq: 1,
    items: encodePackItems(
      items.map((i) => ({ ordinal: i.ordinal, runs: null, ino: inoOf(i.record), record: i.record })),
    ),
  });
  const unpacker = native.createUnpacker({
    slots: b(slots),
    base: null,
    items: encodeUnpackItems(items.map((i) => ({ ...i, patch: false, record: travelling(i.record) }))),
  });
  const total = await reader.plan();
  let offset = 0;
  for (;;) {
    const piece = await reader.read(offset, 100_003);
    if (piece === null) break;
    offset += piece.length;
    await unpacker.write(piece);
  }
  t.equal(offset, total);
  reader.close();
  return decodeUnpackResults(await unpacker.end());
}

t.test('a tree with names that are no text travels and stands as it was', async (t) => {
  const p = places(t.testdir({}));
  const names = [
    b('a\nb'),
    Buffer.concat([b('bad-'), Buffer.from([0xff, 0xfe])]),
    b('empty'),
    b('e\u0301'),
    b('\u00e9'),
    b('large'),
    b('100%'),
  ];
  names.forEach((name, i) => {
    fs.writeFileSync(
      Buffer.concat([b(`${p.source}/`), name]),
      i === 2 ? '' : Buffer.alloc(i === 5 ? 1_500_000 : 10 + i, i + 65),
    );
  });
  fs.truncateSync(`${p.source}/large`, 80_000_000);
  fs.mkdirSync(`${p.source}/d`);
  fs.symlinkSync('../../nowhere', `${p.source}/d/l`);
  fs.chmodSync(`${p.source}/empty`, 0o4711);

  const files = await described(p.source, names);
  const results = await transfer(
    p.source,
    p.slots,
    files.map((record, i) => ({ ordinal: i * 3, slot: i + 1, record })),
  );
  t.same(
    results.map((r) => [r.ordinal, r.status]),
    names.map((_, i) => [i * 3, UnpackStatus.ok]),
  );
  t.ok(chunksOf((results[5] as { record: Buffer }).record).equals(chunksOf(files[5] as Buffer)));

  const others = [...recordsIn(await native.stat(b(p.source), encodePaths([b(''), b('d'), b('d/l')])))];
  const [top, d, l] = others as [Buffer, Buffer, Buffer];
  fs.writeFileSync(
    p.ops,
    Buffer.concat([
      encodeOp(Op.mkdir, d),
      ...files.map((record, i) => encodeOp(Op.put, travelling(record), i + 1)),
      encodeOp(Op.symlink, l),
      encodeOp(Op.meta, d),
      encodeOp(Op.meta, top),
    ]),
  );
  const options = { root: b(p.replica), slots: b(p.slots), retired: null, ops: b(p.ops), out: b(p.out) };
  t.same(await native.apply({ ...options, phase: 1 }), {
    operations: 0,
    bytesWritten: 0,
    notEmpty: 0,
    xattrsFailed: 0,
  });
  t.match(await native.apply({ ...options, phase: 2 }), { operations: 11, notEmpty: 0, xattrsFailed: 0 });
  t.same(fs.readdirSync(p.slots), []);

  const paths = encodePaths([b(''), ...names, b('d'), b('d/l')]);
  const here = [...recordsIn(await native.stat(b(p.replica), paths))];
  const there = [...recordsIn(await native.stat(b(p.source), paths))];
  t.equal(here.length, there.length);
  here.forEach((record, i) => {
    const neutral = (r: Buffer): unknown => ({ ...decodeRecord(r), ino: 0n, ctimeNs: 0n });
    t.same(neutral(record), neutral(there[i] as Buffer));
  });
  const copies = await described(p.replica, names);
  t.same(copies.map(hashOf), files.map(hashOf));
  t.ok(fs.statSync(`${p.replica}/large`).blocks * 512 < 3_000_000, 'the hole is still one');

  const out = fs.readFileSync(p.out);
  let entries = 0;
  for (let at = 0; ; entries++) {
    const entry = decodeApplied(out, at);
    if (!entry) break;
    at = entry.next;
    const [now] = recordsIn(await native.stat(b(p.replica), encodePaths([entry.value.path])));
    t.equal(entry.value.status, 0);
    t.ok(entry.value.identity.equals((now as Buffer).subarray(16, 48)));
  }
  t.equal(entries, 11);
  // done again, as after a crash
  await native.apply({ ...options, phase: 2 });
  t.same([...recordsIn(await native.stat(b(p.replica), paths))].map(mtimeNsOf), here.map(mtimeNsOf));
});

t.test('changed blocks alone travel from shadow to replica', async (t) => {
  const p = places(t.testdir({}));
  const old = Buffer.alloc(4_000_000, 'ab');
  fs.writeFileSync(`${p.source}/db`, old);
  fs.writeFileSync(`${p.replica}/db`, old);
  const [base] = await described(p.replica, [b('db')]);
  const [baseThere] = await described(p.source, [b('db')]);
  const fd = fs.openSync(`${p.source}/db`, 'r+');
  fs.writeSync(fd, 'changed', 3_000_000);
  fs.closeSync(fd);
  // staged against the replica's copy, which is what the shadow has
  const [staged] = decodeStageResults(
    await native.stage(
      { root: b(p.source), slots: b(p.staged), base: b(p.replica), hashOnly: false },
      encodeStageItems([{ id: 0, slot: 1, patch: true, path: b('db'), base: base as Buffer }]),
    ),
  );
  t.ok(staged && baseThere);
  if (!staged) return;
  t.equal(staged.slotKind, SlotKind.patch);
  const reader = native.createPackReader({
    root: b(p.source),
    retired: null,
    seq: 2,
    items: encodePackItems([
      { ordinal: 0, runs: staged.runs, ino: inoOf(staged.record), record: staged.record },
    ]),
  });
  const total = await reader.plan();
  t.ok(total < 70_000, `${total} bytes for a change of 7`);
  const unpacker = native.createUnpacker({
    slots: b(p.slots),
    base: b(p.replica),
    items: encodeUnpackItems([
      { ordinal: 0, patch: true, slot: 7, record: travelling(staged.record), base: base as Buffer },
    ]),
  });
  await unpacker.write((await reader.read(0, 1 << 20)) as Buffer);
  const [result] = decodeUnpackResults(await unpacker.end());
  t.equal(result?.status, UnpackStatus.ok);
  for (const op of [Op.patchCopy, Op.patch]) {
    fs.writeFileSync(p.ops, encodeOp(op, travelling(staged.record), 7));
    await native.apply({
      root: b(p.replica),
      slots: b(p.slots),
      retired: null,
      ops: b(p.ops),
      out: null,
      phase: 2,
    });
    t.ok(fs.readFileSync(`${p.replica}/db`).equals(fs.readFileSync(`${p.source}/db`)));
  }
  t.same(decodeRuns(Buffer.alloc(0)), []);
});

t.test('one call at a time, none after the end, abort at any time', async (t) => {
  const p = places(t.testdir({}));
  fs.writeFileSync(`${p.source}/f`, Buffer.alloc(5_000_000, 1));
  const [record] = (await described(p.source, [b('f')])) as [Buffer];
  const items = encodePackItems([{ ordinal: 0, runs: null, ino: 0n, record }]);
  const reader = native.createPackReader({ root: b(p.source), retired: null, seq: 1, items });
  const first = reader.read(0, 1 << 20);
  t.equal(await code(reader.read(0, 10)), 'BUSY');
  t.equal((await first)?.length, 1 << 20);
  t.equal(await reader.read(1e12, 10), null);
  for (const [offset, max] of [
    [-1, 10],
    [0, 0],
    [0.5, 10],
    [0, 1e12],
  ] as const)
    t.throws(() => reader.read(offset, max), RangeError);
  const last = reader.read(0, 1 << 20);
  reader.close();
  t.equal((await last)?.length, 1 << 20, 'a read that runs is not cut off');
  t.equal(await code(reader.read(0, 10)), 'CLOSED');
  reader.close();

  const make = (): ReturnType<typeof native.createUnpacker> =>
    native.createUnpacker({
      slots: b(p.slots),
      base: null,
      items: encodeUnpackItems([{ ordinal: 0, patch: false, slot: 1, record: travelling(record) }]),
    });
  const other = native.createPackReader({ root: b(p.source), retired: null, seq: 1, items });
  const pack = (await other.read(0, 1 << 24)) as Buffer;
  other.close();
  const aborted = make();
  const writing = aborted.write(pack.subarray(0, 4_000_000));
  t.equal(await code(aborted.write(pack)), 'BUSY');
  await aborted.abort();
  await writing;
  t.same(fs.readdirSync(p.slots), [], 'abort waits and then removes');
  t.equal(await code(aborted.write(pack)), 'CLOSED');
  await aborted.abort();

  const cut = make();
  await cut.write(pack.subarray(0, 4_000_000));
  t.equal(await code(cut.end()), 'FORMAT_INVALID');
  t.same(fs.readdirSync(p.slots), []);

  const whole = make();
  await whole.write(pack);
  await whole.end();
  t.equal(await code(whole.end()), 'CLOSED');
  await whole.abort();
  t.same(fs.readdirSync(p.slots), ['0000000000000001'], 'after the end the slots are the caller’s');
});

t.test('a closed reader and an ended unpacker hold no file open', async (t) => {
  const p = places(t.testdir({}));
  fs.writeFileSync(`${p.source}/f`, Buffer.alloc(300_000, 1));
  const [record] = (await described(p.source, [b('f')])) as [Buffer];
  const open = (): string[] =>
    fs.readdirSync('/proc/self/fd').flatMap((fd) => {
      try {
        const to = fs.readlinkSync(`/proc/self/fd/${fd}`);
        return to.startsWith(p.source) || to.startsWith(p.slots) ? [to] : [];
      } catch {
        return [];
      }
    });
  const reader = native.createPackReader({
    root: b(p.source),
    retired: null,
    seq: 1,
    items: encodePackItems([{ ordinal: 0, runs: null, ino: 0n, record }]),
  });
  const unpacker = native.createUnpacker({
    slots: b(p.slots),
    base: null,
    items: encodeUnpackItems([{ ordinal: 0, patch: false, slot: 1, record: travelling(record) }]),
  });
  await unpacker.write((await reader.read(0, 100_000)) as Buffer);
  t.equal(open().length, 3);
  reader.close();
  await unpacker.abort();
  t.same(open(), []);
});

t.test('errors carry code, path and errno', async (t) => {
  const p = places(t.testdir({}));
  fs.writeFileSync(`${p.source}/f`, 'abc');
  const [record] = (await described(p.source, [b('f')])) as [Buffer];
  fs.writeFileSync(`${p.source}/f`, 'changed');
  const reader = native.createPackReader({
    root: b(p.source),
    retired: null,
    seq: 1,
    items: encodePackItems([{ ordinal: 0, runs: null, ino: 0n, record }]),
  });
  const changed = await reader.read(0, 100).catch((e: NativeError) => e);
  t.match(changed, { code: 'CONTENT_CHANGED', path: b('f') });

  fs.mkdirSync(`${p.replica}/d`);
  fs.writeFileSync(`${p.replica}/d/kept`, 'x');
  fs.writeFileSync(`${p.slots}/0000000000000001`, 'abc');
  const absent = encodeRecord({ kind: Kind.absent, path: b('d') });
  fs.writeFileSync(
    p.ops,
    Buffer.concat([
      encodeOp(Op.rmdir, absent),
      encodeOp(Op.put, travelling(withFields(record, { path: b('d') })), 1),
    ]),
  );
  const options = { root: b(p.replica), slots: b(p.slots), retired: null, ops: b(p.ops), out: null };
  const refused = await native.apply({ ...options, phase: 2 }).catch((e: NativeError) => e);
  t.match(refused, { code: 'ENOTEMPTY', path: b('d/kept'), syscall: 'rmdir' });
  fs.writeFileSync(p.ops, 'no plan');
  t.equal(await code(native.apply({ ...options, phase: 2 })), 'OPS_INVALID');
  t.throws(() => native.apply({ ...options, phase: 3 as 2 }), RangeError);
  t.throws(() => native.createUnpacker({ slots: b(p.slots), base: null, items: b('x') }), {
    code: 'FORMAT_INVALID',
  });
  t.throws(
    () => native.createPackReader({ root: b(p.source), retired: null, seq: -1, items: b('') }),
    RangeError,
  );
  t.throws(() => native.createPackReader(undefined as never), TypeError);
  t.throws(() => native.createUnpacker({ slots: b(`${p.slots}/none`), base: null, items: b('') }), {
    code: 'ENOENT',
  });
  t.equal(kindOf(record), Kind.file);
  t.equal(sizeOf(record), 3);
  t.same(pathOf(record), b('f'));
});

t.test('a process may end while calls run', async (t) => {
  const p = places(t.testdir({}));
  fs.writeFileSync(`${p.source}/f`, Buffer.alloc(3_000_000, 1));
  const [record] = (await described(p.source, [b('f')])) as [Buffer];
  const items = encodePackItems([{ ordinal: 0, runs: null, ino: 0n, record }]).toString('base64');
  const load = path.join(import.meta.dirname, '../../lib/native/load.ts');
  const out = execFileSync(process.execPath, [
    '--input-type=module',
    '--eval',
    `const { native } = await import(${JSON.stringify(load)});
     const items = Buffer.from(${JSON.stringify(items)}, 'base64');
     for (let i = 0; i < 20; i++) {
       const r = native.createPackReader({ root: Buffer.from(${JSON.stringify(p.source)}), retired: null, seq: 1, items });
       r.read(0, 1 << 22);
     }
     process.stdout.write('begun', () => process.exit(0));`,
  ]);
  t.equal(out.toString(), 'begun');
});
