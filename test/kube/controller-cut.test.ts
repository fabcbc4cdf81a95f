/** The links between controller, active node and copies, cut one at a time: who moves, and who may not. */
import tap from 'tap';
import { noKube } from './harness/programs.ts';
import { TestCluster } from './test-cluster.ts';

tap.test('the controller alone is cut off', { skip: noKube(), timeout: 90_000 }, async (t) => {
  const cluster = await TestCluster.start({ nodes: ['a', 'b', 'c'] });
  const controller = await cluster.controller();
  t.teardown(async () => {
    await controller.stop();
    await cluster.stop();
  });
  const { agents } = cluster;
  await cluster.claim('heard', {
    'failover-enabled': 'true',
    'failover-grace-period': '1s',
    'failover-max-staleness': '5m',
  });
  await cluster.workload('heard', 'a');
  await cluster.settled('heard');

  await t.test(
    'from the active node, which its copies hear: nothing moves, its writer runs on (D32)',
    async (t) => {
      agents.agent('a').deaf = true;
      // Far longer than lease, hold and grace together: 4 s, 4.9 s, 1 s.
      for (let i = 0; i < 14; i++) {
        await new Promise((resolve) => setTimeout(resolve, 1000));
        t.ok(agents.agent('a').mayWrite('default', 'pv-heard'), `second ${i + 1}: its writer may run`);
      }
      const { status } = await cluster.waitFor(
        'heard',
        'is told of',
        (one) => one.status?.activeNode === 'a',
      );
      t.equal(status?.epoch, 1);
      agents.agent('a').deaf = false;
      await cluster.settled('heard');
    },
  );

  await t.test('from every agent: nothing moves either (D32)', async (t) => {
    for (const one of agents.agents.values()) one.deaf = true;
    await new Promise((resolve) => setTimeout(resolve, 8000));
    t.ok(agents.agent('a').mayWrite('default', 'pv-heard'));
    t.equal((await cluster.object('heard'))?.status?.epoch, 1);
    for (const one of agents.agents.values()) one.deaf = false;
    await cluster.settled('heard');
  });
});
