import fc from 'fast-check';
import t from 'tap';
import { allows, createGrants } from '../../lib/transfer/grant.ts';
import {
  checkConditions,
  displayName,
  escapeName,
  hrefOf,
  httpDate,
  parseRange,
  parseTarget,
  rangeApplies,
} from '../../lib/transfer/http.ts';
import { Limit } from '../../lib/transfer/limit.ts';
import { type Entry, humanSize, pageRow, propfindEntry } from '../../lib/transfer/render.ts';

const names = (url: string): string[] => parseTarget(url).map((s) => s.toString('latin1'));

t.test('targets are bytes; every way to escape the same name gives the same name (D2, D3)', async (t) => {
  for (const url of ['/a:b', '/a%3Ab', '/a%3ab', '/%61%3A%62', '/./a:b', '//a:b', '/a:b/', '/a:b?x=/y'])
    t.same(names(url), ['a:b'], url);
  t.same(names('/x%2541'), ['x%41'], 'decoded once');
  t.same(names('/hash%231/q%3Fa=1/100%25'), ['hash#1', 'q?a=1', '100%']);
  t.same(names('/bad-%ff%fe/\xe9'), ['bad-\xff\xfe', '\xe9']);
  t.same(names('/%E2%80%9BFF'), ['\xe2\x80\x9bFF']);
  t.same(names('/a%0Ab/%20lead/trail%20/-rf/...'), ['a\nb', ' lead', 'trail ', '-rf', '...']);
  t.same(names('/'), []);
  t.same(names('*'), []);
});

t.test('hostile targets are refused', async (t) => {
  for (const url of [
    '/%',
    '/%z',
    '/%zz',
    '/%4',
    '/a%',
    '/%00',
    '/x%00y',
    '/..',
    '/a/../b',
    '/%2e%2e/etc',
    '/.%2E',
    '/a%2fb',
    '/a%2F..',
    '',
    'x',
    'http://h/a',
    '?',
  ])
    t.throws(() => parseTarget(url), { code: 'FIELD_INVALID' }, url);
  fc.assert(
    fc.property(fc.string({ unit: 'binary', maxLength: 40 }), (text) => {
      try {
        for (const s of parseTarget(`/${text}`))
          if (s.length === 0 || s.includes(0x2f) || s.includes(0) || s.equals(Buffer.from('..')))
            return false;
        return true;
      } catch (error) {
        return (error as { code?: string }).code === 'FIELD_INVALID';
      }
    }),
  );
});

t.test('a name survives the way out and in, whatever its bytes (D9)', async () => {
  const name = fc
    .uint8Array({ minLength: 1, maxLength: 255 })
    .map((a) => Buffer.from(a.map((c) => (c === 0 || c === 0x2f ? 1 : c))))
    .filter((b) => !b.equals(Buffer.from('.')) && !b.equals(Buffer.from('..')));
  fc.assert(
    fc.property(fc.array(name, { minLength: 1, maxLength: 5 }), fc.boolean(), (path, collection) => {
      const href = hrefOf(path, collection);
      return /^[\x21-\x7e]+$/.test(href) && Buffer.concat(parseTarget(href)).equals(Buffer.concat(path));
    }),
  );
});

t.test('ranges', async (t) => {
  const r = (h: string | undefined, size = 100) => parseRange(h, size);
  t.same(r('bytes=0-9'), { start: 0, end: 10 });
  t.same(r('bytes=90-'), { start: 90, end: 100 });
  t.same(r('bytes=-10'), { start: 90, end: 100 });
  t.same(r('bytes=-1000'), { start: 0, end: 100 });
  t.same(r('bytes=90-1000'), { start: 90, end: 100 });
  t.same(r('bytes=0-9, 10-19'), { start: 0, end: 20 }, 'neighbours become one');
  t.same(r('bytes=50-60,0-9,5-55'), { start: 0, end: 61 });
  t.equal(r('bytes=0-9,20-29'), null, 'several: the whole');
  t.same(r('bytes=0-9,500-'), { start: 0, end: 10 }, 'one of them beyond the end');
  for (const h of ['bytes=100-', 'bytes=500-600', 'bytes=-0']) t.equal(r(h), 'unsatisfiable', h);
  t.equal(r('bytes=0-', 0), 'unsatisfiable', 'an empty file has no byte 0');
  for (const h of [
    undefined,
    '',
    'bytes=',
    'bytes=,',
    'bytes=-',
    'bytes=a-b',
    'bytes=9-0',
    'items=0-1',
    'bytes=1--2',
    `bytes=${'0-0,'.repeat(500)}`,
    'bytes=99999999999999999999-',
  ])
    t.equal(r(h), null, String(h).slice(0, 30));
});

t.test('conditions, in the order of RFC 9110', async (t) => {
  const v = { etag: '"e"', modifiedMs: Date.UTC(2026, 0, 1, 0, 0, 0, 500) };
  const at = httpDate(v.modifiedMs);
  const before = httpDate(v.modifiedMs - 5000);
  t.equal(at, 'Thu, 01 Jan 2026 00:00:00 GMT');
  t.equal(checkConditions({}, v), 200);
  t.equal(checkConditions({ 'if-none-match': '"e"' }, v), 304);
  t.equal(checkConditions({ 'if-none-match': 'W/"e", "x"' }, v), 304);
  t.equal(checkConditions({ 'if-none-match': '*' }, v), 304);
  t.equal(checkConditions({ 'if-none-match': '"x"', 'if-modified-since': at }, v), 200, 'the tag decides');
  t.equal(checkConditions({ 'if-modified-since': at }, v), 304);
  t.equal(checkConditions({ 'if-modified-since': before }, v), 200);
  t.equal(checkConditions({ 'if-modified-since': 'yesterday' }, v), 200);
  t.equal(checkConditions({ 'if-match': '"x"' }, v), 412);
  t.equal(checkConditions({ 'if-match': '"x", "e"' }, v), 200);
  t.equal(checkConditions({ 'if-unmodified-since': before }, v), 412);
  t.ok(rangeApplies({}, v));
  t.ok(rangeApplies({ 'if-range': '"e"' }, v));
  t.notOk(rangeApplies({ 'if-range': '"x"' }, v));
  t.notOk(rangeApplies({ 'if-range': 'W/"e"' }, v));
  t.ok(rangeApplies({ 'if-range': at }, v));
  t.notOk(rangeApplies({ 'if-range': before }, v));
  t.equal(httpDate(-5), 'Thu, 01 Jan 1970 00:00:00 GMT');
  t.match(httpDate(8e15), /9999 23:59:59/);
});

t.test('names in XML and HTML: never a control character, never markup', async (t) => {
  const entry = (name: string | Buffer, kind: Entry['kind'] = 'file'): Entry => ({
    name: Buffer.from(name),
    kind,
    size: 1536,
    modifiedMs: 0,
    etag: '"e"',
    target: Buffer.from('<b>\n&'),
  });
  const evil = entry('<img src=x onerror=alert(1)>&"\'');
  for (const text of [
    propfindEntry([evil.name], evil),
    pageRow([], evil),
    pageRow([], { ...evil, kind: 'symlink' }),
  ]) {
    t.notMatch(text, /<img|onerror=alert\(1\)>/);
    t.notMatch(text, /<b>/);
  }
  t.equal(displayName(Buffer.from('a\x01b')), 'a%01b');
  t.equal(displayName(Buffer.from([0xff, 0x61])), '%FFa');
  t.equal(displayName(Buffer.from('é ☃ 😀')), 'é ☃ 😀');
  t.equal(displayName(Buffer.from('\ufffe')), '%EF%BF%BE');
  t.equal(escapeName(Buffer.from('a b')), 'a%20b');
  fc.assert(
    fc.property(fc.uint8Array({ minLength: 1, maxLength: 60 }), (a) => {
      const e = entry(Buffer.from(a));
      return !/[\u0000-\u0009\u000b-\u001f\u007f\ufffe\uffff]/.test(
        propfindEntry([e.name], e) + pageRow([], e),
      );
    }),
  );
  t.same([0, 1023, 1024, 1536, 10 * 1024, 5e9].map(humanSize), [
    '0 B',
    '1023 B',
    '1.0 KiB',
    '1.5 KiB',
    '10 KiB',
    '4.7 GiB',
  ]);
});

t.test('grants: only what was minted here, and only for its scope', async (t) => {
  const grants = createGrants('token-a');
  const scope = { namespace: 'default', volume: 'world', epoch: 3, node: 'node-b' };
  const text = grants.mint(scope);
  t.match(text, /^sv1\.[\w-]+\.[\w-]{43}$/);
  t.equal(grants.mint(scope), text);
  t.same(grants.verify(text), { kind: 'grant', ...scope });
  t.equal(createGrants('token-b').verify(text), null, 'another agent');
  for (let i = 0; i < text.length; i++) {
    const c = text[i] === 'A' ? 'B' : 'A';
    t.equal(grants.verify(text.slice(0, i) + c + text.slice(i + 1)), null, `changed at ${i}`);
  }
  for (const bad of [
    '',
    'sv1.',
    'sv1..',
    `${text}.x`,
    `${text}=`,
    text.slice(0, -1),
    `sv2${text.slice(3)}`,
    'x'.repeat(5000),
  ])
    t.equal(grants.verify(bad), null);
  const grant = grants.verify(text)!;
  t.ok(allows(grant, scope));
  t.ok(allows({ kind: 'agent' }, scope));
  for (const change of [{ namespace: 'x' }, { volume: 'x' }, { epoch: 4 }, { node: 'node-c' }])
    t.notOk(allows(grant, { ...scope, ...change }), JSON.stringify(change));
});

t.test('a limit lets through so many, in order, and forgets who gave up', async (t) => {
  const limit = new Limit(1);
  const order: number[] = [];
  const never = new AbortController().signal;
  let release = (): void => undefined;
  const first = limit.run(never, () => new Promise<void>((r) => (release = r)));
  const stop = new AbortController();
  const second = limit.run(stop.signal, async () => void order.push(2));
  const third = limit.run(never, async () => void order.push(3));
  stop.abort();
  await t.rejects(second, { code: 'CANCELLED' });
  await t.rejects(
    limit.run(stop.signal, async () => undefined),
    { code: 'CANCELLED' },
  );
  release();
  await first;
  await third;
  t.same(order, [3]);
  await t.rejects(
    limit.run(never, () => Promise.reject(new Error('x'))),
    { message: 'x' },
  );
  await limit.run(never, async () => void order.push(4));
  t.same(order, [3, 4]);
});
