/**
 * The replica's side, for one volume: whom it has promised not to be promoted, and for how long.
 *
 * The promise itself is kept in memory: after a start the replica is bound for the whole hold, whatever it had
 * promised, so nothing is written to a disk each second. Durable are the highest epoch seen and the longest lease
 * ever promised.
 */
import { type FenceRules, PROTOCOL } from './rules.ts';
import { holdMs, SILENCE_MS } from './timing.ts';
import type { ConsentCode } from './types.ts';

/** What must survive a restart of the agent. */
export interface ReplicaState {
  /** highest epoch seen or consented to */
  epoch: number;
  /** longest lease that this node may have promised, ms; 0: none yet */
  longestLeaseMs: number;
}

export interface Consent {
  code: Extract<ConsentCode, 'CONSENT' | 'PROMISED' | 'EPOCH_OLD'>;
  /** PROMISED: until the promise ends, ms */
  waitMs: number;
}

export class ReplicaFence {
  readonly #leaseMs: number;
  readonly #rules: FenceRules;
  #state: ReplicaState;
  #until: number;
  /** epoch of the newest promise */
  #for = 0;
  /** no further promises to epochs below #insisted until then */
  #silentUntil = -Infinity;
  #insisted = 0;

  constructor(state: ReplicaState, now: number, leaseMs: number, rules: FenceRules = PROTOCOL) {
    this.#state = state;
    this.#leaseMs = leaseMs;
    this.#rules = rules;
    this.#until = rules.boundAfterStart ? now + holdMs(Math.max(leaseMs, state.longestLeaseMs)) : -Infinity;
  }

  get state(): Readonly<ReplicaState> {
    return this.#state;
  }

  /** Whether the longest lease has to be made durable (noteLease) before the next promise is given. */
  get mustNoteLease(): boolean {
    return this.#state.longestLeaseMs < this.#leaseMs;
  }
  noteLease(): void {
    this.#state = { ...this.#state, longestLeaseMs: Math.max(this.#state.longestLeaseMs, this.#leaseMs) };
  }

  /** A newer epoch became known some other way (a batch, a watch that was started). */
  learn(epoch: number): void {
    if (epoch > this.#state.epoch) this.#state = { ...this.#state, epoch };
  }

  /**
   * A beat of the active node of `epoch` arrived.
   * @returns true: acknowledge it. From now on, for the hold, this replica refuses to be promoted.
   */
  beat(epoch: number, now: number): boolean {
    if (this.#rules.refuseOlderEpoch && epoch < this.#state.epoch) return false;
    if (epoch < this.#insisted && now < this.#silentUntil) return false;
    this.#until = Math.max(
      this.#until,
      now + (this.#rules.fullPromise ? holdMs(this.#leaseMs) : this.#leaseMs * 0.8),
    );
    this.#for = Math.max(this.#for, epoch);
    return true;
  }

  /**
   * The leader asks whether it may promote this replica into `epoch`.
   * @param released the active node gave back the lease of this epoch: promises to it no longer bind
   * @param insist give the present active node no further promise
   * @returns with CONSENT the epoch in `state` may have grown: it must be durable before the answer leaves
   */
  consent(epoch: number, released: number | null, insist: boolean, now: number): Consent {
    if (epoch < this.#state.epoch) return { code: 'EPOCH_OLD', waitMs: 0 };
    // Consented before: since then no older epoch got a promise.
    if (epoch === this.#state.epoch) return { code: 'CONSENT', waitMs: 0 };
    if (insist) {
      this.#insisted = Math.max(this.#insisted, epoch);
      this.#silentUntil = now + holdMs(this.#leaseMs) + SILENCE_MS;
    }
    const free = released !== null && released < epoch && released >= this.#for;
    if (this.#rules.promiseBinds && !free && now < this.#until)
      return { code: 'PROMISED', waitMs: Math.ceil(this.#until - now) };
    this.#state = { ...this.#state, epoch };
    return { code: 'CONSENT', waitMs: 0 };
  }

  /** How long the promise still binds, ms. */
  boundMs(now: number): number {
    return Math.max(0, Math.ceil(this.#until - now));
  }
}
