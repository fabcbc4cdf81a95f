import type { Generation } from './generation.ts';
import type { Run } from './lists.ts';
import { pathOf } from './record.ts';

/** One row of a volume's index. `record` carries no chunk list (see chunks). */
export interface Row {
  record: Buffer;
  /** inode of this path's file in the copy that is served (shadow on the active node, the tree itself on a replica) */
  copyIno: bigint;
}

export interface GenerationRow extends Generation {
  /** wall clock, milliseconds; for people only, nothing is decided by it */
  sealedAt: number;
  quiescent: boolean;
  entries: number;
  bytes: number;
  changed: number;
}

/** What a snapshot and the store itself can answer. Paths and records are Buffers; order is memcmp of paths. */
export interface IndexReader {
  get(path: Buffer): Row | undefined;
  chunks(path: Buffer): Buffer | undefined;
  /** Up to `limit` rows with path > after (null: from the start) and, with `below`, only that directory's subtree. */
  page(after: Buffer | null, limit: number, below?: Buffer): Row[];
  /** Rows changed after `seq` (row.seq > seq) and removed paths (records of kind 0, seq set), in path order. */
  changedSince(seq: number, after: Buffer | null, limit: number): Row[];
  /** Paths of a hard-link group. */
  linkGroup(group: bigint): Row[];
  /** Union of the runs of a large file changed after `seq`, null when not known for all generations since. */
  runsSince(path: Buffer, seq: number): Run[] | null;
  totals(): { entries: number; bytes: number };
  meta<T>(key: string): T | undefined;
}

/** A reader that stays at the generation at which it was opened (an own connection with a read transaction). */
export interface IndexSnapshot extends IndexReader {
  close(): void;
}

export interface VolumeStore extends IndexReader {
  readonly namespace: string;
  readonly volume: string;
  snapshot(): IndexSnapshot;
  setMeta(key: string, value: unknown): void;
  deleteMeta(key: string): void;
  put(record: Buffer, copyIno: bigint, chunks: Buffer | null): void;
  /** Only notes the inode of the copy; nothing when there is no such row. */
  setCopy(path: Buffer, copyIno: bigint): void;
  /** Removes the row and leaves a tombstone of generation `seq`. */
  remove(path: Buffer, seq: number): void;
  /** null: the content changed and nobody knows where */
  putRuns(path: Buffer, seq: number, runs: Run[] | null): void;
  /** Removes tombstones and runs up to `seq`; differences from older bases are no longer possible. */
  prune(seq: number): void;
  /** Lowest base seq from which a difference can be told. */
  horizon(): number;
  addGeneration(row: GenerationRow): void;
  /** Newest first. */
  generations(limit: number): GenerationRow[];
  /** Forgets the generations after `seq`: they belong to a line that ended. */
  dropGenerationsAfter(seq: number): void;
  /** Runs `work` in one transaction. It may give the event loop air by awaiting `breathe()` between slices; nothing else writes to this store meanwhile. */
  transaction<T>(work: (breathe: () => Promise<void>) => Promise<T> | T): Promise<T>;
  /** Makes everything committed so far durable (fdatasync of the write-ahead log on the addon's threads). */
  durable(): Promise<void>;
  close(): void;
}

const PAGE = 500;

/** The copy that the rows name is no more: each one's is to be made anew. In a transaction. */
export async function forgetCopies(store: VolumeStore, breathe: () => Promise<void>): Promise<void> {
  for (let after: Buffer | null = null; ; ) {
    const rows: Row[] = store.page(after, PAGE);
    for (const { record, copyIno } of rows) if (copyIno !== 0n) store.setCopy(pathOf(record), 0n);
    if (rows.length < PAGE) return;
    after = Buffer.from(pathOf((rows.at(-1) as Row).record));
    await breathe();
  }
}
