import { spawn } from 'node:child_process';
import { once } from 'node:events';
import { writeFileSync } from 'node:fs';
import { join } from 'node:path';
import { CLAIMS } from '../controller/cluster/index.ts';
import { PREFIX } from '../controller/plan/types.ts';
import { PROJECT } from '../lib/local/cluster.ts';
import { noKube } from '../test/kube/harness/programs.ts';
import { freePort } from '../test/kube/harness/server.ts';
import { SYSTEM, TestCluster, until } from '../test/kube/test-cluster.ts';
import { type Figure, type Measure, MIB } from './lib/figure.ts';
import { cpuOf, memoryOf } from './lib/proc.ts';
import { summary } from './lib/stats.ts';

const VOLUMES = Number(process.env.SIMPLE_VOLUME_BENCH_VOLUMES ?? 1000);
const NODES = Number(process.env.SIMPLE_VOLUME_BENCH_NODES ?? 50);
const WINDOW_MS = 20_000;
const CHANGES = 10;

async function metric(url: string, name: string): Promise<number> {
  const text = await (await fetch(`${url}/metrics`)).text();
  return text
    .split('\n')
    .filter((line) => line.startsWith(`${name} `) || line.startsWith(`${name}{`))
    .reduce((sum, line) => sum + Number(line.slice(line.lastIndexOf(' '))), 0);
}

export const figure: Figure = {
  title: `the controller with ${VOLUMES} volumes of 2 copies each on ${NODES} nodes`,
  method:
    'real API server, played agents in another process than the controller, which is the command as it is shipped or run from the sources',
  async run(say): Promise<Measure[]> {
    const missing = noKube();
    if (missing) throw new Error(String(missing));
    const nodes = Array.from({ length: NODES }, (_, i) => `n${i}`);
    const cluster = await TestCluster.start({ nodes, leaseMs: 8000 });
    const token = join(cluster.server.folder, 'agents-token');
    writeFileSync(token, cluster.agents.token, { mode: 0o600 });
    const port = await freePort();
    const url = `http://127.0.0.1:${port}`;
    try {
      const ids = Array.from({ length: VOLUMES }, (_, i) => i);
      const work = async (): Promise<void> => {
        for (let i = ids.shift(); i !== undefined; i = ids.shift()) {
          const node = nodes[i % NODES] as string;
          await cluster.claim(
            `v${i}`,
            {
              'replication-replicas': '2',
              'failover-enabled': 'true',
              'replication-include-paths': 'saves/**',
            },
            { node },
          );
          await cluster.pod(`v${i}-0`, `v${i}`, node);
        }
      };
      await Promise.all(Array.from({ length: 8 }, work));
      say(`${VOLUMES} claims, volumes and pods made`);
      const started = performance.now();
      const child = spawn(
        'setpriv',
        [
          ...['--pdeathsig', 'KILL', process.execPath, join(PROJECT, 'lib/cli/bin.js'), 'controller'],
          ...['--namespace', SYSTEM, '--identity', 'bench', '--kubeconfig', cluster.server.kubeconfig],
          ...[
            '--token-file',
            token,
            '--http',
            `127.0.0.1:${port}`,
            '--trigger',
            'off',
            '--log-level',
            'error',
          ],
        ],
        { stdio: ['ignore', 'inherit', 'inherit'] },
      );
      try {
        const pid = child.pid as number;
        await until(
          'all volumes are watched',
          () => {
            if (child.exitCode !== null) throw new Error('the controller ended');
            let active = 0;
            for (const agent of cluster.agents.agents.values())
              for (const one of agent.volumes.values()) if (one.role === 'active') active++;
            return active === VOLUMES;
          },
          600_000,
        );
        const watched = (performance.now() - started) / 1000;
        say(`all watched after ${watched.toFixed(0)} s`);
        // Until the writes have calmed down.
        let last = -1;
        await until(
          'it rests',
          async () => {
            await new Promise((resolve) => setTimeout(resolve, 10_000));
            const now = await metric(url, 'simple_volume_controller_kube_requests_total');
            const rests = now - last < 50;
            last = now;
            return rests;
          },
          600_000,
        );
        const [requests, cpu] = [
          await metric(url, 'simple_volume_controller_kube_requests_total'),
          cpuOf(pid),
        ];
        await new Promise((resolve) => setTimeout(resolve, WINDOW_MS));
        const perSecond =
          ((await metric(url, 'simple_volume_controller_kube_requests_total')) - requests) /
          (WINDOW_MS / 1000);
        const percent = ((cpuOf(pid) - cpu) / (WINDOW_MS / 1000)) * 100;
        const memory = memoryOf(pid);
        if (memory === null) throw new Error('the controller ended');
        say(`at rest: ${perSecond.toFixed(2)} requests a second`);
        const change = async (i: number, debounce: string): Promise<number> => {
          const begun = performance.now();
          await cluster.kube.merge(
            CLAIMS,
            { namespace: 'default', name: `v${i}` },
            { metadata: { annotations: { [`${PREFIX}replication-debounce`]: debounce } } },
          );
          await until('the change is told', () =>
            cluster.agents.seen.some(
              (one) =>
                one.path.endsWith('/watch/start') &&
                one.body.volume === `pv-v${i}` &&
                one.body.debounce === debounce,
            ),
          );
          return (performance.now() - begun) / 1000;
        };
        const quick: number[] = [];
        for (let i = 0; i < CHANGES; i++) quick.push(await change(i, '9s'));
        cluster.agents.agent(nodes.at(-1) as string).set('hangs');
        await new Promise((resolve) => setTimeout(resolve, 5000));
        const beside: number[] = [];
        for (let i = 0; i < CHANGES; i++) beside.push(await change(i, '8s'));
        const [q, b] = [summary(quick), summary(beside)];
        return [
          { name: 'start until all are watched', value: watched, unit: 's', target: 180 },
          {
            name: 'RSS',
            value: memory.rss / MIB,
            unit: 'MiB',
            target: 160,
            note: `${(memory.anonymous / MIB).toFixed(1)} MiB anonymous`,
          },
          { name: 'requests to the API server at rest', value: perSecond, unit: '1/s', target: 1 },
          { name: 'CPU at rest', value: percent, unit: '%', target: 15 },
          { name: 'a changed annotation until the agent is told', value: q.p50, unit: 's', target: 1 },
          {
            name: 'the same while an agent hangs',
            value: b.p50,
            unit: 's',
            target: 1,
            note: `slowest ${Math.max(...beside).toFixed(2)} s`,
          },
        ];
      } finally {
        child.kill('SIGKILL');
        if (child.exitCode === null && child.signalCode === null) await once(child, 'exit');
      }
    } finally {
      await cluster.stop();
    }
  },
};
