import { randomBytes } from 'node:crypto';
import { mkdir, readdir, rename, rm, stat, symlink, truncate, utimes, writeFile } from 'node:fs/promises';
import path from 'node:path';
import { setTimeout as sleep } from 'node:timers/promises';
import t from 'tap';
import { decodeUnpackResults, encodeUnpackItems } from '../../lib/core/lists.ts';
import { ManifestReader } from '../../lib/core/manifest.ts';
import type { Offer } from '../../lib/core/parts.ts';
import { EMPTY, Flag, flagsOf, Kind, kindOf, pathOf, withFields } from '../../lib/core/record.ts';
import { native } from '../../lib/native/load.ts';
import type { Principal } from '../../lib/transfer/grant.ts';
import { exists, type Lab, openFiles, startLab } from './support.ts';

const want = { epoch: 1, node: 'node-b', have: null, full: false };

async function recordsOf(lab: Lab, offer: Offer): Promise<Buffer[]> {
  const reader = await ManifestReader.open(Buffer.from(path.join(lab.volume.offers, offer.id, 'manifest')));
  const out: Buffer[] = [];
  for await (const b of reader.batches()) out.push(...b.records);
  await reader.close();
  return out;
}
const names = (records: Buffer[]): string[] => records.map((r) => pathOf(r).toString('latin1'));

async function readAll(lab: Lab, offer: Offer, name: string, who: Principal = lab.agent): Promise<Buffer> {
  const file = lab.offers.file(offer.id, name, who);
  if (!file) throw new Error(`no file ${name}`);
  const length = await file.length();
  const reading = await file.open(() => undefined);
  const parts: Buffer[] = [];
  try {
    for (let at = 0; ; ) {
      const b = await reading.read(at, 100_000);
      if (!b) break;
      parts.push(b);
      at += b.length;
    }
  } finally {
    await reading.close();
  }
  const all = Buffer.concat(parts);
  if (all.length !== length) throw new Error(`${all.length} bytes, planned ${length}`);
  return all;
}

/** Unpacks a pack of whole files; gives their statuses by ordinal. */
async function unpack(dir: string, records: Buffer[], ordinals: number[], pack: Buffer): Promise<number[]> {
  const slots = path.join(dir, `slots-${randomBytes(4).toString('hex')}`);
  await mkdir(slots, { mode: 0o700 });
  const unpacker = native.createUnpacker({
    slots: Buffer.from(slots),
    base: null,
    items: encodeUnpackItems(
      ordinals.map((ordinal, slot) => ({ ordinal, patch: false, slot, record: records[ordinal]! })),
    ),
  });
  for (let at = 0; at < pack.length; at += 70_000) await unpacker.write(pack.subarray(at, at + 70_000));
  return decodeUnpackResults(await unpacker.end()).map((r) => r.status);
}

t.test('a full offer: manifest of everything, packs that the replica can verify', async (t) => {
  const lab = await startLab(t.testdir());
  t.teardown(() => lab.close());
  const { root } = lab.volume;
  await mkdir(`${root}/d`);
  await writeFile(`${root}/d/small`, 'small');
  await writeFile(`${root}/empty`, '');
  await writeFile(`${root}/big`, randomBytes(3 * 1024 * 1024 + 5));
  await writeFile(Buffer.from(`${root}/bad-\xff\xfe`, 'latin1'), 'bytes');
  await symlink('../../../etc', `${root}/out`);
  await lab.volume.seal();
  const offer = await lab.offers.create(lab.volume, lab.volume.offers, want);
  t.equal(offer.base, null);
  t.match(offer.id, /^[0-9a-f]{32}$/);
  const records = await recordsOf(lab, offer);
  t.same(names(records), ['', 'bad-\xff\xfe', 'big', 'd', 'd/small', 'empty', 'out']);
  t.ok(lab.volume.opened[0]?.closed, 'the index is given back as soon as the manifest stands');
  t.equal(lab.volume.pins, 1);
  const ordinals = records.flatMap((r, i) => (kindOf(r) === Kind.file ? [i] : []));
  const packs = await lab.offers.needs(offer.id, lab.replica, Uint32Array.from(ordinals));
  t.same(
    packs.map((p) => [p.name, p.items]),
    [['pack-0000', 4]],
  );
  t.same(
    await unpack(path.dirname(lab.volume.root), records, ordinals, await readAll(lab, offer, 'pack-0000')),
    [0, 0, 0, 0],
  );
  const whole = await readAll(lab, offer, 'manifest');
  t.equal(whole.length, offer.manifest.bytes);
  t.equal(whole.subarray(-32).toString('hex'), offer.manifest.hash);
  await lab.offers.drop(offer.id, lab.replica);
  t.equal(lab.volume.pins, 0);
  t.notOk(exists(path.join(lab.volume.offers, offer.id)));
});

t.test(
  'H2: a difference: what changed, what is gone, what moved, and only the changed runs of a large file',
  async (t) => {
    const lab = await startLab(t.testdir());
    t.teardown(() => lab.close());
    const { root } = lab.volume;
    const big = randomBytes(2 * 1024 * 1024);
    for (const [name, data] of [
      ['big', big],
      ['kept', 'k'],
      ['gone', 'g'],
      ['old', 'moving'],
      ['other', big],
    ] as const)
      await writeFile(`${root}/${name}`, data);
    const have = await lab.volume.seal();
    const before = Buffer.from(big);
    const oldRow = lab.volume.row('big').record;
    const first = await lab.volume.open();
    const oldChunks = first.index.chunks(Buffer.from('big'))!;
    first.release();
    big.fill(0x41, 8192, 12_288);
    await writeFile(`${root}/big`, big);
    await truncate(`${root}/other`, 1_500_000);
    await rm(`${root}/gone`);
    await rename(`${root}/old`, `${root}/new`);
    await lab.volume.seal(new Map([['big', [{ offset: 8192, length: 4096 }]]]));
    lab.volume.setRow('new', (r) =>
      withFields(r, { flags: flagsOf(r) | Flag.moved, target: Buffer.from('old') }),
    );
    const offer = await lab.offers.create(lab.volume, lab.volume.offers, { ...want, have });
    t.same(offer.base, have);
    const records = await recordsOf(lab, offer);
    const by = new Map(records.map((r) => [pathOf(r).toString(), r]));
    t.same([...by.keys()], ['', 'big', 'gone', 'new', 'old', 'other']);
    t.equal(kindOf(by.get('gone')!), Kind.absent);
    t.equal(kindOf(by.get('old')!), Kind.absent);
    t.ok(flagsOf(by.get('new')!) & Flag.moved);
    t.ok(flagsOf(by.get('big')!) & Flag.chunksSparse);
    t.equal(by.get('big')!.readUInt32LE(108), 2 * 20, 'the changed chunk and the last one');
    t.ok(flagsOf(by.get('other')!) & Flag.chunksFull, 'nobody knows which runs changed: the whole list');
    const [pack] = await lab.offers.needs(offer.id, lab.replica, Uint32Array.of(1));
    t.ok(pack!.bytes < 5000);
    const stream = await readAll(lab, offer, 'pack-0000');
    t.equal(stream.length, 8 + 16 + 4096 + 16);
    t.same(stream.subarray(24, 24 + 4096), Buffer.alloc(4096, 0x41));

    t.test('a replica may ask for single chunks of a large file', async (t) => {
      const words = Uint32Array.of(0x8000_0000 + 5, 2, 0, 1, 22, 1);
      const [chunks] = await lab.offers.needs(offer.id, lab.replica, words);
      t.equal(chunks!.name, 'pack-0001', 'later needs get later packs');
      const s = await readAll(lab, offer, 'pack-0001');
      const last = 1_500_000 - 22 * 65_536;
      t.equal(s.length, 8 + 16 + 65_536 + 16 + last + 16, 'cut to the size of the file');
    });
    t.test(
      'what was asked for in chunks or told as runs makes the new file out of the old one',
      async (t) => {
        const base = path.join(path.dirname(root), 'base');
        await mkdir(base);
        await writeFile(`${base}/big`, before);
        const old = withFields(oldRow, {
          chunks: oldChunks,
          flags: flagsOf(oldRow) | Flag.chunksFull,
          ino: 0n,
        });
        const { mtimeNs } = await stat(`${base}/big`, { bigint: true });
        const patched = async (record: Buffer, pack: Buffer) => {
          const slots = path.join(path.dirname(root), `slots-${randomBytes(4).toString('hex')}`);
          await mkdir(slots);
          const unpacker = native.createUnpacker({
            slots: Buffer.from(slots),
            base: Buffer.from(base),
            items: encodeUnpackItems([
              { ordinal: 1, patch: true, slot: 1, record, base: withFields(old, { mtimeNs, ctimeNs: 0n }) },
            ]),
          });
          await unpacker.write(pack);
          return decodeUnpackResults(await unpacker.end())[0]!.status;
        };
        t.equal(await patched(by.get('big')!, await readAll(lab, offer, 'pack-0000')), 0, 'runs');
        const full = await lab.offers.create(lab.volume, lab.volume.offers, { ...want, node: 'node-c' });
        const record = (await recordsOf(lab, full))[1]!;
        t.ok(flagsOf(record) & Flag.chunksFull);
        const c = { ...lab.replica, node: 'node-c' };
        await lab.offers.needs(full.id, c, Uint32Array.of(0x8000_0001, 1, 0, 1));
        t.equal(await patched(record, await readAll(lab, full, 'pack-0000')), 0, 'chunks');
        await lab.offers.needs(full.id, c, Uint32Array.of(0x8000_0001, 1, 7, 1));
        t.not(
          await patched(record, await readAll(lab, full, 'pack-0001')),
          0,
          'the wrong chunk does not verify',
        );
        await lab.offers.needs(full.id, c, Uint32Array.of(0x8000_0001, 1, 0, 32));
        t.same(
          await unpack(path.dirname(root), [EMPTY, record], [1], await readAll(lab, full, 'pack-0002')),
          [0],
          'all chunks are the whole file',
        );
      },
    );
    t.test('needs that make no sense are refused', async (t) => {
      const refused = (...words: number[]) =>
        lab.offers.needs(offer.id, lab.replica, Uint32Array.from(words));
      await t.rejects(refused(6), { code: 'FIELD_INVALID', message: /not in the manifest/ });
      await t.rejects(refused(0), { code: 'FIELD_INVALID', message: /not a file/ });
      await t.rejects(refused(2), { code: 'FIELD_INVALID', message: /not a file/ });
      await t.rejects(refused(0x8000_0001), { message: /cut short/ });
      await t.rejects(refused(0x8000_0001, 2, 0, 1), { message: /cut short/ });
      await t.rejects(refused(0x8000_0001, 2, 5, 1, 5, 1), { message: /ascend/ });
      await t.rejects(refused(0x8000_0001, 1, 0, 0), { message: /ascend/ });
      await t.rejects(lab.offers.needs('0'.repeat(32), lab.agent, Uint32Array.of(1)), {
        code: 'TRANSFER_UNKNOWN',
      });
    });
  },
);

t.test('no difference can be told: everything is offered', async (t) => {
  const lab = await startLab(t.testdir());
  t.teardown(() => lab.close());
  const have = await lab.volume.seal();
  await lab.volume.seal();
  lab.volume.horizon = 2;
  t.equal((await lab.offers.create(lab.volume, lab.volume.offers, { ...want, have })).base, null);
  const full = { ...want, have: lab.volume.current, full: true };
  t.equal((await lab.offers.create(lab.volume, lab.volume.offers, full)).base, null, 'asked for');
  const none = await lab.offers.create(lab.volume, lab.volume.offers, { ...want, have: lab.volume.current });
  t.same(await recordsOf(lab, none), [], 'nothing changed since the newest');
});

t.test('packs hold at most 4096 items and about 64 MiB', async (t) => {
  const lab = await startLab(t.testdir());
  t.teardown(() => lab.close());
  for (let i = 0; i < 4100; i++) await writeFile(`${lab.volume.root}/f${i}`, 'x');
  for (const name of ['x1', 'x2', 'x3']) {
    await writeFile(`${lab.volume.root}/${name}`, '');
    await truncate(`${lab.volume.root}/${name}`, 40 * 1024 * 1024);
  }
  await lab.volume.seal();
  const offer = await lab.offers.create(lab.volume, lab.volume.offers, want);
  const records = await recordsOf(lab, offer);
  const ordinals = records.flatMap((r, i) => (kindOf(r) === Kind.file ? [i] : []));
  const packs = await lab.offers.needs(offer.id, lab.replica, Uint32Array.from(ordinals));
  t.same(
    packs.map((p) => p.items),
    [4096, 5, 1, 1],
  );
  const second = await readAll(lab, offer, 'pack-0001');
  t.ok(second.length < 10_000, 'a hole of 40 MiB takes no room in a pack (D10)');
  t.same(
    await unpack(path.dirname(lab.volume.root), records, ordinals.slice(4096, 4101), second),
    [0, 0, 0, 0, 0],
  );
});

t.test('a pinned file that a newer generation replaced is still served; a changed one is not', async (t) => {
  const lab = await startLab(t.testdir());
  t.teardown(() => lab.close());
  const { root, retired } = lab.volume;
  await writeFile(`${root}/a`, 'first');
  await writeFile(`${root}/b`, 'first');
  await lab.volume.seal();
  const offer = await lab.offers.create(lab.volume, lab.volume.offers, want);
  const records = await recordsOf(lab, offer);
  await mkdir(`${retired}/2`, { recursive: true });
  await rename(`${root}/a`, `${retired}/2/a`);
  await writeFile(`${root}/a`, 'secnd');
  await lab.volume.seal();
  await lab.offers.needs(offer.id, lab.replica, Uint32Array.of(1));
  t.same(
    await unpack(path.dirname(lab.volume.root), records, [1], await readAll(lab, offer, 'pack-0000')),
    [0],
  );
  await rename(`${root}/b`, `${root}/c`);
  await writeFile(`${root}/b`, 'other');
  await lab.offers.needs(offer.id, lab.replica, Uint32Array.of(2));
  await t.rejects(readAll(lab, offer, 'pack-0001'), { code: 'CONTENT_CHANGED' });
});

t.test('live consistency: a file that is not exactly what was hashed is not sent (A28)', async (t) => {
  const lab = await startLab(t.testdir());
  t.teardown(() => lab.close());
  lab.volume.strict = true;
  await writeFile(`${lab.volume.root}/a`, 'first');
  await writeFile(`${lab.volume.root}/b`, 'first');
  await lab.volume.seal();
  const { mtimeMs } = await import('node:fs').then((fs) => fs.statSync(`${lab.volume.root}/a`));
  const offer = await lab.offers.create(lab.volume, lab.volume.offers, want);
  await writeFile(`${lab.volume.root}/a`, 'secnd');
  await utimes(`${lab.volume.root}/a`, mtimeMs / 1000, mtimeMs / 1000);
  await lab.offers.needs(offer.id, lab.replica, Uint32Array.of(1));
  await t.rejects(
    readAll(lab, offer, 'pack-0000'),
    { code: 'CONTENT_CHANGED' },
    'same size, mtime put back (D19)',
  );
  await lab.offers.needs(offer.id, lab.replica, Uint32Array.of(2));
  t.equal((await readAll(lab, offer, 'pack-0001')).length, 8 + 16 + 5 + 16);
});

t.test('a transfer belongs to one volume, epoch and node', async (t) => {
  const lab = await startLab(t.testdir());
  t.teardown(() => lab.close());
  await lab.volume.seal();
  const offer = await lab.offers.create(lab.volume, lab.volume.offers, want);
  for (const change of [{ namespace: 'x' }, { volume: 'x' }, { epoch: 2 }, { node: 'node-c' }]) {
    const other = { ...lab.replica, ...change };
    t.equal(lab.offers.files(offer.id, other), null);
    t.equal(lab.offers.file(offer.id, 'manifest', other), null);
    await t.rejects(lab.offers.needs(offer.id, other, new Uint32Array()), { code: 'TRANSFER_UNKNOWN' });
    await lab.offers.drop(offer.id, other);
  }
  t.ok(lab.offers.files(offer.id, lab.replica));
  t.ok(lab.offers.files(offer.id, lab.agent));
  for (const name of ['index', 'runs', 'pack-0000', 'pack-00', '../x', ''])
    t.equal(lab.offers.file(offer.id, name, lab.agent), null, name);
});

t.test('a node has one transfer of a volume; all together have a limit', async (t) => {
  const lab = await startLab(t.testdir(), { offers: { limit: 3 } });
  t.teardown(() => lab.close());
  await lab.volume.seal();
  const create = (node: string) => lab.offers.create(lab.volume, lab.volume.offers, { ...want, node });
  const first = await create('node-b');
  const again = await create('node-b');
  t.equal(lab.offers.files(first.id, lab.agent), null, 'the earlier one ended');
  t.ok(lab.offers.files(again.id, lab.agent));
  await create('node-c');
  await create('node-d');
  await t.rejects(create('node-e'), { code: 'TOO_MANY_TRANSFERS' });
  await create('node-d');
  t.equal(lab.volume.pins, 3);
  await lab.offers.dropVolume(lab.volume);
  t.equal(lab.volume.pins, 0, 'a volume that stops has all its pins back');
  t.same(await readdir(lab.volume.offers), []);
});

t.test('a transfer that nobody touches ends, one that is read does not', async (t) => {
  const lab = await startLab(t.testdir(), { offers: { idleMs: 150 } });
  t.teardown(() => lab.close());
  await lab.volume.seal();
  const offer = await lab.offers.create(lab.volume, lab.volume.offers, want);
  const reading = await lab.offers.file(offer.id, 'manifest', lab.replica)!.open(() => undefined);
  await sleep(400);
  t.equal(lab.volume.pins, 1, 'still being read');
  await reading.close();
  await sleep(400);
  t.equal(lab.volume.pins, 0);
  t.equal(lab.offers.size, 0);
});

t.test('a volume that stops while its manifest is written: no transfer comes of it', async (t) => {
  const lab = await startLab(t.testdir());
  t.teardown(() => lab.close());
  for (let i = 0; i < 600; i++) await writeFile(`${lab.volume.root}/f${i}`, '');
  await lab.volume.seal();
  const creating = lab.offers.create(lab.volume, lab.volume.offers, want);
  const refused = t.rejects(creating, { code: 'NOT_READY' });
  while (lab.volume.pins === 0) await sleep(1);
  await lab.offers.dropVolume(lab.volume);
  t.equal(lab.volume.pins, 0, 'dropVolume waits for it');
  await refused;
  t.same(await readdir(lab.volume.offers), []);
  await lab.offers.create(lab.volume, lab.volume.offers, want);
  t.equal(lab.offers.size, 1);
});

t.test('left-overs of an earlier run are removed; an offer that fails leaves nothing', async (t) => {
  const lab = await startLab(t.testdir());
  t.teardown(() => lab.close());
  await mkdir(`${lab.volume.offers}/${'a'.repeat(32)}/x`, { recursive: true });
  await writeFile(`${lab.volume.root}/big`, randomBytes(1024 * 1024));
  await lab.volume.seal();
  const { open } = lab.volume;
  lab.volume.open = async () => {
    const served = await open.call(lab.volume);
    served.index.chunks = () => Buffer.alloc(3);
    return served;
  };
  await t.rejects(lab.offers.create(lab.volume, lab.volume.offers, want), {
    code: 'INTERNAL',
    message: /big/,
  });
  t.same(await readdir(lab.volume.offers), []);
  t.equal(lab.volume.pins, 0);
  lab.volume.open = () => Promise.reject(Object.assign(new Error('x'), { code: 'APPLYING' }));
  await t.rejects(lab.offers.create(lab.volume, lab.volume.offers, want), { code: 'APPLYING' });
  t.equal(lab.offers.size, 0);
  t.same(
    openFiles().filter((f) => f.includes(lab.volume.offers)),
    [],
  );
});
