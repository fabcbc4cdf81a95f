/** What is wrong with a volume right now, for people; one entry per type, with the time since when. */
import type { Condition } from '../core/parts.ts';
import { printablePath } from '../core/record.ts';

const SHOWN = 100;

export class Conditions {
  readonly #all = new Map<string, Condition>();
  readonly #now: () => number;
  /** @param now wall clock, ms */
  constructor(now: () => number) {
    this.#now = now;
  }

  /** True when the condition is new. */
  set(type: string, message: string, paths?: Iterable<Buffer>): boolean {
    const before = this.#all.get(type);
    const condition: Condition = { type, message, since: before?.since ?? this.#now() };
    if (paths) {
      const all = [...paths];
      condition.count = all.length;
      condition.paths = all.slice(0, SHOWN).map(printablePath);
    }
    this.#all.set(type, condition);
    return !before;
  }
  clear(type: string): void {
    this.#all.delete(type);
  }
  has(type: string): boolean {
    return this.#all.has(type);
  }
  list(): Condition[] {
    return [...this.#all.values()];
  }
}
