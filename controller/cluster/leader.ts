/**
 * Leader election by a Lease. Two rules make it safe: who leads counts its time from before it sent the renewal, and who
 * waits counts from when it saw the last sign of life, and longer, by as much as the clocks may differ (holdMs, the same
 * rule as in the fencing protocol). No wall clock is compared; the times in the Lease are for people.
 */
import { holdMs, MARGIN_MS } from '../../lib/fence/timing.ts';
import { errorText, isKubeError } from './errors.ts';
import { LEASES, type Lease } from './resources.ts';
import type { LeaderElection, LeaderElectionOptions } from './types.ts';

const DURATION_MS = 15_000;
const RENEW_MS = 2000;

export function createLeaderElection(options: LeaderElectionOptions): LeaderElection {
  return new Election(options);
}

class Election implements LeaderElection {
  readonly identity: string;
  lastError: string | null = null;
  private readonly options: LeaderElectionOptions;
  private readonly durationMs: number;
  private readonly listeners = new Set<(leads: boolean) => void>();
  /** Own clock: until then nobody else can lead. */
  private validUntil = Number.NEGATIVE_INFINITY;
  private ownTerm: number | null = null;
  /** As last read or written. */
  private seen: Lease | null = null;
  /** What shows a sign of life when it changes, and when it last did. */
  private sign = '';
  private signAt: number;
  /** Numbers of leaderships seen so far. */
  private highest = 0;
  private told = false;
  private timer: { cancel(): void } | null = null;
  private endTimer: { cancel(): void } | null = null;
  private ticking: Promise<void> | null = null;
  private running = false;

  constructor(options: LeaderElectionOptions) {
    this.options = options;
    this.identity = options.identity;
    this.durationMs = options.durationMs ?? DURATION_MS;
    this.signAt = options.clock.boot();
  }

  start(): void {
    if (this.running) return;
    this.running = true;
    this.signAt = this.options.clock.boot();
    this.tick();
  }

  leads(): boolean {
    return this.options.clock.boot() < this.validUntil;
  }

  leadsForMs(): number {
    return Math.max(0, this.validUntil - this.options.clock.boot());
  }

  term(): number | null {
    return this.leads() ? this.ownTerm : null;
  }

  holder(): string | null {
    return this.seen?.spec?.holderIdentity || null;
  }

  onChange(listener: (leads: boolean) => void): () => void {
    this.listeners.add(listener);
    return () => this.listeners.delete(listener);
  }

  async stop(): Promise<void> {
    if (!this.running) return;
    this.running = false;
    this.timer?.cancel();
    // First no longer leading, then saying so.
    this.end();
    await this.ticking;
    const mine = this.seen?.spec?.holderIdentity === this.identity ? this.seen : null;
    if (mine === null) return;
    try {
      const spec = { ...mine.spec, holderIdentity: '', renewTime: this.microTime(), leaseDurationSeconds: 1 };
      await this.options.kube.replace(LEASES, { ...mine, spec }, this.call());
    } catch (error) {
      this.options.logger.info({ error: errorText(error) }, 'the lease could not be given back; it runs out');
    }
  }

  private tick(): void {
    if (!this.running) return;
    this.ticking = this.step()
      .catch((error: unknown) => {
        this.lastError = errorText(error);
        this.options.logger.warn({ error: this.lastError, leads: this.leads() }, 'the lease was not renewed');
      })
      .then(() => {
        this.ticking = null;
        this.settle();
        if (!this.running) return;
        const jitter = 0.9 + 0.2 * (this.options.random ?? Math.random)();
        this.timer = this.options.clock.setTimeout(() => this.tick(), this.renewMs * jitter);
      });
  }

  private get renewMs(): number {
    return this.options.renewMs ?? RENEW_MS;
  }

  /** Three tries fit into the time that a lease lasts. */
  private call(): { timeoutMs: number; urgent: true } {
    return { timeoutMs: Math.max(500, Math.min(5000, this.durationMs / 3)), urgent: true };
  }

  private async step(): Promise<void> {
    const { kube, lease } = this.options;
    // Who leads knows the version that it wrote: one call, which fails when anybody else has written.
    if (this.leads() && this.seen?.spec?.holderIdentity === this.identity) {
      try {
        await this.write(this.seen, this.ownTerm as number);
        return;
      } catch (error) {
        if (!isKubeError(error, 'Conflict', 'NotFound')) throw error;
      }
    }
    this.see(await kube.find(LEASES, lease, this.call()));
    const seen = this.seen;
    if (seen === null) {
      // Nobody else may begin before the leader of a Lease that was deleted has ended; that leader makes it anew itself.
      if (this.leads() || this.waited()) await this.make();
      return;
    }
    const holder = seen.spec?.holderIdentity || null;
    if (holder === this.identity) {
      // Written by this process, though no answer said so.
      const term = seen.spec?.leaseTransitions ?? 0;
      if (this.ownTerm !== null && term === this.ownTerm) await this.write(seen, term);
      else await this.write(seen, this.nextTerm());
      return;
    }
    // Somebody else's: over at once, whatever the own clock says.
    this.end();
    if (holder === null || this.waited()) await this.write(seen, this.nextTerm());
  }

  /** Whether the holder has been silent for so long that it surely leads no more. */
  private waited(): boolean {
    const theirs = (this.seen?.spec?.leaseDurationSeconds ?? 0) * 1000;
    return this.options.clock.boot() - this.signAt >= holdMs(Math.max(this.durationMs, theirs));
  }

  private see(lease: Lease | null): void {
    this.seen = lease;
    this.highest = Math.max(this.highest, lease?.spec?.leaseTransitions ?? 0);
    const sign = lease === null ? 'none' : `${lease.metadata.uid}/${lease.metadata.resourceVersion}`;
    if (sign === this.sign) return;
    this.sign = sign;
    this.signAt = this.options.clock.boot();
  }

  /**
   * Above every number used before. When the Lease was deleted its count is lost, and one that the chart has made has
   * none: then the minutes since 1970 are, as long as leaders change less than once a minute on average (a Lease keeps
   * 31 bits: until the year 6053).
   */
  private nextTerm(): number {
    const counted = this.seen?.spec?.leaseTransitions;
    if (typeof counted === 'number') return Math.max(this.highest, counted) + 1;
    return Math.max(this.highest + 1, Math.floor(this.options.clock.now() / 60_000));
  }

  private microTime(): string {
    return new Date(this.options.clock.now()).toISOString().replace('Z', '000Z');
  }

  private spec(lease: Lease | null, term: number): NonNullable<Lease['spec']> {
    const goesOn = lease?.spec?.holderIdentity === this.identity && lease.spec.leaseTransitions === term;
    return {
      holderIdentity: this.identity,
      leaseDurationSeconds: Math.max(1, Math.ceil(this.durationMs / 1000)),
      acquireTime: goesOn && lease?.spec?.acquireTime ? lease.spec.acquireTime : this.microTime(),
      renewTime: this.microTime(),
      leaseTransitions: term,
    };
  }

  private async write(lease: Lease, term: number): Promise<void> {
    const sent = this.options.clock.boot();
    this.ownTermTried(term);
    const spec = this.spec(lease, term);
    this.holds(await this.options.kube.replace(LEASES, { ...lease, spec }, this.call()), sent, term);
  }

  private async make(): Promise<void> {
    const sent = this.options.clock.boot();
    const term = this.leads() && this.ownTerm !== null ? this.ownTerm : this.nextTerm();
    this.ownTermTried(term);
    const lease: Lease = { metadata: { ...this.options.lease }, spec: this.spec(null, term) };
    this.holds(await this.options.kube.create(LEASES, lease, this.call()), sent, term);
  }

  /** A number that may be in the cluster from now on, whether or not an answer comes. */
  private ownTermTried(term: number): void {
    this.highest = Math.max(this.highest, term);
  }

  private holds(lease: Lease, sent: number, term: number): void {
    this.see(lease);
    this.ownTerm = term;
    this.lastError = null;
    if (!this.running) return;
    this.validUntil = sent + this.durationMs - MARGIN_MS;
    this.endTimer?.cancel();
    const watch = (): void => {
      const left = this.leadsForMs();
      if (left > 0) this.endTimer = this.options.clock.setTimeout(watch, left);
      else this.settle();
    };
    watch();
  }

  private end(): void {
    this.validUntil = Number.NEGATIVE_INFINITY;
    this.ownTerm = null;
    this.endTimer?.cancel();
    this.settle();
  }

  /** Tells the listeners when leading has begun or ended. */
  private settle(): void {
    const leads = this.leads();
    if (leads === this.told) return;
    this.told = leads;
    this.options.logger.info(
      { identity: this.identity, holder: this.holder(), term: this.ownTerm },
      leads ? 'leads now' : 'leads no more',
    );
    for (const listener of this.listeners) {
      try {
        listener(leads);
      } catch (error) {
        this.options.logger.error({ error: errorText(error) }, 'a listener failed');
      }
    }
  }
}
