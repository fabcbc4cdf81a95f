/**
 * A controller that ends between any two writes of a promotion: whoever leads next finishes it. The n-th crash comes
 * behind the n-th write of one of the volumes, while all the others are somewhere in the middle of theirs.
 */
import tap from 'tap';
import { LEASES, NODES, PODS, VOLUMES } from '../../controller/cluster/index.ts';
import type { Controller } from '../../controller/controller.ts';
import { PREFIX } from '../../controller/plan/types.ts';
import { noKube } from './harness/programs.ts';
import { LEASE, SYSTEM, TestCluster, until } from './test-cluster.ts';

const VOLUMES_COUNT = 6;
const CRASHES = 9;

tap.test(
  'a promotion is finished after a crash behind any of its writes (B15)',
  { skip: noKube(), timeout: 60_000 },
  async (t) => {
    // Short leases: who waits for them is tested elsewhere.
    const cluster = await TestCluster.start({ nodes: ['a', 'b', 'c'], leaseMs: 500 });
    const names = Array.from({ length: VOLUMES_COUNT }, (_, i) => `v${i + 1}`);
    let controller: Controller;
    let armed = false;
    let dying: Promise<void> | null = null;
    const counts = new Map<string, number>();
    const crashedAt: string[] = [];
    const start = async (n: number): Promise<void> => {
      dying = null;
      controller = await cluster.controller(`controller-${n}`, {
        fenceBeatMs: 150,
        reportMs: 200,
        wrote: (what, key) => {
          if (!armed || dying) return;
          // From the decision on; what was written before it is no half of anything.
          if (what !== 'decide' && !counts.has(key)) return;
          const count = (counts.get(key) ?? 0) + 1;
          counts.set(key, count);
          if (count !== crashedAt.length + 1 || crashedAt.length === CRASHES) return;
          crashedAt.push(what.split(' ')[0] as string);
          dying = controller.crash();
        },
      });
    };
    t.teardown(async () => {
      armed = false;
      await controller.stop();
      await cluster.stop();
    });
    const { kube, agents } = cluster;
    await start(0);
    for (const name of names) {
      await cluster.claim(name, {
        'failover-enabled': 'true',
        'failover-grace-period': '200ms',
        'failover-max-staleness': '5m',
      });
      await cluster.workload(name, 'a');
    }
    for (const name of names) await cluster.settled(name);
    armed = true;
    await cluster.lose('a');
    let restarts = 0;
    const done = async (): Promise<boolean> => {
      for (const name of names) {
        const status = (await cluster.object(name))?.status;
        if (status?.epoch !== 2 || status.promotion?.done.length !== 7) return false;
      }
      return true;
    };
    await until(
      'all promotions are finished',
      async () => {
        if (dying) {
          await dying;
          restarts++;
          // The next one need not wait for the dead one's Lease here.
          const lease = await kube.get(LEASES, { namespace: SYSTEM, name: LEASE });
          await kube.replace(LEASES, { ...lease, spec: { ...lease.spec, holderIdentity: '' } });
          await start(restarts);
        }
        return await done();
      },
      45_000,
    );
    t.ok(restarts >= 7, `${restarts} crashes: ${crashedAt.join(', ')}`);
    t.ok(crashedAt.includes('decide'), 'right behind the decision');
    t.ok(new Set(crashedAt).size >= 4, 'behind writes of several kinds');
    t.comment(`crashed behind: ${crashedAt.join(', ')}`);
    const nodes = new Map<string, Record<string, string>>();
    for await (const node of kube.list(NODES)) nodes.set(node.metadata.name, node.metadata.labels ?? {});
    for (const name of names) {
      const { status } = (await cluster.object(name)) as NonNullable<
        Awaited<ReturnType<typeof cluster.object>>
      >;
      const active = status?.activeNode as string;
      t.equal(status?.epoch, 2, `${name}: one promotion, not two`);
      t.ok(['b', 'c'].includes(active));
      const roles = [...agents.agents.values()].filter((one) => {
        const copy = one.volume(`default/pv-${name}`);
        return copy?.role === 'active' && copy.epoch === 2;
      });
      t.strictSame(
        roles.map((one) => one.node),
        [active],
        `${name}: one active node`,
      );
      const volume = await kube.get(VOLUMES, { name: `pv-${name}` });
      t.equal(volume.metadata.annotations?.[`${PREFIX}active-node`], active);
      t.strictSame(
        [...nodes].filter(([, labels]) => labels[`${PREFIX}default.${name}-role`]).map(([node]) => node),
        [active],
      );
      t.equal(
        await kube.find(PODS, { namespace: 'default', name: `${name}-0` }),
        null,
        'the dead pod is gone',
      );
    }
  },
);
