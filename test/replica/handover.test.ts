/** A node that gave its volume away in good order: its tree is proven and stays. What cannot be proven goes to the backups. */
import fs from 'node:fs';
import os from 'node:os';
import path from 'node:path';
import t from 'tap';
import { linkGroupOf, pathOf, withFields } from '../../lib/core/record.ts';
import { native } from '../../lib/native/load.ts';
import { withIdentity } from '../../lib/replica/content.ts';
import { NativeDisk } from '../../lib/replica/walk.ts';
import { diesAt, indexFaults, pathsOf, picture, put, settled, until, type World, world } from './support.ts';

/** A node that was active in epoch 1, and as `generation` gave the volume away to one that is in epoch 2. */
async function left(w: World, generation: string | null = '1-1'): Promise<void> {
  for (let i = 0; i < 10; i++) put(w.source.root, `d/f${i}`, `content ${i}`);
  put(w.source.root, 'big', Buffer.alloc(2_000_000, 9));
  fs.linkSync(path.join(w.source.root, 'big'), path.join(w.source.root, 'linked'));
  await w.source.seal();
  await w.sync();
  await w.replica.stop();
  const rows = w.store.page(null, 100);
  const disk = await new NativeDisk(native, Buffer.from(w.live)).statAll(
    rows.map((row) => pathOf(row.record)),
  );
  await w.store.transaction(() => {
    // as a source has them: with its own numbers of hard links, and each row naming its file in the shadow
    for (const [i, { record }] of rows.entries()) {
      const own = withFields(record, { linkGroup: linkGroupOf(disk[i] as Buffer) });
      w.store.put(own, 4711n, w.store.chunks(pathOf(record)) ?? null);
    }
    w.store.setMeta('demoted', { epoch: 1, generation });
  });
  for (const name of ['current/data', 'retired/1', 'offers'])
    fs.mkdirSync(path.join(pathsOf(path.join(w.folder, 'pool')).shadow, name), { recursive: true });
  w.source.promote(2);
}

async function goOn(w: World): Promise<void> {
  put(w.source.root, 'new', 'of epoch 2');
  await w.source.seal();
  await w.restart();
  await w.sync();
  await until(() => w.replica.status().state === 'idle');
  t.same(picture(w.live), picture(w.source.root));
  t.same(await indexFaults(w), []);
  t.equal(w.replica.status().generation, '2-2');
}

const warned = (w: World): string =>
  w.log.lines
    .filter((line) => line.level === 'warn')
    .map((line) => `${line.text} ${line.data.path ?? ''}`)
    .join();

t.test('what was handed over and is proven stays: no backup, and only what is new is pulled', async (t) => {
  const w = await world();
  t.teardown(() => w.close());
  await left(w);
  await w.restart();
  t.equal(w.replica.generation(), null, 'it holds nothing that counts before it was proven');
  w.source.counts.ordinals = 0;
  await goOn(w);
  t.same(await w.replica.backups(), []);
  t.equal(w.source.counts.ordinals, 1, 'pulled: the new file');
  t.ok(w.log.lines.some(({ text }) => text === 'the tree that was handed over is a copy now'));
  t.same(fs.readdirSync(pathsOf(path.join(w.folder, 'pool')).shadow), ['offers'], 'the shadow is gone');
  // and it hands its generation on like any other copy
  const served = await w.replica.open();
  t.ok([...served.index.page(null, 100)].every((row) => row.copyIno !== 4711n));
  served.release();
});

t.test('one file more, one less, or one changed, and the whole tree is kept in the backups', async (t) => {
  for (const [what, change] of Object.entries({
    'd/more': (live: string) => put(live, 'd/more', 'written after the last seal'),
    'd/f3': (live: string) => fs.rmSync(path.join(live, 'd/f3')),
    'd/f4': (live: string) => fs.chmodSync(path.join(live, 'd/f4'), 0o600),
    'd/f5': (live: string) => put(live, 'd/f5', 'content X'),
  })) {
    const w = await world();
    await left(w);
    change(w.live);
    const before = picture(w.live);
    await goOn(w);
    t.match(warned(w), `is not what was sealed last d`, what);
    const [backup, ...more] = await w.replica.backups();
    t.same(more, []);
    t.same(picture(path.join(w.backups, String(backup?.stamp))), before);
    await w.close();
  }
});

t.test('A30: a content that changed without a trace in the times is found by reading', async (t) => {
  const w = await world();
  t.teardown(() => w.close());
  await left(w);
  put(w.live, 'd/f5', 'content X');
  const now = await new NativeDisk(native, Buffer.from(w.live)).statAll([
    Buffer.from('d'),
    Buffer.from('d/f5'),
  ]);
  await w.store.transaction(() => {
    for (const disk of now as Buffer[]) {
      const { record, copyIno } = w.store.get(pathOf(disk)) as { record: Buffer; copyIno: bigint };
      w.store.put(withIdentity(withFields(record, {}), disk), copyIno, null);
    }
  });
  await goOn(w);
  t.match(warned(w), 'is not what was sealed last d/f5');
  const [backup] = await w.replica.backups();
  t.equal(fs.readFileSync(path.join(w.backups, String(backup?.stamp), 'd/f5'), 'utf8'), 'content X');
});

t.test('a generation that the new source did not go on from is none to stay at', async (t) => {
  const w = await world();
  t.teardown(() => w.close());
  await left(w);
  // epoch 2 began before that generation
  w.source.lineage = [
    [1, 1],
    [2, 1],
  ];
  await goOn(w);
  t.notOk(w.log.lines.some(({ text }) => text === 'the tree that was handed over is a copy now'));
  t.equal((await w.replica.backups()).length, 1);
});

t.test('a node that only lost its epoch has handed nothing over', async (t) => {
  const w = await world();
  t.teardown(() => w.close());
  await left(w, null);
  await goOn(w);
  t.equal((await w.replica.backups()).length, 1);
});

t.test('a full sync that is asked for at the same time compares, and keeps the tree too', async (t) => {
  const w = await world();
  t.teardown(() => w.close());
  await left(w);
  put(w.source.root, 'new', 'of epoch 2');
  await w.source.seal();
  await w.restart();
  w.source.counts.ordinals = 0;
  await w.sync({ full: true });
  await until(() => w.replica.status().state === 'idle');
  t.same(picture(w.live), picture(w.source.root));
  t.same(await w.replica.backups(), []);
  t.equal(w.source.counts.ordinals, 1);
});

t.test(
  'what the policy leaves out stays where it was written, or goes when it is to be pruned',
  async (t) => {
    for (const pruneExcluded of [false, true]) {
      const w = await world();
      const policy = { ...w.request().policy, excludePaths: ['cache'], pruneExcluded };
      w.source.filter([], ['cache']);
      await left(w);
      put(w.live, 'cache/big', 'of this node');
      // the directory above it was not touched by anybody but the application
      const [root] = await new NativeDisk(native, Buffer.from(w.live)).statAll([Buffer.alloc(0)]);
      await w.store.transaction(() => {
        const row = w.store.get(Buffer.alloc(0)) as { record: Buffer };
        w.store.put(withIdentity(row.record, root as Buffer), 0n, null);
      });
      put(w.source.root, 'new', 'of epoch 2');
      await w.source.seal();
      await w.restart();
      await w.sync({ policy });
      await until(() => w.replica.status().state === 'idle');
      t.equal(fs.existsSync(path.join(w.live, 'cache/big')), !pruneExcluded);
      t.equal(fs.readFileSync(path.join(w.live, 'new'), 'utf8'), 'of epoch 2');
      await w.close();
    }
  },
);

t.test('a crash before or after the proof is written down ends in the same state', async (t) => {
  for (const at of ['replica.handover.proven', 'replica.handover.durable']) {
    const folder = fs.mkdtempSync(path.join(os.tmpdir(), 'sv-handover-'));
    const first = await world({ folder });
    await left(first);
    first.store.close();
    const died = diesAt(at, folder);
    t.equal(died.signal, 'SIGKILL', `${at} ${died.stderr}`);
    const w = await world({ folder });
    t.equal(w.replica.status().generation, at === 'replica.handover.proven' ? null : '1-1');
    await w.source.seal();
    w.source.promote(2);
    await goOn(w);
    t.same(await w.replica.backups(), []);
    await settled(w.replica);
    await w.close();
  }
});
