/** Real agents over HTTP: secrets, what a grant opens, metrics, and the stop in the middle of a pull. */
import fs from 'node:fs';
import path from 'node:path';
import t from 'tap';
import { LocalCluster, waitFor } from '../../lib/local/cluster.ts';
import { createGrants } from '../../lib/transfer/grant.ts';
import { differences, fill, replica, source, syncBody } from './support.ts';

t.setTimeout(300_000);
const MB = 1024 * 1024;
const cluster = await LocalCluster.start({
  nodes: ['a', 'b'],
  prefix: 'sv-api-',
  flags: ['--log-level', 'debug'],
});
t.teardown(() => cluster.stop());
const a = cluster.agent('a');
const b = cluster.agent('b');
const named = (volume: string): { namespace: string; volume: string } => ({ namespace: 'api', volume });
const volume = named('one');
const other = named('two');
const tokens = [a.token, b.token];
const replies: string[] = [];

/** A call whose answer, whatever it is, is kept for the search for secrets. */
async function raw(
  url: string,
  method: string,
  authorization: string | null,
  body?: unknown,
): Promise<{ status: number; text: string; code: string | null }> {
  const reply = await fetch(url, {
    method,
    headers: {
      ...(authorization === null ? {} : { authorization }),
      ...(body === undefined ? {} : { 'content-type': 'application/json' }),
    },
    ...(body === undefined ? {} : { body: JSON.stringify(body) }),
  });
  const text = await reply.text();
  replies.push(text, JSON.stringify([...reply.headers]));
  let code: string | null = null;
  try {
    code = (JSON.parse(text) as { error?: { code: string } }).error?.code ?? null;
  } catch {
    // metrics, WebDAV
  }
  return { status: reply.status, text, code };
}

/** Command lines of the children of a process, right now. */
function childCommands(pid: number): string[] {
  const found: string[] = [];
  for (const entry of fs.readdirSync('/proc')) {
    if (!/^\d+$/.test(entry)) continue;
    try {
      const stat = fs.readFileSync(`/proc/${entry}/stat`, 'latin1');
      const parent = Number(stat.slice(stat.lastIndexOf(')') + 2).split(' ')[1]);
      if (parent === pid)
        found.push(fs.readFileSync(`/proc/${entry}/cmdline`, 'latin1').replaceAll('\0', ' '));
    } catch {
      // ended meanwhile
    }
  }
  return found;
}

fill(a.live(volume), 30, 2000);
fill(a.live(other), 10, 2000);
await cluster.watch('a', volume, { targets: ['b'], debounce: '50ms' });
await cluster.watch('a', other, { targets: ['b'], debounce: '50ms' });
await cluster.settle('a', volume);
await cluster.settle('a', other);

t.test('no command line of rclone has a token', async (t) => {
  const commands = new Set<string>();
  fill(path.join(a.live(volume), 'large'), 20, 5 * MB, 3);
  const done = { yes: false };
  const settled = cluster.settle('a', volume).finally(() => {
    done.yes = true;
  });
  while (!done.yes) {
    for (const command of childCommands(b.pid as number)) commands.add(command);
    await new Promise((resolve) => setTimeout(resolve, 3));
  }
  await settled;
  const rclone = [...commands].filter((command) => /rclone/.test(command) && / cat /.test(command));
  t.ok(rclone.length > 0, `rclone was seen at work: ${rclone[0]}`);
  for (const command of commands) {
    for (const token of tokens) t.notOk(command.includes(token));
    t.notMatch(command, /sv1\./);
    t.notMatch(command, /bearer/i);
  }
  t.same(await differences(cluster, volume, 'a', 'b'), []);
});

t.test('a grant opens the transfers of its own volume, epoch and node, and nothing else', async (t) => {
  const grants = createGrants(a.token);
  const grant = `Bearer ${grants.mint({ ...volume, epoch: 1, node: 'b' })}`;
  const transfers = `${a.url}/replication/transfers`;
  const offer = await raw(transfers, 'POST', grant, { ...volume, epoch: 1, node: 'b', have: null });
  t.equal(offer.status, 201, 'its own');
  const { id, webdavPath } = JSON.parse(offer.text) as { id: string; webdavPath: string };
  const manifest = new URL(`${webdavPath}/manifest`.replaceAll('//', '/'), a.webdavUrl).href;
  t.equal((await raw(manifest, 'GET', grant)).status, 200, 'the files of its own offer');

  for (const [what, body] of [
    ['another volume', { ...other, epoch: 1, node: 'b', have: null }],
    ['another epoch', { ...volume, epoch: 2, node: 'b', have: null }],
    ['another node', { ...volume, epoch: 1, node: 'c', have: null }],
  ] as const) {
    const no = await raw(transfers, 'POST', grant, body);
    t.equal(no.status, 403, what);
    t.equal(no.code, 'FORBIDDEN', what);
  }
  const foreign = `Bearer ${grants.mint({ ...other, epoch: 1, node: 'b' })}`;
  t.ok([403, 404].includes((await raw(manifest, 'GET', foreign)).status), "the files of another's offer");
  // answered like an offer that is not there, so nothing is learnt of it
  await raw(`${transfers}/${id}`, 'DELETE', foreign);
  t.equal((await raw(manifest, 'GET', grant)).status, 200, 'and dropping it with another grant does nothing');

  const name = `${volume.namespace}/${volume.volume}`;
  for (const [method, url, body] of [
    ['GET', '/replication/volumes'],
    ['GET', `/replication/volumes/${name}`],
    ['GET', '/replication/watch/status'],
    ['GET', `/replication/backups?namespace=${volume.namespace}&volume=${volume.volume}`],
    ['DELETE', `/replication/backups/${name}/2026-01-01T00-00-00Z`],
    ['POST', '/replication/watch/stop', volume],
    ['POST', '/replication/volume/remove', { ...volume, epoch: 1 }],
    ['POST', '/replication/prepare', volume],
    ['POST', '/replication/force', { ...volume, epoch: 1, condition: 'MassDelete' }],
    ['POST', '/replication/sync-batch', syncBody(b, volume, 1)],
    ['POST', '/replication/full-sync', syncBody(b, volume, 1)],
    ['POST', '/replication/beat', { node: 'b', volumes: [] }],
  ] as const) {
    const no = await raw(`${a.url}${url}`, method, grant, body);
    t.equal(no.status, 403, `${method} ${url} with a grant`);
    t.equal(no.code, 'FORBIDDEN', `${method} ${url} with a grant`);
    for (const bad of [
      null,
      'Bearer wrong-wrong-wrong-wrong',
      `Basic ${btoa(`x:${a.token}`)}`,
      `Bearer ${b.token}`,
    ])
      t.equal(
        (await raw(`${a.url}${url}`, method, bad, body)).status,
        401,
        `${method} ${url} with ${bad && 'a wrong token'}`,
      );
  }
  const text = grant.slice('Bearer '.length);
  const changed = `${text.slice(0, -1)}${text.endsWith('A') ? 'B' : 'A'}`;
  for (const bad of [changed, `${text}x`, text.slice(0, -1), 'sv1..', 'sv1.e30.', 'sv1.'])
    t.equal(
      (await raw(transfers, 'POST', `Bearer ${bad}`, { ...volume, epoch: 1, node: 'b', have: null })).status,
      401,
      'a grant that was changed',
    );
  t.equal(
    (
      await raw(`${b.url}/replication/transfers`, 'POST', grant, {
        ...volume,
        epoch: 1,
        node: 'b',
        have: null,
      })
    ).status,
    401,
    'on another agent',
  );
  t.equal((await raw(`${transfers}/${id}`, 'DELETE', grant)).status, 204);
});

t.test('metrics have their names, parse, and say what the status says', async (t) => {
  const LINE =
    /^([a-zA-Z_:][a-zA-Z0-9_:]*)(\{(?:[a-zA-Z_]\w*="(?:[^"\\]|\\.)*",?)*\})? (-?[0-9.]+(?:e[+-]?\d+)?|NaN|[+-]Inf)$/;
  const names: Record<string, Set<string>> = {};
  for (const agent of [a, b]) {
    const { text, status } = await raw(`${agent.url}/metrics`, 'GET', null);
    t.equal(status, 200);
    const seen = new Set<string>();
    const wrong: string[] = [];
    for (const line of text.split('\n')) {
      if (line === '' || line.startsWith('# HELP ') || line.startsWith('# TYPE ')) continue;
      const match = LINE.exec(line);
      if (!match) wrong.push(line);
      else seen.add(match[1] as string);
    }
    t.same(wrong, [], 'each line parses');
    names[agent.node] = seen;
  }
  const both = [
    'build_info',
    'agent_ready',
    'volume_state',
    'volume_epoch',
    'volume_generation_seq',
    'volume_entries',
    'volume_bytes',
    'event_loop_delay_p99_seconds',
    'pulled_bytes_total',
    'staged_bytes_total',
    'served_bytes_total',
  ];
  const active = [
    'source_pending_changes',
    'source_oldest_pending_seconds',
    'source_watched_directories',
    'source_unwatched_directories',
    'source_watch_overflows',
    'source_target_confirmed_seq',
  ];
  for (const [node, wanted] of [
    ['a', [...both, ...active]],
    ['b', [...both, 'replica_fresh_age_seconds', 'pulls_total']],
  ] as const)
    t.same(
      wanted.filter((name) => !names[node]?.has(`simple_volume_${name}`)),
      [],
      `on ${node}`,
    );
  t.equal(await a.metric('simple_volume_agent_ready'), 1);
  const { entries } = await source(a, volume);
  const { entries: more } = await source(a, other);
  t.equal(await a.metric('simple_volume_volume_entries'), entries + more);
  t.ok(((await a.metric('simple_volume_served_bytes_total')) ?? 0) > 100 * MB);
  t.ok(((await b.metric('simple_volume_pulled_bytes_total')) ?? 0) > 100 * MB);
  t.ok(((await a.metric('simple_volume_staged_bytes_total')) ?? 0) > 100 * MB);
});

for (const [node, what] of [
  ['b', 'the replica'],
  ['a', 'the source'],
] as const)
  t.test(`SIGTERM in the middle of a pull: ${what} ends within 10 s with 0`, async (t) => {
    fill(path.join(a.live(volume), 'large'), 24, 5 * MB, node.charCodeAt(0));
    await waitFor(
      'the pull is under way',
      async () => (await replica(b, volume)).state === 'pulling' && childCommands(b.pid as number).length > 0,
      60_000,
      3,
    );
    const began = performance.now();
    const rclone = childCommands(b.pid as number);
    const agent = cluster.agent(node);
    const ended = await agent.end('SIGTERM');
    const ms = performance.now() - began;
    t.same(ended, { code: 0, signal: null }, `${rclone.length} rclone at work`);
    t.ok(ms < 10_000, `${Math.round(ms)} ms`);
    await agent.start();
    await cluster.settle('a', volume, 90_000);
    t.same(await differences(cluster, volume, 'a', 'b'), []);
  });

t.test('no token and no grant is in a reply, a status or a log', async (t) => {
  for (const agent of [a, b]) {
    for (const url of [
      '/replication/volumes',
      `/replication/volumes/${volume.namespace}/${volume.volume}`,
      '/replication/watch/status',
      '/healthz',
      '/readyz',
      '/metrics',
      '/no-such-route',
    ])
      await raw(`${agent.url}${url}`, 'GET', `Bearer ${agent.token}`);
    // refusals that have seen a secret in their request
    const secret = { ...volume, targets: [{ url: 'not a url', token: b.token }] };
    await raw(`${agent.url}/replication/watch/start`, 'POST', `Bearer ${agent.token}`, secret);
    await raw(`${agent.url}/replication/watch/start`, 'POST', `Bearer ${agent.token}`, {
      ...secret,
      targets: [{ url: `http://x:${b.token}@y`, token: `${b.token} blank` }],
    });
    await raw(`${agent.url}/replication/sync-batch`, 'POST', `Bearer ${agent.token}`, {
      ...volume,
      epoch: 0,
      source: { url: 1, token: b.token },
    });
    await raw(`${agent.url}/replication/volumes?token=${b.token}`, 'GET', `Bearer ${agent.token}`);
  }
  // a target that cannot be reached and one that refuses the token: both are logged and in the status
  fs.mkdirSync(a.live(named('three')), { recursive: true });
  fs.writeFileSync(path.join(a.live(named('three')), 'f'), 'x');
  await raw(`${a.url}/replication/watch/start`, 'POST', `Bearer ${a.token}`, {
    ...named('three'),
    targets: [
      { url: b.url, token: `wrong-${b.token}` },
      { url: 'http://127.0.0.1:1', token: `away-${b.token}` },
    ],
  });
  await waitFor('both have failed', async () =>
    (await source(a, named('three'))).targets.every((one) => one.lastError !== null),
  );
  await raw(`${a.url}/replication/watch/status`, 'GET', `Bearer ${a.token}`);
  const found: string[] = [];
  const search = (where: string, text: string): void => {
    for (const token of tokens) if (text.includes(token)) found.push(`${where} has a token`);
    if (/sv1\.[\w-]{10}/.test(text)) found.push(`${where} has a grant`);
  };
  for (const [i, reply] of replies.entries()) search(`reply ${i}: ${reply.slice(0, 200)}`, reply);
  for (const agent of [a, b]) {
    const log = fs.readFileSync(agent.logFile, 'utf8');
    t.ok(log.length > 1000, 'the log is one');
    for (const line of log.split('\n')) search(`log line ${line.slice(0, 200)}`, line);
  }
  t.same(found, []);
});

t.test('what is kept on the disk of a pool is for its owner only', async (t) => {
  for (const agent of [a, b])
    for (const name of fs.readdirSync(agent.pool))
      if (name.startsWith('.simple-volume')) {
        const mode = fs.statSync(path.join(agent.pool, name)).mode & 0o077;
        t.equal(mode, 0, `${name} on ${agent.node}`);
      }
});
