/**
 * Gives memory back once work is over: a scan or a seed leaves the allocator with pages that it holds and nobody
 * uses (8 MiB after a scan of 110,000 entries). Under steady work it happens now and then.
 */
export interface GiveBackDeps {
  /** giveBackMemory */
  trim(): Promise<void>;
  /** Whether something is under way that tells nothing of itself between two looks. */
  busy(): boolean;
}

/** Looks of uninterrupted work after which memory is given back all the same. */
const STEADY = 12;

export class GiveBack {
  readonly #deps: GiveBackDeps;
  #worked = false;
  #due = false;
  #looks = 0;

  constructor(deps: GiveBackDeps) {
    this.#deps = deps;
  }

  /** Something was done that takes memory. */
  worked(): void {
    this.#worked = true;
  }

  /** Called every few seconds. Memory is given back at the first look that finds nothing done since the last one. */
  async look(): Promise<void> {
    const worked = this.#worked;
    this.#worked = false;
    this.#due ||= worked;
    if (!this.#due) return;
    if ((worked || this.#deps.busy()) && ++this.#looks < STEADY) return;
    this.#looks = 0;
    this.#due = false;
    await this.#deps.trim();
  }
}
