/** The decisions about one path, as pure functions of what is wanted and what is there. */
import {
  CHUNK,
  CHUNK_HASH,
  chunksOf,
  decodeRecord,
  EMPTY,
  encodeRecord,
  Flag,
  flagsOf,
  hashOf,
  Kind,
  kindOf,
  LARGE,
  linkGroupOf,
  sameIdentity,
  sizeOf,
  targetOf,
  xattrsOf,
} from '../core/record.ts';

/** What the replica has at a path. */
export interface Have {
  /** the index row's record */
  row: Buffer | null;
  /** what is on the disk, null: nothing */
  disk: Buffer | null;
  /** `disk` carries attributes and link text (a walk of the tree leaves them out) */
  diskComplete: boolean;
  /** the same after the content was read: hash, attributes, chunks */
  hashed: Buffer | null;
}

export const NOTHING: Have = { row: null, disk: null, diskComplete: true, hashed: null };

export const isFile = (r: Buffer | null): r is Buffer => r !== null && kindOf(r) === Kind.file;
export const isDirectory = (r: Buffer | null): r is Buffer => r !== null && kindOf(r) === Kind.directory;

/** Same size and same hash. A record without a hash is the same as nothing. */
export const sameContent = (a: Buffer, b: Buffer): boolean =>
  (flagsOf(a) & flagsOf(b) & Flag.hash) !== 0 && sizeOf(a) === sizeOf(b) && hashOf(a).equals(hashOf(b));

/** The index row speaks of the very file that is on the disk. */
export const rowHolds = (have: Have): boolean =>
  have.row !== null &&
  have.disk !== null &&
  kindOf(have.row) === kindOf(have.disk) &&
  sameIdentity(have.row, have.disk);

/**
 * Whether the wanted content is on the disk at this path. `ask`: only reading the file can tell. Size and mtime
 * never stand for content: a row counts only while inode and ctime are the same too.
 * @param trust false: read everything, whatever the index says
 */
export function contentState(
  want: Buffer,
  have: Have,
  full: boolean,
  trust: boolean,
): 'same' | 'other' | 'ask' {
  if (!isFile(have.disk)) return 'other';
  if (have.hashed) return sameContent(have.hashed, want) ? 'same' : 'other';
  if (trust && isFile(have.row) && rowHolds(have)) return sameContent(have.row, want) ? 'same' : 'other';
  if (sizeOf(have.disk) === sizeOf(want)) return 'ask';
  // reading it costs less than pulling it whole: only its chunks that differ are asked for
  if (full && sizeOf(have.disk) >= LARGE && sizeOf(want) >= LARGE) return 'ask';
  return 'other';
}

/** Mode, owner, mtime, link text and attributes on the disk are the wanted ones. */
export function metaSame(want: Buffer, have: Have): boolean {
  const disk = have.hashed ?? have.disk;
  if (!disk || kindOf(disk) !== kindOf(want)) return false;
  if (want.compare(disk, 6, 16, 6, 16) !== 0 || want.compare(disk, 24, 32, 24, 32) !== 0) return false;
  const full = have.hashed ?? (have.diskComplete ? have.disk : rowHolds(have) ? have.row : null);
  if (!full) return false;
  if (kindOf(want) === Kind.symlink && !targetOf(want).equals(targetOf(full))) return false;
  return kindOf(want) === Kind.symlink || xattrsOf(want).equals(xattrsOf(full));
}

/** The link text on the disk, null when it is not known or no link is there. */
export function linkText(have: Have): Buffer | null {
  if (!have.disk || kindOf(have.disk) !== Kind.symlink) return null;
  if (have.diskComplete) return targetOf(have.disk);
  return rowHolds(have) && have.row ? targetOf(have.row) : null;
}

/** [first chunk, number]* of the chunks of `next` that `base` does not have at the same place, and their bytes. */
export function differingChunks(
  base: { chunks: Buffer; size: number },
  next: { chunks: Buffer; size: number },
): { pairs: number[]; bytes: number } {
  const count = Math.ceil(next.size / CHUNK);
  const had = Math.min(Math.ceil(base.size / CHUNK), base.chunks.length / CHUNK_HASH);
  const pairs: number[] = [];
  let bytes = 0;
  for (let c = 0; c < count; c++) {
    const at = c * CHUNK_HASH;
    if (c < had && next.chunks.compare(base.chunks, at, at + CHUNK_HASH, at, at + CHUNK_HASH) === 0) continue;
    bytes += Math.min(CHUNK, next.size - c * CHUNK);
    const n = pairs.length;
    if (n > 0 && (pairs[n - 2] as number) + (pairs[n - 1] as number) === c)
      pairs[n - 1] = (pairs[n - 1] as number) + 1;
    else pairs.push(c, 1);
  }
  return { pairs, bytes };
}

/** Bytes of the chunks that a sparse list names. */
export function sparseBytes(record: Buffer): number {
  const list = chunksOf(record);
  let bytes = 0;
  for (let at = 0; at + 20 <= list.length; at += 20)
    bytes += Math.max(0, Math.min(CHUNK, sizeOf(record) - list.readUInt32LE(at) * CHUNK));
  return bytes;
}

/** The full list of a record: its own, or its sparse one over the base's. null: cannot be told. */
export function fullChunks(record: Buffer, base: Buffer | undefined): Buffer | null {
  const flags = flagsOf(record);
  if (flags & Flag.chunksFull) return chunksOf(record);
  if (!(flags & Flag.chunksSparse) || !base) return null;
  const count = Math.ceil(sizeOf(record) / CHUNK);
  const out = Buffer.alloc(count * CHUNK_HASH);
  base.copy(out, 0, 0, Math.min(base.length, out.length));
  const known = new Set<number>();
  const list = chunksOf(record);
  for (let at = 0; at + 20 <= list.length; at += 20) {
    const index = list.readUInt32LE(at);
    list.copy(out, index * CHUNK_HASH, at + 4, at + 20);
    known.add(index);
  }
  // chunks beyond the base must all be named
  for (let c = base.length / CHUNK_HASH; c < count; c++) if (!known.has(c)) return null;
  return out;
}

/** A manifest's record as an index row has it: no chunks, no trace of a move. */
export function asRow(record: Buffer): Buffer {
  const kind = kindOf(record);
  const keep = ~(Flag.chunksFull | Flag.chunksSparse | Flag.moved);
  const tail = record.readUInt32LE(108) + (kind === Kind.symlink ? 0 : record.readUInt32LE(100));
  if (tail === 0) {
    const copy = Buffer.from(record);
    copy[5] = flagsOf(record) & keep;
    return copy;
  }
  const f = decodeRecord(record);
  return encodeRecord({
    ...f,
    flags: f.flags & keep,
    chunks: EMPTY,
    target: kind === Kind.symlink ? f.target : EMPTY,
  });
}

/** The record with the identity of what is on the disk: mtime, inode, ctime. */
export function withIdentity(record: Buffer, disk: Buffer): Buffer {
  const copy = Buffer.from(record);
  disk.copy(copy, 24, 24, 48);
  return copy;
}

/** A file on the replica's disk has other names too. */
export const hasOtherNames = (disk: Buffer | null): boolean => disk !== null && linkGroupOf(disk) !== 0n;
