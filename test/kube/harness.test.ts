import { spawn } from 'node:child_process';
import { once } from 'node:events';
import { existsSync } from 'node:fs';
import https from 'node:https';
import path from 'node:path';
import { setTimeout as sleep } from 'node:timers/promises';
import t from 'tap';
import { RequestProxy, WireProxy } from './harness/fault-proxy.ts';
import { noKube } from './harness/programs.ts';
import { KubeServer } from './harness/server.ts';

interface Answer {
  status: number;
  headers: NodeJS.Dict<string | string[]>;
  text: string;
}

t.test('the API server of the tests and what stands in front of it', { skip: noKube() }, async (t) => {
  const server = await KubeServer.start({ users: { jane: ['dev'] } });
  t.teardown(() => server.stop());

  function ask(url: string, options: { path?: string; timeoutMs?: number } = {}): Promise<Answer> {
    return new Promise((resolve, reject) => {
      const request = https.get(
        `${url}${options.path ?? '/api/v1/namespaces/default'}`,
        { ca: server.ca, agent: false, headers: { authorization: `Bearer ${server.token()}` } },
        (response) => {
          let text = '';
          response.setEncoding('utf8').on('data', (part: string) => {
            text += part;
          });
          response.on('end', () =>
            resolve({ status: response.statusCode ?? 0, headers: response.headers, text }),
          );
          response.on('error', reject);
        },
      );
      request.setTimeout(options.timeoutMs ?? 10_000, () => request.destroy(new Error('silent')));
      request.on('error', reject);
    });
  }

  await t.test('users, RBAC and tokens of service accounts are real', async (t) => {
    const jane = server.writeKubeconfig('jane', { user: 'jane' });
    await t.rejects(server.kubectl(['get', 'ns'], { kubeconfig: jane }), /forbidden/);
    await server.kubectl(['create', 'sa', 'one']);
    const token = (await server.kubectl(['create', 'token', 'one'])).trim();
    const one = server.writeKubeconfig('one', { token });
    t.match(
      await server.kubectl(['auth', 'whoami', '-o', 'jsonpath={.status.userInfo.username}'], {
        kubeconfig: one,
      }),
      'system:serviceaccount:default:one',
    );
  });

  await t.test('a restarted API server has what it had', async (t) => {
    await server.apply({ apiVersion: 'v1', kind: 'ConfigMap', metadata: { name: 'kept' }, data: { a: '1' } });
    await server.restart();
    t.equal(await server.kubectl(['get', 'cm', 'kept', '-o', 'jsonpath={.data.a}']), '1');
  });

  await t.test('the wire can be silent, slow, cut and refused', async (t) => {
    const wire = await WireProxy.start(server.url);
    t.equal((await ask(wire.url)).status, 200);
    wire.set('silent');
    await t.rejects(ask(wire.url, { timeoutMs: 300 }), /silent/);
    const held = ask(wire.url);
    await sleep(100);
    wire.set('pass');
    t.equal((await held).status, 200, 'what was held back arrives');
    wire.delay(150);
    const started = performance.now();
    t.equal((await ask(wire.url)).status, 200);
    t.ok(performance.now() - started > 600, 'TLS and the request take at least four ways');
    wire.delay(0);
    wire.set('refuse');
    await t.rejects(ask(wire.url), { code: /ECONNRESET|ECONNREFUSED|EPIPE/ });
    await wire.stop();
  });

  await t.test('single requests can be answered, delayed, lost before and lost after', async (t) => {
    const proxy = await RequestProxy.start(server.url, server.certificate);
    t.equal((await ask(proxy.url)).status, 200);
    proxy.fault = ({ path }) =>
      path.includes('default') ? { status: 429, headers: { 'retry-after': '7' } } : null;
    const refused = await ask(proxy.url);
    t.equal(refused.status, 429);
    t.equal(refused.headers['retry-after'], '7');
    t.equal((await ask(proxy.url, { path: '/version' })).status, 200);
    proxy.fault = () => ({ cut: 'before' });
    await t.rejects(ask(proxy.url));
    proxy.fault = () => ({ cut: 'after' });
    await t.rejects(ask(proxy.url));
    proxy.fault = () => ({ delayMs: 200 });
    const started = performance.now();
    await ask(proxy.url);
    t.ok(performance.now() - started >= 200);
    t.ok(proxy.seen.length >= 6);
    await proxy.stop();
  });

  await t.test('nothing is left when it is stopped', async (t) => {
    const other = await KubeServer.start();
    const { folder, url } = other;
    await other.stop();
    t.notOk(existsSync(folder));
    await t.rejects(ask(url), { code: 'ECONNREFUSED' });
  });

  await t.test('nothing is left when the process that started it is killed', async (t) => {
    const code = `
      import { KubeServer } from ${JSON.stringify(path.join(import.meta.dirname, 'harness/server.ts'))};
      const server = await KubeServer.start();
      console.log(server.url);
      setInterval(() => {}, 1000);`;
    const child = spawn(process.execPath, ['--input-type=module', '-e', code], {
      env: { ...process.env, TMPDIR: server.folder },
      stdio: ['ignore', 'pipe', 'inherit'],
    });
    const [line] = (await once(child.stdout, 'data')) as [Buffer];
    const url = line.toString().trim();
    t.match(url, /^https:/);
    child.kill('SIGKILL');
    await once(child, 'exit');
    await sleep(200);
    await t.rejects(ask(url), { code: 'ECONNREFUSED' });
  });
});
