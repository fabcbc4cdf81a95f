export interface FullSyncRun {
  id: string;
  state: 'running' | 'done' | 'failed';
  error?: string;
  generation?: string;
}

/** Finished runs that can still be asked for. */
const KEPT = 100;
/** A run that failed this often has failed; the replica goes on trying by itself. */
const ATTEMPTS = 3;

/** The full syncs that somebody asked for, and what came of them. At most one is running. */
export class FullRuns {
  readonly #runs = new Map<string, FullSyncRun>();
  #current: { run: FullSyncRun; failures: number } | null = null;

  start(id: string): FullSyncRun {
    const run: FullSyncRun = { id, state: 'running' };
    this.#runs.set(id, run);
    for (const old of this.#runs.keys()) {
      if (this.#runs.size <= KEPT) break;
      this.#runs.delete(old);
    }
    this.#current = { run, failures: 0 };
    return run;
  }
  get current(): FullSyncRun | null {
    return this.#current?.run ?? null;
  }
  get(id: string): FullSyncRun | null {
    const run = this.#runs.get(id);
    return run ? { ...run } : null;
  }
  done(generation: string): void {
    if (!this.#current) return;
    Object.assign(this.#current.run, { state: 'done', generation });
    delete this.#current.run.error;
    this.#current = null;
  }
  failed(error: string, final: boolean): void {
    if (!this.#current) return;
    this.#current.run.error = error;
    if (!final && ++this.#current.failures < ATTEMPTS) return;
    this.#current.run.state = 'failed';
    this.#current = null;
  }
}
