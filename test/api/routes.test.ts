import { connect } from 'node:net';
import t from 'tap';
import type { AgentApi, Principal } from '../../lib/agent/api.ts';
import { createServer } from '../../lib/agent/server.ts';
import { SimpleVolumeError } from '../../lib/core/errors.ts';
import type { Logger } from '../../lib/core/parts.ts';

const TOKEN = 'the-token-of-the-agents';
const calls: [string, unknown[]][] = [];
/** Records what the routes hand on; the real agent is tested in test/agent. */
const api = new Proxy({} as AgentApi, {
  get: (_t, name: string) => {
    if (name === 'readiness') return async () => ({ ready: false, reasons: ['the pool is gone'] });
    if (name === 'metrics') return async () => 'simple_volume_agent_ready 0\n';
    if (name === 'fullSyncStatus') return () => null;
    return async (...args: unknown[]) => {
      calls.push([name, args]);
      if (name === 'volume')
        throw new SimpleVolumeError('VOLUME_UNKNOWN', 'no volume default/x on node a', { node: 'a' });
      if (name === 'createTransfer')
        return {
          id: 'x'.repeat(22),
          generation: { epoch: 1, seq: 2 },
          base: null,
          lineage: [[1, 1]],
          manifest: { bytes: 1, hash: '00' },
          webdavPath: '/transfer/x',
        };
      return { ok: true };
    };
  },
});
const quiet: Logger = { debug() {}, info() {}, warn() {}, error() {}, child: () => quiet };
const authenticate = (header: string | undefined): Principal | null =>
  header === `Bearer ${TOKEN}`
    ? { kind: 'agent' }
    : header === 'Bearer grant'
      ? { kind: 'grant', namespace: 'default', volume: 'pvc-1', epoch: 1, node: 'b' }
      : null;
const app = createServer(api, authenticate, quiet);
await app.ready();
t.teardown(() => app.close());

const auth = { authorization: `Bearer ${TOKEN}` };
const post = (url: string, payload: unknown, headers: Record<string, string> = auth) =>
  app.inject({ method: 'POST', url, payload: payload as object, headers });
const start = (change: object = {}) => ({
  namespace: 'default',
  volume: 'pvc-1234',
  source: { webdavUrl: 'http://10.233.1.10:8081' },
  targets: [{ url: 'http://10.233.1.11:8080', token: 'secret-of-the-target' }],
  includePaths: ['saves/**', 'server.json'],
  excludePaths: ['downloads/**'],
  debounce: '5s',
  ...change,
});

t.test('the documented start request is taken as it stands', async (t) => {
  const reply = await post('/replication/watch/start', start());
  t.equal(reply.statusCode, 200, reply.body);
  const [, [request]] = calls.at(-1) as [string, [{ policy: { debounceMs: number; maxDelayMs: number } }]];
  t.equal(request.policy.debounceMs, 5000);
  t.equal(request.policy.maxDelayMs, 25_000, 'default: five times the debounce');
  t.notMatch(reply.body, /secret-of-the-target/, 'F9: no token in a reply');
});

t.test('each bad field names itself and says what is allowed', async (t) => {
  const cases: [object, string, RegExp][] = [
    [{ namespace: '../x' }, 'namespace', /must match/],
    [{ volume: 'x'.repeat(254) }, 'volume', /at most 253/],
    [{ debounce: '5 seconds' }, 'debounce', /must be a duration such as 500ms/],
    [{ debounce: 5 }, 'debounce', /of type string/],
    [{ targets: [{ url: 'ftp://x', token: 'y' }] }, 'targets[0].url', /http or https URL/],
    [{ targets: [{ url: 'http://x' }] }, 'targets[0].token', /is required/],
    [{ targets: 'all' }, 'targets', /of type array/],
    [{ consistencyMode: 'eventual' }, 'consistencyMode', /one of "shadow", "live"/],
    [{ confirmedReplicas: -1 }, 'confirmedReplicas', />= 0/],
    [{ includePath: ['x'] }, 'includePath', /not a known field/],
    [{ requiredPaths: ['../etc/passwd'] }, 'requiredPaths[0]', /below the volume's root/],
    [{ source: { webdavUrl: 'http://user:pw@host' } }, 'source.webdavUrl', /without user, password/],
    [{ epoch: 0 }, 'epoch', />= 1/],
    [{ ownerUid: 4294967295 }, 'ownerUid', /<= 4294967294/],
  ];
  for (const [change, field, expected] of cases) {
    const reply = await post('/replication/watch/start', start(change));
    t.equal(reply.statusCode, 400, field);
    const { error } = reply.json();
    t.equal(error.code, 'FIELD_INVALID');
    t.equal(error.field, field);
    t.match(error.message, expected);
    t.ok(error.message.startsWith(field), `${error.message} begins with the field`);
  }
});

t.test('file modes are numbers or octal text', async (t) => {
  await post('/replication/watch/start', start({ fileMode: '0664', dirMode: 0o2775 }));
  const [, [request]] = calls.at(-1) as [string, [{ policy: { fileMode: number; dirMode: number } }]];
  t.equal(request.policy.fileMode, 0o664);
  t.equal(request.policy.dirMode, 0o2775, 'E3: setgid is kept');
  t.equal((await post('/replication/watch/start', start({ fileMode: '0999' }))).statusCode, 400);
});

t.test('authentication comes before the body, and a grant opens only its own doors', async (t) => {
  for (const headers of [
    {},
    { authorization: 'Bearer wrong' },
    { authorization: `Basic ${TOKEN}` },
  ] as Record<string, string>[]) {
    const reply = await app.inject({
      method: 'POST',
      url: '/replication/watch/start',
      payload: '{not json',
      headers: { 'content-type': 'application/json', ...headers },
    });
    t.equal(reply.statusCode, 401);
    t.equal(reply.json().error.code, 'UNAUTHORIZED');
    t.equal(reply.headers['www-authenticate'], 'Bearer');
  }
  const grant = { authorization: 'Bearer grant' };
  t.equal((await post('/replication/watch/start', start(), grant)).statusCode, 403);
  t.equal((await post('/replication/sync-batch', {}, grant)).statusCode, 403);
  const want = { namespace: 'default', volume: 'pvc-1', epoch: 1, node: 'b', have: null };
  t.equal((await post('/replication/transfers', want, grant)).statusCode, 201);
  for (const change of [{ volume: 'pvc-2' }, { namespace: 'other' }, { epoch: 2 }, { node: 'c' }])
    t.equal(
      (await post('/replication/transfers', { ...want, ...change }, grant)).statusCode,
      403,
      JSON.stringify(change),
    );
});

t.test('junk is answered, never fatal', async (t) => {
  const junk: [string, string][] = [
    ['application/json', '{'],
    ['application/json', ''],
    ['application/json', '[]'],
    ['application/json', `${'['.repeat(50_000)}${']'.repeat(50_000)}`],
    ['application/json', '{"__proto__":{"x":1}}'],
    ['text/plain', 'hello'],
  ];
  for (const [type, payload] of junk) {
    const reply = await app.inject({
      method: 'POST',
      url: '/replication/watch/start',
      payload,
      headers: { ...auth, 'content-type': type },
    });
    t.ok(
      reply.statusCode >= 400 && reply.statusCode < 500,
      `${type} ${payload.slice(0, 20)}: ${reply.statusCode}`,
    );
    t.type(reply.json().error.message, 'string');
  }
  const large = await app.inject({
    method: 'POST',
    url: '/replication/watch/start',
    payload: `"${'x'.repeat(2_000_000)}"`,
    headers: { ...auth, 'content-type': 'application/json' },
  });
  t.equal(large.statusCode, 413);
  t.equal(large.json().error.code, 'BODY_TOO_LARGE');
  for (const url of [
    '/nothing',
    '/%ff',
    '/replication/volumes/..%2f..%2fetc/x',
    '/replication/full-sync/%00',
  ]) {
    const reply = await app.inject({ method: 'GET', url, headers: auth });
    t.ok([400, 404].includes(reply.statusCode), `${url}: ${reply.statusCode}`);
  }
  t.equal(
    (await app.inject({ method: 'GET', url: '/replication/full-sync/abcdefgh', headers: auth })).json().error
      .code,
    'NOT_FOUND',
  );
});

t.test('wanted entries travel as 32-bit ordinals', async (t) => {
  const send = (payload: Buffer, type = 'application/octet-stream') =>
    app.inject({
      method: 'POST',
      url: '/replication/transfers/abcdefghij/needs',
      payload,
      headers: { ...auth, 'content-type': type },
    });
  t.equal((await send(Buffer.from([7, 0, 0, 0, 9, 0, 0, 0]))).statusCode, 200);
  const [, args] = calls.at(-1) as [string, unknown[]];
  t.same([...(args[2] as Uint32Array)], [7, 9]);
  t.equal((await send(Buffer.from([7, 0, 0]))).json().error.code, 'BODY_INVALID');
  t.equal((await send(Buffer.from('{}'), 'application/json')).json().error.code, 'BODY_INVALID');
});

t.test('an unknown volume says on which node it is unknown', async (t) => {
  const reply = await app.inject({ method: 'GET', url: '/replication/volumes/default/x', headers: auth });
  t.equal(reply.statusCode, 404);
  t.same(reply.json(), {
    error: { code: 'VOLUME_UNKNOWN', message: 'no volume default/x on node a', node: 'a' },
  });
});

t.test('health needs no token, readiness tells the reasons', async (t) => {
  t.equal((await app.inject('/healthz')).statusCode, 200);
  const ready = await app.inject('/readyz');
  t.equal(ready.statusCode, 503);
  t.same(ready.json().reasons, ['the pool is gone']);
  t.equal((await app.inject('/metrics')).statusCode, 200);
});

t.test('slow and broken connections are closed, the server stays up', { timeout: 20_000 }, async (t) => {
  await app.listen({ host: '127.0.0.1', port: 0 });
  const { port } = app.server.address() as { port: number };
  const raw = (text: string): Promise<string> =>
    new Promise((resolve) => {
      const socket = connect(port, '127.0.0.1', () => socket.write(text));
      let got = '';
      socket.on('data', (d) => {
        got += d;
      });
      socket.on('close', () => resolve(got));
      socket.on('error', () => resolve(got));
      setTimeout(() => socket.destroy(), 3000).unref();
    });
  t.match(await raw('nonsense\r\n\r\n'), /400/);
  t.match(await raw(`GET / HTTP/1.1\r\nHost: x\r\nX: ${'a'.repeat(40_000)}\r\n\r\n`), /431/);
  t.match(
    await raw(
      `POST /replication/watch/start HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer ${TOKEN}\r\nContent-Type: application/json\r\nContent-Length: 99999999999\r\nConnection: close\r\n\r\n`,
    ),
    /413/,
  );
  t.equal((await fetch(`http://127.0.0.1:${port}/healthz`)).status, 200);
});
