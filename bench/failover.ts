import { Controller } from '../controller/controller.ts';
import { holdMs } from '../lib/fence/timing.ts';
import { noKube } from '../test/kube/harness/programs.ts';
import { TestCluster, until } from '../test/kube/test-cluster.ts';
import type { Figure, Measure } from './lib/figure.ts';
import { summary } from './lib/stats.ts';

const RUNS = 4;
/** Volumes on the node that is lost, of each kind of fencing. */
const VOLUMES = 5;
const LEASE_MS = 8000;
const GRACE_MS = 1000;
/** From the loss until Kubernetes says NotReady, ms: a lease is over before that. */
const NOT_READY_MS = 12_000;

const sleep = (ms: number): Promise<void> => new Promise((resolve) => setTimeout(resolve, ms));

export const figure: Figure = {
  title: 'a node is lost: until the promotion is written, and until the new node is active',
  method: `real API server, played agents, controller in process as it is set up by default; the node's agent answers nothing any more, ${NOT_READY_MS / 1000} s later the node is NotReady; grace ${GRACE_MS / 1000} s, lease ${LEASE_MS / 1000} s; ${RUNS} times ${VOLUMES} volumes of each fencing at once; counted from when no rule has to be waited for any more: NotReady and grace period, with a lease the grace period and the hold of ${holdMs(LEASE_MS) / 1000} s after the last sign that the leader or a replica vouched for the writer; no peer exists`,
  async run(say): Promise<Measure[]> {
    const missing = noKube();
    if (missing) throw new Error(String(missing));
    const cluster = await TestCluster.start({ nodes: ['a', 'b', 'c'], leaseMs: LEASE_MS, beatMs: 1000 });
    const controller = await Controller.start(
      cluster.options('bench', {
        electionMs: 15_000,
        electionRenewMs: 2000,
        reportMs: 2000,
        kubeRate: { perSecond: 50, burst: 100 },
      }),
    );
    const written: Record<'none' | 'lease', number[]> = { none: [], lease: [] };
    const active: Record<'none' | 'lease', number[]> = { none: [], lease: [] };
    const a = cluster.agents.agent('a');
    try {
      for (let run = 1; run <= RUNS; run++) {
        const volumes = (['none', 'lease'] as const).flatMap((fencing) =>
          Array.from({ length: VOLUMES }, (_, i) => ({ fencing, name: `run-${run}-${fencing}-${i}` })),
        );
        for (const { fencing, name } of volumes) {
          await cluster.claim(name, {
            'failover-enabled': 'true',
            'failover-grace-period': `${GRACE_MS}ms`,
            'failover-max-staleness': '5m',
            'failover-fencing': fencing,
          });
          await cluster.pod(`${name}-pod`, name, 'a');
        }
        for (const { name } of volumes) await cluster.settled(name, 2, 60_000);
        // A new leader and a new copy are waited for as if they had promised something.
        await sleep(holdMs(LEASE_MS) + 2000);
        a.set('hangs');
        cluster.lost.add('a');
        const lost = performance.now();
        let said = Number.NaN;
        const rule = {
          none: () => said + GRACE_MS,
          lease: () => Math.max(lost + GRACE_MS, a.vouchedAt + holdMs(LEASE_MS)),
        };
        const notReady = sleep(NOT_READY_MS).then(() => {
          said = performance.now();
          return cluster.ready('a', false);
        });
        await Promise.all(
          volumes.map(async ({ fencing, name }) => {
            const { status } = await cluster.waitFor(
              name,
              'is promoted',
              (one) => one.status?.epoch === 2,
              60_000,
            );
            written[fencing].push((performance.now() - rule[fencing]()) / 1000);
            const to = cluster.agents.agent(status?.activeNode as string);
            await until(
              'it is active',
              () =>
                to.volume(`default/pv-${name}`)?.role === 'active' &&
                to.volume(`default/pv-${name}`)?.epoch === 2,
              60_000,
            );
            active[fencing].push((performance.now() - rule[fencing]()) / 1000);
          }),
        );
        await notReady;
        say(
          `run ${run}: none ${summary(written.none.slice(-VOLUMES)).max.toFixed(2)} s, lease ${summary(written.lease.slice(-VOLUMES)).max.toFixed(2)} s`,
        );
        await cluster.back('a');
        for (const { name } of volumes) await cluster.settled(name, 2, 60_000);
      }
    } finally {
      await controller.stop();
      await cluster.stop();
    }
    const measure = (name: string, values: readonly number[], target?: number): Measure => {
      const { min, p50, max, count } = summary(values);
      return {
        name,
        value: max,
        unit: 's',
        ...(target === undefined ? {} : { target }),
        note: `slowest of ${count}; median ${p50.toFixed(2)}, quickest ${min.toFixed(2)} s`,
      };
    };
    return [
      measure('NotReady and grace until promoted (none)', written.none, 2),
      measure('the same until the new node is active', active.none),
      measure('lease over until promoted (lease)', written.lease, 2),
      measure('the same until the new node is active', active.lease),
    ];
  },
};
