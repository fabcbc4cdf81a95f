/** A volume's life on a real cluster: bound by its first pod, copied, failed over after a power cut, taken back. */
import t from 'tap';
import { Cluster, MONITOR_GRACE_S, noCluster, type RunningPod, type VolumeRef } from './harness/cluster.ts';
import { claim, compareLines, deployment, lines, SHORT_TIMES } from './harness/objects.ts';
import { steps } from './harness/steps.ts';

const FAILOVER_MS = 120_000;
const seconds = (since: number): string => `${((performance.now() - since) / 1000).toFixed(1)} s`;

t.test('a volume on three nodes', { skip: noCluster(), timeout: 540_000 }, async (t) => {
  const cluster = await Cluster.start({ say: (line) => t.comment(line) });
  t.teardown(() => cluster.stop());
  const step = steps(t, cluster);
  let volume: VolumeRef;
  let first: RunningPod;

  await step('the claim waits for its first consumer, binds, and the pod runs', async (t) => {
    await cluster.apply(claim('data'));
    await cluster.waitFor('it says that it waits', async () =>
      (await cluster.events('data')).some((event) => event.startsWith('WaitForFirstConsumer')),
    );
    t.equal((await cluster.get('pvc', 'data')).status.phase, 'Pending');
    const began = performance.now();
    await cluster.apply(deployment('app', 'data'));
    first = await cluster.podRunning('app=app');
    t.comment(`from the pod's creation to Running: ${seconds(began)}`);
    volume = await cluster.volumeOf('data');
    t.match(await cluster.simpleVolume(volume), { status: { activeNode: first.node, epoch: 1 } });
  });

  await step('the pod sees the pool behind it, and the claim its size', async (t) => {
    const row = (await cluster.sh(first.name, 'df -k /data')).trim().split('\n').at(-1) ?? '';
    t.match(row, /\s\/data$/);
    t.ok(Number(row.split(/\s+/)[1]) > 1024 * 1024, row);
    t.equal((await cluster.get('pvc', 'data')).status.capacity.storage, '1Gi');
  });

  await step('both other nodes get verified copies with the same tree', async (t) => {
    const script = `set -e; mkdir -p /data/deep/er /data/empty; cd /data/deep
      head -c 3000000 /dev/urandom > big; i=0; while [ $i -lt 200 ]; do echo $i > er/$i; i=$((i+1)); done
      ln -s er/7 link; ln big twin; chmod 4750 er/8; chown 1000:2000 er/9; touch -d '2001-02-03 04:05:06' er/10
      truncate -s 50000000 sparse`;
    await cluster.sh(first.name, script);
    for (const { name } of cluster.others(first.node)) {
      await cluster.waitFor(`the tree is on ${name}`, async () => {
        return (await cluster.differences(volume, first.node, name, 'deep')).length === 0;
      });
      const copied = await cluster.read(name, volume, 'lines');
      const { fault } = compareLines(copied, cluster.read(first.node, volume, 'lines'));
      t.equal(fault, null, `lines on ${name}`);
    }
    const { status } = await cluster.waitFor('the status tells it', async () => {
      const object = await cluster.simpleVolume(volume);
      return object?.status?.replicasSummary === '2/2' && object;
    });
    t.equal(
      status.conditions.find((one: { type: string }) => one.type === 'FencingPossible')?.status,
      'True',
    );
  });

  let before: string;
  let second: RunningPod;
  let epoch: number;
  await step('power cut: the replacement runs on a copy, and loses no more than was announced', async (t) => {
    await cluster.leadElsewhere(first.node);
    await cluster.failoverReady(volume);
    const began = performance.now();
    await cluster.node(first.node).powerCut();
    const off = Date.now();
    before = cluster.read(first.node, volume, 'lines') ?? '';
    let announced = 0;
    [second, announced] = await Promise.all([
      cluster.podRunning('app=app', { not: [first.node], limitMs: FAILOVER_MS }),
      cluster.failedOver(volume, first.node, off, FAILOVER_MS),
    ]);
    t.comment(
      `from the power cut to Running elsewhere: ${seconds(began)} (monitor grace ${MONITOR_GRACE_S} s,`,
    );
    t.comment(`failover grace ${SHORT_TIMES['failover-grace-period']})`);
    const { status } = await cluster.simpleVolume(volume);
    t.equal(status.activeNode, second.node);
    // One more, when the scheduler chose another node than the copy's.
    t.ok([2, 3].includes(status.epoch), `epoch ${status.epoch}`);
    epoch = status.epoch;
    const after = await cluster.waitFor('the replacement writes', async () => {
      const text = await cluster.sh(second.name, 'cat /data/lines');
      return lines(text).some((line) => line.pod === second.name) && text;
    });
    const { lost, fault } = compareLines(before, after);
    t.comment(`of ${lines(before).length} lines, one a second, ${lost} were lost`);
    t.equal(fault, null);
    t.ok(lost <= announced + 2, `announced: ${announced.toFixed(1)} s`);
    t.strictSame(
      await cluster.differences(volume, first.node, second.node, 'deep'),
      [],
      'all else is as it was',
    );
  });

  await step('the old node comes back as a copy; what it had is in its backups', async (t) => {
    await cluster.node(first.node).start();
    await cluster.waitFor(
      'both copies are there',
      async () => (await cluster.simpleVolume(volume))?.status?.replicasSummary === '2/2',
      120_000,
    );
    t.match(await cluster.simpleVolume(volume), { status: { activeNode: second.node, epoch } });
    const [backup, ...more] = cluster.backups(first.node, volume);
    t.same(more, []);
    t.equal(cluster.readFile(`${backup}/lines`), before, 'every line that the cut node had written');
    await cluster.waitFor('the new lines reach it', async () =>
      lines(cluster.read(first.node, volume, 'lines')).some((line) => line.pod === second.name),
    );
    const running = await cluster.podRunning('app=app');
    t.equal(running.uid, second.uid, 'the pod was not disturbed');
  });
});
