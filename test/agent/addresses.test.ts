/** Agents that listen on all addresses and are reached by IPv6, as in pods of clusters with IPv6 alone or with both. */
import { existsSync, mkdirSync, mkdtempSync, rmSync, writeFileSync } from 'node:fs';
import { tmpdir } from 'node:os';
import path from 'node:path';
import t from 'tap';
import { LocalCluster, waitFor } from '../../lib/local/cluster.ts';
import { authority, certificate } from '../certificates.ts';
import { differences, fill, replica, source } from './support.ts';

const volume = { namespace: 'default', volume: 'six' };
const skip = existsSync('/proc/net/if_inet6') ? false : 'no IPv6 here';

for (const secure of [false, true]) {
  t.test(`IPv6 ${secure ? 'with' : 'without'} TLS (I5)`, { skip, timeout: 120_000 }, async (t) => {
    const folder = mkdtempSync(path.join(tmpdir(), 'sv-six-'));
    const tls = secure ? { ca: authority(folder), ...certificate(folder, 'agent') } : undefined;
    const cluster = await LocalCluster.start({
      nodes: ['a', 'b'],
      folder,
      host: '::1',
      ...(tls ? { tls } : {}),
    });
    t.teardown(async () => {
      await cluster.stop();
      rmSync(folder, { recursive: true, force: true });
    });
    const a = cluster.agent('a');
    const b = cluster.agent('b');
    t.match(a.url, /^https?:\/\/\[::1\]:\d+$/);
    mkdirSync(a.live(volume), { recursive: true });
    fill(a.live(volume), 20, 20_000);
    await cluster.watch('a', volume, { targets: ['b'], debounce: '100ms' });
    await waitFor('the seed', async () => (await replica(b, volume)).freshAgeMs !== null);
    t.strictSame(await differences(cluster, volume, 'a', 'b'), []);
    t.match((await source(a, volume)).targets, [{ url: b.url }]);

    // An address that nobody gave: the source names itself by what is advertised.
    await b.call('POST', '/replication/watch/stop', volume).catch(() => undefined);
    await a.call('POST', '/replication/watch/start', {
      ...volume,
      epoch: 1,
      targets: [{ node: 'b', url: b.url, token: b.token }],
      debounce: '100ms',
    });
    writeFileSync(path.join(a.live(volume), 'later'), 'more');
    await waitFor('the change', async () => (await differences(cluster, volume, 'a', 'b')).length === 0);

    if (!secure) {
      const four = a.url.replace('[::1]', '127.0.0.1');
      t.equal((await fetch(`${four}/readyz`)).status, 200, 'the same port answers by IPv4');
      const dav = a.webdavUrl.replace('[::1]', '127.0.0.1');
      t.equal((await fetch(`${dav}/browse/`)).status, 401);
    }
  });
}
