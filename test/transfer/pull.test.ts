import { randomBytes } from 'node:crypto';
import { chmod, mkdir, readFile, writeFile } from 'node:fs/promises';
import { createServer, type Server } from 'node:http';
import type { AddressInfo } from 'node:net';
import path from 'node:path';
import { setTimeout as sleep } from 'node:timers/promises';
import t from 'tap';
import { createHttpClient } from '../../lib/core/http-client.ts';
import { decodeUnpackResults, encodeUnpackItems } from '../../lib/core/lists.ts';
import { ManifestReader } from '../../lib/core/manifest.ts';
import type { Offer, Puller, PullSource } from '../../lib/core/parts.ts';
import { Kind, kindOf } from '../../lib/core/record.ts';
import { native } from '../../lib/native/load.ts';
import { createPuller, type PullerOptions } from '../../lib/transfer/pull.ts';
import { rcloneCat } from '../../lib/transfer/rclone.ts';
import { type Lab, startLab, testRclone } from './support.ts';

const binary = await testRclone();

/** The control side of a source, as the agent's routes do it, over the lab's offers. */
async function control(lab: Lab): Promise<{ url: string; server: Server; confirmed: unknown[] }> {
  const confirmed: unknown[] = [];
  const server = createServer(async (request, response) => {
    const parts: Buffer[] = [];
    for await (const b of request) parts.push(b as Buffer);
    const body = Buffer.concat(parts);
    const [, , what, id] = (request.url ?? '').split('/');
    const reply = (status: number, value: unknown): void => {
      response
        .writeHead(status, { 'content-type': 'application/json' })
        .end(value === null ? '' : JSON.stringify(value));
    };
    if (what === 'confirm') {
      confirmed.push(JSON.parse(body.toString()));
      return reply(200, {});
    }
    if (request.method === 'DELETE') {
      await lab.offers.drop(id!, lab.replica);
      return reply(204, null);
    }
    if (id) {
      const words = new Uint32Array(body.length / 4).map((_, i) => body.readUInt32LE(i * 4));
      return reply(200, { packs: await lab.offers.needs(id, lab.replica, words) });
    }
    const want = JSON.parse(body.toString()) as { node: string; epoch: number };
    const offer = await lab.offers.create(lab.volume, lab.volume.offers, {
      ...want,
      have: null,
      full: false,
    });
    const text = (g: { epoch: number; seq: number } | null) => g && `${g.epoch}-${g.seq}`;
    reply(201, { ...offer, generation: text(offer.generation), base: text(offer.base) });
  });
  await new Promise<void>((resolve) => server.listen(0, '127.0.0.1', resolve));
  return { url: `http://127.0.0.1:${(server.address() as AddressInfo).port}`, server, confirmed };
}

async function setUp(t: Tap.Test, base: string, options: Partial<PullerOptions> = {}) {
  const lab = await startLab(base);
  const { url, server, confirmed } = await control(lab);
  const http = createHttpClient();
  const puller = createPuller({
    http,
    rclone: () => binary,
    node: 'node-b',
    hashFile: native.hashFile,
    ...options,
  });
  const source: PullSource = { url, webdavUrl: lab.url, token: lab.grant(), node: 'node-a' };
  t.teardown(async () => {
    http.close();
    server.closeAllConnections();
    server.close();
    await lab.close();
  });
  return { lab, puller, source, confirmed };
}
declare namespace Tap {
  type Test = { teardown(fn: () => Promise<void>): void };
}
const want = { namespace: 'default', volume: 'world', epoch: 1, have: null, full: false };
const signal = new AbortController().signal;

async function allFiles(
  puller: Puller,
  source: PullSource,
  offer: Offer,
  file: string,
): Promise<{ records: Buffer[]; ordinals: Uint32Array }> {
  await puller.manifest(source, offer, file, signal);
  const reader = await ManifestReader.open(Buffer.from(file), {
    expect: { namespace: 'default', volume: 'world' },
  });
  const records: Buffer[] = [];
  for await (const b of reader.batches()) records.push(...b.records);
  await reader.close();
  return {
    records,
    ordinals: Uint32Array.from(records.flatMap((r, i) => (kindOf(r) === Kind.file ? [i] : []))),
  };
}

t.test('offer, manifest, needs, packs into the unpacker, confirm, done', async (t) => {
  const { lab, puller, source, confirmed } = await setUp(t, t.testdir());
  const base = path.dirname(lab.volume.root);
  for (let i = 0; i < 300; i++) await writeFile(`${lab.volume.root}/f${i}`, randomBytes(i * 7));
  await writeFile(`${lab.volume.root}/big`, randomBytes(5_000_000));
  await lab.volume.seal();
  const offer = await puller.offer(source, want, signal);
  const { records, ordinals } = await allFiles(puller, source, offer, path.join(base, 'manifest'));
  const packs = await puller.needs(source, offer, ordinals, signal);
  t.equal(packs.length, 1);
  await mkdir(`${base}/slots`);
  const unpacker = native.createUnpacker({
    slots: Buffer.from(`${base}/slots`),
    base: null,
    items: encodeUnpackItems(
      [...ordinals].map((ordinal, slot) => ({ ordinal, patch: false, slot, record: records[ordinal]! })),
    ),
  });
  let bytes = 0;
  await puller.pack(
    source,
    offer,
    packs[0]!,
    async (chunk) => {
      bytes += chunk.length;
      await unpacker.write(chunk);
    },
    signal,
  );
  t.ok(bytes > 5_000_000);
  const results = decodeUnpackResults(await unpacker.end());
  t.equal(results.length, 301);
  t.ok(results.every((r) => r.status === 0));
  await puller.confirm(
    source,
    { ...want, generation: offer.generation, state: 'idle', problems: [] },
    signal,
  );
  t.match(confirmed, [{ node: 'node-b', generation: '1-1', state: 'idle' }]);
  await puller.done(source, offer);
  t.equal(lab.volume.pins, 0);
});

t.test(
  'rclone: no token in its arguments, no configuration of the machine, a small environment',
  async (t) => {
    const dir = t.testdir();
    const fake = path.join(dir, 'rclone');
    await writeFile(fake, '#!/bin/sh\ncat /proc/$$/cmdline | tr "\\0" " "; env\n');
    await chmod(fake, 0o755);
    process.env.RCLONE_CONFIG_PASS = 'pass-from-outside';
    process.env.HTTP_PROXY = 'http://proxy';
    let out = '';
    await rcloneCat(
      { binary: fake, folder: 'http://x/transfer/1/', name: 'manifest', token: 'sv1.secret.x', signal },
      async (b) => {
        out += b;
      },
    );
    delete process.env.RCLONE_CONFIG_PASS;
    delete process.env.HTTP_PROXY;
    const [argv] = out.split('\n');
    t.notMatch(argv!, /secret/);
    t.match(argv!, /cat :webdav:manifest --config \/dev\/null --buffer-size 0 --transfers 1/);
    t.match(out, /RCLONE_WEBDAV_BEARER_TOKEN=sv1\.secret\.x/);
    t.notMatch(out, /pass-from-outside|http:\/\/proxy|no-check-certificate/i);
  },
);

t.test('a wrong grant: PULL_FAILED, and the grant is not in the message', async (t) => {
  const { lab, puller, source } = await setUp(t, t.testdir());
  await lab.volume.seal();
  const offer = await puller.offer(source, want, signal);
  const wrong = { ...source, token: lab.grant({ node: 'node-c' }) };
  const file = path.join(path.dirname(lab.volume.root), 'manifest');
  const unknown = await puller
    .manifest({ ...source, token: 'wrong' }, offer, file, signal)
    .catch((e: Error) => e);
  t.match(unknown, { code: 'PULL_FAILED', message: /401/ });
  const other = await puller.manifest(wrong, offer, file, signal).catch((e: Error) => e);
  t.match(other, { code: 'PULL_FAILED' });
  t.notMatch(String((other as Error).message), new RegExp(wrong.token));
});

t.test('rclone missing: RCLONE_MISSING', async (t) => {
  for (const rclone of [() => null, () => '/nonexistent/rclone']) {
    const { lab, puller, source } = await setUp(t, t.testdir(), { rclone });
    await lab.volume.seal();
    const offer = await puller.offer(source, want, signal);
    await t.rejects(puller.manifest(source, offer, path.join(path.dirname(lab.volume.root), 'm'), signal), {
      code: 'RCLONE_MISSING',
    });
  }
});

/** A WebDAV server that has one file and may cut its body. */
async function cutting(
  t: Tap.Test,
  content: Buffer,
  cut: (request: number) => number | 'hang',
): Promise<string> {
  let gets = 0;
  const server = createServer((request, response) => {
    const size = content.length;
    if (request.method === 'PROPFIND') {
      // rclone asks for the file, then for the folder with what is in it
      const folder = request.url?.endsWith('/');
      const entry = (href: string, props: string): string =>
        `<D:response><D:href>${href}</D:href><D:propstat><D:prop>${props}</D:prop><D:status>HTTP/1.1 200 OK</D:status></D:propstat></D:response>`;
      const file = `<D:getcontentlength>${size}</D:getcontentlength><D:resourcetype/>`;
      response.writeHead(207, { 'content-type': 'application/xml' });
      response.end(
        `<?xml version="1.0"?><D:multistatus xmlns:D="DAV:">${
          folder
            ? entry(request.url!, '<D:resourcetype><D:collection/></D:resourcetype>') +
              ['manifest', 'pack-0000'].map((n) => entry(request.url! + n, file)).join('')
            : entry(request.url!, file)
        }</D:multistatus>`,
      );
      return;
    }
    const from = Number(/bytes=(\d+)-/.exec(request.headers.range ?? '')?.[1] ?? 0);
    const at = cut(gets++);
    response.writeHead(from ? 206 : 200, {
      'content-length': size - from,
      ...(from ? { 'content-range': `bytes ${from}-${size - 1}/${size}` } : {}),
    });
    if (at === 'hang') return void response.write(content.subarray(0, size - 1));
    response.write(content.subarray(from, at), () => {
      if (at < size) response.destroy();
      else response.end();
    });
  });
  await new Promise<void>((resolve) => server.listen(0, '127.0.0.1', resolve));
  t.teardown(async () => {
    server.closeAllConnections();
    server.close();
  });
  return `http://127.0.0.1:${(server.address() as AddressInfo).port}`;
}
const offerOf = (bytes: number): Offer => ({
  id: '0'.repeat(32),
  generation: { epoch: 1, seq: 1 },
  base: null,
  lineage: [[1, 1]],
  manifest: { bytes, hash: '0'.repeat(64) },
  webdavPath: `/transfer/${'0'.repeat(32)}/`,
});
const packOf = (bytes: number) => ({ name: 'pack-0000', bytes, items: 1 });
const plain = (options: Partial<PullerOptions> = {}): Puller =>
  createPuller({
    http: createHttpClient(),
    rclone: () => binary,
    node: 'node-b',
    hashFile: native.hashFile,
    ...options,
  });

t.test('a source that cuts a pack: resumed when it goes on, else PULL_FAILED (A5, A19)', async (t) => {
  const content = Buffer.concat([
    randomBytes(400_000),
    Buffer.from('ffffffff00000000', 'hex'),
    Buffer.alloc(8),
  ]);
  const once = await cutting(t, content, (n) => (n === 0 ? 150_000 : content.length));
  const source = { url: once, webdavUrl: once, token: 'x', node: 'a' };
  const got: Buffer[] = [];
  await plain().pack(source, offerOf(9), packOf(1), async (b) => void got.push(Buffer.from(b)), signal);
  t.ok(Buffer.concat(got).equals(content), 'continued where it was cut');
  const always = await cutting(t, content, () => 150_000);
  await t.rejects(
    plain().pack({ ...source, webdavUrl: always }, offerOf(9), packOf(1), async () => undefined, signal),
    { code: 'PULL_FAILED' },
  );
  const noEnd = await cutting(t, content.subarray(0, 400_000), () => 400_000);
  await t.rejects(
    plain().pack({ ...source, webdavUrl: noEnd }, offerOf(9), packOf(1), async () => undefined, signal),
    { code: 'PULL_FAILED', message: /cut short/ },
    'a stream without its end record is not whole, whatever rclone says',
  );
});

t.test('a manifest of another length or with another hash is refused', async (t) => {
  const dir = t.testdir();
  const content = randomBytes(1000);
  const url = await cutting(t, content, () => 1000);
  const source = { url, webdavUrl: url, token: 'x', node: 'a' };
  const file = path.join(dir, 'm');
  await t.rejects(plain().manifest(source, offerOf(999), file, signal), {
    code: 'PULL_FAILED',
    message: /longer/,
  });
  await t.rejects(plain().manifest(source, offerOf(1001), file, signal), {
    code: 'PULL_FAILED',
    message: /1000 of 1001/,
  });
  await t.rejects(plain().manifest(source, offerOf(1000), file, signal), { code: 'VERIFY_FAILED' });
});

const groupsOf = async (needle: string): Promise<string[]> => {
  const { readdir } = await import('node:fs/promises');
  const found: string[] = [];
  for (const pid of await readdir('/proc'))
    if (/^\d+$/.test(pid)) {
      const env = await readFile(`/proc/${pid}/environ`, 'latin1').catch(() => '');
      if (env.includes(needle)) found.push(pid);
    }
  return found;
};

t.test(
  'a source that hangs: given up after the stall time; cancelled: at once; no process stays',
  async (t) => {
    const url = await cutting(t, randomBytes(3_000_000), () => 'hang');
    const token = `t${randomBytes(8).toString('hex')}`;
    const source = { url, webdavUrl: url, token, node: 'a' };
    const puller = plain({ stallMs: 500, graceMs: 200 });
    await t.rejects(
      puller.pack(source, offerOf(9), packOf(1), async () => undefined, signal),
      { code: 'PULL_FAILED', message: /no byte for 0.5 s/ },
    );
    t.same(await groupsOf(token), []);
    const stop = new AbortController();
    const pull = plain().pack(source, offerOf(9), packOf(1), async () => stop.abort(), stop.signal);
    await t.rejects(pull, { code: 'CANCELLED' });
    t.same(await groupsOf(token), []);
  },
);

t.test(
  'rclone stopped (SIGSTOP), killed, or with a child of its own: bounded, and the group is gone',
  async (t) => {
    const url = await cutting(t, randomBytes(3_000_000), () => 'hang');
    const token = `t${randomBytes(8).toString('hex')}`;
    const source = { url, webdavUrl: url, token, node: 'a' };
    const on = (sig: NodeJS.Signals) => async () => {
      for (const pid of await groupsOf(token)) process.kill(Number(pid), sig);
    };
    const puller = plain({ stallMs: 700, graceMs: 200 });
    await t.rejects(puller.pack(source, offerOf(9), packOf(1), on('SIGSTOP'), signal), {
      code: 'PULL_FAILED',
      message: /no byte/,
    });
    await t.rejects(puller.pack(source, offerOf(9), packOf(1), on('SIGKILL'), signal), {
      code: 'PULL_FAILED',
      message: /killed by SIGKILL/,
    });
    t.same(await groupsOf(token), []);
    const fake = path.join(t.testdir(), 'rclone');
    await writeFile(fake, '#!/bin/sh\ntrap "" TERM\nsleep 300 &\nsleep 300\n');
    await chmod(fake, 0o755);
    await t.rejects(
      plain({ stallMs: 300, graceMs: 200, rclone: () => fake }).pack(
        source,
        offerOf(9),
        packOf(1),
        async () => undefined,
        signal,
      ),
      { code: 'PULL_FAILED' },
    );
    await sleep(50);
    t.same(await groupsOf(token), []);
  },
);

t.test(
  'the receiver failing ends rclone and is what the caller sees; its slowness is no stall',
  async (t) => {
    const content = Buffer.concat([
      randomBytes(300_000),
      Buffer.from('ffffffff00000000', 'hex'),
      Buffer.alloc(8),
    ]);
    const url = await cutting(t, content, () => content.length);
    const source = { url, webdavUrl: url, token: 'x', node: 'a' };
    const full = new Error('disk full');
    await t.rejects(
      plain().pack(source, offerOf(9), packOf(1), () => Promise.reject(full), signal),
      full,
    );
    let slow = 0;
    await plain({ stallMs: 400 }).pack(
      source,
      offerOf(9),
      packOf(1),
      async () => {
        if (slow++ === 0) await sleep(1000);
      },
      signal,
    );
    t.ok(slow > 1);
  },
);

t.test('two pulls at a time; one that waits can be cancelled', async (t) => {
  const url = await cutting(t, randomBytes(3_000_000), () => 'hang');
  const source = { url, webdavUrl: url, token: `t${randomBytes(8).toString('hex')}`, node: 'a' };
  const puller = plain({ graceMs: 100 });
  const stop = new AbortController();
  const began = new Set<number>();
  const pulls = [1, 2, 3].map((i) =>
    puller.pack(source, offerOf(9), packOf(1), async () => void began.add(i), stop.signal),
  );
  const results = Promise.allSettled(pulls);
  for (let i = 0; began.size < 2 && i < 100; i++) await sleep(50);
  t.equal(began.size, 2);
  t.equal((await groupsOf(source.token)).length, 2);
  stop.abort();
  for (const r of await results) t.match(r, { status: 'rejected', reason: { code: 'CANCELLED' } });
});

t.test(
  "what the source answers is checked: an offer or pack name cannot lead elsewhere (rclone's argument)",
  async (t) => {
    const answers: unknown[] = [];
    const server = createServer((_q, r) => r.end(JSON.stringify(answers.shift())));
    await new Promise<void>((resolve) => server.listen(0, '127.0.0.1', resolve));
    const url = `http://127.0.0.1:${(server.address() as AddressInfo).port}`;
    t.teardown(async () => {
      server.closeAllConnections();
      server.close();
    });
    const source = { url, webdavUrl: url, token: 'x', node: 'a' };
    const good = { ...offerOf(50), generation: '1-1', base: null };
    for (const change of [
      { id: '../../x' },
      { webdavPath: '/browse/' },
      { manifest: { bytes: -1, hash: good.manifest.hash } },
      { manifest: { bytes: 5, hash: 'x' } },
      { lineage: 'x' },
      { generation: 7 },
    ]) {
      answers.push({ ...good, ...change });
      await t.rejects(plain().offer(source, want, signal), { code: 'PULL_FAILED' }, JSON.stringify(change));
    }
    answers.push(good);
    t.match(await plain().offer(source, want, signal), { generation: { epoch: 1, seq: 1 } });
    for (const name of ['../x', '--config=x', 'pack-1;x', 'manifest', 5]) {
      answers.push({ packs: [{ name, bytes: 1, items: 1 }] });
      await t.rejects(
        plain().needs(source, offerOf(9), new Uint32Array(), signal),
        { code: 'PULL_FAILED' },
        String(name),
      );
    }
  },
);

t.test('H1: thousands of small files cost a handful of rclone processes, not one each', async (t) => {
  const folder = t.testdir({ lab: {} });
  const counted = path.join(folder, 'rclone');
  const runs = path.join(folder, 'runs');
  await writeFile(counted, `#!/bin/sh\necho run >> '${runs}'\nexec '${binary}' "$@"\n`, { mode: 0o755 });
  const { lab, puller, source } = await setUp(t, path.join(folder, 'lab'), { rclone: () => counted });
  const base = path.dirname(lab.volume.root);
  for (let i = 0; i < 2000; i++) await writeFile(`${lab.volume.root}/f${i}`, `content ${i}`);
  await lab.volume.seal();
  const offer = await puller.offer(source, want, signal);
  const { ordinals } = await allFiles(puller, source, offer, path.join(base, 'manifest'));
  t.equal(ordinals.length, 2000);
  let bytes = 0;
  for (const pack of await puller.needs(source, offer, ordinals, signal))
    await puller.pack(
      source,
      offer,
      pack,
      async (chunk) => {
        bytes += chunk.length;
      },
      signal,
    );
  t.ok(bytes > 2000 * 10);
  const count = (await readFile(runs, 'utf8')).trim().split('\n').length;
  t.ok(count <= 3, `${count} processes`);
});

t.test('A20: what is not there is never a success', async (t) => {
  const { lab, puller, source } = await setUp(t, t.testdir());
  await lab.volume.seal();
  const offer = await puller.offer(source, want, signal);
  const file = path.join(path.dirname(lab.volume.root), 'manifest');
  const gone = { ...offer, id: '0'.repeat(32), webdavPath: `/transfer/${'0'.repeat(32)}/` };
  await t.rejects(puller.manifest(source, gone, file, signal), { code: 'PULL_FAILED' });
  await t.rejects(
    puller.pack(source, offer, { name: 'pack-0999', bytes: 10, items: 1 }, async () => {}, signal),
    { code: 'PULL_FAILED' },
  );
});
