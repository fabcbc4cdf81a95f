import { chmodSync, mkdirSync, mkdtempSync, readFileSync, rmSync, symlinkSync, writeFileSync } from 'node:fs';
import { tmpdir } from 'node:os';
import { join } from 'node:path';
import t from 'tap';
import {
  addressUrl,
  allAddresses,
  OPTIONS,
  parseAddress,
  parseConfig,
  parseUrl,
} from '../../lib/agent/config.ts';
import { MARKER, Pool } from '../../lib/agent/pool.ts';
import { formatDuration, parseDuration } from '../../lib/core/duration.ts';
import { isNoSpace } from '../../lib/core/errors.ts';
import { compareGenerations, isAncestor, parseGeneration } from '../../lib/core/generation.ts';
import { checkName } from '../../lib/core/names.ts';

const scratch = mkdtempSync(join(tmpdir(), 'sv-config-'));
t.teardown(() => rmSync(scratch, { recursive: true, force: true }));
const token = join(scratch, 'token');
writeFileSync(token, 'a-token-of-sixteen-characters\n', { mode: 0o600 });
const pool = join(scratch, 'pool');
mkdirSync(pool);
const good = { node: 'a', 'pool-name': 'default', 'pool-path': pool, 'token-file': token };

const message = (fn: () => unknown): string => {
  try {
    fn();
    return 'no error';
  } catch (error) {
    return (error as Error).message;
  }
};

t.test('configuration: flags beat the environment, defaults fill in', async (t) => {
  const c = parseConfig(
    { ...good, http: '[::1]:9090' },
    { SIMPLE_VOLUME_HTTP: '1.2.3.4:1', SIMPLE_VOLUME_BEAT: '500ms' },
  );
  t.equal(addressUrl(c.http), 'http://[::1]:9090', 'I5: IPv6 is bracketed');
  t.equal(c.beatMs, 500);
  t.equal(c.browseAuth, true);
  t.match(c, { pulls: 2, pullBufferBytes: 0, pullBytesPerSecond: 0, tls: null, sizeEnforcement: 'auto' });
  t.equal(parseConfig({ ...good, 'size-enforcement': 'off' }, {}).sizeEnforcement, 'off');
  t.match(parseConfig({ ...good, pulls: '4', 'pull-buffer': '8Mi', 'pull-bandwidth': '10Mi' }, {}), {
    pulls: 4,
    pullBufferBytes: 8 * 2 ** 20,
    pullBytesPerSecond: 10 * 2 ** 20,
  });
  t.equal(c.token, 'a-token-of-sixteen-characters');
  t.equal(parseConfig(good, { SIMPLE_VOLUME_ALLOW_NON_EMPTY_POOL: 'true' }).allowNonEmptyPool, true);
});

t.test('a bad value names its flag and what is allowed', async (t) => {
  const cases: [string, Record<string, string | boolean>, RegExp][] = [
    ['node missing', { ...good, node: '' }, /--node is required/],
    ['node with a slash', { ...good, node: 'a/b' }, /--node must be 1 to 253 characters/],
    ['pool name', { ...good, 'pool-name': '../x' }, /--pool-name must be/],
    ['port', { ...good, http: '127.0.0.1:70000' }, /--http must be HOST:PORT/],
    ['bare IPv6', { ...good, http: '::1:80' }, /--http must be HOST:PORT/],
    [
      'all addresses',
      { ...good, webdav: '*:8081', advertise: 'http://h:1' },
      /--webdav with the host \* needs --advertise-host/,
    ],
    [
      'advertised host with a port',
      { ...good, 'advertise-host': 'h:1' },
      /--advertise-host must be an IPv4 or IPv6 address or a DNS name; got "h:1"/,
    ],
    ['advertised zone', { ...good, 'advertise-host': 'fd00::g' }, /--advertise-host must be/],
    ['level', { ...good, 'log-level': 'loud' }, /--log-level must be one of debug, info/],
    ['beat', { ...good, beat: '5' }, /--beat must be a duration such as/],
    ['browse', { ...good, 'browse-auth': 'maybe' }, /--browse-auth must be on or off/],
    ['bool', { ...good, 'allow-non-empty-pool': 'perhaps' }, /--allow-non-empty-pool must be true or false/],
    [
      'advertise with a password',
      { ...good, advertise: 'http://u:p@h:1' },
      /--advertise must be an http or https URL without user/,
    ],
    [
      'size-enforcement',
      { ...good, 'size-enforcement': 'on' },
      /--size-enforcement must be one of auto, off; got "on"/,
    ],
    ['pulls', { ...good, pulls: '17' }, /--pulls must be a whole number from 1 to 16; got "17"/],
    ['buffer', { ...good, 'pull-buffer': '1Gi' }, /--pull-buffer must be a size from 0 to 64Mi/],
    [
      'bandwidth',
      { ...good, 'pull-bandwidth': '1Ki' },
      /--pull-bandwidth must be a size from 64Ki to 1024Gi/,
    ],
    ['bandwidth in words', { ...good, 'pull-bandwidth': 'fast' }, /got "fast"/],
    ['uuid', { ...good, 'expect-pool-id': 'zz' }, /--expect-pool-id must be a UUID/],
    [
      'token missing',
      { ...good, 'token-file': join(scratch, 'none') },
      /--token-file .* cannot be read: ENOENT/,
    ],
  ];
  for (const [name, flags, expected] of cases)
    t.match(
      message(() => parseConfig(flags, {})),
      expected,
      name,
    );
  const short = join(scratch, 'short');
  writeFileSync(short, 'short', { mode: 0o600 });
  t.match(
    message(() => parseConfig({ ...good, 'token-file': short }, {})),
    /at least 16 characters, it holds 5/,
  );
  chmodSync(token, 0o644);
  t.match(
    message(() => parseConfig(good, {})),
    /can be read by everybody/,
    'a world-readable token is refused',
  );
  chmodSync(token, 0o600);
  t.equal(
    new Set(OPTIONS.map((o) => o.env)).size,
    OPTIONS.length,
    'each flag has an own environment variable',
  );
});

t.test('addresses and URLs', async (t) => {
  t.same(parseAddress('0.0.0.0:0', 'http'), { host: '0.0.0.0', port: 0 });
  t.equal(allAddresses(token), '::', 'both families');
  t.equal(allAddresses(join(scratch, 'none')), '0.0.0.0', 'a kernel without IPv6');
  t.same(parseAddress('*:8080', 'http'), { host: allAddresses(), port: 8080 });
  for (const host of ['10.1.2.3', 'fd00::1', '[fd00::1]', 'node-1.example'])
    t.equal(
      parseConfig({ ...good, http: '*:0', webdav: '*:0', 'advertise-host': host }, {}).advertiseHost,
      host.replace(/[[\]]/g, ''),
    );
  t.equal(parseUrl('http://[fd00::1]:8080/', 'x'), 'http://[fd00::1]:8080');
  for (const bad of ['ftp://x', 'nonsense', 'http://x/?q', 'http://x/#f'])
    t.match(
      message(() => parseUrl(bad, 'targets[0].url')),
      /targets\[0\]\.url must be/,
    );
});

t.test(
  'pool: a new empty directory is marked, and only the same pool on the same node is taken again',
  async (t) => {
    const options = { path: pool, name: 'default', node: 'a', allowNonEmpty: false, expectId: null };
    const first = Pool.open(options);
    t.equal(first.problem(), null);
    t.equal(await first.writable(), null);
    t.match(
      message(() => Pool.open(options)),
      /in use by another agent/,
      'a second agent on the same pool is refused',
    );
    first.close();
    const again = Pool.open(options);
    t.equal(again.marker.id, first.marker.id);
    again.close();
    t.match(
      message(() => Pool.open({ ...options, node: 'b' })),
      /belongs to node "a", not to "b"/,
    );
    t.match(
      message(() => Pool.open({ ...options, name: 'fast' })),
      /belongs to pool "default", not to "fast"/,
    );
    t.match(
      message(() => Pool.open({ ...options, expectId: '00000000-0000-0000-0000-000000000000' })),
      /expected 00000000/,
    );
    const marker = JSON.parse(readFileSync(join(pool, MARKER), 'utf8'));
    writeFileSync(join(pool, MARKER), JSON.stringify({ ...marker, format: 99 }));
    t.match(
      message(() => Pool.open(options)),
      /format 99, this version reads format 1/,
    );
    writeFileSync(join(pool, MARKER), '{');
    t.match(
      message(() => Pool.open(options)),
      /not valid JSON/,
      'I12: the marker is validated, not only looked for',
    );
  },
);

t.test('A12: a missing disk never becomes a fresh pool', async (t) => {
  const options = {
    path: join(scratch, 'gone'),
    name: 'default',
    node: 'a',
    allowNonEmpty: false,
    expectId: null,
  };
  t.match(
    message(() => Pool.open(options)),
    /is not there \(ENOENT\).*never created by itself/,
  );
  const mountPoint = join(scratch, 'mountpoint');
  mkdirSync(mountPoint);
  t.match(
    message(() =>
      Pool.open({ ...options, path: mountPoint, expectId: '00000000-0000-0000-0000-000000000000' }),
    ),
    /is its disk mounted\?/,
  );
  t.same(
    message(() => readFileSync(join(mountPoint, MARKER))).includes('ENOENT'),
    true,
    'and nothing was written there',
  );
  const full = join(scratch, 'full');
  mkdirSync(full);
  writeFileSync(join(full, 'somebody.doc'), 'x');
  t.match(
    message(() => Pool.open({ ...options, path: full })),
    /not empty \(somebody\.doc\).*--allow-non-empty-pool/,
  );
  const adopted = Pool.open({ ...options, path: full, allowNonEmpty: true });
  rmSync(join(full, MARKER));
  t.match(adopted.problem(), /lost its marker/, 'while running the marker is looked at again');
  adopted.close();
});

t.test('D40: names that could leave the pool are refused, all others are contained', async (t) => {
  for (const bad of [
    '../x',
    '/etc',
    'a/../../b',
    '.hidden',
    'UPPER',
    'a..b',
    '',
    'x'.repeat(254),
    'a\0b',
    '-a',
    'a-',
  ])
    t.match(
      message(() => checkName(bad, 'volume')),
      /volume must be 1 to 253 characters/,
      JSON.stringify(bad.slice(0, 20)),
    );
  t.equal(checkName('pvc-1234.data', 'volume'), 'pvc-1234.data');
  t.match(
    message(() => checkName('a.b', 'namespace', 'label')),
    /namespace must be/,
  );
  const dir = join(scratch, 'named');
  mkdirSync(dir);
  symlinkSync('/etc', join(dir, 'link'));
  const p = Pool.open({ path: dir, name: 'default', node: 'a', allowNonEmpty: true, expectId: null });
  t.throws(() => p.volume({ namespace: '..', volume: 'x' }), { code: 'FIELD_INVALID', field: 'namespace' });
  p.close();
});

t.test('D41, D6: durations are read whole or refused', async (t) => {
  t.equal(parseDuration('1m30s', 'debounce'), 90_000);
  t.equal(parseDuration('500ms', 'debounce'), 500);
  for (const bad of ['5', '-1s', 'abc', '1e9h', '5 seconds', '', '1.5.5s', '99999h'])
    t.match(
      message(() => parseDuration(bad, 'debounce')),
      /debounce must be a duration such as 500ms/,
      bad,
    );
  t.equal(formatDuration(90_000), '1m30s');
  t.equal(formatDuration(0), '0ms');
});

t.test(
  'generations are ordered by epoch, then by number, and a replaced writer is no ancestor',
  async (t) => {
    const g = parseGeneration;
    t.ok(compareGenerations(g('2-1'), g('1-99')) > 0);
    t.match(
      message(() => g('1.5')),
      /generation must be <epoch>-<seq>/,
    );
    const lineage: [number, number][] = [
      [1, 1],
      [2, 41],
    ];
    t.ok(isAncestor(g('1-40'), lineage, g('2-45')));
    t.notOk(
      isAncestor(g('1-41'), lineage, g('2-45')),
      'D34: 1-41 was sealed by the old writer after the split',
    );
    t.ok(isAncestor(g('2-45'), lineage, g('2-45')));
    t.notOk(isAncestor(g('2-46'), lineage, g('2-45')), 'nothing newer than the newest');
    t.notOk(isAncestor(g('3-41'), lineage, g('2-45')));
  },
);

t.test('a quota that is used up is a full disk, also where Node has no name for it', (t) => {
  for (const error of [
    { code: 'ENOSPC' },
    { code: 'EDQUOT' },
    { code: 'Unknown system error -122', errno: -122 },
  ])
    t.ok(isNoSpace(Object.assign(new Error('x'), error)), error.code);
  t.notOk(isNoSpace(Object.assign(new Error('x'), { code: 'EIO', errno: -5 })));
  t.end();
});
