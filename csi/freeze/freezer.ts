/**
 * Holds writers still when their lease has ended. It has its own timer: when the agent hangs, answers nonsense or is
 * gone, every writer is frozen all the same at the last known end. A renewal of the same epoch thaws it. A newer epoch
 * makes its mount harmless, kills it while it is frozen, and thaws it into death.
 */
import type { Logger, VolumeName } from '../../lib/core/parts.ts';
import { volumeKey } from '../../lib/core/parts.ts';
import type { WriterLease } from '../../lib/fence/types.ts';
import { WriterFence } from './writer-fence.ts';

/** What the Freezer needs of a pod's cgroup (cgroup.ts). */
export interface Freezable {
  readonly path: string;
  readonly exists: boolean;
  frozen(): boolean;
  freeze(limitMs?: number): Promise<number>;
  thaw(): Promise<void>;
  kill(): Promise<void>;
}

export interface WriterName extends VolumeName {
  podUid: string;
}

export type WriterState = 'running' | 'frozen' | 'killed';

export interface WriterStatus extends WriterName {
  state: WriterState;
  epoch: number | null;
  /** how long it may still run, ms; null: without end */
  remainingMs: number | null;
  /** what could not be done; null: nothing */
  problem: string | null;
}

export interface FreezerDeps {
  /** monotonic milliseconds that go on while the machine sleeps (CLOCK_BOOTTIME) */
  clock(): number;
  setTimeout(fn: () => void, ms: number): { cancel(): void };
  /** Until when may the writers of these volumes run? May reject or hang; it is given `signal`. */
  ask(volumes: VolumeName[], signal: AbortSignal): Promise<WriterLease[]>;
  /** Replaces what is mounted at the pod by something empty and read-only: kubelet would restart the container on it. */
  makeHarmless(writer: WriterName): Promise<void>;
  /** @throws when the pod has no cgroup that could be frozen */
  find(podUid: string): Freezable;
  log: Logger;
  /** between two questions, ms; default 1000 */
  intervalMs?: number;
  /** after this a question counts as hung and is asked anew, ms; default 2000 */
  askLimitMs?: number;
  /** how long a writer that is taken up anew may run until the first answer, ms; default 500 */
  lookMs?: number;
  changed?(status: WriterStatus): void;
}

interface Writer extends WriterName {
  fence: WriterFence;
  cgroup: Freezable;
  state: WriterState;
  problem: string | null;
  /** an order is being carried out */
  busy: Promise<void> | null;
  removed: boolean;
}

const AGAIN_MS = 100;
const keyOf = (w: WriterName): string => `${volumeKey(w)} ${w.podUid}`;

export class Freezer {
  readonly #deps: FreezerDeps;
  readonly #writers = new Map<string, Writer>();
  #asking: { abort: AbortController; at: number } | null = null;
  #askTimer: { cancel(): void } | null = null;
  #actTimer: { cancel(): void } | null = null;
  #stopped = false;

  constructor(deps: FreezerDeps) {
    this.#deps = deps;
  }

  /**
   * A volume is about to be written by a pod.
   * @param lease the agent's answer to the announcement, and when it was asked for (own clock); null: taken up anew
   * after a restart, then the first thing done is to look whether the lease ran out
   * @param epoch in which the volume was published; durable at the caller, so that a restart does not forget it. null:
   * it was lost, the first answer that calls this node the active one says it
   * @throws what `find` throws: a pod that cannot be frozen must not be published with a lease
   */
  add(name: WriterName, epoch: number | null, lease: { lease: WriterLease; askedAt: number } | null): void {
    const cgroup = this.#deps.find(name.podUid);
    const now = this.#deps.clock();
    // Taken up anew, it may have been frozen by the process before this one. Then it stays so until there is an answer:
    // the time to look is for one that runs.
    const frozen = cgroup.exists && cgroup.frozen();
    const fence = new WriterFence(epoch, lease || frozen ? -Infinity : now + (this.#deps.lookMs ?? 500));
    if (lease) fence.answer(lease.lease, lease.askedAt);
    const { namespace, volume, podUid } = name;
    this.#writers.set(keyOf(name), {
      namespace,
      volume,
      podUid,
      fence,
      cgroup,
      state: frozen ? 'frozen' : 'running',
      problem: null,
      busy: null,
      removed: false,
    });
    this.#act();
    if (!lease || this.#askTimer === null) this.#ask();
  }

  /** The volume was unpublished: kubelet calls that when the pod's containers have ended. */
  async remove(name: WriterName): Promise<void> {
    const writer = this.#writers.get(keyOf(name));
    if (!writer) return;
    writer.removed = true;
    this.#writers.delete(keyOf(name));
    await writer.busy;
  }

  /** Volumes with a writer that may ever write again, for reports to the agent. */
  volumes(): VolumeName[] {
    const seen = new Map<string, VolumeName>();
    for (const { namespace, volume, state } of this.#writers.values())
      if (state !== 'killed') seen.set(volumeKey({ namespace, volume }), { namespace, volume });
    return [...seen.values()];
  }

  status(): WriterStatus[] {
    return [...this.#writers.values()].map((writer) => this.#statusOf(writer));
  }

  #statusOf({ namespace, volume, podUid, state, fence, problem }: Writer): WriterStatus {
    const left = fence.end - this.#deps.clock();
    return {
      namespace,
      volume,
      podUid,
      state,
      epoch: fence.epoch,
      remainingMs: left === Infinity ? null : Math.max(0, left),
      problem,
    };
  }

  /** Asks once more when the last answer came, and every interval. One that hangs does not keep the next from being asked. */
  #ask(): void {
    if (this.#stopped) return;
    this.#askTimer?.cancel();
    this.#askTimer = this.#deps.setTimeout(() => this.#ask(), this.#deps.intervalMs ?? 1_000);
    const now = this.#deps.clock();
    if (this.#asking) {
      if (now - this.#asking.at < (this.#deps.askLimitMs ?? 2_000)) return;
      this.#asking.abort.abort();
    }
    const asking = { abort: new AbortController(), at: now };
    this.#asking = asking;
    const take = (leases: WriterLease[]): void => {
      const byVolume = new Map(leases.map((lease) => [volumeKey(lease), lease]));
      for (const writer of this.#writers.values()) {
        const lease = byVolume.get(volumeKey(writer));
        // What remains counts from when it was asked, however late the answer is.
        if (lease) writer.fence.answer(lease, asking.at);
      }
    };
    (async () => {
      try {
        take(await this.#deps.ask(this.volumes(), asking.abort.signal));
      } catch (error) {
        this.#deps.log.debug(
          { error: (error as Error).message },
          'the agent does not say how long writers may run',
        );
      } finally {
        if (this.#asking === asking) this.#asking = null;
        this.#act();
      }
    })();
  }

  /** Carries out what is due, and wakes up when the next lease ends. */
  #act(): void {
    if (this.#stopped) return;
    this.#actTimer?.cancel();
    const now = this.#deps.clock();
    let next = Infinity;
    for (const writer of this.#writers.values()) {
      const order = writer.fence.decide(now);
      const due =
        order === 'run' ? writer.state === 'frozen' : writer.state === 'running' || order === 'kill';
      if (due && writer.state !== 'killed' && !writer.busy) this.#carryOut(writer);
      if (order === 'run') next = Math.min(next, writer.fence.end - now);
    }
    if (next !== Infinity)
      // setTimeout rounds down to whole milliseconds and may fire one early.
      this.#actTimer = this.#deps.setTimeout(() => this.#act(), Math.max(1, Math.ceil(next)));
  }

  #carryOut(writer: Writer): void {
    const work = (async () => {
      try {
        // The order is asked for again at each step: a renewal or a newer epoch may have come meanwhile.
        const order = writer.fence.decide(this.#deps.clock());
        if (order === 'run') {
          await writer.cgroup.thaw();
          this.#became(writer, 'running');
          return;
        }
        if (writer.state !== 'frozen') {
          await writer.cgroup.freeze();
          this.#became(writer, 'frozen');
        }
        if (writer.fence.decide(this.#deps.clock()) === 'kill') {
          await this.#deps.makeHarmless({
            namespace: writer.namespace,
            volume: writer.volume,
            podUid: writer.podUid,
          });
          await writer.cgroup.kill();
          this.#became(writer, 'killed');
        }
      } catch (error) {
        const problem = (error as Error).message;
        if (problem !== writer.problem) {
          writer.problem = problem;
          this.#deps.log.error(
            { volume: volumeKey(writer), pod: writer.podUid, problem },
            'a writer is not in hand',
          );
          this.#deps.changed?.(this.#statusOf(writer));
        }
        await new Promise<void>((resolve) => this.#deps.setTimeout(resolve, AGAIN_MS));
      }
    })();
    writer.busy = work.finally(() => {
      writer.busy = null;
      if (!writer.removed) this.#act();
    });
  }

  #became(writer: Writer, state: WriterState): void {
    writer.state = state;
    writer.problem = null;
    const status = this.#statusOf(writer);
    this.#deps.log.warn({ ...status, cgroup: writer.cgroup.path }, `the writer is ${state}`);
    this.#deps.changed?.(status);
  }

  /** Stops asking and acting; nothing is thawed. */
  async stop(): Promise<void> {
    this.#stopped = true;
    this.#asking?.abort.abort();
    this.#askTimer?.cancel();
    this.#actTimer?.cancel();
    await Promise.all([...this.#writers.values()].map((writer) => writer.busy));
  }
}
