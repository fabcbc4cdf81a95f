/**
 * Manual full syncs as they are kept in the cluster, so that they survive restarts and any replica of the controller can
 * take one in: the request is an annotation of the SimpleVolume, which the leader turns into `status.lastFullSync`.
 */
import { randomBytes } from 'node:crypto';
import { isKubeError, type Kube, SIMPLE_VOLUMES } from '../cluster/index.ts';
import type { SimpleVolume } from '../cluster/types.ts';

/** Annotation of a SimpleVolume: a full sync that was asked for and not begun yet, `<id> <RFC 3339>`. */
export const REQUEST_KEY = 'storage.shipstuff.io/manual-sync-request';

export type Started =
  | { started: true; id: string }
  | { started: false; reason: 'already-running'; id: string };

export interface Run {
  id: string;
  claimName: string;
  state: 'queued' | 'running' | 'ended';
  /** as in status.lastFullSync: Succeeded, Failed ... */
  outcome?: string;
  message?: string;
  requestedAt?: string;
  startedAt?: string;
  endedAt?: string;
}

export interface Runs {
  /** null: there is no such claim of this driver */
  start(namespace: string, claimName: string): Promise<Started | null>;
  /** null: no run of that id is known in the namespace */
  find(namespace: string, id: string): Promise<Run | null>;
}

/** The request that waits in an object; null: none. */
export function requestOf(object: {
  metadata: { annotations?: Record<string, string> };
}): { id: string; requestedAt: number } | null {
  const match = /^([0-9a-z-]{8,64}) (\S{20,32})$/.exec(object.metadata.annotations?.[REQUEST_KEY] ?? '');
  const at = Date.parse(match?.[2] ?? '');
  return match && Number.isFinite(at) ? { id: match[1] as string, requestedAt: at } : null;
}

const CALL_MS = 8000;
const ATTEMPTS = 8;

/**
 * @param kube not gated: a request is no decision, and each is written against the version that was read
 * @param now wall clock, ms
 */
export function clusterRuns(kube: Kube, now: () => number): Runs {
  return {
    async start(namespace, claimName) {
      for (let attempt = 1; ; attempt++) {
        const object = await kube.find(
          SIMPLE_VOLUMES,
          { namespace, name: claimName },
          { timeoutMs: CALL_MS },
        );
        if (object === null || object.metadata.deletionTimestamp !== undefined) return null;
        const waiting = requestOf(object);
        if (waiting) return { started: false, reason: 'already-running', id: waiting.id };
        const last = object.status?.lastFullSync;
        if (last && last.endedAt === undefined)
          return { started: false, reason: 'already-running', id: last.id };
        const id = `manual-${randomBytes(9).toString('hex')}`;
        try {
          await kube.merge(
            SIMPLE_VOLUMES,
            { namespace, name: claimName },
            { metadata: { annotations: { [REQUEST_KEY]: `${id} ${new Date(now()).toISOString()}` } } },
            { resourceVersion: object.metadata.resourceVersion, timeoutMs: CALL_MS },
          );
          return { started: true, id };
        } catch (error) {
          if (isKubeError(error, 'NotFound')) return null;
          if (!isKubeError(error, 'Conflict') || attempt === ATTEMPTS) throw error;
        }
      }
    },
    async find(namespace, id) {
      for await (const object of kube.list(SIMPLE_VOLUMES, { namespace, timeoutMs: CALL_MS })) {
        const found = runIn(object, id);
        if (found) return found;
      }
      return null;
    },
  };
}

function runIn(object: SimpleVolume, id: string): Run | null {
  const claimName = object.spec.claimName;
  const last = object.status?.lastFullSync;
  if (last?.id === id) {
    return {
      id,
      claimName,
      state: last.endedAt === undefined ? 'running' : 'ended',
      startedAt: last.startedAt,
      ...(last.endedAt === undefined ? {} : { endedAt: last.endedAt }),
      ...(last.outcome === undefined ? {} : { outcome: last.outcome }),
      ...(last.message === undefined ? {} : { message: last.message }),
    };
  }
  const waiting = requestOf(object);
  return waiting?.id === id
    ? { id, claimName, state: 'queued', requestedAt: new Date(waiting.requestedAt).toISOString() }
    : null;
}
