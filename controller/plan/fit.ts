/**
 * Whether a workload can run on a node: requests, taints, selectors, pod slots and space in the pool, by the rules of
 * the scheduler (kube-scheduler's filters NodeResourcesFit, TaintToleration and NodeAffinity). Quantities are counted
 * in thousandths of their unit.
 */
import { isVolumeLabel } from './labels.ts';
import type { ObservedNode, PodContainer, PodTemplate, SelectorTerm } from './types.ts';

/** Resource name -> thousandths. */
export type Requests = Record<string, number>;

/** Factors of the suffixes of a quantity of the API. */
export const SUFFIXES: Readonly<Record<string, number>> = {
  n: 1e-9,
  u: 1e-6,
  m: 1e-3,
  '': 1,
  k: 1e3,
  M: 1e6,
  G: 1e9,
  T: 1e12,
  P: 1e15,
  E: 1e18,
  Ki: 2 ** 10,
  Mi: 2 ** 20,
  Gi: 2 ** 30,
  Ti: 2 ** 40,
  Pi: 2 ** 50,
  Ei: 2 ** 60,
};

/** Bytes as a quantity of the API, with the largest suffix that says them exactly. */
export function quantityOf(bytes: number): string {
  const units = ['', 'Ki', 'Mi', 'Gi', 'Ti', 'Pi'];
  let unit = 0;
  while (bytes > 0 && bytes % 1024 === 0 && unit < units.length - 1) {
    bytes /= 1024;
    unit++;
  }
  return `${bytes}${units[unit]}`;
}

/** A quantity of the API (`500m`, `1.5Gi`, `2e3`) in thousandths, rounded up; null for anything else. */
export function parseQuantity(text: string): number | null {
  const match =
    /^([+-]?(?:\d+\.?\d*|\.\d+))(?:[eE]([+-]?\d{1,3})|(n|u|m|k|M|G|T|P|E|Ki|Mi|Gi|Ti|Pi|Ei))?$/.exec(text);
  if (!match) return null;
  const unit = match[2] === undefined ? (SUFFIXES[match[3] ?? ''] as number) : 10 ** Number(match[2]);
  const value = Number(match[1]) * unit * 1000;
  // The smallest error of a float must not become a whole thousandth.
  return Number.isFinite(value) ? Math.ceil(Number(value.toPrecision(14))) : null;
}

/** Adds `more` to `sum` in place and gives it back. */
export function addRequests(sum: Requests, more: Readonly<Requests>): Requests {
  for (const [name, value] of Object.entries(more)) sum[name] = (sum[name] ?? 0) + value;
  return sum;
}

function largest(a: Requests, b: Readonly<Requests>): Requests {
  for (const [name, value] of Object.entries(b)) a[name] = Math.max(a[name] ?? 0, value);
  return a;
}

function read(list: Record<string, string> | undefined): Requests {
  const out: Requests = {};
  for (const [name, text] of Object.entries(list ?? {})) {
    const value = parseQuantity(String(text));
    if (value !== null && value > 0) out[name] = value;
  }
  return out;
}

/** A limit without a request is a request (the API server fills it in; a template may not have been there yet). */
const asked = (of: Pick<PodContainer, 'resources'>): Requests => ({
  ...read(of.resources?.limits),
  ...read(of.resources?.requests),
});

/**
 * What a pod asks of its node: all containers and sidecars together, or the hungriest init container with the sidecars
 * that were started before it, whichever is more; requests of the pod as a whole instead, where it has any; and its
 * overhead. (KEP-753 for sidecars, KEP-2837 for pod-level requests.)
 */
export function podRequests(spec: PodTemplate): Requests {
  const running: Requests = {};
  const peak: Requests = {};
  const sidecars: Requests = {};
  for (const one of spec.initContainers ?? []) {
    if (one.restartPolicy === 'Always') {
      addRequests(sidecars, asked(one));
      largest(peak, sidecars);
    } else largest(peak, addRequests({ ...sidecars }, asked(one)));
  }
  for (const one of spec.containers ?? []) addRequests(running, asked(one));
  addRequests(running, sidecars);
  const whole = largest(running, peak);
  for (const [name, value] of Object.entries(asked(spec))) whole[name] = value;
  return addRequests(whole, read(spec.overhead));
}

/** Thousandths as people write them: cpu in millicores, memory and the like in Mi, others as they are. */
function show(resource: string, value: number): string {
  if (resource === 'cpu') return value % 1000 === 0 ? `${value / 1000}` : `${value}m`;
  if (/memory|storage|hugepages/.test(resource)) return `${Number((value / 1000 / 2 ** 20).toFixed(1))}Mi`;
  return `${value / 1000}`;
}

type Toleration = NonNullable<PodTemplate['tolerations']>[number];

function tolerates(toleration: Toleration, taint: ObservedNode['taints'][number]): boolean {
  if (toleration.effect !== undefined && toleration.effect !== '' && toleration.effect !== taint.effect)
    return false;
  const exists = toleration.operator === 'Exists';
  if (toleration.key === undefined || toleration.key === '') return exists;
  if (toleration.key !== taint.key) return false;
  return exists || (toleration.value ?? '') === (taint.value ?? '');
}

/** One expression of a node selector term, by the rules of `NodeSelectorRequirement`. */
function matches(term: SelectorTerm, value: string | undefined): boolean {
  const values = term.values ?? [];
  switch (term.operator) {
    case 'In':
      return value !== undefined && values.includes(value);
    case 'NotIn':
      return value === undefined || !values.includes(value);
    case 'Exists':
      return value !== undefined;
    case 'DoesNotExist':
      return value === undefined;
    case 'Gt':
    case 'Lt': {
      if (value === undefined || !/^-?\d+$/.test(value) || !/^-?\d+$/.test(values[0] ?? '')) return false;
      const [has, wanted] = [Number(value), Number(values[0])];
      return term.operator === 'Gt' ? has > wanted : has < wanted;
    }
    default:
      return false;
  }
}

/** Why the node's labels do not suit the pod; null: they do. This product's own labels follow the volume and don't count. */
function selectorProblem(spec: PodTemplate, node: ObservedNode): string | null {
  for (const [key, value] of Object.entries(spec.nodeSelector ?? {}))
    if (!isVolumeLabel(key) && node.labels[key] !== value)
      return `nodeSelector: ${key}=${value} is wanted, the node has ${node.labels[key] === undefined ? 'no such label' : `${key}=${node.labels[key]}`}`;
  const terms =
    spec.affinity?.nodeAffinity?.requiredDuringSchedulingIgnoredDuringExecution?.nodeSelectorTerms;
  if (terms === undefined || terms.length === 0) return null;
  const suits = terms.some((term) => {
    const expressions = term.matchExpressions ?? [];
    const fields = term.matchFields ?? [];
    // A term without any requirement matches nothing (API reference of NodeSelectorTerm).
    return (
      expressions.length + fields.length > 0 &&
      expressions.every((one) => isVolumeLabel(one.key) || matches(one, node.labels[one.key])) &&
      fields.every((one) => matches(one, one.key === 'metadata.name' ? node.name : undefined))
    );
  });
  return suits ? null : 'nodeAffinity: no required term matches the labels of the node';
}

export interface Fit {
  ok: boolean;
  /** one sentence that names what is missing */
  reason?: string;
}

const no = (reason: string): Fit => ({ ok: false, reason });

/** A pool with less than this is full for every purpose, bytes. */
const MIN_FREE = 64 * 2 ** 20;

/** Space that a workload should find in its pool beyond what is there already: 5 % of the claim, at most 1 GiB; bytes. */
export const headroom = (claimBytes: number | null): number =>
  Math.max(MIN_FREE, Math.min((claimBytes ?? 0) * 0.05, 2 ** 30));

/**
 * Whether pods that use a volume together could run on a node.
 * @param pods their specs; empty: nothing is known of the workload, only the node and its pool are looked at
 * @param pool free space of the pool there (null: not known, not checked) and what has to fit, bytes
 */
export function fits(
  node: ObservedNode,
  pods: readonly PodTemplate[],
  pool: { freeBytes: number | null; needBytes: number },
): Fit {
  for (const spec of pods) {
    const problem = selectorProblem(spec, node);
    if (problem !== null) return no(problem);
    for (const taint of node.taints) {
      if (taint.effect === 'PreferNoSchedule') continue;
      if (!(spec.tolerations ?? []).some((one) => tolerates(one, taint)))
        return no(
          `taint: ${taint.key}${taint.value ? `=${taint.value}` : ''}:${taint.effect} is not tolerated`,
        );
    }
  }
  const slots = parseQuantity(node.allocatable.pods ?? '');
  const count = Math.max(1, pods.length);
  if (slots !== null && (node.podCount + count) * 1000 > slots)
    return no(
      `pods: ${slots / 1000} are allowed on the node, ${node.podCount} are there, ${count} more ${count === 1 ? 'is' : 'are'} wanted`,
    );
  const wanted: Requests = {};
  for (const spec of pods) addRequests(wanted, podRequests(spec));
  for (const [resource, value] of Object.entries(wanted).sort(([a], [b]) => (a < b ? -1 : 1))) {
    const has = parseQuantity(node.allocatable[resource] ?? '') ?? 0;
    const free = has - (node.requested[resource] ?? 0);
    if (value > free)
      return no(
        `${resource}: ${show(resource, value)} ${value === 1000 ? 'is' : 'are'} asked for, ${show(resource, Math.max(0, free))} of ${show(resource, has)} are free`,
      );
  }
  if (pool.freeBytes !== null && pool.freeBytes < pool.needBytes)
    return no(
      `pool space: ${show('storage', pool.needBytes * 1000)} are needed, ${show('storage', pool.freeBytes * 1000)} are free`,
    );
  return { ok: true };
}
