/** The chart and a real API server: what it admits, what it knows of every field, and what helm keeps from one release to the next. */
import { execFileSync, spawn } from 'node:child_process';
import { createPrivateKey, X509Certificate } from 'node:crypto';
import { existsSync, mkdtempSync, readdirSync, readFileSync, rmSync, writeFileSync } from 'node:fs';
import http from 'node:http';
import https from 'node:https';
import type { AddressInfo } from 'node:net';
import { tmpdir } from 'node:os';
import path from 'node:path';
import t from 'tap';
import { AGENT_TLS_NAME } from '../../lib/core/tls.ts';
import { waitFor } from '../../lib/local/cluster.ts';
import { kubeProgram, NO_RBAC_PROXY, noKube, rbacProxy } from '../kube/harness/programs.ts';
import { freePort, KubeServer } from '../kube/harness/server.ts';
import {
  CHART,
  type Container,
  flagsOf,
  helm,
  NAMESPACE,
  type Plain,
  parse,
  pick,
  podsOf,
  RELEASE,
  SETS,
  template,
  type Values,
} from './rendering.ts';
import { LOCATION, writeSchemas } from './schemas.ts';

const skip = noKube(['etcd', 'kube-apiserver', 'kubectl', 'helm', 'kubeconform']);
const examples = readdirSync(path.join(CHART, 'examples')).filter((one) => !one.startsWith('values'));
const example = (name: string): string => readFileSync(path.join(CHART, 'examples', name), 'utf8');

t.test('on a real API server', { skip, timeout: 280_000 }, async (t) => {
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

  const inCluster = (...args: string[]): string =>
    helm([...args, '--namespace', 'ns'], { KUBECONFIG: server.kubeconfig });
  const release = (values: Values, ...more: string[]): string =>
    inCluster(
      'upgrade',
      '--install',
      RELEASE,
      CHART,
      '--create-namespace',
      '--reset-values',
      ...flagsOf(values),
      ...more,
    );
  const read = async (kind: string, name: string): Promise<Plain> =>
    JSON.parse(await server.kubectl(['get', kind, name, '-n', 'ns', '-o', 'json']));
  const dataOf = async (name: string): Promise<Record<string, string>> => (await read('secret', name)).data;

  await t.test('secrets and authority are made once and kept', async (t) => {
    release({});
    const agents = await dataOf('sv-agents');
    const trigger = await dataOf('sv-trigger');
    const text = (base64: string | undefined): string => Buffer.from(base64 as string, 'base64').toString();
    for (const [name, data, host] of [
      ['agents', agents, AGENT_TLS_NAME],
      ['trigger', trigger, 'sv-trigger.ns.svc'],
    ] as const) {
      const certificate = new X509Certificate(text(data['tls.crt']));
      const authority = new X509Certificate(text(data['ca.crt']));
      t.ok(authority.ca && certificate.verify(authority.publicKey), `${name}: of the authority beside it`);
      t.equal(certificate.checkHost(host), host, name);
      t.ok(certificate.checkPrivateKey(createPrivateKey(text(data['tls.key']))), name);
      t.ok(Date.parse(certificate.validTo) > Date.now() + 9 * 365 * 86_400_000, `${name}: for years`);
    }

    const steps: [string, Values][] = [
      ['nothing', {}],
      ['another image', { 'image.tag': '9.9.9' }],
      ['another pool', SETS.pools as Values],
      ['the guard', { 'manualSync.guard': 'builtin' }],
      ['TLS off', { 'security.tls': false }],
      ['TLS on again', {}],
      ['everything', { ...SETS.everything, 'monitoring.serviceMonitor': false, 'monitoring.rules': false }],
      ['back', {}],
    ];
    for (const [what, values] of steps) {
      release(values);
      t.strictSame(await dataOf('sv-agents'), agents, `upgrade: ${what}`);
      t.strictSame(await dataOf('sv-trigger'), trigger, `upgrade: ${what}`);
    }

    release({ 'manualSync.enabled': false });
    await t.rejects(dataOf('sv-trigger'), /NotFound/, 'without the trigger there is no certificate for it');
    release({});
    t.not((await dataOf('sv-trigger'))['tls.crt'], trigger['tls.crt']);
    t.strictSame(await dataOf('sv-agents'), agents, 'an authority for the trigger is not one for the agents');

    await server.kubectl([
      'patch',
      'secret',
      'sv-agents',
      '-n',
      'ns',
      '--type=json',
      '-p',
      '[{"op":"remove","path":"/data/token"}]',
    ]);
    release({});
    const mended = await dataOf('sv-agents');
    t.ok(text(mended.token).length >= 48, 'what is missing is made, what is there stays');
    t.strictSame({ ...mended, token: '' }, { ...agents, token: '' });

    inCluster('uninstall', RELEASE);
    t.strictSame(await dataOf('sv-agents'), mended, 'what opens the data outlives the release');
    await t.rejects(read('daemonset', 'sv-agent-default'), /NotFound/);
    t.match(await server.kubectl(['get', 'crd', 'simplevolumes.storage.shipstuff.io']), 'simplevolumes');
    release({});
    t.strictSame(await dataOf('sv-agents'), mended, 'a new release takes it up');

    release({ 'security.existingSecret': 'mine', 'manualSync.existingSecret': 'my-trigger' });
    t.strictSame(await dataOf('sv-agents'), mended, 'it stays also when another one is used');
    await t.rejects(dataOf('sv-trigger'), /NotFound/);
    release({});
    t.strictSame(await dataOf('sv-agents'), mended);
  });

  await t.test('a class that cannot be changed is named before anything is', async (t) => {
    const before = inCluster('history', RELEASE, '-o', 'json');
    for (const values of [
      { 'storageClass.reclaimPolicy': 'Retain' },
      { storagePools: [{ name: 'other', path: '/mnt/other' }] },
    ]) {
      const error = t.throws(() => release(values)) as unknown as { stderr: string };
      t.match(
        error.stderr,
        /StorageClass simple-volume is there with reclaimPolicy Delete and pool "default", .*kubectl delete storageclass simple-volume/,
      );
    }
    t.equal(inCluster('history', RELEASE, '-o', 'json'), before, 'no release was begun');
    await server.kubectl(['delete', 'storageclass', 'simple-volume']);
    release({ 'storageClass.reclaimPolicy': 'Retain' });
    t.match(await server.kubectl(['get', 'storageclass', 'simple-volume']), /Retain/);
    await server.kubectl(['delete', 'storageclass', 'simple-volume']);
    release({});
  });

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

  await t.test('the notes say what to do next', async (t) => {
    const notes = (values: Values, ...more: string[]): string =>
      /^NOTES:\n(.*)$/ms.exec(release(values, '--dry-run=server', ...more))?.[1] as string;
    const upgrade = notes({});
    t.match(upgrade, /replaces what was there/);
    t.match(upgrade, /helm show crds CHART \| kubectl apply --server-side -f -/);
    t.notMatch(upgrade, /Make a claim/);
    t.notMatch(upgrade, /Think about/, 'nothing to warn of');
    inCluster('uninstall', RELEASE);

    const plain = notes({});
    t.match(plain, /is on its way/);
    t.match(plain, /Pool default: \/var\/lib\/simple-volume on every node\s+The directory must be there/);
    t.match(plain, /StorageClass simple-volume$/m);
    t.match(plain, /rollout status daemonset\/sv-agent-default$/m);
    t.match(plain, /rollout status daemonset\/sv-csi-node deployment\/sv-controller$/m);
    t.match(
      plain,
      /If the cluster enforces Pod Security[^:]*:.*\n.*\n.*kubectl label namespace ns --overwrite pod-security\.kubernetes\.io\/enforce=privileged/,
    );
    t.match(plain, /Make a claim of the class[\s\S]*replication-enabled: "true"/);
    t.match(plain, /kubectl get sv -A/);
    t.match(plain, /get secret sv-trigger -o jsonpath/);
    t.match(plain, /`helm uninstall` leaves all data where it is/);
    t.notMatch(plain, /CRDs|Think about/);

    const pools = notes(SETS.pools as Values);
    t.match(
      pools,
      /Pool fast: \/mnt\/nvme on every node with disk=nvme storage=yes \(made where it is missing\)\n {2}StorageClass simple-volume-fast$/m,
    );
    t.match(pools, /rollout status daemonset\/sv-agent-fast$/m);
    t.match(notes({ 'storageClass.default': true }), /StorageClass simple-volume, the cluster's default$/m);

    const minimal = notes(SETS.minimal as Values);
    t.match(minimal, /No StorageClass was made[\s\S]*parameters\.pool default/);
    for (const words of [
      'security.tls is off',
      'networkPolicy.enabled is off',
      'agent.browseAuth is off',
      'csiNode.hostPID is off',
      'controller.replicas is 1',
    ])
      t.match(minimal, words);
    t.notMatch(minimal, /Full syncs by hand/);

    // Kinds of the Prometheus operator: that they are known is all that helm asks for.
    for (const [kind, plural] of [
      ['PodMonitor', 'podmonitors'],
      ['PrometheusRule', 'prometheusrules'],
    ] as const) {
      const group = 'monitoring.coreos.com';
      const schema = { openAPIV3Schema: { type: 'object', 'x-kubernetes-preserve-unknown-fields': true } };
      await server.apply({
        apiVersion: 'apiextensions.k8s.io/v1',
        kind: 'CustomResourceDefinition',
        metadata: { name: `${plural}.${group}` },
        spec: {
          group,
          scope: 'Namespaced',
          names: { kind, plural },
          versions: [{ name: 'v1', served: true, storage: true, schema }],
        },
      });
      await server.kubectl([
        'wait',
        '--for=condition=Established',
        '--timeout=30s',
        'crd',
        `${plural}.${group}`,
      ]);
    }
    t.match(notes({ 'monitoring.serviceMonitor': true }), /metricsFrom is empty: Prometheus is not let in/);
    t.notMatch(notes(SETS.everything as Values), /Prometheus is not let in/);

    const given = notes(SETS.builtin as Values);
    t.match(given, /Secret mine must be in ns with token, tls\.crt, tls\.key and ca\.crt/);
    t.match(given, /Secret my-trigger must be in ns with tls\.crt and tls\.key/);

    await server.kubectl(['label', 'namespace', 'ns', 'pod-security.kubernetes.io/enforce=restricted']);
    t.match(notes({}), /Namespace ns admits only restricted pods, so no agent can start/);
    await server.kubectl([
      'label',
      'namespace',
      'ns',
      '--overwrite',
      'pod-security.kubernetes.io/enforce=privileged',
    ]);
    t.notMatch(notes({}), /pod-security/);
    for (const values of Object.values(SETS)) t.notMatch(notes(values), /<no value>|%!|map\[/);
  });
});
