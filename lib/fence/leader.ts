/**
 * The leading controller's side, for all volumes: renews leases, remembers until when it has granted them, and says
 * when a promotion is safe.
 *
 * It polls each agent once a second. The reply carries the number of a new beat of that node and which volumes are
 * active there; the next poll renews them for that number. The active node counts the renewal from when it sent the
 * reply; the leader counts the hold from when it received that reply, which is later, so the hold covers the lease
 * however late the renewal arrives.
 */
import { type VolumeName, volumeKey } from '../core/parts.ts';
import { type FenceRules, PROTOCOL } from './rules.ts';
import { holdMs, MAX_LEASE_MS } from './timing.ts';
import type {
  FenceConsentReply,
  FencePoll,
  FencePollReply,
  FencePollVolume,
  FencingMode,
  Promotable,
  ToldSet,
} from './types.ts';

/** A volume as its status in the cluster says. */
export interface VolumeRecord extends VolumeName {
  epoch: number;
  activeNode: string | null;
  promotable: Promotable;
  fencing: FencingMode;
}

export type PromotionRefusal =
  | 'NOT_LEADING'
  | 'NOT_READ'
  | 'NOT_PROMOTABLE'
  | 'EPOCH_OLD'
  | 'NO_CONSENT'
  | 'LEASE_GRANTED';

export type PromotionVerdict =
  | { ok: true }
  | { ok: false; code: PromotionRefusal /** LEASE_GRANTED: until it has surely ended, ms */; waitMs: number };

interface Volume {
  record: VolumeRecord;
  /** own clock: every renewal of the present epoch has surely ended */
  until: number;
  /** the same for renewals of earlier epochs that this leader granted */
  earlierUntil: number;
  /** the node that was active in the epoch before gave that lease back for good, so whatever was granted is void */
  earlierGone: boolean;
  /** set versions that the active node has acknowledged in this epoch: exactly this one, last */
  acknowledged: number | null;
  /** the active node gave back the lease of this epoch */
  released: number | null;
  withheld: boolean;
  /** the active node last said that it goes by `none`: its csi-node lets the writer run without end */
  unfenced: boolean;
}

interface Heard {
  beat: number;
  at: number;
  /** active volumes in that reply and their epochs */
  active: Map<string, number>;
}

const union = (set: Promotable): string[] => [...new Set([...set.nodes, ...set.adding])].sort();
export const toldSet = (set: Promotable): ToldSet => ({ version: set.version, nodes: union(set) });

/**
 * The next step from the present set to the wanted one; null: none is due. Whoever writes it uses compare-and-swap on
 * the record that it was made from. Removals first in the status, then told. Additions are told first (`adding`) and
 * become promotable when the active node has acknowledged exactly this version.
 * @param acknowledged the version that the active node is known to hold durably
 */
export function nextPromotable(
  present: Promotable,
  wanted: readonly string[],
  acknowledged: number | null,
  rules: FenceRules = PROTOCOL,
): Promotable | null {
  const version = present.version + 1;
  const nodes = present.nodes.filter((node) => wanted.includes(node));
  const adding = present.adding.filter((node) => wanted.includes(node));
  if (nodes.length < present.nodes.length || adding.length < present.adding.length)
    return { version, nodes, adding };
  if (adding.length > 0 && acknowledged === present.version)
    return { version, nodes: [...new Set([...nodes, ...adding])].sort(), adding: [] };
  const missing = [...new Set(wanted)].filter((node) => !nodes.includes(node) && !adding.includes(node));
  if (missing.length === 0) return null;
  return rules.addInTwoSteps
    ? { version, nodes, adding: [...adding, ...missing].sort() }
    : { version, nodes: [...nodes, ...missing].sort(), adding: [] };
}

export class LeaderFence {
  readonly #leaseMs: number;
  readonly #controller: string;
  readonly #rules: FenceRules;
  #term = 0;
  #leadsUntil = -Infinity;
  /** own clock: whatever an earlier leader granted has surely ended */
  #takeoverUntil = -Infinity;
  readonly #volumes = new Map<string, Volume>();
  readonly #byNode = new Map<string, Set<string>>();
  readonly #heard = new Map<string, Heard>();

  constructor(controller: string, leaseMs: number, rules: FenceRules = PROTOCOL) {
    this.#controller = controller;
    this.#leaseMs = leaseMs;
    this.#rules = rules;
  }

  get term(): number {
    return this.#term;
  }

  /**
   * This controller was just made the leader. All that was known is forgotten: volumes have to be read anew (from the
   * API server, not from a cache that is older than this moment), agents have to be heard anew.
   * @param term grows with every change of leader (the Lease's leaseTransitions)
   * @param leadsUntil own clock: until when the own lease is surely valid
   * @param previousLeaseMs longest lease that an earlier leader granted; null: not known, the longest allowed is waited for
   */
  takeOver(now: number, term: number, leadsUntil: number, previousLeaseMs: number | null): void {
    this.#term = term;
    this.#leadsUntil = leadsUntil;
    this.#heard.clear();
    if (this.#rules.readAfterTakeover) {
      this.#volumes.clear();
      this.#byNode.clear();
    }
    this.#takeoverUntil = this.#rules.waitAfterTakeover
      ? now + holdMs(Math.max(previousLeaseMs ?? MAX_LEASE_MS, this.#leaseMs))
      : -Infinity;
  }

  /** The own lease was renewed. */
  extend(leadsUntil: number): void {
    this.#leadsUntil = Math.max(this.#leadsUntil, leadsUntil);
  }

  /** Leadership was given up or lost. */
  stepDown(): void {
    this.#leadsUntil = -Infinity;
  }

  leads(now: number): boolean {
    return now < this.#leadsUntil;
  }

  /** The status of a volume was read (or written) just now. An older epoch or set than the known one is ignored. */
  observe(record: VolumeRecord): void {
    const key = volumeKey(record);
    const known = this.#volumes.get(key);
    if (!known) {
      this.#volumes.set(key, {
        record,
        until: -Infinity,
        earlierUntil: -Infinity,
        earlierGone: false,
        acknowledged: null,
        released: null,
        withheld: false,
        unfenced: false,
      });
      this.#at(record.activeNode)?.add(key);
      return;
    }
    const old = known.record;
    if (record.epoch < old.epoch) return;
    if (record.epoch === old.epoch && record.promotable.version < old.promotable.version) return;
    if (record.epoch > old.epoch || record.activeNode !== old.activeNode) {
      if (known.released !== old.epoch) known.earlierUntil = Math.max(known.earlierUntil, known.until);
      known.earlierGone = known.released === old.epoch && record.epoch === old.epoch + 1;
      known.until = -Infinity;
      known.acknowledged = null;
      known.released = null;
      known.withheld = false;
      known.unfenced = false;
      this.#at(old.activeNode)?.delete(key);
      this.#at(record.activeNode)?.add(key);
    }
    known.record = record;
  }

  /** The volume is gone from the cluster. */
  forget(name: VolumeName): void {
    const key = volumeKey(name);
    this.#at(this.#volumes.get(key)?.record.activeNode ?? null)?.delete(key);
    this.#volumes.delete(key);
  }

  #at(node: string | null): Set<string> | undefined {
    if (node === null) return undefined;
    let keys = this.#byNode.get(node);
    if (!keys) {
      keys = new Set();
      this.#byNode.set(node, keys);
    }
    return keys;
  }

  /** true: the lease of this volume is not renewed any more, so that it ends although its node answers. */
  withhold(name: VolumeName, withheld: boolean): void {
    const volume = this.#volumes.get(volumeKey(name));
    if (volume) volume.withheld = withheld;
  }

  /** The next poll of an agent; null: this controller does not lead. What it renews is noted as granted. */
  poll(node: string, now: number): FencePoll | null {
    if (this.#rules.onlyWhileLeading && !this.leads(now)) return null;
    const heard = this.#heard.get(node);
    const volumes: FencePollVolume[] = [];
    for (const key of this.#byNode.get(node) ?? []) {
      const volume = this.#volumes.get(key) as Volume;
      const { namespace, volume: name, epoch, fencing, promotable } = volume.record;
      const renew =
        heard !== undefined &&
        heard.active.get(key) === epoch &&
        !volume.withheld &&
        now >= this.#earlier(volume);
      if (renew) volume.until = Math.max(volume.until, heard.at + holdMs(this.#leaseMs));
      volumes.push({ namespace, volume: name, epoch, renew, fencing, promotable: toldSet(promotable) });
    }
    return {
      controller: this.#controller,
      term: this.#term,
      leaseMs: this.#leaseMs,
      beat: heard?.beat ?? null,
      volumes,
    };
  }

  /** An agent's reply to a poll arrived. Replies to polls of another term are ignored. */
  answered(reply: FencePollReply, now: number): void {
    if (reply.term !== this.#term) return;
    const active = new Map<string, number>();
    for (const state of reply.volumes) {
      if (state.role !== 'active') continue;
      const key = volumeKey(state);
      const volume = this.#volumes.get(key);
      if (!state.released) active.set(key, state.epoch);
      else if (volume && state.epoch === volume.record.epoch - 1) volume.earlierGone = true;
      if (!volume || volume.record.activeNode !== reply.node || volume.record.epoch !== state.epoch) continue;
      if (state.released) volume.released = state.epoch;
      // From none to lease: csi-node hears it with its next question, so that is waited for like a grant.
      if (volume.unfenced && state.fencing === 'lease')
        volume.until = Math.max(volume.until, now + holdMs(this.#leaseMs));
      volume.unfenced = state.fencing === 'none';
      const { promotable } = volume.record;
      const holds = state.promotable;
      const exact = this.#rules.exactAcknowledgement
        ? holds?.version === promotable.version
        : promotable.adding.every((one) => holds?.nodes.includes(one));
      if (!exact || volume.acknowledged === promotable.version) continue;
      volume.acknowledged = promotable.version;
      if (this.#rules.waitAfterAddition && promotable.adding.length > 0)
        volume.until = Math.max(volume.until, now + holdMs(this.#leaseMs));
    }
    this.#heard.set(reply.node, { beat: reply.beat, at: now, active });
  }

  /** The version of the set that the active node is known to hold durably; null: not known. */
  acknowledged(name: VolumeName): number | null {
    return this.#volumes.get(volumeKey(name))?.acknowledged ?? null;
  }

  /** The epoch that the active node has released; null: none. */
  released(name: VolumeName): number | null {
    return this.#volumes.get(volumeKey(name))?.released ?? null;
  }

  /** Until when the own grants of earlier epochs may hold. */
  #earlier(volume: Volume): number {
    return this.#rules.waitBeforeActivating ? volume.earlierUntil : -Infinity;
  }

  /**
   * How long the node that the record calls active must not be activated yet (watch/start), ms; null: this controller
   * does not lead or has not read the volume. A write of an earlier leader, or an own one whose answer was lost, may
   * arrive when the lease that it waited for has been renewed again; so what moved is activated only when nothing
   * granted meanwhile can be valid. 0 in all ordinary cases, and when the node before has given its lease back for good:
   * it could do so only while it was active, so what was granted before its own epoch had ended already.
   */
  activationWaitMs(name: VolumeName, now: number): number | null {
    const volume = this.#volumes.get(volumeKey(name));
    if (!volume || (this.#rules.onlyWhileLeading && !this.leads(now))) return null;
    if (!this.#rules.waitBeforeActivating || volume.record.epoch <= 1) return 0;
    const takeover = volume.earlierGone ? -Infinity : this.#takeoverUntil;
    return Math.max(0, Math.ceil(Math.max(volume.earlierUntil, takeover) - now));
  }

  /**
   * How long until no lease of this volume can be valid any more, ms; 0: the fence is over; null: this controller does
   * not lead or has not read the volume since it leads. While the active node has not confirmed a change from `none` to
   * `lease` nothing ends by itself: it stays above 0 until the node answers or the mode is `none` again.
   */
  fenceWaitMs(name: VolumeName, now: number): number | null {
    const volume = this.#volumes.get(volumeKey(name));
    if (!volume || (this.#rules.onlyWhileLeading && !this.leads(now))) return null;
    if (volume.record.fencing === 'none' || volume.released === volume.record.epoch) return 0;
    if (volume.unfenced) return holdMs(MAX_LEASE_MS);
    const granted = this.#rules.waitForGrants ? Math.max(volume.until, volume.earlierUntil) : -Infinity;
    return Math.max(0, Math.ceil(Math.max(granted, this.#takeoverUntil) - now));
  }

  /**
   * Whether the promotion of `target` into `epoch` may be written now, by compare-and-swap on the status that was
   * observed last. Ask again right before the write.
   */
  mayPromote(
    name: VolumeName,
    target: string,
    epoch: number,
    consent: FenceConsentReply | null,
    now: number,
  ): PromotionVerdict {
    const no = (code: PromotionRefusal, waitMs = 0): PromotionVerdict => ({ ok: false, code, waitMs });
    if (this.#rules.onlyWhileLeading && !this.leads(now)) return no('NOT_LEADING');
    const volume = this.#volumes.get(volumeKey(name));
    if (!volume) return no('NOT_READ');
    if (epoch <= volume.record.epoch) return no('EPOCH_OLD');
    // The released node itself may be made active again, in a new epoch.
    const again = target === volume.record.activeNode && volume.released === volume.record.epoch;
    if (!again && !volume.record.promotable.nodes.includes(target)) return no('NOT_PROMOTABLE');
    if (
      !consent?.consent ||
      consent.node !== target ||
      consent.epoch !== epoch ||
      consent.term !== this.#term
    )
      return no('NO_CONSENT');
    const waitMs = this.fenceWaitMs(name, now) ?? 0;
    return waitMs > 0 ? no('LEASE_GRANTED', waitMs) : { ok: true };
  }
}
