/**
 * The decision to fail a volume over, as a pure function: plain data in, plain data out, no clock, no I/O.
 * Whoever wants to know when and why a volume moves reads this file alone.
 *
 * The rules, in the order in which they are asked:
 *  1. failover is opt-in; a volume that nobody wants, a finished Job, a pod that is still being started are no
 *     failures;
 *  2. a cordoned node, a pod that waits on another node, a broken pod on a node that still answers: a planned
 *     move (last flush, confirmation, then promotion: nothing is lost), never a failover;
 *  3. a failover waits for the grace period and for the old writer to be stopped (the lease, or without one
 *     Kubernetes' NotReady);
 *  4. a candidate is a reachable replica on a Ready, schedulable node that the workload fits on, holds a whole
 *     generation of the newest epoch, is not applying one, and was known complete within the allowed staleness;
 *  5. priority chooses the place, freshness the data: the node priority list first, then the newest generation,
 *     then the name; a newer generation on another live replica is fetched before the promotion;
 *  6. no candidate: nothing is promoted, each replica says why, and only an operator can decide otherwise.
 */
import {
  compareGenerations,
  type Generation,
  isAncestor,
  parseGeneration,
} from '../../lib/core/generation.ts';
import type { CopyState } from '../../lib/core/replica-state.ts';

/**
 * What a replica is doing. `pulling` and `behind` still hold one whole, older generation; `applying` does not.
 * `error` is a fault of the replica's own (no space); a pull that failed because the source is gone is `behind`.
 */
export type ReplicaState = CopyState;

export interface FailoverNode {
  name: string;
  ready: boolean;
  schedulable: boolean;
  /** Its agent answers. */
  reachable: boolean;
  /** Whether the workload could run there (requests, taints, affinity, pod slots, pool space), worked out elsewhere. */
  fit: { ok: boolean; reason?: string };
}

export interface FailoverVolume {
  namespace: string;
  name: string;
  /** Epoch of the cluster's own record, a positive integer. */
  epoch: number;
  activeNode: string | null;
  failoverEnabled: boolean;
  /** How long there must be no healthy pod before a failover, in milliseconds. */
  gracePeriodMs: number;
  /** How old the promoted copy may be at most, in milliseconds. */
  maxStalenessMs: number;
  /** Preferred nodes, best first. */
  nodePriority: readonly string[];
  /**
   * `[epoch, firstSeq]` of every epoch so far, ascending. A copy of an older epoch counts only when this list
   * shows that it lies on the line of the newest one; without the list it never counts.
   */
  lineage?: readonly (readonly [number, number])[];
  /**
   * Generation that the active node held when it was chosen: the line of its epoch goes on from there. A copy that is at
   * it, or before it in the same epoch, lies on the line although it has heard nothing of the new one.
   */
  base?: string | null;
  /** `lease`: the old writer is frozen when its lease ends. `none`: nobody stops it, NotReady is the only evidence. */
  fencing: 'lease' | 'none';
  /** With `lease`: the lease ended for certain, also on a slow clock. Ignored with `none`. */
  leaseEnded: boolean;
  /** A planned move has begun: that nobody wants the volume now does not end it. */
  moving?: boolean;
}

/**
 * Why there is no healthy pod. `pending`: a pod is on its way (image pull, init containers, volume mount);
 * `unschedulable`: a pod is wanted and no node takes it; `no-pod`: one is wanted and there is none;
 * `unhealthy`: it is there and broken; `completed`: it ended as planned; `no-demand`: nobody wants one.
 */
export type WorkloadCause = 'no-demand' | 'no-pod' | 'pending' | 'unschedulable' | 'completed' | 'unhealthy';

export interface FailoverWorkload {
  /** A healthy pod uses the volume on the active node. */
  healthyPod: boolean;
  /** Since when there is none (the clock of `now`), null: the observer has not noticed it before. */
  withoutSince: number | null;
  cause?: WorkloadCause;
  /** Node of a pod that was scheduled elsewhere and waits for its mount. */
  waitingOn?: string | null;
}

export interface FailoverReplica {
  node: string;
  /** Generation that it holds whole, `<epoch>-<seq>`; null: none yet. */
  generation: string | null;
  /** Highest epoch that it has seen. */
  epoch: number;
  state: ReplicaState;
  /** Milliseconds since it was last known complete, as it said in its last report; null: it never was. */
  freshAgeMs: number | null;
  /** Milliseconds since that report was made. */
  reportAgeMs: number;
  reachable: boolean;
  /** Its tree is mounted into a pod on its own node. */
  inUse: boolean;
}

/** An operator's own decision. It lifts opt-in, grace, staleness, fit and epoch; never what makes a copy half of one. */
export interface FailoverForce {
  node: string;
  reason: string;
  by?: string;
}

export interface FailoverInput {
  /** Milliseconds on the caller's clock; only differences with `withoutSince` are looked at. */
  now: number;
  volume: FailoverVolume;
  workload: FailoverWorkload;
  nodes: readonly FailoverNode[];
  replicas: readonly FailoverReplica[];
  force?: FailoverForce | null;
}

export type FailoverAction = 'none' | 'wait' | 'promote' | 'refuse' | 'planned-move';

/** Why the decision as a whole is what it is. Stable: Events, conditions and metrics carry them. */
export type DecisionCode =
  | 'HEALTHY'
  | 'DISABLED'
  | 'NO_ACTIVE_NODE'
  | 'NO_DEMAND'
  | 'COMPLETED'
  | 'STARTING'
  | 'GRACE'
  | 'FENCE_PENDING'
  | 'FENCE_IMPOSSIBLE'
  | 'CANDIDATE_BUSY'
  | 'NO_TARGET'
  | 'NO_CANDIDATE'
  | 'EPOCH_AHEAD'
  | 'FORCE_INVALID'
  | 'FORCED'
  | 'CORDONED'
  | 'POD_ELSEWHERE'
  | 'NODE_LOST'
  | 'WORKLOAD_LOST';

/** Why a replica was refused or chosen. Stable. */
export type ReplicaCode =
  | 'ACTIVE_NODE'
  | 'DUPLICATE_REPORT'
  | 'NODE_UNKNOWN'
  | 'NODE_NOT_READY'
  | 'NODE_UNSCHEDULABLE'
  | 'UNREACHABLE'
  | 'IN_USE'
  | 'NO_COPY'
  | 'APPLYING'
  | 'STATE_UNKNOWN'
  | 'REPLICA_ERROR'
  | 'EPOCH_OLD'
  | 'EPOCH_AHEAD'
  | 'DIVERGED'
  | 'FRESHNESS_UNKNOWN'
  | 'STALE'
  | 'NO_FIT'
  | 'NOT_FORCED'
  | 'FORCED'
  | 'PRIORITY'
  | 'NEWEST_GENERATION'
  | 'SAME_GENERATION_BY_NAME'
  | 'POD_WAITS_THERE'
  | 'BEHIND_ANOTHER';

export interface ReplicaReason {
  code: ReplicaCode;
  text: string;
}

export interface ReplicaVerdict {
  node: string;
  verdict: 'chosen' | 'eligible' | 'refused';
  reasons: ReplicaReason[];
}

export interface FailoverDecision {
  action: FailoverAction;
  code: DecisionCode;
  /** Node to be made active (promote, planned-move). */
  target?: string;
  /** A live replica that holds a newer generation than the target: the target pulls it from there first. */
  catchUpFrom?: string;
  /** The epoch after the decision: one more for a promotion or a planned move, else the present one. */
  epoch: number;
  /** One or two sentences for an Event. */
  because: string;
  /** Sorted by node name. */
  perReplica: ReplicaVerdict[];
  /** Promotion only: what is lost at most, and the generation that goes on. `atMostMs` null: nobody can tell. */
  dataLoss?: { atMostMs: number | null; generation: string };
}

/** null for anything that is no generation. */
function readGeneration(text: string | null): Generation | null {
  if (text === null) return null;
  try {
    return parseGeneration(text);
  } catch {
    return null;
  }
}

function byName(a: string, b: string): number {
  return a < b ? -1 : a > b ? 1 : 0;
}

function isAge(value: number | null): value is number {
  return value !== null && Number.isFinite(value) && value >= 0;
}

/** Age of a copy now: what the replica said, plus how long ago it said so. null: nobody knows. */
function ageOf(replica: FailoverReplica): number | null {
  return isAge(replica.freshAgeMs) && isAge(replica.reportAgeMs)
    ? replica.freshAgeMs + replica.reportAgeMs
    : null;
}

function seconds(ms: number): string {
  return `${(ms / 1000).toFixed(1)} s`;
}

/** Whether the active node began with this generation, or with a newer one of its epoch. */
function atBase(generation: Generation | null, volume: FailoverVolume): boolean {
  const base = readGeneration(volume.base ?? null);
  return (
    base !== null &&
    generation !== null &&
    generation.epoch === base.epoch &&
    generation.epoch <= volume.epoch &&
    generation.seq <= base.seq
  );
}

/** Whether a generation lies on the line of the newest epoch. */
function onLine(generation: Generation, volume: FailoverVolume): boolean {
  if (generation.epoch === volume.epoch || atBase(generation, volume)) return true;
  if (volume.lineage === undefined || generation.epoch > volume.epoch) return false;
  const newest = { epoch: volume.epoch, seq: Number.MAX_SAFE_INTEGER - 1 };
  return isAncestor(
    generation,
    volume.lineage.map(([epoch, first]): [number, number] => [epoch, first]),
    newest,
  );
}

interface Judged {
  replica: FailoverReplica;
  generation: Generation | null;
  age: number | null;
  /** Nothing, not even an operator, can overrule these. */
  hard: ReplicaReason[];
  /** An operator who names the node overrules these. */
  soft: ReplicaReason[];
  /** Can hand its generation to another node, whether or not it may be promoted itself. */
  servesData: boolean;
}

/** Looks at one replica by itself. */
function judge(replica: FailoverReplica, input: FailoverInput, duplicate: boolean): Judged {
  const { volume } = input;
  const hard: ReplicaReason[] = [];
  const soft: ReplicaReason[] = [];
  const node = input.nodes.find((one) => one.name === replica.node);
  const generation = readGeneration(replica.generation);
  const age = ageOf(replica);

  if (duplicate) hard.push({ code: 'DUPLICATE_REPORT', text: 'two replicas report under this node name' });
  if (replica.node === volume.activeNode) {
    hard.push({ code: 'ACTIVE_NODE', text: 'it is the active node that the volume leaves' });
  }
  if (node === undefined) hard.push({ code: 'NODE_UNKNOWN', text: 'the cluster has no such node' });
  else {
    if (!node.ready) hard.push({ code: 'NODE_NOT_READY', text: 'the node is not Ready' });
    if (!node.schedulable)
      hard.push({ code: 'NODE_UNSCHEDULABLE', text: 'the node takes no new pods (cordoned or drained)' });
    if (!node.fit.ok)
      soft.push({
        code: 'NO_FIT',
        text: `the workload does not fit there: ${node.fit.reason ?? 'no reason given'}`,
      });
  }
  const reachable = replica.reachable && (node === undefined || node.reachable);
  if (!reachable) hard.push({ code: 'UNREACHABLE', text: 'its agent does not answer' });
  if (replica.inUse) hard.push({ code: 'IN_USE', text: 'its tree is mounted into a pod there' });
  if (generation === null) hard.push({ code: 'NO_COPY', text: 'it holds no whole generation yet' });
  if (replica.state === 'applying')
    hard.push({ code: 'APPLYING', text: 'it is in the middle of applying a generation' });
  if (replica.state === 'unknown')
    hard.push({ code: 'STATE_UNKNOWN', text: 'nobody knows what it is doing' });
  if (replica.state === 'error') soft.push({ code: 'REPLICA_ERROR', text: 'it reports an error' });

  if (replica.epoch > volume.epoch || (generation !== null && generation.epoch > volume.epoch)) {
    hard.push({
      code: 'EPOCH_AHEAD',
      text: `it has seen epoch ${Math.max(replica.epoch, generation?.epoch ?? 0)}, newer than the cluster's record (${volume.epoch})`,
    });
  } else if (replica.epoch < volume.epoch && !atBase(generation, volume)) {
    soft.push({
      code: 'EPOCH_OLD',
      text: `it has only seen epoch ${replica.epoch}, the volume is at ${volume.epoch}`,
    });
  } else if (generation !== null && !onLine(generation, volume)) {
    soft.push({
      code: 'DIVERGED',
      text: `its generation ${replica.generation} is not on the line of epoch ${volume.epoch}: another copy went on without it`,
    });
  }

  if (age === null) soft.push({ code: 'FRESHNESS_UNKNOWN', text: 'it was never known to be complete' });
  else if (age > volume.maxStalenessMs) {
    soft.push({
      code: 'STALE',
      text: `last known complete ${seconds(age)} ago, allowed are ${seconds(volume.maxStalenessMs)}`,
    });
  }
  const servesData =
    reachable &&
    !duplicate &&
    replica.node !== volume.activeNode &&
    generation !== null &&
    (replica.epoch === volume.epoch || atBase(generation, volume)) &&
    onLine(generation, volume) &&
    replica.state !== 'applying' &&
    replica.state !== 'unknown';
  return { replica, generation, age, hard, soft, servesData };
}

interface Ranked {
  judged: Judged & { generation: Generation };
  rank: number;
}

function priorityOf(volume: FailoverVolume, node: string): number {
  const at = volume.nodePriority.indexOf(node);
  return at < 0 ? Number.MAX_SAFE_INTEGER : at;
}

/** Best place first: priority list, newest generation, name. */
function order(candidates: readonly Judged[], volume: FailoverVolume): Ranked[] {
  return candidates
    .flatMap((judged) =>
      judged.generation === null
        ? []
        : [
            {
              judged: { ...judged, generation: judged.generation },
              rank: priorityOf(volume, judged.replica.node),
            },
          ],
    )
    .sort(
      (a, b) =>
        a.rank - b.rank ||
        compareGenerations(b.judged.generation, a.judged.generation) ||
        byName(a.judged.replica.node, b.judged.replica.node),
    );
}

/** The replica that has the newest generation of all that can still be read, if newer than the given one. */
function newerElsewhere(
  all: readonly Judged[],
  chosen: Judged & { generation: Generation },
): Judged | undefined {
  return all
    .filter(
      (one) =>
        one.servesData &&
        one.generation !== null &&
        compareGenerations(one.generation, chosen.generation) > 0,
    )
    .sort(
      (a, b) =>
        compareGenerations(b.generation as Generation, a.generation as Generation) ||
        byName(a.replica.node, b.replica.node),
    )[0];
}

function whyChosen(ranked: readonly Ranked[], chosen: Ranked): ReplicaReason {
  if (chosen.rank !== Number.MAX_SAFE_INTEGER) {
    return { code: 'PRIORITY', text: `first candidate on the node priority list (place ${chosen.rank + 1})` };
  }
  const generation = chosen.judged.replica.generation;
  const tie = ranked.some(
    (one) => one !== chosen && compareGenerations(one.judged.generation, chosen.judged.generation) === 0,
  );
  return tie
    ? {
        code: 'SAME_GENERATION_BY_NAME',
        text: `newest generation (${generation}), first of its holders by name`,
      }
    : { code: 'NEWEST_GENERATION', text: `newest generation of all candidates (${generation})` };
}

/**
 * Decides what to do with one volume.
 *
 * Pure and total: the same input gives the same decision, the order of `nodes` and `replicas` does not matter,
 * nothing is thrown. Ages and periods are milliseconds.
 */
export function decideFailover(input: FailoverInput): FailoverDecision {
  const { volume, workload } = input;
  const count = new Map<string, number>();
  for (const replica of input.replicas) count.set(replica.node, (count.get(replica.node) ?? 0) + 1);
  const judged = [...input.replicas]
    .sort((a, b) => byName(a.node, b.node) || byName(JSON.stringify(a), JSON.stringify(b)))
    .map((replica) => judge(replica, input, (count.get(replica.node) ?? 0) > 1));

  const verdicts = (extra: ReadonlyMap<string, ReplicaVerdict> = new Map()): ReplicaVerdict[] =>
    judged.map((one) => {
      const given = extra.get(one.replica.node);
      if (given !== undefined) return given;
      const reasons = [...one.hard, ...one.soft];
      return { node: one.replica.node, verdict: reasons.length === 0 ? 'eligible' : 'refused', reasons };
    });
  const stay = (action: FailoverAction, code: DecisionCode, because: string): FailoverDecision => ({
    action,
    code,
    epoch: volume.epoch,
    because,
    perReplica: verdicts(),
  });

  // An epoch that the cluster's record does not know means that the record is the old one. Whatever was
  // decided from it could contradict a promotion that has already happened.
  const ahead = judged.filter((one) => one.hard.some((reason) => reason.code === 'EPOCH_AHEAD'));
  const active = input.nodes.find((one) => one.name === volume.activeNode);
  const activeReady = active?.ready === true;
  // A pod that the API server still calls healthy on a node that is not Ready proves nothing: its state is the
  // last one that the kubelet could report.
  const healthy = workload.healthyPod && activeReady;
  const force = input.force ?? null;

  if (volume.activeNode === null) {
    return stay(
      'none',
      'NO_ACTIVE_NODE',
      'The volume has no active node yet: there is nothing to move away from.',
    );
  }
  const activeName = volume.activeNode;
  if (force === null) {
    if (!volume.failoverEnabled) return stay('none', 'DISABLED', 'Failover is not enabled for this volume.');
    if (healthy && active.schedulable) {
      return stay('none', 'HEALTHY', `A healthy pod uses the volume on ${activeName}.`);
    }
    // A workload that was stopped for a move is wanted again in a moment: a StatefulSet makes its next pod only when the
    // old one is gone.
    if (!healthy && volume.moving !== true) {
      if (workload.cause === 'no-demand')
        return stay('none', 'NO_DEMAND', 'No workload wants the volume now.');
      if (workload.cause === 'completed') return stay('none', 'COMPLETED', 'The workload ended as planned.');
    }
  }
  if (ahead.length > 0) {
    const names = ahead.map((one) => one.replica.node).join(', ');
    return stay(
      'refuse',
      'EPOCH_AHEAD',
      `${names} has seen a newer epoch than the cluster's record (${volume.epoch}). The record is out of date; nothing is decided from it.`,
    );
  }

  const waitingOn = workload.waitingOn ?? null;
  const podElsewhere = waitingOn !== null && waitingOn !== activeName;
  const sourceAlive = activeReady && active.reachable;

  if (force === null && !podElsewhere && !healthy && workload.cause === 'pending' && activeReady) {
    return stay(
      'none',
      'STARTING',
      `A pod is being started on ${activeName} (image, init containers or mount); that is no failure.`,
    );
  }

  if (force !== null) {
    return decideForced(input, force, judged, { healthy, sourceAlive, activeReady, verdicts, stay });
  }

  // 2. As long as the source lives, moving is lossless, and nothing but a planned move is right.
  if (sourceAlive && (podElsewhere || !active.schedulable)) {
    const code: DecisionCode = podElsewhere ? 'POD_ELSEWHERE' : 'CORDONED';
    const why = podElsewhere
      ? `a pod waits for it on ${waitingOn}`
      : `${activeName} takes no new pods (cordoned or drained)`;
    return plannedMove(input, judged, code, why, podElsewhere ? waitingOn : null, verdicts, stay);
  }
  if (healthy) {
    // Cordoned, and its agent does not answer: the pod runs, so nothing is urgent, and a last flush is impossible.
    return stay(
      'wait',
      'CORDONED',
      `${activeName} is cordoned, its pod is healthy, and its agent does not answer: the move waits for the agent.`,
    );
  }

  // 3. Grace.
  const since = workload.withoutSince;
  const without = since === null ? 0 : Math.max(0, input.now - since);
  if (since === null || without < volume.gracePeriodMs) {
    return stay(
      'wait',
      'GRACE',
      `No healthy pod for ${seconds(without)}; the grace period is ${seconds(volume.gracePeriodMs)}.`,
    );
  }
  if (sourceAlive) {
    return plannedMove(
      input,
      judged,
      'WORKLOAD_LOST',
      `there was no healthy pod on ${activeName} for ${seconds(without)} although the node answers`,
      null,
      verdicts,
      stay,
    );
  }

  // 4. Candidates.
  const ranked = order(
    judged.filter((one) => one.hard.length === 0 && one.soft.length === 0),
    volume,
  );
  const chosen = ranked[0];
  if (chosen === undefined) {
    const onlyBusy = judged.filter(
      (one) => one.soft.length === 0 && one.hard.length === 1 && one.hard[0]?.code === 'APPLYING',
    );
    if (onlyBusy.length > 0) {
      const names = onlyBusy.map((one) => one.replica.node).join(', ');
      return stay(
        'wait',
        'CANDIDATE_BUSY',
        `${names} is applying a generation and is a candidate as soon as that is finished.`,
      );
    }
    const why = judged.map(
      (one) => `${one.replica.node}: ${[...one.hard, ...one.soft].map((r) => r.text).join('; ')}`,
    );
    return stay(
      'refuse',
      'NO_CANDIDATE',
      `No copy may be promoted by itself (${why.length === 0 ? 'there is no replica' : why.join(' | ')}). ` +
        'Bring a node back, or force the promotion of one copy by its node name, with a reason; what it lacks is then lost.',
    );
  }

  // The old writer must be stopped before a second one starts.
  if (volume.fencing === 'lease' ? !volume.leaseEnded : activeReady) {
    const why =
      volume.fencing === 'lease'
        ? `the lease of ${activeName} has not ended yet`
        : `${activeName} is still Ready and nothing can stop a writer there (fencing: none)`;
    return stay('wait', 'FENCE_PENDING', `${chosen.judged.replica.node} would be promoted, but ${why}.`);
  }

  return promote(
    input,
    judged,
    chosen,
    whyChosen(ranked, chosen),
    activeReady ? 'WORKLOAD_LOST' : 'NODE_LOST',
    `No healthy pod on ${activeName} for ${seconds(without)}${activeReady ? '' : ' and the node is lost'}`,
    verdicts,
  );
}

type Verdicts = (extra?: ReadonlyMap<string, ReplicaVerdict>) => ReplicaVerdict[];
type Stay = (action: FailoverAction, code: DecisionCode, because: string) => FailoverDecision;

function promote(
  input: FailoverInput,
  judged: readonly Judged[],
  chosen: Ranked,
  reason: ReplicaReason,
  code: DecisionCode,
  why: string,
  verdicts: Verdicts,
): FailoverDecision {
  const { replica, generation } = chosen.judged;
  const newer = newerElsewhere(judged, { ...chosen.judged, generation });
  const reasons = [reason];
  let age = chosen.judged.age;
  let lives = replica.generation as string;
  if (newer !== undefined) {
    lives = newer.replica.generation as string;
    // The newer generation contains the older one's state, so the loss is the smaller of the two ages.
    age = age === null ? newer.age : newer.age === null ? age : Math.min(age, newer.age);
    reasons.push({
      code: 'BEHIND_ANOTHER',
      text: `${newer.replica.node} holds ${lives}, newer than its own ${replica.generation}: it is fetched first`,
    });
  }
  const epoch = input.volume.epoch + 1;
  return {
    action: 'promote',
    code,
    target: replica.node,
    ...(newer === undefined ? {} : { catchUpFrom: newer.replica.node }),
    epoch,
    because:
      `${why}: ${replica.node} is promoted with generation ${lives}` +
      `${newer === undefined ? '' : ` (fetched from ${newer.replica.node} first)`}, epoch ${epoch}; ` +
      `${age === null ? 'how much is lost is not known' : `at most the last ${seconds(age)} are lost`}.`,
    perReplica: verdicts(new Map([[replica.node, { node: replica.node, verdict: 'chosen', reasons }]])),
    dataLoss: { atMostMs: age, generation: lives },
  };
}

/** Reasons that a last flush of a living source cures. */
const CURED_BY_FLUSH: ReadonlySet<ReplicaCode> = new Set([
  'STALE',
  'FRESHNESS_UNKNOWN',
  'DIVERGED',
  'EPOCH_OLD',
]);

/** Picks the node for a move with a living source: all that the replica lacks is sent to it before the switch. */
function plannedMove(
  input: FailoverInput,
  judged: readonly Judged[],
  code: DecisionCode,
  why: string,
  place: string | null,
  verdicts: Verdicts,
  stay: Stay,
): FailoverDecision {
  const usable = judged.filter(
    (one) => one.hard.length === 0 && one.soft.every((reason) => CURED_BY_FLUSH.has(reason.code)),
  );
  const ranked = order(usable, input.volume);
  const chosen = place === null ? ranked[0] : ranked.find((one) => one.judged.replica.node === place);
  if (chosen === undefined) {
    return stay(
      'wait',
      'NO_TARGET',
      `The volume should move because ${why}, but ${place === null ? 'no replica can' : `${place} cannot`} take it now; it stays where it is.`,
    );
  }
  const node = chosen.judged.replica.node;
  const reason: ReplicaReason =
    place === null
      ? whyChosen(ranked, chosen)
      : { code: 'POD_WAITS_THERE', text: 'a pod waits for the volume there' };
  const extra = new Map<string, ReplicaVerdict>(
    ranked.map((one): [string, ReplicaVerdict] => [
      one.judged.replica.node,
      { node: one.judged.replica.node, verdict: 'eligible', reasons: [...one.judged.soft] },
    ]),
  );
  extra.set(node, { node, verdict: 'chosen', reasons: [reason, ...chosen.judged.soft] });
  const epoch = input.volume.epoch + 1;
  return {
    action: 'planned-move',
    code,
    target: node,
    epoch,
    because: `The volume moves to ${node} because ${why}: last flush and confirmation first, then epoch ${epoch}; nothing is lost.`,
    perReplica: verdicts(extra),
  };
}

interface ForcedContext {
  healthy: boolean;
  sourceAlive: boolean;
  activeReady: boolean;
  verdicts: Verdicts;
  stay: Stay;
}

function decideForced(
  input: FailoverInput,
  force: FailoverForce,
  judged: readonly Judged[],
  context: ForcedContext,
): FailoverDecision {
  const { volume } = input;
  const { stay, verdicts } = context;
  if (force.reason.trim() === '')
    return stay('refuse', 'FORCE_INVALID', 'A forced promotion needs a reason.');
  const who = `${force.by === undefined ? 'An operator' : force.by} forced it (${force.reason.trim()})`;
  const wanted = judged.find((one) => one.replica.node === force.node);
  if (wanted === undefined) {
    return stay('refuse', 'FORCE_INVALID', `${who}, but ${force.node} holds no copy of the volume.`);
  }
  if (wanted.hard.length > 0 || wanted.generation === null) {
    const why = wanted.hard.map((reason) => reason.text).join('; ');
    return stay('refuse', 'FORCE_INVALID', `${who}, but ${force.node} cannot be promoted at all: ${why}.`);
  }
  const others = (chosen: ReplicaVerdict): ReplicaVerdict[] =>
    verdicts().map((one) =>
      one.node === chosen.node
        ? chosen
        : {
            ...one,
            verdict: 'refused',
            reasons: [...one.reasons, { code: 'NOT_FORCED', text: `the operator named ${force.node}` }],
          },
    );
  const reasons: ReplicaReason[] = [{ code: 'FORCED', text: `${who}` }, ...wanted.soft];
  const chosenVerdict: ReplicaVerdict = { node: force.node, verdict: 'chosen', reasons };
  if (context.sourceAlive) {
    // A source that answers is flushed first, whoever asks: a forced move need not lose anything.
    return {
      action: 'planned-move',
      code: 'FORCED',
      target: force.node,
      epoch: volume.epoch + 1,
      because: `${who}: the volume moves to ${force.node} after a last flush, epoch ${volume.epoch + 1}; nothing is lost.`,
      perReplica: others(chosenVerdict),
    };
  }
  if (volume.fencing === 'lease' && !volume.leaseEnded) {
    return stay('wait', 'FENCE_PENDING', `${who}, but the lease of ${volume.activeNode} has not ended yet.`);
  }
  if (volume.fencing === 'none' && context.healthy) {
    return stay(
      'refuse',
      'FENCE_IMPOSSIBLE',
      `${who}, but a healthy pod writes on ${volume.activeNode} and nothing stops it (fencing: none): delete the pod first.`,
    );
  }
  const ranked = order([wanted], volume)[0] as Ranked;
  const decision = promote(input, judged, ranked, reasons[0] as ReplicaReason, 'FORCED', who, verdicts);
  const chosen = decision.perReplica.find((one) => one.node === force.node) as ReplicaVerdict;
  return { ...decision, perReplica: others({ ...chosen, reasons: [...chosen.reasons, ...wanted.soft] }) };
}
