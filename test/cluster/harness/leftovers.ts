/** Takes down what a cluster has made on this machine, by its names alone: after a crash nothing else is known. */
import { execFileSync } from 'node:child_process';
import { existsSync, readdirSync, readFileSync, rmdirSync, rmSync, writeFileSync } from 'node:fs';
import path from 'node:path';
import { forgottenFolder, giveBack, type Instance, instance } from './instance.ts';

const CGROUPS = '/sys/fs/cgroup';
const LIMIT_MS = 20_000;

/** Stops this thread: cleaning up also happens while the process ends, when no promise is resolved any more. */
const pause = (ms: number): void => {
  Atomics.wait(new Int32Array(new SharedArrayBuffer(4)), 0, 0, ms);
};

/** Whether this machine has the one hierarchy of cgroup v2 alone. */
export const unifiedCgroups = (): boolean => existsSync(path.join(CGROUPS, 'cgroup.controllers'));

/** Folders of every hierarchy that the kernel knows here. */
export function hierarchies(): string[] {
  if (unifiedCgroups()) return [CGROUPS];
  return readdirSync(CGROUPS)
    .map((name) => path.join(CGROUPS, name))
    .filter((folder) => existsSync(path.join(folder, 'cgroup.procs')));
}

/** Makes a node's own cgroup in every hierarchy. */
export function makeCgroups(scope: string): void {
  if (unifiedCgroups()) {
    const controllers = readFileSync(path.join(CGROUPS, 'cgroup.controllers'), 'utf8').trim().split(' ');
    const wanted = controllers.map((name) => `+${name}`).join(' ');
    writeFileSync(path.join(CGROUPS, 'cgroup.subtree_control'), wanted);
  }
  for (const hierarchy of hierarchies()) {
    const folder = path.join(hierarchy, scope);
    if (!existsSync(folder)) execFileSync('mkdir', [folder]);
    // Empty in a new cgroup of v1, and then no process may enter it (cpusets(7)).
    for (const name of ['cpuset.cpus', 'cpuset.mems']) {
      const above = path.join(hierarchy, name);
      if (!unifiedCgroups() && existsSync(above))
        writeFileSync(path.join(folder, name), readFileSync(above, 'utf8'));
    }
  }
}

/** Cgroups from a folder downwards, the deepest first. */
function below(folder: string): string[] {
  if (!existsSync(folder)) return [];
  const inner = readdirSync(folder, { withFileTypes: true }).filter((entry) => entry.isDirectory());
  return [...inner.flatMap((entry) => below(path.join(folder, entry.name))), folder];
}

const cgroupsOf = (scope: string): string[] =>
  hierarchies().flatMap((hierarchy) => below(path.join(hierarchy, scope)));

/** Lets frozen processes of a node go on: one that was killed while it was frozen dies only then. */
export function thaw(scope: string): void {
  for (const folder of cgroupsOf(scope)) {
    for (const [name, value] of [
      ['freezer.state', 'THAWED'],
      ['cgroup.freeze', '0'],
    ] as const) {
      const file = path.join(folder, name);
      try {
        if (existsSync(file)) writeFileSync(file, value);
      } catch {
        // It went away in between.
      }
    }
  }
}

/** Removes a node's cgroups, whose processes are dead. */
export function removeCgroups(scope: string): void {
  const until = performance.now() + LIMIT_MS;
  for (;;) {
    for (const folder of cgroupsOf(scope)) {
      try {
        rmdirSync(folder);
      } catch {
        // A process in it is still ending.
      }
    }
    if (cgroupsOf(scope).length === 0) return;
    if (performance.now() > until)
      throw new Error(`cgroups of ${scope} are still in use after ${LIMIT_MS} ms`);
    pause(50);
  }
}

const namespaceFile = (name: string): string => path.join('/run/netns', name);

/** Processes in a network namespace. Pods have namespaces of their own; they end with the node's first process. */
function processesIn(namespace: string): number[] {
  if (!existsSync(namespaceFile(namespace))) return [];
  return execFileSync('ip', ['netns', 'pids', namespace], { encoding: 'utf8' })
    .split('\n')
    .filter((line) => line !== '')
    .map(Number)
    .filter((pid) => pid !== process.pid);
}

/** Kills all that runs in a network namespace and removes the namespace with its links, addresses and routes. */
export function removeNamespace(namespace: string, scope: string | null = null): void {
  if (!existsSync(namespaceFile(namespace))) return;
  const until = performance.now() + LIMIT_MS;
  for (;;) {
    const pids = processesIn(namespace);
    if (pids.length === 0) break;
    for (const pid of pids) {
      try {
        process.kill(pid, 'SIGKILL');
      } catch {
        // It has just ended.
      }
    }
    if (scope !== null) thaw(scope);
    if (performance.now() > until)
      throw new Error(`processes ${pids.join(', ')} of ${namespace} do not end within ${LIMIT_MS} ms`);
    pause(50);
  }
  execFileSync('ip', ['netns', 'del', namespace]);
}

/** Removes a link of this machine: its namespace may live on for a minute, kept by a connection that still ends. */
function removeLink(name: string): void {
  if (existsSync(`/sys/class/net/${name}`)) execFileSync('ip', ['link', 'del', name]);
}

/** Everything of a cluster except its folder. Nothing of it is left afterwards, and a second call changes nothing. */
export function takeDown(cluster: Instance): void {
  for (const node of cluster.nodes) removeNamespace(node.scope, node.scope);
  removeNamespace(cluster.name);
  removeLink(cluster.name);
  for (const node of cluster.nodes) {
    thaw(node.scope);
    removeCgroups(node.scope);
  }
}

/** Removes a cluster's folder with the disks of its pools that are mounted there. */
export function removeFolder(folder: string): void {
  const mounted = readFileSync('/proc/self/mounts', 'utf8')
    .split('\n')
    .map((line) => line.split(' ')[1] ?? '')
    .filter((target) => target.startsWith(`${folder}/`));
  for (const target of mounted.reverse()) execFileSync('umount', [target]);
  rmSync(folder, { recursive: true, force: true, maxRetries: 3 });
}

/** Cleans up after a run that ended without doing so. */
export function cleanUp(number: number): void {
  takeDown(instance(number));
  const folder = forgottenFolder(number);
  if (folder !== null) removeFolder(folder);
  giveBack(number);
}
