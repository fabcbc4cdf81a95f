/**
 * The active node's side, for one volume in one epoch: until when may its writer run?
 *
 * While, within the last lease on this node's own clock, the leader has renewed, or every promotable replica has
 * promised not to be promoted. Both count from when the beat that they answer was sent.
 */
import type { BeatLog } from './beats.ts';
import { type FenceRules, PROTOCOL } from './rules.ts';
import type { ToldSet } from './types.ts';

/** What must survive a restart of the agent. */
export interface ActiveState {
  epoch: number;
  /** the lease of this epoch was given back: nothing is written in it any more */
  released: boolean;
  /** null: never told; then promises count for nothing */
  promotable: ToldSet | null;
}

export class ActiveFence {
  readonly #leaseMs: number;
  readonly #rules: FenceRules;
  readonly #since: number;
  #state: ActiveState;
  #leader = -Infinity;
  readonly #promises = new Map<string, number>();

  /**
   * @param now when this node was made active (or its agent started): earlier beats count for nothing
   * @param leaseMs the node's own limit on any lease
   */
  constructor(state: ActiveState, now: number, leaseMs: number, rules: FenceRules = PROTOCOL) {
    this.#state = state;
    this.#since = now;
    this.#leaseMs = leaseMs;
    this.#rules = rules;
  }

  get state(): Readonly<ActiveState> {
    return this.#state;
  }

  /** The end that an answer to `beat` gives, counted from its sending; -Infinity when it counts for nothing. */
  #end(beat: number, epoch: number, leaseMs: number, beats: BeatLog, now: number): number {
    const sent = beats.sentAt(beat);
    if (sent === undefined) return -Infinity;
    if (this.#rules.ownEpochOnly && (epoch !== this.#state.epoch || sent < this.#since)) return -Infinity;
    return (this.#rules.countFromSent ? sent : now) + Math.min(leaseMs, this.#leaseMs);
  }

  /** The leader renewed the lease of `epoch` for `beat`. */
  renewed(beat: number, epoch: number, leaseMs: number, beats: BeatLog, now: number): void {
    this.#leader = Math.max(this.#leader, this.#end(beat, epoch, leaseMs, beats, now));
  }

  /** A replica acknowledged `beat`: it will not be promoted for the length of the lease. */
  promised(node: string, beat: number, epoch: number, leaseMs: number, beats: BeatLog, now: number): void {
    const end = this.#end(beat, epoch, leaseMs, beats, now);
    if (end > (this.#promises.get(node) ?? -Infinity)) this.#promises.set(node, end);
  }

  /**
   * The leader tells the set of promotable nodes.
   * @returns true when it is a newer version: it must be durable before it is acknowledged
   */
  told(set: ToldSet): boolean {
    const known = this.#state.promotable;
    if (known && (this.#rules.versionedSet ? set.version <= known.version : set.version === known.version))
      return false;
    this.#state = { ...this.#state, promotable: { version: set.version, nodes: [...set.nodes] } };
    for (const node of this.#promises.keys()) if (!set.nodes.includes(node)) this.#promises.delete(node);
    return true;
  }

  /** The lease is given back for good. Only when no writer can run; must be durable before it is told to anybody. */
  release(): void {
    this.#state = { ...this.#state, released: true };
  }

  /** The moment at which the writer must stand still; -Infinity: it may not run; Infinity: nobody can replace it. */
  until(): number {
    const { released, promotable } = this.#state;
    if (released) return -Infinity;
    if (!promotable) return this.#leader;
    const ends = promotable.nodes.map((node) => this.#promises.get(node) ?? -Infinity);
    const promised =
      ends.length === 0 ? Infinity : this.#rules.everyReplica ? Math.min(...ends) : Math.max(...ends);
    return Math.max(this.#leader, promised);
  }

  mayWrite(now: number): boolean {
    return now < this.until();
  }

  /**
   * How long csi-node may let the writer run after this answer. Never more than one lease, also when nobody can
   * replace this node: the set can grow, and the leader then waits just that long (rule waitAfterAddition).
   */
  remainingMs(now: number): number {
    return Math.max(0, Math.min(this.until() - now, this.#leaseMs));
  }
}
