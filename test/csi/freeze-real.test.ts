/** Real cgroups of both versions and a real writing process: not one byte between freeze and death. */
import { execFileSync, spawn } from 'node:child_process';
import {
  existsSync,
  mkdirSync,
  mkdtempSync,
  readFileSync,
  rmdirSync,
  rmSync,
  statSync,
  writeFileSync,
} from 'node:fs';
import { tmpdir } from 'node:os';
import { dirname, join } from 'node:path';
import { setTimeout as sleep } from 'node:timers/promises';
import t, { type Test } from 'tap';
import { bootClock } from '../../csi/freeze/boot-clock.ts';
import {
  findHierarchy,
  findPodCgroup,
  type Hierarchy,
  PodCgroup,
  podCgroupPaths,
  probeFreezer,
} from '../../csi/freeze/cgroup.ts';
import { Freezer } from '../../csi/freeze/freezer.ts';
import type { Logger } from '../../lib/core/parts.ts';
import type { WriterLease } from '../../lib/fence/types.ts';

t.setTimeout(120_000);
const quiet: Logger = { debug() {}, info() {}, warn() {}, error() {}, child: () => quiet };
const UID = 'f0f0f0f0-aaaa-4bbb-8ccc-000000000001';

/** Mounts the hierarchy at a folder of its own; null: it cannot be had here, with the reason. */
function mounted(version: 'v1' | 'v2'): { base: string } | { why: string } {
  if (process.getuid?.() !== 0) return { why: 'needs root' };
  const base = mkdtempSync(join(tmpdir(), 'sv-freeze-'));
  const at = version === 'v1' ? join(base, 'freezer') : base;
  mkdirSync(at, { recursive: true });
  try {
    execFileSync(
      'mount',
      version === 'v1' ? ['-t', 'cgroup', '-o', 'freezer', 'freezer', at] : ['-t', 'cgroup2', 'cgroup2', at],
      { stdio: 'pipe' },
    );
  } catch (error) {
    rmSync(base, { recursive: true, force: true });
    return {
      why: `no cgroup ${version} here: ${String((error as { stderr?: Buffer }).stderr ?? error).trim()}`,
    };
  }
  t.teardown(() => {
    execFileSync('umount', [at]);
    rmSync(base, { recursive: true, force: true });
  });
  return { base };
}

interface Pod {
  cgroup: PodCgroup;
  file: string;
  size(): number;
  alive(): boolean;
  exited: Promise<string | null>;
}

/** A pod as kubelet and a runtime make it (a container's cgroup below the pod's) with a process that never stops writing. */
async function startPod(test: Test, hierarchy: Hierarchy, relative: string): Promise<Pod> {
  const pod = join(hierarchy.root, relative);
  const container = join(pod, 'container');
  const made: string[] = [];
  for (let dir = container; dir !== hierarchy.root && !existsSync(dir); dir = dirname(dir)) made.push(dir);
  mkdirSync(container, { recursive: true });
  const file = join(mkdtempSync(join(tmpdir(), 'sv-writer-')), 'log');
  writeFileSync(file, '');
  // Forks all the time, so that freezing meets processes that are just being made.
  const child = spawn('sh', ['-c', 'while :; do echo line >> "$0"; sleep 0.002; done', file], {
    stdio: 'ignore',
  });
  const exited = new Promise<string | null>((resolve) =>
    child.once('exit', (_code, signal) => resolve(signal)),
  );
  test.teardown(async () => {
    const cgroup = new PodCgroup(pod, hierarchy.version);
    cgroup.order(false);
    child.kill('SIGKILL');
    await exited;
    for (const pid of cgroup.pids()) process.kill(pid, 'SIGKILL');
    for (const dir of made)
      for (let i = 0; i < 100 && existsSync(dir); i++) {
        try {
          rmdirSync(dir);
          break;
        } catch {
          await sleep(20);
        }
      }
    rmSync(dirname(file), { recursive: true, force: true });
  });
  writeFileSync(join(container, 'cgroup.procs'), String(child.pid));
  const size = (): number => statSync(file).size;
  while (size() < 50) await sleep(5);
  const alive = (): boolean => child.exitCode === null && child.signalCode === null;
  return { cgroup: findPodCgroup(hierarchy, UID), file, size, alive, exited };
}

for (const version of ['v1', 'v2'] as const) {
  const at = mounted(version);
  if ('why' in at) {
    t.test(`cgroup ${version}`, { skip: at.why }, async () => {});
    continue;
  }
  const hierarchy = findHierarchy(at.base) as Hierarchy;

  t.test(`cgroup ${version}: the hierarchy and the layout are recognized`, async (t) => {
    t.same(hierarchy.version, version);
    const before = probeFreezer(at.base);
    const known =
      existsSync(join(hierarchy.root, 'kubepods')) || existsSync(join(hierarchy.root, 'kubepods.slice'));
    if (!known) t.match(before, { possible: false, reason: /unknown layout/ });
    await startPod(t, hierarchy, podCgroupPaths(UID)[2] as string);
    const state = probeFreezer(at.base);
    if (version === 'v2' || readFileSync('/proc/self/status', 'utf8').match(/^NSpid:\s*\d+$/m))
      t.match(state, { possible: true, cgroup: version });
    t.notOk(
      existsSync(join(hierarchy.root, `simple-volume-probe-${process.pid}`)),
      'the trial is cleaned up',
    );
  });

  // Both drivers with each QoS class, and one below kind's --cgroup-root.
  for (const relative of podCgroupPaths(UID).slice(0, 7))
    t.test(`cgroup ${version}: found at ${relative}`, async (t) => {
      const pod = await startPod(t, hierarchy, relative);
      t.equal(pod.cgroup.path, join(hierarchy.root, relative));
    });

  t.test(`cgroup ${version}: frozen, nothing is written; thawed, it goes on with nothing lost`, async (t) => {
    const pod = await startPod(t, hierarchy, podCgroupPaths(UID)[0] as string);
    const ms = await pod.cgroup.freeze();
    const size = pod.size();
    t.ok(pod.cgroup.frozen());
    t.ok(ms < 500, `confirmed after ${ms.toFixed(1)} ms`);
    await sleep(300);
    t.equal(pod.size(), size, 'not one byte');
    await pod.cgroup.freeze();
    t.ok(pod.alive(), 'freezing twice is no harm, and it lives');
    await pod.cgroup.thaw();
    t.notOk(pod.cgroup.frozen());
    while (pod.size() === size) await sleep(5);
    t.ok(
      readFileSync(pod.file, 'utf8')
        .split('\n')
        .slice(0, -1)
        .every((line) => line === 'line'),
      'every line is whole',
    );
  });

  t.test(`cgroup ${version}: killed while frozen, nothing is written in between`, async (t) => {
    const pod = await startPod(t, hierarchy, podCgroupPaths(UID)[0] as string);
    await pod.cgroup.freeze();
    const size = pod.size();
    await sleep(50);
    await pod.cgroup.kill();
    t.equal(await pod.exited, 'SIGKILL');
    t.same(pod.cgroup.pids(), [], 'its children too');
    await sleep(100);
    t.equal(pod.size(), size, 'not one byte');
  });

  t.test(`cgroup ${version}: a pod that ended meanwhile is nothing to stop`, async (t) => {
    const pod = await startPod(t, hierarchy, podCgroupPaths(UID)[0] as string);
    await pod.cgroup.kill();
    rmdirSync(join(pod.cgroup.path, 'container'));
    rmdirSync(pod.cgroup.path);
    t.ok((await pod.cgroup.freeze()) < 100);
    await pod.cgroup.kill();
    t.throws(() => findPodCgroup(hierarchy, UID), /no cgroup of pod/);
  });

  t.test(`cgroup ${version}: the pod of csi-node itself is refused`, async (t) => {
    const relative = podCgroupPaths(UID)[0] as string;
    await startPod(t, hierarchy, relative);
    t.throws(() => findPodCgroup(hierarchy, UID, `/${relative}/container`), /csi-node itself/);
  });

  t.test(
    `cgroup ${version}: a whole life with the real timer: end, renewal, silence, a newer epoch`,
    async (t) => {
      const pod = await startPod(t, hierarchy, podCgroupPaths(UID)[0] as string);
      const name = { namespace: 'default', volume: 'v' };
      const lease = (epoch: number, remainingMs: number): WriterLease => ({
        ...name,
        role: epoch === 1 ? 'active' : 'replica',
        epoch,
        fencing: 'lease',
        released: false,
        remainingMs,
      });
      let answer: () => Promise<WriterLease[]> = () => new Promise(() => {});
      const mount = { harmlessAt: -1 };
      const freezer = new Freezer({
        clock: bootClock,
        setTimeout: (fn, ms) => {
          const timer = setTimeout(fn, ms);
          return { cancel: () => clearTimeout(timer) };
        },
        ask: () => answer(),
        makeHarmless: async () => {
          mount.harmlessAt = pod.size();
        },
        find: (uid) => findPodCgroup(hierarchy, uid),
        log: quiet,
        intervalMs: 100,
        askLimitMs: 200,
      });
      t.teardown(() => freezer.stop());
      const began = bootClock();
      freezer.add({ ...name, podUid: UID }, 1, { lease: lease(1, 400), askedAt: began });
      await sleep(200);
      t.notOk(pod.cgroup.frozen(), 'it runs while the lease holds');
      while (!pod.cgroup.frozen()) await sleep(2);
      const late = bootClock() - began - 400;
      t.ok(late < 300, `frozen ${late.toFixed(0)} ms after the end, though the agent hangs`);
      const still = pod.size();
      await sleep(300);
      t.equal(pod.size(), still);
      answer = async () => [lease(1, 60_000)];
      while (pod.size() === still) await sleep(5);
      t.pass('renewed, it goes on');
      answer = async () => [lease(2, 0)];
      t.equal(await pod.exited, 'SIGKILL');
      t.equal(mount.harmlessAt, pod.size(), 'nothing was written since the mount was made harmless');
      while (freezer.status()[0]?.state !== 'killed') await sleep(5);
      t.same(freezer.volumes(), [], 'and it counts as a writer no more');
    },
  );
}
