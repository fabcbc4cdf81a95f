/** The long actions on agents: each is a chain of short calls, repeated until the aim is reached or the time is over. */
import { SimpleVolumeError } from '../../lib/core/errors.ts';
import { compareGenerations, parseGeneration } from '../../lib/core/generation.ts';
import type { ReplicaStatus, SourceStatus, VolumeName } from '../../lib/core/parts.ts';
import type { Clock } from '../cluster/types.ts';
import type { ActionBody } from '../plan/types.ts';
import { type Agents, WRITE_MS, wasAnswered } from './agents.ts';
import type { VolumeMemory } from './memory.ts';

type Of<K extends ActionBody['kind']> = Extract<ActionBody, { kind: K }>;

const AGAIN_MS = 500;
/** Full syncs on all volumes together; more wait their turn (each reads and compares whole trees). */
export const FULL_SYNCS = 2;

export function pause(clock: Clock, ms: number, signal: AbortSignal): Promise<void> {
  return new Promise((resolve, reject) => {
    const over = (): void => {
      timer.cancel();
      reject(new SimpleVolumeError('CANCELLED', 'it was cancelled'));
    };
    const timer = clock.setTimeout(() => {
      signal.removeEventListener('abort', over);
      resolve();
    }, ms);
    if (signal.aborted) over();
    else signal.addEventListener('abort', over, { once: true });
  });
}

/** At most some at the same time, in order of arrival. */
export class Turns {
  private free: number;
  private readonly waiting: (() => void)[] = [];
  constructor(count: number) {
    this.free = count;
  }
  async take<T>(work: () => Promise<T>): Promise<T> {
    if (this.free > 0) this.free--;
    else await new Promise<void>((resolve) => this.waiting.push(resolve));
    try {
      return await work();
    } finally {
      const next = this.waiting.shift();
      if (next) next();
      else this.free++;
    }
  }
}

/** A source as replicas are told it. Its token travels in the body alone. */
function sourceOf(agents: Agents, pool: string, node: string): object {
  const address = agents.find(pool, node);
  if (address === null)
    throw new SimpleVolumeError('NOT_READY', `${node} has no agent pod of pool ${pool}`, { node });
  return { url: address.url, webdavUrl: address.webdavUrl, token: agents.token(address), node };
}

/** Seals everything on the active node and waits until the named nodes hold it. */
export async function prepare(
  agents: Agents,
  clock: Clock,
  pool: string,
  name: VolumeName,
  action: Of<'prepare'>,
  memory: VolumeMemory,
  signal: AbortSignal,
): Promise<void> {
  const ends = clock.boot() + action.timeoutMs;
  let last: unknown = new SimpleVolumeError('TIMEOUT', `not confirmed within ${action.timeoutMs} ms`);
  while (clock.boot() < ends && !signal.aborted) {
    try {
      const reply = await agents.call<{ generation: string; confirmed: string[] }>(pool, action.node, {
        path: '/replication/prepare',
        body: {
          ...name,
          epoch: action.epoch,
          confirm: Math.min(64, action.confirm.length),
          timeout: `${WRITE_MS - 1000}ms`,
        },
        signal,
      });
      const missing = action.confirm.filter((node) => !reply.confirmed.includes(node));
      if (missing.length === 0) {
        memory.notePrepared(action.tag, reply.generation, reply.confirmed, null);
        return;
      }
      last = new SimpleVolumeError(
        'TIMEOUT',
        `${missing.join(', ')} had not confirmed ${reply.generation} within ${action.timeoutMs} ms`,
      );
    } catch (error) {
      last = error;
      // A refusal that time does not change ends it at once.
      if (wasAnswered(error) && error.answered !== null && error.answered < 500 && error.code !== 'TIMEOUT')
        break;
    }
    await pause(clock, AGAIN_MS, signal);
  }
  if (!signal.aborted) memory.notePrepared(action.tag, null, [], last);
}

/** Lets a replica fetch a newer generation from another replica before it is promoted. */
export async function catchUp(
  agents: Agents,
  clock: Clock,
  pool: string,
  name: VolumeName,
  action: Of<'catchUp'>,
  memory: VolumeMemory,
  signal: AbortSignal,
): Promise<void> {
  const ends = clock.boot() + action.timeoutMs;
  const wanted = parseGeneration(action.generation);
  let last: unknown = new SimpleVolumeError('TIMEOUT', `not there within ${action.timeoutMs} ms`);
  let asked = Number.NEGATIVE_INFINITY;
  while (clock.boot() < ends && !signal.aborted) {
    try {
      // Asked again from time to time: the first request may have met a pull that was under way.
      if (clock.boot() - asked > 5000) {
        await agents.call(pool, action.node, {
          path: '/replication/sync-batch',
          body: {
            ...name,
            epoch: action.epoch,
            generation: action.generation,
            source: sourceOf(agents, pool, action.from),
            policy: action.policy,
          },
          signal,
        });
        asked = clock.boot();
      }
      const status = await agents.call<ReplicaStatus | SourceStatus>(pool, action.node, {
        path: `/replication/volumes/${name.namespace}/${name.volume}`,
        signal,
      });
      if (
        status.generation !== null &&
        compareGenerations(parseGeneration(status.generation), wanted) >= 0 &&
        status.state !== 'applying'
      ) {
        memory.noteCaughtUp(action.tag, null);
        return;
      }
    } catch (error) {
      last = error;
    }
    await pause(clock, AGAIN_MS, signal);
  }
  if (!signal.aborted) memory.noteCaughtUp(action.tag, last);
}

/** Starts a full sync on each replica and follows it to its end. */
export async function fullSync(
  agents: Agents,
  clock: Clock,
  pool: string,
  name: VolumeName,
  action: Of<'fullSync'>,
  memory: VolumeMemory,
  signal: AbortSignal,
  changed: () => void,
): Promise<void> {
  const nodes = memory.fullSyncs.get(action.run) ?? new Map();
  await Promise.all(
    action.nodes.map(async (node) => {
      let unanswered = 0;
      let id: string | null = null;
      while (!signal.aborted) {
        try {
          if (id === null) {
            const reply = await agents.call<{ id: string }>(pool, node, {
              path: '/replication/full-sync',
              body: {
                ...name,
                epoch: action.epoch,
                source: sourceOf(agents, pool, action.source),
                policy: action.policy,
              },
              signal,
            });
            id = reply.id;
            nodes.set(node, { id, state: 'running', error: null });
          }
          const run = await agents.call<{ state: 'running' | 'done' | 'failed'; error?: string }>(
            pool,
            node,
            { path: `/replication/full-sync/${id}`, signal },
          );
          unanswered = 0;
          nodes.set(node, { id, state: run.state, error: run.error ?? null });
          if (run.state !== 'running') break;
        } catch (error) {
          // One that answers has refused; one that does not is given a minute.
          if (wasAnswered(error) || ++unanswered > 20) {
            if (!signal.aborted)
              nodes.set(node, {
                id,
                state: 'failed',
                error: error instanceof Error ? error.message : String(error),
              });
            break;
          }
          await pause(clock, 2500, signal);
        }
        await pause(clock, AGAIN_MS, signal);
      }
      changed();
    }),
  );
}
