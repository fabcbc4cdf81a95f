/** Asks the owner of a stuck pod whether it wants one: a single GET, only when the pods alone do not tell. */
import type { VolumeMemory } from './act/memory.ts';
import { isKubeError, type Kube, REPLICA_SETS, STATEFUL_SETS } from './cluster/index.ts';
import type { Clock, Logger } from './cluster/types.ts';
import type { Observed } from './plan/types.ts';
import { ownerToAsk, wantsPod } from './plan/workload.ts';

/** An answer is good for this long, ms: a hundred volumes of a lost node ask seven times a second then. */
const GOOD_MS = 15_000;

/** @throws KubeError when the API server does not answer: nothing is decided without knowing */
export async function askOwner(
  kube: Pick<Kube, 'find'>,
  observed: Observed,
  memory: Pick<VolumeMemory, 'owner'>,
  clock: Pick<Clock, 'boot'>,
  logger: Pick<Logger, 'warn'>,
): Promise<Observed['workload']> {
  const owner = ownerToAsk(observed);
  if (owner === null) return null;
  const key = `${owner.kind}/${owner.name}/${owner.pod}`;
  if (memory.owner?.key === key && clock.boot() - memory.owner.at < GOOD_MS)
    return { wants: memory.owner.wants };
  try {
    const found = await kube.find(owner.kind === 'StatefulSet' ? STATEFUL_SETS : REPLICA_SETS, {
      namespace: observed.namespace,
      name: owner.name,
    });
    const { replicas, ordinals } = found?.spec ?? {};
    const wants = wantsPod(
      owner,
      found && {
        ...(replicas === undefined ? {} : { replicas }),
        ...(ordinals?.start === undefined ? {} : { start: ordinals.start }),
        deleting: found.metadata.deletionTimestamp !== undefined,
      },
    );
    memory.owner = { key, at: clock.boot(), wants };
    return { wants };
  } catch (error) {
    // Without the right to ask it is decided as if a pod were wanted, which it nearly always is.
    if (!isKubeError(error, 'Forbidden')) throw error;
    logger.warn({ owner: key, namespace: observed.namespace }, 'the owner of a stuck pod may not be read');
    return null;
  }
}
