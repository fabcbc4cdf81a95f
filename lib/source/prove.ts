/**
 * Whether a tree is exactly what the index says, contents read: for a node that hands its volume over and whose tree is
 * to be a copy afterwards.
 */
import type { Generation } from '../core/generation.ts';
import type { ReplicaPolicy } from '../core/policy.ts';
import { EMPTY, Kind, kindOf, pathOf, printablePath, sizeOf } from '../core/record.ts';
import type { VolumeStore } from '../core/store.ts';
import { filterOf } from '../native/filter.ts';
import { hashFiles } from '../native/hash-files.ts';
import type { Native } from '../native/types.ts';
import { sameContent } from './classify.ts';
import { compare, rowsOf } from './collect.ts';
import { COPIES, type Copies } from './seal.ts';

/** Files that are read at a time, and bytes of them: a cancel does not wait for long. */
const BATCH_FILES = 256;
const BATCH_BYTES = 64 * 1024 * 1024;

/** The generation that the index of an active node is exactly at; null: it is on its way to the next one. */
export function indexedGeneration(store: VolumeStore): Generation | null {
  const [newest] = store.generations(1);
  const copies = store.meta<Copies>(COPIES);
  if (!newest || !copies?.complete || copies.ahead) return null;
  if (copies.seq !== newest.seq || copies.epoch !== newest.epoch) return null;
  return { epoch: newest.epoch, seq: newest.seq };
}

/**
 * The first path at which tree and index differ, null: nowhere. Names, metadata and identity are told by a walk; contents
 * by reading them all, since what is written through mmap may leave no trace in the times.
 * @param root the live tree; nobody may write to it meanwhile
 * @param policy what the index covers
 */
export async function firstDifference(
  {
    native,
    store,
    root,
    policy,
  }: { native: Native; store: VolumeStore; root: Buffer; policy: ReplicaPolicy },
  signal: AbortSignal,
): Promise<string | null> {
  const differences = compare({
    native,
    index: store,
    filter: filterOf(native, policy),
    root,
    directory: EMPTY,
    deep: true,
    copies: false,
    pace: async () => signal.throwIfAborted(),
  });
  // Sockets, FIFOs and devices are no part of any generation.
  for await (const one of differences) if (one.what !== 'special') return printablePath(one.path);

  let batch: Buffer[] = [];
  let size = 0;
  for (const { record } of rowsOf(store, EMPTY, true)) {
    if (kindOf(record) !== Kind.file) continue;
    batch.push(Buffer.from(record));
    size += sizeOf(record);
    if (batch.length < BATCH_FILES && size < BATCH_BYTES) continue;
    const path = await otherContent(native, root, batch, signal);
    if (path !== null) return path;
    batch = [];
    size = 0;
  }
  return otherContent(native, root, batch, signal);
}

/** The first of these files whose content is not the one of its record. */
async function otherContent(
  native: Native,
  root: Buffer,
  records: readonly Buffer[],
  signal: AbortSignal,
): Promise<string | null> {
  if (records.length === 0) return null;
  signal.throwIfAborted();
  const hashed = await hashFiles(native, root, records.map(pathOf));
  const differing = records.find((record, i) => {
    const now = hashed[i];
    return !now || !sameContent(record, now);
  });
  return differing === undefined ? null : printablePath(pathOf(differing));
}
