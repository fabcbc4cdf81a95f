/**
 * When may one published writer run? Pure: the answers of the agent and the time go in, what to do comes out. The
 * Freezer acts on it (freezer.ts); the simulation of the protocol runs it too.
 */
import type { WriterLease } from '../../lib/fence/types.ts';

/** `run`: let it run; `freeze`: hold it still; `kill`: another node goes on in a newer epoch, it must never write again. */
export type WriterOrder = 'run' | 'freeze' | 'kill';

export class WriterFence {
  /** epoch in which the writer was started; null: not known yet, the first answer says it */
  #epoch: number | null;
  #end: number;
  #doomed: number | null = null;

  /**
   * @param epoch in which the volume was published
   * @param end until when it may run as far as is known, own clock; -Infinity: nothing is known, it stands still first
   */
  constructor(epoch: number | null, end: number) {
    this.#epoch = epoch;
    this.#end = end;
  }

  get epoch(): number | null {
    return this.#epoch;
  }
  /** Own clock: when the writer must stand still. */
  get end(): number {
    return this.#doomed === null ? this.#end : -Infinity;
  }
  /** The newer epoch that ended this writer; null: none. */
  get replacedIn(): number | null {
    return this.#doomed;
  }

  /**
   * The agent answered.
   * @param askedAt own clock, when the question was sent: what remains counts from there
   */
  answer(lease: WriterLease, askedAt: number): void {
    if (lease.role === 'none') return;
    if (this.#epoch === null && lease.role === 'active') this.#epoch = lease.epoch;
    if (this.#epoch === null || lease.epoch < this.#epoch) return;
    if (lease.epoch > this.#epoch) {
      this.#doomed = Math.max(this.#doomed ?? 0, lease.epoch);
      return;
    }
    if (lease.role !== 'active') return;
    if (lease.released) {
      this.#end = -Infinity;
      return;
    }
    const end = lease.remainingMs === null ? Infinity : askedAt + lease.remainingMs;
    // A lease that was granted stays good; only "without end" ends with the next answer.
    this.#end = this.#end === Infinity ? end : Math.max(this.#end, end);
  }

  decide(now: number): WriterOrder {
    if (this.#doomed !== null) return 'kill';
    return now < this.#end ? 'run' : 'freeze';
  }
}
