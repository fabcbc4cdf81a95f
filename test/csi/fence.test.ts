/** A published writer, its lease and its end: real csi-node, real agent, a real freezer, a process that never stops writing. */
import { type ChildProcess, execFileSync, spawn } from 'node:child_process';
import { existsSync, mkdirSync, mkdtempSync, rmdirSync, rmSync, statSync, writeFileSync } from 'node:fs';
import { tmpdir } from 'node:os';
import path from 'node:path';
import { setTimeout as sleep } from 'node:timers/promises';
import { status } from '@grpc/grpc-js';
import t from 'tap';
import { waitFor } from '../../lib/local/cluster.ts';
import { capability, inOwnMounts, mounts, mountsAt, noMounts, refused, TestCsi } from './support.ts';

let why = noMounts();
if (!why) await inOwnMounts(import.meta.filename);
t.setTimeout(170_000);

/** In the mount namespace of this test; the hierarchy itself is the machine's. */
const base = mkdtempSync(path.join(tmpdir(), 'sv-cg-'));
const root = path.join(base, 'freezer');
mkdirSync(root);
if (!why)
  try {
    execFileSync('mount', ['-t', 'cgroup', '-o', 'freezer', 'freezer', root], { stdio: 'pipe' });
  } catch (error) {
    why = `no freezer of cgroup v1 here: ${(error as Error).message.split('\n')[1]}`;
  }
const UID = `f0f0f0f0-cccc-4bbb-8ccc-${String(process.pid).padStart(12, '0')}`;
const pod = path.join(root, 'kubepods/burstable', `pod${UID}`);
const container = path.join(pod, 'c');
let writer: ChildProcess | null = null;
const dead = (): boolean => writer === null || writer.exitCode !== null || writer.signalCode !== null;
t.teardown(async () => {
  if (existsSync(pod)) {
    writeFileSync(path.join(pod, 'freezer.state'), 'THAWED');
    if (!dead()) writer?.kill('SIGKILL');
    for (let dir = container; dir !== root; dir = path.dirname(dir))
      for (let i = 0; i < 20; i++)
        try {
          rmdirSync(dir);
          break;
        } catch {
          await sleep(50); // in use by another test, or its process is just ending
        }
  }
  if (!why) execFileSync('umount', ['-l', root]);
  rmSync(base, { recursive: true, force: true });
});

t.test(
  'D32: the writer of a node that is cut off stands still, goes on in the same epoch, and ends in a newer one',
  { skip: why },
  async (t) => {
    mkdirSync(container, { recursive: true });
    const csi = await TestCsi.start(['a', 'b'], { cgroups: base });
    const a = csi.node('a');
    csi.selected = 'a';
    const v = await csi.create('pvc-fence');
    const name = { namespace: 'ns', volume: 'pvc-fence' };
    await csi.activate(name, 'a', 1, 'lease', { version: 1, nodes: ['b'], adding: [] });
    const target = a.target(UID, 'pvc-fence');
    const request = {
      volume_id: v.id,
      target_path: target,
      volume_capability: capability(),
      volume_context: v.context,
    };
    await a.call('NodePublishVolume', request);
    t.match(a.log, /pods can be stopped/);

    // A container: its own mount of the target, its own cgroup.
    const inside = path.join(csi.folder, 'inside');
    mkdirSync(inside);
    const script = `echo $$ > ${container}/cgroup.procs && mount --bind ${target} ${inside} && while :; do echo line >> ${inside}/log; sleep 0.005; done`;
    writer = spawn('unshare', ['--mount', '--propagation', 'private', 'sh', '-c', script], {
      stdio: 'ignore',
    });
    const log = path.join(a.agent.pool, 'ns/pvc-fence/log');
    const size = (): number => statSync(log, { throwIfNoEntry: false })?.size ?? 0;
    const grows = async (ms = 400): Promise<boolean> => {
      const before = size();
      await sleep(ms);
      return size() > before;
    };
    await waitFor('it writes', () => grows());

    csi.deaf = true;
    const cut = performance.now();
    await waitFor('it stands still', async () => !(await grows(300)), 15_000);
    t.ok(
      performance.now() - cut < 7000,
      `after ${Math.round(performance.now() - cut)} ms with a lease of 4 s`,
    );
    t.notOk(await grows(1000), 'not one byte');
    const health = (await a.call('NodeGetVolumeHealth', { volume_id: v.id })) as unknown as {
      volume_health: { health_statuses: { reason: string }[] };
    };
    t.strictSame(
      health.volume_health.health_statuses.map(({ reason }) => reason),
      ['LeaseEnded'],
    );

    await a.endCsi('SIGKILL');
    await a.startCsi();
    t.notOk(await grows(1000), 'a restart of csi-node sets nobody free');
    csi.deaf = false;
    await waitFor('it goes on', () => grows(), 10_000);
    t.equal(mountsAt(target), 1);

    await a.endCsi('SIGKILL');
    csi.deaf = true;
    await sleep(5000);
    await a.startCsi();
    await waitFor('csi-node comes back after the lease has ended', async () => !(await grows(300)), 5_000);

    // The agent alone is away: csi-node has its own timer.
    csi.deaf = false;
    await waitFor('it goes on again', () => grows(), 10_000);
    await a.agent.end('SIGKILL');
    await waitFor('it stands still without the agent', async () => !(await grows(300)), 15_000);
    await a.agent.start();
    await waitFor('it goes on when the agent is back', () => grows(), 15_000);

    // Another node goes on in epoch 2.
    csi.records.delete(v.id);
    const b = csi.node('b');
    csi.deaf = true;
    await waitFor('it stands still before the promotion', async () => !(await grows(300)), 15_000);
    const still = size();
    const told = a.agent.call('POST', '/replication/sync-batch', {
      ...name,
      epoch: 2,
      generation: null,
      source: { url: b.agent.url, webdavUrl: b.agent.webdavUrl, token: b.agent.token, node: 'b' },
    });
    // Its tree is not touched while it is mounted; that it is over is known from here on.
    await t.rejects(told, { code: 'VOLUME_IN_USE' });
    await waitFor('the writer is dead', dead, 10_000);
    t.equal(size(), still, 'not one byte between standing still and death');
    const top = mounts()
      .filter(({ point }) => point === target)
      .at(-1);
    t.equal(top?.type, 'tmpfs', 'the target is covered');
    t.throws(() => writeFileSync(path.join(target, 'x'), 'x'), { code: 'EROFS' });
    const no = await refused(a.call('NodePublishVolume', request));
    t.equal(no.code, status.FAILED_PRECONDITION, no.message);
    await a.endCsi('SIGKILL');
    await a.startCsi();
    t.equal(
      (await refused(a.call('NodePublishVolume', request))).code,
      status.FAILED_PRECONDITION,
      'nor after a restart',
    );
    await a.call('NodeUnpublishVolume', { volume_id: v.id, target_path: target });
    t.equal(mountsAt(target), 0, 'both layers are gone');
    t.notOk(existsSync(target));
  },
);

t.test('a pod that could not be stopped is not given a leased volume', { skip: why }, async (t) => {
  const csi = await TestCsi.start(['a'], { cgroups: base });
  const a = csi.node('a');
  const v = await csi.create('pvc-loose');
  await csi.activate({ namespace: 'ns', volume: 'pvc-loose' }, 'a', 1, 'lease', {
    version: 1,
    nodes: ['b'],
    adding: [],
  });
  const request = (target: string): object => ({
    volume_id: v.id,
    target_path: target,
    volume_capability: capability(),
    volume_context: v.context,
  });
  const target = a.target('00000000-0000-4000-8000-000000000009', 'pvc-loose');
  const gone = await refused(a.call('NodePublishVolume', request(target)));
  t.equal(gone.code, status.UNAVAILABLE, gone.message);
  t.notOk(existsSync(target));
  const nameless = await refused(a.call('NodePublishVolume', request(`${a.kubelet}/pods/x`)));
  t.equal(nameless.code, status.FAILED_PRECONDITION, nameless.message);
});
