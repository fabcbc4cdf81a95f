/**
 * Telling the replicas of a sealed generation. Each target has a lane of its own that knows only the newest
 * generation: a target that is slow, down or hung delays nobody, misses nothing (it asks for the difference from
 * what it holds), and is never given up.
 */

import {
  compareGenerations,
  formatGeneration,
  type Generation,
  parseGeneration,
} from '../core/generation.ts';
import { type HttpClient, RemoteError } from '../core/http-client.ts';
import type { Clock, Logger, Target, TargetStatus, VolumeName } from '../core/parts.ts';
import type { VolumePolicy } from '../core/policy.ts';
import type { Beats } from './beats.ts';

const FIRST_BACKOFF_MS = 250;
const LAST_BACKOFF_MS = 30_000;
const REQUEST_MS = 10_000;
/** A replica that took a generation and went quiet without holding it is told again after this time. */
const REMIND_MS = 5_000;
/** Cuts that are remembered: a file that did not hold still for longer leaves the freshness unknown. */
const CUTS = 1_000;

export interface DeliveryDeps {
  http: HttpClient;
  clock: Clock;
  /** names the volume in each of its lines */
  log: Logger;
  beats: Beats;
  /** this node's name */
  node: string;
  /** a grant for one target node and this volume */
  grant(scope: VolumeName & { epoch: number; node: string }): string;
  /** 0..1, injected so that tests are repeatable */
  random(): number;
}

export interface DeliveryOptions extends VolumeName {
  epoch: number;
  url: string;
  webdavUrl: string;
  targets: Target[];
  policy: VolumePolicy;
}

interface Lane {
  target: Target;
  confirmed: Generation | null;
  state: string;
  lastError: string | null;
  /** what the replica was last told, and when (boot clock) */
  told: Generation | null;
  toldAt: number;
  sending: boolean;
  failures: number;
  timer: { cancel(): void } | null;
  /** a newer epoch exists: this writer has been replaced, nothing more is sent */
  superseded: boolean;
}

export class Delivery implements VolumeName {
  readonly namespace: string;
  readonly volume: string;
  readonly epoch: number;
  readonly #deps: DeliveryDeps;
  readonly #options: DeliveryOptions;
  readonly #lanes: Lane[];
  readonly #abort = new AbortController();
  #newest: Generation | null = null;
  /** per target: its own clock as of which nothing else was pending when the newest generation was cut */
  #echoes = new Map<Target, number | null>();
  /** the same per cut, for those that a later generation may still be as of */
  readonly #cuts = new Map<number, Map<Target, number | null>>();
  #waiting: (() => void)[] = [];

  constructor(deps: DeliveryDeps, options: DeliveryOptions) {
    this.#deps = deps;
    this.#options = options;
    this.namespace = options.namespace;
    this.volume = options.volume;
    this.epoch = options.epoch;
    this.#lanes = options.targets.map((target) => ({
      target,
      confirmed: null,
      state: 'unknown',
      lastError: null,
      told: null,
      toldAt: -Infinity,
      sending: false,
      failures: 0,
      timer: null,
      superseded: false,
    }));
  }

  /** where replicas are told to fetch */
  get source(): { url: string; webdavUrl: string } {
    const { url, webdavUrl } = this.#options;
    return { url, webdavUrl };
  }

  get targets(): Target[] {
    return this.#options.targets;
  }

  /** Right before the marks of a batch are taken: all that happens before now will be in it. */
  cut(number: number): void {
    this.#cuts.set(number, new Map(this.#lanes.map((l) => [l.target, this.#deps.beats.echo(l.target)])));
    if (this.#cuts.size > CUTS) this.#cuts.delete(this.#cuts.keys().next().value as number);
  }

  /**
   * A generation exists. Every lane goes for it.
   * @param asOf number of the last cut of which it holds everything; unknown cuts say nothing about freshness
   */
  sealed(generation: Generation, asOf: number): void {
    this.#newest = generation;
    this.#echoes = this.#cuts.get(asOf) ?? new Map();
    for (const number of this.#cuts.keys()) if (number < asOf) this.#cuts.delete(number);
    for (const lane of this.#lanes) this.#kick(lane);
  }

  /** The target's clock at a cut; null: not known (any more). */
  echoAt(target: Target, cut: number | null): number | null {
    return cut === null ? null : (this.#cuts.get(cut)?.get(target) ?? null);
  }

  /** After a restart: the generation is known, when it was cut is not. */
  resume(generation: Generation): void {
    this.sealed(generation, -1);
  }

  #kick(lane: Lane): void {
    if (this.#abort.signal.aborted || lane.superseded || lane.sending) return;
    lane.timer?.cancel();
    lane.timer = null;
    void this.#send(lane);
  }

  async #send(lane: Lane): Promise<void> {
    // Both of one moment: a newer generation may be sealed while this one is on its way.
    const generation = this.#newest;
    const echo = this.#echoes.get(lane.target) ?? null;
    if (!generation || (lane.confirmed && compareGenerations(lane.confirmed, generation) >= 0)) return;
    lane.sending = true;
    try {
      const node = lane.target.node ?? (await this.#deps.beats.nodeOf(lane.target, this.#abort.signal));
      lane.target.node = node;
      const { namespace, volume, epoch, url, webdavUrl, policy } = this.#options;
      const reply = await this.#deps.http.call<{ state: string; generation: string | null }>({
        method: 'POST',
        url: `${lane.target.url}/replication/sync-batch`,
        token: lane.target.token,
        timeoutMs: REQUEST_MS,
        signal: this.#abort.signal,
        body: {
          namespace,
          volume,
          epoch,
          generation: formatGeneration(generation),
          source: {
            url,
            webdavUrl,
            node: this.#deps.node,
            grant: this.#deps.grant({ namespace, volume, epoch, node }),
          },
          echo,
          policy: {
            includePaths: policy.includePaths,
            excludePaths: policy.excludePaths,
            pruneExcluded: policy.pruneExcluded,
            requiredPaths: policy.requiredPaths,
            ownerUid: policy.ownerUid,
            ownerGid: policy.ownerGid,
            fileMode: policy.fileMode,
            dirMode: policy.dirMode,
          },
        },
      });
      lane.told = generation;
      lane.toldAt = this.#deps.clock.boot();
      lane.state = reply.body.state;
      lane.lastError = null;
      lane.failures = 0;
    } catch (error) {
      this.#failed(lane, error);
    } finally {
      lane.sending = false;
    }
    // A newer generation may have come while this one was told.
    if (lane.timer === null && this.#newest && lane.told !== this.#newest) this.#kick(lane);
  }

  #failed(lane: Lane, error: unknown): void {
    if (this.#abort.signal.aborted) return;
    const { code, message } = error as RemoteError;
    lane.lastError = message;
    if (code === 'EPOCH_OLD') {
      this.#supersede(lane);
      return;
    }
    const base = Math.min(FIRST_BACKOFF_MS * 2 ** lane.failures, LAST_BACKOFF_MS);
    lane.failures++;
    lane.state = error instanceof RemoteError && error.answered !== null ? 'refused' : 'unreachable';
    if (lane.failures === 1 || lane.failures % 20 === 0)
      this.#deps.log.warn(
        {
          target: lane.target.node ?? lane.target.url,
          error: message,
          failures: lane.failures,
        },
        'a target could not be told of a generation; it is tried again',
      );
    // Jitter, so that targets that came back together are not asked together.
    lane.timer = this.#deps.clock.setTimeout(
      () => {
        lane.timer = null;
        this.#kick(lane);
      },
      base / 2 + (this.#deps.random() * base) / 2,
    );
  }

  /** A newer epoch exists: nothing more is sent, and what the replica holds from now on is not of this line. */
  #supersede(lane: Lane): void {
    if (lane.superseded) return;
    lane.superseded = true;
    lane.state = 'superseded';
    lane.timer?.cancel();
    lane.timer = null;
    this.#deps.log.error(
      { target: lane.target.node, epoch: this.epoch },
      'a newer epoch of this volume exists: this node is no longer its active one',
    );
  }

  /**
   * A replica confirms what it has just applied. Confirmations may be late: an older one takes nothing back, only
   * the answer to a beat tells what is held now.
   */
  holds(node: string, generation: Generation, state: string): void {
    for (const lane of this.#lanes) {
      if (lane.target.node !== node || lane.superseded || generation.epoch > this.epoch) continue;
      if (lane.confirmed && compareGenerations(generation, lane.confirmed) < 0) continue;
      lane.confirmed = generation;
      lane.state = state;
      lane.lastError = null;
    }
    for (const wake of this.#waiting.splice(0)) wake();
  }

  /**
   * The answer to a beat: a replica that lags and does nothing about it is told again (it may have restarted).
   * @param epoch highest that the replica has seen
   */
  beat(target: Target, generation: string | null, state: string, epoch: number): void {
    const lane = this.#lanes.find((l) => l.target === target);
    if (!lane || lane.superseded) return;
    if (epoch > this.epoch) {
      this.#supersede(lane);
      return;
    }
    lane.state = state;
    const held = generation ? parseGeneration(generation) : null;
    if (held && (!lane.confirmed || compareGenerations(held, lane.confirmed) !== 0)) {
      lane.confirmed = held.epoch <= this.epoch ? held : lane.confirmed;
      for (const wake of this.#waiting.splice(0)) wake();
    }
    if (!held) lane.confirmed = null;
    const lags = this.#newest !== null && (held === null || compareGenerations(held, this.#newest) < 0);
    const idle = state !== 'pulling' && state !== 'verifying' && state !== 'applying';
    if (lags && idle && this.#deps.clock.boot() - lane.toldAt > REMIND_MS) this.#kick(lane);
  }

  /** Nodes that hold `generation` or a newer one of this line. */
  holders(generation: Generation): string[] {
    return this.#lanes
      .filter((l) => l.confirmed !== null && compareGenerations(l.confirmed, generation) >= 0)
      .map((l) => l.target.node ?? l.target.url);
  }

  /** Highest generation that `confirmedReplicas` replicas hold. With 0 the newest counts as delivered at once. */
  delivered(): Generation | null {
    const wanted = this.#options.policy.confirmedReplicas;
    if (wanted === 0) return this.#newest;
    const held = this.#lanes
      .flatMap((l) => (l.confirmed ? [l.confirmed] : []))
      .sort((a, b) => compareGenerations(b, a));
    return held[wanted - 1] ?? null;
  }

  /** Resolves when `count` nodes hold `generation`, or with those that do when the time is over. */
  async waitForHolders(generation: Generation, count: number, timeoutMs: number): Promise<string[]> {
    const end = this.#deps.clock.boot() + timeoutMs;
    while (this.holders(generation).length < count) {
      const left = end - this.#deps.clock.boot();
      if (left <= 0 || this.#abort.signal.aborted) break;
      await new Promise<void>((resolve) => {
        const timer = this.#deps.clock.setTimeout(resolve, Math.min(left, 1000));
        this.#waiting.push(() => {
          timer.cancel();
          resolve();
        });
      });
    }
    return this.holders(generation);
  }

  status(): TargetStatus[] {
    return this.#lanes.map((l) => ({
      url: l.target.url,
      node: l.target.node,
      confirmed: l.confirmed && formatGeneration(l.confirmed),
      state: l.state,
      lastError: l.lastError,
      lastAnswerMs: this.#deps.beats.lastAnswerMs(l.target),
    }));
  }

  /** Whether some target has refused this writer as replaced. */
  superseded(): boolean {
    return this.#lanes.some((l) => l.superseded);
  }

  stop(): void {
    this.#abort.abort();
    for (const lane of this.#lanes) lane.timer?.cancel();
    for (const wake of this.#waiting.splice(0)) wake();
  }
}
