/** The chart and a real API server: what it admits, what it knows of every field, and who comes through the proxy. */
import { execFileSync, spawn } from 'node:child_process';
import { existsSync, mkdtempSync, readdirSync, readFileSync, rmSync, writeFileSync } from 'node:fs';
import http from 'node:http';
import https from 'node:https';
import type { AddressInfo } from 'node:net';
import { tmpdir } from 'node:os';
import path from 'node:path';
import t from 'tap';
import { FENCE_LEASE_KEY } from '../../controller/act/fence.ts';
import { waitFor } from '../../lib/local/cluster.ts';
import { kubeProgram, NO_RBAC_PROXY, noKube, rbacProxy } from '../kube/harness/programs.ts';
import { freePort, KubeServer } from '../kube/harness/server.ts';
import {
  CHART,
  type Container,
  NAMESPACE,
  type Plain,
  parse,
  pick,
  podsOf,
  SETS,
  template,
} from './rendering.ts';
import { LOCATION, writeSchemas } from './schemas.ts';

const skip = noKube(['etcd', 'kube-apiserver', 'kubectl', 'helm', 'kubeconform']);
const examples = readdirSync(path.join(CHART, 'examples')).filter((one) => !one.startsWith('values'));
const example = (name: string): string => readFileSync(path.join(CHART, 'examples', name), 'utf8');

t.test('on a real API server', { skip, timeout: 400_000 }, async (t) => {
  const server = await KubeServer.start({ crds: [path.join(CHART, 'crds')] });
  t.teardown(() => server.stop());
  await server.kubectl(['create', 'namespace', NAMESPACE]);
  const dryRun = (input: string, namespace = NAMESPACE): Promise<string> =>
    server.kubectl(['apply', '--dry-run=server', '--validate=strict', '-n', namespace, '-f', '-'], { input });

  await t.test('it takes everything, with any set of values, and the examples', async (t) => {
    for (const [name, values] of Object.entries(SETS)) {
      // Kinds of another project, which has no part here.
      const known = parse(template(values)).filter(
        (one) => !one.apiVersion.startsWith('monitoring.coreos.com/'),
      );
      t.match(
        await dryRun(JSON.stringify({ apiVersion: 'v1', kind: 'List', items: known })),
        /deployment\.apps\/sv-controller created/,
        name,
      );
    }
    for (const file of examples) t.match(await dryRun(example(file)), /created \(server dry run\)/, file);
  });

  await t.test('kubeconform knows every field, by schemas of this very server', async (t) => {
    const folder = mkdtempSync(path.join(tmpdir(), 'sv-schemas-'));
    t.teardown(() => rmSync(folder, { recursive: true, force: true }));
    const count = await writeSchemas(server, folder);
    t.ok(count > 100, `${count} kinds`);
    const conform = (
      input: string,
      ...more: string[]
    ): { status: string; resources: Plain[]; summary: Plain } => {
      const args = [
        '-strict',
        '-summary',
        '-verbose',
        '-output',
        'json',
        '-schema-location',
        path.join(folder, LOCATION),
        ...more,
      ];
      try {
        return {
          status: 'ok',
          ...JSON.parse(
            execFileSync(kubeProgram('kubeconform') as string, args, { input, encoding: 'utf8' }),
          ),
        };
      } catch (error) {
        return { status: 'refused', ...JSON.parse(String((error as { stdout: string }).stdout)) };
      }
    };
    const crds = readdirSync(path.join(CHART, 'crds')).map((file) =>
      readFileSync(path.join(CHART, 'crds', file), 'utf8'),
    );
    const volume = `apiVersion: storage.shipstuff.io/v1alpha1
kind: SimpleVolume
metadata: { name: demo, namespace: default }
spec: { claimName: demo, volumeName: pvc-1, storageClassName: simple-volume, pool: default }
`;
    const inputs: Record<string, string> = {
      ...Object.fromEntries(Object.entries(SETS).map(([name, values]) => [name, template(values)])),
      examples: examples.map(example).join('\n---\n'),
      CRDs: crds.join('\n---\n'),
      'an object of ours': volume,
    };
    for (const [name, input] of Object.entries(inputs)) {
      const { status, resources, summary } = conform(input, '-skip', 'PodMonitor,PrometheusRule');
      t.equal(
        status,
        'ok',
        `${name}: ${JSON.stringify(resources.filter((one) => /Invalid|Error/.test(one.status)))}`,
      );
      t.match(
        summary,
        { valid: parse(input).length - (name === 'everything' ? 2 : 0), invalid: 0, errors: 0 },
        name,
      );
    }
    const plain = template();
    const wrong: [string, string, RegExp][] = [
      [
        'a field that is not there',
        plain.replace('  replicas: 2', '  replicas: 2\n  replica: 3'),
        /additional.*replica/is,
      ],
      [
        'one deep in a pod',
        plain.replace('enableServiceLinks:', 'enableServiceLink:'),
        /additional.*enableServiceLink/is,
      ],
      ['a value of another type', plain.replace('  replicas: 2', '  replicas: "2"'), /replicas/],
      ['a field that is missing', plain.replace(/roleRef: .*\n/, ''), /roleRef/],
      ['a field of ours that is not there', volume.replace('pool:', 'pools:'), /pool/],
      [
        'a value of ours that is not allowed',
        volume.replace('pool: default', 'pool: default, policy: { consistencyMode: dead }'),
        /consistencyMode/,
      ],
      [
        'a key that is there twice',
        plain.replace('  replicas: 2', '  replicas: 2\n  replicas: 2'),
        /replicas/,
      ],
    ];
    for (const [name, input, words] of wrong) {
      t.not(input, name.includes('ours') ? volume : plain, `${name}: the input is another one`);
      const { status, resources } = conform(input);
      t.equal(status, 'refused', name);
      t.match(JSON.stringify(resources.filter((one) => /Invalid|Error/.test(one.status))), words, name);
    }
  });

  await t.test(
    'an installation after an uninstall finds who led last and what that one may have granted',
    async (t) => {
      const home = mkdtempSync(path.join(tmpdir(), 'sv-helm-'));
      t.teardown(() => rmSync(home, { recursive: true, force: true }));
      const helm = (...args: string[]): string =>
        execFileSync(kubeProgram('helm') as string, args, {
          encoding: 'utf8',
          env: { PATH: process.env.PATH, KUBECONFIG: server.kubeconfig, HOME: home },
        });
      const install = (): string =>
        helm('upgrade', '--install', 'again', CHART, '-n', 'again', '--create-namespace');
      const read = async (kind: string, name: string): Promise<Plain> => {
        const { metadata, spec, data } = JSON.parse(
          await server.kubectl(['get', kind, name, '-n', 'again', '-o', 'json']),
        );
        return { uid: metadata.uid, grants: metadata.annotations[FENCE_LEASE_KEY], spec, data };
      };
      install();
      t.match(await read('lease', 'again-controller'), { grants: undefined, spec: {} }, 'nobody has led');
      const led = {
        metadata: { annotations: { [FENCE_LEASE_KEY]: '8000' } },
        spec: { holderIdentity: 'one', leaseTransitions: 7 },
      };
      await server.kubectl([
        'patch',
        'lease',
        'again-controller',
        '-n',
        'again',
        '--type=merge',
        '-p',
        JSON.stringify(led),
      ]);
      const lease = await read('lease', 'again-controller');
      const secret = await read('secret', 'again-agents');
      install();
      t.strictSame(await read('lease', 'again-controller'), lease, 'after an upgrade');
      helm('uninstall', 'again', '-n', 'again');
      install();
      t.strictSame(await read('lease', 'again-controller'), lease, 'after a new installation');
      t.match(lease, { grants: '8000', spec: { holderIdentity: 'one', leaseTransitions: 7 } });
      t.strictSame(await read('secret', 'again-agents'), secret, 'and the token and the authority');
      helm('uninstall', 'again', '-n', 'again');
    },
  );

  await t.test(
    'pod security: the controller needs no right at all, an agent only its directories, csi-node is privileged',
    async (t) => {
      for (const level of ['restricted', 'baseline', 'privileged']) {
        await server.kubectl(['create', 'namespace', level]);
        await server.kubectl(['label', 'namespace', level, `pod-security.kubernetes.io/enforce=${level}`]);
      }
      const admitted = async (pod: Plain, level: string): Promise<string> => {
        const { metadata, spec } = pod;
        const probe = { apiVersion: 'v1', kind: 'Pod', metadata: { ...metadata, name: 'probe' }, spec };
        try {
          await dryRun(JSON.stringify(probe), level);
          return 'admitted';
        } catch (error) {
          return (
            /violates PodSecurity "[^"]*": (.*)$/s.exec((error as Error).message)?.[1] ??
            (error as Error).message
          );
        }
      };
      for (const [name, values] of Object.entries(SETS)) {
        for (const [workload, pod] of podsOf(parse(template(values)))) {
          const at = `${name}: ${workload}`;
          // A class that is not in this cluster.
          if (pod.spec.priorityClassName === 'important') delete pod.spec.priorityClassName;
          t.equal(await admitted(pod, 'privileged'), 'admitted', at);
          if (workload.endsWith('-controller')) {
            t.equal(await admitted(pod, 'restricted'), 'admitted', `${at} under the strictest level`);
            continue;
          }
          const baseline = await admitted(pod, 'baseline');
          if (workload.includes('-agent-')) {
            t.match(
              baseline,
              /^hostPath volumes \(volumes "pool", "run"\)$/,
              `${at}: the directories of the host are all that baseline minds`,
            );
            const without = structuredClone(pod);
            for (const volume of without.spec.volumes) {
              if (!volume.hostPath) continue;
              delete volume.hostPath;
              volume.emptyDir = {};
            }
            t.equal(await admitted(without, 'baseline'), 'admitted', `${at} without them`);
            // Files of all owners: root with three capabilities, which the strictest level forbids to everybody.
            t.match(
              await admitted(without, 'restricted'),
              /^unrestricted capabilities .*DAC_OVERRIDE.*runAsNonRoot/s,
              at,
            );
          } else t.match(baseline, /privileged \(/, at);
        }
      }
    },
  );

  const proxy = rbacProxy();
  await t.test(
    'kube-rbac-proxy runs with the arguments, the file and the certificate that are rendered',
    { skip: proxy === null && NO_RBAC_PROXY },
    async (t) => {
      const folder = mkdtempSync(path.join(tmpdir(), 'sv-proxy-'));
      const objects = parse(template());
      const at = (name: string): string => path.join(folder, name);
      const secret = pick(objects, 'Secret/sv-trigger').data;
      for (const name of ['tls.crt', 'tls.key', 'ca.crt'])
        writeFileSync(at(name), Buffer.from(secret[name], 'base64'), { mode: 0o600 });
      writeFileSync(at('config.yaml'), pick(objects, 'ConfigMap/sv-trigger').data['config.yaml']);
      const upstream = http.createServer((request, response) => response.end(`seen ${request.url}\n`));
      await new Promise<void>((resolve) => upstream.listen(0, '127.0.0.1', resolve));
      const [port, health] = [await freePort(), await freePort()];
      const containers = podsOf(objects).get('sv-controller').spec.containers as Container[];
      const args = containers
        .find((one) => one.name === 'kube-rbac-proxy')
        ?.args.map((one) =>
          one
            .replace(/\/(proxy|trigger-tls)\//, `${folder}/`)
            .replace(':8443', `:${port}`)
            .replace('=8444', `=${health}`)
            .replace(':8082', `:${(upstream.address() as AddressInfo).port}`),
        ) as string[];
      const child = spawn(
        'setpriv',
        ['--pdeathsig', 'KILL', proxy as string, ...args, `--kubeconfig=${server.kubeconfig}`],
        { stdio: ['ignore', 'ignore', 'pipe'] },
      );
      let said = '';
      child.stderr.on('data', (chunk: Buffer) => {
        said += chunk;
      });
      const ended = new Promise((resolve) => child.on('exit', resolve));
      t.teardown(async () => {
        child.kill('SIGKILL');
        await ended;
        upstream.close();
        rmSync(folder, { recursive: true, force: true });
      });
      const ask = (
        to: number,
        where: string,
        host = '127.0.0.1',
        token?: string,
      ): Promise<[number, string]> =>
        new Promise((resolve, reject) => {
          https
            .request(
              {
                host,
                port: to,
                path: where,
                method: 'POST',
                agent: false,
                timeout: 5000,
                ca: readFileSync(at('ca.crt')),
                servername: `sv-trigger.${NAMESPACE}.svc`,
                headers: token ? { authorization: `Bearer ${token}` } : {},
              },
              (response) => {
                let text = '';
                response.on('data', (chunk: Buffer) => {
                  text += chunk;
                });
                response.on('end', () => resolve([response.statusCode ?? 0, text]));
              },
            )
            .on('error', reject)
            .end();
        });
      await waitFor('the proxy answers its probe', async () => {
        if (child.exitCode !== null) throw new Error(said);
        return (await ask(health, '/healthz'))[0] === 200;
      });
      await server.kubectl(['create', 'namespace', 'games']);
      await server.kubectl(['apply', '-n', 'games', '-f', '-'], { input: example('manual-sync-rbac.yaml') });
      await server.kubectl(['create', 'serviceaccount', 'stranger', '-n', 'games']);
      const tokenOf = async (name: string): Promise<string> =>
        (await server.kubectl(['create', 'token', name, '-n', 'games'])).trim();
      const trigger = '/replication/full-sync/trigger?namespace=';
      const backup = await tokenOf('backup');
      t.strictSame(await ask(port, `${trigger}games`, '127.0.0.1', backup), [200, `seen ${trigger}games\n`]);
      t.equal((await ask(port, `${trigger}default`, '127.0.0.1', backup))[0], 403, 'in its namespace only');
      t.equal((await ask(port, `${trigger}games`, '127.0.0.1', await tokenOf('stranger')))[0], 403);
      t.equal((await ask(port, `${trigger}games`))[0], 401);
      if (existsSync('/proc/net/if_inet6'))
        t.equal((await ask(port, `${trigger}games`, '::1', backup))[0], 200, 'IPv6 too');
    },
  );
});
