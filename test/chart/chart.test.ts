/** The chart as helm renders it, and as a real API server takes it. */
import { execFileSync } from 'node:child_process';
import { readdirSync, readFileSync } from 'node:fs';
import path from 'node:path';
import t from 'tap';
import { kubeProgram, noKube } from '../kube/harness/programs.ts';
import { KubeServer } from '../kube/harness/server.ts';

const CHART = path.resolve(import.meta.dirname, '../../chart');
const skip = noKube(['etcd', 'kube-apiserver', 'kubectl', 'helm']);
const NAMESPACE = 'simple-volume-system';

const helm = (...args: string[]): string =>
  execFileSync(kubeProgram('helm') as string, args, { encoding: 'utf8', stdio: ['ignore', 'pipe', 'pipe'] });
const template = (...set: string[]): string =>
  helm('template', 'sv', CHART, '--namespace', NAMESPACE, ...set.flatMap((one) => ['--set-json', one]));
const refusal = (...set: string[]): string => {
  try {
    template(...set);
  } catch (error) {
    return String((error as { stderr?: string }).stderr);
  }
  return '';
};

/** A value other than the default for every value of the chart: each must change what is rendered. */
const OTHER: Record<string, unknown> = {
  'image.repository': 'registry.example/sv',
  'image.tag': '9.9.9',
  'image.digest': `sha256:${'a'.repeat(64)}`,
  'image.pullPolicy': 'Always',
  imagePullSecrets: ['registry'],
  storagePools: [
    { name: 'fast', path: '/mnt/fast', createPath: true, allowNonEmpty: true, nodeSelector: { disk: 'ssd' } },
  ],
  'nodes.nodeSelector': { storage: 'yes' },
  'nodes.tolerations': [{ key: 'edge', operator: 'Exists' }],
  'nodes.affinity': { nodeAffinity: {} },
  kubeletDir: '/var/lib/k0s/kubelet',
  'storageClass.create': false,
  'storageClass.name': 'local',
  'storageClass.default': true,
  'storageClass.reclaimPolicy': 'Retain',
  'storageClass.annotations': { team: 'a' },
  'agent.fencingLease': '12s',
  'agent.audit': '1h',
  'agent.browseAuth': false,
  'agent.logLevel': 'debug',
  'agent.ports.http': 9090,
  'agent.ports.webdav': 9091,
  'agent.pull.concurrency': 4,
  'agent.pull.buffer': '8Mi',
  'agent.pull.bandwidth': '20Mi',
  'agent.resources': { limits: { memory: '1Gi' } },
  'agent.priorityClassName': 'important',
  'agent.podAnnotations': { note: 'agent' },
  'csiNode.logLevel': 'debug',
  'csiNode.hostPID': false,
  'csiNode.resources': { limits: { memory: '100Mi' } },
  'csiNode.priorityClassName': 'important',
  'csiNode.podAnnotations': { note: 'csi' },
  'controller.replicas': 3,
  'controller.logLevel': 'debug',
  'controller.election': '30s',
  'controller.fullSyncSchedule': '0 4 * * *',
  'controller.timeZone': 'Europe/Berlin',
  'controller.resources': { limits: { memory: '400Mi' } },
  'controller.nodeSelector': { role: 'infra' },
  'controller.tolerations': [{ key: 'infra', operator: 'Exists' }],
  'controller.affinity': { nodeAffinity: {} },
  'controller.priorityClassName': 'important',
  'controller.podAnnotations': { note: 'controller' },
  'controller.podDisruptionBudget': false,
  'provisioner.image': 'registry.example/provisioner:v1',
  'provisioner.pullPolicy': 'Always',
  'provisioner.resources': { limits: { memory: '200Mi' } },
  'manualSync.enabled': false,
  'manualSync.guard': 'builtin',
  'manualSync.port': 9443,
  'manualSync.proxy.image': 'registry.example/proxy:v1',
  'manualSync.proxy.pullPolicy': 'Always',
  'manualSync.proxy.resources': { limits: { memory: '50Mi' } },
  'security.existingSecret': 'mine',
  'security.tls': false,
  'networkPolicy.enabled': false,
  'networkPolicy.metricsFrom': [{ namespaceSelector: {} }],
  'monitoring.serviceMonitor': true,
  'monitoring.rules': true,
};

/** What is different at every rendering without a cluster. */
const steady = (text: string): string => text.replace(/^ {2}(token|tls\.crt|tls\.key|ca\.crt): .*$/gm, '');

/** Paths of all values, as values.schema.json has them. */
function valuesOf(schema: { properties?: Record<string, object> }, at = ''): string[] {
  return Object.entries(schema.properties ?? {}).flatMap(([key, below]) => {
    const nested = valuesOf(below as typeof schema, `${at}${key}.`);
    return nested.length > 0 ? nested : [`${at}${key}`];
  });
}

t.test('helm lint finds nothing, with the examples too', { skip }, async (t) => {
  t.match(helm('lint', '--strict', CHART), '0 chart(s) failed');
  t.match(
    helm('lint', '--strict', CHART, '-f', path.join(CHART, 'examples/values-demo.yaml')),
    '0 chart(s) failed',
  );
});

t.test('every value of the schema has an effect (I6)', { skip }, async (t) => {
  const schema = JSON.parse(readFileSync(path.join(CHART, 'values.schema.json'), 'utf8'));
  const wanted = valuesOf(schema).filter((one) => one !== 'global' && one !== 'monitoring.labels');
  t.strictSame(
    wanted.filter((one) => !(one in OTHER)),
    [],
    'each has another value here',
  );
  const plain = steady(template());
  for (const value of wanted)
    t.not(steady(template(`${value}=${JSON.stringify(OTHER[value])}`)), plain, value);
  const watched = 'monitoring.serviceMonitor=true';
  t.match(template(watched, 'monitoring.labels={"release":"prometheus"}'), 'release: prometheus');
});

t.test('bad values are refused with a word that helps', { skip }, async (t) => {
  t.match(refusal('nonsense=1'), /additional properties 'nonsense' not allowed/);
  t.match(refusal('agent.fencingLease="often"'), /\/agent\/fencingLease/);
  t.match(
    refusal('agent.pull={"concurrency":8,"buffer":"32Mi"}'),
    /agent\.pull: 8 pulls with a buffer of 32Mi need 616 MiB, agent\.resources\.limits\.memory is 512 MiB/,
  );
  t.match(refusal('storagePools=[]'), /storagePools.*minItems/s);
  t.match(refusal('storagePools=[{"name":"a","path":"relative"}]'), /storagePools\/0\/path/);
  t.match(
    refusal('storagePools=[{"name":"a","path":"/mnt/a"},{"name":"b","path":"/mnt/a/b"}]'),
    /the paths of a and b overlap/,
  );
  t.match(
    refusal('storagePools=[{"name":"a","path":"/mnt/a"},{"name":"a","path":"/mnt/b"}]'),
    /the name a is used twice/,
  );
});

t.test(
  'no secret is in arguments or environment; agents and csi-node have no token of the API (F2, F5)',
  { skip },
  async (t) => {
    const all = template();
    const token = /^ {2}token: (\S+)$/m.exec(all)?.[1] as string;
    t.ok(Buffer.from(token, 'base64').length >= 48, 'a long random token, not a default one');
    t.notMatch(all.replace(/^ {2}token: .*$/m, ''), Buffer.from(token, 'base64').toString());
    t.notMatch(template(), token, 'another one with every install');
    const documents = all.split(/^---$/m);
    for (const part of ['agent-default', 'csi-node']) {
      const one = documents.find(
        (text) => text.includes('kind: DaemonSet') && text.includes(`name: sv-${part}`),
      );
      t.match(one, 'automountServiceAccountToken: false', part);
      t.notMatch(one, 'serviceAccountName', part);
    }
    const privileged = documents.filter((text) => /privileged: true|hostPID: true/.test(text));
    t.strictSame(
      privileged.map((text) => /name: (\S+)/.exec(text)?.[1]),
      ['sv-csi-node'],
      'only the node plugin',
    );
  },
);

t.test('a real API server takes everything', { skip, timeout: 120_000 }, async (t) => {
  const server = await KubeServer.start({});
  t.teardown(() => server.stop());
  await server.kubectl(['create', 'namespace', NAMESPACE]);
  const apply = (input: string): Promise<string> =>
    server.kubectl(['apply', '--dry-run=server', '--validate=strict', '-f', '-'], { input });
  const pools = [
    { name: 'default', path: '/mnt/a' },
    { name: 'fast', path: '/mnt/b' },
  ];
  for (const set of [
    [],
    ['manualSync.guard="builtin"', 'security.tls=false', `storagePools=${JSON.stringify(pools)}`],
  ])
    t.match(await apply(template(...set)), /deployment\.apps\/sv-controller created/);
  for (const file of readdirSync(path.join(CHART, 'examples')).filter((one) => !one.startsWith('values')))
    t.match(
      await apply(readFileSync(path.join(CHART, 'examples', file), 'utf8')),
      /created \(server dry run\)/,
      file,
    );

  // Only what needs the host runs in a namespace without limits; the controller would run under the strictest ones.
  await server.kubectl(['create', 'namespace', 'strict']);
  await server.kubectl(['label', 'namespace', 'strict', 'pod-security.kubernetes.io/enforce=restricted']);
  const deployment = template()
    .split(/^---$/m)
    .find((text) => text.includes('kind: Deployment')) as string;
  const [, pod] = deployment.split(/^ {2}template:$/m) as [string, string];
  const bare = pod.replace(/^ {4}/gm, '').replace('metadata:', 'metadata:\n  name: probe');
  const made = `apiVersion: v1\nkind: Pod\n${bare}`;
  t.match(
    await server.kubectl(['apply', '--dry-run=server', '-n', 'strict', '-f', '-'], { input: made }),
    /pod\/probe created/,
  );
});
