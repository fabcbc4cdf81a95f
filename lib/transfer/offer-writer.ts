/**
 * Writes what a transfer offers: the manifest, and beside it the two files that answer "needs" without the
 * index: `index` (one entry of fixed length per ordinal) and `runs` (changed runs of large files).
 */
import { type FileHandle, open } from 'node:fs/promises';
import path from 'node:path';
import { setImmediate } from 'node:timers/promises';
import { SimpleVolumeError } from '../core/errors.ts';
import type { Generation } from '../core/generation.ts';
import { encodeRuns, type Run, unionRuns } from '../core/lists.ts';
import { type HashFile, ManifestWriter } from '../core/manifest.ts';
import type { ServedGeneration, VolumeName } from '../core/parts.ts';
import {
  CHUNK,
  CHUNK_HASH,
  decodeRecord,
  EMPTY,
  encodeRecord,
  Flag,
  flagsOf,
  HEAD,
  inoOf,
  Kind,
  kindOf,
  LARGE,
  pathOf,
  printablePath,
  seqOf,
  sizeOf,
} from '../core/record.ts';
import type { Row } from '../core/store.ts';

/**
 * An entry of the index file: u64 offset of the record in the manifest, u64 inode of the copy, u64 bytes that
 * travel, u64 offset in the runs file, u32 bytes there, u32 length of the record, i64 ctime (ns), u8 kind, pad.
 */
export const ENTRY = 56;
const PAGE = 256;

/** Appends to a new file in pieces of 64 KiB. */
class Appender {
  readonly #file: FileHandle;
  #parts: Buffer[] = [];
  #held = 0;
  bytes = 0;
  private constructor(file: FileHandle) {
    this.#file = file;
  }
  static async create(name: string): Promise<Appender> {
    return new Appender(await open(name, 'wx', 0o600));
  }
  async add(data: Buffer): Promise<void> {
    this.#parts.push(data);
    this.#held += data.length;
    this.bytes += data.length;
    if (this.#held >= 64 * 1024) await this.#flush();
  }
  async #flush(): Promise<void> {
    const all = Buffer.concat(this.#parts);
    this.#parts = [];
    this.#held = 0;
    await this.#file.writeFile(all);
  }
  async close(): Promise<void> {
    try {
      if (this.#held > 0) await this.#flush();
    } finally {
      await this.#file.close();
    }
  }
}

const CHANGED = Flag.chunksFull | Flag.chunksSparse | Flag.moved;

/** Chunks that runs touch, and always the last one: its length follows the size. */
function sparseChunks(runs: Run[], size: number, full: Buffer): Buffer {
  const count = Math.ceil(size / CHUNK);
  const indexes: number[] = [];
  const add = (i: number): void => {
    if (i < count && i > (indexes.at(-1) ?? -1)) indexes.push(i);
  };
  for (const r of runs) {
    const end = Math.floor((r.offset + r.length - 1) / CHUNK);
    for (let i = Math.floor(r.offset / CHUNK); i <= end && i < count; i++) add(i);
  }
  add(count - 1);
  const out = Buffer.allocUnsafe(indexes.length * (4 + CHUNK_HASH));
  indexes.forEach((i, n) => {
    out.writeUInt32LE(i, n * 20);
    full.copy(out, n * 20 + 4, i * CHUNK_HASH, (i + 1) * CHUNK_HASH);
  });
  return out;
}

interface Entry {
  record: Buffer;
  runs: Run[] | null;
}

/** The record as it travels, or null for what does not (sockets, unreadable files). */
function entryOf(row: Row, served: ServedGeneration, base: Generation | null): Entry | null {
  const r = row.record;
  const kind = kindOf(r);
  if (kind === Kind.absent)
    return { record: encodeRecord({ kind, path: pathOf(r), seq: seqOf(r) }), runs: null };
  if (kind !== Kind.file && kind !== Kind.directory && kind !== Kind.symlink) return null;
  const large = kind === Kind.file && sizeOf(r) >= LARGE;
  const moved = base !== null && kind === Kind.file && (flagsOf(r) & Flag.moved) !== 0;
  const plain = !large && r.readUInt32LE(108) === 0 && (kind === Kind.symlink || r.readUInt32LE(100) === 0);
  if (plain && !moved) {
    const copy = Buffer.from(r);
    copy[5] = flagsOf(r) & ~CHANGED;
    copy.fill(0, 32, 48);
    return { record: copy, runs: null };
  }
  const fields = decodeRecord(r);
  fields.ino = 0n;
  fields.ctimeNs = 0n;
  fields.flags &= ~CHANGED;
  fields.chunks = EMPTY;
  if (moved) fields.flags |= Flag.moved;
  else if (kind === Kind.file) fields.target = EMPTY;
  let runs: Run[] | null = null;
  if (large) {
    const chunks = served.index.chunks(fields.path);
    if (chunks?.length !== Math.ceil(fields.size / CHUNK) * CHUNK_HASH)
      throw new SimpleVolumeError(
        'INTERNAL',
        `the index has no chunk list that fits ${printablePath(fields.path)}`,
        { path: printablePath(fields.path) },
      );
    const since = base && served.runsSince(fields.path, base.seq);
    runs = since && unionRuns([since], fields.size);
    fields.flags |= runs ? Flag.chunksSparse : Flag.chunksFull;
    fields.chunks = runs ? sparseChunks(runs, fields.size, chunks) : chunks;
  }
  return { record: encodeRecord(fields), runs };
}

function indexEntry(row: Row, entry: Entry, at: number, runsAt: number, served: ServedGeneration): Buffer {
  const e = Buffer.alloc(ENTRY);
  const kind = kindOf(entry.record);
  const wire =
    kind !== Kind.file
      ? 0
      : entry.runs
        ? entry.runs.reduce((sum, r) => sum + r.length, 0)
        : sizeOf(entry.record);
  const ino = row.copyIno === 0n && served.strict ? inoOf(row.record) : row.copyIno;
  e.writeBigUInt64LE(BigInt(at), 0);
  e.writeBigUInt64LE(kind === Kind.file ? ino : 0n, 8);
  e.writeBigUInt64LE(BigInt(wire), 16);
  e.writeBigUInt64LE(BigInt(runsAt), 24);
  e.writeUInt32LE((entry.runs?.length ?? 0) * 16, 32);
  e.writeUInt32LE(entry.record.length, 36);
  e.writeBigInt64LE(row.record.length >= HEAD ? row.record.readBigInt64LE(40) : 0n, 40);
  e[48] = kind;
  return e;
}

/**
 * Writes manifest, index and runs into `folder` (exists, empty).
 * @param base null: all entries
 * @param check called between slices and at the end; what it throws ends the writing
 */
export async function writeOffer(
  folder: string,
  name: VolumeName,
  served: ServedGeneration,
  base: Generation | null,
  hashFile: HashFile,
  check: () => void = () => undefined,
): Promise<{ count: number; bytes: number; hash: Buffer }> {
  const index = await Appender.create(path.join(folder, 'index'));
  const runs = await Appender.create(path.join(folder, 'runs'));
  try {
    const manifest = await ManifestWriter.create(Buffer.from(path.join(folder, 'manifest')), {
      namespace: name.namespace,
      volume: name.volume,
      generation: served.generation,
      base,
      lineage: served.lineage,
      quiescent: served.quiescent,
    });
    try {
      for (let after: Buffer | null = null; ; ) {
        const rows: Row[] = base
          ? served.index.changedSince(base.seq, after, PAGE)
          : served.index.page(after, PAGE);
        for (const row of rows) {
          const entry = entryOf(row, served, base);
          if (!entry) continue;
          const at = await manifest.add(entry.record);
          await index.add(indexEntry(row, entry, at, runs.bytes, served));
          if (entry.runs) await runs.add(encodeRuns(entry.runs));
        }
        if (rows.length < PAGE) break;
        after = pathOf((rows.at(-1) as Row).record);
        await setImmediate();
        check();
      }
    } catch (error) {
      await manifest.abort();
      throw error;
    }
    const { bytes, hash } = await manifest.finish(hashFile);
    check();
    return { count: manifest.count, bytes, hash };
  } finally {
    await index.close();
    await runs.close();
  }
}
