/** What helm keeps, refuses and says from one release to the next, on a real API server. */
import { createPrivateKey, X509Certificate } from 'node:crypto';
import path from 'node:path';
import t from 'tap';
import { AGENT_TLS_NAME } from '../../lib/core/tls.ts';
import { noKube } from '../kube/harness/programs.ts';
import { KubeServer } from '../kube/harness/server.ts';
import { CHART, flagsOf, helm, type Plain, RELEASE, SETS, type Values } from './rendering.ts';

const skip = noKube(['etcd', 'kube-apiserver', 'kubectl', 'helm']);

t.test('from one release to the next', { skip, timeout: 400_000 }, async (t) => {
  const server = await KubeServer.start({ crds: [path.join(CHART, 'crds')] });
  t.teardown(() => server.stop());
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
