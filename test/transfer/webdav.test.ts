import { execFile } from 'node:child_process';
import { randomBytes } from 'node:crypto';
import {
  chmod,
  link,
  mkdir,
  mkdtemp,
  readFile,
  rename,
  rm,
  symlink,
  utimes,
  writeFile,
} from 'node:fs/promises';
import net from 'node:net';
import { tmpdir } from 'node:os';
import path from 'node:path';
import { setTimeout as sleep } from 'node:timers/promises';
import { promisify } from 'node:util';
import fc from 'fast-check';
import t from 'tap';
import { escapeName } from '../../lib/transfer/http.ts';
import { type Lab, openFiles, startLab, testRclone } from './support.ts';

const run = promisify(execFile);
const BROWSE = '/browse/default/world';

/** Sends bytes as they are; gives the whole answer. */
function raw(lab: Lab, request: string, keepMs = 2000): Promise<string> {
  return new Promise((resolve) => {
    const socket = net.connect(Number(new URL(lab.url).port), '127.0.0.1');
    const parts: Buffer[] = [];
    const done = (): void => {
      socket.destroy();
      resolve(Buffer.concat(parts).toString('latin1'));
    };
    socket.on('data', (b: Buffer) => parts.push(b));
    socket.on('close', done);
    socket.on('error', done);
    socket.setTimeout(keepMs, done);
    socket.write(Buffer.from(request, 'latin1'));
  });
}
const bearer = (lab: Lab): string => `Authorization: Bearer ${lab.token}\r\n`;
const status = (answer: string): number => Number(answer.split(' ')[1] ?? 0);
const get = (lab: Lab, target: string, method = 'GET', more = ''): Promise<string> =>
  raw(lab, `${method} ${target} HTTP/1.1\r\nHost: x\r\nConnection: close\r\n${bearer(lab)}${more}\r\n`);

t.test(
  'the index is what is seen: listing, content, HEAD and PROPFIND agree on every name (D1-D7, D9)',
  async (t) => {
    // a short path: one name has 255 bytes and the folder is listed by the kernel, not by us
    const base = await mkdtemp(path.join(tmpdir(), 'sv-names-'));
    const lab = await startLab(base);
    t.teardown(async () => {
      await lab.close();
      await rm(base, { recursive: true, force: true });
    });
    const b = (s: string): Buffer => Buffer.from(s, 'latin1');
    const names = [
      b('\xc3\xa9'),
      b('e\xcc\x81'), // D1 twins
      b('hash#1'),
      b('q?a=1'),
      b('100%'),
      b('x%41'),
      b('x%25'),
      b('xA'), // D2
      b('a:b'), // D3
      b('a\nb'),
      b('tab\t'),
      b('ctl\x01\x02'),
      b('del\x7f'),
      b('cr\r'), // D4
      b(' lead'),
      b('trail '),
      b('-rf'),
      b('#x'),
      b(';y'), // D5
      b('a[1].txt'),
      b('{x}.txt'),
      b('*.txt'),
      b('b.txt'), // D6
      Buffer.alloc(255, 'n'),
      b(`${'t'.repeat(130)}0123456789`),
      b(`${'t'.repeat(130)}abcdefghij`), // D7
      b('bad-\xff\xfe'),
      Buffer.from('bad-‛FF‛FE'), // D9
      b('back\\slash'),
      b('"quoted"'),
      b("it's"),
      b('<b>&amp;'),
      b('...'),
      b('..x'),
      b('.hidden'),
      b('+plus'),
      b('ünïx'),
    ];
    const data = Buffer.from(`${lab.volume.root}/`);
    for (const n of names) await writeFile(Buffer.concat([data, n]), Buffer.concat([b('content of '), n]));
    for (const d of [b('d#h'), b('c:')]) {
      await mkdir(Buffer.concat([data, d]));
      await writeFile(Buffer.concat([data, d, b('/x')]), Buffer.concat([b('x in '), d]));
    }
    await lab.volume.seal();
    const list = await (
      await lab.fetch(`${BROWSE}/`, { method: 'PROPFIND', headers: { depth: '1' } })
    ).text();
    const html = await (await lab.fetch(`${BROWSE}/`)).text();
    for (const n of names) {
      const shown = JSON.stringify(n.toString('latin1'));
      const target = `${BROWSE}/${escapeName(n)}`;
      const want = Buffer.concat([b('content of '), n]);
      const r = await lab.fetch(target);
      t.equal(r.status, 200, shown);
      t.ok(Buffer.from(await r.arrayBuffer()).equals(want), `${shown} content`);
      const head = await lab.fetch(target, { method: 'HEAD' });
      t.equal(head.headers.get('content-length'), String(want.length), `${shown} HEAD`);
      t.equal(head.headers.get('etag'), r.headers.get('etag'));
      const self = await (await lab.fetch(target, { method: 'PROPFIND', headers: { depth: '0' } })).text();
      t.match(self, `<D:getcontentlength>${want.length}<`, `${shown} PROPFIND`);
      t.ok(list.includes(`<D:href>${target}</D:href>`), `${shown} in the folder's PROPFIND`);
      t.ok(html.includes(`href="${target}"`), `${shown} on the page`);
    }
    t.equal(list.match(/<D:response>/g)?.length, names.length + 3);
    t.notMatch(list, /[\u0000-\u0009\u000b-\u001f\u007f]/, 'no control character makes the XML unreadable');
    for (const [target, text] of [
      ['/d%23h/x', 'x in d#h'],
      ['/c%3A/x', 'x in c:'],
      ['/c:/x', 'x in c:'],
      ['/./a:b', 'content of a:b'],
      ['/%61%3a%62', 'content of a:b'],
    ])
      t.ok((await get(lab, BROWSE + target)).endsWith(text!), target!);

    const rclone = await testRclone();
    const copy = path.join(base, 'copy');
    await run(
      rclone,
      [
        'copy',
        ':webdav:',
        copy,
        '--config',
        '/dev/null',
        '--local-encoding',
        'Slash',
        '--webdav-encoding',
        'Slash',
        '--no-unicode-normalization',
      ],
      {
        env: {
          PATH: process.env.PATH,
          RCLONE_WEBDAV_URL: lab.url + BROWSE,
          RCLONE_WEBDAV_BEARER_TOKEN: lab.token,
          RCLONE_WEBDAV_PACER_MIN_SLEEP: '1ms',
        },
      },
    ).catch(() => undefined);
    // rclone writes what is not UTF-8 with U+201B and so cannot ask for a name that really has one; packs can (D9)
    for (const n of names.filter((n) => !n.includes('‛'))) {
      const got = await readFile(Buffer.concat([Buffer.from(`${copy}/`), n])).catch(() => null);
      t.ok(
        got?.equals(Buffer.concat([b('content of '), n])),
        `rclone copies ${JSON.stringify(n.toString('latin1'))}`,
      );
    }
  },
);

t.test('requests that end other servers: answered, and the server goes on', async (t) => {
  const lab = await startLab(t.testdir());
  t.teardown(() => lab.close());
  await writeFile(`${lab.volume.root}/f`, 'fine');
  await symlink('/etc', `${lab.volume.root}/etc`);
  await symlink('/etc/passwd', `${lab.volume.root}/passwd`);
  await lab.volume.seal();
  const body = (n: string): string => `Content-Length: ${n}\r\nDepth: 0\r\n`;
  const cases: [string, () => Promise<string>, number][] = [
    ['GET /%ff', () => get(lab, '/%ff'), 404],
    ['GET /browse/.../%ff', () => get(lab, `${BROWSE}/%ff`), 404],
    ['GET /%zz', () => get(lab, '/%zz'), 400],
    ['GET /%', () => get(lab, '/%'), 400],
    ['GET /x%00y', () => get(lab, '/x%00y'), 400],
    ['PROPFIND /%ff', () => get(lab, '/%ff', 'PROPFIND', 'Depth: 0\r\n'), 404],
    ['OPTIONS /%zz', () => get(lab, '/%zz', 'OPTIONS'), 400],
    ['Content-Length over 4 GiB', () => get(lab, '/', 'PROPFIND', body('5000000000')), 413],
    ['Content-Length beyond 2^64', () => get(lab, '/', 'PROPFIND', body('99999999999999999999999')), 400],
    ['Content-Length negative', () => get(lab, '/', 'PROPFIND', body('-1')), 400],
    ['Content-Length 1.5 GB', () => get(lab, '/', 'PROPFIND', body('1500000000')), 413],
    [
      'a header that only looks like Content-Length',
      () => get(lab, '/', 'OPTIONS', 'contentlength: 99999999999999\r\n'),
      200,
    ],
    [
      'a chunked body without end',
      () =>
        get(
          lab,
          '/',
          'PROPFIND',
          `Depth: 0\r\nTransfer-Encoding: chunked\r\n\r\n${'1000\r\n'}${'x'.repeat(4096)}\r\n`.repeat(1) +
            `1000\r\n${'x'.repeat(4096)}\r\n`.repeat(20),
        ),
      413,
    ],
    ['PROPFIND without Depth', () => get(lab, `${BROWSE}/`, 'PROPFIND'), 403],
    ['PROPFIND Depth: infinity', () => get(lab, `${BROWSE}/`, 'PROPFIND', 'Depth: infinity\r\n'), 403],
    ['PROPFIND Depth: 7', () => get(lab, `${BROWSE}/`, 'PROPFIND', 'Depth: 7\r\n'), 400],
    ['..', () => get(lab, `${BROWSE}/../../../etc/passwd`), 400],
    ['%2e%2e', () => get(lab, `${BROWSE}/%2e%2e/%2e%2e/etc/passwd`), 400],
    ['%2f', () => get(lab, `${BROWSE}/..%2f..%2fetc%2fpasswd`), 400],
    ['%5c', () => get(lab, `${BROWSE}/..%5c..%5cetc`), 404],
    ['%252e', () => get(lab, `${BROWSE}/%252e%252e/etc/passwd`), 404],
    ['a symlink out of the volume', () => get(lab, `${BROWSE}/passwd`), 403],
    ['below a symlink out of the volume (D14)', () => get(lab, `${BROWSE}/etc/passwd`), 404],
    ['malformed XML', () => get(lab, '/', 'PROPFIND', 'Depth: 0\r\nContent-Length: 5\r\n\r\n<<<>>'), 207],
    ['32 KiB of headers', () => get(lab, '/', 'GET', `X: ${'x'.repeat(32_768)}\r\n`), 431],
    ['no Host', () => raw(lab, 'GET / HTTP/1.1\r\nConnection: close\r\n\r\n'), 400],
    ['no HTTP at all', () => raw(lab, '\x16\x03\x01\x02\x00\x01\x00\r\n\r\n'), 400],
    ['an absolute target', () => get(lab, 'http://169.254.169.254/latest'), 400],
    ['CONNECT', () => get(lab, 'x:80', 'CONNECT'), 0],
    ['an upgrade', () => get(lab, '/browse/', 'GET', 'Upgrade: websocket\r\nConnection: upgrade\r\n'), 200],
    ['dead properties (PROPPATCH)', () => get(lab, `${BROWSE}/f`, 'PROPPATCH'), 405],
    ['LOCK', () => get(lab, `${BROWSE}/f`, 'LOCK'), 405],
  ];
  for (const method of [
    'PUT',
    'DELETE',
    'MKCOL',
    'MOVE',
    'COPY',
    'POST',
    'PATCH',
    'UNLOCK',
    'TRACE',
    'SEARCH',
    'REPORT',
    'ACL',
  ])
    cases.push([method, () => get(lab, `${BROWSE}/f`, method), 405]);
  for (const [name, ask, want] of cases) {
    const answer = await ask();
    t.equal(status(answer), want, name);
    if (want === 405) t.match(answer, /allow: OPTIONS, GET, HEAD, PROPFIND/i, name);
    t.notMatch(answer, /access-control|root:x:0/i, name);
  }
  t.match(await get(lab, `${BROWSE}/`, 'PROPFIND'), /propfind-finite-depth/);
  t.match(await get(lab, `${BROWSE}/f`), /200 OK[\s\S]*fine$/, 'still there');
  t.same(
    lab.log.lines.filter((l) => l.level === 'error'),
    [],
    'nothing of that is an error of ours',
  );
});

t.test(
  'random requests: always an answer or a closed connection, never the end of the process',
  async (t) => {
    const lab = await startLab(t.testdir(), { browseAuth: false });
    t.teardown(() => lab.close());
    await writeFile(`${lab.volume.root}/f`, 'fine');
    await lab.volume.seal();
    const bits = fc.string({ unit: 'binary', maxLength: 30 });
    const method = fc.constantFrom('GET', 'HEAD', 'PROPFIND', 'OPTIONS', 'PUT', 'LOCK');
    const start = fc.constantFrom('/', '/browse/', `${BROWSE}/`, `${BROWSE}/f`, '/transfer/', '*', '');
    const header = fc.constantFrom(
      'Depth',
      'Range',
      'If-Range',
      'If-None-Match',
      'If-Modified-Since',
      'Authorization',
      'Content-Length',
      'Expect',
      'If',
      'Destination',
      'Transfer-Encoding',
      'Upgrade',
      'Host',
    );
    await fc.assert(
      fc.asyncProperty(
        method,
        start,
        bits,
        fc.array(fc.tuple(header, bits), { maxLength: 4 }),
        bits,
        async (m, s, tail, headers, body) => {
          const lines = headers.map(([k, v]) => `${k}: ${v.replace(/[\r\n]/g, '')}\r\n`).join('');
          const target = s + tail.replace(/[\s]/g, '');
          const answer = await raw(
            lab,
            `${m} ${target} HTTP/1.1\r\nHost: x\r\nConnection: close\r\n${lines}\r\n${body}`,
            150,
          );
          return answer === '' || (/^HTTP\/1\.1 \d{3} /.test(answer) && !/^HTTP\/1\.1 500/.test(answer));
        },
      ),
      { numRuns: 300 },
    );
    t.match(await get(lab, `${BROWSE}/f`), /200 OK[\s\S]*fine$/);
    t.same(
      lab.log.lines.filter((l) => l.level === 'error'),
      [],
    );
  },
);

t.test('who may see what (F1)', async (t) => {
  const lab = await startLab(t.testdir());
  const open = await startLab(`${t.testdirName}/second`, { browseAuth: false });
  t.teardown(async () => {
    await lab.close();
    await open.close();
  });
  await writeFile(`${lab.volume.root}/f`, 'fine');
  await lab.volume.seal();
  await open.volume.seal();
  const code = async (target: string, authorization?: string, on: Lab = lab): Promise<number> =>
    (await on.fetch(target, { anonymous: true, headers: authorization ? { authorization } : {} })).status;
  const basic = (user: string, password: string): string =>
    `Basic ${Buffer.from(`${user}:${password}`).toString('base64')}`;
  for (const target of [
    '/',
    '/browse/',
    '/browse/default/',
    BROWSE,
    `${BROWSE}/f`,
    `${BROWSE}/none`,
    '/transfer/',
    '/none',
  ]) {
    t.equal(await code(target), 401, `${target} without a token`);
    t.equal(await code(target, 'Bearer wrong'), 401);
    t.equal(await code(target, basic('me', 'wrong')), 401);
    t.equal(await code(target, 'Basic %%%'), 401);
  }
  t.match((await lab.fetch('/', { anonymous: true })).headers.get('www-authenticate'), /^Basic realm=/);
  t.equal(await code(`${BROWSE}/f`, basic('anyone', lab.token)), 200, 'a token with + and / as password');
  t.equal(await code(`${BROWSE}/f`, `Bearer ${lab.grant()}`), 403, 'a grant is for transfers');
  t.equal(await code('/', undefined, open), 200, 'open browsing');
  t.equal(await code(`${BROWSE}/`, undefined, open), 200);
  t.equal(await code('/transfer/x/manifest', undefined, open), 401, 'transfers are never open');
  t.equal(await code('/transfer/'), 401);
  const offer = await lab.offers.create(lab.volume, lab.volume.offers, {
    epoch: 1,
    node: 'node-b',
    have: null,
    full: false,
  });
  const manifest = `${offer.webdavPath}manifest`;
  t.equal(await code(manifest, `Bearer ${lab.grant()}`), 200);
  t.equal(await code(manifest, `Bearer ${lab.token}`), 200);
  for (const change of [{ node: 'node-c' }, { volume: 'other' }, { namespace: 'other' }, { epoch: 2 }])
    t.equal(await code(manifest, `Bearer ${lab.grant(change)}`), 404, JSON.stringify(change));
  for (const file of ['index', 'runs', 'pack-0000', 'manifest/x', ''])
    t.equal(await code(`${offer.webdavPath}${file}`, `Bearer ${lab.grant()}`), file === '' ? 200 : 404, file);
  const options = await lab.fetch('/', { method: 'OPTIONS', anonymous: true });
  t.equal(options.status, 200);
  t.equal(options.headers.get('dav'), '1');
  t.equal(options.headers.get('allow'), 'OPTIONS, GET, HEAD, PROPFIND');
  for (const name of [
    'access-control-allow-origin',
    'access-control-allow-credentials',
    'ms-author-via',
    'server',
  ])
    t.equal(options.headers.get(name), null, name);
});

t.test('Range, ETag and dates of a file', async (t) => {
  const lab = await startLab(t.testdir());
  t.teardown(() => lab.close());
  const data = randomBytes(700_000);
  await writeFile(`${lab.volume.root}/f`, data);
  await writeFile(`${lab.volume.root}/empty`, '');
  await utimes(`${lab.volume.root}/f`, 1_700_000_000.75, 1_700_000_000.75);
  await lab.volume.seal();
  const ask = async (headers: object, target = `${BROWSE}/f`, method = 'GET') => {
    const r = await lab.fetch(target, { headers: headers as Record<string, string>, method });
    return { status: r.status, h: r.headers, body: Buffer.from(await r.arrayBuffer()) };
  };
  const whole = await ask({});
  t.ok(whole.body.equals(data));
  t.equal(whole.h.get('last-modified'), 'Tue, 14 Nov 2023 22:13:20 GMT');
  t.equal(whole.h.get('accept-ranges'), 'bytes');
  const etag = whole.h.get('etag')!;
  for (const [range, from, to] of [
    ['bytes=0-0', 0, 1],
    ['bytes=-1024', 698_976, 700_000],
    ['bytes=300000-', 300_000, 700_000],
    ['bytes=5-699999,0-4', 0, 700_000],
  ] as const) {
    const r = await ask({ range });
    t.equal(r.status, 206, range);
    t.equal(r.h.get('content-range'), `bytes ${from}-${to - 1}/700000`);
    t.ok(r.body.equals(data.subarray(from, to)), range);
  }
  t.match(await ask({ range: 'bytes=0-1,5-6' }), { status: 200 });
  const beyond = await ask({ range: 'bytes=700000-' });
  t.equal(beyond.status, 416);
  t.equal(beyond.h.get('content-range'), 'bytes */700000');
  t.match(await ask({ range: 'bytes=0-9', 'if-range': etag }), { status: 206 });
  t.match(await ask({ range: 'bytes=0-9', 'if-range': '"other"' }), { status: 200 });
  t.match(await ask({ 'if-none-match': etag }), { status: 304 });
  t.match(await ask({ 'if-modified-since': whole.h.get('last-modified') }), { status: 304 });
  t.match(await ask({ 'if-match': '"other"' }), { status: 412 });
  const head = await ask({ range: 'bytes=0-9' }, undefined, 'HEAD');
  t.equal(head.status, 206);
  t.equal(head.h.get('content-length'), '10');
  const empty = await ask({}, `${BROWSE}/empty`);
  t.match(empty, { status: 200 });
  t.equal(empty.h.get('content-length'), '0');
  t.match(await ask({}, `${BROWSE}/none`), { status: 404 });
  await writeFile(`${lab.volume.root}/f`, randomBytes(700_000));
  await utimes(`${lab.volume.root}/f`, 1_700_000_000.75, 1_700_000_000.75);
  await lab.volume.seal();
  const after = await ask({ 'if-none-match': etag });
  t.equal(after.status, 200, 'same size, same mtime, other content: another ETag (D19)');
});

t.test('the page of a folder: no script, everything escaped, links shown and not followed', async (t) => {
  const lab = await startLab(t.testdir());
  t.teardown(() => lab.close());
  const { root } = lab.volume;
  await mkdir(`${root}/sub/deep/deeper`, { recursive: true });
  await writeFile(`${root}/sub/deep/deeper/f`, 'x');
  await writeFile(`${root}/<script>alert(1)<`, 'x');
  await writeFile(`${root}/page.html`, '<script>alert(1)</script>');
  await writeFile(`${root}/note.txt`, 'text');
  await symlink('../../<b>etc', `${root}/link`);
  await lab.volume.seal();
  lab.volume.quiescent = false;
  const r = await lab.fetch(BROWSE);
  const page = await r.text();
  t.match(r.headers.get('content-type'), /^text\/html/);
  t.match(r.headers.get('content-security-policy'), /default-src 'none'/);
  t.notMatch(page, /<script|<b>/);
  t.match(page, /link &rarr; \.\.\/\.\.\/&#60;b&#62;etc/);
  t.notMatch(page, /href="[^"]*\/link"/);
  t.match(page, /Generation 1-1/);
  t.match(page, /prefers-color-scheme/);
  t.notMatch(page, /deeper/);
  for (const [target, text] of [
    ['/', '/browse/'],
    ['/browse', '/browse/default/'],
    ['/browse/default', `${BROWSE}/`],
  ])
    t.match(await (await lab.fetch(target!)).text(), `href="${text}"`);
  for (const target of ['/browse/other/', '/browse/default/other/', '/browse/default/other/x', '/elsewhere'])
    t.equal((await lab.fetch(target)).status, 404, target);
  const list = await (await lab.fetch(`${BROWSE}/`, { method: 'PROPFIND', headers: { depth: '1' } })).text();
  t.notMatch(list, /link/, 'no symlink in a PROPFIND');
  t.equal((await lab.fetch(`${BROWSE}/link`)).status, 403);
  t.equal((await lab.fetch(`${BROWSE}/link`, { method: 'PROPFIND', headers: { depth: '0' } })).status, 403);
  const html = await lab.fetch(`${BROWSE}/page.html`);
  t.equal(
    html.headers.get('content-type'),
    'application/octet-stream',
    'a page in a volume is no page of ours',
  );
  t.match(html.headers.get('content-security-policy'), /sandbox/);
  t.equal(html.headers.get('x-content-type-options'), 'nosniff');
  t.match((await lab.fetch(`${BROWSE}/note.txt`)).headers.get('content-type'), /^text\/plain/);
  const head = await lab.fetch(BROWSE, { method: 'HEAD' });
  t.equal(head.status, 200);
  t.equal(await head.text(), '');
});

t.test('what is being read stays the generation that it was (A17)', async (t) => {
  const lab = await startLab(t.testdir());
  t.teardown(() => lab.close());
  const { root, retired } = lab.volume;
  const old = randomBytes(8_000_000);
  await writeFile(`${root}/f`, old);
  await lab.volume.seal();
  const r = await lab.fetch(`${BROWSE}/f`);
  const reader = r.body!.getReader();
  const first = await reader.read();
  await mkdir(`${retired}/2`, { recursive: true });
  await rename(`${root}/f`, `${retired}/2/f`);
  await writeFile(`${root}/f`, 'new');
  await lab.volume.seal();
  t.equal(await (await lab.fetch(`${BROWSE}/f`)).text(), 'new', 'a new request sees the new one');
  const parts = [Buffer.from(first.value!)];
  for (let p = await reader.read(); !p.done; p = await reader.read()) parts.push(Buffer.from(p.value));
  t.ok(Buffer.concat(parts).equals(old));
  for (let i = 0; lab.volume.pins > 1 && i < 50; i++) await sleep(20);
  t.equal(lab.volume.pins, 1, 'the old generation was given back with its last reader');
  await sleep(2200);
  t.equal(lab.volume.pins, 0, 'and the new one after a moment of nobody asking');
});

t.test('a file that is not what the index says is refused, whatever lies at its place', async (t) => {
  const lab = await startLab(t.testdir());
  t.teardown(() => lab.close());
  const { root } = lab.volume;
  await mkdir(`${root}/d`);
  for (const n of ['d/a', 'd/b', 'd/c', 'd/e', 'touched']) await writeFile(`${root}/${n}`, 'secret');
  await lab.volume.seal();
  await rm(`${root}/d/a`);
  await symlink('/etc/passwd', `${root}/d/a`);
  await rm(`${root}/d/b`);
  await run('mkfifo', [`${root}/d/b`]);
  await rm(`${root}/d/c`);
  await mkdir(`${root}/d/c`);
  // its inode must live on, else the new file may get the same number
  await rename(`${root}/d/e`, `${root}/kept`);
  await writeFile(`${root}/other`, 'secret');
  await link(`${root}/other`, `${root}/d/e`);
  await utimes(`${root}/touched`, 5, 5);
  for (const n of ['d/a', 'd/b', 'd/c', 'd/e']) {
    const r = await lab.fetch(`${BROWSE}/${n}`);
    t.equal(r.status, 503, n);
    t.match(await r.json(), { error: { code: 'CONTENT_CHANGED' } });
    t.equal(r.headers.get('retry-after'), '5');
  }
  t.equal(
    (await lab.fetch(`${BROWSE}/touched`)).status,
    200,
    'new times of a pinned file are not new contents',
  );
  await rename(`${root}/d`, `${root}/moved`);
  await symlink('moved', `${root}/d`);
  t.equal(
    (await lab.fetch(`${BROWSE}/d/e`)).status,
    503,
    'a folder that became a link is not walked through (D14)',
  );
  lab.volume.strict = true;
  await lab.volume.seal();
  await chmod(`${root}/touched`, 0o600);
  t.equal((await lab.fetch(`${BROWSE}/touched`)).status, 503, 'live consistency: ctime too');
});

t.test('a volume without a generation, one that applies, one that stops', async (t) => {
  const lab = await startLab(t.testdir());
  t.teardown(() => lab.close());
  const { SimpleVolumeError } = await import('../../lib/core/errors.ts');
  await writeFile(`${lab.volume.root}/f`, randomBytes(20_000_000));
  await lab.volume.seal();
  const { open } = lab.volume;
  for (const [code, want] of [
    ['APPLYING', 503],
    ['NOTHING_SEALED', 409],
  ] as const) {
    lab.volume.open = () => Promise.reject(new SimpleVolumeError(code, 'not now'));
    const r = await lab.fetch(`${BROWSE}/`);
    t.equal(r.status, want);
    t.match(await r.json(), { error: { code } });
  }
  lab.volume.open = open;
  const r = await lab.fetch(`${BROWSE}/f`);
  await lab.webdav.dropVolume(lab.volume);
  t.equal(lab.volume.pins, 0, 'pins are back at once');
  await t.rejects(r.arrayBuffer(), 'and the download is cut, not quietly short');
  const offer = await lab.offers.create(lab.volume, lab.volume.offers, {
    epoch: 1,
    node: 'node-b',
    have: null,
    full: false,
  });
  await lab.offers.needs(offer.id, lab.replica, Uint32Array.of(1));
  const pack = await lab.fetch(`${offer.webdavPath}pack-0000`);
  t.equal(pack.status, 200);
  await lab.offers.dropVolume(lab.volume);
  t.equal(lab.volume.pins, 0);
  await t.rejects(pack.arrayBuffer());
});

t.test('100 aborted downloads leave no file open', async (t) => {
  const lab = await startLab(t.testdir());
  t.teardown(() => lab.close());
  await writeFile(`${lab.volume.root}/f`, randomBytes(6_000_000));
  await lab.volume.seal();
  const offer = await lab.offers.create(lab.volume, lab.volume.offers, {
    epoch: 1,
    node: 'node-b',
    have: null,
    full: false,
  });
  await lab.offers.needs(offer.id, lab.replica, Uint32Array.of(1));
  await (await lab.fetch(`${offer.webdavPath}pack-0000`)).arrayBuffer();
  const before = openFiles().length;
  for (let i = 0; i < 100; i++) {
    const stop = new AbortController();
    const target =
      i % 3 === 0
        ? `${offer.webdavPath}pack-0000`
        : i % 3 === 1
          ? `${offer.webdavPath}manifest`
          : `${BROWSE}/f`;
    const r = await lab.fetch(target, { signal: stop.signal });
    await r.body!.getReader().read();
    stop.abort();
  }
  await sleep(300);
  const after = openFiles();
  t.equal(after.length, before, after.join('\n'));
  t.same(
    lab.log.lines.filter((l) => l.level === 'error'),
    [],
  );
});

t.test('a folder of 5,000 names: streamed, complete, in bounded time', async (t) => {
  const lab = await startLab(t.testdir());
  t.teardown(() => lab.close());
  await mkdir(`${lab.volume.root}/many`);
  for (let i = 0; i < 5000; i++) await writeFile(`${lab.volume.root}/many/file-${i}`, '');
  for (let i = 0; i < 50; i++) {
    await mkdir(`${lab.volume.root}/many/dir-${i}`);
    for (let k = 0; k < 20; k++) await writeFile(`${lab.volume.root}/many/dir-${i}/${k}`, '');
  }
  await lab.volume.seal();
  const list = await (
    await lab.fetch(`${BROWSE}/many`, { method: 'PROPFIND', headers: { depth: '1' } })
  ).text();
  t.equal(list.match(/<D:response>/g)?.length, 5051);
  t.equal(new Set(list.match(/<D:href>[^<]*/g)).size, 5051);
});

t.test('curl and cadaver read the tree', async (t) => {
  const lab = await startLab(t.testdir());
  t.teardown(() => lab.close());
  await mkdir(`${lab.volume.root}/saves`);
  await writeFile(`${lab.volume.root}/saves/one`, 'first save');
  await lab.volume.seal();
  const curl = await run('curl', [
    '-sf',
    '-u',
    `me:${lab.token}`,
    '-r',
    '6-',
    `${lab.url}${BROWSE}/saves/one`,
  ]);
  t.equal(curl.stdout, 'save');
  const dir = t.testdirName;
  await writeFile(`${dir}/.netrc`, `machine 127.0.0.1 login me password ${lab.token}\n`);
  const cadaver = await run(
    'sh',
    ['-c', `printf 'cd saves\\nls\\nget one ${dir}/got\\nquit\\n' | cadaver ${lab.url}${BROWSE}/`],
    { env: { ...process.env, HOME: dir } },
  ).catch((e: Error) => ({ stdout: e.message }));
  t.match(cadaver.stdout, /one/, 'cadaver lists');
  t.equal(await readFile(`${dir}/got`, 'utf8').catch(() => ''), 'first save', 'cadaver gets');
});
