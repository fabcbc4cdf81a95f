/**
 * The controller with a ServiceAccount that may do what chart/files says and nothing else: nothing that it does is
 * refused, and nothing that it may do is never done.
 */
import { readFileSync, writeFileSync } from 'node:fs';
import https from 'node:https';
import path from 'node:path';
import tap from 'tap';
import { FENCE_LEASE_KEY } from '../../controller/act/fence.ts';
import {
  CLAIMS,
  CLUSTER_SIMPLE_VOLUMES,
  EVENTS,
  LEASES,
  PODS,
  REPLICA_SETS,
  referenceTo,
  STATEFUL_SETS,
  VOLUMES,
} from '../../controller/cluster/index.ts';
import type { KubeObject, Resource } from '../../controller/cluster/types.ts';
import { Controller, type ControllerOptions } from '../../controller/controller.ts';
import { PREFIX } from '../../controller/plan/types.ts';
import { RequestProxy } from './harness/fault-proxy.ts';
import { noKube } from './harness/programs.ts';
import { LEASE, SYSTEM, TestCluster, until } from './test-cluster.ts';

const FILES = path.join(import.meta.dirname, '../../chart/files');
const indented = (file: string): string => readFileSync(path.join(FILES, file), 'utf8').replace(/^/gm, '  ');

interface Role extends KubeObject {
  rules: { apiGroups: string[]; resources: string[]; verbs: string[]; resourceNames?: string[] }[];
}
const role = (plural: string, kind: string, namespaced: boolean): Resource<Role> => ({
  group: 'rbac.authorization.k8s.io',
  version: 'v1',
  plural,
  kind,
  namespaced,
});

/** `verb group/resource[/subresource]` of a request, as RBAC sees it (Kubernetes, "Determine the request verb"). */
export function rightOf(method: string, url: string, watch: boolean): string | null {
  const { pathname } = new URL(url, 'http://x');
  const match =
    /^\/(?:api\/v1|apis\/([^/]+)\/[^/]+)(?:\/namespaces\/[^/]+(?=\/[^/]))?\/([^/]+)(?:\/([^/]+))?(?:\/([^/]+))?$/.exec(
      pathname,
    );
  if (!match) return null;
  const [, group = '', resource, name, sub] = match;
  const verb = watch
    ? 'watch'
    : method === 'GET'
      ? name === undefined
        ? 'list'
        : 'get'
      : { POST: 'create', PUT: 'update', PATCH: 'patch', DELETE: 'delete' }[method];
  return `${verb} ${group}/${resource}${sub === undefined ? '' : `/${sub}`}`;
}

tap.test('with exactly the documented rights', { skip: noKube(), timeout: 120_000 }, async (t) => {
  const cluster = await TestCluster.start({ nodes: ['a', 'b', 'c'] });
  const { kube, server, agents } = cluster;
  const manifest = [
    'ClusterRole controller-cluster-rules',
    'ClusterRole controller-guard-rules',
    'Role controller-namespace-rules',
  ]
    .map((line) => line.split(' ') as [string, string])
    .flatMap(([kind, file]) => {
      const namespace = kind === 'Role' ? `\n  namespace: ${SYSTEM}` : '';
      return [
        `apiVersion: rbac.authorization.k8s.io/v1\nkind: ${kind}\nmetadata:\n  name: ${file}${namespace}\nrules:\n${indented(`${file}.yaml`)}`,
        `apiVersion: rbac.authorization.k8s.io/v1\nkind: ${kind}Binding\nmetadata:\n  name: ${file}${namespace}\nroleRef: {apiGroup: rbac.authorization.k8s.io, kind: ${kind}, name: ${file}}\nsubjects: [{kind: ServiceAccount, name: controller, namespace: ${SYSTEM}}]`,
      ];
    });
  await server.kubectl(['apply', '-f', '-'], {
    input: [
      `apiVersion: v1\nkind: ServiceAccount\nmetadata: {name: controller, namespace: ${SYSTEM}}`,
      ...manifest,
    ].join('\n---\n'),
  });
  const token = (await server.kubectl(['create', 'token', 'controller', '-n', SYSTEM])).trim();
  const proxy = await RequestProxy.start(server.url, server.certificate);
  const kubeconfig = server.writeKubeconfig('controller', { token, url: proxy.url });
  const refused: string[] = [];
  const options = (identity: string, more: Partial<ControllerOptions> = {}): ControllerOptions =>
    cluster.options(identity, { kubeconfig, sweepMs: { first: 300, every: 1000 }, ...more });
  // A shorter lease than this one was granted before: that is written down anew.
  await kube.merge(
    LEASES,
    { namespace: SYSTEM, name: LEASE },
    { metadata: { annotations: { [FENCE_LEASE_KEY]: '2000' } } },
  );
  const { cert, key } = server.certificate;
  const tls = {
    certFile: path.join(server.folder, 'trigger.crt'),
    keyFile: path.join(server.folder, 'trigger.key'),
  };
  writeFileSync(tls.certFile, cert);
  writeFileSync(tls.keyFile, key, { mode: 0o600 });
  let controller: Controller | null = null;
  t.teardown(async () => {
    await controller?.stop();
    await proxy.stop();
    await cluster.stop();
  });
  controller = await Controller.start(
    options('one', { trigger: { guard: 'builtin', host: '127.0.0.1', port: 0, tls } }),
  );
  const noneRefused = (t: { same: (a: unknown, b: unknown, text: string) => unknown }): void => {
    const count = controller?.kube.counters.failed.Forbidden;
    if (count) refused.push(`${count}`);
    t.same(refused, [], 'no call was refused');
  };

  const FAILOVER = {
    'failover-enabled': 'true',
    'failover-grace-period': '1s',
    'failover-max-staleness': '5m',
  };
  await t.test('replicates, syncs by hand, moves, is told of bad values', async (t) => {
    await cluster.claim('saves', FAILOVER);
    await cluster.workload('saves', 'a');
    await cluster.settled('saves');
    const admin = server.token();
    const status = await new Promise((resolve, reject) => {
      const request = https.request(
        `${controller?.triggerUrl}/replication/full-sync/trigger?namespace=default`,
        {
          method: 'POST',
          ca: cert,
          agent: false,
          headers: { authorization: `Bearer ${admin}`, 'content-type': 'application/json' },
        },
        (response) => {
          response.resume();
          resolve(response.statusCode);
        },
      );
      request.on('error', reject);
      request.end(JSON.stringify({ namespace: 'default', claimName: 'saves' }));
    });
    t.equal(status, 202);
    await cluster.waitFor(
      'saves',
      'is synced',
      ({ status }) => status?.lastFullSync?.outcome === 'Succeeded',
    );
    await kube.merge(
      CLAIMS,
      { namespace: 'default', name: 'saves' },
      { metadata: { annotations: { [`${PREFIX}replication-debounce`]: 'abc' } } },
    );
    await until('an Event', async () =>
      (await cluster.events('saves')).some((one) => one.message.includes('abc')),
    );
    // A claim that asks for more gets it: on the nodes that have the volume, in its PersistentVolume and its status.
    const claim = { namespace: 'default', name: 'saves' };
    const bound = { phase: 'Bound', capacity: { storage: '1Gi' }, accessModes: ['ReadWriteOnce'] };
    await kube.merge(CLAIMS, claim, { status: bound }, { subresource: 'status' });
    await kube.merge(CLAIMS, claim, { spec: { resources: { requests: { storage: '1536Mi' } } } });
    await until('the claim has grown', async () => {
      const { status } = await kube.get(CLAIMS, claim);
      return status?.capacity?.storage === '1536Mi';
    });
    t.equal((await kube.get(VOLUMES, { name: 'pv-saves' })).spec?.capacity?.storage, '1536Mi');
    for (const node of ['a', 'b', 'c'])
      t.equal(agents.agents.get(node)?.sizes.get('pv-saves'), 1536 * 2 ** 20, `${node} knows it`);
    t.ok((await cluster.events('saves')).some((one) => one.reason === 'Expanded'));
    // More than there is: said, and nothing changes.
    await kube.merge(CLAIMS, claim, { spec: { resources: { requests: { storage: '900Ti' } } } });
    await until('it is refused', async () =>
      (await cluster.events('saves')).some((one) => one.reason === 'ExpansionFailed'),
    );
    t.equal((await kube.get(VOLUMES, { name: 'pv-saves' })).spec?.capacity?.storage, '1536Mi');
    await cluster.cordon('a', true);
    await cluster.waitFor(
      'saves',
      'has moved',
      ({ status }) => status?.epoch === 2 && status.phase === 'Active',
      30_000,
    );
    await cluster.cordon('a', false);
    noneRefused(t);
  });

  await t.test('a lost node: asks whether the stuck pods are wanted, and acts by it (B9, D33)', async (t) => {
    // Two of sets that want them, two of sets that were scaled down.
    for (const [kind, resource] of [
      ['StatefulSet', STATEFUL_SETS],
      ['ReplicaSet', REPLICA_SETS],
    ] as const)
      for (const replicas of [1, 0]) {
        const name = `${kind.toLowerCase()}-${replicas}`;
        await kube.create(resource, {
          apiVersion: 'apps/v1',
          kind,
          metadata: { name, namespace: 'default' },
          spec: {
            replicas,
            ...(kind === 'StatefulSet' ? { serviceName: 'x' } : {}),
            selector: { matchLabels: { app: name } },
            template: {
              metadata: { labels: { app: name } },
              spec: { containers: [{ name: 'c', image: 'none' }] },
            },
          },
        } as never);
        await cluster.claim(name, FAILOVER, { node: 'c' });
        await cluster.pod(`${name}-0`, name, 'c');
        await kube.merge(
          PODS,
          { namespace: 'default', name: `${name}-0` },
          {
            metadata: {
              // keeps it, as the kubelet that is gone would
              finalizers: ['example.org/kubelet'],
              ownerReferences: [{ apiVersion: 'apps/v1', kind, name, uid: 'w', controller: true }],
            },
          },
        );
        await cluster.settled(name);
      }
    for (const kind of ['statefulset', 'replicaset'])
      for (const replicas of [1, 0])
        await kube.delete(PODS, { namespace: 'default', name: `${kind}-${replicas}-0` });
    await cluster.lose('c');
    for (const kind of ['statefulset', 'replicaset']) {
      await cluster.waitFor(`${kind}-1`, 'has failed over', ({ status }) => status?.epoch === 2, 30_000);
      t.equal((await cluster.object(`${kind}-0`))?.status?.epoch, 1, 'nobody wants it: it stays');
    }
    await new Promise((resolve) => setTimeout(resolve, 2000));
    for (const kind of ['statefulset', 'replicaset'])
      t.equal((await cluster.object(`${kind}-0`))?.status?.epoch, 1, 'later too');
    await cluster.back('c');
    noneRefused(t);
  });

  await t.test('a deleted claim, a restarted controller, the first one of all', async (t) => {
    await kube.merge(CLAIMS, { namespace: 'default', name: 'saves' }, { metadata: { finalizers: null } });
    await cluster.end('saves');
    await kube.delete(CLAIMS, { namespace: 'default', name: 'saves' });
    await kube.merge(VOLUMES, { name: 'pv-saves' }, { metadata: { finalizers: null } });
    await kube.delete(VOLUMES, { name: 'pv-saves' });
    await until('its SimpleVolume is gone', async () => (await cluster.object('saves')) === null);
    const claim = await kube.get(CLAIMS, { namespace: 'default', name: 'statefulset-1' });
    const event = { type: 'Normal', reason: 'Tested', message: 'said again', cause: 'x' } as const;
    const about = { ...referenceTo(CLAIMS, claim) };
    controller?.recorder.event(about, event); // written while it stops
    await controller?.stop();
    // Somebody has edited the mirror meanwhile.
    await kube.merge(
      CLUSTER_SIMPLE_VOLUMES,
      { name: 'pv-statefulset-1' },
      { spec: { claimRef: { uid: 'another' } } },
    );
    noneRefused(t);
    const two = await Controller.start(options('two'));
    controller = two;
    await until('it leads', () => two.fence.ready());
    two.recorder.event(about, event);
    await until('the Event is counted up', async () => {
      for await (const one of kube.list(EVENTS, { namespace: 'default' }))
        if (one.reason === 'Tested') return one.count === 2;
      return false;
    });
    await until(
      'the mirror is right again',
      async () =>
        (await kube.get(CLUSTER_SIMPLE_VOLUMES, { name: 'pv-statefulset-1' })).spec.claimRef?.uid ===
        claim.metadata.uid,
    );
    const first = await Controller.start(options('first', { leaseName: 'another' }));
    await until(
      'its Lease is made',
      async () => (await kube.find(LEASES, { namespace: SYSTEM, name: 'another' })) !== null,
    );
    await first.stop();
    t.notOk(first.kube.counters.failed.Forbidden);
    noneRefused(t);
  });

  await t.test('no more than that is needed', async (t) => {
    const done = new Set(proxy.seen.flatMap((one) => rightOf(one.method, one.path, one.watch) ?? []));
    const granted = new Set<string>();
    for (const name of ['controller-cluster-rules', 'controller-guard-rules'])
      for (const rule of (await kube.get(role('clusterroles', 'ClusterRole', false), { name })).rules)
        add(rule);
    for (const rule of (
      await kube.get(role('roles', 'Role', true), { namespace: SYSTEM, name: 'controller-namespace-rules' })
    ).rules)
      add(rule);
    function add(rule: Role['rules'][number]): void {
      for (const group of rule.apiGroups)
        for (const resource of rule.resources)
          for (const verb of rule.verbs) granted.add(`${verb} ${group}/${resource}`);
    }
    t.strictSame([...granted].filter((one) => !done.has(one)).sort(), [], 'every right was used');
    t.strictSame([...done].filter((one) => !granted.has(one)).sort(), [], 'every use has its right');
    t.notOk(
      [...granted].some((one) => one.includes('*') || one.includes('secrets')),
      'no wildcard, no Secret',
    );
    t.ok(agents.seen.length > 0);
  });
});
