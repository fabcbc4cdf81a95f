/**
 * A simulated node: its disk, its agent, its csi-node, the containers on it. The agent runs the real code of fencing,
 * delivery, beats and freshness on a model of the data: a tree is the list of writes that it has seen, a generation is
 * one of these lists. csi-node runs the real Freezer on played cgroups. What is durable is in `Disk`; all else goes with
 * the process.
 */
import { type Freezable, Freezer } from '../../csi/freeze/freezer.ts';
import { Fencing } from '../../lib/agent/fencing.ts';
import { SimpleVolumeError } from '../../lib/core/errors.ts';
import {
  compareGenerations,
  formatGeneration,
  type Generation,
  isAncestor,
  type Lineage,
  parseGeneration,
} from '../../lib/core/generation.ts';
import type {
  Condition,
  Logger,
  ReplicaStatus,
  SourceStatus,
  Target,
  TargetStatus,
} from '../../lib/core/parts.ts';
import type { VolumePolicy } from '../../lib/core/policy.ts';
import type { VolumeStore } from '../../lib/core/store.ts';
import { type FenceState, NO_STATE, type Role } from '../../lib/fence/node.ts';
import type { WriterAnnouncement, WriterLease, WriterReport } from '../../lib/fence/types.ts';
import { Freshness, type SavedFreshness } from '../../lib/replica/freshness.ts';
import { Beats } from '../../lib/source/beats.ts';
import { Delivery } from '../../lib/source/deliver.ts';
import type { Net, Server } from './net.ts';
import { type MachineClock, Process, type Random, type Time } from './time.ts';

export const NAME = { namespace: 'default', volume: 'pv-v' } as const;
export const TOKEN = 'a-token-for-the-simulated-agents';

/** A state of the files: the last write, and the state before it. */
export interface Tree {
  /** how many writes */
  n: number;
  parent: Tree | null;
  /** true time of the write */
  at: number;
  /** epoch in which its writer was started */
  epoch: number;
  node: string;
}
export const EMPTY: Tree = { n: 0, parent: null, at: 0, epoch: 0, node: '' };

/** Whether a state has all that another one has. */
export function has(tree: Tree | null, part: Tree): boolean {
  let one = tree;
  while (one !== null && one.n > part.n) one = one.parent;
  return one === part;
}
/** The writes of `tree` that are not in `other`, newest first. */
export function missing(tree: Tree, other: Tree | null): Tree[] {
  const seen = new Set<Tree>();
  for (let one = other; one !== null; one = one.parent) seen.add(one);
  const out: Tree[] = [];
  for (let one: Tree | null = tree; one !== null && !seen.has(one); one = one.parent)
    if (one.n > 0) out.push(one);
  return out;
}

export interface Held {
  generation: Generation;
  tree: Tree;
  lineage: Lineage;
}

interface WatchRequest {
  epoch: number;
  source: { url: string; webdavUrl: string };
  targets: { url: string; node: string; token: string }[];
  policy: VolumePolicy;
}

/** What survives a crash, and a loss of power. */
export interface Disk {
  /** the agent knows the volume */
  known: boolean;
  role: Role;
  epoch: number;
  /** the epoch in which the copy is becoming the active one; 0: none */
  promoting: number;
  fence: FenceState;
  watch: WatchRequest | null;
  /** the live directory; null: there is none */
  live: Tree | null;
  /** the live directory is between two generations: this apply is to be finished */
  journal: Held | null;
  journalSince: number;
  /** written to under an older epoch: not this line's copy any more */
  demoted: boolean;
  /** the tree is being restored; the old one is in the backups */
  aside: boolean;
  /** newest sealed or applied generation */
  held: Held | null;
  heldSince: number;
  freshness: SavedFreshness | undefined;
  backups: Tree[];
  /** csi-node's: pods to which the volume is published, and in which epoch */
  published: Map<string, number>;
}

const emptyDisk = (): Disk => ({
  known: false,
  role: 'replica',
  epoch: 0,
  promoting: 0,
  fence: NO_STATE,
  watch: null,
  live: null,
  journal: null,
  journalSince: 0,
  demoted: false,
  aside: false,
  held: null,
  heldSince: 0,
  freshness: undefined,
  backups: [],
  published: new Map(),
});

export interface Container {
  uid: string;
  epoch: number;
  alive: boolean;
  frozen: boolean;
  /** its mount was replaced by an empty read-only one */
  harmless: boolean;
  /** mode none was in force when another node was promoted: nobody stops it, by choice */
  exempt: boolean;
  startedAt: number;
  killed: boolean;
}
export const writable = (one: Container): boolean => one.alive && !one.frozen && !one.harmless;

export interface NodeDeps {
  time: Time;
  random: Random;
  net: Net;
  leaseMs: number;
  /** chance of an apply that takes many seconds */
  slowApply(): number;
  log: Logger;
  note(text: string): void;
  bad(text: string): void;
  /** a node has become the active one of an epoch */
  activated(node: SimNode, epoch: number): void;
  sealed(node: SimNode, held: Held): void;
  /** a copy that was not wanted any more is gone */
  removed(node: SimNode, tree: Tree): void;
}

/** Everything of a node that goes on while its programs come and go. */
export class SimNode implements Server {
  readonly name: string;
  readonly deps: NodeDeps;
  readonly disk: Disk;
  machine: MachineClock;
  boot = 1;
  up = true;
  agent: Agent | null = null;
  csi: Csi | null = null;
  kubelet: Process | null = null;
  readonly containers = new Map<string, Container>();
  agentSince = 0;

  constructor(name: string, deps: NodeDeps, machine: MachineClock, first: boolean) {
    this.name = name;
    this.deps = deps;
    this.machine = machine;
    this.disk = emptyDisk();
    if (first) this.disk.live = EMPTY;
  }

  get process(): Process | null {
    return this.agent?.process ?? null;
  }
  get url(): string {
    return `http://${this.name}:8080`;
  }

  startAgent(): void {
    if (!this.up || this.agent) return;
    this.agentSince = this.deps.time.now;
    this.agent = new Agent(this);
  }
  stopAgent(): void {
    if (!this.agent) return;
    this.agent.process.alive = false;
    this.agent = null;
  }
  startCsi(): void {
    if (this.up && !this.csi) this.csi = new Csi(this);
  }
  stopCsi(): void {
    if (!this.csi) return;
    this.csi.process.alive = false;
    this.csi = null;
  }

  powerOff(): void {
    this.up = false;
    this.stopAgent();
    this.stopCsi();
    if (this.kubelet) this.kubelet.alive = false;
    this.kubelet = null;
    for (const one of this.containers.values()) one.alive = false;
    this.containers.clear();
    // The mounts are gone with the machine.
    this.disk.published.clear();
  }

  powerOn(): void {
    if (this.up) return;
    this.up = true;
    this.boot++;
    const { time, random } = this.deps;
    // CLOCK_BOOTTIME begins anew.
    this.machine = { ...this.machine, offset: -time.now * this.machine.rate + random.between(1_000, 20_000) };
    this.startAgent();
    this.startCsi();
  }

  handle(method: string, path: string, body: Record<string, unknown>): unknown {
    const { agent } = this;
    if (!agent) throw new Error('nobody listens');
    return agent.answer(method, path, body);
  }

  /** A writer's next write, if it can. */
  write(container: Container): void {
    if (!writable(container) || !this.disk.live) return;
    const { disk, deps } = this;
    if (disk.journal)
      deps.bad(`a writer on ${this.name} finds a tree between two generations (epoch ${container.epoch})`);
    const live = disk.live as Tree;
    disk.live = {
      n: live.n + 1,
      parent: live,
      at: deps.time.now,
      epoch: container.epoch,
      node: this.name,
    };
    this.agent?.source?.dirtied();
  }

  mountedLive(): boolean {
    return [...this.containers.values()].some((one) => this.disk.published.has(one.uid) && !one.harmless);
  }
}

/** One after the other. */
class Serial {
  #tail: Promise<unknown> = Promise.resolve();
  run<T>(work: () => Promise<T>): Promise<T> {
    const next = this.#tail.then(work, work);
    this.#tail = next.catch(() => {});
    return next;
  }
}

type Body = Record<string, unknown>;

export class Agent {
  readonly node: SimNode;
  readonly process: Process;
  readonly fencing: Fencing;
  readonly beats: Beats;
  delivery: Delivery | null = null;
  #detach: () => void = () => {};
  source: Source | null = null;
  replica: Replica | null = null;
  open = false;
  readonly #serial = new Serial();
  readonly #http;
  readonly #shift: number;
  readonly #startedAt: number;
  readonly #runs = new Map<string, { ends: number }>();

  constructor(node: SimNode) {
    this.node = node;
    const { deps } = node;
    this.process = new Process(`agent ${node.name}`, deps.time, node.machine);
    this.#http = deps.net.client(this.process, node.name);
    this.#shift = Math.floor(deps.random.between(1e9, 1e14));
    const { clock } = this.process;
    this.#startedAt = clock.boot();
    this.beats = new Beats({
      http: this.#http,
      clock,
      log: deps.log,
      node: node.name,
      bootId: `${node.name}-${node.boot}`,
      intervalMs: 1000,
    });
    this.fencing = new Fencing({
      node: node.name,
      leaseMs: deps.leaseMs,
      clock,
      log: deps.log,
      peer: (peer) => this.delivery?.targets.find((one) => one.node === peer) ?? null,
      http: this.#http,
      tls: {},
    });
    void this.#begin();
  }

  get random(): Random {
    return this.node.deps.random;
  }
  get http() {
    return this.#http;
  }

  async #begin(): Promise<void> {
    const { disk } = this.node;
    await this.process.sleep(this.random.between(50, 500));
    this.open = true;
    if (disk.known) {
      this.fencing.opened(NAME, disk.role, disk.epoch, this.#store());
      await this.#serial.run(async () => {
        if (disk.role === 'replica') {
          const replica = new Replica(this);
          await replica.recover();
          this.replica = replica;
          return;
        }
        this.source = new Source(this);
        if (disk.watch) this.#beginWatch(disk.watch);
      });
    }
    this.fencing.start();
  }

  /** A write to the disk that is waited for. */
  fsync(): Promise<void> {
    const { random } = this;
    return this.process.sleep(random.chance(0.02) ? random.wait(800) : random.between(1, 15));
  }

  #store(): VolumeStore {
    const { disk } = this.node;
    let wanted: FenceState | undefined;
    const store = {
      meta: () => disk.fence,
      transaction: async (work: () => unknown) => work(),
      setMeta: (_key: string, value: FenceState) => {
        wanted = value;
      },
      durable: async () => {
        const value = wanted;
        await this.fsync();
        if (value) disk.fence = value;
      },
    };
    return store as unknown as VolumeStore;
  }

  #know(): void {
    const { disk } = this.node;
    if (disk.known) return;
    disk.known = true;
    this.fencing.opened(NAME, disk.role, disk.epoch, this.#store());
  }

  async #remember(epoch: number, role: Role, watch: WatchRequest | null): Promise<void> {
    const { disk } = this.node;
    await this.fsync();
    disk.epoch = Math.max(epoch, disk.epoch);
    disk.role = role;
    disk.watch = watch;
    disk.promoting = 0;
    this.fencing.changed(NAME, role, disk.epoch);
  }

  #refuseOlder(epoch: number): void {
    const { disk, name } = this.node;
    if (epoch < disk.epoch)
      throw new SimpleVolumeError('EPOCH_OLD', `epoch ${epoch} is over: ${name} has seen ${disk.epoch}`);
  }
  #known(): void {
    if (!this.node.disk.known) throw new SimpleVolumeError('VOLUME_UNKNOWN', `not on ${this.node.name}`);
  }

  #beginWatch(watch: WatchRequest): void {
    (this.source as Source).start(watch.epoch, watch.policy);
    const delivery = new Delivery(
      {
        http: this.#http,
        clock: this.process.clock,
        log: this.node.deps.log,
        beats: this.beats,
        node: this.node.name,
        grant: () => TOKEN,
        random: () => this.random.next(),
      },
      {
        ...NAME,
        epoch: watch.epoch,
        url: watch.source.url,
        webdavUrl: watch.source.webdavUrl,
        targets: watch.targets.map((one): Target => ({ ...one })),
        policy: watch.policy,
      },
    );
    const source = this.source as Source;
    const beat = {
      ...NAME,
      epoch: watch.epoch,
      look: () => ({ ...source.look(), asOf: null }),
      answer: (target: Target, generation: string | null, state: string, epoch: number) =>
        delivery.beat(target, generation, state, epoch),
    };
    for (const target of delivery.targets) this.beats.add(target, beat);
    this.delivery = delivery;
    this.#detach = () => {
      for (const target of delivery.targets) this.beats.remove(target, beat);
    };
    const { held } = this.node.disk;
    if (held) delivery.resume(held.generation);
  }

  #endWatch(): void {
    this.#detach();
    this.#detach = () => {};
    this.delivery?.stop();
    this.delivery = null;
    this.source?.stop();
  }

  watchStart(body: Body): Promise<unknown> {
    this.#know();
    return this.#serial.run(async () => {
      const { disk, name, deps } = this.node;
      const active = disk.role === 'active';
      const epoch = body.epoch as number;
      if (!active && disk.epoch > 0 && epoch === disk.epoch && disk.promoting !== epoch)
        throw new SimpleVolumeError('FIELD_INVALID', `epoch must be higher than ${disk.epoch}`);
      this.#refuseOlder(epoch);
      if (!disk.live) throw new SimpleVolumeError('VOLUME_UNKNOWN', `the volume is not on ${name}`);
      const { namespace: _, volume: __, epoch: ___, source, targets, debounce, ...rest } = body;
      const text = String(debounce);
      const debounceMs = text.endsWith('ms') ? Number.parseInt(text, 10) : Number.parseFloat(text) * 1000;
      const watch: WatchRequest = {
        epoch,
        source: source as WatchRequest['source'],
        targets: targets as WatchRequest['targets'],
        policy: { ...(rest as unknown as VolumePolicy), debounceMs, maxDelayMs: debounceMs * 5 },
      };
      if (active && this.delivery && JSON.stringify(disk.watch) === JSON.stringify(watch))
        return this.status();
      if (this.replica) {
        await this.replica.promote(epoch);
        this.replica = null;
      }
      this.#endWatch();
      const moved = !active || epoch > disk.epoch;
      await this.#remember(epoch, 'active', watch);
      this.source ??= new Source(this);
      if (moved) deps.activated(this.node, epoch);
      this.#beginWatch(watch);
      return this.status();
    });
  }

  watchStop(body: Body): Promise<unknown> {
    this.#known();
    return this.#serial.run(async () => {
      this.#refuseOlder(body.epoch as number);
      if (this.node.disk.role !== 'active') throw new SimpleVolumeError('NOT_ACTIVE', 'no watch runs here');
      this.#endWatch();
      await this.#remember(body.epoch as number, 'active', null);
      return this.status();
    });
  }

  #asReplica(epoch: number): Promise<Replica> {
    return this.#serial.run(async () => {
      const { disk, deps, name } = this.node;
      this.#refuseOlder(epoch);
      if (disk.role === 'active') {
        if (epoch === disk.epoch) throw new SimpleVolumeError('VOLUME_ACTIVE', `${name} is the active node`);
        deps.note(`${name} steps down for epoch ${epoch}`);
        this.#endWatch();
        this.source = null;
        disk.demoted = true;
        await this.#remember(epoch, 'replica', null);
      } else if (epoch > disk.epoch) await this.#remember(epoch, 'replica', null);
      if (!this.replica) {
        const replica = new Replica(this);
        await replica.recover();
        this.replica = replica;
      }
      return this.replica;
    });
  }

  async syncBatch(body: Body): Promise<unknown> {
    this.#know();
    const replica = await this.#asReplica(body.epoch as number);
    const echo = body.echo === null || body.echo === undefined ? -1 : (body.echo as number) - this.#shift;
    replica.sync({
      epoch: body.epoch as number,
      generation: body.generation ? parseGeneration(body.generation as string) : null,
      source: body.source as { url: string; node: string },
      echo: echo >= this.#startedAt && echo <= this.process.clock.boot() ? echo : null,
    });
    const { state, generation } = replica.status();
    return { state, generation };
  }

  async fullSync(body: Body): Promise<unknown> {
    this.#know();
    await this.#asReplica(body.epoch as number);
    const id = `run-${this.node.name}-${this.#runs.size}`;
    this.#runs.set(id, { ends: this.process.clock.boot() + this.random.between(100, 2000) });
    return { id, started: true };
  }

  /** What a copy can give to another node. */
  served(): Held | null {
    const { disk } = this.node;
    if (disk.role === 'active') return this.source ? disk.held : null;
    if (!this.replica || disk.journal || disk.demoted || disk.aside) return null;
    return disk.held;
  }

  offer(body: Body): Held {
    this.#known();
    this.#refuseOlder(body.epoch as number);
    const held = this.served();
    if (!held) throw new SimpleVolumeError('NOTHING_SEALED', `${this.node.name} has no generation to give`);
    return held;
  }

  beat(body: Body): unknown {
    const { disk, name } = this.node;
    const volumes = (
      body.volumes as { epoch: number; generation: string | null; complete: boolean; echo: number | null }[]
    ).map((v) => {
      if (!disk.known) return { ...NAME, epoch: v.epoch, generation: null, state: 'unknown' };
      const echo = v.echo === null ? -1 : v.echo - this.#shift;
      if (this.replica && v.generation && v.epoch === disk.epoch)
        this.replica.beat(
          parseGeneration(v.generation),
          v.complete,
          echo >= this.#startedAt && echo <= this.process.clock.boot() ? echo : null,
        );
      const status = this.replica?.status();
      return {
        ...NAME,
        epoch: disk.epoch,
        generation: status?.generation ?? null,
        state: status?.state ?? 'active',
      };
    });
    return { node: name, clock: this.process.clock.boot() + this.#shift, volumes };
  }

  /** The copy is not wanted any more. */
  remove(body: Body): Promise<unknown> {
    const { node } = this;
    return this.#serial.run(async () => {
      const { disk, deps } = node;
      if (!disk.known) return { removed: false };
      this.#refuseOlder(body.epoch as number);
      if (this.fencing.seen(NAME) > (body.epoch as number))
        throw new SimpleVolumeError('EPOCH_OLD', 'it has consented to a newer epoch');
      if (disk.role === 'active')
        throw new SimpleVolumeError('VOLUME_ACTIVE', `${node.name} is the active node`);
      if (disk.demoted) throw new SimpleVolumeError('HELD', 'written to under an older epoch');
      if (node.mountedLive() || this.fencing.published(NAME))
        throw new SimpleVolumeError('VOLUME_IN_USE', 'a pod uses it');
      await this.replica?.stop();
      await this.fencing.closed(NAME);
      this.replica = null;
      if (disk.held) deps.removed(node, disk.held.tree);
      Object.assign(disk, { ...emptyDisk(), backups: disk.backups });
      return { removed: true };
    });
  }

  async prepare(body: Body): Promise<unknown> {
    this.#known();
    const { disk } = this.node;
    this.#refuseOlder(body.epoch as number);
    const { source, delivery } = this;
    if (disk.role !== 'active' || !source || !delivery)
      throw new SimpleVolumeError('NOT_ACTIVE', 'no watch runs here');
    const timeoutMs = Number.parseInt(body.timeout as string, 10);
    const { clock } = this.process;
    const end = clock.boot() + timeoutMs;
    const generation = await Promise.race([
      source.flush(),
      this.process.sleep(timeoutMs).then((): Generation | null => null),
    ]);
    if (!generation) throw new SimpleVolumeError('TIMEOUT', 'nothing was sealed in time');
    const count = body.confirm === 'all' ? delivery.targets.length : (body.confirm as number);
    const confirmed = await delivery.waitForHolders(generation, count, Math.max(0, end - clock.boot()));
    if (confirmed.length < count) throw new SimpleVolumeError('TIMEOUT', `${confirmed} confirmed in time`);
    return { generation: formatGeneration(generation), quiescent: true, confirmed };
  }

  status(): SourceStatus | ReplicaStatus {
    if (this.node.disk.role === 'active' && this.source) return this.source.status();
    if (this.replica) return this.replica.status();
    throw new SimpleVolumeError('NOT_READY', 'the volume is not open yet');
  }

  answer(_method: string, path: string, body: Body): unknown {
    if (!this.open) throw new SimpleVolumeError('NOT_READY', 'the pool is not open');
    const run = /^\/replication\/full-sync\/(.+)$/.exec(path)?.[1];
    if (run !== undefined) {
      const found = this.#runs.get(run);
      if (!found) throw new SimpleVolumeError('NOT_FOUND', run);
      return { id: run, state: this.process.clock.boot() >= found.ends ? 'done' : 'running' };
    }
    switch (path) {
      case '/replication/volumes':
        return { volumes: this.source || this.replica ? [this.status()] : [], pool: null };
      case `/replication/volumes/${NAME.namespace}/${NAME.volume}`:
        this.#known();
        return this.status();
      case '/replication/watch/start':
        return this.watchStart(body);
      case '/replication/watch/stop':
        return this.watchStop(body);
      case '/replication/volume/remove':
        return this.remove(body);
      case '/replication/prepare':
        return this.prepare(body);
      case '/replication/sync-batch':
        return this.syncBatch(body);
      case '/replication/full-sync':
        return this.fullSync(body);
      case '/replication/beat':
        return this.beat(body);
      case '/replication/confirm':
        this.#known();
        this.#refuseOlder(body.epoch as number);
        this.delivery?.holds(body.node as string, body.generation as Generation, 'idle');
        return {};
      case '/transfers':
        return this.offer(body);
      case '/transfers/needs':
        return {};
      case '/replication/fence/poll':
        return this.fencing.poll(body as never);
      case '/replication/fence/beat':
        return this.fencing.beat(body as never);
      case '/replication/fence/consent':
        return this.fencing.consent(body as never);
      case '/replication/fence/release':
        return this.fencing.release(body as never);
      default:
        throw new SimpleVolumeError('NOT_FOUND', path);
    }
  }
}

/** The active node's data plane: what is written is sealed after a moment of quiet. */
class Source {
  readonly #agent: Agent;
  #state: SourceStatus['state'] = 'stopped';
  #epoch = 0;
  #policy: VolumePolicy | null = null;
  #cut = 0;
  #run = 0;
  #timer: { cancel(): void } | null = null;
  #sealing: Promise<void> | null = null;
  #scanned = false;
  #scanning: Promise<void> = Promise.resolve();

  constructor(agent: Agent) {
    this.#agent = agent;
  }

  start(epoch: number, policy: VolumePolicy): void {
    const run = ++this.#run;
    this.#epoch = epoch;
    this.#policy = policy;
    this.#state = 'scanning';
    this.#scanned = false;
    const { random, process } = this.#agent;
    this.#scanning = process
      .sleep(random.chance(0.1) ? random.wait(5000) : random.between(20, 400))
      .then(() => {
        if (run !== this.#run) return;
        this.#scanned = true;
        this.#state = 'watching';
        this.#later(0);
      });
  }

  stop(): void {
    this.#run++;
    this.#timer?.cancel();
    this.#timer = null;
    this.#state = 'stopped';
    this.#scanned = false;
  }

  get #dirty(): boolean {
    const { disk } = this.#agent.node;
    return disk.held === null || disk.held.tree !== disk.live || disk.held.generation.epoch !== this.#epoch;
  }

  dirtied(): void {
    if (this.#scanned && !this.#timer) this.#later((this.#policy as VolumePolicy).debounceMs);
  }

  #later(ms: number): void {
    const run = this.#run;
    this.#timer?.cancel();
    this.#timer = this.#agent.process.clock.setTimeout(() => {
      this.#timer = null;
      if (run === this.#run) void this.#seal();
    }, ms);
  }

  /** Everything of before now is in the generation that it ends with. */
  async flush(): Promise<Generation> {
    await this.#scanning;
    await this.#sealing;
    await this.#seal();
    const { held } = this.#agent.node.disk;
    if (!held || !this.#scanned) throw new SimpleVolumeError('NOT_READY', 'the watch was stopped');
    return held.generation;
  }

  #seal(): Promise<void> {
    if (this.#sealing) return this.#sealing.then(() => this.#seal());
    if (!this.#dirty || !this.#scanned) return Promise.resolve();
    const run = this.#run;
    const { node, random, process } = this.#agent;
    const { disk } = node;
    const cut = ++this.#cut;
    this.#agent.delivery?.cut(cut);
    const tree = disk.live as Tree;
    const epoch = this.#epoch;
    this.#state = 'sealing';
    this.#sealing = (async () => {
      await process.sleep(random.chance(0.05) ? random.wait(3000) : random.between(5, 120));
      if (run !== this.#run) return;
      const before = disk.held;
      const generation = { epoch, seq: (before?.generation.seq ?? 0) + 1 };
      const lineage: Lineage = before ? [...before.lineage] : [];
      if (lineage.at(-1)?.[0] !== epoch) lineage.push([epoch, generation.seq]);
      disk.held = { generation, tree, lineage };
      disk.heldSince = node.deps.time.now;
      node.deps.sealed(node, disk.held);
      this.#state = 'watching';
      this.#agent.delivery?.sealed(generation, cut);
      if (this.#dirty) this.#later((this.#policy as VolumePolicy).debounceMs);
    })().finally(() => {
      this.#sealing = null;
    });
    return this.#sealing;
  }

  look(): { generation: Generation | null; complete: boolean } {
    const { held } = this.#agent.node.disk;
    return { generation: held?.generation ?? null, complete: this.#scanned && !this.#dirty };
  }

  status(): SourceStatus {
    const { disk, deps } = this.#agent.node;
    const delivery = this.#agent.delivery;
    const conditions: Condition[] = delivery?.superseded()
      ? [{ type: 'Superseded', message: 'a replica has seen a newer epoch', since: deps.time.now }]
      : [];
    const delivered = delivery?.delivered() ?? null;
    return {
      ...NAME,
      role: 'active',
      state: this.#state,
      epoch: disk.epoch,
      generation: disk.held ? formatGeneration(disk.held.generation) : null,
      quiescent: true,
      delivered: delivered && formatGeneration(delivered),
      pending: this.#dirty ? 1 : 0,
      pendingMs: null,
      entries: 3,
      bytes: 3000,
      policy: this.#policy as VolumePolicy,
      targets: (delivery?.status() ?? []) as TargetStatus[],
      conditions,
      watch: { directories: 1, unwatched: 0, overflows: 0, events: 0 },
      lastBatch: null,
    };
  }
}

interface Sync {
  epoch: number;
  generation: Generation | null;
  source: { url: string; node: string };
  echo: number | null;
}

/** A copy: pulled as a whole, then applied in place, which takes a while and is finished after a crash. */
class Replica {
  readonly #agent: Agent;
  readonly #fresh: Freshness;
  #wanted: Sync | null = null;
  #told: Generation | null = null;
  #source: { node: string; url: string } | null = null;
  #state: ReplicaStatus['state'] = 'empty';
  #failures = 0;
  #problem: 'PullFailed' | 'InUse' | null = null;
  #running: Promise<void> | null = null;
  #promoting = false;
  #closed = false;
  #forward = false;
  #timer: { cancel(): void } | null = null;

  constructor(agent: Agent) {
    this.#agent = agent;
    const { node, process } = agent;
    this.#fresh = new Freshness(process.clock, `${node.name}-${node.boot}`);
    this.#fresh.load(node.disk.freshness);
  }

  get #held(): Held | null {
    const { disk } = this.#agent.node;
    return disk.demoted || disk.aside ? null : disk.held;
  }

  async recover(): Promise<void> {
    await this.#finish();
    if (!this.#held) this.#fresh.forget();
    this.#settle();
  }

  /** The rest of an apply. */
  async #finish(): Promise<void> {
    const { node, random, process } = this.#agent;
    const { disk } = node;
    const { journal } = disk;
    if (!journal) return;
    this.#forward = true;
    this.#state = 'applying';
    const slow = random.chance(node.deps.slowApply());
    await process.sleep(
      slow ? random.between(8000, 40_000) : random.chance(0.08) ? random.wait(3000) : random.between(5, 300),
    );
    if ([...node.containers.values()].some(writable))
      node.deps.bad(`a generation is applied on ${node.name} under a writer`);
    disk.live = journal.tree;
    disk.held = journal;
    disk.heldSince = node.deps.time.now;
    disk.journal = null;
    disk.aside = false;
    this.#forward = false;
  }

  sync(request: Sync): void {
    const { disk, name } = this.#agent.node;
    if (request.epoch < disk.epoch)
      throw new SimpleVolumeError('EPOCH_OLD', `${name} has seen ${disk.epoch}`);
    if (this.#closed || this.#promoting || disk.role === 'active')
      throw new SimpleVolumeError('VOLUME_ACTIVE', `${name} is becoming the active node`);
    const old = this.#wanted;
    if (
      !old ||
      request.epoch > old.epoch ||
      !old.generation ||
      !request.generation ||
      compareGenerations(request.generation, old.generation) >= 0
    )
      this.#wanted = request;
    if (request.generation && (!this.#told || compareGenerations(request.generation, this.#told) > 0))
      this.#told = request.generation;
    this.#source = { node: request.source.node, url: request.source.url };
    try {
      this.#checkPlace();
    } catch (error) {
      this.#failed(error as Error);
      this.#later();
      throw error;
    }
    this.#kick();
  }

  #checkPlace(): void {
    if (this.#agent.node.mountedLive())
      throw new SimpleVolumeError('VOLUME_IN_USE', `the volume is mounted on ${this.#agent.node.name}`);
  }

  #kick(): void {
    this.#timer?.cancel();
    this.#timer = null;
    if (this.#running || this.#closed || this.#promoting) return;
    this.#running = this.#loop().finally(() => {
      this.#running = null;
      this.#settle();
      if (this.#wanted && !this.#timer) this.#kick();
    });
  }

  async #loop(): Promise<void> {
    while (this.#wanted && !this.#closed && !this.#promoting) {
      const request = this.#wanted;
      try {
        await this.#once(request);
        this.#failures = 0;
        this.#problem = null;
        const held = this.#held;
        if (this.#wanted === request) {
          if (!request.generation || (held && compareGenerations(held.generation, request.generation) >= 0))
            this.#wanted = null;
          else {
            this.#later();
            return;
          }
        }
      } catch (error) {
        if (this.#promoting || this.#closed) return;
        this.#failed(error as Error);
        if (this.#wanted === request) {
          this.#later();
          return;
        }
      } finally {
        this.#forward = false;
      }
    }
  }

  #failed(error: Error): void {
    if (!(error instanceof SimpleVolumeError)) throw error;
    this.#failures++;
    this.#problem = error.code === 'VOLUME_IN_USE' ? 'InUse' : 'PullFailed';
  }

  #later(): void {
    const wait = Math.min(60_000, 1000 * 2 ** Math.min(20, Math.max(0, this.#failures - 1)));
    this.#timer?.cancel();
    this.#timer = this.#agent.process.clock.setTimeout(() => {
      this.#timer = null;
      this.#kick();
    }, wait);
  }

  async #once(request: Sync): Promise<void> {
    const { node, random, process, http } = this.#agent;
    const { disk, name, deps } = node;
    this.#checkPlace();
    await this.#finish();
    const mine = this.#held;
    if (!mine || !request.generation || compareGenerations(mine.generation, request.generation) !== 0) {
      this.#state = 'pulling';
      const ask = async <T>(path: string): Promise<T> =>
        (
          await http.call<T>({
            method: 'POST',
            url: `${request.source.url}${path}`,
            token: TOKEN,
            body: { ...NAME, epoch: request.epoch, node: name },
            timeoutMs: 5000,
          })
        ).body;
      const offer = await ask<Held>('/transfers');
      const { generation } = offer;
      if (generation.epoch > request.epoch)
        throw new SimpleVolumeError('MANIFEST_INVALID', 'an offer of a newer epoch');
      let returning = disk.demoted || disk.aside;
      if (mine && !isAncestor(mine.generation, offer.lineage, generation)) {
        if (mine.generation.epoch === generation.epoch)
          throw new SimpleVolumeError('BASE_UNKNOWN', 'the source has lost its own history');
        returning = true;
      }
      if (returning && !disk.aside) {
        this.#checkPlace();
        await this.#agent.fsync();
        if (this.#promoting || this.#closed) throw new SimpleVolumeError('CANCELLED', 'cancelled');
        deps.note(
          `${name} keeps its old tree (${disk.live?.n} writes) in the backups and is restored at ${formatGeneration(generation)}`,
        );
        if (disk.live) disk.backups.push(disk.live);
        disk.aside = true;
        disk.demoted = false;
        disk.held = null;
        disk.live = EMPTY;
        this.#fresh.forget();
      }
      await process.sleep(random.chance(0.1) ? random.wait(4000) : random.between(10, 300));
      await ask('/transfers/needs');
      this.#checkPlace();
      if (this.#promoting || this.#closed) throw new SimpleVolumeError('CANCELLED', 'cancelled');
      this.#forward = true;
      this.#state = 'applying';
      await this.#agent.fsync();
      disk.journal = offer;
      disk.journalSince = deps.time.now;
      await this.#finish();
    }
    const held = this.#held as Held;
    if (
      request.echo !== null &&
      request.generation &&
      compareGenerations(held.generation, request.generation) >= 0
    ) {
      this.#fresh.advance(request.echo);
      this.#save(false);
    }
    this.#settle();
    void http
      .call({
        method: 'POST',
        url: `${request.source.url}/replication/confirm`,
        token: TOKEN,
        body: { ...NAME, epoch: request.epoch, node: name, generation: held.generation },
        timeoutMs: 5000,
      })
      .catch(() => {});
  }

  async stop(): Promise<void> {
    this.#closed = true;
    this.#timer?.cancel();
    await this.#running;
  }

  #save(force: boolean): void {
    const save = this.#fresh.toSave(force);
    if (save) this.#agent.node.disk.freshness = save;
  }

  beat(generation: Generation, complete: boolean, echo: number | null): void {
    if (!this.#told || compareGenerations(generation, this.#told) > 0) this.#told = generation;
    const held = this.#held;
    if (!this.#running) this.#settle();
    if (!complete || echo === null || !held || this.#forward) return;
    if (compareGenerations(held.generation, generation) !== 0) return;
    this.#fresh.advance(echo);
    this.#save(false);
  }

  #settle(): void {
    if (this.#forward && this.#running) return;
    const held = this.#held;
    if (!held) this.#state = this.#failures > 0 ? 'error' : 'empty';
    else if (this.#failures > 0) this.#state = 'error';
    else if (this.#told && compareGenerations(held.generation, this.#told) < 0) this.#state = 'behind';
    else this.#state = 'idle';
  }

  /** An apply that has begun is finished first. */
  async promote(epoch: number): Promise<void> {
    const { disk, name } = this.#agent.node;
    if (epoch < disk.epoch) throw new SimpleVolumeError('EPOCH_OLD', `${name} has seen ${disk.epoch}`);
    this.#promoting = true;
    this.#timer?.cancel();
    this.#timer = null;
    try {
      await this.#running;
      await this.#finish();
      if (disk.aside) throw new SimpleVolumeError('APPLYING', `the tree of ${name} is being restored`);
      await this.#agent.fsync();
      disk.epoch = Math.max(epoch, disk.epoch);
      disk.promoting = epoch;
      this.#save(true);
      this.#closed = true;
    } finally {
      this.#promoting = false;
      if (!this.#closed && this.#wanted) this.#later();
    }
  }

  status(): ReplicaStatus {
    const { disk, deps } = this.#agent.node;
    const held = this.#held;
    const age = this.#fresh.ageMs;
    const conditions: Condition[] =
      this.#problem === null ? [] : [{ type: this.#problem, message: 'as it says', since: deps.time.now }];
    return {
      ...NAME,
      role: 'replica',
      state: this.#state,
      epoch: disk.epoch,
      generation: held ? formatGeneration(held.generation) : null,
      wanted: this.#told && formatGeneration(this.#told),
      freshAgeMs: held && age !== null ? Math.ceil(age) : null,
      entries: 3,
      bytes: 3000,
      conditions,
      lastPull: null,
      source: this.#source,
    };
  }
}

/** csi-node: the real Freezer over played cgroups, and the agent's socket. */
export class Csi {
  readonly node: SimNode;
  readonly process: Process;
  readonly freezer: Freezer;
  /** announced, and not yet with the freezer */
  readonly #announced = new Set<string>();

  constructor(node: SimNode) {
    this.node = node;
    const { deps } = node;
    this.process = new Process(`csi-node ${node.name}`, deps.time, node.machine);
    const { clock } = this.process;
    this.freezer = new Freezer({
      clock: () => clock.boot(),
      setTimeout: (fn, ms) => clock.setTimeout(fn, ms),
      ask: async () => (await this.#report()).volumes,
      makeHarmless: async ({ podUid }) => {
        await this.process.sleep(deps.random.between(1, 30));
        const one = node.containers.get(podUid);
        if (one) one.harmless = true;
      },
      find: (uid) => this.#cgroup(uid),
      log: deps.log,
    });
    // Taken up anew: what was published before is known from the disk.
    for (const [podUid, epoch] of node.disk.published)
      if (node.containers.has(podUid)) this.freezer.add({ ...NAME, podUid }, epoch, null);
    this.#tick();
  }

  /** While nothing is published the Freezer asks nothing; csi-node reports all the same. */
  #tick(): void {
    this.process.clock.setTimeout(() => this.#tick(), 1000);
    if (this.freezer.status().length === 0) void this.#report().catch(() => {});
  }

  /** Over the unix socket: quick, unless the agent hangs or is not there. */
  #ask<T>(work: (agent: Agent) => T): Promise<T> {
    const { node, process } = this;
    const { time, random } = node.deps;
    return new Promise((resolve, reject) => {
      const { agent } = node;
      if (!agent?.open) {
        time.after(1, () => reject(new Error('the agent does not listen')), process);
        return;
      }
      time.after(
        random.between(0.1, 3),
        () => {
          const answer = work(agent);
          time.after(random.between(0.1, 3), () => resolve(answer), process);
        },
        agent.process,
      );
    });
  }

  #report(): Promise<{ volumes: WriterLease[] }> {
    const writers = this.freezer.volumes().length > 0 || this.#announced.size > 0 ? [{ ...NAME }] : [];
    const request: WriterReport = {
      at: this.process.clock.boot(),
      writers,
      freezer: { possible: true, reason: 'played', cgroup: 'v2' },
    };
    return this.#ask((agent) => agent.fencing.report(request));
  }

  #cgroup(uid: string): Freezable {
    const { node, process } = this;
    const { random } = node.deps;
    const one = (): Container | undefined => node.containers.get(uid);
    return {
      path: uid,
      get exists() {
        return one() !== undefined;
      },
      frozen: () => one()?.frozen ?? false,
      freeze: async () => {
        const ms = random.chance(0.05) ? random.between(50, 250) : random.between(0.5, 10);
        await process.sleep(ms);
        const c = one();
        if (c && !c.frozen) {
          c.frozen = true;
          node.deps.note(`the pod on ${node.name} (epoch ${c.epoch}) stands still`);
        }
        return ms;
      },
      thaw: async () => {
        await process.sleep(random.between(0.5, 5));
        const c = one();
        if (c?.frozen) {
          c.frozen = false;
          node.deps.note(`the pod on ${node.name} (epoch ${c.epoch}) goes on`);
        }
      },
      kill: async () => {
        await process.sleep(random.between(0.5, 5));
        const c = one();
        if (c) {
          c.alive = false;
          c.killed = true;
          c.frozen = false;
          node.deps.note(`the pod on ${node.name} (epoch ${c.epoch}) is killed`);
        }
      },
    };
  }

  /** NodePublish. @throws while the volume may not be written here */
  async publish(uid: string): Promise<void> {
    const { node, process } = this;
    this.#announced.add(uid);
    try {
      const askedAt = process.clock.boot();
      const request: WriterAnnouncement = { ...NAME, at: askedAt };
      const lease = await this.#ask((agent) => agent.fencing.announce(request));
      if (lease.role !== 'active' || lease.released || lease.remainingMs === 0 || !node.disk.live)
        throw new Error(`not here now: ${lease.role}, ${lease.remainingMs} ms`);
      node.containers.set(uid, {
        uid,
        epoch: lease.epoch,
        alive: false,
        frozen: false,
        harmless: false,
        exempt: false,
        startedAt: 0,
        killed: false,
      });
      node.disk.published.set(uid, lease.epoch);
      this.freezer.add({ ...NAME, podUid: uid }, lease.epoch, { lease, askedAt });
    } finally {
      this.#announced.delete(uid);
    }
  }

  /** NodeUnpublish: the containers have ended. */
  async unpublish(uid: string): Promise<void> {
    this.node.disk.published.delete(uid);
    await this.freezer.remove({ ...NAME, podUid: uid });
    await this.#report().catch(() => {});
  }
}
