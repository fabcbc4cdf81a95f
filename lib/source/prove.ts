/**
 * Whether a tree is exactly what the index says, contents read: for a node that hands its volume over and whose tree is
 * to be a copy afterwards.
 */
import { SimpleVolumeError } from '../core/errors.ts';
import type { Generation } from '../core/generation.ts';
import { decodeStageResults, encodeStageItems, StageStatus } from '../core/lists.ts';
import { EMPTY, Kind, kindOf, pathOf, printablePath, sizeOf } from '../core/record.ts';
import type { Row, VolumeStore } from '../core/store.ts';
import type { Filter, Native } from '../native/types.ts';
import { sameContent } from './classify.ts';
import { compare } from './collect.ts';
import { COPIES, type Copies } from './seal.ts';

const PAGE = 512;
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
 * @param filter what the index covers
 */
export async function firstDifference(
  { native, store, root, filter }: { native: Native; store: VolumeStore; root: Buffer; filter: Filter },
  signal: AbortSignal,
): Promise<string | null> {
  const differences = compare({
    native,
    index: store,
    filter,
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
  for (let after: Buffer | null = null; ; ) {
    const rows: Row[] = store.page(after, PAGE);
    for (const { record } of rows) {
      if (kindOf(record) !== Kind.file) continue;
      batch.push(Buffer.from(record));
      size += sizeOf(record);
      if (batch.length < BATCH_FILES && size < BATCH_BYTES) continue;
      const path = await otherContent(native, root, batch, signal);
      if (path !== null) return path;
      batch = [];
      size = 0;
    }
    if (rows.length < PAGE) return otherContent(native, root, batch, signal);
    after = Buffer.from(pathOf((rows.at(-1) as Row).record));
  }
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
  const same = new Set<number>();
  const results = await native.stage(
    { root, slots: EMPTY, base: null, hashOnly: true },
    encodeStageItems(records.map((record, id) => ({ id, slot: 0, patch: false, path: pathOf(record) }))),
  );
  for (const { id, status, record } of decodeStageResults(results)) {
    if (status === StageStatus.busy)
      throw new SimpleVolumeError('CONTENT_CHANGED', 'somebody writes to the tree while it is compared', {
        path: printablePath(pathOf(records[id] as Buffer)),
      });
    if (status === StageStatus.ok && sameContent(records[id] as Buffer, record)) same.add(id);
  }
  const differing = records.find((_, id) => !same.has(id));
  return differing === undefined ? null : printablePath(pathOf(differing));
}
