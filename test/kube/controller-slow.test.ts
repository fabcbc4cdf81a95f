/** The controller when every call to the API server takes its time. */
import tap from 'tap';
import { Controller } from '../../controller/controller.ts';
import { RequestProxy } from './harness/fault-proxy.ts';
import { noKube } from './harness/programs.ts';
import { TestCluster, until } from './test-cluster.ts';

tap.test('an API server that takes 5 s for every call', { skip: noKube(), timeout: 60_000 }, async (t) => {
  const cluster = await TestCluster.start({ nodes: ['a', 'b'] });
  const proxy = await RequestProxy.start(cluster.server.url, cluster.server.certificate);
  const behind = cluster.server.writeKubeconfig('behind', { url: proxy.url });
  const controller = await Controller.start({
    ...cluster.options('one', { electionMs: 30_000, electionRenewMs: 2000 }),
    kubeconfig: behind,
  });
  t.teardown(async () => {
    proxy.fault = () => null;
    await controller.stop();
    await proxy.stop();
    await cluster.stop();
  });
  await until('it leads', () => controller.fence.ready());
  proxy.fault = (request) =>
    request.watch ? null : { delayMs: request.path.includes('/leases/') ? 4000 : 5000 };
  await cluster.claim('slow');
  await cluster.workload('slow', 'a');
  await until(
    'it is watched',
    () => cluster.agents.agent('a').volume('default/pv-slow')?.role === 'active',
    35_000,
  );
  t.ok(controller.election.leads(), 'it still leads');
});
