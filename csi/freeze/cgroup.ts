/**
 * A pod's cgroup: found by the pod's UID, frozen, thawed, killed.
 *
 * Names are kubelet's (pkg/kubelet/cm: cgroup_manager_linux.go, pod_container_manager_linux.go): with the cgroupfs
 * driver `kubepods/<qos>/pod<uid>`, with the systemd driver
 * `kubepods.slice/kubepods-<qos>.slice/kubepods-<qos>-pod<uid with _>.slice`; Guaranteed pods have no QoS level. A
 * node that sets --cgroup-root (kind: `kubelet`) has that in front.
 * Freezing: freezer.state on cgroup v1 (kernel: Documentation/admin-guide/cgroup-v1/freezer-subsystem.rst),
 * cgroup.freeze, cgroup.events and cgroup.kill on v2 (Documentation/admin-guide/cgroup-v2.rst).
 */
import {
  existsSync,
  lstatSync,
  mkdirSync,
  readdirSync,
  readFileSync,
  readlinkSync,
  rmdirSync,
  statfsSync,
  writeFileSync,
} from 'node:fs';
import { join } from 'node:path';
import { setTimeout as sleep } from 'node:timers/promises';
import type { FreezerState } from '../../lib/fence/types.ts';

export type CgroupVersion = 'v1' | 'v2';

/** Where the hierarchy that can freeze is mounted. */
export interface Hierarchy {
  version: CgroupVersion;
  /** absolute directory of its root */
  root: string;
}

export type FreezeFault =
  | 'NO_HIERARCHY'
  | 'BAD_UID'
  | 'NOT_FOUND'
  | 'NOT_A_POD'
  | 'OWN_POD'
  | 'NOT_FROZEN'
  | 'NOT_KILLED';

export class FreezeError extends Error {
  readonly fault: FreezeFault;
  constructor(fault: FreezeFault, message: string) {
    super(message);
    this.name = 'FreezeError';
    this.fault = fault;
  }
}

/** statfs(2) magics, linux/magic.h */
const CGROUP_V1_MAGIC = 0x27e0eb;
const CGROUP_V2_MAGIC = 0x63677270;

/** A UID of the API server, or the 32 hex digits of a static pod. */
const UID = /^(?:[0-9a-f]{8}(?:-[0-9a-f]{4}){3}-[0-9a-f]{12}|[0-9a-f]{32})$/;

const QOS = ['burstable', 'besteffort', null] as const;
/** Values of --cgroup-root that are met: none, and kind's. */
const CGROUP_ROOTS: readonly (readonly string[])[] = [[], ['kubelet']];

/**
 * Every place, relative to the hierarchy's root, where kubelet may have put the pod's cgroup.
 * @throws BAD_UID for anything that is no pod UID: the name becomes a path
 */
export function podCgroupPaths(uid: string): string[] {
  if (!UID.test(uid)) throw new FreezeError('BAD_UID', `${JSON.stringify(uid.slice(0, 80))} is no pod UID`);
  const escaped = uid.replaceAll('-', '_');
  const paths: string[] = [];
  for (const root of CGROUP_ROOTS)
    for (const qos of QOS) {
      const parts = [...root, 'kubepods', ...(qos ? [qos] : [])];
      paths.push([...parts, `pod${uid}`].join('/'));
      // systemd: each slice's name holds its parents' (systemd.slice(5)).
      const slices = [...parts, `pod${escaped}`].map((_, i, all) => `${all.slice(0, i + 1).join('-')}.slice`);
      paths.push(slices.join('/'));
    }
  return paths;
}

const read = (file: string): string | null => {
  try {
    return readFileSync(file, 'utf8');
  } catch {
    return null;
  }
};

/**
 * The hierarchy that kubelet's pods can be frozen in, below the folder where cgroups are mounted.
 * @param base usually /sys/fs/cgroup
 */
export function findHierarchy(base: string): Hierarchy | null {
  const magic = (dir: string): number | null => {
    try {
      return statfsSync(dir).type;
    } catch {
      return null;
    }
  };
  if (magic(base) === CGROUP_V2_MAGIC) return { version: 'v2', root: base };
  const freezer = join(base, 'freezer');
  if (magic(freezer) === CGROUP_V1_MAGIC) return { version: 'v1', root: freezer };
  // Pods of a hybrid node without the v1 freezer are in the unified hierarchy.
  const unified = join(base, 'unified');
  return magic(unified) === CGROUP_V2_MAGIC ? { version: 'v2', root: unified } : null;
}

/** This process's own cgroup in the hierarchy, relative to its root (/proc/self/cgroup, cgroups(7)); null: unknown. */
export function ownCgroup(version: CgroupVersion, text = read('/proc/self/cgroup') ?? ''): string | null {
  for (const line of text.split('\n')) {
    const [id, controllers, ...path] = line.split(':');
    if (path.length === 0) continue;
    if (version === 'v2' ? id === '0' && controllers === '' : controllers?.split(',').includes('freezer'))
      return path.join(':');
  }
  return null;
}

/** How long until freezing must be confirmed; a process in uninterruptible I/O freezes only after it. */
const CONFIRM_MS = 2_000;
const POLL_MS = 3;

export class PodCgroup {
  readonly path: string;
  readonly version: CgroupVersion;

  /** Only from findPodCgroup. */
  constructor(path: string, version: CgroupVersion) {
    this.path = path;
    this.version = version;
  }

  #file(name: string): string {
    return join(this.path, name);
  }

  get exists(): boolean {
    return existsSync(this.path);
  }

  /** Whether everything in it stands still, as the kernel says. A cgroup that is gone has nothing that runs. */
  frozen(): boolean {
    const text = read(this.#file(this.version === 'v1' ? 'freezer.state' : 'cgroup.events'));
    if (text === null) return !this.exists;
    return this.version === 'v1' ? text.trim() === 'FROZEN' : /^frozen 1$/m.test(text);
  }

  /** Orders freezing; what the kernel made of it says frozen(). Does nothing when the cgroup is gone. */
  order(freeze: boolean): void {
    try {
      if (this.version === 'v1') writeFileSync(this.#file('freezer.state'), freeze ? 'FROZEN' : 'THAWED');
      else writeFileSync(this.#file('cgroup.freeze'), freeze ? '1' : '0');
    } catch (error) {
      if (this.exists) throw error;
    }
  }

  /**
   * Freezes all of it.
   * @returns milliseconds that it took
   * @throws NOT_FROZEN when the kernel does not confirm it in time; the order stays
   */
  async freeze(limitMs = CONFIRM_MS): Promise<number> {
    const began = performance.now();
    for (;;) {
      // On v1 a task that was on its way into the cgroup can keep it FREEZING until it is ordered again.
      this.order(true);
      if (this.frozen()) return performance.now() - began;
      if (performance.now() - began > limitMs)
        throw new FreezeError(
          'NOT_FROZEN',
          `${this.path} was not confirmed frozen within ${limitMs} ms; a process in it may be waiting for a disk`,
        );
      await sleep(POLL_MS);
    }
  }

  /** Lets it run on. @throws NOT_FROZEN when it stays frozen (an ancestor is frozen) */
  async thaw(limitMs = CONFIRM_MS): Promise<void> {
    const began = performance.now();
    for (;;) {
      this.order(false);
      if (!this.exists || !this.frozen()) return;
      if (performance.now() - began > limitMs)
        throw new FreezeError('NOT_FROZEN', `${this.path} was not thawed within ${limitMs} ms`);
      await sleep(POLL_MS);
    }
  }

  /** Processes in it and below, as this process sees them. 0 stands for one that it cannot see (pid_namespaces(7)). */
  pids(directory = this.path): number[] {
    const pids = (read(join(directory, 'cgroup.procs')) ?? '').split('\n').filter(Boolean).map(Number);
    try {
      for (const entry of readdirSync(directory, { withFileTypes: true }))
        if (entry.isDirectory()) pids.push(...this.pids(join(directory, entry.name)));
    } catch {
      // It went meanwhile.
    }
    return pids;
  }

  /**
   * Kills all of it while it is frozen, then thaws it into death: nothing in it runs another instruction of its own.
   * @throws NOT_FROZEN when it cannot be frozen first; NOT_KILLED when something is left
   */
  async kill(limitMs = 5_000): Promise<void> {
    await this.freeze();
    const doomed = new Set(this.pids());
    if (this.version === 'v2' && existsSync(this.#file('cgroup.kill')))
      writeFileSync(this.#file('cgroup.kill'), '1');
    else {
      if (doomed.has(0))
        throw new FreezeError(
          'NOT_KILLED',
          `processes in ${this.path} are not visible here: csi-node needs the host's process namespace`,
        );
      for (const pid of doomed) {
        try {
          process.kill(pid, 'SIGKILL');
        } catch (error) {
          if ((error as NodeJS.ErrnoException).code !== 'ESRCH') throw error;
        }
      }
    }
    this.order(false);
    const began = performance.now();
    for (;;) {
      const left = this.pids().filter((pid) => doomed.has(pid));
      if (left.length === 0) return;
      if (performance.now() - began > limitMs)
        throw new FreezeError(
          'NOT_KILLED',
          `${left.length} processes in ${this.path} did not die within ${limitMs} ms`,
        );
      await sleep(POLL_MS);
    }
  }
}

/**
 * The cgroup of a pod.
 * @throws BAD_UID, NOT_FOUND, NOT_A_POD (a link, or no cgroup), OWN_POD (this process is in it)
 */
export function findPodCgroup(
  hierarchy: Hierarchy,
  uid: string,
  own = ownCgroup(hierarchy.version),
): PodCgroup {
  const { root, version } = hierarchy;
  for (const relative of podCgroupPaths(uid)) {
    const path = join(root, relative);
    let directory: boolean;
    try {
      directory = lstatSync(path).isDirectory();
    } catch {
      continue;
    }
    const file = version === 'v1' ? 'freezer.state' : 'cgroup.freeze';
    if (!directory || !existsSync(join(path, file)))
      throw new FreezeError('NOT_A_POD', `${path} is no cgroup that can be frozen`);
    if (own !== null && `${own}/`.startsWith(`/${relative}/`))
      throw new FreezeError('OWN_POD', `${path} is the pod of csi-node itself`);
    return new PodCgroup(path, version);
  }
  throw new FreezeError('NOT_FOUND', `no cgroup of pod ${uid} below ${root}`);
}

/**
 * Whether pods can be frozen on this node, tried on an empty cgroup of our own. Asked before anything happens, so
 * that "impossible" is a condition and not a surprise.
 * @param base usually /sys/fs/cgroup
 */
export function probeFreezer(base: string): FreezerState {
  const hierarchy = findHierarchy(base);
  if (!hierarchy)
    return { possible: false, reason: `no cgroup hierarchy with a freezer below ${base}`, cgroup: null };
  const { root, version } = hierarchy;
  const no = (reason: string): FreezerState => ({ possible: false, reason, cgroup: version });
  if (
    !CGROUP_ROOTS.some(
      (r) => existsSync(join(root, ...r, 'kubepods')) || existsSync(join(root, ...systemd(r))),
    )
  )
    return no(`no cgroup of kubelet (kubepods, kubepods.slice) below ${root}: an unknown layout`);
  const probe = join(root, `simple-volume-probe-${process.pid}`);
  try {
    mkdirSync(probe);
    try {
      const cgroup = new PodCgroup(probe, version);
      cgroup.order(true);
      if (!cgroup.frozen() && version === 'v1') return no(`a cgroup of cgroup ${version} does not freeze`);
      if (version === 'v2' && read(join(probe, 'cgroup.freeze'))?.trim() !== '1')
        return no(`a cgroup of cgroup ${version} does not freeze`);
      cgroup.order(false);
      if (!(version === 'v2' && existsSync(join(probe, 'cgroup.kill'))) && seesOnlyItself())
        return no(
          "csi-node does not see the node's processes (hostPID), so a frozen pod could not be killed",
        );
    } finally {
      rmdirSync(probe);
    }
  } catch (error) {
    return no(
      `a cgroup below ${root} cannot be made and frozen: ${(error as NodeJS.ErrnoException).code ?? error}`,
    );
  }
  return { possible: true, reason: `cgroup ${version} below ${root}`, cgroup: version };
}

const systemd = (root: readonly string[]): string[] =>
  [...root, 'kubepods'].map((_, i, all) => `${all.slice(0, i + 1).join('-')}.slice`);

/**
 * Whether this process is in a process namespace of its own, or of its pod's own. The machine's first namespace has a
 * fixed inode number (PROC_PID_INIT_INO, linux/proc_ns.h). A node may be in a later one, as in kind: its process 1 then
 * is in no pod's cgroup, while that of a pod's namespace is in the pod's (on v2, with a cgroup namespace, the same as
 * this process').
 */
function seesOnlyItself(): boolean {
  try {
    if (readlinkSync('/proc/self/ns/pid') === 'pid:[4026531836]') return false;
    return firstIsOfPod(readFileSync('/proc/1/cgroup', 'utf8'), readFileSync('/proc/self/cgroup', 'utf8'));
  } catch {
    return true;
  }
}

/** Whether the first process of a namespace belongs to a pod: texts of proc(5) cgroup of it and of one in that pod. */
export function firstIsOfPod(first: string, own: string): boolean {
  return first.includes('kubepods') || first === own;
}
