import { MAX_LEASE_MS } from './timing.ts';

/** A number that a process counts its beats from: so far from any other process's that no number comes twice. */
export const FIRST_BEAT_RANGE = 2 ** 47;

const KEPT = 512;

/**
 * The numbered beats of one process and when each was sent. One log serves all volumes and all peers: an answer
 * names the number, and what it grants counts from the sending.
 */
export class BeatLog {
  #next: number;
  readonly #sent = new Map<number, number>();

  /** @param first random, 1..FIRST_BEAT_RANGE: an answer to an earlier process of this node must match nothing here */
  constructor(first: number) {
    this.#next = first;
  }

  /** A new number, sent now. What is older than any lease, or more than 512 beats back, is forgotten. */
  send(now: number): number {
    const beat = this.#next++;
    this.#sent.set(beat, now);
    for (const [old, at] of this.#sent) {
      if (this.#sent.size <= KEPT && now - at <= MAX_LEASE_MS) break;
      this.#sent.delete(old);
    }
    return beat;
  }

  /** When the beat was sent; undefined: never by this process, or too long ago to matter. */
  sentAt(beat: number): number | undefined {
    return this.#sent.get(beat);
  }

  get size(): number {
    return this.#sent.size;
  }
}
