/**
 * A node that handed its volume over has what the next active node began with. Its tree stays and is a copy from then
 * on, once it was read and is what was sealed last; otherwise it goes to the backups, like any other tree that was
 * written to under an older epoch.
 */
import { parseGeneration, sameGeneration } from '../core/generation.ts';
import type { SyncRequest } from '../core/parts.ts';
import { forgetCopies } from '../core/store.ts';
import { ASIDE, DEMOTED, type Demoted, HELD, type Held, requiredPath } from './apply.ts';
import { crashPoint } from './crash.ts';
import { checkPlace, policyKey, type SyncDeps } from './sync.ts';

/**
 * Makes the tree of a node that handed its volume over to a copy, if the new source went on from just that state and
 * the tree is proven to be it.
 * @returns whether the copy holds a generation now that it did not hold before
 */
export async function takeUp(d: SyncDeps, request: SyncRequest, signal: AbortSignal): Promise<boolean> {
  const { store, puller, log } = d;
  const text = store.meta<Demoted>(DEMOTED)?.generation;
  if (!text || store.meta(ASIDE)) return false;
  const generation = parseGeneration(text);
  const [newest] = store.generations(1);
  if (!newest || !sameGeneration(newest, generation)) return false;
  const offer = await puller.offer(
    request.source,
    { ...d.name, epoch: request.epoch, have: generation, full: false },
    signal,
  );
  // Only the question was of interest. Best effort: an offer that nobody touches ends by itself.
  await puller.done(request.source, offer).catch(() => undefined);
  if (!offer.base || !sameGeneration(offer.base, generation)) return false;
  checkPlace(d);
  const { policy } = request;
  const differs = await d.firstDifference(policy, signal);
  if (differs !== null) {
    log.warn(
      { generation: text, path: differs },
      'the tree that was handed over is not what was sealed last',
    );
    return false;
  }
  checkPlace(d);
  signal.throwIfAborted();
  const asIs =
    !policy.pruneExcluded &&
    [policy.ownerUid, policy.ownerGid, policy.fileMode, policy.dirMode].every((one) => one === null);
  const held: Held = {
    generation: text,
    quiescent: newest.quiescent,
    complete: true,
    lastComplete: text,
    refusedCount: 0,
    refused: [],
    xattrsFailed: 0,
    // What a copy has otherwise than the source is made so by the comparison with everything that this brings about.
    policy: asIs ? policyKey(policy) : '',
    missing: policy.requiredPaths.filter((path) => store.get(requiredPath(path)) === undefined),
  };
  crashPoint('replica.handover.proven');
  await store.transaction(async (breathe) => {
    await forgetCopies(store, breathe); // those in the shadow; now the tree itself is what is read
    store.setMeta(HELD, held);
    store.deleteMeta(DEMOTED);
  });
  await store.durable();
  crashPoint('replica.handover.durable');
  log.info({ generation: text }, 'the tree that was handed over is a copy now');
  return true;
}
