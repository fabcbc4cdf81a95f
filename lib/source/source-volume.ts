/**
 * The active side of one volume: watch, batch, seal, serve. Whatever fails, no change is forgotten: the marks of a
 * batch that was not sealed go back to the watcher, and a start compares the whole tree with the index.
 */
import { readFileSync } from 'node:fs';
import { stat } from 'node:fs/promises';
import { isNoSpace, SimpleVolumeError } from '../core/errors.ts';
import { formatGeneration, type Generation, isAncestor, type Lineage } from '../core/generation.ts';
import { decodeMarks, encodeMarks, type Mark, MarkBit, MarkType } from '../core/lists.ts';
import type {
  Clock,
  Logger,
  ServedGeneration,
  ServedVolume,
  SourceStatus,
  VolumeName,
  VolumePaths,
} from '../core/parts.ts';
import { DEFAULT_POLICY, type VolumePolicy } from '../core/policy.ts';
import { forgetCopies, type VolumeStore } from '../core/store.ts';
import { filterOf } from '../native/filter.ts';
import type { Filter, Native, NativeError, Watcher } from '../native/types.ts';
import { Batch } from './batch.ts';
import { isMassDelete } from './classify.ts';
import { compare } from './collect.ts';
import { Conditions } from './conditions.ts';
import type { Gate } from './gate.ts';
import { keyOf } from './paths.ts';
import { Pins } from './pins.ts';
import { makePlan } from './plan.ts';
import { Proof } from './proof.ts';
import { Restless } from './restless.ts';
import { COPIES, type Copies, Sealer, type ShadowPaths, shadowPaths } from './seal.ts';
import { marksOf, type Rest } from './walk.ts';

const ROUNDS = 8;
/** After the first round of a batch, ms: then the generation is fuzzy. */
const ROUNDS_MS = 1000;
/** Paths that one batch takes in; each costs about 2 KiB of heap from the look to the seal. */
const BATCH_LIMIT = 10_000;
const FIRST_BACKOFF_MS = 250;
const LAST_BACKOFF_MS = 30_000;
/** A held volume is looked at again after this time. */
const HELD_MS = 5_000;
/** Paths that could not be read are tried again after this time. */
const UNREADABLE_MS = 60_000;
/** Between two scans of the tree while some directories have no watch. */
const UNWATCHED_MS = 60_000;
/** Pause after each piece of an audit scan (about 2,000 entries): it is in no hurry. */
const AUDIT_PAUSE_MS = 200;
/** How long open() waits for a seal that is under way. */
const OPEN_WAIT_MS = 10_000;
/** Removed paths that are remembered for differences: never fewer than half of this, per volume. */
const TOMBSTONES = 100_000;

const ROOT = Buffer.alloc(0);
const WHOLE: Mark = { type: MarkType.subtree, bits: 0, path: ROOT };

export interface SourceDeps {
  name: VolumeName;
  paths: VolumePaths;
  store: VolumeStore;
  native: Native;
  watcher: Watcher;
  /** this volume's number in the watcher */
  watchNumber: number;
  clock: Clock;
  log: Logger;
  /** staging of all volumes of the agent goes through this */
  jobs: Gate;
  /** milliseconds between two audit scans; 0: none */
  auditMs?: number;
  batchLimit?: number;
  /** right before the marks of a batch are taken */
  onCut?: (cut: number) => void;
  /**
   * A generation exists. caughtUp: it holds everything that had happened when onCut was last called; asOf: the
   * number of the last cut of which it holds everything (files that would not hold still lag behind).
   */
  onSealed?: (generation: Generation, quiescent: boolean, caughtUp: boolean, asOf: number) => void;
  /** bytes written into slots */
  onStaged?: (bytes: number) => void;
}

class Held extends SimpleVolumeError {
  readonly condition: string;
  readonly paths: Buffer[] | undefined;
  constructor(condition: string, message: string, paths?: Buffer[]) {
    super('HELD', message);
    this.condition = condition;
    this.paths = paths;
  }
}

interface RootIdentity {
  dev: string;
  ino: string;
  /** when it was made, for btrfs subvolumes: their roots all have the same inode number */
  born?: string;
}
/** BTRFS_FIRST_FREE_OBJECTID, linux/btrfs_tree.h */
const SUBVOLUME_INO = 256n;

type State = SourceStatus['state'];

/** CLOCK_MONOTONIC, ms: the watcher's clock. */
const monotonicMs = (): number => Number(process.hrtime.bigint() / 1000n) / 1000;

export class SourceVolume implements ServedVolume {
  readonly namespace: string;
  readonly volume: string;
  readonly #deps: SourceDeps;
  readonly #store: VolumeStore;
  readonly #native: Native;
  readonly #shadow: ShadowPaths;
  readonly #sealer: Sealer;
  readonly #live: Buffer;
  readonly #conditions: Conditions;
  readonly #pins = new Pins();
  readonly #forced = new Set<string>();
  readonly #special = new Map<string, Buffer>();
  readonly #unreadable = new Map<string, Buffer>();
  readonly #restless: Restless;
  readonly #proof: Proof;
  #hot = 0;
  /** the last batch took in as much as it may: this follows at once */
  #rest: Rest | null = null;
  /** boot clock of when it began to be pending */
  #restSince = 0;

  #policy: VolumePolicy = DEFAULT_POLICY;
  #epoch = 0;
  #filter: Filter | null = null;
  #state: State = 'stopped';
  #generation: (Generation & { quiescent: boolean }) | null = null;
  #lineage: Lineage = [];
  #copies: Copies | null = null;
  #unfinished = false;
  #announced: string | null = null;
  #root: RootIdentity | null = null;
  #watching = false;
  #directories = 0;
  #lastBatch: SourceStatus['lastBatch'] = null;

  #abort = new AbortController();
  #tail: Promise<unknown> = Promise.resolve();
  #running = false;
  #sealing: Promise<void> | null = null;
  #timer: { cancel(): void } | null = null;
  #auditTimer: { cancel(): void } | null = null;
  #retryTimer: { cancel(): void } | null = null;
  #audit: Promise<void> | null = null;
  #failures = 0;
  #notBefore = 0;
  #nextSlot = 1;

  constructor(deps: SourceDeps) {
    this.#deps = deps;
    this.namespace = deps.name.namespace;
    this.volume = deps.name.volume;
    this.#store = deps.store;
    this.#native = deps.native;
    this.#shadow = shadowPaths(deps.paths.shadow);
    this.#sealer = new Sealer(deps.native, deps.store, this.#shadow);
    this.#live = Buffer.from(deps.paths.live);
    this.#conditions = new Conditions(() => deps.clock.now());
    this.#restless = new Restless(deps.clock, (paths) => this.#dirty(paths));
    this.#proof = new Proof(() => deps.watcher.state(deps.watchNumber).unwatched === 0);
    this.#load();
  }

  #load(): void {
    const [newest] = this.#store.generations(1);
    this.#generation = newest ? { epoch: newest.epoch, seq: newest.seq, quiescent: newest.quiescent } : null;
    this.#lineage = this.#store.meta<Lineage>('lineage') ?? [];
    this.#copies = this.#store.meta<Copies>(COPIES) ?? null;
    this.#unfinished = this.#sealer.unfinished;
  }

  // ---- life

  /** Finishes what a crash interrupted. Never throws for what can be tried again later. */
  async recover(): Promise<void> {
    this.#load();
    try {
      await this.#redo();
      if (await exists(this.#shadow.slots)) await this.#sealer.clearSlots();
      await this.#sealer.clearRetired(null);
    } catch (error) {
      this.#failed(error);
    }
  }

  async #redo(): Promise<void> {
    if (!this.#unfinished) return;
    await this.#sealer.makeFolders(true);
    await this.#sealer.redo();
    this.#load();
  }

  /**
   * Watches and begins with a comparison of the whole tree. Resolves when all watches are in place.
   * @throws EPOCH_OLD, PATTERN_INVALID
   */
  async start(policy: VolumePolicy, epoch: number): Promise<void> {
    if (this.#filter) await this.stop();
    const seen = this.#store.meta<number>('epoch') ?? 0;
    if (epoch < seen || (this.#generation && epoch < this.#generation.epoch))
      throw new SimpleVolumeError('EPOCH_OLD', `epoch ${epoch} is over: this node has seen epoch ${seen}`, {
        field: 'epoch',
      });
    try {
      this.#filter = filterOf(this.#native, policy);
    } catch (error) {
      if ((error as NativeError).code !== 'PATTERN_INVALID') throw error;
      throw new SimpleVolumeError('PATTERN_INVALID', (error as Error).message, { cause: error });
    }
    this.#abort = new AbortController();
    this.#policy = policy;
    this.#epoch = epoch;
    this.#state = 'starting';
    this.#failures = 0;
    this.#notBefore = 0;
    this.#announced = null;
    this.#proof.begin();
    this.#forced.clear();
    if (seen < epoch) this.#store.setMeta('epoch', epoch);
    // In line with the batches: what happens in other volumes wakes this one too, and a batch would begin the watch again.
    const begun = this.#tail.then(() => this.#begin());
    this.#tail = begun.catch(() => undefined);
    await begun;
    this.#scheduleAudit();
    this.#kick();
  }

  async #begin(): Promise<void> {
    await this.#redo();
    await this.#prepareCopies();
    try {
      await this.#checkRoot();
      this.#state = 'scanning';
    } catch (error) {
      if (!(error instanceof Held)) throw error;
      this.#hold(error);
    }
  }

  /** Ends the watch; waits for the batch that is running. */
  async stop(): Promise<void> {
    this.#abort.abort();
    for (const timer of [this.#timer, this.#auditTimer, this.#retryTimer]) timer?.cancel();
    this.#timer = null;
    this.#auditTimer = null;
    this.#retryTimer = null;
    await this.#tail.catch(() => undefined);
    this.#restless.clear();
    await this.#audit?.catch(() => undefined);
    await this.#dropRest();
    if (this.#watching) {
      this.#watching = false;
      await this.#deps.watcher.remove(this.#deps.watchNumber);
    }
    this.#filter = null;
    this.#state = 'stopped';
  }

  /** Whether the copy that the index speaks of is the one in this shadow; else it is begun anew. */
  async #prepareCopies(): Promise<void> {
    const mode = this.#policy.consistencyMode;
    const have = this.#copies;
    const generation = this.#generation;
    const fits =
      have !== null &&
      have.mode === mode &&
      have.seq === (generation?.seq ?? null) &&
      (have.complete ? generation !== null && have.epoch === generation.epoch : have.epoch === this.#epoch);
    await this.#sealer.makeFolders(mode === 'shadow');
    if (fits) return;
    await this.#native.removeTree(Buffer.from(this.#shadow.home), Buffer.from('current'));
    await this.#sealer.clearRetired(null);
    await this.#sealer.makeFolders(mode === 'shadow');
    const copies: Copies = {
      mode,
      epoch: this.#epoch,
      seq: generation?.seq ?? null,
      complete: false,
      ahead: have?.epoch === this.#epoch && have.ahead,
    };
    const store = this.#store;
    await store.transaction(async (breathe) => {
      await forgetCopies(store, breathe);
      store.setMeta(COPIES, copies);
    });
    this.#copies = copies;
  }

  // ---- the root

  async #identity(): Promise<RootIdentity | null> {
    try {
      const s = await stat(this.#live, { bigint: true });
      if (!s.isDirectory()) return null;
      const root = { dev: String(s.dev), ino: String(s.ino) };
      return s.ino === SUBVOLUME_INO ? { ...root, born: String(s.birthtimeNs) } : root;
    } catch (error) {
      const { code } = error as NodeJS.ErrnoException;
      if (code === 'ENOENT' || code === 'ENOTDIR') return null;
      throw error;
    }
  }

  /** The tree must be the one that it was: another one, or none, is never taken for a tree that was emptied. */
  async #checkRoot(): Promise<void> {
    const { watcher, watchNumber } = this.#deps;
    const now = await this.#identity();
    if (!now)
      throw new Held(
        'RootChanged',
        `the volume's directory ${this.#deps.paths.live} is not there; it is not taken for a deletion`,
      );
    const stored = this.#store.meta<RootIdentity & { epoch: number }>('root');
    const other = this.#root
      ? this.#root.dev !== now.dev || this.#root.ino !== now.ino
      : // Device numbers may change with a reboot.
        stored !== undefined &&
        stored.epoch === this.#epoch &&
        (stored.ino !== now.ino || stored.born !== now.born);
    if (other && !this.#forced.delete('RootChanged'))
      throw new Held(
        'RootChanged',
        `the volume's directory ${this.#deps.paths.live} is another one than before; if it is the right one, lift this condition by force`,
      );
    const lost = this.#watching && watcher.state(watchNumber).rootLost;
    if (this.#watching && !lost && !other) return;
    await this.#dropRest();
    if (this.#watching) {
      this.#watching = false;
      await watcher.remove(watchNumber);
    }
    const { directories, dev, ino } = await watcher.add(watchNumber, this.#live, this.#filter as Filter);
    this.#watching = true;
    this.#directories = directories;
    if (String(dev) !== now.dev || String(ino) !== now.ino) {
      // swapped right now: look again
      const again = await this.#identity();
      if (!again || again.ino !== now.ino || again.dev !== now.dev)
        throw new Held('RootChanged', `the volume's directory ${this.#deps.paths.live} is being replaced`);
    }
    this.#root = now;
    if (!stored || stored.epoch !== this.#epoch || stored.ino !== now.ino || stored.born !== now.born)
      this.#store.setMeta('root', { ...now, epoch: this.#epoch });
    // What happened before the watch: compared with the index, nothing is taken as given.
    watcher.putBack(watchNumber, encodeMarks([WHOLE]));
    this.#release('RootChanged');
    this.#watchBudget();
  }

  #watchBudget(): void {
    const { watcher, watchNumber, auditMs = 0, log } = this.#deps;
    const s = watcher.state(watchNumber);
    if (this.#proof.sighted()) {
      this.#conditions.clear('WatchBudgetExhausted');
      return;
    }
    const ENOSPC = 28;
    const { unwatched } = s;
    const until =
      auditMs > 0 ? `until then the volume is scanned every ${Math.min(auditMs, UNWATCHED_MS) / 1000} s` : '';
    const limit = watchLimit();
    const message =
      s.watchErrno === ENOSPC
        ? `${unwatched} directories of this volume have no watch: all ${limit} of fs.inotify.max_user_watches are used, at least ${limit + unwatched} are needed (sysctl -w fs.inotify.max_user_watches=${roundUp(limit + unwatched)}); ${until}`
        : `${unwatched} directories of this volume cannot be watched (errno ${s.watchErrno}); ${until}`;
    if (!this.#conditions.set('WatchBudgetExhausted', message)) return;
    log.warn({ unwatched, errno: s.watchErrno }, message);
    // the next scan may be far off
    if (this.#auditTimer) {
      this.#auditTimer.cancel();
      this.#scheduleAudit();
    }
  }

  #hold(held: Held): void {
    this.#state = 'held';
    if (this.#conditions.set(held.condition, held.message, held.paths))
      this.#deps.log.warn({ condition: held.condition }, held.message);
    this.#notBefore = this.#deps.clock.boot() + HELD_MS;
  }
  #release(condition: string): void {
    if (this.#conditions.has(condition)) this.#deps.log.info({ condition }, 'condition is over');
    this.#conditions.clear(condition);
  }

  // ---- when a batch begins

  /** These are to be looked at again. */
  #dirty(paths: Iterable<Buffer>, type: number = MarkType.path): void {
    if (!this.#watching) return;
    const marks = [...paths].map((path) => ({ type, bits: MarkBit.content, path }));
    this.#deps.watcher.putBack(this.#deps.watchNumber, encodeMarks(marks));
    this.wake();
  }

  /** Something may be dirty. */
  wake(): void {
    if (!this.#running && this.#filter && !this.#abort.signal.aborted) this.#schedule();
  }

  #schedule(): void {
    this.#timer?.cancel();
    this.#timer = null;
    if (this.#abort.signal.aborted || !this.#filter) return;
    const wait = this.#due();
    if (wait === null) return;
    this.#timer = this.#deps.clock.setTimeout(
      () => {
        this.#timer = null;
        const left = this.#due();
        if (left !== null && left > 0) this.#schedule();
        else this.#kick();
      },
      Math.max(0, Math.ceil(wait)),
    );
  }

  /** Milliseconds until the next batch; null: nothing to do. */
  #due(): number | null {
    const { watcher, watchNumber, clock } = this.#deps;
    const pause = Math.max(0, this.#notBefore - clock.boot());
    if (!this.#watching || this.#unfinished) return pause;
    const s = watcher.state(watchNumber);
    if (s.rootLost) return pause;
    if (this.#rest) return pause;
    if (s.dirty === 0 || s.firstMs === null || s.lastMs === null)
      return this.#state === 'held' ? pause : null;
    const { debounceMs, maxDelayMs } = this.#policy;
    const due = Math.min(s.lastMs + debounceMs, s.firstMs + maxDelayMs) - monotonicMs();
    return Math.max(due, pause);
  }

  #kick(): void {
    void this.#run().catch(() => undefined);
  }

  /**
   * One batch, after the one that is running.
   * @param all large files too that would not hold still: an application that has stopped is to be had whole
   */
  #run(all = false): Promise<void> {
    const work = async (): Promise<void> => {
      if (this.#abort.signal.aborted || !this.#filter) return;
      if (all) this.#restless.recall(Number.POSITIVE_INFINITY);
      this.#running = true;
      this.#timer?.cancel();
      this.#timer = null;
      try {
        await this.#batch();
        this.#failures = 0;
      } catch (error) {
        this.#failed(error);
        throw error;
      } finally {
        this.#running = false;
        this.#schedule();
      }
    };
    const result = this.#tail.then(work, work);
    this.#tail = result.catch(() => undefined);
    return result;
  }

  #failed(error: unknown): void {
    this.#unfinished = this.#sealer.unfinished;
    if (this.#abort.signal.aborted) return;
    if (error instanceof Held) {
      this.#hold(error);
      return;
    }
    const { code, message, errcode } = error as NativeError & { errcode?: number };
    const SQLITE_FULL = 13;
    const full = isNoSpace(error) || errcode === SQLITE_FULL;
    const wait = Math.min(FIRST_BACKOFF_MS * 2 ** this.#failures, LAST_BACKOFF_MS);
    this.#failures++;
    this.#notBefore = this.#deps.clock.boot() + wait;
    this.#conditions.clear(full ? 'BatchFailed' : 'NoSpace');
    this.#conditions.set(
      full ? 'NoSpace' : 'BatchFailed',
      full
        ? 'there is no space left for the shadow copy; the application is not concerned, replication goes on when there is space'
        : `a batch failed and is tried again: ${message}`,
    );
    if (this.#failures === 1 || this.#failures % 20 === 0)
      this.#deps.log.warn(
        { error: message, code, failures: this.#failures },
        'a batch failed and is tried again',
      );
  }

  // ---- a batch

  async #batch(): Promise<void> {
    const { watcher, watchNumber, clock, jobs } = this.#deps;
    if (this.#unfinished) await this.#redo();
    this.#announce(false);
    await this.#checkRoot();
    const begin = clock.boot();
    const taken: Buffer[] = [];
    const rest = this.#rest;
    const scan = this.#proof.takeScan();
    // if this batch fails, the walk begins anew
    if (rest) taken.push(encodeMarks(marksOf(rest)));
    this.#rest = null;
    const shadow = this.#policy.consistencyMode === 'shadow';
    const batch = new Batch({
      native: this.#native,
      index: this.#store,
      filter: this.#filter as Filter,
      root: this.#live,
      shadow: shadow
        ? { slots: Buffer.from(this.#shadow.slots), data: Buffer.from(this.#shadow.data) }
        : null,
      jobs,
      newSlot: () => this.#nextSlot++,
      limit: this.#deps.batchLimit ?? BATCH_LIMIT,
      rest,
      waits: (key) => this.#restless.waits(key),
      signal: this.#abort.signal,
    });
    const take = (): Mark[] => {
      const marks = watcher.take(watchNumber);
      if (marks.length > 0) taken.push(marks);
      return decodeMarks(marks);
    };
    if (this.#state !== 'held')
      this.#state = this.#generation && this.#copies?.complete ? 'sealing' : 'scanning';
    let sealed = false;
    try {
      const sighted = this.#proof.sighted();
      const cut = this.#cut();
      let marks = take();
      // proven when this batch, or the last one of the walk, is sealed
      if (marks.some((m) => m.type === MarkType.subtree && m.path.length === 0))
        this.#proof.walkBegan({ cut, sighted });
      let left: Mark[] = [];
      let rounds = 0;
      let until = Number.POSITIVE_INFINITY;
      let still = false;
      for (;;) {
        rounds++;
        await batch.round(marks);
        if (rounds === 1) until = clock.boot() + ROUNDS_MS;
        if (batch.limited) break;
        await watcher.barrier();
        marks = [...take(), ...batch.takeAgain()];
        still = marks.length === 0 && watcher.state(watchNumber).pendingDirs === 0;
        if (still) break;
        if (rounds >= ROUNDS || clock.boot() > until) {
          left = marks;
          break;
        }
      }
      left = [...left, ...batch.finish()];
      await this.#checkSame();
      this.#checkRequired(batch);
      this.#checkMassDelete(batch);
      const settled = left.length === 0 && !batch.limited;
      this.#restless.note(batch);
      const stale = batch.busy.size + batch.unreadable.size + batch.leftOut.length + this.#restless.size > 0;
      if (!batch.limited && (still || rounds > 1)) this.#proof.caughtUp(cut, scan, this.#waiting(batch));
      else this.#proof.returnScan(scan);
      await this.#seal(batch, {
        quiescent: still && settled && !stale && !this.#proof.blind,
        caughtUp: !batch.limited && !stale && (still || rounds > 1) && !this.#proof.blind,
        settled,
        begin,
        rounds,
      });
      sealed = true;
      if (!batch.limited) this.#proof.sealed();
      if (!rest) this.#restSince = begin;
      this.#rest = batch.rest;
      this.#report(batch);
      const busy = [...batch.busy]
        .filter(([key]) => !this.#restless.has(key))
        .map(([, path]) => ({ type: MarkType.path, bits: MarkBit.content, path }));
      if (left.length + busy.length > 0) watcher.putBack(watchNumber, encodeMarks([...left, ...busy]));
    } catch (error) {
      if (!sealed && !this.#abort.signal.aborted && this.#watching)
        for (const marks of taken) watcher.putBack(watchNumber, marks);
      if (!sealed) {
        this.#proof.returnScan(scan);
        await batch.close();
      }
      throw error;
    } finally {
      if (!this.#sealer.unfinished && shadow) await this.#sealer.clearSlots().catch(() => undefined);
    }
  }

  /** Ends a walk that was to go on; the caller sees to it that the tree is compared anew. */
  async #dropRest(): Promise<void> {
    const rest = this.#rest;
    this.#rest = null;
    await rest?.walk?.close();
  }

  /** The root once more, right before a seal: an unmount during the batch must not look like deletions. */
  async #checkSame(): Promise<void> {
    const now = await this.#identity();
    if (!now || now.dev !== this.#root?.dev || now.ino !== this.#root.ino)
      throw new Held(
        'RootChanged',
        `the volume's directory ${this.#deps.paths.live} went away or was replaced during a batch`,
      );
  }

  #checkRequired(batch: Batch): void {
    const missing = this.#policy.requiredPaths
      .map((p) => Buffer.from(p.replace(/^\/+|\/+$/g, '')))
      .filter((path) => {
        const p = batch.pending.get(keyOf(path));
        // The walk of a first copy may not have come there yet.
        return p ? p.change === 'gone' : !batch.limited && this.#store.get(path) === undefined;
      });
    if (missing.length === 0) {
      this.#release('RequiredPathMissing');
      return;
    }
    throw new Held(
      'RequiredPathMissing',
      'required paths are missing: the last generation stays until they are back',
      missing,
    );
  }

  #checkMassDelete(batch: Batch): void {
    const gone = [...batch.pending.values()].filter((p) => p.change === 'gone');
    const entries = batch.limited ? batch.walked : this.#store.totals().entries;
    const { held, unexplained } = isMassDelete(gone, entries);
    if (held && !this.#forced.has('MassDelete'))
      throw new Held(
        'MassDelete',
        `${unexplained} of ${entries} entries are gone and nobody was seen deleting them; the last generation stays. If it is right, lift this condition by force`,
      );
    if (!batch.limited) this.#forced.delete('MassDelete');
    this.#release('MassDelete');
  }

  async #seal(
    batch: Batch,
    how: { quiescent: boolean; caughtUp: boolean; settled: boolean; begin: number; rounds: number },
  ): Promise<void> {
    const { clock, log } = this.#deps;
    const store = this.#store;
    const shadow = this.#policy.consistencyMode === 'shadow';
    const before = this.#generation;
    const copies = this.#copies as Copies;
    const previous = before?.seq ?? 0;
    const seq = previous + 1;
    let release = (): void => {};
    // open() waits from here on: who pins a generation must not do so between the plan and its end.
    this.#sealing = new Promise((resolve) => {
      release = resolve;
    });
    try {
      const pinned = this.#pins.any;
      const plan = makePlan(batch.pending.values(), {
        seq,
        shadow,
        pinned,
        lookup: (path) => store.get(path),
        newSlot: () => this.#nextSlot++,
      });
      const changes = plan.changed + plan.removed > 0;
      const complete = copies.complete || (!batch.limited && !this.#lacksCopies(batch));
      const wanted = changes || copies.ahead || before === null || before.epoch !== this.#epoch;
      const generation = complete && wanted ? { epoch: this.#epoch, seq, quiescent: how.quiescent } : null;
      const upgrade = !generation && complete && before && !before.quiescent && how.quiescent && !changes;
      const nothing =
        !generation &&
        !upgrade &&
        plan.ops.length + plan.puts.length + plan.removes.length === 0 &&
        complete === copies.complete;
      if (!nothing) {
        const lineage: Lineage =
          generation && this.#lineage.at(-1)?.[0] !== this.#epoch
            ? [...this.#lineage, [this.#epoch, seq]]
            : this.#lineage;
        const newest = generation ?? before;
        await this.#sealer.seal(plan, {
          generation,
          lineage,
          previous,
          pinned,
          now: clock.now(),
          copies: {
            mode: copies.mode,
            epoch: complete && newest ? newest.epoch : this.#epoch,
            seq: newest?.seq ?? null,
            complete,
            ahead: !generation && (copies.ahead || changes),
          },
          also: () => {
            if (upgrade && before) {
              const [row] = store.generations(1);
              if (row) store.addGeneration({ ...row, quiescent: true });
            }
            if (generation) this.#prune(seq, plan.removed);
          },
        });
        this.#load();
      }
      if (generation || plan.puts.length > 0 || plan.removes.length > 0)
        this.#lastBatch = {
          changed: plan.changed,
          removed: plan.removed,
          moved: plan.moved,
          bytesWritten: batch.bytesWritten,
          ms: Math.round(clock.boot() - how.begin),
          rounds: how.rounds,
        };
      this.#deps.onStaged?.(batch.bytesWritten);
      if (generation)
        log.debug(
          {
            generation: formatGeneration(generation),
            quiescent: how.quiescent,
            changed: plan.changed,
            removed: plan.removed,
            moved: plan.moved,
            rounds: how.rounds,
          },
          'generation sealed',
        );
      this.#announce(how.caughtUp);
      this.#state = this.#copies?.complete ? 'watching' : 'scanning';
      this.#conditions.clear('BatchFailed');
      this.#conditions.clear('NoSpace');
    } finally {
      this.#sealing = null;
      release();
    }
    await this.#sweepRetired();
  }

  /**
   * Whether some row has no copy yet, because its file could not be read: sealed like that, the generation would
   * promise a file that nobody can get; without it, replicas would delete theirs.
   */
  #lacksCopies(batch: Batch): boolean {
    if (this.#policy.consistencyMode === 'live') return false;
    const before = [...this.#unreadable].filter(([key]) => !batch.fine.has(key)).map(([, path]) => path);
    const waiting = [
      ...batch.busy.values(),
      ...[...batch.unreadable.values()].map((u) => u.path),
      ...this.#restless.paths().map(([, path]) => path),
      ...before,
    ];
    return (
      waiting.some((path) => {
        if (batch.pending.has(keyOf(path))) return false;
        const row = this.#store.get(path);
        return row !== undefined && row.copyIno === 0n;
      }) || batch.leftOut.some((path) => this.#store.get(path)?.copyIno === 0n)
    );
  }

  /** Paths whose newest content a batch leaves out. */
  #waiting(batch: Batch): Set<string> {
    const waiting = new Set([
      ...batch.busy.keys(),
      ...this.#restless.keys(),
      ...batch.unreadable.keys(),
      ...batch.leftOut.map((path) => keyOf(path)),
    ]);
    for (const key of this.#unreadable.keys()) if (!batch.fine.has(key)) waiting.add(key);
    return waiting;
  }

  /** All that happens before now will be in the batch, or be found by the scan, that begins now. */
  #cut(): number {
    const cut = this.#proof.cut();
    this.#deps.onCut?.(cut);
    return cut;
  }

  #announce(caughtUp: boolean): void {
    const generation = this.#generation;
    if (!generation || this.#unfinished || generation.epoch !== this.#epoch) return;
    const text = formatGeneration(generation);
    if (this.#announced === text) return;
    this.#announced = text;
    this.#deps.onSealed?.(
      { epoch: generation.epoch, seq: generation.seq },
      generation.quiescent,
      caughtUp,
      this.#proof.asOf,
    );
  }

  /** Bounds what is kept for differences: the older half goes when there is too much of it. */
  #prune(seq: number, removed: number): void {
    const store = this.#store;
    const t = store.meta<{ count: number; seq: number }>('tombstones') ?? { count: 0, seq };
    t.count += removed;
    if (t.count < TOMBSTONES / 2 && seq - t.seq < 5000) {
      store.setMeta('tombstones', t);
      return;
    }
    store.prune(store.meta<number>('tombstonesHalf') ?? 0);
    store.setMeta('tombstonesHalf', seq);
    store.setMeta('tombstones', { count: 0, seq });
  }

  #report(batch: Batch): void {
    for (const key of batch.fine) {
      this.#special.delete(key);
      this.#unreadable.delete(key);
    }
    for (const [key, path] of batch.special) this.#special.set(key, path);
    for (const [key, { path }] of batch.unreadable) this.#unreadable.set(key, path);
    const hot = new Map([...batch.busy, ...this.#restless.paths()]);
    this.#hot = hot.size;
    const c = this.#conditions;
    if (hot.size > 0)
      c.set(
        'Hot',
        'these files change so steadily that no consistent copy could be made; their last version stays',
        hot.values(),
      );
    else c.clear('Hot');
    if (this.#special.size > 0)
      c.set('Unsupported', 'sockets, FIFOs and devices are not replicated', this.#special.values());
    else c.clear('Unsupported');
    if (this.#unreadable.size > 0) {
      c.set('Unreadable', 'these paths cannot be read; their last version stays', this.#unreadable.values());
      this.#retryTimer ??= this.#deps.clock.setTimeout(() => {
        this.#retryTimer = null;
        this.#dirty(this.#unreadable.values(), MarkType.subtree);
      }, UNREADABLE_MS);
    } else c.clear('Unreadable');
    this.#watchBudget();
  }

  async #sweepRetired(): Promise<void> {
    if (this.#sealing || this.#policy.consistencyMode === 'live') return;
    await this.#sealer
      .clearRetired(this.#pins.oldest())
      .catch((error: Error) =>
        this.#deps.log.warn(
          { error: error.message },
          'replaced files could not be removed; tried again after the next batch',
        ),
      );
  }

  // ---- audit

  #scheduleAudit(): void {
    const { auditMs = 0, clock } = this.#deps;
    if (auditMs <= 0) return;
    const wait = this.#conditions.has('WatchBudgetExhausted') ? Math.min(auditMs, UNWATCHED_MS) : auditMs;
    this.#auditTimer = clock.setTimeout(() => {
      this.#auditTimer = null;
      this.#audit = this.audit()
        .then(
          () => undefined,
          (error: Error) => {
            if (!this.#abort.signal.aborted)
              this.#deps.log.warn({ error: error.message }, 'an audit scan failed');
          },
        )
        .finally(() => {
          this.#audit = null;
          if (!this.#abort.signal.aborted) this.#scheduleAudit();
        });
    }, wait);
  }

  /**
   * Compares the tree with the index in no hurry and marks what differs: for what inotify does not tell (writes
   * through mmap, directories without a watch). Counts the differences.
   */
  async audit(pauseMs = AUDIT_PAUSE_MS): Promise<number> {
    const { watcher, watchNumber } = this.#deps;
    const { signal } = this.#abort;
    if (!this.#watching || !this.#filter || this.#state !== 'watching') return 0;
    await watcher.retry();
    this.#watchBudget();
    const scan = { cut: this.#cut(), sighted: this.#proof.sighted() };
    let found = 0;
    let marks: Mark[] = [];
    const give = (): void => {
      if (marks.length === 0 || !this.#watching) return;
      watcher.putBack(watchNumber, encodeMarks(marks));
      marks = [];
      this.wake();
    };
    const differences = compare({
      native: this.#native,
      index: this.#store,
      filter: this.#filter,
      root: this.#live,
      directory: ROOT,
      deep: true,
      copies: this.#policy.consistencyMode === 'shadow',
      pace: async () => {
        if (pauseMs > 0) await new Promise<void>((resolve) => this.#deps.clock.setTimeout(resolve, pauseMs));
        signal.throwIfAborted();
      },
    });
    for await (const d of differences) {
      const key = keyOf(d.path);
      if (d.what === 'unreadable' && this.#unreadable.has(key)) continue;
      if (d.what === 'special' && this.#special.has(key)) continue;
      found++;
      marks.push({ type: MarkType.path, bits: 0, path: d.path });
      if (marks.length >= 1000) give();
    }
    give();
    if (this.#proof.blind && !signal.aborted) {
      // also when nothing was found: then a batch without marks proves it
      this.#proof.scanEnded(scan);
      this.#kick();
    }
    return found;
  }

  // ---- what others ask

  /**
   * Seals everything that is pending now.
   * @throws HELD, NOT_READY, NOTHING_SEALED
   */
  async flush(): Promise<{ generation: Generation; quiescent: boolean }> {
    const { watcher, watchNumber } = this.#deps;
    if (!this.#filter) throw new SimpleVolumeError('NOT_READY', 'the volume is not watched');
    // Once is enough for all that is pending now, unless it is more than one batch takes; once more for what
    // happened meanwhile, so that an application that has just stopped gives an exact point in time.
    for (let again = 1; ; ) {
      await watcher.barrier();
      await this.#run(true);
      if (!this.#watching || this.#abort.signal.aborted) break;
      if (this.#rest) continue;
      const { dirty } = watcher.state(watchNumber);
      if (dirty === 0 || again-- === 0) break;
    }
    const generation = this.#generation;
    if (!generation || generation.epoch !== this.#epoch)
      throw new SimpleVolumeError('NOTHING_SEALED', 'no generation of this epoch has been sealed yet');
    return { generation: { epoch: generation.epoch, seq: generation.seq }, quiescent: generation.quiescent };
  }

  /** Lifts a held condition for once: MassDelete or RootChanged. */
  async force(condition: string): Promise<void> {
    if (condition !== 'MassDelete' && condition !== 'RootChanged')
      throw new SimpleVolumeError(
        'FIELD_INVALID',
        `condition must be MassDelete or RootChanged, got ${JSON.stringify(condition)}`,
        { field: 'condition' },
      );
    if (!this.#conditions.has(condition))
      throw new SimpleVolumeError('FIELD_INVALID', `the volume is not held by ${condition}`, {
        field: 'condition',
      });
    this.#forced.add(condition);
    this.#deps.log.warn({ condition }, 'condition lifted by force');
    this.#notBefore = 0;
    await this.#run();
  }

  /** Whether a batch is running. */
  busy(): boolean {
    return this.#running;
  }

  /** Whether the newest generation is all there is: nothing marked, nothing being worked on, nothing unreadable. */
  complete(): boolean {
    if (this.#state !== 'watching' || this.#running || !this.#watching || this.#unfinished) return false;
    if (this.#generation?.epoch !== this.#epoch || this.#rest) return false;
    if (!this.#proof.sighted() || this.#proof.blind) return false;
    if (this.#hot > 0 || this.#unreadable.size > 0) return false;
    const s = this.#deps.watcher.state(this.#deps.watchNumber);
    return s.dirty === 0 && s.pendingDirs === 0 && !s.rootLost;
  }

  /**
   * Number of the last cut as of which the newest generation holds everything, whatever happened since; null: not
   * known.
   */
  holdsAsOf(): number | null {
    if (!this.#watching || this.#unfinished || this.#generation?.epoch !== this.#epoch) return null;
    if (!this.#copies?.complete || this.#copies.ahead) return null;
    return this.#proof.heldAsOf;
  }

  status(): SourceStatus {
    const { watcher, watchNumber } = this.#deps;
    const s = this.#watching ? watcher.state(watchNumber) : null;
    const { entries, bytes } = this.#store.totals();
    const pendingMs = [
      ...(s?.firstMs == null ? [] : [monotonicMs() - s.firstMs]),
      ...(this.#rest ? [this.#deps.clock.boot() - this.#restSince] : []),
    ];
    return {
      namespace: this.namespace,
      volume: this.volume,
      role: 'active',
      state: this.#state,
      epoch: this.#epoch,
      generation: this.#generation && formatGeneration(this.#generation),
      quiescent: this.#generation?.quiescent ?? null,
      delivered: null,
      pending: (s?.dirty ?? 0) + (this.#rest ? 1 : 0),
      pendingMs: pendingMs.length > 0 ? Math.max(0, Math.round(Math.max(...pendingMs))) : null,
      entries,
      bytes,
      policy: this.#policy,
      targets: [],
      conditions: this.#conditions.list(),
      watch: {
        directories: s?.watches ?? this.#directories,
        unwatched: s?.unwatched ?? 0,
        overflows: s?.overflows ?? 0,
        events: s?.events ?? 0,
      },
      lastBatch: this.#lastBatch,
    };
  }

  // ---- serving

  epoch(): number {
    return this.#epoch;
  }
  generation(): Generation | null {
    return this.#generation && { epoch: this.#generation.epoch, seq: this.#generation.seq };
  }
  lineage(): Lineage {
    return this.#lineage;
  }
  canDiffFrom(base: Generation): boolean {
    return (
      this.#generation !== null &&
      base.seq >= this.#store.horizon() &&
      isAncestor(base, this.#lineage, this.#generation)
    );
  }

  async open(): Promise<ServedGeneration> {
    const { clock } = this.#deps;
    for (const end = clock.boot() + OPEN_WAIT_MS; this.#sealing; ) {
      let timer: { cancel(): void } | null = null;
      const late = new Promise<void>((resolve) => {
        timer = clock.setTimeout(resolve, Math.max(0, end - clock.boot()));
      });
      await Promise.race([this.#sealing, late]);
      (timer as { cancel(): void } | null)?.cancel();
      if (clock.boot() >= end) break;
    }
    const generation = this.#generation;
    if (!generation) throw new SimpleVolumeError('NOTHING_SEALED', 'no generation has been sealed yet');
    if (this.#sealing || this.#unfinished || !this.#copies?.complete)
      throw new SimpleVolumeError('APPLYING', 'the copy that is served is being brought up to date');
    const live = this.#copies.mode === 'live';
    const index = this.#store.snapshot();
    let open = true;
    const closeIndex = (): void => {
      if (open) index.close();
      open = false;
    };
    const unpin = this.#pins.pin(generation.seq, () => void this.#sweepRetired());
    return {
      generation: { epoch: generation.epoch, seq: generation.seq },
      lineage: this.#lineage,
      quiescent: generation.quiescent,
      index,
      root: live ? this.#live : Buffer.from(this.#shadow.data),
      retired: live ? null : Buffer.from(this.#shadow.retired),
      strict: live,
      runsSince: (path, seq) => index.runsSince(path, seq),
      closeIndex,
      release: () => {
        closeIndex();
        unpin();
      },
    };
  }
}

/** Watches that one user may have (inotify(7)). */
const watchLimit = (): number =>
  Number.parseInt(readFileSync('/proc/sys/fs/inotify/max_user_watches', 'utf8'), 10) || 0;

/** To the next power of two: room for what comes. */
const roundUp = (n: number): number => 2 ** Math.ceil(Math.log2(n));

async function exists(path: string): Promise<boolean> {
  try {
    await stat(path);
    return true;
  } catch (error) {
    if ((error as NodeJS.ErrnoException).code === 'ENOENT') return false;
    throw error;
  }
}
