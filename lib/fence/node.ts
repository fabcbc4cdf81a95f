/**
 * A node's side, for all its volumes: the beats that it sends and answers, the polls of the leader, and what
 * csi-node is told. Pure: what must be durable before an answer leaves is handed to the caller as `save`.
 */
import { type VolumeName, volumeKey } from '../core/parts.ts';
import { ActiveFence } from './active.ts';
import { BeatLog } from './beats.ts';
import { ReplicaFence } from './replica.ts';
import { type FenceRules, PROTOCOL } from './rules.ts';
import type {
  FenceBeat,
  FenceBeatReply,
  FenceConsentReply,
  FenceConsentRequest,
  FencePoll,
  FencePollReply,
  FenceVolumeState,
  FencingMode,
  FreezerState,
  ToldSet,
  WriterLease,
} from './types.ts';

/** What the fence of one volume keeps over restarts, beside the volume's own role and epoch. */
export interface FenceState {
  /** highest epoch consented to */
  consented: number;
  longestLeaseMs: number;
  fencing: FencingMode;
  /** epoch whose lease was given back; 0: none */
  released: number;
  /** what the active node was told, and in which epoch */
  told: (ToldSet & { epoch: number }) | null;
}

export const NO_STATE: Readonly<FenceState> = {
  consented: 0,
  longestLeaseMs: 0,
  fencing: 'lease',
  released: 0,
  told: null,
};

export type Role = 'active' | 'replica';

interface Volume extends VolumeName {
  role: Role;
  /** the data plane's own: highest epoch accepted */
  epoch: number;
  fencing: FencingMode;
  released: number;
  told: (ToldSet & { epoch: number }) | null;
  active: ActiveFence | null;
  replica: ReplicaFence;
  /** when the leader last named this epoch as the present one */
  heardAt: number;
}

/** Something to make durable before the answer leaves. */
export interface Save extends VolumeName {
  state: FenceState;
}

export type ReleaseRefusal = 'NOT_ACTIVE' | 'EPOCH_OLD' | 'WRITER_RUNS';

/** How old csi-node's last report may be for "no writer there" to count, ms. */
export const REPORT_FRESH_MS = 3_000;

/** With `none` no writer is started on a node that the leader has not called the active one for this long, ms. */
export const HEARD_MS = 10_000;

export class NodeFence {
  readonly node: string;
  readonly #leaseMs: number;
  readonly #rules: FenceRules;
  readonly #beats: BeatLog;
  readonly #volumes = new Map<string, Volume>();
  #writers: Set<string> = new Set();
  #reportedAt = -Infinity;
  #saidAt = -Infinity;
  #freezer: FreezerState | null = null;

  /** @param firstBeat random, 1..FIRST_BEAT_RANGE */
  constructor(node: string, leaseMs: number, firstBeat: number, rules: FenceRules = PROTOCOL) {
    this.node = node;
    this.#leaseMs = leaseMs;
    this.#rules = rules;
    this.#beats = new BeatLog(firstBeat);
  }

  /** A volume is opened (at the start of the agent, or because it is new): a replica is bound for the whole hold. */
  open(name: VolumeName, role: Role, epoch: number, state: FenceState, now: number): void {
    const volume: Volume = {
      namespace: name.namespace,
      volume: name.volume,
      role,
      epoch,
      fencing: state.fencing,
      released: state.released,
      told: state.told,
      active: null,
      heardAt: -Infinity,
      replica: new ReplicaFence(
        { epoch: Math.max(epoch, state.consented), longestLeaseMs: state.longestLeaseMs },
        now,
        this.#leaseMs,
        this.#rules,
      ),
    };
    if (role === 'active') volume.active = this.#activeFence(volume, now);
    this.#volumes.set(volumeKey(name), volume);
  }

  close(name: VolumeName): void {
    this.#volumes.delete(volumeKey(name));
  }

  /** The highest epoch that it has seen or consented to; 0: the volume is not known. */
  seen(name: VolumeName): number {
    const volume = this.#volumes.get(volumeKey(name));
    return volume ? Math.max(volume.epoch, volume.replica.state.epoch) : 0;
  }

  /** Whether csi-node said last that it has published the volume here. */
  published(name: VolumeName): boolean {
    return this.#writers.has(volumeKey(name));
  }

  /** What is to be durable of a volume now; null: it is not known. */
  state(name: VolumeName): FenceState | null {
    const volume = this.#volumes.get(volumeKey(name));
    return volume ? this.#save(volume).state : null;
  }

  #activeFence(volume: Volume, now: number): ActiveFence {
    const { epoch, told, released } = volume;
    return new ActiveFence(
      {
        epoch,
        released: released === epoch,
        promotable: told?.epoch === epoch ? { version: told.version, nodes: told.nodes } : null,
      },
      now,
      this.#leaseMs,
      this.#rules,
    );
  }

  /**
   * The data plane changed the volume's role or epoch, durably. A node that is made active holds no lease yet; one
   * that steps down must not write any more.
   */
  changed(name: VolumeName, role: Role, epoch: number, now: number): void {
    const volume = this.#volumes.get(volumeKey(name));
    if (!volume) {
      this.open(name, role, epoch, NO_STATE, now);
      return;
    }
    if (volume.role === role && volume.epoch === epoch) return;
    const stepsDown = volume.role === 'active' && role === 'replica';
    volume.role = role;
    volume.epoch = epoch;
    volume.replica.learn(epoch);
    if (role === 'replica') {
      volume.active = null;
      if (stepsDown) volume.replica = new ReplicaFence(volume.replica.state, now, this.#leaseMs, this.#rules);
    } else {
      // Whatever was told in another epoch: until the leader says otherwise, only a lease lets a writer run.
      volume.fencing = 'lease';
      volume.active = this.#activeFence(volume, now);
    }
  }

  /** Takes the set and the mode that the controller tells for the epoch in which this node is active. */
  told(name: VolumeName, epoch: number, set: ToldSet | null, fencing: FencingMode): Save | null {
    const volume = this.#volumes.get(volumeKey(name));
    if (!volume?.active || volume.epoch !== epoch) return null;
    let changed = false;
    if (volume.fencing !== fencing) {
      volume.fencing = fencing;
      changed = true;
    }
    if (set && volume.active.told(set)) {
      volume.told = { epoch, version: set.version, nodes: [...set.nodes] };
      changed = true;
    }
    return changed ? this.#save(volume) : null;
  }

  #save(volume: Volume): Save {
    const { namespace, volume: name, fencing, released, told, replica } = volume;
    const { epoch, longestLeaseMs } = replica.state;
    return { namespace, volume: name, state: { consented: epoch, longestLeaseMs, fencing, released, told } };
  }

  /** Peers that could promise something: the promotable nodes of all volumes that are active here. */
  peers(): string[] {
    const peers = new Set<string>();
    for (const { active, fencing } of this.#volumes.values())
      if (active && fencing === 'lease' && !active.state.released)
        for (const node of active.state.promotable?.nodes ?? []) peers.add(node);
    peers.delete(this.node);
    return [...peers].sort();
  }

  /** The beat for one peer, sent now; null: there is nothing to ask of it. */
  beatFor(peer: string, now: number): FenceBeat | null {
    const volumes = [];
    for (const { namespace, volume, epoch, fencing, active } of this.#volumes.values())
      if (
        active &&
        fencing === 'lease' &&
        !active.state.released &&
        active.state.promotable?.nodes.includes(peer)
      )
        volumes.push({ namespace, volume, epoch });
    return volumes.length === 0 ? null : { node: this.node, beat: this.#beats.send(now), volumes };
  }

  /** @param peer the node that was asked; an answer in another's name counts for nothing */
  beatAnswered(peer: string, reply: FenceBeatReply, now: number): void {
    if (reply.node !== peer) return;
    for (const answer of reply.volumes)
      if (answer.promised)
        this.#volumes
          .get(volumeKey(answer))
          ?.active?.promised(peer, reply.beat, answer.epoch, reply.leaseMs, this.#beats, now);
  }

  /** Answers the beat of another node. The promises bind from now on. */
  beat(request: FenceBeat, now: number): { reply: FenceBeatReply; save: Save[] } {
    const save: Save[] = [];
    const volumes = request.volumes.map((asked) => {
      const { namespace, volume: name, epoch } = asked;
      const volume = this.#volumes.get(volumeKey(asked));
      if (!volume) return { namespace, volume: name, epoch: 0, promised: false };
      let promised = false;
      if (volume.role === 'replica') {
        promised = volume.replica.beat(epoch, now);
        if (promised && volume.replica.mustNoteLease) {
          volume.replica.noteLease();
          save.push(this.#save(volume));
        }
      }
      // A promise names the epoch that it was given for; a refusal the newest one that is known here.
      return {
        namespace,
        volume: name,
        epoch: promised ? epoch : Math.max(volume.epoch, volume.replica.state.epoch),
        promised,
      };
    });
    return { reply: { node: this.node, beat: request.beat, leaseMs: this.#leaseMs, volumes }, save };
  }

  /** Answers a poll of the leader: takes renewals and sets, gives a new beat. */
  poll(request: FencePoll, now: number): { reply: FencePollReply; save: Save[] } {
    const save: Save[] = [];
    for (const item of request.volumes) {
      const volume = this.#volumes.get(volumeKey(item));
      if (!volume?.active) continue;
      if (item.epoch === volume.epoch) volume.heardAt = now;
      // The set first: a renewal must not lengthen what an older set allows.
      const told = this.told(item, item.epoch, item.promotable, item.fencing);
      if (told) save.push(told);
      if (item.renew && request.beat !== null)
        volume.active.renewed(request.beat, item.epoch, request.leaseMs, this.#beats, now);
    }
    const volumes = [...this.#volumes.values()].map((volume) => this.#stateOf(volume, now));
    return {
      reply: {
        node: this.node,
        term: request.term,
        beat: this.#beats.send(now),
        freezer: this.freezer(now),
        volumes,
      },
      save,
    };
  }

  #stateOf(volume: Volume, now: number): FenceVolumeState {
    const { namespace, volume: name, role, epoch, fencing, active, replica } = volume;
    return {
      namespace,
      volume: name,
      role,
      epoch: active ? active.state.epoch : Math.max(epoch, replica.state.epoch),
      released: active?.state.released ?? false,
      fencing,
      promotable: active?.state.promotable ?? null,
      remainingMs: active ? (fencing === 'none' ? null : active.remainingMs(now)) : replica.boundMs(now),
    };
  }

  /** The leader asks for consent to a promotion. */
  consent(request: FenceConsentRequest, now: number): { reply: FenceConsentReply; save: Save[] } {
    const volume = this.#volumes.get(volumeKey(request));
    const { epoch, term } = request;
    const answer = (code: FenceConsentReply['code'], waitMs = 0): FenceConsentReply => ({
      node: this.node,
      epoch,
      term,
      consent: code === 'CONSENT',
      code,
      waitMs,
      seen: volume ? Math.max(volume.epoch, volume.replica.state.epoch) : 0,
    });
    if (!volume) return { reply: answer('UNKNOWN'), save: [] };
    // The active node itself may go on in a new epoch once it has given the present one back.
    if (volume.active && !volume.active.state.released) return { reply: answer('ACTIVE'), save: [] };
    const before = volume.replica.state.epoch;
    const { code, waitMs } = volume.replica.consent(epoch, request.released, request.insist, now);
    return {
      reply: answer(code, waitMs),
      save: volume.replica.state.epoch > before ? [this.#save(volume)] : [],
    };
  }

  /**
   * Gives the lease of `epoch` back for good, when csi-node says that no writer is there.
   * @returns a refusal, or what must be durable before anybody is told
   */
  release(name: VolumeName, epoch: number, now: number): { refused: ReleaseRefusal } | { save: Save | null } {
    const key = volumeKey(name);
    const volume = this.#volumes.get(key);
    if (!volume?.active) return { refused: 'NOT_ACTIVE' };
    if (volume.active.state.epoch !== epoch) return { refused: 'EPOCH_OLD' };
    if (volume.active.state.released) return { save: null };
    if (
      this.#rules.releaseWhenStopped &&
      (this.#writers.has(key) || now - this.#reportedAt > REPORT_FRESH_MS)
    )
      return { refused: 'WRITER_RUNS' };
    volume.active.release();
    volume.released = epoch;
    return { save: this.#save(volume) };
  }

  /** What csi-node says of freezing; when it has been silent for long, nobody on this node would freeze anything. */
  freezer(now: number): FreezerState | null {
    if (this.#freezer === null || now - this.#reportedAt <= REPORT_FRESH_MS) return this.#freezer;
    return { possible: false, reason: 'csi-node does not report to the agent', cgroup: this.#freezer.cgroup };
  }

  /**
   * csi-node says which volumes it has published here, all of them, also those that it has just announced.
   * @param at csi-node's boot clock when it said so: what it said before is not taken after what it said later
   */
  report(writers: readonly VolumeName[], freezer: FreezerState | null, at: number, now: number): void {
    if (at < this.#saidAt) return;
    this.#saidAt = at;
    this.#writers = new Set(writers.map(volumeKey));
    this.#reportedAt = now;
    if (freezer) this.#freezer = freezer;
  }

  /**
   * csi-node is about to publish a volume: from here on it counts as a writer, until a later report says otherwise.
   * @param at as in report()
   * @returns whether and how long it may run. Only this answer, not an earlier one, allows to start a writer: the
   * lease may have been given back, or the volume moved, since that one. With `none` no lease would end a writer that
   * is started on a node which has been replaced without hearing of it, so there the leader must have named it lately.
   */
  announce(name: VolumeName, at: number, now: number): WriterLease {
    const lease = this.lease(name, now);
    if (lease.role !== 'active' || lease.released) return lease;
    const volume = this.#volumes.get(volumeKey(name));
    const replaceable = volume?.active?.state.promotable?.nodes.length !== 0;
    if (lease.fencing === 'none' && replaceable && now - (volume?.heardAt ?? -Infinity) > HEARD_MS)
      return { ...lease, remainingMs: 0 };
    this.#saidAt = Math.max(this.#saidAt, at);
    this.#writers.add(volumeKey(name));
    return lease;
  }

  /** What csi-node may know of a volume. */
  lease(name: VolumeName, now: number): WriterLease {
    const { namespace, volume: named } = name;
    const volume = this.#volumes.get(volumeKey(name));
    if (!volume)
      return {
        namespace,
        volume: named,
        role: 'none',
        epoch: 0,
        fencing: 'lease',
        released: false,
        remainingMs: 0,
      };
    const { role, epoch, fencing, active } = volume;
    return {
      namespace,
      volume: named,
      role,
      epoch,
      fencing,
      released: active?.state.released ?? false,
      remainingMs: !active
        ? 0
        : active.state.released
          ? 0
          : fencing === 'none'
            ? null
            : active.remainingMs(now),
    };
  }
}
