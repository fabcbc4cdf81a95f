/** A small cluster in memory that carries plans out, so that tests see where a volume comes to rest. */
import { canonical } from '../../controller/plan/conditions.ts';
import { roleLabel } from '../../controller/plan/labels.ts';
import {
  type Action,
  DEFAULT_OPTIONS,
  DRIVER,
  FINALIZER,
  type Observed,
  type ObservedAgent,
  type ObservedNode,
  type ObservedPod,
  type PlannedEvent,
  PREFIX,
  type SimpleVolume,
  type VolumePlan,
  type WatchBody,
} from '../../controller/plan/types.ts';
import { planVolume } from '../../controller/plan/volume.ts';
import { parseDuration } from '../../lib/core/duration.ts';
import { formatGeneration, parseGeneration } from '../../lib/core/generation.ts';
import type { ReplicaStatus, SourceStatus } from '../../lib/core/parts.ts';
import { DEFAULT_POLICY } from '../../lib/core/policy.ts';

export const START = Date.parse('2026-12-02T12:00:00Z');
export const NAME = { namespace: 'default', volume: 'pvc-1' };

export type Mutable<T> = { -readonly [K in keyof T]: T[K] };

export function node(name: string, change: Partial<ObservedNode> = {}): Mutable<ObservedNode> {
  return {
    name,
    ready: true,
    unschedulable: false,
    inPool: true,
    deleting: false,
    labels: {},
    taints: [],
    allocatable: { cpu: '4', memory: '8Gi', pods: '110' },
    requested: {},
    podCount: 5,
    volumeCount: 0,
    ...change,
  };
}

export function source(body: WatchBody | null, epoch: number, generation: string | null): SourceStatus {
  return {
    ...NAME,
    role: 'active',
    state: body === null ? 'stopped' : 'watching',
    epoch,
    generation,
    quiescent: true,
    delivered: generation,
    pending: 0,
    pendingMs: null,
    entries: 10,
    bytes: 1000,
    policy:
      body === null
        ? DEFAULT_POLICY
        : {
            ...body,
            debounceMs: parseDuration(body.debounce, 'd'),
            maxDelayMs: parseDuration(body.debounce, 'd') * 5,
          },
    ...(body === null ? {} : { source: body.source }),
    targets: (body?.targets ?? []).map((target) => ({
      ...target,
      confirmed: generation,
      state: 'idle',
      lastError: null,
      lastAnswerMs: 10,
    })),
    conditions: [],
    watch: { directories: 1, unwatched: 0, overflows: 0, events: 0 },
    lastBatch: null,
  };
}

export function copy(
  epoch: number,
  generation: string | null,
  change: Partial<ReplicaStatus> = {},
): ReplicaStatus {
  return {
    ...NAME,
    role: 'replica',
    state: generation === null ? 'empty' : 'idle',
    epoch,
    generation,
    wanted: generation,
    freshAgeMs: generation === null ? null : 500,
    entries: 10,
    bytes: 1000,
    conditions: [],
    lastPull: null,
    source: null,
    ...change,
  };
}

export function pod(
  name: string,
  on: string | null,
  change: Partial<ObservedPod> = {},
): Mutable<ObservedPod> {
  return {
    name,
    uid: `uid-${name}`,
    node: on,
    phase: 'Running',
    deleting: false,
    createdAt: START - 3_600_000,
    ready: true,
    readyChangedAt: START - 3_500_000,
    unschedulable: false,
    restarts: 0,
    waiting: [],
    initializing: false,
    controlledBy: { kind: 'StatefulSet', name: 'game' },
    readOnly: false,
    spec: { containers: [{ name: 'c', resources: { requests: { cpu: '500m' } } }] },
    ...change,
  };
}

/** What a pod that has just been made by its controller is like. */
const fresh = (world: World, name: string, on: string | null): Mutable<ObservedPod> =>
  pod(name, on, {
    phase: 'Pending',
    ready: false,
    readyChangedAt: null,
    createdAt: world.now,
    uid: `${name}-${world.now}`,
  });

export class World {
  now = START;
  claim: Observed['claim'] = {
    namespace: 'default',
    name: 'world',
    uid: 'claim-1',
    deleting: false,
    annotations: {},
    storageClassName: 'simple',
    provisioner: DRIVER,
    requestedBytes: 2 ** 30,
  };
  volume: Observed['volume'] = {
    name: 'pvc-1',
    uid: 'pv-1',
    driver: DRIVER,
    pool: 'default',
    storageClassName: 'simple',
    reclaimPolicy: 'Delete',
    annotations: {},
    firstNode: 'a',
    deleting: false,
  };
  object: SimpleVolume | null = null;
  nodes: Mutable<ObservedNode>[];
  pods: Mutable<ObservedPod>[] = [];
  agents: Mutable<ObservedAgent>[];
  fence: Mutable<Observed['fence']> = {
    fenceWaitMs: 0,
    activationWaitMs: 0,
    acknowledged: null,
    released: null,
    consent: null,
  };
  /** how long copies are bound by what they promised the active node when they are told to let go of it, ms */
  promiseMs = 0;
  /** when they were told so */
  toldAt: number | null = null;
  memory: { -readonly [K in keyof Observed['memory']]: Observed['memory'][K][number][] } = {
    prepared: [],
    caughtUp: [],
    fullSyncs: [],
    manualSyncs: [],
  };
  /** the workload is a StatefulSet of one, whose pods carry the role label as node selector or not */
  recreate: 'selector' | 'anywhere' | 'never' = 'selector';
  /** how long after a pod its next one is made, ms: a StatefulSet waits until the old one is gone */
  gapMs = 0;
  private due: { at: number; name: string }[] = [];
  /** the scheduler says nothing of pods that it cannot place */
  mute = false;
  /** where the scheduler places a pod that may run anywhere, when it can */
  prefers: string | null = null;
  workload: Observed['workload'] = null;
  options: Partial<Observed['options']> = {};
  decisions = 0;
  events: PlannedEvent[] = [];
  log: string[] = [];
  /** refuses an action by its kind */
  refuse: (action: Action) => boolean = () => false;

  constructor(names: string[], annotations: Record<string, string> = {}) {
    this.nodes = names.map((name) => node(name));
    this.agents = names.map((name) => ({
      node: name,
      url: `http://${name}:8080`,
      webdavUrl: `http://${name}:8081`,
      reachable: true,
      ready: true,
      reportAgeMs: 100,
      volume: null,
      mounted: null,
      freeBytes: 2 ** 40,
      freezer: { possible: true, reason: 'cgroup v2', cgroup: 'v2' },
    }));
    this.annotate(annotations);
  }

  annotate(values: Record<string, string | null>): void {
    if (this.claim === null) return;
    const annotations: Record<string, string> = { ...this.claim.annotations };
    for (const [key, value] of Object.entries(values))
      if (value === null) delete annotations[PREFIX + key];
      else annotations[PREFIX + key] = value;
    this.claim = { ...this.claim, annotations };
  }

  get status() {
    return this.object?.status ?? {};
  }
  agent(name: string): Mutable<ObservedAgent> {
    return this.agents.find((one) => one.node === name) as Mutable<ObservedAgent>;
  }
  on(name: string): Mutable<ObservedNode> {
    return this.nodes.find((one) => one.name === name) as Mutable<ObservedNode>;
  }
  condition(type: string) {
    return this.status.conditions?.find((one) => one.type === type);
  }
  /** nodes that carry the role label */
  labelled(): string[] {
    return this.nodes
      .filter((one) => one.labels[roleLabel('default', 'world')] === 'active')
      .map((one) => one.name);
  }

  observed(): Observed {
    return structuredClone({
      now: this.now,
      namespace: 'default',
      claimName: 'world',
      claim: this.claim,
      volume: this.volume,
      object: this.object,
      name: this.volume === null ? null : NAME,
      nodes: this.nodes,
      pods: this.pods,
      agents: this.agents,
      fence: this.fence,
      memory: this.memory,
      workload: this.workload,
      nodeNames: this.nodes.map((one) => one.name),
      options: { ...DEFAULT_OPTIONS, ...this.options },
    });
  }

  /** The power of a node goes. */
  kill(name: string): void {
    Object.assign(this.on(name), {
      ready: false,
      taints: [{ key: 'node.kubernetes.io/unreachable', effect: 'NoExecute' }],
    });
    Object.assign(this.agent(name), { reachable: false });
    for (const one of this.pods) if (one.node === name) one.ready = false;
  }
  /** ... and comes back; its agent still thinks what it thought. */
  revive(name: string): void {
    Object.assign(this.on(name), { ready: true, taints: [] });
    Object.assign(this.agent(name), { reachable: true, reportAgeMs: 100 });
  }

  /** One look: plan, carry out, let the world go on for `ms`. Returns the plan. */
  step(ms = 1000, only = Number.POSITIVE_INFINITY): VolumePlan {
    const plan = planVolume(this.observed());
    this.events.push(...plan.events);
    if (plan.status !== null && this.object !== null) this.write(plan.status);
    let count = 0;
    for (const action of plan.actions) {
      if (this.refuse(action)) continue;
      if (count++ >= only) break;
      this.log.push(action.id);
      this.carryOut(action);
    }
    this.goOn(ms, plan);
    return plan;
  }

  /** Looks until nothing has been done for longer than the grace period of the tests. */
  settle(limit = 150): void {
    let quiet = 0;
    for (let i = 0; i < limit && quiet < 14; i += 1) {
      const plan = this.step();
      quiet = plan.actions.some((one) => one.kind !== 'mirror') ? 0 : quiet + 1;
    }
    if (quiet < 14) throw new Error(`it does not come to rest: ${this.log.slice(-12).join(' ')}`);
  }

  private write(status: object): void {
    const object = this.object as SimpleVolume;
    const before = object.status ?? {};
    // The API server gives objects back with their keys in an order of its own.
    const after = JSON.parse(canonical(status)) as typeof before;
    // What the CRD's rules refuse.
    if ((after.epoch ?? 0) < (before.epoch ?? 0)) throw new Error('epoch falls');
    if (
      before.activeNode !== undefined &&
      after.activeNode !== before.activeNode &&
      !((after.epoch ?? 0) > (before.epoch ?? 0))
    )
      throw new Error('another active node in one epoch');
    if (after.promotion && (after.promotion.epoch !== after.epoch || after.promotion.to !== after.activeNode))
      throw new Error('the record is not of this epoch');
    if (
      before.promotable &&
      JSON.stringify(before.promotable) !== JSON.stringify(after.promotable) &&
      !((after.promotable?.version ?? -1) > before.promotable.version)
    )
      throw new Error('promotable without a version');
    for (const one of after.conditions ?? [])
      if (!/^[A-Za-z][A-Za-z0-9]*$/.test(one.reason) || one.message.length > 4096)
        throw new Error(`condition ${one.type}`);
    object.status = after;
  }

  private carryOut(action: Action): void {
    const { object } = this;
    switch (action.kind) {
      case 'createObject':
        this.object = {
          metadata: {
            name: 'world',
            namespace: 'default',
            generation: 1,
            finalizers: [FINALIZER],
            creationTimestamp: new Date(this.now).toISOString(),
          },
          spec: structuredClone(action.spec),
        };
        return;
      case 'patchSpec':
        if (object === null) return;
        if (action.policy !== undefined) object.spec.policy = structuredClone(action.policy);
        if (action.volumeName !== undefined) object.spec.volumeName = action.volumeName;
        object.metadata.generation = (object.metadata.generation ?? 0) + 1;
        return;
      case 'deleteObject':
        if (object !== null) object.metadata.deletionTimestamp = new Date(this.now).toISOString();
        return;
      case 'removeFinalizer':
        this.object = null;
        return;
      case 'decide': {
        const { promotable, activeNode } = this.status;
        const first = activeNode === undefined;
        // What LeaderFence.mayPromote refuses.
        const again = action.record.to === activeNode && this.fence.released === this.status.epoch;
        if (!first && !again && !promotable?.nodes.includes(action.record.to))
          throw new Error('not promotable');
        // The copy's consent comes first.
        this.toldAt ??= this.now;
        const { epoch, to } = action.record;
        const waitMs = this.toldAt + this.promiseMs - this.now;
        if (!first && waitMs > 0) {
          const reply = { node: to, epoch, term: 1, consent: false, code: 'PROMISED', seen: 1 } as const;
          this.fence.consent = { ...reply, waitMs, ageMs: 0 };
          return;
        }
        if (!first && this.fence.fenceWaitMs !== 0 && this.fence.released !== this.status.epoch) return;
        this.write(action.status);
        this.decisions += 1;
        this.fence = { ...this.fence, released: null, acknowledged: null, consent: null };
        this.toldAt = null;
        return;
      }
      case 'prepare': {
        const active = this.agent(action.node);
        const ok =
          active.reachable &&
          active.volume?.role === 'active' &&
          action.confirm.every(
            (name) =>
              this.agent(name).reachable &&
              (active.volume as SourceStatus).targets.some((one) => one.node === name),
          );
        if (ok) this.seal(action.node);
        this.memory.prepared.push({
          tag: action.tag,
          ok,
          generation: ok ? (active.volume?.generation ?? null) : null,
          confirmed: ok ? [...action.confirm] : [],
          error: ok ? null : 'TIMEOUT',
          ageMs: 0,
        });
        return;
      }
      case 'releaseLease':
        if (!this.agent(action.node).reachable) return;
        if (this.pods.some((one) => one.node === action.node && one.phase === 'Running')) return;
        this.fence.released = action.epoch;
        return;
      case 'catchUp': {
        const from = this.agent(action.from);
        const to = this.agent(action.node);
        const ok = from.reachable && to.reachable;
        if (ok) to.volume = copy(action.epoch, action.generation);
        this.memory.caughtUp.push({ tag: action.tag, ok, error: ok ? null : 'TIMEOUT', ageMs: 0 });
        return;
      }
      case 'startWatch': {
        const agent = this.agent(action.node);
        if (!agent.reachable) return;
        const report = agent.volume;
        if (report !== null && report.epoch > action.body.epoch) throw new Error('an older epoch');
        const generation = report?.generation ?? null;
        const seq = (generation === null ? 0 : parseGeneration(generation).seq) + 1;
        agent.volume = source(
          action.body,
          action.body.epoch,
          formatGeneration({ epoch: action.body.epoch, seq }),
        );
        this.seal(action.node);
        return;
      }
      case 'stopWatch': {
        const report = this.agent(action.node).volume;
        if (report?.role === 'active')
          this.agent(action.node).volume = { ...report, state: 'stopped', targets: [] };
        return;
      }
      case 'annotatePv':
        this.volume = {
          ...(this.volume as NonNullable<Observed['volume']>),
          annotations: merged(this.volume?.annotations, action.annotations),
        };
        return;
      case 'annotatePvc':
        if (this.claim !== null)
          this.claim = { ...this.claim, annotations: merged(this.claim.annotations, action.annotations) };
        return;
      case 'expand':
        this.volume = { ...(this.volume as NonNullable<Observed['volume']>), bytes: action.bytes };
        if (this.claim !== null) this.claim = { ...this.claim, capacityBytes: action.bytes };
        return;
      case 'labelNode':
        this.on(action.node).labels = merged(this.on(action.node).labels, action.labels);
        return;
      case 'deletePod': {
        const one = this.pods.find((candidate) => candidate.uid === action.uid);
        if (one === undefined) return;
        const dead = one.node !== null && this.on(one.node)?.ready !== true;
        if (dead && !action.force) one.deleting = true;
        else this.remove(one);
        return;
      }
      case 'fullSync':
        for (const name of action.nodes)
          this.memory.fullSyncs.push({ run: action.run, node: name, state: 'running', error: null });
        return;
      case 'acceptManualSync':
        this.memory.manualSyncs = this.memory.manualSyncs.filter((one) => one.id !== action.requestId);
        return;
      case 'removeCopy': {
        const { volume } = this.agent(action.node);
        if (volume?.role !== 'replica' || volume.epoch > action.epoch)
          throw new Error('removes what must stay');
        this.agent(action.node).volume = null;
        return;
      }
      case 'liftCondition': {
        const report = this.agent(action.node).volume;
        if (report) report.conditions = report.conditions.filter((one) => one.type !== action.condition);
        return;
      }
      case 'mirror':
        return;
    }
  }

  private remove(one: ObservedPod): void {
    this.pods = this.pods.filter((other) => other !== one);
    if (this.recreate !== 'never' && one.controlledBy !== null)
      this.due.push({ at: this.now + this.gapMs, name: one.name });
    this.makePods();
  }

  private makePods(): void {
    for (const { name } of this.due.filter(({ at }) => at <= this.now))
      this.pods.push(fresh(this, name, null));
    this.due = this.due.filter(({ at }) => at > this.now);
  }

  /** A new generation on the active node reaches all targets that answer. */
  seal(name: string): void {
    const report = this.agent(name).volume;
    if (report?.role !== 'active' || report.state === 'stopped') return;
    for (const target of report.targets) {
      const replica = this.agent(target.node ?? '');
      if (replica?.reachable && (replica.volume?.epoch ?? 0) <= report.epoch)
        replica.volume = copy(report.epoch, report.generation);
    }
  }

  private goOn(ms: number, plan: VolumePlan): void {
    this.now += ms;
    if (this.fence.consent !== null) this.fence.consent.ageMs += ms;
    for (const list of [this.memory.prepared, this.memory.caughtUp]) for (const one of list) one.ageMs += ms;
    for (const agent of this.agents) {
      if (agent.reachable) agent.reportAgeMs = 100;
      else if (agent.reportAgeMs !== null) agent.reportAgeMs += ms;
      const report = agent.volume;
      if (report?.role !== 'replica' || report.freshAgeMs === null) continue;
      const active = this.agents.find(
        (one) =>
          one.reachable &&
          one.volume?.role === 'active' &&
          one.volume.epoch === report.epoch &&
          one.volume.state !== 'stopped',
      );
      report.freshAgeMs = active && agent.reachable ? 500 : report.freshAgeMs + (agent.reachable ? ms : 0);
    }
    const { activeNode, promotable } = this.status;
    if (activeNode !== undefined && promotable !== undefined && this.agent(activeNode)?.reachable) {
      const report = this.agent(activeNode).volume;
      if (report?.role === 'active' && report.epoch === this.status.epoch)
        this.fence.acknowledged = promotable.version;
    }
    if (plan.withholdLease && this.fence.fenceWaitMs !== null)
      this.fence.fenceWaitMs = Math.max(0, this.fence.fenceWaitMs - ms);
    this.makePods();
    this.schedule();
  }

  /** The scheduler, kubelet and csi-node: a pod mounts only on the active node. */
  private schedule(): void {
    for (const one of this.pods) {
      if (one.deleting || one.phase !== 'Pending') continue;
      if (one.node === null) {
        const free = this.nodes.filter((candidate) => candidate.ready && !candidate.unschedulable);
        const target =
          this.recreate === 'selector'
            ? free.find((candidate) => this.labelled().includes(candidate.name))
            : (free.find((candidate) => candidate.name === this.prefers) ?? free[0]);
        if (target !== undefined) one.node = target.name;
        if (!this.mute) one.unschedulable = target === undefined;
      }
      const report = one.node === null ? null : this.agent(one.node)?.volume;
      if (
        one.node !== null &&
        one.node === this.status.activeNode &&
        this.on(one.node).ready &&
        report?.role === 'active' &&
        report.epoch === this.status.epoch &&
        this.fence.released !== this.status.epoch
      )
        Object.assign(one, { phase: 'Running', ready: true, readyChangedAt: this.now });
    }
  }
}

const merged = (
  has: Readonly<Record<string, string>> = {},
  patch: Record<string, string | null>,
): Record<string, string> => {
  const out = { ...has };
  for (const [key, value] of Object.entries(patch))
    if (value === null) delete out[key];
    else out[key] = value;
  return out;
};

export const REPLICATED = {
  'replication-enabled': 'true',
  'failover-enabled': 'true',
  'failover-grace-period': '10s',
};

/** A volume at rest: active on a with a healthy pod, whole copies on the others. */
export function atRest(names = ['a', 'b', 'c'], annotations: Record<string, string> = REPLICATED): World {
  const world = new World(names, annotations);
  world.pods = [pod('game-0', 'a')];
  world.settle();
  world.events = [];
  world.log = [];
  return world;
}
