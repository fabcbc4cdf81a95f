/** A pool that is missing, foreign, in use or gone, a tree that was moved away, and deletions that look like an accident. */
import { spawn, spawnSync } from 'node:child_process';
import fs from 'node:fs';
import os from 'node:os';
import path from 'node:path';
import t from 'tap';
import { freePorts, LocalCluster, PROJECT, waitFor } from '../../lib/local/cluster.ts';
import { compareTrees } from '../../lib/local/tree.ts';
import { differences, fill, refusal, source, tree } from './support.ts';

t.setTimeout(300_000);
const BIN = path.join(PROJECT, 'lib/cli/bin.js');
const scratch = fs.mkdtempSync(path.join(os.tmpdir(), 'sv-pool-'));
const cluster = await LocalCluster.start({ nodes: ['a', 'b'], folder: path.join(scratch, 'cluster') });
t.teardown(async () => {
  await cluster.stop();
  fs.rmSync(scratch, { recursive: true, force: true });
});
const a = cluster.agent('a');
const b = cluster.agent('b');
const named = (volume: string): { namespace: string; volume: string } => ({ namespace: 'pool', volume });
const fast = { debounce: '50ms', targets: ['b'] };
const token = path.join(scratch, 'token');
fs.writeFileSync(token, 'a-token-of-enough-characters\n', { mode: 0o600 });

interface Ready {
  ready: boolean;
  reasons: string[];
}
const readiness = async (url: string): Promise<Ready & { status: number }> => {
  const reply = await fetch(`${url}/readyz`);
  return { ...((await reply.json()) as Ready), status: reply.status };
};
const notReady = (url: string, words: RegExp, limitMs = 20_000): Promise<Ready & { status: number }> =>
  waitFor(
    `not ready: ${words}`,
    async () => {
      const now = await readiness(url);
      return now.status === 503 && words.test(now.reasons.join('\n')) ? now : null;
    },
    limitMs,
  );
const isReady = (url: string): Promise<true> =>
  waitFor('ready', async () => (await readiness(url)).status === 200, 30_000).then(() => true as const);

/** An agent of its own, outside the cluster, that nobody expects to become ready. */
async function lone(t: Tap, node: string, pool: string): Promise<{ url: string; running(): boolean }> {
  const [http, webdav] = await freePorts(2);
  const log = fs.openSync(path.join(scratch, `lone-${node}.log`), 'a');
  const child = spawn(
    process.execPath,
    [
      ...[BIN, 'agent', '--node', node, '--pool-name', 'local', '--pool-path', pool, '--token-file', token],
      ...['--http', `127.0.0.1:${http}`, '--webdav', `127.0.0.1:${webdav}`],
    ],
    { stdio: ['ignore', log, log] },
  );
  fs.closeSync(log);
  const ended = new Promise((resolve) => child.once('exit', resolve));
  t.teardown(async () => {
    child.kill('SIGTERM');
    await ended;
  });
  const url = `http://127.0.0.1:${http}`;
  await waitFor('it answers', async () => (await fetch(`${url}/healthz`)).ok, 20_000);
  return { url, running: () => child.exitCode === null && child.signalCode === null };
}
type Tap = Pick<typeof t, 'teardown'>;

t.test('A12, D31: a pool that loses its marker is not ready and deletes nothing on replicas', async (t) => {
  const volume = named('marker');
  const live = a.live(volume);
  fill(live, 20, 1000);
  await cluster.watch('a', volume, fast);
  await cluster.settle('a', volume);
  const before = await tree(b.live(volume));
  const marker = path.join(a.pool, '.simple-volume-pool');
  const text = fs.readFileSync(marker);
  fs.rmSync(marker);
  // as when the disk is gone and its empty mount point is all that is left
  fs.renameSync(path.join(a.pool, 'pool'), path.join(scratch, 'away'));
  try {
    const now = await notReady(a.url, /marker/);
    t.equal(now.ready, false);
    t.match(now.reasons.join(' '), /\.simple-volume-pool/);
    await waitFor('the volume is closed', async () => {
      try {
        await a.call('GET', '/replication/volumes/pool/marker');
        return false;
      } catch (error) {
        return (error as { code?: string }).code === 'NOT_READY';
      }
    });
    t.equal((await fetch(`${a.url}/healthz`)).status, 200, 'it is alive all the same');
    t.same(
      await a.call('GET', '/replication/volumes'),
      { volumes: [], pool: null },
      'the room of what is mounted there instead is not told as its own',
    );
    t.notOk(fs.existsSync(marker), 'no new marker was written');
    t.notOk(fs.existsSync(path.join(a.pool, 'pool')), 'no new tree was made');
    t.same(compareTrees(before, await tree(b.live(volume))), [], 'the replica is as it was');
  } finally {
    fs.renameSync(path.join(scratch, 'away'), path.join(a.pool, 'pool'));
    fs.writeFileSync(marker, text);
  }
  t.ok(await isReady(a.url), 'ready again by itself');
  fs.writeFileSync(path.join(live, 'back'), 'and on');
  await cluster.settle('a', volume);
  t.same(await differences(cluster, volume, 'a', 'b'), []);
  await a.call('POST', '/replication/watch/stop', volume);
});

t.test('B14: the agent tells how much room its pool has', async (t) => {
  const { pool } = await a.call<{ pool: { freeBytes: number; totalBytes: number } }>(
    'GET',
    '/replication/volumes',
  );
  const real = fs.statfsSync(a.pool);
  t.equal(pool.totalBytes, real.blocks * real.bsize);
  t.ok(Math.abs(pool.freeBytes - real.bavail * real.bsize) < 2 ** 30, `${pool.freeBytes}`);
});

t.test('A12: a live tree that was moved away is no deletion, and is told of', async (t) => {
  const volume = named('moved');
  const live = a.live(volume);
  fill(live, 20, 1000);
  await cluster.watch('a', volume, fast);
  const generation = await cluster.settle('a', volume);
  const before = await tree(b.live(volume));
  fs.renameSync(live, `${live}-elsewhere`);
  const held = await waitFor('the condition', async () => {
    const status = await source(a, volume);
    return status.conditions.find((one) => one.type === 'RootChanged') ? status : null;
  });
  t.equal(held.state, 'held');
  t.equal(held.generation, generation);
  const flush = await refusal(a.call('POST', '/replication/prepare', volume));
  t.equal(flush.code, 'HELD', 'and a flush says so instead of sealing nothing');
  fs.mkdirSync(live);
  const other = await refusal(a.call('POST', '/replication/prepare', volume));
  t.equal(other.code, 'HELD', 'another, empty directory in its place is not taken either');
  t.same(compareTrees(before, await tree(b.live(volume))), [], 'the replica is as it was');
  fs.rmdirSync(live);
  fs.renameSync(`${live}-elsewhere`, live);
  await waitFor('it goes on', async () => {
    const status = await source(a, volume);
    return status.state === 'watching' && status.conditions.length === 0;
  });
  fs.writeFileSync(path.join(live, 'back'), 'and on');
  await cluster.settle('a', volume);
  t.same(await differences(cluster, volume, 'a', 'b'), []);
  await a.call('POST', '/replication/watch/stop', volume);
});

t.test('a mass deletion that nobody watched is held until it is forced', async (t) => {
  const volume = named('mass');
  const live = a.live(volume);
  fill(live, 200, 300);
  await cluster.watch('a', volume, fast);
  await cluster.settle('a', volume);
  const before = await tree(b.live(volume));
  await a.stop();
  for (let i = 0; i < 200; i++) if (i % 10 < 6) fs.rmSync(path.join(live, `d${i % 10}`, `f${i}`));
  fs.writeFileSync(path.join(live, 'also'), 'a change beside');
  await a.start();
  const held = await waitFor('the condition', async () => {
    const status = await source(a, volume);
    return status.conditions.find((one) => one.type === 'MassDelete') ? status : null;
  });
  t.equal(held.state, 'held');
  t.match(held.conditions[0]?.message, /force/);
  const no = await refusal(a.call('POST', '/replication/prepare', volume));
  t.equal(no.code, 'HELD');
  t.same(compareTrees(before, await tree(b.live(volume))), [], 'the replica is as it was');
  const wrong = await refusal(
    a.call('POST', '/replication/force', { ...volume, epoch: 1, condition: 'RootChanged' }),
  );
  t.equal(wrong.code, 'FIELD_INVALID', 'only what holds it can be lifted');
  await a.call('POST', '/replication/force', { ...volume, epoch: 1, condition: 'MassDelete' });
  await cluster.settle('a', volume);
  t.same(await differences(cluster, volume, 'a', 'b'), []);
  t.same((await source(a, volume)).conditions, []);
  // The same number of deletions while it is watched is what somebody did, and goes through.
  for (const name of fs.readdirSync(live)) fs.rmSync(path.join(live, name), { recursive: true });
  await cluster.settle('a', volume);
  t.same(fs.readdirSync(b.live(volume)), []);
  await a.call('POST', '/replication/watch/stop', volume);
});

t.test('a second agent on the same pool is not ready, and harms nothing', async (t) => {
  const second = await lone(t, 'a', a.pool);
  const now = await notReady(second.url, /in use/);
  t.match(now.reasons.join(' '), a.pool);
  t.ok(second.running());
  t.ok(await isReady(a.url), 'the first one is not disturbed');
});

t.test('a pool of another node is refused, and the reason names both nodes', async (t) => {
  const other = await lone(t, 'zebra', a.pool);
  const now = await notReady(other.url, /node "a"/);
  t.match(now.reasons.join(' '), /"zebra"/);
  t.match(now.reasons.join(' '), /--node/);
});

t.test('a pool that is not there at the start is waited for, and never made', async (t) => {
  const pool = path.join(scratch, 'late');
  const agent = await lone(t, 'late', pool);
  await notReady(agent.url, /late is not there/);
  const call = await fetch(`${agent.url}/replication/volumes`, {
    headers: { authorization: `Bearer ${fs.readFileSync(token, 'utf8').trim()}` },
  });
  t.notOk(fs.existsSync(pool), 'it is not made');
  t.ok(call.status === 200 || call.status === 503);
  fs.mkdirSync(pool);
  t.ok(await isReady(agent.url), 'ready once it is there');
  t.ok(fs.existsSync(path.join(pool, '.simple-volume-pool')));
});

t.test('a pool that is not empty and has no marker is refused until it is adopted', async (t) => {
  const pool = path.join(scratch, 'full');
  fs.mkdirSync(pool);
  fs.writeFileSync(path.join(pool, 'precious'), 'somebody else');
  const agent = await lone(t, 'full', pool);
  const now = await notReady(agent.url, /not empty/);
  t.match(now.reasons.join(' '), /--allow-non-empty-pool/);
  t.same(fs.readdirSync(pool), ['precious'], 'nothing was written into it');
});

t.test('flags that are wrong end with 2 and name the flag', async (t) => {
  const pool = path.join(scratch, 'flags');
  fs.mkdirSync(pool);
  const weak = path.join(scratch, 'weak');
  fs.writeFileSync(weak, 'short\n', { mode: 0o600 });
  const open = path.join(scratch, 'open');
  fs.writeFileSync(open, 'a-token-of-enough-characters\n');
  fs.chmodSync(open, 0o644);
  const good: Record<string, string> = {
    node: 'n',
    'pool-name': 'local',
    'pool-path': pool,
    'token-file': token,
    http: '127.0.0.1:0',
    webdav: '127.0.0.1:0',
  };
  const cases: [string, string | null][] = [
    ['node', null],
    ['node', 'No/Slash'],
    ['pool-name', null],
    ['pool-path', null],
    ['token-file', null],
    ['token-file', path.join(scratch, 'missing')],
    ['token-file', weak],
    ['token-file', open],
    ['http', '127.0.0.1'],
    ['http', '::1:80'],
    ['webdav', '127.0.0.1:99999'],
    ['advertise', 'ftp://x'],
    ['advertise-webdav', 'http://user:pass@x'],
    ['beat', '1'],
    ['audit', 'never'],
    ['log-level', 'loud'],
    ['browse-auth', 'maybe'],
    ['expect-pool-id', 'x'],
  ];
  const env = Object.fromEntries(
    Object.entries(process.env).filter(([name]) => !name.startsWith('SIMPLE_VOLUME_')),
  );
  for (const [flag, value] of cases) {
    const flags = { ...good };
    if (value === null) delete flags[flag];
    else flags[flag] = value;
    const run = spawnSync(
      process.execPath,
      [BIN, 'agent', ...Object.entries(flags).flatMap(([name, text]) => [`--${name}`, text])],
      { encoding: 'utf8', env, timeout: 20_000 },
    );
    t.equal(run.status, 2, `--${flag} ${value ?? 'missing'}: ${run.stderr.trim()}`);
    t.match(run.stderr, `--${flag}`);
    t.notMatch(run.stderr, /\n\s+at /, 'no stack');
  }
  const unknown = spawnSync(process.execPath, [BIN, 'agent', '--colour', 'red'], { encoding: 'utf8', env });
  t.equal(unknown.status, 2);
  t.match(unknown.stderr, '--colour');
  t.same(fs.readdirSync(pool), [], 'nothing was written');
});
