/** What every test with a real program does: a cluster, a load on node a, a death, the decision, the checks. */
import { type ChildProcess, execFile, spawn } from 'node:child_process';
import { existsSync, mkdirSync } from 'node:fs';
import { join } from 'node:path';
import { decideFailover, type FailoverDecision } from '../../controller/plan/failover.ts';
import type { VolumeName } from '../../lib/core/parts.ts';
import { LocalCluster, PROJECT, waitFor } from '../../lib/local/cluster.ts';
import { setUp } from '../../lib/local/setup.ts';
import { installPackages, PACKAGES, programPath } from '../packages.ts';

export {
  clock,
  freePorts,
  type LocalAgent,
  LocalCluster,
  newest,
  sleep,
  waitFor,
} from '../../lib/local/cluster.ts';
export { compareTrees, readTree, treeDigest } from '../../lib/local/tree.ts';
export { programPath } from '../packages.ts';

/** As tap's `skip` option wants it: false, or the reason by name. Installs what is missing where that is allowed. */
export function needs(...programs: string[]): string | false {
  const missing = programs.filter((program) => programPath(program) === null);
  if (missing.length === 0) return false;
  return installPackages(PACKAGES.filter((one) => missing.includes(one.program))) ?? false;
}

export interface Ended {
  code: number | null;
  signal: NodeJS.Signals | null;
  stdout: string;
  stderr: string;
}

/** Runs a program to its end; a non-zero code is an answer, not an exception. */
export function run(
  program: string,
  args: readonly string[],
  options: { cwd?: string; env?: Record<string, string>; input?: string; limitMs?: number } = {},
): Promise<Ended> {
  return new Promise((resolve, reject) => {
    const child = execFile(
      programPath(program) ?? program,
      args,
      {
        timeout: options.limitMs ?? 120_000,
        maxBuffer: 64 * 1024 * 1024,
        ...(options.cwd === undefined ? {} : { cwd: options.cwd }),
        env: { ...process.env, LC_ALL: 'C.UTF-8', ...options.env },
      },
      (error, stdout, stderr) => {
        if (error !== null && typeof error.code !== 'number' && error.signal === undefined)
          return reject(error);
        resolve({
          code: error === null ? 0 : typeof error.code === 'number' ? error.code : null,
          signal: (error?.signal as NodeJS.Signals | undefined) ?? null,
          stdout: String(stdout),
          stderr: String(stderr),
        });
      },
    );
    child.stdin?.on('error', () => {});
    child.stdin?.end(options.input ?? '');
  });
}

/** Like `run`, and throws with the program's own words when it fails. */
export async function must(
  program: string,
  args: readonly string[],
  options: Parameters<typeof run>[2] = {},
): Promise<string> {
  const ended = await run(program, args, options);
  if (ended.code !== 0) {
    throw new Error(
      `${program} ${args.join(' ')} ended with ${ended.code ?? ended.signal}: ${ended.stderr || ended.stdout}`,
    );
  }
  return ended.stdout;
}

/** A load or a server that is meant to die: a process group of its own, so that nothing of it survives. */
export class Load {
  readonly child: ChildProcess;
  readonly #ended: Promise<void>;
  output = '';

  constructor(
    program: string,
    args: readonly string[],
    options: { cwd?: string; env?: Record<string, string> } = {},
  ) {
    this.child = spawn(programPath(program) ?? program, args, {
      detached: true,
      stdio: ['ignore', 'pipe', 'pipe'],
      ...(options.cwd === undefined ? {} : { cwd: options.cwd }),
      env: { ...process.env, LC_ALL: 'C.UTF-8', ...options.env },
    });
    for (const stream of [this.child.stdout, this.child.stderr]) {
      stream?.on('data', (chunk: Buffer) => {
        this.output += chunk.toString();
      });
    }
    this.#ended = new Promise((resolve) => {
      this.child.once('error', () => resolve());
      this.child.once('close', () => resolve());
    });
  }

  get running(): boolean {
    return this.child.pid !== undefined && this.child.exitCode === null && this.child.signalCode === null;
  }

  signal(signal: NodeJS.Signals): void {
    if (this.child.pid === undefined) return;
    try {
      process.kill(-this.child.pid, signal);
    } catch {
      // The whole group has ended already.
    }
  }

  async end(signal: NodeJS.Signals = 'SIGKILL'): Promise<void> {
    this.signal(signal);
    await this.#ended;
  }
}

export interface Teardown {
  teardown(callback: () => unknown): unknown;
}

/** Three agents that are stopped and removed with the test. */
export async function startCluster(
  t: Teardown,
  options: Parameters<typeof LocalCluster.start>[0] = {},
): Promise<LocalCluster> {
  // The gate has built everything before; a test that is run by itself in a fresh checkout builds it once.
  if (!existsSync(join(PROJECT, 'build/Release/simple_volume.node'))) await setUp(() => {});
  const cluster = await LocalCluster.start({ prefix: 'simple-volume-real-', ...options });
  t.teardown(() => cluster.stop());
  return cluster;
}

/** Starts the watch on a with b and c as targets and waits until both hold the first generation. */
export async function replicate(
  cluster: LocalCluster,
  volume: VolumeName,
  options: Partial<Parameters<LocalCluster['watch']>[2]> = {},
): Promise<string> {
  const live = cluster.agent('a').live(volume);
  mkdirSync(live, { recursive: true });
  await cluster.watch('a', volume, { targets: ['b', 'c'], debounce: '300ms', maxDelay: '1s', ...options });
  const generation = await cluster.settle('a', volume);
  for (const node of ['b', 'c']) await cluster.reached(node, volume, generation);
  return live;
}

/** Waits until the copies have moved on `count` generations from now, so that the death falls amid replication. */
export async function generationsPass(
  cluster: LocalCluster,
  volume: VolumeName,
  count: number,
  nodes: readonly string[] = ['b', 'c'],
  limitMs = 60_000,
): Promise<void> {
  const seq = async (): Promise<number> => {
    const reports = await cluster.reports(volume, nodes);
    return Math.min(...reports.map((one) => Number(one.generation?.split('-')[1] ?? 0)));
  };
  const before = await seq();
  await waitFor(
    `${count} more generations on both replicas`,
    async () => (await seq()) >= before + count,
    limitMs,
  );
}

/** Kills the active node's agent and the load at the same moment, as a power cut does. */
export async function killNode(cluster: LocalCluster, node: string, ...loads: Load[]): Promise<void> {
  for (const load of loads) load.signal('SIGKILL');
  const agent = cluster.agent(node).end('SIGKILL');
  await Promise.all([agent, ...loads.map((load) => load.end('SIGKILL'))]);
}

export type Promotion = FailoverDecision & { target: string };

export interface Lost {
  /** The node that died; default a. */
  active?: string;
  /** Its epoch; default 1. */
  epoch?: number;
  lineage?: [number, number][];
}

/** The product's own decision on the copies of the other nodes; waits while the decision says to wait. */
export async function decide(cluster: LocalCluster, volume: VolumeName, lost: Lost = {}): Promise<Promotion> {
  const diedAt = performance.now();
  const active = lost.active ?? 'a';
  const others = [...cluster.agents.keys()].filter((node) => node !== active);
  return waitFor(
    'a promotion',
    async () => {
      const decision = decideFailover({
        now: performance.now(),
        volume: {
          namespace: volume.namespace,
          name: volume.volume,
          epoch: lost.epoch ?? 1,
          activeNode: active,
          failoverEnabled: true,
          gracePeriodMs: 500,
          maxStalenessMs: 30_000,
          nodePriority: [],
          ...(lost.lineage === undefined ? {} : { lineage: lost.lineage }),
          fencing: 'lease',
          // The test killed the writer itself.
          leaseEnded: true,
        },
        workload: { healthyPod: false, withoutSince: diedAt, cause: 'no-pod' },
        nodes: [...cluster.agents.values()].map((agent) => ({
          name: agent.node,
          ready: agent.running,
          schedulable: true,
          reachable: agent.running,
          fit: { ok: true },
        })),
        replicas: await cluster.reports(volume, others),
      });
      if (decision.action === 'wait') return null;
      if (decision.action !== 'promote' || decision.target === undefined) throw new Error(decision.because);
      return { ...decision, target: decision.target };
    },
    20_000,
  );
}

/** Makes the chosen node active with the next epoch; gives the folder that the application opens. */
export async function promote(
  cluster: LocalCluster,
  volume: VolumeName,
  decision: Promotion,
  targets?: readonly string[],
): Promise<string> {
  await cluster.watch(decision.target, volume, {
    epoch: decision.epoch,
    targets:
      targets ??
      [...cluster.agents.values()]
        .filter((agent) => agent.running && agent.node !== decision.target)
        .map((agent) => agent.node),
    debounce: '300ms',
    maxDelay: '1s',
  });
  return cluster.agent(decision.target).live(volume);
}

/** The first line of a list of faults, so that a failing test says what and not only how many. */
export const first = (faults: readonly string[]): string => faults.slice(0, 5).join('\n') || 'no faults';
