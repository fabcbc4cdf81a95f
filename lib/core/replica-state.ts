import type { ReplicaStatus } from './parts.ts';

/** What a replica is doing, as the decision to fail over sees it. */
export type CopyState = 'idle' | 'pulling' | 'applying' | 'behind' | 'error' | 'unknown';

/** Conditions that a failed attempt to bring the copy forward sets; the first one only says that the source is away. */
const SOURCE_AWAY = 'PullFailed';
const OWN_FAULTS = ['NoSpace', 'InUse'];

/**
 * Reads a replica's own status for that decision. A pull that failed is no fault of the copy: when the source dies
 * every replica has one, and each still holds its last generation whole. What is wrong with the replica itself (no
 * space, its tree in use) stays an error.
 */
export function copyState(status: Pick<ReplicaStatus, 'state' | 'conditions'>): CopyState {
  switch (status.state) {
    case 'idle':
    case 'pulling':
    case 'applying':
    case 'behind':
      return status.state;
    case 'verifying':
      return 'pulling';
    case 'empty':
      return 'behind';
    case 'error': {
      const types = status.conditions.map((one) => one.type);
      return types.includes(SOURCE_AWAY) && !OWN_FAULTS.some((one) => types.includes(one))
        ? 'behind'
        : 'error';
    }
    default:
      return 'unknown';
  }
}
