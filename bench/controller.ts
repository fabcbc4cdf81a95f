import { type ChildProcess, spawn } from 'node:child_process';
import { once } from 'node:events';
import { readFileSync, writeFileSync } from 'node:fs';
import { join } from 'node:path';
import { CLAIMS, CLUSTER_SIMPLE_VOLUMES, SIMPLE_VOLUMES } from '../controller/cluster/index.ts';
import { PREFIX } from '../controller/plan/types.ts';
import { parseDuration } from '../lib/core/duration.ts';
import { PROJECT } from '../lib/local/cluster.ts';
import { noKube } from '../test/kube/harness/programs.ts';
import { freePort } from '../test/kube/harness/server.ts';
import { SYSTEM, TestCluster, until } from '../test/kube/test-cluster.ts';
import { type Figure, type Measure, MIB } from './lib/figure.ts';
import { cpuOf, memoryOf, parseKiB } from './lib/proc.ts';
import { percentile, summary } from './lib/stats.ts';

const VOLUMES = Number(process.env.SIMPLE_VOLUME_BENCH_VOLUMES ?? 1000);
const NODES = Number(process.env.SIMPLE_VOLUME_BENCH_NODES ?? 50);
/** Copies besides the active one. */
const REPLICAS = 2;
/**
 * Counted at rest for this long, ms, in pieces of which the busiest is told too: with 1,000 volumes ages are written
 * five to ten minutes after anything else was.
 */
const WINDOW_MS = Number(process.env.SIMPLE_VOLUME_BENCH_WINDOW ?? 420) * 1000;
const PIECE_MS = 30_000;
/** Changes a round, and rounds with and without a hanging agent, one after the other. */
const CHANGES = 15;
const ROUNDS = 4;

type Counts = Map<string, number>;

/** Requests so far by verb and kind. */
async function requests(url: string): Promise<Counts> {
  const text = await (await fetch(`${url}/metrics`)).text();
  const found = text.matchAll(
    /^simple_volume_controller_kube_requests_total\{verb="([^"]*)",resource="([^"]*)"\} (\d+)$/gm,
  );
  return new Map([...found].map(([, verb, resource, count]) => [`${verb} ${resource}`, Number(count)]));
}

const sum = (counts: Counts): number => [...counts.values()].reduce((a, b) => a + b, 0);
const less = (after: Counts, before: Counts): Counts =>
  new Map([...after].map(([key, count]) => [key, count - (before.get(key) ?? 0)]));
/** What was asked most, for people. */
const listed = (counts: Counts, per: number, digits: number): string =>
  [...counts]
    .filter(([, count]) => count > 0)
    .sort((a, b) => b[1] - a[1])
    .map(([what, count]) => `${what} ${(count / per).toFixed(digits)}`)
    .join(', ');
const sleep = (ms: number): Promise<void> => new Promise((resolve) => setTimeout(resolve, ms));

/** Whether every volume is where it shall be, and its record says so: nothing is left to be told. */
async function settled(cluster: TestCluster): Promise<boolean> {
  let done = 0;
  for await (const { status } of cluster.kube.list(SIMPLE_VOLUMES))
    if (
      status?.phase === 'Active' &&
      status.promotable?.nodes.length === REPLICAS &&
      status.replicasSummary === `${REPLICAS}/${REPLICAS}` &&
      status.promotion?.done.length === 7
    )
      done++;
  let mirrored = 0;
  for await (const { status } of cluster.kube.list(CLUSTER_SIMPLE_VOLUMES))
    if (status?.phase === 'Active') mirrored++;
  return done === VOLUMES && mirrored === VOLUMES;
}

async function makeVolumes(cluster: TestCluster, nodes: readonly string[]): Promise<void> {
  const ids = Array.from({ length: VOLUMES }, (_, i) => i);
  const work = async (): Promise<void> => {
    for (let i = ids.shift(); i !== undefined; i = ids.shift()) {
      const node = nodes[i % NODES] as string;
      await cluster.claim(
        `v${i}`,
        {
          'replication-replicas': String(REPLICAS),
          'failover-enabled': 'true',
          'replication-include-paths': 'saves/**',
        },
        { node },
      );
      await cluster.pod(`v${i}-0`, `v${i}`, node);
    }
  };
  await Promise.all(Array.from({ length: 8 }, work));
}

function startController(cluster: TestCluster, port: number): ChildProcess {
  const token = join(cluster.server.folder, 'agents-token');
  writeFileSync(token, cluster.agents.token, { mode: 0o600 });
  return spawn(
    'setpriv',
    [
      ...['--pdeathsig', 'KILL', process.execPath, join(PROJECT, 'dist/bin.js'), 'controller'],
      ...['--namespace', SYSTEM, '--identity', 'bench', '--kubeconfig', cluster.server.kubeconfig],
      ...['--token-file', token, '--http', `127.0.0.1:${port}`, '--trigger', 'off', '--log-level', 'error'],
    ],
    { stdio: ['ignore', 'inherit', 'inherit'] },
  );
}

/**
 * From the moment in which an annotation's patch is sent until the agent of the active node is told (its watch/start has
 * arrived), s. The volumes are ones that the last node has nothing to do with.
 */
async function changed(cluster: TestCluster, name: string, ms: number): Promise<number> {
  const { seen } = cluster.agents;
  const from = seen.length;
  const begun = performance.now();
  await cluster.kube.merge(
    CLAIMS,
    { namespace: 'default', name },
    { metadata: { annotations: { [`${PREFIX}replication-debounce`]: `${ms}ms` } } },
  );
  const told = await until(`the agent is told of ${name}`, () =>
    seen
      .slice(from)
      .find(
        ({ path, body }) =>
          path.endsWith('/watch/start') &&
          body.volume === `pv-${name}` &&
          parseDuration(String(body.debounce), 'debounce') === ms,
      ),
  );
  return (told.at - begun) / 1000;
}

export const figure: Figure = {
  title: `the controller with ${VOLUMES} volumes of ${REPLICAS} copies each on ${NODES} nodes`,
  method:
    'real API server, played agents in another process than the controller, which is the bundle as it is shipped (`simple-volume controller`); at rest: every volume is Active, its copies promotable and its mirror written, 30 s ago; no peer exists for these figures',
  async run(say): Promise<Measure[]> {
    const missing = noKube();
    if (missing) throw new Error(String(missing));
    const nodes = Array.from({ length: NODES }, (_, i) => `n${i}`);
    const cluster = await TestCluster.start({ nodes, leaseMs: 8000, beatMs: 1000, play: false });
    const port = await freePort();
    const url = `http://127.0.0.1:${port}`;
    try {
      await makeVolumes(cluster, nodes);
      say(`${VOLUMES} claims, volumes and pods made`);
      const started = performance.now();
      const child = startController(cluster, port);
      try {
        const pid = child.pid as number;
        const alive = (): void => {
          if (child.exitCode !== null || child.signalCode !== null) throw new Error('the controller ended');
        };
        await until(
          'all volumes are watched',
          () => {
            alive();
            let active = 0;
            for (const agent of cluster.agents.agents.values())
              for (const one of agent.volumes.values()) if (one.role === 'active') active++;
            return active === VOLUMES;
          },
          600_000,
        );
        const watched = (performance.now() - started) / 1000;
        say(`all watched after ${watched.toFixed(0)} s`);
        for (;;) {
          alive();
          if (await settled(cluster)) break;
          if (performance.now() - started > 900_000) throw new Error('they are not settled after 900 s');
          await sleep(2000);
        }
        const whole = (performance.now() - started) / 1000;
        const spent = await requests(url);
        say(`all settled after ${whole.toFixed(0)} s; a volume: ${listed(spent, VOLUMES, 2)}`);
        await sleep(30_000);

        const [before, cpu] = [await requests(url), cpuOf(pid)];
        let busiest = 0;
        for (let last = before, left = WINDOW_MS; left > 0; left -= PIECE_MS) {
          await sleep(PIECE_MS);
          const now = await requests(url);
          busiest = Math.max(busiest, sum(less(now, last)) / (PIECE_MS / 1000));
          last = now;
        }
        const rest = less(await requests(url), before);
        const perSecond = sum(rest) / (WINDOW_MS / 1000);
        const percent = ((cpuOf(pid) - cpu) / (WINDOW_MS / 1000)) * 100;
        const memory = memoryOf(pid);
        if (memory === null) throw new Error('the controller ended');
        const peak = parseKiB(readFileSync(`/proc/${pid}/status`, 'utf8')).get('VmHWM') ?? 0;
        say(`at rest, a second: ${listed(rest, WINDOW_MS / 1000, 3)}`);

        const quick: number[] = [];
        const beside: number[] = [];
        const last = nodes.at(-1) as string;
        const hanging = cluster.agents.agent(last);
        const concerned = new Set([...hanging.volumes.values()].map((one) => one.volume));
        const names = Array.from({ length: VOLUMES }, (_, i) => `v${i}`).filter(
          (name) => !concerned.has(`pv-${name}`),
        );
        let next = 0;
        for (let round = 0; round < ROUNDS * 2; round++) {
          const hangs = round % 2 === 1;
          hanging.set(hangs ? 'hangs' : 'answers');
          await sleep(8000);
          for (let i = 0; i < CHANGES; i++) {
            const name = names[next++ % names.length] as string;
            (hangs ? beside : quick).push(await changed(cluster, name, 4000 + next));
            await sleep(200);
          }
        }
        const [q, b] = [summary(quick), summary(beside)];
        const seconds = (value: number): string => `${value.toFixed(3)} s`;
        return [
          {
            name: 'start until all are watched',
            value: watched,
            unit: 's',
            note: `${whole.toFixed(0)} s until all is told; ${(sum(spent) / VOLUMES).toFixed(1)} requests a volume, at most 50 a second`,
          },
          {
            name: 'RSS',
            value: memory.rss / MIB,
            unit: 'MiB',
            target: 150,
            note: `${(memory.anonymous / MIB).toFixed(1)} MiB anonymous; at most ${(peak / MIB).toFixed(1)} MiB since the start`,
          },
          {
            name: 'requests to the API server at rest',
            value: busiest,
            unit: '1/s',
            target: 5,
            note: `the busiest ${PIECE_MS / 1000} s of ${WINDOW_MS / 1000} s; on average ${perSecond.toFixed(2)}: ${listed(rest, WINDOW_MS / 1000, 2)}`,
          },
          { name: 'CPU at rest', value: percent, unit: '%' },
          {
            name: 'a changed annotation until the agent is told',
            value: q.p50,
            unit: 's',
            target: 1,
            note: `p90 ${seconds(percentile(quick, 90))}, p99 ${seconds(q.p99)}, ${q.count} changes`,
          },
          {
            name: 'the same while one agent hangs',
            value: b.p50,
            unit: 's',
            target: 1,
            note: `p90 ${seconds(percentile(beside, 90))}, p99 ${seconds(b.p99)}, ${b.count} changes of volumes on other nodes, rounds in turn`,
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
