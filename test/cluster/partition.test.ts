/**
 * The network falls apart, agents restart, a node comes back with an old disk: never two writers, and what one of them
 * had more than the copies is kept.
 */
import { execFileSync } from 'node:child_process';
import { renameSync, rmSync } from 'node:fs';
import path from 'node:path';
import t, { type Test } from 'tap';
import { Cluster, noCluster, type RunningPod, type VolumeRef } from './harness/cluster.ts';
import {
  CGROUPS,
  type Decision,
  EpochWatch,
  isFrozen,
  lastWritten,
  listedBackups,
  longestPause,
  QUICK_WRITER,
  uptime,
} from './harness/fencing.ts';
import { claim, compareLines, deployment, lines } from './harness/objects.ts';

const FAILOVER_MS = 150_000;
const HEALED_MS = 150_000;
const LEASE_S = 8;
/** How long a writer stands still, at least, before its partition heals, seconds. */
const PAUSE_S = 2;
/** Nothing but the lease is waited for: this is shorter. */
const TIMES = {
  'replication-enabled': 'true',
  'replication-debounce': '500ms',
  'failover-enabled': 'true',
  'failover-grace-period': '5s',
};

t.test('partitions and fencing', { skip: noCluster(), timeout: 840_000 }, async (t) => {
  const cluster = await Cluster.start({ say: (line) => t.comment(line) });
  t.teardown(() => cluster.stop());

  interface Writer {
    name: string;
    volume: VolumeRef;
    pod: RunningPod;
  }

  const text = (node: string, one: Writer): string => cluster.read(node, one.volume, 'lines') ?? '';
  const status = async (one: Writer) => (await cluster.simpleVolume(one.volume))?.status;

  /** A scenario of its own: whatever becomes of it, the next one finds a cluster in which all is well. */
  async function scenario(
    name: string,
    run: (t: Test, start: typeof startWriter) => Promise<void>,
    skip: string | false = false,
  ): Promise<void> {
    await t.test(name, { skip }, async (t) => {
      const began = performance.now();
      const started: string[] = [];
      t.teardown(async () => {
        if (!t.passing()) t.comment(await cluster.dump(name));
        for (const node of cluster.nodes) {
          if (node.running) await node.heal();
          else await node.start();
          await cluster.uncordon(node.name);
        }
        for (const one of started)
          await cluster.kubectl(['delete', 'deployment,pvc', one, '--wait=false', '--ignore-not-found']);
        await settled();
        t.comment(`${((performance.now() - began) / 1000).toFixed(0)} s in all`);
      });
      await run(t, (name, node, annotations) => {
        started.push(name);
        return startWriter(name, node, annotations);
      });
    });
  }

  /** All nodes and all parts of the product are Ready. */
  async function settled(): Promise<void> {
    await cluster.kubectl(['wait', '--for=condition=Ready', 'node', '--all', '--timeout=120s'], '', 130_000);
    const ready = ['wait', '--for=condition=Ready', 'pod', '--all', '-n', 'simple-volume-system'];
    await cluster.waitFor('all parts are Ready', () => cluster.kubectl([...ready, '--timeout=20s']), 120_000);
  }

  /** Starts a writer on a node and waits until it has written and a failover would wait for nothing but its times. */
  async function startWriter(
    name: string,
    node: string,
    annotations: Readonly<Record<string, string>> = {},
  ): Promise<Writer> {
    for (const other of cluster.others(node)) await cluster.cordon(other.name);
    await cluster.apply(
      claim(name, { annotations: { ...TIMES, ...annotations } }),
      deployment(name, name, { script: QUICK_WRITER }),
    );
    const pod = await cluster.podRunning(`app=${name}`);
    for (const other of cluster.others(node)) await cluster.uncordon(other.name);
    const one = { name, pod, volume: await cluster.volumeOf(name) };
    await cluster.failoverReady(one.volume);
    await copied(one, node);
    return one;
  }

  /** What is written now reaches both copies. */
  async function copied(one: Writer, active: string): Promise<void> {
    const { length } = lines(text(active, one));
    for (const { name } of cluster.others(active))
      await cluster.waitFor(
        `line ${length} of ${one.name} reaches ${name}`,
        async () => lines(text(name, one)).length >= length,
        HEALED_MS,
      );
  }

  /** The node on which the controller leads, the one with its other replica, and the one with neither. */
  async function places(): Promise<{ leader: string; standby: string; plain: string }> {
    const leader = await cluster.leader();
    const nodes = (await cluster.parts('controller')).map((pod) => pod.spec.nodeName as string);
    const standby = nodes.find((node) => node !== leader);
    const plain = cluster.nodes.map(({ name }) => name).find((name) => !nodes.includes(name));
    if (standby === undefined || plain === undefined) throw new Error(`controllers on ${nodes}`);
    return { leader, standby, plain };
  }

  /** Its successor elsewhere runs and writes. */
  async function successor(one: Writer): Promise<RunningPod> {
    const next = await cluster.podRunning(`app=${one.name}`, {
      not: [one.pod.node],
      limitMs: FAILOVER_MS,
    });
    await writes(one, next);
    return next;
  }

  /** The pod has written a line more than there are now. */
  async function writes(one: Writer, pod: RunningPod): Promise<void> {
    const own = (): number => lines(text(pod.node, one)).filter((line) => line.pod === pod.name).length;
    const before = own();
    await cluster.waitFor(`${pod.name} writes`, async () => own() > before, HEALED_MS);
  }

  /** The successor goes on with what the old writer had, but for what was announced. Returns how many lines were lost. */
  function goesOn(t: Test, one: Writer, next: RunningPod, before: string, decision: Decision): number {
    const { lost, fault } = compareLines(before, text(next.node, one));
    t.equal(fault, null, one.name);
    const old = lines(before);
    const first = old[old.length - lost]?.at ?? Number.POSITIVE_INFINITY;
    const seconds = (old.at(-1)?.at ?? 0) - Math.min(first, old.at(-1)?.at ?? 0);
    t.comment(`${one.name}: of ${old.length} lines ${lost} were lost, ${seconds.toFixed(1)} s`);
    t.ok(first >= decision.safe, `${one.name}: lost from ${first} on, announced from ${decision.safe} on`);
    return lost;
  }

  /** No byte was written on the old node after the decision. `end`: the last one; `decided`: when that was seen. */
  function standsStill(t: Test, end: number, decided: number, one: Writer, next: RunningPod): void {
    const first = lines(text(next.node, one)).find((line) => line.pod === next.name);
    t.comment(
      `${one.name}: last byte on ${one.pod.node} ${(decided - end).toFixed(2)} s before the decision,`,
    );
    t.comment(`first line on ${next.node} ${((first?.at ?? 0) - decided).toFixed(2)} s after it`);
    t.ok(
      end < decided,
      `${one.name}: the last byte was written at ${end}, the decision was seen at ${decided}`,
    );
    t.ok(
      first !== undefined && end < first.at,
      `${one.name}: the new copy was written first at ${first?.at}`,
    );
  }

  /** Both copies are there again, and what is written now reaches them. */
  async function isWhole(one: Writer, next: RunningPod): Promise<void> {
    await cluster.waitFor(
      `${one.name} has both copies`,
      async () => (await status(one))?.replicasSummary === '2/2',
      HEALED_MS,
    );
    await copied(one, next.node);
  }

  const isGone = (pod: RunningPod): Promise<boolean> =>
    cluster.waitFor(
      `the pod ${pod.name} is gone`,
      async () => (await cluster.get('pod', pod.name)) === null,
      HEALED_MS,
    );

  /** The old node has a copy again; what its writer had is in a backup there, which its agent lists. Returns the file. */
  async function isBack(
    t: Test,
    one: Writer,
    node: string,
    next: RunningPod,
    before: string,
  ): Promise<string> {
    await isWhole(one, next);
    const backups = cluster.backups(node, one.volume);
    t.equal(backups.length, 1, `${one.name}: one backup`);
    const file = path.join(backups[0] ?? '', 'lines');
    t.equal(cluster.readFile(file), before, `${one.name}: what ${node} had, to the last byte`);
    const listed = await listedBackups(cluster, node, one.volume);
    t.strictSame(
      listed.map(({ stamp }) => stamp),
      backups.map((folder) => path.basename(folder)),
      'the agent lists it',
    );
    t.ok((listed[0]?.entries ?? 0) >= lines(before).length, 'with all its entries');
    await isGone(one.pod);
    t.equal((await cluster.podRunning(`app=${one.name}`)).uid, next.uid, 'the new pod was not disturbed');
    return file;
  }

  for (const version of ['v1', 'v2'])
    await scenario(
      `cut off from everything: no byte on the old node once the new copy is written (cgroup ${version})`,
      async (t, start) => {
        const { plain } = await places();
        const one = await start('everything', plain);
        const watch = new EpochWatch(cluster, one.volume);
        t.teardown(() => watch.stop());
        const cutAt = uptime();
        await cluster.partition(plain, 'all');
        const next = await successor(one);
        t.comment(`from the cut to the decision ${(watch.at(2) - cutAt).toFixed(1)} s`);
        t.ok(isFrozen(cluster, one.pod), 'the old pod stands still');
        const old = lastWritten(cluster.tree(plain, one.volume, 'lines'));
        const before = text(plain, one);
        t.ok((lines(before).at(-1)?.at ?? 0) > cutAt, 'the old writer went on after the cut');
        standsStill(t, old, watch.at(2), one, next);
        goesOn(t, one, next, before, watch.decision(2));
        await cluster.heal(plain);
        const kept = await isBack(t, one, plain, next, before);
        standsStill(t, lastWritten(kept), watch.at(2), one, next);
        t.match(await status(one), { activeNode: next.node });
      },
      version === CGROUPS ? false : `this machine has cgroup ${CGROUPS}`,
    );

  await scenario('a partition that heals in time costs a pause and nothing else', async (t, start) => {
    const { plain } = await places();
    const one = await start('pause', plain, { 'failover-grace-period': '60s' });
    await cluster.partition(plain, 'all');
    const file = cluster.tree(plain, one.volume, 'lines');
    await cluster.waitFor(
      'the writer stands still',
      async () => isFrozen(cluster, one.pod) && uptime() - lastWritten(file) > PAUSE_S,
      60_000,
      50,
    );
    const before = text(plain, one);
    await cluster.heal(plain);
    await cluster.waitFor('the writer goes on', async () => !isFrozen(cluster, one.pod), 60_000, 50);
    await writes(one, one.pod);
    await cluster.waitFor('Kubernetes has seen it', async () => {
      const pods = await cluster.list('pods', 'default', `app=${one.name}`);
      return (
        pods.length === 1 &&
        pods[0].status.conditions.some(
          (c: { type: string; status: string }) => c.type === 'Ready' && c.status === 'True',
        )
      );
    });
    const after = text(plain, one);
    t.strictSame(compareLines(before, after), { lost: 0, fault: null }, 'the numbers go on without a gap');
    t.strictSame([...new Set(lines(after).map((line) => line.pod))], [one.pod.name], 'all by the same pod');
    const pause = longestPause(after, one.pod.name);
    t.comment(`the pause was ${pause.toFixed(1)} s`);
    t.ok(pause > PAUSE_S, 'there was one');
    const pod = await cluster.podRunning('app=pause');
    t.equal(pod.uid, one.pod.uid);
    t.equal((await cluster.get('pod', pod.name)).status.containerStatuses[0].restartCount, 0);
    t.match(await status(one), { activeNode: plain, epoch: 1 });
    await copied(one, plain);
    for (const { name } of cluster.nodes)
      t.same(cluster.backups(name, one.volume), [], `no backup on ${name}`);
  });

  await scenario('cut off from the API server alone: with a lease nothing is lost', async (t, start) => {
    const { plain } = await places();
    const [leased, free] = await Promise.all([
      // So long that what was written last could not have been sent by itself.
      start('leased', plain, { 'replication-debounce': '2s' }),
      start('free', plain, { 'failover-fencing': 'none' }),
    ]);
    const watches = [leased, free].map((one) => new EpochWatch(cluster, one.volume));
    t.teardown(() => {
      for (const watch of watches) watch.stop();
    });
    const [seenLeased, seenFree] = watches as [EpochWatch, EpochWatch];
    const cutAt = uptime();
    await cluster.partition(plain, 'api');
    // Its agent can be reached, and puts the old tree away as soon as it hears of the decision.
    let before = '';
    let end = 0;
    const file = cluster.tree(plain, leased.volume, 'lines');
    await cluster.waitFor(
      'the decision',
      async () => {
        if (seenLeased.has(2)) return true;
        [before, end] = [text(plain, leased), lastWritten(file)];
        return false;
      },
      FAILOVER_MS,
      50,
    );
    t.comment(`from the cut to the decision ${(seenLeased.at(2) - cutAt).toFixed(1)} s`);
    const [afterLeased, afterFree] = await Promise.all([successor(leased), successor(free)]);
    standsStill(t, end, seenLeased.at(2), leased, afterLeased);
    t.equal(
      goesOn(t, leased, afterLeased, before, seenLeased.decision(2)),
      0,
      'what the old node still had was fetched',
    );

    await cluster.heal(plain);
    for (const one of [leased, free]) await isWhole(one, one === leased ? afterLeased : afterFree);
    for (const one of [leased, free]) t.ok(await isGone(one.pod), `the old pod ${one.pod.name} is gone`);
    // The copy had all of it: there may be nothing to put away. Whatever is there is not more than was seen.
    for (const folder of [cluster.tree(plain, leased.volume), ...cluster.backups(plain, leased.volume)]) {
      const left = lines(cluster.readFile(path.join(folder, 'lines')));
      const own = left.filter(({ pod }) => pod === leased.pod.name);
      t.equal(own.length, lines(before).length, `${folder}: no line of the old pod after the decision`);
    }

    // Nobody stands still for certain here. What matters: no line of the old writer reaches the new tree any more, and
    // none vanishes.
    const [backup, ...more] = cluster.backups(plain, free.volume);
    t.same(more, []);
    const kept = path.join(backup ?? '', 'lines');
    t.comment(`free: last byte ${(lastWritten(kept) - seenFree.at(2)).toFixed(1)} s after the decision`);
    const had = cluster.readFile(kept) ?? '';
    t.strictSame(
      lines(had).map(({ number, pod }) => [number, pod]),
      lines(had).map((_, index) => [index + 1, free.pod.name]),
      'the backup has every line of the old writer',
    );
    goesOn(t, free, afterFree, had, seenFree.decision(2));
    t.strictSame(
      (await listedBackups(cluster, plain, free.volume)).map(({ stamp }) => stamp),
      [path.basename(backup ?? '')],
    );
    t.equal((await cluster.podRunning('app=leased')).uid, afterLeased.uid);
    const running = await cluster.podRunning('app=free');
    t.equal(running.uid, afterFree.uid);
    await copied(free, running.node);
  });

  await scenario('cut off from the other agents alone: nothing moves and nothing waits', async (t, start) => {
    const { plain } = await places();
    const one = await start('agents', plain);
    const cutAt = uptime();
    await cluster.partition(plain, 'agents');
    // Twice as long as a lease: whoever needed the copies would stand still by now.
    await cluster.waitFor(
      'the writer goes on for two leases',
      async () => {
        if (isFrozen(cluster, one.pod)) throw new Error('the writer stands still');
        return (lines(text(plain, one)).at(-1)?.at ?? 0) > cutAt + 2 * LEASE_S;
      },
      60_000,
      100,
    );
    const during = text(plain, one);
    const pause = longestPause(during, one.pod.name);
    t.comment(`the longest pause between two lines was ${pause.toFixed(2)} s`);
    t.ok(pause < LEASE_S / 2, 'the writer never stood still');
    const copy = cluster.others(plain).map(({ name }) => lines(text(name, one)).length);
    t.ok(
      copy.every((count) => count < lines(during).length - 20),
      `the copies got nothing: ${copy}`,
    );
    t.match(await status(one), { activeNode: plain, epoch: 1 });
    await cluster.heal(plain);
    await copied(one, plain);
    t.equal((await cluster.podRunning('app=agents')).uid, one.pod.uid);
    t.match(await status(one), { activeNode: plain, epoch: 1 });
    t.strictSame(compareLines(during, text(plain, one)), { lost: 0, fault: null });
  });

  await scenario('all agents restarted at once under load', async (t, start) => {
    const { plain } = await places();
    const one = await start('restart', plain);
    const agents = (await cluster.parts('agent')).map((pod) => pod.metadata.name as string);
    await cluster.kubectl(['delete', 'pod', '-n', 'simple-volume-system', '--wait=false', ...agents]);
    await cluster.waitFor(
      'new agents are Ready',
      async () => {
        const pods = await cluster.parts('agent');
        return (
          pods.length === 3 &&
          pods.every(
            ({ metadata, status }) =>
              !agents.includes(metadata.name) &&
              status.conditions?.some(
                (c: { type: string; status: string }) => c.type === 'Ready' && c.status === 'True',
              ),
          )
        );
      },
      120_000,
    );
    await writes(one, one.pod);
    await copied(one, plain);
    await cluster.sh(one.pod.name, 'touch /data/stop');
    const written = text(plain, one);
    t.comment(`the longest pause between two lines was ${longestPause(written, one.pod.name).toFixed(1)} s`);
    t.strictSame(
      lines(written).map(({ number, pod }) => [number, pod]),
      lines(written).map((_, index) => [index + 1, one.pod.name]),
      'every line by the same pod',
    );
    for (const { name } of cluster.others(plain))
      await cluster.waitFor(
        `${name} has the same tree`,
        async () => (await cluster.differences(one.volume, plain, name)).length === 0,
        HEALED_MS,
      );
    t.equal((await cluster.podRunning('app=restart')).uid, one.pod.uid);
    t.match(await status(one), { activeNode: plain, epoch: 1 });
  });

  await scenario(
    'power cut with a lease; an old primary never wins, not even with an old disk while the new one is cut too',
    async (t, start) => {
      const { plain } = await places();
      const one = await start('power', plain);
      const watch = new EpochWatch(cluster, one.volume);
      t.teardown(() => watch.stop());
      let cutAt = uptime();
      await cluster.node(plain).powerCut();
      const before = text(plain, one);
      const second = await cluster.podRunning('app=power', { not: [plain], limitMs: FAILOVER_MS });
      t.comment(`power cut to replacement Running, lease ${LEASE_S} s, nothing waited for but the lease:`);
      t.comment(`${(uptime() - cutAt).toFixed(1)} s, decided after ${(watch.at(2) - cutAt).toFixed(1)} s`);
      t.ok(watch.at(2) - cutAt > LEASE_S, 'never before the lease has ended');
      await writes(one, second);
      goesOn(t, one, second, before, watch.decision(2));

      const node = cluster.node(plain);
      const image = `${node.pool}.old`;
      execFileSync('cp', ['-a', node.pool, image]);
      await node.start();
      await isBack(t, one, plain, second, before);
      const { epoch } = await status(one);
      t.match(await status(one), { activeNode: second.node });

      await node.powerCut();
      rmSync(node.pool, { recursive: true });
      renameSync(image, node.pool);
      // The present primary is lost as the old one comes back.
      cutAt = uptime();
      await cluster.node(second.node).powerCut();
      const between = text(second.node, one);
      await node.start();
      one.pod = second;
      const third = await cluster.podRunning('app=power', { not: [second.node], limitMs: FAILOVER_MS });
      t.comment(`Running again after ${(uptime() - cutAt).toFixed(1)} s`);
      await writes(one, third);
      t.equal(
        watch.decision(epoch + 1).node,
        cluster.others(plain, second.node)[0]?.name,
        'the only newest copy wins',
      );
      goesOn(t, one, third, between, watch.decision(epoch + 1));
      await cluster.node(second.node).start();
      await isWhole(one, third);
      t.match(await status(one), { activeNode: third.node });
      for (const [name, had] of [
        [second.node, between],
        [plain, before],
      ] as const) {
        const backups = cluster.backups(name, one.volume);
        t.ok(
          backups.some((folder) => cluster.readFile(path.join(folder, 'lines')) === had),
          `what ${name} had is in its backups`,
        );
        t.strictSame(
          (await listedBackups(cluster, name, one.volume)).map(({ stamp }) => stamp),
          backups.map((folder) => path.basename(folder)),
          'and its agent lists it',
        );
      }
    },
  );

  await scenario('cut off from everything together with the leading controller', async (t, start) => {
    const { leader } = await places();
    const one = await start('led', leader);
    const watch = new EpochWatch(cluster, one.volume);
    t.teardown(() => watch.stop());
    const cutAt = uptime();
    await cluster.partition(leader, 'all');
    const next = await successor(one);
    t.comment(`from the cut to the decision ${(watch.at(2) - cutAt).toFixed(1)} s`);
    const before = text(leader, one);
    standsStill(t, lastWritten(cluster.tree(leader, one.volume, 'lines')), watch.at(2), one, next);
    goesOn(t, one, next, before, watch.decision(2));
    await cluster.heal(leader);
    const kept = await isBack(t, one, leader, next, before);
    standsStill(t, lastWritten(kept), watch.at(2), one, next);
    t.match(await status(one), { activeNode: next.node });
  });
});
