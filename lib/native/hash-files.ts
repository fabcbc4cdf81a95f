import { SimpleVolumeError } from '../core/errors.ts';
import { decodeStageResults, encodeStageItems, StageStatus } from '../core/lists.ts';
import { EMPTY, printablePath } from '../core/record.ts';
import type { Native } from './types.ts';

/**
 * Reads files: complete records with hash, chunks and attributes. null: it is not there or cannot be read.
 * @throws CONTENT_CHANGED when somebody writes to one of them meanwhile
 */
export async function hashFiles(
  native: Pick<Native, 'stage'>,
  root: Buffer,
  paths: readonly Buffer[],
): Promise<(Buffer | null)[]> {
  const results = await native.stage(
    { root, slots: EMPTY, base: null, hashOnly: true },
    encodeStageItems(paths.map((path, id) => ({ id, slot: 0, patch: false, path }))),
  );
  const hashed: (Buffer | null)[] = paths.map(() => null);
  for (const { id, status, record } of decodeStageResults(results)) {
    if (status === StageStatus.ok) hashed[id] = record;
    else if (status === StageStatus.busy)
      throw new SimpleVolumeError('CONTENT_CHANGED', 'somebody writes to the replica while it is compared', {
        path: printablePath(paths[id] as Buffer),
      });
  }
  return hashed;
}
