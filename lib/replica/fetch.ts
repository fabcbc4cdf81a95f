/** Brings every content that a plan wants into a verified slot: from this disk where it can, else from the source. */
import { rm } from 'node:fs/promises';
import { join } from 'node:path';
import { SimpleVolumeError } from '../core/errors.ts';
import {
  decodeStageResults,
  decodeUnpackResults,
  encodeStageItems,
  encodeUnpackItems,
  StageStatus,
  slotName,
  type UnpackItem,
  UnpackStatus,
} from '../core/lists.ts';
import type { ManifestReader } from '../core/manifest.ts';
import type { Offer, OfferedPack, Puller, PullSource } from '../core/parts.ts';
import { Flag, flagsOf, pathOf, printablePath, sizeOf } from '../core/record.ts';
import type { IndexReader } from '../core/store.ts';
import type { Native } from '../native/types.ts';
import { asRow, isFile, sameContent } from './content.ts';
import { Drift, type Plan } from './plan.ts';
import { NativeDisk } from './walk.ts';

const COPY_FILES = 256;
/** Packs under way at once, unless the puller says otherwise: while the files of one are made here, the source reads those of the next. */
const LANES = 2;
const CHUNKS_ASKED = 0x8000_0000;

/**
 * Which entries of a manifest have a slot with their whole, verified content; kept over a failed attempt for the
 * next one. Patches are never among them: they are good only for the version that they were checked against.
 */
export class Verified {
  readonly #bits: Uint8Array;
  constructor(count: number) {
    this.#bits = new Uint8Array(Math.ceil(count / 8));
  }
  has(ordinal: number): boolean {
    return ((this.#bits[ordinal >> 3] as number) & (1 << (ordinal & 7))) !== 0;
  }
  add(ordinal: number): void {
    this.#bits[ordinal >> 3] = (this.#bits[ordinal >> 3] as number) | (1 << (ordinal & 7));
  }
}

export interface FetchInput {
  native: Native;
  puller: Puller;
  source: PullSource;
  offer: Offer;
  manifest: ManifestReader;
  plan: Plan;
  index: IndexReader;
  slots: string;
  live: string;
  /** an older copy of the volume from which contents can be taken, or null */
  aside: string | null;
  verified: Verified;
  signal: AbortSignal;
}

export interface Fetched {
  bytes: number;
  files: number;
}

/** The wanted entries with their records, in order. */
async function* wantedRecords(
  manifest: ManifestReader,
  wanted: Uint32Array,
): AsyncGenerator<{ ordinal: number; record: Buffer }> {
  let next = 0;
  if (wanted.length === 0) return;
  for await (const { first, records } of manifest.batches()) {
    while (next < wanted.length && (wanted[next] as number) < first + records.length) {
      const ordinal = wanted[next++] as number;
      yield { ordinal, record: records[ordinal - first] as Buffer };
    }
    if (next >= wanted.length) return;
  }
}

export async function fetchContents(i: FetchInput): Promise<Fetched> {
  const wanted = i.plan.wanted();
  await copyLocally(i, wanted);
  const missing = wanted.filter((ordinal) => !hasSlot(i.plan, i.verified, ordinal));
  if (missing.length === 0) return { bytes: 0, files: 0 };
  const packs = await i.puller.needs(i.source, i.offer, words(i.plan, missing), i.signal);
  let bytes = 0;
  const records = wantedRecords(i.manifest, missing);
  const waiting = packs[Symbol.iterator]();
  // One at a time reads the manifest on; each takes its items before the next one does.
  let turn: Promise<unknown> = Promise.resolve();
  const take = (): Promise<{ pack: OfferedPack; items: UnpackItem[] } | null> => {
    const mine = turn.then(async () => {
      const next = waiting.next();
      if (next.done) return null;
      const items: UnpackItem[] = [];
      while (items.length < next.value.items) {
        const r = await records.next();
        if (r.done)
          throw new SimpleVolumeError('PULL_FAILED', `${i.source.node} offers more than it was asked for`);
        items.push(itemOf(i, r.value.ordinal, r.value.record));
      }
      return { pack: next.value, items };
    });
    turn = mine;
    return mine;
  };
  // After a failure no further pack is begun; the one beside it is finished, so that it need not be pulled again.
  let failed = false;
  const lane = async (): Promise<void> => {
    try {
      while (!failed) {
        i.signal.throwIfAborted();
        const next = await take();
        if (next === null) return;
        const received = await onePack(i, next.pack, next.items);
        bytes += received;
      }
    } catch (error) {
      failed = true;
      throw error;
    }
  };
  try {
    const lanes = await Promise.allSettled(Array.from({ length: i.puller.atOnce ?? LANES }, lane));
    for (const l of lanes) if (l.status === 'rejected') throw l.reason;
    if (!(await records.next()).done)
      throw new SimpleVolumeError('PULL_FAILED', `${i.source.node} offers less than it was asked for`);
  } finally {
    await records.return(undefined);
  }
  return { bytes, files: missing.length };
}

/** Whether the slot of an earlier attempt, or of a copy on this disk, serves this plan. */
export const hasSlot = (plan: Plan, verified: Verified, ordinal: number): boolean =>
  verified.has(ordinal) && plan.special.get(ordinal)?.patch !== true;

function words(plan: Plan, ordinals: Uint32Array): Uint32Array {
  let length = ordinals.length;
  for (const s of plan.special.values()) if (s.chunks) length += 1 + s.chunks.length;
  const out = new Uint32Array(length);
  let at = 0;
  for (const ordinal of ordinals) {
    const chunks = plan.special.get(ordinal)?.chunks;
    if (!chunks) {
      out[at++] = ordinal;
      continue;
    }
    out[at++] = ordinal + CHUNKS_ASKED;
    out[at++] = chunks.length / 2;
    for (const c of chunks) out[at++] = c;
  }
  return out.subarray(0, at);
}

function itemOf(i: FetchInput, ordinal: number, record: Buffer): UnpackItem {
  const special = i.plan.special.get(ordinal);
  if (!special?.patch) return { ordinal, patch: false, slot: ordinal, record };
  let base = special.base;
  if (!base) {
    const path = pathOf(record);
    const row = i.index.get(path);
    const chunks = i.index.chunks(path);
    if (!row || !chunks) throw new Drift('the index has no version to patch', path);
    base = withChunks(row.record, chunks);
  }
  return { ordinal, patch: true, slot: ordinal, record, base };
}

/** A row with its chunk list, as the addon wants a base. */
export function withChunks(row: Buffer, chunks: Buffer): Buffer {
  const out = Buffer.concat([asRow(row), chunks]);
  out.writeUInt32LE(out.length, 0);
  out.writeUInt32LE(chunks.length, 108);
  out[5] = (flagsOf(out) & ~Flag.chunksSparse) | Flag.chunksFull;
  return out;
}

async function onePack(i: FetchInput, pack: OfferedPack, items: UnpackItem[]): Promise<number> {
  const unpacker = i.native.createUnpacker({
    slots: Buffer.from(i.slots),
    base: Buffer.from(i.live),
    items: encodeUnpackItems(items),
  });
  let bytes = 0;
  try {
    await i.puller.pack(
      i.source,
      i.offer,
      pack,
      async (chunk) => {
        bytes += chunk.length;
        await unpacker.write(chunk);
      },
      i.signal,
    );
  } catch (error) {
    await unpacker.abort();
    throw error;
  }
  const results = decodeUnpackResults(await unpacker.end());
  if (results.length !== items.length || results.some((r, n) => r.ordinal !== items[n]?.ordinal))
    throw new SimpleVolumeError('INTERNAL', 'the results of a pack are not the items that were asked for');
  // what is good is kept, also when something else of the pack is not
  for (const [n, r] of results.entries())
    if (r.status === UnpackStatus.ok && !items[n]?.patch) i.verified.add(r.ordinal);
  for (const [n, result] of results.entries()) {
    if (result.status === UnpackStatus.ok) continue;
    const item = items[n] as UnpackItem;
    const path = pathOf(item.record);
    if (result.status === UnpackStatus.base)
      throw new Drift('the version to patch is not the expected one', path);
    // a patch over bytes that are not what the index says gives a wrong hash too: then compare with the disk
    if (result.status === UnpackStatus.hash && item.patch)
      throw new Drift('a patch gives other contents', path);
    throw new SimpleVolumeError(
      'VERIFY_FAILED',
      `${printablePath(path)} from ${i.source.node} is not what the manifest says (${STATUS[result.status] ?? result.status})`,
      { path: printablePath(path), node: i.source.node },
    );
  }
  return bytes;
}

const STATUS: Record<number, string> = {
  [UnpackStatus.hash]: 'wrong content',
  [UnpackStatus.size]: 'wrong size',
  [UnpackStatus.missing]: 'missing',
  [UnpackStatus.io]: 'input/output error',
};

/** Contents that are on this disk already: in the old copy of a returning node, or under another name. */
async function copyLocally(i: FetchInput, wanted: Uint32Array): Promise<void> {
  const special = i.plan.special;
  let any = i.aside !== null;
  for (const s of special.values()) if (s.copyFrom) any = true;
  if (!any) return;
  const aside = i.aside ? new NativeDisk(i.native, Buffer.from(i.aside)) : null;
  let batch: { ordinal: number; record: Buffer }[] = [];
  const flush = async (): Promise<void> => {
    i.signal.throwIfAborted();
    const own = batch.filter((b) => special.get(b.ordinal)?.copyFrom);
    await copyBatch(i, i.live, own);
    for (const b of own)
      if (!i.verified.has(b.ordinal)) throw new Drift('the content to copy is not there', pathOf(b.record));
    if (aside) {
      const others = batch.filter((b) => !special.get(b.ordinal)?.copyFrom && !special.get(b.ordinal)?.patch);
      const there = await aside.statAll(others.map((b) => pathOf(b.record)));
      await copyBatch(
        i,
        i.aside as string,
        others.filter((b, n) => {
          const d = there[n] ?? null;
          return isFile(d) && sizeOf(d) === sizeOf(b.record);
        }),
      );
    }
    batch = [];
  };
  for await (const w of wantedRecords(i.manifest, wanted)) {
    if (i.verified.has(w.ordinal)) continue;
    batch.push({ ordinal: w.ordinal, record: Buffer.from(w.record) });
    if (batch.length >= COPY_FILES) await flush();
  }
  if (batch.length > 0) await flush();
}

async function copyBatch(
  i: FetchInput,
  root: string,
  batch: { ordinal: number; record: Buffer }[],
): Promise<void> {
  if (batch.length === 0) return;
  const items = batch.map((b, id) => ({ id, slot: b.ordinal, patch: false, path: pathOf(b.record) }));
  const out = await i.native.stage(
    { root: Buffer.from(root), slots: Buffer.from(i.slots), base: null, hashOnly: false },
    encodeStageItems(items),
  );
  for (const r of decodeStageResults(out)) {
    const b = batch[r.id] as { ordinal: number; record: Buffer };
    if (r.status === StageStatus.ok && r.slotKind === 1 && sameContent(r.record, b.record))
      i.verified.add(b.ordinal);
    else await rm(join(i.slots, slotName(b.ordinal)), { force: true });
  }
}
