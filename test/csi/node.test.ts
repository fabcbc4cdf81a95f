/** csi-node and the Controller service with two real agents and real mounts: what goes where, and what a refusal leaves. */
import { execFileSync, spawnSync } from 'node:child_process';
import {
  existsSync,
  mkdirSync,
  readdirSync,
  readFileSync,
  renameSync,
  rmSync,
  statSync,
  writeFileSync,
} from 'node:fs';
import path from 'node:path';
import { status } from '@grpc/grpc-js';
import t from 'tap';
import { waitFor } from '../../lib/local/cluster.ts';
import {
  capability,
  createRequest,
  inOwnMounts,
  mounts,
  mountsAt,
  noMounts,
  POOL,
  refused,
  TestCsi,
  type TestNode,
} from './support.ts';

const why = noMounts();
if (!why) await inOwnMounts(import.meta.filename);
t.setTimeout(170_000);
if (why) {
  t.plan(0, why);
  process.exit(0);
}

const csi = await TestCsi.start(['a', 'b']);
const [a, b] = [csi.node('a'), csi.node('b')];
const UID = (n: number): string => `00000000-0000-4000-8000-${String(n).padStart(12, '0')}`;
const live = (node: TestNode, volume: string): string => path.join(node.agent.pool, 'ns', volume);

let count = 0;
/** A volume that is made and active on node a. */
async function volume(
  more: object = {},
): Promise<{ id: string; name: string; context: Record<string, string> }> {
  const name = `pvc-${++count}`;
  csi.selected = 'a';
  const { id, context } = await csi.create(name, more);
  await csi.activate({ namespace: 'ns', volume: name }, 'a');
  return { id, name, context };
}

const request = (
  v: { id: string; context: Record<string, string> },
  target: string,
  more: { mode?: string; readonly?: boolean; flags?: string[] } = {},
): object => ({
  volume_id: v.id,
  target_path: target,
  volume_capability: capability(more.mode, more.flags),
  readonly: more.readonly ?? false,
  volume_context: v.context,
});
const publish = (node: TestNode, ...args: Parameters<typeof request>): Promise<unknown> =>
  node.call('NodePublishVolume', request(...args));
const unpublish = (node: TestNode, id: string, target: string): Promise<unknown> =>
  node.call('NodeUnpublishVolume', { volume_id: id, target_path: target });

t.test('G1, G2: a volume is mounted on its active node; on another one nothing is made', async (t) => {
  const v = await volume();
  const there = b.target(UID(1));
  const no = await refused(publish(b, v, there));
  t.equal(no.code, status.FAILED_PRECONDITION, no.message);
  t.notOk(existsSync(there), 'no target');
  t.notOk(existsSync(live(b, v.name)), 'no directory in the pool');
  t.notOk(existsSync(path.join(b.agent.pool, 'ns')), 'nor above it');
  const here = a.target(UID(2));
  await publish(a, v, here);
  writeFileSync(path.join(here, 'file'), 'x');
  t.equal(readFileSync(path.join(live(a, v.name), 'file'), 'utf8'), 'x', 'it is the volume');
  t.equal(mountsAt(here), 1);
  const again = await refused(publish(b, v, there));
  t.equal(again.code, status.FAILED_PRECONDITION, 'a second node never has it while the first one does');
  await unpublish(a, v.id, here);
});

t.test(
  'G2: ReadWriteOncePod keeps a second pod of the node out, whichever of the two asks for it',
  async (t) => {
    const v = await volume();
    const [one, two] = [a.target(UID(1), v.name), a.target(UID(2), v.name)];
    await publish(a, v, one, { mode: 'SINGLE_NODE_SINGLE_WRITER' });
    for (const mode of ['SINGLE_NODE_SINGLE_WRITER', 'SINGLE_NODE_MULTI_WRITER']) {
      const no = await refused(publish(a, v, two, { mode }));
      t.equal(no.code, status.FAILED_PRECONDITION, no.message);
      t.notOk(existsSync(two));
    }
    await unpublish(a, v.id, one);
    await publish(a, v, two);
    await publish(a, v, one);
    t.equal(
      (await refused(publish(a, v, a.target(UID(3), v.name), { mode: 'SINGLE_NODE_SINGLE_WRITER' }))).code,
      9,
    );
    await unpublish(a, v.id, one);
    await unpublish(a, v.id, two);
  },
);

t.test('G3: a directory that is missing is never made by a mount', async (t) => {
  const v = await volume();
  rmSync(live(a, v.name), { recursive: true });
  const target = a.target(UID(1), v.name);
  const no = await refused(publish(a, v, target));
  t.equal(no.code, status.FAILED_PRECONDITION, no.message);
  t.notOk(existsSync(live(a, v.name)));
  t.notOk(existsSync(target));
  const made = await refused(csi.create(v.name));
  t.equal(made.code, status.NOT_FOUND, `a volume is made once: ${made.message}`);
  t.notOk(existsSync(live(a, v.name)));
  // A link in its place is no directory of the pool.
  const elsewhere = path.join(csi.folder, 'elsewhere');
  mkdirSync(elsewhere);
  execFileSync('ln', ['-s', elsewhere, live(a, v.name)]);
  t.equal((await refused(publish(a, v, target))).code, status.FAILED_PRECONDITION, 'nor through a link');
});

t.test(
  'G4, D38: fifty publishes and three restarts of csi-node are one mount; one unpublish ends it',
  async (t) => {
    const v = await volume();
    const target = a.target(UID(1), v.name);
    for (let i = 0; i < 50; i++) await publish(a, v, target);
    t.equal(mountsAt(target), 1);
    for (const signal of ['SIGTERM', 'SIGKILL', 'SIGKILL'] as const) {
      await a.endCsi(signal);
      await a.startCsi();
      await publish(a, v, target);
      t.equal(mountsAt(target), 1);
    }
    await Promise.all(Array.from({ length: 10 }, () => publish(a, v, target)));
    t.equal(mountsAt(target), 1, 'ten at once');
    await unpublish(a, v.id, target);
    t.equal(mountsAt(target), 0);
    t.notOk(existsSync(target));
  },
);

t.test('G4: layers that were stacked before are all taken away', async (t) => {
  const v = await volume();
  const target = a.target(UID(1), v.name);
  await publish(a, v, target);
  for (let i = 0; i < 3; i++) execFileSync('mount', ['--bind', live(a, v.name), target]);
  t.equal(mountsAt(target), 4);
  await unpublish(a, v.id, target);
  t.equal(mountsAt(target), 0);
});

t.test(
  'G5, D37: unpublish of what is not there, not mounted, or of before a restart of the machine',
  async (t) => {
    const v = await volume();
    const target = a.target(UID(1), v.name);
    await unpublish(a, v.id, target);
    await publish(a, v, target);
    await unpublish(a, v.id, target);
    await unpublish(a, v.id, target);
    // The machine restarted: the record and the empty directory are there, the mount is not.
    await publish(a, v, target);
    await a.endCsi('SIGKILL');
    execFileSync('umount', [target]);
    const records = path.join(a.kubelet, 'plugins/state/publishes');
    for (const name of readdirSync(records)) {
      const file = path.join(records, name);
      writeFileSync(file, readFileSync(file, 'utf8').replace(/"bootId":"[^"]*"/, '"bootId":"another"'));
    }
    await a.startCsi();
    t.strictSame(readdirSync(records), [], 'records of another boot mean nothing');
    await unpublish(a, v.id, target);
    t.notOk(existsSync(target), 'the directory is gone');
    // The volume was deleted, and its directory with it.
    await publish(a, v, target);
    rmSync(live(a, v.name), { recursive: true, force: true });
    await unpublish(a, v.id, target);
    t.equal(mountsAt(target), 0, 'a mount of a directory that is gone comes off');
    // Something was written below the mount point: it is not volume data and not ours to delete.
    mkdirSync(target);
    writeFileSync(path.join(target, 'strange'), 'x');
    t.equal((await refused(unpublish(a, v.id, target))).code, status.FAILED_PRECONDITION);
    t.ok(existsSync(path.join(target, 'strange')));
    rmSync(target, { recursive: true });
  },
);

t.test('a mount whose tree went to the backups under an ending pod comes off', async (t) => {
  const v = await volume();
  const target = a.target(UID(1), v.name);
  await publish(a, v, target);
  // As an agent does on a node that was replaced: the mount follows its directory.
  const backups = path.join(a.agent.pool, '.simple-volume-backups/ns', v.name);
  mkdirSync(backups, { recursive: true });
  renameSync(live(a, v.name), path.join(backups, '2026-12-03T07-33-52Z'));
  mkdirSync(live(a, v.name));
  await unpublish(a, v.id, target);
  t.equal(mountsAt(target), 0);
  t.notOk(existsSync(target));
  // Another volume's is not this one's.
  const other = path.join(a.agent.pool, '.simple-volume-backups/ns/pvc-other/2026-12-03T07-33-52Z');
  mkdirSync(other, { recursive: true });
  mkdirSync(target, { recursive: true });
  execFileSync('mount', ['--bind', other, target]);
  t.equal((await refused(unpublish(a, v.id, target))).code, status.FAILED_PRECONDITION);
  execFileSync('umount', [target]);
});

t.test('G5: what somebody else mounted at a target is neither covered nor taken away', async (t) => {
  const v = await volume();
  const target = a.target(UID(1), v.name);
  mkdirSync(target);
  execFileSync('mount', ['-t', 'tmpfs', 'other', target]);
  t.equal((await refused(publish(a, v, target))).code, status.FAILED_PRECONDITION);
  t.equal((await refused(unpublish(a, v.id, target))).code, status.FAILED_PRECONDITION);
  t.equal(mountsAt(target), 1);
  execFileSync('umount', [target]);
});

t.test('G6: read-only and mount options hold, as the kernel says and as a writer finds', async (t) => {
  const v = await volume();
  const target = a.target(UID(1), v.name);
  await publish(a, v, target, { readonly: true, flags: ['noexec', 'nosuid', 'noatime'] });
  const options = mounts().find((one) => one.point === target)?.options ?? [];
  for (const option of ['ro', 'noexec', 'nosuid', 'noatime']) t.ok(options.includes(option), option);
  t.throws(() => writeFileSync(path.join(target, 'file'), 'x'), { code: 'EROFS' });
  const other = a.target(UID(2), v.name);
  await publish(a, v, other);
  writeFileSync(path.join(other, 'file'), 'x');
  t.equal(readFileSync(path.join(target, 'file'), 'utf8'), 'x', 'one pod reads what another one writes');
  const no = await refused(publish(a, v, target));
  t.equal(no.code, status.ALREADY_EXISTS, no.message);
  // A crash between the mount and its options.
  execFileSync('mount', ['-o', 'remount,bind,rw,exec,suid', target]);
  await publish(a, v, target, { readonly: true, flags: ['noexec', 'nosuid', 'noatime'] });
  t.throws(() => writeFileSync(path.join(target, 'file'), 'x'), { code: 'EROFS' }, 'is finished');
  t.equal(mountsAt(target), 1);
  const bad = await refused(publish(a, v, a.target(UID(3), v.name), { flags: ['data=journal'] }));
  t.equal(bad.code, status.INVALID_ARGUMENT, bad.message);
  await unpublish(a, v.id, target);
  await unpublish(a, v.id, other);
});

t.test(
  'G7: block, several nodes and volumes that do not exist are refused with the right code',
  async (t) => {
    const v = await volume();
    const block = { block: {}, access_mode: { mode: 'SINGLE_NODE_WRITER' } };
    const target = a.target(UID(1), v.name);
    const wrong = [
      block,
      ...['MULTI_NODE_MULTI_WRITER', 'MULTI_NODE_READER_ONLY', 'UNKNOWN'].map((m) => capability(m)),
    ];
    for (const one of wrong) {
      const made = await refused(csi.create('other', { volume_capabilities: [one] }));
      t.equal(made.code, status.INVALID_ARGUMENT, made.message);
      const mounted = await refused(
        a.call('NodePublishVolume', { ...request(v, target), volume_capability: one }),
      );
      t.equal(mounted.code, status.INVALID_ARGUMENT);
      const said = await csi.call('ValidateVolumeCapabilities', {
        volume_id: v.id,
        volume_capabilities: [one],
      });
      t.equal(said.confirmed, null, String(said.message));
    }
    const yes = await csi.call('ValidateVolumeCapabilities', {
      volume_id: v.id,
      volume_capabilities: [capability()],
      volume_context: v.context,
    });
    t.ok(yes.confirmed);
    const unknown = await refused(
      csi.call('ValidateVolumeCapabilities', { volume_id: 'ns/none', volume_capabilities: [capability()] }),
    );
    t.equal(unknown.code, status.NOT_FOUND);
    t.notOk(existsSync(live(a, 'other')));
  },
);

t.test('G8: DeleteVolume removes the data on every node, or says which is missing', async (t) => {
  const v = await volume();
  writeFileSync(path.join(live(a, v.name), 'file'), 'x');
  mkdirSync(path.join(live(b, v.name)), { recursive: true });
  rmSync(live(b, v.name), { recursive: true });
  await b.agent.call('POST', '/replication/volume/create', { namespace: 'ns', volume: v.name, bytes: 1 });
  const target = a.target(UID(1), v.name);
  await publish(a, v, target);
  const used = await refused(csi.call('DeleteVolume', { volume_id: v.id }));
  t.equal(used.code, status.FAILED_PRECONDITION, used.message);
  t.ok(existsSync(live(a, v.name)), 'a volume in use stays');
  await unpublish(a, v.id, target);
  csi.setAgents(['b']);
  const silent = await refused(csi.call('DeleteVolume', { volume_id: v.id }));
  t.equal(silent.code, status.UNAVAILABLE);
  t.match(silent.message, /b \(/, silent.message);
  t.notOk(existsSync(live(a, v.name)), 'what can go is gone');
  csi.setAgents();
  await csi.call('DeleteVolume', { volume_id: v.id });
  t.notOk(existsSync(live(b, v.name)));
  await csi.call('DeleteVolume', { volume_id: v.id });
  csi.records.delete(v.id);
  // A node that is gone for good is not waited for.
  const other = await volume();
  csi.setAgents(['b']);
  csi.labels.delete('b');
  await csi.call('DeleteVolume', { volume_id: other.id });
  csi.labels.set('b', { ready: true });
  csi.setAgents();
});

t.test('D40: no id leads out of the pool, and no name is cut to another one', async (t) => {
  const keep = await volume();
  writeFileSync(path.join(live(a, keep.name), 'keep'), 'x');
  for (const id of [
    '../x',
    '/etc',
    'a/../../b',
    'ns/..',
    'ns/.',
    'ns/../ns',
    `ns/${keep.name}/`,
    'ns',
    'x'.repeat(4000),
  ]) {
    await csi.call('DeleteVolume', { volume_id: id });
    const no = await refused(publish(a, { id, context: keep.context }, a.target(UID(1), keep.name)));
    t.ok([status.NOT_FOUND, status.INVALID_ARGUMENT].includes(no.code), `${id.slice(0, 20)}: ${no.code}`);
  }
  t.ok(existsSync(path.join(live(a, keep.name), 'keep')));
  t.ok(existsSync('/etc/passwd'));
  const long = 'n'.repeat(128);
  const made = await Promise.all([`${long}A`, `${long}B`, '../x', 'UPPER'].map((name) => csi.create(name)));
  t.equal(new Set(made.map(({ id }) => id)).size, 4, 'four volumes');
  for (const { id } of made) {
    t.match(id, /^ns\/v-[0-9a-f]{40}$/);
    await csi.call('DeleteVolume', { volume_id: id });
  }
  t.strictSame(
    readdirSync(path.join(a.agent.pool, 'ns')).filter((name) => name.startsWith('v-')),
    [],
    'each delete removed its own directory',
  );
  for (const target of ['relative', `${a.kubelet}/../x`, '/tmp/x', `${a.kubelet}/pods/..`]) {
    const no = await refused(publish(a, keep, target));
    t.equal(no.code, status.INVALID_ARGUMENT, no.message);
  }
});

t.test('G9: a volume grows, everywhere it is known, and never shrinks', async (t) => {
  const v = await volume();
  const grow = (bytes: number, more = {}): Promise<Record<string, unknown>> =>
    csi.call('ControllerExpandVolume', {
      volume_id: v.id,
      capacity_range: { required_bytes: String(bytes), ...more },
    });
  t.equal((await grow(2 ** 21)).capacity_bytes, String(2 ** 21));
  t.equal((await grow(2 ** 20)).capacity_bytes, String(2 ** 21), 'a smaller one changes nothing');
  t.equal((await refused(grow(1, { limit_bytes: '1000' }))).code, status.OUT_OF_RANGE);
  t.equal((await refused(grow(2 ** 52))).code, status.OUT_OF_RANGE, 'more than there is');
  const target = a.target(UID(1), v.name);
  await publish(a, v, target);
  const grown = await a.call('NodeExpandVolume', {
    volume_id: v.id,
    volume_path: target,
    capacity_range: { required_bytes: String(2 ** 21) },
  });
  t.equal(grown.capacity_bytes, String(2 ** 21));
  await a.agent.stop();
  await a.agent.start();
  t.equal((await grow(1)).capacity_bytes, String(2 ** 21), 'also after a restart of the agent');
  await unpublish(a, v.id, target);
});

t.test(
  'G10, G14: the topology is the pool, and a volume is made where the scheduler wants its pod',
  async (t) => {
    const key = `simple-volume.shipstuff.io/pool.${POOL}`;
    t.strictSame(await a.call('NodeGetInfo'), {
      node_id: 'a',
      max_volumes_per_node: '0',
      accessible_topology: { segments: { [key]: 'true' } },
    });
    const info = await waitFor('registration', () => a.register('GetInfo'));
    t.strictSame(info, {
      type: 'CSIPlugin',
      name: 'simple-volume.csi.shipstuff.io',
      endpoint: a.endpoint,
      supported_versions: ['1.0.0'],
    });
    await a.register('NotifyRegistrationStatus', { plugin_registered: true, error: '' });
    csi.selected = 'b';
    const made = (await csi.call('CreateVolume', createRequest('pvc-b'))) as {
      volume: { volume_context: object; accessible_topology: unknown };
    };
    t.strictSame(made.volume.volume_context, { pool: POOL, node: 'b' });
    t.strictSame(
      made.volume.accessible_topology,
      [{ segments: { [key]: 'true' } }],
      'not pinned to the node',
    );
    t.ok(existsSync(live(b, 'pvc-b')));
    t.notOk(existsSync(live(a, 'pvc-b')));
    csi.selected = 'a';
    const again = await csi.create('pvc-b');
    t.equal(again.context.node, 'b', 'a repeat finds what the first one made, whatever was decided since');
    csi.selected = 'nowhere';
    const no = await refused(csi.create('pvc-nowhere'));
    t.equal(no.code, status.RESOURCE_EXHAUSTED, `the scheduler chooses anew: ${no.message}`);
    csi.selected = 'a';
    const pool = await refused(
      csi.create('pvc-pool', { parameters: { pool: 'fast', 'csi.storage.k8s.io/pvc/namespace': 'ns' } }),
    );
    t.equal(pool.code, status.INVALID_ARGUMENT, pool.message);
    const typo = await refused(
      csi.create('pvc-typo', { parameters: { storagePool: 'x', 'csi.storage.k8s.io/pvc/namespace': 'ns' } }),
    );
    t.match(typo.message, /storagePool/);
    const far = await refused(
      csi.create('pvc-far', { accessibility_requirements: { requisite: [{ segments: { other: 'x' } }] } }),
    );
    t.equal(far.code, status.RESOURCE_EXHAUSTED, far.message);
    await csi.call('DeleteVolume', { volume_id: 'ns/pvc-b' });
  },
);

t.test('G11: content sources, limits, another size for the same name, no size', async (t) => {
  const source = { snapshot: { snapshot_id: 's' } };
  t.equal(
    (await refused(csi.create('g11', { volume_content_source: source }))).code,
    status.INVALID_ARGUMENT,
  );
  const range = { required_bytes: '2000', limit_bytes: '1000' };
  t.equal((await refused(csi.create('g11', { capacity_range: range }))).code, status.OUT_OF_RANGE);
  const much = await refused(csi.create('g11', { capacity_range: { required_bytes: String(2 ** 52) } }));
  t.equal(much.code, status.RESOURCE_EXHAUSTED, much.message);
  t.notOk(existsSync(live(a, 'g11')), 'nothing was made');
  const made = (await csi.call('CreateVolume', createRequest('g11', { capacity_range: null }))) as {
    volume: { capacity_bytes: string };
  };
  t.equal(made.volume.capacity_bytes, String(2 ** 30), 'a size is told also when none was asked for');
  const other = await refused(csi.create('g11', { capacity_range: { required_bytes: String(2 ** 31) } }));
  t.equal(other.code, status.ALREADY_EXISTS, other.message);
  const both = await Promise.all(Array.from({ length: 5 }, () => csi.create('g11-at-once')));
  t.equal(new Set(both.map(({ context }) => context.node)).size, 1, 'five at once are one volume');
  const capacity = await csi.call('GetCapacity', { parameters: { pool: POOL } });
  t.ok(Number(capacity.available_capacity) > 2 ** 20, `capacity ${capacity.available_capacity}`);
  for (const id of ['ns/g11', 'ns/g11-at-once']) await csi.call('DeleteVolume', { volume_id: id });
});

t.test('G12: statistics and health are of what is mounted; the driver claims what it does', async (t) => {
  const v = await volume();
  const target = a.target(UID(1), v.name);
  await publish(a, v, target);
  const stats = (await a.call('NodeGetVolumeStats', { volume_id: v.id, volume_path: target })) as {
    usage: { unit: string; total: string; available: string; used: string }[];
  };
  t.strictSame(
    stats.usage.map(({ unit }) => unit),
    ['BYTES', 'INODES'],
  );
  t.ok(stats.usage.every(({ total }) => Number(total) > 0));
  type Health = { volume_health: { health_statuses: { reason: string }[] } };
  const health = async (): Promise<string[]> =>
    (
      (await a.call('NodeGetVolumeHealth', { volume_id: v.id })) as unknown as Health
    ).volume_health.health_statuses.map(({ reason }) => reason);
  t.strictSame(await health(), []);
  execFileSync('umount', [target]);
  t.strictSame(await health(), ['NotMounted']);
  t.equal((await refused(a.call('NodeGetVolumeStats', { volume_id: v.id, volume_path: target }))).code, 5);
  await publish(a, v, target);
  t.equal(mountsAt(target), 1, 'published once more');
  await a.agent.end('SIGKILL');
  await waitFor('the agent is missed', async () => (await health()).includes('AgentSilent'));
  await publish(a, v, target);
  t.pass('kubelet is told that a mounted volume is mounted, also while the agent is away');
  const other = await refused(publish(a, v, a.target(UID(2), v.name)));
  t.equal(other.code, status.UNAVAILABLE, `and nothing new is mounted: ${other.message}`);
  await unpublish(a, v.id, target);
  t.equal(mountsAt(target), 0, 'what is mounted can be taken away');
  await a.agent.start();
});

t.test(
  'G13: a new volume can be written by a pod of any user without fsGroup, and not by the others of the machine',
  async (t) => {
    const v = await volume();
    const target = a.target(UID(1), v.name);
    await publish(a, v, target);
    t.equal(statSync(live(a, v.name)).mode & 0o7777, 0o777);
    t.equal(statSync(path.dirname(live(a, v.name))).mode & 0o7777, 0o700);
    const write = (at: string): number | null =>
      spawnSync('sh', ['-c', 'cd "$0" && echo x > by-user', at], { uid: 1000, gid: 1000, cwd: '/' }).status;
    // The way to the target is kubelet's and the runtime's own affair; for the container it is the root of a mount.
    const inside = '/mnt';
    execFileSync('mount', ['--bind', target, inside]);
    t.equal(write(inside), 0, 'the container writes');
    t.equal(statSync(path.join(inside, 'by-user')).uid, 1000);
    execFileSync('umount', [inside]);
    t.not(write(live(a, v.name)), 0, 'another user of the machine does not get there');
    await unpublish(a, v.id, target);
  },
);

t.test('D37: records that were lost are found in the mount table', async (t) => {
  const v = await volume();
  const target = a.target(UID(1), v.name);
  await publish(a, v, target);
  await a.endCsi('SIGKILL');
  rmSync(path.join(a.kubelet, 'plugins/state'), { recursive: true });
  await a.startCsi();
  const used = await waitFor('the agent hears of the writer', async () => {
    const no = await refused(csi.call('DeleteVolume', { volume_id: v.id }));
    return /published/.test(no.message) ? no : null;
  });
  t.equal(used.code, status.FAILED_PRECONDITION, used.message);
  await publish(a, v, target);
  t.equal(mountsAt(target), 1);
  await unpublish(a, v.id, target);
  await csi.call('DeleteVolume', { volume_id: v.id });
});
