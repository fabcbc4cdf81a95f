/**
 * A claim from its first day to its last on a real API server, with the real controller, real agents and real csi-node
 * processes; the test plays the provisioner, the scheduler and kubelet.
 */
import { existsSync, mkdtempSync, readdirSync, readFileSync, rmSync, writeFileSync } from 'node:fs';
import { tmpdir } from 'node:os';
import path from 'node:path';
import { status } from '@grpc/grpc-js';
import tap from 'tap';
import { CLAIMS, VOLUMES } from '../../controller/cluster/index.ts';
import { DRIVER, PREFIX } from '../../controller/plan/types.ts';
import { freePorts, LocalAgent } from '../../lib/local/cluster.ts';
import {
  type Call,
  callerOf,
  capability,
  inOwnMounts,
  mountsAt,
  noMounts,
  refused,
  TestNode,
} from '../csi/support.ts';
import { noKube } from './harness/programs.ts';
import { TestCluster, until } from './test-cluster.ts';

const why = noKube() || noMounts();
if (!why) await inOwnMounts(import.meta.filename);
const TOKEN = 'agents-token-of-the-csi-test';
const NODES = ['a', 'b'];

tap.test('a claim is made, placed, mounted and deleted', { skip: why, timeout: 120_000 }, async (t) => {
  const folder = mkdtempSync(path.join(tmpdir(), 'sv-kcsi-'));
  const cluster = await TestCluster.start({ nodes: [], leaseMs: 4000 });
  const ports = await freePorts(NODES.length * 2);
  const nodes = new Map(
    NODES.map((node, i) => {
      const agent = new LocalAgent({
        node,
        folder,
        httpPort: ports[i * 2] as number,
        webdavPort: ports[i * 2 + 1] as number,
        token: TOKEN,
        flags: ['--lease', '4s', '--socket', path.join(folder, `${node}.sock`), '--pool-name', 'default'],
      });
      return [node, new TestNode(node, folder, agent, path.join(folder, 'none'))];
    }),
  );
  const node = (name: string): TestNode => nodes.get(name) as TestNode;
  await Promise.all([...nodes.values()].map((one) => one.agent.start()));
  await Promise.all([...nodes.values()].map((one) => one.startCsi()));
  for (const [i, name] of NODES.entries()) {
    await cluster.node(name);
    await cluster.agentPod({
      node: name,
      http: ports[i * 2] as number,
      webdav: ports[i * 2 + 1] as number,
    });
  }
  const endpoint = path.join(folder, 'controller.sock');
  const controller = await cluster.controller('one', { token: () => TOKEN, csiEndpoint: endpoint });
  const { call, close } = callerOf(endpoint, 'csi.v1.Controller');
  t.teardown(async () => {
    close();
    await controller.stop();
    await Promise.all([...nodes.values()].map((one) => one.endCsi('SIGKILL')));
    await Promise.all([...nodes.values()].map((one) => one.agent.end('SIGKILL')));
    await cluster.stop();
    rmSync(folder, { recursive: true, force: true });
  });
  await until('the controller leads and has heard the agents', () =>
    NODES.every((name) => controller.agents.find('default', name) !== null),
  );

  /** What the scheduler and the provisioner do with a claim that waited for its first pod. */
  async function provision(
    claim: string,
    selected: string,
    annotations: Record<string, string>,
  ): Promise<{ id: string; pv: string; context: Record<string, string> }> {
    const pv = `pvc-${claim}`;
    const made = await cluster.kube.create(CLAIMS, {
      apiVersion: 'v1',
      kind: 'PersistentVolumeClaim',
      metadata: {
        name: claim,
        namespace: 'default',
        annotations: {
          ...Object.fromEntries(Object.entries(annotations).map(([key, value]) => [PREFIX + key, value])),
          'volume.kubernetes.io/selected-node': selected,
        },
      },
      spec: {
        storageClassName: 'fast',
        accessModes: ['ReadWriteOnce'],
        resources: { requests: { storage: '1Mi' } },
      },
    } as never);
    const { volume } = (await call('CreateVolume', {
      name: pv,
      capacity_range: { required_bytes: String(2 ** 20) },
      volume_capabilities: [capability()],
      parameters: {
        pool: 'default',
        'csi.storage.k8s.io/pvc/namespace': 'default',
        'csi.storage.k8s.io/pvc/name': claim,
        'csi.storage.k8s.io/pv/name': pv,
      },
    })) as { volume: { volume_id: string; volume_context: Record<string, string> } };
    await cluster.kube.create(VOLUMES, {
      apiVersion: 'v1',
      kind: 'PersistentVolume',
      metadata: { name: pv },
      spec: {
        storageClassName: 'fast',
        capacity: { storage: '1Mi' },
        accessModes: ['ReadWriteOnce'],
        persistentVolumeReclaimPolicy: 'Delete',
        claimRef: { namespace: 'default', name: claim, uid: made.metadata.uid as string },
        csi: { driver: DRIVER, volumeHandle: volume.volume_id, volumeAttributes: volume.volume_context },
      },
    } as never);
    const bound = await cluster.kube.merge(
      CLAIMS,
      { namespace: 'default', name: claim },
      { spec: { volumeName: pv } },
    );
    await cluster.kube.replace(CLAIMS, { ...bound, status: { phase: 'Bound' } } as never, {
      subresource: 'status',
    });
    return { id: volume.volume_id, pv, context: volume.volume_context };
  }
  const publish = async (
    on: string,
    v: { id: string; pv: string; context: Record<string, string> },
    podUid: string,
  ): Promise<string> => {
    const target = node(on).target(podUid, v.pv);
    await node(on).call('NodePublishVolume', {
      volume_id: v.id,
      target_path: target,
      volume_capability: capability(),
      volume_context: v.context,
    });
    return target;
  };
  const POD = '00000000-0000-4000-8000-000000000001';

  for (const [claim, annotations] of [
    ['plain', {}],
    ['copied', { 'replication-enabled': 'true', 'replication-debounce': '200ms' }],
  ] as const)
    await t.test(`${claim}: on the scheduler's node, at once, and nowhere else`, async (t) => {
      const started = performance.now();
      const v = await provision(claim, 'b', annotations);
      t.strictSame(v.context, { pool: 'default', node: 'b' });
      t.strictSame(
        readdirSync(node('a').agent.pool).filter((name) => name === 'default'),
        [],
        'nothing on a',
      );
      const target = await publish('b', v, POD);
      const tookMs = Math.round(performance.now() - started);
      t.ok(tookMs < 5000, `claim to mount in ${tookMs} ms`);
      t.comment(`${claim}: claim to mount ${tookMs} ms`);
      writeFileSync(path.join(target, 'save'), 'the game');
      const object = await cluster.waitFor(claim, 'is placed', (one) => one.status?.epoch === 1);
      t.match(object.status, { epoch: 1, activeNode: 'b' });
      const no = await refused(publish('a', v, POD));
      t.equal(no.code, status.FAILED_PRECONDITION, no.message);

      const used = await refused(call('DeleteVolume', { volume_id: v.id }));
      t.equal(used.code, status.FAILED_PRECONDITION, `the claim is there: ${used.message}`);
      if (claim === 'copied') {
        const copy = path.join(node('a').agent.pool, 'default', v.pv, 'save');
        await until('the copy has it', () => existsSync(copy) && readFileSync(copy, 'utf8') === 'the game');
      }
      await node('b').call('NodeUnpublishVolume', { volume_id: v.id, target_path: target });
      t.equal(mountsAt(target), 0);
      await cluster.kube.delete(CLAIMS, { namespace: 'default', name: claim });
      // The claim has a finalizer that a controller of Kubernetes takes off.
      await cluster.kube
        .merge(CLAIMS, { namespace: 'default', name: claim }, { metadata: { finalizers: null } })
        .catch(() => undefined);
      await until('the volume is deleted', async () => {
        try {
          await (call as Call)('DeleteVolume', { volume_id: v.id });
          return true;
        } catch {
          return false;
        }
      });
      for (const name of NODES)
        t.notOk(existsSync(path.join(node(name).agent.pool, 'default', v.pv)), `nothing is left on ${name}`);
      await cluster.kube.delete(VOLUMES, { name: v.pv });
    });
});
