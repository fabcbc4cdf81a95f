/**
 * A controller that ends between any two writes of a promotion: whoever leads next finishes it. The n-th crash comes
 * behind the n-th write of one of the volumes, while all the others are somewhere in the middle of theirs.
 */
import tap from 'tap';
import { LEASES, NODES, PODS, VOLUMES } from '../../controller/cluster/index.ts';
import { Controller } from '../../controller/controller.ts';
import { PREFIX } from '../../controller/plan/types.ts';
import { RequestProxy } from './harness/fault-proxy.ts';
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

/** What is seen from outside when the controller ends: its last message has not left, or its answer comes too late. */
const POINTS = [
  'consent is given, the controller hears it no more',
  'the decision never arrives',
  'the decision is written, its answer is lost',
  'watch/start is carried out, its answer is lost',
  'the deletion of the pod never arrives',
  'the pod is deleted, the answer is lost',
  'the label never arrives',
  'the annotation is written, its answer is lost',
] as const;

tap.test(
  'a promotion is finished after a crash before, in and behind its decision, the pod’s end and the new watch (B15)',
  { skip: noKube(), timeout: 100_000 },
  async (t) => {
    const cluster = await TestCluster.start({ nodes: ['a', 'b', 'c'], leaseMs: 500 });
    const proxy = await RequestProxy.start(cluster.server.url, cluster.server.certificate);
    const kubeconfig = cluster.server.writeKubeconfig('crashes', { url: proxy.url });
    const { kube, agents } = cluster;
    const names = POINTS.map((_, i) => `p${i}`);
    let controller: Controller;
    let dying: Promise<void> | null = null;
    let armed = false;
    const hit = new Set<string>();
    const crash = (point: (typeof POINTS)[number]): boolean => {
      if (!armed || dying || hit.has(point)) return false;
      hit.add(point);
      dying = controller.crash();
      return true;
    };
    const of = (point: (typeof POINTS)[number]): string => `p${POINTS.indexOf(point)}`;
    agents.called = (_, path, body) => {
      const is = (point: (typeof POINTS)[number]): boolean => body.volume === `pv-${of(point)}`;
      if (path.endsWith('/fence/consent') && is(POINTS[0])) crash(POINTS[0]);
      if (path.endsWith('/watch/start') && body.epoch === 2 && is(POINTS[3])) crash(POINTS[3]);
    };
    proxy.fault = ({ method, path, body }) => {
      const about = (point: (typeof POINTS)[number], part: string): boolean =>
        new RegExp(`/${part}/(pv-)?${of(point)}(-0)?(/status)?($|\\?)`).test(path);
      const decides = method === 'PUT' && /"epoch":2/.test(body);
      if (decides && about(POINTS[1], 'simplevolumes') && crash(POINTS[1])) return { cut: 'before' };
      if (decides && about(POINTS[2], 'simplevolumes') && crash(POINTS[2])) return { cut: 'after' };
      if (method === 'DELETE' && about(POINTS[4], 'pods') && crash(POINTS[4])) return { cut: 'before' };
      if (method === 'DELETE' && about(POINTS[5], 'pods') && crash(POINTS[5])) return { cut: 'after' };
      if (
        method === 'PATCH' &&
        path.includes('/nodes/') &&
        body.includes(`default.${of(POINTS[6])}-role":"active`) &&
        crash(POINTS[6])
      )
        return { cut: 'before' };
      if (method === 'PATCH' && about(POINTS[7], 'persistentvolumes') && crash(POINTS[7]))
        return { cut: 'after' };
      return null;
    };
    let restarts = 0;
    const start = async (): Promise<void> => {
      dying = null;
      controller = await Controller.start({
        ...cluster.options(`controller-${restarts}`, { fenceBeatMs: 150, reportMs: 200 }),
        kubeconfig,
      });
    };
    t.teardown(async () => {
      armed = false;
      await controller.stop();
      await proxy.stop();
      await cluster.stop();
    });
    await start();
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
    await until(
      'all promotions are finished',
      async () => {
        if (dying) {
          await dying;
          restarts++;
          const lease = await kube.get(LEASES, { namespace: SYSTEM, name: LEASE });
          await kube.replace(LEASES, { ...lease, spec: { ...lease.spec, holderIdentity: '' } });
          await start();
        }
        for (const name of names) {
          const status = (await cluster.object(name))?.status;
          if (status?.epoch !== 2 || status.promotion?.done.length !== 7) return false;
        }
        return true;
      },
      70_000,
    );
    t.strictSame(
      POINTS.filter((point) => !hit.has(point)),
      [],
      'it ended at every point',
    );
    for (const [i, name] of names.entries()) {
      const object = await cluster.object(name);
      const active = object?.status?.activeNode as string;
      t.equal(object?.status?.epoch, 2, `${POINTS[i]}: one promotion, not two`);
      t.strictSame(
        [...agents.agents.values()]
          .filter((one) => {
            const copy = one.volume(`default/pv-${name}`);
            return copy?.role === 'active' && copy.epoch === 2;
          })
          .map((one) => one.node),
        [active],
        'one active node',
      );
      t.equal(
        await kube.find(PODS, { namespace: 'default', name: `${name}-0` }),
        null,
        'the dead pod is gone',
      );
      t.equal(
        (await kube.get(VOLUMES, { name: `pv-${name}` })).metadata.annotations?.[`${PREFIX}active-node`],
        active,
      );
    }
  },
);
