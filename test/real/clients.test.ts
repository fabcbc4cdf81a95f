import { mkdirSync, mkdtempSync, readFileSync, rmSync, statSync, symlinkSync, writeFileSync } from 'node:fs';
import { tmpdir } from 'node:os';
import { join } from 'node:path';
import t from 'tap';
import { findRclone } from '../../lib/transfer/rclone-binary.ts';
import { type LocalCluster, must, needs, replicate, run, startCluster } from './harness.ts';

t.setTimeout(280_000);
const VOLUME = { namespace: 'real', volume: 'site' };
const at = '/browse/real/site';
// Names that break URLs, listings and shells; all are UTF-8 because WebDAV carries them in XML.
const NAMES = [
  'plain.txt',
  'a b',
  '100%',
  'x%41',
  'hash#1',
  'q?a=1',
  'a:b',
  'é',
  'e\u0301',
  '<b>&"\'',
  ';-rf',
  '[1].txt',
  'semi;colon',
  '+plus',
  '日本',
];

let cluster: LocalCluster;
let guarded: LocalCluster;
const scratch = mkdtempSync(join(tmpdir(), 'simple-volume-clients-'));
t.teardown(() => rmSync(scratch, { recursive: true, force: true }));

const content = (name: string): string => `contents of ${JSON.stringify(name)}\n`;

t.before(async () => {
  cluster = await startCluster(t, { flags: ['--browse-auth', 'off'] });
  guarded = await startCluster(t, { nodes: ['a', 'b', 'c'] });
  for (const one of [cluster, guarded]) {
    const live = one.agent('a').live(VOLUME);
    mkdirSync(join(live, 'folder', 'deep'), { recursive: true });
    for (const name of NAMES) writeFileSync(join(live, name), content(name));
    writeFileSync(join(live, 'folder', 'deep', 'big.bin'), Buffer.alloc(3_000_000, 7));
    writeFileSync(join(live, 'empty'), '');
    symlinkSync('/etc/passwd', join(live, 'link'));
    await replicate(one, VOLUME);
  }
});

t.test(
  'curl: listing, whole and partial reads, conditions, and nothing that writes',
  { skip: needs('curl') },
  async (t) => {
    const base = `${cluster.agent('a').webdavUrl}${at}`;
    const curl = (...args: string[]): Promise<string> => must('curl', ['-sS', '--max-time', '20', ...args]);
    const listing = await curl('-X', 'PROPFIND', '-H', 'Depth: 1', `${base}/`);
    t.match(listing, /multistatus/i);
    for (const name of NAMES) {
      const url = `${base}/${encodeURIComponent(name)}`;
      t.equal(await curl(url), content(name), name);
    }
    const head = await curl('-I', `${base}/folder/deep/big.bin`);
    t.match(head, /content-length: 3000000/i);
    const etag = /etag: (\S+)/i.exec(head)?.[1] as string;
    t.match(head, /last-modified: /i);
    t.equal(
      await curl(
        '-o',
        '/dev/null',
        '-w',
        '%{http_code}',
        '-H',
        `If-None-Match: ${etag}`,
        `${base}/folder/deep/big.bin`,
      ),
      '304',
    );
    t.equal(
      await curl(
        '-o',
        join(scratch, 'part'),
        '-w',
        '%{http_code}',
        '-r',
        '1000000-1000099',
        `${base}/folder/deep/big.bin`,
      ),
      '206',
    );
    t.equal(statSync(join(scratch, 'part')).size, 100);
    for (const method of ['PUT', 'DELETE', 'MKCOL', 'MOVE', 'COPY', 'PROPPATCH', 'LOCK']) {
      const code = await curl(
        '-o',
        '/dev/null',
        '-w',
        '%{http_code}',
        '-X',
        method,
        '-d',
        'x',
        `${base}/plain.txt`,
      );
      t.match(code, /^(405|501|403)$/, `${method} is refused`);
    }
    t.equal(readFileSync(join(cluster.agent('a').live(VOLUME), 'plain.txt'), 'utf8'), content('plain.txt'));
    for (const path of [
      '/link',
      '/%2e%2e/%2e%2e/etc/passwd',
      '/folder/..%2f..%2f..%2fetc/passwd',
      '/%ff',
      '/%00',
    ]) {
      const code = await curl(
        '--path-as-is',
        '-o',
        join(scratch, 'out'),
        '-w',
        '%{http_code}',
        `${base}${path}`,
      );
      t.match(code, /^4\d\d$/, `${path} leads nowhere`);
      t.notMatch(readFileSync(join(scratch, 'out'), 'utf8'), /root:/);
    }
    t.equal(
      await curl('-o', '/dev/null', '-w', '%{http_code}', `${base}/plain.txt`),
      '200',
      'and the server is still there',
    );
  },
);

t.test('curl: with a token asked for, nothing is told without it', { skip: needs('curl') }, async (t) => {
  const agent = guarded.agent('a');
  const url = `${agent.webdavUrl}${at}/plain.txt`;
  const code = (...args: string[]): Promise<string> =>
    must('curl', ['-sS', '-o', '/dev/null', '-w', '%{http_code}', ...args, url]);
  t.equal(await code(), '401');
  t.equal(await code('-H', 'Authorization: Bearer wrong-wrong-wrong-wrong'), '401');
  t.equal(await code('-H', `Authorization: Bearer ${agent.token}`), '200');
  t.equal(await code('-u', `anybody:${agent.token}`), '200');
});

t.test('rclone: lists and copies the tree as an ordinary WebDAV remote', async (t) => {
  const rclone = await findRclone();
  const env = {
    RCLONE_CONFIG: '/dev/null',
    RCLONE_CONFIG_SV_TYPE: 'webdav',
    RCLONE_CONFIG_SV_URL: `${guarded.agent('a').webdavUrl}${at}`,
    RCLONE_CONFIG_SV_VENDOR: 'other',
    RCLONE_CONFIG_SV_BEARER_TOKEN: guarded.agent('a').token,
  };
  const target = join(scratch, 'rclone');
  await must(
    rclone.path,
    ['copy', 'sv:', target, '--no-unicode-normalization', '--local-unicode-normalization=false'],
    { env },
  );
  for (const name of NAMES) t.equal(readFileSync(join(target, name), 'utf8'), content(name), name);
  t.ok(readFileSync(join(target, 'folder/deep/big.bin')).equals(Buffer.alloc(3_000_000, 7)));
});

t.test('cadaver: lists and fetches', { skip: needs('cadaver') }, async (t) => {
  const out = join(scratch, 'fetched.txt');
  const url = `${cluster.agent('a').webdavUrl}${at}/`;
  const ended = await run('cadaver', [url], {
    input: `ls\nget plain.txt ${out}\ncd folder\nls\nquit\n`,
    env: { HOME: scratch },
  });
  t.match(ended.stdout, /plain\.txt/);
  t.match(ended.stdout, /deep/);
  t.equal(readFileSync(out, 'utf8'), content('plain.txt'));
});

t.test('Chromium: shows the volume as a page', { skip: needs('chromium'), timeout: 120_000 }, async (t) => {
  const chromium = (...args: string[]): Promise<string> =>
    must(
      'chromium',
      [
        ...[
          '--headless',
          '--no-sandbox',
          '--disable-gpu',
          '--disable-quic',
          '--no-first-run',
          '--hide-scrollbars',
        ],
        ...[
          '--disable-background-networking',
          '--disable-component-update',
          '--disable-sync',
          '--disable-dev-shm-usage',
        ],
        ...[
          `--user-data-dir=${join(scratch, 'chromium')}`,
          '--window-size=1000,800',
          '--timeout=20000',
          ...args,
        ],
      ],
      { limitMs: 60_000, env: { HOME: scratch } },
    );
  const url = `${cluster.agent('a').webdavUrl}${at}/`;
  const dom = await chromium('--dump-dom', url);
  for (const name of ['plain.txt', 'a b', '100%', 'x%41', 'hash#1', '日本'])
    t.match(dom, name, `${name} is listed`);
  t.match(dom, /&lt;b&gt;&amp;/, 'a name that looks like markup is text');
  const picture = join(scratch, 'page.png');
  await chromium(`--screenshot=${picture}`, url);
  const png = readFileSync(picture);
  t.equal(png.subarray(1, 4).toString(), 'PNG');
  t.equal(png.readUInt32BE(16), 1000, 'width of the window');
  t.ok(png.length > 5000, `a page with something on it (${png.length} bytes)`);
});
