/**
 * The agent of a storage node: one pool, its volumes in either role, the HTTP API and the WebDAV tree. This file
 * only wires; what is done is in the rooms source, transfer and replica.
 *
 * A configuration that is wrong ends the process (command.ts). A pool that is missing, foreign or in use does not:
 * the agent stays up, not ready, says why, and tries again, so that a disk that is mounted late just works.
 */
import { randomInt } from 'node:crypto';
import { existsSync, readdirSync, statSync } from 'node:fs';
import type { AddressInfo } from 'node:net';
import type { FastifyInstance } from 'fastify';
import { SimpleVolumeError } from '../core/errors.ts';
import { formatGeneration, type Generation, parseGeneration } from '../core/generation.ts';
import { createHttpClient, type HttpClient, type HttpClientOptions } from '../core/http-client.ts';
import {
  type Clock,
  type Condition,
  type Logger,
  type Offer,
  type OfferedPack,
  type PoolSpace,
  type Puller,
  type ServedVolume,
  type SizeStatus,
  type SourceStatus,
  type SyncRequest,
  type VolumeName,
  volumeKey,
} from '../core/parts.ts';
import { AGENT_TLS_NAME } from '../core/tls.ts';
import type { SizeOutcome, WriterLease } from '../fence/types.ts';
import { filterOf } from '../native/filter.ts';
import { native } from '../native/load.ts';
import type { Native, Watcher } from '../native/types.ts';
import { makeLive } from '../replica/live.ts';
import { mountsOf } from '../replica/mounts.ts';
import { ReplicaVolume } from '../replica/replica-volume.ts';
import { Beats } from '../source/beats.ts';
import { Delivery } from '../source/deliver.ts';
import { firstDifference } from '../source/prove.ts';
import { removeShadow } from '../source/seal.ts';
import { SourceVolume } from '../source/source-volume.ts';
import { type OpenStore, openVolumeStore } from '../store/volume-store.ts';
import { createGrants, type Grants } from '../transfer/grant.ts';
import { Offers } from '../transfer/offers.ts';
import { createPuller } from '../transfer/pull.ts';
import { Rate } from '../transfer/rate.ts';
import { findRclone } from '../transfer/rclone-binary.ts';
import { Webdav } from '../transfer/webdav.ts';
import type {
  AgentApi,
  Backup,
  Beat,
  BeatReply,
  FenceApi,
  FullSyncRun,
  Principal,
  Removal,
  VolumeRecord,
  VolumeStatus,
  WatchStart,
} from './api.ts';
import { createAuthenticate } from './auth.ts';
import { bootId, systemClock } from './clock.ts';
import { type AgentConfig, addressUrl } from './config.ts';
import { Fencing } from './fencing.ts';
import { giveBackMemory } from './garbage.ts';
import { GiveBack } from './give-back.ts';
import { createLogger } from './logger.ts';
import { type AgentMetrics, createMetrics } from './metrics.ts';
import { Pool } from './pool.ts';
import { Semaphore } from './semaphore.ts';
import { createServer, createSocketServer, listenOnSocket } from './server.ts';
import { readAuthorities, readTls, TlsRenewal } from './tls.ts';
import { VolumeEntry, type VolumeParts } from './volume-entry.ts';

const POOL_CHECK_MS = 5_000;
const WRITE_PROBE_MS = 10_000;
const STAGE_JOBS = 2;
/** How long a stop waits for a tree that is being deleted; the next start goes on with it. */
const STOP_TRASH_MS = 3_000;

/** What there is only while the pool is usable. */
interface Open {
  pool: Pool;
  watcher: Watcher;
  stores: Map<string, OpenStore>;
  volumes: Map<string, VolumeEntry>;
}

interface Delivering {
  delivery: Delivery;
  detach(): void;
}

export class Agent implements AgentApi {
  readonly #config: AgentConfig;
  readonly #log: Logger;
  readonly #native: Native;
  readonly #clock: Clock;
  readonly #http: HttpClient;
  readonly #grants: Grants;
  readonly #beats: Beats;
  readonly #offers: Offers;
  readonly #puller: Puller;
  readonly #metrics: AgentMetrics;
  readonly #jobs = new Semaphore(STAGE_JOBS);
  readonly #memory: GiveBack;
  readonly #deliveries = new Map<VolumeEntry, Delivering>();
  readonly #watchNumbers = { next: 1 };
  /**
   * Clocks that this process hands out are shifted by a number of its own, so that an echo of an earlier process or
   * boot, whose clock means nothing any more, is known by being out of range.
   */
  readonly #clockShift = randomInt(1_000_000_000, 100_000_000_000_000);
  readonly #startedAt: number;
  readonly #fencing: Fencing;
  #socket: FastifyInstance | null = null;
  #webdav: Webdav | null = null;
  #api: FastifyInstance | null = null;
  #open: Open | null = null;
  #opening = true;
  #problem: string | null = 'the pool is not open yet';
  #rclone: string | null = null;
  #rcloneProblem: string | null = null;
  #writable: { at: number; problem: string | null } = { at: -Infinity, problem: null };
  #poolTimer: { cancel(): void } | null = null;
  #url = '';
  #webdavUrl = '';
  #stopped = false;
  #renewal: TlsRenewal | null = null;
  #trash: Promise<void> = Promise.resolve();
  /** what csi-node said last about the limits of what is published */
  #sizes = new Map<string, SizeOutcome>();

  private constructor(config: AgentConfig, version: string) {
    this.#config = config;
    this.#log = createLogger(config.logLevel, config.node);
    this.#native = native;
    this.#clock = systemClock(native);
    this.#startedAt = this.#clock.boot();
    const tls: HttpClientOptions = {
      serverName: AGENT_TLS_NAME,
      ...(config.caFile === null ? {} : { ca: readAuthorities(config.caFile) }),
    };
    this.#http = createHttpClient(tls);
    this.#grants = createGrants(config.token);
    this.#metrics = createMetrics(version);
    this.#beats = new Beats({
      http: this.#http,
      clock: this.#clock,
      log: this.#log,
      node: config.node,
      bootId: bootId(),
      intervalMs: config.beatMs,
      settle: async () => this.#open?.watcher.barrier(),
    });
    this.#fencing = new Fencing({
      node: config.node,
      tls,
      leaseMs: config.leaseMs,
      clock: this.#clock,
      log: this.#log,
      peer: (node) => {
        for (const { delivery } of this.#deliveries.values())
          for (const target of delivery.targets) if (target.node === node) return target;
        return null;
      },
    });
    this.#memory = new GiveBack({
      trim: () => giveBackMemory(native),
      busy: () => this.#entries().some((e) => e.source?.busy() ?? false),
    });
    this.#memory.worked(); // so is starting
    this.#offers = new Offers({ native, clock: this.#clock, log: this.#log });
    // One for all volumes: it limits how many rclone processes there are.
    const rate = new Rate(this.#clock, config.pullBytesPerSecond);
    this.#puller = createPuller({
      http: this.#http,
      rclone: () => this.#rclone,
      node: config.node,
      hashFile: native.hashFile,
      caFile: config.caFile,
      limit: config.pulls,
      bufferBytes: config.pullBufferBytes,
      rate: (bytes, signal) => rate.take(bytes, signal),
      onReceived: (bytes) => {
        this.#metrics.pulledBytes.inc(bytes);
        this.#memory.worked();
      },
    });
  }

  /** Listens, opens the pool, takes the volumes up where they were. Rejects when an address cannot be had. */
  static async start(config: AgentConfig, version = native.version()): Promise<Agent> {
    const agent = new Agent(config, version);
    await agent.#listen();
    agent.#log.info(
      { http: agent.#url, webdav: agent.#webdavUrl, pool: config.poolPath, version },
      'agent listens',
    );
    await agent.#lookForRclone();
    await agent.#checkPool();
    agent.#fencing.start();
    return agent;
  }

  get url(): string {
    return this.#url;
  }
  get webdavUrl(): string {
    return this.#webdavUrl;
  }

  async #listen(): Promise<void> {
    const { http, webdav, advertise, advertiseWebdav, advertiseHost, browseAuth, token } = this.#config;
    const authenticate = createAuthenticate(token, (text) => this.#grants.verify(text));
    const { tls: files } = this.#config;
    const tls = files && readTls(files);
    const scheme = tls ? 'https' : 'http';
    this.#api = createServer(this, authenticate, this.#log, tls);
    await this.#api.listen({ host: http.host, port: http.port });
    const real = this.#api.server.address() as AddressInfo;
    this.#url = advertise ?? addressUrl({ host: advertiseHost ?? http.host, port: real.port }, scheme);
    this.#webdav = new Webdav({
      offers: this.#offers,
      volumes: {
        list: () => this.#entries().flatMap((e) => (e.served ? [e.served] : [])),
        get: (name) => this.#open?.volumes.get(volumeKey(name))?.served ?? null,
      },
      authenticate,
      browseAuth,
      tls,
      clock: this.#clock,
      log: this.#log,
      onSent: (bytes) => {
        this.#metrics.servedBytes.inc(bytes);
        this.#memory.worked();
      },
    });
    if (files) this.#renewal = new TlsRenewal(files, [this.#api.server, this.#webdav.server], this.#log);
    if (this.#config.socket !== null) {
      this.#socket = createSocketServer(this, this.#log);
      await listenOnSocket(this.#socket, this.#config.socket);
    }
    const dav = await this.#webdav.listen(webdav.port, webdav.host);
    this.#webdavUrl =
      advertiseWebdav ?? addressUrl({ host: advertiseHost ?? webdav.host, port: dav.port }, scheme);
  }

  async #lookForRclone(): Promise<void> {
    try {
      const found = await findRclone();
      this.#rclone = found.path;
      this.#rcloneProblem = null;
      if (found.warning) this.#log.warn({ rclone: found.path, version: found.version }, found.warning);
    } catch (error) {
      this.#rcloneProblem = (error as Error).message;
    }
  }

  /** Opens the pool, or notices that it is gone; again every few seconds for as long as the agent runs. */
  async #checkPool(): Promise<void> {
    if (this.#stopped) return;
    if (this.#open) {
      const problem = this.#open.pool.problem();
      if (problem) {
        this.#log.error({ problem }, 'the pool is gone: nothing on it is touched until it is back');
        this.#problem = problem;
        await this.#closePool();
      }
    } else {
      try {
        await this.#openPool();
        this.#problem = null;
        this.#log.info({ pool: this.#config.poolPath, volumes: this.#entries().length }, 'pool is open');
      } catch (error) {
        const { message } = error as Error;
        if (message !== this.#problem) this.#log.error({ problem: message }, 'the pool cannot be used');
        this.#problem = message;
      }
    }
    this.#opening = false;
    this.#renewal?.look();
    if (this.#rclone === null) await this.#lookForRclone();
    await this.#memory.look().catch(() => undefined); // nothing depends on it
    if (this.#stopped) return;
    this.#poolTimer = this.#clock.setTimeout(() => {
      this.#checkPool().catch((error: Error) => this.#log.error({ err: error }, 'pool check failed'));
    }, POOL_CHECK_MS);
  }

  async #openPool(): Promise<void> {
    const { poolPath, poolName, node, allowNonEmptyPool, expectPoolId } = this.#config;
    const pool = Pool.open({
      path: poolPath,
      name: poolName,
      node,
      allowNonEmpty: allowNonEmptyPool,
      expectId: expectPoolId,
    });
    const watcher = this.#native.createWatcher(() => this.#wake());
    this.#open = { pool, watcher, stores: new Map(), volumes: new Map() };
    // One volume that cannot be opened concerns itself only.
    for (const name of pool.volumes()) {
      try {
        const entry = this.#entry(name);
        await entry.recover();
        if (entry.removing) await this.#takeAway(entry);
      } catch (error) {
        this.#log.error({ volume: volumeKey(name), err: error as Error }, 'the volume cannot be taken up');
      }
    }
    void this.#emptyTrash();
  }

  async #closePool(): Promise<void> {
    const open = this.#open;
    if (!open) return;
    this.#open = null;
    for (const entry of open.volumes.values()) {
      try {
        await this.#fencing.closed(entry);
        await this.#parts.dropReaders(entry);
        await entry.close();
      } catch (error) {
        this.#log.error(
          { volume: volumeKey(entry), err: error as Error },
          'the volume did not close cleanly',
        );
      }
    }
    await open.watcher.close();
    for (const store of open.stores.values()) {
      await store.settled();
      store.close();
    }
    open.pool.close();
  }

  async stop(reason: string): Promise<void> {
    if (this.#stopped) return;
    this.#stopped = true;
    this.#log.info({ reason }, 'agent stops');
    this.#poolTimer?.cancel();
    await this.#beats.stop();
    await this.#fencing.stop();
    await this.#inTime(this.#trash, STOP_TRASH_MS);
    await this.#closePool();
    await this.#offers.close();
    await this.#webdav?.close();
    await this.#api?.close();
    await this.#socket?.close();
    this.#http.close();
  }

  #wake(): void {
    for (const entry of this.#entries()) entry.source?.wake();
  }

  /** An echo as this node's boot clock; null when this process did not hand it out. */
  #ownClock(echo: number | null): number | null {
    const at = echo === null ? -1 : echo - this.#clockShift;
    return at >= this.#startedAt && at <= this.#clock.boot() ? at : null;
  }

  #entries(): VolumeEntry[] {
    return this.#open ? [...this.#open.volumes.values()] : [];
  }

  #need(): Open {
    if (!this.#open) throw new SimpleVolumeError('NOT_READY', this.#problem ?? 'the pool is not open');
    return this.#open;
  }

  /** The volume's entry, made when it is new (its state folder too, never its live tree). */
  #entry(name: VolumeName): VolumeEntry {
    const open = this.#need();
    const key = volumeKey(name);
    const known = open.volumes.get(key);
    if (known) return known;
    const paths = open.pool.volume(name);
    const store = openVolumeStore(paths.state, name.namespace, name.volume, {
      syncFile: (path) => this.#native.syncFile(path),
    });
    open.stores.set(key, store);
    const entry = new VolumeEntry(name, paths, store, this.#log.child({ volume: key }), this.#parts);
    open.volumes.set(key, entry);
    this.#fencing.opened(name, entry.role, entry.epoch, store);
    return entry;
  }

  #known(name: VolumeName): VolumeEntry {
    const entry = this.#need().volumes.get(volumeKey(name));
    if (!entry)
      throw new SimpleVolumeError(
        'VOLUME_UNKNOWN',
        `no volume ${volumeKey(name)} on node ${this.#config.node}`,
        { node: this.#config.node },
      );
    return entry;
  }

  readonly #parts: VolumeParts = {
    source: (entry) =>
      new SourceVolume({
        name: entry,
        paths: entry.paths,
        store: entry.store,
        native: this.#native,
        watcher: this.#need().watcher,
        watchNumber: this.#watchNumbers.next++,
        clock: this.#clock,
        log: entry.log,
        jobs: this.#jobs,
        auditMs: this.#config.auditMs,
        onCut: (cut) => {
          this.#memory.worked();
          this.#deliveries.get(entry)?.delivery.cut(cut);
        },
        onSealed: (generation, _quiescent, _caughtUp, asOf) =>
          this.#deliveries.get(entry)?.delivery.sealed(generation, asOf),
        onStaged: (bytes) => this.#metrics.stagedBytes.inc(bytes),
      }),
    replica: (entry) =>
      new ReplicaVolume({
        name: entry,
        paths: entry.paths,
        store: entry.store as OpenStore,
        native: this.#native,
        clock: this.#clock,
        log: entry.log,
        bootId: bootId(),
        puller: this.#puller,
        isActive: () => entry.role === 'active',
        countTrees: this.#config.sizeEnforcement === 'auto',
        firstDifference: (policy, signal) =>
          firstDifference(
            { native: this.#native, store: entry.store, root: Buffer.from(entry.paths.live), policy },
            signal,
          ),
        removeShadow: () => removeShadow(this.#native, entry.paths.shadow),
        poolProblem: () => this.#open?.pool.problem() ?? null,
        onPull: (outcome) => {
          this.#metrics.pulls.inc({ outcome });
          this.#memory.worked();
        },
      }),
    startDelivery: (entry, watch) => {
      const { namespace, volume } = entry;
      const source = entry.source as SourceVolume;
      const epoch = watch.epoch as number;
      const delivery = new Delivery(
        {
          http: this.#http,
          clock: this.#clock,
          log: entry.log,
          beats: this.#beats,
          node: this.#config.node,
          grant: (scope) => this.#grants.mint(scope),
          random: Math.random,
        },
        {
          namespace,
          volume,
          epoch,
          url: watch.sourceUrl ?? this.#url,
          webdavUrl: watch.sourceWebdavUrl ?? this.#webdavUrl,
          targets: watch.targets.map((t) => ({ ...t })),
          policy: watch.policy,
        },
      );
      const beat = {
        namespace,
        volume,
        epoch,
        look: (target: (typeof delivery.targets)[number]) => ({
          generation: source.generation(),
          complete: source.complete(),
          asOf: delivery.echoAt(target, source.holdsAsOf()),
        }),
        answer: (
          target: (typeof delivery.targets)[number],
          generation: string | null,
          state: string,
          seen: number,
        ) => delivery.beat(target, generation, state, seen),
      };
      for (const target of delivery.targets) this.#beats.add(target, beat);
      this.#deliveries.set(entry, {
        delivery,
        detach: () => {
          for (const target of delivery.targets) this.#beats.remove(target, beat);
        },
      });
      const generation = source.generation();
      if (generation) delivery.resume(generation);
    },
    stopDelivery: async (entry) => {
      const running = this.#deliveries.get(entry);
      if (!running) return;
      this.#deliveries.delete(entry);
      running.detach();
      running.delivery.stop();
    },
    withTargets: (entry, status) => {
      const delivery = this.#deliveries.get(entry)?.delivery;
      if (!delivery) return status;
      const delivered = delivery.delivered();
      const conditions: Condition[] = delivery.superseded()
        ? [
            ...status.conditions,
            {
              type: 'Superseded',
              message:
                'a replica has seen a newer epoch: this node is no longer the active one of the volume',
              since: this.#clock.now(),
            },
          ]
        : status.conditions;
      return {
        ...status,
        conditions,
        delivered: delivered && formatGeneration(delivered),
        source: delivery.source,
        targets: delivery.status(),
      };
    },
    sizeStatus: (entry) => this.#sizeOf(entry),
    makeLive: (entry, mode) =>
      makeLive(this.#native, entry.paths.live, { mode, counted: this.#config.sizeEnforcement === 'auto' }),
    handedOver: (entry) => {
      const lease = this.#fencing.lease(entry);
      return lease.role === 'active' && lease.epoch === entry.epoch && lease.released;
    },
    roleChanged: (entry, role, epoch) => this.#fencing.changed(entry, role, epoch),
    dropReaders: async (name) => {
      await this.#offers.dropVolume(name);
      await this.#webdav?.dropVolume(name);
    },
  };

  async watchStart(request: WatchStart): Promise<SourceStatus> {
    const { excludePaths } = request.policy;
    try {
      filterOf(this.#native, request.policy);
    } catch (error) {
      const { pattern, reason, message } = error as Error & { pattern?: string; reason?: string };
      const field =
        pattern !== undefined && excludePaths.includes(String(pattern)) ? 'excludePaths' : 'includePaths';
      throw new SimpleVolumeError(
        'PATTERN_INVALID',
        `${field}: ${JSON.stringify(String(pattern ?? ''))} ${reason ?? message}`,
        { field },
      );
    }
    // What is this agent's address now need not be the one after its next start: a pod has another one then, also in
    // the same pod after a restart of the machine. Only what differs is kept.
    const start = {
      ...request,
      sourceUrl: request.sourceUrl === this.#url ? null : request.sourceUrl,
      sourceWebdavUrl: request.sourceWebdavUrl === this.#webdavUrl ? null : request.sourceWebdavUrl,
    };
    return (await this.#entry(start).start(start)) as SourceStatus;
  }

  async watchStop(name: VolumeName, epoch: number | null): Promise<SourceStatus> {
    return (await this.#known(name).stop(epoch)) as SourceStatus;
  }

  watchStatus(name: VolumeName | null): SourceStatus[] {
    const entries = name ? [this.#known(name)] : this.#entries();
    return entries.flatMap((e) => {
      const status = e.role === 'active' && e.source ? [e.status()] : [];
      return status as SourceStatus[];
    });
  }

  async syncBatch(request: SyncRequest): Promise<{ state: string; generation: string | null }> {
    const status = await this.#entry(request).sync({ ...request, echo: this.#ownClock(request.echo) });
    return { state: status.state, generation: status.generation };
  }

  fullSync(request: SyncRequest): Promise<{ id: string; started: boolean; reason?: string }> {
    return this.#entry(request).fullSync({ ...request, echo: this.#ownClock(request.echo) });
  }

  fullSyncStatus(id: string): FullSyncRun | null {
    for (const entry of this.#entries()) {
      const run = entry.replica?.fullSyncRun(id);
      if (run) return run;
    }
    return null;
  }

  async createTransfer(
    request: VolumeName & { epoch: number; node: string; have: Generation | null; full: boolean },
  ): Promise<Offer> {
    const entry = this.#known(request);
    const served: ServedVolume | null = entry.served;
    if (!served)
      throw new SimpleVolumeError('NOTHING_SEALED', `${volumeKey(request)} has no generation on this node`);
    if (request.epoch < entry.epoch)
      throw new SimpleVolumeError(
        'EPOCH_OLD',
        `epoch ${request.epoch} of ${volumeKey(request)} is over: this node has seen epoch ${entry.epoch}`,
        { field: 'epoch' },
      );
    return this.#offers.create(served, `${entry.paths.shadow}/offers`, request);
  }

  transferNeeds(id: string, principal: Principal, ordinals: Uint32Array): Promise<OfferedPack[]> {
    return this.#offers.needs(id, principal, ordinals);
  }

  dropTransfer(id: string, principal: Principal): Promise<void> {
    return this.#offers.drop(id, principal);
  }

  async confirm(
    request: VolumeName & {
      epoch: number;
      node: string;
      generation: Generation;
      state: string;
      problems: Condition[];
    },
  ): Promise<void> {
    const entry = this.#known(request);
    if (request.epoch < entry.epoch)
      throw new SimpleVolumeError(
        'EPOCH_OLD',
        `epoch ${request.epoch} of ${volumeKey(request)} is over: this node has seen epoch ${entry.epoch}`,
        { field: 'epoch' },
      );
    this.#deliveries.get(entry)?.delivery.holds(request.node, request.generation, request.state);
  }

  fencing(): FenceApi {
    this.#need();
    const fencing = this.#fencing;
    const sized = (lease: WriterLease): WriterLease => ({ ...lease, sizeBytes: this.#limitOf(lease) });
    return {
      beat: (request) => fencing.beat(request),
      poll: (request) => fencing.poll(request),
      consent: (request) => fencing.consent(request),
      release: (request) => fencing.release(request),
      report: (request) => {
        this.#sizes = new Map((request.sizes ?? []).map((one) => [volumeKey(one), one]));
        const reply = fencing.report(request);
        return { ...reply, volumes: reply.volumes.map(sized) };
      },
      announce: (request) => sized(fencing.announce(request)),
      lease: (name) => sized(fencing.lease(name)),
    };
  }

  /** What csi-node is to limit a published tree to, bytes; null: nothing. */
  #limitOf({ role, ...name }: WriterLease): number | null {
    const entry = this.#open?.volumes.get(volumeKey(name));
    return role === 'active' && this.#config.sizeEnforcement === 'auto' ? (entry?.bytes ?? null) : null;
  }

  #sizeOf(entry: VolumeEntry): SizeStatus {
    const { bytes } = entry;
    const not = (enforced: false | null, reason: string): SizeStatus => ({ bytes, enforced, reason });
    if (bytes === null) return not(false, 'no size is recorded for it');
    if (this.#config.sizeEnforcement === 'off') return not(false, 'size enforcement is off for this pool');
    const outcome = this.#sizes.get(volumeKey(entry));
    if (!outcome) return not(null, 'no pod of this node has it; the limit is set when one gets it');
    if (!outcome.enforced) return not(false, outcome.reason);
    return outcome.bytes === bytes
      ? { bytes, enforced: true, reason: '' }
      : not(false, `the limit is still ${outcome.bytes} bytes`);
  }

  beat(request: Beat): BeatReply {
    const volumes = request.volumes.flatMap((v) => {
      const entry = this.#open?.volumes.get(volumeKey(v));
      if (!entry || (!entry.source && !entry.replica))
        return [
          { namespace: v.namespace, volume: v.volume, epoch: v.epoch, generation: null, state: 'unknown' },
        ];
      const replica = entry.replica;
      // An older epoch's beats say nothing about this volume any more.
      if (replica && v.generation && v.epoch === entry.epoch)
        replica.beat(parseGeneration(v.generation), v.complete, this.#ownClock(v.echo));
      const status = replica?.status();
      return [
        {
          namespace: v.namespace,
          volume: v.volume,
          epoch: entry.epoch,
          generation: status?.generation ?? null,
          state: status?.state ?? 'active',
        },
      ];
    });
    return { node: this.#config.node, clock: this.#clock.boot() + this.#clockShift, volumes };
  }

  /** What `work` gives, null when it takes longer; it goes on then, and its outcome is in the volume's status. */
  async #inTime<T>(work: Promise<T>, ms: number): Promise<T | null> {
    let timer: { cancel(): void } | null = null;
    const late = new Promise<null>((resolve) => {
      timer = this.#clock.setTimeout(() => resolve(null), ms);
    });
    try {
      return await Promise.race([work, late]);
    } finally {
      (timer as { cancel(): void } | null)?.cancel();
    }
  }

  async prepare(
    request: VolumeName & { epoch: number | null; confirm: number | 'all'; timeoutMs: number },
  ): Promise<{ generation: string; quiescent: boolean; confirmed: string[] }> {
    const entry = this.#known(request);
    if (request.epoch !== null && request.epoch < entry.epoch)
      throw new SimpleVolumeError(
        'EPOCH_OLD',
        `epoch ${request.epoch} of ${volumeKey(request)} is over: this node has seen epoch ${entry.epoch}`,
        { field: 'epoch' },
      );
    const source = entry.role === 'active' ? entry.source : null;
    const delivery = this.#deliveries.get(entry)?.delivery;
    if (!source || !delivery)
      throw new SimpleVolumeError('NOT_ACTIVE', `no watch of ${volumeKey(request)} runs on this node`);
    const end = this.#clock.boot() + request.timeoutMs;
    // 0: seal, and tell who holds it; no replica is waited for
    const atOnce = request.timeoutMs === 0;
    const sealed = atOnce ? await source.flush() : await this.#inTime(source.flush(), request.timeoutMs);
    if (!sealed)
      throw new SimpleVolumeError(
        'TIMEOUT',
        `nothing was sealed within ${request.timeoutMs} ms: ${volumeKey(request)} is ${source.status().state}, which goes on; no replica was waited for`,
      );
    const { generation, quiescent } = sealed;
    const count = request.confirm === 'all' ? delivery.targets.length : request.confirm;
    const left = Math.max(0, end - this.#clock.boot());
    const confirmed = await delivery.waitForHolders(generation, count, left);
    if (!atOnce && confirmed.length < count)
      throw new SimpleVolumeError(
        'TIMEOUT',
        `${confirmed.length} of ${count} replicas confirmed ${formatGeneration(generation)} in time${confirmed.length ? ` (${confirmed.join(', ')})` : ''}`,
      );
    return { generation: formatGeneration(generation), quiescent, confirmed };
  }

  async force(name: VolumeName, epoch: number | null, condition: string): Promise<VolumeStatus> {
    const entry = this.#known(name);
    if (epoch !== null && epoch < entry.epoch)
      throw new SimpleVolumeError(
        'EPOCH_OLD',
        `epoch ${epoch} is over: this node has seen epoch ${entry.epoch}`,
        { field: 'epoch' },
      );
    if (entry.role !== 'active' || !entry.source)
      throw new SimpleVolumeError('NOT_ACTIVE', `no watch of ${volumeKey(name)} runs on this node`);
    await entry.source.force(condition);
    return entry.status();
  }

  volumes(): VolumeStatus[] {
    return this.#entries().flatMap((e) => (e.source || e.replica ? [e.status()] : []));
  }

  async poolSpace(): Promise<PoolSpace | null> {
    return (await this.#open?.pool.space()) ?? null;
  }

  volume(name: VolumeName): VolumeStatus {
    return this.#known(name).status();
  }

  async createVolume(name: VolumeName, bytes: number): Promise<{ created: boolean; bytes: number }> {
    const { pool, volumes } = this.#need();
    if (!volumes.has(volumeKey(name))) {
      // Asked before there is any state of it: a refusal leaves nothing behind.
      const { live } = pool.volume(name);
      if (existsSync(live) && (!statSync(live).isDirectory() || readdirSync(live).length > 0))
        throw new SimpleVolumeError('HELD', `${live} exists and is no empty directory`, { path: live });
      const space = await pool.space();
      if (space && space.freeBytes < bytes)
        throw new SimpleVolumeError(
          'NO_SPACE',
          `${bytes} bytes are asked for, the pool has ${space.freeBytes} free`,
          { node: this.#config.node },
        );
    }
    return this.#entry(name).create(bytes);
  }

  async resizeVolume(name: VolumeName, bytes: number): Promise<{ bytes: number }> {
    return { bytes: await this.#known(name).resize(bytes) };
  }

  record(name: VolumeName): VolumeRecord {
    const { namespace, volume } = name;
    const entry = this.#need().volumes.get(volumeKey(name));
    if (!entry || entry.removing)
      return { namespace, volume, known: false, role: null, epoch: 0, bytes: null, watched: false };
    return {
      namespace,
      volume,
      known: true,
      role: entry.role,
      epoch: entry.epoch,
      bytes: entry.bytes,
      watched: entry.watch !== null,
    };
  }

  async poolState(): Promise<{ space: PoolSpace | null; volumes: number }> {
    const { pool, volumes } = this.#need();
    return { space: await pool.space(), volumes: volumes.size };
  }

  about(): { node: string; pool: string; path: string } {
    const { node, poolName, poolPath } = this.#config;
    return { node, pool: poolName, path: poolPath };
  }

  async removeVolume(removal: Removal): Promise<{ removed: boolean }> {
    const open = this.#need();
    const paths = open.pool.volume(removal);
    const users = (): string[] => [
      ...mountsOf(paths.live),
      ...(this.#fencing.published(removal) ? ['published by csi-node'] : []),
    ];
    const entry = open.volumes.get(volumeKey(removal));
    let removed: boolean;
    if (entry)
      removed = await entry.remove(removal, {
        seen: () => this.#fencing.seen(removal),
        users,
        take: () => this.#takeAway(entry),
      });
    else if (removal.evenActive) {
      const using = users();
      if (using.length > 0)
        throw new SimpleVolumeError('VOLUME_IN_USE', `${volumeKey(removal)} is in use: ${using.join(', ')}`);
      // One that was never replicated has a live tree alone.
      removed = open.pool.discard([
        paths.live,
        paths.shadow,
        paths.incoming,
        ...(removal.backups ? [paths.backups] : []),
      ]);
    } else removed = false;
    if (removed) {
      this.#log.info({ volume: volumeKey(removal), epoch: removal.epoch }, 'the volume was removed');
      void this.#emptyTrash();
    }
    return { removed };
  }

  /** The trees first and the state last: a crash in between is finished at the next start. */
  async #takeAway(entry: VolumeEntry): Promise<void> {
    const open = this.#need();
    const { live, shadow, incoming, backups, state } = entry.paths;
    open.pool.discard([live, shadow, incoming, ...(entry.removing?.backups ? [backups] : [])]);
    const key = volumeKey(entry);
    const store = open.stores.get(key);
    await this.#fencing.closed(entry);
    await store?.settled();
    store?.close();
    open.stores.delete(key);
    open.volumes.delete(key);
    open.pool.discard([state]);
  }

  /** Deletes what was taken away, beside everything else; what cannot be deleted is tried again with the next removal. */
  #emptyTrash(): Promise<void> {
    this.#trash = this.#trash.then(async () => {
      const pool = this.#open?.pool;
      if (!pool || this.#stopped) return;
      try {
        for (const name of pool.discarded())
          if (!this.#stopped) await this.#native.removeTree(Buffer.from(pool.trash), Buffer.from(name));
      } catch (error) {
        this.#log.error({ err: error as Error }, 'what was removed cannot be deleted yet');
      }
    });
    return this.#trash;
  }

  async backups(name: VolumeName): Promise<Backup[]> {
    const { listBackups } = await import('../replica/backups.ts');
    return listBackups(this.#backupsOf(name));
  }

  /** Backups outlive the volume's other data on this node. */
  #backupsOf(name: VolumeName): string {
    const { backups } = this.#need().pool.volume(name);
    return existsSync(backups) ? backups : this.#known(name).paths.backups;
  }

  async removeBackup(name: VolumeName, stamp: string): Promise<void> {
    const { removeBackup } = await import('../replica/backups.ts');
    const entry = this.#need().volumes.get(volumeKey(name));
    const inUse = entry?.store.meta<{ stamp: string }>('aside')?.stamp ?? null;
    await removeBackup(this.#native, this.#backupsOf(name), stamp, inUse);
  }

  async readiness(): Promise<{ ready: boolean; reasons: string[] }> {
    const reasons: string[] = [];
    if (this.#stopped) reasons.push('the agent is stopping');
    if (this.#opening) reasons.push('the agent is starting');
    else if (this.#problem) reasons.push(this.#problem);
    if (this.#open) {
      const now = this.#clock.boot();
      if (now - this.#writable.at > WRITE_PROBE_MS)
        this.#writable = { at: now, problem: await this.#open.pool.writable() };
      if (this.#writable.problem) reasons.push(this.#writable.problem);
      const problem = this.#open?.pool.problem();
      if (problem) reasons.push(problem);
    }
    if (!this.#webdav?.server.listening) reasons.push('the WebDAV tree does not listen');
    if (this.#rclone === null) reasons.push(this.#rcloneProblem ?? 'rclone was not found');
    return { ready: reasons.length === 0, reasons };
  }

  async metrics(): Promise<string> {
    return this.#metrics.render(this.volumes(), (await this.readiness()).ready);
  }
}
