/**
 * What the scenarios of partitions look at from outside the nodes: a writer whose lines carry a time that is the same on
 * all nodes (one machine, one clock), whether a pod stands still, when the decision was seen, and the agents' lists of
 * backups.
 */
import { existsSync, readFileSync, statSync } from 'node:fs';
import path from 'node:path';
import { findHierarchy, podCgroupPaths } from '../../../csi/freeze/cgroup.ts';
import { createHttpClient } from '../../../lib/core/http-client.ts';
import { AGENT_TLS_NAME } from '../../../lib/core/tls.ts';
import type { Backup } from '../../../lib/replica/backups.ts';
import { follow } from '../../kube/harness/program.ts';
import { kubeProgram } from '../../kube/harness/programs.ts';
import { type Cluster, RELEASE, type RunningPod, SYSTEM, type VolumeRef } from './cluster.ts';
import { unifiedCgroups } from './leftovers.ts';
import { lines } from './objects.ts';

/** Which cgroups this machine has: one freezer or the other stops the writers. */
export const CGROUPS = unifiedCgroups() ? 'v2' : 'v1';

/**
 * Some five lines a second into /data/lines, each on the disk before the next, as WRITER's but with the seconds since
 * the machine's start, and a file of its own for every line. It rests while there is /data/stop.
 */
export const QUICK_WRITER = `trap 'exit 0' TERM
mkdir -p /data/files
n=$(tail -n 1 /data/lines 2>/dev/null | cut -d' ' -f1); n=\${n:-0}
while true; do
  if [ ! -e /data/stop ]; then
    n=$((n+1)); head -c 20000 /dev/urandom > /data/files/$n
    read -r now rest < /proc/uptime; echo "$n $POD $now" >> /data/lines; sync /data/lines
  fi
  sleep 0.15
done`;

/** Seconds since the machine's start, as the lines have them. */
export const uptime = (): number => Number(readFileSync('/proc/uptime', 'utf8').split(' ')[0]);

/** When a file was last written, by the clock of the lines; its time stamps have the resolution of a tick, 10 ms at most. */
export function lastWritten(file: string): number {
  return uptime() - (Date.now() - statSync(file).mtimeMs) / 1000;
}

/** The longest pause between two lines of one pod, seconds. */
export function longestPause(text: string | null, pod: string): number {
  const own = lines(text).filter((line) => line.pod === pod);
  return own.reduce((most, line, index) => Math.max(most, line.at - (own[index - 1]?.at ?? line.at)), 0);
}

/** Whether a pod's cgroup is frozen, read from outside its node. */
export function isFrozen(cluster: Cluster, pod: RunningPod): boolean {
  const hierarchy = findHierarchy('/sys/fs/cgroup');
  const scope = cluster.instance.nodes.find(({ name }) => name === pod.node)?.scope;
  if (hierarchy === null || scope === undefined) throw new Error('no cgroups that can freeze');
  const folder = podCgroupPaths(pod.uid)
    .map((relative) => path.join(hierarchy.root, scope, relative))
    .find((one) => existsSync(one));
  if (folder === undefined) throw new Error(`no cgroup of the pod ${pod.name}`);
  return hierarchy.version === 'v1'
    ? readFileSync(path.join(folder, 'freezer.state'), 'utf8').trim() === 'FROZEN'
    : /^frozen 1$/m.test(readFileSync(path.join(folder, 'cgroup.events'), 'utf8'));
}

export interface Decision {
  /** when it was first seen, by the clock of the lines: it was written before that */
  at: number;
  /** the active node from then on */
  node: string;
  /** a failover announces what may be lost: lines from before this are not; by the clock of the lines */
  safe: number;
}

/** Notes the decisions on a volume as they are written into its status. */
export class EpochWatch {
  private readonly seen = new Map<number, Decision>();
  private readonly end: () => void;

  constructor(cluster: Cluster, volume: VolumeRef) {
    const what = ['get', 'simplevolumes.storage.shipstuff.io', volume.claim, '-n', volume.namespace];
    const fields = ['epoch', 'activeNode', 'promotion.decidedAt', 'promotion.reason'];
    const form = `jsonpath=${fields.map((field) => `{.status.${field}}`).join('|')}{"\\n"}`;
    const argv = [
      kubeProgram('kubectl') as string,
      `--kubeconfig=${cluster.kubeconfig}`,
      ...what,
      '-w',
      '-o',
      form,
    ];
    this.end = follow(argv, (line) => {
      const [number, node = '', decidedAt = '', reason = ''] = line.split('|');
      const epoch = Number(number);
      if (!(epoch > 0) || this.seen.has(epoch)) return;
      const at = uptime();
      const announced = Number(/at most the last ([\d.]+) s are lost/.exec(reason)?.[1] ?? 0);
      // It has whole seconds, rounded down.
      const decided = at - (Date.now() - Date.parse(decidedAt)) / 1000;
      this.seen.set(epoch, { at, node, safe: decided - announced });
    });
  }

  has(epoch: number): boolean {
    return this.seen.has(epoch);
  }

  /** When an epoch was first seen, by the clock of the lines. */
  at(epoch: number): number {
    return this.decision(epoch).at;
  }

  /** @throws Error when it was never seen */
  decision(epoch: number): Decision {
    const seen = this.seen.get(epoch);
    if (seen === undefined) throw new Error(`epoch ${epoch} was not seen, only ${[...this.seen.keys()]}`);
    return seen;
  }

  stop(): void {
    this.end();
  }
}

/** What the agent of a node lists as the backups of a volume there, oldest first. */
export async function listedBackups(cluster: Cluster, node: string, volume: VolumeRef): Promise<Backup[]> {
  const pod = (await cluster.parts('agent')).find((one) => one.spec.nodeName === node);
  const { data } = await cluster.get('secret', `${RELEASE}-agents`, SYSTEM);
  const read = (name: string): string => Buffer.from(data[name], 'base64').toString();
  const client = createHttpClient({ ca: read('ca.crt'), serverName: AGENT_TLS_NAME });
  try {
    const query = new URLSearchParams({ namespace: volume.namespace, volume: volume.name });
    const url = `https://${pod.status.podIP}:8080/replication/backups?${query}`;
    const { body } = await client.call<{ backups: Backup[] }>({ url, token: read('token') });
    return body.backups;
  } finally {
    client.close();
  }
}
