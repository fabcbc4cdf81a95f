/** The chart as helm renders it: the sets of values that all tests of the chart share, and the rendered objects as data. */
import { execFileSync } from 'node:child_process';
import { readFileSync } from 'node:fs';
import path from 'node:path';
import { parseAllDocuments } from 'yaml';
import { kubeProgram } from '../kube/harness/programs.ts';

export const CHART = path.resolve(import.meta.dirname, '../../chart');
export const NAMESPACE = 'simple-volume-system';
export const RELEASE = 'sv';
export const SNAPSHOTS = path.join(import.meta.dirname, 'snapshots');

// biome-ignore lint/suspicious/noExplicitAny: objects of all kinds, read by the paths that a test names
export type Plain = any;
/** Dotted path of a value to what it is set to. */
export type Values = Readonly<Record<string, unknown>>;

export interface Container {
  name: string;
  image: string;
  args: string[];
  env?: { name: string; value?: string; valueFrom?: { fieldRef: { fieldPath: string } } }[];
  ports?: { name: string; containerPort: number }[];
  volumeMounts: { name: string; mountPath: string }[];
  [key: string]: Plain;
}

/** YAML 1.1, as Kubernetes reads it: 0400 is octal. */
export function parse(text: string): Plain[] {
  const documents = parseAllDocuments(text, { version: '1.1' });
  if (!Array.isArray(documents)) return [];
  return documents
    .map((one) => {
      if (one.errors[0]) throw one.errors[0];
      return one.toJS();
    })
    .filter((one) => one !== null);
}

const POOL = { name: 'default', path: '/var/lib/simple-volume' };

/** For every value another than the default one. Values below `resources` are thought of by their names. */
export const OTHER: Values = {
  'image.repository': 'registry.example/sv',
  'image.tag': '9.9.9',
  'image.digest': `sha256:${'a'.repeat(64)}`,
  'image.pullPolicy': 'Always',
  imagePullSecrets: ['registry'],
  'storagePools[].name': [{ ...POOL, name: 'other' }],
  'storagePools[].path': [{ ...POOL, path: '/mnt/other' }],
  'storagePools[].createPath': [{ ...POOL, createPath: true }],
  'storagePools[].allowNonEmpty': [{ ...POOL, allowNonEmpty: true }],
  'storagePools[].sizeEnforcement': [{ ...POOL, sizeEnforcement: 'off' }],
  'storagePools[].nodeSelector': [{ ...POOL, nodeSelector: { disk: 'ssd' } }],
  'nodes.nodeSelector': { storage: 'yes' },
  'nodes.tolerations': [{ key: 'edge', operator: 'Exists' }],
  'nodes.affinity': {
    nodeAffinity: {
      requiredDuringSchedulingIgnoredDuringExecution: {
        nodeSelectorTerms: [{ matchExpressions: [{ key: 'disk', operator: 'Exists' }] }],
      },
    },
  },
  kubeletDir: '/var/lib/k0s/kubelet',
  'storageClass.create': false,
  'storageClass.name': 'local',
  'storageClass.default': true,
  'storageClass.reclaimPolicy': 'Retain',
  'storageClass.annotations': { team: 'a' },
  'agent.fencingLease': '12s',
  'agent.audit': '1h',
  'agent.browseAuth': false,
  'agent.logLevel': 'debug',
  'agent.ports.http': 9090,
  'agent.ports.webdav': 9091,
  'agent.pull.concurrency': 4,
  'agent.pull.buffer': '8Mi',
  'agent.pull.bandwidth': '20Mi',
  'agent.priorityClassName': 'important',
  'agent.podAnnotations': { note: 'agent' },
  'csiNode.logLevel': 'debug',
  'csiNode.hostPID': false,
  'csiNode.priorityClassName': 'important',
  'csiNode.podAnnotations': { note: 'csi' },
  'controller.replicas': 3,
  'controller.logLevel': 'debug',
  'controller.election': '30s',
  'controller.fullSyncSchedule': '0 4 * * *',
  'controller.timeZone': 'Europe/Berlin',
  'controller.nodeSelector': { role: 'infra' },
  'controller.tolerations': [{ key: 'infra', operator: 'Exists' }],
  'controller.affinity': { nodeAffinity: { preferredDuringSchedulingIgnoredDuringExecution: [] } },
  'controller.priorityClassName': 'important',
  'controller.podAnnotations': { note: 'controller' },
  'controller.podDisruptionBudget': false,
  'provisioner.image': 'registry.example/provisioner:v1',
  'provisioner.pullPolicy': 'Always',
  'manualSync.enabled': false,
  'manualSync.guard': 'builtin',
  'manualSync.port': 9443,
  'manualSync.existingSecret': 'my-trigger',
  'manualSync.proxy.image': 'registry.example/proxy:v1',
  'manualSync.proxy.pullPolicy': 'Always',
  'security.existingSecret': 'mine',
  'security.tls': false,
  'networkPolicy.enabled': false,
  'networkPolicy.metricsFrom': [
    { namespaceSelector: { matchLabels: { 'kubernetes.io/metadata.name': 'monitoring' } } },
  ],
  'monitoring.serviceMonitor': true,
  'monitoring.rules': true,
  'monitoring.dashboard': true,
  'monitoring.labels': { release: 'prometheus' },
};

/** What else has to be set for a value to matter. */
export const ONLY_WITH: Readonly<Record<string, Values>> = {
  'monitoring.labels': { 'monitoring.serviceMonitor': true, 'monitoring.rules': true },
};

/** Another value of a leaf of values.yaml; undefined: nobody has thought of one. */
export function otherValue(leaf: string): unknown {
  if (leaf.endsWith('.cpu')) return '77m';
  if (leaf.endsWith('.memory')) return '777Mi';
  return OTHER[leaf];
}

/** A case of OTHER as helm takes it: `storagePools[].path` sets the list. */
export const settable = (leaf: string): string => leaf.replace(/\[\].*$/, '');

const OFF = [
  'image.digest',
  'storageClass.create',
  'agent.browseAuth',
  'csiNode.hostPID',
  'controller.podDisruptionBudget',
  'manualSync.enabled',
  'manualSync.guard',
  'manualSync.existingSecret',
  'security.existingSecret',
  'security.tls',
  'networkPolicy.enabled',
];
const TWO_POOLS = [
  { name: 'default', path: '/mnt/disk' },
  { name: 'fast', path: '/mnt/nvme', createPath: true, allowNonEmpty: true, nodeSelector: { disk: 'nvme' } },
];

/** Sets of values that all checks go through. */
export const SETS: Readonly<Record<string, Values>> = {
  default: {},
  minimal: {
    'storageClass.create': false,
    'agent.browseAuth': false,
    'agent.resources': null,
    'csiNode.hostPID': false,
    'csiNode.resources': null,
    'controller.replicas': 1,
    'controller.podDisruptionBudget': false,
    'controller.resources': null,
    'controller.priorityClassName': '',
    'provisioner.resources': null,
    'manualSync.enabled': false,
    'security.tls': false,
    'networkPolicy.enabled': false,
  },
  pools: { storagePools: TWO_POOLS, 'nodes.nodeSelector': { storage: 'yes' } },
  builtin: {
    'manualSync.guard': 'builtin',
    'manualSync.existingSecret': 'my-trigger',
    'security.existingSecret': 'mine',
    'image.digest': OTHER['image.digest'],
  },
  everything: {
    ...Object.fromEntries(
      Object.entries(OTHER).filter(([leaf]) => !OFF.includes(leaf) && !leaf.includes('[]')),
    ),
    storagePools: TWO_POOLS,
  },
  // The values file of the example, in whole.
  demo: parse(readFileSync(path.join(CHART, 'examples/values-demo.yaml'), 'utf8'))[0],
};

export const flagsOf = (values: Values): string[] =>
  Object.entries(values).flatMap(([key, value]) => [
    '--set-json',
    `${settable(key)}=${JSON.stringify(value)}`,
  ]);

/** @throws Error with `stderr` */
export function helm(args: readonly string[], env: NodeJS.ProcessEnv = {}): string {
  return execFileSync(kubeProgram('helm') as string, [...args], {
    encoding: 'utf8',
    stdio: ['ignore', 'pipe', 'pipe'],
    env: { PATH: process.env.PATH, HOME: process.env.HOME, ...env },
  });
}

export const template = (values: Values = {}, ...more: string[]): string =>
  helm(['template', RELEASE, CHART, '--namespace', NAMESPACE, ...flagsOf(values), ...more]);

/** What is new with every rendering without a cluster: keys, certificates, the token. */
export const steady = (text: string): string =>
  text.replace(/^ {2}(token|tls\.crt|tls\.key|ca\.crt): .*$/gm, '  $1: bmV3');

export const titleOf = (object: Plain): string => `${object.kind}/${object.metadata.name}`;

/** The one object of this kind and name. */
export function pick(objects: readonly Plain[], title: string): Plain {
  const found = objects.filter((one) => titleOf(one) === title);
  if (found.length !== 1) throw new Error(`${found.length} objects ${title}`);
  return found[0];
}

/** Pod templates by the name of their workload. */
export const podsOf = (objects: readonly Plain[]): Map<string, Plain> =>
  new Map(
    objects
      .filter((one) => one.spec?.template?.spec?.containers)
      .map((one) => [one.metadata.name, one.spec.template]),
  );

/** Each scalar of an object by its path; members of lists by name where they have one, arguments by their flag. */
function walk(value: Plain, at: string, into: Map<string, string>): void {
  if (typeof value !== 'object' || value === null || Object.keys(value).length === 0) {
    into.set(at, JSON.stringify(value));
    return;
  }
  for (const [key, below] of Object.entries(value as Record<string, Plain>)) {
    if (!Array.isArray(value)) {
      walk(below, `${at}${at === '' ? '' : '.'}${/^[\w-]+$/.test(key) ? key : `'${key}'`}`, into);
      continue;
    }
    const flag = typeof below === 'string' ? /^(--[\w-]+)=(.*)$/.exec(below) : null;
    if (flag) into.set(`${at}[${flag[1]}]`, JSON.stringify(flag[2]));
    else walk(below, `${at}[${below?.name ?? key}]`, into);
  }
}

/** `Kind/name` to its scalars. */
export function scalars(text: string): Map<string, Map<string, string>> {
  return new Map(
    parse(steady(text)).map((object) => {
      const into = new Map<string, string>();
      walk(object, '', into);
      return [titleOf(object), into];
    }),
  );
}

type Scalars = ReadonlyMap<string, string>;

/** The part of `at` that is gone as a whole: what nothing in `now` is below. */
function goneAt(at: string, now: Scalars): string {
  for (const { index } of at.matchAll(/[\].](?=[.[])/g)) {
    const part = at.slice(0, index + 1);
    if (![...now.keys()].some((one) => one.startsWith(part))) return part;
  }
  return at;
}

/** The name of a member that the paths of its other scalars say already. */
function saysItself(at: string, now: Scalars): boolean {
  const member = /^(.*\[[\w-]+\]\.)name$/.exec(at)?.[1];
  return member !== undefined && [...now.keys()].some((one) => one !== at && one.startsWith(member));
}

function changesOf(title: string, old: Scalars, now: Scalars): string[] {
  const lines = new Set<string>();
  for (const at of new Set([...old.keys(), ...now.keys()])) {
    const [was, is] = [old.get(at), now.get(at)];
    const where = `${title} ${at}`;
    if (was === is) continue;
    if (was === undefined && saysItself(at, now)) continue;
    if (was === undefined) lines.add(`+ ${where} = ${is}`);
    else if (is !== undefined) lines.add(`~ ${where} = ${is}`);
    else lines.add(`- ${title} ${goneAt(at, now)}`);
  }
  return [...lines];
}

/** The object of the same kind that has most in common with a new one. */
function relative(
  title: string,
  one: Scalars,
  among: ReadonlyMap<string, Scalars>,
): [string, Scalars] | null {
  const shared = (other: Scalars): number => [...one].filter(([at, is]) => other.get(at) === is).length;
  const kind = title.replace(/\/.*/, '/');
  const [best] = [...among]
    .filter(([other]) => other.startsWith(kind))
    .sort(([, a], [, b]) => shared(b) - shared(a));
  return best && shared(best[1]) > one.size / 2 ? best : null;
}

/**
 * What is different, for people: `-` was there, `+` is new, `~` has another value now. What is gone as a whole is one
 * line; a new object is told by what sets it apart from one of its kind that was there before.
 */
export function changes(before: string, after: string): string[] {
  const [old, now] = [scalars(before), scalars(after)];
  const lines: string[] = [];
  for (const title of [...new Set([...old.keys(), ...now.keys()])].sort()) {
    const [was, is] = [old.get(title), now.get(title)];
    if (!is) lines.push(`- ${title}`);
    else if (was) lines.push(...changesOf(title, was, is));
    else {
      const like = relative(title, is, old);
      lines.push(`+ ${title}${like ? `, like ${like[0]} but for` : ''}`);
      lines.push(...changesOf(title, like?.[1] ?? new Map(), is));
    }
  }
  return lines;
}

/** Paths of all leaves of values.yaml; members of lists of objects as `list[].key`. */
export function leavesOf(value: Plain, at = ''): string[] {
  if (Array.isArray(value) && typeof value[0] === 'object') return leavesOf(value[0], `${at}[].`);
  if (typeof value !== 'object' || value === null || Array.isArray(value) || Object.keys(value).length === 0)
    return [at.replace(/\.$/, '')];
  return Object.entries(value).flatMap(([key, below]) =>
    leavesOf(below, `${at}${at === '' || at.endsWith('.') ? '' : '.'}${key}`),
  );
}
