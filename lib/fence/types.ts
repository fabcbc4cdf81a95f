/**
 * What the parts of the fencing protocol say to each other, and the plain data that they keep. The protocol is in
 * docs/fencing.md; the machines that send and read these shapes are active.ts, replica.ts and leader.ts.
 *
 * Every time is a number of milliseconds on the own monotonic clock of the part that keeps it. No clock reading ever
 * travels: what travels are numbers of beats and lengths of time.
 */
import type { VolumeName } from '../core/parts.ts';

/** `lease`: the writer is frozen when its lease ends. `none`: nobody stops it. */
export type FencingMode = 'lease' | 'none';

/**
 * The versioned set of nodes that may be promoted, as the status of a volume keeps it (`status.promotable`).
 * Versions only grow, also across epochs.
 */
export interface Promotable {
  version: number;
  /** may be promoted; sorted */
  nodes: string[];
  /** are told to the active node and become promotable when it has acknowledged exactly this version; sorted */
  adding: string[];
}

/** The same set as the active node is told it: `nodes` and `adding` together. */
export interface ToldSet {
  version: number;
  nodes: string[];
}

/* Between agents: POST /replication/fence/beat, one a second per pair of nodes, for all volumes between the two. */

/** From the node that is active for these volumes. */
export interface FenceBeat {
  node: string;
  /** number of this beat; never used twice by any process of this node */
  beat: number;
  volumes: (VolumeName & { epoch: number })[];
}

export interface FenceBeatReply {
  node: string;
  /** the number that is answered */
  beat: number;
  /** the promises are good for this long, counted from when the beat was sent */
  leaseMs: number;
  volumes: (VolumeName & {
    /** highest epoch that the replica has seen (0: it does not know the volume) */
    epoch: number;
    /** it will not be promoted while the promise holds */
    promised: boolean;
  })[];
}

/* From the leading controller to an agent: POST /replication/fence/poll, once a second, for all volumes. */

export interface FencePoll {
  /** identity of the controller, for logs */
  controller: string;
  /** number of the leadership: grows with every change of leader */
  term: number;
  /** the renewals of this poll are good for this long, counted from when the named beat was sent */
  leaseMs: number;
  /** the beat that is answered: the number in the agent's reply to an earlier poll of this term; null: none yet */
  beat: number | null;
  volumes: FencePollVolume[];
}

/** A volume that is active on the polled node, as the controller reads it in the cluster. */
export interface FencePollVolume extends VolumeName {
  epoch: number;
  /** whether the lease is renewed for the named beat */
  renew: boolean;
  fencing: FencingMode;
  promotable: ToldSet;
}

export interface FencePollReply {
  node: string;
  /** of the poll that is answered */
  term: number;
  /** a new beat: the next poll may renew for it the volumes that are `active` below */
  beat: number;
  /** what csi-node said of freezing on this node; null: it has not said anything yet */
  freezer: FreezerState | null;
  /** every volume of this node */
  volumes: FenceVolumeState[];
}

export interface FenceVolumeState extends VolumeName {
  role: 'active' | 'replica';
  /** active: the epoch in which it is; replica: highest epoch seen */
  epoch: number;
  /** active only: it has given its lease of this epoch back and will not write in it again */
  released: boolean;
  fencing: FencingMode;
  /** active only: the set that it knows, durably; null: it was never told one */
  promotable: ToldSet | null;
  /** active: how long its writer may still run, null: without end; replica: how long it is still bound by a promise */
  remainingMs: number | null;
}

export interface FreezerState {
  possible: boolean;
  /** what was found, or why freezing is impossible; one sentence */
  reason: string;
  /** cgroup hierarchy that is used */
  cgroup: 'v1' | 'v2' | null;
}

/* From the leading controller to a replica that it wants to promote: POST /replication/fence/consent. */

export interface FenceConsentRequest extends VolumeName {
  /** the new epoch */
  epoch: number;
  term: number;
  /** the active node has released this epoch: promises that were given to it no longer bind; null: it has not */
  released: number | null;
  /** true: the replica gives the present active node no further promise, so that the wait ends although it beats */
  insist: boolean;
}

export type ConsentCode = 'CONSENT' | 'PROMISED' | 'EPOCH_OLD' | 'ACTIVE' | 'UNKNOWN';

export interface FenceConsentReply {
  node: string;
  /** as asked */
  epoch: number;
  term: number;
  consent: boolean;
  code: ConsentCode;
  /** PROMISED: how long the promise still binds, counted from this answer */
  waitMs: number;
  /** highest epoch that the replica has seen: a new attempt must be above it */
  seen: number;
}

/* From the controller to the active node of a planned move: POST /replication/fence/release. 409 VOLUME_IN_USE while a writer may run. */

export interface FenceReleaseRequest extends VolumeName {
  epoch: number;
}
export interface FenceReleaseReply {
  node: string;
  epoch: number;
  released: true;
}

/* On the agent's unix socket, for csi-node. */

/** POST /fence/report, once a second: all volumes that csi-node has published on this node. */
export interface WriterReport {
  /** csi-node's boot clock (CLOCK_BOOTTIME), ms: only for the order of what it says */
  at: number;
  writers: VolumeName[];
  freezer: FreezerState;
  /** what became of the size of each of them, as far as a limit was tried; absent: an older csi-node */
  sizes?: SizeOutcome[];
}
export interface SizeOutcome extends VolumeName {
  /** the limit that was asked for */
  bytes: number;
  enforced: boolean;
  /** why it is not enforced */
  reason: string;
}
export interface WriterReportReply {
  node: string;
  volumes: WriterLease[];
}

/** POST /fence/announce, before a volume is published; only its answer allows to start a writer. */
export interface WriterAnnouncement extends VolumeName {
  at: number;
}

/** GET /fence/volumes/:ns/:vol, the answer to an announcement, and one for each volume of a report. */
export interface WriterLease extends VolumeName {
  /** `none`: this node has no state of the volume */
  role: 'active' | 'replica' | 'none';
  epoch: number;
  fencing: FencingMode;
  released: boolean;
  /** how long the writer may run, counted from when the question was sent; null: without end; 0: not at all */
  remainingMs: number | null;
  /** what the tree is to be limited to, bytes; null: to nothing; absent: nothing is said of it */
  sizeBytes?: number | null;
}
