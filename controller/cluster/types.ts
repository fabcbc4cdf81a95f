/**
 * What the other rooms of the controller see of Kubernetes. Everything that can fail says so with a `KubeError`;
 * every call ends within its time; clocks are injected (`Clock` of lib/core/parts.ts, milliseconds everywhere).
 */
import type { Clock, Logger } from '../../lib/core/parts.ts';

export type { Clock, Logger };

/* Objects */

export interface OwnerReference {
  apiVersion: string;
  kind: string;
  name: string;
  uid: string;
  controller?: boolean;
  blockOwnerDeletion?: boolean;
}

export interface ObjectMeta {
  name: string;
  namespace?: string;
  uid?: string;
  resourceVersion?: string;
  generation?: number;
  creationTimestamp?: string;
  deletionTimestamp?: string;
  labels?: Record<string, string>;
  annotations?: Record<string, string>;
  finalizers?: string[];
  ownerReferences?: OwnerReference[];
}

/** Any object of the API. */
export interface KubeObject {
  apiVersion?: string;
  kind?: string;
  metadata: ObjectMeta;
}

/** One kind of object: where it lives in the API. `T` is its shape. resources.ts has the ones that are used. */
export interface Resource<T extends KubeObject = KubeObject> {
  /** API group, '' for core */
  readonly group: string;
  readonly version: string;
  /** as in the URL: lower case, plural */
  readonly plural: string;
  readonly kind: string;
  readonly namespaced: boolean;
  /** carries the shape, never a value */
  readonly shape?: T;
}

/** Names one object. `namespace` for namespaced kinds only. */
export interface ObjectName {
  namespace?: string | undefined;
  name: string;
}

/** `namespace/name`, or `name` for cluster-scoped kinds: the key of informers and queues. */
export type Key = string;

/* Client */

export type KubeErrorReason =
  /** 404 */
  | 'NotFound'
  /** 409, another version was written meanwhile or a precondition failed */
  | 'Conflict'
  /** 409 to a create */
  | 'AlreadyExists'
  /** 410, the resource version is too old to watch or page from */
  | 'Gone'
  | 'Unauthorized'
  | 'Forbidden'
  /** 400, 405, 413, 415, 422: the same request will be refused again */
  | 'Invalid'
  /** 429, and the time of the call was over before the server wanted to be asked again */
  | 'TooManyRequests'
  /** 5xx */
  | 'ServerError'
  /** no whole answer in time; a write may or may not have happened */
  | 'Timeout'
  /** no connection, or it broke; a write may or may not have happened unless `notSent` */
  | 'Unreachable'
  /** an answer that is not what the API answers */
  | 'BadReply'
  /** the caller's signal */
  | 'Cancelled'
  /** a write that the gate (leadership) does not allow (any more); nothing was sent */
  | 'NotLeader';

/** A page of a list. */
export interface Page<T> {
  items: T[];
  /** of the list as a whole; a watch may go on from here */
  resourceVersion: string;
  /** of the next page, null at the end */
  continue: string | null;
}

export interface CallOptions {
  /** for the whole call, waiting for the rate limit included; default 10,000 ms */
  timeoutMs?: number;
  signal?: AbortSignal | undefined;
  /** goes before everything that waits for the rate limit, and is not held back by it (the lease) */
  urgent?: boolean;
}

export interface ListOptions extends CallOptions {
  namespace?: string | undefined;
  labelSelector?: string | undefined;
  fieldSelector?: string | undefined;
  /** objects a page; default 500 */
  limit?: number;
  continue?: string | undefined;
  /** see the API's rules for `resourceVersion` in a list; '0': any, from the server's cache */
  resourceVersion?: string;
}

export interface WriteOptions extends CallOptions {
  subresource?: 'status' | 'scale';
  /** try it, keep nothing */
  dryRun?: boolean;
}

export interface PatchOptions extends WriteOptions {
  /** the write happens only if the object is still this version (sent inside the patch) */
  resourceVersion?: string | undefined;
  /** ... only if it is still this very object */
  uid?: string | undefined;
}

export interface DeleteOptions extends CallOptions {
  uid?: string | undefined;
  resourceVersion?: string | undefined;
  /** 0 deletes a pod without waiting for its kubelet */
  gracePeriodSeconds?: number;
  propagation?: 'Orphan' | 'Background' | 'Foreground';
}

export interface JsonPatchStep {
  op: 'add' | 'remove' | 'replace' | 'test';
  path: string;
  value?: unknown;
}

/** What a watch tells, besides its end. */
export type WatchEvent<T> =
  | { type: 'ADDED' | 'MODIFIED' | 'DELETED'; object: T }
  | { type: 'BOOKMARK'; resourceVersion: string };

export interface WatchOptions {
  namespace?: string | undefined;
  labelSelector?: string | undefined;
  fieldSelector?: string | undefined;
  /** goes on behind this one */
  resourceVersion: string;
  /** the server ends the watch after this, seconds */
  timeoutSeconds: number;
  /**
   * Nothing heard for this long: the watch is given up, ms. Bookmarks come once a minute, but not before the server has
   * seen a change of this kind since it was started: silence is a reason to ask anew, not yet a fault.
   */
  quietMs: number;
  /** the server has taken the watch */
  opened?: () => void;
  signal?: AbortSignal | undefined;
}

/**
 * A small typed client. It retries by itself only what the server says was not done (429; 503 with Retry-After), and a
 * read on a connection that turned out to be closed; everything else is the caller's to repeat.
 */
export interface Kube {
  /** @throws KubeError NotFound and all others */
  get<T extends KubeObject>(kind: Resource<T>, name: ObjectName, options?: CallOptions): Promise<T>;
  /** Like get, null for what is not there. */
  find<T extends KubeObject>(kind: Resource<T>, name: ObjectName, options?: CallOptions): Promise<T | null>;
  /** One page. */
  page<T extends KubeObject>(kind: Resource<T>, options?: ListOptions): Promise<Page<T>>;
  /** All objects, page by page, none kept. @throws KubeError Gone when the pages outlived the server's memory */
  list<T extends KubeObject>(kind: Resource<T>, options?: ListOptions): AsyncIterable<T>;
  /**
   * Calls `event` for each event, in order, until the watch ends. Resolves on an ordinary end.
   * @throws KubeError Gone (list anew), Timeout (quiet for too long), and all others
   */
  watch<T extends KubeObject>(
    kind: Resource<T>,
    options: WatchOptions,
    event: (event: WatchEvent<T>) => void,
  ): Promise<void>;
  /** Also for the reviews (TokenReview, SubjectAccessReview): the reply is the answer. */
  create<T extends KubeObject>(kind: Resource<T>, object: T, options?: WriteOptions): Promise<T>;
  /** Compare and swap: `object.metadata.resourceVersion` must be there. @throws KubeError Conflict */
  replace<T extends KubeObject>(kind: Resource<T>, object: T, options?: WriteOptions): Promise<T>;
  /** A JSON merge patch (RFC 7386): null removes a field, arrays are replaced. */
  merge<T extends KubeObject>(
    kind: Resource<T>,
    name: ObjectName,
    patch: object,
    options?: PatchOptions,
  ): Promise<T>;
  /** A JSON patch (RFC 6902); Conflict when a step does not fit the object as it is (a failed `test`, a missing path). */
  jsonPatch<T extends KubeObject>(
    kind: Resource<T>,
    name: ObjectName,
    steps: readonly JsonPatchStep[],
    options?: WriteOptions,
  ): Promise<T>;
  /** True when it is gone or going, false when it was not there. @throws KubeError Conflict for another uid or version */
  delete<T extends KubeObject>(
    kind: Resource<T>,
    name: ObjectName,
    options?: DeleteOptions,
  ): Promise<boolean>;
  /** Asks anything else of the API server, for example `/version`. */
  raw(path: string, options?: CallOptions): Promise<unknown>;
  /**
   * The same client, but writes happen only while `allowed()` is true; it is asked in the very moment in which a request
   * is handed to the connection, again for every repetition. Reviews are not writes.
   */
  gated(allowed: () => boolean): Kube;
  readonly counters: KubeCounters;
  /** Ends connections and watches. */
  close(): void;
}

export interface KubeCounters {
  requests: number;
  /** the same by what they do and to what, as a role's rules say it: `patch simplevolumes/status` */
  byVerb: Map<string, number>;
  /** answers and failures by reason of KubeError */
  failed: Partial<Record<KubeErrorReason, number>>;
  /** times the server asked to come back later */
  throttledByServer: number;
  /** milliseconds that calls waited for the own rate limit */
  waitedMs: number;
  connections: number;
}

/* Informers */

export interface Change<P> {
  key: Key;
  /** undefined: it is new */
  before: P | undefined;
  /** undefined: it is gone */
  after: P | undefined;
}

export interface InformerCounters {
  lists: number;
  watches: number;
  events: number;
  bookmarks: number;
  /** lists that were needed because the server had forgotten where the watch was (410) */
  gone: number;
  /** watches begun anew because nothing was heard; ordinary for kinds that rarely change */
  silent: number;
  /** other failures of lists and watches */
  errors: number;
  /** objects that `project` could not read; what was known of them before stays */
  unreadable: number;
}

/** A copy of one kind, kept up to date; of each object only what `project` makes of it. */
export interface Informer<P> {
  readonly kind: Resource;
  start(): void;
  stop(): Promise<void>;
  get(key: Key): P | undefined;
  values(): IterableIterator<P>;
  keys(): IterableIterator<Key>;
  readonly size: number;
  /** Objects with this value in one of the `indexes`. */
  by(index: string, value: string): P[];
  /** The first whole list is there. */
  synced(): boolean;
  /** Resolves when it is; rejects when stopped before. */
  whenSynced(): Promise<void>;
  /** Milliseconds since the API server was last heard (list, watch, event, bookmark): how old this copy may be. */
  ageMs(): number;
  /** Called after the copy changed; a throwing listener concerns nobody else. Returns how to end it. */
  onChange(listener: (change: Change<P>) => void): () => void;
  readonly counters: InformerCounters;
  readonly lastError: string | null;
}

export interface InformerOptions<T extends KubeObject, P> {
  kube: Kube;
  kind: Resource<T>;
  /** What is kept. Undefined: the object is none of our business and is left out. Must not keep parts of `object` whole. */
  project: (object: T) => P | undefined;
  /** Named look-ups: the values under which an object is found. */
  indexes?: Record<string, (kept: P) => readonly string[]>;
  namespace?: string | undefined;
  labelSelector?: string | undefined;
  fieldSelector?: string | undefined;
  clock: Clock;
  logger: Logger;
  /** a whole new list at the latest after this (plus up to 20 % jitter), ms; default 30 min */
  relistMs?: number;
  /** see WatchOptions; default 90,000 ms */
  quietMs?: number;
  /** first and longest pause after a failure, ms; default 500 and 30,000, both with jitter */
  backoffMs?: { first: number; longest: number };
  /** 0..1; default Math.random */
  random?: () => number;
}

/* Work queue */

export interface WorkQueueOptions {
  /**
   * Works on one key. Its signal ends when the time is over or the queue is stopped. A returned `againMs` asks to be
   * called again after that time; a throw asks for it after a pause that doubles with every failure in a row.
   */
  work: (key: Key, signal: AbortSignal) => Promise<{ againMs?: number } | undefined>;
  /** keys worked on at the same time */
  concurrency: number;
  clock: Clock;
  logger: Logger;
  /** for one piece of work, ms; default 60,000. One that does not end then loses its slot, but its key stays taken. */
  timeoutMs?: number;
  /** default 500 and 60,000 */
  backoffMs?: { first: number; longest: number };
  random?: () => number;
}

export interface WorkQueueState {
  /** ready and waiting for a slot */
  ready: number;
  /** waiting for their time */
  delayed: number;
  running: number;
  /** over their time and still not ended */
  stuck: number;
  done: number;
  failed: number;
  /** how long the key that waits longest has been ready, ms */
  oldestReadyMs: number;
}

/** Keys to be worked on. A key is never worked on twice at once; asked for meanwhile, it is worked on once more after. */
export interface WorkQueue {
  start(): void;
  /**
   * At the earliest after `delayMs` (default 0). Of several requests the earliest counts. It cuts a back-off short, but
   * a key that failed always rests for the first pause of the back-off.
   */
  add(key: Key, delayMs?: number): void;
  /** Failures in a row. */
  failures(key: Key): number;
  /** Forgets its delay, back-off and failures; work under way goes on. */
  forget(key: Key): void;
  /** Lets nothing new begin, cancels what runs, waits for it (at most `timeoutMs`, default 5,000). */
  stop(timeoutMs?: number): Promise<void>;
  readonly state: WorkQueueState;
}

/* Leader election */

export interface LeaderElectionOptions {
  kube: Kube;
  /** of the Lease object */
  lease: { namespace: string; name: string };
  /** unique for this process */
  identity: string;
  clock: Clock;
  logger: Logger;
  /** how long others wait for a sign of life; default 15,000 ms */
  durationMs?: number;
  /** between renewals and between looks of the waiting; default 2,000 ms */
  renewMs?: number;
  random?: () => number;
}

export interface LeaderElection {
  readonly identity: string;
  start(): void;
  /** Stops leading at once and gives the Lease back, so that the next one need not wait. */
  stop(): Promise<void>;
  /**
   * True only while nobody else can lead: counted on the own clock from before the last renewal was sent; others wait
   * longer than that, by the clocks' drift and a margin. Ask it in the moment of the deed, never remember the answer.
   */
  leads(): boolean;
  /** Milliseconds for which leads() stays true without another renewal; 0 when it is false. */
  leadsForMs(): number;
  /** Number of the own leadership: grows with every change of leader, also when the Lease was deleted. Null: does not lead. */
  term(): number | null;
  /** Who leads, as last seen. */
  holder(): string | null;
  /** Called when leading begins and when it has ended. */
  onChange(listener: (leads: boolean) => void): () => void;
  readonly lastError: string | null;
}

/* Events */

/** What an Event is about. */
export interface ObjectReference {
  apiVersion: string;
  kind: string;
  name: string;
  namespace?: string | undefined;
  uid?: string | undefined;
}

export interface EventText {
  type: 'Normal' | 'Warning';
  /** CamelCase, stable */
  reason: string;
  /** for people; at most 1,024 characters are kept */
  message: string;
  /** what makes it another event of the same reason (a node, a field); default: the reason alone */
  cause?: string;
}

export interface Recorder {
  /**
   * One Event per object, reason and cause, counted up when it comes again (also after a restart of the controller).
   * Never throws, never waits. The same text is written at most every `repeatMs`.
   */
  event(about: ObjectReference, text: EventText): void;
  /** Waits until all is written or given up. */
  flush(): Promise<void>;
  readonly counters: { written: number; suppressed: number; failed: number; dropped: number };
}

export interface RecorderOptions {
  kube: Kube;
  clock: Clock;
  logger: Logger;
  /** shown as the source; default `simple-volume-controller` */
  component?: string;
  /** pod name */
  instance?: string;
  /** the count of an Event is written at most this often; default 300,000 ms */
  repeatMs?: number;
  /** new Events an object may cause at once, and one more each `refillMs`; default 25 and 60,000 ms */
  burst?: number;
  refillMs?: number;
}

/* storage.shipstuff.io/v1alpha1 (chart/crds) */

export type VolumePhase = 'Pending' | 'Active' | 'Degraded' | 'Moving' | 'FailingOver' | 'Held' | 'Deleting';

export interface Condition {
  type: string;
  status: 'True' | 'False' | 'Unknown';
  reason: string;
  message: string;
  observedGeneration?: number;
  lastTransitionTime: string;
}

/** The policy that is in force: of the claim's annotations the last good ones. Durations as `1m30s`. */
export interface SimpleVolumePolicy {
  replicationEnabled?: boolean;
  includePaths?: string[];
  excludePaths?: string[];
  pruneExcluded?: boolean;
  debounce?: string;
  consistencyMode?: 'shadow' | 'live';
  confirmedReplicas?: number;
  /** how many copies besides the active one; absent: one on every other node of the pool */
  replicas?: number;
  fullSyncOnStart?: boolean;
  fullSyncSchedule?: string;
  requiredPaths?: string[];
  ownerUid?: number;
  ownerGid?: number;
  /** octal, as `0644` */
  fileMode?: string;
  dirMode?: string;
  failoverEnabled?: boolean;
  gracePeriod?: string;
  maxStaleness?: string;
  nodePriority?: string[];
  fencing?: 'lease' | 'none';
}

/** An operator's own decision, carried out once per change of `spec.force`. */
export interface SimpleVolumeForce {
  action: 'Promote' | 'LiftCondition';
  /** Promote: the node */
  node?: string;
  /** LiftCondition: its type */
  condition?: string;
  /** why, for the Event; required */
  reason: string;
}

export interface SimpleVolumeSpec {
  claimName: string;
  /** the PersistentVolume */
  volumeName: string;
  storageClassName: string;
  pool: string;
  policy?: SimpleVolumePolicy;
  force?: SimpleVolumeForce;
}

/** The one durable decision about where the volume is. All writes that follow are repeated until `done` has them all. */
export interface PromotionRecord {
  /** equal to status.epoch */
  epoch: number;
  from?: string;
  to: string;
  reason: string;
  planned: boolean;
  decidedAt: string;
  done: string[];
  /** generation that the new active node was known to hold: it and what is older in its epoch lie on the line */
  base?: string;
  /** what the new active node lacks, in words */
  leftBehind?: string;
}

export interface ReplicaStatus {
  node: string;
  state: string;
  generation?: string;
  freshAgeSeconds?: number;
  observedAt: string;
  message?: string;
}

export interface SimpleVolumeStatus {
  observedGeneration?: number;
  phase?: VolumePhase;
  activeNode?: string;
  previousActiveNode?: string;
  epoch?: number;
  /** `<epoch>-<seq>`, newest of the active node */
  generation?: string;
  promotion?: PromotionRecord;
  promotable?: { version: number; nodes: string[]; adding?: string[] };
  replicas?: ReplicaStatus[];
  /** for the column: `2/2`, fresh copies of wanted ones */
  replicasSummary?: string;
  /** when the freshest copy was known complete, RFC 3339 by the controller's clock: `kubectl get sv` shows its age */
  freshAt?: string;
  conditions?: Condition[];
  lastFullSync?: {
    id: string;
    trigger: string;
    startedAt: string;
    endedAt?: string;
    outcome?: string;
    message?: string;
  };
  nextFullSync?: string;
  wouldFailOverTo?: string;
  refused?: { node: string; cause: string; message?: string }[];
}

export interface SimpleVolume extends KubeObject {
  spec: SimpleVolumeSpec;
  status?: SimpleVolumeStatus;
}

/** One per PersistentVolume of the driver; a mirror for administrators that survives the claim. */
export interface ClusterSimpleVolume extends KubeObject {
  spec: { claimRef?: { namespace: string; name: string; uid?: string }; pool: string };
  status?: {
    activeNode?: string;
    epoch?: number;
    phase?: VolumePhase;
    generation?: string;
    observedAt?: string;
  };
}
