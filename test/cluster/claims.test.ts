/** What people try by hand with a new storage class, each with its own claims on one cluster. */
import { createHash, randomBytes } from 'node:crypto';
import { existsSync, mkdirSync, readdirSync, readFileSync, statSync, writeFileSync } from 'node:fs';
import path from 'node:path';
import { setTimeout as sleep } from 'node:timers/promises';
import t, { type Test } from 'tap';
import { POOL_FOLDERS } from '../../lib/core/pool-folders.ts';
import { run } from '../kube/harness/program.ts';
import { kubeProgram } from '../kube/harness/programs.ts';
import { programPath } from '../packages.ts';
import {
  CHART,
  Cluster,
  type KubeObject,
  noCluster,
  type RunningPod,
  SYSTEM,
  type VolumeRef,
} from './harness/cluster.ts';
import { applicationImage, PRODUCT_IMAGE } from './harness/images.ts';
import {
  type ClaimOptions,
  claim,
  compareLines,
  deployment,
  lines,
  pod,
  statefulSet,
} from './harness/objects.ts';

const DRIVER = 'simple-volume.csi.shipstuff.io';
const IDLE = 'trap "exit 0" TERM; while true; do sleep 1; done';
const POSIX_IMAGE = 'docker.io/library/posix:test';
/** This node's pool is on btrfs, where there is one. */
const BTRFS_NODE = 'n3';
const BTRFS =
  readFileSync('/proc/filesystems', 'utf8').includes('\tbtrfs\n') &&
  existsSync('/dev/loop-control') &&
  programPath('mkfs.btrfs') !== null;
/** Two seconds are the aim (see the benchmark); tests run on busy machines. */
const BIND_LIMIT_S = 20;

const secondsSince = (start: number): number => (performance.now() - start) / 1000;
const say = (seconds: number): string => `${seconds.toFixed(1)} s`;
const sha256 = (data: Buffer | string): string => createHash('sha256').update(data).digest('hex');
const median = (list: number[]): number => [...list].sort((a, b) => a - b)[list.length >> 1] as number;
const conditionOf = (object: KubeObject, type: string): KubeObject =>
  object?.status?.conditions?.find((one: KubeObject) => one.type === type);

t.test('claims on a real cluster', { skip: noCluster(), timeout: 1_440_000 }, async (t) => {
  const cluster = await Cluster.start({
    say: (line) => t.comment(line),
    btrfs: BTRFS ? [BTRFS_NODE] : [],
    valueFiles: [path.join(CHART, 'examples/values-demo.yaml')],
  });
  t.teardown(() => cluster.stop());

  const posix = path.join(cluster.folder, 'posix');
  await run('cc', ['-O2', '-static', '-o', posix, path.join(import.meta.dirname, 'programs/posix.c')]);
  const posixTar = path.join(cluster.folder, 'posix.tar');
  applicationImage(POSIX_IMAGE, posixTar, [posix]);
  await cluster.loadImage(posixTar);

  /** A scenario in a namespace of its own, which is not waited for when it is over. One that fails spoils no other. */
  async function scenario(
    ns: string,
    name: string,
    body: (t: Test, ns: string) => Promise<void>,
    skip: string | false = false,
  ): Promise<void> {
    const began = performance.now();
    const result = await t.test(name, { skip }, async (t) => {
      t.teardown(async () => {
        for (const node of cluster.nodes) await cluster.uncordon(node.name);
        await cluster.kubectl(['delete', 'namespace', ns, '--wait=false', '--ignore-not-found']);
      });
      await cluster.kubectl(['create', 'namespace', ns]);
      await body(t, ns);
    });
    t.comment(`${ns}: ${say(secondsSince(began))}`);
    if (result?.ok === false) t.comment(await cluster.dump(name));
  }

  const apply = (ns: string, ...objects: object[]): Promise<void> =>
    cluster.apply(
      ...objects.map((object) => {
        const { metadata, ...rest } = object as { metadata: object };
        return { ...rest, metadata: { ...metadata, namespace: ns } };
      }),
    );
  const running = (ns: string, name: string, limitMs = 60_000): Promise<RunningPod> =>
    cluster.podRunning(`app=${name}`, { namespace: ns, limitMs });
  const gone = (ns: string, kind: string, name: string, limitMs = 60_000): Promise<unknown> =>
    cluster.waitFor(
      `${kind} ${name} is gone`,
      async () => (await cluster.get(kind, name, ns)) === null,
      limitMs,
    );
  const remove = async (ns: string, kind: string, name: string): Promise<void> => {
    await cluster.kubectl(['delete', kind, name, '-n', ns, '--wait=false']);
    await gone(ns, kind, name);
  };
  const event = (ns: string, about: string, wanted: RegExp, limitMs = 60_000): Promise<string> =>
    cluster.waitFor(
      `an Event about ${about} like ${wanted}`,
      async () => (await cluster.events(about, ns)).find((one) => wanted.test(one)),
      limitMs,
    );
  const copies = (volume: VolumeRef, summary = '2/2', limitMs = 90_000): Promise<KubeObject> =>
    cluster.waitFor(
      `${volume.claim} has ${summary} copies`,
      async () => {
        const object = await cluster.simpleVolume(volume);
        return object?.status?.replicasSummary === summary && object;
      },
      limitMs,
    );
  /** Everything of a volume in a node's pool, whatever folder it is in. */
  const traces = (node: string, volume: VolumeRef): string[] =>
    [
      '',
      POOL_FOLDERS.backups,
      '.simple-volume-shadows',
      '.simple-volume-incoming',
      '.simple-volume-state/volumes',
    ]
      .map((part) => path.join(cluster.node(node).pool, part, volume.namespace, volume.name))
      .filter((folder) => existsSync(folder));
  const plain: ClaimOptions = { annotations: {}, size: '64Mi' };

  await scenario(
    'binds',
    'a claim waits for its first consumer, then binds and its pod runs',
    async (t, ns) => {
      await apply(ns, claim('waits', plain));
      await event(ns, 'waits', /^WaitForFirstConsumer: /);
      t.equal((await cluster.get('pvc', 'waits', ns)).status.phase, 'Pending');
      for (const node of cluster.nodes)
        t.notOk(existsSync(path.join(node.pool, ns)), `nothing on ${node.name}`);
      const times: number[] = [];
      for (const name of ['waits', 'second', 'third']) {
        const began = performance.now();
        await apply(ns, ...(name === 'waits' ? [] : [claim(name, plain)]), pod(name, name, { script: IDLE }));
        const phase = '--for=jsonpath={.status.phase}=Running';
        await cluster.kubectl(['wait', phase, `pod/${name}`, '-n', ns, '--timeout=60s'], '', 70_000);
        times.push(secondsSince(began));
        t.equal((await cluster.get('pvc', name, ns)).status.phase, 'Bound');
      }
      t.comment(`from the claim and its pod to Running: ${times.map(say).join(', ')} (aim 2 s)`);
      t.ok(median(times) <= BIND_LIMIT_S, `median ${say(median(times))}`);
    },
  );

  await scenario(
    'refused',
    'what cannot be had is refused with a sentence in the Events of the claim',
    async (t, ns) => {
      const block = claim('block', plain) as { spec: object };
      await apply(
        ns,
        claim('shared', { ...plain, mode: 'ReadWriteMany' }),
        pod('shared', 'shared', { script: IDLE }),
        { ...block, metadata: { name: 'block' }, spec: { ...block.spec, volumeMode: 'Block' } },
        pod('block', 'block', {
          script: IDLE,
          spec: {
            containers: [
              {
                name: 'app',
                image: POSIX_IMAGE,
                command: ['sh', '-c', IDLE],
                volumeDevices: [{ name: 'data', devicePath: '/dev/data' }],
              },
            ],
          },
        }),
        claim('huge', { ...plain, size: '900Ti' }),
        pod('huge', 'huge', { script: IDLE }),
      );
      for (const [name, wanted] of [
        ['shared', /^ProvisioningFailed: .*(one node|single node|several nodes)/i],
        ['block', /^ProvisioningFailed: .*block/i],
        ['huge', /^ProvisioningFailed: .*(room|free)/i],
      ] as const) {
        t.comment(await event(ns, name, wanted));
        t.equal((await cluster.get('pvc', name, ns)).status.phase, 'Pending');
      }
      for (const node of cluster.nodes)
        t.notOk(existsSync(path.join(node.pool, ns)), `nothing on ${node.name}`);
    },
  );

  const grow = async (ns: string, name: string, size: string): Promise<void> => {
    const patch = JSON.stringify({ spec: { resources: { requests: { storage: size } } } });
    await cluster.kubectl(['patch', 'pvc', name, '-n', ns, '-p', patch]);
  };
  /** Writes a file of so many MiB. Returns its size and what was said. */
  const fill = async (
    ns: string,
    app: string,
    mebibytes: number,
  ): Promise<{ bytes: number; said: string }> => {
    const said = await cluster.sh(
      app,
      `dd if=/dev/zero of=/data/big bs=1M count=${mebibytes} conv=fsync 2>&1; stat -c %s /data/big`,
      ns,
    );
    return { bytes: Number(said.trim().split('\n').at(-1)), said };
  };
  const sizeSaid = (volume: VolumeRef, status: string): Promise<KubeObject> =>
    cluster.waitFor(`it is said that the size is enforced: ${status}`, async () => {
      const condition = conditionOf(await cluster.simpleVolume(volume), 'SizeEnforced');
      return condition?.status === status && condition;
    });

  /** From a volume of 16 MiB on a node to one of 128 MiB, under its pod. */
  async function growing(t: Test, ns: string, node: string, enforced: boolean): Promise<RunningPod> {
    const at = { script: IDLE, nodeSelector: { 'kubernetes.io/hostname': node } };
    await apply(ns, claim('grows', { ...plain, size: '16Mi' }), pod('app', 'grows', at));
    const app = await running(ns, 'app');
    const volume = await cluster.volumeOf('grows', ns);
    const df = (await cluster.sh(app.name, 'df -k /data', ns)).trim().split('\n').at(-1) ?? '';
    t.comment(`df in the pod: ${df}`);
    t.match(df, /\s\/data$/);
    t.ok(Number(df.split(/\s+/)[1]) > 1 << 20, 'it shows the disk of the pool');
    const { reason, message } = await sizeSaid(volume, enforced ? 'True' : 'False');
    t.comment(`${reason}: ${message}`);
    t.match(message, new RegExp(`^${node}: .`));
    const { bytes, said } = await fill(ns, app.name, 40);
    if (enforced) {
      t.ok(bytes > 1 << 20 && bytes <= 16 << 20, `${bytes} bytes fit`);
      t.match(said, /quota exceeded/i);
    } else t.equal(bytes, 40 << 20, 'all of it was written');
    await grow(ns, 'grows', '128Mi');
    await cluster.waitFor('the claim has grown', async () => {
      const { status } = await cluster.get('pvc', 'grows', ns);
      return status.capacity.storage === '128Mi' && !(status.conditions ?? []).length;
    });
    t.equal((await cluster.get('pv', volume.name)).spec.capacity.storage, '128Mi');
    // csi-node learns the new limit with the next report, a second later at most when nothing else is going on.
    await cluster.waitFor(
      'there is room for more',
      async () => (await fill(ns, app.name, 100)).bytes === 100 << 20,
      15_000,
    );
    t.equal((await running(ns, 'app')).uid, app.uid, 'its pod was not disturbed');
    await t.rejects(grow(ns, 'grows', '64Mi'), /less than|shrink/, 'it never shrinks');
    return app;
  }

  await scenario(
    'grows',
    'a claim grows under its pod; where its size is not enforced, that is said',
    async (t, ns) => {
      await growing(t, ns, 'n1', false);
    },
  );

  await scenario(
    'held',
    'on btrfs a full volume is an error for its own pod and for nobody else',
    async (t, ns) => {
      const other = { script: IDLE, nodeSelector: { 'kubernetes.io/hostname': BTRFS_NODE } };
      await apply(ns, claim('other', { size: '32Mi' }), pod('other', 'other', other));
      await running(ns, 'other');
      const app = await growing(t, ns, BTRFS_NODE, true);
      await fill(ns, app.name, 200).catch(() => undefined);
      const { bytes, said } = await fill(ns, 'other', 20);
      t.equal(bytes, 20 << 20, said);
      const volume = await cluster.volumeOf('other', ns);
      await copies(volume);
      for (const { name } of cluster.others(BTRFS_NODE))
        await cluster.waitFor(`a copy on ${name}`, async () => {
          const file = cluster.tree(name, volume, 'big');
          return existsSync(file) && statSync(file).size === 20 << 20;
        });
    },
    BTRFS ? false : 'the kernel has no btrfs, or no loop devices, or btrfs-progs is not installed',
  );

  await scenario(
    'static',
    'a PersistentVolume made by hand takes a directory that has data already',
    async (t, ns) => {
      const volume = { namespace: ns, name: 'archive-2019', claim: 'archive' };
      const content = randomBytes(3_000_000);
      const folder = cluster.tree('n2', volume);
      mkdirSync(path.join(folder, 'photos/ä b'), { recursive: true });
      writeFileSync(path.join(folder, 'photos/ä b/one'), content);
      const made = claim('archive', { size: '1Gi' }) as { spec: object };
      await cluster.apply({
        apiVersion: 'v1',
        kind: 'PersistentVolume',
        metadata: { name: volume.name },
        spec: {
          capacity: { storage: '1Gi' },
          accessModes: ['ReadWriteOnce'],
          persistentVolumeReclaimPolicy: 'Retain',
          storageClassName: '',
          csi: {
            driver: DRIVER,
            volumeHandle: `${ns}/${volume.name}`,
            volumeAttributes: { pool: 'default', node: 'n2' },
          },
        },
      });
      const nowhere = { storageClassName: '', volumeName: volume.name };
      await apply(ns, { ...made, spec: { ...made.spec, ...nowhere } }, deployment('app', 'archive'));
      t.teardown(() => cluster.kubectl(['delete', 'pv', volume.name, '--wait=false', '--ignore-not-found']));
      const app = await running(ns, 'app', 90_000);
      t.comment(`the pod runs on ${app.node}`);
      const [sum] = (await cluster.sh(app.name, 'sha256sum "/data/photos/ä b/one"', ns)).split(' ');
      t.equal(sum, sha256(content), 'the pod reads what was there');
      await copies(volume);
      await cluster.waitFor('every node has all of it', async () =>
        cluster.nodes.every(
          ({ name }) =>
            sha256(readFileSync(cluster.tree(name, volume, 'photos/ä b/one'))) === sha256(content) &&
            lines(cluster.read(name, volume, 'lines')).length > 0,
        ),
      );
    },
  );

  await scenario(
    'alone',
    'ReadWriteOncePod keeps a second pod out until the first has ended',
    async (t, ns) => {
      await apply(
        ns,
        claim('data', { ...plain, mode: 'ReadWriteOncePod' }),
        pod('first', 'data', { script: IDLE }),
      );
      const first = await running(ns, 'first');
      await cluster.sh(first.name, 'echo first > /data/who', ns);
      // On the same node: this volume has no copies and cannot follow its next pod.
      const here = { nodeSelector: { 'kubernetes.io/hostname': first.node } };
      await apply(ns, pod('second', 'data', { script: IDLE, spec: here }));
      t.comment(await event(ns, 'second', /ReadWriteOncePod/));
      t.equal((await cluster.get('pod', 'second', ns)).status.phase, 'Pending');
      // One that goes past the scheduler is kept out by the driver.
      const { spec, ...rest } = pod('third', 'data', { script: IDLE }) as { spec: object };
      await apply(ns, { ...rest, spec: { ...spec, nodeName: first.node } });
      t.comment(await event(ns, 'third', /ReadWriteOncePod/));
      t.not((await cluster.get('pod', 'third', ns)).status.phase, 'Running');
      await remove(ns, 'pod', 'third');
      await remove(ns, 'pod', 'first');
      const second = await running(ns, 'second', 90_000);
      t.equal(await cluster.sh(second.name, 'cat /data/who', ns), 'first\n');
    },
  );

  await scenario(
    'moves',
    'node cordoned, pod deleted: the volume moves and nothing is lost',
    async (t, ns) => {
      await apply(ns, claim('data'), deployment('app', 'data'));
      const first = await running(ns, 'app');
      const volume = await cluster.volumeOf('data', ns);
      await copies(volume);
      await cluster.cordon(first.node);
      const began = performance.now();
      // What the old pod has written, seen on its node until it is a copy of the new one.
      let before = '';
      const look = setInterval(() => {
        const text = cluster.read(first.node, volume, 'lines') ?? '';
        if (lines(text).every((line) => line.pod === first.name)) before = text;
      }, 25);
      t.teardown(() => clearInterval(look));
      await cluster.kubectl(['delete', 'pod', first.name, '-n', ns, '--wait=false']);
      const second = await cluster.podRunning('app=app', {
        namespace: ns,
        not: [first.node],
        limitMs: 120_000,
      });
      t.comment(`from the deletion to Running on another node: ${say(secondsSince(began))}`);
      const after = await cluster.waitFor('it writes on', async () => {
        const text = await cluster.sh(second.name, 'cat /data/lines', ns);
        return lines(text).some((line) => line.pod === second.name) && text;
      });
      await cluster.waitFor('the old node is a copy', async () =>
        lines(cluster.read(first.node, volume, 'lines')).some((line) => line.pod === second.name),
      );
      clearInterval(look);
      t.same(cluster.backups(first.node, volume), [], 'what was handed over stays where it is');
      t.ok(lines(before).length > 0);
      t.strictSame(compareLines(before, after), { lost: 0, fault: null });
      const at = lines(after).map((line) => line.at);
      t.comment(
        `longest pause ${Math.max(...at.slice(1).map((time, index) => time - (at[index] as number)))} s`,
      );
      t.match(await cluster.simpleVolume(volume), {
        status: { activeNode: second.node, previousActiveNode: first.node, epoch: 2 },
      });
      await cluster.uncordon(first.node);
      await copies(volume);
    },
  );

  await scenario(
    'deleted',
    'a deleted claim: with Delete nothing is left anywhere, with Retain all of it',
    async (t, ns) => {
      await apply(ns, claim('goes'), claim('stays'), pod('goes', 'goes'), pod('stays', 'stays'));
      await Promise.all(['goes', 'stays'].map((name) => running(ns, name)));
      const [goes, stays] = await Promise.all([cluster.volumeOf('goes', ns), cluster.volumeOf('stays', ns)]);
      await Promise.all([copies(goes), copies(stays)]);
      for (const { name } of cluster.nodes) {
        t.ok(traces(name, goes).length >= 2, `${name} has it, and a state of it`);
        await cluster.waitFor(
          'lines everywhere',
          async () => lines(cluster.read(name, stays, 'lines')).length > 0,
        );
      }
      const retain = JSON.stringify({ spec: { persistentVolumeReclaimPolicy: 'Retain' } });
      await cluster.kubectl(['patch', 'pv', stays.name, '-p', retain]);
      await cluster.waitFor('the product knows it', async () => {
        const pv = await cluster.get('pv', stays.name);
        return pv.spec.persistentVolumeReclaimPolicy === 'Retain';
      });
      // A claim in use stays until its pod has ended.
      await cluster.kubectl(['delete', 'pvc', 'goes', 'stays', '-n', ns, '--wait=false']);
      t.equal((await cluster.get('pvc', 'goes', ns)).status.phase, 'Bound');
      t.ok((await cluster.sh('goes', 'cat /data/lines', ns)).length > 0);
      await cluster.kubectl(['delete', 'pod', 'goes', 'stays', '-n', ns, '--wait=false']);
      await Promise.all(['goes', 'stays'].map((name) => gone(ns, 'pvc', name)));
      await gone(ns, 'pv', goes.name, 90_000);
      for (const kind of ['simplevolumes.storage.shipstuff.io'])
        await Promise.all([gone(ns, kind, 'goes'), gone(ns, kind, 'stays')]);
      await cluster.waitFor('its data is gone on all nodes', async () =>
        cluster.nodes.every(({ name }) => traces(name, goes).length === 0),
      );
      for (const { name, pool } of cluster.nodes) {
        const trash = path.join(pool, '.simple-volume-trash');
        await cluster.waitFor(
          'the trash is empty',
          async () => !existsSync(trash) || readdirSync(trash).length === 0,
        );
        t.strictSame(traces(name, goes), [], `nothing on ${name}`);
      }

      // Retain
      const told = await event(ns, 'stays', /^Deleting: .*Retain/);
      t.comment(told);
      for (const { name } of cluster.nodes) t.ok(told.includes(name), `it is said that ${name} has it`);
      t.ok(told.includes(`${ns}/${stays.name}`), 'and in which folder of the pool');
      t.equal((await cluster.get('pv', stays.name)).status.phase, 'Released');
      const kept = cluster.nodes.map(({ name }) => cluster.read(name, stays, 'lines') ?? '');
      for (const [index, { name }] of cluster.nodes.entries())
        t.ok(lines(kept[index] as string).length > 0, `${name} has its lines`);
      // Given to a new claim by the administrator.
      const free = JSON.stringify([{ op: 'remove', path: '/spec/claimRef' }]);
      await cluster.kubectl(['patch', 'pv', stays.name, '--type=json', '-p', free]);
      const again = claim('again') as { spec: object };
      await apply(
        ns,
        { ...again, spec: { ...again.spec, volumeName: stays.name } },
        deployment('again', 'again'),
      );
      const next = await running(ns, 'again', 90_000);
      const text = await cluster.waitFor('the new pod writes', async () => {
        const all = await cluster.sh(next.name, 'cat /data/lines', ns);
        return lines(all).some((line) => line.pod === next.name) && all;
      });
      const longest = kept.reduce((a, b) => (a.length >= b.length ? a : b));
      t.strictSame(
        compareLines(longest, text),
        { lost: 0, fault: null },
        'and goes on with all that there was',
      );
      await cluster.kubectl(['patch', 'pv', stays.name, '-p', retain.replace('Retain', 'Delete')]);
    },
  );

  await scenario(
    'plugin',
    'csi-node is killed and upgraded under a pod that goes on writing',
    async (t, ns) => {
      const script = `trap 'exit 0' TERM
      n=0; while true; do n=$((n+1)); echo "$n $POD $(date +%s)" >> /data/lines && sync /data/lines || echo "line $n failed"; usleep 200000; done`;
      await apply(ns, claim('data'), deployment('app', 'data', { script }), claim('next', plain));
      const app = await running(ns, 'app');
      const volume = await cluster.volumeOf('data', ns);
      await copies(volume);
      const count = (): number => lines(cluster.read(app.node, volume, 'lines')).length;
      const goesOn = async (): Promise<void> => {
        const now = count();
        await cluster.waitFor('it writes on', async () => count() > now + 5);
      };
      const plugin = async (): Promise<KubeObject> =>
        (await cluster.parts('csi-node')).find((one) => one.spec.nodeName === app.node);
      const before = await plugin();
      await cluster.node(app.node).killContainer('csi-node');
      await cluster.waitFor('csi-node is back', async () => {
        const now = await plugin();
        const [status] = now?.status?.containerStatuses ?? [];
        return status?.restartCount > before.status.containerStatuses[0].restartCount && status.ready;
      });
      await goesOn();
      const ctr = kubeProgram('ctr') as string;
      const [repository] = PRODUCT_IMAGE.split(/:(?=[^:/]+$)/);
      await Promise.all(
        cluster.nodes.map((node) =>
          node.enter(ctr, ['-n', 'k8s.io', 'images', 'tag', PRODUCT_IMAGE, `${repository}:next`]),
        ),
      );
      const began = performance.now();
      await cluster.install({ image: { tag: 'next' } }, [path.join(CHART, 'examples/values-demo.yaml')]);
      await cluster.kubectl(
        ['rollout', 'status', '-n', SYSTEM, 'daemonset,deployment', '--timeout=180s'],
        '',
        190_000,
      );
      t.comment(`the upgrade took ${say(secondsSince(began))}`);
      for (const part of await cluster.list('pods', SYSTEM))
        t.ok(part.spec.containers[0].image.endsWith(':next'), `${part.metadata.name} has the new image`);
      await goesOn();
      const now = await cluster.get('pod', app.name, ns);
      t.equal(now.metadata.uid, app.uid);
      t.equal(now.status.containerStatuses[0].restartCount, 0);
      t.equal(await cluster.kubectl(['logs', app.name, '-n', ns]), '', 'no write ever failed');
      const all = lines(await cluster.sh(app.name, 'cat /data/lines', ns));
      t.strictSame(
        all.map((line) => line.number),
        all.map((_, index) => index + 1),
        'no number is missing',
      );
      const pause = Math.max(
        ...all.slice(1).map((line, index) => line.at - (all[index] as { at: number }).at),
      );
      t.comment(`${all.length} lines, five a second; the longest pause was ${pause} s`);
      t.ok(pause <= 45, `${pause} s`);
      t.match(await cluster.simpleVolume(volume), { status: { activeNode: app.node, epoch: 1 } });
      // What the new one has not mounted it unmounts, and it mounts anew.
      await remove(ns, 'deployment', 'app');
      await gone(ns, 'pod', app.name);
      await apply(ns, deployment('app', 'data'), pod('next', 'next', { script: IDLE }));
      await running(ns, 'app', 90_000);
      await running(ns, 'next');
      await copies(volume);
    },
  );

  await scenario(
    'secrets',
    'no secret can be seen in arguments, environments or descriptions',
    async (t, ns) => {
      const secrets = await cluster.list('secrets', SYSTEM);
      const words = new Map<string, string>();
      for (const secret of secrets) {
        for (const [key, value] of Object.entries((secret.data ?? {}) as Record<string, string>)) {
          const text = Buffer.from(value, 'base64').toString('latin1').trim();
          // What is public of TLS is no secret; of a key any line will do.
          if (/\.crt$/.test(key) || secret.type.startsWith('helm.sh/')) continue;
          const line = text.split('\n').find((one) => !one.startsWith('-----')) ?? '';
          if (line.length >= 16) words.set(line, `${secret.metadata.name}/${key}`);
          words.set(Buffer.from(line).toString('base64'), `${secret.metadata.name}/${key} in base64`);
        }
      }
      t.ok(words.size >= 4, [...words.values()].join(', '));
      const planted = randomBytes(24).toString('base64url');
      words.set(planted, 'planted');

      // All processes of the nodes are processes of this machine, seen here while contents are pulled by rclone.
      const programs = new Set<string>();
      const found = new Set<string>();
      const look = (): void => {
        for (const pid of readdirSync('/proc')) {
          if (!/^\d+$/.test(pid)) continue;
          for (const file of ['cmdline', 'environ']) {
            try {
              const text = readFileSync(`/proc/${pid}/${file}`, 'latin1');
              if (file === 'cmdline') programs.add(path.basename(text.split('\0')[0] ?? ''));
              for (const [word, name] of words) if (text.includes(word)) found.add(`${name} in ${file}`);
            } catch {
              // It has ended.
            }
          }
        }
      };
      const script = `head -c 60000000 /dev/urandom > /data/one; export PLANTED=${planted}; ${IDLE.replace('sleep 1', `sh -c 'sleep 1; : ${planted}'`)}`;
      await apply(ns, claim('data'), pod('app', 'data', { script }));
      await running(ns, 'app');
      const volume = await cluster.volumeOf('data', ns);
      const end = performance.now() + 90_000;
      const whole = (): boolean =>
        cluster.nodes.every(({ name }) => {
          const file = cluster.tree(name, volume, 'one');
          return existsSync(file) && statSync(file).size === 60_000_000;
        });
      while (!(whole() && programs.has('rclone') && found.size >= 2) && performance.now() < end) {
        look();
        await sleep(10);
      }
      t.ok(whole(), 'a file was copied meanwhile');
      t.ok(programs.has('rclone'), 'rclone was seen at work');
      t.ok(programs.has('node'), 'and the parts of the product');
      t.strictSame(
        [...found].sort(),
        ['planted in cmdline', 'planted in environ'],
        'only what was planted is found',
      );

      const texts = new Map<string, string>();
      const ask = async (...args: string[]): Promise<void> => {
        texts.set(args.join(' '), await cluster.kubectl(args, '', 120_000));
      };
      await ask('describe', 'all,secrets,configmaps,pvc,events', '-n', SYSTEM);
      await ask('get', 'pods,daemonsets,deployments,configmaps,serviceaccounts', '-n', SYSTEM, '-o', 'yaml');
      await ask('describe', 'pods,pvc,simplevolumes', '-n', ns);
      await ask('get', 'pv,clustersimplevolumes,storageclasses,csidrivers,nodes', '-o', 'yaml');
      for (const { metadata } of await cluster.list('pods', SYSTEM))
        await ask('logs', metadata.name, '-n', SYSTEM, '--all-containers');
      const told = [...texts].flatMap(([command, text]) =>
        [...words].filter(([word]) => text.includes(word)).map(([, name]) => `${name}: kubectl ${command}`),
      );
      t.strictSame(told, [`planted: kubectl describe pods,pvc,simplevolumes -n ${ns}`]);
    },
  );

  await scenario('posix', 'rename, locks, fsync and mmap are those of a local disk', async (t, ns) => {
    const local = { name: 'local', emptyDir: {} };
    const spec = (name: string): object => ({
      containers: [
        {
          name: 'app',
          image: POSIX_IMAGE,
          command: ['sh', '-c', IDLE],
          volumeMounts: [
            { name: 'data', mountPath: '/data' },
            { name: 'local', mountPath: '/local' },
          ],
        },
      ],
      volumes: [{ name: 'data', persistentVolumeClaim: { claimName: 'data' } }, local],
      ...(name === '' ? {} : { nodeName: name }),
    });
    await apply(ns, claim('data'), pod('one', 'data', { spec: spec('') }));
    const one = await running(ns, 'one');
    const check = async (folder: string): Promise<string[]> =>
      (await cluster.sh(one.name, `mkdir ${folder}/check && posix check ${folder}/check`, ns))
        .trim()
        .split('\n');
    const expected = await check('/local');
    t.ok(expected.length >= 30);
    t.strictSame(await check('/data'), expected, 'point by point as beside it');
    for (const point of [
      'atomic rename: whole each time',
      'flock of a second process: refused',
      'appends of two processes: none torn, none lost',
      'mmap is read: yes',
      'fsync of a folder: ok',
    ])
      t.ok(expected.includes(point), point);
    // Two pods of the node.
    await apply(ns, pod('two', 'data', { spec: spec(one.node) }));
    const two = await running(ns, 'two');
    await cluster.sh(
      one.name,
      'posix hold /data/lock > /local/held 2>&1 < /dev/null & until grep -q locked /local/held; do usleep 50000; done',
      ns,
    );
    t.equal(
      (await cluster.sh(two.name, 'posix try /data/lock', ns)).trim(),
      'EAGAIN',
      'the lock holds between pods',
    );
    await remove(ns, 'pod', 'one');
    t.equal(
      (await cluster.sh(two.name, 'posix try /data/lock', ns)).trim(),
      'locked',
      'and ends with its holder',
    );
  });

  await scenario('mounts', 'subPath, fsGroup and readOnly do what they do elsewhere', async (t, ns) => {
    const container = (name: string, mounts: object[]): object => ({
      name,
      image: POSIX_IMAGE,
      command: ['sh', '-c', IDLE],
      volumeMounts: mounts,
    });
    await apply(
      ns,
      claim('data'),
      pod('app', 'data', {
        spec: {
          securityContext: { runAsUser: 1000, runAsGroup: 1000, fsGroup: 2345 },
          containers: [
            container('app', [{ name: 'data', mountPath: '/data' }]),
            container('part', [{ name: 'data', mountPath: '/data', subPath: 'inner/part' }]),
            container('reader', [{ name: 'data', mountPath: '/data', readOnly: true }]),
          ],
        },
      }),
    );
    const app = await running(ns, 'app');
    const volume = await cluster.volumeOf('data', ns);
    const inside = (name: string, script: string): Promise<string> =>
      cluster.kubectl(['exec', '-n', ns, 'app', '-c', name, '--', 'sh', '-c', script]);
    await inside('app', 'echo whole > /data/whole');
    await inside('part', 'echo part > /data/file');
    t.equal(await inside('app', 'cat /data/inner/part/file'), 'part\n');
    t.equal((await inside('part', 'ls /data')).trim(), 'file', 'the rest is not seen');
    t.equal((await inside('app', 'stat -c "%u %g" /data/whole')).trim(), '1000 2345', 'owner and group');
    t.equal((await inside('app', 'stat -c "%g %A" /data')).trim(), '2345 drwxrwsrwx');
    await t.rejects(inside('reader', 'echo x > /data/no'), /Read-only file system/);
    t.equal(await inside('reader', 'cat /data/whole'), 'whole\n');
    await copies(volume);
    for (const { name } of cluster.others(app.node)) {
      await cluster.waitFor(
        `${name} has it`,
        async () => cluster.read(name, volume, 'inner/part/file') === 'part\n',
      );
      const { uid, gid } = statSync(cluster.tree(name, volume, 'whole'));
      t.strictSame([uid, gid], [1000, 2345], `owner and group on ${name}`);
    }
    await remove(ns, 'pod', 'app');
    await apply(
      ns,
      pod('again', 'data', {
        script: IDLE,
        spec: { volumes: [{ name: 'data', persistentVolumeClaim: { claimName: 'data', readOnly: true } }] },
      }),
    );
    await running(ns, 'again', 90_000);
    await t.rejects(cluster.sh('again', 'echo x > /data/no', ns), /Read-only file system/);
    t.equal(await cluster.sh('again', 'cat /data/whole', ns), 'whole\n');
  });

  await scenario('trio', 'three pods of a StatefulSet keep each its own claim', async (t, ns) => {
    await apply(ns, statefulSet('app', { replicas: 3 }));
    const names = ['app-0', 'app-1', 'app-2'];
    const ready = (wanted: number): Promise<unknown> =>
      cluster.waitFor(
        `${wanted} are Ready`,
        async () => {
          const { status } = await cluster.get('statefulset', 'app', ns);
          return (status.readyReplicas ?? 0) === wanted && (status.replicas ?? 0) === wanted;
        },
        120_000,
      );
    await ready(3);
    const volumes = await Promise.all(names.map((name) => cluster.volumeOf(`data-${name}`, ns)));
    t.equal(new Set(volumes.map(({ name }) => name)).size, 3);
    await Promise.all(volumes.map((volume) => copies(volume)));
    const read = (name: string): Promise<string> => cluster.sh(name, 'cat /data/lines', ns);
    const texts = await Promise.all(names.map(read));
    const { uid } = (await cluster.get('pod', 'app-1', ns)).metadata;
    await cluster.kubectl(['delete', 'pod', 'app-1', '-n', ns, '--wait=false']);
    await cluster.waitFor('its successor', async () => {
      const now = (await cluster.get('pod', 'app-1', ns))?.metadata.uid;
      return now !== undefined && now !== uid;
    });
    await ready(3);
    await cluster.kubectl(['scale', 'statefulset', 'app', '-n', ns, '--replicas=0']);
    await ready(0);
    await cluster.kubectl(['scale', 'statefulset', 'app', '-n', ns, '--replicas=3']);
    await ready(3);
    for (const [index, name] of names.entries()) {
      const now = await read(name);
      t.strictSame(compareLines(texts[index] as string, now), { lost: 0, fault: null }, name);
      t.ok(
        lines(now).every((line) => line.pod === name),
        `${name} has nobody else's lines`,
      );
    }
    await Promise.all(volumes.map((volume) => copies(volume)));
  });

  await scenario('demo', 'the demo example runs as it is', async (t, ns) => {
    await cluster.kubectl(['apply', '-n', ns, '-f', path.join(CHART, 'examples/demo.yaml')]);
    const app = await running(ns, 'demo');
    const volume = await cluster.volumeOf('demo', ns);
    await copies(volume);
    const text = await cluster.waitFor('it writes', async () => {
      const all = await cluster.sh(app.name, 'cat /data/lines', ns);
      return all.split('\n').length > 3 && all;
    });
    for (const { name } of cluster.others(app.node))
      await cluster.waitFor(`${name} has these lines`, async () =>
        (cluster.read(name, volume, 'lines') ?? '').startsWith(text),
      );
    // values-demo.yaml makes it the default class.
    const { spec, ...rest } = claim('unnamed', plain) as { spec: { storageClassName?: string } };
    const { storageClassName: _, ...without } = spec;
    await apply(ns, { ...rest, spec: without }, pod('unnamed', 'unnamed', { script: IDLE }));
    await running(ns, 'unnamed');
    t.equal((await cluster.get('pvc', 'unnamed', ns)).spec.storageClassName, 'simple-volume');
  });

  await scenario(
    'game',
    'the game server example copies saves and settings, and nothing else',
    async (t, ns) => {
      await cluster.kubectl(['apply', '-n', ns, '-f', path.join(CHART, 'examples/game-server.yaml')]);
      const script = `mkdir -p /data/saves/world /data/downloads; echo '{"name":"world"}' > /data/server.json
      head -c 500000 /dev/urandom > /data/downloads/map; echo half > /data/saves/world/region.tmp
      head -c 300000 /dev/urandom > /data/saves/world/region.new; mv /data/saves/world/region.new /data/saves/world/region; ${IDLE}`;
      await apply(ns, pod('server', 'world', { script }));
      const server = await running(ns, 'server');
      const volume = await cluster.volumeOf('world', ns);
      const object = await copies(volume);
      t.comment(`next full sync: ${object.status.nextFullSync}`);
      t.match(conditionOf(object, 'PolicyValid'), { status: 'True' });
      const save = await cluster.waitFor('the world is saved', async () => {
        const file = cluster.tree(server.node, volume, 'saves/world/region');
        return existsSync(file) && readFileSync(file);
      });
      for (const { name } of cluster.others(server.node)) {
        await cluster.waitFor(`the save is on ${name}`, async () => {
          const file = cluster.tree(name, volume, 'saves/world/region');
          return existsSync(file) && readFileSync(file).equals(save);
        });
        t.equal(cluster.read(name, volume, 'server.json'), '{"name":"world"}\n');
        t.strictSame(readdirSync(cluster.tree(name, volume)).sort(), ['saves', 'server.json']);
        t.strictSame(readdirSync(cluster.tree(name, volume, 'saves/world')), ['region']);
      }
    },
  );

  await scenario(
    'many',
    'a hundred claims at once: all are bound, each has its own data, all go again',
    async (t, ns) => {
      const [PODS, EACH] = [10, 10];
      const name = (index: number, which: number): string => `c${index}-${which}`;
      const objects: object[] = [];
      for (let index = 0; index < PODS; index++) {
        const claims = Array.from({ length: EACH }, (_, which) => name(index, which));
        objects.push(
          ...claims.map((one) => claim(one, { annotations: {}, size: '8Mi' })),
          pod(`p${index}`, '', {
            spec: {
              containers: [
                {
                  name: 'app',
                  image: POSIX_IMAGE,
                  command: [
                    'sh',
                    '-c',
                    `for one in /data/*; do echo "\${one##*/}" > $one/name; done; ${IDLE}`,
                  ],
                  volumeMounts: claims.map((one) => ({ name: one, mountPath: `/data/${one}` })),
                },
              ],
              volumes: claims.map((one) => ({ name: one, persistentVolumeClaim: { claimName: one } })),
            },
          }),
        );
      }
      const began = performance.now();
      await apply(ns, ...objects);
      await cluster.waitFor(
        'all pods run',
        async () => {
          const pods = await cluster.list('pods', ns);
          return pods.length === PODS && pods.every((one) => one.status.phase === 'Running');
        },
        240_000,
        1000,
      );
      t.comment(`${PODS * EACH} claims in ${PODS} pods, all Running: ${say(secondsSince(began))}`);
      const claims = await cluster.list('pvc', ns);
      t.equal(claims.filter((one) => one.status.phase === 'Bound').length, PODS * EACH);
      const volumes = claims.map(({ metadata, spec }) => ({
        namespace: ns,
        claim: metadata.name as string,
        name: spec.volumeName as string,
      }));
      const objectsOf = new Map(
        (await cluster.list('simplevolumes.storage.shipstuff.io', ns)).map((one) => [one.metadata.name, one]),
      );
      t.equal(objectsOf.size, PODS * EACH);
      const wrong = await cluster.waitFor('each has written', async () => {
        const texts = volumes.map((one) =>
          cluster.read(objectsOf.get(one.claim)?.status.activeNode, one, 'name'),
        );
        return (
          !texts.includes(null) &&
          texts.flatMap((text, i) => (text === `${volumes[i]?.claim}\n` ? [] : [text]))
        );
      });
      t.strictSame(wrong, [], 'each volume has its own data');
      const deleting = performance.now();
      await cluster.kubectl(['delete', 'namespace', ns, '--wait=false']);
      await cluster.waitFor(
        'all are gone',
        async () => {
          const left = (await cluster.list('pv', null)).filter((one) => one.spec.claimRef?.namespace === ns);
          return left.length === 0 && (await cluster.get('namespace', ns)) === null;
        },
        240_000,
        1000,
      );
      t.comment(`all deleted: ${say(secondsSince(deleting))}`);
      const left = cluster.nodes.flatMap((node) => volumes.flatMap((one) => traces(node.name, one)));
      t.strictSame(left, [], 'nothing of them is left in any pool');
    },
  );
});
