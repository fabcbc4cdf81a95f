import { spawn } from 'node:child_process';
import t from 'tap';
import {
  cpuOf,
  descendants,
  memoryOf,
  PeakWatcher,
  parseCpu,
  parseKiB,
  writtenTo,
} from '../../bench/lib/proc.ts';
import { generator, percentile, sample, summary } from '../../bench/lib/stats.ts';

t.test('percentiles are values that were measured, by nearest rank', (t) => {
  const hundred = Array.from({ length: 100 }, (_, i) => 100 - i);
  t.equal(percentile(hundred, 50), 50);
  t.equal(percentile(hundred, 99), 99);
  t.equal(percentile(hundred, 100), 100);
  t.equal(percentile(hundred, 0.5), 1);
  t.equal(percentile([7], 99), 7);
  t.equal(percentile([1, 2, 3, 4], 50), 2);
  t.equal(percentile([1, 2, 3, 4], 51), 3);
  const values = Array.from({ length: 64 }, (_, i) => i);
  t.equal(percentile(values, 99), 63, 'of 64 probes the worst one is the 99th percentile');
  t.equal(percentile([10, 9, 100], 50), 10, 'numbers are not sorted as text');
  t.throws(() => percentile([], 50), RangeError);
  t.throws(() => percentile([1], 0), RangeError);
  t.throws(() => percentile([1], 101), RangeError);
  t.same(values[0], 0, 'the input stays as it was');
  t.end();
});

t.test('a summary has the extremes', (t) => {
  t.same(summary([3, 1, 2]), { count: 3, min: 1, p50: 2, p99: 3, max: 3 });
  t.end();
});

t.test('a sample has different numbers below the limit, the same for the same seed', (t) => {
  const one = sample(1000, 1500, 3);
  t.equal(new Set(one).size, 1000);
  t.ok(
    one.every((n, i) => Number.isInteger(n) && n >= 0 && n < 1500 && (i === 0 || n > (one[i - 1] as number))),
  );
  t.same(sample(1000, 1500, 3), one);
  t.notSame(sample(1000, 1500, 4), one);
  t.same(sample(3, 3, 1), [0, 1, 2]);
  t.throws(() => sample(4, 3, 1), RangeError);
  const random = generator(9);
  const mean = Array.from({ length: 10_000 }, random).reduce((a, b) => a + b) / 10_000;
  t.ok(Math.abs(mean - 0.5) < 0.02, `mean ${mean}`);
  t.end();
});

t.test('CPU time is read behind a name with blanks and brackets', (t) => {
  t.equal(parseCpu('42 (a ) (b) S 1 42 42 0 -1 4194304 100 0 0 0 250 50 7 8 20 0 1 0 99'), 3);
  t.end();
});

t.test('lines of the same name are added up', (t) => {
  const found = parseKiB('Rss:   10 kB\nPss: 4 kB\nRss: 5 kB\nnot: a line\n');
  t.equal(found.get('Rss'), 15 * 1024);
  t.equal(found.get('Pss'), 4 * 1024);
  t.equal(found.size, 2);
  t.end();
});

t.test('a process and its children are measured', async (t) => {
  const own = memoryOf(process.pid);
  t.ok(own !== null && own.rss > 20e6 && own.pss <= own.rss && own.anonymous <= own.rss);
  t.equal(memoryOf(2 ** 22 + 1), null, 'a process that is not there has no memory');
  t.ok(cpuOf(process.pid) > 0);
  t.ok(writtenTo(import.meta.dirname) >= 0);
  const child = spawn('sleep', ['30']);
  try {
    t.same(descendants(process.pid), [child.pid]);
    const watcher = new PeakWatcher(process.pid, 5);
    await new Promise((resolve) => setTimeout(resolve, 50));
    t.ok(watcher.stop() > (memoryOf(child.pid as number)?.pss ?? 0));
  } finally {
    child.kill('SIGKILL');
  }
});
