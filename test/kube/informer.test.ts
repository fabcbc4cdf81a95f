/** Informers on a real API server that is restarted, cut off, goes silent and forgets. */
import t from 'tap';
import { createInformer, createKube, openConnection } from '../../controller/cluster/index.ts';
import type { Clock, Informer, Kube } from '../../controller/cluster/types.ts';
import { RequestProxy, WireProxy } from './harness/fault-proxy.ts';
import { noKube } from './harness/programs.ts';
import { KubeServer } from './harness/server.ts';
import { CONFIG_MAPS, type ConfigMap, clock, configMap, kubeOf, quiet, until } from './helpers.ts';

interface Kept {
  name: string;
  a: string;
}

t.test('informers', { skip: noKube() }, async (t) => {
  const server = await KubeServer.start();
  const kube = kubeOf(server.kubeconfig);
  const started: Informer<Kept>[] = [];
  t.teardown(async () => {
    await Promise.all(started.map((one) => one.stop()));
    kube.close();
    await server.stop();
  });

  function copy(own: Kube, more: object = {}): Informer<Kept> {
    const informer = createInformer<ConfigMap, Kept>({
      kube: own,
      kind: CONFIG_MAPS,
      namespace: 'default',
      project: ({ metadata, data }) => {
        if (data?.broken) throw new Error('cannot be read');
        return data?.ignored ? undefined : { name: metadata.name, a: data?.a ?? '' };
      },
      indexes: { a: ({ a }) => (a === '' ? [] : [a]) },
      clock,
      logger: quiet,
      backoffMs: { first: 50, longest: 500 },
      ...more,
    });
    started.push(informer);
    informer.start();
    return informer;
  }
  const set = (name: string, data: Record<string, string>): Promise<unknown> =>
    kube.merge(CONFIG_MAPS, { namespace: 'default', name }, { data });
  const has = (informer: Informer<Kept>, name: string, a: string) => (): boolean =>
    informer.get(`default/${name}`)?.a === a;

  await t.test('it holds what there is, tells each change once, and finds by index', async (t) => {
    await Promise.all(
      Array.from({ length: 1100 }, (_, i) =>
        kube.create(CONFIG_MAPS, configMap(`c-${i}`, { a: `v${i % 10}` })),
      ),
    );
    const informer = copy(kube);
    await informer.whenSynced();
    t.ok(informer.size >= 1100, 'all pages');
    t.equal(informer.by('a', 'v3').length, 110);
    t.throws(() => informer.by('none', 'x'), /no index/);
    const changes: unknown[] = [];
    informer.onChange(() => {
      throw new Error('a listener that fails concerns nobody else');
    });
    const end = informer.onChange((change) => changes.push(change));
    await kube.create(CONFIG_MAPS, configMap('new', { a: '1' }));
    await set('new', { a: '2' });
    await kube.delete(CONFIG_MAPS, { namespace: 'default', name: 'new' });
    await until('it is gone', () => changes.length === 3);
    t.strictSame(changes, [
      { key: 'default/new', before: undefined, after: { name: 'new', a: '1' } },
      { key: 'default/new', before: { name: 'new', a: '1' }, after: { name: 'new', a: '2' } },
      { key: 'default/new', before: { name: 'new', a: '2' }, after: undefined },
    ]);
    t.strictSame(informer.by('a', '2'), []);
    end();
    await informer.stop();
    t.match(informer.counters, { lists: 1, errors: 0 });
  });

  await t.test(
    'an object that cannot be read concerns itself only, and is not taken for a deleted one (D41)',
    async (t) => {
      const informer = copy(kube);
      await kube.create(CONFIG_MAPS, configMap('odd', { a: 'good' }));
      await kube.create(CONFIG_MAPS, configMap('hidden', { a: 'x' }));
      await until('both', () => has(informer, 'odd', 'good')() && has(informer, 'hidden', 'x')());
      await set('odd', { broken: '1', a: 'bad' });
      await set('hidden', { ignored: '1' });
      await until('the ignored one is out', () => informer.get('default/hidden') === undefined);
      t.equal(informer.get('default/odd')?.a, 'good', 'the last good state stays');
      t.ok(informer.counters.unreadable >= 1);
      const later = copy(kube);
      await later.whenSynced();
      t.equal(later.get('default/odd'), undefined);
      t.ok(later.size > 1000, 'the list as a whole is read');
      await Promise.all([informer.stop(), later.stop()]);
    },
  );

  await t.test('a restart of the API server: it goes on, and nothing is missed (D46)', async (t) => {
    const informer = copy(kube);
    await informer.whenSynced();
    await set('c-1', { a: 'before' });
    await until('seen', has(informer, 'c-1', 'before'));
    await server.restart('SIGKILL');
    await set('c-1', { a: 'after' });
    await until('seen after the restart', has(informer, 'c-1', 'after'));
    await until('it was heard of just now', () => informer.ageMs() < 10_000);
    t.equal(informer.get('default/c-1')?.a, 'after');
    await informer.stop();
  });

  await t.test('410: what the server has forgotten is listed anew, deletions included', async (t) => {
    const wire = await WireProxy.start(server.url);
    const own = kubeOf(server.writeKubeconfig('forgets', { url: wire.url }));
    const informer = copy(own);
    await informer.whenSynced();
    const gone: string[] = [];
    informer.onChange(({ key, after }) => after === undefined && gone.push(key));
    wire.set('refuse');
    await set('c-2', { a: 'unseen' });
    await kube.delete(CONFIG_MAPS, { namespace: 'default', name: 'c-3' });
    await server.compact();
    await server.restart('SIGKILL'); // its memory of past events is gone too
    await set('c-4', { a: 'later' });
    await new Promise((resolve) => setTimeout(resolve, 500));
    t.equal(informer.get('default/c-2')?.a, 'v2', 'the copy of before is kept meanwhile');
    t.ok(informer.lastError);
    wire.set('pass');
    await until('it has caught up', has(informer, 'c-4', 'later'));
    t.equal(informer.get('default/c-2')?.a, 'unseen');
    t.strictSame(gone, ['default/c-3']);
    t.equal(informer.counters.gone, 1);
    t.equal(informer.counters.lists, 2);
    await informer.stop();
    own.close();
    await wire.stop();
  });

  await t.test('a watch that goes silent without an end is noticed (D46)', async (t) => {
    const wire = await WireProxy.start(server.url);
    const own = kubeOf(server.writeKubeconfig('silent', { url: wire.url }));
    const informer = copy(own, { quietMs: 1500 });
    await informer.whenSynced();
    await set('c-5', { a: 'heard' });
    await until('heard', has(informer, 'c-5', 'heard'));
    wire.set('silent');
    await set('c-5', { a: 'unheard' });
    await until('the silence is noticed', () => informer.counters.silent >= 1);
    await until('the copy says how old it may be', () => informer.ageMs() > 1000);
    t.equal(informer.get('default/c-5')?.a, 'heard');
    wire.set('pass');
    await until('it has caught up', has(informer, 'c-5', 'unheard'));
    t.equal(informer.counters.lists, 1, 'it went on where it was');
    await until('what was given up is closed', () => wire.open <= 4);
    await informer.stop();
    own.close();
    await wire.stop();
  });

  await t.test(
    'an hour of silence on every connection: no storm, no leak, and then up to date (D46)',
    async (t) => {
      // Its clock runs 400 times as fast while nothing gets through: an hour in nine seconds.
      let factor = 1;
      let [at, base] = [performance.now(), performance.now()];
      const timers = new Set<{ due: number; fn: () => void; real: NodeJS.Timeout | null }>();
      const boot = (): number => base + (performance.now() - at) * factor;
      const fast: Clock = {
        boot,
        now: () => Date.now(),
        setTimeout(fn, ms) {
          const timer = { due: boot() + ms, fn, real: null };
          timers.add(timer);
          arm(timer);
          return {
            cancel() {
              clearTimeout(timer.real ?? undefined);
              timers.delete(timer);
            },
          };
        },
      };
      function arm(timer: { due: number; fn: () => void; real: NodeJS.Timeout | null }): void {
        clearTimeout(timer.real ?? undefined);
        timer.real = setTimeout(
          () => {
            timers.delete(timer);
            timer.fn();
          },
          Math.max(0, timer.due - boot()) / factor,
        );
      }
      const run = (next: number): void => {
        [base, at, factor] = [boot(), performance.now(), next];
        for (const timer of timers) arm(timer);
      };
      const wire = await WireProxy.start(server.url);
      const kubeconfig = server.writeKubeconfig('hour', { url: wire.url });
      const own = createKube({ connection: openConnection({ kubeconfig, clock: fast }), clock: fast });
      // As it is shipped: with the limits of its own.
      const informer = createInformer<ConfigMap, Kept>({
        kube: own,
        kind: CONFIG_MAPS,
        namespace: 'default',
        project: ({ metadata, data }) => ({ name: metadata.name, a: data?.a ?? '' }),
        clock: fast,
        logger: quiet,
      });
      started.push(informer);
      informer.start();
      await informer.whenSynced();
      await set('c-20', { a: 'before' });
      await until('heard', has(informer, 'c-20', 'before'));
      const { connections } = wire;
      wire.set('silent');
      await set('c-20', { a: 'meanwhile' });
      await set('c-21', { a: 'new' });
      await kube.delete(CONFIG_MAPS, { namespace: 'default', name: 'c-22' });
      const began = boot();
      run(400);
      await until('an hour has passed', () => boot() - began > 3_600_000);
      run(1);
      t.ok(informer.counters.silent >= 1, 'the silence was noticed');
      t.ok(informer.ageMs() > 3_000_000, 'and the copy says how old it is');
      t.equal(informer.get('default/c-20')?.a, 'before', 'what was known is kept');
      const tried = wire.connections - connections;
      t.ok(
        tried > 10 && tried < 300,
        `${tried} connections in an hour: it goes on trying, and not in a storm`,
      );
      wire.set('pass'); // and with that the wire hears which ends were closed
      await until('it has caught up', has(informer, 'c-20', 'meanwhile'), 60_000);
      t.equal(informer.get('default/c-21')?.a, 'new');
      t.equal(informer.get('default/c-22'), undefined);
      await until('what was tried is closed', () => wire.open <= 4);
      await informer.stop();
      own.close();
      await wire.stop();
    },
  );

  await t.test('an API server that answers badly is not asked in a storm (D46)', async (t) => {
    const proxy = await RequestProxy.start(server.url, server.certificate);
    const own = kubeOf(server.writeKubeconfig('storm', { url: proxy.url }));
    const informer = copy(own, { backoffMs: { first: 100, longest: 800 } });
    await informer.whenSynced();
    const count = async (ms: number): Promise<number> => {
      const before = proxy.seen.length;
      await new Promise((resolve) => setTimeout(resolve, ms));
      return proxy.seen.length - before;
    };
    // Each of these ends watches at once, in its own way.
    const ways = [
      { status: 500 },
      { status: 200, body: '' },
      { status: 200, body: 'no JSON\n' },
      { status: 429, headers: { 'retry-after': '1' } },
      { status: 401 },
      {
        status: 200,
        body: `${JSON.stringify({ type: 'ERROR', object: { kind: 'Status', code: 410, reason: 'Expired' } })}\n`,
      },
    ];
    for (const way of ways) {
      proxy.fault = ({ watch }) => (watch ? way : null);
      proxy.cut(); // ends the watch that is open
      await set('c-6', { a: 'x' });
      await new Promise((resolve) => setTimeout(resolve, 700));
      const asked = await count(1500);
      t.ok(asked >= 1 && asked <= 10, `${JSON.stringify(way).slice(0, 40)}: ${asked} requests in 1.5 s`);
    }
    proxy.fault = () => null;
    await set('c-6', { a: 'well again' });
    await until('well again', has(informer, 'c-6', 'well again'));
    await informer.stop();
    own.close();
    await proxy.stop();
  });

  await t.test('lists anew when it is time, and then tells only what differs', async (t) => {
    const informer = copy(kube, { relistMs: 1500 });
    await informer.whenSynced();
    let told = 0;
    informer.onChange(() => told++);
    await until('two more lists', () => informer.counters.lists >= 3);
    t.equal(told, 0);
    t.ok(informer.counters.watches >= 2);
    await informer.stop();
  });

  await t.test('started without an API server it waits for it; stopped before, it says so', async (t) => {
    await server.stopApi();
    const informer = copy(kube);
    const other = copy(kube);
    const waiting = t.rejects(other.whenSynced(), /is stopped/);
    await new Promise((resolve) => setTimeout(resolve, 300));
    t.notOk(informer.synced());
    t.equal(informer.ageMs(), Number.POSITIVE_INFINITY);
    await other.stop();
    await waiting;
    await server.startApi();
    await informer.whenSynced();
    t.ok(informer.size > 1000);
    await informer.stop();
  });

  await t.test('a kind that nothing happens to is asked for anew, and that is no fault', async (t) => {
    const informer = copy(kube, { quietMs: 400 });
    await until('some silences', () => informer.counters.silent >= 4);
    t.match(informer.counters, { lists: 1, errors: 0, gone: 0 });
    t.equal(informer.lastError, null);
    await until('it was heard of just now', () => informer.ageMs() < 1000);
    await set('c-7', { a: 'changed' });
    await until('a change', has(informer, 'c-7', 'changed'));
    await informer.stop();
  });
});
