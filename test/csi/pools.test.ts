/** A node that has some of the cluster's pools: its csi-node is given the sockets of all of them. */
import { statSync } from 'node:fs';
import path from 'node:path';
import t from 'tap';
import { freePorts, LocalAgent, waitFor } from '../../lib/local/cluster.ts';
import { POOL, TestCsi } from './support.ts';

const key = (pool: string): string => `simple-volume.shipstuff.io/pool.${pool}`;

t.test('kubelet is told of the pools that a node has, and again when another one comes', async (t) => {
  const csi = await TestCsi.start(['a'], { csi: false });
  const a = csi.nodes.get('a');
  if (!a) throw new Error('no node a');
  t.teardown(() => a.endCsi());
  const [health, http, webdav] = (await freePorts(3)) as [number, number, number];
  const fast = path.join(csi.folder, 'fast.sock');
  const probe = async (what: string): Promise<[number, string]> => {
    const reply = await fetch(`http://127.0.0.1:${health}/${what}`);
    return [reply.status, await reply.text()];
  };

  await a.startCsi([a.socket, fast], [`--health=127.0.0.1:${health}`]);
  t.strictSame(await probe('healthz'), [200, 'ok\n']);
  t.strictSame(await probe('readyz'), [503, 'kubelet has not registered the driver yet\n']);
  t.equal((await probe('metrics'))[0], 404);
  const info = await waitFor('registration without the other pool', () => a.register('GetInfo'), 15_000);
  t.match(info, { name: 'simple-volume.csi.shipstuff.io' });
  t.match(await a.call('NodeGetInfo'), { accessible_topology: { segments: { [key(POOL)]: 'true' } } });
  await a.register('NotifyRegistrationStatus', { plugin_registered: true, error: '' });
  t.strictSame(await probe('readyz'), [200, 'ok\n']);

  const socket = path.join(a.registration, 'simple-volume.csi.shipstuff.io-reg.sock');
  const before = statSync(socket).ino;
  const second = new LocalAgent({
    node: 'fast',
    folder: csi.folder,
    httpPort: http,
    webdavPort: webdav,
    token: 'token-of-another-agent',
    flags: ['--node', 'a', '--pool-name', 'fast', '--socket', fast],
  });
  t.teardown(() => second.stop());
  await second.start();
  await waitFor('a new socket for kubelet', () => {
    const now = statSync(socket, { throwIfNoEntry: false });
    return now && now.ino !== before;
  });
  t.strictSame((await a.call('NodeGetInfo')) as object, {
    node_id: 'a',
    max_volumes_per_node: '0',
    accessible_topology: { segments: { [key(POOL)]: 'true', [key('fast')]: 'true' } },
  });

  // Both are known from before, also while an agent is away.
  await second.stop();
  await a.endCsi('SIGKILL');
  await a.startCsi([a.socket, fast]);
  t.match(await a.call('NodeGetInfo'), { accessible_topology: { segments: { [key('fast')]: 'true' } } });
});

t.test('a node without any pool is no failure of the rollout, and kubelet hears nothing of it', async (t) => {
  const csi = await TestCsi.start(['a'], { csi: false });
  const a = csi.nodes.get('a');
  if (!a) throw new Error('no node a');
  t.teardown(() => a.endCsi());
  const [health] = (await freePorts(1)) as [number];
  await a.startCsi([path.join(csi.folder, 'none.sock')], [`--health=127.0.0.1:${health}`]);
  t.equal((await fetch(`http://127.0.0.1:${health}/readyz`)).status, 200);
  await t.rejects(a.call('NodeGetInfo'), /no agent of this node has answered yet/);
  t.throws(() => statSync(path.join(a.registration, 'simple-volume.csi.shipstuff.io-reg.sock')), /ENOENT/);
});
