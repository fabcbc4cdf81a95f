/** What the pods of a claim say about its workload: is it healthy, and if not, what is it that is missing? */
import type { FailoverWorkload, WorkloadCause } from './failover.ts';
import type { Observed, ObservedPod, PodTemplate } from './types.ts';

export interface Workload extends Omit<FailoverWorkload, 'withoutSince'> {
  cause: WorkloadCause;
  waitingOn: string | null;
  /** pods on the active node that may have the volume open, those that are being deleted too */
  users: ObservedPod[];
  /** what would have to run on another node */
  templates: PodTemplate[];
}

export const isLive = (pod: ObservedPod): boolean => pod.phase !== 'Succeeded' && pod.phase !== 'Failed';

const oldestFirst = (a: ObservedPod, b: ObservedPod): number =>
  a.createdAt - b.createdAt || (a.name < b.name ? -1 : a.name > b.name ? 1 : 0);

/** Only containers that ended badly make a pod unhealthy: one that pulls its image, runs its init containers or is not ready yet is starting. */
const isBroken = (pod: ObservedPod): boolean =>
  !pod.initializing &&
  (pod.restarts > 0 ||
    pod.waiting.some((reason) => reason === 'CrashLoopBackOff' || reason === 'RunContainerError'));

/** A pod of a controller that is being deleted on the active node, whose kubelet is gone, when no other pod is wanted yet. */
function stuckPod(o: Observed, activeNode: string | null): ObservedPod | null {
  const live = o.pods.filter(isLive);
  if (activeNode === null || live.some((pod) => !pod.deleting)) return null;
  if (o.nodes.find((node) => node.name === activeNode)?.ready === true) return null;
  return live.find((pod) => pod.node === activeNode && pod.controlledBy !== null) ?? null;
}

/**
 * The owner to be asked whether it wants a pod at all: the one case in which the pods do not tell. In every other one
 * a pod that is wanted is there, at the latest when its owner has made it, and nobody is served before.
 */
export function ownerToAsk(
  o: Observed,
): { kind: 'StatefulSet' | 'ReplicaSet'; name: string; pod: string } | null {
  const pod = stuckPod(o, o.object?.status?.activeNode ?? null);
  const owner = pod?.controlledBy;
  if (!pod || !owner || owner.apiVersion?.startsWith('apps/') !== true) return null;
  return owner.kind === 'StatefulSet' || owner.kind === 'ReplicaSet'
    ? { kind: owner.kind, name: owner.name, pod: pod.name }
    : null;
}

/** Whether a StatefulSet with these numbers wants the pod of this name, a ReplicaSet any pod. */
export function wantsPod(
  owner: { kind: 'StatefulSet' | 'ReplicaSet'; pod: string },
  found: { replicas?: number; start?: number; deleting: boolean } | null,
): boolean {
  if (found === null || found.deleting) return false;
  const replicas = found.replicas ?? 1;
  if (owner.kind === 'ReplicaSet') return replicas > 0;
  const ordinal = Number(/-(\d+)$/.exec(owner.pod)?.[1] ?? Number.NaN);
  const start = found.start ?? 0;
  return Number.isNaN(ordinal) || (ordinal >= start && ordinal < start + replicas);
}

function causeOf(live: readonly ObservedPod[], o: Observed, activeNode: string | null): WorkloadCause {
  const staying = live.filter((pod) => !pod.deleting);
  const here = staying.filter((pod) => pod.node === activeNode);
  // Where the lease was given back nothing starts any more.
  const gone = o.fence.released !== null && o.fence.released === o.object?.status?.epoch;
  if (!gone && here.some((pod) => !isBroken(pod))) return 'pending';
  if (here.length > 0) return 'unhealthy';
  const unscheduled = staying.filter((pod) => pod.node === null);
  // Before the scheduler has spoken a pod is on its way, but not to a node that takes none, and not back to one that the
  // volume is just leaving.
  const leaving =
    o.object?.status?.phase === 'Moving' ||
    o.nodes.some((node) => node.name === activeNode && node.unschedulable);
  if (unscheduled.some((pod) => pod.unschedulable || leaving)) return 'unschedulable';
  if (staying.length > 0) return 'pending';
  // What is left is being deleted. On a node that answers it just ends; on a dead one it stays until somebody acts, and
  // a StatefulSet makes no other pod before. One that was scaled down wants none: nothing is lost by waiting.
  if (stuckPod(o, activeNode) !== null) return o.workload?.wants === false ? 'no-demand' : 'unhealthy';
  return o.pods.length > live.length ? 'completed' : 'no-demand';
}

/** Pods on other nodes never count as healthy: the volume is not there (a returning old pod, a debug pod). */
export function judgeWorkload(o: Observed, activeNode: string | null): Workload {
  const live = o.pods.filter(isLive).sort(oldestFirst);
  const users = live.filter((pod) => pod.node !== null && pod.node === activeNode);
  const healthyPod = users.some((pod) => !pod.deleting && pod.phase === 'Running' && pod.ready);
  const elsewhere = live.filter(
    (pod) => !pod.deleting && pod.node !== null && pod.node !== activeNode && pod.phase === 'Pending',
  );
  const staying = live.filter((pod) => !pod.deleting);
  const given = (staying.length > 0 ? staying : live).map((pod) => pod.spec);
  return {
    healthyPod,
    cause: causeOf(live, o, activeNode),
    waitingOn: users.length === 0 ? (elsewhere[0]?.node ?? null) : null,
    users,
    templates: given,
  };
}
