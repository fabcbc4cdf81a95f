import t from 'tap';
import { backoffMs } from '../../../controller/cluster/backoff.ts';
import { createWorkQueue } from '../../../controller/cluster/queue.ts';
import { RateLimit } from '../../../controller/cluster/rate.ts';
import type { WorkQueueOptions } from '../../../controller/cluster/types.ts';
import { FakeClock, settle, silent } from './fake.ts';

interface Job {
  key: string;
  signal: AbortSignal;
  end: (result?: { againMs?: number }) => void;
  fail: (error: Error) => void;
}

function queueOf(more: Partial<WorkQueueOptions> = {}) {
  const clock = new FakeClock();
  const jobs: Job[] = [];
  const queue = createWorkQueue({
    clock,
    logger: silent,
    concurrency: 2,
    random: () => 0,
    work: (key, signal) =>
      new Promise((end, fail) => {
        jobs.push({ key, signal, end: (result) => end(result), fail });
      }),
    ...more,
  });
  queue.start();
  const keys = (): string[] => jobs.map((job) => job.key);
  const job = (index: number): Job => jobs.at(index) as Job;
  return { clock, jobs, queue, keys, job };
}

t.test('a key is never worked on twice at once, and asked for meanwhile once more after', async (t) => {
  const { queue, keys, job, clock } = queueOf();
  queue.add('a');
  queue.add('a');
  await settle();
  t.strictSame(keys(), ['a']);
  queue.add('a');
  queue.add('a');
  await settle();
  t.strictSame(keys(), ['a'], 'still at work');
  job(0).end();
  await settle();
  t.strictSame(keys(), ['a', 'a']);
  job(1).end();
  await clock.advance(100_000);
  t.strictSame(keys(), ['a', 'a'], 'and then there is nothing to do');
  t.equal(clock.waiting, 0, 'no timer is left');
});

t.test('no more at once than allowed, in the order in which they were asked for', async (t) => {
  const { queue, keys, job } = queueOf();
  for (const key of ['a', 'b', 'c', 'd']) queue.add(key);
  await settle();
  t.strictSame(keys(), ['a', 'b']);
  t.match(queue.state, { running: 2, ready: 2 });
  job(1).end();
  await settle();
  t.strictSame(keys(), ['a', 'b', 'c']);
});

t.test('of several delays the earliest counts', async (t) => {
  const { queue, keys, clock } = queueOf();
  queue.add('a', 5000);
  queue.add('a', 1000);
  queue.add('a', 9000);
  await clock.advance(999);
  t.strictSame(keys(), []);
  await clock.advance(1);
  t.strictSame(keys(), ['a']);
});

t.test(
  'what fails comes again after a pause of its own that doubles, and is forgotten by a success',
  async (t) => {
    const { queue, keys, job, clock } = queueOf();
    queue.add('bad');
    await settle();
    for (const pause of [500, 1000, 2000, 4000]) {
      job(-1).fail(new Error('no'));
      await clock.advance(pause - 1);
      const before = keys().length;
      await clock.advance(1);
      t.equal(keys().length, before + 1, `${pause} ms`);
    }
    t.equal(queue.failures('bad'), 4);
    queue.add('good');
    await settle();
    t.equal(job(-1).key, 'good', 'others are not concerned');
    job(-2).end();
    await settle();
    t.equal(queue.failures('bad'), 0);
  },
);

t.test(
  'a request cuts a back-off short, but not to nothing: no storm from what an own failure caused',
  async (t) => {
    const { queue, keys, job, clock } = queueOf();
    queue.add('a');
    await settle();
    for (let i = 0; i < 6; i++) {
      job(-1).fail(new Error('no'));
      await clock.advance(20_000);
    }
    const before = keys().length;
    job(-1).fail(new Error('no'));
    await settle();
    queue.add('a');
    await clock.advance(499);
    t.equal(keys().length, before);
    await clock.advance(1);
    t.equal(keys().length, before + 1);
  },
);

t.test('asked for while it fails: the pause is kept', async (t) => {
  const { queue, keys, job, clock } = queueOf();
  queue.add('a');
  await settle();
  queue.add('a');
  job(0).fail(new Error('no'));
  await clock.advance(499);
  t.equal(keys().length, 1);
  await clock.advance(1);
  t.equal(keys().length, 2);
});

t.test('againMs asks to be called again', async (t) => {
  const { queue, keys, job, clock } = queueOf();
  queue.add('a');
  await settle();
  job(0).end({ againMs: 3000 });
  await clock.advance(2999);
  t.equal(keys().length, 1);
  await clock.advance(1);
  t.equal(keys().length, 2);
});

t.test('work that hangs is told to end, loses its slot, and its key stays taken (B3)', async (t) => {
  const { queue, keys, job, clock } = queueOf({ concurrency: 1, timeoutMs: 10_000 });
  queue.add('hangs');
  queue.add('other');
  await clock.advance(9999);
  t.notOk(job(0).signal.aborted);
  await clock.advance(1);
  t.ok(job(0).signal.aborted);
  t.strictSame(keys(), ['hangs'], 'it gets a moment to notice');
  await clock.advance(5000);
  t.strictSame(keys(), ['hangs', 'other']);
  t.equal(queue.state.stuck, 1);
  queue.add('hangs');
  job(1).end();
  await clock.advance(60_000);
  t.strictSame(keys(), ['hangs', 'other'], 'never twice at once');
  job(0).end();
  await settle();
  t.strictSame(keys(), ['hangs', 'other', 'hangs']);
  t.equal(queue.state.stuck, 0);
});

t.test('work that throws at once is a failure like any other', async (t) => {
  const { queue, clock } = queueOf({
    work: () => {
      throw new Error('at once');
    },
  });
  queue.add('a');
  await clock.advance(500);
  t.equal(queue.failures('a'), 2);
});

t.test('a forgotten key waits for nothing any more; asked for anew it starts afresh', async (t) => {
  const { queue, keys, job, clock } = queueOf();
  queue.add('a', 1000);
  queue.forget('a');
  await clock.advance(2000);
  t.strictSame(keys(), []);
  queue.add('b');
  await settle();
  queue.forget('b');
  queue.add('b');
  await settle();
  t.strictSame(keys(), ['b'], 'work under way goes on, never twice');
  job(0).fail(new Error('no'));
  await settle();
  t.strictSame(keys(), ['b', 'b']);
  job(1).end();
  await settle();
  queue.add('b');
  await settle();
  t.equal(keys().length, 3);
});

t.test('stop lets nothing begin, cancels what runs and waits for it, not for ever', async (t) => {
  const { queue, keys, job, clock } = queueOf();
  for (const key of ['a', 'b', 'c']) queue.add(key);
  queue.add('d', 500);
  await settle();
  let stopped = false;
  const stopping = queue.stop(3000).then(() => {
    stopped = true;
  });
  t.ok(job(0).signal.aborted);
  job(0).end();
  await clock.advance(2999);
  t.notOk(stopped, 'b is still at work');
  await clock.advance(1);
  await stopping;
  queue.add('e');
  await clock.advance(5000);
  t.strictSame(keys(), ['a', 'b']);
});

t.test('the state says how long the first one waits', async (t) => {
  const { queue, clock } = queueOf({ concurrency: 1 });
  queue.add('a');
  await settle();
  queue.add('b');
  await clock.advance(700);
  t.equal(queue.state.oldestReadyMs, 700);
});

t.test('pauses double up to the longest, with jitter downwards only', (t) => {
  const limits = { first: 500, longest: 60_000 };
  t.strictSame(
    [1, 2, 3, 8, 9, 1000].map((n) => backoffMs(n, limits, 0)),
    [500, 1000, 2000, 60_000, 60_000, 60_000],
  );
  t.equal(backoffMs(1, limits, 1), 375);
  t.end();
});

t.test('the rate limit: a burst, then evenly; a pause holds everybody', (t) => {
  const clock = new FakeClock();
  const limit = new RateLimit({ perSecond: 10, burst: 3, clock });
  t.strictSame(
    [1, 2, 3, 4, 5].map(() => limit.reserve()),
    [0, 0, 0, 100, 200],
  );
  clock.skip(10_000);
  t.strictSame(
    [1, 2, 3, 4].map(() => limit.reserve()),
    [0, 0, 0, 100],
    'quiet fills it, not beyond the burst',
  );
  clock.skip(10_000);
  limit.pause(5000);
  t.equal(limit.reserve(), 5000);
  t.equal(limit.pausedMs(), 5000);
  limit.pause(1000);
  t.equal(limit.pausedMs(), 5000, 'a shorter one does not end a longer one');
  clock.skip(5000);
  t.equal(limit.pausedMs(), 0);
  t.end();
});
