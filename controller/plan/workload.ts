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
  // a StatefulSet makes no other pod before.
  const dead = (name: string | null): boolean => o.nodes.find((node) => node.name === name)?.ready !== true;
  if (live.some((pod) => pod.node === activeNode && pod.controlledBy !== null && dead(pod.node)))
    return 'unhealthy';
  if (o.workload?.wants === true) return 'no-pod';
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
    templates: given.length > 0 ? given : o.workload?.template ? [o.workload.template] : [],
  };
}
