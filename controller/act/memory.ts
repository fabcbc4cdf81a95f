/**
 * What one volume's actions remember of themselves, and the long ones among them: they run beside the queue, so that a
 * last flush of a large volume takes no slot from others. All of it may be lost at any time; the step is done again then.
 */
import { errorText } from '../cluster/index.ts';
import type { Clock } from '../cluster/types.ts';
import type { Memory } from '../plan/types.ts';

const KEPT = 10;

/** 0.5 to 1 */
export const drawShare = (): number => 0.5 + Math.random() / 2;

interface Ended {
  tag: string;
  ok: boolean;
  error: string | null;
  at: number;
}

export class VolumeMemory {
  private readonly clock: Clock;
  private readonly prepared: (Ended & { generation: string | null; confirmed: string[] })[] = [];
  private readonly caughtUp: Ended[] = [];
  private readonly running = new Map<string, AbortController>();
  readonly fullSyncs = new Map<
    string,
    Map<string, { id: string | null; state: 'running' | 'done' | 'failed'; error: string | null }>
  >();

  /** what the mirror object was last made to say, by this process */
  mirrored: string | null = null;
  /** what the owner of a stuck pod said last */
  owner: { key: string; at: number; wants: boolean } | null = null;
  /** the size that was refused last, and when */
  refusedSize: { bytes: number; at: number } | null = null;
  /** how much of the longest time its ages are left as they are, drawn anew with every write: volumes take turns */
  agesShare = drawShare();
  /** looks in a row in which something failed */
  failures = 0;

  constructor(clock: Clock) {
    this.clock = clock;
  }

  /** Starts a long action unless one of its tag runs already. `ended` is called however it ends. */
  run(tag: string, work: (signal: AbortSignal) => Promise<void>, ended: () => void): void {
    if (this.running.has(tag)) return;
    const cancel = new AbortController();
    this.running.set(tag, cancel);
    void work(cancel.signal)
      .catch(() => {})
      .then(() => {
        if (this.running.get(tag) === cancel) this.running.delete(tag);
        if (!cancel.signal.aborted) ended();
      });
  }

  get busy(): number {
    return this.running.size;
  }

  notePrepared(tag: string, generation: string | null, confirmed: string[], error: unknown): void {
    this.prepared.push({
      tag,
      ok: error === null,
      generation,
      confirmed,
      error: error === null ? null : errorText(error),
      at: this.clock.boot(),
    });
    if (this.prepared.length > KEPT) this.prepared.shift();
  }

  noteCaughtUp(tag: string, error: unknown): void {
    this.caughtUp.push({
      tag,
      ok: error === null,
      error: error === null ? null : errorText(error),
      at: this.clock.boot(),
    });
    if (this.caughtUp.length > KEPT) this.caughtUp.shift();
  }

  /** As the planner reads it. */
  view(manual: { id: string; requestedAt: number } | null): Memory {
    const now = this.clock.boot();
    return {
      prepared: this.prepared.map(({ at, ...one }) => ({ ...one, ageMs: now - at })),
      caughtUp: this.caughtUp.map(({ at, ...one }) => ({ ...one, ageMs: now - at })),
      fullSyncs: [...this.fullSyncs].flatMap(([run, nodes]) =>
        [...nodes].map(([node, { state, error }]) => ({ run, node, state, error })),
      ),
      manualSyncs: manual === null ? [] : [manual],
    };
  }

  /** Ends everything that runs: leadership is over, or the volume is gone. */
  cancel(): void {
    for (const cancel of this.running.values()) cancel.abort();
    this.running.clear();
    this.fullSyncs.clear();
    this.prepared.length = 0;
    this.caughtUp.length = 0;
    this.mirrored = null;
  }
}
