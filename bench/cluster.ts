/** What a user of a real cluster waits for, on three nodes with the chart installed as it comes. */
import { readdirSync, readFileSync } from 'node:fs';
import { CLAIMS, PODS } from '../controller/cluster/index.ts';
import type { KubeObject, Resource } from '../controller/cluster/types.ts';
import { Cluster, MONITOR_GRACE_S, noCluster, type RunningPod } from '../test/cluster/harness/cluster.ts';
import {
  claim,
  compareLines,
  deployment,
  FAST_WRITER,
  lines,
  pod,
  SHORT_TIMES,
} from '../test/cluster/harness/objects.ts';
import { kubeOf } from '../test/kube/helpers.ts';
import { type Figure, type Measure, MIB } from './lib/figure.ts';
import { memoryOf } from './lib/proc.ts';
import { percentile } from './lib/stats.ts';

const STARTS = 5;
const CUTS = 3;
const FAILOVER_MS = 180_000;
/** How long nothing happens before memory is looked at, ms. */
const REST_MS = 45_000;

const sleep = (ms: number): Promise<void> => new Promise((resolve) => setTimeout(resolve, ms));
const secondsSince = (start: number): number => (performance.now() - start) / 1000;
const median = (values: readonly number[]): number => percentile(values, 50);
const all = (values: readonly number[], digits = 1): string =>
  values.map((one) => one.toFixed(digits)).join(', ');

/** Processes of a pod, by the cgroup that kubelet made for it. */
function processesOf(uid: string): number[] {
  return readdirSync('/proc')
    .filter((name) => /^\d+$/.test(name))
    .map(Number)
    .filter((pid) => {
      try {
        return readFileSync(`/proc/${pid}/cgroup`, 'utf8').includes(`/pod${uid}/`);
      } catch {
        return false;
      }
    });
}

export const figure: Figure = {
  title: 'a real cluster of three nodes',
  method: `Kubernetes with containerd on three nodes of one machine, the chart with its defaults, monitor grace ${MONITOR_GRACE_S} s; medians, single values in the notes; the peer of a start is the same pod without a claim (the scheduler itself looks once a second whether a claim is bound: one of the two seconds), of a power cut Kubernetes itself: 11.5 min for a Deployment, never for a StatefulSet (measured once, not here)`,
  async run(say): Promise<Measure[]> {
    const missing = noCluster();
    if (missing) throw new Error(missing);
    const cluster = await Cluster.start({ say });
    const kube = kubeOf(cluster.kubeconfig);
    try {
      const measures: Measure[] = [];

      say('starts');
      const started: number[] = [];
      const bare: number[] = [];
      for (let i = 0; i < STARTS; i++) {
        // Without kubectl, each call of which takes a tenth of a second and one of the two cores.
        const time = async (name: string, ...objects: object[]): Promise<number> => {
          const start = performance.now();
          for (const one of objects as (KubeObject & { kind: string })[]) {
            const kind: Resource = one.kind === PODS.kind ? PODS : CLAIMS;
            await kube.create(kind, { ...one, metadata: { ...one.metadata, namespace: 'default' } });
          }
          await cluster.waitFor(
            `${name} runs`,
            async () => (await cluster.get('pod', name))?.status?.phase === 'Running',
            FAILOVER_MS,
            20,
          );
          const took = secondsSince(start);
          await cluster.kubectl(['delete', 'pod', name, '--now']);
          return took;
        };
        const script = 'exec sleep 3600';
        const quick = { script, graceS: 0 };
        bare.push(
          await time(
            `bare-${i}`,
            pod(`bare-${i}`, 'x', { ...quick, spec: { volumes: [{ name: 'data', emptyDir: {} }] } }),
          ),
        );
        started.push(await time(`start-${i}`, claim(`start-${i}`), pod(`start-${i}`, `start-${i}`, quick)));
        await cluster.kubectl(['delete', 'pvc', `start-${i}`]);
      }
      measures.push(
        {
          name: 'claim created to pod Running',
          value: median(started),
          unit: 's',
          target: 2,
          note: all(started),
        },
        { name: 'the same pod without a claim', value: median(bare), unit: 's', note: all(bare) },
      );

      say('at rest');
      await sleep(REST_MS);
      const node = (await cluster.leader()) as string;
      const [other] = cluster.others(node);
      const parts = [...(await cluster.parts('agent')), ...(await cluster.parts('csi-node'))].filter(
        (one) => one.spec.nodeName === other?.name,
      );
      const memory = parts
        .flatMap((one) => processesOf(one.metadata.uid))
        .flatMap((pid) => memoryOf(pid) ?? []);
      const sum = (key: 'pss' | 'anonymous'): number =>
        memory.reduce((total, one) => total + one[key], 0) / MIB;
      const what = `agent and csi-node of a node, ${memory.length} processes`;
      measures.push(
        { name: 'node at rest: PSS', value: sum('pss'), unit: 'MiB', target: 100, note: what },
        { name: 'node at rest: anonymous', value: sum('anonymous'), unit: 'MiB', target: 48 },
      );

      say('power cuts');
      const kinds = {
        none: { ...SHORT_TIMES, 'failover-fencing': 'none' },
        lease: { ...SHORT_TIMES, 'failover-fencing': 'lease', 'failover-grace-period': '1s' },
      };
      const took: Record<keyof typeof kinds, number[]> = { none: [], lease: [] };
      const lost: number[] = [];
      const names = Object.keys(kinds) as (keyof typeof kinds)[];
      await Promise.all(cluster.others('n1').map(({ name }) => cluster.cordon(name)));
      await cluster.apply(
        ...names.flatMap((name) => [claim(name, { annotations: kinds[name] }), deployment(name, name)]),
      );
      const running = new Map<string, RunningPod>();
      for (const name of names) running.set(name, await cluster.podRunning(`app=${name}`));
      await Promise.all(cluster.others('n1').map(({ name }) => cluster.uncordon(name)));
      for (let run = 0; run < CUTS; run++) {
        const from = running.get('none')?.node as string;
        // Both are on one node, so that one cut shows both.
        if (running.get('lease')?.node !== from) {
          await Promise.all(cluster.others(from).map(({ name }) => cluster.cordon(name)));
          const lease = await cluster.podRunning('app=lease', {
            not: cluster.others(from).map(({ name }) => name),
            limitMs: FAILOVER_MS,
          });
          running.set('lease', lease);
          await Promise.all(cluster.others(from).map(({ name }) => cluster.uncordon(name)));
        }
        await cluster.leadElsewhere(from);
        for (const name of names) {
          const volume = await cluster.volumeOf(name);
          await cluster.failoverReady(volume, FAILOVER_MS);
        }
        await sleep(10_000);
        const start = performance.now();
        await cluster.node(from).powerCut();
        await Promise.all(
          names.map(async (name) => {
            const next = await cluster.podRunning(`app=${name}`, { not: [from], limitMs: FAILOVER_MS });
            took[name].push(secondsSince(start));
            running.set(name, next);
            const volume = await cluster.volumeOf(name);
            const before = cluster.read(from, volume, 'lines');
            await cluster.waitFor('it writes', async () =>
              lines(cluster.read(next.node, volume, 'lines')).some((line) => line.pod === next.name),
            );
            const found = compareLines(before, cluster.read(next.node, volume, 'lines'));
            if (found.fault !== null) throw new Error(`${name}: ${found.fault}`);
            lost.push(found.lost);
          }),
        );
        say(
          `cut ${run + 1}: ${names.map((name) => `${name} ${took[name].at(-1)?.toFixed(1)} s`).join(', ')}`,
        );
        await cluster.node(from).start();
        for (const name of names)
          await cluster.waitFor(
            `${name} is whole`,
            async () =>
              (await cluster.simpleVolume(await cluster.volumeOf(name)))?.status?.replicasSummary === '2/2',
            FAILOVER_MS,
          );
      }
      measures.push(
        {
          name: 'power cut to Running, fencing none, grace 15 s',
          value: median(took.none),
          unit: 's',
          target: 33,
          note: all(took.none),
        },
        {
          name: 'power cut to Running, fencing lease of 8 s',
          value: median(took.lease),
          unit: 's',
          target: 15,
          note: all(took.lease),
        },
        {
          name: 'seconds of writes lost at a cut',
          value: Math.max(...lost),
          unit: 's',
          target: 3,
          note: `one a second; ${all(lost, 0)}`,
        },
      );

      say('drains');
      const pauses: number[] = [];
      await cluster.apply(claim('busy'), deployment('busy', 'busy', { script: FAST_WRITER }));
      let busy = await cluster.podRunning('app=busy');
      const volume = await cluster.volumeOf('busy');
      let missingLines = 0;
      for (let i = 0; i < cluster.nodes.length; i++) {
        await cluster.failoverReady(volume, FAILOVER_MS);
        await cluster.waitFor(
          'it is whole',
          async () => (await cluster.simpleVolume(volume))?.status?.replicasSummary === '2/2',
          FAILOVER_MS,
        );
        const from = busy;
        // What the pod has written on its node, seen from outside until it is gone.
        let seen = 0;
        const look = setInterval(() => {
          const own = lines(cluster.read(from.node, volume, 'lines')).findLast(
            (line) => line.pod === from.uid,
          );
          seen = Math.max(seen, own?.number ?? 0);
        }, 25);
        try {
          await cluster.drain(from.node, FAILOVER_MS);
          busy = await cluster.podRunning('app=busy', { not: [from.node], limitMs: FAILOVER_MS });
        } finally {
          clearInterval(look);
        }
        const written = await cluster.waitFor('it writes', async () => {
          const found = lines(cluster.read(busy.node, volume, 'lines'));
          return found.some((line) => line.pod === busy.uid) && found;
        });
        const last = written.findLast((line) => line.pod === from.uid);
        const next = written.find((line) => line.pod === busy.uid);
        if (!last || !next) throw new Error('the lines of one of the pods are missing');
        pauses.push(next.at - last.at);
        missingLines += Math.max(0, seen - last.number);
        missingLines += written.filter((line, index) => line.number !== index + 1).length;
        await cluster.uncordon(from.node);
      }
      measures.push({
        name: 'drain: pause of the application',
        value: median(pauses),
        unit: 's',
        target: 6,
        note: `of five lines a second; ${all(pauses, 2)}; ${missingLines} of its lines missing`,
      });
      return measures;
    } catch (error) {
      await cluster.dump(String(error));
      throw error;
    } finally {
      kube.close();
      await cluster.stop();
    }
  },
};
