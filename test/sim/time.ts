/** Simulated time: one queue of events, machines whose clocks drift, processes that stop, hang and die. */
import type { Clock } from '../../lib/core/parts.ts';

/** mulberry32; the same seed gives the same numbers. */
export class Random {
  #s: number;
  constructor(seed: number) {
    this.#s = (seed * 2_654_435_761 + 12_345) >>> 0;
  }
  next(): number {
    this.#s = (this.#s + 0x6d2b79f5) >>> 0;
    let t = this.#s;
    t = Math.imul(t ^ (t >>> 15), t | 1);
    t ^= t + Math.imul(t ^ (t >>> 7), t | 61);
    return ((t ^ (t >>> 14)) >>> 0) / 4_294_967_296;
  }
  chance(p: number): boolean {
    return this.next() < p;
  }
  between(low: number, high: number): number {
    return low + this.next() * (high - low);
  }
  /** 0..n-1 */
  below(n: number): number {
    return Math.floor(this.next() * n);
  }
  pick<T>(from: readonly T[]): T {
    return from[this.below(from.length)] as T;
  }
  /** exponential with this mean */
  wait(mean: number): number {
    return -Math.log(1 - this.next()) * mean;
  }
}

interface Due {
  at: number;
  order: number;
  run: () => void;
  process: Process | null;
  cancelled: boolean;
}

/** Microtasks and what they begin: all of it has run when this resolves. Taken before a test may look for real timers. */
const realImmediate = setImmediate;
const drained = (): Promise<void> => new Promise((resolve) => realImmediate(resolve));

export class Time {
  /** true time, milliseconds; nobody in the simulated world can read it */
  now = 0;
  events = 0;
  readonly #heap: Due[] = [];
  #order = 0;

  /** Runs `run` at this true time, unless the process has ended by then; a process that hangs runs it when it goes on. */
  at(at: number, run: () => void, process: Process | null = null): { cancel(): void } {
    const due: Due = { at: Math.max(at, this.now), order: this.#order++, run, process, cancelled: false };
    this.#push(due);
    return {
      cancel: () => {
        due.cancelled = true;
      },
    };
  }

  after(ms: number, run: () => void, process: Process | null = null): { cancel(): void } {
    return this.at(this.now + ms, run, process);
  }

  /** One event, and everything that follows from it at once. False: there is none before `end`. */
  async step(end: number): Promise<boolean> {
    for (;;) {
      const due = this.#heap[0];
      if (due === undefined || due.at > end) {
        this.now = Math.max(this.now, Math.min(end, due?.at ?? end));
        return false;
      }
      this.#pop();
      if (due.cancelled || due.process?.alive === false) continue;
      const hangs = due.process?.hangsUntil ?? 0;
      if (hangs > due.at) {
        due.at = hangs;
        due.order = this.#order++;
        this.#push(due);
        continue;
      }
      this.now = due.at;
      this.events++;
      due.run();
      await drained();
      return true;
    }
  }

  #before(a: Due, b: Due): boolean {
    return a.at < b.at || (a.at === b.at && a.order < b.order);
  }
  #push(one: Due): void {
    const h = this.#heap;
    let i = h.push(one) - 1;
    while (i > 0) {
      const up = (i - 1) >> 1;
      if (!this.#before(one, h[up] as Due)) break;
      h[i] = h[up] as Due;
      i = up;
    }
    h[i] = one;
  }
  #pop(): void {
    const h = this.#heap;
    const last = h.pop() as Due;
    if (h.length === 0) return;
    let i = 0;
    for (;;) {
      let down = 2 * i + 1;
      if (down >= h.length) break;
      if (down + 1 < h.length && this.#before(h[down + 1] as Due, h[down] as Due)) down++;
      if (!this.#before(h[down] as Due, last)) break;
      h[i] = h[down] as Due;
      i = down;
    }
    h[i] = last;
  }
}

/** Whose clocks a process reads. */
export interface MachineClock {
  /** boot clock per true millisecond */
  rate: number;
  /** boot clock at true time 0 */
  offset: number;
  /** wall clock at true time 0 */
  wall: number;
}

/** One run of a program: when it has ended, nothing of it happens any more. */
export class Process {
  readonly name: string;
  readonly time: Time;
  readonly machine: MachineClock;
  readonly clock: Clock;
  alive = true;
  /** true time */
  hangsUntil = 0;

  constructor(name: string, time: Time, machine: MachineClock) {
    this.name = name;
    this.time = time;
    this.machine = machine;
    this.clock = {
      boot: () => time.now * machine.rate + machine.offset,
      now: () => Math.round(time.now + machine.wall),
      setTimeout: (fn, ms) => time.after(Math.max(0, ms) / machine.rate, fn, this),
    };
  }

  get hangs(): boolean {
    return this.hangsUntil > this.time.now;
  }

  /** Own milliseconds; never resolves when the process ends before. */
  sleep(ms: number): Promise<void> {
    return new Promise((resolve) => this.clock.setTimeout(resolve, ms));
  }
}
