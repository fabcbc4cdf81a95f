/**
 * Which nodes hold the copies of a volume, and which of them may be promoted.
 *
 * Copying a volume is the most expensive thing that this product does, so a copy stays where it is: also on a node that
 * is not Ready, because it will be back, and catching up is cheap. Only when too few living copies are left is another
 * one made, and a copy too many is let go only when the wanted number is alive without it.
 */
import { nextPromotable } from '../../lib/fence/leader.ts';
import type { FencingMode, Promotable } from '../../lib/fence/types.ts';
import type { ObservedNode } from './types.ts';

export const ZONE = 'topology.kubernetes.io/zone';

export interface PlacementNode
  extends Pick<
    ObservedNode,
    'name' | 'ready' | 'unschedulable' | 'inPool' | 'deleting' | 'labels' | 'volumeCount'
  > {
  /** its agent answers and says that it is ready */
  agentReady: boolean;
  /** free space of its pool, bytes; null: not known */
  freeBytes: number | null;
}

export interface PlacementInput {
  nodes: readonly PlacementNode[];
  activeNode: string | null;
  /** nodes that have or are to have a copy by an earlier placement, the active one may be among them */
  present: readonly string[];
  /** nodes that hold a whole generation */
  whole: readonly string[];
  /** nodes whose copy is not given up: heard of not too long ago */
  alive: readonly string[];
  /** copies besides the active one; null: one on every other node of the pool */
  wanted: number | null;
  /** living copies below which a lost one is replaced; at least one */
  atLeast: number;
  /** nodes that shall have a copy whatever the number (a pod waits there) */
  needed: readonly string[];
  /** failover's priority list: their copies are made first and kept longest */
  priority: readonly string[];
  /** room that a new copy takes, bytes */
  needBytes: number;
}

export interface Placement {
  /** sorted */
  nodes: string[];
  /** how many of the wanted copies have no node; 0 when every node of the pool is wanted */
  missing: number;
  /** had a copy and are not wanted any more, sorted */
  dropped: string[];
  /** why nodes of the pool that could help get no copy: node -> one sentence */
  unfit: Record<string, string>;
}

const byName = (a: string, b: string): number => (a < b ? -1 : a > b ? 1 : 0);

/** Two digits, rounded up: a number that goes on changing must not change the status each time. */
function roughly(bytes: number): string {
  const [unit, name] = bytes >= 2 ** 30 ? [2 ** 30, 'GiB'] : [2 ** 20, 'MiB'];
  const value = bytes / unit;
  const step = 10 ** Math.max(0, Math.floor(Math.log10(value)) - 1);
  return `${Number((Math.ceil(value / step) * step).toPrecision(2))} ${name}`;
}

/** Why a node cannot take a new copy; null: it can. */
function newCopyProblem(node: PlacementNode, needBytes: number): string | null {
  if (node.deleting) return 'the node is being deleted';
  if (!node.ready) return 'the node is not Ready';
  if (node.unschedulable) return 'the node is cordoned';
  if (!node.agentReady) return 'its agent is not ready';
  if (node.freeBytes !== null && node.freeBytes < needBytes)
    return `its pool has less than ${roughly(needBytes)} free`;
  return null;
}

/** Deterministic: the same facts give the same nodes, in whatever order they are told. */
export function place(input: PlacementInput): Placement {
  const { activeNode, wanted } = input;
  const pool = input.nodes
    .filter((node) => node.inPool && node.name !== activeNode)
    .sort((a, b) => byName(a.name, b.name));
  const rank = (name: string): number => {
    const at = input.priority.indexOf(name);
    return at < 0 ? input.priority.length : at;
  };
  const had = pool.filter((node) => input.present.includes(node.name)).map((node) => node.name);
  const kept = new Set(had);

  // A copy too many goes when all that stay are alive and whole.
  if (wanted !== null && kept.size > wanted) {
    const worth = (name: string): number =>
      (input.needed.includes(name) ? 4 : 0) +
      (input.alive.includes(name) ? 2 : 0) +
      (input.whole.includes(name) ? 1 : 0);
    const best = [...kept].sort((a, b) => worth(b) - worth(a) || rank(a) - rank(b) || byName(a, b));
    const stay = best.slice(0, wanted);
    if (stay.every((name) => input.alive.includes(name) && input.whole.includes(name)))
      for (const name of best.slice(wanted)) if (!input.needed.includes(name)) kept.delete(name);
  }

  const unfit: Record<string, string> = {};
  const free = pool.filter((node) => {
    if (kept.has(node.name)) return false;
    const problem = newCopyProblem(node, input.needBytes);
    if (problem !== null) unfit[node.name] = problem;
    return problem === null;
  });
  const zoneOf = (name: string): string | undefined =>
    input.nodes.find((node) => node.name === name)?.labels[ZONE];
  const inZone = (zone: string | undefined): number =>
    zone === undefined
      ? 0
      : [...kept, ...(activeNode === null ? [] : [activeNode])].filter((name) => zoneOf(name) === zone)
          .length;

  const add = (): boolean => {
    const next = free
      .filter((node) => !kept.has(node.name))
      .sort(
        (a, b) =>
          rank(a.name) - rank(b.name) ||
          inZone(a.labels[ZONE]) - inZone(b.labels[ZONE]) ||
          a.volumeCount - b.volumeCount ||
          byName(a.name, b.name),
      )[0];
    if (next === undefined) return false;
    kept.add(next.name);
    return true;
  };

  for (const name of input.needed) if (free.some((node) => node.name === name)) kept.add(name);
  const living = (): number =>
    [...kept].filter((name) => input.alive.includes(name) || !had.includes(name)).length;
  let missing = 0;
  if (wanted === null) for (const node of free) kept.add(node.name);
  else {
    while (kept.size < wanted) {
      if (add()) continue;
      missing = wanted - kept.size;
      break;
    }
    const least = Math.min(wanted, Math.max(1, input.atLeast));
    while (living() < least && add());
  }
  const nodes = [...kept].sort(byName);
  return {
    nodes,
    missing,
    dropped: input.present.filter((name) => name !== activeNode && !kept.has(name)).sort(byName),
    unfit,
  };
}

/**
 * The next version of `status.promotable`; null: it stays as it is. With a lease every change goes the way of the
 * fencing protocol (lib/fence): what leaves does so here first; what comes is told to the active node first, and the
 * active node must have acknowledged exactly that version. Without one nobody is asked.
 *
 * @param before how the writer was fenced until now; null: never. A node that has not heard that its writer is leased
 *   does not stop it, so with a new lease all copies begin as told anew: the message that is acknowledged carries both.
 */
export function promotableStep(
  present: Promotable | null,
  wanted: readonly string[],
  fencing: FencingMode,
  before: FencingMode | null,
  acknowledged: number | null,
): Promotable | null {
  const set = present ?? { version: 0, nodes: [], adding: [] };
  const nodes = [...new Set(wanted)].sort(byName);
  if (fencing === 'none') {
    if (
      present !== null &&
      set.adding.length === 0 &&
      JSON.stringify([...set.nodes].sort(byName)) === JSON.stringify(nodes)
    )
      return null;
    return { version: set.version + 1, nodes, adding: [] };
  }
  if (before !== 'lease' && (set.nodes.length > 0 || present === null))
    return { version: set.version + 1, nodes: [], adding: nodes };
  return nextPromotable(set, nodes, acknowledged);
}

/**
 * The set with which an epoch begins. Nothing is still to be told: the new active node knows no set of its epoch before
 * it is told this one, and until then only the leader lets it write. So what was being added is promotable, and so is
 * the node that a planned move leaves (`left`), which has all that there is. The new one is not promoted over itself.
 */
export function decidedSet(
  present: { version: number; nodes: readonly string[]; adding?: readonly string[] } | null,
  to: string,
  left: readonly string[],
): Promotable {
  const set = present ?? { version: 0, nodes: [] };
  const nodes = new Set([...set.nodes, ...(set.adding ?? []), ...left]);
  nodes.delete(to);
  return { version: set.version + 1, nodes: [...nodes].sort(byName), adding: [] };
}

/** The node of a new volume: room first, then the fewest volumes, then the most space, then the name; null: none can take it. */
export function firstNode(nodes: readonly PlacementNode[], needBytes: number): string | null {
  return (
    nodes
      .filter((node) => node.inPool && newCopyProblem(node, needBytes) === null)
      .sort(
        (a, b) =>
          a.volumeCount - b.volumeCount || (b.freeBytes ?? 0) - (a.freeBytes ?? 0) || byName(a.name, b.name),
      )[0]?.name ?? null
  );
}
