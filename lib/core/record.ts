/**
 * The packed entry of an index or a manifest (docs/formats.md, "Record"). A record stays a Buffer as long as
 * possible: a volume has a hundred thousand of them. The accessors below read single fields.
 */

export const HEAD = 112;

export const Kind = { absent: 0, file: 1, directory: 2, symlink: 3, special: 4, unreadable: 5 } as const;
export type Kind = (typeof Kind)[keyof typeof Kind];

export const Flag = { hash: 1, chunksFull: 2, chunksSparse: 4, sparse: 8, moved: 16, large: 32 } as const;

/** Bytes of a file from which on it keeps a chunk list and travels as changed blocks. */
export const LARGE = 1024 * 1024;
export const CHUNK = 64 * 1024;
export const CHUNK_HASH = 16;

export const EMPTY: Buffer = Buffer.alloc(0);

export interface RecordFields {
  kind: Kind;
  flags?: number;
  mode?: number;
  uid?: number;
  gid?: number;
  /** bytes; 0 for directories */
  size?: number;
  mtimeNs?: bigint;
  ino?: bigint;
  ctimeNs?: bigint;
  linkGroup?: bigint;
  seq?: number;
  hash?: Buffer;
  path: Buffer;
  target?: Buffer;
  xattrs?: Buffer;
  chunks?: Buffer;
}

export function encodeRecord(f: RecordFields): Buffer {
  const target = f.target ?? EMPTY;
  const xattrs = f.xattrs ?? EMPTY;
  const chunks = f.chunks ?? EMPTY;
  const total = HEAD + f.path.length + target.length + xattrs.length + chunks.length;
  const b = Buffer.alloc(total);
  b.writeUInt32LE(total, 0);
  b[4] = f.kind;
  b[5] = f.flags ?? 0;
  b.writeUInt16LE((f.mode ?? 0) & 0o7777, 6);
  b.writeUInt32LE(f.uid ?? 0, 8);
  b.writeUInt32LE(f.gid ?? 0, 12);
  b.writeBigUInt64LE(BigInt(f.size ?? 0), 16);
  b.writeBigInt64LE(f.mtimeNs ?? 0n, 24);
  b.writeBigUInt64LE(f.ino ?? 0n, 32);
  b.writeBigInt64LE(f.ctimeNs ?? 0n, 40);
  b.writeBigUInt64LE(f.linkGroup ?? 0n, 48);
  b.writeBigUInt64LE(BigInt(f.seq ?? 0), 56);
  if (f.hash) f.hash.copy(b, 64, 0, 32);
  b.writeUInt32LE(f.path.length, 96);
  b.writeUInt32LE(target.length, 100);
  b.writeUInt32LE(xattrs.length, 104);
  b.writeUInt32LE(chunks.length, 108);
  let at = HEAD;
  for (const part of [f.path, target, xattrs, chunks]) {
    part.copy(b, at);
    at += part.length;
  }
  return b;
}

export const kindOf = (r: Buffer): Kind => r[4] as Kind;
export const flagsOf = (r: Buffer): number => r[5] as number;
export const modeOf = (r: Buffer): number => r.readUInt16LE(6);
export const uidOf = (r: Buffer): number => r.readUInt32LE(8);
export const gidOf = (r: Buffer): number => r.readUInt32LE(12);
/** Sizes are at most 2^53 (checked where records come in), so a number holds them. */
export const sizeOf = (r: Buffer): number => r.readUInt32LE(16) + r.readUInt32LE(20) * 0x1_0000_0000;
export const mtimeNsOf = (r: Buffer): bigint => r.readBigInt64LE(24);
export const inoOf = (r: Buffer): bigint => r.readBigUInt64LE(32);
export const ctimeNsOf = (r: Buffer): bigint => r.readBigInt64LE(40);
export const linkGroupOf = (r: Buffer): bigint => r.readBigUInt64LE(48);
export const seqOf = (r: Buffer): number => r.readUInt32LE(56) + r.readUInt32LE(60) * 0x1_0000_0000;
export const hashOf = (r: Buffer): Buffer => r.subarray(64, 96);
export const pathOf = (r: Buffer): Buffer => r.subarray(HEAD, HEAD + r.readUInt32LE(96));
export function targetOf(r: Buffer): Buffer {
  const at = HEAD + r.readUInt32LE(96);
  return r.subarray(at, at + r.readUInt32LE(100));
}
export function xattrsOf(r: Buffer): Buffer {
  const at = HEAD + r.readUInt32LE(96) + r.readUInt32LE(100);
  return r.subarray(at, at + r.readUInt32LE(104));
}
export function chunksOf(r: Buffer): Buffer {
  const n = r.readUInt32LE(108);
  return r.subarray(r.length - n);
}

/** Size, mtime, inode and ctime are all the same: nothing happened to this file. */
export const sameIdentity = (a: Buffer, b: Buffer): boolean => a.compare(b, 16, 48, 16, 48) === 0;
/** Kind, mode, owner and mtime, link text and xattrs are the same (contents not looked at). */
export function sameMeta(a: Buffer, b: Buffer): boolean {
  return (
    a[4] === b[4] &&
    a.compare(b, 6, 16, 6, 16) === 0 &&
    a.compare(b, 24, 32, 24, 32) === 0 &&
    targetOf(a).equals(targetOf(b)) &&
    xattrsOf(a).equals(xattrsOf(b))
  );
}

export function decodeRecord(r: Buffer): Required<RecordFields> {
  return {
    kind: kindOf(r),
    flags: flagsOf(r),
    mode: modeOf(r),
    uid: uidOf(r),
    gid: gidOf(r),
    size: sizeOf(r),
    mtimeNs: mtimeNsOf(r),
    ino: inoOf(r),
    ctimeNs: ctimeNsOf(r),
    linkGroup: linkGroupOf(r),
    seq: seqOf(r),
    hash: hashOf(r),
    path: pathOf(r),
    target: targetOf(r),
    xattrs: xattrsOf(r),
    chunks: chunksOf(r),
  };
}

/** The same record with some fields replaced. */
export function withFields(r: Buffer, change: Partial<RecordFields>): Buffer {
  return encodeRecord({ ...decodeRecord(r), ...change });
}

/** Walks records that stand one after the other. The Buffers are views into `all`. */
export function* recordsIn(all: Buffer): Generator<Buffer> {
  let at = 0;
  while (at < all.length) {
    const n = all.readUInt32LE(at);
    if (n < HEAD || at + n > all.length) throw new RangeError('record list is cut short');
    yield all.subarray(at, at + n);
    at += n;
  }
}

/** A path for people: bytes that are not printable UTF-8 as \xNN. Never parsed back. */
export function printablePath(path: Buffer): string {
  const text = path.toString('utf8');
  if (Buffer.from(text, 'utf8').equals(path) && !/[\u0000-\u001f\u007f\\]/.test(text))
    return text === '' ? '.' : text;
  let out = '';
  for (const c of path)
    out +=
      c < 0x20 || c >= 0x7f || c === 0x5c ? `\\x${c.toString(16).padStart(2, '0')}` : String.fromCharCode(c);
  return out;
}
