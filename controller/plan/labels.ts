/**
 * The labels of a volume on nodes: `simple-volume.shipstuff.io/<namespace>.<claim>-role=active` on the one node whose
 * pods may write, `...-candidate=true` on that one and on each that holds a copy.
 *
 * A label's name has at most 63 characters. A longer one is cut and a hash of the whole follows behind an underscore,
 * which neither a namespace nor a claim can contain: a shortened name can never be another volume's whole one.
 */
import { createHash } from 'node:crypto';
import { PREFIX } from './types.ts';

/** Longest name part of a label (Kubernetes, "Syntax and character set" of labels). */
const MAX_NAME = 63;
const ROLE = '-role';
const CANDIDATE = '-candidate';
const MAX_ID = MAX_NAME - CANDIDATE.length;
/** 20 characters of base 32: 100 bits. */
const HASH = 20;
/** `pool.<name>` labels name the nodes of a pool; a namespace of that name never has its labels look like one. */
const RESERVED_NAMESPACE = 'pool';

function hash(text: string): string {
  const alphabet = 'abcdefghijklmnopqrstuvwxyz234567';
  const bytes = createHash('sha256').update(text).digest();
  let out = '';
  let bits = 0;
  let value = 0;
  for (const byte of bytes) {
    value = (value << 8) | byte;
    bits += 8;
    while (bits >= 5 && out.length < HASH) {
      bits -= 5;
      out += alphabet[(value >>> bits) & 31];
    }
    value &= (1 << bits) - 1;
  }
  return out;
}

/** What the labels of a claim begin with, behind the prefix. Different claims have different ones. */
export function labelId(namespace: string, claim: string): string {
  const whole = `${namespace}.${claim}`;
  if (whole.length <= MAX_ID && namespace !== RESERVED_NAMESPACE) return whole;
  return `${whole.slice(0, MAX_ID - HASH - 1)}_${hash(whole)}`;
}

export const roleLabel = (namespace: string, claim: string): string =>
  `${PREFIX}${labelId(namespace, claim)}${ROLE}`;
export const candidateLabel = (namespace: string, claim: string): string =>
  `${PREFIX}${labelId(namespace, claim)}${CANDIDATE}`;

/** What the two labels of a claim shall say on one node; null: not there. */
export interface LabelWish {
  /** the active node; null: none, or the volume is deleted or not replicated */
  active: string | null;
  /** nodes that hold a copy, the active one may be among them */
  candidates: readonly string[];
}

export interface LabelChange {
  node: string;
  /** null removes */
  labels: Record<string, string | null>;
}

type Labelled = { name: string; labels: Readonly<Record<string, string>> };

/** The patches that make the labels of one claim right on all nodes; nodes that are right have none. Sorted by node. */
export function labelChanges(
  namespace: string,
  claim: string,
  wish: LabelWish,
  nodes: readonly Labelled[],
): LabelChange[] {
  const role = roleLabel(namespace, claim);
  const candidate = candidateLabel(namespace, claim);
  const changes: LabelChange[] = [];
  for (const node of nodes) {
    const labels: Record<string, string | null> = {};
    const want = (key: string, value: string | null): void => {
      const has = Object.hasOwn(node.labels, key) ? (node.labels[key] as string) : null;
      if (has !== value) labels[key] = value;
    };
    want(role, wish.active === node.name ? 'active' : null);
    want(candidate, wish.candidates.includes(node.name) ? 'true' : null);
    if (Object.keys(labels).length > 0) changes.push({ node: node.name, labels });
  }
  return changes.sort((a, b) => (a.node < b.node ? -1 : a.node > b.node ? 1 : 0));
}

/** Whether a label is a role or candidate label of some volume, as this file makes them. */
function idOf(key: string, value: string): string | null {
  if (!key.startsWith(PREFIX)) return null;
  const name = key.slice(PREFIX.length);
  const id =
    name.endsWith(ROLE) && value === 'active'
      ? name.slice(0, -ROLE.length)
      : name.endsWith(CANDIDATE) && value === 'true'
        ? name.slice(0, -CANDIDATE.length)
        : null;
  if (id === null || !/[._]/.test(id)) return null;
  return id.startsWith(`${RESERVED_NAMESPACE}.`) && !id.includes('_') ? null : id;
}

/**
 * Removes what volumes left behind that are no more: labels of claims that nobody knows.
 * @param known `labelId` of every claim that has labels of its own; must be the whole list
 */
export function orphanLabels(nodes: readonly Labelled[], known: ReadonlySet<string>): LabelChange[] {
  const changes: LabelChange[] = [];
  for (const node of nodes) {
    const labels: Record<string, null> = {};
    for (const [key, value] of Object.entries(node.labels)) {
      const id = idOf(key, value);
      if (id !== null && !known.has(id)) labels[key] = null;
    }
    if (Object.keys(labels).length > 0) changes.push({ node: node.name, labels });
  }
  return changes.sort((a, b) => (a.node < b.node ? -1 : a.node > b.node ? 1 : 0));
}

/** Whether a key of a node selector is one of this product's labels of volumes, which follow the volume by themselves. */
export function isVolumeLabel(key: string): boolean {
  return (
    key.startsWith(PREFIX) &&
    !key.startsWith(`${PREFIX}pool.`) &&
    (key.endsWith(ROLE) || key.endsWith(CANDIDATE))
  );
}
