/** Objects of the scenarios, and the workload whose lines say what was lost. */
import { SHELL_IMAGE } from './images.ts';

const PREFIX = 'simple-volume.shipstuff.io';

export interface ClaimOptions {
  /** annotations without their prefix, instead of copies and failover with short times */
  annotations?: Readonly<Record<string, string>>;
  size?: string;
  class?: string;
  mode?: string;
}

/** Copies on all other nodes after 1 s without a change, failover 15 s after the last healthy pod. */
export const SHORT_TIMES: Readonly<Record<string, string>> = {
  'replication-enabled': 'true',
  'replication-debounce': '1s',
  'failover-enabled': 'true',
  'failover-grace-period': '15s',
};

export function claim(name: string, options: ClaimOptions = {}): object {
  const { annotations = SHORT_TIMES, size = '1Gi', mode = 'ReadWriteOnce' } = options;
  return {
    apiVersion: 'v1',
    kind: 'PersistentVolumeClaim',
    metadata: {
      name,
      annotations: Object.fromEntries(
        Object.entries(annotations).map(([key, value]) => [`${PREFIX}/${key}`, value]),
      ),
    },
    spec: {
      storageClassName: options.class ?? 'simple-volume',
      accessModes: [mode],
      resources: { requests: { storage: size } },
    },
  };
}

/**
 * Lines into /data/lines, each on the disk before the next: its number, the pod, the time. Numbers go on from what is
 * there, so a number that was lost is written once more, by another pod.
 * @param who how the pod is called in them
 * @param now shell command that sets t
 */
const writer = (everyS: number, who: string, now: string): string => `trap 'exit 0' TERM
n=$(tail -n 1 /data/lines 2>/dev/null | cut -d' ' -f1); n=\${n:-0}
while true; do n=$((n+1)); ${now}; echo "$n ${who} $t" >> /data/lines; sync /data/lines; sleep ${everyS}; done`;

/** A line a second; its time is in seconds since 1970. */
export const WRITER = writer(1, '$POD', 't=$(date +%s)');

/**
 * Five lines a second, with the pod's UID, since a StatefulSet's next pod has the same name. Their times are seconds since
 * the start of the machine, the same clock on all nodes, with two decimals.
 */
export const FAST_WRITER = writer(0.2, '$POD_UID', 'read -r t rest < /proc/uptime');

export interface WorkloadOptions {
  /** shell commands; default: the writer */
  script?: string;
  image?: string;
  nodeSelector?: Readonly<Record<string, string>>;
  graceS?: number;
  /** more of the pod's spec */
  spec?: object;
}

/** Spec of a pod with one container that has the claim at /data. */
export function podSpec(claimName: string | null, options: WorkloadOptions = {}): object {
  const { script = WRITER, image = SHELL_IMAGE, nodeSelector, graceS = 5, spec = {} } = options;
  return {
    terminationGracePeriodSeconds: graceS,
    ...(nodeSelector ? { nodeSelector } : {}),
    containers: [
      {
        name: 'app',
        image,
        imagePullPolicy: 'IfNotPresent',
        command: ['sh', '-c', script],
        env: [
          { name: 'POD', valueFrom: { fieldRef: { fieldPath: 'metadata.name' } } },
          { name: 'POD_UID', valueFrom: { fieldRef: { fieldPath: 'metadata.uid' } } },
        ],
        volumeMounts: [{ name: 'data', mountPath: '/data' }],
      },
    ],
    ...(claimName === null ? {} : { volumes: [{ name: 'data', persistentVolumeClaim: { claimName } }] }),
    ...spec,
  };
}

/** One pod, found by the label app=<name>. */
export const deployment = (name: string, claimName: string, options: WorkloadOptions = {}): object =>
  deploymentOf(name, podSpec(claimName, options));

/** The same of any pod. */
export function deploymentOf(name: string, spec: object): object {
  return {
    apiVersion: 'apps/v1',
    kind: 'Deployment',
    metadata: { name },
    spec: {
      replicas: 1,
      strategy: { type: 'Recreate' },
      selector: { matchLabels: { app: name } },
      template: { metadata: { labels: { app: name } }, spec },
    },
  };
}

/** Each pod with a claim of its own, data-<name>-<number>. */
export function statefulSet(
  name: string,
  options: WorkloadOptions & { replicas?: number; claim?: ClaimOptions } = {},
): object {
  const { replicas = 1 } = options;
  return {
    apiVersion: 'apps/v1',
    kind: 'StatefulSet',
    metadata: { name },
    spec: {
      replicas,
      serviceName: name,
      podManagementPolicy: 'Parallel',
      selector: { matchLabels: { app: name } },
      template: { metadata: { labels: { app: name } }, spec: podSpec(null, options) },
      volumeClaimTemplates: [claim('data', options.claim)],
    },
  };
}

export function pod(name: string, claimName: string, options: WorkloadOptions = {}): object {
  return {
    apiVersion: 'v1',
    kind: 'Pod',
    metadata: { name, labels: { app: name } },
    spec: podSpec(claimName, options),
  };
}

export interface Line {
  number: number;
  pod: string;
  /** seconds, by the writer's clock */
  at: number;
}

/** What the writer has written; a last line without its end was being written. */
export function lines(text: string | null): Line[] {
  const whole = (text ?? '').split('\n').slice(0, -1);
  return whole.map((line) => {
    const [number, name, at] = line.split(' ');
    return { number: Number(number), pod: name ?? '', at: Number(at) };
  });
}

/**
 * Compares what a writer had written when it was cut off with what its successor found.
 * @returns lost: how many lines at the end are not there; fault: why the successor's file cannot come from the old one
 *   (null: its start is the old file's start, and the numbers go on without a gap)
 */
export function compareLines(
  before: string | null,
  after: string | null,
): { lost: number; fault: string | null } {
  const old = lines(before);
  const now = lines(after);
  let same = 0;
  while (
    same < old.length &&
    same < now.length &&
    old[same]?.at === now[same]?.at &&
    old[same]?.pod === now[same]?.pod
  )
    same++;
  const lost = old.length - same;
  const gap = now.findIndex((line, index) => line.number !== index + 1);
  if (gap >= 0) return { lost, fault: `line ${gap + 1} has number ${now[gap]?.number}` };
  const stray = now
    .slice(same)
    .find((line) => old.slice(same).some((one) => one.pod === line.pod && one.at === line.at));
  if (stray) return { lost, fault: `line ${stray.number} of ${stray.pod} is there and one before it is not` };
  if (same === 0 && old.length > 0) return { lost, fault: 'nothing is left of it' };
  return { lost, fault: null };
}
