/**
 * The agent's part of fencing: sends the beats, answers those of others, the polls of the leader and the questions of
 * csi-node, and makes durable what lib/fence wants durable before an answer leaves. The protocol itself is lib/fence.
 */
import { randomInt } from 'node:crypto';
import { SimpleVolumeError } from '../core/errors.ts';
import { createHttpClient, type HttpClient, type HttpClientOptions } from '../core/http-client.ts';
import { type Clock, type Logger, type VolumeName, volumeKey } from '../core/parts.ts';
import type { VolumeStore } from '../core/store.ts';
import { FIRST_BEAT_RANGE } from '../fence/beats.ts';
import { type FenceState, NO_STATE, NodeFence, type Role, type Save } from '../fence/node.ts';
import { BEAT_MS } from '../fence/timing.ts';
import type {
  FenceBeat,
  FenceBeatReply,
  FenceConsentReply,
  FenceConsentRequest,
  FencePoll,
  FencePollReply,
  FenceReleaseReply,
  FenceReleaseRequest,
  WriterAnnouncement,
  WriterLease,
  WriterReport,
  WriterReportReply,
} from '../fence/types.ts';

/** Under which the store of a volume keeps the fence's state. */
const META = 'fence';
/** How long an answer waits for a disk; past it the answer grants nothing that is not durable. */
const SAVE_LIMIT_MS = 1_000;
const BEAT_LIMIT_MS = 2_000;

interface Open {
  store: VolumeStore;
  /** the write under way; true: what was wanted is durable */
  saving: Promise<boolean> | null;
  /** something is not durable yet */
  dirty: boolean;
}

export interface FencingDeps {
  node: string;
  leaseMs: number;
  clock: Clock;
  log: Logger;
  /** how a peer of this volume's node name is reached; null: not known */
  peer(node: string): { url: string; token: string } | null;
  /** how agents that serve TLS are checked */
  tls: HttpClientOptions;
  /** how they are called; default: over HTTP, by `tls` */
  http?: HttpClient;
}

export class Fencing {
  readonly #deps: FencingDeps;
  readonly #fence: NodeFence;
  readonly #open = new Map<string, Open>();
  /** its own connections: a beat must not wait behind a transfer's requests */
  readonly #http: HttpClient;
  readonly #abort = new AbortController();
  #timer: { cancel(): void } | null = null;

  constructor(deps: FencingDeps) {
    this.#deps = deps;
    this.#http = deps.http ?? createHttpClient({ maxSockets: 2, ...deps.tls });
    this.#fence = new NodeFence(deps.node, deps.leaseMs, randomInt(1, FIRST_BEAT_RANGE));
  }

  start(): void {
    this.#beat();
  }

  async stop(): Promise<void> {
    this.#abort.abort();
    this.#timer?.cancel();
    this.#http.close();
    await Promise.all([...this.#open.values()].map((one) => one.saving));
  }

  #now(): number {
    return this.#deps.clock.boot();
  }

  /** A volume was opened on this node. As a replica it is bound for the whole hold from now on. */
  opened(name: VolumeName, role: Role, epoch: number, store: VolumeStore): void {
    this.#open.set(volumeKey(name), { store, saving: null, dirty: false });
    this.#fence.open(name, role, epoch, store.meta<FenceState>(META) ?? NO_STATE, this.#now());
  }

  /** The data plane made a role or an epoch durable. */
  changed(name: VolumeName, role: Role, epoch: number): void {
    this.#fence.changed(name, role, epoch, this.#now());
  }

  /** The pool closes: nothing is promised, renewed or consented to for it any more. */
  async closed(name: VolumeName): Promise<void> {
    this.#fence.close(name);
    const open = this.#open.get(volumeKey(name));
    this.#open.delete(volumeKey(name));
    await open?.saving;
  }

  /** Writes what is not durable yet; one write at a time per volume, always of the newest state. */
  #save(key: string, name: VolumeName): Promise<boolean> {
    const open = this.#open.get(key);
    if (!open) return Promise.resolve(false);
    open.saving ??= (async () => {
      try {
        while (open.dirty) {
          open.dirty = false;
          const state = this.#fence.state(name);
          if (!state) return false;
          try {
            await open.store.transaction(() => open.store.setMeta(META, state));
            await open.store.durable();
          } catch (error) {
            open.dirty = true;
            throw error;
          }
        }
        return true;
      } catch (error) {
        this.#deps.log.error(
          { volume: key, err: error as Error },
          'the state of the fence cannot be written: nothing is promised or acknowledged for this volume',
        );
        return false;
      } finally {
        open.saving = null;
      }
    })();
    return open.saving;
  }

  /**
   * Waits until all that was ever handed out as `save` for these volumes is durable.
   * @returns the keys of those that are not, in time
   */
  async #durable(names: readonly VolumeName[], saves: readonly Save[]): Promise<Set<string>> {
    for (const save of saves) {
      const open = this.#open.get(volumeKey(save));
      if (open) open.dirty = true;
    }
    const missing = new Set<string>();
    const waits: Promise<void>[] = [];
    for (const name of names) {
      const key = volumeKey(name);
      const open = this.#open.get(key);
      if (!open || (!open.dirty && !open.saving)) continue;
      missing.add(key);
      waits.push(
        this.#save(key, name).then((done) => {
          if (done) missing.delete(key);
        }),
      );
    }
    if (waits.length === 0) return missing;
    let timer: { cancel(): void } | null = null;
    const late = new Promise<void>((resolve) => {
      timer = this.#deps.clock.setTimeout(resolve, SAVE_LIMIT_MS);
    });
    await Promise.race([Promise.all(waits), late]);
    (timer as { cancel(): void } | null)?.cancel();
    // What becomes durable after this was not, for this answer.
    return new Set(missing);
  }

  /** POST /replication/fence/beat */
  async beat(request: FenceBeat): Promise<FenceBeatReply> {
    const { reply, save } = this.#fence.beat(request, this.#now());
    const missing = await this.#durable(reply.volumes, save);
    if (missing.size === 0) return reply;
    return {
      ...reply,
      volumes: reply.volumes.map((one) => (missing.has(volumeKey(one)) ? { ...one, promised: false } : one)),
    };
  }

  /** POST /replication/fence/poll */
  async poll(request: FencePoll): Promise<FencePollReply> {
    const { reply, save } = this.#fence.poll(request, this.#now());
    const missing = await this.#durable(reply.volumes, save);
    if (missing.size === 0) return reply;
    return {
      ...reply,
      volumes: reply.volumes.map((one) =>
        missing.has(volumeKey(one)) ? { ...one, promotable: null, released: false } : one,
      ),
    };
  }

  /** POST /replication/fence/consent @throws NOT_READY when the consent cannot be made durable */
  async consent(request: FenceConsentRequest): Promise<FenceConsentReply> {
    const { reply, save } = this.#fence.consent(request, this.#now());
    if ((await this.#durable([request], save)).size > 0)
      throw new SimpleVolumeError('NOT_READY', `the consent for ${volumeKey(request)} cannot be written now`);
    return reply;
  }

  /**
   * POST /replication/fence/release
   * @throws NOT_ACTIVE, EPOCH_OLD, VOLUME_IN_USE while a writer may be there, NOT_READY when it cannot be made durable
   */
  async release(request: FenceReleaseRequest): Promise<FenceReleaseReply> {
    const answer = this.#fence.release(request, request.epoch, this.#now());
    const key = volumeKey(request);
    const { node } = this.#deps;
    if ('refused' in answer) {
      switch (answer.refused) {
        case 'NOT_ACTIVE':
          throw new SimpleVolumeError('NOT_ACTIVE', `${node} is not the active node of ${key}`, { node });
        case 'EPOCH_OLD':
          throw new SimpleVolumeError(
            'EPOCH_OLD',
            `${node} is not active for ${key} in epoch ${request.epoch}`,
            { field: 'epoch' },
          );
        case 'WRITER_RUNS':
          throw new SimpleVolumeError(
            'VOLUME_IN_USE',
            `${key} is published on ${node}, or csi-node there has not said for seconds that it is not`,
            { node },
          );
      }
    }
    if ((await this.#durable([request], answer.save ? [answer.save] : [])).size > 0)
      throw new SimpleVolumeError('NOT_READY', `the release of ${key} cannot be written now`);
    return { node, epoch: request.epoch, released: true };
  }

  /** csi-node's report of all that it has published. */
  report(request: WriterReport): WriterReportReply {
    const now = this.#now();
    this.#fence.report(request.writers, request.freezer, request.at, now);
    return { node: this.#deps.node, volumes: request.writers.map((name) => this.#fence.lease(name, now)) };
  }

  announce(request: WriterAnnouncement): WriterLease {
    return this.#fence.announce(request, request.at, this.#now());
  }

  seen(name: VolumeName): number {
    return this.#fence.seen(name);
  }

  published(name: VolumeName): boolean {
    return this.#fence.published(name);
  }

  lease(name: VolumeName): WriterLease {
    return this.#fence.lease(name, this.#now());
  }

  /** Once a second one beat to each peer; a peer that does not answer keeps no other from its beat. */
  #beat(): void {
    if (this.#abort.signal.aborted) return;
    this.#timer = this.#deps.clock.setTimeout(() => this.#beat(), BEAT_MS);
    for (const peer of this.#fence.peers()) void this.#beatTo(peer);
  }

  async #beatTo(peer: string): Promise<void> {
    const address = this.#deps.peer(peer);
    if (!address) return;
    const body = this.#fence.beatFor(peer, this.#now());
    if (!body) return;
    try {
      const reply = await this.#http.call<FenceBeatReply>({
        method: 'POST',
        url: `${address.url}/replication/fence/beat`,
        token: address.token,
        timeoutMs: BEAT_LIMIT_MS,
        signal: this.#abort.signal,
        body,
      });
      if (reply.body.beat === body.beat) this.#fence.beatAnswered(peer, reply.body, this.#now());
    } catch (error) {
      this.#deps.log.debug({ peer, error: (error as Error).message }, 'a beat of the fence was not answered');
    }
  }
}
