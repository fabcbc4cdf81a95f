/** Real agents change roles: promotion, fences, the old node's return, a chain of three. */
import fs from 'node:fs';
import path from 'node:path';
import t from 'tap';
import { LocalCluster, waitFor } from '../../lib/local/cluster.ts';
import { compareTrees } from '../../lib/local/tree.ts';
import { native } from '../../lib/native/load.ts';
import { PROMOTING } from '../../lib/replica/replica-volume.ts';
import { openVolumeStore } from '../../lib/store/volume-store.ts';
import { differences, fill, refusal, replica, source, syncBody, tree } from './support.ts';

t.setTimeout(300_000);
const cluster = await LocalCluster.start({ nodes: ['a', 'b', 'c'], prefix: 'sv-roles-' });
t.teardown(() => cluster.stop());
const a = cluster.agent('a');
const b = cluster.agent('b');
const c = cluster.agent('c');
const named = (volume: string): { namespace: string; volume: string } => ({ namespace: 'roles', volume });
const fast = { debounce: '50ms' };

t.test('promotion, fences, and the return of the old node', async (t) => {
  const volume = named('failover');
  const live = a.live(volume);
  fill(live, 30, 3000);
  await cluster.watch('a', volume, { targets: ['b', 'c'], epoch: 1, ...fast });
  const first = await cluster.settle('a', volume);

  await t.test('a watch on a replica needs a new epoch, and the refusal names the field', async (t) => {
    for (const epoch of [{}, { epoch: 1 }]) {
      const no = await refusal(cluster.watch('b', volume, { targets: ['a'], ...epoch, ...fast }));
      t.equal(no.status, 400);
      t.equal(no.code, 'FIELD_INVALID');
      t.match(no.message, /\bepoch\b/);
    }
    t.equal((await replica(b, volume)).generation, first, 'it is a replica as before');
  });

  await t.test('a sync of the active epoch is refused on the active node', async (t) => {
    const no = await refusal(a.call('POST', '/replication/sync-batch', syncBody(b, volume, 1, first)));
    t.equal(no.code, 'VOLUME_ACTIVE');
    const full = await refusal(a.call('POST', '/replication/full-sync', syncBody(b, volume, 1, first)));
    t.equal(full.code, 'VOLUME_ACTIVE');
    t.equal((await source(a, volume)).generation, first);
  });

  // c falls behind, then a dies with something that nobody else has.
  await c.stop();
  fs.writeFileSync(path.join(live, 'only-on-b'), 'b has it, c does not');
  await waitFor('b has it', () => fs.existsSync(path.join(b.live(volume), 'only-on-b')));
  await waitFor('b is idle', async () => (await replica(b, volume)).state === 'idle');
  const second = (await replica(b, volume)).generation as string;
  await a.end('SIGKILL');
  fs.writeFileSync(path.join(live, 'unreplicated'), 'written right before the end');
  fs.writeFileSync(path.join(live, 'd1/f1'), 'changed right before the end');
  const left = await tree(live);
  await c.start();

  await t.test('epoch 2 on a replica is a new line with everything that it held', async (t) => {
    const status = await cluster.watch('b', volume, { targets: ['c', 'a'], epoch: 2, ...fast });
    t.equal(status.role, 'active');
    t.equal(status.epoch, 2);
    fs.writeFileSync(path.join(b.live(volume), 'after'), 'epoch 2');
    const generation = await waitFor('a generation of epoch 2', async () => {
      const now = (await source(b, volume)).generation;
      return now?.startsWith('2-') ? now : null;
    });
    const [, seq] = generation.split('-');
    t.ok(Number(seq) > Number(second.split('-')[1]), `${generation} goes on from ${second}`);
  });

  await t.test('a third replica that was behind continues by difference', async (t) => {
    const newest = (
      await b.call<{ generation: string }>('POST', '/replication/prepare', {
        ...volume,
        confirm: 1,
        timeout: '30s',
      })
    ).generation;
    const status = await cluster.reached('c', volume, newest);
    t.equal(status.lastPull?.full, false);
    t.ok((status.lastPull?.files ?? 99) <= 2, `${status.lastPull?.files} files were pulled`);
    t.same(await differences(cluster, volume, 'b', 'c'), []);
  });

  await t.test('A14: the old epoch is refused everywhere', async (t) => {
    for (const agent of [b, c]) {
      const batch = await refusal(
        agent.call('POST', '/replication/sync-batch', syncBody(a, volume, 1, first)),
      );
      t.equal(batch.code, 'EPOCH_OLD', `sync-batch on ${agent.node}`);
      const full = await refusal(agent.call('POST', '/replication/full-sync', syncBody(a, volume, 1)));
      t.equal(full.code, 'EPOCH_OLD', `full-sync on ${agent.node}`);
      const start = await refusal(cluster.watch(agent.node, volume, { targets: ['a'], epoch: 1, ...fast }));
      t.equal(start.code, 'EPOCH_OLD', `watch/start on ${agent.node}`);
    }
    const confirm = await refusal(
      b.call('POST', '/replication/confirm', {
        ...volume,
        epoch: 1,
        node: 'c',
        generation: '1-999',
        state: 'idle',
      }),
    );
    t.equal(confirm.code, 'EPOCH_OLD', 'confirm');
    const transfer = await refusal(
      b.call('POST', '/replication/transfers', { ...volume, epoch: 1, node: 'c', have: null }),
    );
    t.equal(transfer.code, 'EPOCH_OLD', 'transfer');
    const stop = await refusal(b.call('POST', '/replication/watch/stop', { ...volume, epoch: 1 }));
    t.equal(stop.code, 'EPOCH_OLD', 'watch/stop');
    const beat = await c.call<{ volumes: { epoch: number }[] }>('POST', '/replication/beat', {
      node: 'a',
      volumes: [{ ...volume, epoch: 1, generation: '1-999', complete: true, echo: null }],
    });
    t.equal(beat.volumes[0]?.epoch, 2, 'a beat of it is told the newer epoch');
    t.equal((await replica(c, volume)).wanted?.startsWith('2-'), true, 'and changes nothing');
  });

  await t.test(
    "A22, A23, D34: the old node's tree goes to the backups once, then it is a replica",
    async (t) => {
      await a.start();
      const newest = (await source(b, volume)).generation as string;
      await cluster.reached('a', volume, newest);
      t.same(await differences(cluster, volume, 'b', 'a'), []);
      t.notOk(fs.existsSync(path.join(live, 'unreplicated')));
      const backups = fs.readdirSync(a.backups(volume));
      t.equal(backups.length, 1, 'exactly one backup');
      const kept = await tree(path.join(a.backups(volume), backups[0] as string));
      t.same(compareTrees(left, kept), [], 'it is the tree that the old node left behind, byte for byte');
      const listed = await a.call<{ backups: { stamp: string; entries: number }[] }>(
        'GET',
        `/replication/backups?namespace=${volume.namespace}&volume=${volume.volume}`,
      );
      t.same(
        listed.backups.map((one) => one.stamp),
        backups,
      );

      await a.stop();
      await a.start();
      fs.writeFileSync(path.join(b.live(volume), 'later'), 'and on');
      await cluster.settle('b', volume);
      t.same(await differences(cluster, volume, 'b', 'a'), []);
      t.same(fs.readdirSync(a.backups(volume)), backups, 'still one, after a restart and another generation');

      await a.call('DELETE', `/replication/backups/${volume.namespace}/${volume.volume}/${backups[0]}`);
      t.same(fs.readdirSync(a.backups(volume)), [], 'an operator can remove it');
      t.same(await differences(cluster, volume, 'b', 'a'), []);
    },
  );

  await t.test('role and watch survive a restart of each agent', async (t) => {
    for (const agent of [a, b, c]) {
      await agent.stop();
      await agent.start();
    }
    t.equal((await replica(a, volume)).epoch, 2);
    t.equal((await replica(c, volume)).epoch, 2);
    t.equal((await source(b, volume)).epoch, 2);
    fs.writeFileSync(path.join(b.live(volume), 'after-restart'), 'still watched');
    await cluster.settle('b', volume);
    t.same(await differences(cluster, volume, 'b', 'a'), []);
    t.same(await differences(cluster, volume, 'b', 'c'), []);
  });

  await t.test('prepare with a dead replica ends with TIMEOUT and says how many confirmed', async (t) => {
    await c.stop();
    fs.writeFileSync(path.join(b.live(volume), 'for-two'), 'only one gets it');
    const no = await refusal(
      b.call('POST', '/replication/prepare', { ...volume, confirm: 'all', timeout: '4s' }),
    );
    t.equal(no.status, 504);
    t.equal(no.code, 'TIMEOUT');
    t.match(no.message, /1 of 2 .*\(a\)/);
    await c.start();
    await cluster.settle('b', volume);
    t.same(await differences(cluster, volume, 'b', 'c'), []);
  });
  await b.call('POST', '/replication/watch/stop', volume);
});

t.test('a chain of planned moves over three nodes ends with three equal trees', async (t) => {
  const volume = named('chain');
  const nodes = ['a', 'b', 'c'] as const;
  fill(a.live(volume), 20, 2000);
  let epoch = 1;
  let now: (typeof nodes)[number] = 'a';
  await cluster.watch('a', volume, { targets: ['b', 'c'], epoch, ...fast });
  for (const next of ['b', 'c', 'a', 'c'] as const) {
    await cluster.settle(now, volume);
    await cluster.agent(now).call('POST', '/replication/watch/stop', { ...volume, epoch });
    epoch++;
    await cluster.watch(next, volume, { targets: nodes.filter((node) => node !== next), epoch, ...fast });
    now = next;
    const root = cluster.agent(next).live(volume);
    fs.writeFileSync(path.join(root, `by-${next}-${epoch}`), `epoch ${epoch}`);
    fs.appendFileSync(path.join(root, 'd1/f1'), `${epoch}`);
    fs.rmSync(path.join(root, `d${epoch}`), { recursive: true, force: true });
    await cluster.settle(next, volume);
    for (const other of nodes.filter((node) => node !== next))
      t.same(await differences(cluster, volume, next, other), [], `${next} -> ${other} in epoch ${epoch}`);
  }
});

t.test('a promotion that a crash has cut in two is finished in the same epoch', async (t) => {
  const volume = named('cut-in-two');
  fill(a.live(volume), 10, 1000);
  await cluster.watch('a', volume, { targets: ['b', 'c'], epoch: 1, ...fast });
  const generation = await cluster.settle('a', volume);
  await b.end('SIGKILL');
  // As it is after the copy has noted its new epoch, before the role is.
  const state = path.join(b.pool, '.simple-volume-state/volumes', volume.namespace, volume.volume);
  const store = openVolumeStore(state, volume.namespace, volume.volume, {
    syncFile: (file) => native.syncFile(file),
  });
  await store.transaction(() => {
    store.setMeta('epoch', 2);
    store.setMeta(PROMOTING, 2);
  });
  await store.durable();
  store.close();
  await b.start();
  t.equal((await replica(b, volume)).generation, generation, 'a copy as before');
  const status = await cluster.watch('b', volume, { targets: ['c'], epoch: 2, ...fast });
  t.match(status, { role: 'active', epoch: 2 });
  await waitFor('c has a generation of epoch 2', async () =>
    (await replica(c, volume)).generation?.startsWith('2-'),
  );
  t.same(await differences(cluster, volume, 'b', 'c'), []);
  const again = await refusal(cluster.watch('c', volume, { targets: [], epoch: 2, ...fast }));
  t.equal(again.code, 'FIELD_INVALID', 'of another copy that epoch makes no active node');
});
