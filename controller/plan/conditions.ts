/** Conditions and other parts of the status that change rarely and must not be written when nothing has changed. */
import type { Condition } from '../cluster/types.ts';
import type { SimpleVolumeStatus } from './types.ts';

/** Limits of the CRD. */
const MAX_MESSAGE = 4000;
const MAX_CONDITIONS = 32;

export const shorten = (text: string, max: number): string =>
  text.length <= max ? text : `${text.slice(0, max - 1)}…`;

/** As JSON with sorted keys: the API server gives objects back with their keys in an order of its own. */
export function canonical(value: unknown): string {
  return JSON.stringify(value, (_, one: unknown) =>
    one !== null && typeof one === 'object' && !Array.isArray(one)
      ? Object.fromEntries(Object.entries(one).sort(([a], [b]) => (a < b ? -1 : 1)))
      : one,
  );
}

/** RFC 3339 in whole seconds. */
export const stamp = (ms: number): string => new Date(ms).toISOString().replace(/\.\d{3}Z$/, 'Z');

export interface ConditionNow {
  type: string;
  status: 'True' | 'False' | 'Unknown';
  reason: string;
  message: string;
}

/** The conditions as they are now; the time of one that has not changed its status stays. Sorted by type. */
export function conditions(
  before: readonly Condition[],
  now: readonly ConditionNow[],
  at: number,
  generation: number | undefined,
): Condition[] {
  return [...now]
    .sort((a, b) => (a.type < b.type ? -1 : a.type > b.type ? 1 : 0))
    .slice(0, MAX_CONDITIONS)
    .map((one) => {
      const known = before.find((condition) => condition.type === one.type);
      return {
        ...one,
        message: shorten(one.message, MAX_MESSAGE),
        ...(generation === undefined ? {} : { observedGeneration: generation }),
        lastTransitionTime: known?.status === one.status ? known.lastTransitionTime : stamp(at),
      };
    });
}

/** Whether a condition says something that it did not say before: what is worth an Event. */
export function isNews(before: readonly Condition[], now: ConditionNow): boolean {
  const known = before.find((condition) => condition.type === now.type);
  return known === undefined || known.status !== now.status || known.reason !== now.reason;
}

/** What goes on growing by itself and is written only now and then. */
function steady(status: SimpleVolumeStatus): string {
  return canonical({
    ...status,
    freshAt: undefined,
    generation: undefined,
    replicas: (status.replicas ?? []).map(({ node, state, message }) => ({ node, state, message })),
    // What the agents say may hold counts that go on changing.
    conditions: (status.conditions ?? []).map(({ message, ...one }) => ({
      ...one,
      message: one.reason === 'ReportedByAgent' ? '' : message,
    })),
  });
}

/**
 * The status to be written: the new one when something happened, or when the ages in the old one are older than
 * `everyMs`; else the old one as it is, so that an idle volume costs no writes.
 */
export function settle(
  before: SimpleVolumeStatus,
  after: SimpleVolumeStatus,
  now: number,
  everyMs: number,
): SimpleVolumeStatus {
  if (canonical(before) === canonical(after)) return before;
  if (steady(before) !== steady(after)) return after;
  const written = Math.max(
    ...(before.replicas ?? []).map((one) => Date.parse(one.observedAt)).filter((at) => !Number.isNaN(at)),
    Date.parse(before.freshAt ?? '') || Number.NEGATIVE_INFINITY,
  );
  // A clock that jumped back must not silence it for long.
  return Math.abs(now - written) < everyMs ? before : after;
}
