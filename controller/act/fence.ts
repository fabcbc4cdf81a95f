/**
 * Drives the leader's side of the fencing protocol: one LeaderFence a pool, one poll a second and agent. Nothing is
 * granted or decided before the volumes were read from the API server itself, after this process became the leader.
 */
import type { VolumeName } from '../../lib/core/parts.ts';
import { LeaderFence, type PromotionVerdict, type VolumeRecord } from '../../lib/fence/leader.ts';
import { BEAT_MS, holdMs, LEASE_MS, MAX_LEASE_MS } from '../../lib/fence/timing.ts';
import type {
  FenceConsentReply,
  FenceConsentRequest,
  FencePollReply,
  FencingMode,
  FreezerState,
} from '../../lib/fence/types.ts';
import { errorText, type Kube, LEASES, SIMPLE_VOLUMES } from '../cluster/index.ts';
import type { Clock, LeaderElection, Logger, SimpleVolume } from '../cluster/types.ts';
import { type Agents, agentKey } from './agents.ts';

/** Annotation of the leader's Lease: the longest fencing lease that its holder grants, milliseconds. */
export const FENCE_LEASE_KEY = 'storage.shipstuff.io/fence-lease-ms';

export interface FenceDriverOptions {
  kube: Kube;
  agents: Agents;
  election: LeaderElection;
  /** of the leader election */
  lease: { namespace: string; name: string };
  clock: Clock;
  logger: Logger;
  leaseMs?: number;
  /** between two polls of an agent, ms */
  beatMs?: number;
  /** an agent's poll said something new about a volume (released, acknowledged, freezer) */
  onNews: (pool: string, name: VolumeName) => void;
  /** every volume as read after a take-over */
  onRead: (object: SimpleVolume) => void;
}

interface PoolFence {
  leader: LeaderFence;
  /** the last answer of each volume, and when it came, own clock */
  consents: Map<string, FenceConsentReply & { at: number }>;
}

const nameKey = (name: VolumeName): string => `${name.namespace}/${name.volume}`;

/** As LeaderFence knows a volume; null while it has no epoch. */
export function recordOf(object: SimpleVolume, fencing: FencingMode): VolumeRecord | null {
  const { spec, status, metadata } = object;
  if (!spec.volumeName || !status?.epoch) return null;
  return {
    namespace: metadata.namespace as string,
    volume: spec.volumeName,
    epoch: status.epoch,
    activeNode: status.activeNode ?? null,
    promotable: {
      version: status.promotable?.version ?? 0,
      nodes: [...(status.promotable?.nodes ?? [])],
      adding: [...(status.promotable?.adding ?? [])],
    },
    fencing,
  };
}

export class FenceDriver {
  readonly leaseMs: number;
  private readonly options: FenceDriverOptions;
  private readonly pools = new Map<string, PoolFence>();
  /** as the planner said last; a volume that it has not looked at yet counts as what its policy says */
  private readonly modes = new Map<string, FencingMode>();
  private readonly freezers = new Map<string, FreezerState | null>();
  private readonly polling = new Map<string, Promise<void>>();
  private readonly news = new Map<string, string>();
  private timer: { cancel(): void } | null = null;
  /** the leadership for which everything was read: only then anything is granted or decided */
  private readTerm: number | null = null;
  /** the leadership that the pools have been told of */
  private takenTerm: number | null = null;
  private previousLeaseMs: number | null = null;
  private takingOver: number | null = null;
  /** own clock: from then on no lease longer than the own ones can hold */
  private lowerAt: number | null = null;
  private stopped = false;
  /** polls sent and unanswered ones, for metrics */
  readonly counters = { polls: 0, failed: 0, takeovers: 0 };

  constructor(options: FenceDriverOptions) {
    this.options = options;
    this.leaseMs = options.leaseMs ?? LEASE_MS;
  }

  start(): void {
    this.tick();
  }

  stop(): void {
    this.stopped = true;
    this.timer?.cancel();
    for (const { leader } of this.pools.values()) leader.stepDown();
  }

  /** Whether volumes were read in this leadership: only then anything is decided. */
  ready(): boolean {
    const term = this.options.election.term();
    return term !== null && term === this.readTerm;
  }

  term(): number | null {
    return this.ready() ? this.readTerm : null;
  }

  private pool(pool: string): PoolFence {
    let found = this.pools.get(pool);
    if (!found) {
      const leader = new LeaderFence(this.options.election.identity, this.leaseMs);
      found = { leader, consents: new Map() };
      this.pools.set(pool, found);
      // A pool that is met later: nothing was granted in it by this leader, perhaps by an earlier one.
      if (this.takenTerm !== null) this.takeOverPool(found, this.takenTerm);
    }
    return found;
  }

  private takeOverPool(pool: PoolFence, term: number): void {
    const { clock, election } = this.options;
    const now = clock.boot();
    pool.leader.takeOver(now, term, now + election.leadsForMs(), this.previousLeaseMs);
    pool.consents.clear();
  }

  private tick(): void {
    if (this.stopped) return;
    this.timer = this.options.clock.setTimeout(() => this.tick(), this.options.beatMs ?? BEAT_MS);
    const term = this.options.election.term();
    if (term === null) {
      this.readTerm = null;
      this.takenTerm = null;
      for (const { leader } of this.pools.values()) leader.stepDown();
      return;
    }
    if (term !== this.readTerm) {
      if (this.takingOver !== term) void this.takeOver(term);
      return;
    }
    const now = this.options.clock.boot();
    if (this.lowerAt !== null && now >= this.lowerAt) {
      // Whatever longer lease an earlier leader granted is over.
      this.lowerAt = null;
      this.note(this.leaseMs).catch(() => {
        this.lowerAt = now + 10_000;
      });
    }
    const leadsFor = this.options.election.leadsForMs();
    for (const { leader } of this.pools.values()) if (leadsFor > 0) leader.extend(now + leadsFor);
    for (const agent of this.options.agents.all()) void this.poll(agent.pool, agent.node);
  }

  /** Writes into the Lease how long the longest fencing lease is that may be granted. */
  private async note(leaseMs: number): Promise<void> {
    await this.options.kube.merge(LEASES, this.options.lease, {
      metadata: { annotations: { [FENCE_LEASE_KEY]: String(leaseMs) } },
    });
  }

  /** Begins to lead: first what an earlier leader may have granted, then every volume, from the API server itself. */
  private async takeOver(term: number): Promise<void> {
    const { kube, lease, election, logger } = this.options;
    this.takingOver = term;
    try {
      const seen = await kube.get(LEASES, lease);
      const said = Number(seen.metadata.annotations?.[FENCE_LEASE_KEY]);
      const objects: SimpleVolume[] = [];
      for await (const object of kube.list(SIMPLE_VOLUMES)) objects.push(object);
      let previous = Number.isFinite(said) && said > 0 ? said : null;
      // A new installation: nothing was granted, for there is no volume. At most, whoever led a moment ago makes one in
      // what is left of its time, and grants it a lease at the end of that.
      if (previous === null && objects.length === 0) {
        previous = Math.min(MAX_LEASE_MS, this.leaseMs + Math.max(0, election.leadsForMs()));
      }
      // First it is written down what may be granted; a smaller number would be a lie while older grants hold.
      const longest = Math.max(this.leaseMs, previous ?? MAX_LEASE_MS);
      if (said !== longest) await this.note(longest);
      if (election.term() !== term) return;
      this.previousLeaseMs = previous;
      this.takenTerm = term;
      for (const pool of this.pools.values()) this.takeOverPool(pool, term);
      if (election.term() !== term) return;
      for (const object of objects) {
        this.observe(object, null);
        this.options.onRead(object);
      }
      this.readTerm = term;
      this.lowerAt = longest > this.leaseMs ? this.options.clock.boot() + holdMs(longest) : null;
      this.counters.takeovers++;
      logger.info({ term, volumes: objects.length }, 'fencing: leads');
    } catch (error) {
      this.readTerm = null;
      logger.warn({ error: errorText(error) }, 'fencing: the volumes could not be read; nothing is decided');
    } finally {
      this.takingOver = null;
    }
  }

  /** One poll of an agent at a time: while one is under way, that one counts. */
  private poll(pool: string, node: string): Promise<void> {
    const key = agentKey(pool, node);
    let under = this.polling.get(key);
    if (under === undefined) {
      under = this.pollOnce(pool, node, key).finally(() => this.polling.delete(key));
      this.polling.set(key, under);
    }
    return under;
  }

  private async pollOnce(pool: string, node: string, key: string): Promise<void> {
    const { clock, agents } = this.options;
    const { leader } = this.pool(pool);
    const poll = leader.poll(node, clock.boot());
    if (poll === null) return;
    this.counters.polls++;
    try {
      const reply = await agents.call<FencePollReply>(pool, node, {
        path: '/replication/fence/poll',
        body: poll,
        probe: true,
        timeoutMs: 3000,
      });
      // An agent that gives itself another name speaks for nobody.
      if (reply?.node !== node || !Array.isArray(reply.volumes)) return;
      leader.answered(reply, clock.boot());
      this.noteNews(pool, key, reply);
    } catch {
      this.counters.failed++;
    }
  }

  /**
   * Polls an agent now and not with the next beat: once to hear what it has just done (a lease given back), twice to
   * renew the first lease of a node that was just made active, for the beat that the first answer names.
   */
  async hurry(pool: string, node: string, times: 1 | 2): Promise<void> {
    // What is under way may have been asked before.
    await this.polling.get(agentKey(pool, node));
    for (let i = 0; i < times && !this.stopped && this.ready(); i++) await this.poll(pool, node);
  }

  private noteNews(pool: string, key: string, reply: FencePollReply): void {
    const before = this.freezers.get(key);
    this.freezers.set(key, reply.freezer);
    const freezerChanged = before !== undefined && before?.possible !== reply.freezer?.possible;
    for (const one of reply.volumes) {
      if (one.role !== 'active') continue;
      const at = `${key}/${nameKey(one)}`;
      const now = `${one.epoch} ${one.released} ${one.promotable?.version} ${one.fencing}`;
      if (this.news.get(at) === now && !freezerChanged) continue;
      this.news.set(at, now);
      this.options.onNews(pool, one);
    }
  }

  /** A volume as it was just read or written. `fencing` null: as before, else as its policy says. */
  observe(object: SimpleVolume, fencing: FencingMode | null): void {
    const name = { namespace: object.metadata.namespace as string, volume: object.spec.volumeName };
    const mode =
      fencing ?? this.modes.get(nameKey(name)) ?? (object.spec.policy?.fencing === 'none' ? 'none' : 'lease');
    if (fencing !== null) this.modes.set(nameKey(name), fencing);
    const record = recordOf(object, mode);
    if (record && this.takenTerm !== null) this.pool(object.spec.pool).leader.observe(record);
  }

  forget(pool: string, name: VolumeName): void {
    this.pools.get(pool)?.leader.forget(name);
    this.pools.get(pool)?.consents.delete(nameKey(name));
    this.modes.delete(nameKey(name));
  }

  withhold(pool: string, name: VolumeName, withheld: boolean): void {
    if (this.ready()) this.pool(pool).leader.withhold(name, withheld);
  }

  /** What the planner is told of a volume. */
  state(
    pool: string,
    name: VolumeName,
  ): {
    fenceWaitMs: number | null;
    activationWaitMs: number | null;
    acknowledged: number | null;
    released: number | null;
    consent: (FenceConsentReply & { ageMs: number }) | null;
  } {
    if (!this.ready())
      return { fenceWaitMs: null, activationWaitMs: null, acknowledged: null, released: null, consent: null };
    const now = this.options.clock.boot();
    const { leader, consents } = this.pool(pool);
    const asked = consents.get(nameKey(name));
    return {
      fenceWaitMs: leader.fenceWaitMs(name, now),
      activationWaitMs: leader.activationWaitMs(name, now),
      acknowledged: leader.acknowledged(name),
      released: leader.released(name),
      consent: asked === undefined ? null : { ...asked, ageMs: now - asked.at },
    };
  }

  freezer(pool: string, node: string): FreezerState | null {
    return this.freezers.get(agentKey(pool, node)) ?? null;
  }

  /** Asks a replica for its consent. @throws RemoteError when it does not answer */
  async askConsent(
    pool: string,
    target: string,
    request: Omit<FenceConsentRequest, 'term'>,
  ): Promise<FenceConsentReply | null> {
    const term = this.term();
    if (term === null) return null;
    const reply = await this.options.agents.call<FenceConsentReply>(pool, target, {
      path: '/replication/fence/consent',
      body: { ...request, term },
    });
    this.pool(pool).consents.set(nameKey(request), { ...reply, at: this.options.clock.boot() });
    return reply;
  }

  mayPromote(
    pool: string,
    name: VolumeName,
    target: string,
    epoch: number,
    consent: FenceConsentReply | null,
  ): PromotionVerdict {
    if (!this.ready()) return { ok: false, code: 'NOT_LEADING', waitMs: 0 };
    return this.pool(pool).leader.mayPromote(name, target, epoch, consent, this.options.clock.boot());
  }
}
