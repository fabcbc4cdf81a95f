/**
 * A cluster as the controller sees it, on the real API server: nodes, agents' pods, a class, claims with volumes and
 * pods. Of kubelet, ReplicaSets and the scheduler it plays the little that matters: a deleted pod of a live node ends, a
 * workload without a pod gets another one, and that one runs where the volume is.
 */
import path from 'node:path';
import { FENCE_LEASE_KEY } from '../../controller/act/fence.ts';
import {
  CLAIMS,
  CLASSES,
  type Kube,
  LEASES,
  NODES,
  type Node,
  PODS,
  type Pod,
  SIMPLE_VOLUMES,
  VOLUMES,
} from '../../controller/cluster/index.ts';
import type { SimpleVolume } from '../../controller/cluster/types.ts';
import { Controller, type ControllerOptions } from '../../controller/controller.ts';
import { DRIVER, PREFIX } from '../../controller/plan/types.ts';
import { KubeServer, type KubeServerOptions } from './harness/server.ts';
import { clock, kubeOf, quiet } from './helpers.ts';
import { PlayedAgents } from './scripted-agents.ts';

export const CRDS = path.join(import.meta.dirname, '../../chart/crds');
export const SYSTEM = 'simple-volume-system';
export const LEASE = 'simple-volume-controller';

export async function until<T>(
  what: string,
  check: () => Promise<T | null | undefined | false> | T | null | undefined | false,
  limitMs = 20_000,
): Promise<T> {
  const ends = performance.now() + limitMs;
  let last = '';
  for (;;) {
    try {
      const value = await check();
      if (value) return value;
      last = '';
    } catch (error) {
      last = `: ${(error as Error).message}`;
    }
    if (performance.now() > ends) throw new Error(`not within ${limitMs} ms: ${what}${last}`);
    await new Promise((resolve) => setTimeout(resolve, 50));
  }
}

const claimsOf = (pod: Pod): string[] =>
  (pod.spec?.volumes ?? []).flatMap((one) => one.persistentVolumeClaim?.claimName ?? []);

export interface AgentPlace {
  node: string;
  http: number;
  webdav: number;
}

export class TestCluster {
  readonly server: KubeServer;
  readonly kube: Kube;
  readonly agents: PlayedAgents;
  readonly lost = new Set<string>();
  /** workloads of one pod each: claim to the number of pods so far */
  private readonly workloads = new Map<string, number>();
  private timer: NodeJS.Timeout | null = null;
  private running = false;
  /** a volume is mounted or unmounted, as csi-node would do it */
  mount: (node: string, key: string, mounted: boolean) => void = (node, key, mounted) => {
    const played = this.agents.agents.get(node)?.mounted;
    if (mounted) played?.add(key);
    else played?.delete(key);
  };

  private constructor(server: KubeServer, agents: PlayedAgents) {
    this.server = server;
    this.kube = kubeOf(server.kubeconfig);
    this.agents = agents;
  }

  static async start(
    options: {
      nodes?: readonly string[];
      leaseMs?: number;
      /** between two beats of the played agents, ms */
      beatMs?: number;
      /** false: nobody plays kubelet and scheduler; a thousand pods need not be listed all the time */
      play?: boolean;
      server?: KubeServerOptions;
    } = {},
  ): Promise<TestCluster> {
    const server = await KubeServer.start({ crds: [CRDS], ...options.server });
    const cluster = new TestCluster(server, new PlayedAgents(options.leaseMs ?? 4000, options.beatMs));
    await server.apply({ apiVersion: 'v1', kind: 'Namespace', metadata: { name: SYSTEM } });
    await cluster.kube.create(CLASSES, {
      apiVersion: 'storage.k8s.io/v1',
      kind: 'StorageClass',
      metadata: { name: 'fast' },
      provisioner: DRIVER,
      allowVolumeExpansion: true,
      parameters: { pool: 'default' },
      volumeBindingMode: 'WaitForFirstConsumer',
    });
    // As after a controller of before: of the very first one it would be waited for the longest lease there is.
    await cluster.kube.create(LEASES, {
      apiVersion: 'coordination.k8s.io/v1',
      kind: 'Lease',
      metadata: {
        name: LEASE,
        namespace: SYSTEM,
        annotations: { [FENCE_LEASE_KEY]: String(options.leaseMs ?? 4000) },
      },
      spec: { holderIdentity: '', leaseDurationSeconds: 1, leaseTransitions: 1 },
    });
    await Promise.all((options.nodes ?? ['a', 'b', 'c']).map((node) => cluster.addNode(node)));
    if (options.play !== false) cluster.timer = setInterval(() => void cluster.play(), 200);
    return cluster;
  }

  async stop(): Promise<void> {
    if (this.timer) clearInterval(this.timer);
    this.kube.close();
    await this.agents.stop();
    await this.server.stop();
  }

  /** A node with a played agent. */
  async addNode(node: string): Promise<void> {
    const agent = await this.agents.add(node);
    await this.node(node);
    await this.agentPod({ node, http: agent.port, webdav: agent.port });
  }

  async node(name: string): Promise<void> {
    const made = await this.kube.create(NODES, {
      apiVersion: 'v1',
      kind: 'Node',
      metadata: { name, labels: { [`${PREFIX}pool.default`]: 'true', 'kubernetes.io/hostname': name } },
    } as Node);
    await this.kube.replace(
      NODES,
      {
        ...made,
        status: {
          conditions: [{ type: 'Ready', status: 'True', reason: 'KubeletReady' }],
          allocatable: { cpu: '4', memory: '8Gi', pods: '110' },
          capacity: { cpu: '4', memory: '8Gi', pods: '110' },
        },
      },
      { subresource: 'status' },
    );
    // The API server taints new nodes; a kubelet's controller takes it off.
    await this.kube.merge(NODES, { name }, { spec: { taints: null } });
  }

  async agentPod({ node, http, webdav }: AgentPlace): Promise<void> {
    await this.placePod(SYSTEM, `agent-${node}`, node, {
      labels: { 'app.kubernetes.io/component': 'agent', [`${PREFIX}pool`]: 'default' },
      ports: [
        { name: 'http', containerPort: http },
        { name: 'webdav', containerPort: webdav },
      ],
    });
  }

  async ready(node: string, ready: boolean): Promise<void> {
    await this.kube.jsonPatch(
      NODES,
      { name: node },
      [
        {
          op: 'replace',
          path: '/status/conditions',
          value: [
            {
              type: 'Ready',
              status: ready ? 'True' : 'Unknown',
              reason: ready ? 'KubeletReady' : 'NodeStatusUnknown',
            },
          ],
        },
      ],
      { subresource: 'status' },
    );
    if (ready) return;
    // As the node lifecycle controller does: what cannot be heard is not ready.
    for await (const pod of this.kube.list(PODS, { fieldSelector: `spec.nodeName=${node}` })) {
      const conditions = pod.status?.conditions?.map((one) =>
        one.type === 'Ready'
          ? { ...one, status: 'False', lastTransitionTime: new Date().toISOString() }
          : one,
      );
      await this.kube.merge(
        PODS,
        { namespace: pod.metadata.namespace, name: pod.metadata.name },
        { status: { conditions } },
        { subresource: 'status' },
      );
    }
  }

  async cordon(node: string, cordoned: boolean): Promise<void> {
    await this.kube.merge(NODES, { name: node }, { spec: { unschedulable: cordoned || null } });
  }

  /** Power off: the agent is away, kubelet silent, Kubernetes says NotReady. */
  async lose(node: string): Promise<void> {
    this.lost.add(node);
    this.agents.agents.get(node)?.set('away');
    await this.ready(node, false);
  }

  async back(node: string): Promise<void> {
    this.lost.delete(node);
    this.agents.agents.get(node)?.set('answers');
    await this.ready(node, true);
    for await (const pod of this.kube.list(PODS, {
      namespace: SYSTEM,
      fieldSelector: `spec.nodeName=${node}`,
    }))
      await this.kube.merge(
        PODS,
        { namespace: SYSTEM, name: pod.metadata.name },
        {
          status: {
            conditions: pod.status?.conditions?.map((one) =>
              one.type === 'Ready' ? { ...one, status: 'True' } : one,
            ),
          },
        },
        { subresource: 'status' },
      );
  }

  /** A claim that is bound to a volume of the driver. */
  async claim(
    name: string,
    annotations: Record<string, string> = {},
    options: { namespace?: string; node?: string } = {},
  ): Promise<void> {
    const namespace = options.namespace ?? 'default';
    const made = await this.kube.create(CLAIMS, {
      apiVersion: 'v1',
      kind: 'PersistentVolumeClaim',
      metadata: {
        name,
        namespace,
        annotations: Object.fromEntries(
          Object.entries({ 'replication-enabled': 'true', ...annotations }).map(([key, value]) => [
            key.includes('/') ? key : PREFIX + key,
            value,
          ]),
        ),
      },
      spec: {
        storageClassName: 'fast',
        volumeName: `pv-${name}`,
        accessModes: ['ReadWriteOnce'],
        resources: { requests: { storage: '1Gi' } },
      },
    });
    await this.kube.create(VOLUMES, {
      apiVersion: 'v1',
      kind: 'PersistentVolume',
      metadata: { name: `pv-${name}` },
      spec: {
        storageClassName: 'fast',
        capacity: { storage: '1Gi' },
        accessModes: ['ReadWriteOnce'],
        persistentVolumeReclaimPolicy: 'Delete',
        claimRef: { namespace, name, uid: made.metadata.uid as string },
        csi: {
          driver: DRIVER,
          volumeHandle: `pv-${name}`,
          volumeAttributes: { pool: 'default', node: options.node ?? 'a' },
        },
      } as never,
    });
    await this.kube.replace(CLAIMS, { ...made, status: { phase: 'Bound' } }, { subresource: 'status' });
  }

  /** A pod that uses the claim, Running and Ready on a node; `node` null: not scheduled. */
  async pod(name: string, claim: string, node: string | null, namespace = 'default'): Promise<void> {
    await this.placePod(namespace, name, node, { claim });
    if (node !== null) this.mount(node, `${namespace}/pv-${claim}`, true);
  }

  /** The same of a workload that always wants one: another one is made when it is being deleted. */
  async workload(claim: string, node: string): Promise<void> {
    await this.pod(`${claim}-0`, claim, node);
    this.workloads.set(claim, 1);
  }

  /** Nobody wants it any more. */
  async end(claim: string): Promise<void> {
    this.workloads.delete(claim);
    for await (const pod of this.kube.list(PODS, { namespace: 'default' }))
      if (claimsOf(pod).includes(claim)) {
        const { name } = pod.metadata;
        await this.kube.delete(PODS, { namespace: 'default', name }, { gracePeriodSeconds: 0 });
        if (pod.spec?.nodeName) this.mount(pod.spec.nodeName, `default/pv-${claim}`, false);
      }
  }

  private async placePod(
    namespace: string,
    name: string,
    node: string | null,
    options: {
      labels?: Record<string, string>;
      claim?: string;
      ports?: { name: string; containerPort: number }[];
    },
  ): Promise<void> {
    const made = await this.kube.create(PODS, {
      apiVersion: 'v1',
      kind: 'Pod',
      metadata: {
        name,
        namespace,
        labels: options.labels ?? {},
        ownerReferences: options.claim
          ? [{ apiVersion: 'apps/v1', kind: 'ReplicaSet', name: 'w', uid: 'w', controller: true }]
          : [],
      },
      spec: {
        ...(node === null ? {} : { nodeName: node }),
        containers: [{ name: 'main', image: 'none', ports: options.ports ?? [] }],
        volumes: options.claim ? [{ name: 'data', persistentVolumeClaim: { claimName: options.claim } }] : [],
      } as never,
    });
    if (node !== null) await this.runs(made);
  }

  private async runs(pod: Pod): Promise<void> {
    const time = new Date().toISOString();
    await this.kube.merge(
      PODS,
      { namespace: pod.metadata.namespace, name: pod.metadata.name },
      {
        status: {
          phase: 'Running',
          podIP: '127.0.0.1',
          podIPs: [{ ip: '127.0.0.1' }],
          startTime: time,
          conditions: ['PodScheduled', 'Initialized', 'ContainersReady', 'Ready'].map((type) => ({
            type,
            status: 'True',
            lastTransitionTime: time,
          })),
          containerStatuses: [
            {
              name: 'main',
              ready: true,
              restartCount: 0,
              image: 'none',
              imageID: '',
              state: { running: {} },
            },
          ],
        },
      },
      { subresource: 'status' },
    );
  }

  private async play(): Promise<void> {
    if (this.running) return;
    this.running = true;
    try {
      const pods: Pod[] = [];
      for await (const pod of this.kube.list(PODS, { namespace: 'default' })) pods.push(pod);
      for (const pod of pods) await this.playPod(pod);
      for (const [claim, count] of this.workloads) {
        const mine = pods.filter((one) => claimsOf(one).includes(claim));
        if (mine.some((one) => !one.metadata.deletionTimestamp)) continue;
        this.workloads.set(claim, count + 1);
        await this.pod(`${claim}-${count}`, claim, null);
      }
    } catch {
      // the API server is being restarted by a test, or somebody else was first
    } finally {
      this.running = false;
    }
  }

  private async playPod(pod: Pod): Promise<void> {
    const { namespace, name, uid, deletionTimestamp } = pod.metadata;
    const node = pod.spec?.nodeName;
    if (node !== undefined) {
      if (!deletionTimestamp || this.lost.has(node)) return;
      for (const claim of claimsOf(pod)) this.mount(node, `${namespace}/pv-${claim}`, false);
      await this.kube.delete(PODS, { namespace, name }, { gracePeriodSeconds: 0, uid: uid as string });
      return;
    }
    const [claim] = claimsOf(pod);
    const active = claim === undefined ? undefined : (await this.object(claim))?.status?.activeNode;
    if (active === undefined || this.lost.has(active)) return;
    const { spec } = await this.kube.get(NODES, { name: active });
    if (spec?.unschedulable) {
      // What the scheduler says of a pod that may run on the active node alone.
      if (pod.status?.conditions?.some((one) => one.reason === 'Unschedulable')) return;
      const condition = { type: 'PodScheduled', status: 'False', reason: 'Unschedulable' };
      await this.kube.merge(
        PODS,
        { namespace, name },
        { status: { conditions: [{ ...condition, lastTransitionTime: new Date().toISOString() }] } },
        { subresource: 'status' },
      );
      return;
    }
    await this.kube.create({ ...PODS, plural: `pods/${name}/binding`, kind: 'Binding' }, {
      apiVersion: 'v1',
      kind: 'Binding',
      metadata: { name, namespace },
      target: { apiVersion: 'v1', kind: 'Node', name: active },
    } as never);
    this.mount(active, `${namespace}/pv-${claim}`, true);
    await this.runs(pod);
  }

  async object(claim: string, namespace = 'default'): Promise<SimpleVolume | null> {
    return await this.kube.find(SIMPLE_VOLUMES, { namespace, name: claim });
  }

  /** Waits for a state of the SimpleVolume. */
  async waitFor(
    claim: string,
    what: string,
    check: (object: SimpleVolume) => boolean | undefined,
    limitMs?: number,
  ): Promise<SimpleVolume> {
    let last: SimpleVolume | null = null;
    return await until(
      `${claim} ${what}`,
      async () => {
        last = await this.object(claim);
        return last && check(last) ? last : null;
      },
      limitMs,
    ).catch((error: Error) => {
      throw new Error(`${error.message}\n${JSON.stringify(last?.status, null, 1)}`);
    });
  }

  /** Until a volume is active with fresh, promotable copies. */
  async settled(claim: string, replicas = 2, limitMs = 90_000): Promise<SimpleVolume> {
    return await this.waitFor(
      claim,
      'is replicated',
      ({ status }) =>
        status?.phase === 'Active' &&
        status.promotable?.nodes.length === replicas &&
        status.replicasSummary === `${replicas}/${replicas}`,
      limitMs,
    );
  }

  options(identity: string, more: Partial<ControllerOptions> = {}): ControllerOptions {
    return {
      namespace: SYSTEM,
      identity,
      version: 'test',
      kubeconfig: this.server.kubeconfig,
      token: () => this.agents.token,
      electionMs: 3000,
      electionRenewMs: 500,
      fenceLeaseMs: this.agents.leaseMs,
      reportMs: 300,
      kubeRate: { perSecond: 200, burst: 200 },
      clock,
      logger: process.env.SIMPLE_VOLUME_TEST_LOG ? shout : quiet,
      ...more,
    };
  }

  async controllerOf(options: ControllerOptions): Promise<Controller> {
    return await Controller.start(options);
  }

  async controller(identity = 'one', more: Partial<ControllerOptions> = {}): Promise<Controller> {
    return await Controller.start(this.options(identity, more));
  }

  async events(claim: string): Promise<{ reason: string; message: string; type: string }[]> {
    const text = await this.server.kubectl([
      ...['get', 'events', '-o', 'json', '--field-selector', `involvedObject.name=${claim}`],
    ]);
    return (JSON.parse(text) as { items: { reason: string; message: string; type: string }[] }).items;
  }
}

const line =
  (level: string) =>
  (data: object, text: string): void => {
    process.stderr.write(`${level} ${text} ${JSON.stringify(data)}\n`);
  };
export const shout: typeof quiet = {
  debug: process.env.SIMPLE_VOLUME_TEST_LOG === 'debug' ? line('debug') : () => {},
  info: line('info'),
  warn: line('warn'),
  error: line('error'),
  child: () => shout,
};
