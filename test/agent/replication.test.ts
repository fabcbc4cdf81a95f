/** Two or three real agents: what happens to a replica that is hung, killed, empty, idle, or damaged on its disk. */
import { execFileSync } from 'node:child_process';
import fs from 'node:fs';
import path from 'node:path';
import t from 'tap';
import type { ReplicaStatus } from '../../lib/core/parts.ts';
import { clock, freePorts, LocalAgent, LocalCluster, sleep, waitFor } from '../../lib/local/cluster.ts';
import { differences, fill, refusal, replica, source, syncBody } from './support.ts';

t.setTimeout(300_000);
const cluster = await LocalCluster.start({ nodes: ['a', 'b', 'c'], prefix: 'sv-replication-' });
t.teardown(() => cluster.stop());
const a = cluster.agent('a');
const b = cluster.agent('b');
const c = cluster.agent('c');
const named = (volume: string): { namespace: string; volume: string } => ({
  namespace: 'replication',
  volume,
});

t.test('what is written on one node is on both replicas', async (t) => {
  const volume = named('plain');
  const live = a.live(volume);
  fill(live, 40, 5000);
  await cluster.watch('a', volume, { targets: ['b', 'c'], debounce: '50ms' });
  await cluster.settle('a', volume);
  fs.writeFileSync(path.join(live, 'd1/f1'), 'changed');
  fs.rmSync(path.join(live, 'd2'), { recursive: true });
  fs.renameSync(path.join(live, 'd3'), path.join(live, 'moved'));
  const generation = await cluster.settle('a', volume);
  for (const node of ['b', 'c']) {
    t.same(await differences(cluster, volume, 'a', node), [], node);
    t.equal((await replica(cluster.agent(node), volume)).generation, generation);
  }
  await a.call('POST', '/replication/watch/stop', volume);
});

t.test(
  'A1, C10: a replica that hangs misses batches, is never taken for fresh, delays nobody, and then has everything',
  async (t) => {
    const volume = named('hung');
    const live = a.live(volume);
    fill(live, 10, 2000);
    await cluster.watch('a', volume, { targets: ['b', 'c'], debounce: '50ms' });
    await cluster.settle('a', volume);
    const pid = c.pid as number;
    process.kill(pid, 'SIGSTOP');
    let newest: string;
    let firstMissed: number;
    try {
      const slowest = { ms: 0 };
      firstMissed = clock();
      for (let i = 0; i < 4; i++) {
        const began = clock();
        fs.writeFileSync(path.join(live, `missed-${i}`), `batch ${i}`);
        await waitFor(
          `missed-${i} on b`,
          () => fs.existsSync(path.join(b.live(volume), `missed-${i}`)),
          20_000,
          20,
        );
        slowest.ms = Math.max(slowest.ms, clock() - began);
      }
      // A hung target costs its request's 10 s; the other one must not wait for that even once.
      t.ok(slowest.ms < 8000, `the other replica has each batch in ${Math.round(slowest.ms)} ms`);
      newest = (await source(a, volume)).generation as string;
      const stuck = (await source(a, volume)).targets.find((one) => one.node === 'c');
      t.not(stuck?.confirmed, newest, 'the source does not say that the hung one holds it');
    } finally {
      process.kill(pid, 'SIGCONT');
    }
    await waitFor(
      'c has everything',
      async () => {
        const asked = clock();
        const status = await replica(c, volume);
        if (status.generation === newest) return true;
        // It was complete at most until the first missed write.
        if (status.freshAgeMs !== null && status.freshAgeMs + 1 < asked - firstMissed)
          t.fail(`at ${status.generation}, yet complete ${status.freshAgeMs} ms ago`);
        return false;
      },
      60_000,
      5,
    );
    t.same(await differences(cluster, volume, 'a', 'c'), []);
    await waitFor('c is fresh again', async () => ((await replica(c, volume)).freshAgeMs ?? Infinity) < 3000);
    await a.call('POST', '/replication/watch/stop', volume);
  },
);

t.test('A2, A3: an empty replica says that it holds nothing until it holds everything', async (t) => {
  const volume = named('new');
  fill(a.live(volume), 300, 40_000);
  await cluster.watch('a', volume, { targets: ['b'], debounce: '50ms' });
  const seen: ReplicaStatus[] = [];
  const done = await waitFor(
    'b holds a generation',
    async () => {
      const status = await b.status(volume);
      if (status?.role !== 'replica') return false;
      seen.push(status);
      return status.generation === null ? false : status;
    },
    60_000,
    5,
  );
  const promising = seen
    .slice(0, -1)
    .filter((s) => s.freshAgeMs !== null || s.state === 'idle' || s.entries > 0);
  t.same(promising, [], 'no age, no entries, not idle before there is a generation');
  t.ok(seen.length > 1, 'it was looked at before it was done');
  t.equal(done.generation, (await source(a, volume)).generation);
  t.same(await differences(cluster, volume, 'a', 'b'), []);
  await a.call('POST', '/replication/watch/stop', volume);
});

t.test('prepare keeps its time also while a first copy is still being sealed', async (t) => {
  const volume = named('slow');
  fill(a.live(volume), 400, 40_000);
  await cluster.watch('a', volume, { targets: ['b'], debounce: '50ms' });
  const began = clock();
  const no = await refusal(a.call('POST', '/replication/prepare', { ...volume, timeout: '1ms' }));
  t.equal(no.code, 'TIMEOUT');
  t.match(no.message, /nothing was sealed within 1 ms/);
  t.ok(clock() - began < 5000);
  await cluster.settle('a', volume);
  t.same(await differences(cluster, volume, 'a', 'b'), [], 'and what was begun goes on');
  await a.call('POST', '/replication/watch/stop', volume);
});

t.test('prepare with a timeout of 0 seals and waits for no replica', async (t) => {
  const volume = named('at-once');
  const live = a.live(volume);
  fill(live, 50, 1000);
  await cluster.watch('a', volume, { targets: ['b'], debounce: '1h', maxDelay: '1h' });
  await cluster.settle('a', volume);
  const before = (await source(a, volume)).generation as string;
  process.kill(b.pid as number, 'SIGSTOP');
  try {
    fs.writeFileSync(path.join(live, 'last'), 'words');
    const sealed = await a.call<{ generation: string; quiescent: boolean; confirmed: string[] }>(
      'POST',
      '/replication/prepare',
      { ...volume, confirm: 'all', timeout: '0s' },
    );
    t.equal(sealed.generation, (await source(a, volume)).generation);
    t.not(sealed.generation, before, 'sealed');
    t.equal(sealed.quiescent, true);
    t.same(sealed.confirmed, [], 'and nobody holds it yet');
  } finally {
    process.kill(b.pid as number, 'SIGCONT');
  }
  await cluster.settle('a', volume);
  const again = await a.call<{ confirmed: string[] }>('POST', '/replication/prepare', {
    ...volume,
    timeout: '0s',
  });
  t.same(again.confirmed, ['b'], 'who holds it already is named');
  await a.call('POST', '/replication/watch/stop', volume);
});

t.test('a line of the log names its volume once; an age is whole milliseconds', async (t) => {
  const volume = named('log');
  fill(a.live(volume), 3, 100);
  await cluster.watch('a', volume, { targets: ['b'], debounce: '50ms' });
  await cluster.settle('a', volume);
  const age = await waitFor('b has an age', async () => (await replica(b, volume)).freshAgeMs);
  t.ok(Number.isInteger(age), String(age));
  await a.call('POST', '/replication/watch/stop', volume);
  const lines = [a, b].flatMap((agent) => fs.readFileSync(agent.logFile, 'utf8').trim().split('\n'));
  t.ok(lines.some((line) => line.includes('"volume":"replication/log"')));
  t.same(
    lines.filter((line) => line.split('"volume":').length > 2),
    [],
  );
});

t.test('B1: a volume that nobody writes to stays fresh', async (t) => {
  const volume = named('idle');
  fill(a.live(volume), 5, 1000);
  await cluster.watch('a', volume, { targets: ['b', 'c'], debounce: '50ms' });
  const generation = await cluster.settle('a', volume);
  await waitFor('b has an age', async () => (await replica(b, volume)).freshAgeMs !== null);
  await waitFor('c has an age', async () => (await replica(c, volume)).freshAgeMs !== null);
  let oldest = 0;
  for (const end = clock() + 10_000; clock() < end; await sleep(250))
    for (const agent of [b, c])
      oldest = Math.max(oldest, (await replica(agent, volume)).freshAgeMs ?? Infinity);
  t.ok(oldest < 5000, `never older than ${oldest} ms`);
  t.equal((await source(a, volume)).generation, generation, 'and no generation was made for it');
  await a.call('POST', '/replication/watch/stop', volume);
});

t.test('A8: what is written while the source agent is down is found, and only that is sent', async (t) => {
  const volume = named('restart');
  const live = a.live(volume);
  fill(live, 200, 3000);
  await cluster.watch('a', volume, { targets: ['b', 'c'], debounce: '50ms' });
  const before = await cluster.settle('a', volume);
  await a.stop();
  fs.writeFileSync(path.join(live, 'd1/f1'), 'changed while it was down');
  fs.writeFileSync(path.join(live, 'new'), 'made while it was down');
  fs.rmSync(path.join(live, 'd2/f2'));
  await a.start();
  const after = await cluster.settle('a', volume);
  t.not(after, before);
  const { lastBatch } = await source(a, volume);
  t.ok(
    (lastBatch?.changed ?? 99) <= 5,
    `${lastBatch?.changed} entries changed (files and their directories)`,
  );
  t.equal(lastBatch?.removed, 1);
  for (const agent of [b, c]) {
    const { lastPull } = await replica(agent, volume);
    t.equal(lastPull?.full, false, 'by difference');
    t.equal(lastPull?.files, 2, 'the two files');
    t.same(await differences(cluster, volume, 'a', agent.node), []);
  }
  await a.call('POST', '/replication/watch/stop', volume);
});

t.test(
  'A8: a source that comes back under another address is asked there, with no word from a controller',
  async (t) => {
    const volume = named('moved-address');
    fill(a.live(volume), 20, 3000);
    await cluster.watch('a', volume, { targets: ['b', 'c'], debounce: '50ms' });
    await cluster.settle('a', volume);
    await a.stop();
    const [httpPort = 0, webdavPort = 0] = await freePorts(2);
    const moved = new LocalAgent({ node: 'a', folder: cluster.folder, token: a.token, httpPort, webdavPort });
    await moved.start();
    try {
      t.strictSame((await source(moved, volume)).source, { url: moved.url, webdavUrl: moved.webdavUrl });
      fs.writeFileSync(path.join(a.live(volume), 'new'), 'written under the new address');
      await waitFor('both replicas have it', async () =>
        [b, c].every((agent) => fs.existsSync(path.join(agent.live(volume), 'new'))),
      );
      await moved.call('POST', '/replication/watch/stop', volume);
    } finally {
      await moved.stop();
      await a.start();
    }
  },
);

t.test('A4: a full sync repairs a file whose bytes rotted with size and time as before', async (t) => {
  const volume = named('rot');
  const live = a.live(volume);
  fill(live, 20, 8000);
  await cluster.watch('a', volume, { targets: ['b'], debounce: '50ms' });
  const generation = await cluster.settle('a', volume);
  const victim = path.join(b.live(volume), 'd4/f4');
  const { atimeNs, mtimeNs } = fs.statSync(victim, { bigint: true });
  const seconds = (ns: bigint): string =>
    `@${ns / 1_000_000_000n}.${String(ns % 1_000_000_000n).padStart(9, '0')}`;
  const fd = fs.openSync(victim, 'r+');
  fs.writeSync(fd, 'rotten', 4000);
  fs.closeSync(fd);
  execFileSync('touch', ['-m', '-d', seconds(mtimeNs), victim]);
  execFileSync('touch', ['-a', '-d', seconds(atimeNs), victim]);
  t.not((await differences(cluster, volume, 'a', 'b')).length, 0, 'it is damaged');
  const body = syncBody(a, volume, 1, generation);
  const run = await b.call<{ id: string; started: boolean }>('POST', '/replication/full-sync', body);
  t.equal(run.started, true);
  const again = await b.call<{ id: string; started: boolean; reason?: string }>(
    'POST',
    '/replication/full-sync',
    body,
  );
  t.same(again, { id: run.id, started: false, reason: 'already-running' });
  const done = await waitFor('the full sync ends', async () => {
    const one = await b.call<{ state: string }>('GET', `/replication/full-sync/${run.id}`);
    return one.state === 'running' ? null : one;
  });
  t.match(done, { id: run.id, state: 'done', generation });
  t.same(await differences(cluster, volume, 'a', 'b'), []);
  const third = await b.call<{ id: string; started: boolean }>('POST', '/replication/full-sync', body);
  t.equal(third.started, true, 'then another one can be asked for');
  t.not(third.id, run.id);
  await waitFor('the second run ends', async () => {
    const one = await b.call<{ state: string }>('GET', `/replication/full-sync/${third.id}`);
    return one.state === 'done';
  });
  await a.call('POST', '/replication/watch/stop', volume);
});
