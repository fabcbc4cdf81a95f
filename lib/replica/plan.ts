/**
 * From what is wanted (manifest), what the index says and what is on the disk to the operations that make the one
 * into the other. Works along a walk in path order; nothing here touches the volume.
 */
import { randomBytes } from 'node:crypto';
import { join } from 'node:path';
import { setImmediate as nextTurn } from 'node:timers/promises';
import { SimpleVolumeError } from '../core/errors.ts';
import { encodeOp, KEEP_OLD, Op } from '../core/lists.ts';
import type { ReplicaPolicy } from '../core/policy.ts';
import {
  chunksOf,
  EMPTY,
  encodeRecord,
  Flag,
  flagsOf,
  hashOf,
  inoOf,
  Kind,
  kindOf,
  LARGE,
  linkGroupOf,
  pathOf,
  printablePath,
  seqOf,
  sizeOf,
  targetOf,
} from '../core/record.ts';
import type { IndexReader, Row } from '../core/store.ts';
import {
  asRow,
  contentState,
  differingChunks,
  type Have,
  hasOtherNames,
  isDirectory,
  isFile,
  linkText,
  metaSame,
  rowHolds,
  sameContent,
  sparseBytes,
  withIdentity,
} from './content.ts';
import { Directories, parentOf } from './directories.ts';
import { withOverrides } from './overrides.ts';
import { type Member, Scratch } from './scratch.ts';
import { Spool } from './spool.ts';

/** The tree is not what the index says: everything has to be compared with the disk. */
export class Drift extends Error {
  readonly path: string;
  constructor(what: string, path: Buffer) {
    super(`${what}: ${printablePath(path)}`);
    this.name = 'Drift';
    this.path = printablePath(path);
  }
}

/** Contents that one entry still needs. */
export interface Wanted {
  /** patch against what is on the disk */
  patch: boolean;
  /** [first chunk, number]*, null: what the source sends by itself */
  chunks: number[] | null;
  /** own version with full chunk list, when it is not the index row */
  base: Buffer | null;
  /** another name of the file on this disk has the content: copied, not pulled */
  copyFrom: Buffer | null;
}

/** Disk, looked at on demand. */
export interface DiskReader {
  /** Everything below a directory, whatever the filter says, in path order; without the directory itself. */
  below(directory: Buffer): AsyncIterable<Buffer>;
  stat(path: Buffer): Promise<Buffer | null>;
}

export interface PlanOptions {
  folder: string;
  index: IndexReader;
  disk: DiskReader;
  policy: ReplicaPolicy;
  /** the filter: 0 not covered, 1 covered, 2 on the way */
  covers(path: Buffer, isDirectory: boolean): 0 | 1 | 2;
  /** everything is compared with the disk, and the manifest has all entries */
  full: boolean;
  /** false: the index is not believed, every file is read */
  trust: boolean;
  /** seq of the manifest's generation */
  seq: number;
  /** errno name when the file system here cannot have this path, null when it can */
  refuses(path: Buffer): Promise<string | null>;
  /** paths that were refused before and that a difference need not name again, with the errno */
  refusedBefore: ReadonlyMap<string, string>;
}

const COPY: Wanted = { patch: false, chunks: null, base: null, copyFrom: null };

/** Entries with a name that the file system here cannot have: at most this many are kept by name. */
export const NAMED = 100;

export class Plan {
  readonly #o: PlanOptions;
  readonly #ops: Record<'take' | 'remove' | 'mkdir' | 'put' | 'link' | 'patch' | 'meta' | 'directory', Spool>;
  /** index rows that change without an operation, and removed paths (kind 0) */
  readonly rows: Spool;
  readonly #scratch: Scratch;
  readonly #directories: Directories;
  /** entries whose whole content is wanted, ascending after finish() */
  #whole = new Uint32Array(1024);
  #wholeCount = 0;
  /** entries whose content comes in another way */
  readonly special = new Map<number, Wanted>();
  #cleared: Buffer | null = null;
  #refusedBelow: { path: Buffer; errno: string } | null = null;
  readonly #refusedBefore: Map<string, string>;

  /** entries that the index had and the new state has not */
  removed = 0;
  /** file system operations that take something away that the replica had */
  destroys = 0;
  changed = 0;
  bytesWanted = 0;
  /** latin1 path to errno, at most NAMED of them; refusedCount has all */
  readonly refused = new Map<string, string>();
  refusedCount = 0;
  /** directories, files and links that are made */
  creates = 0;

  constructor(o: PlanOptions) {
    this.#o = o;
    this.#refusedBefore = new Map(o.full ? [] : o.refusedBefore);
    const spool = (name: string): Spool =>
      new Spool(join(o.folder, `plan-${name}-${randomBytes(4).toString('hex')}`));
    this.#ops = {
      take: spool('take'),
      remove: spool('remove'),
      mkdir: spool('mkdir'),
      put: spool('put'),
      link: spool('link'),
      patch: spool('patch'),
      meta: spool('meta'),
      directory: spool('directory'),
    };
    this.rows = spool('rows');
    this.#scratch = new Scratch(join(o.folder, 'scratch.db'));
    this.#directories = new Directories(
      (path) => o.index.get(path)?.record ?? null,
      (record) => this.#ops.directory.add(encodeOp(Op.meta, record)),
    );
  }

  /** The record with the overrides of the policy, where the filter covers it. */
  effective(record: Buffer): Buffer {
    const { ownerUid, ownerGid, fileMode, dirMode } = this.#o.policy;
    if (ownerUid === null && ownerGid === null && fileMode === null && dirMode === null) return record;
    if (this.#o.covers(pathOf(record), kindOf(record) === Kind.directory) !== 1) return record;
    return withOverrides(record, this.#o.policy);
  }

  /**
   * One entry of the manifest. Call in path order; false: the file at the path has to be read first (call again,
   * now or later, with `have.hashed`).
   */
  async entry(ordinal: number, want: Buffer, have: Have): Promise<boolean> {
    const path = pathOf(want);
    await this.#directories.at(path);
    if (kindOf(want) === Kind.absent) {
      await this.removal(path, seqOf(want), have);
      return true;
    }
    if (have.disk && kindOf(have.disk) === Kind.unreadable)
      throw new SimpleVolumeError(
        'INTERNAL',
        `cannot look at ${printablePath(path)} (errno ${have.disk.readUInt32LE(8)}); nothing was changed`,
        { path: printablePath(path) },
      );
    if (await this.#isRefused(path, have)) return true;
    const record = this.effective(want);
    const disk = this.#cleared && isBelow(path, this.#cleared) ? null : have.disk;
    const now = disk === have.disk ? have : { ...have, disk };
    if (isFile(record)) {
      const state = contentState(record, now, this.#o.full, this.#o.trust);
      if (state === 'ask') {
        // what comes of it is decided later, when the walk is elsewhere: the directory's times are set in any case
        this.#touch(path);
        return false;
      }
      await this.#file(ordinal, record, now, state === 'same');
    } else if (isDirectory(record)) await this.#directory(record, now);
    else await this.#symlink(record, now);
    return true;
  }

  /** The rest of entry() for a file that was read. The walk may be elsewhere by now. */
  async hashed(ordinal: number, want: Buffer, have: Have): Promise<void> {
    const record = this.effective(want);
    this.#late = true;
    try {
      await this.#file(
        ordinal,
        record,
        have,
        contentState(record, have, this.#o.full, this.#o.trust) === 'same',
      );
    } finally {
      this.#late = false;
    }
  }

  /** Whether the walk came by this directory as one that is to be there (or is refused, with all below). */
  makes(path: Buffer): boolean {
    return (
      this.#directories.knows(path) ||
      this.#refusedBelow?.path.equals(path) === true ||
      this.#refusedBefore.has(path.toString('latin1')) ||
      this.#refusedAbove(path) !== null
    );
  }

  async #isRefused(path: Buffer, have: Have): Promise<boolean> {
    const above = this.#refusedAbove(path);
    if (above !== null) {
      this.#refuse(path, above);
      return true;
    }
    if (have.disk || path.length === 0) return false;
    const errno = await this.#o.refuses(path);
    if (!errno) return false;
    this.#refusedBelow = { path: Buffer.from(path), errno };
    this.#refuse(path, errno);
    return true;
  }

  /** The errno of a refused directory above `path`, null: none. */
  #refusedAbove(path: Buffer): string | null {
    if (this.#refusedBelow && isBelow(path, this.#refusedBelow.path)) return this.#refusedBelow.errno;
    if (!this.#o.full)
      for (const [other, errno] of this.#refusedBefore)
        if (isBelow(path, Buffer.from(other, 'latin1'))) return errno;
    return null;
  }

  #refuse(path: Buffer, errno: string): void {
    this.#refusedBefore.delete(path.toString('latin1'));
    this.refusedCount++;
    if (this.refused.size < NAMED) this.refused.set(path.toString('latin1'), errno);
  }

  /** The walk stands elsewhere: the directory was touched when it was there. */
  #late = false;

  #touch(path: Buffer): void {
    if (path.length > 0 && !this.#late) this.#directories.touch(parentOf(path));
  }

  /** Rows of entries that stay as they are on the disk. */
  async #keep(record: Buffer, have: Have): Promise<void> {
    const disk = have.hashed ?? (have.disk as Buffer);
    const next = withIdentity(asRow(record), disk);
    if (have.row?.equals(next)) return;
    // with its chunk list, so that the row is whole
    await this.rows.add(chunksOf(record).length > 0 ? withIdentity(record, disk) : next);
  }

  async #directory(record: Buffer, have: Have): Promise<void> {
    const path = pathOf(record);
    const there = isDirectory(have.disk);
    if (!there) {
      if (have.disk) await this.#removeOp(have.disk, have);
      this.changed++;
      this.creates++;
      this.#touch(path);
      await this.#ops.mkdir.add(encodeOp(Op.mkdir, record));
    }
    const same = there && metaSame(record, have);
    if (same) await this.#keep(record, have);
    else if (there) this.changed++;
    this.#directories.add(Buffer.from(path), Buffer.from(record), !same);
    if (have.row && isFile(have.row)) this.#ownFile(have, true);
  }

  async #symlink(record: Buffer, have: Have): Promise<void> {
    if (isDirectory(have.disk)) await this.#clear(have.disk);
    if (have.row && isFile(have.row)) this.#ownFile(have, true);
    if (linkText(have)?.equals(targetOf(record))) {
      if (metaSame(record, have)) return this.#keep(record, have);
      this.changed++;
      return this.#ops.meta.add(encodeOp(Op.meta, record));
    }
    this.changed++;
    this.creates++;
    if (isFile(have.disk)) this.destroys++;
    this.#touch(pathOf(record));
    await this.#ops.put.add(encodeOp(Op.symlink, record));
  }

  async #file(ordinal: number, record: Buffer, have: Have, same: boolean): Promise<void> {
    const path = pathOf(record);
    if (isDirectory(have.disk)) await this.#clear(have.disk);
    const group = linkGroupOf(record);
    if (group !== 0n) {
      this.#ownFile(have, !same);
      // joined, kept or pulled: decided when all members are known
      this.#touch(path);
      this.#scratch.member(
        {
          group,
          ordinal,
          record: this.#lean(record),
          present: same,
          ino: isFile(have.disk) ? inoOf(have.disk) : 0n,
          metaSame: same && metaSame(record, have),
          movedFrom: flagsOf(record) & Flag.moved ? targetOf(record) : null,
        },
        Buffer.from(hashOf(record)),
        Buffer.from(path),
      );
      if (same && metaSame(record, have)) await this.#keep(record, have);
      return;
    }
    if (same) {
      if (hasOtherNames(have.disk)) {
        // one file under several names that shall be several files
        this.#ownFile(have, false, true);
        await this.#put(ordinal, record, { ...COPY, copyFrom: Buffer.from(path) });
        return;
      }
      this.#ownFile(have, false);
      if (metaSame(record, have)) return this.#keep(record, have);
      this.changed++;
      return this.#ops.meta.add(encodeOp(Op.meta, record));
    }
    if (!this.#o.full && flagsOf(record) & Flag.moved) {
      this.#ownFile(have, true);
      this.#touch(path);
      this.#scratch.move({ ordinal, record: Buffer.from(record), from: Buffer.from(targetOf(record)) });
      return;
    }
    if (await this.#patch(ordinal, record, have)) return;
    this.#ownFile(have, true);
    await this.#put(ordinal, record, null);
  }

  /**
   * Notes in a difference what becomes of the replica's own file at this path.
   * @param leaves the path will be another file's
   */
  #ownFile(have: Have, free: boolean, leaves = free): void {
    const { row, disk } = have;
    if (!isFile(row)) return;
    const linked = linkGroupOf(row) !== 0n || hasOtherNames(disk);
    if (leaves && linked) this.#scratch.regroup(linkGroupOf(row));
    if (this.#o.full) return;
    this.#scratch.touch(Buffer.from(pathOf(row)), Buffer.from(hashOf(row)), free && rowHolds(have), linked);
  }

  /** Only the chunks that differ travel, when there is something that they can be put into. */
  async #patch(ordinal: number, record: Buffer, have: Have): Promise<boolean> {
    if (sizeOf(record) < LARGE || !isFile(have.disk) || sizeOf(have.disk) < LARGE) return false;
    const path = pathOf(record);
    const base = this.#baseOf(have);
    if (!base) return false;
    const sparse = (flagsOf(record) & Flag.chunksSparse) !== 0;
    let chunks: number[] | null = null;
    let bytes: number;
    if (sparse) {
      // told against the base that the index row is of
      if (have.hashed || !isFile(have.row)) return false;
      bytes = sparseBytes(record);
    } else {
      const found = differingChunks(
        { chunks: base.chunks, size: sizeOf(base.record) },
        { chunks: chunksOf(record), size: sizeOf(record) },
      );
      // all the same chunks in another length, or so many pieces that whole is simpler
      if (found.pairs.length === 0 || found.pairs.length / 2 > 65_535) return false;
      chunks = found.pairs;
      bytes = found.bytes;
    }
    if (bytes > sizeOf(record) / 2) return false;
    const copy = hasOtherNames(have.disk);
    this.#ownFile(have, false, copy);
    this.special.set(ordinal, {
      patch: true,
      chunks,
      base: have.hashed ? Buffer.from(have.hashed) : null,
      copyFrom: null,
    });
    this.bytesWanted += bytes + (copy ? sizeOf(record) : 0);
    this.changed++;
    if (copy) this.#touch(path);
    await this.#ops.patch.add(encodeOp(copy ? Op.patchCopy : Op.patch, record, ordinal));
    return true;
  }

  #baseOf(have: Have): { record: Buffer; chunks: Buffer } | null {
    if (have.hashed) {
      const chunks = chunksOf(have.hashed);
      return chunks.length > 0 ? { record: have.hashed, chunks } : null;
    }
    if (!this.#o.trust || !isFile(have.row) || !rowHolds(have)) return null;
    const chunks = this.#o.index.chunks(pathOf(have.row));
    return chunks ? { record: have.row, chunks } : null;
  }

  async #put(ordinal: number, record: Buffer, special: Wanted | null): Promise<void> {
    this.changed++;
    this.creates++;
    this.#touch(pathOf(record));
    this.#want(ordinal, record, special);
    await this.#ops.put.add(encodeOp(Op.put, this.#lean(record), ordinal));
  }

  #want(ordinal: number, record: Buffer, special: Wanted | null): void {
    // holes are not known here; a file without them needs its size
    if (!(flagsOf(record) & Flag.sparse)) this.bytesWanted += sizeOf(record);
    if (special) {
      this.special.set(ordinal, special);
      return;
    }
    // a list of changed chunks alone would bring only these: ask for all
    if (flagsOf(record) & Flag.chunksSparse)
      this.special.set(ordinal, {
        patch: false,
        chunks: [0, Math.ceil(sizeOf(record) / (64 * 1024))],
        base: null,
        copyFrom: null,
      });
    if (this.#wholeCount === this.#whole.length) {
      const more = new Uint32Array(this.#whole.length * 2);
      more.set(this.#whole);
      this.#whole = more;
    }
    this.#whole[this.#wholeCount++] = ordinal;
  }

  /** Without the hint of a move; the chunk list stays, the index row is made of it. */
  #lean(record: Buffer): Buffer {
    if (!(flagsOf(record) & Flag.moved)) return record;
    const chunks = chunksOf(record);
    const row = asRow(record);
    if (chunks.length === 0) return row;
    const out = Buffer.concat([row, chunks]);
    out.writeUInt32LE(out.length, 0);
    out.writeUInt32LE(chunks.length, 108);
    out[5] = flagsOf(record) & ~Flag.moved;
    return out;
  }

  /** An entry that the new state does not have. */
  async removal(path: Buffer, seq: number, have: Have): Promise<void> {
    await this.#directories.at(path);
    this.#refusedBefore.delete(path.toString('latin1'));
    await this.rows.add(encodeRecord({ kind: Kind.absent, path, seq }));
    this.removed++;
    this.changed++;
    this.#directories.add(Buffer.from(path), null, false);
    const known = have.row ?? have.disk;
    if (!have.disk || !known) return;
    this.#ownFile(have, true);
    if (this.#cleared && isBelow(path, this.#cleared)) return;
    // what the filter does not cover (any more) is not ours to remove
    if (!this.#o.policy.pruneExcluded && this.#o.covers(path, isDirectory(known)) === 0) return;
    await this.#removeOp(have.disk, have);
  }

  /** Something on the disk that neither index nor manifest has. Only a full comparison sees it. */
  async stray(disk: Buffer): Promise<void> {
    const kind = kindOf(disk);
    const path = pathOf(disk);
    await this.#directories.at(path);
    if (kind === Kind.unreadable || kind === Kind.absent || path.length === 0) return;
    if (this.#cleared && isBelow(path, this.#cleared)) return;
    this.changed++;
    await this.#removeOp(disk, { row: null, disk, diskComplete: false, hashed: null });
  }

  async #removeOp(disk: Buffer, have: Have): Promise<void> {
    const path = pathOf(disk);
    this.#touch(path);
    const record = encodeRecord({ kind: Kind.absent, path });
    if (kindOf(disk) === Kind.directory) await this.#ops.remove.add(encodeOp(Op.rmdir, record));
    else {
      this.destroys++;
      await this.#ops.remove.add(encodeOp(Op.remove, record));
    }
    if (hasOtherNames(disk) && have.row) this.#scratch.regroup(linkGroupOf(have.row));
  }

  /**
   * A directory gives way to something else, with all below it. What is not part of the state (excluded, or put
   * there by somebody) is not thrown away but kept in the backups.
   */
  async #clear(disk: Buffer): Promise<void> {
    const path = Buffer.from(pathOf(disk));
    this.#cleared = path;
    this.#directories.add(path, null, false);
    this.#touch(path);
    await this.#ops.remove.add(encodeOp(Op.rmdir, encodeRecord({ kind: Kind.absent, path })));
    for await (const entry of this.#o.disk.below(path)) {
      const kind = kindOf(entry);
      if (kind === Kind.unreadable)
        throw new SimpleVolumeError(
          'INTERNAL',
          `cannot look into ${printablePath(pathOf(entry))}, which gives way to a file`,
          {
            path: printablePath(pathOf(entry)),
          },
        );
      const record = encodeRecord({ kind: Kind.absent, path: pathOf(entry) });
      if (kind === Kind.directory) await this.#ops.remove.add(encodeOp(Op.rmdir, record));
      else {
        const ours = this.#o.index.get(pathOf(entry)) !== undefined;
        if (!ours) this.keepsStrays = true;
        this.destroys++;
        await this.#ops.remove.add(encodeOp(Op.remove, record, 0, EMPTY, ours ? 0 : KEEP_OLD));
      }
    }
  }
  /** some operations keep what they remove: the plan needs a folder for it */
  keepsStrays = false;

  /** Hard-link groups, moves and directories: what only the whole walk can tell. */
  async finish(): Promise<void> {
    this.#late = true;
    let n = 0;
    // what is awaited below is mostly memory: without this the event loop would wait for all of it
    const air = async (): Promise<void> => {
      if (++n % 256 === 0) await nextTurn();
    };
    for (const group of this.#scratch.groups()) {
      await this.#group(group);
      await air();
    }
    for (const { ordinal, record, from } of this.#scratch.moves()) {
      await air();
      if (this.#scratch.takeFree(from, hashOf(record), false))
        await this.#take(ordinal, from, this.#lean(record));
      else await this.#lateContent(ordinal, record);
    }
    for (const group of this.#scratch.regrouped())
      for (const row of this.#o.full ? [] : this.#o.index.linkGroup(group))
        if (!this.#scratch.isTouched(pathOf(row.record)))
          await this.#ops.meta.add(encodeOp(Op.meta, row.record));
    await this.#directories.finish();
    // what was refused before and is not named now is still wanted and still not there
    for (const [path, errno] of this.#refusedBefore) this.#refuse(Buffer.from(path, 'latin1'), errno);
    this.#whole = this.#whole.subarray(0, this.#wholeCount).sort();
  }

  async #take(ordinal: number, from: Buffer, record: Buffer): Promise<void> {
    this.changed++;
    await this.#ops.take.add(encodeOp(Op.take, encodeRecord({ kind: Kind.file, path: from }), ordinal));
    await this.#ops.put.add(encodeOp(Op.put, record, ordinal));
  }

  /** Like #put, at a time when the directories of the walk are behind us (they were touched on the way). */
  async #lateContent(ordinal: number, record: Buffer, special: Wanted | null = null): Promise<void> {
    this.changed++;
    this.creates++;
    this.#want(ordinal, record, special);
    await this.#ops.put.add(encodeOp(Op.put, this.#lean(record), ordinal));
  }

  /**
   * One file under several names. One of them carries the content: one of the group that the manifest does not
   * mention (it stays where it is), else a name at which it already is, else a file that moves, else the first, which
   * is pulled.
   */
  async #group(members: Member[]): Promise<void> {
    const first = members[0] as Member;
    let leader: Member | null = null;
    /** inode at which the content is already, 0n: it is put there */
    let ino = 0n;
    let path: Buffer | null = null;
    const others = this.#o.full ? [] : await this.#untouched(first);
    const [other] = others;
    if (other) {
      path = pathOf(other.record);
      ino = inoOf(other.record);
      if (!this.#scratch.claim(ino)) throw new Drift('a hard link has another file', path);
    } else {
      leader = members.find((m) => m.present && !this.#isShared(m) && this.#scratch.claim(m.ino)) ?? null;
      if (leader) ino = leader.ino;
      else {
        // the inode belongs to another group: this one gets a file of its own
        leader = members.find((m) => m.present) ?? null;
        if (leader) {
          const own = pathOf(leader.record);
          this.#leaves(own);
          await this.#lateContent(leader.ordinal, leader.record, { ...COPY, copyFrom: Buffer.from(own) });
        }
      }
      if (leader) path = pathOf(leader.record);
    }
    if (!path) {
      const hash = hashOf(first.record);
      leader = members.find((m) => m.movedFrom && this.#scratch.takeFree(m.movedFrom, hash, true)) ?? null;
      if (leader?.movedFrom) await this.#take(leader.ordinal, leader.movedFrom, leader.record);
      else {
        leader = first;
        await this.#lateContent(first.ordinal, first.record);
      }
      path = pathOf(leader.record);
    }
    const joined = (m: Member): boolean => m.present && ino !== 0n && m.ino === ino;
    // Another name, or one less, changes the ctime of all, and so their rows. Whether there is one less can't be told
    // by the group's number: an old source may have numbered it otherwise.
    for (const o of others)
      if (inoOf(o.record) === ino) await this.#ops.meta.add(encodeOp(Op.meta, o.record));
    for (const m of members) {
      if (joined(m)) {
        if (!m.metaSame) this.changed++;
        await this.#ops.meta.add(encodeOp(Op.meta, m.record));
      } else if (m !== leader) {
        this.changed++;
        this.creates++;
        if (m.ino !== 0n) this.#leaves(pathOf(m.record));
        await this.#ops.link.add(encodeOp(Op.link, m.record, 0, Buffer.from(path)));
        // the name that carries the content may still have the group's old mode or times
        if (!leader) await this.#ops.meta.add(encodeOp(Op.meta, m.record));
      }
    }
  }

  /** Whether names of other groups, which the manifest does not mention, are names of the member's file too. */
  #isShared(m: Member): boolean {
    if (this.#o.full) return false;
    const row = this.#o.index.get(pathOf(m.record))?.record;
    const group = row ? linkGroupOf(row) : 0n;
    return (
      group !== m.group &&
      this.#o.index
        .linkGroup(group)
        .some(({ record }) => inoOf(record) === m.ino && !this.#scratch.isTouched(pathOf(record)))
    );
  }

  /** The path becomes a name of another file than the one that it is a name of now. */
  #leaves(path: Buffer): void {
    const row = this.#o.index.get(path)?.record;
    if (row && linkGroupOf(row) !== 0n) this.#scratch.regroup(linkGroupOf(row));
  }

  /** Names of the group with the same content that this difference does not concern. */
  async #untouched(m: Member): Promise<Row[]> {
    const out: Row[] = [];
    for (const row of this.#o.index.linkGroup(m.group)) {
      const path = pathOf(row.record);
      if (!sameContent(row.record, m.record) || this.#scratch.isTouched(path)) continue;
      const disk = await this.#o.disk.stat(path);
      // the new names would be names of another file than this one
      if (!rowHolds({ row: row.record, disk, diskComplete: true, hashed: null }))
        throw new Drift('a hard link was touched', path);
      out.push(row);
    }
    return out;
  }

  /** Ordinals whose content has to come from somewhere, ascending. */
  wanted(): Uint32Array {
    if (this.special.size === 0) return this.#whole;
    const all = new Set<number>(this.special.keys());
    for (const o of this.#whole) all.delete(o);
    const out = new Uint32Array(this.#whole.length + all.size);
    out.set(this.#whole);
    out.set([...all], this.#whole.length);
    return out.sort();
  }

  get empty(): boolean {
    return Object.values(this.#ops).every((s) => s.count === 0);
  }

  get operations(): number {
    return Object.values(this.#ops).reduce((n, s) => n + s.count, 0);
  }

  /**
   * The operations in the order in which they have to be done.
   * @param keepOld whatever is removed or replaced is kept
   */
  async *operationsInOrder(keepOld: boolean): AsyncGenerator<Buffer> {
    const o = this.#ops;
    yield* o.take.pieces();
    // children first
    for await (const piece of o.remove.reversedPieces()) yield keepOld ? keeping(piece) : piece;
    yield* o.mkdir.pieces();
    for (const s of [o.put, o.link])
      for await (const piece of s.pieces()) yield keepOld ? keeping(piece) : piece;
    yield* o.patch.pieces();
    yield* o.meta.pieces();
    yield* o.directory.pieces();
  }

  async close(): Promise<void> {
    for (const s of Object.values(this.#ops)) await s.remove();
    await this.rows.remove();
    await this.#scratch.close();
  }
}

function keeping(piece: Buffer): Buffer {
  const out = Buffer.from(piece);
  for (let at = 0; at < out.length; at += out.readUInt32LE(at)) {
    const op = out[at + 4];
    if (op !== Op.rmdir) out[at + 5] = (out[at + 5] as number) | KEEP_OLD;
  }
  return out;
}

const isBelow = (path: Buffer, directory: Buffer): boolean =>
  directory.length === 0
    ? path.length > 0
    : path.length > directory.length &&
      path[directory.length] === 0x2f &&
      path.compare(directory, 0, directory.length, 0, directory.length) === 0;
