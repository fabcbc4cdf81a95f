/** How one volume is replicated. Plain data; parsed once at the border (HTTP body, later annotations). */
export interface VolumePolicy {
  includePaths: string[];
  excludePaths: string[];
  consistencyMode: 'shadow' | 'live';
  /** milliseconds of quiet after which a batch closes */
  debounceMs: number;
  /** milliseconds after which a batch closes under constant writing; default 5 x debounce */
  maxDelayMs: number;
  pruneExcluded: boolean;
  /** Replicas that must hold a generation before it counts as delivered. */
  confirmedReplicas: number;
  fullSyncOnStart: boolean;
  /** Paths (files or directories) without which a state is not worth sealing. */
  requiredPaths: string[];
  ownerUid: number | null;
  ownerGid: number | null;
  /** permission bits 0..0o7777; executable bits of a file are kept on top */
  fileMode: number | null;
  dirMode: number | null;
}

export const DEFAULT_POLICY: VolumePolicy = {
  includePaths: [],
  excludePaths: [],
  consistencyMode: 'shadow',
  debounceMs: 2000,
  maxDelayMs: 10_000,
  pruneExcluded: false,
  confirmedReplicas: 1,
  fullSyncOnStart: false,
  requiredPaths: [],
  ownerUid: null,
  ownerGid: null,
  fileMode: null,
  dirMode: null,
};

/** The part of the policy that a replica needs. */
export type ReplicaPolicy = Pick<
  VolumePolicy,
  | 'includePaths'
  | 'excludePaths'
  | 'pruneExcluded'
  | 'ownerUid'
  | 'ownerGid'
  | 'fileMode'
  | 'dirMode'
  | 'requiredPaths'
>;
