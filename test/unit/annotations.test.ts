import { readFileSync } from 'node:fs';
import fc from 'fast-check';
import t from 'tap';
import {
  ANNOTATIONS,
  annotationsTable,
  DEFAULTS,
  effectivePolicy,
  fromSpecPolicy,
  type Policy,
  parseAnnotations,
  quote,
  splitList,
  toSpecPolicy,
  toWatchBody,
} from '../../controller/policy/annotations.ts';
import { parseWatchStart } from '../../lib/agent/routes/watch.ts';

const P = 'simple-volume.shipstuff.io/';
const under = (values: Record<string, string>): Record<string, string> =>
  Object.fromEntries(Object.entries(values).map(([key, value]) => [P + key, value]));
const parse = (values: Record<string, string>, nodes: string[] | null = null) =>
  parseAnnotations(under(values), nodes);

const good: [string, string, Partial<Policy>][] = [
  ['replication-enabled', 'true', { replicationEnabled: true }],
  ['replication-include-paths', 'saves/**, server.json', { includePaths: ['saves/**', 'server.json'] }],
  ['replication-include-paths', '["a, b","c"]', { includePaths: ['a, b', 'c'] }],
  [
    'replication-exclude-paths',
    '*.{tmp,log},[a,b]*\ncache/',
    { excludePaths: ['*.{tmp,log}', '[a,b]*', 'cache/'] },
  ],
  ['replication-exclude-paths', '', { excludePaths: [] }],
  ['replication-prune-excluded', 'true', { pruneExcluded: true }],
  ['replication-debounce', '1m30s', { debounceMs: 90_000 }],
  ['replication-debounce', ' 500ms ', { debounceMs: 500 }],
  ['replication-consistency-mode', 'live', { consistencyMode: 'live' }],
  ['replication-confirmed-replicas', '2', { confirmedReplicas: 2 }],
  ['replication-full-sync-on-start', 'true', { fullSyncOnStart: true }],
  ['replication-full-sync-schedule', '0 4 * * 0', { fullSyncSchedule: '0 4 * * 0' }],
  ['replication-required-paths', 'server.json, world/', { requiredPaths: ['server.json', 'world'] }],
  ['replication-owner-uid', '0', { ownerUid: 0 }],
  ['replication-owner-gid', '4294967294', { ownerGid: 4_294_967_294 }],
  ['replication-file-mode', '0664', { fileMode: 0o664 }],
  ['replication-dir-mode', '2775', { dirMode: 0o2775 }],
  ['replication-replicas', '2', { replicas: 2 }],
  ['failover-enabled', 'true', { failoverEnabled: true }],
  ['failover-grace-period', '0s', { gracePeriodMs: 0 }],
  ['failover-max-staleness', '720h', { maxStalenessMs: 2_592_000_000 }],
  ['failover-node-priority', 'b,a,b', { nodePriority: ['b', 'a'] }],
  ['failover-fencing', 'none', { fencing: 'none' }],
];

t.test('every key is read, alone, and leaves the others as they are', (t) => {
  for (const [key, value, expected] of good) {
    const { policy, errors, unknown } = parse({ [key]: value });
    t.same(errors, [], `${key}=${value}`);
    t.same(unknown, []);
    t.same(policy, { ...DEFAULTS, ...expected }, `${key}=${value}`);
  }
  const tried = new Set(good.map(([key]) => key));
  t.same(
    ANNOTATIONS.map((one) => one.key).filter((key) => !tried.has(key)),
    [],
    'no key is untried',
  );
  t.end();
});

t.test('the fallback that a key documents is the one that holds', (t) => {
  for (const one of ANNOTATIONS) {
    t.ok(one.doc.length > 10 && one.allowed.length > 5, one.key);
    if (one.fallback === '') continue;
    t.same(parse({ [one.key]: one.fallback }).policy, DEFAULTS, one.key);
  }
  t.same(parse({}).policy, DEFAULTS);
  t.end();
});

t.test('D41/F10/D.6: a bad value names its key, itself and what is allowed', (t) => {
  const bad: [string, string, RegExp][] = [
    ['replication-debounce', '5', /500ms, 2s or 1m30s/],
    ['replication-debounce', '-1s', /from 10ms to 1h/],
    ['replication-debounce', 'abc', /duration/],
    ['replication-debounce', '1e9h', /duration/],
    ['replication-debounce', '5 seconds', /duration/],
    ['replication-debounce', '2s\u00a0', /duration/],
    ['replication-debounce', '', /duration/],
    ['replication-enabled', 'yes', /true or false/],
    ['replication-enabled', 'True', /true or false/],
    ['replication-owner-uid', 'abc', /whole number from 0/],
    ['replication-owner-uid', '-1', /whole number/],
    ['replication-owner-uid', '4294967295', /4294967294/],
    ['replication-owner-uid', '1e3', /whole number/],
    ['replication-file-mode', '0888', /octal/],
    ['replication-file-mode', '07777777', /octal/],
    ['replication-confirmed-replicas', '65', /0 to 64/],
    ['replication-full-sync-schedule', '* * *', /cron expression.*3 fields instead of five/],
    ['replication-required-paths', '../etc', /"\.\.\/etc" is no path below/],
    ['replication-required-paths', '/etc', /no path below/],
    ['replication-include-paths', 'x'.repeat(1025), /longer than 1024/],
    ['replication-include-paths', '["a"', /none/],
    ['replication-include-paths', '["a",1]', /texts only/],
    ['replication-include-paths', 'a\0b', /zero byte/],
    ['replication-include-paths', Array(1001).fill('a').join(), /there are 1001 patterns/],
    ['failover-node-priority', 'node a', /beginning and ending with a letter or digit/],
    ['failover-fencing', 'off', /lease or none/],
    ['replication-consistency-mode', 'Shadow', /shadow or live/],
  ];
  for (const [key, value, expected] of bad) {
    const { errors, policy } = parse({ [key]: value });
    t.equal(errors.length, 1, `${key}=${quote(value)}`);
    t.equal(errors[0]?.key, P + key);
    t.match(errors[0]?.allowed, expected, `${key}=${quote(value)}`);
    t.ok((errors[0]?.value.length ?? 0) < 200, 'shortened');
    t.same(policy, DEFAULTS);
  }
  t.equal(parse({ 'replication-debounce': '2s\u00a0' }).errors[0]?.value, '"2s\\u00a0"', 'blanks show');
  t.end();
});

t.test('two bad values are both named; the good ones beside them do not count alone', (t) => {
  const parsed = parse({
    'replication-debounce': 'x',
    'failover-enabled': 'y',
    'replication-enabled': 'true',
  });
  t.same(
    parsed.errors.map((one) => one.key),
    [`${P}replication-debounce`, `${P}failover-enabled`],
  );
  t.end();
});

t.test('D41: after a bad value the last good policy stays in force, whole', (t) => {
  const last = parse({ 'replication-enabled': 'true', 'replication-debounce': '9s' }).policy;
  const bad = parse({ 'replication-enabled': 'false', 'replication-debounce': 'x' });
  t.same(effectivePolicy(bad, last), last);
  t.same(effectivePolicy(bad, null), DEFAULTS, 'without one nothing is begun');
  const next = parse({ 'replication-enabled': 'true', 'replication-debounce': '3s' });
  t.equal(effectivePolicy(next, last).debounceMs, 3000);
  t.end();
});

t.test('unknown keys are reported with near names, others’ annotations are not looked at', (t) => {
  const { unknown, errors } = parse({
    'replication-debonce': '2s',
    'failover-max-stalenes': '1m',
    replicas: '2',
    'snapshot-class': 'x',
    'active-node': 'evil',
    'previous-active-node': 'evil',
  });
  t.same(errors, []);
  t.same(
    unknown.map((one) => one.key),
    [`${P}failover-max-stalenes`, `${P}replicas`, `${P}replication-debonce`, `${P}snapshot-class`],
  );
  t.equal(unknown[0]?.near[0], `${P}failover-max-staleness`);
  t.ok(unknown[1]?.near.includes(`${P}replication-replicas`));
  t.equal(unknown[2]?.near[0], `${P}replication-debounce`);
  t.same(unknown[3]?.near, []);
  t.same(parseAnnotations({ 'example.com/replication-debonce': '2s' }).unknown, []);
  t.end();
});

t.test(
  'D41/A25: unknown nodes of a priority list are warnings, what cannot work together is one too',
  (t) => {
    const { warnings, errors, policy } = parse({ 'failover-node-priority': 'a,zz' }, ['a', 'b']);
    t.same(errors, []);
    t.same(policy.nodePriority, ['a', 'zz'], 'the list is kept: the node may come');
    t.match(warnings, [{ key: `${P}failover-node-priority`, message: /no node "zz"/ }]);
    t.match(parse({ 'failover-enabled': 'true' }).warnings[0]?.message, /no copy to fail over to/);
    t.match(
      parse({ 'failover-enabled': 'true', 'replication-enabled': 'true', 'replication-debounce': '1m' })
        .warnings[0]?.message,
      /5m behind.*only 2m/,
    );
    const more = parse({ 'replication-replicas': '1', 'replication-confirmed-replicas': '2' });
    t.match(more.errors[0]?.allowed, /at most the number of copies.*1/, 'A25');
    t.end();
  },
);

t.test(
  'patterns are split at commas outside braces and brackets, an unclosed one holds nothing back',
  (t) => {
    t.same(splitList('a,b'), ['a', 'b']);
    t.same(splitList('{a,b}/**,c'), ['{a,b}/**', 'c']);
    t.same(splitList('a{b,c'), ['a{b', 'c']);
    t.same(splitList('[,],b'), ['[,]', 'b']);
    t.same(splitList('a\\,b,c\\d'), ['a,b', 'c\\d']);
    t.same(splitList(' a\tb ,, '), ['a\tb']);
    t.same(splitList('[]'), []);
    t.same(splitList('[ab]*.txt'), ['[ab]*.txt']);
    t.end();
  },
);

t.test('a policy goes to the spec and back unchanged, and the agent takes its watch request', (t) => {
  const values = Object.fromEntries(good.map(([key, value]) => [key, value]));
  const { policy, errors } = parse(values);
  t.same(errors, []);
  t.same(fromSpecPolicy(JSON.parse(JSON.stringify(toSpecPolicy(policy)))), policy);
  t.same(fromSpecPolicy(toSpecPolicy(DEFAULTS)), DEFAULTS);
  t.equal(fromSpecPolicy(undefined), null);
  t.same(fromSpecPolicy({ debounce: 'rubbish' }), DEFAULTS, 'what a hand wrote wrongly has its default');
  const body = toWatchBody(
    policy,
    { namespace: 'n', volume: 'pvc-1' },
    3,
    { url: 'http://10.0.0.1:8080', webdavUrl: 'http://10.0.0.1:8081' },
    [
      { url: 'http://10.0.0.3:8080', node: 'c' },
      { url: 'http://10.0.0.2:8080', node: 'b' },
    ],
  );
  t.same(
    body.targets.map((one) => one.node),
    ['b', 'c'],
    'in one order, whatever it was',
  );
  const asked = parseWatchStart({ ...body, targets: body.targets.map((one) => ({ ...one, token: 't' })) });
  const { debounceMs, includePaths, requiredPaths, fileMode, dirMode, ownerUid, confirmedReplicas } = policy;
  t.match(asked.policy, {
    debounceMs,
    includePaths,
    requiredPaths,
    fileMode,
    dirMode,
    ownerUid,
    confirmedReplicas,
  });
  t.equal(asked.policy.maxDelayMs, debounceMs * 5);
  t.end();
});

t.test('property: whatever the values are, nothing is thrown and every bad one is named once', (t) => {
  const key = fc.constantFrom(...ANNOTATIONS.map((one) => one.key));
  const value = fc.oneof(
    fc.string({ unit: 'binary' }),
    fc.constantFrom('true', '0', '1e3', '1h', '[[', '["', '{', '\\', ',', '[]', '{}', 'a,b', '* * * * *'),
  );
  fc.assert(
    fc.property(fc.dictionary(key, value), (values) => {
      const parsed = parse(values);
      const keys = parsed.errors.map((one) => one.key);
      if (new Set(keys).size !== keys.length) throw new Error(`twice: ${keys}`);
      const again = fromSpecPolicy(toSpecPolicy(parsed.policy));
      if (JSON.stringify(again) !== JSON.stringify(parsed.policy)) throw new Error('spec is not the policy');
    }),
    { numRuns: 2000, seed: 3 },
  );
  t.pass('2000 sets');
  t.end();
});

t.test('the documentation has the table as it is', (t) => {
  const text = readFileSync(new URL('../../docs/annotations.md', import.meta.url), 'utf8');
  t.ok(text.includes(annotationsTable()), 'docs/annotations.md is what annotationsTable() gives');
  t.end();
});
