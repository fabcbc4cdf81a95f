/**
 * Carries a plan out. Every action is idempotent and the plan is made anew from what is there each time, so that whoever
 * leads next finishes what a crash between any two writes left undone. Every write goes through a client that is gated by
 * leadership; every write to an agent carries the epoch, which it refuses when it has seen a newer one.
 */
import type { ReplicaStatus, SourceStatus, VolumeName } from '../../lib/core/parts.ts';
import {
  apiVersion,
  CLAIMS,
  CLUSTER_SIMPLE_VOLUMES,
  errorText,
  isKubeError,
  type Kube,
  NODES,
  PODS,
  referenceTo,
  SIMPLE_VOLUMES,
  VOLUMES,
} from '../cluster/index.ts';
import type { Clock, Logger, ObjectReference, Recorder, SimpleVolume } from '../cluster/types.ts';
import { canonical } from '../plan/conditions.ts';
import { quantityOf } from '../plan/fit.ts';
import {
  type Action,
  type ActionBody,
  FINALIZER,
  type Observed,
  type ObservedClaim,
  type SimpleVolumePolicy,
  type VolumePlan,
} from '../plan/types.ts';
import { REQUEST_KEY, requestOf } from '../trigger/runs.ts';
import { type Agents, wasAnswered } from './agents.ts';
import type { FenceDriver } from './fence.ts';
import { drawShare, type VolumeMemory } from './memory.ts';
import { catchUp, fullSync, prepare, type Turns } from './operations.ts';
import { decide } from './promote.ts';

export interface ActContext {
  /** gated by leadership */
  kube: Kube;
  agents: Agents;
  fence: FenceDriver;
  recorder: Recorder;
  clock: Clock;
  logger: Logger;
  fullSyncTurns: Turns;
  /** makes a volume larger wherever it is; gives its size. Throws with a sentence for people */
  expand: (name: VolumeName, bytes: number) => Promise<number>;
  /** asks for another look at a volume */
  look: (key: string) => void;
  /** the object as this process has just written it; caches may be behind */
  written: (object: SimpleVolume) => void;
  /** what the mirror of a PersistentVolume says, as `keepMirror` puts it; null: there is none */
  mirror: (name: string) => string | null;
  /** an agent has answered with its state of a volume */
  reported: (pool: string, node: string, report: SourceStatus | ReplicaStatus) => void;
  /** called after each write of a volume, for metrics and for tests that end the process there */
  wrote: (what: string, key: string) => void;
}

export interface Applied {
  /** look again after this, ms; null: when something changes */
  againMs: number | null;
  failed: { id: string; error: string }[];
}

/** A size that was refused is asked for again, ms: room may have come. */
const EXPAND_AGAIN_MS = 60_000;

const referenceToClaim = ({ name, namespace, uid }: ObservedClaim): ObjectReference => ({
  apiVersion: apiVersion(CLAIMS),
  kind: CLAIMS.kind,
  name,
  namespace,
  uid,
});

type Of<K extends ActionBody['kind']> = Extract<ActionBody, { kind: K }>;

/** Carries out one plan of one volume. Throws only when this process does not lead (any more). */
export async function applyPlan(
  context: ActContext,
  observed: Observed,
  plan: VolumePlan,
  memory: VolumeMemory,
): Promise<Applied> {
  if (!plan.ours) return { againMs: null, failed: [] };
  const volume = new VolumeActs(context, observed, plan, memory);
  try {
    return await volume.run();
  } finally {
    volume.events();
  }
}

class VolumeActs {
  private readonly c: ActContext;
  private readonly observed: Observed;
  private readonly plan: VolumePlan;
  private readonly memory: VolumeMemory;
  private readonly key: string;
  /** as read, then as written by this plan */
  private object: SimpleVolume | null;
  private againMs: number | null;

  constructor(context: ActContext, observed: Observed, plan: VolumePlan, memory: VolumeMemory) {
    this.c = context;
    this.observed = observed;
    this.plan = plan;
    this.memory = memory;
    this.key = `${observed.namespace}/${observed.claimName}`;
    this.object = observed.object;
    this.againMs = plan.nextLookMs;
  }

  private soon(ms: number): void {
    this.againMs = this.againMs === null ? ms : Math.min(this.againMs, ms);
  }

  private get pool(): string {
    return this.object?.spec.pool ?? this.observed.volume?.pool ?? '';
  }

  private get name(): VolumeName {
    if (this.observed.name === null) throw new Error('the volume has no name yet');
    return this.observed.name;
  }

  async run(): Promise<Applied> {
    const { fence } = this.c;
    const { name } = this.observed;
    if (this.object) fence.observe(this.object, this.plan.fencing);
    if (name) fence.withhold(this.pool, name, this.plan.withholdLease);
    const failed: { id: string; error: string }[] = [];
    if (!(await this.status())) {
      this.soon(200);
      return { againMs: this.againMs, failed };
    }
    const undone = new Set<string>();
    for (const action of this.plan.actions) {
      if (action.needs?.some((need) => undone.has(need))) {
        undone.add(action.id);
        continue;
      }
      try {
        if (!(await this.act(action))) undone.add(action.id);
      } catch (error) {
        if (isKubeError(error, 'NotLeader')) throw error;
        undone.add(action.id);
        failed.push({ id: action.id, error: errorText(error) });
        this.c.logger.warn(
          { volume: this.key, action: action.id, error: errorText(error) },
          'an action failed; it is repeated',
        );
      }
    }
    return { againMs: this.againMs, failed };
  }

  /** The status by compare-and-swap; false: somebody else has written, look anew. */
  private async status(): Promise<boolean> {
    const { status } = this.plan;
    if (status === null || this.object === null) return true;
    if (canonical(status) === canonical(this.object.status ?? {})) return true;
    try {
      this.took(
        await this.c.kube.replace(
          SIMPLE_VOLUMES,
          { ...this.object, status },
          { subresource: 'status', urgent: status.phase === 'FailingOver' },
        ),
        'status',
      );
      return true;
    } catch (error) {
      if (isKubeError(error, 'Conflict', 'NotFound')) return false;
      throw error;
    }
  }

  private took(object: SimpleVolume, what: string): void {
    this.object = object;
    this.memory.agesShare = drawShare();
    this.c.fence.observe(object, this.plan.fencing);
    this.c.written(object);
    this.c.wrote(what, this.key);
  }

  events(): void {
    const { claim } = this.observed;
    const about = claim
      ? referenceToClaim(claim)
      : this.object
        ? referenceTo(SIMPLE_VOLUMES, this.object)
        : null;
    if (about) for (const event of this.plan.events) this.c.recorder.event(about, event);
  }

  /** One action. False: not done, and no error either (a refusal that time will change). */
  private async act(action: Action): Promise<boolean> {
    switch (action.kind) {
      case 'createObject':
        return this.createObject(action);
      case 'patchSpec':
        return this.patchSpec(action);
      case 'deleteObject':
        return this.deleteObject();
      case 'removeFinalizer':
        return this.removeFinalizer();
      case 'decide':
        return this.decide(action);
      case 'prepare':
        this.memory.run(
          `prepare ${action.tag}`,
          (signal) => prepare(this.c.agents, this.c.clock, this.pool, this.name, action, this.memory, signal),
          () => this.c.look(this.key),
        );
        return true;
      case 'catchUp':
        this.memory.run(
          `catchUp ${action.tag}`,
          (signal) => catchUp(this.c.agents, this.c.clock, this.pool, this.name, action, this.memory, signal),
          () => this.c.look(this.key),
        );
        return true;
      case 'fullSync':
        return this.fullSync(action);
      case 'releaseLease':
        return this.releaseLease(action);
      case 'startWatch':
        return this.startWatch(action);
      case 'stopWatch':
        return this.agent(action.node, '/replication/watch/stop', { ...this.name, epoch: action.epoch }, [
          'NOT_ACTIVE',
          'VOLUME_UNKNOWN',
        ]);
      case 'removeCopy':
        return this.removeCopy(action);
      case 'liftCondition':
        return this.agent(action.node, '/replication/force', {
          ...this.name,
          epoch: action.epoch,
          condition: action.condition,
        });
      case 'annotatePv':
        return this.merge(
          () =>
            this.c.kube.merge(
              VOLUMES,
              { name: action.name },
              { metadata: { annotations: action.annotations } },
            ),
          `annotatePv ${action.name}`,
        );
      case 'annotatePvc':
        return this.merge(
          () =>
            this.c.kube.merge(
              CLAIMS,
              { namespace: this.observed.namespace, name: action.name },
              { metadata: { annotations: action.annotations } },
              { uid: action.uid },
            ),
          `annotatePvc ${action.name}`,
        );
      case 'labelNode':
        return this.merge(
          () => this.c.kube.merge(NODES, { name: action.node }, { metadata: { labels: action.labels } }),
          `labelNode ${action.node}`,
        );
      case 'deletePod':
        return this.deletePod(action);
      case 'expand':
        return this.expand(action);
      case 'acceptManualSync':
        return this.acceptManualSync(action);
      case 'mirror':
        return this.mirror(action);
    }
  }

  private async expand(action: Of<'expand'>): Promise<boolean> {
    const { clock, kube, recorder } = this.c;
    const { claim, volume, namespace } = this.observed;
    if (claim === null || volume === null) return false;
    const before = this.memory.refusedSize;
    if (before?.bytes === action.bytes && clock.boot() - before.at < EXPAND_AGAIN_MS) return false;
    const about = referenceToClaim(claim);
    let bytes: number;
    try {
      bytes = await this.c.expand(this.name, action.bytes);
    } catch (error) {
      this.memory.refusedSize = { bytes: action.bytes, at: clock.boot() };
      this.soon(EXPAND_AGAIN_MS);
      const message = `The volume cannot grow to ${quantityOf(action.bytes)}: ${errorText(error)}`;
      recorder.event(about, {
        type: 'Warning',
        reason: 'ExpansionFailed',
        message,
        cause: 'ExpansionFailed',
      });
      return false;
    }
    this.memory.refusedSize = null;
    const storage = quantityOf(bytes);
    if ((volume.bytes ?? 0) < bytes)
      await this.merge(
        () => kube.merge(VOLUMES, { name: volume.name }, { spec: { capacity: { storage } } }),
        `expandPv ${volume.name}`,
      );
    await this.merge(
      () =>
        kube.merge(
          CLAIMS,
          { namespace, name: claim.name },
          { status: { capacity: { storage } } },
          { uid: claim.uid, subresource: 'status' },
        ),
      `expandPvc ${claim.name}`,
    );
    const message = `The volume has grown to ${storage}.`;
    recorder.event(about, { type: 'Normal', reason: 'Expanded', message, cause: storage });
    return true;
  }

  private async createObject(action: Of<'createObject'>): Promise<boolean> {
    const { namespace, claimName } = this.observed;
    try {
      const made = await this.c.kube.create(SIMPLE_VOLUMES, {
        apiVersion: apiVersion(SIMPLE_VOLUMES),
        kind: SIMPLE_VOLUMES.kind,
        metadata: { namespace, name: claimName, finalizers: [FINALIZER] },
        spec: action.spec,
      });
      this.took(made, 'createObject');
    } catch (error) {
      if (!isKubeError(error, 'AlreadyExists')) throw error;
    }
    this.soon(0);
    return true;
  }

  private async patchSpec(action: Of<'patchSpec'>): Promise<boolean> {
    const { object } = this;
    if (object === null) return false;
    const spec: Record<string, unknown> = {};
    if (action.volumeName !== undefined) spec.volumeName = action.volumeName;
    if (action.policy !== undefined) spec.policy = replaceAll(object.spec.policy ?? {}, action.policy);
    return this.versioned(async () => {
      this.took(
        await this.c.kube.merge(
          SIMPLE_VOLUMES,
          { namespace: this.observed.namespace, name: object.metadata.name },
          { spec },
          { resourceVersion: object.metadata.resourceVersion },
        ),
        'patchSpec',
      );
      this.soon(0);
    });
  }

  /** A write against the version that is known; when it is not the newest, another look decides anew. */
  private async versioned(write: () => Promise<void>): Promise<boolean> {
    try {
      await write();
      return true;
    } catch (error) {
      if (!isKubeError(error, 'Conflict', 'NotFound')) throw error;
      this.soon(200);
      return false;
    }
  }

  private async deleteObject(): Promise<boolean> {
    if (this.object === null) return true;
    const { name, uid } = this.object.metadata;
    return this.versioned(async () => {
      await this.c.kube.delete(
        SIMPLE_VOLUMES,
        { namespace: this.observed.namespace, name },
        { uid: uid as string },
      );
      this.c.wrote('deleteObject', this.key);
    });
  }

  private async removeFinalizer(): Promise<boolean> {
    if (this.object === null) return true;
    const { name, resourceVersion, finalizers } = this.object.metadata;
    return this.versioned(async () => {
      await this.c.kube.merge(
        SIMPLE_VOLUMES,
        { namespace: this.observed.namespace, name },
        { metadata: { finalizers: (finalizers ?? []).filter((one) => one !== FINALIZER) } },
        { resourceVersion },
      );
      this.c.wrote('removeFinalizer', this.key);
      if (this.observed.name) this.c.fence.forget(this.pool, this.observed.name);
    });
  }

  private async decide(action: Of<'decide'>): Promise<boolean> {
    if (this.object === null) return false;
    const outcome = await decide(action, this.object, this.c.fence, this.c.kube);
    if (!outcome.done) {
      this.c.logger.info(
        { volume: this.key, to: action.record.to, epoch: action.record.epoch, ...outcome },
        'the promotion waits',
      );
      this.soon(outcome.waitMs);
      return false;
    }
    this.c.logger.info({ volume: this.key, ...action.record }, 'promoted');
    this.took(outcome.object, 'decide');
    this.soon(0);
    return true;
  }

  private fullSync(action: Of<'fullSync'>): boolean {
    const { memory } = this;
    let nodes = memory.fullSyncs.get(action.run);
    if (!nodes) {
      nodes = new Map(action.nodes.map((node) => [node, { id: null, state: 'running', error: null }]));
      memory.fullSyncs.set(action.run, nodes);
      // Of ended runs the last ones are enough.
      for (const run of memory.fullSyncs.keys())
        if (memory.fullSyncs.size > 4 && run !== action.run) memory.fullSyncs.delete(run);
    }
    memory.run(
      `fullSync ${action.run}`,
      (signal) =>
        this.c.fullSyncTurns.take(() =>
          fullSync(this.c.agents, this.c.clock, this.pool, this.name, action, memory, signal, () =>
            this.c.look(this.key),
          ),
        ),
      () => this.c.look(this.key),
    );
    return true;
  }

  private async releaseLease(action: Of<'releaseLease'>): Promise<boolean> {
    try {
      await this.c.agents.call(this.pool, action.node, {
        path: '/replication/fence/release',
        body: { ...this.name, epoch: action.epoch },
      });
      this.c.wrote(`releaseLease ${action.node}`, this.key);
      // A poll tells the fence, and that brings the next look about.
      void this.c.fence.hurry(this.pool, action.node, 1);
      this.soon(1000);
      return true;
    } catch (error) {
      if (!wasAnswered(error) || error.code !== 'VOLUME_IN_USE') throw error;
      this.soon(1000);
      return false;
    }
  }

  private async startWatch(action: Of<'startWatch'>): Promise<boolean> {
    const { agents, fence } = this.c;
    // What moved is activated only when nothing that was granted meanwhile can be valid.
    const wait = fence.state(this.pool, this.name).activationWaitMs;
    if (wait === null || wait > 0) {
      this.soon(wait ?? 1000);
      return false;
    }
    const targets = action.body.targets.map((target) => {
      const address = agents.find(this.pool, target.node);
      return address === null ? null : { ...target, token: agents.token(address) };
    });
    // A replica whose agent has no pod now gets its batches when it is back: the planner starts the watch anew then.
    const body = { ...action.body, targets: targets.filter((one) => one !== null) };
    const before = this.observed.agents.find((one) => one.node === action.node)?.volume;
    await this.agent(action.node, '/replication/watch/start', body);
    if (before?.role !== 'active' || before.epoch !== body.epoch) void fence.hurry(this.pool, action.node, 2);
    return true;
  }

  private async removeCopy(action: Of<'removeCopy'>): Promise<boolean> {
    try {
      await this.c.agents.call(this.pool, action.node, {
        path: '/replication/volume/remove',
        body: { ...this.name, epoch: action.epoch },
      });
      this.c.wrote(`removeCopy ${action.node}`, this.key);
      return true;
    } catch (error) {
      // Whatever keeps it there is a reason to leave it.
      if (
        !wasAnswered(error) ||
        !['VOLUME_ACTIVE', 'VOLUME_IN_USE', 'EPOCH_OLD', 'HELD'].includes(error.code)
      )
        throw error;
      return false;
    }
  }

  private async agent(
    node: string,
    path: string,
    body: object,
    fine: readonly string[] = [],
  ): Promise<boolean> {
    try {
      const report = await this.c.agents.call<SourceStatus | ReplicaStatus | null>(this.pool, node, {
        path,
        body,
      });
      // All of these answer with the state that they left.
      if (report?.role && report.volume === this.name.volume) this.c.reported(this.pool, node, report);
    } catch (error) {
      if (!wasAnswered(error) || !fine.includes(error.code)) throw error;
    }
    this.c.wrote(`${path} ${node}`, this.key);
    return true;
  }

  private async merge(write: () => Promise<unknown>, what: string): Promise<boolean> {
    try {
      await write();
      this.c.wrote(what, this.key);
    } catch (error) {
      // Gone, or another object of the same name: there is nothing to write to.
      if (!isKubeError(error, 'NotFound', 'Conflict')) throw error;
    }
    return true;
  }

  private async deletePod(action: Of<'deletePod'>): Promise<boolean> {
    return this.merge(
      () =>
        this.c.kube.delete(
          PODS,
          { namespace: this.observed.namespace, name: action.name },
          { uid: action.uid, ...(action.force ? { gracePeriodSeconds: 0 } : {}) },
        ),
      `deletePod ${action.name}`,
    );
  }

  private async acceptManualSync(action: Of<'acceptManualSync'>): Promise<boolean> {
    const { object } = this;
    if (object === null || requestOf(object)?.id !== action.requestId) return true;
    return this.versioned(async () => {
      this.took(
        await this.c.kube.merge(
          SIMPLE_VOLUMES,
          { namespace: this.observed.namespace, name: object.metadata.name },
          { metadata: { annotations: { [REQUEST_KEY]: null } } },
          { resourceVersion: object.metadata.resourceVersion },
        ),
        'acceptManualSync',
      );
    });
  }

  private async mirror(action: Of<'mirror'>): Promise<boolean> {
    const { kube } = this.c;
    const { name, pool, claimRef } = action;
    const status = {
      ...(action.activeNode === undefined ? {} : { activeNode: action.activeNode }),
      ...(action.epoch === undefined ? {} : { epoch: action.epoch }),
      ...(action.phase === undefined ? {} : { phase: action.phase }),
      ...(action.generation === undefined ? {} : { generation: action.generation }),
    };
    const spec = { claimRef, pool };
    const wanted = canonical([spec, status]);
    // What was written counts as long as the copy of the cluster may be behind it.
    const known = this.memory.mirrored ?? this.c.mirror(name);
    if (known === wanted) {
      if (this.c.mirror(name) === wanted) this.memory.mirrored = null;
      return true;
    }
    if (known === null) {
      try {
        await kube.create(CLUSTER_SIMPLE_VOLUMES, {
          apiVersion: apiVersion(CLUSTER_SIMPLE_VOLUMES),
          kind: CLUSTER_SIMPLE_VOLUMES.kind,
          metadata: { name },
          spec,
        });
        this.c.wrote(`mirror ${name}`, this.key);
      } catch (error) {
        if (!isKubeError(error, 'AlreadyExists')) throw error;
        await kube.merge(CLUSTER_SIMPLE_VOLUMES, { name }, { spec });
        this.c.wrote(`mirror ${name}`, this.key);
      }
    } else if (canonical((JSON.parse(known) as unknown[])[0]) !== canonical(spec)) {
      await kube.merge(CLUSTER_SIMPLE_VOLUMES, { name }, { spec });
      this.c.wrote(`mirror ${name}`, this.key);
    }
    await kube.merge(
      CLUSTER_SIMPLE_VOLUMES,
      { name },
      { status: { ...status, observedAt: new Date(this.c.clock.now()).toISOString() } },
      { subresource: 'status' },
    );
    this.memory.mirrored = wanted;
    this.c.wrote(`mirror status ${name}`, this.key);
    return true;
  }
}

/** A merge patch that leaves nothing of the old fields. */
function replaceAll(before: SimpleVolumePolicy, after: SimpleVolumePolicy): Record<string, unknown> {
  const gone = Object.keys(before).filter((key) => !(key in after));
  return { ...after, ...Object.fromEntries(gone.map((key) => [key, null])) };
}
