/** Removing a volume's data from a node: a copy that is not wanted any more, and a volume that is deleted (D40, G8, I8). */
import { execFileSync } from 'node:child_process';
import fs from 'node:fs';
import path from 'node:path';
import t from 'tap';
import { AgentSocket } from '../../csi/freeze/agent-client.ts';
import { freePorts, LocalAgent, LocalCluster, waitFor } from '../../lib/local/cluster.ts';
import { native } from '../../lib/native/load.ts';
import { openVolumeStore } from '../../lib/store/volume-store.ts';
import { differences, fill, refusal, replica, syncBody } from './support.ts';

t.setTimeout(180_000);
const cluster = await LocalCluster.start({ nodes: ['a', 'b', 'c'], prefix: 'sv-remove-' });
t.teardown(() => cluster.stop());
const a = cluster.agent('a');
const b = cluster.agent('b');
const c = cluster.agent('c');
const named = (volume: string) => ({ namespace: 'remove', volume });
const remove = (agent: typeof a, body: object) =>
  agent.call<{ removed: boolean }>('POST', '/replication/volume/remove', body);
const FOLDERS = ['', '.simple-volume-shadows', '.simple-volume-incoming', '.simple-volume-backups'];
/** All that is left of a volume on a node, by folder. */
const left = (agent: typeof a, { namespace, volume }: ReturnType<typeof named>): string[] =>
  [...FOLDERS, '.simple-volume-state/volumes'].filter((folder) =>
    fs.existsSync(path.join(agent.pool, folder, namespace, volume)),
  );
const trash = (agent: typeof a) => fs.readdirSync(path.join(agent.pool, '.simple-volume-trash'));

async function replicated(volume: ReturnType<typeof named>, targets = ['b', 'c']): Promise<void> {
  fill(a.live(volume), 20, 1000);
  await cluster.watch('a', volume, { targets, debounce: '50ms', epoch: 3 });
  await cluster.settle('a', volume);
}

t.test('a copy that is not wanted any more goes whole, and nothing else with it (D40)', async (t) => {
  const [one, other] = [named('one'), named('one-more')];
  await replicated(one);
  await replicated(other);
  await cluster.watch('a', one, { targets: ['c'], debounce: '50ms', epoch: 3 });
  t.same(await remove(b, { ...one, epoch: 3 }), { removed: true });
  t.same(left(b, one), []);
  t.equal(await b.status(one), null);
  await waitFor('the trash is empty', () => trash(b).length === 0);
  t.same(await differences(cluster, one, 'a', 'c'), [], 'the other copy');
  t.same(await differences(cluster, other, 'a', 'b'), [], 'the volume whose name begins the same');
  t.same(await remove(b, { ...one, epoch: 3 }), { removed: false }, 'again: nothing to do, no error');
  t.same(await remove(b, { ...named('never-seen'), epoch: 1 }), { removed: false });
  await b.end('SIGTERM');
  await b.start();
  t.equal(await b.status(one), null, 'nor does it come back with a restart');
  await cluster.watch('a', one, { targets: ['b', 'c'], debounce: '50ms', epoch: 3 });
  await cluster.settle('a', one);
  t.same(await differences(cluster, one, 'a', 'b'), [], 'wanted again, it is made anew');
});

t.test('what must stay is refused: an active node, a newer epoch, a tree in use', async (t) => {
  const volume = named('kept');
  await replicated(volume);
  const no = async (agent: typeof a, body: object, code: string) => {
    const refused = await refusal(remove(agent, { ...volume, epoch: 3, ...body }));
    t.equal(refused.code, code);
    return refused;
  };
  await no(a, {}, 'VOLUME_ACTIVE');
  await no(a, { evenActive: true }, 'VOLUME_ACTIVE');
  await no(a, { evenActive: true, epoch: 9 }, 'VOLUME_ACTIVE');
  await no(b, { epoch: 2 }, 'EPOCH_OLD');
  // A replica that has consented to be promoted holds what goes on.
  const consent = { ...volume, epoch: 4, term: 1, released: null, insist: false };
  await waitFor(
    'c consents',
    async () => (await c.call<{ consent: boolean }>('POST', '/replication/fence/consent', consent)).consent,
    30_000,
  );
  await no(c, { epoch: 3 }, 'EPOCH_OLD');
  if (process.getuid?.() === 0) {
    const point = path.join(b.pool, '../mounted');
    fs.mkdirSync(point, { recursive: true });
    execFileSync('mount', ['--bind', b.live(volume), point]);
    try {
      // The agent sees the mount where it shares the mounts of this process.
      const refused = await no(b, {}, 'VOLUME_IN_USE');
      t.match(refused.message, /mounted/);
    } finally {
      execFileSync('umount', [point]);
    }
  }
  for (const agent of [a, b, c]) t.ok(left(agent, volume).includes(''), `${agent.node} has its tree`);
  t.equal((await replica(b, volume)).generation, (await replica(c, volume)).generation);
  await cluster.agent('a').call('POST', '/replication/watch/stop', volume);
});

t.test(
  'a deleted volume: the active node’s data goes when its watch is stopped, backups when asked',
  async (t) => {
    const volume = named('deleted');
    await replicated(volume, ['b']);
    const stamp = '2026-01-01T00-00-00Z';
    for (const agent of [a, b]) {
      fs.mkdirSync(path.join(agent.backups(volume), stamp), { recursive: true });
      fs.writeFileSync(path.join(agent.backups(volume), stamp, 'old'), 'kept');
    }
    await a.call('POST', '/replication/watch/stop', { ...volume, epoch: 3 });
    t.equal((await refusal(remove(a, { ...volume, epoch: 3 }))).code, 'VOLUME_ACTIVE', 'not by mistake');
    t.same(await remove(a, { ...volume, epoch: 3, evenActive: true, backups: true }), { removed: true });
    t.same(left(a, volume), []);
    t.same(await remove(b, { ...volume, epoch: 3, evenActive: true }), { removed: true });
    t.same(left(b, volume), ['.simple-volume-backups']);
    const query = `?namespace=${volume.namespace}&volume=${volume.volume}`;
    t.match(await b.call('GET', `/replication/backups${query}`), { backups: [{ stamp }] }, 'still told of');
    await b.call('DELETE', `/replication/backups/${volume.namespace}/${volume.volume}/${stamp}`);
    t.notOk(fs.existsSync(path.join(b.backups(volume), stamp)));
  },
);

t.test('a volume that was never replicated: kept unless the volume is deleted', async (t) => {
  const volume = named('alone');
  fill(a.live(volume), 3, 10);
  t.same(await remove(a, { ...volume, epoch: 1 }), { removed: false });
  t.ok(fs.existsSync(a.live(volume)));
  t.same(await remove(a, { ...volume, epoch: 1, evenActive: true }), { removed: true });
  t.notOk(fs.existsSync(a.live(volume)));
});

t.test('what a returning node wrote last is not removed before it is in the backups (A23)', async (t) => {
  const volume = named('returning');
  await replicated(volume, ['b']);
  fs.writeFileSync(path.join(a.live(volume), 'last'), 'never replicated');
  // It steps down for a source that cannot be reached, so nothing is moved aside or restored yet.
  const [nowhere] = await freePorts(1);
  const dead = `http://127.0.0.1:${nowhere}`;
  const body = {
    ...syncBody(c, volume, 4, '4-1'),
    source: { node: 'c', url: dead, webdavUrl: dead, token: c.token },
  };
  await a.call('POST', '/replication/sync-batch', body);
  const refused = await refusal(remove(a, { ...volume, epoch: 4 }));
  t.equal(refused.code, 'HELD');
  t.match(refused.message, /not in the backups yet/);
  t.equal(fs.readFileSync(path.join(a.live(volume), 'last'), 'utf8'), 'never replicated');
  t.same(
    await remove(a, { ...volume, epoch: 4, evenActive: true }),
    { removed: true },
    'unless the volume is deleted',
  );
});

t.test('what csi-node has published is not removed', async (t) => {
  const volume = named('published');
  const [http, webdav] = (await freePorts(2)) as [number, number];
  const socket = path.join(cluster.folder, 'd.sock');
  const own = new LocalAgent({
    node: 'd',
    folder: cluster.folder,
    httpPort: http,
    webdavPort: webdav,
    token: 'token-of-the-fourth-agent',
    flags: ['--socket', socket],
  });
  t.teardown(() => own.stop());
  await own.start();
  fill(own.live(volume), 3, 10);
  const csi = new AgentSocket(socket);
  const says = (writers: object[]) =>
    csi.report({
      at: native.bootMs(),
      writers: writers as never,
      freezer: { possible: true, reason: '', cgroup: 'v2' },
    });
  const body = { ...volume, epoch: 1, evenActive: true };
  await says([volume]);
  t.match(await refusal(remove(own, body)), { code: 'VOLUME_IN_USE', message: /published by csi-node/ });
  await own.call('POST', '/replication/watch/start', { ...volume, targets: [], epoch: 1 });
  await own.call('POST', '/replication/watch/stop', volume);
  t.match(await refusal(remove(own, body)), { code: 'VOLUME_IN_USE' });
  t.ok(fs.existsSync(own.live(volume)));
  await says([]);
  t.same(await remove(own, body), { removed: true });
});

t.test('names that lead elsewhere, folders that are links: nothing outside is touched (D40)', async (t) => {
  for (const [field, body] of [
    ['namespace', { namespace: '..', volume: 'x' }],
    ['namespace', { namespace: 'a/b', volume: 'x' }],
    ['namespace', { namespace: '.simple-volume-state', volume: 'volumes' }],
    ['volume', { namespace: 'remove', volume: '..' }],
    ['volume', { namespace: 'remove', volume: '../../etc' }],
    ['volume', { namespace: 'remove', volume: '' }],
    ['volume', { namespace: 'remove', volume: `x${'y'.repeat(253)}` }],
    ['volume', { namespace: 'remove', volume: 'a\u0000b' }],
    ['epoch', { namespace: 'remove', volume: 'x', epoch: 0 }],
    ['epoch', { namespace: 'remove', volume: 'x', epoch: '1' }],
    ['evenActive', { namespace: 'remove', volume: 'x', evenActive: 'yes' }],
    ['force', { namespace: 'remove', volume: 'x', force: true }],
  ] as const) {
    const no = await refusal(remove(b, { epoch: 1, evenActive: true, ...body }));
    t.equal(no.code, 'FIELD_INVALID', JSON.stringify(body).slice(0, 60));
    t.match(no.message, field);
  }
  const outside = path.join(cluster.folder, 'outside');
  fill(path.join(outside, 'precious'), 3, 10);
  fs.symlinkSync(outside, path.join(b.pool, 'linked'));
  const no = await refusal(
    remove(b, { namespace: 'linked', volume: 'precious', epoch: 1, evenActive: true }),
  );
  t.equal(no.code, 'HELD');
  fs.symlinkSync(path.join(outside, 'precious'), path.join(b.pool, 'remove', 'link'));
  await remove(b, { ...named('link'), epoch: 1, evenActive: true });
  await waitFor('the trash is empty', () => trash(b).length === 0);
  t.equal(fs.readdirSync(path.join(outside, 'precious'), { recursive: true }).length, 6, 'all is there');
});

t.test(
  'a removal that was cut off is finished at the next start, and what was pulled meanwhile too',
  async (t) => {
    const volume = named('cut-off');
    await replicated(volume, ['b']);
    await b.end('SIGKILL');
    const state = path.join(b.pool, '.simple-volume-state/volumes', volume.namespace, volume.volume);
    const store = openVolumeStore(state, volume.namespace, volume.volume, {
      syncFile: (file) => native.syncFile(file),
    });
    await store.transaction(() => store.setMeta('removing', { backups: true }));
    await store.durable();
    store.close();
    fs.mkdirSync(path.join(b.pool, '.simple-volume-trash/half-deleted/d'), { recursive: true });
    await b.start();
    t.same(left(b, volume), []);
    await waitFor('the trash is empty', () => trash(b).length === 0);
  },
);

t.test('removed in the middle of a pull: the pull ends, nothing of it stays', async (t) => {
  const volume = named('pulling');
  fill(a.live(volume), 200, 20_000);
  await cluster.watch('a', volume, { targets: [], debounce: '50ms', epoch: 1 });
  await a.call('POST', '/replication/prepare', { ...volume, confirm: 0 });
  const { generation } = (await a.status(volume)) as { generation: string };
  await c.call('POST', '/replication/sync-batch', syncBody(a, volume, 1, generation));
  t.same(await remove(c, { ...volume, epoch: 1 }), { removed: true });
  t.same(left(c, volume), []);
  await waitFor('the trash is empty', () => trash(c).length === 0);
  t.equal(await c.status(volume), null);
});
