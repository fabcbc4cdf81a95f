/** The client against a real API server, and against one that answers badly. */
import { writeFileSync } from 'node:fs';
import path from 'node:path';
import tap from 'tap';
import { createKube, isKubeError, KubeError, openConnection } from '../../controller/cluster/index.ts';
import type { KubeErrorReason } from '../../controller/cluster/types.ts';
import { RequestProxy, WireProxy } from './harness/fault-proxy.ts';
import { noKube } from './harness/programs.ts';
import { KubeServer } from './harness/server.ts';
import { CONFIG_MAPS, clock, configMap, kubeOf } from './helpers.ts';

async function failure(work: Promise<unknown>): Promise<KubeError> {
  try {
    await work;
  } catch (error) {
    if (error instanceof KubeError) return error;
    throw error;
  }
  throw new Error('it did not fail');
}

tap.test('the client', { skip: noKube() }, async (t) => {
  const server = await KubeServer.start({ users: { nobody: [] } });
  const requests = await RequestProxy.start(server.url, server.certificate);
  t.teardown(async () => {
    await requests.stop();
    await server.stop();
  });
  const kube = kubeOf(server.kubeconfig);
  const behind = kubeOf(server.writeKubeconfig('behind', { url: requests.url }));
  t.teardown(() => {
    kube.close();
    behind.close();
  });
  const name = (name: string) => ({ namespace: 'default', name });
  const fails = async (
    t: Pick<typeof tap, 'equal'>,
    reason: KubeErrorReason,
    work: Promise<unknown>,
  ): Promise<KubeError> => {
    const error = await failure(work);
    t.equal(error.reason, reason, error.message);
    return error;
  };

  await t.test('objects are made, read, changed and deleted, each write once', async (t) => {
    const made = await kube.create(CONFIG_MAPS, configMap('one', { a: '1' }));
    t.equal((await kube.get(CONFIG_MAPS, name('one'))).data?.a, '1');
    t.equal(await kube.find(CONFIG_MAPS, name('none')), null);
    await fails(t, 'NotFound', kube.get(CONFIG_MAPS, name('none')));
    await fails(t, 'AlreadyExists', kube.create(CONFIG_MAPS, configMap('one')));
    const version = made.metadata.resourceVersion;
    const merged = await kube.merge(
      CONFIG_MAPS,
      name('one'),
      { data: { b: '2' } },
      { resourceVersion: version },
    );
    t.strictSame(merged.data, { a: '1', b: '2' });
    await fails(
      t,
      'Conflict',
      kube.merge(CONFIG_MAPS, name('one'), { data: { b: '3' } }, { resourceVersion: version }),
    );
    await fails(t, 'Conflict', kube.merge(CONFIG_MAPS, name('one'), {}, { uid: 'another' }));
    await fails(t, 'Conflict', kube.replace(CONFIG_MAPS, made));
    const replaced = await kube.replace(CONFIG_MAPS, { ...merged, data: { c: '4' } });
    t.strictSame(replaced.data, { c: '4' });
    const { resourceVersion: _, ...unversioned } = merged.metadata;
    await fails(t, 'Invalid', kube.replace(CONFIG_MAPS, { ...merged, metadata: unversioned }));
    const step = (value: string) =>
      [
        { op: 'test', path: '/data/c', value },
        { op: 'replace', path: '/data/c', value: '5' },
      ] as const;
    await fails(t, 'Conflict', kube.jsonPatch(CONFIG_MAPS, name('one'), step('9')));
    t.equal((await kube.jsonPatch(CONFIG_MAPS, name('one'), step('4'))).data?.c, '5');
    t.equal(
      (await kube.merge(CONFIG_MAPS, name('one'), { data: { c: '6' } }, { dryRun: true })).data?.c,
      '6',
    );
    t.equal((await kube.get(CONFIG_MAPS, name('one'))).data?.c, '5', 'only tried');
    await fails(t, 'Conflict', kube.delete(CONFIG_MAPS, name('one'), { uid: 'another' }));
    t.equal(await kube.delete(CONFIG_MAPS, name('one'), { uid: made.metadata.uid }), true);
    t.equal(await kube.delete(CONFIG_MAPS, name('one')), false);
    await fails(t, 'Invalid', kube.create(CONFIG_MAPS, configMap('No Name')));
    await t.rejects(async () => kube.get(CONFIG_MAPS, { name: 'x' }), /without a namespace/);
  });

  await t.test('long lists come in pages, over few connections', async (t) => {
    const own = kubeOf(server.kubeconfig);
    await Promise.all(Array.from({ length: 120 }, (_, i) => own.create(CONFIG_MAPS, configMap(`many-${i}`))));
    const first = await own.page(CONFIG_MAPS, { namespace: 'default', limit: 50 });
    t.equal(first.items.length, 50);
    t.ok(first.continue);
    const seen = new Set<string>();
    for await (const one of own.list(CONFIG_MAPS, { namespace: 'default', limit: 50 }))
      seen.add(one.metadata.name);
    t.equal([...seen].filter((one) => one.startsWith('many-')).length, 120);
    t.ok(
      own.counters.connections <= 8,
      `${own.counters.connections} connections for ${own.counters.requests} calls`,
    );
    own.close();
  });

  await t.test('the answers that mean something are told apart', async (t) => {
    const nobody = kubeOf(server.writeKubeconfig('nobody', { user: 'nobody' }));
    const error = await fails(t, 'Forbidden', nobody.page(CONFIG_MAPS));
    t.equal(error.status, 403);
    nobody.close();
    const bad = kubeOf(server.writeKubeconfig('bad', { token: 'never-issued-token' }));
    const refused = await fails(t, 'Unauthorized', bad.page(CONFIG_MAPS));
    t.notMatch(refused.message, /never-issued/, 'no credential in an error');
    bad.close();
    for (const [status, reason] of [
      [500, 'ServerError'],
      [503, 'ServerError'],
      [409, 'Conflict'],
      [410, 'Gone'],
      [418, 'Invalid'],
    ] as const) {
      requests.seen.length = 0;
      requests.fault = () => ({ status });
      const failed = await fails(t, reason, behind.create(CONFIG_MAPS, configMap('x')));
      t.equal(failed.status, status);
      t.equal(requests.seen.length, 1, 'not repeated by itself');
    }
    requests.fault = () => ({ status: 200, body: 'hello' });
    await fails(t, 'BadReply', behind.get(CONFIG_MAPS, name('x')));
    requests.fault = () => ({ status: 200, body: '{}' });
    await fails(t, 'BadReply', behind.page(CONFIG_MAPS));
    requests.fault = () => null;
  });

  await t.test('429 with Retry-After: it comes back then, and not sooner, with everything', async (t) => {
    let left = 1;
    requests.fault = () => (left-- > 0 ? { status: 429, headers: { 'retry-after': '1' } } : null);
    const started = performance.now();
    await behind.create(CONFIG_MAPS, configMap('patient'));
    t.ok(performance.now() - started >= 1000);
    t.equal(behind.counters.throttledByServer, 1);

    requests.fault = ({ path }) =>
      path.endsWith('/busy') ? { status: 429, headers: { 'retry-after': '2' } } : null;
    const error = await fails(
      t,
      'TooManyRequests',
      behind.get(CONFIG_MAPS, name('busy'), { timeoutMs: 500 }),
    );
    t.equal(error.retryAfterMs, 2000);
    requests.seen.length = 0;
    await fails(t, 'TooManyRequests', behind.get(CONFIG_MAPS, name('patient'), { timeoutMs: 500 }));
    t.equal(requests.seen.length, 0, 'the server wanted quiet');
    await behind.get(CONFIG_MAPS, name('patient'), { timeoutMs: 500, urgent: true });
    t.equal(requests.seen.length, 1, 'the lease goes all the same');
    const again = performance.now();
    await behind.get(CONFIG_MAPS, name('patient'));
    t.ok(performance.now() - again > 700);
    requests.fault = () => null;
  });

  await t.test('the own rate limit', async (t) => {
    const slow = kubeOf(server.kubeconfig, { perSecond: 10, burst: 2 });
    const started = performance.now();
    await Promise.all([1, 2, 3, 4, 5].map(() => slow.find(CONFIG_MAPS, name('none'))));
    t.ok(performance.now() - started >= 290);
    slow.close();
  });

  await t.test(
    'a write whose answer is lost: its outcome is unknown, and it is not done twice',
    async (t) => {
      requests.seen.length = 0;
      requests.fault = ({ method }) => (method === 'POST' ? { cut: 'after' } : null);
      const error = await fails(t, 'Unreachable', behind.create(CONFIG_MAPS, configMap('lost')));
      t.equal(error.unknownOutcome, true);
      t.equal(requests.seen.length, 1);
      t.ok(await behind.find(CONFIG_MAPS, name('lost')), 'it had happened');
      requests.fault = () => null;
    },
  );

  await t.test('5 s of latency are waited for, or not, as the caller says', async (t) => {
    requests.fault = () => ({ delayMs: 5000 });
    const [slow, late] = await Promise.all([
      behind.get(CONFIG_MAPS, name('lost')),
      fails(t, 'Timeout', behind.get(CONFIG_MAPS, name('lost'), { timeoutMs: 1000 })),
    ]);
    t.equal(slow.metadata.name, 'lost');
    t.equal(late.notSent, false);
    const cancel = new AbortController();
    const started = performance.now();
    setTimeout(() => cancel.abort(), 100);
    await fails(t, 'Cancelled', behind.get(CONFIG_MAPS, name('lost'), { signal: cancel.signal }));
    t.ok(performance.now() - started < 2000);
    requests.fault = () => null;
  });

  await t.test('a silent wire ends each call in time, and new connections are made afterwards', async (t) => {
    const wire = await WireProxy.start(server.url);
    const own = kubeOf(server.writeKubeconfig('wire', { url: wire.url }));
    await own.get(CONFIG_MAPS, name('lost'));
    wire.set('silent');
    const started = performance.now();
    await fails(t, 'Timeout', own.get(CONFIG_MAPS, name('lost'), { timeoutMs: 500 }));
    const write = await fails(t, 'Timeout', own.merge(CONFIG_MAPS, name('lost'), {}, { timeoutMs: 500 }));
    t.equal(write.notSent, true, 'on a connection that never came about nothing was sent');
    t.ok(performance.now() - started < 1500);
    wire.set('refuse');
    await fails(t, 'Unreachable', own.get(CONFIG_MAPS, name('lost')));
    wire.set('pass');
    t.ok(await own.get(CONFIG_MAPS, name('lost')));
    wire.cut();
    await new Promise((resolve) => setTimeout(resolve, 50));
    t.ok(await own.get(CONFIG_MAPS, name('lost')), 'kept connections that broke are no obstacle');
    own.close();
    await wire.stop();
  });

  await t.test('a restarted API server is no obstacle for the next call', async (t) => {
    await kube.get(CONFIG_MAPS, name('lost'));
    await server.restart('SIGTERM');
    t.ok(await kube.get(CONFIG_MAPS, name('lost')));
  });

  await t.test('writes are gated to the last moment, reads and reviews are not', async (t) => {
    const wire = await WireProxy.start(server.url);
    const own = kubeOf(server.writeKubeconfig('gated', { url: wire.url }));
    let leads = true;
    const gated = own.gated(() => leads);
    wire.delay(200); // making a connection takes a while
    requests.seen.length = 0;
    setTimeout(() => {
      leads = false;
    }, 100);
    const error = await fails(t, 'NotLeader', gated.create(CONFIG_MAPS, configMap('late')));
    t.equal(error.notSent, true);
    t.equal(await kube.find(CONFIG_MAPS, name('late')), null);
    wire.delay(0);
    await fails(t, 'NotLeader', gated.merge(CONFIG_MAPS, name('lost'), { data: { a: '1' } }));
    await fails(t, 'NotLeader', gated.delete(CONFIG_MAPS, name('lost')));
    t.ok(await gated.get(CONFIG_MAPS, name('lost')));
    leads = true;
    t.ok(await gated.create(CONFIG_MAPS, configMap('late')));
    own.close();
    await wire.stop();
  });

  await t.test('a token in a file is read anew when the server refuses it', async (t) => {
    const file = path.join(server.folder, 'token');
    const config = JSON.parse(await server.kubectl(['config', 'view', '--raw', '-o', 'json'])) as {
      users: { name: string; user: object }[];
    };
    const [user] = config.users;
    if (user) user.user = { 'auth-provider': { name: 'tokenFile', config: { tokenFile: file } } };
    const kubeconfig = path.join(server.folder, 'tokenfile.kubeconfig');
    writeFileSync(kubeconfig, JSON.stringify(config));
    writeFileSync(file, `${server.token()}\n`);
    const own = createKube({ connection: openConnection({ kubeconfig, clock }), clock });
    t.ok(await own.raw('/version'), 'the line break at its end does no harm');
    writeFileSync(file, 'revoked');
    const other = createKube({ connection: openConnection({ kubeconfig, clock }), clock });
    await fails(t, 'Unauthorized', other.page(CONFIG_MAPS));
    writeFileSync(file, server.token());
    t.ok(await other.page(CONFIG_MAPS), 'at once, not after a minute');
    own.close();
    other.close();
  });

  await t.test('after close nothing is sent', async (t) => {
    const own = kubeOf(server.kubeconfig);
    const watching = failure(
      own.watch(CONFIG_MAPS, { resourceVersion: '0', timeoutSeconds: 60, quietMs: 60_000 }, () => {}),
    );
    await new Promise((resolve) => setTimeout(resolve, 200));
    own.close();
    t.ok(isKubeError(await watching, 'Cancelled'));
    await fails(t, 'Cancelled', own.get(CONFIG_MAPS, name('lost')));
  });
});
