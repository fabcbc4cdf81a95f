/** One volume on this node: which role it has, and everything that changes the role, one change after the other. */
import { closeSync, fsyncSync, openSync, statSync } from 'node:fs';
import { chmod, mkdir, readdir } from 'node:fs/promises';
import { dirname } from 'node:path';
import { SimpleVolumeError } from '../core/errors.ts';
import { formatGeneration } from '../core/generation.ts';
import type {
  Logger,
  ServedVolume,
  SizeStatus,
  SourceStatus,
  SyncRequest,
  VolumeName,
  VolumePaths,
} from '../core/parts.ts';
import { volumeKey } from '../core/parts.ts';
import type { VolumeStore } from '../core/store.ts';
import { ASIDE, DEMOTED, type Demoted } from '../replica/apply.ts';
import { PROMOTING, type ReplicaVolume } from '../replica/replica-volume.ts';
import { indexedGeneration } from '../source/prove.ts';
import { COPIES } from '../source/seal.ts';
import type { SourceVolume } from '../source/source-volume.ts';
import type { VolumeStatus, WatchStart } from './api.ts';
import { Serial } from './semaphore.ts';

export type Role = 'active' | 'replica';

export interface VolumeParts {
  /** new objects per role; the store stays */
  source(entry: VolumeEntry): SourceVolume;
  replica(entry: VolumeEntry): ReplicaVolume;
  /** targets, grants, addresses of a started watch */
  startDelivery(entry: VolumeEntry, watch: WatchStart): void;
  stopDelivery(entry: VolumeEntry): Promise<void>;
  withTargets(entry: VolumeEntry, status: SourceStatus): SourceStatus;
  sizeStatus(entry: VolumeEntry): SizeStatus;
  /** makes the live tree if it is not there */
  makeLive(entry: VolumeEntry, mode: number): Promise<void>;
  /** the lease of the present epoch was given back: no writer is there, and none comes */
  handedOver(entry: VolumeEntry): boolean;
  /** a role or an epoch was made durable */
  roleChanged(entry: VolumeEntry, role: Role, epoch: number): void;
  /** transfers and browse readings of this volume end */
  dropReaders(name: VolumeName): Promise<void>;
}

/** Meta key of a volume that is on its way out: `{ backups }`, whether those go too. */
const REMOVING = 'removing';

/** Meta key of a volume that was made for a claim: its size. */
const RECORD = 'record';
/** A container may run as any user, and Kubernetes changes owner and mode only where a pod asks for it (fsGroup). */
const LIVE_MODE = 0o777;
/** So the folder above it keeps the machine's other users out. */
const NAMESPACE_MODE = 0o700;

export class VolumeEntry implements VolumeName {
  readonly namespace: string;
  readonly volume: string;
  readonly paths: VolumePaths;
  readonly store: VolumeStore;
  /** names the volume in each of its lines */
  readonly log: Logger;
  readonly #parts: VolumeParts;
  readonly #serial = new Serial();
  #source: SourceVolume | null = null;
  #replica: ReplicaVolume | null = null;
  #gone = false;
  /** the watch that runs, as it was asked for; null: none, whatever the durable record says */
  #running: string | null = null;

  constructor(name: VolumeName, paths: VolumePaths, store: VolumeStore, log: Logger, parts: VolumeParts) {
    this.namespace = name.namespace;
    this.volume = name.volume;
    this.paths = paths;
    this.store = store;
    this.log = log;
    this.#parts = parts;
  }

  get role(): Role {
    return this.store.meta<Role>('role') ?? 'replica';
  }
  /** The started watch, as it was asked for; null: none. */
  get watch(): WatchStart | null {
    return this.store.meta<WatchStart>('watch') ?? null;
  }
  /** Highest epoch seen. */
  get epoch(): number {
    return this.store.meta<number>('epoch') ?? 0;
  }
  /** Its data is on the way out, also after a crash in the middle of it; null: it is not. */
  get removing(): { backups: boolean } | null {
    return this.store.meta<{ backups: boolean }>(REMOVING) ?? null;
  }
  /** Its size as the claim has it, bytes; null: it was not made here for a claim. */
  get bytes(): number | null {
    return this.store.meta<{ bytes: number }>(RECORD)?.bytes ?? null;
  }
  get source(): SourceVolume | null {
    return this.#source;
  }
  get replica(): ReplicaVolume | null {
    return this.#replica;
  }
  get served(): ServedVolume | null {
    return this.role === 'active' ? this.#source : this.#replica;
  }

  status(): VolumeStatus {
    if (this.role === 'active' && this.#source)
      return {
        ...this.#parts.withTargets(this, this.#source.status() as SourceStatus),
        size: this.#parts.sizeStatus(this),
      };
    if (this.#replica) return this.#replica.status();
    throw new SimpleVolumeError('NOT_READY', `the volume ${volumeKey(this)} is not open yet`);
  }

  /** After a start of the agent: unfinished journals are finished, a durable watch goes on. */
  recover(): Promise<void> {
    return this.#serial.run(async () => {
      if (this.removing) return;
      // Made and not begun: what it becomes is the controller's first decision.
      if (this.role === 'replica' && this.epoch === 0 && this.bytes !== null) return;
      if (this.role === 'replica') {
        this.#replica = this.#parts.replica(this);
        await this.#replica.recover();
        return;
      }
      this.#source = this.#parts.source(this);
      await this.#source.recover();
      const watch = this.watch;
      if (watch) await this.#begin(watch, watch.epoch ?? this.epoch);
    });
  }

  /** Ends the watch and the sending of what it finds. */
  async #end(source: SourceVolume): Promise<void> {
    this.#running = null;
    await this.#parts.stopDelivery(this);
    await source.stop();
  }

  async #remember(epoch: number, role: Role, watch: WatchStart | null): Promise<void> {
    await this.store.transaction(() => {
      this.store.setMeta('epoch', Math.max(epoch, this.epoch));
      this.store.setMeta('role', role);
      this.store.deleteMeta(PROMOTING);
      // What it stepped down from is what it goes on from.
      if (role === 'active') this.store.deleteMeta(DEMOTED);
      if (watch) this.store.setMeta('watch', watch);
      else this.store.deleteMeta('watch');
    });
    await this.store.durable();
    this.#parts.roleChanged(this, role, this.epoch);
  }

  async #begin(watch: WatchStart, epoch: number): Promise<void> {
    const source = this.#source as SourceVolume;
    try {
      await source.start(watch.policy, epoch);
    } catch (error) {
      await source.stop(); // half begun it would look like one that runs
      throw error;
    }
    this.#parts.startDelivery(this, watch);
    this.#running = JSON.stringify(watch);
  }

  #refuseOlder(epoch: number): void {
    if (epoch < this.epoch)
      throw new SimpleVolumeError(
        'EPOCH_OLD',
        `epoch ${epoch} of ${volumeKey(this)} is over: this node has seen epoch ${this.epoch}`,
        { field: 'epoch' },
      );
  }

  /** Whoever waited in line for a volume that is removed meanwhile. */
  #refuseGone(): void {
    if (this.#gone || this.removing)
      throw new SimpleVolumeError('VOLUME_UNKNOWN', `${volumeKey(this)} is being removed from this node`);
  }

  /**
   * Ends everything here and has the data taken away by `take`, once. From the mark on there is no way back.
   * @param seen the highest epoch that the fence of this node knows
   * @param users where it is in use
   * @throws EPOCH_OLD, VOLUME_ACTIVE, VOLUME_IN_USE
   */
  remove(
    removal: { epoch: number; evenActive: boolean; backups: boolean },
    o: { seen: () => number; users: () => string[]; take: () => Promise<void> },
  ): Promise<boolean> {
    const mayGo = (): void => {
      const seen = Math.max(this.epoch, o.seen());
      if (removal.epoch < seen)
        throw new SimpleVolumeError(
          'EPOCH_OLD',
          `epoch ${removal.epoch} of ${volumeKey(this)} is over: this node has seen epoch ${seen}`,
          { field: 'epoch' },
        );
      if (this.role === 'active' && (!removal.evenActive || this.watch !== null))
        throw new SimpleVolumeError(
          'VOLUME_ACTIVE',
          `this node is the active one of ${volumeKey(this)} in epoch ${this.epoch}${removal.evenActive ? '; stop its watch first' : ''}`,
        );
      if (!removal.evenActive && (this.store.meta(DEMOTED) || this.store.meta(ASIDE)))
        throw new SimpleVolumeError(
          'HELD',
          `${volumeKey(this)} was written to on this node under an older epoch and is not in the backups yet`,
        );
      const users = o.users();
      if (users.length > 0)
        throw new SimpleVolumeError('VOLUME_IN_USE', `${volumeKey(this)} is in use: ${users.join(', ')}`);
    };
    return this.#serial.run(async () => {
      if (this.#gone) return false;
      if (!this.removing) {
        mayGo();
        if (this.#source) {
          await this.#end(this.#source);
          this.#source = null;
        }
        if (this.#replica) {
          await this.#replica.stop();
          this.#replica = null;
        }
        await this.#parts.dropReaders(this);
        mayGo();
        await this.store.transaction(() => this.store.setMeta(REMOVING, { backups: removal.backups }));
        await this.store.durable();
      }
      await o.take();
      this.#gone = true;
      return true;
    });
  }

  /**
   * Makes the live tree of a new volume, empty. This is the only place where one is made that is no copy.
   * @returns whether it was made now, and its size: the one of the first time when it was there
   * @throws HELD when something is there that is not this, VOLUME_UNKNOWN when it was made once and is gone
   */
  create(bytes: number): Promise<{ created: boolean; bytes: number }> {
    return this.#serial.run(async () => {
      this.#refuseGone();
      const { live } = this.paths;
      const there = statSync(live, { throwIfNoEntry: false });
      const known = this.bytes;
      if (known !== null) {
        if (!there?.isDirectory())
          throw new SimpleVolumeError(
            'VOLUME_UNKNOWN',
            `${live} is no directory any more; a volume is made once and never again`,
            { path: live },
          );
        return { created: false, bytes: known };
      }
      if (this.epoch > 0 || this.role === 'active')
        throw new SimpleVolumeError('HELD', `this node has a copy of ${volumeKey(this)} already`);
      // An empty one is what a crash left between the directory and its record.
      if (there && (!there.isDirectory() || (await readdir(live)).length > 0))
        throw new SimpleVolumeError('HELD', `${live} exists and is no empty directory`, { path: live });
      const parent = dirname(live);
      await mkdir(parent, { recursive: true, mode: NAMESPACE_MODE });
      await this.#parts.makeLive(this, LIVE_MODE);
      await chmod(live, LIVE_MODE); // umask(2) took its part
      for (const path of [live, parent, dirname(parent)]) syncDirectory(path);
      await this.#setBytes(bytes);
      this.log.info({ bytes }, 'volume made');
      return { created: true, bytes };
    });
  }

  async #setBytes(bytes: number): Promise<void> {
    await this.store.transaction(() => this.store.setMeta(RECORD, { bytes }));
    await this.store.durable();
  }

  /** Notes a new size; a smaller one changes nothing. */
  resize(bytes: number): Promise<number> {
    return this.#serial.run(async () => {
      this.#refuseGone();
      const known = this.bytes ?? 0;
      if (bytes > known) await this.#setBytes(bytes);
      return Math.max(known, bytes);
    });
  }

  start(request: WatchStart): Promise<VolumeStatus> {
    return this.#serial.run(async () => {
      this.#refuseGone();
      const active = this.role === 'active';
      const epoch = request.epoch ?? (active || this.epoch === 0 ? Math.max(this.epoch, 1) : 0);
      // A promotion that was cut off between the copy's part and this one has noted its epoch, not yet the role.
      const begun = this.store.meta<number>(PROMOTING) === epoch;
      const wasReplica = !active && this.epoch > 0 && !begun;
      if (epoch === 0 || (wasReplica && epoch === this.epoch))
        throw new SimpleVolumeError(
          'FIELD_INVALID',
          `epoch must be higher than ${this.epoch}: this node is a replica of ${volumeKey(this)}, and only a new epoch makes it the active one`,
          { field: 'epoch' },
        );
      this.#refuseOlder(epoch);
      let isDirectory = false;
      try {
        isDirectory = statSync(this.paths.live).isDirectory();
      } catch {
        // told below
      }
      if (!isDirectory)
        throw new SimpleVolumeError(
          'VOLUME_UNKNOWN',
          `${this.paths.live} is no directory: the volume is not on this node, and it is never created by a watch`,
          { path: this.paths.live },
        );
      // The size is no part of the watch: another one starts nothing anew.
      if ((request.bytes ?? 0) > (this.bytes ?? 0)) await this.#setBytes(request.bytes as number);
      const watch: WatchStart = { ...request, epoch, bytes: null };
      if (active && this.#running === JSON.stringify(watch)) return this.status();
      if (this.#replica) {
        await this.#replica.promote(epoch);
        await this.#replica.stop();
        await this.#parts.dropReaders(this);
        this.#replica = null;
      }
      if (this.#source) await this.#end(this.#source);
      await this.#remember(epoch, 'active', watch);
      this.#source ??= this.#parts.source(this);
      await this.#begin(watch, epoch);
      this.log.info({ epoch, targets: watch.targets.length }, 'watch started');
      return this.status();
    });
  }

  stop(epoch: number | null): Promise<VolumeStatus> {
    return this.#serial.run(async () => {
      this.#refuseGone();
      if (epoch !== null) this.#refuseOlder(epoch);
      if (this.role !== 'active' || !this.#source)
        throw new SimpleVolumeError('NOT_ACTIVE', `no watch of ${volumeKey(this)} runs on this node`);
      await this.#end(this.#source);
      await this.#remember(epoch ?? this.epoch, 'active', null);
      this.log.info({}, 'watch stopped');
      return this.status();
    });
  }

  /** The replica that takes this request; an active volume of an older epoch steps down first. */
  #asReplica(request: SyncRequest): Promise<ReplicaVolume> {
    return this.#serial.run(async () => {
      this.#refuseGone();
      this.#refuseOlder(request.epoch);
      if (this.role === 'active') {
        if (request.epoch === this.epoch)
          throw new SimpleVolumeError(
            'VOLUME_ACTIVE',
            `this node is the active one of ${volumeKey(this)} in epoch ${this.epoch}`,
          );
        if (this.#source) {
          await this.#end(this.#source);
          await this.#parts.dropReaders(this);
          this.#source = null;
        }
        // Written to under an older epoch: its tree is kept aside before a restore, whatever generation it is at. Only
        // when nothing could be written any more and all was sealed it may prove to be what the new one began with.
        const generation = this.#parts.handedOver(this) ? indexedGeneration(this.store) : null;
        const demoted: Demoted = {
          epoch: this.epoch,
          generation: generation && formatGeneration(generation),
        };
        this.log.warn(
          {
            epoch: request.epoch,
            was: this.epoch,
            source: request.source.node,
            handedOver: generation !== null,
          },
          'another node is active in a newer epoch: this one steps down',
        );
        await this.store.transaction(() => {
          this.store.setMeta(DEMOTED, demoted);
          this.store.deleteMeta(COPIES); // the shadow does not outlive the role
        });
        await this.#remember(request.epoch, 'replica', null);
      } else if (request.epoch > this.epoch) {
        await this.#remember(request.epoch, 'replica', null);
      }
      if (!this.#replica) {
        await mkdir(this.paths.incoming, { recursive: true, mode: 0o700 });
        this.#replica = this.#parts.replica(this);
        await this.#replica.recover();
      }
      return this.#replica;
    });
  }

  async sync(request: SyncRequest): Promise<VolumeStatus> {
    const replica = await this.#asReplica(request);
    replica.sync(request);
    return replica.status();
  }

  async fullSync(request: SyncRequest): Promise<{ id: string; started: boolean; reason?: string }> {
    return (await this.#asReplica(request)).fullSync(request);
  }

  close(): Promise<void> {
    return this.#serial.run(async () => {
      if (this.#source) await this.#end(this.#source);
      if (this.#replica) await this.#replica.stop();
    });
  }
}

function syncDirectory(path: string): void {
  const fd = openSync(path, 'r');
  try {
    fsyncSync(fd);
  } finally {
    closeSync(fd);
  }
}
