/**
 * Events: one per object, reason and cause, found again by its name, so that it is counted up also by the next controller.
 * A volume that is in trouble for hours costs one write each few minutes, whatever happens inside.
 */
import { createHash } from 'node:crypto';
import { backoffMs } from './backoff.ts';
import { errorText, isKubeError } from './errors.ts';
import { type CoreEvent, EVENTS } from './resources.ts';
import type { EventText, ObjectReference, Recorder, RecorderOptions } from './types.ts';

const REPEAT_MS = 300_000;
/** A new text of the same cause is written at most this often, ms. */
const CHANGED_MS = 10_000;
const BURST = 25;
const REFILL_MS = 60_000;
/** What is remembered; the oldest is forgotten first. */
const MAX_CAUSES = 5000;
const MAX_QUEUE = 500;
/** The API refuses longer ones (validation of core/v1 Event). */
const MAX_MESSAGE = 1024;
const TRIES = 5;

interface Cause {
  name: string;
  about: ObjectReference;
  text: EventText;
  /** since it was last written */
  pending: number;
  /** own clock; null: never */
  writtenAt: number | null;
  writtenMessage: string;
  queued: boolean;
  timer: { cancel(): void } | null;
}

export function createRecorder(options: RecorderOptions): Recorder {
  const { kube, clock, logger } = options;
  const component = options.component ?? 'simple-volume-controller';
  const repeatMs = options.repeatMs ?? REPEAT_MS;
  const burst = options.burst ?? BURST;
  const refillMs = options.refillMs ?? REFILL_MS;
  const counters = { written: 0, suppressed: 0, failed: 0, dropped: 0 };
  const causes = new Map<string, Cause>();
  const allowances = new Map<string, { left: number; at: number }>();
  const queue: Cause[] = [];
  let busy: Promise<void> | null = null;
  let flushing = false;

  const objectKey = (about: ObjectReference): string =>
    about.uid ?? `${about.kind}/${about.namespace ?? ''}/${about.name}`;

  /** New causes that one object may bring: whatever makes them up cannot flood the cluster. */
  function allowed(object: string): boolean {
    const now = clock.boot();
    const had = allowances.get(object) ?? { left: burst, at: now };
    const gained = Math.floor((now - had.at) / refillMs);
    const left = Math.min(burst, had.left + gained);
    const at = left === burst ? now : had.at + gained * refillMs;
    allowances.delete(object);
    allowances.set(object, { left: Math.max(0, left - 1), at });
    forgetOldest(allowances);
    return left > 0;
  }

  function forgetOldest<V>(map: Map<string, V>): void {
    if (map.size <= MAX_CAUSES) return;
    const [oldest] = map.keys();
    if (oldest !== undefined) map.delete(oldest);
  }

  function event(about: ObjectReference, text: EventText): void {
    const object = objectKey(about);
    const key = [object, text.type, text.reason, text.cause ?? ''].join('\0');
    const message =
      text.message.length > MAX_MESSAGE ? `${text.message.slice(0, MAX_MESSAGE - 1)}…` : text.message;
    let cause = causes.get(key);
    if (cause === undefined) {
      if (!allowed(object)) {
        counters.dropped++;
        return;
      }
      const hash = createHash('sha256').update(key).digest('hex').slice(0, 16);
      cause = {
        name: `${about.name.slice(0, 230).replace(/[^a-z0-9]+$/, '')}.${hash}`,
        about,
        text,
        pending: 0,
        writtenAt: null,
        writtenMessage: '',
        queued: false,
        timer: null,
      };
    } else causes.delete(key);
    causes.set(key, cause);
    forgetOldest(causes);
    cause.text = { ...text, message };
    cause.pending++;
    const { writtenAt } = cause;
    const every = cause.writtenMessage === message ? repeatMs : Math.min(repeatMs, CHANGED_MS);
    const due = writtenAt === null ? 0 : writtenAt + every - clock.boot();
    if (due <= 0) enqueue(cause);
    else {
      counters.suppressed++;
      const waiting = cause;
      if (cause.timer && every === repeatMs) return;
      cause.timer?.cancel();
      cause.timer = clock.setTimeout(() => {
        waiting.timer = null;
        enqueue(waiting);
      }, due);
    }
  }

  function enqueue(cause: Cause): void {
    if (cause.queued) return;
    if (queue.length >= MAX_QUEUE) {
      counters.dropped++;
      return;
    }
    cause.queued = true;
    queue.push(cause);
    busy ??= work().finally(() => {
      busy = null;
    });
  }

  async function work(): Promise<void> {
    for (let cause = queue.shift(); cause !== undefined; cause = queue.shift()) {
      cause.queued = false;
      cause.timer?.cancel();
      cause.timer = null;
      const count = cause.pending;
      cause.pending = 0;
      for (let tries = 1; ; tries++) {
        try {
          await write(cause, count);
          counters.written++;
          break;
        } catch (error) {
          const again = isKubeError(
            error,
            'Timeout',
            'Unreachable',
            'ServerError',
            'TooManyRequests',
            'Conflict',
          );
          if (!again || tries === TRIES || flushing) {
            counters.failed++;
            cause.writtenAt = null;
            const { reason, message } = cause.text;
            logger.warn(
              { event: reason, text: message, error: errorText(error) },
              'an Event could not be written',
            );
            break;
          }
          await new Promise<void>((resolve) => {
            clock.setTimeout(resolve, backoffMs(tries, { first: 1000, longest: 15_000 }, 0));
          });
        }
      }
    }
  }

  async function write(cause: Cause, count: number): Promise<void> {
    const { about, text } = cause;
    // An Event lives in its object's namespace; one about a cluster-scoped object in `default`.
    const name = { namespace: about.namespace ?? 'default', name: cause.name };
    const now = new Date(clock.now()).toISOString().replace(/\.\d+Z$/, 'Z');
    const create = async (): Promise<void> => {
      try {
        await kube.create(EVENTS, {
          metadata: name,
          involvedObject: about,
          type: text.type,
          reason: text.reason,
          message: text.message,
          count,
          firstTimestamp: now,
          lastTimestamp: now,
          source: { component },
          reportingComponent: component,
          reportingInstance: options.instance ?? '',
        });
      } catch (error) {
        if (!isKubeError(error, 'AlreadyExists')) throw error;
        await countUp(name, text, count, now);
      }
    };
    if (cause.writtenAt === null) await create();
    else {
      try {
        await countUp(name, text, count, now);
      } catch (error) {
        // Events are forgotten after an hour.
        if (!isKubeError(error, 'NotFound')) throw error;
        await create();
      }
    }
    cause.writtenAt = clock.boot();
    cause.writtenMessage = text.message;
  }

  async function countUp(
    name: { namespace: string; name: string },
    text: EventText,
    count: number,
    now: string,
  ): Promise<void> {
    const there: CoreEvent = await kube.get(EVENTS, name);
    await kube.merge(
      EVENTS,
      name,
      { count: (there.count ?? 1) + count, message: text.message, lastTimestamp: now },
      { resourceVersion: there.metadata.resourceVersion },
    );
  }

  return {
    event(about, text) {
      try {
        event(about, text);
      } catch (error) {
        counters.failed++;
        logger.error({ error: errorText(error) }, 'an Event could not be made');
      }
    },
    async flush() {
      flushing = true;
      try {
        for (const cause of causes.values()) if (cause.pending > 0) enqueue(cause);
        await busy;
      } finally {
        flushing = false;
      }
    },
    counters,
  };
}
