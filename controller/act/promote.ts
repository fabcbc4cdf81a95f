/**
 * The promotion: consent of the replica, the fence, then ONE compare-and-swap on the SimpleVolume's status. Everything
 * that follows from it (annotations, labels, pods, watches) is planned anew from the record until it is done, by whoever
 * leads then.
 */
import { isKubeError, type Kube, SIMPLE_VOLUMES } from '../cluster/index.ts';
import type { SimpleVolume } from '../cluster/types.ts';
import type { ActionBody } from '../plan/types.ts';
import type { FenceDriver } from './fence.ts';

export type Decide = Extract<ActionBody, { kind: 'decide' }>;

export type DecideOutcome =
  | { done: true; object: SimpleVolume }
  /** not now; look again after this, ms */
  | { done: false; code: string; waitMs: number };

/** How soon to look again when a node refuses without saying until when, ms. */
const AGAIN_MS = 1000;

/**
 * @param object as observed, or as this plan has written it already
 * @throws KubeError Conflict when somebody else has written the status meanwhile, and all others
 */
export async function decide(
  action: Decide,
  object: SimpleVolume,
  fence: FenceDriver,
  kube: Kube,
): Promise<DecideOutcome> {
  const { record, status, insist, released } = action;
  const { spec, metadata } = object;
  const name = { namespace: metadata.namespace as string, volume: spec.volumeName };
  let allowed = (): boolean => fence.ready();
  if (object.status?.activeNode !== undefined) {
    const consent = await fence.askConsent(spec.pool, record.to, {
      ...name,
      epoch: record.epoch,
      released,
      insist,
    });
    if (consent === null) return { done: false, code: 'NOT_LEADING', waitMs: AGAIN_MS };
    if (!consent.consent)
      return { done: false, code: consent.code, waitMs: Math.max(100, consent.waitMs || AGAIN_MS) };
    const verdict = fence.mayPromote(spec.pool, name, record.to, record.epoch, consent);
    if (!verdict.ok)
      return { done: false, code: verdict.code, waitMs: Math.max(100, verdict.waitMs || AGAIN_MS) };
    // Asked once more in the moment in which the write leaves.
    allowed = () => fence.ready() && fence.mayPromote(spec.pool, name, record.to, record.epoch, consent).ok;
  }
  try {
    // Before all that waits for the own rate limit: a hundred volumes of a lost node are decided first, then tidied up.
    const written = await kube
      .gated(allowed)
      .replace(SIMPLE_VOLUMES, { ...object, status }, { subresource: 'status', urgent: true });
    return { done: true, object: written };
  } catch (error) {
    // Whether it was written is not known: the next look reads it. A conflict says that somebody else was first.
    if (isKubeError(error, 'Conflict')) return { done: false, code: 'CONFLICT', waitMs: 100 };
    if (isKubeError(error, 'NotLeader')) return { done: false, code: 'NOT_LEADING', waitMs: AGAIN_MS };
    throw error;
  }
}
