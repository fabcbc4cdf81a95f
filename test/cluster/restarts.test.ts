/** Parts of a node end and begin again under a workload that goes on writing. */
import t, { type Test } from 'tap';
import {
  Cluster,
  type KubeObject,
  noCluster,
  type RunningPod,
  SYSTEM,
  type VolumeRef,
} from './harness/cluster.ts';
import { claim, compareLines, deployment, lines } from './harness/objects.ts';
import { steps } from './harness/steps.ts';

t.test('restarts under a writer', { skip: noCluster(), timeout: 540_000 }, async (t) => {
  const cluster = await Cluster.start({ say: (line) => t.comment(line) });
  t.teardown(() => cluster.stop());
  const step = steps(t, cluster);
  let volume: VolumeRef;
  let pod: RunningPod;

  const text = (): string | null => cluster.read(pod.node, volume, 'lines');
  const written = (): number => lines(text()).length;
  const writesOn = (from: number): Promise<unknown> =>
    cluster.waitFor('the pod writes on', async () => written() > from + 2);
  /** The longest time between two lines from number `from` on, seconds. */
  const longestPause = (from: number): number => {
    const at = lines(text())
      .slice(from)
      .map((line) => line.at);
    return Math.max(...at.slice(1).map((time, index) => time - (at[index] as number)));
  };
  /** The same pod, container and epoch, and nothing missing. */
  const undisturbed = async (t: Test, before: string | null): Promise<void> => {
    const now = await cluster.get('pod', pod.name);
    t.equal(now.metadata.uid, pod.uid);
    t.equal(now.status.containerStatuses[0].restartCount, 0, 'no container was restarted');
    t.strictSame(compareLines(before, text()), { lost: 0, fault: null });
    t.match(await cluster.simpleVolume(volume), { status: { activeNode: pod.node, epoch: 1 } });
  };
  const copiesFollow = (): Promise<unknown> => {
    const goal = written();
    return cluster.waitFor('both copies follow', async () =>
      cluster.others(pod.node).every(({ name }) => lines(cluster.read(name, volume, 'lines')).length >= goal),
    );
  };

  await step('a writer with two copies', async () => {
    await cluster.apply(claim('data'), deployment('app', 'data'));
    pod = await cluster.podRunning('app=app');
    volume = await cluster.volumeOf('data');
    await cluster.failoverReady(volume);
  });

  await step('kubelet restarted three times: the pod notices nothing', async (t) => {
    const before = text();
    for (let i = 0; i < 3; i++) {
      await cluster.node(pod.node).restartKubelet(i % 2 === 0 ? 'SIGKILL' : 'SIGTERM');
      await writesOn(written());
    }
    await cluster.waitFor('kubelet answers', async () =>
      (await cluster.sh(pod.name, 'df /data')).includes('/data'),
    );
    await undisturbed(t, before);
    t.ok(longestPause(lines(before).length - 1) <= 3, 'no pause');
    await copiesFollow();
  });

  await step('all agents restarted at once: a pause at most, and the copies follow', async (t) => {
    const before = text();
    const old = (await cluster.parts('agent')).map((one) => one.metadata.name as string);
    await cluster.kubectl(['delete', 'pod', '-n', SYSTEM, '--wait=false', ...old]);
    await cluster.waitFor('all agents are new', async () => {
      const agents = await cluster.parts('agent');
      const ready = (one: KubeObject): boolean =>
        !old.includes(one.metadata.name) && one.status.containerStatuses?.[0]?.ready === true;
      return agents.length === old.length && agents.every(ready);
    });
    await writesOn(written());
    t.comment(`longest pause of the writer: ${longestPause(lines(before).length - 1)} s`);
    await undisturbed(t, before);
    await copiesFollow();
  });

  await step('all agents killed at once', async (t) => {
    const before = text();
    await Promise.all(cluster.nodes.map((node) => node.killContainer('agent')));
    await writesOn(written());
    await copiesFollow();
    t.comment(`longest pause of the writer: ${longestPause(lines(before).length - 1)} s`);
    await undisturbed(t, before);
  });

  await step('all csi-node processes killed at once', async (t) => {
    const before = text();
    await Promise.all(cluster.nodes.map((node) => node.killContainer('csi-node')));
    await writesOn(written());
    await copiesFollow();
    t.comment(`longest pause of the writer: ${longestPause(lines(before).length - 1)} s`);
    await undisturbed(t, before);
  });

  await step('power cut and back at once: the pod goes on where it was, with every line', async (t) => {
    await cluster.failoverReady(volume);
    await cluster.node(pod.node).powerCut();
    const before = text();
    await cluster.node(pod.node).start();
    await writesOn(lines(before).length);
    t.strictSame(compareLines(before, text()), { lost: 0, fault: null });
    t.match(await cluster.simpleVolume(volume), { status: { activeNode: pod.node, epoch: 1 } });
    await copiesFollow();
    t.same(cluster.backups(pod.node, volume), [], 'nothing was put aside');
  });
});
