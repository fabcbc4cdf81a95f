/** A node loses its power, and with it whatever its workloads are made of; it comes back sooner or later. */
import t, { type Test } from 'tap';
import { Cluster, noCluster, type RunningPod, type VolumeRef } from './harness/cluster.ts';
import { claim, compareLines, deployment, lines, pod, SHORT_TIMES, statefulSet } from './harness/objects.ts';
import { steps } from './harness/steps.ts';

const FAILOVER_MS = 120_000;
const since = (start: number): string => `${((performance.now() - start) / 1000).toFixed(1)} s`;

t.test('power cuts', { skip: noCluster(), timeout: 1_140_000 }, async (t) => {
  const cluster = await Cluster.start({ say: (line) => t.comment(line) });
  t.teardown(() => cluster.stop());
  const step = steps(t, cluster);

  interface Workload {
    claim: string;
    selector: string;
    volume: VolumeRef;
    pod: RunningPod;
    /** what it had written when its node was cut */
    before: string;
    /** and when that was, ms since 1970 */
    off: number;
  }

  /** Starts workloads on one node and waits until each has written and could fail over (`copies`: has its copies). */
  async function startOn(
    node: string,
    list: readonly { claim: string; selector: string; objects: object[] }[],
  ): Promise<Workload[]> {
    await Promise.all(cluster.others(node).map(({ name }) => cluster.cordon(name)));
    await cluster.apply(...list.flatMap(({ objects }) => objects));
    const running = await Promise.all(
      list.map(async ({ claim, selector }) => {
        const pod = await cluster.podRunning(selector);
        return { claim, selector, pod, volume: await cluster.volumeOf(claim), before: '', off: 0 };
      }),
    );
    await Promise.all(cluster.others(node).map(({ name }) => cluster.uncordon(name)));
    return running;
  }

  const find = (list: readonly Workload[], name: string): Workload =>
    list.find((one) => one.claim === name) as Workload;

  /** Cuts the node and notes what was written until then. */
  async function cut(node: string, workloads: readonly Workload[]): Promise<number> {
    const start = performance.now();
    await cluster.node(node).powerCut();
    const off = Date.now();
    for (const one of workloads)
      Object.assign(one, { off, before: cluster.read(node, one.volume, 'lines') ?? '' });
    return start;
  }

  /** Its successor runs and goes on with what was there. */
  async function goesOn(
    t: Test,
    one: Workload,
    start: number,
    { selector = one.selector, movesSince = one.off }: { selector?: string; movesSince?: number } = {},
  ): Promise<RunningPod> {
    const [next, announced] = await Promise.all([
      cluster.podRunning(selector, { old: one.pod, limitMs: FAILOVER_MS }).then((pod) => {
        t.comment(`${one.claim}: Running on ${pod.node} ${since(start)} after the cut`);
        return pod;
      }),
      cluster.failedOver(one.volume, one.pod.node, one.off, FAILOVER_MS, movesSince),
    ]);
    await wrote(next, one);
    const { lost, fault } = compareLines(one.before, cluster.read(next.node, one.volume, 'lines'));
    t.equal(fault, null, one.claim);
    const what = `${lost} of ${lines(one.before).length} lines, one a second, were lost`;
    t.ok(lost <= announced + 2, `${one.claim}: ${what}; announced: ${announced.toFixed(1)} s`);
    t.match(await cluster.simpleVolume(one.volume), { status: { activeNode: next.node } });
    return next;
  }

  const wrote = (next: RunningPod, one: Workload): Promise<unknown> =>
    cluster.waitFor(`${next.name} writes`, async () =>
      lines(cluster.read(next.node, one.volume, 'lines')).some((line) => line.pod === next.name),
    );

  const whole = (one: Workload): Promise<unknown> =>
    cluster.waitFor(
      `${one.claim} has both copies`,
      async () => (await cluster.simpleVolume(one.volume))?.status?.replicasSummary === '2/2',
      120_000,
    );

  let all: Workload[] = [];
  let cutAt = 0;
  const newPods = new Map<string, RunningPod>();

  await step('every kind of workload starts on one node', async () => {
    for (const node of ['n1', 'n2']) await cluster.kubectl(['label', 'node', node, 'tier=game']);
    const slow = { annotations: { ...SHORT_TIMES, 'failover-grace-period': '10m' } };
    all = await startOn('n1', [
      { claim: 'deploy', selector: 'app=deploy', objects: [claim('deploy'), deployment('deploy', 'deploy')] },
      { claim: 'data-set-0', selector: 'app=set', objects: [statefulSet('set')] },
      { claim: 'bare', selector: 'app=bare', objects: [claim('bare'), pod('bare', 'bare')] },
      {
        claim: 'selected',
        selector: 'app=selected',
        objects: [claim('selected'), deployment('selected', 'selected', { nodeSelector: { tier: 'game' } })],
      },
      {
        claim: 'pinned',
        selector: 'app=pinned',
        objects: [
          claim('pinned'),
          deployment('pinned', 'pinned', { nodeSelector: { 'kubernetes.io/hostname': 'n1' } }),
        ],
      },
      {
        claim: 'patient',
        selector: 'app=patient',
        objects: [claim('patient', slow), deployment('patient', 'patient')],
      },
    ]);
    await cluster.leadElsewhere('n1');
    for (const one of all) if (one.claim !== 'pinned') await cluster.failoverReady(one.volume);
    await whole(find(all, 'pinned'));
  });

  await step(
    "Deployment, StatefulSet, node selector and a bare pod's successor go on elsewhere",
    async (t) => {
      cutAt = await cut('n1', all);
      await cluster.apply(pod('successor', 'bare'));
      await Promise.all(
        ['deploy', 'data-set-0', 'selected', 'bare'].map(async (name) => {
          const successor = name === 'bare' ? { selector: 'app=successor' } : {};
          newPods.set(name, await goesOn(t, find(all, name), cutAt, successor));
        }),
      );
      t.equal(newPods.get('selected')?.node, 'n2', 'the node selector leaves only this one');
      t.equal(newPods.get('data-set-0')?.name, 'set-0');
    },
  );

  await step('what fits nowhere else stays, and says why', async (t) => {
    const { status } = await cluster.waitFor('the refusal is told', async () => {
      const object = await cluster.simpleVolume(find(all, 'pinned').volume);
      return object?.status?.refused?.length > 0 && object;
    });
    t.match(status, { activeNode: 'n1', epoch: 1 });
    t.match(JSON.stringify(status.refused), /does not fit/);
  });

  await step('node back a minute later: what waited for it goes on there with every line', async (t) => {
    await new Promise((resolve) => setTimeout(resolve, Math.max(0, cutAt + 60_000 - performance.now())));
    await cluster.node('n1').start();
    for (const name of ['pinned', 'patient']) {
      const one = find(all, name);
      await cluster.waitFor(
        `${name} writes again`,
        async () => lines(cluster.read('n1', one.volume, 'lines')).length > lines(one.before).length,
        90_000,
      );
      const { lost, fault } = compareLines(one.before, cluster.read('n1', one.volume, 'lines'));
      t.strictSame({ lost, fault }, { lost: 0, fault: null }, name);
      t.match(await cluster.simpleVolume(one.volume), { status: { activeNode: 'n1', epoch: 1 } });
    }
  });

  await step(
    'node back after the failovers: it has copies again, and its old trees in the backups',
    async (t) => {
      for (const name of ['deploy', 'data-set-0', 'selected', 'bare']) {
        const one = find(all, name);
        await whole(one);
        const backups = cluster.backups('n1', one.volume);
        t.equal(backups.length, 1, `${name}: one backup`);
        t.equal(cluster.readFile(`${backups[0]}/lines`), one.before, `${name}: what the cut node had`);
        t.equal(
          (await cluster.podRunning(name === 'bare' ? 'app=successor' : one.selector)).uid,
          newPods.get(name)?.uid,
        );
      }
    },
  );

  await step(
    'node back in the middle of the failover: one writer, and nothing lost that the copy had',
    async (t) => {
      const one = find(all, 'deploy');
      one.pod = await cluster.podRunning(one.selector);
      await cluster.leadElsewhere(one.pod.node);
      await cluster.failoverReady(one.volume);
      const { epoch } = (await cluster.simpleVolume(one.volume)).status;
      const start = await cut(one.pod.node, [one]);
      await cluster.waitFor(
        'the decision',
        async () => (await cluster.simpleVolume(one.volume)).status.epoch > epoch,
        FAILOVER_MS,
        50,
      );
      await cluster.node(one.pod.node).start();
      const next = await goesOn(t, one, start);
      await whole(one);
      t.equal((await cluster.podRunning(one.selector)).uid, next.uid);
      // The scheduler may have sent the new pod to the node that is back, and the volume after it.
      const backups = cluster.backups(one.pod.node, one.volume);
      t.ok(
        backups.some((backup) => cluster.readFile(`${backup}/lines`) === one.before),
        'what the cut node had is in its backups',
      );
    },
  );

  await step('the leading controller is lost together with the workload', async (t) => {
    const one = find(all, 'deploy');
    one.pod = await cluster.podRunning(one.selector);
    await cluster.leadOn(one.pod.node);
    await cluster.failoverReady(one.volume);
    const start = await cut(one.pod.node, [one]);
    await goesOn(t, one, start);
    await cluster.node(one.pod.node).start();
    await whole(one);
  });

  /** The node is to be left, and its pod is gone: the volume is about to move, or moves. */
  async function beginMove(one: Workload): Promise<void> {
    one.pod = await cluster.podRunning(one.selector);
    await whole(one);
    await cluster.leadElsewhere(one.pod.node);
    await cluster.failoverReady(one.volume);
    await cluster.cordon(one.pod.node);
    await cluster.kubectl(['delete', 'pod', one.pod.name, '--wait=false']);
    const gone = async (): Promise<boolean> => (await cluster.get('pod', one.pod.name)) === null;
    await cluster.waitFor('the old pod is gone', gone, 30_000, 20);
  }

  await step('power cut of the node that a planned move leaves', async (t) => {
    const one = find(all, 'selected');
    const movesSince = Date.now();
    await beginMove(one);
    const start = await cut(one.pod.node, [one]);
    // The move may have been decided before the power was off.
    const next = await goesOn(t, one, start, { movesSince });
    const { lost } = compareLines(one.before, cluster.read(next.node, one.volume, 'lines'));
    t.comment(`${lost} lines lost`);
    await cluster.node(one.pod.node).start();
    await cluster.uncordon(one.pod.node);
    await whole(one);
  });

  await step('power cut of the node that a planned move goes to', async (t) => {
    const one = find(all, 'deploy');
    await beginMove(one);
    const left = one.pod.node;
    const { status } = await cluster.waitFor(
      'the volume is on another node',
      async () => {
        const object = await cluster.simpleVolume(one.volume);
        return object.status.activeNode !== left && object;
      },
      60_000,
      20,
    );
    const start = performance.now();
    await cluster.node(status.activeNode).powerCut();
    one.off = Date.now();
    one.before = cluster.read(left, one.volume, 'lines') ?? '';
    one.pod = { ...one.pod, node: status.activeNode };
    await cluster.uncordon(left);
    await goesOn(t, one, start);
    await cluster.node(status.activeNode).start();
    await whole(one);
  });
});
