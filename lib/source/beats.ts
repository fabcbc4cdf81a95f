/**
 * The steady beat from a source to its replicas: one small request per pair of nodes and interval, for all volumes
 * between the two. It tells each replica whether it holds everything, and carries the replica's own clock back to
 * it, so that freshness is counted on one clock and from the asking side (docs/architecture.md, "Freshness").
 */

import { formatGeneration, type Generation } from '../core/generation.ts';
import type { HttpClient } from '../core/http-client.ts';
import type { Clock, Logger, Target, VolumeName } from '../core/parts.ts';
import { volumeKey } from '../core/parts.ts';

export interface BeatVolume extends VolumeName {
  epoch: number;
  /**
   * The newest sealed generation, and whether it is all there is, both of the same moment. When it is not, `asOf` is
   * the target's clock as of which it held everything, null: not known.
   */
  look(target: Target): { generation: Generation | null; complete: boolean; asOf: number | null };
  /** what the target answered for this volume; epoch: the highest that it has seen */
  answer(target: Target, generation: string | null, state: string, epoch: number): void;
}

interface BeatReply {
  node: string;
  clock: number;
  volumes: { namespace: string; volume: string; epoch: number; generation: string | null; state: string }[];
}

interface Pair {
  target: Target;
  members: { target: Target; volume: BeatVolume }[];
  /** the replica's clock in its last answer; null: none yet */
  echo: number | null;
  node: string | null;
  answeredAt: number | null;
  timer: { cancel(): void } | null;
  beating: Promise<void> | null;
  failures: number;
}

export interface BeatsDeps {
  http: HttpClient;
  clock: Clock;
  log: Logger;
  node: string;
  bootId: string;
  /** milliseconds between two beats */
  intervalMs: number;
  /**
   * Resolves when every event that the kernel holds at this moment is known (watcher.barrier): without it a state
   * could be called complete while a change still waits in the queue.
   */
  settle?: () => Promise<void>;
}

const keyOf = (target: Target): string => `${target.url}\n${target.token}`;

export class Beats {
  readonly #deps: BeatsDeps;
  readonly #pairs = new Map<string, Pair>();
  readonly #abort = new AbortController();

  constructor(deps: BeatsDeps) {
    this.#deps = deps;
  }

  #pair(target: Target): Pair {
    const key = keyOf(target);
    let pair = this.#pairs.get(key);
    if (!pair) {
      pair = {
        target,
        members: [],
        echo: null,
        node: null,
        answeredAt: null,
        timer: null,
        beating: null,
        failures: 0,
      };
      this.#pairs.set(key, pair);
    }
    return pair;
  }

  add(target: Target, volume: BeatVolume): void {
    const pair = this.#pair(target);
    pair.members.push({ target, volume });
    if (!pair.timer && !pair.beating) void this.#beat(pair);
  }

  remove(target: Target, volume: BeatVolume): void {
    const pair = this.#pairs.get(keyOf(target));
    if (!pair) return;
    pair.members = pair.members.filter((m) => m.volume !== volume);
    if (pair.members.length > 0) return;
    pair.timer?.cancel();
    this.#pairs.delete(keyOf(target));
  }

  /** The clock that the target sent with its last answer: whatever is looked at from now on is later than it. */
  echo(target: Target): number | null {
    return this.#pairs.get(keyOf(target))?.echo ?? null;
  }

  /** Milliseconds since the target's last answer; null: never. */
  lastAnswerMs(target: Target): number | null {
    const at = this.#pairs.get(keyOf(target))?.answeredAt ?? null;
    return at === null ? null : Math.round(this.#deps.clock.boot() - at);
  }

  /** The node's name, asked of the target if it is not known yet. */
  async nodeOf(target: Target, signal: AbortSignal): Promise<string> {
    const known = this.#pairs.get(keyOf(target))?.node;
    if (known) return known;
    const { body } = await this.#call(target, [], signal);
    return body.node;
  }

  #call(
    target: Target,
    volumes: object[],
    signal: AbortSignal,
  ): Promise<{ status: number; body: BeatReply }> {
    return this.#deps.http.call<BeatReply>({
      method: 'POST',
      url: `${target.url}/replication/beat`,
      token: target.token,
      timeoutMs: Math.max(2000, this.#deps.intervalMs * 2),
      signal,
      body: { node: this.#deps.node, bootId: this.#deps.bootId, volumes },
    });
  }

  async #beat(pair: Pair): Promise<void> {
    pair.timer = null;
    const work = (async () => {
      // The order matters: the echo is taken before the state is looked at.
      const { echo } = pair;
      let settled = true;
      try {
        await this.#deps.settle?.();
      } catch {
        // No watcher right now: a change may wait in the kernel's queue, so nothing is called complete.
        settled = false;
      }
      const members = [...pair.members];
      const volumes = members.flatMap(({ target, volume }) => {
        try {
          const { generation, complete, asOf } = volume.look(target);
          const now = complete && settled;
          return [
            {
              namespace: volume.namespace,
              volume: volume.volume,
              epoch: volume.epoch,
              generation: generation && formatGeneration(generation),
              // complete as of the echo
              complete: now || asOf !== null,
              echo: now ? echo : (asOf ?? echo),
            },
          ];
        } catch (error) {
          this.#failed(volume, error);
          return [];
        }
      });
      try {
        const { body } = await this.#call(pair.target, volumes, this.#abort.signal);
        pair.echo = body.clock;
        pair.node = body.node;
        pair.answeredAt = this.#deps.clock.boot();
        pair.failures = 0;
        const answers = new Map(body.volumes.map((v) => [volumeKey(v), v]));
        for (const { target, volume } of members) {
          target.node ??= body.node;
          const answer = answers.get(volumeKey(volume));
          try {
            if (answer) volume.answer(target, answer.generation, answer.state, answer.epoch);
          } catch (error) {
            this.#failed(volume, error);
          }
        }
      } catch (error) {
        pair.failures++;
        if (pair.failures === 5)
          this.#deps.log.warn(
            { target: pair.node ?? pair.target.url, error: (error as Error).message },
            'a replica does not answer beats',
          );
      }
    })();
    pair.beating = work;
    await work;
    pair.beating = null;
    if (this.#abort.signal.aborted || pair.members.length === 0) return;
    pair.timer = this.#deps.clock.setTimeout(() => void this.#beat(pair), this.#deps.intervalMs);
  }

  #failed(volume: BeatVolume, error: unknown): void {
    this.#deps.log.debug(
      { volume: volumeKey(volume), error: (error as Error).message },
      'a volume could not take part in a beat',
    );
  }

  async stop(): Promise<void> {
    this.#abort.abort();
    const running = [...this.#pairs.values()].map((p) => {
      p.timer?.cancel();
      return p.beating;
    });
    await Promise.all(running);
    this.#pairs.clear();
  }
}
