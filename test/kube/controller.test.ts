/** The controller on a real API server with played agents: what a claim gets, moves, failures, bad input, bad agents. */
import http from 'node:http';
import tap from 'tap';
import { CLAIMS, CLUSTER_SIMPLE_VOLUMES, NODES, PODS, VOLUMES } from '../../controller/cluster/index.ts';
import { PREFIX } from '../../controller/plan/types.ts';
import { noKube } from './harness/programs.ts';
import { TestCluster, until } from './test-cluster.ts';

const FAILOVER = {
  'failover-enabled': 'true',
  'failover-grace-period': '1s',
  'failover-max-staleness': '1m',
  'replication-debounce': '1s',
};

function post(url: string, body?: object): Promise<{ status: number; body: Record<string, string> }> {
  return new Promise((resolve, reject) => {
    const request = http.request(url, { method: body ? 'POST' : 'GET', agent: false }, (response) => {
      let text = '';
      response.on('data', (part: Buffer) => {
        text += part;
      });
      response.on('end', () => resolve({ status: response.statusCode ?? 0, body: JSON.parse(text) }));
    });
    request.on('error', reject);
    request.end(body ? JSON.stringify(body) : '');
  });
}

tap.test('the controller', { skip: noKube(), timeout: 60_000 }, async (t) => {
  const cluster = await TestCluster.start({ nodes: ['a', 'b', 'c'] });
  const controller = await cluster.controller('one', {
    trigger: { guard: 'proxy', host: '127.0.0.1', port: 0 },
    health: { host: '127.0.0.1', port: 0 },
    sweepMs: { first: 500, every: 1500 },
  });
  t.teardown(async () => {
    await controller.stop();
    await cluster.stop();
  });
  const { kube, agents } = cluster;
  const label = (claim: string, what: string): string => `${PREFIX}default.${claim}-${what}`;
  const labelled = async (claim: string, what: string): Promise<string[]> => {
    const names: string[] = [];
    for await (const node of kube.list(NODES))
      if (node.metadata.labels?.[label(claim, what)] !== undefined) names.push(node.metadata.name);
    return names.sort();
  };

  await t.test(
    'a claim of the class gets a SimpleVolume, a watch with its policy, labels and a mirror',
    async (t) => {
      await cluster.claim('saves', {
        ...FAILOVER,
        'replication-include-paths': 'saves/**,server.json',
        'replication-confirmed-replicas': '2',
      });
      await cluster.workload('saves', 'a');
      const object = await cluster.settled('saves');
      t.match(object, {
        metadata: { finalizers: ['simple-volume.shipstuff.io/cleanup'] },
        spec: { claimName: 'saves', volumeName: 'pv-saves', pool: 'default' },
        status: { activeNode: 'a', epoch: 1 },
      });
      const start = agents.calls('/watch/start', 'a').at(-1)?.body;
      t.match(start, {
        namespace: 'default',
        volume: 'pv-saves',
        epoch: 1,
        includePaths: ['saves/**', 'server.json'],
        confirmedReplicas: 2,
        debounce: '1s',
      });
      t.strictSame(((start?.targets ?? []) as { node: string }[]).map((one) => one.node).sort(), ['b', 'c']);
      t.equal(agents.calls('/watch/start', 'b').length + agents.calls('/watch/start', 'c').length, 0);
      t.strictSame(await labelled('saves', 'role'), ['a']);
      await until(
        'candidates are labelled',
        async () => (await labelled('saves', 'candidate')).join() === 'a,b,c',
      );
      t.match(await kube.get(CLUSTER_SIMPLE_VOLUMES, { name: 'pv-saves' }), {
        spec: { pool: 'default', claimRef: { namespace: 'default', name: 'saves' } },
        status: { activeNode: 'a', epoch: 1 },
      });
      t.match((await kube.get(VOLUMES, { name: 'pv-saves' })).metadata.annotations, {
        [`${PREFIX}active-node`]: 'a',
      });
    },
  );

  await t.test('a node whose pool is full gets no copy, one that has room does (B14)', async (t) => {
    const roomy = agents.agent('b').space;
    agents.agent('b').space = { freeBytes: 1000, totalBytes: roomy.totalBytes };
    await new Promise((resolve) => setTimeout(resolve, 700));
    await cluster.claim('roomy', FAILOVER);
    await cluster.workload('roomy', 'a');
    const { status } = await cluster.settled('roomy', 1);
    t.strictSame(status?.promotable?.nodes, ['c']);
    agents.agent('b').space = roomy;
    await cluster.settled('roomy', 2);
    await cluster.end('roomy');
  });

  await t.test('at rest nothing is written or read, and agents are told nothing again (H4)', async (t) => {
    await new Promise((resolve) => setTimeout(resolve, 1500));
    const [calls, requests] = [agents.seen.length, controller.kube.counters.requests];
    await new Promise((resolve) => setTimeout(resolve, 3000));
    t.strictSame(
      agents.seen.slice(calls).map((one) => one.path),
      [],
    );
    // The own lease is renewed about twice a second here.
    t.ok(controller.kube.counters.requests - requests < 12, 'only the Lease');
  });

  await t.test(
    'a bad annotation: Event and condition quote it, the last good policy stays, others go on (D41)',
    async (t) => {
      const watches = agents.calls('/watch/start').length;
      await kube.merge(
        CLAIMS,
        { namespace: 'default', name: 'saves' },
        { metadata: { annotations: { [`${PREFIX}replication-debounce`]: '1e9h' } } },
      );
      const object = await cluster.waitFor('saves', 'says that its policy is bad', ({ status }) =>
        status?.conditions?.some((one) => one.type === 'PolicyValid' && one.status === 'False'),
      );
      t.match(object.status?.conditions?.find((one) => one.type === 'PolicyValid')?.message, '1e9h');
      t.equal(object.spec.policy?.debounce, '1s');
      await until('an Event quotes it', async () =>
        (await cluster.events('saves')).some((one) => one.type === 'Warning' && one.message.includes('1e9h')),
      );
      t.equal(agents.calls('/watch/start').length, watches, 'the watch goes on as it was');
      await cluster.claim('other', {}, { node: 'b' });
      await cluster.workload('other', 'b');
      await cluster.settled('other');
      await kube.merge(
        CLAIMS,
        { namespace: 'default', name: 'saves' },
        { metadata: { annotations: { [`${PREFIX}replication-debounce`]: '1s' } } },
      );
      await cluster.waitFor('saves', 'is good again', ({ status }) =>
        status?.conditions?.some((one) => one.type === 'PolicyValid' && one.status === 'True'),
      );
    },
  );

  await t.test(
    'a manual full sync runs on every replica, and how it ended survives a restart (I2)',
    async (t) => {
      const url = controller.triggerUrl as string;
      const body = { namespace: 'default', claimName: 'saves' };
      for (const node of ['b', 'c']) agents.agent(node).fullSyncMs = 400;
      const started = await post(`${url}/replication/full-sync/trigger?namespace=default`, body);
      t.equal(started.status, 202);
      t.equal(started.body.started, true);
      const run = `${url}/replication/full-sync/runs/${started.body.id}?namespace=default`;
      const again = await post(`${url}/replication/full-sync/trigger?namespace=default`, body);
      t.strictSame(again.body, { started: false, reason: 'already-running', id: started.body.id });
      const ended = await until('it ends', async () => {
        const answer = await post(run);
        return answer.body.state === 'ended' ? answer : null;
      });
      t.equal(ended.body.outcome, 'Succeeded', JSON.stringify(ended.body));
      t.strictSame(
        agents
          .calls('/replication/full-sync')
          .filter((one) => one.method === 'POST')
          .map((one) => one.node)
          .sort(),
        ['b', 'c'],
      );
      const object = await cluster.object('saves');
      t.equal(object?.status?.lastFullSync?.id, started.body.id, 'it is in the cluster, not in this process');
    },
  );

  await t.test(
    'a cordon is a planned move: last flush, confirmation, then the promotion; nothing is lost (B6)',
    async (t) => {
      await cluster.claim('moved', FAILOVER, { node: 'b' });
      await cluster.workload('moved', 'b');
      await cluster.settled('moved');
      await cluster.cordon('b', true);
      const object = await cluster.waitFor('moved', 'is elsewhere', ({ status }) => status?.epoch === 2);
      t.match(object.status?.promotion, { from: 'b', planned: true, epoch: 2 });
      await cluster.waitFor('moved', 'is done', ({ status }) =>
        status?.promotion?.done.includes('startWatch'),
      );
      const to = object.status?.activeNode as string;
      const calls = agents.seen
        .filter((one) => one.body.volume === 'pv-moved')
        .map((one) => `${one.path} ${one.node}`);
      const given = calls.lastIndexOf('/replication/fence/release b');
      const flushed = calls.lastIndexOf('/replication/prepare b');
      const begun = calls.indexOf(`/replication/watch/start ${to}`);
      t.ok(calls.indexOf('/replication/prepare b') < given, 'first flush while the workload runs');
      t.ok(
        given < flushed && flushed < begun,
        `lease given back, last flush, then the new node: ${calls.join(' ')}`,
      );
      t.equal(await kube.find(PODS, { namespace: 'default', name: 'moved-0' }), null);
      await cluster.cordon('b', false);
    },
  );

  await t.test(
    'a lost node: the volume fails over, everything follows, the dead pod goes (B4, D33)',
    async (t) => {
      await cluster.lose('a');
      const object = await cluster.waitFor('saves', 'has failed over', ({ status }) => status?.epoch === 2);
      const to = object.status?.activeNode as string;
      t.ok(['b', 'c'].includes(to));
      t.match(object.status?.promotion, { from: 'a', to, planned: false });
      t.equal(object.status?.previousActiveNode, 'a');
      await cluster.waitFor('saves', 'is done', ({ status }) => status?.promotion?.done.length === 7);
      const copy = agents.agent(to).volume('default/pv-saves');
      t.match(copy, { role: 'active', epoch: 2 });
      t.strictSame(await labelled('saves', 'role'), [to]);
      t.equal(
        await kube.find(PODS, { namespace: 'default', name: 'saves-0' }),
        null,
        'the pod of the dead node is gone',
      );
      t.match((await kube.get(VOLUMES, { name: 'pv-saves' })).metadata.annotations, {
        [`${PREFIX}active-node`]: to,
        [`${PREFIX}previous-active-node`]: 'a',
      });
      t.match((await kube.get(CLAIMS, { namespace: 'default', name: 'saves' })).metadata.annotations, {
        [`${PREFIX}active-node`]: to,
      });
      await until('an Event tells it', async () =>
        (await cluster.events('saves')).some((one) => /epoch 2/.test(one.message)),
      );
    },
  );

  await t.test('with a lease a silent agent is enough: Kubernetes still calls the node Ready', async (t) => {
    await cluster.claim('silent', FAILOVER, { node: 'c' });
    await cluster.workload('silent', 'c');
    await cluster.settled('silent', 1);
    agents.agent('c').set('away');
    await cluster.waitFor('silent', 'has failed over', ({ status }) => status?.epoch === 2, 40_000);
    const node = await kube.get(NODES, { name: 'c' });
    t.equal(node.status?.conditions?.find((one) => one.type === 'Ready')?.status, 'True');
    await until(
      'its pod is taken off',
      async () => (await kube.find(PODS, { namespace: 'default', name: 'silent-0' })) === null,
    );
    agents.agent('c').set('answers');
    await until('it is a replica', () => agents.agent('c').volume('default/pv-silent')?.role === 'replica');
  });

  await t.test('the node that comes back is a replica and is not promoted back (B5, D34)', async (t) => {
    await cluster.back('a');
    await until(
      'its old watch is over',
      () => agents.agent('a').volume('default/pv-saves')?.role === 'replica',
    );
    await new Promise((resolve) => setTimeout(resolve, 1000));
    const object = await cluster.object('saves');
    t.equal(object?.status?.epoch, 2);
    t.not(object?.status?.activeNode, 'a');
  });

  await t.test(
    'replication that is switched off: no watch, no labels; a deleted claim leaves nothing (B13, H6)',
    async (t) => {
      await kube.merge(
        CLAIMS,
        { namespace: 'default', name: 'other' },
        { metadata: { annotations: { [`${PREFIX}replication-enabled`]: 'false' } } },
      );
      const active = (await cluster.object('other'))?.status?.activeNode as string;
      await until(
        'the watch is stopped',
        () => agents.agent(active).volume('default/pv-other')?.state === 'stopped',
      );
      await until('candidates are gone', async () => (await labelled('other', 'candidate')).length === 0);
      await cluster.end('other');
      await cluster.server.kubectl([
        ...['patch', 'pvc', 'other', '--type=merge', '-p', '{"metadata":{"finalizers":null}}'],
      ]);
      await kube.delete(CLAIMS, { namespace: 'default', name: 'other' });
      await cluster.server.kubectl([
        ...['patch', 'pv', 'pv-other', '--type=merge', '-p', '{"metadata":{"finalizers":null}}'],
      ]);
      await kube.delete(VOLUMES, { name: 'pv-other' });
      await until('the SimpleVolume is gone', async () => (await cluster.object('other')) === null);
      t.strictSame(await labelled('other', 'role'), []);
    },
  );

  await t.test('labels of volumes that nobody knows are swept, all others stay (H6)', async (t) => {
    const stays = {
      'example.org/gone-role': 'active',
      [`${PREFIX}pool.other`]: 'true',
      [`${PREFIX}default.gone-size`]: 'large',
    };
    await kube.merge(
      NODES,
      { name: 'c' },
      {
        metadata: {
          labels: { ...stays, [label('gone', 'role')]: 'active', [label('gone', 'candidate')]: 'true' },
        },
      },
    );
    const before = await labelled('saves', 'candidate');
    await until('they are gone', async () => (await labelled('gone', 'candidate')).length === 0);
    t.strictSame(await labelled('gone', 'role'), []);
    t.match((await kube.get(NODES, { name: 'c' })).metadata.labels, stays);
    t.strictSame(await labelled('saves', 'candidate'), before);
  });

  await t.test('a copy that is not wanted any more is removed from its node, late', async (t) => {
    await cluster.claim('fewer', FAILOVER, { node: 'b' });
    await cluster.workload('fewer', 'b');
    await cluster.settled('fewer');
    await kube.merge(
      CLAIMS,
      { namespace: 'default', name: 'fewer' },
      { metadata: { annotations: { [`${PREFIX}replication-replicas`]: '1' } } },
    );
    const { status } = await cluster.settled('fewer', 1);
    const out = status?.promotable?.nodes[0] === 'a' ? 'c' : 'a';
    const copy = agents.agent(out).volume('default/pv-fewer');
    t.ok(copy, 'its data is still there');
    t.equal(agents.calls('/volume/remove').length, 0);
    (copy as NonNullable<typeof copy>).freshAt = performance.now() - 700_000;
    await until('it is gone', () => agents.agent(out).volume('default/pv-fewer') === undefined, 40_000);
    t.match(agents.calls('/volume/remove'), [{ node: out, body: { volume: 'pv-fewer', epoch: 1 } }]);
    await until('an Event tells it', async () =>
      (await cluster.events('fewer')).some((one) => /not wanted any more/.test(one.message)),
    );
  });

  await t.test('health and metrics', async (t) => {
    const url = controller.healthUrl as string;
    t.equal((await post(`${url}/healthz`)).status, 200);
    t.equal((await post(`${url}/readyz`)).status, 200);
    const text = await (await fetch(`${url}/metrics`)).text();
    t.match(text, /simple_volume_controller_leads 1/);
    t.match(text, /simple_volume_controller_volume_phase\{namespace="default",claim="saves",phase="\w+"\} 1/);
    t.match(text, /simple_volume_controller_promotions_total\{kind="planned"\} [12]/);
  });
});
