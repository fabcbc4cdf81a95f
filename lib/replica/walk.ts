/** The two ways through a volume that feed a plan: the whole of it, or what a difference names. */
import { setImmediate as nextTurn } from 'node:timers/promises';
import { encodePaths } from '../core/lists.ts';
import type { ManifestReader } from '../core/manifest.ts';
import { EMPTY, Kind, kindOf, pathOf, recordsIn, sizeOf } from '../core/record.ts';
import type { IndexReader, Row } from '../core/store.ts';
import { hashFiles } from '../native/hash-files.ts';
import type { Filter, Native } from '../native/types.ts';
import type { Have } from './content.ts';
import { parentOf } from './directories.ts';
import { type DiskReader, Drift, type Plan } from './plan.ts';

const PAGE = 512;
const SCAN_BYTES = 256 * 1024;
/** Files that are read at a time; and how many bytes of them, so that a cancel does not wait for long. */
const BATCH_FILES = 256;
const BATCH_BYTES = 256 * 1024 * 1024;

/** The replica's tree as the addon sees it. */
export class NativeDisk implements DiskReader {
  readonly #native: Native;
  readonly root: Buffer;
  readonly #all: Filter;
  constructor(native: Native, root: Buffer) {
    this.#native = native;
    this.root = root;
    this.#all = native.compileFilter([], []);
  }

  async *walk(directory: Buffer, filter: Filter = this.#all): AsyncGenerator<Buffer> {
    const scanner = this.#native.scan(this.root, directory, filter, true);
    try {
      for (;;) {
        const piece = await scanner.next(SCAN_BYTES);
        if (!piece) return;
        yield* recordsIn(piece);
      }
    } finally {
      scanner.close();
    }
  }

  async *below(directory: Buffer): AsyncGenerator<Buffer> {
    for await (const r of this.walk(directory)) if (!pathOf(r).equals(directory)) yield r;
  }

  async stat(path: Buffer): Promise<Buffer | null> {
    return (await this.statAll([path]))[0] ?? null;
  }

  /** The root itself, null when it is gone. */
  async rootStat(): Promise<Buffer | null> {
    try {
      return await this.stat(EMPTY);
    } catch (error) {
      if ((error as { code?: string }).code === 'ENOENT') return null;
      throw error;
    }
  }

  async statAll(paths: Buffer[]): Promise<(Buffer | null)[]> {
    if (paths.length === 0) return [];
    const all = await this.#native.stat(this.root, encodePaths(paths));
    return [...recordsIn(all)].map((r) => (kindOf(r) === Kind.absent ? null : r));
  }

  /** As hashFiles. */
  hashAll(paths: readonly Buffer[]): Promise<(Buffer | null)[]> {
    return hashFiles(this.#native, this.root, paths);
  }
}

/** Files that have to be read before their entry can be decided. */
class HashQueue {
  readonly #disk: NativeDisk;
  readonly #plan: Plan;
  #waiting: { ordinal: number; want: Buffer; have: Have }[] = [];
  #bytes = 0;
  constructor(disk: NativeDisk, plan: Plan) {
    this.#disk = disk;
    this.#plan = plan;
  }
  async add(ordinal: number, want: Buffer, have: Have): Promise<void> {
    this.#waiting.push({ ordinal, want: Buffer.from(want), have });
    this.#bytes += sizeOf(have.disk as Buffer);
    if (this.#waiting.length >= BATCH_FILES || this.#bytes >= BATCH_BYTES) await this.flush();
  }
  async flush(): Promise<void> {
    const batch = this.#waiting;
    if (batch.length === 0) return;
    this.#waiting = [];
    this.#bytes = 0;
    const hashed = await this.#disk.hashAll(batch.map((b) => pathOf(b.want)));
    for (const [i, b] of batch.entries()) {
      const now = hashed[i] ?? null;
      // gone since it was seen: then it is pulled
      await this.#plan.hashed(b.ordinal, b.want, {
        ...b.have,
        disk: now ?? null,
        diskComplete: true,
        hashed: now,
      });
    }
  }
}

/** An async sequence with a look at its next element. */
class Ahead<T> {
  readonly #it: AsyncIterator<T>;
  head: T | null = null;
  constructor(source: AsyncIterable<T>) {
    this.#it = source[Symbol.asyncIterator]();
  }
  async next(): Promise<void> {
    const r = await this.#it.next();
    this.head = r.done ? null : r.value;
  }
  async close(): Promise<void> {
    await this.#it.return?.();
  }
}

async function* rowsOf(index: IndexReader): AsyncGenerator<Row> {
  for (let after: Buffer | null = null; ; ) {
    const rows: Row[] = index.page(after, PAGE);
    yield* rows;
    if (rows.length < PAGE) return;
    after = pathOf((rows.at(-1) as Row).record);
    await nextTurn();
  }
}

async function* entriesOf(manifest: ManifestReader): AsyncGenerator<{ ordinal: number; record: Buffer }> {
  for await (const { first, records } of manifest.batches()) {
    for (const [i, record] of records.entries()) yield { ordinal: first + i, record };
    await nextTurn();
  }
}

export interface WalkInput {
  manifest: ManifestReader;
  index: IndexReader;
  disk: NativeDisk;
  plan: Plan;
  signal: AbortSignal;
}

/**
 * Compares everything: manifest, index and disk, merged in path order. `seen` is the filter for the disk: what it
 * leaves out is left alone.
 */
export async function walkAll(i: WalkInput, seen: Filter, seq: number): Promise<void> {
  const queue = new HashQueue(i.disk, i.plan);
  const wanted = new Ahead(entriesOf(i.manifest));
  const rows = new Ahead(rowsOf(i.index));
  const disk = new Ahead(i.disk.walk(EMPTY, seen));
  try {
    await wanted.next();
    await rows.next();
    await disk.next();
    for (;;) {
      const paths = [wanted.head?.record, rows.head?.record, disk.head].filter((r) => r != null).map(pathOf);
      if (paths.length === 0) break;
      i.signal.throwIfAborted();
      const path = paths.reduce((a, b) => (b.compare(a) < 0 ? b : a));
      const w = wanted.head && pathOf(wanted.head.record).equals(path) ? wanted.head : null;
      const row = rows.head && pathOf(rows.head.record).equals(path) ? rows.head.record : null;
      let there = disk.head && pathOf(disk.head).equals(path) ? disk.head : null;
      let complete = false;
      // the walk of the disk leaves out what the filter does; the manifest or the index may still speak of it
      const named = w?.record ?? row;
      if (!there && named && seen.match(path, kindOf(named) === Kind.directory) === 0) {
        there = await i.disk.stat(path);
        complete = true;
      }
      const have: Have = { row, disk: there, diskComplete: complete, hashed: null };
      if (w) {
        if (!(await i.plan.entry(w.ordinal, w.record, have))) await queue.add(w.ordinal, w.record, have);
        await wanted.next();
      } else if (row) await i.plan.removal(path, seq, have);
      else if (there) await i.plan.stray(there);
      if (row) await rows.next();
      if (disk.head && pathOf(disk.head).equals(path)) await disk.next();
    }
    await queue.flush();
  } finally {
    await wanted.close();
    await rows.close();
    await disk.close();
  }
  await i.plan.finish();
}

/** What a difference names, with a look at the disk at each of these paths and at the directories above them. */
export async function walkDifference(i: WalkInput): Promise<void> {
  const queue = new HashQueue(i.disk, i.plan);
  for await (const { first, records } of i.manifest.batches()) {
    i.signal.throwIfAborted();
    const parents: Buffer[] = [];
    for (const r of records) {
      const parent = parentOf(pathOf(r));
      if (!parents.at(-1)?.equals(parent)) parents.push(parent);
    }
    const paths = records.map(pathOf);
    const found = await i.disk.statAll([...paths, ...parents]);
    const parentThere = new Map(
      parents.map((p, n) => [p.toString('latin1'), found[paths.length + n] ?? null]),
    );
    for (const [n, record] of records.entries()) {
      const path = paths[n] as Buffer;
      const have: Have = {
        row: i.index.get(path)?.record ?? null,
        disk: found[n] ?? null,
        diskComplete: true,
        hashed: null,
      };
      const parent = parentOf(path);
      if (path.length > 0 && kindOf(record) !== Kind.absent) {
        const above = parentThere.get(parent.toString('latin1'));
        const made = i.plan.makes(parent);
        if (!made && !(above && kindOf(above) === Kind.directory))
          throw new Drift('a directory is missing', parent);
      }
      if (kindOf(record) === Kind.directory && have.row && !have.disk && kindOf(have.row) === Kind.directory)
        throw new Drift('a directory is missing', path);
      const ordinal = first + n;
      if (!(await i.plan.entry(ordinal, record, have))) await queue.add(ordinal, record, have);
    }
    await nextTurn();
  }
  await queue.flush();
  await i.plan.finish();
}
