/**
 * One volume: what is -> what is to be done. The whole of the controller's judgement, pure; the parts are in the files
 * beside this one, the decision to fail over in failover.ts.
 */
import { createHash } from 'node:crypto';
import { compareGenerations, parseGeneration } from '../../lib/core/generation.ts';
import { copyState } from '../../lib/core/replica-state.ts';
import { SILENCE_MS } from '../../lib/fence/timing.ts';
import type { FencingMode } from '../../lib/fence/types.ts';
import {
  effectivePolicy,
  fromSpecPolicy,
  type ParsedAnnotations,
  type Policy,
  parseAnnotations,
  toSpecPolicy,
  toSyncPolicy,
  toWatchBody,
} from '../policy/annotations.ts';
import { type ConditionNow, canonical, conditions, isNews, settle, shorten, stamp } from './conditions.ts';
import {
  decideFailover,
  type FailoverDecision,
  type FailoverForce,
  type FailoverInput,
  type FailoverReplica,
} from './failover.ts';
import { fits, headroom } from './fit.ts';
import { planFullSync } from './fullsync.ts';
import { type LabelChange, labelChanges } from './labels.ts';
import { decidedSet, type Placement, place, promotableStep } from './placement.ts';
import {
  ACTIVE_NODE,
  annotationActions,
  EPOCH,
  leftPods,
  moveStep,
  promotionSteps,
  STEPS,
  staleWatches,
  watchRuns,
} from './promotion.ts';
import {
  type Action,
  DRIVER,
  FINALIZER,
  type Observed,
  type ObservedAgent,
  type PlannedEvent,
  type PromotionRecord,
  type SimpleVolume,
  type SimpleVolumeStatus,
  type VolumePlan,
  type WatchBody,
} from './types.ts';
import { isLive, judgeWorkload, type Workload } from './workload.ts';

/** A copy that was not heard of for this long counts as lost for placement, ms. */
const LOST_MS = 600_000;
/** How often a volume is looked at when nothing is told, ms. */
const LOOK_MS = 30_000;
/** A time stamp of the status was up to this later, ms. */
const STAMP_MS = 999;
/** A node that cannot be reached has this long to be flushed before it is left behind, ms. */
const SALVAGE_MS = 30_000;
/** How long what was fetched before a failover counts; then it is asked for again, which costs little when it is there. */
const FETCH_GOOD_MS = 30_000;
const SALVAGE_GOOD_MS = 10_000;
/** The owner of a pod that has ended makes the next one within this, and the scheduler speaks, ms. */
const SUCCESSOR_MS = 2000;
/** A copy that is not wanted any more is removed when it was last known complete this long ago, ms: time for a mistake. */
const UNWANTED_MS = 600_000;
/** The agent's conditions that stop its replication until an operator lifts them. */
const HOLDING = ['MassDelete', 'RootChanged'];

type Agent = ObservedAgent | undefined;
type VolumeReport = NonNullable<ObservedAgent['volume']>;

/** What is the same for all parts of one plan. */
interface View {
  o: Observed;
  object: SimpleVolume;
  before: SimpleVolumeStatus;
  policy: Policy;
  parsed: ParsedAnnotations;
  activeNode: string;
  epoch: number;
  active: Agent;
  workload: Workload;
  fencing: FencingMode;
  placement: Placement;
  agent: (node: string | undefined | null) => Agent;
}

const nothing = (ours: boolean): VolumePlan => ({
  ours,
  status: null,
  withholdLease: false,
  fencing: 'none',
  actions: [],
  events: [],
  nextLookMs: null,
});

const event = (
  type: PlannedEvent['type'],
  reason: string,
  message: string,
  cause = reason,
): PlannedEvent => ({
  type,
  reason,
  message: shorten(message, 1000),
  cause,
});

/** Makes the plan of one volume. Pure and total: the same facts give the same plan, nothing is thrown. */
export function planVolume(o: Observed): VolumePlan {
  const { claim, object, volume } = o;
  if (volume !== null && volume.driver !== DRIVER && object === null) return nothing(false);
  if (volume === null && object === null && claim?.provisioner !== undefined && claim.provisioner !== DRIVER)
    return nothing(false);
  if (object === null) {
    if (claim === null || claim.deleting || volume === null) return nothing(true);
    const parsed = parseAnnotations(claim.annotations, o.nodeNames);
    return {
      ...nothing(true),
      actions: [
        {
          id: 'createObject',
          kind: 'createObject',
          spec: {
            claimName: claim.name,
            volumeName: volume.name,
            storageClassName: claim.storageClassName,
            pool: volume.pool,
            // What stands in for a bad one is no good one to fall back to later.
            ...(parsed.errors.length > 0 ? {} : { policy: toSpecPolicy(policyOf(o, parsed, null)) }),
          },
        },
      ],
    };
  }
  const replaced =
    claim !== null &&
    volume !== null &&
    object.spec.volumeName !== '' &&
    object.spec.volumeName !== volume.name;
  if (claim === null || replaced) return planDeletion(o, object, replaced);
  return planLiving(withoutSilentNodes(o, object.status ?? {}), object);
}

/**
 * Under a lease a node whose agent does not answer counts as lost, whatever Kubernetes still says of it: nobody renews its
 * lease, so its writer is frozen when that runs out, unless every copy that could take over still hears it. Then they
 * refuse to take over, and nothing moves. Where the agent's pod is gone or not Ready it is being replaced or restarted,
 * perhaps with csi-node, which then freezes nobody: such a node is Kubernetes' to judge.
 */
function withoutSilentNodes(o: Observed, status: SimpleVolumeStatus): Observed {
  if (fencingOf(status) !== 'lease') return o;
  const concerned = [status.activeNode, status.previousActiveNode];
  const silent = o.agents
    .filter((one) => !one.reachable && one.ready && concerned.includes(one.node))
    .map(({ node }) => node);
  if (silent.length === 0) return o;
  return {
    ...o,
    nodes: o.nodes.map((node) =>
      node.ready && silent.includes(node.name) ? { ...node, ready: false, silent: true } : node,
    ),
  };
}

/** What is in force: the claim's own policy, and where it says nothing what the chart says for all. */
function policyOf(o: Observed, parsed: ParsedAnnotations, lastGood: Policy | null): Policy {
  const policy = effectivePolicy(parsed, lastGood);
  const { defaultSchedule } = o.options;
  return policy.fullSyncSchedule !== null || !policy.replicationEnabled || defaultSchedule === null
    ? policy
    : { ...policy, fullSyncSchedule: defaultSchedule };
}

/* Deletion */

/** The claim is gone: the watch ends, the labels go, then the object. The data is CreateVolume's and DeleteVolume's. */
function planDeletion(o: Observed, object: SimpleVolume, replaced: boolean): VolumePlan {
  const before = object.status ?? {};
  const actions: Action[] = [];
  const waits: string[] = [];
  if (object.metadata.deletionTimestamp === undefined)
    actions.push({ id: 'deleteObject', kind: 'deleteObject' });
  for (const agent of o.agents) {
    const report = agent.volume;
    if (report?.role !== 'active' || report.state === 'stopped') continue;
    if (agent.reachable)
      actions.push({
        id: `stopWatch:${agent.node}`,
        kind: 'stopWatch',
        node: agent.node,
        epoch: report.epoch,
      });
    waits.push(`${agent.node} still has a watch of it`);
  }
  // An agent that was never heard may still run the watch that it kept; a node that is gone does not.
  for (const node of o.nodes)
    if (
      node.name === before.activeNode &&
      o.agents.find((one) => one.node === node.name)?.reportAgeMs == null
    )
      waits.push(`nothing was heard of the agent of ${node.name} yet`);
  const labels = labelChanges(o.namespace, o.claimName, { active: null, candidates: [] }, o.nodes);
  for (const change of labels) actions.push({ id: `labelNode:${change.node}`, kind: 'labelNode', ...change });
  if (labels.length > 0) waits.push('labels are being removed');
  const holds = object.metadata.finalizers?.includes(FINALIZER) === true;
  const deleting = object.metadata.deletionTimestamp !== undefined;
  if (waits.length === 0 && holds && deleting)
    actions.push({ id: 'removeFinalizer', kind: 'removeFinalizer' });
  const ready: ConditionNow = {
    type: 'Ready',
    status: 'False',
    reason: 'Deleting',
    message:
      (replaced ? 'The claim is another one than before. ' : 'The claim is gone. ') +
      (waits.length === 0 ? 'All is cleaned up.' : `It waits because ${waits.join('; ')}.`) +
      whatStays(o),
  };
  const others = (before.conditions ?? []).filter((one) => one.type !== 'Ready');
  const status: SimpleVolumeStatus = {
    ...before,
    phase: 'Deleting',
    conditions: [
      ...conditions(before.conditions ?? [], [ready], o.now, object.metadata.generation),
      ...others,
    ].sort((a, b) => (a.type < b.type ? -1 : 1)),
  };
  return {
    ours: true,
    status: settle(before, status, o.now, o.options.statusEveryMs),
    withholdLease: false,
    fencing: fencingOf(before) ?? 'none',
    actions,
    events: isNews(before.conditions ?? [], ready) ? [event('Normal', 'Deleting', ready.message)] : [],
    nextLookMs: waits.length === 0 && actions.length === 0 ? null : 5000,
  };
}

/** Where an administrator finds the data of a claim that is gone; nothing when it goes too. */
function whatStays(o: Observed): string {
  if (o.volume?.reclaimPolicy !== 'Retain') return '';
  const { name, pool } = o.volume;
  const holders = o.agents.filter((one) => one.volume !== null).map(({ node }) => node);
  const where = holders.length === 0 ? 'the nodes that have it' : shorten(holders.sort().join(', '), 300);
  return ` The data stays in ${o.namespace}/${name} of pool ${pool} on ${where} (reclaim policy Retain).`;
}

/* What can be read from a status */

/** How the writer is fenced according to a status: what the active node was told last. null: nothing yet. */
export function fencingOf(status: SimpleVolumeStatus): FencingMode | null {
  const known = status.conditions?.find((one) => one.type === 'FencingPossible');
  return known === undefined ? null : known.status === 'True' ? 'lease' : 'none';
}

/** The mode from now on, and why. */
function fencingNow(
  policy: Policy,
  active: Agent,
  before: FencingMode | null,
): { mode: FencingMode; condition: ConditionNow } {
  const say = (
    mode: FencingMode,
    reason: string,
    message: string,
  ): { mode: FencingMode; condition: ConditionNow } => ({
    mode,
    condition: { type: 'FencingPossible', status: mode === 'lease' ? 'True' : 'False', reason, message },
  });
  if (!policy.replicationEnabled || !policy.failoverEnabled)
    return say(
      'none',
      'NotNeeded',
      'Failover is off: nobody is promoted over the writer, so nothing has to stop it.',
    );
  if (policy.fencing === 'none')
    return say(
      'none',
      'NotWanted',
      'failover-fencing is none: nobody stops a partitioned writer; a failover waits for NotReady.',
    );
  const freezer = active?.freezer ?? null;
  if (freezer === null) {
    // csi-node has not said anything since this controller asks: what the writer was told stays.
    return before === 'lease'
      ? say('lease', 'Lease', 'The writer is stopped when its lease ends.')
      : say(
          'none',
          'NotKnown',
          'csi-node has not said yet whether it can stop the writer; until then it counts as not fenced.',
        );
  }
  return freezer.possible
    ? say('lease', 'Lease', 'The writer is stopped when its lease ends.')
    : say(
        'none',
        'NotPossible',
        `The writer cannot be stopped on ${active?.node}: ${freezer.reason}. The volume counts as not fenced.`,
      );
}

const reachableReport = (agent: Agent) => (agent?.reachable === true ? agent.volume : null);

/**
 * Whether a node that was left by a planned move still is as it was left: all that was ever written was sealed there and
 * is what the new active node began with. Until that one has sent something it may be the only node that has it.
 */
function leftInOrder(v: Pick<View, 'before' | 'epoch'>, node: string, report: VolumeReport): boolean {
  const { promotion } = v.before;
  return (
    promotion?.planned === true &&
    promotion.epoch === v.epoch &&
    promotion.from === node &&
    report.role === 'active' &&
    report.epoch < v.epoch &&
    report.generation !== null &&
    report.generation === promotion.base
  );
}

/** A copy as the decision sees it. The node that is active is no copy; one that says that it is active is none yet. */
function replicasOf(v: Pick<View, 'o' | 'activeNode' | 'epoch' | 'before'>): FailoverReplica[] {
  return v.o.agents.flatMap((agent): FailoverReplica[] => {
    const report = agent.volume;
    if (report === null || agent.reportAgeMs === null) return [];
    // The active node itself only when it knows more than the record does.
    if (agent.node === v.activeNode && report.epoch <= v.epoch) return [];
    const left = leftInOrder(v, agent.node, report);
    // Nothing was written when it was decided. A clock that jumped back proves nothing.
    const sinceMs = left ? v.o.now - Date.parse(v.before.promotion?.decidedAt ?? '') : Number.NaN;
    const replica = report.role === 'replica';
    return [
      {
        node: agent.node,
        generation: report.generation,
        epoch: report.epoch,
        state: left ? 'idle' : replica ? copyState(report) : 'unknown',
        freshAgeMs: replica ? report.freshAgeMs : sinceMs >= 0 ? sinceMs : null,
        reportAgeMs: agent.reportAgeMs,
        reachable: agent.reachable,
        inUse: agent.mounted === true,
      },
    ];
  });
}

/* The living volume */

function planLiving(o: Observed, object: SimpleVolume): VolumePlan {
  const claim = o.claim as NonNullable<Observed['claim']>;
  const before = object.status ?? {};
  const parsed = parseAnnotations(claim.annotations, o.nodeNames);
  const lastGood = fromSpecPolicy(object.spec.policy);
  const policy = policyOf(o, parsed, lastGood);
  const actions: Action[] = [];
  const events: PlannedEvent[] = [];

  const spec: { policy?: ReturnType<typeof toSpecPolicy>; volumeName?: string } = {};
  if (parsed.errors.length === 0 && !sameData(toSpecPolicy(policy), object.spec.policy ?? {}))
    spec.policy = toSpecPolicy(policy);
  if (object.spec.volumeName === '' && o.volume !== null) spec.volumeName = o.volume.name;
  const patch: Action[] =
    Object.keys(spec).length > 0 ? [{ id: 'patchSpec', kind: 'patchSpec', ...spec }] : [];

  const policyCondition = policyConditionOf(parsed, lastGood !== null);
  events.push(...policyEvents(o, parsed, before, policyCondition));

  // Somebody deletes the object by hand: what it knows is written to the volume, from where the next one takes it up.
  if (object.metadata.deletionTimestamp !== undefined) {
    const placed = placedOf(before);
    const notes = placed === null ? [] : annotationActions(o, placed);
    return {
      ...nothing(true),
      fencing: fencingOf(before) ?? 'none',
      status: before,
      actions: notes.length > 0 ? notes : [{ id: 'removeFinalizer', kind: 'removeFinalizer' }],
      nextLookMs: 1000,
    };
  }

  if (before.activeNode === undefined || before.epoch === undefined) {
    const first = planFirst(o, object, policyCondition);
    return { ...first, actions: [...patch, ...first.actions], events: [...events, ...first.events] };
  }

  const activeNode = before.activeNode;
  const agent = (node: string | undefined | null): Agent => o.agents.find((one) => one.node === node);
  const active = agent(activeNode);
  const workload = judgeWorkload(o, activeNode);
  const fencingBefore = fencingOf(before);
  const fencing = fencingNow(policy, active, fencingBefore);
  const placement = placementOf(o, policy, before, workload, activeNode);
  const v: View = {
    o,
    object,
    before,
    policy,
    parsed,
    activeNode,
    epoch: before.epoch,
    active,
    workload,
    fencing: fencing.mode,
    placement,
    agent,
  };

  const record = before.promotion ?? null;
  const placed = {
    activeNode,
    previousActiveNode: before.previousActiveNode ?? null,
    epoch: v.epoch,
  };
  const body = bodyOf(v);
  const labels = (on: string | null): LabelChange[] =>
    labelChanges(
      o.namespace,
      o.claimName,
      policy.replicationEnabled
        ? { active: on, candidates: [activeNode, ...wholeCopies(v)] }
        : { active: null, candidates: [] },
      o.nodes,
    );

  /* Carrying out what was decided. */
  let promotion = record;
  let unfinished = false;
  const carriedOut: Action[] = [];
  if (record !== null && record.epoch === v.epoch) {
    const steps = promotionSteps(record, o, {
      body,
      labels: labels(activeNode),
      replicates: policy.replicationEnabled,
      fencing: v.fencing,
      placed,
    });
    unfinished = !steps.finished && !steps.onlyEnding;
    if (unfinished) carriedOut.push(...steps.actions);
    carriedOut.push(...leftPods(record, o));
    if (record.done.length === 0 && v.epoch > 1) events.push(promotedEvent(record));
    if (!sameData([...steps.done].sort(), [...record.done].sort()))
      promotion = { ...record, done: steps.done };
  }

  /* Deciding. */
  const force = forceOf(v);
  const decision = decideNow(v, force.promote);
  const would = wouldFailOver(v);
  const outcome = actOn(v, decision, unfinished, force.promote);
  if (
    force.promote !== null &&
    decision.action === 'refuse' &&
    v.agent(force.promote.node)?.reportAgeMs !== null
  )
    force.conditions = [force.answer('False', 'Refused', decision.because)];
  // While the workload is stopped for a move, its next pod is not drawn to the node that is left.
  if (!unfinished)
    carriedOut.push(...steadyActions(v, body, labels(outcome.stopping ? null : activeNode), placed));
  if (!unfinished && outcome.moving === null) carriedOut.push(...expansion(o));
  if (!unfinished && outcome.moving === null && !outcome.refused)
    for (const { node } of unwantedCopies(v, body)) {
      carriedOut.push({ id: `removeCopy:${node}`, kind: 'removeCopy', node, epoch: v.epoch });
      events.push(
        event(
          'Normal',
          'CopyRemoved',
          `The copy on ${node} is not wanted any more; its data is removed.`,
          node,
        ),
      );
    }
  actions.push(...patch, ...carriedOut, ...force.actions, ...outcome.actions);
  events.push(...outcome.events, ...force.events);

  /* Full syncs. */
  const sourceReport = reachableReport(active);
  const syncSource =
    !unfinished &&
    outcome.moving === null &&
    sourceReport?.role === 'active' &&
    sourceReport.epoch === v.epoch &&
    sourceReport.generation !== null &&
    (sourceReport.state === 'watching' || sourceReport.state === 'sealing')
      ? activeNode
      : null;
  const fullSync = planFullSync(o, {
    policy,
    scheduleBefore: object.spec.policy?.fullSyncSchedule ?? null,
    last: before.lastFullSync ?? null,
    next: before.nextFullSync ?? null,
    epoch: v.epoch,
    epochSince: Date.parse(record?.decidedAt ?? object.metadata.creationTimestamp ?? '') || 0,
    source: syncSource,
    reachable: placement.nodes.filter(
      (node) => reachableReport(agent(node)) !== null || agent(node)?.reachable === true,
    ),
    unreachable: placement.nodes.filter((node) => agent(node)?.reachable !== true),
  });
  actions.push(...fullSync.actions);
  events.push(...fullSync.events);

  /* The promotable set. */
  const step = promotableStep(
    before.promotable === undefined
      ? null
      : {
          version: before.promotable.version,
          nodes: before.promotable.nodes,
          adding: before.promotable.adding ?? [],
        },
    policy.replicationEnabled ? wholeCopies(v) : [],
    v.fencing,
    fencingBefore,
    o.fence.acknowledged,
  );

  const copies = copiesOf(v);
  const fresh = copies.filter((one) => one.fresh);
  const now = [
    policyCondition,
    fencing.condition,
    ...conditionsOf(v, {
      copies: copies.length,
      fresh,
      decision,
      would,
      outcome,
      unfinished,
      record: promotion,
    }),
    ...sizeCondition(active),
    ...agentConditions(active),
    ...force.conditions,
  ];
  for (const one of now)
    if (isNews(before.conditions ?? [], one)) events.push(...conditionEvent(one, before));
  events.push(...ownerEvents(v, before));

  const next: SimpleVolumeStatus = {
    ...before,
    ...(object.metadata.generation === undefined ? {} : { observedGeneration: object.metadata.generation }),
    phase: phaseOf(v, { fresh: fresh.length, decision, outcome, unfinished, record: promotion }),
    ...(promotion === null ? {} : { promotion }),
    ...(step === null ? {} : { promotable: step }),
    replicas: copies.map((one) => one.status),
    replicasSummary: `${fresh.length}/${copies.length + placement.missing}`,
    conditions: conditions(before.conditions ?? [], now, o.now, object.metadata.generation),
  };
  put(
    next,
    'generation',
    sourceReport?.role === 'active' ? (sourceReport.generation ?? undefined) : before.generation,
  );
  put(next, 'freshAt', freshAtOf(copies));
  put(next, 'wouldFailOverTo', would.target);
  put(next, 'refused', refusedOf(would));
  put(next, 'lastFullSync', fullSync.lastFullSync ?? undefined);
  put(next, 'nextFullSync', fullSync.nextFullSync ?? undefined);
  const status = settle(before, next, o.now, o.options.statusEveryMs);

  if (outcome.decide !== null && o.fence.fenceWaitMs !== null)
    actions.push(decideAction(v, status, outcome.decide));
  // What is about to change is mirrored with the next look, which the write brings about.
  if (o.volume !== null && sameData(status, before)) actions.push(mirrorOf(v, status));

  // What moved is activated in the moment in which no lease of before can hold any more, not with the next round.
  const activation = unfinished && o.fence.activationWaitMs !== null ? o.fence.activationWaitMs : 0;
  const looks = [
    LOOK_MS,
    outcome.nextLookMs,
    fullSync.nextLookMs,
    unfinished ? 2000 : null,
    activation > 0 ? Math.max(50, activation) : null,
  ];
  return {
    ours: true,
    status,
    withholdLease: outcome.withhold,
    fencing: v.fencing,
    actions: unique(actions),
    events,
    nextLookMs: Math.min(...looks.filter((one): one is number => one !== null)),
  };
}

function put<K extends keyof SimpleVolumeStatus>(
  status: SimpleVolumeStatus,
  key: K,
  value: SimpleVolumeStatus[K] | undefined,
): void {
  if (value === undefined) delete status[key];
  else status[key] = value;
}

/** One action of an id; the first one stays. */
function unique(actions: readonly Action[]): Action[] {
  const ids = new Set<string>();
  return actions.filter((action) => !ids.has(action.id) && ids.add(action.id));
}

const sameData = (a: unknown, b: unknown): boolean => canonical(a) === canonical(b);

const placedOf = (status: SimpleVolumeStatus) =>
  status.activeNode === undefined || status.epoch === undefined
    ? null
    : {
        activeNode: status.activeNode,
        previousActiveNode: status.previousActiveNode ?? null,
        epoch: status.epoch,
      };

/* The first decision: where a volume is that no status speaks of. */

function planFirst(o: Observed, object: SimpleVolume, policyCondition: ConditionNow): VolumePlan {
  const before = object.status ?? {};
  const { volume } = o;
  const noted = volume?.annotations[ACTIVE_NODE] ?? null;
  const notedEpoch = Number(volume?.annotations[EPOCH] ?? '1');
  const seen = o.agents.flatMap((agent) =>
    agent.volume === null ? [] : [{ node: agent.node, role: agent.volume.role, epoch: agent.volume.epoch }],
  );
  const newest = Math.max(0, ...seen.map((one) => one.epoch));
  const say = (phase: 'Pending' | 'Held', reason: string, message: string): VolumePlan => {
    const ready: ConditionNow = { type: 'Ready', status: 'False', reason, message };
    const status: SimpleVolumeStatus = {
      ...before,
      phase,
      conditions: conditions(
        before.conditions ?? [],
        [policyCondition, ready],
        o.now,
        object.metadata.generation,
      ),
    };
    return {
      ...nothing(true),
      status: settle(before, status, o.now, o.options.statusEveryMs),
      events:
        phase === 'Held' && isNews(before.conditions ?? [], ready) ? [event('Warning', reason, message)] : [],
      nextLookMs: 5000,
    };
  };

  let to: string;
  let epoch: number;
  let reason: string;
  let recovered = true;
  if (noted !== null && Number.isSafeInteger(notedEpoch) && notedEpoch >= 1) {
    // The status was lost; the volume's own annotations say where it was. An agent that knows more is believed.
    if (newest > notedEpoch)
      return say(
        'Held',
        'RecordLost',
        `The record of the volume was lost. Its annotations say epoch ${notedEpoch} on ${noted}, but ${seen.find((one) => one.epoch === newest)?.node} has seen epoch ${newest}. Set the annotations ${ACTIVE_NODE} and ${EPOCH} of the PersistentVolume to where its newest data is.`,
      );
    to = noted;
    epoch = notedEpoch;
    reason = `taken up again from the annotations of ${volume?.name}`;
  } else if (newest > 0) {
    const holders = seen.filter((one) => one.role === 'active' && one.epoch === newest);
    if (holders.length !== 1)
      return say(
        'Held',
        'RecordLost',
        `The record of the volume was lost, and ${holders.length === 0 ? 'no node says that it is' : `${holders.map((one) => one.node).join(', ')} say that they are`} the active one in epoch ${newest}. Set the annotations ${ACTIVE_NODE} and ${EPOCH} of the PersistentVolume to where its newest data is.`,
      );
    to = (holders[0] as { node: string }).node;
    epoch = newest;
    reason = `taken up again from what ${to} says`;
  } else if (volume?.firstNode != null) {
    // A volume that its own first node has never spoken of could be an old one whose records are all lost.
    const first = o.agents.find((agent) => agent.node === volume.firstNode);
    if (first?.reportAgeMs == null)
      return say('Pending', 'NotPlaced', `Nothing was heard of the agent of ${volume.firstNode} yet.`);
    to = volume.firstNode;
    epoch = 1;
    reason = 'first node';
    recovered = false;
  } else {
    return say(
      'Pending',
      'NotPlaced',
      volume === null
        ? 'The claim is not bound yet.'
        : 'Nobody has recorded which node the volume was made on.',
    );
  }
  const waiting = say('Pending', 'NotPlaced', `The volume begins on ${to}.`);
  const record: PromotionRecord = { epoch, to, reason, planned: true, decidedAt: stamp(o.now), done: [] };
  return {
    ...waiting,
    // The decision writes it.
    status: before,
    actions: [
      {
        id: `decide:${epoch}`,
        kind: 'decide',
        record,
        status: {
          ...waiting.status,
          activeNode: to,
          epoch,
          promotion: record,
          // The active node takes no older version than it knows; how far it had come is lost, a clock is always beyond.
          ...(recovered ? { promotable: { version: o.now, nodes: [], adding: [] } } : {}),
        },
        insist: false,
        released: null,
      },
    ],
  };
}

/* Copies */

const wholeCopies = (v: View): string[] =>
  v.placement.nodes.filter((node) => {
    const report = v.agent(node)?.volume;
    return report?.role === 'replica'
      ? report.generation !== null
      : (v.before.promotable?.nodes.includes(node) ?? false);
  });

function placementOf(
  o: Observed,
  policy: Policy,
  before: SimpleVolumeStatus,
  workload: Workload,
  activeNode: string,
): Placement {
  if (!policy.replicationEnabled) return { nodes: [], missing: 0, dropped: [], unfit: {} };
  const agent = (node: string): Agent => o.agents.find((one) => one.node === node);
  const present = new Set((before.replicas ?? []).map((one) => one.node));
  // The node that was left keeps a copy, until the record of copies speaks of it.
  const { promotion } = before;
  if (promotion?.from !== undefined && !promotion.done.includes('startWatch')) present.add(promotion.from);
  const active = agent(activeNode)?.volume;
  const bytes = active?.bytes ?? o.claim?.requestedBytes ?? 0;
  const heard = (node: string): number => {
    const age = agent(node)?.reportAgeMs;
    if (age != null) return o.now - age;
    // Not heard by this process: the status says when it was heard before, up to this much behind.
    const said = Date.parse(before.replicas?.find((one) => one.node === node)?.observedAt ?? '') || 0;
    return said + o.options.statusEveryMs;
  };
  return place({
    nodes: o.nodes.map((node) => ({
      ...node,
      agentReady: agent(node.name)?.reachable === true && agent(node.name)?.ready === true,
      freeBytes: agent(node.name)?.freeBytes ?? null,
    })),
    activeNode,
    present: [...present],
    whole: o.agents
      .filter((one) => one.volume?.role === 'replica' && one.volume.generation !== null)
      .map((one) => one.node),
    alive: [...present].filter((node) => agent(node)?.reachable === true || o.now - heard(node) < LOST_MS),
    wanted: policy.replicas,
    atLeast: policy.confirmedReplicas,
    needed: [...(workload.waitingOn === null ? [] : [workload.waitingOn]), ...forcedNode(o.object, before)],
    priority: policy.nodePriority,
    needBytes: bytes + headroom(o.claim?.requestedBytes ?? null),
  });
}

interface Copy {
  fresh: boolean;
  freshAt: number | null;
  status: NonNullable<SimpleVolumeStatus['replicas']>[number];
}

function copiesOf(v: View): Copy[] {
  const { o } = v;
  return v.placement.nodes.map((node): Copy => {
    const agent = v.agent(node);
    const report = agent?.volume ?? null;
    if (agent?.reportAgeMs == null || report === null) {
      const known = v.before.replicas?.find((one) => one.node === node);
      const state = agent?.reportAgeMs == null ? 'unknown' : agent.reachable ? 'empty' : 'unreachable';
      return { fresh: false, freshAt: null, status: { observedAt: stamp(o.now), ...known, node, state } };
    }
    const replica = report.role === 'replica';
    const age = replica && report.freshAgeMs !== null ? report.freshAgeMs + agent.reportAgeMs : null;
    const problem = report.conditions[0];
    return {
      fresh:
        agent.reachable &&
        replica &&
        report.generation !== null &&
        report.epoch === v.epoch &&
        age !== null &&
        age <= v.policy.maxStalenessMs,
      freshAt: age === null ? null : o.now - age,
      status: {
        node,
        state: agent.reachable ? (replica ? report.state : 'returning') : 'unreachable',
        ...(report.generation === null ? {} : { generation: report.generation }),
        ...(replica && report.freshAgeMs !== null
          ? { freshAgeSeconds: Math.floor(report.freshAgeMs / 1000) }
          : {}),
        observedAt: stamp(o.now - agent.reportAgeMs),
        ...(problem === undefined ? {} : { message: shorten(`${problem.type}: ${problem.message}`, 1000) }),
      },
    };
  });
}

function freshAtOf(copies: readonly Copy[]): string | undefined {
  const times = copies.flatMap((one) => (one.freshAt === null ? [] : [one.freshAt]));
  return times.length === 0 ? undefined : stamp(Math.max(...times));
}

/* The watch */

function bodyOf(v: View): WatchBody | null {
  const { name } = v.o;
  if (name === null || v.active === undefined) return null;
  const targets = v.placement.nodes.flatMap((node) => {
    const agent = v.agent(node);
    return agent === undefined ? [] : [{ node, url: agent.url }];
  });
  const { url, webdavUrl } = v.active;
  const bytes = v.o.volume?.bytes;
  return {
    ...toWatchBody(v.policy, name, v.epoch, { url, webdavUrl }, targets),
    ...(bytes ? { bytes } : {}),
  };
}

/** What is kept right when nothing was decided. */
function steadyActions(
  v: View,
  body: WatchBody | null,
  labels: readonly LabelChange[],
  placed: { activeNode: string; previousActiveNode: string | null; epoch: number },
): Action[] {
  const { o, policy, active } = v;
  const actions: Action[] = [...staleWatches(o, v.activeNode, v.epoch)];
  const report = active?.volume;
  if (active?.reachable === true && active.reportAgeMs !== null) {
    const knowsMore = report != null && report.epoch > v.epoch;
    if (policy.replicationEnabled) {
      if (body !== null && !knowsMore && !watchRuns(active, body) && o.fence.activationWaitMs === 0)
        actions.push({ id: `startWatch:${v.activeNode}`, kind: 'startWatch', node: v.activeNode, body });
    } else if (report?.role === 'active' && report.state !== 'stopped' && !knowsMore)
      actions.push({
        id: `stopWatch:${v.activeNode}`,
        kind: 'stopWatch',
        node: v.activeNode,
        epoch: report.epoch,
      });
  }
  actions.push(...annotationActions(o, placed));
  for (const change of labels) actions.push({ id: `labelNode:${change.node}`, kind: 'labelNode', ...change });
  return actions;
}

/**
 * Copies that are not wanted any more (fewer `replication-replicas`, a node that left the pool) and have been out of the
 * set for a while, their data still on their nodes. Only while everything is well: every wanted copy is there, whole and
 * fresh, and at least one of them. How long it is out is told by the copy itself, which hears no beat any more.
 */
function unwantedCopies(v: View, body: WatchBody | null): ObservedAgent[] {
  const { o, before, policy, placement } = v;
  if (!policy.replicationEnabled || placement.missing > 0 || o.claim?.deleting === true) return [];
  if (body === null || v.active?.reachable !== true || !watchRuns(v.active, body)) return [];
  const copies = copiesOf(v);
  if (copies.length === 0 || !copies.every((one) => one.fresh)) return [];
  const named = new Set([
    v.activeNode,
    ...placement.nodes,
    ...(before.replicas ?? []).map((one) => one.node),
    ...(before.promotable?.nodes ?? []),
    ...(before.promotable?.adding ?? []),
  ]);
  return o.agents.filter((agent) => {
    const report = agent.volume;
    return (
      !named.has(agent.node) &&
      agent.reachable &&
      agent.mounted !== true &&
      report?.role === 'replica' &&
      report.epoch <= v.epoch &&
      (report.freshAgeMs === null || report.freshAgeMs >= UNWANTED_MS)
    );
  });
}

/* Force */

/** Names one request: the same one is carried out once, whatever else changes in the spec. */
const digest = (force: object): string =>
  createHash('sha256').update(JSON.stringify(force)).digest('hex').slice(0, 12);

/** The node of a forced promotion that is not answered yet: it gets a copy however many are wanted. */
function forcedNode(object: SimpleVolume | null, before: SimpleVolumeStatus): string[] {
  const force = object?.spec.force;
  if (force?.action !== 'Promote' || force.node === undefined) return [];
  const known = before.conditions?.find((one) => one.type === 'Forced');
  const answered = known?.message.endsWith(`(request ${digest(force)})`) && known.status !== 'Unknown';
  return answered ? [] : [force.node];
}

interface Forced {
  promote: FailoverForce | null;
  actions: Action[];
  events: PlannedEvent[];
  conditions: ConditionNow[];
  answer: (status: ConditionNow['status'], reason: string, message: string) => ConditionNow;
}

function forceOf(v: View): Forced {
  const { force } = v.object.spec;
  const id = digest(force ?? {});
  const answer: Forced['answer'] = (status, reason, message) => ({
    type: 'Forced',
    status,
    reason,
    message: `${shorten(message, 3000)} (request ${id})`,
  });
  const none: Forced = { promote: null, actions: [], events: [], conditions: [], answer };
  if (force === undefined) return none;
  const known = v.before.conditions?.find((one) => one.type === 'Forced');
  if (known?.message.endsWith(`(request ${id})`) && known.status !== 'Unknown') {
    const { type, status, reason, message } = known;
    return { ...none, conditions: [{ type, status, reason, message }] };
  }
  if (force.action === 'Promote') {
    if (v.activeNode === force.node && v.epoch > 1 && known?.message.endsWith(`(request ${id})`))
      return {
        ...none,
        conditions: [answer('True', 'Done', `${force.node} is the active node since epoch ${v.epoch}.`)],
      };
    return {
      ...none,
      promote: { node: force.node ?? '', reason: force.reason },
      conditions: [answer('Unknown', 'Waiting', `The promotion of ${force.node} is being carried out.`)],
    };
  }
  const condition = force.condition ?? '';
  if (!HOLDING.includes(condition))
    return {
      ...none,
      conditions: [answer('False', 'Refused', `Only ${HOLDING.join(' and ')} can be lifted.`)],
    };
  const held = v.active?.volume?.conditions.some((one) => one.type === condition) === true;
  if (held && v.active?.reachable === true)
    return {
      ...none,
      actions: [
        {
          id: `liftCondition:${condition}`,
          kind: 'liftCondition',
          node: v.activeNode,
          epoch: v.epoch,
          condition: condition as 'MassDelete' | 'RootChanged',
        },
      ],
      conditions: [answer('Unknown', 'Waiting', `${condition} is being lifted on ${v.activeNode}.`)],
    };
  if (v.active?.reachable !== true)
    return {
      ...none,
      conditions: [answer('Unknown', 'Waiting', `The agent of ${v.activeNode} does not answer.`)],
    };
  return { ...none, conditions: [answer('True', 'Done', `${condition} does not hold on ${v.activeNode}.`)] };
}

/* Deciding */

/** Since when there is no healthy pod; a node that was just made the active one has the whole grace period. */
function withoutSince(v: View): number | null {
  // What the API still says of pods on a node that is not Ready proves nothing.
  const ready = v.o.nodes.find((node) => node.name === v.activeNode)?.ready === true;
  if (v.workload.healthyPod && ready) return null;
  const known = v.before.conditions?.find((one) => one.type === 'WorkloadHealthy' && one.status === 'False');
  const since = Date.parse(known?.lastTransitionTime ?? '');
  if (Number.isNaN(since)) return null;
  const decided = Date.parse(v.before.promotion?.decidedAt ?? '');
  // A clock that jumped back makes the wait longer, never shorter; and so does it that the status has whole seconds.
  return Math.max(since, Number.isNaN(decided) ? since : decided) + STAMP_MS;
}

function inputOf(v: View, force: FailoverForce | null): FailoverInput {
  const { o, policy, workload } = v;
  const promotable = v.before.promotable?.nodes ?? [];
  const need = headroom(o.claim?.requestedBytes ?? null);
  const sourceAlive =
    v.active?.reachable === true && o.nodes.find((one) => one.name === v.activeNode)?.ready === true;
  const follows = workload.waitingOn !== null && workload.waitingOn !== v.activeNode && sourceAlive;
  return {
    now: o.now,
    volume: {
      namespace: o.namespace,
      name: o.claimName,
      epoch: v.epoch,
      base: v.before.promotion?.base ?? null,
      activeNode: v.activeNode,
      // The volume follows its pod whether or not failover is on: with a living source nothing is lost.
      failoverEnabled: policy.failoverEnabled || follows,
      gracePeriodMs: policy.gracePeriodMs,
      maxStalenessMs: policy.maxStalenessMs,
      nodePriority: policy.nodePriority,
      fencing: v.fencing,
      // Whether the lease has ended is asked in the moment of the write (decide); the choice is made before.
      leaseEnded: true,
      moving: moveBegun(v),
    },
    workload: {
      healthyPod: workload.healthyPod,
      withoutSince: withoutSince(v),
      cause: workload.cause,
      waitingOn: workload.waitingOn,
    },
    nodes: o.nodes.map((node) => {
      const agent = v.agent(node.name);
      const fit = fits(node, workload.templates, { freeBytes: agent?.freeBytes ?? null, needBytes: need });
      return {
        name: node.name,
        ready: node.ready && !node.deleting,
        schedulable: !node.unschedulable,
        reachable: agent?.reachable === true,
        fit: !fit.ok
          ? fit
          : promotable.includes(node.name) || node.name === v.activeNode
            ? fit
            : { ok: false, reason: NOT_PROMOTABLE },
      };
    }),
    replicas: replicasOf(v),
    force,
  };
}

const NOT_PROMOTABLE = `the active node has not acknowledged yet that it may be promoted`;

function decideNow(v: View, force: FailoverForce | null): FailoverDecision {
  const decision = decideFailover(inputOf(v, force));
  if (v.policy.replicationEnabled && v.o.claim?.deleting !== true) return decision;
  return {
    ...decision,
    action: force === null ? 'none' : 'refuse',
    code: force === null ? 'DISABLED' : 'FORCE_INVALID',
    because: v.o.claim?.deleting === true ? 'The claim is being deleted.' : 'Replication is off.',
  };
}

/** What would happen if the active node were lost now, for those who look before it is. */
function wouldFailOver(v: View): FailoverDecision {
  const input = inputOf(v, null);
  return decideFailover({
    ...input,
    volume: { ...input.volume, failoverEnabled: true, gracePeriodMs: 0 },
    workload: { healthyPod: false, withoutSince: input.now - 1, cause: 'no-pod', waitingOn: null },
    nodes: input.nodes.map((node) =>
      node.name === v.activeNode ? { ...node, ready: false, reachable: false } : node,
    ),
  });
}

function refusedOf(would: FailoverDecision): SimpleVolumeStatus['refused'] {
  const refused = would.perReplica
    .filter((one) => one.verdict === 'refused' && one.reasons[0]?.code !== 'ACTIVE_NODE')
    .slice(0, 100)
    .map((one) => ({
      node: one.node,
      cause: one.reasons[0]?.text.includes(NOT_PROMOTABLE)
        ? 'NOT_PROMOTABLE'
        : (one.reasons[0]?.code ?? 'UNKNOWN'),
      message: shorten(one.reasons.map((reason) => steadyText(reason.text)).join('; '), 1000),
    }));
  return refused.length === 0 ? undefined : refused;
}

/** Ages grow by themselves and free space changes all the time; a text that is kept in the status has neither. */
const steadyText = (text: string): string =>
  text
    .replace(/complete \d+\.\d s ago/g, 'complete too long ago')
    .replace(/ for \d+\.\d s\b/g, '')
    .replace(/; at most the last \d+\.\d s are lost/g, '')
    .replace(/(pool space: \S+ are needed), \S+ are free/g, '$1, there is less');

interface Outcome {
  moving: 'planned' | 'failover' | null;
  /** in words, for condition and phase */
  waitsFor: string | null;
  withhold: boolean;
  /** the workload on the active node is being stopped for a planned move */
  stopping: boolean;
  decide: { to: string; reason: string; planned: boolean; insist: boolean; leftBehind?: string } | null;
  actions: Action[];
  events: PlannedEvent[];
  nextLookMs: number | null;
  /** nothing can be done without an operator or a node that comes back */
  refused: boolean;
}

/** A failed move of a workload that was not healthy after the last move either would only wander from node to node. */
function wanders(v: View, decision: FailoverDecision): boolean {
  const { promotion } = v.before;
  if (decision.code !== 'WORKLOAD_LOST' || promotion === undefined || v.epoch === 1) return false;
  const known = v.before.conditions?.find((one) => one.type === 'WorkloadHealthy');
  return known?.status === 'False' && Date.parse(known.lastTransitionTime) <= Date.parse(promotion.decidedAt);
}

/** The active node has given its lease back: no pod can start there any more in this epoch. */
const givenBack = (v: View): boolean => v.o.fence.released === v.epoch;

/** A planned move has begun and was not written yet: its workload may be stopped already. */
const moveBegun = (v: View): boolean =>
  givenBack(v) ||
  (v.before.phase === 'Moving' && STEPS.every((step) => v.before.promotion?.done.includes(step) === true));

/** A lease that was given back for a move that is not to be any more: the node goes on in a new epoch. */
function goOn(v: View, decision: FailoverDecision, unfinished: boolean): Outcome | null {
  if (!givenBack(v) || v.active?.reachable !== true || unfinished) return null;
  return {
    moving: 'planned',
    waitsFor: null,
    withhold: false,
    stopping: false,
    decide: {
      to: v.activeNode,
      reason: `The move was given up (${decision.because}); ${v.activeNode} goes on.`,
      planned: true,
      insist: false,
    },
    actions: [],
    events: [],
    nextLookMs: 1000,
    refused: false,
  };
}

/**
 * How long a move that could end now still waits to learn where the workload's next pod goes, ms. Most pods may run
 * anywhere: one that comes half a second later would draw the volume from the node that was just chosen to another one,
 * by a second move. One that the scheduler places nowhere waits for the labels that the move brings.
 */
function successorMs(v: View): number {
  const staying = v.o.pods.filter((pod) => isLive(pod) && !pod.deleting);
  if (staying.some((pod) => pod.node !== null || pod.unschedulable)) return 0;
  const flushed = v.o.memory.prepared.filter((one) => one.ok && one.tag.startsWith(`last:${v.epoch}:`));
  return Math.max(0, SUCCESSOR_MS - Math.max(0, ...flushed.map((one) => one.ageMs)));
}

function actOn(
  v: View,
  decision: FailoverDecision,
  unfinished: boolean,
  force: FailoverForce | null,
): Outcome {
  const { o } = v;
  const stay: Outcome = {
    moving: null,
    waitsFor: null,
    withhold: false,
    stopping: false,
    decide: null,
    actions: [],
    events: [],
    nextLookMs: null,
    refused: false,
  };
  const target = decision.target;
  if (target !== undefined && o.fence.fenceWaitMs === null)
    return { ...stay, waitsFor: 'this controller to have read the volume', nextLookMs: 1000 };
  const promotable = target !== undefined && v.before.promotable?.nodes.includes(target) === true;
  if (decision.action === 'planned-move' && target !== undefined) {
    if (!promotable)
      return {
        ...stay,
        moving: 'planned',
        waitsFor: `${v.activeNode} to acknowledge that ${target} may be promoted`,
        nextLookMs: 1000,
      };
    const orphan = v.workload.users.find((pod) => pod.controlledBy === null && !pod.deleting);
    if (orphan !== undefined && force === null)
      return {
        ...stay,
        waitsFor: `The pod ${orphan.name} on ${v.activeNode} belongs to no controller and would not come back: it is not stopped for a move. Delete it, or force the promotion.`,
        nextLookMs: null,
      };
    if (wanders(v, decision)) {
      // Its lease was given back for this move: without another epoch no pod would ever run there again.
      const again = goOn(v, decision, unfinished);
      if (again !== null) return again;
      const message = `The workload was not healthy on ${v.before.previousActiveNode ?? 'the node before'} and is not on ${v.activeNode}: it is not moved again (${decision.because})`;
      return { ...stay, refused: true, waitsFor: message };
    }
    if (unfinished)
      return { ...stay, moving: 'planned', waitsFor: 'the last move to be carried out', nextLookMs: 2000 };
    const step = moveStep(o, { from: v.activeNode, target, epoch: v.epoch, users: v.workload.users });
    const successor = step.ready && decision.code !== 'POD_ELSEWHERE' && force === null ? successorMs(v) : 0;
    if (successor > 0)
      return {
        ...stay,
        moving: 'planned',
        waitsFor: 'the scheduler to say where the next pod goes',
        stopping: step.stopping,
        nextLookMs: successor,
      };
    return {
      ...stay,
      moving: 'planned',
      waitsFor: step.ready ? null : step.waitsFor,
      stopping: step.stopping,
      actions: step.actions,
      nextLookMs: step.nextLookMs,
      decide: step.ready ? { to: target, reason: decision.because, planned: true, insist: false } : null,
      events: [event('Normal', 'Moving', decision.because, `${v.epoch} ${target}`)],
    };
  }
  if (decision.action === 'promote' && target !== undefined && !promotable)
    return {
      ...stay,
      refused: true,
      waitsFor: `${target} would be promoted, but ${v.activeNode} has never acknowledged that it may be, so it would not stop its writer. If ${v.activeNode} is certainly off, set failover-fencing to none.`,
      nextLookMs: 5000,
    };
  if (decision.action === 'promote' && target !== undefined) {
    const base: Outcome = {
      ...stay,
      moving: 'failover',
      withhold: v.fencing === 'lease',
      nextLookMs: 1000,
      events: [],
    };
    let leftBehind: string | undefined;
    const from = decision.catchUpFrom;
    if (from !== undefined) {
      const generation = v.agent(from)?.volume?.generation ?? '';
      // An attempt of before, when the node had come back in between, says nothing about what is missing now.
      const tag = `catchUp:${v.epoch}:${target}:${from}:${generation}`;
      const ended = o.memory.caughtUp.filter((one) => one.tag === tag && one.ageMs < FETCH_GOOD_MS).at(-1);
      if (ended === undefined)
        return {
          ...base,
          waitsFor: `${target} to fetch ${generation} from ${from}`,
          actions: [
            {
              id: `catchUp:${tag}`,
              kind: 'catchUp',
              node: target,
              from,
              epoch: v.epoch,
              generation,
              policy: toSyncPolicy(v.policy),
              timeoutMs: o.options.catchUpMs,
              tag,
            },
          ],
        };
      if (ended.ok) return { ...base, waitsFor: `${target} to report ${generation}` };
      leftBehind = `${from} holds ${generation}, which ${target} could not fetch in time: ${ended.error ?? 'no reason given'}`;
    }
    // A node whose kubelet is gone may still answer: what it has is fetched, with a lease once its writer stands still.
    // That is when neither this controller nor the copy gives it anything: the copy is told to let go of it at once.
    const waits = o.fence.fenceWaitMs;
    const report = reachableReport(v.active);
    if (report?.role === 'active' && report.epoch === v.epoch) {
      const free = freeSinceMs(v, target);
      if (waits === null || (free ?? 0) < 0 || (waits > 0 && free !== null))
        return {
          ...base,
          waitsFor: `the lease of ${v.activeNode} to end`,
          nextLookMs: Math.min(1000, Math.max(100, waits ?? 1000, -(free ?? 0))),
        };
      const tag = `salvage:${v.epoch}:${target}`;
      const goodMs = Math.min(SALVAGE_GOOD_MS, free ?? SALVAGE_GOOD_MS);
      if (waits === 0 && !o.memory.prepared.some((one) => one.tag === tag && one.ageMs < goodMs))
        return {
          ...base,
          waitsFor: `${target} to fetch what ${v.activeNode} still has`,
          actions: [
            {
              id: `prepare:${tag}`,
              kind: 'prepare',
              node: v.activeNode,
              epoch: v.epoch,
              confirm: [target],
              timeoutMs: SALVAGE_MS,
              tag,
            },
          ],
        };
    }
    return {
      ...base,
      waitsFor: waits === 0 ? null : `the lease of ${v.activeNode} to end`,
      nextLookMs: Math.min(1000, Math.max(100, waits ?? 1000)),
      decide: {
        to: target,
        reason: decision.because,
        planned: false,
        // As long as Kubernetes calls the node Ready, copies that still hear it are believed.
        insist: o.nodes.find((node) => node.name === v.activeNode)?.silent !== true,
        ...(leftBehind === undefined ? {} : { leftBehind }),
      },
    };
  }
  const again = goOn(v, decision, unfinished);
  if (again !== null) return again;
  if (decision.action === 'refuse') {
    const cause = decision.perReplica
      .map((one) => `${one.node}:${one.reasons.map((reason) => reason.code).join('+')}`)
      .join(' ');
    return {
      ...stay,
      refused: true,
      waitsFor: decision.because,
      events:
        force === null
          ? [event('Warning', 'FailoverRefused', decision.because, `${decision.code} ${cause}`.trim())]
          : [],
    };
  }
  if (decision.action === 'wait')
    return {
      ...stay,
      waitsFor: decision.because,
      nextLookMs: decision.code === 'GRACE' ? graceLook(v) : 5000,
    };
  return stay;
}

/**
 * Since when the copy that is to be promoted has not been bound by a promise to the active node, ms; negative: it still
 * is, for so long; null: it has not said that it is, or so long ago that it may have given another one.
 */
function freeSinceMs(v: View, target: string): number | null {
  const asked = v.o.fence.consent;
  if (v.fencing !== 'lease' || asked?.code !== 'PROMISED') return null;
  const free = asked.ageMs - asked.waitMs;
  return asked.node === target && asked.epoch > v.epoch && free < SILENCE_MS ? free : null;
}

function graceLook(v: View): number {
  const since = withoutSince(v);
  return since === null ? 1000 : Math.max(250, Math.min(5000, since + v.policy.gracePeriodMs - v.o.now));
}

/**
 * The generation that a node begins its epoch with, as far as is known. What it has confirmed counts too: its report of
 * itself may be older, and copies that are as far would be taken for such that went beyond it.
 */
function baseOf(v: View, node: string): string | null {
  const confirmed = v.o.memory.prepared
    .filter((one) => one.ok && one.confirmed.includes(node) && one.tag.split(':')[1] === `${v.epoch}`)
    .map((one) => one.generation);
  const known = [v.agent(node)?.volume?.generation ?? null, ...confirmed]
    .filter((one) => one !== null)
    .sort((a, b) => compareGenerations(parseGeneration(a), parseGeneration(b)));
  return known.at(-1) ?? null;
}

function decideAction(v: View, status: SimpleVolumeStatus, decide: NonNullable<Outcome['decide']>): Action {
  const seen = v.o.fence.consent;
  // A consent to an attempt that was never written has moved the replica on; the next one must be above it.
  const epoch = Math.max(v.epoch, seen?.node === decide.to && seen.code === 'EPOCH_OLD' ? seen.seen : 0) + 1;
  const base = baseOf(v, decide.to);
  const record: PromotionRecord = {
    epoch,
    from: v.activeNode,
    to: decide.to,
    reason: shorten(decide.reason, 1000),
    planned: decide.planned,
    decidedAt: stamp(v.o.now),
    done: [],
    ...(base === null ? {} : { base }),
    ...(decide.leftBehind === undefined ? {} : { leftBehind: shorten(decide.leftBehind, 1000) }),
  };
  const left = decide.planned && decide.to !== v.activeNode ? [v.activeNode] : [];
  return {
    id: `decide:${epoch}`,
    kind: 'decide',
    record,
    status: {
      ...status,
      phase: decide.planned ? 'Moving' : 'FailingOver',
      activeNode: decide.to,
      ...(decide.to === v.activeNode ? {} : { previousActiveNode: v.activeNode }),
      epoch,
      promotion: record,
      promotable: decidedSet(status.promotable ?? null, decide.to, left),
    },
    insist: decide.insist,
    released: v.o.fence.released,
  };
}

function mirrorOf(v: View, status: SimpleVolumeStatus): Action {
  const { claim, volume } = v.o;
  return {
    id: 'mirror',
    kind: 'mirror',
    name: (volume as NonNullable<typeof volume>).name,
    pool: v.object.spec.pool,
    claimRef: {
      namespace: v.o.namespace,
      name: v.o.claimName,
      ...(claim === null || claim.uid === '' ? {} : { uid: claim.uid }),
    },
    activeNode: v.activeNode,
    epoch: v.epoch,
    ...(status.phase === undefined ? {} : { phase: status.phase }),
    ...(status.generation === undefined ? {} : { generation: status.generation }),
  };
}

/* Conditions, phase, Events */

function policyConditionOf(parsed: ParsedAnnotations, hadGood: boolean): ConditionNow {
  if (parsed.errors.length === 0) {
    const notes = [
      ...parsed.unknown.map(
        (one) =>
          `${one.key} is not known${one.near.length === 0 ? '' : `; did you mean ${one.near.join(' or ')}?`}`,
      ),
      ...parsed.warnings.map((one) => `${one.key}: ${one.message}`),
    ];
    return {
      type: 'PolicyValid',
      status: 'True',
      reason: notes.length === 0 ? 'Valid' : 'ValidWithWarnings',
      message: notes.length === 0 ? 'All annotations are as they should be.' : notes.join('\n'),
    };
  }
  return {
    type: 'PolicyValid',
    status: 'False',
    reason: 'BadAnnotation',
    message: `${parsed.errors.map((one) => `${one.key} is ${one.value}; allowed: ${one.allowed}`).join('\n')}\n${
      hadGood
        ? 'The last good policy stays in force.'
        : 'There was no good policy before: the volume is not replicated.'
    }`,
  };
}

/** One Event per bad or unknown key, when the condition says something new. */
function policyEvents(
  _o: Observed,
  parsed: ParsedAnnotations,
  before: SimpleVolumeStatus,
  now: ConditionNow,
): PlannedEvent[] {
  const known = before.conditions?.find((one) => one.type === 'PolicyValid');
  if (known?.message === shorten(now.message, 4000)) return [];
  return [
    ...parsed.errors.map((one) =>
      event(
        'Warning',
        'BadAnnotation',
        `${one.key} is ${one.value}; allowed: ${one.allowed}`,
        `${one.key} ${one.value}`,
      ),
    ),
    ...parsed.unknown.map((one) =>
      event(
        'Warning',
        'UnknownAnnotation',
        `${one.key} is not known${one.near.length === 0 ? '' : `; did you mean ${one.near.join(' or ')}?`}`,
        one.key,
      ),
    ),
    ...parsed.warnings.map((one) =>
      event('Warning', 'PolicyWarning', `${one.key}: ${one.message}`, `${one.key} ${one.message}`),
    ),
  ];
}

function promotedEvent(record: PromotionRecord): PlannedEvent {
  return record.planned
    ? event('Normal', 'Moved', record.reason, `epoch ${record.epoch}`)
    : event(
        'Warning',
        'FailedOver',
        `${record.reason}${record.leftBehind === undefined ? '' : ` Left behind: ${record.leftBehind}.`}`,
        `epoch ${record.epoch}`,
      );
}

/** What a claim that asks for more than it has waits for. Kubernetes leaves this to the driver. */
function expansion({ claim, volume }: Observed): Action[] {
  const [wanted, shown, has] = [claim?.requestedBytes, claim?.capacityBytes, volume?.bytes];
  if (claim?.deleting || !wanted || !shown || !has) return [];
  // A volume that is larger than its claim asks for is as large as it was when both were bound, or half way through this.
  const bytes = Math.max(wanted, has);
  return bytes > shown ? [{ id: 'expand', kind: 'expand', bytes }] : [];
}

/** Whether the volume is held to its size on the node where it is active. Copies are not limited. */
function sizeCondition(active: Agent): ConditionNow[] {
  const report = active?.volume;
  const size = report?.role === 'active' ? report.size : undefined;
  if (size === undefined || size.bytes === null) return [];
  const say = (status: ConditionNow['status'], reason: string, message: string): ConditionNow[] => [
    { type: 'SizeEnforced', status, reason, message: `${active?.node}: ${message}.` },
  ];
  if (size.enforced === null) return say('Unknown', 'NotPublished', size.reason);
  return size.enforced
    ? say('True', 'Enforced', `the file system holds the volume to ${size.bytes} bytes`)
    : say('False', 'NotEnforced', shorten(size.reason, 1000));
}

/** What the active node's agent says of itself, as it says it. */
function agentConditions(active: Agent): ConditionNow[] {
  const own = [
    'Ready',
    'Replicating',
    'Fresh',
    'FailoverPossible',
    'PolicyValid',
    'FencingPossible',
    'WorkloadHealthy',
    'SizeEnforced',
    'Forced',
  ];
  return (active?.volume?.conditions ?? [])
    .filter((one) => /^[A-Za-z][A-Za-z0-9]{0,63}$/.test(one.type) && !own.includes(one.type))
    .slice(0, 16)
    .map((one) => ({
      type: one.type,
      status: 'True' as const,
      reason: 'ReportedByAgent',
      message: `${active?.node}: ${one.message}${one.paths === undefined || one.paths.length === 0 ? '' : ` (${one.paths.slice(0, 5).join(', ')}${(one.count ?? one.paths.length) > 5 ? `, ${one.count ?? one.paths.length} in all` : ''})`}`,
    }));
}

const heldBy = (v: View): string[] =>
  (v.active?.volume?.conditions ?? []).map((one) => one.type).filter((type) => HOLDING.includes(type));

interface Facts {
  copies: number;
  fresh: readonly Copy[];
  decision: FailoverDecision;
  would: FailoverDecision;
  outcome: Outcome;
  unfinished: boolean;
  record: PromotionRecord | null;
}

function conditionsOf(v: View, facts: Facts): ConditionNow[] {
  const { policy, activeNode } = v;
  const report = v.active?.volume;
  const isActive = report?.role === 'active' && report.epoch === v.epoch;
  const say = (
    type: string,
    status: ConditionNow['status'],
    reason: string,
    message: string,
  ): ConditionNow => ({
    type,
    status,
    reason,
    message,
  });
  const no = (type: string, reason: string, message: string): ConditionNow =>
    say(type, 'False', reason, message);
  const out: ConditionNow[] = [];

  const held = heldBy(v);
  if (facts.decision.code === 'EPOCH_AHEAD') out.push(no('Ready', 'RecordOutOfDate', facts.decision.because));
  else if (facts.outcome.moving === 'failover')
    out.push(
      no(
        'Ready',
        'FailingOver',
        `The volume fails over from ${activeNode} to ${facts.decision.target}.${facts.outcome.waitsFor === null ? '' : ` It waits for ${facts.outcome.waitsFor}.`}`,
      ),
    );
  else if (facts.outcome.moving === 'planned')
    out.push(
      no(
        'Ready',
        'Moving',
        facts.outcome.waitsFor === null ? facts.decision.because : `It waits for ${facts.outcome.waitsFor}.`,
      ),
    );
  else if (facts.unfinished && facts.record !== null && !facts.record.done.includes('promoteNew'))
    out.push(
      no(
        'Ready',
        facts.record.planned ? 'Moving' : 'FailingOver',
        `${activeNode} is being made the active node of epoch ${v.epoch}.`,
      ),
    );
  else if (v.active?.reachable !== true)
    out.push(no('Ready', 'AgentUnreachable', `The agent of ${activeNode} does not answer.`));
  else if (policy.replicationEnabled && !isActive)
    out.push(no('Ready', 'NotActivated', `${activeNode} is not active in epoch ${v.epoch} yet.`));
  else if (
    facts.outcome.refused &&
    facts.outcome.waitsFor !== null &&
    facts.decision.code !== 'FORCE_INVALID'
  )
    out.push(no('Ready', 'Held', steadyText(facts.outcome.waitsFor)));
  else out.push(say('Ready', 'True', 'Active', `The volume is on ${activeNode}, epoch ${v.epoch}.`));

  if (!policy.replicationEnabled) out.push(no('Replicating', 'Disabled', 'Replication is off.'));
  else if (held.length > 0)
    out.push(no('Replicating', 'Held', `Replication waits for an operator: ${held.join(', ')}.`));
  else if (v.active?.reachable !== true)
    out.push(no('Replicating', 'AgentUnreachable', `The agent of ${activeNode} does not answer.`));
  else if (!isActive || report.state === 'stopped' || report.state === 'failed')
    out.push(no('Replicating', 'NotWatching', `No watch runs on ${activeNode}.`));
  else if (facts.copies === 0)
    out.push(no('Replicating', 'NoCopies', `No other node holds a copy${unfitText(v.placement)}.`));
  else if (v.placement.missing > 0)
    out.push(
      say(
        'Replicating',
        'True',
        'TooFewNodes',
        `${v.placement.missing} of the wanted copies have no node${unfitText(v.placement)}.`,
      ),
    );
  else
    out.push(
      say('Replicating', 'True', 'Watching', `Changes on ${activeNode} go to ${facts.copies} copies.`),
    );

  if (!policy.replicationEnabled) out.push(no('Fresh', 'Disabled', 'Replication is off.'));
  else if (facts.fresh.length > 0)
    out.push(
      say(
        'Fresh',
        'True',
        'Fresh',
        `${facts.fresh.length} of ${facts.copies} copies are complete within the allowed staleness.`,
      ),
    );
  else out.push(no('Fresh', 'Stale', 'No copy was known complete within the allowed staleness.'));

  if (!policy.failoverEnabled || !policy.replicationEnabled)
    out.push(
      no(
        'FailoverPossible',
        'Disabled',
        policy.replicationEnabled ? 'Failover is off.' : 'Replication is off.',
      ),
    );
  else if (facts.would.action === 'promote')
    out.push(say('FailoverPossible', 'True', 'Candidate', `${facts.would.target} would be promoted.`));
  else {
    const real = facts.decision.action === 'refuse' && facts.decision.code !== 'FORCE_INVALID';
    out.push(
      no(
        'FailoverPossible',
        real ? 'Refused' : 'NoCandidate',
        steadyText(real ? facts.decision.because : facts.would.because),
      ),
    );
  }

  const { workload } = v;
  const nodeReady = v.o.nodes.find((node) => node.name === activeNode)?.ready === true;
  const nobodyWants = workload.cause === 'no-demand' || workload.cause === 'completed';
  const known = v.before.conditions?.find((one) => one.type === 'WorkloadHealthy');
  // Since when it was unhealthy is what the move is carried through by, also between its old pod and the next one.
  const betweenPods =
    nobodyWants && moveBegun(v) && known?.status === 'False'
      ? no('WorkloadHealthy', known.reason, known.message)
      : undefined;
  if (workload.healthyPod && nodeReady)
    out.push(say('WorkloadHealthy', 'True', 'Healthy', `A healthy pod uses the volume on ${activeNode}.`));
  else if (betweenPods !== undefined) out.push(betweenPods);
  else if (nobodyWants)
    out.push(
      say(
        'WorkloadHealthy',
        'Unknown',
        workload.cause === 'completed' ? 'Completed' : 'NoDemand',
        'No workload wants the volume now.',
      ),
    );
  else
    out.push(
      no(
        'WorkloadHealthy',
        CAUSES[workload.healthyPod ? 'unhealthy' : workload.cause],
        nodeReady
          ? `There is no healthy pod on ${activeNode}.`
          : `${activeNode} is not Ready or its agent does not answer; what its pods do is not known.`,
      ),
    );
  return out;
}

const CAUSES = {
  'no-demand': 'NoDemand',
  'no-pod': 'NoPod',
  pending: 'Starting',
  unschedulable: 'Unschedulable',
  completed: 'Completed',
  unhealthy: 'Unhealthy',
} as const;

const unfitText = (placement: Placement): string => {
  const all = Object.entries(placement.unfit);
  return all.length === 0 ? '' : `: ${all.map(([node, why]) => `${node}: ${why}`).join('; ')}`;
};

/** Which conditions are worth an Event when they change, besides those that have one of their own. */
function conditionEvent(now: ConditionNow, before: SimpleVolumeStatus): PlannedEvent[] {
  const bad = (reason: string): PlannedEvent[] => [
    event('Warning', reason, now.message, `${now.type} ${now.reason}`),
  ];
  const known = before.conditions?.some((one) => one.type === now.type) === true;
  switch (now.type) {
    case 'FencingPossible':
      return now.reason === 'NotPossible' ? bad('FencingNotPossible') : [];
    case 'Replicating':
      return now.status === 'False' && now.reason !== 'Disabled' && (known || now.reason === 'Held')
        ? bad('NotReplicating')
        : now.reason === 'TooFewNodes'
          ? bad('TooFewNodes')
          : [];
    case 'FailoverPossible':
      // Refused has an Event of its own, with the causes.
      return now.status === 'False' && now.reason === 'NoCandidate' && known
        ? bad('NoFailoverCandidate')
        : [];
    case 'Ready':
      return now.status === 'False' && now.reason === 'Held' ? bad('Held') : [];
    case 'Forced':
      return now.status === 'Unknown'
        ? []
        : [
            event(
              now.status === 'True' ? 'Normal' : 'Warning',
              `Force${now.reason}`,
              now.message,
              now.message,
            ),
          ];
    default:
      return HOLDING.includes(now.type) ? bad(now.type) : [];
  }
}

/**
 * Files on the copies belong to whom they belong on the source. Annotations change that; when they name another user
 * than the workload runs as, it could not write its own files after a failover.
 */
export function ownerOf(workload: Pick<Workload, 'templates'>): { uid: number | null; gid: number | null } {
  const uids = new Set<number>();
  const gids = new Set<number>();
  for (const { securityContext, containers } of workload.templates) {
    for (const one of containers ?? []) {
      const uid = one.securityContext?.runAsUser ?? securityContext?.runAsUser;
      if (uid !== undefined) uids.add(uid);
      const gid = securityContext?.fsGroup ?? one.securityContext?.runAsGroup ?? securityContext?.runAsGroup;
      if (gid !== undefined) gids.add(gid);
    }
  }
  return {
    uid: uids.size === 1 ? ([...uids][0] as number) : null,
    gid: gids.size === 1 ? ([...gids][0] as number) : null,
  };
}

function ownerEvents(v: View, before: SimpleVolumeStatus): PlannedEvent[] {
  // Said when the policy is new, not at every look.
  const last = v.object.spec.policy;
  if (
    last?.ownerUid === (v.policy.ownerUid ?? undefined) &&
    last?.ownerGid === (v.policy.ownerGid ?? undefined) &&
    before.observedGeneration === v.object.metadata.generation
  )
    return [];
  const pods = ownerOf(v.workload);
  const events: PlannedEvent[] = [];
  for (const [key, wanted, has] of [
    ['uid', v.policy.ownerUid, pods.uid],
    ['gid', v.policy.ownerGid, pods.gid],
  ] as const) {
    // Root may write whatever belongs to whom.
    if (wanted === null || has === null || wanted === has || pods.uid === 0) continue;
    events.push(
      event(
        'Warning',
        'OwnerMismatch',
        `replication-owner-${key} is ${wanted}, the pods run as ${has}: after a failover they may not be able to write their files.`,
        `${key} ${wanted} ${has}`,
      ),
    );
  }
  return events;
}

function phaseOf(
  v: View,
  facts: {
    fresh: number;
    decision: FailoverDecision;
    outcome: Outcome;
    unfinished: boolean;
    record: PromotionRecord | null;
  },
): NonNullable<SimpleVolumeStatus['phase']> {
  if (v.o.claim?.deleting === true) return 'Deleting';
  if (facts.outcome.moving === 'failover') return 'FailingOver';
  if (facts.outcome.moving === 'planned') return 'Moving';
  if (facts.unfinished && facts.record !== null && v.epoch > 1)
    return facts.record.planned ? 'Moving' : 'FailingOver';
  if (facts.outcome.refused && facts.decision.code !== 'FORCE_INVALID') return 'Held';
  if (heldBy(v).length > 0) return 'Held';
  if (facts.unfinished && facts.record !== null && !facts.record.done.includes('promoteNew'))
    return 'Pending';
  const report = v.active?.volume;
  if (v.active?.reachable !== true) return 'Degraded';
  if (!v.policy.replicationEnabled) return 'Active';
  if (report?.role !== 'active' || report.epoch !== v.epoch) return 'Degraded';
  const wanted = v.placement.nodes.length + v.placement.missing;
  return wanted > 0 && facts.fresh === wanted ? 'Active' : 'Degraded';
}
