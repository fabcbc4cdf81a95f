/** Agents that serve TLS: everything between them goes through it, checked by one name and the authority. */
import { spawnSync } from 'node:child_process';
import {
  copyFileSync,
  mkdirSync,
  mkdtempSync,
  readdirSync,
  renameSync,
  rmSync,
  writeFileSync,
} from 'node:fs';
import { request } from 'node:http';
import { tmpdir } from 'node:os';
import path from 'node:path';
import { connect } from 'node:tls';
import t from 'tap';
import { AGENT_TLS_NAME } from '../../lib/core/tls.ts';
import { agentCommand, LocalAgent, LocalCluster, waitFor } from '../../lib/local/cluster.ts';
import { authority, certificate } from '../certificates.ts';
import { differences, fill, replica, source } from './support.ts';

const volume = { namespace: 'default', volume: 'tls' };

/** Serial number of the certificate that is served. */
const served = (port: number, ca: string): Promise<string> =>
  new Promise((resolve, reject) => {
    const socket = connect({
      host: '127.0.0.1',
      port,
      ca,
      servername: AGENT_TLS_NAME,
      rejectUnauthorized: false,
    });
    socket.on('secureConnect', () => {
      resolve(socket.getPeerX509Certificate()?.serialNumber ?? '');
      socket.destroy();
    });
    socket.on('error', reject);
  });

t.test('agents over TLS', { timeout: 120_000 }, async (t) => {
  const folder = mkdtempSync(path.join(tmpdir(), 'sv-tls-'));
  const temporary = path.join(folder, 'tmp');
  mkdirSync(temporary);
  const ca = authority(folder);
  const tls = { ...certificate(folder, 'agent'), ca };
  const cluster = await LocalCluster.start({ nodes: ['a', 'b'], folder, tls, env: { TMPDIR: temporary } });
  t.teardown(async () => {
    await cluster.stop();
    rmSync(folder, { recursive: true, force: true });
  });
  const a = cluster.agent('a');
  const b = cluster.agent('b');
  mkdirSync(a.live(volume), { recursive: true });
  fill(a.live(volume), 50, 20_000);

  await t.test('a volume is seeded and follows, by requests and by rclone', async (t) => {
    await cluster.watch('a', volume, { targets: ['b'], debounce: '200ms' });
    await waitFor('the seed', async () => (await replica(b, volume)).freshAgeMs !== null, 30_000);
    t.strictSame(await differences(cluster, volume, 'a', 'b'), []);
    writeFileSync(path.join(a.live(volume), 'later'), 'more');
    await waitFor(
      'the change',
      async () => (await differences(cluster, volume, 'a', 'b')).length === 0,
      30_000,
    );
    t.match((await source(a, volume)).targets, [{ url: /^https:/ }]);
    t.strictSame(readdirSync(temporary), [], 'no socket of a pull is left');
  });

  await t.test('plain HTTP gets no answer', async (t) => {
    const plain = (url: string): Promise<number> =>
      new Promise((resolve, reject) => {
        const sent = request(url.replace('https:', 'http:'), (response) => resolve(response.statusCode ?? 0));
        sent.on('error', reject);
        sent.end();
      });
    await t.rejects(plain(`${a.url}/readyz`));
    await t.rejects(plain(`${a.webdavUrl}/browse/`));
  });

  await t.test('renewed files are served without a restart; unusable ones never', async (t) => {
    const port = Number(new URL(b.url).port);
    const dav = Number(new URL(b.webdavUrl).port);
    const before = await served(port, ca);
    copyFileSync(tls.key, `${tls.key}.old`);
    writeFileSync(`${tls.cert}.new`, 'no certificate');
    renameSync(`${tls.cert}.new`, tls.cert);
    await waitFor('a warning', async () => /new certificate is not usable/.test(b.logTail(40)), 15_000);
    t.equal(await served(port, ca), before);
    const next = certificate(folder, 'next');
    renameSync(next.key, tls.key);
    renameSync(next.cert, tls.cert);
    await waitFor('the new one', async () => (await served(port, ca)) !== before, 15_000);
    t.equal(await served(dav, ca), await served(port, ca));
  });

  await t.test('an agent of another authority gets neither data nor tokens', async (t) => {
    const foreign = path.join(folder, 'foreign');
    mkdirSync(foreign);
    authority(foreign, 'other');
    const stranger = certificate(foreign, 'stranger', { ca: 'other' });
    const c = new LocalAgent({
      node: 'c',
      folder: foreign,
      httpPort: Number(new URL(a.url).port) - 1,
      webdavPort: Number(new URL(a.webdavUrl).port) - 2,
      token: 'the-token-of-a-stranger',
      tls: { ...stranger, ca: path.join(foreign, 'other.crt') },
    });
    await c.start();
    t.teardown(() => c.stop());
    writeFileSync(path.join(a.live(volume), 'secret'), 'not for strangers');
    await a.call('POST', '/replication/watch/start', {
      ...volume,
      epoch: 1,
      source: { url: a.url, webdavUrl: a.webdavUrl },
      targets: [
        { node: 'b', url: b.url, token: b.token },
        { node: 'c', url: c.url, token: c.token },
      ],
      debounce: '200ms',
    });
    const target = await waitFor(
      'the refusal',
      async () => {
        const found = (await source(a, volume)).targets.find((one) => one.node === 'c');
        return found?.lastError ? found : null;
      },
      30_000,
    );
    t.match(JSON.stringify(target), /CERT|SIGNATURE|SELF_SIGNED|UNABLE_TO/);
    await waitFor(
      'the other one',
      async () => (await differences(cluster, volume, 'a', 'b')).length === 0,
      30_000,
    );
    t.equal(await c.status(volume), null, 'it was never spoken to');
  });
});

t.test('a wrong pair is named before anything listens', async (t) => {
  const folder = t.testdir({ token: 'a-token-of-enough-length', pool: {}, junk: 'junk' });
  const token = path.join(folder, 'token');
  spawnSync('chmod', ['600', token]);
  authority(folder);
  const good = certificate(folder, 'good');
  const other = certificate(folder, 'other');
  const named = certificate(folder, 'named', { dns: 'example.org' });
  const junk = path.join(folder, 'junk');
  const run = (...flags: string[]): { status: number | null; stderr: string } => {
    const [program, ...args] = agentCommand();
    const base = ['agent', '--node', 'a', '--pool-name', 'p', '--pool-path', path.join(folder, 'pool')];
    return spawnSync(
      program as string,
      [...args, ...base, '--token-file', token, '--http', '127.0.0.1:0', '--webdav', '127.0.0.1:0', ...flags],
      { encoding: 'utf8', timeout: 20_000 },
    );
  };
  for (const [flags, words] of [
    [['--tls-cert', good.cert], /--tls-key is required together/],
    [['--tls-key', good.key], /--tls-cert is required together/],
    [['--tls-cert', good.cert, '--tls-key', other.key], /--tls-key .*other\.key is no key for .*good\.crt/],
    [['--tls-cert', junk, '--tls-key', good.key], /--tls-cert .*junk holds no PEM certificate/],
    [
      ['--tls-cert', named.cert, '--tls-key', named.key],
      /must carry the DNS name simple-volume-agent.*example\.org/,
    ],
    [['--tls-cert', `${junk}2`, '--tls-key', good.key], /--tls-cert .*junk2 cannot be read: ENOENT/],
    [['--ca-file', junk], /--ca-file .*junk holds no PEM certificate/],
  ] as const) {
    const { status, stderr } = run(...flags);
    t.equal(status, 2, stderr);
    t.match(stderr, words);
  }
});
