import { Controller } from '../controller/controller.ts';
import { noKube } from '../test/kube/harness/programs.ts';
import { TestCluster, until } from '../test/kube/test-cluster.ts';
import type { Figure, Measure } from './lib/figure.ts';
import { summary } from './lib/stats.ts';

const RUNS = 5;
const LEASE_MS = 8000;
const GRACE = '1s';

export const figure: Figure = {
  title: 'a node is lost: until the promotion is written, and until the new node is active',
  method: `real API server, played agents, controller in process; power off (agent away, node NotReady at once), grace ${GRACE}, fencing lease ${LEASE_MS / 1000} s; ${RUNS} times`,
  async run(say): Promise<Measure[]> {
    const missing = noKube();
    if (missing) throw new Error(String(missing));
    const cluster = await TestCluster.start({ nodes: ['a', 'b', 'c'], leaseMs: LEASE_MS });
    const controller = await Controller.start(
      cluster.options('bench', { electionMs: 15_000, electionRenewMs: 2000, reportMs: 2000 }),
    );
    const decided: number[] = [];
    const active: number[] = [];
    const planned: number[] = [];
    try {
      for (let run = 1; run <= RUNS; run++) {
        const name = `run-${run}`;
        await cluster.claim(name, {
          'failover-enabled': 'true',
          'failover-grace-period': GRACE,
          'failover-max-staleness': '5m',
        });
        await cluster.pod(`${name}-pod`, name, 'a');
        await cluster.settled(name, 2, 60_000);
        // A new leader and a new copy are waited for as if they had promised something.
        await new Promise((resolve) => setTimeout(resolve, LEASE_MS + 3000));
        const started = performance.now();
        await cluster.lose('a');
        const { status } = await cluster.waitFor(
          name,
          'is promoted',
          (one) => one.status?.epoch === 2,
          60_000,
        );
        decided.push((performance.now() - started) / 1000);
        const to = status?.activeNode as string;
        await until(
          'it is active',
          () => cluster.agents.agent(to).volume(`default/pv-${name}`)?.role === 'active',
          60_000,
        );
        active.push((performance.now() - started) / 1000);
        await cluster.back('a');
        await cluster.settled(name, 2, 60_000);
        say(`run ${run}: ${decided.at(-1)?.toFixed(2)} s`);
        await cluster.pod(`${name}-next`, name, to);
        await cluster.settled(name, 2, 60_000);
        const moved = performance.now();
        await cluster.cordon(to, true);
        await cluster.waitFor(name, 'has moved', (one) => one.status?.epoch === 3, 60_000);
        planned.push((performance.now() - moved) / 1000);
        await cluster.cordon(to, false);
      }
    } finally {
      await controller.stop();
      await cluster.stop();
    }
    const range = (values: readonly number[]): string =>
      `${Math.min(...values).toFixed(1)} to ${Math.max(...values).toFixed(1)} s`;
    return [
      {
        name: 'node lost until the promotion is written',
        value: summary(decided).p50,
        unit: 's',
        target: 12,
        note: range(decided),
      },
      {
        name: 'node lost until the new node is active',
        value: summary(active).p50,
        unit: 's',
        target: 13,
        note: range(active),
      },
      {
        name: 'cordon until the planned move is written',
        value: summary(planned).p50,
        unit: 's',
        target: 5,
        note: range(planned),
      },
    ];
  },
};
