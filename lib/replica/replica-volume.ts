/**
 * The copy of one volume on a node that is not its active one. It is always exactly at one generation, says how far
 * it is behind, and comes forward by itself: the newest request is remembered, one sync runs at a time, a failed
 * one is tried again.
 */
import { randomUUID } from 'node:crypto';
import { isNoSpace, SimpleVolumeError } from '../core/errors.ts';
import {
  compareGenerations,
  formatGeneration,
  type Generation,
  isAncestor,
  type Lineage,
  parseGeneration,
} from '../core/generation.ts';
import type {
  Clock,
  Condition,
  Logger,
  Puller,
  ReplicaStatus,
  ServedGeneration,
  ServedVolume,
  SyncRequest,
  VolumeName,
  VolumePaths,
} from '../core/parts.ts';
import { volumeKey } from '../core/parts.ts';
import type { ReplicaPolicy } from '../core/policy.ts';
import type { VolumeStore } from '../core/store.ts';
import type { Native } from '../native/types.ts';
import { ASIDE, carryOut, clearIncoming, DEMOTED, HELD, type Held, JOURNAL, type Journal } from './apply.ts';
import { type Aside, type Backup, listBackups, moveAside, removeBackup } from './backups.ts';
import type { Verified } from './fetch.ts';
import { Freshness, type SavedFreshness } from './freshness.ts';
import { FullRuns, type FullSyncRun } from './full-runs.ts';
import { takeUp } from './handover.ts';
import { mountsOf as mountsHere } from './mounts.ts';
import { NameCheck, type tryName } from './names.ts';
import { Drift } from './plan.ts';
import { applyDeps, asideDeps, attempt, checkPlace, heldOf, policyKey, type SyncDeps } from './sync.ts';

export interface ReplicaOptions {
  name: VolumeName;
  paths: VolumePaths;
  store: VolumeStore;
  native: Native;
  puller: Puller;
  clock: Clock;
  log: Logger;
  /** of this boot, /proc/sys/kernel/random/boot_id */
  bootId: string;
  /** this node is the active one of the volume */
  isActive?: () => boolean;
  /** mount points at which the tree is in use; default: as this process sees them */
  mountsOf?: (directory: string) => string[];
  /** what is wrong with the pool (its disk is gone, or another one), null: nothing; nothing is written then */
  poolProblem?: () => string | null;
  /** limits how many syncs of an agent run at a time */
  gate?: <T>(work: () => Promise<T>) => Promise<T>;
  limits?: Partial<ReplicaLimits>;
  /** told of each attempt that ended */
  onPull?: (outcome: 'done' | 'failed') => void;
  /** live trees are made so that they can be held to a size, where the file system can; default true */
  countTrees?: boolean;
  /** the first path at which the live tree is not what the index says, contents read; null: nowhere */
  firstDifference(policy: ReplicaPolicy, signal: AbortSignal): Promise<string | null>;
  /** removes what the active role kept beside the tree; what is offered from here as a copy stays */
  removeShadow(): Promise<void>;
  tryName?: typeof tryName;
}

/** Meta key: the epoch in which this copy is becoming the active one, until its role says so. */
export const PROMOTING = 'promoting';

export interface ReplicaLimits {
  /** bytes that a sync leaves free; default 64 MiB */
  floorBytes: number;
  /** milliseconds before a failed sync is tried again: doubled from the first to the second */
  retryMinMs: number;
  retryMaxMs: number;
}

/** Thrown away attempts of a journal before the tree is compared anew with a source. */
const APPLY_ATTEMPTS = 3;

export class ReplicaVolume implements ServedVolume {
  readonly namespace: string;
  readonly volume: string;
  readonly #d: SyncDeps;
  readonly #log: Logger;
  readonly #clock: Clock;
  readonly #store: VolumeStore;
  readonly #isActive: () => boolean;
  readonly #gate: <T>(work: () => Promise<T>) => Promise<T>;
  readonly #limits: ReplicaLimits;
  readonly #onPull: (outcome: 'done' | 'failed') => void;
  readonly #fresh: Freshness;
  readonly #runs = new FullRuns();
  readonly #conditions = new Map<string, Condition>();

  #wanted: SyncRequest | null = null;
  /** highest generation that any request or beat told of */
  #told: Generation | null = null;
  #source: { node: string; url: string } | null = null;
  #fullWanted = false;
  #distrust = false;
  #running: Promise<void> | null = null;
  #abort: AbortController | null = null;
  /** what is being seen to now */
  #current: SyncRequest | null = null;
  #timer: { cancel(): void } | null = null;
  #failures = 0;
  #applyFailures = 0;
  #forward = false;
  #closed: 'no' | 'promoted' | 'stopped' = 'no';
  #promoting = false;
  #state: ReplicaStatus['state'] = 'empty';
  #lastPull: ReplicaStatus['lastPull'] = null;
  #kept: { hash: string; verified: Verified } | null = null;
  #held: Held | null = null;

  constructor(o: ReplicaOptions) {
    this.namespace = o.name.namespace;
    this.volume = o.name.volume;
    this.#limits = { floorBytes: 64 * 1024 * 1024, retryMinMs: 1000, retryMaxMs: 60_000, ...o.limits };
    this.#log = o.log;
    this.#clock = o.clock;
    this.#store = o.store;
    this.#isActive = o.isActive ?? (() => false);
    this.#gate = o.gate ?? ((work) => work());
    this.#onPull = o.onPull ?? (() => undefined);
    this.#fresh = new Freshness(o.clock, o.bootId);
    this.#d = {
      name: { namespace: o.name.namespace, volume: o.name.volume },
      paths: o.paths,
      store: o.store,
      native: o.native,
      puller: o.puller,
      clock: o.clock,
      log: this.#log,
      names: new NameCheck(o.paths.incoming, o.tryName),
      mountsOf: o.mountsOf ?? mountsHere,
      poolProblem: o.poolProblem ?? (() => null),
      floorBytes: this.#limits.floorBytes,
      countTrees: o.countTrees ?? true,
      firstDifference: o.firstDifference,
      removeShadow: o.removeShadow,
    };
  }

  /**
   * After a start: an apply that had begun is finished; what was only pulled is dropped and the replica is at the
   * generation that it had. Does not throw for what a source can heal later; the status tells of it.
   */
  async recover(): Promise<void> {
    this.#fresh.load(this.#store.meta<SavedFreshness>('freshness'));
    this.#reload();
    if (this.#store.meta<Aside>(ASIDE)?.state === 'moving') await moveAside(asideDeps(this.#d));
    try {
      await this.#finishJournal();
      if (!this.#store.meta<Journal>(JOURNAL)) await clearIncoming(this.#d.native, this.#d.paths.incoming);
    } catch (error) {
      this.#failed(error);
    }
    this.#reload();
    this.#settle();
  }

  /** Carries out a journal that is there. True when there was one. */
  async #finishJournal(): Promise<boolean> {
    const journal = this.#store.meta<Journal>(JOURNAL);
    if (!journal) return false;
    checkPlace(this.#d);
    this.#forward = true;
    this.#state = 'applying';
    try {
      const held = await carryOut(applyDeps(this.#d), journal);
      this.#log.info({ generation: held.generation }, 'an unfinished apply was finished');
      this.#applyFailures = 0;
      this.#reload();
      return true;
    } catch (error) {
      this.#applyFailures++;
      throw error;
    } finally {
      this.#forward = false;
    }
  }

  /** A journal that cannot be carried out: the tree is between two generations until everything was compared. */
  async #giveUpJournal(): Promise<void> {
    this.#log.error({}, 'an apply cannot be finished; the tree is compared with the source as a whole');
    await this.#store.transaction(() => {
      this.#store.deleteMeta(JOURNAL);
      this.#store.deleteMeta(HELD);
    });
    await this.#store.durable();
    this.#fresh.forget();
    this.#distrust = true;
    this.#applyFailures = 0;
    this.#reload();
  }

  #reload(): void {
    this.#held = heldOf(this.#store);
    if (this.#held === null) this.#fresh.forget();
    this.#heldConditions();
  }

  #heldConditions(): void {
    const h = this.#held;
    const unsupported: string[] = [];
    if (h && h.refusedCount > 0)
      unsupported.push(
        ...h.refused.map(([path, errno]) => `${Buffer.from(path, 'latin1').toString()} (${errno})`),
      );
    if (h && (h.refusedCount > 0 || h.xattrsFailed > 0))
      this.#set(
        'Unsupported',
        h.refusedCount > 0
          ? `the file system here cannot have ${h.refusedCount} of the paths; without them the generation is not complete`
          : `the file system here does not take the extended attributes of ${h.xattrsFailed} entries; all else is there`,
        { paths: unsupported, count: h.refusedCount || h.xattrsFailed },
      );
    else this.#conditions.delete('Unsupported');
    if (h && h.missing.length > 0)
      this.#set('RequiredPathMissing', `the state has no ${h.missing.join(', ')}`, {
        paths: h.missing.slice(0, 100),
        count: h.missing.length,
      });
    else this.#conditions.delete('RequiredPathMissing');
  }

  #set(type: string, message: string, more: { paths?: string[]; count?: number } = {}): void {
    const since = this.#conditions.get(type)?.since ?? this.#clock.now();
    this.#conditions.set(type, { type, message, since, ...more });
  }

  epoch(): number {
    return this.#store.meta<number>('epoch') ?? 0;
  }

  #check(request: SyncRequest): void {
    if (request.epoch < this.epoch())
      throw new SimpleVolumeError(
        'EPOCH_OLD',
        `epoch ${request.epoch} of ${volumeKey(this)} is over: this node has seen epoch ${this.epoch()}`,
        { field: 'epoch' },
      );
    if (this.#closed !== 'no' || this.#promoting || this.#isActive())
      throw new SimpleVolumeError(
        this.#closed === 'stopped' ? 'NOT_READY' : 'VOLUME_ACTIVE',
        this.#closed === 'stopped'
          ? `the replica of ${volumeKey(this)} is stopped`
          : `this node is the active one of ${volumeKey(this)}, or is becoming it`,
      );
  }

  /**
   * Remembers the request, if it is the newest, and sees to it in the background.
   * @throws EPOCH_OLD, VOLUME_ACTIVE, NOT_READY; VOLUME_IN_USE when the tree is mounted into a pod: then it is kept
   * and tried again by itself
   */
  sync(request: SyncRequest): void {
    this.#check(request);
    this.#remember(request);
    if (request.full) this.#fullWanted = true;
    checkPlaceOr(this.#d, (error) => {
      this.#failed(error);
      this.#later();
      throw error;
    });
    this.#kick();
  }

  /** Compares everything with the source, also when nothing seems to be missing. The outcome can be asked for by the id. */
  fullSync(request: SyncRequest): { id: string; started: boolean; reason?: string } {
    this.#check(request);
    const running = this.#runs.current;
    if (running) return { id: running.id, started: false, reason: 'already-running' };
    checkPlace(this.#d);
    const run = this.#runs.start(randomUUID());
    this.#remember(request);
    this.#fullWanted = true;
    this.#kick();
    return { id: run.id, started: true };
  }

  fullSyncRun(id: string): FullSyncRun | null {
    return this.#runs.get(id);
  }

  #remember(request: SyncRequest): void {
    const old = this.#wanted;
    const older =
      old !== null &&
      (request.epoch < old.epoch ||
        (request.epoch === old.epoch &&
          old.generation !== null &&
          request.generation !== null &&
          compareGenerations(request.generation, old.generation) < 0));
    // a late, older request still wakes the replica, with what it already knows
    if (!older) {
      this.#wanted = request;
      this.#leaveOtherSource(request);
    }
    if (request.generation && (!this.#told || compareGenerations(request.generation, this.#told) > 0))
      this.#told = request.generation;
    this.#source = { node: request.source.node, url: request.source.url };
    if (!this.#running) this.#settle();
  }

  /**
   * What is being pulled from another source, or from the same one under an address that it has no more, is left: who
   * names a new source knows of none that still answers, and a dead one is noticed by its silence only, a minute later.
   */
  #leaveOtherSource(request: SyncRequest): void {
    const now = this.#current;
    if (now === null || this.#forward || this.#abort === null) return;
    if (now.source.url === request.source.url) return;
    this.#log.info(
      { from: now.source.url, to: request.source.url },
      'another source: what is being pulled is left',
    );
    this.#abort.abort();
  }

  #kick(): void {
    this.#timer?.cancel();
    this.#timer = null;
    if (this.#running || this.#closed !== 'no' || this.#promoting) return;
    this.#running = this.#loop().finally(() => {
      this.#running = null;
      this.#settle();
      // something came in between the last look and now
      if (this.#wanted && !this.#timer) this.#kick();
    });
  }

  async #loop(): Promise<void> {
    while (this.#wanted && this.#closed === 'no' && !this.#promoting) {
      const request = this.#wanted;
      const abort = new AbortController();
      this.#abort = abort;
      this.#current = request;
      try {
        await this.#gate(() => this.#once(request, abort.signal));
        this.#failures = 0;
        for (const type of ['PullFailed', 'NoSpace', 'InUse']) this.#conditions.delete(type);
        if (this.#wanted === request) {
          const there = this.#held && parseGeneration(this.#held.generation);
          if (!request.generation || (there && compareGenerations(there, request.generation) >= 0))
            this.#wanted = null;
          else {
            // the offer was older than what was told; the source has more by the next look
            this.#later();
            return;
          }
        }
      } catch (error) {
        if (abort.signal.aborted && (this.#promoting || this.#closed !== 'no')) {
          this.#runs.failed('cancelled', true);
          return;
        }
        if (abort.signal.aborted) continue; // for another source
        this.#onPull('failed');
        this.#failed(error);
        if (this.#wanted === request) {
          this.#later();
          return;
        }
      } finally {
        this.#abort = null;
        this.#current = null;
        this.#forward = false;
      }
    }
  }

  #failed(error: unknown): void {
    this.#failures++;
    const message = error instanceof Error ? error.message : String(error);
    const code = (error as { code?: string }).code;
    this.#log.warn(
      { err: message, code, failures: this.#failures },
      'the replica could not be brought forward',
    );
    for (const type of ['PullFailed', 'NoSpace', 'InUse']) this.#conditions.delete(type);
    if (isNoSpace(error)) this.#set('NoSpace', message);
    else if (code === 'VOLUME_IN_USE') this.#set('InUse', message);
    else this.#set('PullFailed', message);
    this.#runs.failed(message, false);
  }

  #later(): void {
    const { retryMinMs, retryMaxMs } = this.#limits;
    const wait = Math.min(retryMaxMs, retryMinMs * 2 ** Math.min(20, Math.max(0, this.#failures - 1)));
    this.#timer?.cancel();
    this.#timer = this.#clock.setTimeout(() => {
      this.#timer = null;
      this.#kick();
    }, wait);
  }

  /** One sync, from the fence to the confirmation. */
  async #once(request: SyncRequest, signal: AbortSignal): Promise<void> {
    this.#check(request);
    if (request.epoch > this.epoch()) {
      // the fence comes first: what an older writer sends from now on is refused, also after a crash
      await this.#store.transaction(() => this.#store.setMeta('epoch', request.epoch));
      await this.#store.durable();
    }
    checkPlace(this.#d);
    try {
      if (await this.#finishJournal()) this.#settle();
    } catch (error) {
      if (isNoSpace(error) || this.#applyFailures < APPLY_ATTEMPTS) throw error;
      await this.#giveUpJournal();
    }
    if (this.#store.meta(DEMOTED)) {
      await this.#d.removeShadow();
      this.#state = 'verifying';
      if (await takeUp(this.#d, request, signal)) this.#reload();
    }
    const held = heldOf(this.#store);
    const full = this.#fullWanted || this.#distrust;
    const mine = held && parseGeneration(held.generation);
    const current =
      mine !== null &&
      request.generation !== null &&
      compareGenerations(mine, request.generation) === 0 &&
      held?.policy === policyKey(request.policy);
    if (!current || full) {
      const started = this.#clock.boot();
      const run = this.#runs.current;
      const reached = await this.#attempt(request, full, signal);
      this.#lastPull = { ...reached.pull, ms: Math.round(this.#clock.boot() - started) };
      this.#kept = null;
      this.#distrust = false;
      this.#onPull('done');
      if (full) this.#fullWanted = false;
      this.#reload();
      if (run && full) this.#runs.done(reached.held.generation);
      this.#log.info(
        { generation: reached.held.generation, ...this.#lastPull, complete: reached.held.complete },
        'the replica is at a new generation',
      );
      this.#applied(reached.generation, request);
    } else this.#applied(mine, request);
    await this.#confirm(request, signal);
  }

  async #attempt(request: SyncRequest, full: boolean, signal: AbortSignal): ReturnType<typeof attempt> {
    const once = (all: boolean) =>
      attempt(this.#d, {
        request,
        full: all,
        trust: !this.#distrust,
        signal,
        state: (state) => {
          this.#state = state;
        },
        pointOfNoReturn: () => {
          if (this.#promoting || this.#closed !== 'no')
            throw new SimpleVolumeError('CANCELLED', 'the sync was cancelled');
          this.#forward = true;
        },
        kept: this.#kept,
        keep: (hash, verified) => {
          this.#kept = { hash, verified };
        },
      });
    try {
      return await once(full);
    } catch (error) {
      if (!(error instanceof Drift)) throw error;
      this.#log.warn({ err: error.message }, 'the tree is not what the index says: everything is compared');
      this.#distrust = true;
      this.#kept = null;
      return await once(true);
    }
  }

  /** Freshness that a request brings: as of its echo the source had nothing beyond the generation that it names. */
  #applied(generation: Generation, request: SyncRequest): void {
    if (!this.#held?.complete || request.echo === null || !request.generation) return;
    if (compareGenerations(generation, request.generation) < 0) return;
    this.#fresh.advance(request.echo);
    this.#saveFreshness(false);
  }

  async #confirm(request: SyncRequest, signal: AbortSignal): Promise<void> {
    const held = this.#held;
    // a generation that is not complete here is not confirmed; the conditions tell why
    if (!held?.complete) return;
    this.#settle();
    try {
      await this.#d.puller.confirm(
        request.source,
        {
          ...this.#d.name,
          epoch: request.epoch,
          generation: parseGeneration(held.generation),
          state: 'idle',
          problems: [...this.#conditions.values()].filter(
            (c) => c.type === 'Unsupported' || c.type === 'RequiredPathMissing',
          ),
        },
        signal,
      );
    } catch (error) {
      // the answer to the next beat carries the generation too
      this.#log.debug({ err: (error as Error).message }, 'the source did not take the confirmation');
    }
  }

  #settle(): void {
    if (this.#forward && this.#running) return;
    if (!this.#held) this.#state = this.#failures > 0 ? 'error' : 'empty';
    else if (this.#failures > 0) this.#state = 'error';
    else if (!this.#held.complete || this.#isBehind()) this.#state = 'behind';
    else this.#state = 'idle';
  }

  #isBehind(): boolean {
    if (!this.#told || !this.#held) return false;
    return compareGenerations(parseGeneration(this.#held.generation), this.#told) < 0;
  }

  /**
   * The source's steady word. `echo` is a value of this node's own boot clock (ms) that the source had received
   * before it looked at its state, null: none of this boot.
   */
  beat(generation: Generation, complete: boolean, echo: number | null): void {
    if (!this.#told || compareGenerations(generation, this.#told) > 0) this.#told = generation;
    const held = this.#held;
    if (!this.#running) this.#settle();
    if (!complete || echo === null || !held?.complete || this.#forward) return;
    if (compareGenerations(parseGeneration(held.generation), generation) !== 0) return;
    this.#fresh.advance(echo);
    this.#saveFreshness(false);
  }

  #saveFreshness(force: boolean): Promise<void> {
    const save = this.#fresh.toSave(force);
    if (!save) return Promise.resolve();
    return this.#store
      .transaction(() => this.#store.setMeta('freshness', save))
      .catch((error: Error) => this.#log.warn({ err: error.message }, 'freshness could not be kept'));
  }

  /**
   * This node becomes the active one. A pull is cancelled; an apply that has begun is finished first, so the pod
   * finds exactly one generation. Afterwards nothing is written to the tree from here.
   * @returns the generation held, null: none (a volume that nobody has replicated to this node)
   * @throws EPOCH_OLD; APPLYING when the apply does not end within `timeoutMs` or cannot be finished, or the tree is
   * being restored: the node must not become active then
   */
  async promote(epoch: number, timeoutMs = 60_000): Promise<Generation | null> {
    if (epoch < this.epoch())
      throw new SimpleVolumeError(
        'EPOCH_OLD',
        `epoch ${epoch} is over: this node has seen epoch ${this.epoch()}`,
        {
          field: 'epoch',
        },
      );
    this.#promoting = true;
    this.#timer?.cancel();
    this.#timer = null;
    try {
      if (!this.#forward) this.#abort?.abort();
      await this.#waitForRun(timeoutMs);
      try {
        await this.#finishJournal();
      } catch (error) {
        throw new SimpleVolumeError('APPLYING', `an apply cannot be finished: ${(error as Error).message}`, {
          cause: error,
        });
      }
      if (this.#store.meta(ASIDE))
        throw new SimpleVolumeError('APPLYING', 'the tree of this returning node is being restored');
      if (this.#distrust && !this.#held)
        throw new SimpleVolumeError(
          'APPLYING',
          'the tree is between two generations and has to be compared with a source first',
        );
      await this.#store.transaction(() => {
        this.#store.setMeta('epoch', Math.max(epoch, this.epoch()));
        this.#store.setMeta(PROMOTING, epoch);
      });
      await this.#saveFreshness(true);
      await this.#store.durable();
      this.#closed = 'promoted';
      this.#wanted = null;
      await clearIncoming(this.#d.native, this.#d.paths.incoming);
      return this.generation();
    } finally {
      this.#promoting = false;
      if (this.#closed === 'no' && this.#wanted) this.#later();
    }
  }

  async #waitForRun(timeoutMs: number): Promise<void> {
    if (!this.#running) return;
    let timer: { cancel(): void } | null = null;
    const late = new Promise<'late'>((resolve) => {
      timer = this.#clock.setTimeout(() => resolve('late'), timeoutMs);
    });
    const result = await Promise.race([this.#running.then(() => 'done' as const), late]);
    (timer as { cancel(): void } | null)?.cancel();
    if (result === 'late')
      throw new SimpleVolumeError('APPLYING', `the apply of a generation did not end within ${timeoutMs} ms`);
  }

  /** Ends what runs (an apply that has begun is finished) and keeps what has to be kept. */
  async stop(): Promise<void> {
    if (this.#closed === 'no') this.#closed = 'stopped';
    this.#timer?.cancel();
    this.#timer = null;
    if (!this.#forward) this.#abort?.abort();
    await this.#running;
    await this.#saveFreshness(true);
    await this.#store.durable();
  }

  /** A sync runs now. */
  get busy(): boolean {
    return this.#running !== null;
  }

  status(): ReplicaStatus {
    const held = this.#held;
    const age = this.#fresh.ageMs;
    const { entries, bytes } = held ? this.#store.totals() : { entries: 0, bytes: 0 };
    const conditions = [...this.#conditions.values()];
    if (this.#fresh.byWallClock)
      conditions.push({
        type: 'FreshnessByWallClock',
        message:
          'since the restart of this node the age is told by the wall clock; the next beat of the source ends that',
        since: this.#clock.now(),
      });
    return {
      ...this.#d.name,
      role: 'replica',
      state: this.#state,
      epoch: this.epoch(),
      generation: held ? (held.complete ? held.generation : held.lastComplete) : null,
      wanted: this.#told && formatGeneration(this.#told),
      freshAgeMs: held && age !== null ? Math.ceil(age) : null,
      entries,
      bytes,
      conditions,
      lastPull: this.#lastPull,
      source: this.#source,
    };
  }

  backups(): Promise<Backup[]> {
    return listBackups(this.#d.paths.backups);
  }

  removeBackup(stamp: string): Promise<void> {
    return removeBackup(
      this.#d.native,
      this.#d.paths.backups,
      stamp,
      this.#store.meta<Aside>(ASIDE)?.stamp ?? null,
    );
  }

  generation(): Generation | null {
    return this.#held ? parseGeneration(this.#held.generation) : null;
  }

  lineage(): Lineage {
    return this.#held ? (this.#store.meta<Lineage>('lineage') ?? []) : [];
  }

  canDiffFrom(base: Generation): boolean {
    const mine = this.generation();
    return mine !== null && isAncestor(base, this.lineage(), mine) && base.seq >= this.#store.horizon();
  }

  open(): Promise<ServedGeneration> {
    return this.#open();
  }

  async #open(): Promise<ServedGeneration> {
    const held = this.#held;
    const generation = this.generation();
    if (this.#forward || this.#store.meta(JOURNAL))
      throw new SimpleVolumeError('APPLYING', `${volumeKey(this)} is between two generations on this node`);
    if (!held || !generation)
      throw new SimpleVolumeError('NOTHING_SEALED', `this node holds no generation of ${volumeKey(this)}`);
    const index = this.#store.snapshot();
    let closed = false;
    const closeIndex = (): void => {
      if (!closed) index.close();
      closed = true;
    };
    return {
      generation,
      lineage: this.lineage(),
      quiescent: held.quiescent,
      index,
      root: Buffer.from(this.#d.paths.live),
      retired: null,
      // an apply may come while this is read: a file must be exactly the one of the index
      strict: true,
      runsSince: (path, seq) => index.runsSince(path, seq),
      closeIndex,
      release: closeIndex,
    };
  }
}

function checkPlaceOr(d: SyncDeps, otherwise: (error: unknown) => void): void {
  try {
    checkPlace(d);
  } catch (error) {
    otherwise(error);
  }
}
