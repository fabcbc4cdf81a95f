/**
 * A simulated cluster around the real controller: API server, network, nodes with agents and csi-node, the rest of
 * Kubernetes played. Random faults for a few minutes of simulated time, then peace; what must never happen is looked at
 * after every event, what must come true again at the end. One seed, one history.
 */
import { FENCE_LEASE_KEY } from '../../controller/act/fence.ts';
import {
  CLAIMS,
  CLASSES,
  KubeError,
  LEASES,
  NODES,
  type Node,
  PODS,
  type Pod,
  SIMPLE_VOLUMES,
  STATEFUL_SETS,
  VOLUMES,
} from '../../controller/cluster/index.ts';
import type { KubeObject, SimpleVolume, SimpleVolumeStatus } from '../../controller/cluster/types.ts';
import { Controller } from '../../controller/controller.ts';
import { candidateLabel, roleLabel } from '../../controller/plan/labels.ts';
import { ACTIVE_NODE, EPOCH } from '../../controller/plan/promotion.ts';
import { DRIVER, PREFIX } from '../../controller/plan/types.ts';
import { compareGenerations, formatGeneration } from '../../lib/core/generation.ts';
import type { Logger } from '../../lib/core/parts.ts';
import { CLOCK_DRIFT } from '../../lib/fence/timing.ts';
import { EPOCH_MS, SimApi, SimKube, type Stored } from './api.ts';
import { Net } from './net.ts';
import { type Container, has, missing, NAME, SimNode, TOKEN, type Tree, writable } from './node.ts';
import { type MachineClock, Process, Random, Time } from './time.ts';

const SYSTEM = 'simple-volume-system';
const LEASE = 'simple-volume-controller';
const CLAIM = { namespace: 'default', name: 'v' };

/** What a test takes out or puts in, to see that the world notices. */
export interface Mutation {
  /** after a controller was made, before it leads */
  controller?: (controller: Controller, world: ControllerWorld) => void;
  /** before everything */
  world?: (world: ControllerWorld) => void;
  /** what an agent says of itself, as the controller hears it */
  report?: (report: Record<string, unknown>, node: SimNode) => void;
}

export interface WorldOptions {
  mutation?: Mutation;
  /** seconds of trouble; default by the seed, 60 to 160 */
  seconds?: number;
  fencing?: 'lease' | 'none';
  /** how often faults begin, a factor */
  trouble?: number;
  /** these faults only */
  only?: readonly string[];
  /** instead of what the seed says */
  set?: {
    nodes?: number;
    graceMs?: number;
    maxStalenessMs?: number;
    debounce?: string;
    /** the list of preferred nodes names one at least */
    priority?: boolean;
    latencyMs?: number;
    /** chance of an apply that takes many seconds */
    slowApply?: number;
  };
  /** at the end the controllers are taken away */
  alone?: boolean;
  /** notes what the controllers log */
  verbose?: boolean;
}

/** Kinds of trouble: seeds take them in turn. */
export const KINDS: Record<string, WorldOptions> = {
  all: {},
  dense: { trouble: 3, seconds: 90 },
  losses: { only: ['behind', 'twice', 'power', 'controllerCrash', 'link'], trouble: 0.5 },
  moves: {
    only: ['cordon', 'podDeleted', 'controllerHang', 'controllerCrash', 'link', 'agentRestart', 'apiErrors'],
    trouble: 2,
  },
  partitions: {
    only: ['isolated', 'unheard', 'link', 'power', 'controllerHang'],
    trouble: 1.5,
    seconds: 120,
  },
};

export interface Outcome {
  seed: number;
  /** null: nothing was wrong */
  bad: string | null;
  history: string[];
  counts: Record<string, number>;
}

interface ControllerSlot {
  name: string;
  machine: MachineClock;
  process: Process | null;
  kube: SimKube | null;
  controller: Controller | null;
  starts: number;
}

interface Promotion {
  epoch: number;
  from: string;
  to: string;
  planned: boolean;
  tree: Tree | null;
}

export class ControllerWorld {
  readonly seed: number;
  readonly random: Random;
  readonly time = new Time();
  readonly api: SimApi;
  readonly net: Net;
  readonly nodes: SimNode[] = [];
  readonly controllers: ControllerSlot[] = [];
  readonly options: WorldOptions;
  readonly leaseMs: number;
  readonly fencing: 'lease' | 'none';
  readonly graceMs: number;
  readonly maxStalenessMs: number;
  readonly stateful: boolean;
  readonly selector: boolean;
  readonly monitorGraceMs: number;
  readonly evictionMs: number;
  readonly counts: Record<string, number> = {
    promotions: 0,
    planned: 0,
    failovers: 0,
    again: 0,
    leftBehind: 0,
    forced: 0,
    writes: 0,
    kills: 0,
    exempt: 0,
    takeovers: 0,
  };
  bad: string | null = null;
  readonly history: string[] = [];
  readonly promotions: Promotion[] = [];
  readonly #generations = new Map<string, Tree>();
  readonly #heartbeats = new Map<string, number>();
  readonly #notReadySince = new Map<string, number>();
  readonly #readySince = new Map<string, number>();
  readonly #actives = new Map<number, string>();
  /** epochs that ended while the mode was none */
  readonly #unfenced = new Set<number>();
  /** newest epoch in which something was written */
  #newest = 0;
  #pods = 0;
  replicas = 1;
  /** nothing is disturbed: before the trouble and after it */
  peace = true;
  api503 = 0;
  apiSlow = 0;
  apiDown = false;
  /** the pod breaks wherever it runs, until then (true time) */
  brokenUntil = 0;
  crashChance = 0;
  readonly stuck: number;
  readonly #logger: Logger;

  constructor(seed: number, options: WorldOptions = {}) {
    this.seed = seed;
    this.options = options;
    const random = new Random(seed);
    this.random = random;
    this.api = new SimApi(this.time);
    this.net = new Net(this.time, random);
    this.leaseMs = random.chance(0.7) ? 4000 : 8000;
    this.fencing = options.fencing ?? (random.chance(0.85) ? 'lease' : 'none');
    const { set = {} } = options;
    this.graceMs = set.graceMs ?? random.pick([1000, 3000, 8000]);
    this.maxStalenessMs = set.maxStalenessMs ?? random.pick([15_000, 30_000, 60_000]);
    this.stateful = random.chance(0.5);
    this.selector = random.chance(0.7);
    this.monitorGraceMs = random.between(6_000, 14_000);
    this.evictionMs = random.between(5_000, 30_000);
    if (set.latencyMs !== undefined) this.net.latencyMs = set.latencyMs;
    this.stuck = random.pick([0.002, 0.01, 0.03]);
    this.net.stuck = 0;
    this.net.stuckMs = random.pick([1_000, 4_000, 12_000]);
    this.crashChance = random.chance(0.5) ? random.pick([0.003, 0.01, 0.04]) : 0;
    const log =
      (level: string) =>
      (data: object, text: string): void => {
        if (options.verbose && (level !== 'debug' || text === 'planned'))
          this.note(`   ${level}: ${text} ${JSON.stringify(data)}`);
      };
    this.#logger = {
      debug: log('debug'),
      info: log('info'),
      warn: log('warn'),
      error: log('error'),
      child: () => this.#logger,
    };
  }

  note(text: string): void {
    this.history.push(`${(this.time.now / 1000).toFixed(2)} ${text}`);
    if (this.history.length > 3000) this.history.splice(0, 1000);
  }

  #count(what: string): void {
    this.counts[what] = (this.counts[what] ?? 0) + 1;
  }

  fail(text: string): void {
    if (this.bad !== null) return;
    this.bad = text;
    this.note(`BAD ${text}`);
  }

  clock(): MachineClock {
    const { random } = this;
    return {
      rate: 1 + (random.chance(0.5) ? random.pick([-1, 1]) : random.next() * 2 - 1) * CLOCK_DRIFT,
      offset: random.between(1e6, 2e6),
      wall: EPOCH_MS + (random.chance(0.7) ? random.between(-200, 200) : random.between(-3000, 3000)),
    };
  }

  node(name: string): SimNode {
    return this.nodes.find((one) => one.name === name) as SimNode;
  }
  get object(): SimpleVolume | null {
    return this.api.find(SIMPLE_VOLUMES, CLAIM);
  }
  get status(): SimpleVolumeStatus {
    return this.object?.status ?? {};
  }
  pods(): Pod[] {
    return this.api.all(PODS).filter((one) => one.metadata.namespace === 'default');
  }

  /* What there is at the beginning. */

  setUp(): void {
    const { random, api } = this;
    const names = ['a', 'b', 'c', 'd'].slice(0, this.options.set?.nodes ?? random.pick([2, 3, 3, 3, 4]));
    for (const name of names) {
      const node = new SimNode(
        name,
        {
          time: this.time,
          random,
          net: this.net,
          leaseMs: this.leaseMs,
          slowApply: () => (this.peace ? 0 : (this.options.set?.slowApply ?? 0.01)),
          log: this.#logger,
          note: (text) => {
            if (text.endsWith('stands still')) this.#count('stills');
            if (text.endsWith('is killed')) this.#count('kills');
            this.note(text);
          },
          bad: (text) => this.fail(text),
          activated: (one, epoch) => this.#activated(one, epoch),
          removed: (one, tree) => {
            this.note(`${one.name} removes its copy`);
            this.#count('removed');
            const active = this.status.activeNode;
            if (active && !has(this.node(active).disk.live, tree))
              this.fail(`a copy is removed from ${one.name} that has more than ${active}`);
          },
          sealed: (_, held) => {
            const id = formatGeneration(held.generation);
            const known = this.#generations.get(id);
            if (known && known !== held.tree) this.fail(`two different copies are called ${id}`);
            this.#generations.set(id, held.tree);
          },
        },
        this.clock(),
        name === 'a',
      );
      this.nodes.push(node);
      this.net.servers.set(name, {
        get process() {
          return node.process;
        },
        get up() {
          return node.up;
        },
        handle: async (method, path, body) => {
          const answer = await node.handle(method, path, body);
          const report = this.options.mutation?.report;
          if (report && path === '/replication/volumes')
            for (const one of (answer as { volumes: Record<string, unknown>[] }).volumes) report(one, node);
          return answer;
        },
      });
    }
    api.create(CLASSES, {
      metadata: { name: 'fast' },
      provisioner: DRIVER,
      parameters: { pool: 'default' },
    });
    api.create(LEASES, {
      metadata: { namespace: SYSTEM, name: LEASE, annotations: { [FENCE_LEASE_KEY]: String(this.leaseMs) } },
      spec: { holderIdentity: '', leaseDurationSeconds: 1, leaseTransitions: 1 },
    });
    for (const node of this.nodes) {
      api.create(NODES, {
        metadata: { name: node.name, labels: { [`${PREFIX}pool.default`]: 'true' } },
        spec: {},
      } as Node);
      this.#nodeStatus(node.name, true);
      this.#heartbeats.set(node.name, 0);
      this.#readySince.set(node.name, 0);
      api.create(PODS, {
        metadata: {
          namespace: SYSTEM,
          name: `agent-${node.name}`,
          labels: { 'app.kubernetes.io/component': 'agent', [`${PREFIX}pool`]: 'default' },
        },
        spec: {
          nodeName: node.name,
          containers: [
            {
              name: 'agent',
              ports: [
                { name: 'http', containerPort: 8080 },
                { name: 'webdav', containerPort: 8081 },
              ],
            },
          ],
        },
        // Names are resolved as they are: agentOfPod wants an address, so each node has one.
      } as Pod);
      this.#podStatus(SYSTEM, `agent-${node.name}`, {
        phase: 'Running',
        podIP: this.ip(node.name),
        conditions: [{ type: 'Ready', status: 'True' }],
      });
      const server = this.net.servers.get(node.name);
      if (server) this.net.servers.set(this.ip(node.name), server);
      node.startAgent();
      node.startCsi();
      this.#kubelet(node);
    }
    const priority =
      this.options.set?.priority || random.chance(0.3) ? [random.pick(names), random.pick(names)] : [];
    const annotations: Record<string, string> = {
      'replication-enabled': 'true',
      'failover-enabled': 'true',
      'failover-grace-period': `${this.graceMs}ms`,
      'failover-max-staleness': `${this.maxStalenessMs}ms`,
      'replication-debounce': this.options.set?.debounce ?? random.pick(['300ms', '1s']),
      'failover-fencing': this.fencing,
      ...(priority.length > 0 ? { 'failover-node-priority': [...new Set(priority)].join(',') } : {}),
      ...(random.chance(0.2) ? { 'replication-replicas': '1' } : {}),
      'replication-confirmed-replicas': random.pick(['0', '1']),
    };
    api.create(CLAIMS, {
      metadata: {
        ...CLAIM,
        annotations: Object.fromEntries(Object.entries(annotations).map(([k, v]) => [PREFIX + k, v])),
      },
      spec: {
        storageClassName: 'fast',
        volumeName: NAME.volume,
        resources: { requests: { storage: '1Gi' } },
      },
    });
    api.create(VOLUMES, {
      metadata: { name: NAME.volume },
      spec: {
        storageClassName: 'fast',
        capacity: { storage: '1Gi' },
        persistentVolumeReclaimPolicy: 'Delete',
        claimRef: { namespace: CLAIM.namespace, name: CLAIM.name },
        csi: {
          driver: DRIVER,
          volumeHandle: NAME.volume,
          volumeAttributes: { pool: 'default', node: 'a' },
        },
      },
    });
    if (this.stateful) api.create(STATEFUL_SETS, { metadata: { ...CLAIM }, spec: { replicas: 1 } } as never);
    this.note(
      `${names.length} nodes, lease ${this.leaseMs}, fencing ${this.fencing}, grace ${this.graceMs}, staleness ${this.maxStalenessMs}, ${this.stateful ? 'StatefulSet' : 'Deployment'}${this.selector ? ' with a selector' : ''}, priority ${priority}`,
    );
    api.admit = (kind, before, after) => this.#admit(kind, before, after);
    this.options.mutation?.world?.(this);
    for (const name of random.chance(0.8) ? ['k1', 'k2'] : ['k1']) {
      const slot: ControllerSlot = {
        name,
        machine: this.clock(),
        process: null,
        kube: null,
        controller: null,
        starts: 0,
      };
      this.controllers.push(slot);
      this.startController(slot);
    }
    const every = (ms: number, work: () => void): void => {
      const go = (): void => {
        work();
        this.time.after(ms, go);
      };
      this.time.after(random.between(0, ms), go);
    };
    every(500, () => this.#scheduler());
    every(1000, () => this.#nodeMonitor());
    every(700, () => this.#workload());
    every(120, () => this.#writers());
  }

  ip(node: string): string {
    return `10.0.0.${node.charCodeAt(0) - 96}`;
  }

  /* The controllers. */

  startController(slot: ControllerSlot): void {
    if (slot.process?.alive) return;
    const { random, net } = this;
    const process = new Process(slot.name, this.time, slot.machine);
    slot.process = process;
    slot.starts++;
    const kube = new SimKube(
      this.api,
      process,
      {
        cut: () => net.isCut(slot.name, 'api') || this.apiDown,
        delay: () => net.delay() + (this.apiSlow > 0 ? random.wait(this.apiSlow) : 0),
        refuses: (write) => this.#refusal(write),
        wrote: (what) => {
          if (this.peace || what.includes('lease') || !random.chance(this.crashChance)) return;
          this.note(`${slot.name} ends right behind ${what}, before its answer`);
          this.stopController(slot, random.between(100, 6000));
        },
      },
      random,
    );
    slot.kube = kube;
    Controller.start({
      namespace: SYSTEM,
      identity: `${slot.name}-${slot.starts}`,
      version: '0',
      kube,
      agentsHttp: this.#byAddress(process, slot.name),
      token: () => TOKEN,
      leaseName: LEASE,
      electionMs: 5000,
      electionRenewMs: 800,
      fenceLeaseMs: this.leaseMs,
      reportMs: 1000,
      health: null,
      trigger: null,
      clock: process.clock,
      logger: this.#logger,
      wrote: (what) => {
        if (this.peace || !process.alive || !random.chance(this.crashChance)) return;
        this.note(`${slot.name} ends behind ${what}`);
        this.stopController(slot, random.between(100, 6000));
      },
    }).then(
      (controller) => {
        slot.controller = controller;
        this.options.mutation?.controller?.(controller, this);
      },
      (error: Error) => {
        if (process.alive) this.fail(`${slot.name} does not start: ${error.message}`);
      },
    );
  }

  #byAddress(process: Process, name: string) {
    const http = this.net.client(process, name);
    return {
      close: () => http.close(),
      call: <T>(call: Parameters<typeof http.call>[0]) => {
        const url = new URL(call.url);
        const node = this.nodes.find((one) => this.ip(one.name) === url.hostname);
        return http.call<T>({ ...call, url: `http://${node?.name ?? url.hostname}${url.pathname}` });
      },
    };
  }

  stopController(slot: ControllerSlot, forMs: number): void {
    if (!slot.process?.alive) return;
    slot.process.alive = false;
    slot.controller = null;
    for (const one of slot.kube?.watches ?? []) one.break(true);
    this.time.after(forMs, () => this.startController(slot));
  }

  #refusal(write: boolean): KubeError | null {
    if (this.api503 <= 0 || !this.random.chance(this.api503)) return null;
    const status = this.random.pick(write ? [409, 429, 500, 503] : [429, 500, 503]);
    switch (status) {
      case 409:
        return new KubeError('Conflict', 'as if it were written meanwhile', { status });
      case 429:
        return new KubeError('TooManyRequests', 'later', { status, retryAfterMs: 1000 });
      default:
        return new KubeError('ServerError', 'no', { status });
    }
  }

  get leader(): ControllerSlot | null {
    return this.controllers.find((one) => one.process?.alive && one.controller?.election.leads()) ?? null;
  }

  /* Kubernetes, played. */

  #nodeStatus(name: string, ready: boolean): void {
    const condition = {
      type: 'Ready',
      status: ready ? 'True' : 'Unknown',
      reason: ready ? 'KubeletReady' : 'NodeStatusUnknown',
    };
    this.api.change(NODES, { name }, {}, 'status', (before) => ({
      ...before,
      status: { conditions: [condition], allocatable: { cpu: '4', memory: '8Gi', pods: '110' } },
    }));
    this.api.change(NODES, { name }, {}, undefined, (before) => {
      const spec = before.spec as Node['spec'];
      const taints = (spec?.taints ?? []).filter((one) => one.key !== 'node.kubernetes.io/unreachable');
      return {
        ...before,
        spec: {
          ...spec,
          taints: ready
            ? taints
            : [...taints, { key: 'node.kubernetes.io/unreachable', effect: 'NoExecute' }],
        },
      };
    });
  }

  #podStatus(namespace: string, name: string, status: object): void {
    if (!this.api.find(PODS, { namespace, name })) return;
    this.api.change(PODS, { namespace, name }, {}, 'status', (before) => ({
      ...before,
      status: { ...(before.status as object), ...status },
    }));
  }

  /** The node lifecycle controller. */
  #nodeMonitor(): void {
    if (this.apiDown) return;
    for (const node of this.nodes) {
      const { name } = node;
      const object = this.api.find(NODES, { name }) as Node;
      const ready = object.status?.conditions?.[0]?.status === 'True';
      const silent = this.time.now - (this.#heartbeats.get(name) ?? 0);
      if (ready && silent > this.monitorGraceMs) {
        this.note(`${name} is NotReady`);
        this.#nodeStatus(name, false);
        this.#notReadySince.set(name, this.time.now);
        this.#readySince.delete(name);
        for (const pod of this.api.all(PODS))
          if (pod.spec?.nodeName === name)
            this.#podStatus(pod.metadata.namespace as string, pod.metadata.name, {
              conditions: [{ type: 'Ready', status: 'False', lastTransitionTime: this.api.stamp() }],
            });
      } else if (!ready && silent < 1500) {
        this.note(`${name} is Ready`);
        this.#nodeStatus(name, true);
        this.#notReadySince.delete(name);
        this.#readySince.set(name, this.time.now);
      }
      const since = this.#notReadySince.get(name);
      if (since !== undefined && this.time.now - since > this.evictionMs)
        for (const pod of this.pods())
          if (pod.spec?.nodeName === name && !pod.metadata.deletionTimestamp)
            this.api.remove(PODS, pod.metadata as { name: string; namespace: string });
    }
  }

  #scheduler(): void {
    if (this.apiDown) return;
    for (const pod of this.pods()) {
      if (pod.spec?.nodeName || pod.metadata.deletionTimestamp) continue;
      const fit = (this.api.all(NODES) as Node[]).filter(
        (node) =>
          !node.spec?.unschedulable &&
          (node.spec?.taints ?? []).length === 0 &&
          node.status?.conditions?.[0]?.status === 'True' &&
          Object.entries(pod.spec?.nodeSelector ?? {}).every(
            ([key, value]) => node.metadata.labels?.[key] === value,
          ),
      );
      const name = pod.metadata as { name: string; namespace: string };
      if (fit.length === 0) {
        if (pod.status?.conditions?.[0]?.status !== 'False')
          this.#podStatus('default', name.name, {
            conditions: [
              {
                type: 'PodScheduled',
                status: 'False',
                reason: 'Unschedulable',
                lastTransitionTime: this.api.stamp(),
              },
            ],
          });
        continue;
      }
      const node = this.random.pick(fit).metadata.name;
      this.api.change(PODS, name, {}, undefined, (before) => ({
        ...before,
        spec: { ...(before.spec as object), nodeName: node },
      }));
      this.#podStatus('default', name.name, { conditions: [{ type: 'PodScheduled', status: 'True' }] });
      this.note(`the pod ${name.name} is placed on ${node}`);
    }
  }

  /** A Deployment makes the next pod when the last one is told to end, a StatefulSet when it is gone. */
  #workload(): void {
    if (this.apiDown) return;
    const pods = this.pods();
    const active = pods.filter((one) => !one.metadata.deletionTimestamp);
    if (active.length > this.replicas) {
      this.api.remove(PODS, (active[0] as Pod).metadata as { name: string; namespace: string });
      return;
    }
    if (active.length >= this.replicas || (this.stateful && pods.length > 0)) return;
    const name = this.stateful ? 'v-0' : `v-${++this.#pods}`;
    this.api.create(PODS, {
      metadata: {
        namespace: 'default',
        name,
        ownerReferences: [
          {
            apiVersion: 'apps/v1',
            kind: this.stateful ? 'StatefulSet' : 'ReplicaSet',
            name: 'v',
            uid: 'owner',
            controller: true,
          },
        ],
      },
      spec: {
        ...(this.selector ? { nodeSelector: { [roleLabel('default', 'v')]: 'active' } } : {}),
        containers: [{ name: 'app' }],
        volumes: [{ name: 'data', persistentVolumeClaim: { claimName: 'v' } }],
      },
    } as Pod);
    this.#podStatus('default', name, { phase: 'Pending' });
  }

  #kubelet(node: SimNode): void {
    const process = new Process(`kubelet ${node.name}`, this.time, node.machine);
    node.kubelet = process;
    const busy = new Set<string>();
    let known: Pod[] = [];
    let agentReady = true;
    const online = (): boolean => !this.net.isCut(node.name, 'api') && !this.apiDown;
    const tell = (pod: Pod, status: object): void => {
      const now = this.api.find(PODS, pod.metadata as { name: string; namespace: string });
      if (now?.metadata.uid !== pod.metadata.uid) return;
      this.#podStatus('default', pod.metadata.name, status);
    };
    const containerStatus = (state: object, ready: boolean, restartCount = 0) => ({
      phase: ready || restartCount > 0 ? 'Running' : 'Pending',
      containerStatuses: [{ name: 'app', ready, restartCount, state }],
      conditions: [
        { type: 'Ready', status: ready ? 'True' : 'False', lastTransitionTime: this.api.stamp() },
        { type: 'PodScheduled', status: 'True' },
      ],
    });
    const end = async (uid: string): Promise<void> => {
      busy.add(uid);
      // A frozen container ends when it is killed.
      await process.sleep(this.random.between(100, 1500));
      const one = node.containers.get(uid);
      if (one) one.alive = false;
      await process.sleep(this.random.between(10, 100));
      for (let i = 0; node.csi === null && i < 100; i++) await process.sleep(200);
      const { csi } = node;
      if (csi) void csi.unpublish(uid);
      await process.sleep(20);
      node.containers.delete(uid);
      node.disk.published.delete(uid);
      busy.delete(uid);
    };
    const begin = async (pod: Pod): Promise<void> => {
      const uid = pod.metadata.uid as string;
      busy.add(uid);
      const { csi } = node;
      try {
        if (!csi) throw new Error('no csi-node');
        let failed: Error | null = null;
        let done = false;
        csi.publish(uid).then(
          () => {
            done = true;
          },
          (error: Error) => {
            failed = error;
          },
        );
        for (let i = 0; i < 40 && !done && failed === null; i++) await process.sleep(50);
        if (!done) throw failed ?? new Error('csi-node does not answer');
        await process.sleep(this.random.between(100, 800));
        const one = node.containers.get(uid);
        if (one && !one.killed) {
          one.alive = true;
          one.startedAt = this.time.now;
          this.note(`the pod on ${node.name} runs (epoch ${one.epoch})`);
        }
      } catch {
        await process.sleep(this.random.between(500, 2000));
      } finally {
        busy.delete(uid);
      }
    };
    const reported = new Map<string, string>();
    const sync = (): void => {
      process.clock.setTimeout(sync, 400);
      if (online()) {
        this.#heartbeats.set(node.name, this.time.now);
        known = this.pods().filter((one) => one.spec?.nodeName === node.name);
        const ready = node.agent?.open === true && !node.agent.process.hangs;
        const object = this.api.find(PODS, { namespace: SYSTEM, name: `agent-${node.name}` }) as Pod;
        if (ready !== agentReady || (object.status?.conditions?.[0]?.status === 'True') !== ready) {
          agentReady = ready;
          this.#podStatus(SYSTEM, `agent-${node.name}`, {
            conditions: [{ type: 'Ready', status: ready ? 'True' : 'False' }],
          });
        }
      }
      const uids = new Set(known.map((one) => one.metadata.uid as string));
      for (const uid of node.containers.keys()) if (!uids.has(uid) && !busy.has(uid)) void end(uid);
      for (const pod of known) {
        const uid = pod.metadata.uid as string;
        if (busy.has(uid)) continue;
        const one = node.containers.get(uid);
        if (pod.metadata.deletionTimestamp) {
          if (one) void end(uid);
          else if (online()) {
            const { name, namespace } = pod.metadata;
            try {
              this.api.remove(PODS, { name, namespace }, { uid, gracePeriodSeconds: 0 });
            } catch (error) {
              if (!(error instanceof KubeError)) throw error;
            }
          }
          continue;
        }
        if (!one) {
          void begin(pod);
          continue;
        }
        if (!online()) continue;
        const broken = this.time.now < this.brokenUntil;
        const state = one.killed || broken ? 'broken' : one.alive ? 'running' : 'starting';
        const said = `${state} ${this.api.find(PODS, pod.metadata as never)?.status?.conditions?.[0]?.status}`;
        if (reported.get(uid) === said) continue;
        reported.set(uid, state === 'running' ? 'running True' : `${state} False`);
        if (state === 'broken')
          tell(pod, containerStatus({ waiting: { reason: 'CrashLoopBackOff' } }, false, 2));
        else if (state === 'running') tell(pod, containerStatus({ running: {} }, true));
      }
    };
    process.clock.setTimeout(sync, this.random.between(0, 400));
  }

  #writers(): void {
    for (const node of this.nodes)
      for (const one of node.containers.values())
        if (writable(one) && this.random.chance(0.15)) {
          node.write(one);
          this.#count('writes');
        }
  }

  /* Faults. */

  partition(name: string, from: readonly string[], forMs: number): void {
    const others = from.filter((one) => one !== name);
    for (const other of others) this.net.cut(name, other);
    this.time.after(forMs, () => {
      if (!this.peace) for (const other of others) this.net.heal(name, other);
    });
  }

  get places(): string[] {
    return [...this.nodes.map((one) => one.name), ...this.controllers.map((one) => one.name), 'api'];
  }

  powerOff(node: SimNode, forMs: number): void {
    if (!node.up) return;
    this.note(`${node.name} loses its power for ${Math.round(forMs / 1000)} s`);
    node.powerOff();
    this.time.after(forMs, () => this.powerOn(node));
  }
  powerOn(node: SimNode): void {
    if (node.up) return;
    this.note(`${node.name} is switched on`);
    node.powerOn();
    this.#kubelet(node);
  }

  restartAgent(node: SimNode, forMs: number): void {
    if (!node.agent) return;
    this.note(`the agent of ${node.name} is away for ${Math.round(forMs)} ms`);
    node.stopAgent();
    this.time.after(forMs, () => node.startAgent());
  }

  cordon(name: string, on: boolean): void {
    this.api.change(NODES, { name }, {}, undefined, (before) => ({
      ...before,
      spec: { ...(before.spec as object), unschedulable: on },
    }));
  }

  readonly faults: Record<string, { weight: number; begin: () => void }> = {
    power: {
      weight: 4,
      begin: () => {
        const { random } = this;
        const active = this.status.activeNode;
        const node = active && random.chance(0.6) ? this.node(active) : random.pick(this.nodes);
        this.powerOff(node, random.wait(30_000) + 1000);
      },
    },
    /** The next active node is lost right behind the first one. */
    twice: {
      weight: 1.5,
      begin: () => {
        const first = this.status.activeNode;
        if (!first) return;
        const epoch = this.status.epoch ?? 0;
        this.powerOff(this.node(first), this.random.wait(60_000) + 15_000);
        const look = (tries: number): void => {
          if (this.peace || tries > 600) return;
          const { status } = this;
          if ((status.epoch ?? 0) > epoch && status.activeNode) {
            const next = this.node(status.activeNode);
            this.time.after(this.random.wait(1500), () => {
              if (!this.peace) this.powerOff(next, this.random.wait(40_000) + 10_000);
            });
          } else this.time.after(50, () => look(tries + 1));
        };
        look(0);
      },
    },
    /** A copy misses what another one gets, then the active node is lost. */
    behind: {
      weight: 1.5,
      begin: () => {
        const active = this.status.activeNode;
        const others = this.nodes.filter((one) => one.name !== active);
        if (!active || others.length < 2) return;
        const { name } = this.random.pick(others);
        this.note(`${name} gets nothing more from ${active}`);
        this.partition(name, [active], 40_000);
        this.time.after(this.random.between(2_000, 15_000), () => {
          if (!this.peace) this.powerOff(this.node(active), this.random.wait(30_000) + 25_000);
        });
      },
    },
    isolated: {
      weight: 4,
      begin: () => {
        const active = this.status.activeNode;
        const name =
          active && this.random.chance(0.6)
            ? active
            : this.random.pick(this.places.filter((one) => one !== 'api'));
        this.note(`${name} is cut off`);
        this.partition(name, this.places, this.random.wait(20_000) + 1000);
      },
    },
    link: {
      weight: 5,
      begin: () => {
        const [one, other] = [this.random.pick(this.places), this.random.pick(this.places)];
        if (one === other) return;
        this.note(`${one} and ${other} do not hear each other`);
        this.partition(one, [other], this.random.wait(15_000) + 500);
      },
    },
    /** Controllers hear neither the active node, nor it them; the copies hear all. */
    unheard: {
      weight: 1.5,
      begin: () => {
        const active = this.status.activeNode;
        if (!active) return;
        this.note(`the controllers do not hear ${active}`);
        this.partition(
          active,
          [...this.controllers.map((one) => one.name), ...(this.random.chance(0.5) ? ['api'] : [])],
          this.random.wait(25_000) + 3000,
        );
      },
    },
    /** The controllers and Kubernetes hear nothing of the active node, its copies do. */
    unheardLong: {
      weight: 0,
      begin: () => {
        const active = this.status.activeNode;
        if (!active) return;
        this.note(`nobody but the copies hears ${active}`);
        this.partition(
          active,
          [...this.controllers.map((one) => one.name), 'api'],
          this.random.wait(20_000) + 45_000,
        );
      },
    },
    /** All copies miss what is written, for longer than is allowed; then the active node is lost. */
    behindAll: {
      weight: 0,
      begin: () => {
        const active = this.status.activeNode;
        if (!active) return;
        this.note(`no copy gets anything more from ${active}`);
        this.partition(
          active,
          this.nodes.map((one) => one.name),
          100_000,
        );
        this.time.after(this.maxStalenessMs + 20_000, () => {
          if (!this.peace) this.powerOff(this.node(active), 60_000);
        });
      },
    },
    /** The copies of the cluster are late exactly when a node comes back. */
    lateCopy: {
      weight: 0,
      begin: () => {
        const active = this.status.activeNode;
        if (!active) return;
        this.note(`${active} is NotReady for a moment, and the watches do not tell that it is over`);
        this.net.cut(active, 'api');
        const look = (): void => {
          if (this.peace) return;
          if (!this.#notReadySince.has(active)) {
            this.time.after(100, look);
            return;
          }
          this.time.after(500, () => {
            for (const slot of this.controllers)
              for (const one of [...(slot.kube?.watches ?? [])]) one.break(true);
            if (!this.peace) this.net.heal(active, 'api');
          });
        };
        look();
      },
    },
    /** A copy is behind another, the active node is lost, and a new leader finds that. */
    newLeader: {
      weight: 0,
      begin: () => {
        const active = this.status.activeNode;
        const others = this.nodes.filter((one) => one.name !== active);
        if (!active || others.length < 2) return;
        const { name } = this.random.pick(others);
        this.note(`${name} gets nothing more from ${active}`);
        this.partition(name, [active], 200_000);
        this.time.after(6_000, () => {
          if (this.peace) return;
          this.powerOff(this.node(active), 200_000);
          const look = (): void => {
            if (this.peace) return;
            if (
              this.status.conditions?.some((one) => one.type === 'WorkloadHealthy' && one.status === 'False')
            )
              for (const slot of this.controllers) this.stopController(slot, 15_000);
            else this.time.after(200, look);
          };
          look();
        });
      },
    },
    /** The active node hears the leader alone, and the leader does not hear the API server. */
    split: {
      weight: 1.5,
      begin: () => {
        const active = this.status.activeNode;
        const { leader } = this;
        if (!active || !leader) return;
        const ms = this.random.wait(20_000) + 15_000;
        this.note(`${active} hears ${leader.name} alone, which does not hear the API server`);
        this.partition(
          active,
          this.places.filter((one) => one !== leader.name),
          ms,
        );
        this.partition(leader.name, ['api'], ms);
      },
    },
    /** The kubelet of the active node is not heard; its agent is. */
    silent: {
      weight: 1.5,
      begin: () => {
        const active = this.status.activeNode;
        if (!active) return;
        this.note(`the kubelet of ${active} is silent`);
        const others = this.nodes.map((one) => one.name);
        this.partition(
          active,
          ['api', ...(this.random.chance(0.5) ? others : [])],
          this.random.wait(15_000) + 15_000,
        );
      },
    },
    control: {
      weight: 1.5,
      begin: () => {
        const ms = this.random.wait(20_000) + 2000;
        this.note(`the control plane is away for ${Math.round(ms)} ms`);
        for (const slot of this.controllers) this.partition(slot.name, this.places, ms);
      },
    },
    apiDown: {
      weight: 1.5,
      begin: () => {
        const ms = this.random.wait(12_000) + 500;
        this.note(`the API server is away for ${Math.round(ms)} ms`);
        this.apiDown = true;
        this.time.after(ms, () => {
          this.apiDown = false;
          // As after a start: nothing is late just because nobody could say anything.
          for (const node of this.nodes) this.#heartbeats.set(node.name, this.time.now);
        });
      },
    },
    apiSlow: {
      weight: 1.5,
      begin: () => {
        const slow = this.random.pick([300, 1500, 5000]);
        this.note(`the API server takes ${slow} ms more`);
        this.apiSlow = slow;
        this.time.after(this.random.wait(15_000), () => {
          this.apiSlow = 0;
        });
      },
    },
    apiErrors: {
      weight: 2,
      begin: () => {
        this.api503 = this.random.pick([0.05, 0.3, 0.7]);
        this.note(`the API server refuses ${this.api503 * 100} %`);
        this.time.after(this.random.wait(10_000), () => {
          this.api503 = 0;
        });
      },
    },
    watches: {
      weight: 2,
      begin: () => {
        const silently = this.random.chance(0.5);
        if (this.random.chance(0.4)) this.api.forgotten = this.api.version;
        for (const slot of this.controllers)
          for (const one of [...(slot.kube?.watches ?? [])]) if (this.random.chance(0.5)) one.break(silently);
        this.note(`watches are dropped${silently ? ' without a word' : ''}`);
      },
    },
    controllerCrash: {
      weight: 2.5,
      begin: () => {
        const slot =
          this.random.chance(0.7) && this.leader ? this.leader : this.random.pick(this.controllers);
        this.note(`${slot.name} is killed`);
        this.stopController(slot, this.random.wait(8000));
      },
    },
    controllerHang: {
      weight: 2.5,
      begin: () => {
        const slot =
          this.random.chance(0.7) && this.leader ? this.leader : this.random.pick(this.controllers);
        if (!slot.process) return;
        const ms = this.random.wait(8000) + 200;
        this.note(`${slot.name} hangs for ${Math.round(ms)} ms`);
        slot.process.hangsUntil = this.time.now + ms;
      },
    },
    agentRestart: {
      weight: 3,
      begin: () =>
        this.restartAgent(
          this.random.pick(this.nodes),
          this.random.chance(0.7) ? this.random.between(50, 2000) : this.random.wait(15_000),
        ),
    },
    agentHang: {
      weight: 2,
      begin: () => {
        const { agent, name } = this.random.pick(this.nodes);
        if (!agent) return;
        const ms = this.random.wait(6000) + 200;
        this.note(`the agent of ${name} hangs for ${Math.round(ms)} ms`);
        agent.process.hangsUntil = this.time.now + ms;
      },
    },
    csiRestart: {
      weight: 1.5,
      begin: () => {
        const node = this.random.pick(this.nodes);
        if (!node.csi) return;
        this.note(`csi-node of ${node.name} restarts`);
        node.stopCsi();
        this.time.after(this.random.between(20, 1200), () => node.startCsi());
      },
    },
    cordon: {
      weight: 3,
      begin: () => {
        const active = this.status.activeNode;
        const name = active && this.random.chance(0.7) ? active : this.random.pick(this.nodes).name;
        const drain = this.random.chance(0.5);
        this.note(`${name} is ${drain ? 'drained' : 'cordoned'}`);
        this.cordon(name, true);
        if (drain)
          for (const pod of this.pods())
            if (pod.spec?.nodeName === name) this.api.remove(PODS, pod.metadata as never);
        this.time.after(this.random.wait(30_000) + 2000, () => {
          if (!this.peace) this.cordon(name, false);
        });
      },
    },
    podDeleted: {
      weight: 2,
      begin: () => {
        const [pod] = this.pods();
        if (pod) this.api.remove(PODS, pod.metadata as never);
      },
    },
    podBroken: {
      weight: 1,
      begin: () => {
        const ms = this.random.wait(20_000);
        this.note(`the application is broken for ${Math.round(ms)} ms`);
        this.brokenUntil = this.time.now + ms;
      },
    },
    scaled: {
      weight: 0.7,
      begin: () => {
        this.note('the workload is scaled to nothing');
        this.#scale(0);
        this.time.after(this.random.wait(15_000) + 1000, () => this.#scale(1));
      },
    },
    force: {
      weight: 0.7,
      begin: () => {
        const node = this.random.pick(this.nodes).name;
        if (!this.object) return;
        this.note(`an operator forces ${node}`);
        this.api.change(SIMPLE_VOLUMES, CLAIM, {}, undefined, (before) => ({
          ...before,
          spec: {
            ...(before.spec as object),
            force: { action: 'Promote', node, reason: `because of ${this.time.now}` },
          },
        }));
      },
    },
    fencingChanged: {
      weight: 0.4,
      begin: () => {
        if (this.fencing !== 'lease') return;
        this.note('failover-fencing becomes none for a while');
        this.#annotate('failover-fencing', 'none');
        this.time.after(this.random.wait(12_000), () => this.#annotate('failover-fencing', 'lease'));
      },
    },
  };

  #scale(replicas: number): void {
    this.replicas = replicas;
    if (this.stateful)
      this.api.change(STATEFUL_SETS, CLAIM, {}, undefined, (before) => ({ ...before, spec: { replicas } }));
  }

  #annotate(key: string, value: string): void {
    this.api.change(CLAIMS, CLAIM, {}, undefined, (before) => ({
      ...before,
      metadata: {
        ...before.metadata,
        annotations: { ...before.metadata.annotations, [PREFIX + key]: value },
      },
    }));
  }

  #trouble(): void {
    const all = Object.entries(this.faults).filter(
      ([name]) => this.options.only === undefined || this.options.only.includes(name),
    );
    // Those without a weight of their own come only when they are asked for.
    const weight = (one: { weight: number }): number => (this.options.only ? one.weight || 1 : one.weight);
    const sum = all.reduce((total, [, one]) => total + weight(one), 0);
    const mean = 7000 / (this.options.trouble ?? 1);
    const next = (): void => {
      if (this.peace) return;
      let at = this.random.next() * sum;
      for (const [, one] of all) {
        at -= weight(one);
        if (at <= 0) {
          one.begin();
          break;
        }
      }
      this.time.after(this.random.chance(0.3) ? this.random.wait(500) : this.random.wait(mean), next);
    };
    this.time.after(this.random.wait(mean), next);
  }

  #makePeace(): void {
    this.note('peace');
    this.peace = true;
    this.net.healAll();
    this.net.stuck = 0;
    this.apiDown = false;
    this.apiSlow = 0;
    this.api503 = 0;
    this.brokenUntil = 0;
    this.#scale(1);
    if (this.fencing === 'lease') this.#annotate('failover-fencing', 'lease');
    for (const node of this.nodes) {
      this.powerOn(node);
      node.startAgent();
      node.startCsi();
      if (node.agent) node.agent.process.hangsUntil = 0;
      this.cordon(node.name, false);
      this.#heartbeats.set(node.name, this.time.now);
    }
    for (const slot of this.controllers) {
      if (slot.process) slot.process.hangsUntil = 0;
      this.startController(slot);
    }
  }

  /* What must never be. */

  #mode(status: SimpleVolumeStatus): 'lease' | 'none' {
    return status.conditions?.find((one) => one.type === 'FencingPossible')?.status === 'True'
      ? 'lease'
      : 'none';
  }

  #activated(node: SimNode, epoch: number): void {
    this.note(`${node.name} is activated in epoch ${epoch}`);
    const other = this.#actives.get(epoch);
    if (other !== undefined && other !== node.name)
      this.fail(`${other} and ${node.name} are both made active in epoch ${epoch}`);
    this.#actives.set(epoch, node.name);
    const { disk } = node;
    if (disk.journal) this.fail(`${node.name} is made active in the middle of an apply`);
    const promotion = this.promotions.find((one) => one.epoch === epoch);
    if (promotion?.tree && disk.live && !has(disk.live, promotion.tree))
      this.fail(`${node.name} is activated in epoch ${epoch} without what it had at the decision`);
  }

  #admit(kind: string, before: Stored | null, after: Stored | null): void {
    if (kind === 'simplevolumes' && after)
      this.#decided((before as SimpleVolume | null)?.status ?? {}, (after as SimpleVolume).status ?? {});
    if (kind === 'pods' && after === null && SimKube.sent !== null && before) this.#podTaken(before);
  }

  /** A pod is taken off without its kubelet: then nothing of it may write any more. */
  #podTaken(pod: Stored): void {
    const node = this.nodes.find((one) => one.name === (pod as Pod).spec?.nodeName);
    const container = node?.containers.get(pod.metadata.uid as string);
    if (container && writable(container) && !container.exempt)
      this.fail(`the pod on ${node?.name} is taken off by force while it writes`);
  }

  #line(epoch: number, active: string): Tree | null {
    const node = this.node(active);
    if (!node) return null;
    const { disk } = node;
    if (disk.role === 'active' && disk.epoch === epoch) return disk.live;
    // It never began; the line ends where the copy was when it was chosen.
    return this.promotions.find((one) => one.epoch === epoch)?.tree ?? null;
  }

  #decided(was: SimpleVolumeStatus, is: SimpleVolumeStatus): void {
    if (was.epoch === undefined || was.activeNode === undefined || is.epoch === was.epoch) return;
    if (is.epoch === undefined || is.epoch < was.epoch) {
      this.fail(`the record falls from epoch ${was.epoch} to ${is.epoch}`);
      return;
    }
    const record = is.promotion;
    const from = was.activeNode;
    const to = is.activeNode as string;
    this.#count('promotions');
    const kind = record?.planned ? 'planned' : 'failovers';
    this.#count(kind);
    const sent = SimKube.sent;
    const target = this.node(to);
    this.note(
      `DECIDED by ${sent?.who}: epoch ${is.epoch} on ${to}, was ${from}, ${record?.planned ? 'planned' : 'failover'}: ${record?.reason}${record?.leftBehind ? ` LEFT BEHIND ${record.leftBehind}` : ''}`,
    );
    if (this.#mode(was) === 'none') {
      this.#unfenced.add(was.epoch);
      for (const one of this.node(from)?.containers.values() ?? []) {
        one.exempt = true;
        this.#count('exempt');
      }
    }
    if (record?.leftBehind) this.#count('leftBehind');
    if (!target) {
      this.fail(`epoch ${is.epoch} is on ${to}, which is no node`);
      return;
    }
    const { disk } = target;
    const forced = record?.reason.includes('forced it') === true;
    if (forced) this.#count('forced');
    if (to === from) {
      this.#count('again');
      this.promotions.push({ epoch: is.epoch as number, from, to, planned: true, tree: disk.live });
      return;
    }
    const tree =
      disk.role === 'replica' && !disk.demoted ? ((disk.journal ?? disk.held)?.tree ?? null) : null;
    if (disk.role !== 'replica' || disk.demoted || (disk.aside && !disk.journal) || !tree) {
      this.fail(`${to} is promoted and holds no whole copy of the line`);
      return;
    }
    const at = sent?.at ?? this.time.now;
    // A report is at most some seconds old; an agent that has not answered for longer is no candidate.
    if (disk.journal && at - disk.journalSince > 9000 && at - target.agentSince > 9000)
      this.fail(`${to} is promoted in the middle of an apply`);
    const ready = this.#readySince.get(from);
    if (
      this.#mode(was) === 'none' &&
      !record?.planned &&
      !forced &&
      ready !== undefined &&
      at - ready > 12_000
    )
      this.fail(`${to} is promoted in mode none although Kubernetes calls ${from} Ready`);
    this.promotions.push({
      epoch: is.epoch as number,
      from,
      to,
      planned: record?.planned === true,
      tree,
    });
    const line = this.#line(was.epoch, from);
    const sentAt = sent?.at ?? this.time.now;
    if (line) {
      const lost = missing(line, tree);
      const name = `${lost.length} writes, the oldest ${((sentAt - (lost.at(-1)?.at ?? 0)) / 1000).toFixed(1)} s old`;
      if (record?.planned && lost.length > 0)
        this.fail(`the planned move to ${to} in epoch ${is.epoch} loses ${name}`);
      // What was known is a report, at most some seconds old when the write left.
      const oldest = lost.at(-1)?.at ?? sentAt;
      if (!record?.planned && !forced && sentAt - oldest > this.maxStalenessMs * 1.05 + 12_000)
        this.fail(`a stale copy is promoted on ${to}: ${name}, allowed are ${this.maxStalenessMs} ms`);
    }
    if (record?.planned || forced || record?.leftBehind || line === null) return;
    // A live copy that the leader and the new active node could read all the while.
    const leader = sent?.who ?? '';
    const mine = (disk.journal ?? disk.held)?.generation;
    for (const other of this.nodes) {
      if (other === target || other.name === from) continue;
      const theirs = other.disk;
      const { held } = theirs;
      const settled =
        other.agent?.open === true &&
        !other.agent.process.hangs &&
        this.time.now - other.agentSince > 15_000 &&
        this.net.wholeFor(leader, other.name) > 15_000 &&
        this.net.wholeFor(to, other.name) > 15_000 &&
        theirs.role === 'replica' &&
        theirs.epoch === was.epoch &&
        !theirs.demoted &&
        !theirs.aside &&
        !theirs.journal &&
        held !== null &&
        sentAt - theirs.heldSince > 8_000;
      if (!settled || held === null || mine === undefined) continue;
      if (
        compareGenerations(held.generation, mine) > 0 &&
        held.generation.epoch === was.epoch &&
        has(line, held.tree)
      )
        this.fail(
          `${to} is promoted at ${formatGeneration(mine)} although ${other.name} holds ${formatGeneration(held.generation)} and could be read`,
        );
    }
  }

  /** After every event. */
  look(): void {
    let first: { node: SimNode; one: Container } | null = null;
    for (const node of this.nodes)
      for (const one of node.containers.values()) {
        if (!writable(one)) continue;
        // With none nobody stops it, by choice.
        if (one.exempt || this.#unfenced.has(one.epoch)) continue;
        if (one.epoch < this.#newest && this.time.now > one.startedAt)
          this.fail(`${node.name} goes on in epoch ${one.epoch} after epoch ${this.#newest} was written`);
        if (first && first.node !== node)
          this.fail(
            `two writers: ${first.node.name} (epoch ${first.one.epoch}) and ${node.name} (epoch ${one.epoch})`,
          );
        first = { node, one };
        this.#newest = Math.max(this.#newest, one.epoch);
      }
  }

  /** What is not yet as it should be when all is well; null: nothing. */
  unrest(): string | null {
    const { object, status } = this;
    if (!object || status.activeNode === undefined) return 'there is no record';
    const { activeNode, epoch } = status;
    if (status.phase !== 'Active') return `phase ${status.phase}: ${this.#conditions()}`;
    const record = status.promotion;
    if (record && record.done.length < 7) return `of the promotion only ${record.done} is done`;
    if (status.conditions?.some((one) => one.type === 'Ready' && one.status !== 'True')) return 'not Ready';
    const node = this.node(activeNode);
    // A node that is wanted no more is told nothing more; its watch is stopped.
    const actives = this.nodes.filter(
      (one) =>
        one.disk.role === 'active' &&
        (one === node || one.disk.watch !== null || status.replicas?.some((r) => r.node === one.name)),
    );
    if (actives.length !== 1 || actives[0] !== node)
      return `active are ${actives.map((one) => one.name)}, the record says ${activeNode}`;
    if (node.disk.epoch !== epoch)
      return `${activeNode} is in epoch ${node.disk.epoch}, the record in ${epoch}`;
    const running = this.nodes.flatMap((one) =>
      [...one.containers.values()].filter(writable).map(() => one.name),
    );
    if (running.length !== 1 || running[0] !== activeNode)
      return `writers run on ${running.join() || 'no node'}`;
    const pods = this.pods();
    if (pods.length !== 1) return `${pods.length} pods`;
    for (const one of this.nodes) {
      if (one === node || !status.replicas?.some((r) => r.node === one.name)) continue;
      const { held, role, demoted, aside } = one.disk;
      if (role !== 'replica' || demoted || aside || !held) return `${one.name} holds no copy`;
      const behind = missing(node.disk.live as Tree, held.tree).at(-1);
      if (behind && this.time.now - behind.at > 6000) return `${one.name} is behind`;
      if (!has(node.disk.live, held.tree)) return `${one.name} holds something of another line`;
    }
    const volume = this.api.find(VOLUMES, { name: NAME.volume }) as KubeObject;
    const claim = this.api.find(CLAIMS, CLAIM) as KubeObject;
    if (volume.metadata.annotations?.[ACTIVE_NODE] !== activeNode) return 'the volume names another node';
    if (volume.metadata.annotations?.[EPOCH] !== String(epoch)) return 'the volume names another epoch';
    if (claim.metadata.annotations?.[ACTIVE_NODE] !== activeNode) return 'the claim names another node';
    for (const one of this.api.all(NODES) as Node[]) {
      const { name, labels } = one.metadata;
      if ((labels?.[roleLabel('default', 'v')] === 'active') !== (name === activeNode))
        return `the role label of ${name} is ${labels?.[roleLabel('default', 'v')]}`;
      const candidate = name === activeNode || status.promotable?.nodes.includes(name) === true;
      if ((labels?.[candidateLabel('default', 'v')] === 'true') !== candidate)
        return `the candidate label of ${name}`;
    }
    if (this.fencing === 'lease' && this.#mode(status) !== 'lease') return 'fencing is not in force';
    return null;
  }

  #conditions(): string {
    return (this.status.conditions ?? [])
      .filter((one) => one.status !== 'True')
      .map((one) => `${one.type} ${one.reason}: ${one.message}`)
      .join('; ');
  }

  async until(end: number, done: () => boolean = () => false): Promise<boolean> {
    while (this.bad === null && (await this.time.step(end))) {
      this.look();
      if (done()) return true;
    }
    return false;
  }

  async run(): Promise<Outcome> {
    this.setUp();
    const { random } = this;
    // First it comes up undisturbed.
    const calm = (limit: number, what: string): Promise<void> => this.#calm(limit, what);
    await calm(150_000, 'comes up');
    if (this.bad === null) {
      this.note('trouble begins');
      this.peace = false;
      this.net.stuck = this.stuck;
      this.#trouble();
      await this.until(this.time.now + (this.options.seconds ?? random.between(60, 160)) * 1000);
    }
    if (this.bad === null) {
      this.#makePeace();
      await calm(600_000, 'is well again');
    }
    if (this.bad === null && this.fencing === 'lease' && this.options.alone) await this.#alone();
    this.counts.takeovers = this.controllers.reduce((sum, one) => sum + one.starts, 0);
    this.counts.seconds = Math.round(this.time.now / 1000);
    this.counts.events = this.time.events;
    return { seed: this.seed, bad: this.bad, history: this.history, counts: this.counts };
  }

  async #calm(limit: number, what: string): Promise<void> {
    const end = this.time.now + limit;
    let since = this.time.now;
    let looked = 0;
    let last: string | null = 'nothing was looked at';
    const there = await this.until(end, () => {
      if (this.time.now - looked < 500) return false;
      looked = this.time.now;
      last = this.unrest();
      if (last !== null) since = this.time.now;
      return this.time.now - since > 5000;
    });
    if (!there) this.fail(`it never ${what}: ${last}`);
  }

  /** A control plane that is away stops nobody while the copies can be reached (docs/fencing.md). */
  async #alone(): Promise<void> {
    if ((this.status.promotable?.nodes ?? []).length === 0) return;
    this.note('the controllers are taken away');
    for (const slot of this.controllers) {
      if (slot.process) slot.process.alive = false;
      slot.process = null;
    }
    const node = this.node(this.status.activeNode as string);
    await this.until(this.time.now + 3 * this.leaseMs + 3000, () => {
      const running = [...node.containers.values()].some(writable);
      if (!running) this.fail(`without a controller the writer on ${node.name} stands still`);
      return false;
    });
  }
}

/** Runs one seed. Math.random is the seed's meanwhile, and whoever sets a real timer is told of. */
export async function simulate(seed: number, options: WorldOptions = {}): Promise<Outcome> {
  const world = new ControllerWorld(seed, options);
  const real = {
    random: Math.random,
    setTimeout: globalThis.setTimeout,
    setInterval: globalThis.setInterval,
  };
  /** What the test runner does for itself is none of ours. */
  const watched =
    (what: 'setTimeout' | 'setInterval') =>
    (...args: unknown[]): unknown => {
      const stack = new Error(what).stack ?? '';
      if (/\/(controller|csi|lib)\/[^\n]*\.ts/.test(stack)) world.fail(`a real ${what} is used: ${stack}`);
      return (real[what] as (...a: unknown[]) => unknown)(...args);
    };
  Math.random = () => world.random.next();
  globalThis.setTimeout = watched('setTimeout') as never;
  globalThis.setInterval = watched('setInterval') as never;
  try {
    return await world.run();
  } catch (error) {
    world.fail(`${(error as Error).stack}`);
    return { seed, bad: world.bad, history: world.history, counts: world.counts };
  } finally {
    Math.random = real.random;
    globalThis.setTimeout = real.setTimeout;
    globalThis.setInterval = real.setInterval;
  }
}
