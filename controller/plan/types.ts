/**
 * What the planner is told and what it answers: plain data both ways, no clock, no I/O.
 *
 *   Observed (what is) -> planVolume -> VolumePlan (what is to be written)
 *
 * Whoever carries a plan out does, in this order:
 *   1. `fence.withhold(plan.withholdLease)`;
 *   2. the status, when it differs from the observed one: one compare-and-swap on the observed resourceVersion;
 *      when that fails nothing else of the plan is done and the volume is looked at anew;
 *   3. the actions, in their order. Each is idempotent. When one fails, those after it whose `needs` name it are left
 *      out, the others go on; the volume is looked at again after a pause;
 *   4. the Events, whatever happened before.
 * Nothing is remembered between two plans except what `Memory` lists, and all of that may be lost at any time.
 */
import type { ReplicaStatus, SourceStatus, VolumeName } from '../../lib/core/parts.ts';
import type { FenceConsentReply, FencingMode, FreezerState } from '../../lib/fence/types.ts';
import type {
  OwnerReference,
  PromotionRecord,
  SimpleVolume,
  SimpleVolumePolicy,
  SimpleVolumeSpec,
  SimpleVolumeStatus,
} from '../cluster/types.ts';

export type { OwnerReference, PromotionRecord, SimpleVolume, SimpleVolumePolicy, SimpleVolumeStatus };

/** What all labels and annotations of the product begin with. */
export const PREFIX = 'simple-volume.shipstuff.io/';
/** On SimpleVolume objects: the watch is stopped and the labels are gone before the object goes. */
export const FINALIZER = 'simple-volume.shipstuff.io/cleanup';
export const DRIVER = 'simple-volume.csi.shipstuff.io';

/* Observed */

export interface ObservedClaim {
  namespace: string;
  name: string;
  uid: string;
  /** being deleted */
  deleting: boolean;
  annotations: Readonly<Record<string, string>>;
  storageClassName: string;
  /** of its StorageClass; null: no class, or it is not there (any more); absent: the caller has looked already */
  provisioner?: string | null;
  /** bytes asked for; null: not said */
  requestedBytes: number | null;
  /** bytes that its status says it has; null or absent: not bound yet */
  capacityBytes?: number | null;
}

export interface ObservedPersistentVolume {
  name: string;
  uid: string;
  /** spec.csi.driver; null: another kind of volume */
  driver: string | null;
  /** of its StorageClass or its attributes */
  pool: string;
  storageClassName: string;
  reclaimPolicy: 'Delete' | 'Retain';
  annotations: Readonly<Record<string, string>>;
  /** the node that CreateVolume put it on; null: not recorded */
  firstNode: string | null;
  /** spec.capacity; null or absent: not said */
  bytes?: number | null;
  deleting: boolean;
}

export interface Taint {
  key: string;
  value?: string;
  effect: 'NoSchedule' | 'PreferNoSchedule' | 'NoExecute';
}

/** A container's part of a pod's spec, as far as the planner looks at it. */
export interface PodContainer {
  name: string;
  resources?: { requests?: Record<string, string>; limits?: Record<string, string> };
  /** `Always` on an init container: a sidecar */
  restartPolicy?: string;
  ports?: { hostPort?: number; protocol?: string; hostIP?: string }[];
  securityContext?: { runAsUser?: number; runAsGroup?: number };
}

export interface SelectorTerm {
  key: string;
  operator: string;
  values?: string[];
}

/** What decides whether a pod can run on a node. A Pod's or a template's `spec` fits as it is. */
export interface PodTemplate {
  containers?: PodContainer[];
  initContainers?: PodContainer[];
  overhead?: Record<string, string>;
  resources?: { requests?: Record<string, string>; limits?: Record<string, string> };
  nodeSelector?: Record<string, string>;
  affinity?: {
    nodeAffinity?: {
      requiredDuringSchedulingIgnoredDuringExecution?: {
        nodeSelectorTerms?: { matchExpressions?: SelectorTerm[]; matchFields?: SelectorTerm[] }[];
      };
    };
  };
  tolerations?: { key?: string; operator?: string; value?: string; effect?: string }[];
  securityContext?: { runAsUser?: number; runAsGroup?: number; fsGroup?: number };
}

/** A pod that names the claim in its volumes. Pods of other claims are only in the nodes' sums. */
export interface ObservedPod {
  name: string;
  uid: string;
  /** null: not scheduled */
  node: string | null;
  phase: 'Pending' | 'Running' | 'Succeeded' | 'Failed' | 'Unknown';
  /** metadata.deletionTimestamp is set */
  deleting: boolean;
  createdAt: number;
  /** condition Ready is True */
  ready: boolean;
  /** condition Ready was last changed, wall clock ms; null: no such condition */
  readyChangedAt: number | null;
  /** condition PodScheduled is False with reason Unschedulable */
  unschedulable: boolean;
  /** of all containers and init containers together */
  restarts: number;
  /** reasons of waiting containers, for example CrashLoopBackOff, ImagePullBackOff, PodInitializing */
  waiting: readonly string[];
  /** an init container (no sidecar) has not finished, or no container status is there yet */
  initializing: boolean;
  /** the owner with `controller: true`; null: a pod of nobody */
  controlledBy: { kind: string; name: string; apiVersion?: string } | null;
  /** the claim is mounted read-only */
  readOnly: boolean;
  spec: PodTemplate;
}

/** Every node that has a label of the pool, holds or held a copy, or has a pod of the claim. */
export interface ObservedNode {
  name: string;
  /** condition Ready is True */
  ready: boolean;
  /** set by the planner: Kubernetes calls it Ready, but its agent does not answer */
  silent?: boolean;
  unschedulable: boolean;
  /** `simple-volume.shipstuff.io/pool.<pool>` = `true` */
  inPool: boolean;
  /** being deleted */
  deleting: boolean;
  labels: Readonly<Record<string, string>>;
  taints: readonly Taint[];
  /** quantities as the API has them (`pods` too) */
  allocatable: Readonly<Record<string, string>>;
  /**
   * What the pods on it have been promised, those of this claim and finished ones left out; in thousandths, as
   * `podRequests` of fit.ts gives it and `addRequests` adds it up.
   */
  requested: Readonly<Record<string, number>>;
  /** pods on it that are not finished, those of this claim left out */
  podCount: number;
  /** volumes of this pool that have a copy on it (any role), for spreading */
  volumeCount: number;
}

/** The agent of one node, and its last word about this volume. */
export interface ObservedAgent {
  node: string;
  /** as other agents reach it: `http://10.0.0.5:8080` */
  url: string;
  webdavUrl: string;
  /** its last call was answered, not longer ago than the time-out of a few polls */
  reachable: boolean;
  /** its own /readyz */
  ready: boolean;
  /** milliseconds since `volume` was said; null: nothing was heard yet */
  reportAgeMs: number | null;
  /** its last report of this volume; null: it does not know the volume, or nothing was heard (reportAgeMs null) */
  volume: SourceStatus | ReplicaStatus | null;
  /** the volume is mounted into a pod there, as csi-node says; null: not known */
  mounted: boolean | null;
  /** free space of the pool, bytes; null: not known */
  freeBytes: number | null;
  /** what csi-node said of freezing; null: nothing yet */
  freezer: FreezerState | null;
}

/** What LeaderFence says of this volume, asked at the moment of observation. */
export interface ObservedFence {
  /** LeaderFence.fenceWaitMs; null: does not lead or has not read the volume: nothing is decided */
  fenceWaitMs: number | null;
  /** LeaderFence.activationWaitMs; null: nothing is activated */
  activationWaitMs: number | null;
  /** LeaderFence.acknowledged */
  acknowledged: number | null;
  /** LeaderFence.released: the epoch that the active node has given back */
  released: number | null;
  /** the last answer to a consent request of this leadership; null: none */
  consent: (FenceConsentReply & { /** milliseconds since it came */ ageMs: number }) | null;
}

/** What this process remembers of its own actions. Lost at a restart; then the step is done again. */
export interface Memory {
  /** the last end of each `prepare`, by its tag; at most the last ten */
  prepared: readonly {
    tag: string;
    ok: boolean;
    generation: string | null;
    confirmed: readonly string[];
    error: string | null;
    /** milliseconds since it ended */
    ageMs: number;
  }[];
  /** the last end of each `catchUp`, by its tag; the act waits until the node holds it or the time is over */
  caughtUp: readonly { tag: string; ok: boolean; error: string | null; ageMs: number }[];
  /** the full syncs on the replicas for the run `run`; asked from the agents by their ids */
  fullSyncs: readonly {
    run: string;
    node: string;
    state: 'running' | 'done' | 'failed';
    error: string | null;
  }[];
  /** ids of manual full syncs that wait to be started, oldest first; the trigger made the ids */
  manualSyncs: readonly { id: string; requestedAt: number }[];
}

export interface Observed {
  /** wall clock of the controller, ms */
  now: number;
  /** the claim `namespace/name` that is looked at */
  namespace: string;
  claimName: string;
  /** null: there is none (any more) */
  claim: ObservedClaim | null;
  /** the volume that the claim is bound to, or that the SimpleVolume names; null: none */
  volume: ObservedPersistentVolume | null;
  /** as last read from the API server; null: none */
  object: SimpleVolume | null;
  /** how agents call it: the claim's namespace and the name of the PersistentVolume */
  name: VolumeName | null;
  nodes: readonly ObservedNode[];
  pods: readonly ObservedPod[];
  agents: readonly ObservedAgent[];
  fence: ObservedFence;
  memory: Memory;
  /** Whether the owner of the pods that `ownerToAsk` names still wants one; null: it was not asked, or cannot be. */
  workload: { wants: boolean } | null;
  /** names of all nodes of the cluster, for checking a priority list */
  nodeNames: readonly string[];
  options: PlanOptions;
}

export interface PlanOptions {
  /** time zone of schedules that name none; default UTC */
  timeZone: string;
  /** for claims that name no schedule of full syncs, a cron expression; null: none */
  defaultSchedule: string | null;
  /** how long a prepare may take, ms; default 60,000 */
  prepareTimeoutMs: number;
  /** how long a promotion waits for a newer generation of another replica, ms; default 60,000 */
  catchUpMs: number;
  /** how often ages in the status are brought up to date when nothing else changes, ms; default 60,000 */
  statusEveryMs: number;
}

export const DEFAULT_OPTIONS: Readonly<PlanOptions> = {
  timeZone: 'UTC',
  defaultSchedule: null,
  prepareTimeoutMs: 60_000,
  catchUpMs: 60_000,
  statusEveryMs: 60_000,
};

/* VolumePlan */

/** Body of POST /replication/watch/start without the targets' tokens, which only the act knows. */
export interface WatchBody extends VolumeName {
  epoch: number;
  /** size of the volume; absent: not known */
  bytes?: number;
  source: { url: string; webdavUrl: string };
  targets: { url: string; node: string }[];
  includePaths: string[];
  excludePaths: string[];
  debounce: string;
  consistencyMode: 'shadow' | 'live';
  pruneExcluded: boolean;
  confirmedReplicas: number;
  fullSyncOnStart: boolean;
  requiredPaths: string[];
  ownerUid: number | null;
  ownerGid: number | null;
  /** permission bits */
  fileMode: number | null;
  dirMode: number | null;
}

/** `policy` of sync-batch and full-sync bodies. */
export type SyncPolicyBody = Pick<
  WatchBody,
  | 'includePaths'
  | 'excludePaths'
  | 'pruneExcluded'
  | 'requiredPaths'
  | 'ownerUid'
  | 'ownerGid'
  | 'fileMode'
  | 'dirMode'
>;

export type Action = { id: string; needs?: readonly string[] } & ActionBody;

export type ActionBody =
  /** Create the SimpleVolume (finalizer FINALIZER, no owner: it outlives a claim until all is cleaned up). AlreadyExists is fine. */
  | { kind: 'createObject'; spec: SimpleVolumeSpec }
  /** Merge patch of the SimpleVolume's spec, with the observed resourceVersion. `policy` replaces the policy as a whole. */
  | { kind: 'patchSpec'; policy?: SimpleVolumePolicy; volumeName?: string }
  /** Delete the SimpleVolume (its finalizer holds it). */
  | { kind: 'deleteObject' }
  /** Take FINALIZER off. */
  | { kind: 'removeFinalizer' }
  /**
   * The decision. In this order: consent of `record.to` (POST fence/consent with epoch, term, released, insist) unless it
   * is the present active node; LeaderFence.mayPromote right before the write; then `status` by compare-and-swap on the
   * observed resourceVersion. PROMISED or LEASE_GRANTED: look again after its waitMs. `consent` of a refusal goes
   * into `Observed.fence.consent`.
   */
  | {
      kind: 'decide';
      record: PromotionRecord;
      status: SimpleVolumeStatus;
      insist: boolean;
      /** the released epoch as observed */
      released: number | null;
    }
  /** POST prepare on the active node: seal everything, wait until all of `confirm` hold it (ask with `confirm:"all"` when it names all targets, else repeat until they are among the confirmed). End goes into memory. */
  | {
      kind: 'prepare';
      node: string;
      epoch: number;
      confirm: readonly string[];
      timeoutMs: number;
      tag: string;
    }
  /** POST fence/release on the active node. 409 VOLUME_IN_USE: a writer may still run, look again. */
  | { kind: 'releaseLease'; node: string; epoch: number }
  /** sync-batch on `node` with `from` (another replica) as its source and epoch `epoch`, until it holds `generation` or the time is over. End goes into memory. */
  | {
      kind: 'catchUp';
      node: string;
      from: string;
      epoch: number;
      generation: string;
      policy: SyncPolicyBody;
      timeoutMs: number;
      tag: string;
    }
  /** POST watch/start; also what makes a replica the active one of a new epoch. */
  | { kind: 'startWatch'; node: string; body: WatchBody }
  /** POST watch/stop with the epoch that the agent has (never a newer one: that would make it the active one of that). NOT_ACTIVE and VOLUME_UNKNOWN are fine. */
  | { kind: 'stopWatch'; node: string; epoch: number }
  /** Merge patch of annotations; null removes. Only what differs is named. */
  | { kind: 'annotatePv'; name: string; annotations: Record<string, string | null> }
  | { kind: 'annotatePvc'; name: string; uid: string; annotations: Record<string, string | null> }
  /** Merge patch of a node's labels; null removes. NotFound is fine. */
  | { kind: 'labelNode'; node: string; labels: Record<string, string | null> }
  /** Delete this very pod (uid as precondition). `force`: grace period 0, for a pod whose kubelet is gone and whose writer is fenced. NotFound and another uid are fine. */
  | { kind: 'deletePod'; name: string; uid: string; force: boolean; why: string }
  /** POST full-sync on each of `nodes` with the active node as source, body with the controller's way to its token; `already-running` counts as started. States go into memory under `run`. */
  | {
      kind: 'fullSync';
      run: string;
      nodes: readonly string[];
      source: string;
      epoch: number;
      policy: SyncPolicyBody;
    }
  /** POST volume/remove on a node whose copy is not wanted any more. VOLUME_ACTIVE, VOLUME_IN_USE and EPOCH_OLD: it stays. */
  | { kind: 'removeCopy'; node: string; epoch: number }
  /** POST replication/force on the active node. */
  | { kind: 'liftCondition'; node: string; epoch: number; condition: 'MassDelete' | 'RootChanged' }
  /**
   * The volume grows to `bytes`: agents first, then the PersistentVolume, then the status of the claim. A refusal is an
   * Event, and is asked again after a minute.
   */
  | { kind: 'expand'; bytes: number }
  /** A manual sync is under way or cannot be: the trigger stops waiting for it. */
  | { kind: 'acceptManualSync'; requestId: string; run: string }
  /** The ClusterSimpleVolume of this PersistentVolume as it shall be (created when missing). */
  | {
      kind: 'mirror';
      name: string;
      pool: string;
      claimRef: { namespace: string; name: string; uid?: string };
      activeNode?: string;
      epoch?: number;
      phase?: SimpleVolumeStatus['phase'];
      generation?: string;
    };

export type ActionKind = ActionBody['kind'];

export interface PlannedEvent {
  type: 'Normal' | 'Warning';
  /** CamelCase, stable */
  reason: string;
  message: string;
  /** what makes it another Event of the same reason */
  cause: string;
}

export interface VolumePlan {
  /** false: the claim is none of this driver; everything else is empty then */
  ours: boolean;
  /** the whole next status; null: there is no object to write it to */
  status: SimpleVolumeStatus | null;
  /** true: the lease of the active node is not renewed any more */
  withholdLease: boolean;
  /** for LeaderFence.observe, together with the status' epoch, activeNode and promotable */
  fencing: FencingMode;
  actions: Action[];
  /** about the claim; about the SimpleVolume when the claim is gone */
  events: PlannedEvent[];
  /** at the latest, look again after this; null: when something changes */
  nextLookMs: number | null;
}
