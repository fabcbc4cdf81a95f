/**
 * From what was staged to what has to be done: the operations on the shadow in their binding order
 * (docs/formats.md, "Applying a plan"), and the changes of the index. Pure.
 */
import { encodeOp, KEEP_OLD, Op, type Run, SlotKind, unionRuns } from '../core/lists.ts';
import { EMPTY, Flag, Kind, kindOf, LARGE, linkGroupOf, pathOf, sizeOf } from '../core/record.ts';
import type { Row } from '../core/store.ts';
import { sameContent, sameFileMeta, sameState } from './classify.ts';
import { keyOf, parentOf } from './paths.ts';

/** One path of a batch, from the look at it to the plan. */
export interface Pending {
  path: Buffer;
  change: 'identity' | 'content' | 'directory' | 'symlink' | 'gone';
  /** the index row of before; undefined: new */
  base: Row | undefined;
  /** what stands there now, without a chunk list; of something gone: its old record */
  record: Buffer;
  chunks: Buffer | null;
  /** a number that names the slot; 0: none */
  slot: number;
  slotKind: number;
  /** of a patch (and in live consistency): what differs from the base version */
  runs: Run[] | null;
  /** its unchanged content is taken from this path, which has no use for it any more */
  movedFrom: Pending | null;
  /** another path has taken this one's old content */
  taken: boolean;
  /** another name of the same file, which was read for both */
  leader: Pending | null;
  /** of something gone: see isMassDelete */
  explained: boolean;
  /** content: already read in this batch */
  staged: boolean;
}

export interface PlanOptions {
  /** of the generation to be */
  seq: number;
  /** live consistency has no shadow: no operations */
  shadow: boolean;
  /** somebody reads an earlier generation: what it consists of is kept */
  pinned: boolean;
  /** the index row of a path that the batch does not touch */
  lookup(path: Buffer): Row | undefined;
  newSlot(): number;
}

export interface Put {
  record: Buffer;
  copyIno: bigint;
  chunks: Buffer | null;
  /** of a large file whose content changed: undefined: it did not */
  runs: Run[] | null | undefined;
}

export interface Plan {
  /** in order; empty: the shadow stays as it is */
  ops: Buffer[];
  hasTakes: boolean;
  puts: Put[];
  removes: Buffer[];
  /** patch slots: needed until the plan has been carried out */
  patches: number[];
  /** paths whose state differs from the last generation */
  changed: number;
  removed: number;
  moved: number;
}

/** What differs between two sizes of a file counts as changed: it may be cut off now and grow back later. */
const runsOfChange = (runs: Run[], before: number, after: number): Run[] =>
  before === after
    ? runs
    : unionRuns(
        [runs, [{ offset: Math.min(before, after), length: Math.abs(after - before) }]],
        Math.max(before, after),
      );

/** @param pending one entry per path, any order */
export function makePlan(pending: Iterable<Pending>, options: PlanOptions): Plan {
  const { seq, shadow, pinned, lookup, newSlot } = options;
  const all = [...pending].sort((a, b) => a.path.compare(b.path));
  const byKey = new Map(all.map((p) => [keyOf(p.path), p]));
  const takes: Buffer[] = [];
  const removes: Buffer[] = [];
  const rmdirs: Buffer[] = [];
  const mkdirs: Buffer[] = [];
  const puts: Buffer[] = [];
  const links: Buffer[] = [];
  const patches: Buffer[] = [];
  const metas: Buffer[] = [];
  const directories = new Map<string, Buffer>();
  const touched = new Map<string, Buffer>();
  const plan: Plan = {
    ops: [],
    hasTakes: false,
    puts: [],
    removes: [],
    patches: [],
    changed: 0,
    removed: 0,
    moved: 0,
  };
  const renewed = new Set<Pending>();

  const touch = (path: Buffer): void => {
    const parent = parentOf(path);
    if (parent) touched.set(keyOf(parent), parent);
  };
  const copied = (p: Pending): Row | undefined => (p.base && p.base.copyIno !== 0n ? p.base : undefined);
  const keepFlag = (p: Pending): number => {
    const base = copied(p);
    return pinned && base && kindOf(base.record) === Kind.file && !p.taken ? KEEP_OLD : 0;
  };
  /** Clears the way where something of another kind stands. */
  const clear = (p: Pending, kind: Kind): void => {
    const base = copied(p);
    if (!base || p.taken) return;
    const was = kindOf(base.record);
    if (was === kind || (was !== Kind.directory && kind !== Kind.directory)) return;
    if (was === Kind.directory) rmdirs.push(encodeOp(Op.rmdir, base.record));
    else removes.push(encodeOp(Op.remove, base.record, 0, EMPTY, keepFlag(p)));
  };

  const content = (p: Pending): void => {
    const base = copied(p);
    if (p.leader) {
      const { leader } = p;
      const shared =
        base && copied(leader) && base.copyIno === leader.base?.copyIno && kindOf(base.record) === Kind.file;
      if (shared && !renewed.has(leader) && !p.taken && !leader.taken) return;
      clear(p, Kind.file);
      links.push(encodeOp(Op.link, p.record, 0, leader.path, keepFlag(p)));
      touch(p.path);
      return;
    }
    if (p.movedFrom) {
      const from = p.movedFrom;
      if (!from.taken || !from.base) throw new Error('a moved file without its origin');
      const slot = newSlot();
      takes.push(encodeOp(Op.take, from.base.record, slot, EMPTY, pinned ? KEEP_OLD : 0));
      touch(from.path);
      clear(p, Kind.file);
      puts.push(encodeOp(Op.put, p.record, slot, EMPTY, keepFlag(p)));
      touch(p.path);
      return;
    }
    if (p.slotKind === SlotKind.whole) {
      clear(p, Kind.file);
      puts.push(encodeOp(Op.put, p.record, p.slot, EMPTY, keepFlag(p)));
      touch(p.path);
      renewed.add(p);
      return;
    }
    // What follows rests on the version that is in the shadow.
    if (!base || p.taken || kindOf(base.record) !== Kind.file)
      throw new Error('a change without the version that it is based on');
    const single = linkGroupOf(p.record) === 0n && linkGroupOf(base.record) === 0n;
    if (p.slotKind === SlotKind.patch) {
      plan.patches.push(p.slot);
      if (single && !pinned) patches.push(encodeOp(Op.patch, p.record, p.slot));
      else {
        patches.push(encodeOp(Op.patchCopy, p.record, p.slot, EMPTY, keepFlag(p)));
        touch(p.path);
        renewed.add(p);
      }
      return;
    }
    if (sameFileMeta(base.record, p.record)) return;
    // In place also when it is pinned: readers know a pinned file by its inode and size, not by its times.
    metas.push(encodeOp(Op.meta, p.record));
  };

  // Leaders first: what becomes of their names depends on what became of them.
  for (const p of all) if (p.change === 'content' && shadow && !p.leader) content(p);
  for (const p of all) {
    const old = p.base?.record;
    if (p.change === 'gone') {
      if (!p.base) continue;
      plan.removes.push(p.path);
      plan.removed++;
      if (!shadow || !copied(p) || p.taken) continue;
      if (kindOf(p.base.record) === Kind.directory) rmdirs.push(encodeOp(Op.rmdir, p.base.record));
      else removes.push(encodeOp(Op.remove, p.base.record, 0, EMPTY, keepFlag(p)));
      touch(p.path);
      continue;
    }
    if (shadow) {
      if (p.change === 'directory') {
        const base = copied(p);
        if (!base || kindOf(base.record) !== Kind.directory || p.taken) {
          clear(p, Kind.directory);
          if (p.path.length > 0) mkdirs.push(encodeOp(Op.mkdir, p.record));
          touch(p.path);
        }
        directories.set(keyOf(p.path), p.record);
      } else if (p.change === 'symlink') {
        clear(p, Kind.symlink);
        puts.push(encodeOp(Op.symlink, p.record, 0, EMPTY, keepFlag(p)));
        touch(p.path);
      } else if (p.change === 'content' && p.leader) content(p);
    }
    const same = old !== undefined && sameState(old, p.record);
    const record = Buffer.from(p.record);
    if (same && old) old.copy(record, 56, 56, 64);
    else {
      record.writeBigUInt64LE(BigInt(seq), 56);
      plan.changed++;
    }
    if (p.movedFrom) plan.moved++;
    let runs: Run[] | null | undefined;
    if (
      kindOf(record) === Kind.file &&
      sizeOf(record) >= LARGE &&
      !(old && kindOf(old) === Kind.file && sameContent(old, record))
    )
      runs =
        p.runs && old && kindOf(old) === Kind.file && sizeOf(old) >= LARGE && !p.movedFrom && !p.leader
          ? runsOfChange(p.runs, sizeOf(old), sizeOf(record))
          : null;
    plan.puts.push({ record, copyIno: shadow ? (p.base?.copyIno ?? 0n) : 0n, chunks: p.chunks, runs });
  }
  if (!shadow) return plan;

  // Every change of names moves the mtime of the directory above: it is set again at the very end.
  for (const [key, path] of touched) {
    if (directories.has(key)) continue;
    const p = byKey.get(key);
    if (p && p.change !== 'identity') continue;
    const record = p?.record ?? lookup(path)?.record;
    if (record && kindOf(record) === Kind.directory) directories.set(key, record);
  }
  const deepestFirst = (a: Buffer, b: Buffer): number => pathOf(b).compare(pathOf(a));
  plan.hasTakes = takes.length > 0;
  plan.ops = [
    ...takes,
    ...removes,
    // ops hold {head 20, record}: the record of an operation without an argument starts there
    ...rmdirs.sort((a, b) => deepestFirst(a.subarray(20), b.subarray(20))),
    ...mkdirs,
    ...puts,
    ...patches,
    // after the patches: a copy that was patched is another inode than the one that it replaces
    ...links,
    ...metas,
    ...[...directories.values()].sort(deepestFirst).map((r) => encodeOp(Op.meta, r)),
  ];
  return plan;
}

/** The index row's record with its chunk list again: what staging compares a large file with. */
export const withChunks = (record: Buffer, chunks: Buffer | undefined): Buffer => {
  if (!chunks || chunks.length === 0) return record;
  const out = Buffer.concat([record, chunks]);
  out.writeUInt32LE(out.length, 0);
  out.writeUInt32LE(chunks.length, 108);
  out[5] = (record[5] as number) | Flag.chunksFull;
  return out;
};

/** A record from staging, split into the row's record and its chunk list. */
export function splitChunks(record: Buffer): { record: Buffer; chunks: Buffer | null } {
  const n = record.readUInt32LE(108);
  const lean = Buffer.from(record.subarray(0, record.length - n));
  lean.writeUInt32LE(lean.length, 0);
  lean.writeUInt32LE(0, 108);
  lean[5] = (record[5] as number) & ~(Flag.chunksFull | Flag.chunksSparse);
  return { record: lean, chunks: n === 0 ? null : Buffer.from(record.subarray(record.length - n)) };
}

/** The same file under another name: what was read of one is true of the other. */
export function underName(record: Buffer, path: Buffer): Buffer {
  const pathLen = record.readUInt32LE(96);
  const out = Buffer.concat([record.subarray(0, 112), path, record.subarray(112 + pathLen)]);
  out.writeUInt32LE(out.length, 0);
  out.writeUInt32LE(path.length, 96);
  return out;
}
