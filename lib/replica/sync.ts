/** One attempt to come to what the source has: offer, plan, pull, verify, apply, confirm. */
import { mkdir, rm, statfs } from 'node:fs/promises';
import { join } from 'node:path';
import { SimpleVolumeError } from '../core/errors.ts';
import {
  formatGeneration,
  type Generation,
  isAncestor,
  parseGeneration,
  sameGeneration,
} from '../core/generation.ts';
import { slotName } from '../core/lists.ts';
import { ManifestReader } from '../core/manifest.ts';
import type {
  Clock,
  Logger,
  Offer,
  Puller,
  ReplicaStatus,
  SyncRequest,
  VolumeName,
  VolumePaths,
} from '../core/parts.ts';
import type { ReplicaPolicy } from '../core/policy.ts';

import type { VolumeStore } from '../core/store.ts';
import { filterOf } from '../native/filter.ts';
import type { Native } from '../native/types.ts';
import {
  type ApplyDeps,
  ASIDE,
  begin,
  carryOut,
  clearIncoming,
  DEMOTED,
  HELD,
  type Held,
  type Journal,
  writePlan,
} from './apply.ts';
import { type Aside, type AsideDeps, hasEntries, moveAside, newStamp } from './backups.ts';
import { fetchContents, hasSlot, Verified } from './fetch.ts';
import { makeLive } from './live.ts';
import type { NameCheck } from './names.ts';
import { NAMED, Plan } from './plan.ts';
import { NativeDisk, walkAll, walkDifference } from './walk.ts';

export interface SyncDeps {
  name: VolumeName;
  paths: VolumePaths;
  store: VolumeStore;
  native: Native;
  puller: Puller;
  clock: Clock;
  log: Logger;
  names: NameCheck;
  mountsOf(directory: string): string[];
  /** what is wrong with the pool, null: nothing */
  poolProblem(): string | null;
  /** bytes that stay free on the file system */
  floorBytes: number;
  /** live trees are made so that they can be held to a size */
  countTrees: boolean;
  /** the first path at which the live tree is not what the index says, contents read; null: nowhere */
  firstDifference(policy: ReplicaPolicy, signal: AbortSignal): Promise<string | null>;
  /** removes what the active role kept beside the tree; what is offered from here as a copy stays */
  removeShadow(): Promise<void>;
}

export interface Attempt {
  request: SyncRequest;
  /** compare with the disk whatever is held */
  full: boolean;
  /** believe the index where inode and ctime agree */
  trust: boolean;
  signal: AbortSignal;
  state(state: ReplicaStatus['state']): void;
  /** From here on the attempt only goes forward: it may not be cancelled. Throws when it must not begin. */
  pointOfNoReturn(): void;
  /** slots of an attempt before this one, if it was of the same manifest */
  kept: { hash: string; verified: Verified } | null;
  keep(hash: string, verified: Verified): void;
}

export interface Reached {
  held: Held;
  generation: Generation;
  pull: { bytes: number; files: number; full: boolean };
}

/** Filter and overrides: when they change, everything is compared anew. */
export const policyKey = (p: ReplicaPolicy): string =>
  JSON.stringify([
    p.includePaths,
    p.excludePaths,
    p.pruneExcluded,
    p.ownerUid,
    p.ownerGid,
    p.fileMode,
    p.dirMode,
  ]);

/**
 * Before anything is written to the pool: a disk that is not there must not be taken for an empty volume, and what
 * a pod uses is not ours.
 * @throws POOL_MISSING, VOLUME_IN_USE
 */
export function checkPlace(d: Pick<SyncDeps, 'mountsOf' | 'poolProblem' | 'paths'>): void {
  const problem = d.poolProblem();
  if (problem) throw new SimpleVolumeError('POOL_MISSING', problem);
  const mounts = d.mountsOf(d.paths.live);
  if (mounts.length > 0)
    throw new SimpleVolumeError(
      'VOLUME_IN_USE',
      `the volume is mounted on this node (${mounts[0]}): it is not written to`,
      {
        path: mounts[0] as string,
      },
    );
}

export const applyDeps = (d: SyncDeps): ApplyDeps => ({
  native: d.native,
  store: d.store,
  clock: d.clock,
  live: d.paths.live,
  incoming: d.paths.incoming,
  backups: d.paths.backups,
});

export const asideDeps = (d: SyncDeps): AsideDeps => ({
  native: d.native,
  store: d.store,
  live: d.paths.live,
  backups: d.paths.backups,
  now: d.clock.now(),
  countTrees: d.countTrees,
});

/** What can serve as a base: nothing while the tree on the disk is not this volume's replica. */
export function heldOf(store: VolumeStore): Held | null {
  if (store.meta(DEMOTED) || store.meta(ASIDE)) return null;
  return store.meta<Held>(HELD) ?? null;
}

export async function attempt(d: SyncDeps, a: Attempt): Promise<Reached> {
  const { store, puller } = d;
  const { request, signal } = a;
  a.state('pulling');
  const returning = store.meta(DEMOTED) !== undefined || store.meta(ASIDE) !== undefined;
  let held = heldOf(store);
  const policyChanged = held !== null && held.policy !== policyKey(request.policy);
  const rootGone =
    held !== null && (await new NativeDisk(d.native, Buffer.from(d.paths.live)).rootStat()) === null;
  // names beyond what is remembered: only a full comparison knows them all
  const tooManyRefused = held !== null && held.refusedCount > held.refused.length;
  const full = a.full || policyChanged || rootGone || tooManyRefused || held === null;
  const have = held && !full ? parseGeneration(held.generation) : null;
  const offer = await puller.offer(request.source, { ...d.name, epoch: request.epoch, have, full }, signal);
  try {
    const diverged = checkOffer(held, offer, request, a.full, have);
    if (returning || diverged) {
      checkPlace(d);
      signal.throwIfAborted();
      if (store.meta(ASIDE) || (await hasEntries(d.paths.live))) {
        const aside = await moveAside(asideDeps(d));
        d.log.warn(
          { backup: aside.stamp, offered: formatGeneration(offer.generation) },
          'this node was written to under an older epoch, or holds a state that is not on the line of the source: its tree is kept in the backups and restored anew',
        );
      } else if (store.meta(DEMOTED))
        await store.transaction(() => {
          store.deleteMeta(DEMOTED);
          store.deleteMeta(HELD);
        });
      held = null;
    }
    return await pull(d, a, offer, held);
  } finally {
    // best effort: an offer that nobody touches ends by itself
    await puller.done(request.source, offer).catch(() => undefined);
  }
}

/** Whether what is held lies on another line than the offer. Throws when the offer must not be taken. */
function checkOffer(
  held: Held | null,
  offer: Offer,
  request: SyncRequest,
  fullAsked: boolean,
  have: Generation | null,
): boolean {
  const text = formatGeneration(offer.generation);
  if (!isAncestor(offer.generation, offer.lineage, offer.generation))
    throw new SimpleVolumeError(
      'MANIFEST_INVALID',
      `the source offers ${text}, which is not on its own line`,
    );
  if (offer.generation.epoch > request.epoch)
    throw new SimpleVolumeError('MANIFEST_INVALID', `the source offers ${text} in epoch ${request.epoch}`);
  if (offer.base && !(have && sameGeneration(offer.base, have)))
    throw new SimpleVolumeError(
      'MANIFEST_INVALID',
      `the source offers a difference from ${formatGeneration(offer.base)}, which this replica does not hold`,
    );
  if (!held) return false;
  const mine = parseGeneration(held.generation);
  if (isAncestor(mine, offer.lineage, offer.generation)) return false;
  // The same writer with an older state: it has lost its own history. What is here may be the better copy.
  if (mine.epoch === offer.generation.epoch && !fullAsked)
    throw new SimpleVolumeError(
      'BASE_UNKNOWN',
      `the source ${request.source.node} is at ${text}, this replica already holds ${held.generation} of the same epoch; ask for a full sync if the source is right`,
      { node: request.source.node },
    );
  return true;
}

async function pull(d: SyncDeps, a: Attempt, offer: Offer, held: Held | null): Promise<Reached> {
  const { native, store } = d;
  const { request, signal } = a;
  const { incoming, live } = d.paths;
  await mkdir(incoming, { recursive: true, mode: 0o700 });
  const reuse = a.kept?.hash === offer.manifest.hash ? a.kept.verified : null;
  if (reuse) await rm(join(incoming, 'manifest'), { force: true });
  else await clearIncoming(native, incoming);
  await mkdir(join(incoming, 'slots'), { recursive: true, mode: 0o700 });
  await requireSpace(d, offer.manifest.bytes);
  await d.puller.manifest(request.source, offer, join(incoming, 'manifest'), signal);
  const manifest = await ManifestReader.open(Buffer.from(join(incoming, 'manifest')), {
    expect: { ...d.name, generation: offer.generation, base: offer.base },
  });
  let plan: Plan | null = null;
  try {
    // never made before a source has something for it; the root's own mode and owner come with the state
    if (!offer.base) await makeLive(native, live, { mode: 0o700, counted: d.countTrees });
    // What is pulled now is renamed into the tree.
    for (const folder of [incoming, join(incoming, 'slots')])
      await native.joinTree(Buffer.from(folder), Buffer.from(live));
    const disk = new NativeDisk(native, Buffer.from(live));
    const filter = filterOf(native, request.policy);
    plan = new Plan({
      folder: incoming,
      index: store,
      disk,
      policy: request.policy,
      covers: (path, isDirectory) => filter.match(path, isDirectory),
      full: offer.base === null,
      trust: a.trust,
      seq: offer.generation.seq,
      refuses: (path) => d.names.refuses(path),
      refusedBefore: new Map(held?.refused ?? []),
    });
    const input = { manifest, index: store, disk, plan, signal };
    const before = store.totals().entries;
    if (offer.base) await walkDifference(input);
    else
      await walkAll(
        input,
        request.policy.pruneExcluded ? native.compileFilter([], []) : filter,
        offer.generation.seq,
      );
    await requireSpace(d, plan.bytesWanted);
    const aside = store.meta<Aside>(ASIDE);
    const verified = reuse ?? new Verified(manifest.header.count);
    a.keep(offer.manifest.hash, verified);
    if (reuse) await dropUnverified(plan, verified, join(incoming, 'slots'));
    const pulled = await fetchContents({
      native,
      puller: d.puller,
      source: request.source,
      offer,
      manifest,
      plan,
      index: store,
      slots: join(incoming, 'slots'),
      live,
      aside: aside ? join(d.paths.backups, aside.stamp) : null,
      verified,
      signal,
    });
    a.state('verifying');
    const keepOld = mustKeepOld(plan, offer, held, before);
    const retired = keepOld || plan.keepsStrays ? await newStamp(d.paths.backups, d.clock.now()) : null;
    if (keepOld)
      d.log.warn(
        { backup: retired, removed: plan.removed, entries: before },
        'more than half of the replica would go: it is kept in the backups',
      );
    const journal: Journal = {
      held: {
        generation: formatGeneration(offer.generation),
        quiescent: manifest.header.quiescent,
        complete: plan.refusedCount === 0,
        lastComplete:
          plan.refusedCount === 0 ? formatGeneration(offer.generation) : (held?.lastComplete ?? null),
        refusedCount: plan.refusedCount,
        refused: [...plan.refused].slice(0, NAMED),
        xattrsFailed: 0,
        policy: policyKey(request.policy),
        missing: [],
      },
      lineage: manifest.header.lineage,
      full: offer.base === null,
      phase: 1,
      retired,
      changed: plan.changed,
      sealedAt: d.clock.now(),
      required: request.policy.requiredPaths,
    };
    await writePlan(applyDeps(d), plan, keepOld);
    await plan.close();
    checkPlace(d);
    signal.throwIfAborted();
    a.pointOfNoReturn();
    a.state('applying');
    await begin(applyDeps(d), journal);
    const now = await carryOut(applyDeps(d), journal);
    return { held: now, generation: offer.generation, pull: { ...pulled, full: offer.base === null } };
  } finally {
    await plan?.close();
    await manifest.close();
  }
}

/**
 * A state that would take more than half of what is here is more often a mistake (an empty source, a filter that
 * matches nothing) than a wish. And what is in a tree of unknown origin is nobody's to throw away.
 */
export function mustKeepOld(
  plan: Pick<Plan, 'removed' | 'destroys'>,
  offer: Pick<Offer, 'base'>,
  held: Held | null,
  entriesBefore: number,
): boolean {
  if (offer.base !== null || plan.destroys === 0) return false;
  // without the root, which is never removed
  return held === null || plan.removed * 2 > entriesBefore - 1;
}

/** @throws NO_SPACE */
async function requireSpace(d: SyncDeps, bytes: number): Promise<void> {
  const fs = await statfs(d.paths.incoming);
  const free = fs.bavail * fs.bsize;
  if (bytes + d.floorBytes > free)
    throw new SimpleVolumeError(
      'NO_SPACE',
      `${bytes} bytes are to be pulled and ${d.floorBytes} have to stay free, ${free} are free; nothing was changed`,
      { path: d.paths.incoming },
    );
}

/** Slots of a failed attempt that are not of use: half written, or patches. */
async function dropUnverified(plan: Plan, verified: Verified, slots: string): Promise<void> {
  for (const ordinal of plan.wanted())
    if (!hasSlot(plan, verified, ordinal)) await rm(join(slots, slotName(ordinal)), { force: true });
}
