/**
 * What is: copies of the cluster's objects, cut down to what is decided from, and what the agents said last. `observe`
 * puts it together for one volume, as the planner wants it.
 */
import type { PoolSpace, ReplicaStatus, SourceStatus, VolumeName } from '../lib/core/parts.ts';
import { type AgentAddress, type Agents, agentKey, agentOfPod } from './act/agents.ts';
import type { FenceDriver } from './act/fence.ts';
import type { VolumeMemory } from './act/memory.ts';
import {
  CLAIMS,
  CLASSES,
  CLUSTER_SIMPLE_VOLUMES,
  createInformer,
  type Kube,
  keyOf,
  NODES,
  type Node,
  type PersistentVolume,
  type PersistentVolumeClaim,
  PODS,
  type Pod,
  SIMPLE_VOLUMES,
  type StorageClass,
  VOLUMES,
} from './cluster/index.ts';
import type {
  Clock,
  ClusterSimpleVolume,
  Informer,
  KubeObject,
  Logger,
  Resource,
  SimpleVolume,
} from './cluster/types.ts';
import { canonical } from './plan/conditions.ts';
import { addRequests, podRequests, SUFFIXES } from './plan/fit.ts';
import { isVolumeLabel, labelId } from './plan/labels.ts';
import {
  DRIVER,
  type Observed,
  type ObservedAgent,
  type ObservedClaim,
  type ObservedNode,
  type ObservedPersistentVolume,
  type ObservedPod,
  type PlanOptions,
  type PodTemplate,
  PREFIX,
} from './plan/types.ts';
import { requestOf } from './trigger/runs.ts';

export type VolumeReport = SourceStatus | ReplicaStatus;

/** Annotations of others that are looked at. */
const FOREIGN = ['volume.kubernetes.io/selected-node'];
const DEFAULT_POOL = 'default';

interface KeptClaim extends Omit<ObservedClaim, 'provisioner'> {
  volumeName: string;
}
interface KeptClass {
  name: string;
  provisioner: string;
  pool: string;
}
interface KeptVolume extends Omit<ObservedPersistentVolume, 'pool'> {
  /** of its attributes, null: its class says */
  pool: string | null;
  claim: string | null;
  claimUid: string | null;
}
interface KeptNode {
  name: string;
  ready: boolean;
  unschedulable: boolean;
  deleting: boolean;
  labels: Record<string, string>;
  taints: ObservedNode['taints'];
  allocatable: Record<string, string>;
}
interface KeptPod {
  namespace: string;
  node: string | null;
  finished: boolean;
  requests: Record<string, number>;
  /** the claims that it names */
  claims: { name: string; readOnly: boolean }[];
  /** only for pods that name claims */
  pod: Omit<ObservedPod, 'readOnly'> | null;
  agent: AgentAddress | null;
}

const annotationsOf = (object: KubeObject): Record<string, string> =>
  Object.fromEntries(
    Object.entries(object.metadata.annotations ?? {}).filter(
      ([key]) => key.startsWith(PREFIX) || FOREIGN.includes(key),
    ),
  );

/** Bytes of a quantity of the API; null for what is none. */
export function bytesOf(quantity: string | undefined): number | null {
  const match = /^(\d+(?:\.\d+)?(?:e\d+)?)(m|[kMGTPE]i?)?$/.exec(quantity ?? '');
  if (!match) return null;
  const factor = match[2] === 'm' ? 1e-3 : (SUFFIXES[match[2] ?? ''] ?? 1);
  return Math.ceil(Number(match[1]) * factor);
}

function keepClaim(claim: PersistentVolumeClaim): KeptClaim {
  const { metadata, spec } = claim;
  return {
    namespace: metadata.namespace as string,
    name: metadata.name,
    uid: metadata.uid ?? '',
    deleting: metadata.deletionTimestamp !== undefined,
    annotations: annotationsOf(claim),
    storageClassName: spec?.storageClassName ?? '',
    requestedBytes: bytesOf(spec?.resources?.requests?.storage),
    capacityBytes: bytesOf(claim.status?.capacity?.storage),
    volumeName: spec?.volumeName ?? '',
  };
}

const keepClass = (one: StorageClass): KeptClass => ({
  name: one.metadata.name,
  provisioner: one.provisioner,
  pool: one.parameters?.pool ?? DEFAULT_POOL,
});

function keepVolume(volume: PersistentVolume): KeptVolume | undefined {
  const { metadata, spec } = volume;
  if (spec?.csi?.driver !== DRIVER) return undefined;
  const attributes = spec.csi.volumeAttributes ?? {};
  const ref = spec.claimRef;
  return {
    name: metadata.name,
    uid: metadata.uid ?? '',
    driver: spec.csi.driver,
    pool: attributes.pool ?? null,
    storageClassName: spec.storageClassName ?? '',
    reclaimPolicy: spec.persistentVolumeReclaimPolicy === 'Delete' ? 'Delete' : 'Retain',
    annotations: annotationsOf(volume),
    firstNode: attributes.node ?? attributes.firstNode ?? null,
    bytes: bytesOf(spec.capacity?.storage),
    deleting: metadata.deletionTimestamp !== undefined,
    claim: ref?.namespace && ref.name ? `${ref.namespace}/${ref.name}` : null,
    claimUid: ref?.uid ?? null,
  };
}

function keepNode(node: Node): KeptNode {
  const { metadata, spec, status } = node;
  return {
    name: metadata.name,
    ready: status?.conditions?.some((one) => one.type === 'Ready' && one.status === 'True') ?? false,
    unschedulable: spec?.unschedulable === true,
    deleting: metadata.deletionTimestamp !== undefined,
    labels: metadata.labels ?? {},
    taints: spec?.taints ?? [],
    allocatable: status?.allocatable ?? {},
  };
}

/** Of a pod's spec only what decides where it can run. */
function templateOf(spec: NonNullable<Pod['spec']>): PodTemplate {
  const given = spec as unknown as PodTemplate;
  const containers = (list: PodTemplate['containers']): PodTemplate['containers'] =>
    list?.map(({ name, resources, restartPolicy, ports, securityContext }) => ({
      name,
      ...(resources ? { resources } : {}),
      ...(restartPolicy ? { restartPolicy } : {}),
      ...(ports?.some((one) => one.hostPort) ? { ports: ports.filter((one) => one.hostPort) } : {}),
      ...(securityContext ? { securityContext } : {}),
    }));
  return {
    ...(given.containers ? { containers: containers(given.containers) ?? [] } : {}),
    ...(given.initContainers ? { initContainers: containers(given.initContainers) ?? [] } : {}),
    ...(given.overhead ? { overhead: given.overhead } : {}),
    ...(given.resources ? { resources: given.resources } : {}),
    ...(given.nodeSelector ? { nodeSelector: given.nodeSelector } : {}),
    ...(given.affinity?.nodeAffinity ? { affinity: { nodeAffinity: given.affinity.nodeAffinity } } : {}),
    ...(given.tolerations ? { tolerations: given.tolerations } : {}),
    ...(given.securityContext ? { securityContext: given.securityContext } : {}),
  };
}

const millis = (text: string | undefined): number | null => {
  const at = Date.parse(text ?? '');
  return Number.isFinite(at) ? at : null;
};

export function keepPod(pod: Pod): KeptPod {
  const { metadata, spec, status } = pod;
  const claims = (spec?.volumes ?? []).flatMap(({ persistentVolumeClaim: claim }) =>
    claim ? [{ name: claim.claimName, readOnly: claim.readOnly === true }] : [],
  );
  const phase = status?.phase ?? 'Pending';
  const condition = (type: string) => status?.conditions?.find((one) => one.type === type);
  const containers = [...(status?.initContainerStatuses ?? []), ...(status?.containerStatuses ?? [])];
  const sidecars = new Set(
    (spec?.initContainers ?? []).filter((one) => one.restartPolicy === 'Always').map((one) => one.name),
  );
  const owner = metadata.ownerReferences?.find((one) => one.controller);
  const ready = condition('Ready');
  const scheduled = condition('PodScheduled');
  return {
    namespace: metadata.namespace as string,
    node: spec?.nodeName ?? null,
    finished: phase === 'Succeeded' || phase === 'Failed',
    requests: podRequests((spec ?? {}) as PodTemplate),
    claims,
    agent: metadata.labels?.['app.kubernetes.io/component'] === 'agent' ? agentOfPod(pod) : null,
    pod:
      claims.length === 0
        ? null
        : {
            name: metadata.name,
            uid: metadata.uid ?? '',
            node: spec?.nodeName ?? null,
            phase,
            deleting: metadata.deletionTimestamp !== undefined,
            createdAt: millis(metadata.creationTimestamp) ?? 0,
            ready: ready?.status === 'True',
            readyChangedAt: millis(ready?.lastTransitionTime),
            unschedulable: scheduled?.status === 'False' && scheduled.reason === 'Unschedulable',
            restarts: containers.reduce((sum, one) => sum + (one.restartCount ?? 0), 0),
            waiting: containers.flatMap((one) => one.state?.waiting?.reason ?? []),
            initializing:
              containers.length === 0 ||
              (status?.initContainerStatuses ?? []).some(
                (one) => !sidecars.has(one.name) && one.state?.terminated?.reason !== 'Completed',
              ),
            controlledBy: owner ? { kind: owner.kind, name: owner.name, apiVersion: owner.apiVersion } : null,
            spec: templateOf(spec ?? {}),
          },
  };
}

function keepObject(object: SimpleVolume): SimpleVolume {
  const { managedFields: _, ...metadata } = object.metadata as SimpleVolume['metadata'] & {
    managedFields?: unknown;
  };
  return { ...object, metadata };
}

/** What a mirror says, to be compared with what it shall say. */
function keepMirror({ spec, status }: ClusterSimpleVolume): string {
  const { observedAt: _, ...said } = status ?? {};
  return canonical([spec, said]);
}

/** The newer of two states of one object: resource versions of one kind are comparable as numbers. */
export function newer(a: SimpleVolume | undefined, b: SimpleVolume | undefined): SimpleVolume | undefined {
  if (!a || !b) return a ?? b;
  if (a.metadata.uid !== b.metadata.uid)
    return (millis(a.metadata.creationTimestamp) ?? 0) > (millis(b.metadata.creationTimestamp) ?? 0) ? a : b;
  const [x, y] = [a, b].map((one) => one.metadata.resourceVersion ?? '0') as [string, string];
  if (!/^\d+$/.test(x) || !/^\d+$/.test(y)) return b;
  return BigInt(x) > BigInt(y) ? a : b;
}

interface SplitLabels {
  /** role and candidate labels by volume */
  volumes: ReadonlyMap<string, string>;
  /** all else that is kept of the node, as text */
  rest: string;
}

function splitLabels(node: KeptNode | undefined): SplitLabels {
  const volumes = new Map<string, string>();
  if (node === undefined) return { volumes, rest: '' };
  const labels: Record<string, string> = {};
  for (const [key, value] of Object.entries(node.labels))
    if (isVolumeLabel(key)) {
      const id = key.slice(PREFIX.length, key.lastIndexOf('-'));
      volumes.set(id, `${volumes.get(id) ?? ''} ${key}=${value}`);
    } else labels[key] = value;
  return { volumes, rest: JSON.stringify({ ...node, labels }) };
}

function* changedVolumes(
  was: ReadonlyMap<string, string>,
  is: ReadonlyMap<string, string>,
): IterableIterator<string> {
  for (const [id, labels] of was) if (is.get(id) !== labels) yield id;
  for (const id of is.keys()) if (!was.has(id)) yield id;
}

/** What one agent said last of all its volumes. */
interface Said {
  /** own clock */
  at: number;
  volumes: Map<string, VolumeReport>;
  space: PoolSpace | null;
}

export interface WorldOptions {
  kube: Kube;
  /** the controller's own, where the agents' pods are */
  namespace: string;
  agents: Agents;
  clock: Clock;
  logger: Logger;
  /** something concerning this claim changed; soon: within moments, not at once */
  changed: (key: string, delayMs?: number) => void;
  relistMs?: number;
}

export class World {
  readonly claims: Informer<KeptClaim>;
  readonly classes: Informer<KeptClass>;
  readonly volumes: Informer<KeptVolume>;
  readonly nodes: Informer<KeptNode>;
  readonly pods: Informer<KeptPod>;
  readonly objects: Informer<SimpleVolume>;
  /** by PersistentVolume, see keepMirror */
  readonly mirrors: Informer<string>;
  private readonly options: WorldOptions;
  /** newer than the copies: read at a take-over, or written by this process */
  private readonly ahead = new Map<string, SimpleVolume>();
  private readonly said = new Map<string, Said>();
  /** pods and what they ask for, by node */
  private readonly load = new Map<string, { requested: Record<string, number>; pods: number }>();
  /** claims by the agents' name of their volume */
  private readonly byVolume = new Map<string, string>();

  constructor(options: WorldOptions) {
    this.options = options;
    const shared = {
      kube: options.kube,
      clock: options.clock,
      logger: options.logger,
      ...(options.relistMs === undefined ? {} : { relistMs: options.relistMs }),
    };
    const informer = <T extends KubeObject, P>(
      kind: Resource<T>,
      project: (object: T) => P | undefined,
      indexes: Record<string, (kept: P) => readonly string[]> = {},
    ): Informer<P> => createInformer({ ...shared, kind, project, indexes });
    this.claims = informer(CLAIMS, keepClaim, { volume: (one) => [one.volumeName] });
    this.classes = informer(CLASSES, keepClass);
    this.volumes = informer(VOLUMES, keepVolume, { claim: (one) => (one.claim ? [one.claim] : []) });
    this.nodes = informer(NODES, keepNode);
    this.pods = informer(PODS, keepPod, {
      claim: (one) => one.claims.map(({ name }) => `${one.namespace}/${name}`),
      agent: (one) => (one.agent && one.namespace === options.namespace ? ['agent'] : []),
    });
    this.objects = informer(SIMPLE_VOLUMES, keepObject, {
      volume: (one) => [`${one.metadata.namespace}/${one.spec.volumeName}`],
      pool: (one) => [one.spec.pool],
      label: (one) => [labelId(one.metadata.namespace as string, one.metadata.name)],
    });
    this.mirrors = informer(CLUSTER_SIMPLE_VOLUMES, keepMirror);
    this.listen();
  }

  get all(): Informer<unknown>[] {
    return [this.claims, this.classes, this.volumes, this.nodes, this.pods, this.objects, this.mirrors];
  }

  start(): void {
    for (const one of this.all) one.start();
  }

  async stop(): Promise<void> {
    await Promise.all(this.all.map((one) => one.stop()));
  }

  synced(): boolean {
    return this.all.every((one) => one.synced());
  }

  async whenSynced(): Promise<void> {
    await Promise.all(this.all.map((one) => one.whenSynced()));
    this.setAgents();
  }

  private listen(): void {
    const { changed } = this.options;
    this.claims.onChange(({ key }) => changed(key));
    this.volumes.onChange(({ before, after }) => {
      for (const claim of new Set([before?.claim, after?.claim])) if (claim) changed(claim);
    });
    this.classes.onChange(() => {
      for (const claim of this.claims.keys()) changed(claim, 1000);
    });
    this.objects.onChange(({ key, after }) => {
      const ahead = this.ahead.get(key);
      if (!after || (ahead && newer(ahead, after) === after)) this.ahead.delete(key);
      changed(key);
    });
    this.nodes.onChange(({ before, after }) => {
      const kept = after ?? before;
      if (!kept) return;
      // The labels of a volume concern that volume alone, and all others together are most of a node's labels.
      const [was, is] = [before, after].map((one) => splitLabels(one)) as [SplitLabels, SplitLabels];
      for (const id of changedVolumes(was.volumes, is.volumes))
        for (const object of this.objects.by('label', id)) changed(keyOf(object));
      if (was.rest === is.rest) return;
      // Whether it is there, Ready and schedulable concerns its volumes now; what fits on it, all of its pools soon.
      const urgent =
        !before ||
        !after ||
        before.ready !== after.ready ||
        before.unschedulable !== after.unschedulable ||
        before.deleting !== after.deleting;
      for (const object of this.objects.values()) {
        const concerned = this.onNode(object, kept.name);
        if (concerned && urgent) changed(keyOf(object));
        else if (concerned || this.inPool(kept, object.spec.pool) || this.inPool(before, object.spec.pool))
          changed(keyOf(object), 2000 + Math.random() * 3000);
      }
    });
    this.pods.onChange(({ before, after }) => {
      this.count(before, -1);
      this.count(after, 1);
      if (
        (before?.agent || after?.agent) &&
        (before ?? (after as KeptPod)).namespace === this.options.namespace &&
        JSON.stringify(before?.agent) !== JSON.stringify(after?.agent)
      )
        this.agentsChanged(new Set([before?.agent, after?.agent]));
      for (const kept of [before, after])
        for (const { name } of kept?.claims ?? []) changed(`${kept?.namespace}/${name}`);
    });
  }

  private inPool(node: KeptNode | undefined, pool: string): boolean {
    return node?.labels[`${PREFIX}pool.${pool}`] === 'true';
  }

  private onNode(object: SimpleVolume, node: string): boolean {
    return (
      object.status?.activeNode === node ||
      (object.status?.replicas?.some((one) => one.node === node) ?? false)
    );
  }

  private count(kept: KeptPod | undefined, sign: 1 | -1): void {
    if (!kept?.node || kept.finished) return;
    let load = this.load.get(kept.node);
    if (!load) {
      load = { requested: {}, pods: 0 };
      this.load.set(kept.node, load);
    }
    load.pods += sign;
    if (sign === 1) load.requested = addRequests(load.requested, kept.requests);
    else
      for (const [name, value] of Object.entries(kept.requests))
        load.requested[name] = (load.requested[name] ?? 0) - value;
  }

  private setAgents(): void {
    this.options.agents.set(this.pods.by('agent', 'agent').flatMap((one) => one.agent ?? []));
  }

  private agentsChanged(agents: Iterable<AgentAddress | null | undefined>): void {
    this.setAgents();
    const pools = new Set([...agents].flatMap((one) => one?.pool ?? []));
    for (const pool of pools)
      for (const object of this.objects.by('pool', pool)) this.options.changed(keyOf(object), 200);
  }

  /** All claims and SimpleVolumes, those of other drivers among them. */
  keys(): Set<string> {
    return new Set([...this.claims.keys(), ...this.objects.keys(), ...this.ahead.keys()]);
  }

  /** The object as it is for sure not older than what this process has written or read itself. */
  object(key: string): SimpleVolume | undefined {
    return newer(this.objects.get(key), this.ahead.get(key));
  }

  setAhead(object: SimpleVolume): void {
    this.ahead.set(keyOf(object), keepObject(object));
  }

  /** The claim whose volume agents call by this name. */
  claimOf(name: VolumeName): string | null {
    const key = `${name.namespace}/${name.volume}`;
    const object = this.objects.by('volume', key)[0];
    return object ? keyOf(object) : (this.byVolume.get(key) ?? null);
  }

  /** What an agent said of all its volumes, and whose looks change by it. */
  heard(pool: string, node: string, volumes: readonly VolumeReport[], space: PoolSpace | null = null): void {
    const at = agentKey(pool, node);
    const before = this.said.get(at);
    const said: Said = { at: this.options.clock.boot(), volumes: new Map(), space };
    for (const one of volumes) said.volumes.set(`${one.namespace}/${one.volume}`, one);
    this.said.set(at, said);
    const keys = new Set([...said.volumes.keys(), ...(before?.volumes.keys() ?? [])]);
    for (const key of keys) {
      const [was, is] = [before?.volumes.get(key), said.volumes.get(key)];
      const change = before === undefined ? 2 : differs(was, is);
      if (change === 0) continue;
      const [namespace, volume] = key.split('/') as [string, string];
      const claim = this.claimOf({ namespace, volume });
      // A new generation is no hurry; a changed role, state or condition is.
      if (claim) this.options.changed(claim, change === 2 ? 0 : 1000);
    }
  }

  /** What an agent answered about one volume: newer than its last report of all. */
  heardOne(pool: string, node: string, report: VolumeReport): void {
    const said = this.said.get(agentKey(pool, node));
    said?.volumes.set(`${report.namespace}/${report.volume}`, report);
  }

  /** An agent that has stopped or begun to answer. */
  reachabilityChanged(pool: string, node: string): void {
    for (const object of this.objects.by('pool', pool))
      if (this.onNode(object, node)) this.options.changed(keyOf(object));
  }

  forgetAgents(): void {
    const keep = new Set(this.options.agents.all().map((one) => agentKey(one.pool, one.node)));
    for (const key of this.said.keys()) if (!keep.has(key)) this.said.delete(key);
  }

  /** Everything that is known of one claim; null: it is none of this driver, and never was. */
  observe(key: string, memory: VolumeMemory, fence: FenceDriver, options: PlanOptions): Observed | null {
    const [namespace, claimName] = key.split('/') as [string, string];
    const claim = this.claims.get(key) ?? null;
    const object = this.object(key) ?? null;
    const volume =
      this.volumes.get(claim?.volumeName || object?.spec.volumeName || '') ??
      (claim?.volumeName
        ? undefined
        : this.volumes.by('claim', key).find((one) => one.claimUid === claim?.uid));
    const claimClass = this.classes.get(claim?.storageClassName ?? '');
    const ofClass = claimClass?.provisioner === DRIVER ? claimClass : undefined;
    if (!object && !volume && !ofClass) return null;
    const pool =
      object?.spec.pool ??
      volume?.pool ??
      this.classes.get(volume?.storageClassName ?? '')?.pool ??
      ofClass?.pool ??
      DEFAULT_POOL;
    const volumeName = object?.spec.volumeName || volume?.name;
    const name = volumeName ? { namespace, volume: volumeName } : null;
    const pods = this.pods.by('claim', key);
    const agents = name ? this.agentsOf(pool, name, fence) : [];
    return {
      now: this.options.clock.now(),
      namespace,
      claimName,
      claim: claim ? { ...claim, provisioner: claimClass?.provisioner ?? null } : null,
      volume: volume ? { ...volume, pool: volume.pool ?? pool } : null,
      object,
      name,
      nodes: this.nodesOf(pool, object, pods, agents),
      pods: pods.flatMap((one) =>
        one.pod
          ? [{ ...one.pod, readOnly: one.claims.every((c) => c.name !== claimName || c.readOnly) }]
          : [],
      ),
      agents,
      fence: name
        ? fence.state(pool, name)
        : {
            fenceWaitMs: null,
            activationWaitMs: null,
            acknowledged: null,
            released: null,
            consent: null,
          },
      memory: memory.view(object ? requestOf(object) : null),
      workload: null,
      nodeNames: [...this.nodes.keys()],
      options,
    };
  }

  private agentsOf(pool: string, name: VolumeName, fence: FenceDriver): ObservedAgent[] {
    const now = this.options.clock.boot();
    const key = `${name.namespace}/${name.volume}`;
    return this.options.agents
      .all()
      .filter((one) => one.pool === pool)
      .map((one) => {
        const said = this.said.get(agentKey(pool, one.node));
        const volume = said?.volumes.get(key) ?? null;
        return {
          node: one.node,
          url: one.url,
          webdavUrl: one.webdavUrl,
          reachable: said !== undefined && this.options.agents.answers(pool, one.node),
          ready: one.ready,
          reportAgeMs: said === undefined ? null : now - said.at,
          volume,
          mounted: volume?.conditions.some((c) => c.type === 'InUse') ? true : null,
          freeBytes: said?.space?.freeBytes ?? null,
          freezer: fence.freezer(pool, one.node),
        };
      });
  }

  private nodesOf(
    pool: string,
    object: SimpleVolume | null,
    pods: readonly KeptPod[],
    agents: readonly ObservedAgent[],
  ): ObservedNode[] {
    const wanted = new Set<string>();
    for (const node of this.nodes.values()) if (this.inPool(node, pool)) wanted.add(node.name);
    for (const agent of agents) wanted.add(agent.node);
    for (const pod of pods) if (pod.node) wanted.add(pod.node);
    const { status } = object ?? {};
    for (const name of [
      status?.activeNode,
      status?.previousActiveNode,
      ...(status?.replicas ?? []).map((one) => one.node),
    ])
      if (name) wanted.add(name);
    // Labels that were set once are found by what they are called.
    return [...this.nodes.values()]
      .filter((node) => wanted.has(node.name) || Object.keys(node.labels).some((l) => l.startsWith(PREFIX)))
      .map((node) => {
        const load = this.load.get(node.name) ?? { requested: {}, pods: 0 };
        const mine = pods.filter((one) => one.node === node.name && !one.finished);
        const requested = { ...load.requested };
        for (const one of mine)
          for (const [name, value] of Object.entries(one.requests))
            requested[name] = (requested[name] ?? 0) - value;
        return {
          ...node,
          inPool: this.inPool(node, pool),
          requested,
          podCount: load.pods - mine.length,
          volumeCount: this.said.get(agentKey(pool, node.name))?.volumes.size ?? 0,
        };
      });
  }
}

/** 0: nothing that is decided from. 1: it went on as usual. 2: something else. */
function differs(was: VolumeReport | undefined, is: VolumeReport | undefined): 0 | 1 | 2 {
  if (!was || !is) return was === is ? 0 : 2;
  if (
    was.role !== is.role ||
    was.epoch !== is.epoch ||
    was.conditions.map((one) => one.type).join() !== is.conditions.map((one) => one.type).join()
  )
    return 2;
  if (was.state !== is.state) {
    const busy = ['scanning', 'sealing', 'watching', 'idle', 'pulling', 'verifying', 'applying'];
    return busy.includes(was.state) && busy.includes(is.state) ? 1 : 2;
  }
  if (was.generation !== is.generation) return 1;
  if (was.role === 'active' && is.role === 'active') {
    const targets = (one: SourceStatus): string => one.targets.map((x) => `${x.node}=${x.url}`).join();
    if (targets(was) !== targets(is)) return 2;
    if (was.delivered !== is.delivered) return 1;
  }
  return 0;
}
