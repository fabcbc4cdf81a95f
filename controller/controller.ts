/**
 * The controller as a whole: observe, decide, record, carry out, one volume at a time, as long as this process leads.
 * Nothing of it is kept here: what matters is in the cluster or with the agents, so that it can end at any moment.
 */
import type { HttpClient } from '../lib/core/http-client.ts';
import type { PoolSpace, VolumeName } from '../lib/core/parts.ts';
import { type AgentAddress, Agents, agentKey, READ_MS } from './act/agents.ts';
import { type ActContext, applyPlan } from './act/apply.ts';
import { FenceDriver } from './act/fence.ts';
import { VolumeMemory } from './act/memory.ts';
import { FULL_SYNCS, Turns } from './act/operations.ts';
import { sweepLabels } from './act/sweep.ts';
import {
  createKube,
  createLeaderElection,
  createRecorder,
  createWorkQueue,
  errorText,
  type Kube,
  openConnection,
} from './cluster/index.ts';
import type { Clock, LeaderElection, Logger, Recorder, WorkQueue } from './cluster/types.ts';
import { NodesNow } from './confirm.ts';
import { type HealthServer, startHealth } from './metrics.ts';
import { type VolumeReport, World } from './observe.ts';
import { askOwner } from './owner.ts';
import { DEFAULT_OPTIONS, type PlanOptions } from './plan/types.ts';
import { planVolume } from './plan/volume.ts';
import { builtinGuard, proxyGuard } from './trigger/guard.ts';
import { clusterRuns } from './trigger/runs.ts';
import { startTrigger, type TriggerServer } from './trigger/server.ts';

export interface ControllerOptions {
  /** its own, where the agents' pods, the Lease and the Secrets are */
  namespace: string;
  /** unique for this process: the pod's name */
  identity: string;
  version: string;
  kubeconfig?: string | undefined;
  /** bearer token for an agent */
  token: (agent: AgentAddress) => string;
  /** PEM of the authorities for agents that serve TLS */
  ca?: string | undefined;
  /** name of the Lease */
  leaseName?: string;
  /** how long others wait for a sign of life of the leader, ms; default 15,000 */
  electionMs?: number;
  electionRenewMs?: number;
  /** fencing lease, ms */
  fenceLeaseMs?: number;
  /** between two polls of an agent for the leases, ms; default 1,000 */
  fenceBeatMs?: number;
  /** from the take-over to the first search for labels of volumes that are no more, and between two, ms */
  sweepMs?: { first: number; every: number };
  /** between two questions for the state of all volumes of an agent, ms; default 2,000 */
  reportMs?: number;
  concurrency?: number;
  kubeRate?: { perSecond: number; burst: number };
  plan?: Partial<PlanOptions>;
  health?: { host: string; port: number } | null;
  trigger?: {
    guard: 'proxy' | 'builtin';
    host: string;
    port: number;
    tls?: { certFile: string; keyFile: string } | undefined;
  } | null;
  /** unix socket of the CSI Controller service; null: not offered */
  csiEndpoint?: string | null;
  clock: Clock;
  logger: Logger;
  /** the client of the API server; default: one that goes by `kubeconfig` */
  kube?: Kube;
  /** how agents are called; default: over HTTP */
  agentsHttp?: HttpClient;
  /** called after each write, before the next; tests end the process there */
  wrote?: (what: string, key: string) => void;
}

const CONCURRENCY = 8;
/** A thousand claims that are met for the first time cost about ten writes each: three to four minutes. */
const KUBE_RATE = { perSecond: 50, burst: 100 };
const REPORT_MS = 2000;
/** What is new at a take-over has its labels by the first sweep. */
const SWEEP_MS = { first: 10_000, every: 3_600_000 };
const REPORT_BYTES = 32 * 1024 * 1024;
/**
 * What only grows older in a status is written anew within a minute, and with more than 100 volumes about twice a second
 * for all of them together: within 0.6 s for each volume that there is. Nothing is decided from it: agents say how old
 * their copies are when it matters.
 */
const AGES_MS = 600;
/** After a failed action: first and longest pause, ms. */
const PAUSE = { first: 500, longest: 15_000 };
/** Copies of the cluster that were not heard of for this long say nothing any more, ms. */
const DEAF_MS = 300_000;

function connect(options: ControllerOptions): Kube {
  const { clock, kubeconfig, version, kubeRate } = options;
  return createKube({
    connection: openConnection({ clock, ...(kubeconfig === undefined ? {} : { kubeconfig }) }),
    clock,
    userAgent: `simple-volume-controller/${version}`,
    rate: kubeRate ?? KUBE_RATE,
  });
}

export class Controller {
  readonly kube: Kube;
  readonly agents: Agents;
  readonly election: LeaderElection;
  readonly fence: FenceDriver;
  readonly world: World;
  readonly queue: WorkQueue;
  readonly recorder: Recorder;
  healthUrl: string | null = null;
  triggerUrl: string | null = null;
  private readonly options: ControllerOptions;
  private readonly context: ActContext;
  private readonly nodesNow: NodesNow;
  private readonly memories = new Map<string, VolumeMemory>();
  private readonly planOptions: PlanOptions;
  private readonly writes = new Map<string, number>();
  private readonly promotions = { planned: 0, failover: 0 };
  private readonly asking = new Set<string>();
  private readonly answering = new Map<string, boolean>();
  private health: HealthServer | null = null;
  private trigger: TriggerServer | null = null;
  private expand: ActContext['expand'] | null = null;
  private csi: { close(): Promise<void> } | null = null;
  private timer: { cancel(): void } | null = null;
  private leadTerm: number | null = null;
  /** the leadership in which every agent was heard once, or has had its time: nothing is decided from half a picture */
  private heardTerm: number | null = null;
  /** own clock */
  private sweepAt = Number.POSITIVE_INFINITY;
  private dead = false;

  private constructor(options: ControllerOptions) {
    this.options = options;
    const { clock, logger } = options;
    this.planOptions = { ...DEFAULT_OPTIONS, ...options.plan };
    this.kube = options.kube ?? connect(options);
    this.agents = new Agents({
      clock,
      token: options.token,
      ca: options.ca,
      ...(options.agentsHttp === undefined ? {} : { http: options.agentsHttp }),
    });
    this.nodesNow = new NodesNow(this.kube, clock);
    const lease = { namespace: options.namespace, name: options.leaseName ?? 'simple-volume-controller' };
    this.election = createLeaderElection({
      kube: this.kube,
      lease,
      identity: options.identity,
      clock,
      logger,
      ...(options.electionMs === undefined ? {} : { durationMs: options.electionMs }),
      ...(options.electionRenewMs === undefined ? {} : { renewMs: options.electionRenewMs }),
    });
    // A write leaves only while this process surely leads: asked in the moment in which it is sent.
    const gated = this.kube.gated(() => !this.dead && this.election.leads());
    // What was said before a clean stop is still written.
    const events = this.kube.gated(() => this.election.leads());
    this.recorder = createRecorder({ kube: events, clock, logger, instance: options.identity });
    this.queue = createWorkQueue({
      work: (key) => this.work(key),
      concurrency: options.concurrency ?? CONCURRENCY,
      clock,
      logger,
    });
    this.fence = new FenceDriver({
      kube: gated,
      agents: this.agents,
      election: this.election,
      lease,
      clock,
      logger,
      ...(options.fenceLeaseMs === undefined ? {} : { leaseMs: options.fenceLeaseMs }),
      ...(options.fenceBeatMs === undefined ? {} : { beatMs: options.fenceBeatMs }),
      onNews: (_pool, name) => this.lookAt(name),
      onRead: (object) => this.world.setAhead(object),
    });
    this.world = new World({
      kube: this.kube,
      namespace: options.namespace,
      agents: this.agents,
      clock,
      logger,
      changed: (key, delayMs) => {
        if (this.leadTerm !== null) this.queue.add(key, delayMs);
      },
    });
    this.context = {
      kube: gated,
      agents: this.agents,
      fence: this.fence,
      recorder: this.recorder,
      clock,
      logger,
      // Loaded when the first volume grows: it brings the libraries of the driver along.
      expand: async (name, bytes) => {
        const { expander } = await import('./csi/serve.ts');
        this.expand ??= expander(this.kube, this.world, this.agents, logger);
        return this.expand(name, bytes);
      },
      fullSyncTurns: new Turns(FULL_SYNCS),
      look: (key) => this.queue.add(key),
      written: (object) => this.world.setAhead(object),
      mirror: (name) => this.world.mirrors.get(name) ?? null,
      reported: (pool, node, report) => this.world.heardOne(pool, node, report),
      wrote: (what, key) => {
        const kind = what.split(' ')[0] as string;
        this.writes.set(kind, (this.writes.get(kind) ?? 0) + 1);
        options.wrote?.(what, key);
      },
    };
  }

  /** Starts and resolves when it listens and has read the cluster once; leading may begin later. */
  static async start(options: ControllerOptions): Promise<Controller> {
    const controller = new Controller(options);
    try {
      await controller.begin();
      return controller;
    } catch (error) {
      await controller.stop();
      throw error;
    }
  }

  private async begin(): Promise<void> {
    const { health, trigger, clock, logger } = this.options;
    if (health) {
      this.health = await startHealth({
        ...health,
        readings: () => this.readings(),
        notReady: () => this.notReady(),
      });
      this.healthUrl = this.health.url;
    }
    if (trigger) {
      this.trigger = await startTrigger({
        guard: trigger.guard === 'proxy' ? proxyGuard : builtinGuard(this.kube, clock),
        runs: clusterRuns(this.kube, () => clock.now()),
        logger,
        host: trigger.host,
        port: trigger.port,
        tls: trigger.tls,
      });
      this.triggerUrl = this.trigger.url;
    }
    this.world.start();
    await this.world.whenSynced();
    const { csiEndpoint } = this.options;
    if (csiEndpoint) {
      const { serveCsi } = await import('./csi/serve.ts');
      this.csi = await serveCsi(
        csiEndpoint,
        this.options.version,
        this.kube,
        this.world,
        this.agents,
        logger,
      );
    }
    this.queue.start();
    this.election.start();
    this.fence.start();
    this.tick();
  }

  /** Clean stop: what runs ends, the Lease is given back so that the next one need not wait. */
  async stop(): Promise<void> {
    this.dead = true;
    this.timer?.cancel();
    this.fence.stop();
    for (const memory of this.memories.values()) memory.cancel();
    await this.queue.stop(3000);
    await this.recorder.flush();
    await this.election.stop();
    await Promise.all([this.csi?.close(), this.trigger?.close(), this.health?.close(), this.world.stop()]);
    this.agents.close();
    this.kube.close();
  }

  /** As a crash leaves it: nothing is sent any more, the Lease is not given back. For tests. */
  async crash(): Promise<void> {
    this.dead = true;
    this.agents.close();
    this.kube.close();
    await this.stop();
  }

  private tick(): void {
    if (this.dead) return;
    const { clock } = this.options;
    const period = this.options.reportMs ?? REPORT_MS;
    const term = this.fence.term();
    if (term !== this.leadTerm) {
      this.leadTerm = term;
      for (const memory of this.memories.values()) memory.cancel();
      if (term !== null) void this.lead(term);
    } else if (term !== null) {
      void this.askAll();
      if (clock.boot() >= this.sweepAt) void this.sweep();
    }
    this.timer = clock.setTimeout(() => this.tick(), term === null ? Math.min(200, period) : period);
  }

  /** First every agent is heard (or has had its time), then every claim is looked at. */
  private async lead(term: number): Promise<void> {
    this.answering.clear();
    await this.askAll();
    if (this.leadTerm !== term || this.dead) return;
    this.heardTerm = term;
    for (const key of this.world.keys()) this.queue.add(key, Math.random() * 200);
    this.sweepAt = this.options.clock.boot() + (this.options.sweepMs ?? SWEEP_MS).first;
  }

  private async sweep(): Promise<void> {
    this.sweepAt = this.options.clock.boot() + (this.options.sweepMs ?? SWEEP_MS).every;
    try {
      await sweepLabels(this.context.kube, this.world.nodes.values(), this.world.keys(), this.options.logger);
    } catch (error) {
      // It leads no more; whoever does, sweeps.
      this.options.logger.debug({ error: errorText(error) }, 'the sweep was given up');
    }
  }

  private async askAll(): Promise<void> {
    this.world.forgetAgents();
    await Promise.all(this.agents.all().map((one) => this.ask(one)));
  }

  private async ask({ pool, node }: AgentAddress): Promise<void> {
    const key = agentKey(pool, node);
    if (this.asking.has(key)) return;
    this.asking.add(key);
    try {
      const { volumes, pool: space } = await this.agents.call<{
        volumes: VolumeReport[];
        pool?: PoolSpace | null;
      }>(pool, node, {
        path: '/replication/volumes',
        timeoutMs: READ_MS,
        maxBytes: REPORT_BYTES,
      });
      this.world.heard(pool, node, volumes, space ?? null);
    } catch (error) {
      this.options.logger.debug({ pool, node, error: errorText(error) }, 'an agent did not answer');
    } finally {
      this.asking.delete(key);
    }
    const answers = this.agents.answers(pool, node);
    if (this.answering.get(key) !== answers) {
      const known = this.answering.has(key);
      this.answering.set(key, answers);
      if (known && this.leadTerm !== null) {
        this.options.logger.warn(
          { pool, node, answers },
          answers ? 'the agent answers' : 'the agent does not answer',
        );
        this.world.reachabilityChanged(pool, node);
      }
    }
  }

  private lookAt(name: VolumeName): void {
    const claim = this.world.claimOf(name);
    if (claim && this.leadTerm !== null) this.queue.add(claim);
  }

  private memory(key: string): VolumeMemory {
    let memory = this.memories.get(key);
    if (!memory) {
      memory = new VolumeMemory(this.options.clock);
      this.memories.set(key, memory);
    }
    return memory;
  }

  /** One look at one volume. */
  private async work(key: string): Promise<{ againMs?: number } | undefined> {
    if (this.dead || this.leadTerm === null || this.leadTerm !== this.heardTerm || !this.fence.ready())
      return undefined;
    const memory = this.memory(key);
    const longestMs = Math.max(this.planOptions.statusEveryMs, this.world.objects.size * AGES_MS);
    const statusEveryMs = longestMs * memory.agesShare;
    const observed = this.world.observe(key, memory, this.fence, { ...this.planOptions, statusEveryMs });
    if (observed === null) {
      memory.cancel();
      this.memories.delete(key);
      return undefined;
    }
    await this.nodesNow.confirm(observed);
    observed.workload = await askOwner(this.kube, observed, memory, this.options.clock, this.options.logger);
    const before = observed.object?.status?.epoch ?? 0;
    const plan = planVolume(observed);
    this.options.logger.debug(
      {
        key,
        actions: plan.actions.map((one) => one.id),
        phase: plan.status?.phase,
        nextLookMs: plan.nextLookMs,
      },
      'planned',
    );
    const applied = await applyPlan(this.context, observed, plan, memory);
    const after = this.world.object(key)?.status;
    if (before > 0 && (after?.epoch ?? 0) > before)
      this.promotions[after?.promotion?.planned ? 'planned' : 'failover']++;
    memory.failures = applied.failed.length === 0 ? 0 : memory.failures + 1;
    const pause =
      memory.failures === 0
        ? null
        : Math.min(PAUSE.longest, PAUSE.first * 2 ** Math.min(10, memory.failures - 1));
    const again = [applied.againMs, pause].filter((one) => one !== null);
    return again.length === 0 ? undefined : { againMs: Math.max(50, Math.min(...again)) };
  }

  private notReady(): string[] {
    const reasons: string[] = [];
    if (this.dead) reasons.push('it is being stopped');
    for (const one of this.world.all) {
      if (!one.synced()) reasons.push(`${one.kind.plural} were not read yet`);
      else if (one.ageMs() > DEAF_MS)
        reasons.push(`nothing was heard of ${one.kind.plural} for ${Math.round(one.ageMs() / 1000)} s`);
    }
    return reasons;
  }

  private readings() {
    return {
      version: this.options.version,
      leads: this.election.leads(),
      term: this.election.term(),
      objects: this.world.objects.values(),
      informers: this.world.all,
      queue: this.queue.state,
      kube: this.kube.counters,
      agents: this.agents.states(),
      fence: this.fence.counters,
      events: this.recorder.counters,
      writes: this.writes,
      trigger: this.trigger?.requests ?? new Map<number, number>(),
      promotions: this.promotions,
    };
  }
}
