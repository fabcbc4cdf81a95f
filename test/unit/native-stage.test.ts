/** The addon's border of staging, hashing, durability and tree removal: what comes back, and what misuse gets. */
import { execFileSync } from 'node:child_process';
import * as fs from 'node:fs';
import path from 'node:path';
import t from 'tap';
import {
  decodeStageResults,
  encodeStageItems,
  SlotKind,
  StageStatus,
  slotName,
} from '../../lib/core/lists.ts';
import { chunksOf, hashOf, inoOf, Kind, kindOf, mtimeNsOf, pathOf, sizeOf } from '../../lib/core/record.ts';
import { native } from '../../lib/native/load.ts';
import type { NativeError, StageOptions } from '../../lib/native/types.ts';

const b = (s: string): Buffer => Buffer.from(s);

async function failure(run: () => Promise<unknown>): Promise<NativeError> {
  try {
    await run();
  } catch (error) {
    return error as NativeError;
  }
  throw new Error('it did not fail');
}

function places(dir: string): StageOptions & { at: (name: string) => string } {
  const at = (name: string): string => path.join(dir, name);
  for (const name of ['live', 'slots', 'base']) fs.mkdirSync(at(name));
  return { at, root: b(at('live')), slots: b(at('slots')), base: b(at('base')), hashOnly: false };
}

t.test('files with any name become slots, described in the order asked for', async (t) => {
  const p = places(t.testdir({}));
  const odd = Buffer.concat([b('bad-'), Buffer.from([0xff, 0xfe, 0x0a])]);
  const large = Buffer.alloc(1_500_001, 7);
  fs.writeFileSync(Buffer.concat([b(p.at('live/')), odd]), 'odd');
  fs.writeFileSync(p.at('live/large'), large);
  fs.writeFileSync(p.at('live/empty'), '');
  fs.symlinkSync('large', p.at('live/link'));
  const names = [b('large'), odd, b('none'), b('empty'), b('link')];
  const items = encodeStageItems(
    names.map((name, i) => ({ id: 50 - i, slot: i + 10, patch: false, path: name })),
  );
  const results = decodeStageResults(await native.stage(p, items));
  t.same(
    results.map((r) => [r.id, r.status, r.slotKind]),
    [
      [50, StageStatus.ok, SlotKind.whole],
      [49, StageStatus.ok, SlotKind.whole],
      [48, StageStatus.gone, SlotKind.none],
      [47, StageStatus.ok, SlotKind.whole],
      [46, StageStatus.special, SlotKind.none],
    ],
  );
  results.forEach((r, i) => {
    t.ok(pathOf(r.record).equals(names[i] as Buffer));
  });
  const [first, second] = results as [(typeof results)[0], (typeof results)[0]];
  t.ok(fs.readFileSync(p.at(`slots/${slotName(10)}`)).equals(large));
  t.equal(fs.readFileSync(p.at(`slots/${slotName(11)}`), 'utf8'), 'odd');
  const stat = fs.statSync(p.at('live/large'), { bigint: true });
  t.equal(kindOf(first.record), Kind.file);
  t.equal(sizeOf(first.record), large.length);
  t.equal(mtimeNsOf(first.record), stat.mtimeNs);
  t.equal(inoOf(first.record), stat.ino);
  t.equal(chunksOf(first.record).length, Math.ceil(large.length / 65536) * 16);
  t.ok(hashOf(second.record).equals(native.hashBytes(b('odd'))));
  t.same(fs.readdirSync(p.at('slots')).sort(), [slotName(10), slotName(11), slotName(13)]);
});

t.test('a large file with a base is staged as the blocks that differ', async (t) => {
  const p = places(t.testdir({}));
  const data = Buffer.alloc(2_000_000);
  for (let i = 0; i < data.length; i++) data[i] = (i * 2654435761) >>> 24;
  fs.writeFileSync(p.at('live/f'), data);
  const item = { id: 1, slot: 1, patch: false, path: b('f') };
  const [first] = decodeStageResults(await native.stage(p, encodeStageItems([item])));
  fs.renameSync(p.at(`slots/${slotName(1)}`), p.at('base/f'));
  execFileSync('touch', ['-r', p.at('live/f'), p.at('base/f')]);
  data[1_000_000] = (data[1_000_000] as number) ^ 1;
  fs.writeFileSync(p.at('live/f'), data);
  const again = { id: 2, slot: 2, patch: true, path: b('f'), base: first?.record as Buffer };
  const [patch] = decodeStageResults(await native.stage(p, encodeStageItems([again])));
  t.equal(patch?.slotKind, SlotKind.patch);
  t.same(patch?.runs, [{ offset: Math.floor(1_000_000 / 4096) * 4096, length: 4096 }]);
  t.ok(fs.statSync(p.at(`slots/${slotName(2)}`)).size < 5000);
  const [hashed] = decodeStageResults(
    await native.stage({ ...p, hashOnly: true }, encodeStageItems([{ ...again, slot: 0 }])),
  );
  t.equal(hashed?.slotKind, SlotKind.none);
  t.same(hashed?.runs, [{ offset: Math.floor(1_000_000 / 65536) * 65536, length: 65536 }]);
  t.ok(hashOf(hashed?.record as Buffer).equals(hashOf(patch?.record as Buffer)));
});

t.test('D15, C2: a FIFO neither blocks staging nor hashing', async (t) => {
  const p = places(t.testdir({}));
  execFileSync('mkfifo', [p.at('live/fifo')]);
  const items = encodeStageItems([{ id: 1, slot: 1, patch: false, path: b('fifo') }]);
  t.equal(decodeStageResults(await native.stage(p, items))[0]?.status, StageStatus.special);
  t.equal((await failure(() => native.hashFile(b(p.at('live/fifo'))))).code, 'EINVAL');
});

t.test('F7: a path never leaves the root', async (t) => {
  const p = places(t.testdir({ outside: { secret: 'x' } }));
  fs.symlinkSync('../outside', p.at('live/link'));
  const paths = ['../outside/secret', 'link/secret', path.join(p.at('outside'), 'secret')];
  const items = encodeStageItems(paths.map((name, i) => ({ id: i, slot: i, patch: false, path: b(name) })));
  for (const r of decodeStageResults(await native.stage(p, items))) t.not(r.status, StageStatus.ok);
  t.same(fs.readdirSync(p.at('slots')), []);
});

t.test('errors carry code, syscall and path as bytes', async (t) => {
  const p = places(t.testdir({}));
  const none = b(p.at('none'));
  const item = encodeStageItems([{ id: 1, slot: 1, patch: false, path: b('f') }]);
  fs.writeFileSync(p.at('live/f'), 'x');
  t.equal((await failure(() => native.stage({ ...p, root: none }, item))).code, 'ENOENT');
  t.equal((await failure(() => native.stage({ ...p, slots: none }, item))).code, 'ENOENT');
  t.equal((await failure(() => native.stage(p, item.subarray(0, 20)))).code, 'FORMAT_INVALID');
  t.equal((await failure(() => native.stage(p, Buffer.from([3, 0, 0, 0])))).code, 'FORMAT_INVALID');
  fs.writeFileSync(p.at(`slots/${slotName(1)}`), 'mine');
  t.equal((await failure(() => native.stage(p, item))).code, 'EEXIST');
  t.equal(fs.readFileSync(p.at(`slots/${slotName(1)}`), 'utf8'), 'mine');
  const missing = await failure(() => native.hashFile(none));
  t.equal(missing.code, 'ENOENT');
  t.ok(missing.path?.equals(none));
  t.type(missing.syscall, 'string');
  for (const wrong of [undefined, null, 'text', 1, {}]) {
    t.ok(await failure(async () => native.stage(p, wrong as unknown as Buffer)), `items ${String(wrong)}`);
    t.ok(
      await failure(async () => native.stage(wrong as unknown as StageOptions, item)),
      `options ${String(wrong)}`,
    );
    t.ok(await failure(async () => native.hashFile(wrong as unknown as Buffer)));
    t.ok(await failure(async () => native.removeTree(p.root, wrong as unknown as Buffer)));
    t.throws(() => native.hashBytes(wrong as unknown as Buffer));
  }
});

t.test('hashes are BLAKE3, of a buffer and of a file', async (t) => {
  const dir = t.testdir({ f: 'abc', empty: '' });
  const abc = '6437b3ac38465133ffb63b75273a8db548c558465d79db03fd359c6cd5bd9d85';
  t.equal(native.hashBytes(b('abc')).toString('hex'), abc);
  t.equal(native.hashBytes(new Uint8Array([97, 98, 99])).toString('hex'), abc);
  t.equal((await native.hashFile(b(path.join(dir, 'f')))).toString('hex'), abc);
  t.equal(
    (await native.hashFile(b(path.join(dir, 'empty')))).toString('hex'),
    'af1349b9f5f9a1a6a0404dea36dcc9499bcb25c9adc112b7cc9a93cae41f3262',
  );
});

t.test(
  'durability calls: a missing file is nothing to sync, a missing file system is an error',
  async (t) => {
    const dir = t.testdir({ f: 'x' });
    await native.syncFs(b(dir));
    await native.syncFile(b(path.join(dir, 'f')));
    await native.syncFile(b(dir));
    await native.syncFile(b(path.join(dir, 'none')));
    t.equal((await failure(() => native.syncFs(b(path.join(dir, 'none'))))).code, 'ENOENT');
  },
);

t.test('removeTree counts what it removes and stays beneath its root', async (t) => {
  const dir = t.testdir({ root: { a: { b: { f: 'x', g: 'y' } }, keep: 'x' }, outside: { secret: 'x' } });
  const root = b(path.join(dir, 'root'));
  fs.symlinkSync('../../outside', path.join(dir, 'root/a/link'));
  t.equal(await native.removeTree(root, b('a')), 5);
  t.equal(await native.removeTree(root, b('a')), 0);
  fs.symlinkSync('../outside', path.join(dir, 'root/link'));
  await failure(() => native.removeTree(root, b('link/secret')));
  await failure(() => native.removeTree(root, b('../outside')));
  await failure(() => native.removeTree(root, b('')));
  t.equal(await native.removeTree(root, b('link')), 1);
  t.same(fs.readdirSync(path.join(dir, 'outside')), ['secret']);
  t.same(fs.readdirSync(path.join(dir, 'root')), ['keep']);
});

t.test('probe and clock', async (t) => {
  const dir = t.testdir({});
  const found = await native.probe(b(dir));
  t.match(found, { type: String, reflink: Boolean, xattrs: Boolean, dev: Number });
  t.same(fs.readdirSync(dir), [], 'nothing is left behind');
  t.equal((await failure(() => native.probe(b(path.join(dir, 'none'))))).code, 'ENOENT');
  const before = native.bootMs();
  await new Promise((resolve) => setTimeout(resolve, 20));
  const passed = native.bootMs() - before;
  t.ok(passed >= 15 && passed < 5_000, `${passed} ms`);
});
