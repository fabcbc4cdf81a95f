/** A ceiling on bytes per second for everybody who takes from it together. */
import type { Clock } from '../core/parts.ts';

export class Rate {
  readonly #clock: Clock;
  readonly #perMs: number;
  /** boot clock, ms: until then what was taken is paid for */
  #paidUntil = 0;

  /** @param bytesPerSecond 0: no ceiling */
  constructor(clock: Clock, bytesPerSecond: number) {
    this.#clock = clock;
    this.#perMs = bytesPerSecond / 1000;
  }

  /** Waits as long as these bytes take at that rate; those who come later wait behind. */
  async take(bytes: number, signal: AbortSignal): Promise<void> {
    if (this.#perMs === 0) return;
    const now = this.#clock.boot();
    // What was not used is not saved up: a pause is followed by the rate, not by a burst.
    this.#paidUntil = Math.max(now, this.#paidUntil) + bytes / this.#perMs;
    const wait = this.#paidUntil - now;
    if (wait < 1) return;
    await new Promise<void>((resolve) => {
      const end = (): void => {
        signal.removeEventListener('abort', end);
        timer.cancel();
        resolve();
      };
      const timer = this.#clock.setTimeout(end, Math.ceil(wait));
      signal.addEventListener('abort', end, { once: true });
    });
  }
}
