/**
 * One batch: marks become paths, each path is looked at and compared with the index, and what changed is staged.
 * A batch may have several rounds; a path that is marked again is looked at again and the later look counts.
 */
import { setImmediate as nextTurn } from 'node:timers/promises';
import {
  decodeStageResults,
  encodePaths,
  encodeStageItems,
  type Mark,
  MarkBit,
  MarkType,
  SlotKind,
  type StageItem,
  type StageResult,
  StageStatus,
} from '../core/lists.ts';
import {
  EMPTY,
  Flag,
  flagsOf,
  inoOf,
  Kind,
  kindOf,
  LARGE,
  linkGroupOf,
  pathOf,
  recordsIn,
  sameIdentity,
  sizeOf,
  withFields,
} from '../core/record.ts';
import type { IndexReader } from '../core/store.ts';
import type { Filter, Native } from '../native/types.ts';
import { classify, movedRecord, sameContent, sameFileElsewhere } from './classify.ts';
import { rowsOf } from './collect.ts';
import type { Gate } from './gate.ts';
import { companionsOf, coveredBy, databaseOf, isBelow, keyOf, parentOf } from './paths.ts';
import { type Pending, splitChunks, underName, withChunks } from './plan.ts';
import { type Rest, type Scan, Walk } from './walk.ts';

const LOOK = 512;
const STAGE_ITEMS = 256;
const STAGE_BYTES = 64 * 1024 * 1024;
/** Pauses before a database is staged once more, ms. */
const UNIT_BACKOFF = [20, 60, 150, 300];
const SLICE_MS = 8;
/** How often a large file that changes while it is read is read again within one batch. */
const LARGE_RETRIES = 1;

export interface BatchOptions {
  native: Native;
  index: IndexReader;
  filter: Filter;
  /** absolute path of the live tree */
  root: Buffer;
  /** slots folder and the shadow's tree; null: live consistency */
  shadow: { slots: Buffer; data: Buffer } | null;
  jobs: Gate;
  newSlot(): number;
  /** differences after which scans stop: the rest is for the next batch */
  limit: number;
  /** what the batch before left */
  rest: Rest | null;
  /** a large file that did not hold still in an earlier batch and is not read again yet */
  waits(key: string): boolean;
  /** ends the batch between two pieces of work */
  signal: AbortSignal;
}

interface Candidate {
  path: Buffer;
  /** union of the bits of its marks, or of the mark on the directory above */
  bits: number;
  /** found by a scan of the directory above: what is below it has been scanned too */
  scanned: boolean;
}

const pause = (ms: number): Promise<void> => new Promise((resolve) => setTimeout(resolve, ms));

export class Batch {
  readonly pending = new Map<string, Pending>();
  /** files that did not hold still: their last version stays */
  readonly busy = new Map<string, Buffer>();
  /** those of them that are large, and no databases: reading them again and again costs too much */
  readonly hot = new Map<string, Buffer>();
  readonly unreadable = new Map<string, { path: Buffer; errno: number }>();
  readonly special = new Map<string, Buffer>();
  /** looked at and fit to be carried: reported no more */
  readonly fine = new Set<string>();
  /** the limit was reached: not everything that was marked has been looked at */
  limited = false;
  /** index rows that scans passed; what a limited batch is measured by */
  walked = 0;
  /** paths that finish() left out */
  readonly leftOut: Buffer[] = [];
  bytesWritten = 0;
  bytesRead = 0;
  /** slots that were made and are of no use any more */
  readonly garbage: number[] = [];
  readonly #o: BatchOptions;
  readonly #deleted: Set<string>;
  readonly #scans: Scan[];
  #walk: Walk | null;
  /** differences that scans have found */
  #found = 0;
  readonly #bits = new Map<string, number>();
  readonly #followers = new Map<Pending, Pending[]>();
  readonly #slotOfResult = new Map<StageResult, number>();
  #again: Mark[] = [];
  #left = 0;
  #since = performance.now();

  constructor(options: BatchOptions) {
    this.#o = options;
    this.#deleted = new Set(options.rest?.deleted);
    this.#scans = [...(options.rest?.scans ?? [])];
    this.#walk = options.rest?.walk ?? null;
  }

  /** What the limit kept it from; null: nothing. */
  get rest(): Rest | null {
    return this.limited ? { walk: this.#walk, scans: [...this.#scans], deleted: this.#deleted } : null;
  }

  /** Ends a batch that failed. */
  async close(): Promise<void> {
    await this.#walk?.close();
    this.#walk = null;
  }

  /** Paths that have to be looked at again although nobody marked them. */
  takeAgain(): Mark[] {
    const marks = this.#again;
    this.#again = [];
    return marks;
  }

  async #breathe(): Promise<void> {
    if (performance.now() - this.#since < SLICE_MS) return;
    await nextTurn();
    this.#since = performance.now();
    this.#o.signal.throwIfAborted();
  }

  /** Slots that the plan needs. */
  slots(): number[] {
    return [...this.pending.values()].filter((p) => p.slotKind !== SlotKind.none).map((p) => p.slot);
  }

  #drop(key: string): void {
    const p = this.pending.get(key);
    if (!p) return;
    this.#left++;
    if (p.slotKind !== SlotKind.none) this.garbage.push(p.slot);
    if (p.movedFrom) p.movedFrom.taken = false;
    this.pending.delete(key);
    // What rested on it has to be looked at again.
    for (const other of p.taken ? this.pending.values() : (this.#followers.get(p) ?? [])) {
      if (other.movedFrom !== p && other.leader !== p) continue;
      other.movedFrom = null;
      other.leader = null;
      other.staged = false;
      this.#again.push({ type: MarkType.path, bits: 0, path: other.path });
    }
    this.#followers.delete(p);
  }

  #set(p: Pending): void {
    const key = keyOf(p.path);
    this.#drop(key);
    this.pending.set(key, p);
  }

  #explained(path: Buffer): boolean {
    return coveredBy(path, this.#deleted);
  }

  #gone(path: Buffer, explained: boolean): void {
    const base = this.#o.index.get(path);
    if (!base) {
      this.#drop(keyOf(path));
      return;
    }
    this.#set({
      path: Buffer.from(path),
      change: 'gone',
      base,
      record: base.record,
      chunks: null,
      slot: 0,
      slotKind: SlotKind.none,
      runs: null,
      movedFrom: null,
      taken: false,
      leader: null,
      explained,
      staged: false,
    });
  }

  /** One round: looks at everything that the marks cover and stages what changed. */
  async round(marks: Mark[]): Promise<void> {
    const queue: Candidate[] = [];
    const seen = new Set<string>();
    const add = (path: Buffer, bits: number, scanned: boolean): void => {
      const key = keyOf(path);
      if (bits) this.#bits.set(key, (this.#bits.get(key) ?? 0) | bits);
      if (seen.has(key)) return;
      seen.add(key);
      queue.push({ path: Buffer.from(path), bits, scanned });
    };
    const scans = this.#scans;
    for (const m of marks) {
      if (m.bits & MarkBit.deleted) this.#deleted.add(keyOf(m.path));
      if (m.type === MarkType.path) add(m.path, m.bits, false);
      else scans.push({ path: Buffer.from(m.path), deep: m.type === MarkType.subtree, bits: m.bits });
    }
    const roundPending: Pending[] = [];
    const inodes = new Set<bigint>();
    const scanned = new Set<string>();
    let at = 0;
    let sorted = 0;
    for (;;) {
      // Subtrees first, upper ones first: what they cover needs no scan of its own. Taken from the end.
      if (scans.length !== sorted)
        scans.sort((a, b) => Number(a.deep) - Number(b.deep) || b.path.compare(a.path));
      if (!this.limited) this.#walk ??= this.#nextWalk(scanned);
      sorted = scans.length;
      if (this.#walk && !this.limited) await this.#scan(this.#walk, add);
      else if (at < queue.length) {
        const part = queue.slice(at, at + LOOK);
        at += part.length;
        await this.#look(part, add, scans, roundPending, inodes);
      } else if (inodes.size > 0) {
        await this.#otherNames(inodes, add);
        inodes.clear();
        if (at === queue.length) break;
      } else break;
    }
    const fresh = roundPending.filter((p) => this.pending.get(keyOf(p.path)) === p);
    await this.#moves(fresh);
    this.#lead(fresh);
    await this.#stage(fresh);
  }

  /** The next directory to be scanned that no scan which began in this round has covered. */
  #nextWalk(done: Set<string>): Walk | null {
    const { native, index, filter, root, shadow } = this.#o;
    for (let s = this.#scans.pop(); s; s = this.#scans.pop()) {
      if (coveredBy(s.path, done)) continue;
      if (s.deep) done.add(keyOf(s.path));
      return new Walk({ native, index, filter, root, copies: shadow !== null }, s);
    }
    return null;
  }

  async #scan(walk: Walk, add: (path: Buffer, bits: number, scanned: boolean) => void): Promise<void> {
    const { deep, bits } = walk.scan;
    for (;;) {
      const d = await walk.next(
        () => this.#breathe(),
        () => {
          this.walked++;
        },
      );
      if (!d) break;
      if (d.what === 'unreadable') this.unreadable.set(keyOf(d.path), { path: d.path, errno: d.errno });
      else if (d.what === 'special') this.special.set(keyOf(d.path), d.path);
      else {
        add(d.path, bits & ~MarkBit.deleted, deep);
        if (++this.#found >= this.#o.limit) {
          this.limited = true;
          return;
        }
      }
    }
    this.#walk = null;
  }

  async #look(
    part: Candidate[],
    add: (path: Buffer, bits: number, scanned: boolean) => void,
    scans: Scan[],
    round: Pending[],
    inodes: Set<bigint>,
  ): Promise<void> {
    const { native, index, filter, root, shadow } = this.#o;
    const records = await native.stat(root, encodePaths(part.map((c) => c.path)));
    let i = 0;
    for (const stat of recordsIn(records)) {
      const candidate = part[i++] as Candidate;
      const { path } = candidate;
      const key = keyOf(path);
      const base = index.get(path);
      const there = kindOf(stat);
      const isDirectory = there === Kind.directory;
      const outside =
        path.length > 0 &&
        there !== Kind.absent &&
        there !== Kind.unreadable &&
        filter.match(path, isDirectory) === 0;
      const copyMissing = shadow !== null && base !== undefined && base.copyIno === 0n;
      const change = outside ? (base ? 'gone' : 'none') : classify(base?.record, stat, copyMissing);
      if (
        base &&
        kindOf(base.record) === Kind.directory &&
        change !== 'unreadable' &&
        (!isDirectory || outside)
      )
        this.#below(path, outside, add);
      if (change !== 'unreadable' && change !== 'special') this.fine.add(key);
      for (const group of new Set([
        base ? linkGroupOf(base.record) : 0n,
        change === 'content' ? linkGroupOf(stat) : 0n,
      ])) {
        if (group === 0n) continue;
        for (const member of index.linkGroup(group)) add(pathOf(member.record), 0, true);
      }
      switch (change) {
        case 'none':
          this.#drop(key);
          break;
        case 'unreadable':
          this.#drop(key);
          this.unreadable.set(key, { path, errno: stat.readUInt32LE(8) });
          break;
        case 'special':
          this.special.set(key, path);
          this.fine.delete(key);
          // What was there before is no more; the state has no entry for what is there now.
          this.#gone(path, true);
          break;
        case 'gone':
          this.#gone(path, outside || this.#explained(path));
          this.#unit(path, add);
          break;
        default: {
          if (change === 'content' && sizeOf(stat) >= LARGE && (this.hot.has(key) || this.#o.waits(key))) {
            this.busy.set(key, path);
            this.#drop(key);
            break;
          }
          const p: Pending = {
            path,
            change,
            base,
            record: Buffer.from(stat),
            chunks: null,
            slot: 0,
            slotKind: SlotKind.none,
            runs: null,
            movedFrom: null,
            taken: false,
            leader: null,
            explained: true,
            staged: false,
          };
          this.#set(p);
          round.push(p);
          const group = linkGroupOf(stat);
          if (change === 'content') {
            this.#unit(path, add);
            if (group !== 0n && (!base || linkGroupOf(base.record) !== group)) inodes.add(group);
          }
          // A directory that is new here came with all that is in it.
          if (isDirectory && !candidate.scanned && (!base || inoOf(base.record) !== inoOf(stat)))
            scans.push({ path, deep: true, bits: candidate.bits });
        }
      }
    }
    await this.#breathe();
  }

  /** A directory is no more: neither is what was below it. */
  #below(
    directory: Buffer,
    explained: boolean,
    add: (path: Buffer, bits: number, scanned: boolean) => void,
  ): void {
    for (const row of rowsOf(this.#o.index, directory, true)) {
      const path = pathOf(row.record);
      if (path.equals(directory)) continue;
      this.#gone(path, explained || this.#explained(path));
      // Names of the same file elsewhere have one name less beside them.
      for (const member of this.#o.index.linkGroup(linkGroupOf(row.record))) {
        const other = pathOf(member.record);
        if (!isBelow(other, directory)) add(other, 0, true);
      }
    }
  }

  /** A database and its companions are looked at together. */
  #unit(path: Buffer, add: (path: Buffer, bits: number, scanned: boolean) => void): void {
    const database = databaseOf(path);
    if (database) {
      add(database, 0, true);
      for (const companion of companionsOf(database)) add(companion, 0, true);
    } else if (this.#o.index.get(path) && companionsOf(path).some((c) => this.#o.index.get(c)))
      for (const companion of companionsOf(path)) add(companion, 0, true);
  }

  /** Index rows of files that have got a further name: their own name tells nothing of it. One pass for all. */
  async #otherNames(
    inodes: ReadonlySet<bigint>,
    add: (path: Buffer, bits: number, scanned: boolean) => void,
  ): Promise<void> {
    const { index } = this.#o;
    for (let after: Buffer | null = null; ; ) {
      const rows = index.page(after, LOOK);
      for (const { record } of rows)
        if (kindOf(record) === Kind.file && inodes.has(inoOf(record))) add(pathOf(record), 0, true);
      if (rows.length < LOOK) return;
      after = pathOf((rows.at(-1) as { record: Buffer }).record);
      await this.#breathe();
    }
  }

  /**
   * Files that are where they were not, with a content that the last generation has under a name which is free now:
   * renamed, not copied. Where no event vouches that nothing was written meanwhile, the content is compared.
   */
  async #moves(fresh: Pending[]): Promise<void> {
    const { shadow } = this.#o;
    const free = new Map<bigint, Pending>();
    for (const p of this.pending.values()) {
      if (!p.base || p.taken || kindOf(p.base.record) !== Kind.file || linkGroupOf(p.base.record) !== 0n)
        continue;
      if (shadow && p.base.copyIno === 0n) continue;
      const vacated =
        p.change !== 'content' || inoOf(p.record) !== inoOf(p.base.record) || kindOf(p.record) !== Kind.file;
      // What was staged already may rest on the version that is in the shadow.
      if (vacated && !(p.staged && p.slotKind !== SlotKind.whole)) free.set(inoOf(p.base.record), p);
    }
    if (free.size === 0) return;
    const doubtful: { p: Pending; from: Pending }[] = [];
    for (const p of fresh) {
      if (p.change !== 'content') continue;
      const from = free.get(inoOf(p.record));
      if (!from?.base || from === p || !sameFileElsewhere(from.base.record, p.record)) continue;
      free.delete(inoOf(p.record));
      const here = this.#bits.get(keyOf(p.path)) ?? 0;
      const there = this.#bits.get(keyOf(from.path)) ?? 0;
      if (here & MarkBit.created && !((here | there) & MarkBit.content)) this.#move(p, from);
      else doubtful.push({ p, from });
    }
    if (doubtful.length === 0) return;
    const results = await this.#stageCalls(
      doubtful.map(({ p }, id) => ({ id, slot: 0, patch: false, path: p.path })),
      (id) => sizeOf((doubtful[id] as { p: Pending }).p.record),
      true,
    );
    for (const { id, status, record } of results) {
      const { p, from } = doubtful[id] as { p: Pending; from: Pending };
      if (
        status === StageStatus.ok &&
        from.base &&
        sameIdentity(record, p.record) &&
        sameContent(from.base.record, record)
      )
        this.#move(p, from);
    }
  }

  #move(p: Pending, from: Pending): void {
    const base = from.base as NonNullable<Pending['base']>;
    p.movedFrom = from;
    from.taken = true;
    p.record = movedRecord(p.record, base.record);
    p.chunks = this.#o.index.chunks(from.path) ?? null;
    p.staged = true;
  }

  /** Of several names of one file one is read. A name whose version is in the shadow already comes first. */
  #lead(fresh: Pending[]): void {
    const groups = new Map<bigint, Pending[]>();
    for (const p of this.pending.values()) {
      const group = linkGroupOf(p.record);
      if (p.change !== 'content' || group === 0n) continue;
      const members = groups.get(group);
      if (members) members.push(p);
      else groups.set(group, [p]);
    }
    const isFresh = new Set(fresh);
    for (const [group, members] of groups) {
      if (!members.some((p) => isFresh.has(p))) continue;
      if (this.#leadByUnchanged(group, members)) continue;
      const leader =
        members.find(
          (p) => this.#base(p) !== undefined && linkGroupOf(p.base?.record ?? p.record) === group,
        ) ??
        members.find((p) => this.#base(p) !== undefined) ??
        (members[0] as Pending);
      for (const p of members) {
        if (p.slotKind !== SlotKind.none) this.garbage.push(p.slot);
        p.slotKind = SlotKind.none;
        p.staged = false;
        p.leader = p === leader ? null : leader;
      }
      this.#followers.set(
        leader,
        members.filter((p) => p !== leader),
      );
      if (!isFresh.has(leader)) fresh.push(leader);
    }
  }

  /**
   * A name of the file at which nothing happened (only the names beside it changed, as when a directory with one of
   * them is renamed): it leads, nothing has to be read.
   */
  #leadByUnchanged(group: bigint, members: Pending[]): boolean {
    const { index, shadow } = this.#o;
    if (members.some((p) => p.base && linkGroupOf(p.base.record) === group && this.#base(p))) return false;
    const row = index
      .linkGroup(group)
      .find(
        ({ record, copyIno }) =>
          !this.pending.has(keyOf(pathOf(record))) &&
          (!shadow || copyIno !== 0n) &&
          members.every((p) => sameIdentity(p.record, record)),
      );
    if (!row) return false;
    const path = Buffer.from(pathOf(row.record));
    const leader: Pending = {
      path,
      change: 'content',
      base: row,
      record: row.record,
      chunks: index.chunks(path) ?? null,
      slot: 0,
      slotKind: SlotKind.none,
      runs: null,
      movedFrom: null,
      taken: false,
      leader: null,
      explained: true,
      staged: true,
    };
    this.pending.set(keyOf(path), leader);
    this.#followers.set(leader, members);
    for (const p of members) {
      if (p.slotKind !== SlotKind.none) this.garbage.push(p.slot);
      p.slotKind = SlotKind.none;
      p.leader = leader;
      this.#follow(p, leader);
    }
    return true;
  }

  /**
   * The version in the shadow that the new one may rest on. Not when another path takes it, and not when the
   * shadow's file has other names that no longer belong to this file.
   */
  #base(p: Pending): Buffer | undefined {
    const { base } = p;
    if (!base || p.taken || kindOf(base.record) !== Kind.file) return undefined;
    if (this.#o.shadow && base.copyIno === 0n) return undefined;
    const group = linkGroupOf(base.record);
    if (group !== 0n && group !== linkGroupOf(p.record)) return undefined;
    return base.record;
  }

  #item(p: Pending, id: number, patchable: boolean): StageItem {
    const { index, shadow, newSlot } = this.#o;
    const base = this.#base(p);
    const item: StageItem = { id, slot: shadow ? newSlot() : 0, patch: false, path: p.path };
    if (!base) return item;
    const chunks = sizeOf(base) >= LARGE ? index.chunks(p.path) : undefined;
    item.base = withChunks(base, chunks);
    item.patch =
      patchable && chunks !== undefined && linkGroupOf(base) === 0n && linkGroupOf(p.record) === 0n;
    return item;
  }

  async #stage(fresh: Pending[]): Promise<void> {
    const units = new Set<string>();
    const single: Pending[] = [];
    for (const p of fresh) {
      if (p.leader || p.movedFrom || (p.change !== 'content' && p.change !== 'gone')) continue;
      const database = databaseOf(p.path);
      const key =
        database && this.#isDatabase(database)
          ? keyOf(database)
          : this.#hasCompanions(p)
            ? keyOf(p.path)
            : null;
      if (key === null) {
        if (p.change === 'content' && !p.staged) single.push(p);
        await this.#breathe();
        continue;
      }
      units.add(key);
      await this.#breathe();
    }
    // Large ones in calls of their own: they are not read as often within one.
    const isLarge = (p: Pending): boolean => sizeOf(p.record) >= LARGE;
    single.sort((a, b) => Number(isLarge(a)) - Number(isLarge(b)));
    const results = await this.#stageCalls(
      single.map((p, id) => this.#item(p, id, true)),
      (id) => sizeOf((single[id] as Pending).record),
      this.#o.shadow === null,
    );
    for (const r of results) this.#settle(single[r.id] as Pending, r);
    for (const key of units) await this.#stageUnit(Buffer.from(key, 'latin1'));
  }

  /** Stages a result into its path. False: its last version stays. */
  #settle(p: Pending, r: StageResult): boolean {
    const key = keyOf(p.path);
    this.bytesRead += r.bytesRead;
    this.bytesWritten += r.bytesWritten;
    const current = this.pending.get(key) === p;
    if (r.status === StageStatus.ok && current) {
      const { record, chunks } = splitChunks(r.record);
      p.record = record;
      p.chunks = chunks;
      p.slot = r.slotKind === SlotKind.none ? 0 : this.#slotOf(r);
      p.slotKind = r.slotKind;
      p.runs = r.slotKind === SlotKind.patch || this.#o.shadow === null ? r.runs : null;
      p.staged = true;
      this.busy.delete(key);
      for (const f of this.#followers.get(p) ?? []) if (f.leader === p) this.#follow(f, p);
      return true;
    }
    if (r.slotKind !== SlotKind.none) this.garbage.push(this.#slotOf(r));
    if (!current) return false;
    const names = [p, ...(this.#followers.get(p) ?? []).filter((f) => f.leader === p)];
    for (const name of names) {
      const nameKey = keyOf(name.path);
      if (r.status === StageStatus.busy) {
        this.busy.set(nameKey, name.path);
        if (sizeOf(p.record) >= LARGE) this.hot.set(nameKey, name.path);
      } else if (r.status === StageStatus.error)
        this.unreadable.set(nameKey, { path: name.path, errno: r.errno });
      else this.#again.push({ type: MarkType.path, bits: 0, path: name.path });
      this.#keepOld(name);
    }
    return false;
  }

  #slotOf(r: StageResult): number {
    return this.#slotOfResult.get(r) ?? 0;
  }

  #follow(follower: Pending, leader: Pending): void {
    if (inoOf(follower.record) !== inoOf(leader.record)) {
      // Became another file between the look and the reading.
      this.#again.push({ type: MarkType.path, bits: 0, path: follower.path });
      this.#keepOld(follower);
      return;
    }
    const record =
      flagsOf(leader.record) & Flag.moved
        ? withFields(leader.record, { flags: flagsOf(leader.record) & ~Flag.moved, target: EMPTY })
        : leader.record;
    follower.record = underName(record, follower.path);
    follower.chunks = leader.chunks;
    follower.staged = true;
    this.busy.delete(keyOf(follower.path));
  }

  /** The path keeps its last version, unless another path has taken that: then it has none in this generation. */
  #keepOld(p: Pending): void {
    const { taken, base } = p;
    const key = keyOf(p.path);
    if (!taken || !base) {
      this.#drop(key);
      return;
    }
    if (p.slotKind !== SlotKind.none) this.garbage.push(p.slot);
    this.#left++;
    Object.assign(p, { change: 'gone', record: base.record, slotKind: SlotKind.none, slot: 0, leader: null });
  }

  #isDatabase(path: Buffer): boolean {
    const p = this.pending.get(keyOf(path));
    const record = p && p.change !== 'gone' ? p.record : this.#o.index.get(path)?.record;
    return record !== undefined && kindOf(record) === Kind.file;
  }
  #hasCompanions(p: Pending): boolean {
    return companionsOf(p.path).some(
      (c) => this.pending.has(keyOf(c)) || (p.base !== undefined && this.#o.index.get(c) !== undefined),
    );
  }

  /**
   * A database with its journal or write-ahead log, all of one moment or not at all. While the database file and
   * its rollback journal stand still, any prefix of the log that was there belongs to them: frames beyond it are as
   * if the writer had been stopped there (sqlite.org/walformat.html). The shared-memory file is made anew by the
   * first process that opens the database, so it binds nobody.
   */
  async #stageUnit(database: Buffer): Promise<void> {
    const paths = [database, ...companionsOf(database)];
    const [journal, , shm] = companionsOf(database) as [Buffer, Buffer, Buffer];
    for (let attempt = 0; ; attempt++) {
      this.#o.signal.throwIfAborted();
      // Without the tick that staging waits for: what changed within one tick is caught by the second look.
      const members = paths.flatMap((path) => {
        const p = this.pending.get(keyOf(path));
        return p && p.change === 'content' && !p.movedFrom && !p.leader ? [p] : [];
      });
      for (const p of members) if (p.slotKind !== SlotKind.none) this.garbage.push(p.slot);
      for (const p of members) p.slotKind = SlotKind.none;
      const calls = members.map((p, id) => this.#item(p, id, p.path.equals(database)));
      const results = calls.length === 0 ? [] : await this.#stageOne(calls, this.#o.shadow === null);
      const failed = results.find(
        (r) => r.status !== StageStatus.ok && !(members[r.id] as Pending).path.equals(shm),
      );
      const broken = failed && failed.status === StageStatus.error ? failed : null;
      const still = !failed && (await this.#stoodStill([database, journal], members, results));
      if (still || broken) {
        for (const r of results) {
          const p = members[r.id] as Pending;
          if (still) this.#settle(p, r);
          else {
            if (r.slotKind !== SlotKind.none) this.garbage.push(this.#slotOf(r));
            this.unreadable.set(keyOf(p.path), { path: p.path, errno: broken?.errno ?? 0 });
          }
        }
        if (broken) for (const path of paths) this.#keepPath(path);
        for (const path of paths) if (still) this.busy.delete(keyOf(path));
        return;
      }
      for (const r of results) if (r.slotKind !== SlotKind.none) this.garbage.push(this.#slotOf(r));
      if (attempt >= UNIT_BACKOFF.length) {
        this.busy.set(keyOf(database), database);
        for (const path of paths) this.#keepPath(path);
        return;
      }
      await pause(UNIT_BACKOFF[attempt] as number);
      await this.#refresh(paths);
    }
  }

  #keepPath(path: Buffer): void {
    const p = this.pending.get(keyOf(path));
    if (p) this.#keepOld(p);
  }

  /** Whether paths are now what they were when they were staged (or, not staged, what was seen of them before). */
  async #stoodStill(paths: Buffer[], members: Pending[], results: StageResult[]): Promise<boolean> {
    const { native, root, index } = this.#o;
    const now = [...recordsIn(await native.stat(root, encodePaths(paths)))];
    return paths.every((path, i) => {
      const record = now[i] as Buffer;
      const at = members.findIndex((p) => p.path.equals(path));
      const p = this.pending.get(keyOf(path));
      const before =
        at >= 0
          ? results.find((r) => r.id === at)?.record
          : p
            ? p.change === 'gone'
              ? undefined
              : p.record
            : index.get(path)?.record;
      if (!before) return kindOf(record) === Kind.absent;
      return kindOf(record) === kindOf(before) && sameIdentity(record, before);
    });
  }

  /** A new look at the members of a unit, before it is tried again. */
  async #refresh(paths: Buffer[]): Promise<void> {
    const none = new Set<bigint>();
    await this.#look(
      paths.map((path) => ({ path, bits: 0, scanned: true })),
      () => {},
      [],
      [],
      none,
    );
  }

  /**
   * After the last round: what is left has to be a tree. Paths that could not be read, whose directory is not
   * there, or that would pull a directory away from under others, wait for the next batch: their marks come back.
   */
  finish(): Mark[] {
    const { index, shadow } = this.#o;
    const again = (path: Buffer): void => {
      this.#again.push({ type: MarkType.path, bits: 0, path });
      this.leftOut.push(path);
    };
    const isDirectory = (path: Buffer): boolean => {
      const p = this.pending.get(keyOf(path));
      if (p && p.change !== 'identity') return p.change === 'directory';
      const row = index.get(path);
      return row !== undefined && kindOf(row.record) === Kind.directory && (!shadow || row.copyIno !== 0n);
    };
    // What is left out may leave others without what they rest on: until nothing more is left out.
    for (let before = -1; before !== this.#left; ) {
      before = this.#left;
      for (const p of [...this.pending.values()])
        if (p.change === 'content' && !p.staged) {
          again(p.path);
          this.#keepOld(p);
        }
      const inOrder = [...this.pending.values()].sort((a, b) => a.path.compare(b.path));
      let parent: { path: Buffer; ok: boolean } | null = null;
      for (const p of inOrder) {
        if (p.change === 'gone' || p.path.length === 0 || this.pending.get(keyOf(p.path)) !== p) continue;
        const above = parentOf(p.path) as Buffer;
        if (!parent?.path.equals(above)) parent = { path: above, ok: isDirectory(above) };
        if (parent.ok) continue;
        again(above);
        again(p.path);
        this.#keepOld(p);
        parent = null;
      }
      for (const p of inOrder.reverse()) {
        if (!p.base || kindOf(p.base.record) !== Kind.directory || this.pending.get(keyOf(p.path)) !== p)
          continue;
        if (p.change === 'directory' || p.change === 'identity') continue;
        for (const row of rowsOf(index, p.path, true)) {
          const path = pathOf(row.record);
          if (path.equals(p.path) || this.pending.get(keyOf(path))?.change === 'gone') continue;
          again(p.path);
          again(path);
          this.#drop(keyOf(p.path));
          break;
        }
      }
    }
    return this.takeAgain();
  }

  /** Many items in calls of bearable size, as many at once as the gate lets. */
  async #stageCalls(
    items: StageItem[],
    sizeOfItem: (id: number) => number,
    hashOnly: boolean,
  ): Promise<StageResult[]> {
    const calls: StageItem[][] = [];
    let call: StageItem[] = [];
    let bytes = 0;
    for (const item of items) {
      const size = sizeOfItem(item.id);
      const first = call[0];
      const full = call.length >= STAGE_ITEMS || bytes + size > STAGE_BYTES;
      if (first && (full || size >= LARGE !== sizeOfItem(first.id) >= LARGE)) {
        calls.push(call);
        call = [];
        bytes = 0;
      }
      call.push(item);
      bytes += size;
    }
    if (call.length > 0) calls.push(call);
    const results: StageResult[] = [];
    let failure: unknown;
    const lane = async (): Promise<void> => {
      for (let next = calls.shift(); next && failure === undefined; next = calls.shift()) {
        try {
          this.#o.signal.throwIfAborted();
          const large = sizeOfItem((next[0] as StageItem).id) >= LARGE;
          results.push(...(await this.#stageOne(next, hashOnly, large ? LARGE_RETRIES : undefined)));
        } catch (error) {
          failure ??= error;
        }
      }
    };
    await Promise.all([lane(), lane()]);
    if (failure !== undefined) {
      for (const r of results) if (r.slotKind !== SlotKind.none) this.garbage.push(this.#slotOf(r));
      throw failure;
    }
    return results;
  }

  async #stageOne(items: StageItem[], hashOnly: boolean, retries?: number): Promise<StageResult[]> {
    const { native, root, shadow, jobs } = this.#o;
    const out = await jobs.run(() =>
      native.stage(
        {
          root,
          slots: shadow?.slots ?? EMPTY,
          base: hashOnly ? null : (shadow?.data ?? null),
          hashOnly,
          ...(retries === undefined ? {} : { retries }),
        },
        encodeStageItems(items),
      ),
    );
    const results = decodeStageResults(out);
    const slots = new Map(items.map((it) => [it.id, it.slot]));
    for (const r of results)
      if (r.slotKind !== SlotKind.none) this.#slotOfResult.set(r, slots.get(r.id) ?? 0);
    return results;
  }
}
