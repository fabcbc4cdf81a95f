/** What the rooms source, transfer, replica and agent know of each other. Only interfaces and plain data. */
import type { Generation, Lineage } from './generation.ts';
import type { Run } from './lists.ts';
import type { ReplicaPolicy, VolumePolicy } from './policy.ts';
import type { IndexSnapshot } from './store.ts';

export interface VolumeName {
  namespace: string;
  volume: string;
}
export const volumeKey = (v: VolumeName): string => `${v.namespace}/${v.volume}`;

/** Injected everywhere; tests pass their own. Milliseconds. */
export interface Clock {
  /** monotonic, goes on while the machine sleeps; one line for the whole boot */
  boot(): number;
  /** wall clock, for people */
  now(): number;
  setTimeout(fn: () => void, ms: number): { cancel(): void };
}

export interface Logger {
  debug(data: object, text: string): void;
  info(data: object, text: string): void;
  warn(data: object, text: string): void;
  error(data: object, text: string): void;
  child(data: object): Logger;
}

/** Absolute directories of one volume on this node (design section 4). */
export interface VolumePaths {
  live: string;
  /** .simple-volume-shadows/<ns>/<vol> : current/data, retired, slots, offers */
  shadow: string;
  incoming: string;
  backups: string;
  state: string;
}

export interface Condition {
  /** e.g. MassDelete, RootChanged, RequiredPathMissing, WatchBudgetExhausted, NoSpace, Unsupported, Hot, PullFailed, Unreadable */
  type: string;
  message: string;
  /** wall clock ms */
  since: number;
  /** printable paths concerned, at most 100 of them, with the full count beside */
  paths?: string[];
  count?: number;
}

/** A volume as the transfer room serves it: the same for the active node and for a replica. */
export interface ServedVolume extends VolumeName {
  epoch(): number;
  /** The newest sealed (applied) generation, null when there is none. */
  generation(): Generation | null;
  lineage(): Lineage;
  /** Whether a difference from `base` can be told (ancestor, and not older than the horizon). */
  canDiffFrom(base: Generation): boolean;
  /**
   * A fixed view of the newest generation for one pull or one browse: index snapshot and a pin, so that every
   * file of it stays readable until release(). Rejects with NOTHING_SEALED or APPLYING.
   */
  open(): Promise<ServedGeneration>;
}

export interface ServedGeneration {
  generation: Generation;
  lineage: Lineage;
  quiescent: boolean;
  index: IndexSnapshot;
  /** Absolute path of the tree with the newest versions. */
  root: Buffer;
  /** Folder of replaced files by seq, or null. */
  retired: Buffer | null;
  /** live consistency: files must still be exactly what the index says (ctime too). */
  strict: boolean;
  runsSince(path: Buffer, baseSeq: number): Run[] | null;
  /**
   * Moves the pin to the index only: call when the manifest is written and the index snapshot is no longer
   * needed (closes it) while the files stay pinned.
   */
  closeIndex(): void;
  release(): void;
}

/** Where a replica pulls from. */
export interface PullSource {
  url: string;
  webdavUrl: string;
  /** bearer token or grant; never logged */
  token: string;
  node: string;
}

export interface SyncRequest extends VolumeName {
  epoch: number;
  generation: Generation | null;
  source: PullSource;
  /** this replica's boot clock (ms) as of which the source knows it had nothing else pending at the cut; null: unknown */
  echo: number | null;
  policy: ReplicaPolicy;
  /** compare everything with what is on the disk, also when a base is held */
  full: boolean;
}

export interface Offer {
  id: string;
  generation: Generation;
  base: Generation | null;
  lineage: Lineage;
  manifest: { bytes: number; hash: string };
  webdavPath: string;
}
export interface OfferedPack {
  name: string;
  bytes: number;
  items: number;
}

/** The replica's side of one pull, done by the transfer room (HTTP + rclone). */
export interface Puller {
  /** packs of one volume that may be under way at once; default 2 */
  readonly atOnce?: number;
  offer(
    source: PullSource,
    want: VolumeName & { epoch: number; have: Generation | null; full: boolean },
    signal: AbortSignal,
  ): Promise<Offer>;
  /** Writes the manifest to `file` (absolute) and checks its hash. */
  manifest(source: PullSource, offer: Offer, file: string, signal: AbortSignal): Promise<void>;
  /** `ordinals` of the entries whose contents are wanted. */
  needs(source: PullSource, offer: Offer, ordinals: Uint32Array, signal: AbortSignal): Promise<OfferedPack[]>;
  /** Streams one pack; `onData` gives the back-pressure. */
  pack(
    source: PullSource,
    offer: Offer,
    pack: OfferedPack,
    onData: (chunk: Buffer) => Promise<void>,
    signal: AbortSignal,
  ): Promise<void>;
  done(source: PullSource, offer: Offer): Promise<void>;
  confirm(
    source: PullSource,
    body: VolumeName & { epoch: number; generation: Generation; state: string; problems: Condition[] },
    signal: AbortSignal,
  ): Promise<void>;
}

export interface Target {
  url: string;
  /** never logged, never in a reply */
  token: string;
  node: string | null;
}

export interface TargetStatus {
  url: string;
  node: string | null;
  /** last generation that it confirmed */
  confirmed: string | null;
  state: string;
  lastError: string | null;
  /** milliseconds since its last answer, null: never */
  lastAnswerMs: number | null;
}

/** Room of a pool as its file system counts it, bytes. */
export interface PoolSpace {
  /** for what the agent may write: reserved blocks are left out */
  freeBytes: number;
  totalBytes: number;
}

/** What becomes of the size that a volume was made with, on its active node. */
export interface SizeStatus {
  /** as its claim has it; null: no size is recorded here */
  bytes: number | null;
  /** whether the file system holds the volume to it; null: it is not published here, so no limit was set yet */
  enforced: boolean | null;
  /** why it is not, or not yet; empty when it is */
  reason: string;
}

export interface SourceStatus extends VolumeName {
  role: 'active';
  state: 'starting' | 'scanning' | 'watching' | 'sealing' | 'held' | 'stopped' | 'failed';
  epoch: number;
  generation: string | null;
  quiescent: boolean | null;
  /** highest generation that `confirmedReplicas` replicas hold */
  delivered: string | null;
  pending: number;
  /** oldest pending change in ms, null: none */
  pendingMs: number | null;
  entries: number;
  bytes: number;
  policy: VolumePolicy;
  size?: SizeStatus;
  /** where replicas are told to fetch; undefined: nobody is told */
  source?: { url: string; webdavUrl: string };
  targets: TargetStatus[];
  conditions: Condition[];
  watch: { directories: number; unwatched: number; overflows: number; events: number };
  lastBatch: {
    changed: number;
    removed: number;
    moved: number;
    bytesWritten: number;
    ms: number;
    rounds: number;
  } | null;
}

export interface ReplicaStatus extends VolumeName {
  role: 'replica';
  state: 'empty' | 'idle' | 'pulling' | 'verifying' | 'applying' | 'behind' | 'error';
  epoch: number;
  generation: string | null;
  /** newest generation that the source told of */
  wanted: string | null;
  /** ms since it was last known complete, on this node's own clock; null: never */
  freshAgeMs: number | null;
  entries: number;
  bytes: number;
  conditions: Condition[];
  lastPull: { bytes: number; files: number; ms: number; full: boolean } | null;
  source: { node: string; url: string } | null;
}
