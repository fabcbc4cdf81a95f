/** The manual full sync: who may, what is refused, and that its end is kept in the cluster; with both guards. */
import { type ChildProcess, spawn } from 'node:child_process';
import { writeFileSync } from 'node:fs';
import http from 'node:http';
import https from 'node:https';
import net from 'node:net';
import path from 'node:path';
import tap from 'tap';
import { SIMPLE_VOLUMES } from '../../controller/cluster/index.ts';
import { builtinGuard, proxyGuard } from '../../controller/trigger/guard.ts';
import { clusterRuns, REQUEST_KEY } from '../../controller/trigger/runs.ts';
import { startTrigger, type TriggerServer } from '../../controller/trigger/server.ts';
import { NO_RBAC_PROXY, noKube, rbacProxy } from './harness/programs.ts';
import { freePort, KubeServer } from './harness/server.ts';
import { clock, kubeOf, quiet, until } from './helpers.ts';

const CRDS = path.join(import.meta.dirname, '../../chart/crds');
const TRIGGER = '/replication/full-sync/trigger';

interface Answer {
  status: number;
  headers: http.IncomingHttpHeaders;
  body: {
    started?: boolean;
    reason?: string;
    id?: string;
    state?: string;
    outcome?: string;
    error?: { code: string; message: string; field?: string };
  };
}

interface Ask {
  method?: string;
  token?: string | undefined;
  body?: unknown;
  /** as it is, instead of JSON */
  raw?: string;
  ca?: string;
}

function ask(base: string, to: string, options: Ask = {}): Promise<Answer> {
  const payload = options.raw ?? (options.body === undefined ? '' : JSON.stringify(options.body));
  return new Promise((resolve, reject) => {
    const request = (base.startsWith('https:') ? https : http).request(
      base + to,
      {
        method: options.method ?? 'POST',
        agent: false,
        ...(options.ca === undefined ? {} : { ca: options.ca }),
        headers: {
          'content-type': 'application/json',
          'content-length': Buffer.byteLength(payload),
          ...(options.token === undefined ? {} : { authorization: `Bearer ${options.token}` }),
        },
      },
      (response) => {
        let text = '';
        response.setEncoding('utf8').on('data', (part: string) => {
          text += part;
        });
        response.on('end', () => {
          let body = {};
          try {
            body = JSON.parse(text);
          } catch {
            body = { error: { code: 'none', message: text } };
          }
          resolve({ status: response.statusCode ?? 0, headers: response.headers, body });
        });
      },
    );
    request.on('error', reject);
    request.setTimeout(10_000, () => request.destroy(new Error('no answer')));
    request.end(payload);
  });
}

tap.test('the manual full sync', { skip: noKube(), timeout: 60_000 }, async (t) => {
  const server = await KubeServer.start({ crds: [CRDS] });
  const kube = kubeOf(server.kubeconfig);
  const opened: TriggerServer[] = [];
  t.teardown(async () => {
    for (const one of opened) await one.close();
    kube.close();
    await server.stop();
  });
  await server.kubectl(['create', 'ns', 'games']);
  await server.kubectl(['create', 'ns', 'other']);
  await server.kubectl(['-n', 'games', 'create', 'sa', 'allowed']);
  await server.kubectl(['-n', 'games', 'create', 'sa', 'stranger']);
  await server.apply(
    {
      apiVersion: 'rbac.authorization.k8s.io/v1',
      kind: 'Role',
      metadata: { name: 'manual-sync', namespace: 'games' },
      rules: [
        { apiGroups: ['storage.shipstuff.io'], resources: ['simplevolumes/manualsync'], verbs: ['create'] },
      ],
    },
    {
      apiVersion: 'rbac.authorization.k8s.io/v1',
      kind: 'RoleBinding',
      metadata: { name: 'manual-sync', namespace: 'games' },
      subjects: [{ kind: 'ServiceAccount', name: 'allowed', namespace: 'games' }],
      roleRef: { apiGroup: 'rbac.authorization.k8s.io', kind: 'Role', name: 'manual-sync' },
    },
  );
  const token = async (name: string): Promise<string> =>
    (await server.kubectl(['-n', 'games', 'create', 'token', name])).trim();
  const allowed = await token('allowed');
  const stranger = await token('stranger');
  for (const namespace of ['games', 'other']) {
    for (const name of ['saves', 'more', 'third']) {
      await kube.create(SIMPLE_VOLUMES, {
        apiVersion: 'storage.shipstuff.io/v1alpha1',
        kind: 'SimpleVolume',
        metadata: { name, namespace },
        spec: { claimName: name, volumeName: `pvc-${name}`, storageClassName: 'fast', pool: 'default' },
      });
    }
  }
  const runs = clusterRuns(kube, () => Date.now());
  const logged: unknown[] = [];
  const logger = {
    ...quiet,
    info: (data: object) => logged.push(data),
    warn: (data: object) => logged.push(data),
  };

  /** What both guards have in common. */
  async function contract(
    t: Pick<typeof tap, 'equal' | 'match' | 'not' | 'strictSame'>,
    url: string,
    claim: string,
    options: { ca?: string; token?: string },
  ): Promise<void> {
    const body = { namespace: 'games', claimName: claim };
    const query = `${TRIGGER}?namespace=games`;
    const started = await ask(url, query, { ...options, body });
    t.equal(started.status, 202, JSON.stringify(started.body));
    t.equal(started.body.started, true);
    const id = started.body.id as string;
    const twice = await ask(url, query, { ...options, body });
    t.equal(twice.status, 202);
    t.strictSame(twice.body, { started: false, reason: 'already-running', id });
    const waits = await ask(url, `/replication/full-sync/runs/${id}?namespace=games`, options);
    t.equal(waits.body.state, 'queued');
    // The leader takes it up and ends it: all of it is in the status.
    const object = await kube.get(SIMPLE_VOLUMES, { namespace: 'games', name: claim });
    t.match(object.metadata.annotations?.[REQUEST_KEY], id);
    const begun = await kube.merge(
      SIMPLE_VOLUMES,
      { namespace: 'games', name: claim },
      {
        metadata: { annotations: { [REQUEST_KEY]: null } },
      },
    );
    const lastFullSync = { id, trigger: 'Manual', startedAt: '2026-01-02T03:04:05Z' };
    const running = await kube.replace(
      SIMPLE_VOLUMES,
      { ...begun, status: { lastFullSync } },
      { subresource: 'status' },
    );
    t.equal((await ask(url, query, { ...options, body })).body.reason, 'already-running');
    await kube.replace(
      SIMPLE_VOLUMES,
      {
        ...running,
        status: { lastFullSync: { ...lastFullSync, endedAt: '2026-01-02T03:05:05Z', outcome: 'Succeeded' } },
      },
      { subresource: 'status' },
    );
    const ended = await ask(url, `/replication/full-sync/runs/${id}?namespace=games`, options);
    t.equal(ended.status, 200);
    t.match(ended.body, { id, state: 'ended', outcome: 'Succeeded' });
    t.equal(
      (await ask(url, `/replication/full-sync/runs/${id}?namespace=games`, { ...options, method: 'POST' }))
        .status,
      200,
      'whoever may create may ask as well',
    );
    const next = await ask(url, query, { ...options, body });
    t.equal(next.body.started, true, 'the next one begins anew');
    t.not(next.body.id, id);

    t.equal((await ask(url, query, { ...options, body: { ...body, namespace: 'other' } })).status, 403);
    t.equal((await ask(url, query, { ...options, body: { ...body, claimName: 'unknown' } })).status, 404);
    for (const [raw, field] of [
      ['', undefined],
      ['{', undefined],
      ['[]', undefined],
      ['null', undefined],
      ['{"namespace":"games"}', 'claimName'],
      ['{"namespace":1,"claimName":"saves"}', 'namespace'],
      ['{"namespace":"games","claimName":"../x"}', 'claimName'],
      ['{"namespace":"games","claimName":"saves","more":1}', 'more'],
    ] as const) {
      const junk = await ask(url, query, { ...options, raw });
      t.equal(junk.status, 400, raw);
      if (field) t.equal(junk.body.error?.field, field, raw);
    }
    const large = await ask(url, query, { ...options, raw: `{"namespace":"${'x'.repeat(5000)}"}` });
    t.equal(large.status, 413);
    t.equal((await ask(url, `${TRIGGER}x?namespace=games`, options)).status, 404);
    t.equal(
      (await ask(url, '/replication/full-sync/runs/manual-000000?namespace=games', options)).status,
      404,
    );
  }

  await t.test(
    'builtin guard: TLS, and the API server is asked who it is and whether they may',
    async (t) => {
      const { cert, key } = server.certificate;
      const [certFile, keyFile] = ['trigger.crt', 'trigger.key'].map((name) =>
        path.join(server.folder, name),
      );
      writeFileSync(certFile as string, cert);
      writeFileSync(keyFile as string, key, { mode: 0o600 });
      const trigger = await startTrigger({
        guard: builtinGuard(kube, clock),
        runs,
        logger,
        host: '127.0.0.1',
        port: 0,
        tls: { certFile: certFile as string, keyFile: keyFile as string },
      });
      opened.push(trigger);
      t.match(trigger.url, /^https:/);
      await contract(t, trigger.url, 'saves', { ca: cert, token: allowed });
      const query = `${TRIGGER}?namespace=games`;
      const body = { namespace: 'games', claimName: 'saves' };
      const none = await ask(trigger.url, query, { ca: cert, body });
      t.equal(none.status, 401);
      t.equal(none.headers['www-authenticate'], 'Bearer');
      t.equal((await ask(trigger.url, query, { ca: cert, body, token: 'made-up' })).status, 401);
      const other = await ask(trigger.url, query, { ca: cert, body, token: stranger });
      t.equal(other.status, 403);
      t.match(other.body.error?.message, 'system:serviceaccount:games:stranger');
      t.equal(
        (
          await ask(trigger.url, `${TRIGGER}?namespace=other`, {
            ca: cert,
            token: allowed,
            body: { namespace: 'other', claimName: 'saves' },
          })
        ).status,
        403,
        'allowed in games says nothing of other',
      );
      t.equal((await ask(trigger.url, TRIGGER, { ca: cert, body, token: allowed })).status, 400);
      t.equal(
        (await ask(trigger.url, `${query}&namespace=other`, { ca: cert, body, token: allowed })).status,
        400,
        'two namespaces in one query',
      );
      for (const method of ['GET', 'PUT', 'DELETE']) {
        const refused = await ask(trigger.url, query, { ca: cert, token: allowed, method });
        t.equal(refused.status, 405, method);
        t.equal(refused.headers.allow, 'POST');
      }
      const before = kube.counters.requests;
      await ask(trigger.url, '/replication/full-sync/runs/manual-000000?namespace=games', {
        ca: cert,
        token: allowed,
      });
      t.equal(kube.counters.requests - before, 1, 'answers of the API server are used for a moment');
      const text = JSON.stringify(logged);
      for (const secret of [allowed, stranger, 'made-up'])
        t.notOk(text.includes(secret), 'no token in the log');
    },
  );

  await t.test('a guard that cannot guard is refused at the start', async (t) => {
    const shared = { runs, logger, port: 0 };
    await t.rejects(startTrigger({ ...shared, guard: proxyGuard, host: '0.0.0.0' }), {
      code: 'FIELD_INVALID',
    });
    await t.rejects(startTrigger({ ...shared, guard: builtinGuard(kube, clock), host: '127.0.0.1' }), {
      code: 'FIELD_INVALID',
    });
  });

  await t.test('of two that ask at the same time one starts it (I2)', async (t) => {
    const answers = await Promise.all(Array.from({ length: 6 }, () => runs.start('other', 'third')));
    t.equal(answers.filter((one) => one?.started).length, 1);
    t.equal(new Set(answers.map((one) => one?.id)).size, 1, 'all are told the same run');
  });

  const program = rbacProxy();
  await t.test(
    'proxy guard: through kube-rbac-proxy',
    {
      skip: program === null && NO_RBAC_PROXY,
    },
    async (t) => {
      const trigger = await startTrigger({ guard: proxyGuard, runs, logger, host: '127.0.0.1', port: 0 });
      opened.push(trigger);
      await contract(t, trigger.url, 'more', {});
      const config = path.join(server.folder, 'proxy.yaml');
      writeFileSync(
        config,
        JSON.stringify({
          authorization: {
            rewrites: { byQueryParameter: { name: 'namespace' } },
            resourceAttributes: {
              apiGroup: 'storage.shipstuff.io',
              apiVersion: 'v1alpha1',
              resource: 'simplevolumes',
              subresource: 'manualsync',
              namespace: '{{ .Value }}',
            },
          },
        }),
      );
      const { key } = server.certificate;
      writeFileSync(path.join(server.folder, 'proxy.key'), key, { mode: 0o600 });
      const port = await freePort();
      const child: ChildProcess = spawn(
        'setpriv',
        [
          ...['--pdeathsig', 'KILL', program as string],
          `--secure-listen-address=127.0.0.1:${port}`,
          `--upstream=${trigger.url}/`,
          `--config-file=${config}`,
          `--kubeconfig=${server.kubeconfig}`,
          `--tls-cert-file=${path.join(server.folder, 'pki/apiserver.crt')}`,
          `--tls-private-key-file=${path.join(server.folder, 'proxy.key')}`,
        ],
        { stdio: ['ignore', 'ignore', 'pipe'] },
      );
      let output = '';
      child.stderr?.on('data', (part: Buffer) => {
        output += part;
      });
      t.teardown(() => child.kill('SIGKILL'));
      let listens = false;
      const knock = setInterval(() => {
        const socket = net.connect(port, '127.0.0.1', () => {
          listens = true;
          socket.destroy();
        });
        socket.on('error', () => {});
      }, 100);
      await until(`kube-rbac-proxy listens: ${output}`, () => listens || child.exitCode !== null);
      clearInterval(knock);
      t.equal(child.exitCode, null, output);
      const url = `https://127.0.0.1:${port}`;
      const ca = server.ca;
      const body = { namespace: 'games', claimName: 'third' };
      const query = `${TRIGGER}?namespace=games`;
      t.equal((await ask(url, query, { ca, body })).status, 401);
      t.equal((await ask(url, query, { ca, body, token: stranger })).status, 403);
      const started = await ask(url, query, { ca, body, token: allowed });
      t.equal(started.status, 202, JSON.stringify(started.body));
      t.equal(started.body.started, true);
      t.equal(
        (await ask(url, query, { ca, token: allowed, body: { ...body, namespace: 'other' } })).status,
        403,
        'permission in games does not reach a volume of another namespace',
      );
      t.equal((await ask(url, `${TRIGGER}?namespace=other`, { ca, token: allowed, body })).status, 403);
      const run = `/replication/full-sync/runs/${started.body.id}?namespace=games`;
      t.equal(
        (await ask(url, run, { ca, token: allowed })).status,
        200,
        'the documented role is enough to ask',
      );
      t.equal((await ask(url, run, { ca, token: stranger })).status, 403);
    },
  );
});
