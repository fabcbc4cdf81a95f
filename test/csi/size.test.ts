/** Sizes on a real btrfs: a full volume is an error for its own pod and for nobody else, wherever the volume goes. */
import { execFileSync } from 'node:child_process';
import {
  closeSync,
  existsSync,
  fsyncSync,
  mkdirSync,
  mkdtempSync,
  openSync,
  readdirSync,
  readFileSync,
  renameSync,
  rmSync,
  statSync,
  truncateSync,
  writeFileSync,
  writeSync,
} from 'node:fs';
import path from 'node:path';
import t from 'tap';
import type { ReplicaStatus, SizeStatus, SourceStatus, VolumeName } from '../../lib/core/parts.ts';
import { waitFor } from '../../lib/local/cluster.ts';
import { native } from '../../lib/native/load.ts';
import { programPath } from '../packages.ts';
import { capability, inOwnMounts, noMounts, TestCsi, type TestNode } from './support.ts';

const mkfs = programPath('mkfs.btrfs');
const why = noMounts() || (mkfs === null && 'mkfs.btrfs is not installed (Debian package btrfs-progs)');
if (!why) await inOwnMounts(import.meta.filename);
t.setTimeout(170_000);
if (why) {
  t.plan(0, why);
  process.exit(0);
}

const MiB = 2 ** 20;
// Not below the gate's own folder: a socket's path has 107 bytes at most.
const home = mkdtempSync('/tmp/sv-');
t.teardown(() => {
  process.chdir('/');
  for (const one of ['btrfs', 'tmpfs'])
    try {
      execFileSync('umount', ['-l', path.join(home, one)], { stdio: 'ignore' });
    } catch {
      // was not mounted
    }
  rmSync(home, { recursive: true, force: true });
});
/** Mounted in this process's own namespace: gone with it, whatever happens. */
function disk(type: 'btrfs' | 'tmpfs'): string {
  const at = path.join(home, type);
  mkdirSync(at);
  if (type === 'tmpfs') {
    execFileSync('mount', ['-t', 'tmpfs', '-o', 'size=200m', 'tmpfs', at]);
    return at;
  }
  const image = path.join(home, 'image');
  closeSync(openSync(image, 'w'));
  truncateSync(image, 2048 * MiB);
  execFileSync(mkfs as string, ['-q', image], { stdio: 'pipe' });
  execFileSync('mount', ['-o', 'loop', image, at]);
  rmSync(image); // the loop device has it
  return at;
}

const piece = Buffer.alloc(MiB, 'simple-volume ');
/** Writes so many MiB; the code of what ended it early, null: nothing. */
function fill(file: string, mebibytes: number): string | null {
  let fd: number | null = null;
  try {
    fd = openSync(file, 'w');
    for (let i = 0; i < mebibytes; i++) for (let at = 0; at < MiB; ) at += writeSync(fd, piece, at);
    fsyncSync(fd);
    return null;
  } catch (error) {
    const { code, errno } = error as NodeJS.ErrnoException;
    return errno === -122 ? 'EDQUOT' : (code ?? 'unknown'); // Node has no name for it
  } finally {
    if (fd !== null) closeSync(fd);
  }
}

const UID = (n: number): string => `00000000-0000-4000-8000-${String(n).padStart(12, '0')}`;
const nameOf = (volume: string): VolumeName => ({ namespace: 'ns', volume });
const live = (node: TestNode, volume: string): string => path.join(node.agent.pool, 'ns', volume);
const isSubvolume = (at: string): boolean => statSync(at).ino === 256;

interface Made {
  id: string;
  name: string;
  context: Record<string, string>;
}

async function make(csi: TestCsi, name: string, mebibytes: number): Promise<Made> {
  csi.selected = 'a';
  const { id, context } = await csi.create(name, {
    capacity_range: { required_bytes: `${mebibytes * MiB}` },
  });
  return { id, name, context };
}

/** The node is the active one, the others get copies. */
async function activate(csi: TestCsi, v: Made, node: string, epoch: number, bytes?: number): Promise<void> {
  const { agent } = csi.node(node);
  const others = [...csi.nodes.values()].filter((one) => one.name !== node);
  csi.records.set(v.id, {
    ...nameOf(v.name),
    epoch,
    activeNode: node,
    fencing: 'none',
    promotable: { version: epoch, nodes: [], adding: [] },
  });
  await agent.call('POST', '/replication/watch/start', {
    ...nameOf(v.name),
    epoch,
    ...(bytes === undefined ? {} : { bytes }),
    source: { url: agent.url, webdavUrl: agent.webdavUrl },
    targets: others.map((one) => ({ url: one.agent.url, token: one.agent.token, node: one.name })),
    debounce: '100ms',
  });
}

async function publish(node: TestNode, v: Made, uid: number): Promise<string> {
  const target = node.target(UID(uid), v.name);
  await node.call('NodePublishVolume', {
    volume_id: v.id,
    target_path: target,
    volume_capability: capability(),
    volume_context: v.context,
  });
  return target;
}
const unpublish = (node: TestNode, v: Made, target: string): Promise<unknown> =>
  node.call('NodeUnpublishVolume', { volume_id: v.id, target_path: target });

const status = async (node: TestNode, v: Made): Promise<SourceStatus | ReplicaStatus> =>
  (await node.agent.status(nameOf(v.name))) as SourceStatus | ReplicaStatus;
const sizeOf = async (node: TestNode, v: Made): Promise<SizeStatus | undefined> =>
  ((await status(node, v)) as SourceStatus).size;
const enforced = (node: TestNode, v: Made, bytes: number): Promise<SizeStatus | undefined> =>
  waitFor(`${v.name} is held to its size on ${node.name}`, async () => {
    const size = await sizeOf(node, v);
    return size?.enforced === true && size.bytes === bytes && size;
  });
/** All copies hold what the active node has now. */
const settle = (node: TestNode, v: Made): Promise<unknown> =>
  node.agent.call('POST', '/replication/prepare', {
    ...nameOf(v.name),
    confirm: 'all',
    timeout: '60s',
  });

const temporary = process.env.TMPDIR;
const within = async (
  folder: string,
  flags: readonly string[],
  names: readonly string[],
): Promise<TestCsi> => {
  process.env.TMPDIR = folder;
  try {
    return await TestCsi.start(names, { flags });
  } finally {
    if (temporary === undefined) delete process.env.TMPDIR;
    else process.env.TMPDIR = temporary;
  }
};

const btrfs = disk('btrfs');
const csi = await within(btrfs, [], ['a', 'b']);
const [a, b] = [csi.node('a'), csi.node('b')];

t.test('a volume that is full is an error for its own pod alone, and goes on being copied', async (t) => {
  const v = await make(csi, 'pvc-full', 20);
  const beside = await make(csi, 'pvc-beside', 200);
  t.ok(isSubvolume(live(a, v.name)));
  t.equal(statSync(live(a, v.name)).mode & 0o7777, 0o777);
  await activate(csi, v, 'a', 1);
  await activate(csi, beside, 'a', 1);
  t.match(await sizeOf(a, v), { bytes: 20 * MiB, enforced: null }, 'no pod has it: no limit yet');
  const [mine, theirs] = [await publish(a, v, 1), await publish(a, beside, 2)];
  t.equal(fill(path.join(mine, 'log'), 40), 'EDQUOT', 'from the first byte on');
  await enforced(a, v, 20 * MiB);
  t.equal(fill(path.join(theirs, 'log'), 60), null, 'the neighbour has its own size');

  await settle(a, v);
  t.ok(isSubvolume(live(b, v.name)), 'the copy is such a tree too');
  t.ok(
    readFileSync(path.join(live(b, v.name), 'log')).equals(readFileSync(path.join(mine, 'log'))),
    'the copy holds what the full volume holds',
  );
  rmSync(path.join(mine, 'log'));
  await settle(a, v);
  t.strictSame(readdirSync(live(b, v.name)), [], 'and what was removed to make room');
  t.equal(fill(path.join(mine, 'again'), 10), null, 'there is room again');

  const metrics = await (
    await fetch(`${a.agent.url}/metrics`, { headers: { authorization: `Bearer ${a.agent.token}` } })
  ).text();
  t.match(metrics, /simple_volume_volume_size_bytes\{[^}]*pvc-full[^}]*\} 20971520/);
  t.match(metrics, /simple_volume_volume_size_enforced\{[^}]*pvc-full[^}]*\} 1/);
  const { usage } = (await a.call('NodeGetVolumeStats', { volume_id: v.id, volume_path: mine })) as {
    usage: { unit: string; total: string; used: string; available: string }[];
  };
  const bytes = usage.find(({ unit }) => unit === 'BYTES');
  t.equal(bytes?.total, `${20 * MiB}`, 'statistics are those of the volume');
  t.ok(Number(bytes?.used) + Number(bytes?.available) <= 20 * MiB);
  await unpublish(a, v, mine);
  await unpublish(a, beside, theirs);
});

t.test('a volume that grew has its room at once', async (t) => {
  const v = await make(csi, 'pvc-grows', 10);
  await activate(csi, v, 'a', 1);
  const target = await publish(a, v, 1);
  t.equal(fill(path.join(target, 'a'), 20), 'EDQUOT');
  const grow = (mebibytes: number): Promise<unknown> =>
    csi.call('ControllerExpandVolume', {
      volume_id: v.id,
      capacity_range: { required_bytes: `${mebibytes * MiB}` },
    });
  await grow(40);
  await a.call('NodeExpandVolume', {
    volume_id: v.id,
    volume_path: target,
    capacity_range: { required_bytes: `${40 * MiB}` },
  });
  t.equal(fill(path.join(target, 'b'), 20), null, 'when the call has returned');
  t.match(await sizeOf(a, v), { bytes: 40 * MiB, enforced: true, reason: '' });
  t.equal(fill(path.join(target, 'c'), 40), 'EDQUOT');
  // Without kubelet's call csi-node hears of it with its next report.
  await grow(80);
  await enforced(a, v, 80 * MiB);
  t.equal(fill(path.join(target, 'c'), 20), null);
  // kill -9 of csi-node: the limit stands, and is told of again.
  await a.endCsi('SIGKILL');
  t.equal(fill(path.join(target, 'd'), 80), 'EDQUOT');
  await a.startCsi();
  await enforced(a, v, 80 * MiB);
  await unpublish(a, v, target);
});

t.test('the limit goes where the volume goes; a copy has none', async (t) => {
  const v = await make(csi, 'pvc-moves', 20);
  await activate(csi, v, 'a', 1);
  const first = await publish(a, v, 1);
  t.equal(fill(path.join(first, 'before'), 15), null);
  await settle(a, v);
  await unpublish(a, v, first);
  await waitFor('no limit is told of', async () => (await sizeOf(a, v))?.enforced === null);

  await activate(csi, v, 'b', 2, 20 * MiB);
  const second = await publish(b, v, 2);
  t.equal(fill(path.join(second, 'after'), 15), 'EDQUOT', 'what was copied counts, from the first byte on');
  t.equal(readFileSync(path.join(second, 'before')).length, 15 * MiB);
  await enforced(b, v, 20 * MiB);
  t.equal((await status(a, v)).role, 'replica');
  await settle(b, v);
  t.ok(
    readFileSync(path.join(live(a, v.name), 'after')).equals(readFileSync(path.join(second, 'after'))),
    'the old node follows',
  );
  t.ok(isSubvolume(live(a, v.name)), 'with a tree of the same kind');
  t.equal(readdirSync(path.join(a.agent.pool, '.simple-volume-backups/ns', v.name)).length, 1);
  t.equal(fill(path.join(live(a, v.name), 'agent'), 30), null, 'to which the agent may write what it must');
  rmSync(path.join(live(a, v.name), 'agent'));

  // A limit below what is there stops writing and takes nothing away.
  rmSync(path.join(second, 'after'));
  await settle(b, v);
  await unpublish(b, v, second);
  await activate(csi, v, 'a', 3, 20 * MiB);
  await settle(a, v);
  t.equal(fill(path.join(live(a, v.name), 'more'), 20), null);
  const third = await publish(a, v, 3);
  t.equal(fill(path.join(third, 'again'), 2), 'EDQUOT');
  t.equal(readFileSync(path.join(third, 'more')).length, 20 * MiB);

  // What a crash leaves is no limit for a copy: nothing is published, nothing recorded.
  await a.endCsi('SIGKILL');
  execFileSync('umount', [third]);
  rmSync(path.join(a.kubelet, 'plugins/state/publishes'), { recursive: true });
  await a.startCsi();
  await waitFor(
    'the limit of before is lifted',
    async () => fill(path.join(live(a, v.name), 'x'), 5) === null,
  );

  csi.records.delete(v.id);
  await csi.call('DeleteVolume', { volume_id: v.id });
  for (const node of [a, b]) {
    t.notOk(existsSync(live(node, v.name)));
    await waitFor(
      'the trash is emptied',
      async () => readdirSync(path.join(node.agent.pool, '.simple-volume-trash')).length === 0,
    );
  }
});

t.test('A12: another subvolume in the place of a tree is not taken for it', async (t) => {
  const v = await make(csi, 'pvc-other', 10);
  await activate(csi, v, 'a', 1);
  writeFileSync(path.join(live(a, v.name), 'file'), 'data');
  await settle(a, v);
  await a.agent.stop();
  renameSync(live(a, v.name), path.join(btrfs, 'elsewhere'));
  await native.makeTree(Buffer.from(live(a, v.name)), 0o777);
  await a.agent.start();
  await waitFor('it is held', async () =>
    (await status(a, v)).conditions.some(({ type }) => type === 'RootChanged'),
  );
  t.equal(readFileSync(path.join(live(b, v.name), 'file'), 'utf8'), 'data');
});

t.test('where it cannot be enforced, or is off, the volume is there and says so', async (t) => {
  const off = await within(btrfs, ['--size-enforcement', 'off'], ['a']);
  const plain = await make(off, 'pvc-off', 5);
  t.notOk(isSubvolume(live(off.node('a'), plain.name)));
  await activate(off, plain, 'a', 1);
  const free = await publish(off.node('a'), plain, 1);
  t.equal(fill(path.join(free, 'a'), 10), null);
  t.match(await sizeOf(off.node('a'), plain), { bytes: 5 * MiB, enforced: false, reason: /is off/ });
  await unpublish(off.node('a'), plain, free);

  const other = await within(disk('tmpfs'), [], ['a']);
  const v = await make(other, 'pvc-none', 5);
  await activate(other, v, 'a', 1);
  const target = await publish(other.node('a'), v, 1);
  t.equal(fill(path.join(target, 'a'), 10), null);
  const said = await waitFor('it says why not', async () => {
    const size = await sizeOf(other.node('a'), v);
    return size?.enforced === false && size;
  });
  t.match(said, { bytes: 5 * MiB, reason: /no quotas that can be used/ });
  t.match(other.node('a').log, /the size is not enforced/);
  await unpublish(other.node('a'), v, target);
  // A tree of before, or one made by hand.
  const hand = await make(csi, 'pvc-hand', 5);
  rmSync(live(a, hand.name), { recursive: true });
  mkdirSync(live(a, hand.name));
  writeFileSync(path.join(live(a, hand.name), 'old'), 'data');
  await activate(csi, hand, 'a', 1);
  const by = await publish(a, hand, 1);
  const told = await waitFor('it says why not', async () => {
    const size = await sizeOf(a, hand);
    return size?.enforced === false && size;
  });
  t.match(told, { reason: /plain directory/ });
  t.equal(readFileSync(path.join(by, 'old'), 'utf8'), 'data');
  await unpublish(a, hand, by);
});
