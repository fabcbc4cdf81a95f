/** Keys to be worked on: each at most once at a time, after its delay, with a back-off of its own when it fails. */
import { backoffMs } from './backoff.ts';
import { errorText } from './errors.ts';
import type { Key, WorkQueue, WorkQueueOptions, WorkQueueState } from './types.ts';

const TIMEOUT_MS = 60_000;
const BACKOFF = { first: 500, longest: 60_000 };
/** For work to notice that its time is over, ms; then its slot goes to another key. */
const NOTICE_MS = 5000;

interface Item {
  /** when it may begin, null: nobody asked; ms on the own clock */
  due: number | null;
  timer: { cancel(): void } | null;
  ready: boolean;
  readySince: number;
  running: boolean;
  failures: number;
  /** not before this, after a failure */
  restUntil: number;
}

export function createWorkQueue(options: WorkQueueOptions): WorkQueue {
  const { clock, logger } = options;
  const timeoutMs = options.timeoutMs ?? TIMEOUT_MS;
  const backoff = options.backoffMs ?? BACKOFF;
  const items = new Map<Key, Item>();
  /** Ready keys, the one that waits longest first. */
  const ready = new Set<Key>();
  const running = new Map<Key, { cancel: AbortController; settled: Promise<void> }>();
  let slots = 0;
  let stuck = 0;
  let done = 0;
  let failed = 0;
  let started = false;
  let stopped = false;

  function itemOf(key: Key): Item {
    let item = items.get(key);
    if (item === undefined) {
      item = {
        due: null,
        timer: null,
        ready: false,
        readySince: 0,
        running: false,
        failures: 0,
        restUntil: Number.NEGATIVE_INFINITY,
      };
      items.set(key, item);
    }
    return item;
  }

  function schedule(key: Key, item: Item, due: number): void {
    if (item.ready || (item.due !== null && item.due <= due)) return;
    item.due = due;
    item.timer?.cancel();
    item.timer = null;
    if (!item.running) arm(key, item);
  }

  function arm(key: Key, item: Item): void {
    const left = (item.due as number) - clock.boot();
    if (left > 0) {
      item.timer = clock.setTimeout(() => {
        item.timer = null;
        arm(key, item);
      }, left);
      return;
    }
    item.due = null;
    item.ready = true;
    item.readySince = clock.boot();
    ready.add(key);
    pump();
  }

  function pump(): void {
    while (started && !stopped && slots < options.concurrency) {
      const [key] = ready;
      if (key === undefined) return;
      ready.delete(key);
      begin(key, items.get(key) as Item);
    }
  }

  function begin(key: Key, item: Item): void {
    item.ready = false;
    item.running = true;
    slots++;
    const cancel = new AbortController();
    let holdsSlot = true;
    let isStuck = false;
    const release = (): void => {
      if (!holdsSlot) return;
      holdsSlot = false;
      slots--;
    };
    let timer = clock.setTimeout(() => {
      cancel.abort(new Error(`the work took longer than ${timeoutMs} ms`));
      timer = clock.setTimeout(() => {
        isStuck = true;
        stuck++;
        logger.error({ key, timeoutMs }, 'the work does not end; its slot is given to others');
        release();
        pump();
      }, NOTICE_MS);
    }, timeoutMs);
    const settled = (async () => options.work(key, cancel.signal))().then(
      (result) => {
        done++;
        item.failures = 0;
        item.restUntil = Number.NEGATIVE_INFINITY;
        return result?.againMs;
      },
      (error: unknown) => {
        if (stopped) return undefined;
        failed++;
        item.failures++;
        const pause = backoffMs(item.failures, backoff, (options.random ?? Math.random)());
        item.restUntil = clock.boot() + Math.min(pause, backoff.first);
        logger.warn(
          { key, failures: item.failures, pauseMs: pause, error: errorText(error) },
          'the work failed',
        );
        return pause;
      },
    );
    const ended = settled.then((againMs) => {
      timer.cancel();
      if (isStuck) stuck--;
      running.delete(key);
      item.running = false;
      release();
      if (items.get(key) !== item) {
        // Forgotten meanwhile, and perhaps asked for anew.
        const anew = items.get(key);
        if (anew) anew.running = false;
        if (anew && anew.due !== null && !anew.timer && !stopped) arm(key, anew);
      } else if (!stopped) {
        if (item.due !== null) item.due = Math.max(item.due, item.restUntil);
        if (againMs !== undefined) schedule(key, item, clock.boot() + Math.max(0, againMs));
        if (item.due !== null && !item.timer && !item.ready) arm(key, item);
        else if (item.due === null && item.failures === 0) items.delete(key);
      }
      pump();
    });
    running.set(key, { cancel, settled: ended });
  }

  return {
    start() {
      started = true;
      pump();
    },
    add(key, delayMs = 0) {
      if (stopped) return;
      const item = itemOf(key);
      if (running.has(key)) item.running = true;
      schedule(key, item, Math.max(clock.boot() + Math.max(0, delayMs), item.restUntil));
    },
    failures: (key) => items.get(key)?.failures ?? 0,
    forget(key) {
      items.get(key)?.timer?.cancel();
      items.delete(key);
      ready.delete(key);
    },
    async stop(limitMs = 5000) {
      stopped = true;
      for (const item of items.values()) item.timer?.cancel();
      ready.clear();
      for (const { cancel } of running.values()) cancel.abort(new Error('the queue is stopped'));
      let timer: { cancel(): void } | null = null;
      const late = new Promise<void>((resolve) => {
        timer = clock.setTimeout(resolve, limitMs);
      });
      await Promise.race([Promise.all([...running.values()].map(({ settled }) => settled)), late]);
      (timer as { cancel(): void } | null)?.cancel();
    },
    get state(): WorkQueueState {
      const [first] = ready;
      const since = first === undefined ? undefined : items.get(first)?.readySince;
      let delayed = 0;
      for (const item of items.values()) if (item.timer !== null) delayed++;
      return {
        ready: ready.size,
        delayed,
        running: running.size,
        stuck,
        done,
        failed,
        oldestReadyMs: since === undefined ? 0 : clock.boot() - since,
      };
    },
  };
}
