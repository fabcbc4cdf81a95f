/** The one place where a live tree is made. */
import { mkdir } from 'node:fs/promises';
import { dirname } from 'node:path';
import type { Native } from '../native/types.ts';

/**
 * Makes a volume's live tree if it is missing, and the folders above it, closed to others. One that is there stays.
 * @param counted as a tree that its file system can hold to a size, where it can
 */
export async function makeLive(
  native: Native,
  live: string,
  o: { mode: number; counted: boolean },
): Promise<void> {
  await mkdir(dirname(live), { recursive: true, mode: 0o700 });
  if (o.counted) await native.makeTree(Buffer.from(live), o.mode);
  else await mkdir(live, { recursive: true, mode: o.mode });
}
