import t from 'tap';
import { parseSize } from '../../lib/core/size.ts';
import { Rate } from '../../lib/transfer/rate.ts';
import { ManualClock } from './remote.ts';

t.test('all who take from it together get no more than the rate, in the order of asking', async (t) => {
  const clock = new ManualClock();
  const rate = new Rate(clock, 1000);
  const { signal } = new AbortController();
  const done: string[] = [];
  void rate.take(1000, signal).then(() => done.push('first'));
  void rate.take(500, signal).then(() => done.push('second'));
  await clock.pass(999);
  t.strictSame(done, []);
  await clock.pass(1);
  t.strictSame(done, ['first']);
  await clock.pass(499);
  t.strictSame(done, ['first']);
  await clock.pass(1);
  t.strictSame(done, ['first', 'second']);
});

t.test(
  'a pause is not saved up for a burst; no rate is no wait; a cancelled one waits no longer',
  async (t) => {
    const clock = new ManualClock();
    const rate = new Rate(clock, 1000);
    const cancel = new AbortController();
    await clock.pass(60_000);
    let done = false;
    void rate.take(5000, cancel.signal).then(() => {
      done = true;
    });
    await clock.pass(1000);
    t.notOk(done);
    cancel.abort();
    await clock.pass(0);
    t.ok(done);
    await new Rate(clock, 0).take(1e12, cancel.signal);
  },
);

t.test('sizes: what is meant and what is not', async (t) => {
  t.equal(parseSize('0', 'size', 0, 10), 0);
  t.equal(parseSize('64Ki', 'size', 0, 2 ** 20), 65536);
  for (const bad of ['', '-1', '1.5Mi', '8MB', '1e3', '2Gi'])
    t.throws(() => parseSize(bad, 'size', 0, 2 ** 30), /size must be a size from 0 to 1Gi/, bad);
});
