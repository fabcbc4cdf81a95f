/** One agent of this node: its pool, and everything that csi-node and it tell each other about writers. */
import type { Logger, VolumeName } from '../../lib/core/parts.ts';
import { volumeKey } from '../../lib/core/parts.ts';
import type { FreezerState, SizeOutcome, WriterLease } from '../../lib/fence/types.ts';
import type { AgentSocket } from '../freeze/agent-client.ts';
import { type Freezable, Freezer, type WriterName } from '../freeze/freezer.ts';

export interface About {
  node: string;
  pool: string;
  path: string;
}

export interface PoolAgentDeps {
  socket: AgentSocket;
  /** CLOCK_BOOTTIME, ms */
  clock(): number;
  freezer: FreezerState;
  /** what is on the disk as published in this pool and may be written */
  written(pool: string): VolumeName[];
  /** what became of their sizes */
  sizes(names: readonly VolumeName[]): SizeOutcome[];
  find(podUid: string): Freezable;
  makeHarmless(writer: WriterName): Promise<void>;
  /** the agent's newest word about all that is published */
  heard(pool: string, leases: readonly WriterLease[]): void;
  /** it has said for the first time which pool it serves; before anything else is said to it */
  learnt(about: About): void;
  log: Logger;
  reportMs?: number;
}

const REPORT_MS = 1_000;

export class PoolAgent {
  readonly #deps: PoolAgentDeps;
  readonly freezer: Freezer;
  /** announced and not yet on the disk: every report names them */
  readonly #announced = new Map<string, VolumeName>();
  #about: About | null;
  #saidAt = 0;
  #reportedAt = Number.NEGATIVE_INFINITY;
  #timer: NodeJS.Timeout | null = null;
  #stopped = false;
  #looking: Promise<About | null> | null = null;
  /** why the agent did not answer last; null: it did */
  problem: string | null = 'the agent has not been asked yet';

  constructor(deps: PoolAgentDeps, known: About | null) {
    this.#deps = deps;
    this.#about = known;
    this.freezer = new Freezer({
      clock: deps.clock,
      setTimeout: (fn, ms) => {
        const timer = setTimeout(fn, ms);
        return { cancel: () => clearTimeout(timer) };
      },
      ask: (_volumes, signal) => this.#report(signal),
      makeHarmless: deps.makeHarmless,
      find: deps.find,
      log: deps.log,
      ...(deps.reportMs === undefined ? {} : { intervalMs: deps.reportMs }),
    });
  }

  get about(): About | null {
    return this.#about;
  }

  /** Which pool it serves: asked until it was said once; a pool never changes its agent's socket. */
  look(): Promise<About | null> {
    if (this.#about) return Promise.resolve(this.#about);
    this.#looking ??= (async () => {
      try {
        const about = await this.#deps.socket.pool();
        this.#about = about;
        this.#deps.learnt(about);
        this.problem = null;
      } catch (error) {
        this.problem = (error as Error).message;
      } finally {
        this.#looking = null;
      }
      return this.#about;
    })();
    return this.#looking;
  }

  start(): void {
    const tick = async (): Promise<void> => {
      if (this.#stopped) return;
      this.#timer = setTimeout(() => void tick(), this.#deps.reportMs ?? REPORT_MS);
      if (!this.#about && !(await this.look())) return;
      // The Freezer asks by itself as long as it has a writer.
      if (this.#deps.clock() - this.#reportedAt >= (this.#deps.reportMs ?? REPORT_MS) * 0.8)
        await this.#report(AbortSignal.timeout(2_000)).catch(() => undefined);
    };
    void tick();
  }

  async stop(): Promise<void> {
    this.#stopped = true;
    if (this.#timer) clearTimeout(this.#timer);
    await this.freezer.stop();
  }

  /** No two things are said at the same moment, so that the agent knows what was said last. */
  #now(): number {
    this.#saidAt = Math.max(this.#deps.clock(), this.#saidAt + 0.001);
    return this.#saidAt;
  }

  async #report(signal: AbortSignal): Promise<WriterLease[]> {
    const about = this.#about;
    if (!about) throw new Error(this.problem ?? 'the pool of the agent is not known');
    const writers = new Map<string, VolumeName>(this.#announced);
    for (const { namespace, volume } of this.#deps.written(about.pool))
      writers.set(volumeKey({ namespace, volume }), { namespace, volume });
    this.#reportedAt = this.#deps.clock();
    try {
      const names = [...writers.values()];
      const reply = await this.#deps.socket.report(
        { at: this.#now(), writers: names, freezer: this.#deps.freezer, sizes: this.#deps.sizes(names) },
        signal,
      );
      this.problem = null;
      this.#deps.heard(about.pool, reply.volumes);
      return reply.volumes;
    } catch (error) {
      this.problem = (error as Error).message;
      throw error;
    }
  }

  /** Said before a volume is published; from here on it counts as written, until `unannounce`. */
  async announce(name: VolumeName): Promise<{ lease: WriterLease; askedAt: number }> {
    this.#announced.set(volumeKey(name), { namespace: name.namespace, volume: name.volume });
    const askedAt = this.#deps.clock();
    const { namespace, volume } = name;
    const lease = await this.#deps.socket.announce({ namespace, volume, at: this.#now() });
    this.problem = null;
    return { lease, askedAt };
  }

  /** It is on the disk now, or it came to nothing. */
  unannounce(name: VolumeName): void {
    this.#announced.delete(volumeKey(name));
  }

  /** Says anew at once what is published. */
  async reportNow(): Promise<void> {
    await this.#report(AbortSignal.timeout(1_000)).catch(() => undefined);
  }

  /** How long the writer may run; asked without announcing anything. */
  lease(name: VolumeName): Promise<WriterLease> {
    return this.#deps.socket.lease(name);
  }
}
