/** What the Controller service needs of the cluster: nodes with pools, and their agents. It knows nothing else of it. */
import type { VolumeName } from '../../lib/core/parts.ts';

/** A volume as one node knows it. */
export interface Holder {
  pool: string;
  node: string;
  role: 'active' | 'replica' | null;
  epoch: number;
  /** its size; null: not recorded there */
  bytes: number | null;
  watched: boolean;
}

export interface Lookup {
  holders: Holder[];
  /** nodes that may know it and did not answer, with the reason */
  silent: { node: string; why: string }[];
}

export interface ClaimName {
  namespace: string;
  name: string;
}

export interface VolumeCluster {
  /** null: it can be asked; else why not (yet) */
  problem(): string | null;
  /** pools that have a node */
  pools(): string[];
  /**
   * Asks all agents of a pool.
   * @param pool null: it is not known in which it is; then all are asked
   */
  lookup(name: VolumeName, pool: string | null): Promise<Lookup>;
  /** The pool that a volume is recorded to be in; null: no record. */
  poolOf(name: VolumeName): string | null;
  /** The node that the scheduler chose for the claim's first pod; null: none, or it is not known. */
  selectedNode(claim: ClaimName): Promise<string | null>;
  /** The node for a new volume. `refused`: why no node, or not the selected one. */
  choose(
    pool: string,
    bytes: number,
    selected: string | null,
  ): Promise<{ node: string } | { refused: string }>;
  /** Largest volume that one node of the pool has room for, bytes. */
  room(pool: string): Promise<number>;
  create(pool: string, node: string, name: VolumeName, bytes: number): Promise<{ bytes: number }>;
  resize(pool: string, node: string, name: VolumeName, bytes: number): Promise<void>;
  stopWatch(pool: string, node: string, name: VolumeName, epoch: number): Promise<void>;
  remove(pool: string, node: string, name: VolumeName, epoch: number): Promise<void>;
  /** Why the volume must not be deleted now; null: it may. */
  keeps(name: VolumeName): Promise<string | null>;
}
