/** Labels of volumes that nobody knows any more: a claim that went while no controller ran, an object deleted by force. */
import { errorText, isKubeError, type Kube, NODES } from '../cluster/index.ts';
import type { Logger } from '../cluster/types.ts';
import { labelId, orphanLabels } from '../plan/labels.ts';

/**
 * Takes them off; what fails is found again by the next sweep.
 * @param known keys `namespace/name` of all claims and SimpleVolumes; must be the whole list
 * @returns how many nodes were patched
 */
export async function sweepLabels(
  kube: Pick<Kube, 'merge'>,
  nodes: Iterable<{ name: string; labels: Readonly<Record<string, string>> }>,
  known: Iterable<string>,
  logger: Pick<Logger, 'info' | 'warn'>,
): Promise<number> {
  const ids = new Set<string>();
  for (const key of known) {
    const [namespace, claim] = key.split('/') as [string, string];
    ids.add(labelId(namespace, claim));
  }
  let patched = 0;
  for (const { node, labels } of orphanLabels([...nodes], ids)) {
    try {
      await kube.merge(NODES, { name: node }, { metadata: { labels } });
      patched++;
      logger.info({ node, labels: Object.keys(labels) }, 'labels of volumes that are no more were removed');
    } catch (error) {
      if (isKubeError(error, 'NotLeader')) throw error;
      if (!isKubeError(error, 'NotFound'))
        logger.warn(
          { node, error: errorText(error) },
          'labels of volumes that are no more could not be removed',
        );
    }
  }
  return patched;
}
