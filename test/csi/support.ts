/**
 * A node, or several, as far as CSI sees them: real agents, real csi-node processes, real bind mounts, in a mount
 * namespace of their own that goes with the test, however that ends. Of the controller there is the real CSI service,
 * asked through its socket; who is active is decided by the test.
 */
import { type ChildProcess, execFileSync, spawn } from 'node:child_process';
import { mkdirSync, mkdtempSync, readFileSync, rmSync } from 'node:fs';
import { tmpdir } from 'node:os';
import path from 'node:path';
import { credentials } from '@grpc/grpc-js';
import t from 'tap';
import { type AgentAddress, Agents } from '../../controller/act/agents.ts';
import type { KnownWorld } from '../../controller/csi/cluster.ts';
import { serveCsi } from '../../controller/csi/serve.ts';
import { clientOf, type GrpcServer } from '../../csi/grpc.ts';
import { type MountEntry, parseMounts } from '../../csi/node/mounts.ts';
import { systemClock } from '../../lib/agent/clock.ts';
import type { Logger, VolumeName } from '../../lib/core/parts.ts';
import type { FencePollReply, FencingMode, Promotable } from '../../lib/fence/types.ts';
import { agentCommand, freePorts, LocalAgent, sleep, waitFor } from '../../lib/local/cluster.ts';
import { native } from '../../lib/native/load.ts';

export const quiet: Logger = { debug() {}, info() {}, warn() {}, error() {}, child: () => quiet };
/** LocalAgent's */
export const POOL = 'local';
const NAMESPACE = 'SIMPLE_VOLUME_TEST_MOUNTS';

/** Why mounts cannot be tried here; false: they can. */
export function noMounts(): string | false {
  if (process.getuid?.() !== 0) return 'needs root';
  try {
    execFileSync('unshare', ['--mount', '--propagation', 'private', 'true'], { stdio: 'pipe' });
    return false;
  } catch (error) {
    return `needs a mount namespace: ${(error as Error).message.split('\n')[0]}`;
  }
}

/**
 * Whether this process is in a mount namespace of its own; if not, the test file is run once more in one, and its output
 * is this one's. Nothing that it mounts is seen by anybody else or left behind.
 */
export async function inOwnMounts(file: string): Promise<boolean> {
  if (process.env[NAMESPACE] === '1') return true;
  const child = spawn(
    'unshare',
    ['--mount', '--propagation', 'private', process.execPath, ...process.execArgv, file],
    { stdio: 'inherit', env: { ...process.env, [NAMESPACE]: '1' } },
  );
  const code = await new Promise<number>((resolve) => child.on('close', (c) => resolve(c ?? 1)));
  process.exit(code);
}

export interface CsiFailure extends Error {
  code: number;
  details: string;
}

type Answer = Record<string, unknown>;
export type Call = (method: string, request?: object) => Promise<Answer>;

/** A client of one service on a socket; each call has this long. */
export function callerOf(socket: string, service: string): { call: Call; close(): void } {
  const Client = clientOf(service);
  const client = new Client(`unix:${socket}`, credentials.createInsecure());
  return {
    call: (method, request = {}) =>
      new Promise((resolve, reject) => {
        const send = (client as unknown as Record<string, (...args: unknown[]) => void>)[method] as (
          ...args: unknown[]
        ) => void;
        send.call(
          client,
          request,
          { deadline: Date.now() + 30_000 },
          (error: Error | null, answer: Answer) => (error ? reject(error) : resolve(answer)),
        );
      }),
    close: () => client.close(),
  };
}

export const mounts = (): MountEntry[] => parseMounts(readFileSync('/proc/self/mountinfo', 'latin1'));
export const mountsAt = (target: string): number => mounts().filter((one) => one.point === target).length;

export interface PlayedRecord extends VolumeName {
  epoch: number;
  activeNode: string;
  fencing: FencingMode;
  promotable: Promotable;
}

export class TestNode {
  readonly name: string;
  readonly agent: LocalAgent;
  readonly kubelet: string;
  readonly endpoint: string;
  readonly socket: string;
  readonly registration: string;
  readonly cgroups: string;
  csi: ChildProcess | null = null;
  log = '';
  #client: { call: Call; close(): void } | null = null;
  #registrar: { call: Call; close(): void } | null = null;

  constructor(name: string, folder: string, agent: LocalAgent, cgroups: string) {
    this.name = name;
    this.agent = agent;
    this.kubelet = path.join(folder, `k-${name}`);
    this.endpoint = path.join(this.kubelet, 'plugins/csi.sock');
    this.registration = path.join(this.kubelet, 'plugins_registry');
    this.socket = path.join(folder, `${name}.sock`);
    this.cgroups = cgroups;
    mkdirSync(path.join(this.kubelet, 'pods'), { recursive: true });
  }

  /** @param sockets of agents, default: the one of this node */
  async startCsi(sockets: readonly string[] = [this.socket], flags: readonly string[] = []): Promise<void> {
    const [program, ...args] = agentCommand();
    const child = spawn(
      program as string,
      [
        ...args,
        'csi-node',
        `--node=${this.name}`,
        `--agent-socket=${sockets.join(',')}`,
        `--kubelet-dir=${this.kubelet}`,
        `--endpoint=${this.endpoint}`,
        `--cgroup-dir=${this.cgroups}`,
        '--log-level=debug',
        ...flags,
      ],
      { stdio: ['ignore', 'pipe', 'pipe'] },
    );
    this.csi = child;
    for (const stream of [child.stdout, child.stderr])
      stream?.on('data', (chunk: Buffer) => {
        this.log += chunk;
      });
    await waitFor('csi-node answers', async () => {
      if (child.exitCode !== null) throw new Error(`csi-node ended: ${this.log}`);
      this.#client?.close();
      this.#client = callerOf(this.endpoint, 'csi.v1.Node');
      return this.call('NodeGetCapabilities');
    });
  }

  /** SIGKILL: a crash. */
  async endCsi(signal: NodeJS.Signals = 'SIGTERM'): Promise<void> {
    const { csi } = this;
    this.csi = null;
    this.#client?.close();
    this.#client = null;
    this.#registrar?.close();
    this.#registrar = null;
    if (!csi || csi.exitCode !== null) return;
    const ended = new Promise((resolve) => csi.on('close', resolve));
    csi.kill(signal);
    await ended;
  }

  call: Call = (method, request) => {
    if (!this.#client) return Promise.reject(new Error('csi-node does not run'));
    return this.#client.call(method, request);
  };

  register(method: string, request: object = {}): Promise<Answer> {
    this.#registrar ??= callerOf(
      path.join(this.registration, 'simple-volume.csi.shipstuff.io-reg.sock'),
      'pluginregistration.Registration',
    );
    return this.#registrar.call(method, request);
  }

  /** As kubelet makes it, up to the last part. */
  target(podUid: string, volume = 'v'): string {
    const parent = path.join(this.kubelet, 'pods', podUid, 'volumes/kubernetes.io~csi', volume);
    mkdirSync(parent, { recursive: true });
    return path.join(parent, 'mount');
  }
}

export class TestCsi {
  readonly folder: string;
  readonly nodes = new Map<string, TestNode>();
  readonly records = new Map<string, PlayedRecord>();
  /** names of the cluster's nodes; an agent may be there or not */
  readonly labels = new Map<string, { ready: boolean }>();
  readonly agents: Agents;
  readonly endpoint: string;
  selected: string | null = null;
  /** the controller does nothing for volumes that it was not told of */
  auto = false;
  deaf = false;
  #server: GrpcServer | null = null;
  #client: { call: Call; close(): void } | null = null;
  #beats = new Map<string, number>();
  #stopped = false;
  #loop: Promise<void> = Promise.resolve();

  private constructor(folder: string) {
    this.folder = folder;
    this.endpoint = path.join(folder, 'controller.sock');
    this.agents = new Agents({
      clock: systemClock(native),
      token: ({ node }) => `token-of-the-agent-${node}`,
    });
  }

  static async start(
    names: readonly string[],
    options: { cgroups?: string; lease?: string; csi?: boolean; flags?: readonly string[] } = {},
  ): Promise<TestCsi> {
    const folder = mkdtempSync(path.join(tmpdir(), 'sv-csi-'));
    const made = new TestCsi(folder);
    t.teardown(() => made.stop());
    const ports = await freePorts(2 * names.length);
    for (const [i, name] of names.entries()) {
      const socket = path.join(folder, `${name}.sock`);
      const agent = new LocalAgent({
        node: name,
        folder,
        httpPort: ports[2 * i] as number,
        webdavPort: ports[2 * i + 1] as number,
        token: `token-of-the-agent-${name}`,
        flags: ['--lease', options.lease ?? '4s', '--socket', socket, ...(options.flags ?? [])],
      });
      made.nodes.set(name, new TestNode(name, folder, agent, options.cgroups ?? path.join(folder, 'none')));
      made.labels.set(name, { ready: true });
    }
    await Promise.all([...made.nodes.values()].map((one) => one.agent.start()));
    made.setAgents();
    if (options.csi !== false) await Promise.all([...made.nodes.values()].map((one) => one.startCsi()));
    await made.serve();
    made.#loop = made.#play();
    return made;
  }

  /** As informers would: agents whose pods are there. */
  setAgents(without: readonly string[] = []): void {
    this.agents.set(
      [...this.nodes.values()]
        .filter(({ name }) => !without.includes(name))
        .map(
          ({ name, agent }): AgentAddress => ({
            node: name,
            pool: POOL,
            url: agent.url,
            webdavUrl: agent.webdavUrl,
            ready: true,
            uid: name,
            pod: `agent-${name}`,
          }),
        ),
    );
  }

  async serve(): Promise<void> {
    const node = (name: string) => {
      const label = this.labels.get(name);
      return (
        label && {
          name,
          ready: label.ready,
          unschedulable: false,
          deleting: false,
          labels: { [`simple-volume.shipstuff.io/pool.${POOL}`]: 'true' },
          taints: [],
          allocatable: {},
        }
      );
    };
    const world = {
      nodes: { get: node, values: () => [...this.labels.keys()].map((name) => node(name)).values() },
      volumes: { get: () => undefined },
      synced: () => true,
    } as unknown as KnownWorld;
    const selected = (): string | null => this.selected;
    const kube = {
      list: async function* (kind: { plural: string }) {
        if (kind.plural === 'persistentvolumeclaims' && selected() !== null)
          yield {
            metadata: {
              name: 'claim',
              annotations: { 'volume.kubernetes.io/selected-node': selected() },
            },
          };
      },
    } as never;
    this.#server = await serveCsi(this.endpoint, '0.0.0', kube, world, this.agents, quiet);
    this.#client = callerOf(this.endpoint, 'csi.v1.Controller');
  }

  call: Call = (method, request) =>
    this.#client ? this.#client.call(method, request) : Promise.reject(new Error('no controller'));

  node(name: string): TestNode {
    return this.nodes.get(name) as TestNode;
  }

  /** The first decision, or a later one. */
  async activate(
    name: VolumeName,
    node: string,
    epoch = 1,
    fencing: FencingMode = 'none',
    promotable: Promotable = { version: epoch, nodes: [], adding: [] },
  ): Promise<void> {
    await this.node(node).agent.call('POST', '/replication/watch/start', { ...name, epoch, targets: [] });
    if (fencing === 'none')
      await this.node(node).agent.call('POST', '/replication/watch/stop', { ...name, epoch });
    this.records.set(`${name.namespace}/${name.volume}`, {
      ...name,
      epoch,
      activeNode: node,
      fencing,
      promotable,
    });
  }

  /** The leader's polls, and its first decisions where the test does not make them. */
  async #play(): Promise<void> {
    while (!this.#stopped) {
      await sleep(200);
      for (const [name, { agent }] of this.nodes) {
        if (this.deaf) continue;
        const volumes = [...this.records.values()]
          .filter((one) => one.activeNode === name)
          .map(({ namespace, volume, epoch, fencing, promotable }) => ({
            namespace,
            volume,
            epoch,
            renew: true,
            fencing,
            promotable: { version: promotable.version, nodes: promotable.nodes },
          }));
        try {
          const reply = await agent.call<FencePollReply>('POST', '/replication/fence/poll', {
            controller: 'test',
            term: 1,
            leaseMs: 4000,
            beat: this.#beats.get(name) ?? null,
            volumes,
          });
          this.#beats.set(name, reply.beat);
        } catch {
          this.#beats.delete(name);
        }
      }
    }
  }

  /** CreateVolume as the provisioner calls it. */
  async create(name: string, more: object = {}): Promise<{ id: string; context: Record<string, string> }> {
    const { volume } = (await this.call('CreateVolume', createRequest(name, more))) as {
      volume: { volume_id: string; volume_context: Record<string, string> };
    };
    return { id: volume.volume_id, context: volume.volume_context };
  }

  async stop(): Promise<void> {
    if (this.#stopped) return;
    this.#stopped = true;
    await this.#loop;
    this.#client?.close();
    await this.#server?.close();
    this.agents.close();
    await Promise.all([...this.nodes.values()].map((one) => one.endCsi('SIGKILL')));
    await Promise.all([...this.nodes.values()].map((one) => one.agent.stop()));
    for (const { point } of mounts())
      if (point.startsWith(`${this.folder}/`)) execFileSync('umount', ['-l', point], { stdio: 'ignore' });
    rmSync(this.folder, { recursive: true, force: true });
  }
}

export const capability = (mode = 'SINGLE_NODE_MULTI_WRITER', flags: string[] = []): object => ({
  mount: { mount_flags: flags },
  access_mode: { mode },
});

export const createRequest = (name: string, more: object = {}): object => ({
  name,
  capacity_range: { required_bytes: '1048576' },
  volume_capabilities: [capability()],
  parameters: {
    pool: POOL,
    'csi.storage.k8s.io/pvc/namespace': 'ns',
    'csi.storage.k8s.io/pvc/name': 'claim',
  },
  ...more,
});

/** gRPC code of a refusal, and its text. */
export async function refused(call: Promise<unknown>): Promise<{ code: number; message: string }> {
  try {
    await call;
  } catch (error) {
    const { code, details } = error as CsiFailure;
    return { code, message: details };
  }
  throw new Error('the call was not refused');
}
