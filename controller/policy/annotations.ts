/**
 * The annotations of a claim: ONE table of every key, what it means, what is allowed and what holds without it; and the
 * ways from there to `spec.policy` of a SimpleVolume and to the agent's requests.
 *
 * A bad value never stops anything but its own volume: it is reported with its key, its value and what is allowed, and
 * the last good policy stays in force as a whole (half of a new policy could be worse than either).
 */
import { formatDuration, parseDuration } from '../../lib/core/duration.ts';
import { SimpleVolumeError } from '../../lib/core/errors.ts';
import { checkName } from '../../lib/core/names.ts';
import type { VolumeName } from '../../lib/core/parts.ts';
import { DEFAULT_POLICY, type VolumePolicy } from '../../lib/core/policy.ts';
import type { SimpleVolumePolicy } from '../cluster/types.ts';
import { MAX_SCHEDULE, NO_SCHEDULE, parseSchedule } from '../plan/schedule.ts';
import { PREFIX, type SyncPolicyBody, type WatchBody } from '../plan/types.ts';

/** The policy of a volume, read. Times in milliseconds. */
export interface Policy extends Omit<VolumePolicy, 'maxDelayMs'> {
  replicationEnabled: boolean;
  /** copies besides the active one; null: one on every other node of the pool */
  replicas: number | null;
  /** null: none */
  fullSyncSchedule: string | null;
  failoverEnabled: boolean;
  gracePeriodMs: number;
  maxStalenessMs: number;
  nodePriority: string[];
  fencing: 'lease' | 'none';
}

const { maxDelayMs: _, ...VOLUME_DEFAULTS } = DEFAULT_POLICY;

export const DEFAULTS: Readonly<Policy> = {
  ...VOLUME_DEFAULTS,
  replicationEnabled: false,
  replicas: null,
  fullSyncSchedule: null,
  failoverEnabled: false,
  gracePeriodMs: 60_000,
  maxStalenessMs: 120_000,
  nodePriority: [],
  fencing: 'lease',
};

/** Limits of the agent's API (lib/agent/schemas.ts): what is accepted here is accepted there. */
const MAX_ITEMS = 1000;
const MAX_PATTERN = 1024;
const MAX_PATH = 4096;
const MAX_COPIES = 64;
const MAX_NODES = 100;
const MAX_ID = 4_294_967_294;
const DAY_MS = 86_400_000;

/** Thrown by the parsers below: what was wrong with one item, when the sentence of what is allowed is not enough. */
class BadValue extends Error {}

const oneOf =
  <T extends string>(...values: T[]) =>
  (text: string): T => {
    if (!values.includes(text as T)) throw new BadValue();
    return text as T;
  };

const bool = (text: string): boolean => oneOf('true', 'false')(text) === 'true';

const integer =
  (min: number, max: number) =>
  (text: string): number => {
    const value = /^\d{1,10}$/.test(text) ? Number(text) : Number.NaN;
    if (!(value >= min && value <= max)) throw new BadValue();
    return value;
  };

const duration = (min: number, max: number) => (text: string) => parseDuration(text, 'it', min, max);

const mode = (text: string): number => {
  if (!/^0?[0-7]{1,4}$/.test(text)) throw new BadValue();
  return Number.parseInt(text, 8);
};

/**
 * A list: a JSON array of texts, or items separated by commas or line ends. A comma inside `{}` or `[]` belongs to the
 * pattern, and so does one after a backslash.
 */
export function splitList(text: string): string[] {
  if (/^\[\s*(?:"|\]$)/.test(text)) {
    let items: unknown;
    try {
      items = JSON.parse(text);
    } catch (error) {
      throw new BadValue(`it begins like a JSON array and is none: ${(error as Error).message}`);
    }
    if (!Array.isArray(items) || !items.every((item) => typeof item === 'string'))
      throw new BadValue('the JSON array must hold texts only');
    return items;
  }
  const items: string[] = [];
  let item = '';
  let depth = 0;
  let bracket = false;
  for (let i = 0; i < text.length; i += 1) {
    const c = text[i] as string;
    if (c === '\\' && i + 1 < text.length) {
      item += text[i + 1] === ',' ? ',' : c + text[i + 1];
      i += 1;
      continue;
    }
    if (c === '\n' || (c === ',' && depth === 0 && !bracket)) {
      items.push(item);
      item = '';
      depth = 0;
      bracket = false;
      continue;
    }
    if (bracket) bracket = c !== ']';
    else if (c === '[') bracket = text.indexOf(']', i) > i;
    else if (c === '{') depth += text.indexOf('}', i) > i ? 1 : 0;
    else if (c === '}') depth = Math.max(0, depth - 1);
    item += c;
  }
  items.push(item);
  return items.map((one) => one.replace(/^[ \t\r]+|[ \t\r]+$/g, '')).filter((one) => one !== '');
}

const list =
  (what: string, max: number, longest: number, check: (item: string) => string = (item) => item) =>
  (text: string): string[] => {
    const items = splitList(text);
    if (items.length > max) throw new BadValue(`there are ${items.length} ${what}`);
    return items.map((item) => {
      if (item.length === 0) throw new BadValue(`one of the ${what} is empty`);
      if (item.length > longest) throw new BadValue(`${quote(item)} is longer than ${longest} characters`);
      if (item.includes('\0')) throw new BadValue(`${quote(item)} holds a zero byte`);
      return check(item);
    });
  };

/** As the agent checks required paths (lib/agent/routes/fields.ts): below the volume's root. */
const relative = (item: string): string => {
  const path = item.replace(/\/+$/, '');
  if (path === '' || path.split('/').some((part) => part === '' || part === '.' || part === '..'))
    throw new BadValue(`${quote(item)} is no path below the volume's root`);
  return path;
};

const schedule = (text: string): string | null => {
  if (text.trim() === NO_SCHEDULE) return NO_SCHEDULE;
  if (text === '') return null;
  const parsed = parseSchedule(text);
  if ('error' in parsed) throw new BadValue(parsed.error);
  return text;
};

const nodes = (text: string): string[] => [
  ...new Set(list('nodes', MAX_NODES, 253, (item) => checkName(item, quote(item)))(text)),
];

export interface AnnotationRow {
  /** below PREFIX */
  key: string;
  field: keyof Policy;
  /** the value that holds without it, as an annotation would say it; '' for none */
  fallback: string;
  parse: (text: string) => Policy[keyof Policy];
  /** what is allowed, to follow "allowed: " */
  allowed: string;
  doc: string;
}

function row<K extends keyof Policy>(
  key: string,
  field: K,
  fallback: string,
  parse: (text: string) => Policy[K],
  allowed: string,
  doc: string,
): AnnotationRow {
  return { key, field, fallback, parse, allowed, doc };
}

const LIST = 'separated by commas or line ends, or a JSON array';
const PATTERNS = `at most ${MAX_ITEMS} patterns of at most ${MAX_PATTERN} characters, ${LIST}`;
const BOOL = 'true or false';
const ID = `a whole number from 0 to ${MAX_ID}`;
const MODE = 'octal permission bits such as 0644 or 2775';

/** Every annotation that a user may set. */
export const ANNOTATIONS: readonly AnnotationRow[] = [
  row(
    'replication-enabled',
    'replicationEnabled',
    'false',
    bool,
    BOOL,
    'Keeps copies of the volume on other nodes of its pool.',
  ),
  row(
    'replication-include-paths',
    'includePaths',
    '',
    list('patterns', MAX_ITEMS, MAX_PATTERN),
    PATTERNS,
    'What is replicated. Nothing given: everything.',
  ),
  row(
    'replication-exclude-paths',
    'excludePaths',
    '',
    list('patterns', MAX_ITEMS, MAX_PATTERN),
    PATTERNS,
    'What is not replicated, also when it is included.',
  ),
  row(
    'replication-prune-excluded',
    'pruneExcluded',
    'false',
    bool,
    BOOL,
    'Copies remove what is not replicated.',
  ),
  row(
    'replication-debounce',
    'debounceMs',
    '2s',
    duration(10, 3_600_000),
    'a duration such as 500ms, 2s or 1m30s, from 10ms to 1h',
    'Quiet after which changes become a generation; under constant writing five times as long.',
  ),
  row(
    'replication-consistency-mode',
    'consistencyMode',
    'shadow',
    oneOf('shadow', 'live'),
    'shadow or live',
    'shadow: copies are made from a staged tree; live: from the tree that the workload writes.',
  ),
  row(
    'replication-confirmed-replicas',
    'confirmedReplicas',
    '1',
    integer(0, MAX_COPIES),
    `a whole number from 0 to ${MAX_COPIES}`,
    'Copies that must hold a generation before it counts as delivered.',
  ),
  row(
    'replication-full-sync-on-start',
    'fullSyncOnStart',
    'false',
    bool,
    BOOL,
    'A full comparison of all copies whenever a node becomes the active one.',
  ),
  row(
    'replication-full-sync-schedule',
    'fullSyncSchedule',
    '',
    schedule,
    `a cron expression of at most ${MAX_SCHEDULE} characters, five fields, six with seconds, or @daily and the like; CRON_TZ=Europe/Berlin in front names a time zone; or ${NO_SCHEDULE}`,
    'When all copies are compared with the source in full. Not given: as the chart says for all (`controller.fullSyncSchedule`), without that never.',
  ),
  row(
    'replication-required-paths',
    'requiredPaths',
    '',
    list('paths', MAX_ITEMS, MAX_PATH, relative),
    `at most ${MAX_ITEMS} paths below the volume's root, ${LIST}`,
    'Files and directories without which a state of the volume is not worth keeping.',
  ),
  row(
    'replication-owner-uid',
    'ownerUid',
    '',
    integer(0, MAX_ID),
    ID,
    'Owner of everything on the copies. Not given: as on the source.',
  ),
  row(
    'replication-owner-gid',
    'ownerGid',
    '',
    integer(0, MAX_ID),
    ID,
    'Group of everything on the copies. Not given: as on the source.',
  ),
  row(
    'replication-file-mode',
    'fileMode',
    '',
    mode,
    MODE,
    'Mode of files on the copies; executable bits stay. Not given: as on the source.',
  ),
  row(
    'replication-dir-mode',
    'dirMode',
    '',
    mode,
    MODE,
    'Mode of directories on the copies. Not given: as on the source.',
  ),
  row(
    'replication-replicas',
    'replicas',
    '',
    integer(0, MAX_COPIES),
    `a whole number from 0 to ${MAX_COPIES}`,
    'Copies besides the active one. Not given: one on every other node of the pool. A copy too many is removed from its node after ten minutes, while all others are whole and fresh; the last one stays.',
  ),
  row(
    'failover-enabled',
    'failoverEnabled',
    'false',
    bool,
    BOOL,
    'Another node becomes the active one when the active node fails.',
  ),
  row(
    'failover-grace-period',
    'gracePeriodMs',
    '1m',
    duration(0, DAY_MS),
    'a duration such as 30s or 5m, from 0s to 24h',
    'How long there must be no healthy pod before a failover.',
  ),
  row(
    'failover-max-staleness',
    'maxStalenessMs',
    '2m',
    duration(1000, 30 * DAY_MS),
    'a duration such as 30s or 5m, from 1s to 720h',
    'How long ago a copy may at most have been known complete to be promoted.',
  ),
  row(
    'failover-node-priority',
    'nodePriority',
    '',
    nodes,
    `at most ${MAX_NODES} node names, ${LIST}`,
    'Preferred nodes for a failover, best first.',
  ),
  row(
    'failover-fencing',
    'fencing',
    'lease',
    oneOf('lease', 'none'),
    'lease or none',
    'lease: the old writer is stopped before another may begin; none: nobody stops a partitioned writer.',
  ),
];

/** Written by the controller, on claim and volume; never read from a claim. */
export const CONTROLLER_ANNOTATIONS = ['active-node', 'previous-active-node', 'epoch'] as const;

export interface AnnotationError {
  /** with its prefix */
  key: string;
  /** quoted and shortened */
  value: string;
  /** what is allowed, and what was wrong when that is more */
  allowed: string;
}

export interface UnknownAnnotation {
  key: string;
  /** known keys with a similar name, nearest first */
  near: string[];
}

export interface AnnotationWarning {
  key: string;
  message: string;
}

export interface ParsedAnnotations {
  /** bad values replaced by their defaults; in force only when there are no errors (effectivePolicy) */
  policy: Policy;
  errors: AnnotationError[];
  unknown: UnknownAnnotation[];
  warnings: AnnotationWarning[];
}

const LONGEST_QUOTE = 80;

/** In JSON's quotes, so that blanks and control characters show; shortened. */
export function quote(text: string): string {
  const short = text.length > LONGEST_QUOTE ? `${text.slice(0, LONGEST_QUOTE)}…` : text;
  return JSON.stringify(short).replace(
    /[\u007f-\u00a0\u00ad\u1680\u180e\u2000-\u200f\u2028-\u202f\u205f-\u2064\u3000\ufeff]/g,
    (c) => `\\u${c.charCodeAt(0).toString(16).padStart(4, '0')}`,
  );
}

/** Levenshtein distance, given up beyond `limit`. */
function distance(a: string, b: string, limit: number): number {
  if (Math.abs(a.length - b.length) > limit) return limit + 1;
  let line = Array.from({ length: b.length + 1 }, (_, i) => i);
  for (let i = 1; i <= a.length; i += 1) {
    const next = [i];
    for (let j = 1; j <= b.length; j += 1)
      next[j] = Math.min(
        (line[j] as number) + 1,
        (next[j - 1] as number) + 1,
        (line[j - 1] as number) + (a[i - 1] === b[j - 1] ? 0 : 1),
      );
    line = next;
  }
  return line[b.length] as number;
}

function nearNames(key: string): string[] {
  return ANNOTATIONS.map((one) => {
    // `replicas` for `replication-replicas` is as near as a slip of the finger.
    const tail = one.key.slice(one.key.indexOf('-') + 1);
    const inTail = one.key.endsWith(key) && key.length > 3 ? 0 : distance(key, tail, 1) + 1;
    const steps = Math.min(distance(key, one.key, 3), inTail > 2 ? Number.POSITIVE_INFINITY : inTail);
    return { key: one.key, steps };
  })
    .filter((one) => one.steps <= 3)
    .sort((a, b) => a.steps - b.steps || (a.key < b.key ? -1 : 1))
    .slice(0, 3)
    .map((one) => PREFIX + one.key);
}

const clean = (text: string): string => text.replace(/^[ \t\r\n]+|[ \t\r\n]+$/g, '');

function reasonOf(error: unknown): string {
  // parseDuration and checkName say in full what is allowed; only the list of nodes needs which one it was.
  if (error instanceof BadValue) return error.message;
  if (error instanceof SimpleVolumeError && /^"/.test(error.message)) return error.message;
  return '';
}

/**
 * Reads the annotations of a claim. Never throws.
 * @param nodeNames all nodes of the cluster, for the priority list; null: not known, not checked
 */
export function parseAnnotations(
  annotations: Readonly<Record<string, string>>,
  nodeNames: readonly string[] | null = null,
): ParsedAnnotations {
  const policy: Record<string, unknown> = structuredClone(DEFAULTS);
  const errors: AnnotationError[] = [];
  const unknown: UnknownAnnotation[] = [];
  const warnings: AnnotationWarning[] = [];
  const fail = (key: string, text: string, allowed: string, why = ''): void => {
    errors.push({
      key: PREFIX + key,
      value: quote(text),
      allowed: why === '' ? allowed : `${allowed} (${why})`,
    });
  };

  for (const one of ANNOTATIONS) {
    const key = PREFIX + one.key;
    if (!Object.hasOwn(annotations, key)) continue;
    const text = annotations[key] as string;
    try {
      policy[one.field] = one.parse(clean(text));
    } catch (error) {
      fail(one.key, text, one.allowed, reasonOf(error));
    }
  }

  const read = policy as unknown as Policy;
  const given = (key: string): string => annotations[PREFIX + key] ?? '';
  const replicas = read.replicas;
  const confirmed = `${PREFIX}replication-confirmed-replicas`;
  if (
    replicas !== null &&
    read.confirmedReplicas > replicas &&
    Object.hasOwn(annotations, confirmed) &&
    !errors.some((one) => one.key === confirmed)
  )
    fail(
      'replication-confirmed-replicas',
      given('replication-confirmed-replicas'),
      `at most the number of copies, which replication-replicas sets to ${replicas}`,
    );
  if (read.failoverEnabled && !read.replicationEnabled)
    warnings.push({
      key: `${PREFIX}failover-enabled`,
      message: 'failover is on and replication is off: there is no copy to fail over to',
    });
  if (read.failoverEnabled && replicas === 0)
    warnings.push({
      key: `${PREFIX}replication-replicas`,
      message: 'failover is on and no copies are wanted: there is nothing to fail over to',
    });
  if (read.failoverEnabled && read.maxStalenessMs < read.debounceMs * 5)
    warnings.push({
      key: `${PREFIX}failover-max-staleness`,
      message: `a busy volume's copies may be up to ${formatDuration(read.debounceMs * 5)} behind by replication-debounce alone, but only ${formatDuration(read.maxStalenessMs)} are allowed: failover would often be refused`,
    });
  if (nodeNames !== null)
    for (const node of read.nodePriority)
      if (!nodeNames.includes(node))
        warnings.push({
          key: `${PREFIX}failover-node-priority`,
          message: `the cluster has no node ${quote(node)}`,
        });

  const known = new Set<string>([...ANNOTATIONS.map((one) => one.key), ...CONTROLLER_ANNOTATIONS]);
  for (const key of Object.keys(annotations).sort())
    if (key.startsWith(PREFIX) && !known.has(key.slice(PREFIX.length)))
      unknown.push({ key, near: nearNames(key.slice(PREFIX.length)) });

  return { policy: read, errors, unknown, warnings };
}

/**
 * The policy in force: the new one when all of it is good, else the last good one, else one that does nothing.
 * @param lastGood spec.policy of the SimpleVolume, read; null: there was none
 */
export function effectivePolicy(parsed: ParsedAnnotations, lastGood: Policy | null): Policy {
  if (parsed.errors.length === 0) return parsed.policy;
  return lastGood ?? structuredClone(DEFAULTS);
}

const octal = (value: number): string => `0${value.toString(8).padStart(3, '0')}`;

/** As `spec.policy` keeps it: durations and modes as text, everything named, nothing null. */
export function toSpecPolicy(policy: Policy): SimpleVolumePolicy {
  const spec: SimpleVolumePolicy = {
    replicationEnabled: policy.replicationEnabled,
    includePaths: [...policy.includePaths],
    excludePaths: [...policy.excludePaths],
    pruneExcluded: policy.pruneExcluded,
    debounce: formatDuration(policy.debounceMs),
    consistencyMode: policy.consistencyMode,
    confirmedReplicas: policy.confirmedReplicas,
    fullSyncOnStart: policy.fullSyncOnStart,
    requiredPaths: [...policy.requiredPaths],
    failoverEnabled: policy.failoverEnabled,
    gracePeriod: formatDuration(policy.gracePeriodMs),
    maxStaleness: formatDuration(policy.maxStalenessMs),
    nodePriority: [...policy.nodePriority],
    fencing: policy.fencing,
  };
  if (policy.replicas !== null) spec.replicas = policy.replicas;
  if (policy.fullSyncSchedule !== null) spec.fullSyncSchedule = policy.fullSyncSchedule;
  if (policy.ownerUid !== null) spec.ownerUid = policy.ownerUid;
  if (policy.ownerGid !== null) spec.ownerGid = policy.ownerGid;
  if (policy.fileMode !== null) spec.fileMode = octal(policy.fileMode);
  if (policy.dirMode !== null) spec.dirMode = octal(policy.dirMode);
  return spec;
}

/**
 * Reads `spec.policy` back. A field that an older version or a hand wrote wrongly has its default.
 * @returns null when nothing was ever written
 */
export function fromSpecPolicy(spec: SimpleVolumePolicy | undefined): Policy | null {
  if (spec === undefined) return null;
  const text: Record<string, string> = {};
  const names: Record<string, string> = {
    debounceMs: 'debounce',
    gracePeriodMs: 'gracePeriod',
    maxStalenessMs: 'maxStaleness',
  };
  const values = spec as Record<string, unknown>;
  for (const one of ANNOTATIONS) {
    const value = values[names[one.field] ?? one.field];
    if (value === undefined || value === null) continue;
    text[PREFIX + one.key] = Array.isArray(value) ? JSON.stringify(value) : String(value);
  }
  return parseAnnotations(text).policy;
}

/** What a replica needs of the policy, as the bodies of sync-batch and full-sync carry it. */
export function toSyncPolicy(policy: Policy): SyncPolicyBody {
  return {
    includePaths: [...policy.includePaths],
    excludePaths: [...policy.excludePaths],
    pruneExcluded: policy.pruneExcluded,
    requiredPaths: [...policy.requiredPaths],
    ownerUid: policy.ownerUid,
    ownerGid: policy.ownerGid,
    fileMode: policy.fileMode,
    dirMode: policy.dirMode,
  };
}

/**
 * Body of POST /replication/watch/start, without tokens.
 * @param targets the copies, any order; the body has them sorted, so that the same set is the same body
 */
export function toWatchBody(
  policy: Policy,
  name: VolumeName,
  epoch: number,
  source: { url: string; webdavUrl: string },
  targets: readonly { url: string; node: string }[],
): WatchBody {
  return {
    namespace: name.namespace,
    volume: name.volume,
    epoch,
    source: { url: source.url, webdavUrl: source.webdavUrl },
    targets: targets
      .map(({ url, node }) => ({ url, node }))
      .sort((a, b) => (a.node < b.node ? -1 : a.node > b.node ? 1 : 0)),
    ...toSyncPolicy(policy),
    debounce: formatDuration(policy.debounceMs),
    consistencyMode: policy.consistencyMode,
    confirmedReplicas: policy.confirmedReplicas,
    fullSyncOnStart: policy.fullSyncOnStart,
  };
}

/** The table of docs/annotations.md. */
export function annotationsTable(): string {
  const cell = (text: string): string => text.replaceAll('|', '\\|');
  return [
    '| Annotation | Without it | Allowed | What it does |',
    '| --- | --- | --- | --- |',
    ...ANNOTATIONS.map(
      (one) =>
        `| \`${one.key}\` | ${one.fallback === '' ? '' : `\`${one.fallback}\``} | ${cell(one.allowed)} | ${cell(one.doc)} |`,
    ),
    '',
  ].join('\n');
}
