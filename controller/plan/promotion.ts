/**
 * A move of the volume, in two halves.
 *
 * Before the decision (planned moves only): flush while the workload still runs, stop it, give the lease back, flush
 * what was written last. Nothing of this is remembered but by what it left: whoever leads next goes on from there.
 *
 * After the decision, which is one write to the status: everything that follows from it, each step looked up in what is
 * there, so that the list of what is still to be done comes out right from every prefix of it, in any order, twice.
 */
import { parseDuration } from '../../lib/core/duration.ts';
import type { FencingMode } from '../../lib/fence/types.ts';
import type { LabelChange } from './labels.ts';
import {
  type Action,
  type Observed,
  type ObservedAgent,
  type ObservedPod,
  PREFIX,
  type PromotionRecord,
  type WatchBody,
} from './types.ts';
import { isLive } from './workload.ts';

export const SELECTED_NODE = 'volume.kubernetes.io/selected-node';
export const ACTIVE_NODE = `${PREFIX}active-node`;
export const PREVIOUS_ACTIVE_NODE = `${PREFIX}previous-active-node`;
export const EPOCH = `${PREFIX}epoch`;

/** In the order in which they are begun; none waits for another one, so that one that fails holds none back. */
export const STEPS = [
  'demoteOld',
  'promoteNew',
  'annotatePv',
  'annotatePvc',
  'labels',
  'startWatch',
  'deletePods',
] as const;
export type Step = (typeof STEPS)[number];

const agentOf = (o: Observed, node: string | undefined): ObservedAgent | undefined =>
  o.agents.find((agent) => agent.node === node);

/** Agents that still run a watch of an epoch that is over; their own epoch is told back, never a newer one. */
export function staleWatches(o: Observed, active: string | null, epoch: number): Action[] {
  return o.agents.flatMap((agent): Action[] => {
    const { volume } = agent;
    if (agent.node === active || !agent.reachable || volume?.role !== 'active') return [];
    if (volume.epoch >= epoch || volume.state === 'stopped') return [];
    return [{ id: `stopWatch:${agent.node}`, kind: 'stopWatch', node: agent.node, epoch: volume.epoch }];
  });
}

const differing = (
  has: Readonly<Record<string, string>>,
  wanted: Record<string, string | null>,
): Record<string, string | null> =>
  Object.fromEntries(Object.entries(wanted).filter(([key, value]) => (has[key] ?? null) !== value));

export interface Placed {
  activeNode: string;
  previousActiveNode: string | null;
  epoch: number;
}

/** What claim and PersistentVolume shall say about where the volume is; only what differs. */
export function annotationActions(o: Observed, placed: Placed): Action[] {
  const actions: Action[] = [];
  const { volume, claim } = o;
  const common = {
    [ACTIVE_NODE]: placed.activeNode,
    ...(placed.previousActiveNode === null ? {} : { [PREVIOUS_ACTIVE_NODE]: placed.previousActiveNode }),
  };
  if (volume !== null) {
    const annotations = differing(volume.annotations, { ...common, [EPOCH]: String(placed.epoch) });
    if (Object.keys(annotations).length > 0)
      actions.push({ id: `annotatePv:${volume.name}`, kind: 'annotatePv', name: volume.name, annotations });
  }
  if (claim !== null && volume !== null) {
    // A claim without a volume is the provisioner's: taking its node away races with it. This one is bound.
    const stale = claim.annotations[SELECTED_NODE];
    const annotations = differing(claim.annotations, {
      ...common,
      ...(stale !== undefined && stale !== placed.activeNode ? { [SELECTED_NODE]: null } : {}),
    });
    if (Object.keys(annotations).length > 0)
      actions.push({
        id: `annotatePvc:${claim.name}`,
        kind: 'annotatePvc',
        name: claim.name,
        uid: claim.uid,
        annotations,
      });
  }
  return actions;
}

/** Whether an active node's report is what the body asks for; then nothing is sent. */
export function watchRuns(agent: ObservedAgent | undefined, body: WatchBody): boolean {
  const report = agent?.volume;
  if (report?.role !== 'active' || report.epoch !== body.epoch) return false;
  if (report.state === 'stopped' || report.state === 'failed') return false;
  // An agent that says nothing of sizes has none to be told.
  if (body.bytes !== undefined && report.size && (report.size.bytes ?? 0) < body.bytes) return false;
  const key = (list: readonly { url: string; node: string | null }[]): string =>
    list
      .map((one) => `${one.node} ${one.url}`)
      .sort()
      .join();
  if (key(report.targets) !== key(body.targets)) return false;
  // An agent that was started anew may have another address, and replicas ask at the one that they were told.
  const { source } = report;
  const at = (addresses: WatchBody['source']): string =>
    [addresses.url, addresses.webdavUrl].map((url) => URL.parse(url)?.href ?? url).join();
  if (source && at(source) !== at(body.source)) return false;
  const { policy } = report;
  const same = (a: readonly string[], b: readonly string[]): boolean =>
    JSON.stringify(a) === JSON.stringify(b);
  return (
    same(policy.includePaths, body.includePaths) &&
    same(policy.excludePaths, body.excludePaths) &&
    same(policy.requiredPaths, body.requiredPaths) &&
    policy.debounceMs === parseDuration(body.debounce, 'debounce') &&
    policy.consistencyMode === body.consistencyMode &&
    policy.pruneExcluded === body.pruneExcluded &&
    policy.confirmedReplicas === body.confirmedReplicas &&
    policy.ownerUid === body.ownerUid &&
    policy.ownerGid === body.ownerGid &&
    policy.fileMode === body.fileMode &&
    policy.dirMode === body.dirMode
  );
}

/**
 * Pods of before the decision that keep the workload from being where the volume is now: those on the node that was
 * left, and those that wait for the volume on a third one and whose controller makes them anew. One that waits for a
 * node is left alone, and so is what has ended.
 */
function stalePods(record: PromotionRecord, o: Observed): ObservedPod[] {
  if (record.from === undefined || record.from === record.to) return [];
  const decided = Date.parse(record.decidedAt);
  return o.pods.filter((pod) => {
    if (!isLive(pod) || pod.node === null || pod.node === record.to || pod.createdAt > decided) return false;
    return pod.node === record.from || (pod.phase === 'Pending' && pod.controlledBy !== null);
  });
}

/**
 * Pods of before the decision that still run where the volume is not any more: their mounts were taken away, or never
 * could be. When the decision was carried out they were not seen there (a copy of the cluster can be late), and nobody
 * else ends them.
 */
export function leftPods(record: PromotionRecord, o: Observed): Action[] {
  if (!record.done.includes('deletePods')) return [];
  const decided = Date.parse(record.decidedAt);
  return o.pods
    .filter(
      (pod) =>
        pod.phase === 'Running' &&
        !pod.deleting &&
        pod.controlledBy !== null &&
        pod.node !== null &&
        pod.node !== record.to &&
        pod.createdAt <= decided,
    )
    .map((pod) => ({
      id: `deletePod:${pod.name}`,
      kind: 'deletePod',
      name: pod.name,
      uid: pod.uid,
      force: false,
      why: `the volume is on ${record.to} since epoch ${record.epoch}`,
    }));
}

/** Without its kubelet a pod never ends by itself; it is taken off when nothing of it can write to the volume any more. */
function mayForce(pod: ObservedPod, o: Observed, fencing: FencingMode, promoted: boolean): boolean {
  const node = o.nodes.find((one) => one.name === pod.node);
  if (node?.ready === true || !promoted) return false;
  const agent = agentOf(o, pod.node ?? undefined);
  return node === undefined || agent?.reachable !== true || fencing === 'lease';
}

export interface PromotionPlan {
  /** all that is done, for the record: what was noted before, and what is seen now */
  done: Step[];
  actions: Action[];
  finished: boolean;
  /**
   * All is done but that pods are ending on a node that does not say when they have: it may never say so. Nothing else
   * waits for them.
   */
  onlyEnding: boolean;
}

/**
 * What is still to be done of a decision.
 * @param wanted body: the watch of the new active node (null: its agent has no address now); labels: patches that are
 *   still due; replicates: false when the watch is to be stopped (the node is made the active one all the same)
 */
export function promotionSteps(
  record: PromotionRecord,
  o: Observed,
  wanted: {
    body: WatchBody | null;
    labels: readonly LabelChange[];
    replicates: boolean;
    fencing: FencingMode;
    placed: Placed;
  },
): PromotionPlan {
  const noted = new Set<string>(record.done);
  const now = new Set<Step>();
  const actions: Action[] = [];

  const demote = staleWatches(o, record.to, record.epoch);
  if (demote.length === 0) now.add('demoteOld');
  actions.push(...demote);

  const target = agentOf(o, record.to);
  const report = target?.volume;
  const promoted = report?.role === 'active' && report.epoch === record.epoch;
  if (promoted) now.add('promoteNew');
  const runs = wanted.body !== null && watchRuns(target, wanted.body);
  if (promoted && (!wanted.replicates || runs)) now.add('startWatch');
  if (wanted.body !== null && target?.reachable === true && (!promoted || (wanted.replicates && !runs))) {
    // Not before every lease that was granted in an older epoch has ended for certain.
    if (o.fence.activationWaitMs === 0)
      actions.push({ id: `startWatch:${record.to}`, kind: 'startWatch', node: record.to, body: wanted.body });
  }

  const annotations = annotationActions(o, wanted.placed);
  if (!annotations.some((one) => one.kind === 'annotatePv')) now.add('annotatePv');
  if (!annotations.some((one) => one.kind === 'annotatePvc')) now.add('annotatePvc');
  actions.push(...annotations);

  if (wanted.labels.length === 0) now.add('labels');
  for (const change of wanted.labels)
    actions.push({ id: `labelNode:${change.node}`, kind: 'labelNode', ...change });

  // Once all were gone, what comes later is another matter: the volume follows a new pod, it does not delete it.
  const stale = noted.has('deletePods') ? [] : stalePods(record, o);
  if (stale.length === 0) now.add('deletePods');
  let toEnd = 0;
  for (const pod of stale) {
    const force = mayForce(pod, o, wanted.fencing, promoted || noted.has('promoteNew'));
    if (pod.deleting && !force) continue;
    toEnd += 1;
    actions.push({
      id: `deletePod:${pod.name}`,
      kind: 'deletePod',
      name: pod.name,
      uid: pod.uid,
      force,
      why: `the volume is on ${record.to} since epoch ${record.epoch}`,
    });
  }
  const done = STEPS.filter((step) => noted.has(step) || now.has(step));
  const open = STEPS.filter((step) => !done.includes(step));
  const onlyEnding = toEnd === 0 && open.every((step) => step === 'deletePods');
  return { done, actions, finished: open.length === 0, onlyEnding };
}

export interface MoveStep {
  actions: Action[];
  /** everything is flushed, confirmed and given back: the decision may be written */
  ready: boolean;
  /** the workload is being stopped: no new pod shall be drawn to the node that is left */
  stopping: boolean;
  /** what it waits for, for people */
  waitsFor: string;
  nextLookMs: number;
}

/** A failed flush is tried again after this, ms. */
const RETRY_MS = 10_000;
/** A first flush is good for this long; then the workload would have to stop for too much, ms. */
const FLUSH_GOOD_MS = 120_000;

/**
 * The next step of a planned move, from the active node to `target`, which holds a copy.
 * @param users pods on the active node that may have the volume open
 */
export function moveStep(
  o: Observed,
  move: { from: string; target: string; epoch: number; users: readonly ObservedPod[] },
): MoveStep {
  const { from, target, epoch, users } = move;
  const flush = (name: 'flush' | 'last', what: string): MoveStep | null => {
    const tag = `${name}:${epoch}:${target}`;
    const last = [...o.memory.prepared].filter((one) => one.tag === tag).sort((a, b) => a.ageMs - b.ageMs)[0];
    if (
      last?.ok === true &&
      last.confirmed.includes(target) &&
      (name === 'last' || last.ageMs < FLUSH_GOOD_MS)
    )
      return null;
    const wait: MoveStep = {
      actions: [],
      ready: false,
      stopping: name === 'last',
      waitsFor: what,
      nextLookMs: RETRY_MS,
    };
    if (last !== undefined && !last.ok && last.ageMs < RETRY_MS)
      return {
        ...wait,
        waitsFor: `${what}; the last attempt failed: ${last.error ?? 'no reason given'}`,
        nextLookMs: RETRY_MS - last.ageMs,
      };
    wait.actions.push({
      id: `prepare:${tag}`,
      kind: 'prepare',
      node: from,
      epoch,
      confirm: [target],
      timeoutMs: o.options.prepareTimeoutMs,
      tag,
    });
    return wait;
  };

  if (o.fence.released !== epoch) {
    const stopping = users.filter((pod) => !pod.deleting);
    if (users.length === 0 || stopping.length > 0) {
      const first = flush('flush', `${target} to hold what ${from} has`);
      if (first !== null) return first;
    }
    // The agent gives the lease back only when no writer is there, so it is asked first: a pod that came meanwhile and
    // has not mounted the volume then never does. Those that have it open end, and it is asked again.
    return {
      actions: [
        { id: `releaseLease:${from}`, kind: 'releaseLease', node: from, epoch },
        ...stopping.map(
          (pod): Action => ({
            id: `deletePod:${pod.name}`,
            kind: 'deletePod',
            name: pod.name,
            uid: pod.uid,
            force: false,
            why: `the volume moves from ${from} to ${target}`,
          }),
        ),
      ],
      ready: false,
      stopping: true,
      waitsFor:
        users.length === 0
          ? `${from} to give its lease back`
          : `the pods on ${from} to end (${users.map((pod) => pod.name).join(', ')})`,
      nextLookMs: users.length === 0 ? 1000 : 2000,
    };
  }
  // Nobody can write any more: what this flush finds is all that will ever be there.
  const last = flush('last', `${target} to confirm the last generation`);
  if (last !== null) return last;
  return { actions: [], ready: true, stopping: true, waitsFor: '', nextLookMs: 1000 };
}
