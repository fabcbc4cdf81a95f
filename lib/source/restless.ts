/**
 * Large files that would not hold still while they were copied: each is read again later and later, since every try
 * reads it whole; those that did hold still are forgotten.
 */
import type { Clock } from '../core/parts.ts';
import type { Batch } from './batch.ts';

/** Pauses before a file is read again, ms; doubled each time. */
const FIRST_MS = 2_000;
const LAST_MS = 60_000;

interface Waiting {
  path: Buffer;
  failures: number;
  /** boot clock, ms */
  notBefore: number;
}

export class Restless {
  readonly #files = new Map<string, Waiting>();
  readonly #clock: Clock;
  readonly #again: (paths: Buffer[]) => void;
  #timer: { cancel(): void } | null = null;

  /** @param again the time of these paths has come: they are dirty */
  constructor(clock: Clock, again: (paths: Buffer[]) => void) {
    this.#clock = clock;
    this.#again = again;
  }

  get size(): number {
    return this.#files.size;
  }
  has(key: string): boolean {
    return this.#files.has(key);
  }
  keys(): IterableIterator<string> {
    return this.#files.keys();
  }
  /** Path by key. */
  paths(): [string, Buffer][] {
    return [...this.#files].map(([key, { path }]) => [key, path]);
  }
  /** Whether it is too early to read this one again. */
  waits(key: string): boolean {
    return (this.#files.get(key)?.notBefore ?? 0) > this.#clock.boot();
  }

  /** What a batch has found out. */
  note(batch: Batch): void {
    for (const key of this.#files.keys()) {
      const seen =
        batch.fine.has(key) ||
        batch.unreadable.has(key) ||
        batch.special.has(key) ||
        batch.pending.get(key)?.change === 'gone';
      if (seen && !batch.busy.has(key)) this.#files.delete(key);
    }
    const now = this.#clock.boot();
    for (const [key, path] of batch.hot) {
      const failures = (this.#files.get(key)?.failures ?? 0) + 1;
      const wait = Math.min(FIRST_MS * 2 ** (failures - 1), LAST_MS);
      this.#files.set(key, { path, failures, notBefore: now + wait });
    }
    this.#schedule();
  }

  #schedule(): void {
    this.#timer?.cancel();
    this.#timer = null;
    if (this.#files.size === 0) return;
    const next = Math.min(...[...this.#files.values()].map((one) => one.notBefore));
    this.#timer = this.#clock.setTimeout(
      () => {
        this.#timer = null;
        if (this.#clock.boot() < next) this.#schedule();
        else this.recall(this.#clock.boot());
      },
      Math.max(0, Math.ceil(next - this.#clock.boot())),
    );
  }

  /** Hands out those whose time comes until then (boot clock, ms). */
  recall(until: number): void {
    const due = [...this.#files.values()].filter((one) => one.notBefore <= until);
    if (due.length === 0) return;
    for (const one of due) one.notBefore = 0;
    this.#again(due.map(({ path }) => path));
  }

  clear(): void {
    this.#timer?.cancel();
    this.#timer = null;
    this.#files.clear();
  }
}
