import type { Clock } from '../core/parts.ts';

/** As kept in the volume's state. */
export interface SavedFreshness {
  bootId: string;
  bootMs: number;
  wallMs: number;
}

export const SAVE_EVERY_MS = 10_000;

/**
 * When this replica was last known to hold everything, on its own boot clock. Only ever moves forward. After a
 * reboot the old boot clock means nothing, so the wall clock has to bridge it; `byWallClock` says so until the
 * source speaks again.
 */
export class Freshness {
  readonly #clock: Clock;
  readonly #bootId: string;
  #at: number | null = null;
  #byWallClock = false;
  #saved: number | null = null;
  #savedWhen = -Infinity;

  constructor(clock: Clock, bootId: string) {
    this.#clock = clock;
    this.#bootId = bootId;
  }

  load(saved: SavedFreshness | undefined): void {
    if (!saved) return;
    if (saved.bootId === this.#bootId) {
      this.#at = saved.bootMs;
    } else {
      const age = this.#clock.now() - saved.wallMs;
      // a wall clock that stands before the saved time was set back: then nothing can be said
      this.#at = age < 0 ? null : this.#clock.boot() - age;
      this.#byWallClock = this.#at !== null;
    }
    this.#saved = this.#at;
  }

  /** `at`: boot clock in ms as of which everything is held. Older values and values of the future change nothing. */
  advance(at: number): void {
    if (!(at <= this.#clock.boot())) return;
    if (this.#at !== null && at <= this.#at) return;
    this.#at = at;
    this.#byWallClock = false;
  }

  /** The replica no longer holds what it was fresh with (its tree went to the backups). */
  forget(): void {
    this.#at = null;
    this.#byWallClock = false;
  }

  get at(): number | null {
    return this.#at;
  }
  get byWallClock(): boolean {
    return this.#byWallClock;
  }
  get ageMs(): number | null {
    return this.#at === null ? null : Math.max(0, this.#clock.boot() - this.#at);
  }

  /** What to keep now, null when nothing changed or it was kept less than 10 s ago. */
  toSave(force: boolean): SavedFreshness | null {
    const boot = this.#clock.boot();
    if (this.#at === null || this.#at === this.#saved) return null;
    if (!force && boot - this.#savedWhen < SAVE_EVERY_MS) return null;
    this.#saved = this.#at;
    this.#savedWhen = boot;
    return { bootId: this.#bootId, bootMs: this.#at, wallMs: this.#clock.now() - (boot - this.#at) };
  }
}
