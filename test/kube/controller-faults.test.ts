/** The controller when the API server or an agent misbehaves: work goes on, and one volume's trouble is its own. */
import tap from 'tap';
import { CLAIMS } from '../../controller/cluster/index.ts';
import { Controller } from '../../controller/controller.ts';
import { PREFIX } from '../../controller/plan/types.ts';
import { type Fault, RequestProxy, type SeenRequest } from './harness/fault-proxy.ts';
import { noKube } from './harness/programs.ts';
import { TestCluster, until } from './test-cluster.ts';

tap.test('the controller and what goes wrong around it', { skip: noKube(), timeout: 60_000 }, async (t) => {
  const cluster = await TestCluster.start({ nodes: ['a', 'b', 'c'] });
  const proxy = await RequestProxy.start(cluster.server.url, cluster.server.certificate);
  const behind = cluster.server.writeKubeconfig('behind', { url: proxy.url });
  const controller = await Controller.start({ ...cluster.options('one'), kubeconfig: behind });
  t.teardown(async () => {
    await controller.stop();
    await proxy.stop();
    await cluster.stop();
  });
  const { agents, kube } = cluster;
  const write = ({ method, path }: SeenRequest): boolean => method !== 'GET' && !path.includes('/leases/');

  await t.test('an agent that hangs delays no other volume (B3, D19)', async (t) => {
    await cluster.claim('first');
    await cluster.workload('first', 'a');
    await cluster.settled('first');
    agents.agent('c').set('hangs');
    await new Promise((resolve) => setTimeout(resolve, 500));
    const started = performance.now();
    for (let i = 1; i <= 10; i++) {
      await cluster.claim(`more-${i}`, {}, { node: 'b' });
      await cluster.workload(`more-${i}`, 'b');
    }
    await until('all are watched', () =>
      Array.from({ length: 10 }, (_, i) => i + 1).every(
        (i) => agents.agent('b').volume(`default/pv-more-${i}`)?.role === 'active',
      ),
    );
    t.ok(performance.now() - started < 12_000, `${Math.round(performance.now() - started)} ms`);
    agents.agent('c').set('answers');
    await cluster.settled('more-10');
  });

  const kinds: [string, (n: number) => Fault | null][] = [
    ['409', (n) => (n % 2 ? { status: 409 } : null)],
    ['429', (n) => (n % 3 === 0 ? { status: 429, headers: { 'retry-after': '1' } } : null)],
    ['500', (n) => (n % 2 ? { status: 500 } : null)],
    ['a lost answer', (n) => (n % 2 ? { cut: 'after' } : null)],
  ];
  for (const [what, fault] of kinds) {
    await t.test(`writes that meet ${what} are repeated until they are done (B15)`, async (t) => {
      let count = 0;
      proxy.fault = (request) => (write(request) ? fault(++count) : null);
      const name = `w${kinds.findIndex((one) => one[0] === what)}`;
      await cluster.claim(name);
      await cluster.workload(name, 'a');
      const object = await cluster.settled(name);
      proxy.fault = () => null;
      t.ok(count > 2);
      t.equal(object.status?.epoch, 1);
      t.equal(agents.agent('a').volume(`default/pv-${name}`)?.role, 'active');
    });
  }

  await t.test('a restarted API server: changes of the time in between are seen (D46)', async (t) => {
    await cluster.server.restart();
    await kube.merge(
      CLAIMS,
      { namespace: 'default', name: 'first' },
      { metadata: { annotations: { [`${PREFIX}replication-debounce`]: '7s' } } },
    );
    await until('the new policy is told', () =>
      agents
        .calls('/watch/start', 'a')
        .some((one) => one.body.volume === 'pv-first' && one.body.debounce === '7s'),
    );
    t.pass();
  });
});
