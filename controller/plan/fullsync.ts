/**
 * Full syncs: a comparison of every copy with the source in full, on start of an epoch, by schedule, by hand. One at a
 * time per volume; what is under way is in `status.lastFullSync`, so that the next leader goes on with it (a replica that
 * is asked again says that it is at it already).
 */
import type { Policy } from '../policy/annotations.ts';
import { toSyncPolicy } from '../policy/annotations.ts';
import { due, NO_SCHEDULE, parseSchedule } from './schedule.ts';
import type { Action, Observed, PlannedEvent, SimpleVolumeStatus } from './types.ts';

export type LastFullSync = NonNullable<SimpleVolumeStatus['lastFullSync']>;

export interface FullSyncPlan {
  lastFullSync: LastFullSync | null;
  /** RFC 3339; null: no schedule */
  nextFullSync: string | null;
  actions: Action[];
  events: PlannedEvent[];
  nextLookMs: number | null;
}

/** A run that takes longer has hung somewhere, ms. */
const LONGEST_MS = 24 * 3_600_000;
/** How often a running one is looked at when nothing is heard, ms. */
const LOOK_MS = 15_000;

const iso = (ms: number): string => new Date(ms).toISOString();

export interface FullSyncInput {
  policy: Policy;
  /** the schedule of the policy that was in force until now: a changed one begins to count now */
  scheduleBefore: string | null;
  last: LastFullSync | null;
  next: string | null;
  epoch: number;
  /** when this epoch began, wall clock ms */
  epochSince: number;
  /** the active node; null: it cannot be asked now, or nothing may be begun (a move, a held volume, nothing sealed) */
  source: string | null;
  /** copies whose agents answer, and those whose agents do not */
  reachable: readonly string[];
  unreachable: readonly string[];
}

/** How a run ended, from what its replicas said; null: it goes on. */
function outcomeOf(o: Observed, input: FullSyncInput, run: LastFullSync): Partial<LastFullSync> | null {
  const states = o.memory.fullSyncs.filter((one) => one.run === run.id);
  const started = Date.parse(run.startedAt);
  if (started < input.epochSince)
    return { outcome: 'Cancelled', message: 'the volume moved to another node meanwhile' };
  if (!input.policy.replicationEnabled)
    return { outcome: 'Cancelled', message: 'replication was switched off' };
  const late = o.now - started > LONGEST_MS;
  const open = input.reachable.filter(
    (node) =>
      states.find((one) => one.node === node)?.state !== 'done' &&
      states.find((one) => one.node === node)?.state !== 'failed',
  );
  if (open.length > 0 && !late) return null;
  const failed = [
    ...states.filter((one) => one.state === 'failed').map((one) => `${one.node}: ${one.error ?? 'failed'}`),
    ...input.unreachable
      .filter((node) => !states.some((one) => one.node === node && one.state !== 'running'))
      .map((node) => `${node}: its agent does not answer; it catches up when it does`),
    ...(late ? open.map((node) => `${node}: not done after ${LONGEST_MS / 3_600_000} h`) : []),
  ];
  const done = states.filter((one) => one.state === 'done').length;
  if (failed.length === 0 && done === 0) return { outcome: 'Failed', message: 'there is no copy to compare' };
  return {
    outcome: failed.length === 0 ? 'Succeeded' : done > 0 ? 'Partial' : 'Failed',
    message: failed.length === 0 ? `${done} copies are as the source` : failed.join('; ').slice(0, 1000),
  };
}

/** The state of full syncs after now, and what is to be done for it. */
export function planFullSync(o: Observed, input: FullSyncInput): FullSyncPlan {
  const { policy, epoch } = input;
  const actions: Action[] = [];
  const events: PlannedEvent[] = [];
  let last = input.last;
  let look: number | null = null;

  if (last !== null && last.endedAt === undefined) {
    const end = outcomeOf(o, input, last);
    if (end !== null) {
      last = { ...last, endedAt: iso(o.now), ...end };
      events.push({
        type: last.outcome === 'Succeeded' || last.outcome === 'Cancelled' ? 'Normal' : 'Warning',
        reason: `FullSync${last.outcome}`,
        message: `The full sync ${last.id} ended: ${last.message ?? ''}`,
        cause: last.id,
      });
    }
  }

  // The next slot is kept in the status: what passed while nobody looked is seen by it.
  let next: number | null = null;
  let slot: number | null = null;
  const schedule =
    policy.fullSyncSchedule === null || policy.fullSyncSchedule === NO_SCHEDULE
      ? null
      : parseSchedule(policy.fullSyncSchedule, o.options.timeZone);
  if (schedule !== null && !('error' in schedule)) {
    const kept = input.scheduleBefore === policy.fullSyncSchedule ? Date.parse(input.next ?? '') : Number.NaN;
    const since = Number.isNaN(kept) ? o.now : kept - 1;
    const ran = last === null ? null : Date.parse(last.startedAt);
    ({ slot, next } = due(schedule, since, ran, o.now));
  }

  const manual = o.memory.manualSyncs[0];
  if (manual !== undefined && last?.id === manual.id)
    actions.push({
      id: `acceptManualSync:${manual.id}`,
      kind: 'acceptManualSync',
      requestId: manual.id,
      run: manual.id,
    });
  const idle = last === null || last.endedAt !== undefined;
  const ready = input.source !== null && policy.replicationEnabled && input.reachable.length > 0;
  if (idle && ready) {
    const since = last === null ? Number.NEGATIVE_INFINITY : Date.parse(last.startedAt);
    const begin = (id: string, trigger: string): void => {
      last = { id, trigger, startedAt: iso(o.now) };
    };
    if (manual !== undefined && last?.id !== manual.id) {
      begin(manual.id, 'Manual');
      actions.push({
        id: `acceptManualSync:${manual.id}`,
        kind: 'acceptManualSync',
        requestId: manual.id,
        run: manual.id,
      });
    } else if (policy.fullSyncOnStart && since < input.epochSince) begin(`start-${epoch}-${o.now}`, 'Start');
    else if (slot !== null) begin(`schedule-${slot}`, 'Schedule');
    // A run serves every slot until it began.
    if (slot !== null && last !== input.last && last?.endedAt === undefined) slot = null;
  }
  // A slot that could not be served yet stays the next one, so that it is not forgotten.
  const kept = slot ?? next;

  if (last !== null && last.endedAt === undefined && input.source !== null) {
    const run = last.id;
    const states = o.memory.fullSyncs.filter((one) => one.run === run);
    const unasked = input.reachable.filter((node) => !states.some((one) => one.node === node));
    if (unasked.length > 0)
      actions.push({
        id: `fullSync:${run}`,
        kind: 'fullSync',
        run,
        nodes: unasked,
        source: input.source,
        epoch,
        policy: toSyncPolicy(policy),
      });
    look = LOOK_MS;
  }
  if (next !== null) look = Math.min(look ?? Number.POSITIVE_INFINITY, Math.max(1000, next - o.now));
  return {
    lastFullSync: last,
    nextFullSync: kept === null ? null : iso(kept),
    actions,
    events,
    nextLookMs: look,
  };
}
