/**
 * The whole product in under a minute on one machine: three agents, an application that never stops writing,
 * a node that dies without warning, the decision where to go on, what was lost, and the node coming back.
 *
 *   npm run demo [-- --keep] [-- --seconds N]
 *
 * Exit code 0 only when every check held.
 */
import { type ChildProcess, spawn } from 'node:child_process';
import { readdirSync, rmSync } from 'node:fs';
import { join } from 'node:path';
import { createInterface } from 'node:readline';
import { fileURLToPath } from 'node:url';
import { parseArgs } from 'node:util';
import { decideFailover, type FailoverDecision } from '../../controller/plan/failover.ts';
import type { VolumeName } from '../core/parts.ts';
import { LocalCluster, sleep, waitFor } from '../local/cluster.ts';
import { setUp } from '../local/setup.ts';
import { compareTrees, readTree, treeDigest } from '../local/tree.ts';
import { checkCopy, lostByKind, lostMs } from './check.ts';
import { View } from './view.ts';
import type { Kind, Stamp } from './writer.ts';

const VOLUME: VolumeName = { namespace: 'demo', volume: 'world' };
const GRACE_MS = 2000;
const MAX_STALENESS_MS = 15_000;

/** The application as a child process, and the last write of each kind that it reported. */
class Writer {
  readonly written = new Map<Kind, Stamp>();
  count = 0;
  readonly #child: ChildProcess;
  readonly #ended: Promise<void>;

  constructor(folder: string) {
    const script = fileURLToPath(new URL('writer.ts', import.meta.url));
    this.#child = spawn(process.execPath, [script, folder], { stdio: ['ignore', 'pipe', 'inherit'] });
    const lines = createInterface({ input: this.#child.stdout as NodeJS.ReadableStream });
    lines.on('line', (line) => {
      try {
        const stamp = JSON.parse(line) as Stamp;
        this.written.set(stamp.kind, stamp);
        this.count += 1;
      } catch {
        // The last line of a killed process may be cut; that write counts as never reported.
      }
    });
    // Its pipe is drained before it counts as ended: what it reported before it died must be known.
    this.#ended = new Promise((resolve) => lines.once('close', resolve));
  }

  get running(): boolean {
    return this.#child.exitCode === null && this.#child.signalCode === null;
  }

  signal(signal: NodeJS.Signals): void {
    this.#child.kill(signal);
  }

  async end(signal: NodeJS.Signals): Promise<void> {
    this.signal(signal);
    await this.#ended;
  }
}

interface Options {
  keep: boolean;
  seconds: number;
}

async function demo(options: Options): Promise<boolean> {
  const cluster = await LocalCluster.create({
    prefix: 'simple-volume-demo-',
    flags: ['--browse-auth', 'off'],
  });
  const view = new View(cluster, VOLUME);
  const { style } = view;
  const writers: Writer[] = [];
  let held = true;
  const check = (ok: boolean, text: string, faults: readonly string[] = []): void => {
    view.line(`  ${ok ? style.green('✓') : style.red('✗')} ${text}`);
    for (const fault of ok ? [] : faults.slice(0, 10)) view.line(`      ${style.red(fault)}`);
    if (!ok) held = false;
  };
  const step = (text: string): void => {
    view.line();
    view.line(style.bold(text));
  };
  const write = (node: string): Writer => {
    const writer = new Writer(cluster.agent(node).live(VOLUME));
    writers.push(writer);
    return writer;
  };
  const interrupted = (): void => {
    view.stop();
    for (const writer of writers) writer.signal('SIGKILL');
    void cluster.stop(true).finally(() => {
      rmSync(cluster.folder, { recursive: true, force: true });
      process.exit(130);
    });
  };
  process.once('SIGINT', interrupted);
  process.once('SIGTERM', interrupted);

  try {
    step('1. Three nodes, one volume, an application that writes without a pause on node a');
    await Promise.all([...cluster.agents.values()].map((agent) => agent.start()));
    view.start();
    await cluster.watch('a', VOLUME, { targets: ['b', 'c'], debounce: '500ms', maxDelay: '1s' });
    const first = write('a');
    const counting = setInterval(
      () => view.note(`${writers.reduce((sum, one) => sum + one.count, 0)} writes`),
      200,
    );
    counting.unref();
    await waitFor('the first copies', async () => {
      const reports = await cluster.reports(VOLUME, ['b', 'c']);
      return reports.every((one) => one.generation !== null && one.freshAgeMs !== null);
    });
    await sleep(options.seconds * 1000);

    step('2. Node a dies: its agent and the application are killed with SIGKILL in the middle of a write');
    first.signal('SIGKILL');
    cluster
      .agent('a')
      .end('SIGKILL')
      .catch(() => {});
    const diedAt = performance.now();
    await first.end('SIGKILL');
    await cluster.agent('a').end('SIGKILL');

    step('3. The decision where to go on (controller/plan/failover.ts)');
    let decision: FailoverDecision | null = null;
    let before = '';
    while (decision === null || decision.action === 'wait') {
      const replicas = await cluster.reports(VOLUME, ['b', 'c']);
      decision = decideFailover({
        now: performance.now(),
        volume: {
          ...VOLUME,
          name: VOLUME.volume,
          epoch: 1,
          activeNode: 'a',
          failoverEnabled: true,
          gracePeriodMs: GRACE_MS,
          maxStalenessMs: MAX_STALENESS_MS,
          nodePriority: [],
          fencing: 'lease',
          // The demonstration killed the writer itself, so nothing holds a lease any more.
          leaseEnded: !first.running,
        },
        workload: { healthyPod: false, withoutSince: diedAt, cause: 'no-pod' },
        nodes: ['a', 'b', 'c'].map((name) => ({
          name,
          ready: cluster.agent(name).running,
          schedulable: true,
          reachable: cluster.agent(name).running,
          fit: { ok: true },
        })),
        replicas,
      });
      if (decision.code !== before) view.line(`  ${decision.action}: ${decision.because}`);
      before = decision.code;
      if (decision.action === 'wait') await sleep(250);
      if (performance.now() - diedAt > 30_000) break;
    }
    for (const one of decision.perReplica) {
      view.line(
        `    ${one.node}: ${one.verdict}${one.reasons.length === 0 ? '' : ` (${one.reasons.map((r) => `${r.code}: ${r.text}`).join('; ')})`}`,
      );
    }
    check(
      decision.action === 'promote',
      `a copy was chosen ${((performance.now() - diedAt) / 1000).toFixed(1)} s after the node died`,
    );
    const target = decision.target;
    if (target === undefined) throw new Error('there is no copy to go on with');
    const others = ['b', 'c'].filter((node) => node !== target);
    if (decision.catchUpFrom !== undefined) await catchUp(cluster, target, decision.catchUpFrom);

    step(`4. Node ${target} goes on with epoch ${decision.epoch}`);
    await cluster.watch(target, VOLUME, {
      epoch: decision.epoch,
      targets: others,
      debounce: '500ms',
      maxDelay: '1s',
    });
    const promoted = checkCopy(cluster.agent(target).live(VOLUME));
    const lost = lostMs(first.written, promoted);
    check(
      promoted.faults.length === 0,
      `the copy is whole: database integrity ok, ${promoted.counts.database} rows, ${promoted.counts.save} saves, ${promoted.counts.log} log lines, ${promoted.counts.region} blocks`,
      promoted.faults,
    );
    const promise = decision.dataLoss?.atMostMs ?? null;
    const kinds = [...lostByKind(first.written, promoted)].map(
      ([kind, ms]) => `${kind} ${(ms / 1000).toFixed(2)} s`,
    );
    // The promise counts from the decision; the application had been dead for a while by then.
    check(
      Number.isFinite(lost) && promise !== null && lost <= promise,
      `${(lost / 1000).toFixed(2)} s of writes are lost (${kinds.join(', ')}), at most ${((promise ?? 0) / 1000).toFixed(2)} s were announced`,
    );
    const second = write(target);
    await waitFor('the application to write on', () => second.count > 50);
    check(true, `the application writes on node ${target}`);
    await sleep(3000);

    step('5. Node a comes back with its old state and becomes a replica');
    await cluster.agent('a').start();
    await cluster.watch(target, VOLUME, {
      epoch: decision.epoch,
      targets: [...others, 'a'],
      debounce: '500ms',
      maxDelay: '1s',
    });
    await waitFor(
      'node a to be a replica',
      async () => {
        const status = await cluster.agent('a').status(VOLUME);
        return (
          status?.role === 'replica' &&
          status.generation?.startsWith(`${decision.epoch}-`) &&
          status.state === 'idle'
        );
      },
      30_000,
    );
    check(true, 'node a is a replica of the new line and was not asked twice');
    const stamps = listed(cluster.agent('a').backups(VOLUME));
    check(stamps.length > 0, `its old tree is kept in backups (${stamps.join(', ')})`);
    const backup = stamps[0];
    if (backup !== undefined) {
      const kept = checkCopy(join(cluster.agent('a').backups(VOLUME), backup));
      const missing = lostMs(first.written, kept);
      check(missing === 0, 'the writes that the failover lost are all in that backup, for the operator', [
        `${missing} ms of them are missing`,
        ...kept.faults,
      ]);
    }

    step('6. The application stops; all trees are compared');
    await second.end('SIGTERM');
    clearInterval(counting);
    const generation = await cluster.settle(target, VOLUME, 30_000);
    for (const node of [...others, 'a']) await cluster.reached(node, VOLUME, generation, 30_000);
    view.stop();
    const original = await readTree(cluster.agent(target).live(VOLUME));
    const copies = new Map([
      [`shadow on ${target}`, cluster.agent(target).shadow(VOLUME)],
      ...[...others, 'a'].map((node): [string, string] => [
        `replica on ${node}`,
        cluster.agent(node).live(VOLUME),
      ]),
    ]);
    view.line(
      `    ${treeDigest(original).slice(0, 32)}  live tree on ${target}, ${original.size} entries, generation ${generation}`,
    );
    for (const [name, path] of copies) {
      const copy = await readTree(path);
      const differences = compareTrees(original, copy);
      check(differences.length === 0, `${treeDigest(copy).slice(0, 32)}  ${name}`, differences);
    }
    const final = checkCopy(cluster.agent(target).live(VOLUME));
    check(
      final.faults.length === 0 && lostMs(second.written, final) === 0,
      'nothing of what was written after the failover is missing',
      final.faults,
    );

    view.line();
    view.line(
      `The newest generation as a web page: ${cluster.agent(target).webdavUrl}/browse/${VOLUME.namespace}/${VOLUME.volume}/`,
    );
    if (options.keep) {
      view.line('All agents keep running; Ctrl-C ends them and removes their folder:');
      view.line(`  ${cluster.folder}`);
      await new Promise(() => {});
    }
  } catch (error) {
    view.stop();
    check(false, error instanceof Error ? error.message : String(error));
  } finally {
    process.removeListener('SIGINT', interrupted);
    process.removeListener('SIGTERM', interrupted);
    view.stop();
    for (const writer of writers) if (writer.running) await writer.end('SIGKILL');
    await cluster.stop(true);
  }
  view.line();
  if (held) {
    view.line(style.green('Every check held.'));
    rmSync(cluster.folder, { recursive: true, force: true });
  } else {
    view.line(style.red('A check did not hold. Pools, and the logs of the agents:'));
    view.line(`  ${cluster.folder}`);
    for (const log of cluster.logs().split('\n')) view.line(`  ${log}`);
  }
  return held;
}

/** Lets the chosen node fetch a newer generation from another live replica before it is promoted. */
async function catchUp(cluster: LocalCluster, target: string, from: string): Promise<void> {
  const source = cluster.agent(from);
  const newer = await source.status(VOLUME);
  const run = await cluster.agent(target).call<{ id: string }>('POST', '/replication/full-sync', {
    ...VOLUME,
    epoch: 1,
    generation: newer?.generation ?? null,
    source: { url: source.url, webdavUrl: source.webdavUrl, token: source.token, node: from },
  });
  await waitFor(`${target} to catch up from ${from}`, async () => {
    const state = await cluster
      .agent(target)
      .call<{ state: string; error?: string }>('GET', `/replication/full-sync/${run.id}`);
    return state.state !== 'running';
  });
}

function listed(folder: string): string[] {
  try {
    return readdirSync(folder).sort();
  } catch {
    return [];
  }
}

const { values } = parseArgs({
  options: {
    keep: { type: 'boolean', default: false },
    seconds: { type: 'string', default: '10' },
    help: { type: 'boolean', default: false },
  },
});
if (values.help) {
  process.stdout.write(
    'npm run demo [-- --keep] [-- --seconds N]\n\n' +
      '  --keep       leaves the three agents running until Ctrl-C\n' +
      '  --seconds N  how long the application writes before the node dies (default 10)\n',
  );
} else {
  const seconds = Number(values.seconds);
  if (!(seconds >= 1 && seconds <= 3600)) {
    process.stderr.write('--seconds must be a number from 1 to 3600\n');
    process.exitCode = 2;
  } else {
    await setUp((text) => process.stdout.write(`${text}\n`));
    process.exitCode = (await demo({ keep: values.keep, seconds })) ? 0 : 1;
    process.exit();
  }
}
