/**
 * The Node service: publishes a volume where it is active and nowhere else. Each call looks at what is there, plans
 * (plan.ts) and carries the steps out; a refusal changes nothing.
 */
import { lstatSync, mkdirSync, readdirSync, realpathSync, rmdirSync } from 'node:fs';
import { statfs } from 'node:fs/promises';
import path from 'node:path';
import type { Logger, VolumeName } from '../../lib/core/parts.ts';
import { volumeKey } from '../../lib/core/parts.ts';
import { POOL_FOLDERS } from '../../lib/core/pool-folders.ts';
import type { FreezerState, WriterLease } from '../../lib/fence/types.ts';
import { capabilityProblem } from '../capabilities.ts';
import { poolKey } from '../driver.ts';
import { exists, invalid, notFound, precondition, unavailable } from '../errors.ts';
import type { AgentSocket } from '../freeze/agent-client.ts';
import type { Freezable } from '../freeze/freezer.ts';
import type { NodeExpandVolumeRequest__Output } from '../generated/csi/v1/NodeExpandVolumeRequest.ts';
import type { NodeGetVolumeHealthRequest__Output } from '../generated/csi/v1/NodeGetVolumeHealthRequest.ts';
import type { NodeGetVolumeStatsRequest__Output } from '../generated/csi/v1/NodeGetVolumeStatsRequest.ts';
import type { NodePublishVolumeRequest__Output } from '../generated/csi/v1/NodePublishVolumeRequest.ts';
import type { NodeUnpublishVolumeRequest__Output } from '../generated/csi/v1/NodeUnpublishVolumeRequest.ts';
import type { Service } from '../grpc.ts';
import { needVolumeId, parseVolumeId, volumeId } from '../volume-id.ts';
import type { Mounter } from './mounter.ts';
import { layerOf, type MountEntry, placeOf, stackAt } from './mounts.ts';
import {
  type Found,
  judgePublish,
  type PublishRecord,
  publishSteps,
  type Refusal,
  unpublishSteps,
  type Wanted,
  wantedOptions,
} from './plan.ts';
import { type About, PoolAgent } from './pool-agent.ts';
import type { Records } from './records.ts';
import { Sizes, type TreeLimit } from './sizes.ts';

/** How long a publish waits until the volume may be written here: a first decision or a move is often under way. */
const WAIT_MS = 5_000;
const AGAIN_MS = 150;
/** How long the other pools of a node have to appear once the first is known. */
const SETTLE_MS = 5_000;
/** Between two looks for agents that may not be of this node. */
const LATER_MS = 1_000;
/** kubelet's folder of a pod's volume of a CSI driver: pods/<uid>/volumes/kubernetes.io~csi/<name>/mount */
const POD_PATH = /\/pods\/([0-9a-fA-F-]{36})\/volumes\/kubernetes\.io~csi\//;
const POD_UID = 'csi.storage.k8s.io/pod.uid';

export interface NodeDeps {
  node: string;
  /** targets below it are ours to make; nothing else is touched */
  kubeletDir: string;
  agents: readonly { socket: AgentSocket; known: About | null }[];
  records: Records;
  mounter: Mounter;
  clock(): number;
  bootId: string;
  freezer: FreezerState;
  find(podUid: string): Freezable;
  /** limits a tree to so many bytes, 0: to nothing. `others`: all trees of this node's pools */
  limit(tree: string, bytes: number, others: () => string[]): Promise<TreeLimit>;
  log: Logger;
  waitMs?: number;
  reportMs?: number;
  settleMs?: number;
}

type Health = { status: string; reason: string; message: string };

export class NodeService {
  readonly #deps: NodeDeps;
  readonly #agents: PoolAgent[];
  /** volumes and targets that are being worked on */
  readonly #locks = new Map<string, Promise<void>>();
  readonly #leases = new Map<string, WriterLease>();
  readonly #sizes: Sizes;

  constructor(deps: NodeDeps) {
    this.#deps = deps;
    this.#sizes = new Sizes({
      limit: (tree, bytes) => deps.limit(tree, bytes, () => this.#trees()),
      clock: deps.clock,
      log: deps.log,
    });
    this.#agents = deps.agents.map(
      ({ socket, known }) =>
        new PoolAgent(
          {
            socket,
            clock: deps.clock,
            freezer: deps.freezer,
            written: (pool) => this.#written(pool),
            sizes: (names) => this.#sizes.outcomes(names),
            find: deps.find,
            makeHarmless: (writer) => this.#makeHarmless(writer, writer.podUid),
            heard: (pool, leases) => this.#heard(pool, leases),
            learnt: (about) => this.#takeUp(about),
            log: deps.log,
            ...(deps.reportMs === undefined ? {} : { reportMs: deps.reportMs }),
          },
          known,
        ),
    );
  }

  /** Takes up what was published before this process, then reports and listens to the agents. */
  start(): void {
    this.#recover();
    for (const agent of this.#agents) agent.start();
  }

  async stop(): Promise<void> {
    await Promise.all(this.#agents.map((one) => one.stop()));
  }

  /**
   * Asks until every agent has said once which pool it serves. A node need not have all pools, and the agents of those
   * that it lacks never answer: `heard` is called when all are known, or SETTLE_MS after the first with those that are,
   * and then with each one that comes later.
   */
  async learn(signal: AbortSignal, heard: () => Promise<void>): Promise<void> {
    let firstAt: number | null = null;
    let told = 0;
    for (;;) {
      await Promise.all(this.#agents.map((one) => one.look()));
      if (signal.aborted) return;
      const known = this.#agents.filter((one) => one.about !== null).length;
      const all = known === this.#agents.length;
      const now = this.#deps.clock();
      if (known > 0) firstAt ??= now;
      const settled = firstAt !== null && now - firstAt >= (this.#deps.settleMs ?? SETTLE_MS);
      if (known > told && (all || told > 0 || settled)) {
        await heard();
        told = known;
      }
      if (all) return;
      await sleep(told > 0 ? LATER_MS : AGAIN_MS);
    }
  }

  /** In the order of the agents; null: not known yet. */
  pools(): (About | null)[] {
    return this.#agents.map((one) => one.about);
  }

  /** Why the driver is not ready; null: it is. */
  problem(): string | null {
    if (this.#agents.some((one) => one.about !== null)) return null;
    return `no agent of this node has answered yet: ${this.#agents[0]?.problem}`;
  }

  #recover(): void {
    const { records, bootId, log, mounter } = this.#deps;
    const table = mounter.table();
    for (const record of records.all()) {
      // After a restart of the machine nothing of it runs and nothing is mounted; kubelet begins anew.
      if (record.bootId !== bootId && stackAt(table, record.target).length === 0)
        records.delete(record.target);
    }
    for (const { about } of this.#agents) if (about) this.#takeUp(about);
    log.info({ published: records.all().length }, 'took up what was published');
  }

  #takeUp(about: About): void {
    this.#adopt(this.#deps.mounter.table(), about);
    for (const record of this.#deps.records.all()) if (record.pool === about.pool) this.#watch(record);
    // A crash, of this process or the machine, leaves the limits of what was published.
    for (const tree of liveTrees(about.path)) {
      const name = parseVolumeId(path.relative(about.path, tree));
      if (name) void this.#lift(name, about);
    }
  }

  /** All trees of this node's pools, and what returning volumes had before. */
  #trees(): string[] {
    return this.#agents.flatMap(({ about }) =>
      about === null
        ? []
        : [
            ...liveTrees(about.path),
            ...below(path.join(about.path, POOL_FOLDERS.backups)).flatMap(below).flatMap(below),
          ],
    );
  }

  /** Takes the limit of a volume away once nothing of it is published: what the agent writes to a copy has none. */
  async #lift(name: VolumeName, about: About): Promise<void> {
    const source = this.#sourceOrNull(about, name);
    if (source !== null && this.#deps.records.of(volumeId(name)).length === 0)
      await this.#sizes.set(nameOf(name), source, null);
  }

  /** Mounts of the pool below kubelet's folder that no record speaks of: the records were lost, the writers were not. */
  #adopt(table: readonly MountEntry[], about: About): void {
    const { records, kubeletDir, bootId, log } = this.#deps;
    let place: { device: string; root: string } | null;
    try {
      place = placeOf(table, realpathSync(about.path));
    } catch {
      return; // no disk, no mount of it
    }
    if (!place) return;
    const prefix = place.root === '/' ? '/' : `${place.root}/`;
    for (const { device, root, point, options } of table) {
      if (device !== place.device || !root.startsWith(prefix) || records.get(point)) continue;
      if (!`${point}`.startsWith(`${kubeletDir}/`) || !point.endsWith('/mount')) continue;
      const name = parseVolumeId(root.slice(prefix.length));
      if (!name) continue;
      log.error({ target: point, volume: volumeKey(name) }, 'a mount without its record is taken up');
      records.put({
        ...name,
        volumeId: volumeId(name),
        pool: about.pool,
        target: point,
        podUid: POD_PATH.exec(point)?.[1] ?? null,
        epoch: null,
        accessMode: 'SINGLE_NODE_WRITER',
        readOnly: options.includes('ro'),
        flags: [],
        bootId,
        moved: false,
        bytes: null,
      });
    }
  }

  /** A writer of before is looked after again. */
  #watch(record: PublishRecord): void {
    const agent = this.#agents.find((one) => one.about?.pool === record.pool);
    if (!agent || record.moved || record.podUid === null || !this.#deps.freezer.possible) return;
    try {
      agent.freezer.add({ ...nameOf(record), podUid: record.podUid }, record.epoch, null);
    } catch (error) {
      // Its pod is gone: kubelet will unpublish it.
      this.#deps.log.warn(
        { volume: record.volumeId, pod: record.podUid, problem: (error as Error).message },
        'the pod of a published volume cannot be found',
      );
    }
  }

  #written(pool: string): VolumeName[] {
    return this.#deps.records.all().filter((one) => one.pool === pool && !one.moved);
  }

  #heard(pool: string, leases: readonly WriterLease[]): void {
    for (const lease of leases) {
      this.#leases.set(volumeKey(lease), lease);
      if (lease.role === 'none') continue;
      this.#heardSize(pool, lease);
      // Pods that cannot be stopped: at least nothing is started on the old tree any more.
      for (const record of this.#deps.records.of(volumeId(lease)))
        if (
          record.pool === pool &&
          !record.moved &&
          record.epoch !== null &&
          lease.epoch > record.epoch &&
          (record.podUid === null || !this.#deps.freezer.possible)
        )
          void this.#makeHarmless(lease, record.podUid).catch((error: Error) =>
            this.#deps.log.error(
              { volume: record.volumeId, problem: error.message },
              'a mount is not harmless yet',
            ),
          );
    }
  }

  /** A volume that grew is given room at once. */
  #heardSize(pool: string, lease: WriterLease): void {
    if (lease.role !== 'active' || lease.sizeBytes === undefined) return;
    const published = this.#deps.records.of(volumeId(lease)).some((one) => one.pool === pool && !one.moved);
    const about = this.#agents.find((one) => one.about?.pool === pool)?.about;
    const source = published && about ? this.#sourceOrNull(about, lease) : null;
    if (source !== null) this.#sizes.heard(nameOf(lease), source, lease.sizeBytes);
  }

  /** What is mounted into this pod becomes empty and read-only, so that nothing can be started on the old tree. */
  async #makeHarmless(name: VolumeName, podUid: string | null): Promise<void> {
    const { records, mounter, log } = this.#deps;
    for (const record of records.of(volumeId(name))) {
      if (record.podUid !== podUid || record.moved) continue;
      const top = stackAt(mounter.table(), record.target).at(-1);
      if (lstatSync(record.target, { throwIfNoEntry: false }) && !(top && layerOf(top, null) === 'moved'))
        await mounter.cover(record.target);
      // Unpublished meanwhile: then nothing of it is left to be said.
      if (records.get(record.target) !== record) continue;
      records.put({ ...record, moved: true });
      log.warn(
        { volume: record.volumeId, target: record.target },
        'the volume has moved on; its mount here is covered',
      );
    }
  }

  async #locked<T>(keys: readonly string[], work: () => Promise<T>): Promise<T> {
    const before = keys.map((key) => this.#locks.get(key));
    let done: () => void = () => undefined;
    const mine = new Promise<void>((resolve) => {
      done = resolve;
    });
    for (const key of keys) this.#locks.set(key, mine);
    try {
      await Promise.all(before);
      return await work();
    } finally {
      for (const key of keys) if (this.#locks.get(key) === mine) this.#locks.delete(key);
      done();
    }
  }

  /** A target of kubelet, checked: absolute, plain, below its folder through no link. */
  #target(text: string): string {
    const { kubeletDir } = this.#deps;
    if (text === '') invalid('target_path is required');
    if (!path.isAbsolute(text) || text.includes('\0') || path.normalize(text) !== text)
      invalid(`target_path must be a plain absolute path; got ${JSON.stringify(text)}`);
    if (!text.startsWith(`${kubeletDir}/`))
      invalid(`target_path must be below ${kubeletDir} (--kubelet-dir); got ${JSON.stringify(text)}`);
    return text;
  }

  #throughLinks(target: string): boolean {
    const parent = path.dirname(target);
    try {
      return (
        realpathSync(parent) !==
        path.join(realpathSync(this.#deps.kubeletDir), path.relative(this.#deps.kubeletDir, parent))
      );
    } catch {
      return false;
    }
  }

  #found(
    target: string,
    source: string | null,
    table: readonly MountEntry[],
    tail: string | null = null,
  ): Found {
    const there = lstatSync(target, { throwIfNoEntry: false });
    const place = source === null ? null : placeOf(table, source);
    return {
      kind: there ? (there.isDirectory() ? 'directory' : 'other') : null,
      layers: stackAt(table, target).map((one) => ({
        layer: layerOf(one, place, tail),
        options: one.options,
      })),
    };
  }

  #refuse({ refuse, message }: Refusal): never {
    return refuse === 'ALREADY_EXISTS' ? exists(message) : precondition(message);
  }

  async #agentOf(pool: string | undefined): Promise<{ agent: PoolAgent; about: About }> {
    for (const agent of this.#agents) await agent.look();
    const known = this.#agents.flatMap((agent) => (agent.about ? [{ agent, about: agent.about }] : []));
    const only = known.length === 1 && this.#agents.length === 1 ? known[0] : undefined;
    const mine = pool === undefined ? only : known.find(({ about }) => about.pool === pool);
    if (mine) return mine;
    const silent = this.#agents.find((one) => one.about === null);
    if (silent) return unavailable(`an agent of ${this.#deps.node} does not answer: ${silent.problem}`);
    return pool === undefined
      ? invalid('volume_context.pool is required: this node has several pools')
      : precondition(
          `${this.#deps.node} has no pool ${JSON.stringify(pool)}, it has ${known.map(({ about }) => about.pool).join(', ')}`,
        );
  }

  /**
   * The live tree of a volume, as it must be: a directory of the pool that is reached through no link. Never made here.
   */
  #source(about: About, name: VolumeName): string {
    const source = path.join(about.path, name.namespace, name.volume);
    try {
      const real = realpathSync(source);
      if (
        lstatSync(source).isDirectory() &&
        real === path.join(realpathSync(about.path), name.namespace, name.volume)
      )
        return real;
    } catch (error) {
      if ((error as NodeJS.ErrnoException).code !== 'ENOENT') throw error;
    }
    return precondition(
      `${volumeKey(name)} has no directory on ${this.#deps.node} (${source}); it is not made by a mount`,
    );
  }

  async publish(request: NodePublishVolumeRequest__Output): Promise<object> {
    const id = needVolumeId(request.volume_id);
    const target = this.#target(request.target_path);
    const problem = capabilityProblem(request.volume_capability);
    if (problem !== null) invalid(problem);
    const name = parseVolumeId(id) ?? notFound(`${JSON.stringify(id)} is no volume of this driver`);
    const capability = request.volume_capability;
    const accessMode = capability?.access_mode?.mode ?? 'SINGLE_NODE_WRITER';
    const flags = [...new Set(capability?.mount?.mount_flags ?? [])];
    const wanted: Wanted = {
      volumeId: id,
      accessMode,
      readOnly: request.readonly || accessMode === 'SINGLE_NODE_READER_ONLY' || flags.includes('ro'),
      flags: flags.filter((one) => one !== 'ro' && one !== 'rw'),
      podUid: request.volume_context[POD_UID] || POD_PATH.exec(target)?.[1] || null,
    };
    const { pool } = request.volume_context;
    return this.#locked([id, target], () => this.#publish(name, target, wanted, pool));
  }

  async #publish(
    name: VolumeName,
    target: string,
    wanted: Wanted,
    pool: string | undefined,
  ): Promise<object> {
    const { records, mounter, log } = this.#deps;
    const { agent, about } = await this.#agentOf(pool);
    const others = (): PublishRecord[] => records.of(wanted.volumeId).filter((one) => one.target !== target);
    const before = records.get(target);
    const first = this.#found(target, this.#sourceOrNull(about, name), mounter.table());
    const no = judgePublish(wanted, before, others(), first);
    if (no) this.#refuse(no);
    if (this.#throughLinks(target)) precondition(`${path.dirname(target)} is reached through a link`);

    const mounted = first.layers.length > 0;
    const permit = await this.#permit(agent, name, wanted, before, mounted);
    let kept = false;
    try {
      // It was waited for: what is there may be something else by now.
      const record = records.get(target);
      const found = this.#found(target, this.#sourceOrNull(about, name), mounter.table());
      const still = judgePublish(wanted, record, others(), found);
      if (still) this.#refuse(still);
      const steps = publishSteps(wanted, record, found);
      if (permit === null) {
        // Mounted before and looked after since: kubelet asks again, and the agent is away. Nobody gets more by it.
        for (const step of steps) if (step.do === 'remount') await mounter.remount(target, step.flags);
        this.#check(target, this.#sourceOrNull(about, name), wanted);
        kept = true;
        return {};
      }
      const { lease, askedAt } = permit;
      const source = this.#source(about, name);
      if (found.layers.length > 0 && record && record.epoch !== null && record.epoch !== lease.epoch)
        precondition(
          `${wanted.volumeId} was published here in epoch ${record.epoch} and is in epoch ${lease.epoch} now: this pod must end first`,
        );
      const next: PublishRecord = {
        ...name,
        volumeId: wanted.volumeId,
        pool: about.pool,
        target,
        podUid: wanted.podUid,
        epoch: lease.epoch,
        accessMode: wanted.accessMode,
        readOnly: wanted.readOnly,
        flags: wanted.flags,
        bootId: this.#deps.bootId,
        moved: false,
        bytes: record?.bytes ?? null,
      };
      // Before anything can be written; the volume is published whatever comes of it.
      if (lease.sizeBytes !== undefined && steps.some((step) => step.do === 'bind'))
        await this.#sizes.set(nameOf(name), source, lease.sizeBytes);
      for (const step of steps) {
        if (step.do === 'mkdir') mkdirSync(target, { mode: 0o750 });
        else if (step.do === 'record') {
          records.put(next);
          if (wanted.podUid !== null && this.#deps.freezer.possible && this.#unstoppable(wanted) === null)
            agent.freezer.add({ ...name, podUid: wanted.podUid }, lease.epoch, { lease, askedAt });
        } else if (step.do === 'bind') await mounter.bind(source, target);
        else await mounter.remount(target, step.flags);
      }
      this.#check(target, source, wanted);
      kept = true;
      log.info(
        { volume: wanted.volumeId, target, epoch: lease.epoch, readOnly: wanted.readOnly },
        'published',
      );
      return {};
    } finally {
      agent.unannounce(name);
      if (!kept) await this.#undo(agent, name, target, before, mounted);
    }
  }

  /** What was begun and not finished is taken back, as far as nothing is mounted. */
  async #undo(
    agent: PoolAgent,
    name: VolumeName,
    target: string,
    before: PublishRecord | null,
    mounted: boolean,
  ): Promise<void> {
    const { records, mounter, log } = this.#deps;
    try {
      if (!mounted && stackAt(mounter.table(), target).length === 0) {
        const made = records.get(target);
        if (made && made !== before) {
          if (made.podUid !== null) await this.#release(agent, made);
          if (before) records.put(before);
          else records.delete(target);
        }
        if (agent.about) await this.#lift(name, agent.about);
        if (!before && lstatSync(target, { throwIfNoEntry: false })?.isDirectory() && made) rmdirSync(target);
      }
    } catch (error) {
      log.warn({ target, problem: (error as Error).message }, 'a publish that failed left something behind');
    }
    if (records.of(volumeId(name)).length === 0) await agent.reportNow();
  }

  #sourceOrNull(about: About, name: VolumeName): string | null {
    try {
      return this.#source(about, name);
    } catch {
      return null;
    }
  }

  /** The mount is as it was asked for, as the kernel says. */
  #check(target: string, source: string | null, wanted: Wanted): void {
    const { layers } = this.#found(target, source, this.#deps.mounter.table());
    const [only] = layers;
    const options = wantedOptions(wanted.readOnly, wanted.flags);
    if (
      layers.length !== 1 ||
      only?.layer !== 'volume' ||
      !options.every((one) => only.options.includes(one))
    )
      throw new Error(
        `the mount at ${target} is not as it was made: ${JSON.stringify(layers)}, wanted ${options.join(',')}`,
      );
  }

  /**
   * The agent's leave to write here now; null: it does not answer, and the volume is mounted already.
   * Waits a little: a first decision, a move or a renewal is usually under way.
   */
  async #permit(
    agent: PoolAgent,
    name: VolumeName,
    wanted: Wanted,
    record: PublishRecord | null,
    mounted: boolean,
  ): Promise<{ lease: WriterLease; askedAt: number } | null> {
    const { node, clock, freezer } = this.#deps;
    const ends = clock() + (this.#deps.waitMs ?? WAIT_MS);
    let granted = false;
    try {
      for (;;) {
        let refusal: () => never;
        try {
          const permit = await agent.announce(name);
          const { lease } = permit;
          if (lease.role !== 'active' || lease.released) {
            const where =
              lease.role === 'none'
                ? `${node} has no state of ${wanted.volumeId} (it is not placed yet, or was deleted)`
                : `${node} is not the active node of ${wanted.volumeId} in epoch ${lease.epoch}`;
            refusal = () => precondition(`${where}; it is published on its active node only`);
          } else if (lease.remainingMs !== null && lease.remainingMs <= 0) {
            refusal = () =>
              unavailable(
                `${node} holds no lease for ${wanted.volumeId} in epoch ${lease.epoch} yet: neither the controller nor the replicas have answered`,
              );
          } else if (lease.fencing === 'lease' && !freezer.possible) {
            refusal = () =>
              precondition(
                `the writer of ${wanted.volumeId} could not be stopped on ${node}: ${freezer.reason}`,
              );
          } else if (lease.fencing === 'lease' && wanted.podUid === null) {
            refusal = () =>
              precondition(
                `the writer of ${wanted.volumeId} could not be stopped: the target names no pod (podInfoOnMount is off?)`,
              );
          } else {
            const why = this.#unstoppable(wanted);
            if (why === null) {
              granted = true;
              return permit;
            }
            if (lease.fencing === 'none') {
              granted = true;
              return permit;
            }
            refusal = () => unavailable(why);
          }
        } catch (error) {
          if (mounted && record) {
            granted = true;
            return null;
          }
          refusal = () => unavailable(`the agent of ${node} does not answer: ${(error as Error).message}`);
        }
        if (clock() >= ends) refusal();
        await sleep(AGAIN_MS);
      }
    } finally {
      if (!granted) {
        agent.unannounce(name);
        await agent.reportNow();
      }
    }
  }

  /** Why the pod cannot be found by whom it would be frozen; null: it can, or there is nothing to find. */
  #unstoppable({ podUid }: Wanted): string | null {
    if (podUid === null || !this.#deps.freezer.possible) return null;
    try {
      this.#deps.find(podUid);
      return null;
    } catch (error) {
      return (error as Error).message;
    }
  }

  async #release(agent: PoolAgent, record: PublishRecord): Promise<void> {
    const others = this.#deps.records
      .of(record.volumeId)
      .filter((one) => one.target !== record.target && one.podUid === record.podUid);
    // A pod may have the same volume at several places.
    if (record.podUid !== null && others.length === 0)
      await agent.freezer.remove({ ...nameOf(record), podUid: record.podUid });
  }

  async unpublish(request: NodeUnpublishVolumeRequest__Output): Promise<object> {
    const id = needVolumeId(request.volume_id);
    const target = this.#target(request.target_path);
    const name = parseVolumeId(id);
    return this.#locked([id, target], async () => {
      const { records, mounter, log } = this.#deps;
      const record = records.get(target);
      const about = await this.#aboutFor(record, name);
      const source = about && name ? path.join(about.path, name.namespace, name.volume) : null;
      const real = source === null ? null : realOrSelf(source);
      const plan = unpublishSteps(id, record, this.#found(target, real, mounter.table(), name && `/${id}`));
      if (!Array.isArray(plan)) this.#refuse(plan);
      for (const step of plan) {
        if (step.do === 'umount') await mounter.umount(target);
        else if (step.do === 'rmdir') {
          if (stackAt(mounter.table(), target).length > 0)
            throw new Error(`something is still mounted at ${target}`);
          try {
            rmdirSync(target);
          } catch (error) {
            const { code } = error as NodeJS.ErrnoException;
            if (code === 'ENOTEMPTY' || code === 'EEXIST')
              precondition(`${target} is not mounted and not empty; nothing of it is removed`);
            if (code !== 'ENOENT') throw error;
          }
        } else {
          const agent = this.#agents.find((one) => one.about?.pool === record?.pool);
          if (agent && record) await this.#release(agent, record);
          records.delete(target);
          if (record && agent?.about) await this.#lift(record, agent.about);
          if (agent) await agent.reportNow();
        }
      }
      if (plan.length > 0) log.info({ volume: id, target }, 'unpublished');
      return {};
    });
  }

  async #aboutFor(record: PublishRecord | null, name: VolumeName | null): Promise<About | null> {
    const abouts = this.#agents.flatMap((one) => (one.about ? [one.about] : []));
    if (record) return abouts.find((one) => one.pool === record.pool) ?? null;
    if (!name) return null;
    return (
      abouts.find((one) =>
        lstatSync(path.join(one.path, name.namespace, name.volume), { throwIfNoEntry: false }),
      ) ??
      abouts[0] ??
      null
    );
  }

  /** The record of a published path; NOT_FOUND when there is none or nothing is mounted. */
  #published(id: string, at: string): PublishRecord {
    const record = this.#deps.records.get(at);
    if (record && record.volumeId === id) return record;
    return notFound(`${JSON.stringify(id)} is not published at ${JSON.stringify(at)}`);
  }

  #healthOf(record: PublishRecord): Health[] {
    const out: Health[] = [];
    const agent = this.#agents.find((one) => one.about?.pool === record.pool);
    const top = stackAt(this.#deps.mounter.table(), record.target).at(-1);
    if (record.moved)
      out.push({
        status: 'INACCESSIBLE',
        reason: 'MovedOn',
        message: 'Another node goes on with the volume; the pod on this node must end.',
      });
    else if (!top)
      out.push({
        status: 'INACCESSIBLE',
        reason: 'NotMounted',
        message: `Nothing is mounted at ${record.target}.`,
      });
    const writer = agent?.freezer
      .status()
      .find((one) => volumeKey(one) === volumeKey(record) && one.podUid === record.podUid);
    if (writer?.state === 'frozen')
      out.push({
        status: 'INACCESSIBLE',
        reason: 'LeaseEnded',
        message:
          'The pod is held still: neither the controller nor all replicas could be reached in time. It goes on when they can.',
      });
    if (writer?.problem)
      out.push({
        status: 'DEGRADED',
        reason: 'NotInHand',
        message: `The pod could not be stopped: ${writer.problem}`,
      });
    if (agent && agent.problem !== null)
      out.push({ status: 'DEGRADED', reason: 'AgentSilent', message: agent.problem });
    return out;
  }

  async stats(request: NodeGetVolumeStatsRequest__Output): Promise<object> {
    const id = needVolumeId(request.volume_id);
    if (request.volume_path === '') invalid('volume_path is required');
    const record = this.#published(id, request.volume_path);
    if (stackAt(this.#deps.mounter.table(), record.target).length === 0)
      notFound(`nothing is mounted at ${record.target}`);
    const { bavail, bfree, blocks, bsize, files, ffree } = await statfs(record.target);
    // What a size is enforced on is full when that is used up, however much room the disk has.
    const own = await this.#sizes.usage(nameOf(record));
    return {
      usage: [
        own === null
          ? {
              unit: 'BYTES',
              total: `${blocks * bsize}`,
              available: `${bavail * bsize}`,
              used: `${(blocks - bfree) * bsize}`,
            }
          : {
              unit: 'BYTES',
              total: `${own.bytes}`,
              available: `${Math.max(0, Math.min(own.bytes - own.used, bavail * bsize))}`,
              used: `${own.used}`,
            },
        { unit: 'INODES', total: `${files}`, available: `${ffree}`, used: `${files - ffree}` },
      ],
    };
  }

  health(request: NodeGetVolumeHealthRequest__Output): object {
    const id = needVolumeId(request.volume_id);
    const at = request.volume_publish_path;
    const records = at === '' ? this.#deps.records.of(id) : [this.#published(id, at)];
    if (records.length === 0) notFound(`${JSON.stringify(id)} is not published on this node`);
    const seen = new Set<string>();
    const health_statuses = records
      .flatMap((one) => this.#healthOf(one))
      .filter(({ status, reason }) => !seen.has(`${status} ${reason}`) && seen.add(`${status} ${reason}`));
    return { volume_health: { volume_id: id, health_statuses } };
  }

  async expand(request: NodeExpandVolumeRequest__Output): Promise<object> {
    const id = needVolumeId(request.volume_id);
    if (request.volume_path === '') invalid('volume_path is required');
    const record = this.#published(id, request.volume_path);
    const bytes = Number(request.capacity_range?.required_bytes ?? 0);
    if (bytes > (record.bytes ?? 0)) this.#deps.records.put({ ...record, bytes });
    await this.#grow(record, bytes);
    return { capacity_bytes: `${Math.max(bytes, record.bytes ?? 0)}` };
  }

  /** The new size holds when the call returns; the controller has told the agent before. */
  async #grow(record: PublishRecord, bytes: number): Promise<void> {
    const name = nameOf(record);
    const agent = this.#agents.find((one) => one.about?.pool === record.pool);
    const source = agent?.about ? this.#sourceOrNull(agent.about, name) : null;
    if (!agent || source === null || record.moved) return;
    let wanted: number | null | undefined;
    try {
      const lease = await agent.lease(name);
      wanted = lease.role === 'active' ? lease.sizeBytes : undefined;
    } catch {
      const known = this.#sizes.of(name)?.bytes;
      wanted = known === undefined ? undefined : Math.max(known, bytes);
    }
    if (wanted === undefined) return;
    await this.#sizes.set(name, source, wanted);
    await agent.reportNow();
  }

  async info(): Promise<object> {
    const abouts = await Promise.all(this.#agents.map((one) => one.look()));
    const pools = abouts.flatMap((about) => (about ? [about.pool] : []));
    if (pools.length === 0) return unavailable(this.problem() ?? 'no pool is known');
    return {
      node_id: this.#deps.node,
      accessible_topology: { segments: Object.fromEntries(pools.map((pool) => [poolKey(pool), 'true'])) },
    };
  }

  service(): Service {
    const capabilities = [
      'GET_VOLUME_STATS',
      'EXPAND_VOLUME',
      'SINGLE_NODE_MULTI_WRITER',
      'GET_VOLUME_HEALTH',
    ];
    return {
      name: 'csi.v1.Node',
      methods: {
        NodePublishVolume: (request) => this.publish(request),
        NodeUnpublishVolume: (request) => this.unpublish(request),
        NodeGetVolumeStats: (request) => this.stats(request),
        NodeGetVolumeHealth: (request) => this.health(request),
        NodeExpandVolume: (request) => this.expand(request),
        NodeGetInfo: () => this.info(),
        NodeGetCapabilities: () => ({ capabilities: capabilities.map((type) => ({ rpc: { type } })) }),
      },
    };
  }
}

/** Directories in a folder, none if there is no folder. */
function below(folder: string): string[] {
  try {
    return readdirSync(folder, { withFileTypes: true }).flatMap((one) =>
      one.isDirectory() ? [path.join(folder, one.name)] : [],
    );
  } catch {
    return [];
  }
}

const liveTrees = (pool: string): string[] =>
  below(pool)
    .filter((one) => !path.basename(one).startsWith('.'))
    .flatMap(below);

const nameOf = ({ namespace, volume }: VolumeName): VolumeName => ({ namespace, volume });

function realOrSelf(source: string): string {
  try {
    return realpathSync(source);
  } catch {
    return source;
  }
}

const sleep = (ms: number): Promise<void> => new Promise((resolve) => setTimeout(resolve, ms));
