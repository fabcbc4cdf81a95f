/** The length-prefixed lists that cross the addon's border (docs/formats.md, "Lists"). All little-endian. */
import { EMPTY } from './record.ts';

/** {u32 length, bytes}* */
export function encodePaths(paths: Iterable<Buffer>): Buffer {
  const parts: Buffer[] = [];
  for (const p of paths) {
    const n = Buffer.allocUnsafe(4);
    n.writeUInt32LE(p.length, 0);
    parts.push(n, p);
  }
  return Buffer.concat(parts);
}

export interface Run {
  offset: number;
  length: number;
}

const u64 = (b: Buffer, at: number): number => b.readUInt32LE(at) + b.readUInt32LE(at + 4) * 0x1_0000_0000;
const putU64 = (b: Buffer, v: number, at: number): void => {
  b.writeUInt32LE(v % 0x1_0000_0000, at);
  b.writeUInt32LE(Math.floor(v / 0x1_0000_0000), at + 4);
};

/** Runs as {u64 offset, u64 length}*, offsets ascending, not overlapping. */
export function decodeRuns(b: Buffer): Run[] {
  const out: Run[] = [];
  for (let at = 0; at + 16 <= b.length; at += 16) out.push({ offset: u64(b, at), length: u64(b, at + 8) });
  return out;
}
export function encodeRuns(runs: Run[]): Buffer {
  const b = Buffer.allocUnsafe(runs.length * 16);
  runs.forEach((r, i) => {
    putU64(b, r.offset, i * 16);
    putU64(b, r.length, i * 16 + 8);
  });
  return b;
}
/** Union of several lists of runs, cut to `size`. */
export function unionRuns(lists: Run[][], size: number): Run[] {
  const all = lists.flat().sort((a, b) => a.offset - b.offset);
  const out: Run[] = [];
  for (const r of all) {
    const end = Math.min(r.offset + r.length, size);
    if (r.offset >= end) continue;
    const last = out.at(-1);
    if (last && r.offset <= last.offset + last.length) last.length = Math.max(last.length, end - last.offset);
    else out.push({ offset: r.offset, length: end - r.offset });
  }
  return out;
}

export interface StageItem {
  id: number;
  slot: number;
  patch: boolean;
  path: Buffer;
  base?: Buffer;
}
export function encodeStageItems(items: StageItem[]): Buffer {
  const parts: Buffer[] = [];
  for (const it of items) {
    const base = it.base ?? EMPTY;
    const head = Buffer.alloc(24);
    head.writeUInt32LE(24 + it.path.length + 4 + base.length, 0);
    head.writeUInt32LE(it.id, 4);
    putU64(head, it.slot, 8);
    head[16] = it.patch ? 1 : 0;
    head.writeUInt32LE(it.path.length, 20);
    const n = Buffer.allocUnsafe(4);
    n.writeUInt32LE(base.length, 0);
    parts.push(head, it.path, n, base);
  }
  return Buffer.concat(parts);
}

export const StageStatus = { ok: 0, gone: 1, busy: 2, error: 3, special: 4 } as const;
export const SlotKind = { none: 0, whole: 1, patch: 2 } as const;
export interface StageResult {
  id: number;
  status: number;
  slotKind: number;
  errno: number;
  bytesRead: number;
  bytesWritten: number;
  record: Buffer;
  runs: Run[];
}
/** {u32 len, u32 id, u8 status, u8 slotKind, u16 errno, u64 read, u64 written, u32 recordLen, record, u32 runsLen, runs}* */
export function decodeStageResults(b: Buffer): StageResult[] {
  const out: StageResult[] = [];
  for (let at = 0; at < b.length; ) {
    const len = b.readUInt32LE(at);
    const recordLen = b.readUInt32LE(at + 28);
    const record = b.subarray(at + 32, at + 32 + recordLen);
    const runsAt = at + 32 + recordLen;
    out.push({
      id: b.readUInt32LE(at + 4),
      status: b[at + 8] as number,
      slotKind: b[at + 9] as number,
      errno: b.readUInt16LE(at + 10),
      bytesRead: u64(b, at + 12),
      bytesWritten: u64(b, at + 20),
      record,
      runs: decodeRuns(b.subarray(runsAt + 4, runsAt + 4 + b.readUInt32LE(runsAt))),
    });
    at += len;
  }
  return out;
}

export const Op = {
  take: 1,
  remove: 2,
  rmdir: 3,
  mkdir: 4,
  put: 5,
  symlink: 6,
  link: 7,
  patch: 8,
  patchCopy: 9,
  meta: 10,
} as const;
export type Op = (typeof Op)[keyof typeof Op];
/** Flag of an op: the replaced file is kept as `<retired>/<path>`. */
export const KEEP_OLD = 1;

/** {u32 len, u8 op, u8 flags, u16 0, u32 argLen, u64 slot, arg, record} */
export function encodeOp(op: Op, record: Buffer, slot = 0, arg: Buffer = EMPTY, flags = 0): Buffer {
  const head = Buffer.alloc(20);
  head.writeUInt32LE(20 + arg.length + record.length, 0);
  head[4] = op;
  head[5] = flags;
  head.writeUInt32LE(arg.length, 8);
  putU64(head, slot, 12);
  return Buffer.concat([head, arg, record]);
}

export interface Applied {
  status: number;
  path: Buffer;
  /** size, mtime, ino, ctime as the record's bytes 16..48 */
  identity: Buffer;
  ino: bigint;
}
/** One entry of apply's out file at `at`; null when the buffer ends before its end. */
export function decodeApplied(b: Buffer, at: number): { value: Applied; next: number } | null {
  if (at + 4 > b.length) return null;
  const len = b.readUInt32LE(at);
  if (at + len > b.length) return null;
  const pathLen = b.readUInt32LE(at + 8);
  return {
    value: {
      status: b[at + 4] as number,
      path: b.subarray(at + 44, at + 44 + pathLen),
      identity: b.subarray(at + 12, at + 44),
      ino: b.readBigUInt64LE(at + 28),
    },
    next: at + len,
  };
}

export interface UnpackItem {
  ordinal: number;
  patch: boolean;
  slot: number;
  record: Buffer;
  base?: Buffer;
}
export function encodeUnpackItems(items: UnpackItem[]): Buffer {
  const parts: Buffer[] = [];
  for (const it of items) {
    const base = it.base ?? EMPTY;
    const head = Buffer.alloc(24);
    head.writeUInt32LE(24 + it.record.length + 4 + base.length, 0);
    head.writeUInt32LE(it.ordinal, 4);
    head[8] = it.patch ? 2 : 1;
    putU64(head, it.slot, 12);
    head.writeUInt32LE(it.record.length, 20);
    const n = Buffer.allocUnsafe(4);
    n.writeUInt32LE(base.length, 0);
    parts.push(head, it.record, n, base);
  }
  return Buffer.concat(parts);
}
export const UnpackStatus = { ok: 0, hash: 1, size: 2, base: 3, missing: 4, io: 5 } as const;
export interface UnpackResult {
  ordinal: number;
  status: number;
  errno: number;
  record: Buffer;
}
/** {u32 len, u32 ordinal, u8 status, u8 0, u16 errno, u32 recordLen, record}* */
export function decodeUnpackResults(b: Buffer): UnpackResult[] {
  const out: UnpackResult[] = [];
  for (let at = 0; at < b.length; at += b.readUInt32LE(at)) {
    const n = b.readUInt32LE(at + 12);
    out.push({
      ordinal: b.readUInt32LE(at + 4),
      status: b[at + 8] as number,
      errno: b.readUInt16LE(at + 10),
      record: b.subarray(at + 16, at + 16 + n),
    });
  }
  return out;
}

export interface PackItem {
  ordinal: number;
  runs: Run[] | null;
  /** inode of the file to be read, 0n: not checked */
  ino: bigint;
  record: Buffer;
}
/** {u32 len, u32 ordinal, u8 kind, 3 pad, u64 ino, u32 recordLen, record, u32 runsLen, runs}* */
export function encodePackItems(items: PackItem[]): Buffer {
  const parts: Buffer[] = [];
  for (const it of items) {
    const runs = it.runs ? encodeRuns(it.runs) : EMPTY;
    const head = Buffer.alloc(24);
    head.writeUInt32LE(24 + it.record.length + 4 + runs.length, 0);
    head.writeUInt32LE(it.ordinal, 4);
    head[8] = it.runs ? 2 : 1;
    head.writeBigUInt64LE(it.ino, 12);
    head.writeUInt32LE(it.record.length, 20);
    const n = Buffer.allocUnsafe(4);
    n.writeUInt32LE(runs.length, 0);
    parts.push(head, it.record, n, runs);
  }
  return Buffer.concat(parts);
}

export const MarkType = { path: 1, directory: 2, subtree: 3 } as const;
export const MarkBit = { content: 1, attributes: 2, created: 4, deleted: 8 } as const;
export interface Mark {
  type: number;
  bits: number;
  path: Buffer;
}
/** {u32 len, u8 type, u8 bits, u16 0, u32 pathLen, path}* */
export function decodeMarks(b: Buffer): Mark[] {
  const out: Mark[] = [];
  for (let at = 0; at < b.length; at += b.readUInt32LE(at)) {
    const n = b.readUInt32LE(at + 8);
    out.push({
      type: b[at + 4] as number,
      bits: b[at + 5] as number,
      path: b.subarray(at + 12, at + 12 + n),
    });
  }
  return out;
}
export function encodeMarks(marks: Mark[]): Buffer {
  return Buffer.concat(
    marks.map((m) => {
      const b = Buffer.alloc(12 + m.path.length);
      b.writeUInt32LE(b.length, 0);
      b[4] = m.type;
      b[5] = m.bits;
      b.writeUInt32LE(m.path.length, 8);
      m.path.copy(b, 12);
      return b;
    }),
  );
}

export const slotName = (slot: number): string => slot.toString(16).padStart(16, '0');
