/** What the HTTP routes can ask of an agent. The routes know nothing else of it. */

import type { Generation } from '../core/generation.ts';
import type {
  Condition,
  Offer,
  OfferedPack,
  PoolSpace,
  ReplicaStatus,
  SourceStatus,
  SyncRequest,
  Target,
  VolumeName,
} from '../core/parts.ts';
import type { VolumePolicy } from '../core/policy.ts';
import type { Fencing } from './fencing.ts';

export interface WatchStart extends VolumeName {
  epoch: number | null;
  /** size as the claim has it; null: not said, what is known stays */
  bytes: number | null;
  /** how replicas reach this agent; null: its own addresses */
  sourceUrl: string | null;
  sourceWebdavUrl: string | null;
  targets: Target[];
  policy: VolumePolicy;
}

export type VolumeStatus = SourceStatus | ReplicaStatus;

export interface Beat {
  node: string;
  volumes: (VolumeName & {
    epoch: number;
    generation: string | null;
    complete: boolean;
    echo: number | null;
  })[];
}
export interface BeatReply {
  node: string;
  /** this node's boot clock, ms */
  clock: number;
  volumes: (VolumeName & { epoch: number; generation: string | null; state: string })[];
}

export interface FullSyncRun {
  id: string;
  state: 'running' | 'done' | 'failed';
  error?: string;
  generation?: string;
}

export interface Backup {
  stamp: string;
  bytes: number;
  entries: number;
}

/** What goes of a volume on one node. */
export interface Removal extends VolumeName {
  /** the newest that the caller knows: a node that has seen a newer one keeps its data */
  epoch: number;
  /** also from a node that was its active one and whose watch is stopped, or that has no state of it: the volume is deleted */
  evenActive: boolean;
  /** with what returning nodes had */
  backups: boolean;
}

/** What a node knows of a volume, also of one that was only made. */
export interface VolumeRecord extends VolumeName {
  known: boolean;
  role: 'active' | 'replica' | null;
  epoch: number;
  /** size as the claim has it; null: not recorded here */
  bytes: number | null;
  /** a watch is started */
  watched: boolean;
}

export interface AgentApi {
  watchStart(request: WatchStart): Promise<SourceStatus>;
  watchStop(name: VolumeName, epoch: number | null): Promise<SourceStatus>;
  watchStatus(name: VolumeName | null): SourceStatus[];
  syncBatch(request: SyncRequest): Promise<{ state: string; generation: string | null }>;
  fullSync(request: SyncRequest): Promise<{ id: string; started: boolean; reason?: string }>;
  fullSyncStatus(id: string): FullSyncRun | null;
  createTransfer(
    request: VolumeName & { epoch: number; node: string; have: Generation | null; full: boolean },
  ): Promise<Offer>;
  transferNeeds(id: string, principal: Principal, ordinals: Uint32Array): Promise<OfferedPack[]>;
  dropTransfer(id: string, principal: Principal): Promise<void>;
  confirm(
    request: VolumeName & {
      epoch: number;
      node: string;
      generation: Generation;
      state: string;
      problems: Condition[];
    },
  ): Promise<void>;
  beat(request: Beat): BeatReply;
  /** @throws NOT_READY while the pool is not open: nothing is granted or said of its volumes then */
  fencing(): FenceApi;
  prepare(
    request: VolumeName & { epoch: number | null; confirm: number | 'all'; timeoutMs: number },
  ): Promise<{ generation: string; quiescent: boolean; confirmed: string[] }>;
  force(name: VolumeName, epoch: number | null, condition: string): Promise<VolumeStatus>;
  volumes(): VolumeStatus[];
  /** null: the pool is not open, or its file system does not say */
  poolSpace(): Promise<PoolSpace | null>;
  volume(name: VolumeName): VolumeStatus;
  /** Removes the data of a volume from this node. Of one that is not here: `removed` false, and no error. */
  removeVolume(removal: Removal): Promise<{ removed: boolean }>;
  /** Makes the empty live tree of a new volume, once. @throws HELD, VOLUME_UNKNOWN, NO_SPACE */
  createVolume(name: VolumeName, bytes: number): Promise<{ created: boolean; bytes: number }>;
  /** Notes a larger size. @throws VOLUME_UNKNOWN */
  resizeVolume(name: VolumeName, bytes: number): Promise<{ bytes: number }>;
  record(name: VolumeName): VolumeRecord;
  /** room and number of volumes, for placing new ones. @throws NOT_READY while the pool is not open */
  poolState(): Promise<{ space: PoolSpace | null; volumes: number }>;
  /** which pool this is, for csi-node of the same pod */
  about(): { node: string; pool: string; path: string };
  backups(name: VolumeName): Promise<Backup[]>;
  removeBackup(name: VolumeName, stamp: string): Promise<void>;
  readiness(): Promise<{ ready: boolean; reasons: string[] }>;
  metrics(): Promise<string>;
}

/** The agent's part of fencing (fencing.ts), as the routes see it. */
export type FenceApi = Pick<
  Fencing,
  'beat' | 'poll' | 'consent' | 'release' | 'report' | 'announce' | 'lease'
>;

/** Who asks: another agent or the controller (the token), or a replica with a grant for one volume. */
export type Principal =
  | { kind: 'agent' }
  | { kind: 'grant'; namespace: string; volume: string; epoch: number; node: string };
export type Authenticate = (authorization: string | undefined) => Principal | null;
