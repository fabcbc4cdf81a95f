import http from 'node:http';
import type { AddressInfo } from 'node:net';
import t from 'tap';
import { createHttpClient, printableUrl, RemoteError } from '../../lib/core/http-client.ts';

type Handler = (req: http.IncomingMessage, res: http.ServerResponse) => void;

async function server(test: Tap.Test, handler: Handler): Promise<string> {
  const s = http.createServer(handler);
  await new Promise<void>((r) => s.listen(0, '127.0.0.1', r));
  test.teardown(() => {
    s.closeAllConnections();
    s.close();
  });
  return `http://127.0.0.1:${(s.address() as AddressInfo).port}`;
}
declare namespace Tap {
  type Test = typeof t;
}

const read = (req: http.IncomingMessage): Promise<Buffer> =>
  new Promise((resolve) => {
    const parts: Buffer[] = [];
    req.on('data', (p: Buffer) => parts.push(p));
    req.on('end', () => resolve(Buffer.concat(parts)));
  });

t.test('JSON goes out with the token and comes back parsed', async (t) => {
  const url = await server(t as never, async (req, res) => {
    const body = await read(req);
    res.end(
      JSON.stringify({
        got: JSON.parse(body.toString()),
        auth: req.headers.authorization,
        type: req.headers['content-type'],
      }),
    );
  });
  const client = createHttpClient();
  t.teardown(() => client.close());
  const { status, body } = await client.call<object>({ url: `${url}/x`, token: 'secret', body: { a: 1 } });
  t.equal(status, 200);
  t.strictSame(body, { got: { a: 1 }, auth: 'Bearer secret', type: 'application/json' });
});

t.test('a Buffer goes out as it is', async (t) => {
  const url = await server(t as never, async (req, res) => {
    res.end(JSON.stringify({ hex: (await read(req)).toString('hex'), type: req.headers['content-type'] }));
  });
  const client = createHttpClient();
  t.teardown(() => client.close());
  const { body } = await client.call<object>({ url, body: Buffer.from([0, 255, 1]) });
  t.strictSame(body, { hex: '00ff01', type: 'application/octet-stream' });
});

t.test("the other side's error code is kept, an unknown one is not believed", async (t) => {
  const url = await server(t as never, (req, res) => {
    res.statusCode = 409;
    res.end(
      JSON.stringify({
        error: { code: req.url === '/a' ? 'EPOCH_OLD' : 'hasOwnProperty', message: 'too old' },
      }),
    );
  });
  const client = createHttpClient();
  t.teardown(() => client.close());
  await t.rejects(client.call({ url: `${url}/a` }), { code: 'EPOCH_OLD', answered: 409, message: /too old/ });
  await t.rejects(client.call({ url: `${url}/b` }), { code: 'INTERNAL', answered: 409 });
});

t.test('a server that never answers costs the time limit and no more (C10)', async (t) => {
  const url = await server(t as never, () => {});
  const client = createHttpClient();
  t.teardown(() => client.close());
  const begin = Date.now();
  await t.rejects(client.call({ url, timeoutMs: 80 }), { code: 'TIMEOUT', answered: null });
  t.ok(Date.now() - begin < 2000);
});

t.test('a reply that trickles for ever ends at the time limit too', async (t) => {
  const url = await server(t as never, (_req, res) => {
    const timer = setInterval(() => res.write(' '), 10);
    res.on('close', () => clearInterval(timer));
  });
  const client = createHttpClient();
  t.teardown(() => client.close());
  await t.rejects(client.call({ url, timeoutMs: 100 }), { code: 'TIMEOUT' });
});

t.test('a reply larger than allowed is refused while it arrives', async (t) => {
  const url = await server(t as never, (_req, res) => res.end(Buffer.alloc(100_000, 0x20)));
  const client = createHttpClient();
  t.teardown(() => client.close());
  await t.rejects(client.call({ url, maxBytes: 1000 }), { code: 'BODY_TOO_LARGE' });
});

t.test('cancelling rejects at once; a signal that is already aborted sends nothing', async (t) => {
  let calls = 0;
  const url = await server(t as never, () => {
    calls++;
  });
  const client = createHttpClient();
  t.teardown(() => client.close());
  const abort = new AbortController();
  const p = client.call({ url, signal: abort.signal });
  setTimeout(() => abort.abort(), 30);
  await t.rejects(p, { code: 'CANCELLED' });
  const before = calls;
  await t.rejects(client.call({ url, signal: AbortSignal.abort() }), { code: 'CANCELLED' });
  t.equal(calls, before);
});

t.test('no credential in any error text (F9)', async (t) => {
  const client = createHttpClient();
  t.teardown(() => client.close());
  const url = 'http://user:hunter2@127.0.0.1:1/path?token=hunter2';
  const error = (await client
    .call({ url, token: 'hunter2', timeoutMs: 1000 })
    .catch((e) => e)) as RemoteError;
  t.type(error, RemoteError);
  t.equal(error.code, 'NOT_READY');
  t.notMatch(`${error.stack} ${JSON.stringify(error)}`, /hunter2/);
  t.equal(printableUrl(url), 'http://127.0.0.1:1/path');
});

t.test('a kept connection that the server closed is replaced without an error', async (t) => {
  const sockets = new Set<import('node:net').Socket>();
  const s = http.createServer((_req, res) => res.end('{}'));
  s.on('connection', (c) => sockets.add(c));
  await new Promise<void>((r) => s.listen(0, '127.0.0.1', r));
  t.teardown(() => s.close());
  const url = `http://127.0.0.1:${(s.address() as AddressInfo).port}`;
  const client = createHttpClient();
  t.teardown(() => client.close());
  for (let i = 0; i < 3; i++) {
    await client.call({ url });
    for (const c of sockets) c.resetAndDestroy();
    sockets.clear();
    t.equal((await client.call({ url })).status, 200);
  }
});

t.test('an answer that is not JSON is an error, an empty one is null', async (t) => {
  const url = await server(t as never, (req, res) => res.end(req.url === '/html' ? '<html>' : ''));
  const client = createHttpClient();
  t.teardown(() => client.close());
  await t.rejects(client.call({ url: `${url}/html` }), { code: 'BODY_INVALID' });
  t.equal((await client.call({ url })).body, null);
});
