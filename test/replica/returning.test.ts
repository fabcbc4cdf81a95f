import fs from 'node:fs';
import os from 'node:os';
import path from 'node:path';
import t from 'tap';
import { diesAt, indexFaults, picture, put, settled, until, type World, world } from './support.ts';

/** A node that was active in epoch 1 and wrote what nobody got; meanwhile epoch 2 went on from 1-1. */
async function returned(w: World): Promise<void> {
  for (let i = 0; i < 10; i++) put(w.source.root, `f${i}`, `content ${i}`);
  put(w.source.root, 'big', Buffer.alloc(2_000_000, 9));
  await w.source.seal();
  await w.sync();
  put(w.live, 'written-here', 'unreplicated');
  put(w.live, 'f1', 'changed here');
  await w.store.transaction(() => w.store.setMeta('demoted', { epoch: 1 }));
  w.source.promote(2);
  put(w.source.root, 'new', 'of epoch 2');
  await w.source.seal();
}

t.test(
  'A22, A23, D34: what a returning node had is kept once, however often the restore is tried',
  async (t) => {
    const w = await world();
    t.teardown(() => w.close());
    await returned(w);
    await w.restart();
    t.equal(w.replica.generation(), null, 'it holds nothing that counts');
    t.equal(w.replica.status().freshAgeMs, null);

    w.source.down = true;
    await w.sync();
    await until(() => w.log.lines.filter((l) => l.level === 'warn').length >= 3);
    t.same(fs.existsSync(w.backups) ? fs.readdirSync(w.backups) : [], [], 'no source, no backup');
    t.equal(fs.readFileSync(path.join(w.live, 'written-here'), 'utf8'), 'unreplicated');

    w.source.onPack = () => null;
    w.source.down = false;
    const seen = w.log.lines.length;
    await until(() => w.log.lines.slice(seen).filter((l) => l.data.failures !== undefined).length >= 3);
    t.equal(fs.readdirSync(w.backups).length, 1, 'three tries, one backup');
    await t.rejects(w.replica.promote(3), { code: 'APPLYING' }, 'never promoted while it is restored');
    const stamp = String((await w.replica.backups())[0]?.stamp);
    await t.rejects(w.replica.removeBackup(stamp), { code: 'HELD' });

    await w.restart();
    w.source.onPack = () => null;
    await w.sync();
    t.equal(fs.readdirSync(w.backups).length, 1, 'also after a restart');

    w.source.onPack = null;
    w.source.counts.ordinals = 0;
    await until(() => w.replica.status().state === 'idle');
    t.same(picture(w.live), picture(w.source.root));
    t.same(await indexFaults(w), []);
    t.equal(w.replica.status().generation, '2-2');
    t.equal(w.source.counts.ordinals, 2, 'pulled: the new file and the one that was changed here');
    const backups = await w.replica.backups();
    t.equal(backups.length, 1);
    t.equal(fs.readFileSync(path.join(w.backups, stamp, 'written-here'), 'utf8'), 'unreplicated');
    t.equal(fs.readFileSync(path.join(w.backups, stamp, 'f1'), 'utf8'), 'changed here');
    t.ok((backups[0]?.bytes ?? 0) > 2_000_000);
    t.equal(backups[0]?.entries, 12);

    // and then it is a replica like any other
    put(w.source.root, 'more', 'x');
    await w.source.seal();
    w.source.counts.differences = 0;
    await w.sync();
    t.equal(w.source.counts.differences, 1);
    t.same(picture(w.live), picture(w.source.root));
    await w.replica.removeBackup(stamp);
    t.same(await w.replica.backups(), []);
    await t.rejects(w.replica.removeBackup(stamp), { code: 'NOT_FOUND' });
    await t.rejects(w.replica.removeBackup('../../../games'), { code: 'NOT_FOUND' });
  },
);

t.test(
  'A24: a replica whose generation is not on the line of the source is restored, not patched over',
  async (t) => {
    const w = await world();
    t.teardown(() => w.close());
    put(w.source.root, 'f', '1');
    await w.source.seal();
    put(w.source.root, 'f', 'sealed by the old writer, not taken over');
    await w.source.seal();
    await w.sync();
    t.equal(w.replica.status().generation, '1-2');
    // epoch 2 went on from 1-1
    w.source.states.pop();
    w.source.promote(2);
    put(w.source.root, 'f', 'of epoch 2');
    await w.source.seal();
    await w.sync();
    t.equal(w.replica.status().generation, '2-2');
    t.same(picture(w.live), picture(w.source.root));
    t.same(
      w.store.generations(10).map((g) => `${g.epoch}-${g.seq}`),
      ['2-2'],
    );
    const [backup] = await w.replica.backups();
    t.equal(
      fs.readFileSync(path.join(w.backups, String(backup?.stamp), 'f'), 'utf8'),
      'sealed by the old writer, not taken over',
    );
  },
);

t.test('a replica that lags behind a promotion on its own line takes a difference', async (t) => {
  const w = await world();
  t.teardown(() => w.close());
  put(w.source.root, 'f', '1');
  await w.source.seal();
  await w.sync();
  put(w.source.root, 'f', '2');
  await w.source.seal();
  w.source.promote(4);
  put(w.source.root, 'g', '3');
  await w.source.seal();
  await w.sync();
  t.equal(w.replica.status().generation, '4-3');
  t.equal(w.source.counts.differences, 1);
  t.same(await w.replica.backups(), []);
  t.same(w.replica.lineage(), [
    [1, 1],
    [4, 3],
  ]);
});

t.test('an empty returning node makes no backup', async (t) => {
  const w = await world();
  t.teardown(() => w.close());
  put(w.source.root, 'f', '1');
  await w.source.seal();
  await w.store.transaction(() => w.store.setMeta('demoted', { epoch: 1 }));
  fs.mkdirSync(w.live, { recursive: true });
  await w.sync();
  t.equal(w.replica.status().state, 'idle');
  t.same(await w.replica.backups(), []);
});

t.test('A22: a crash around the move to the backups makes no second one', async (t) => {
  for (const at of ['replica.aside.noted', 'replica.aside.renamed', 'replica.aside.moved']) {
    const folder = fs.mkdtempSync(path.join(os.tmpdir(), 'sv-aside-'));
    const first = await world({ folder });
    put(first.source.root, 'f', '1');
    await first.source.seal();
    await first.sync();
    put(first.live, 'mine', 'unreplicated');
    await first.store.transaction(() => first.store.setMeta('demoted', { epoch: 1 }));
    await first.replica.stop();
    first.store.close();
    const died = diesAt(at, folder);
    t.equal(died.signal, 'SIGKILL', `${at} ${died.stderr}`);
    const w = await world({ folder });
    t.equal(w.replica.generation(), null);
    await w.source.seal();
    w.source.promote(2);
    await w.source.seal();
    await w.sync();
    t.equal(w.replica.status().state, 'idle');
    t.same(picture(w.live), picture(w.source.root));
    const backups = await w.replica.backups();
    t.equal(backups.length, 1);
    t.equal(fs.readFileSync(path.join(w.backups, String(backups[0]?.stamp), 'mine'), 'utf8'), 'unreplicated');
    await settled(w.replica);
    await w.close();
  }
});
