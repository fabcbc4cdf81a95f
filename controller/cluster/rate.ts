/** A token bucket, as a line of reserved times: who comes later goes later, and after a pause nobody goes early. */
import type { Clock } from './types.ts';

export interface RateLimitOptions {
  /** requests a second in the long run */
  perSecond: number;
  /** requests that may go at once after quiet */
  burst: number;
  clock: Clock;
}

export class RateLimit {
  private readonly clock: Clock;
  private readonly spacing: number;
  private readonly slack: number;
  /** When the next token is due if they were handed out one by one, ms on the own clock. */
  private next = Number.NEGATIVE_INFINITY;
  private paused = Number.NEGATIVE_INFINITY;

  constructor(options: RateLimitOptions) {
    this.clock = options.clock;
    this.spacing = 1000 / options.perSecond;
    this.slack = this.spacing * (options.burst - 1);
  }

  /** Takes a token. @returns milliseconds to wait until it may be used */
  reserve(): number {
    const now = this.clock.boot();
    this.next = Math.max(this.next, now) + this.spacing;
    return Math.max(0, this.next - this.spacing - this.slack - now, this.paused - now);
  }

  /** Nobody goes for this long: the server asked for it. */
  pause(ms: number): void {
    this.paused = Math.max(this.paused, this.clock.boot() + ms);
  }

  /** Milliseconds that a pause still lasts. */
  pausedMs(): number {
    return Math.max(0, this.paused - this.clock.boot());
  }
}
