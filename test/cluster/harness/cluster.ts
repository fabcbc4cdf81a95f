/**
 * A real Kubernetes with three nodes on this machine, with the product installed by its chart: what the scenarios in
 * this folder run on. Everything is real but the machines: a node is a set of namespaces (node.ts).
 *
 *     const cluster = await Cluster.start();            // ready in under a minute; all agents are Ready
 *     t.teardown(() => cluster.stop());                 // takes all down; keeps the logs after a failure
 *     await cluster.apply(claim('data', {...}), deployment('app', 'data'));
 *     const pod = await cluster.podRunning('app=app');
 *     await cluster.node(pod.node).powerCut();          // or cluster.partition(node, 'api'), node.restartKubelet() ...
 *     await cluster.waitFor('the replacement', async () => ...);   // a time-out dumps what is known into the logs
 *     cluster.read('n2', volume, 'lines');              // a copy's file, straight from the node's pool
 *
 * Each cluster has a number (SIMPLE_VOLUME_CLUSTER=0..9, else the first free one), so several may run at once. One that
 * was killed is cleaned up by the next that takes its number. It ends with the process that started it.
 */
import {
  cpSync,
  existsSync,
  lstatSync,
  mkdirSync,
  mkdtempSync,
  readdirSync,
  readFileSync,
  rmSync,
  writeFileSync,
} from 'node:fs';
import os from 'node:os';
import path from 'node:path';
import { setTimeout as sleep } from 'node:timers/promises';
import { POOL_FOLDERS } from '../../../lib/core/pool-folders.ts';
import { waitFor } from '../../../lib/local/cluster.ts';
import { compareTrees, readTree, type Tree } from '../../../lib/local/tree.ts';
import { xattrReader } from '../../cases/support.ts';
import { run, tail } from '../../kube/harness/program.ts';
import { CLUSTER_PROGRAMS, kubeProgram, noKube } from '../../kube/harness/programs.ts';
import { programPath } from '../../packages.ts';
import { ControlPlane } from './control-plane.ts';
import { baseImages } from './images.ts';
import { giveBack, type Instance, take } from './instance.ts';
import { cleanUp, removeFolder, takeDown } from './leftovers.ts';
import { ClusterNode, type Cut } from './node.ts';
import { Reader } from './reader.ts';

export { MONITOR_GRACE_S } from './control-plane.ts';
export { SHELL_IMAGE } from './images.ts';
export { ClusterNode, type Cut } from './node.ts';

const PROJECT = path.resolve(import.meta.dirname, '../../..');
export const CHART = path.join(PROJECT, 'chart');
/** Logs of clusters in which something failed; the newest are kept. */
export const KEPT_LOGS = path.join(PROJECT, 'build/cluster-logs');
const KEEP = 5;
export const RELEASE = 'simple-volume';
export const SYSTEM = 'simple-volume-system';

/** After a leader begins to lead in a new installation: what another may have granted is over. */
const TAKEOVER_MS = 27_000;

/** Programs from Debian packages, see test/packages.ts. */
const SYSTEM_PROGRAMS = ['ip', 'nft', 'nsenter', 'unshare', 'setpriv', 'openssl', 'cc', 'busybox', 'tar'];

/** Why no cluster can run here, false when one can: the `skip` of a test. */
export function noCluster(): string | false {
  if (process.getuid?.() !== 0) return 'needs root: a node has namespaces and cgroups of its own';
  const missing = SYSTEM_PROGRAMS.filter((program) => programPath(program) === null);
  if (!existsSync('/usr/lib/cni/bridge')) missing.push('/usr/lib/cni/bridge (containernetworking-plugins)');
  if (missing.length > 0) return `not installed: ${missing.join(', ')}`;
  return noKube(CLUSTER_PROGRAMS);
}

export interface ClusterOptions {
  /** default: SIMPLE_VOLUME_CLUSTER, else the first that is free */
  number?: number;
  /** values of the chart beside the harness's own; null: the chart is not installed */
  values?: object | null;
  /** files with values, which go before `values` */
  valueFiles?: readonly string[];
  /** nodes whose pool is a disk of its own with btrfs, which can hold a volume to its size */
  btrfs?: readonly string[];
  /** more images (tar files of `docker save`), loaded on every node */
  images?: readonly string[];
  /** told what goes on */
  say?: (line: string) => void;
}

// biome-ignore lint/suspicious/noExplicitAny: objects of Kubernetes, of which a test reads a field or two
export type KubeObject = any;

/** A pod that runs. */
export interface RunningPod {
  name: string;
  namespace: string;
  node: string;
  uid: string;
  ip: string;
}

/** A volume: its namespace, the name of its PersistentVolume and that of its claim. */
export interface VolumeRef {
  namespace: string;
  name: string;
  claim: string;
}

export class Cluster {
  readonly instance: Instance;
  /** scratch folder of everything, removed at the end */
  readonly folder: string;
  readonly control: ControlPlane;
  private readonly reader: Reader;
  readonly nodes: readonly ClusterNode[];
  /** when all was ready, milliseconds after the start */
  readyMs = 0;
  private readonly logs: string;
  private readonly say: (line: string) => void;
  private failed = false;
  private dumps = 0;
  private over = false;
  private readonly onExit = (): void => this.takeDown();
  private readonly onSignal = (): void => process.exit(130);

  private constructor(instance: Instance, folder: string, say: (line: string) => void) {
    this.instance = instance;
    this.folder = folder;
    this.say = say;
    this.logs = path.join(folder, 'logs');
    mkdirSync(this.logs, { recursive: true });
    this.control = new ControlPlane(instance, folder, this.logs);
    this.reader = new Reader(this.control.kubeconfig);
    const pause = path.join(folder, 'pause');
    this.nodes = instance.nodes.map(
      (names) => new ClusterNode(names, instance, this.control, folder, this.logs, pause),
    );
    process.once('exit', this.onExit);
    for (const signal of ['SIGINT', 'SIGTERM', 'SIGHUP'] as const) process.once(signal, this.onSignal);
  }

  /** Brings one up and installs the chart. After an error nothing is left of it but its logs. */
  static async start(options: ClusterOptions = {}): Promise<Cluster> {
    const { say = () => {} } = options;
    const began = performance.now();
    const named = options.number ?? process.env.SIMPLE_VOLUME_CLUSTER;
    const folder = mkdtempSync(path.join(os.tmpdir(), 'sv-cluster-'));
    const number = named === undefined || named === '' ? null : Number(named);
    let taken: Instance;
    try {
      taken = take(number, folder, cleanUp);
    } catch (error) {
      rmSync(folder, { recursive: true });
      throw error;
    }
    const cluster = new Cluster(taken, folder, say);
    try {
      for (const node of options.btrfs ?? []) cluster.node(node).makeDisk();
      await cluster.bringUp(options.images ?? []);
      if (options.values !== null) await cluster.install(options.values, options.valueFiles);
      cluster.readyMs = performance.now() - began;
      say(`ready after ${(cluster.readyMs / 1000).toFixed(1)} s`);
      return cluster;
    } catch (error) {
      await cluster.dump(`start: ${error instanceof Error ? error.message : error}`);
      await cluster.stop();
      throw error;
    }
  }

  get kubeconfig(): string {
    return this.control.kubeconfig;
  }

  node(name: string): ClusterNode {
    const node = this.nodes.find((one) => one.name === name);
    if (!node) throw new Error(`no node ${name}`);
    return node;
  }

  /** The other nodes. */
  others(...names: string[]): ClusterNode[] {
    return this.nodes.filter(({ name }) => !names.includes(name));
  }

  // Kubernetes

  /** Runs kubectl as the administrator. @throws Error with what it wrote to standard error */
  kubectl(args: readonly string[], input = '', limitMs = 60_000): Promise<string> {
    return this.control.kubectl(args, input, limitMs);
  }

  /** Applies objects, or files (an absolute path). */
  async apply(...what: (object | string)[]): Promise<void> {
    for (const file of what.filter((one) => typeof one === 'string'))
      await this.kubectl(['apply', '-f', file]);
    const items = what.filter((one) => typeof one === 'object');
    if (items.length > 0)
      await this.kubectl(['apply', '-f', '-'], JSON.stringify({ apiVersion: 'v1', kind: 'List', items }));
  }

  /** One object, null when there is none. */
  async get(kind: string, name: string, namespace = 'default'): Promise<KubeObject | null> {
    if (this.reader.knows(kind)) return this.reader.get(kind, name, namespace);
    const args = ['get', kind, name, '-n', namespace, '-o', 'json', '--ignore-not-found'];
    const text = await this.kubectl(args);
    return text === '' ? null : JSON.parse(text);
  }

  /** All objects of a kind in a namespace (null: in all), by label. */
  async list(kind: string, namespace: string | null = 'default', selector = ''): Promise<KubeObject[]> {
    if (this.reader.knows(kind)) return this.reader.list(kind, namespace, selector);
    const where = namespace === null ? ['-A'] : ['-n', namespace];
    const text = await this.kubectl(['get', kind, ...where, '-l', selector, '-o', 'json']);
    return (JSON.parse(text) as { items: KubeObject[] }).items;
  }

  /** Runs a program in a container. It goes through kubelet: not while the node is cut off. */
  exec(pod: string, command: readonly string[], namespace = 'default', input = ''): Promise<string> {
    return this.kubectl(['exec', '-i', '-n', namespace, pod, '--', ...command], input);
  }

  /** Shell commands in a container that has one. */
  sh(pod: string, script: string, namespace = 'default'): Promise<string> {
    return this.exec(pod, ['sh', '-c', script], namespace);
  }

  /** Reasons and messages of the Events about an object. */
  async events(name: string, namespace = 'default'): Promise<string[]> {
    const events = await this.list('events', namespace);
    return events
      .filter((one) => one.involvedObject.name === name)
      .map((one) => `${one.reason}: ${one.message}`);
  }

  /** A pod by label that is Ready and not being deleted, on another node than those named and another one than `old`. */
  podRunning(
    selector: string,
    options: { namespace?: string; not?: readonly string[]; old?: RunningPod; limitMs?: number } = {},
  ): Promise<RunningPod> {
    const { namespace = 'default', not = [], old, limitMs = 60_000 } = options;
    const where = not.length > 0 ? ` elsewhere than on ${not.join(', ')}` : '';
    return this.waitFor(
      `a pod ${selector} Running${where}`,
      async () => {
        const pods = await this.list('pods', namespace, selector);
        const pod = pods.find(
          (one) =>
            !one.metadata.deletionTimestamp &&
            one.metadata.uid !== old?.uid &&
            !not.includes(one.spec.nodeName) &&
            isReady(one),
        );
        if (!pod) return null;
        const { name, uid } = pod.metadata;
        return { name, namespace, uid, node: pod.spec.nodeName, ip: pod.status.podIP };
      },
      limitMs,
      200,
    );
  }

  /** The volume of a claim that is bound. */
  volumeOf(claim: string, namespace = 'default', limitMs = 30_000): Promise<VolumeRef> {
    return this.waitFor(
      `the claim ${claim} is bound`,
      async () => {
        const pvc = await this.get('pvc', claim, namespace);
        return pvc?.status?.phase === 'Bound' && { namespace, name: pvc.spec.volumeName as string, claim };
      },
      limitMs,
    );
  }

  /** The SimpleVolume of a volume, as it is called by its claim. */
  simpleVolume(volume: VolumeRef): Promise<KubeObject | null> {
    return this.get('simplevolumes.storage.shipstuff.io', volume.claim, volume.namespace);
  }

  /**
   * Waits until a failover of this volume would wait for nothing but its own times: it is known to whom, and what an
   * earlier leader may have granted is over (25.8 s after the first installation).
   */
  async failoverReady(volume: VolumeRef, limitMs = 60_000): Promise<void> {
    await this.waitFor(
      `a failover of ${volume.claim} is possible`,
      async () => {
        const { status } = (await this.simpleVolume(volume)) ?? {};
        const complete = /^(\d+)\/\1$/.test(status?.replicasSummary ?? '');
        return complete && status.wouldFailOverTo !== undefined && status.promotable?.nodes?.length > 0;
      },
      limitMs,
    );
    const until = Date.now() + limitMs;
    const lease = await this.get('lease', `${RELEASE}-controller`, SYSTEM);
    const began = Date.parse(lease.spec.acquireTime);
    await sleep(Math.max(0, Math.min(until, began + TAKEOVER_MS) - Date.now()));
  }

  /**
   * Waits for a failover away from a node, or for a move that was decided right before it. To be asked right after a
   * power cut: a move may follow, and then its record is in the place of this one.
   * @param off ms since 1970, when the node was off
   * @param since ms since 1970: a move that was decided from then on counts
   * @returns how many seconds before `off` the promoted copy may end, as the decision said: it counts from itself back
   */
  async failedOver(
    volume: VolumeRef,
    node: string,
    off: number,
    limitMs = 120_000,
    since = off,
  ): Promise<number> {
    const record = await this.waitFor(
      `a failover of ${volume.claim} from ${node}`,
      async () => {
        const promotion = (await this.simpleVolume(volume))?.status?.promotion;
        const late = Date.parse(promotion?.decidedAt) + 1000 > since; // it has whole seconds
        return promotion?.from === node && late && promotion;
      },
      limitMs,
      500,
    );
    if (record.planned) return 0; // a move that was flushed before
    const [, seconds] = /at most the last ([\d.]+) s are lost/.exec(record.reason) ?? [];
    if (seconds === undefined) throw new Error(`nothing was announced: ${record.reason}`);
    return Math.max(0, Number(seconds) - (Date.parse(record.decidedAt) - off) / 1000);
  }

  // Pools

  /** Path of a volume's live tree, or of its applied copy, in a node's pool. */
  tree(node: string, volume: VolumeRef, ...parts: string[]): string {
    return path.join(this.node(node).pool, volume.namespace, volume.name, ...parts);
  }

  /** A file of a volume on a node, null when it is not there. Works while the node is off. */
  read(node: string, volume: VolumeRef, ...parts: string[]): string | null {
    return this.readFile(this.tree(node, volume, ...parts));
  }

  /** A file of this machine, null when it is not there. */
  readFile(file: string): string | null {
    try {
      return readFileSync(file, 'utf8');
    } catch (error) {
      const { code } = error as NodeJS.ErrnoException;
      if (code === 'ENOENT' || code === 'ENOTDIR') return null;
      throw error;
    }
  }

  /** What differs between two nodes' trees of a volume (or a part of them), modes, owners and times too. */
  async differences(volume: VolumeRef, from: string, to: string, ...parts: string[]): Promise<string[]> {
    const read = (node: string): Promise<Tree> => {
      const root = this.tree(node, volume, ...parts);
      return readTree(root, xattrReader(Buffer.from(root)));
    };
    return compareTrees(await read(from), await read(to));
  }

  /** Folders of the backups of a volume on a node, oldest first. */
  backups(node: string, volume: VolumeRef): string[] {
    const folder = path.join(this.node(node).pool, POOL_FOLDERS.backups, volume.namespace, volume.name);
    if (!existsSync(folder)) return [];
    return readdirSync(folder)
      .sort()
      .map((name) => path.join(folder, name));
  }

  // Faults

  /** Cuts a node from everything, from the API server alone, or from the other agents alone. */
  async partition(node: string, ...kinds: Cut[]): Promise<void> {
    if (kinds.includes('all')) return this.node(node).cut(null);
    const addresses: string[] = [];
    if (kinds.includes('api')) addresses.push(this.instance.address);
    if (kinds.includes('agents')) {
      const agents = await this.list('pods', SYSTEM, 'app.kubernetes.io/component=agent');
      addresses.push(...agents.filter((pod) => pod.spec.nodeName !== node).map((pod) => pod.status.podIP));
    }
    await this.node(node).cut(addresses);
  }

  heal(node: string): Promise<void> {
    return this.node(node).heal();
  }

  cordon(node: string): Promise<string> {
    return this.kubectl(['cordon', node]);
  }

  uncordon(node: string): Promise<string> {
    return this.kubectl(['uncordon', node]);
  }

  drain(node: string, limitMs = 120_000): Promise<string> {
    const flags = ['--ignore-daemonsets', '--delete-emptydir-data', '--force'];
    return this.kubectl(['drain', node, ...flags, `--timeout=${limitMs / 1000}s`], '', limitMs + 10_000);
  }

  /** Pods of a part of the product: agent, csi-node or controller. */
  parts(component: 'agent' | 'csi-node' | 'controller'): Promise<KubeObject[]> {
    return this.list('pods', SYSTEM, `app.kubernetes.io/component=${component}`);
  }

  /** Name of the node on which the controller leads. */
  leader(): Promise<string> {
    return this.waitFor('a leading controller', async () => {
      const lease = await this.get('lease', `${RELEASE}-controller`, SYSTEM);
      const holder = lease?.spec?.holderIdentity as string | undefined;
      const pod = holder ? await this.get('pod', holder, SYSTEM) : null;
      return pod?.spec?.nodeName as string | undefined;
    });
  }

  /** Makes sure that the controller on this node does not lead, as when its pod is moved away in order. */
  async leadElsewhere(node: string): Promise<void> {
    await this.waitFor(`no leader on ${node}`, async () => {
      if ((await this.leader()) !== node) return true;
      for (const pod of await this.parts('controller'))
        if (pod.spec.nodeName === node)
          await this.kubectl(['delete', 'pod', '-n', SYSTEM, pod.metadata.name]);
      return false;
    });
  }

  /** Makes sure that the controller leads on this node, and that its other replica is on another one. */
  async leadOn(node: string): Promise<void> {
    const restart = async (choose: (pod: KubeObject) => boolean): Promise<void> => {
      const names = (await this.parts('controller')).filter(choose).map((pod) => pod.metadata.name as string);
      if (names.length > 0) await this.kubectl(['delete', 'pod', '-n', SYSTEM, ...names]);
    };
    if ((await this.leader()) !== node) {
      await Promise.all(this.others(node).map(({ name }) => this.cordon(name)));
      await restart((pod) => pod.spec.nodeName !== node);
      await Promise.all(this.others(node).map(({ name }) => this.uncordon(name)));
      await this.waitFor(`the leader is on ${node}`, async () => (await this.leader()) === node);
    }
    const lease = await this.get('lease', `${RELEASE}-controller`, SYSTEM);
    await this.waitFor('the other replica is elsewhere', async () => {
      const pods = (await this.parts('controller')).filter((pod) => !pod.metadata.deletionTimestamp);
      const here = (pod: KubeObject): boolean =>
        pod.spec.nodeName === node && pod.metadata.name !== lease.spec.holderIdentity;
      if (pods.some(here)) await restart(here);
      return pods.some((pod) => pod.spec.nodeName !== node && isReady(pod));
    });
  }

  // The product

  /** Installs or upgrades the chart and waits until all of it is Ready. */
  async install(values: object = {}, files: readonly string[] = [], limitMs = 180_000): Promise<string> {
    const own = path.join(this.folder, 'values-harness.json');
    const more = path.join(this.folder, 'values.json');
    // kube-rbac-proxy's image can be had from a registry only.
    writeFileSync(own, JSON.stringify({ manualSync: { guard: 'builtin' } }));
    writeFileSync(more, JSON.stringify(values));
    return this.helm(
      ['upgrade', '--install', RELEASE, CHART, '-n', SYSTEM, '--create-namespace'],
      ...[own, ...files, more].flatMap((file) => ['-f', file]),
      '--wait',
      `--timeout=${limitMs / 1000}s`,
    );
  }

  async helm(args: readonly string[], ...more: string[]): Promise<string> {
    const home = path.join(this.folder, 'helm');
    const env = { PATH: process.env.PATH, KUBECONFIG: this.kubeconfig, HOME: home };
    const { stdout } = await run(kubeProgram('helm') as string, [...args, ...more], {
      env,
      limitMs: 300_000,
    });
    return stdout;
  }

  /** Loads an image (a tar file of `docker save`) on every node. */
  async loadImage(file: string): Promise<void> {
    await Promise.all(this.nodes.map((node) => node.loadImage(file)));
  }

  // Waiting, and what is known when something failed

  /**
   * Asks until `probe` gives something else than null, undefined or false. Errors of `probe` count as "not yet".
   * @throws Error after `limitMs`, once what is known of the cluster was written to its logs
   */
  async waitFor<T>(
    what: string,
    probe: () => Promise<T | null | undefined | false>,
    limitMs = 60_000,
    everyMs = 250,
  ): Promise<T> {
    try {
      return await waitFor(what, probe, limitMs, everyMs);
    } catch (error) {
      const { message } = error as Error;
      throw new Error(`${message}\n${await this.dump(message)}`);
    }
  }

  /** Writes what is known into the logs, which are kept from now on. Returns the short part of it. */
  async dump(title: string): Promise<string> {
    this.failed = true;
    const parts = [`# ${title}, ${new Date().toISOString()}`];
    const short: string[] = [];
    const ask = async (list: string[], ...args: string[]): Promise<void> => {
      let text: string;
      try {
        text = await this.kubectl(args, '', 10_000);
      } catch (error) {
        text = String(error);
      }
      list.push(`$ kubectl ${args.join(' ')}\n${text.trimEnd()}`);
    };
    await ask(short, 'get', 'nodes');
    await ask(short, 'get', 'pods,pvc,sv', '-A', '-o', 'wide');
    await ask(parts, 'get', 'events', '-A', '--sort-by=.metadata.creationTimestamp');
    await ask(parts, 'get', 'sv', '-A', '-o', 'yaml');
    await ask(parts, 'describe', 'pods', '-A');
    for (const node of this.nodes)
      parts.push(`## kubelet of ${node.name}\n${tail(this.log(node, 'kubelet'))}`);
    this.dumps++;
    const file = path.join(this.logs, `dump-${this.dumps}.txt`);
    writeFileSync(file, [...short, ...parts].join('\n\n'));
    return [...short, `logs: ${this.keptFolder()}`].join('\n');
  }

  /** Says that its logs are worth keeping. */
  fail(): void {
    this.failed = true;
  }

  /** Takes all of it down, and waits until nothing is left. */
  async stop(): Promise<void> {
    if (this.over) return;
    this.takeDown();
  }

  private log(node: ClusterNode, name: string): string {
    return path.join(this.logs, `${node.name}-${name}.log`);
  }

  private keptFolder(): string {
    return path.join(KEPT_LOGS, path.basename(this.folder));
  }

  /** Without a promise: also while the process ends. */
  private takeDown(): void {
    if (this.over) return;
    this.over = true;
    this.reader.close();
    process.removeListener('exit', this.onExit);
    for (const signal of ['SIGINT', 'SIGTERM', 'SIGHUP'] as const)
      process.removeListener(signal, this.onSignal);
    try {
      takeDown(this.instance);
    } finally {
      if (this.failed) this.keepLogs();
      removeFolder(this.folder);
    }
    giveBack(this.instance.number);
  }

  private keepLogs(): void {
    const kept = this.keptFolder();
    cpSync(this.logs, kept, { recursive: true });
    for (const node of this.nodes) {
      if (existsSync(node.podLogs))
        cpSync(node.podLogs, path.join(kept, `pods-${node.name}`), { recursive: true });
    }
    const folders = readdirSync(KEPT_LOGS)
      .map((name) => path.join(KEPT_LOGS, name))
      .sort((a, b) => lstatSync(b).mtimeMs - lstatSync(a).mtimeMs);
    for (const old of folders.slice(KEEP)) rmSync(old, { recursive: true, force: true });
    this.say(`logs: ${kept}`);
  }

  private async bringUp(images: readonly string[]): Promise<void> {
    const pause = path.join(this.folder, 'pause');
    const source = path.join(import.meta.dirname, 'pause.c');
    await run('cc', ['-O2', '-static', '-o', pause, source]);
    this.say(`cluster ${this.instance.number} in ${this.folder}`);
    const [files] = await Promise.all([
      baseImages(path.join(this.folder, 'images'), pause, this.say),
      this.control.start(),
    ]);
    this.say('the control plane is ready, starting the nodes');
    await Promise.all(this.nodes.map((node) => node.start()));
    // One image after the other: the first are small and let everything begin.
    for (const file of [...files, ...images]) await this.loadImage(file);
    await this.kubectl(['wait', '--for=condition=Ready', 'node', '--all', '--timeout=60s'], '', 70_000);
    this.say('the nodes are Ready, installing the chart');
  }
}

const isReady = (pod: KubeObject): boolean =>
  pod.status.conditions?.some((one: KubeObject) => one.type === 'Ready' && one.status === 'True') === true;
