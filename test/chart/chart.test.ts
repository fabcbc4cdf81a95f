/** The chart as helm renders it, without a cluster. */
import { mkdtempSync, readFileSync, rmSync, writeFileSync } from 'node:fs';
import { tmpdir } from 'node:os';
import path from 'node:path';
import t from 'tap';
import { OPTIONS as controllerOptions, parseControllerConfig } from '../../controller/config.ts';
import { OPTIONS as csiNodeOptions, parseCsiNodeConfig } from '../../csi/config.ts';
import { OPTIONS as agentOptions, type Option, parseConfig } from '../../lib/agent/config.ts';
import { authority, certificate } from '../certificates.ts';
import { noKube } from '../kube/harness/programs.ts';
import {
  CHART,
  type Container,
  flagsOf,
  helm,
  leavesOf,
  OTHER,
  type Plain,
  parse,
  pick,
  podsOf,
  SETS,
  template,
  titleOf,
  type Values,
} from './rendering.ts';

const skip = noKube(['helm']);

function refusal(values: Values, ...more: string[]): string {
  try {
    template(values, ...more);
  } catch (error) {
    return String((error as { stderr?: string }).stderr);
  }
  return '';
}

const rendered = new Map<string, Plain[]>();
const objectsOf = (name: string): Plain[] => {
  const known = rendered.get(name) ?? parse(template(SETS[name]));
  rendered.set(name, known);
  return known;
};

t.test('helm lint finds nothing, with any set of values', { skip }, async (t) => {
  for (const [name, values] of Object.entries(SETS))
    t.match(helm(['lint', '--strict', CHART, ...flagsOf(values)]), '0 chart(s) failed', name);
  t.match(
    helm(['lint', '--strict', CHART, '-f', path.join(CHART, 'examples/values-demo.yaml')]),
    '0 chart(s) failed',
    'the values file of the example',
  );
});

t.test(
  'every version of Kubernetes that the chart names renders, an older one is refused',
  { skip },
  async (t) => {
    for (const version of ['1.30.0', '1.32.4', '1.34.1-gke.1200', '1.36.3+k3s1'])
      t.match(template({}, '--kube-version', version), 'kind: DaemonSet', version);
    t.match(refusal({}, '--kube-version', '1.29.9'), /requires kubeVersion: >=1\.30\.0-0/);
  },
);

t.test(
  'values.yaml has each value that the schema allows, and no case is of a value that is gone',
  { skip },
  async (t) => {
    interface Schema {
      properties?: Record<string, Schema>;
      items?: Schema;
    }
    const allowed = (schema: Schema, at = ''): string[] =>
      Object.entries(schema.properties ?? {}).flatMap(([key, below]) => {
        const nested = below.items?.properties
          ? allowed(below.items, `${at}${key}[].`)
          : allowed(below, `${at}${key}.`);
        return nested.length > 0 ? nested : [`${at}${key}`];
      });
    const schema = JSON.parse(readFileSync(path.join(CHART, 'values.schema.json'), 'utf8'));
    const leaves = leavesOf(parse(readFileSync(path.join(CHART, 'values.yaml'), 'utf8'))[0]);
    // What helm itself hands over is no value of this chart.
    const inSchema = allowed(schema).filter((one) => one !== 'global');
    const inFile = new Set(leaves.map((one) => one.replace(/\.resources\..*$/, '.resources')));
    t.strictSame([...inFile].sort(), inSchema.sort());
    t.strictSame(
      Object.keys(OTHER).filter((one) => !leaves.includes(one)),
      [],
    );
  },
);

t.test('bad values are refused with a word that helps', { skip }, async (t) => {
  const pools = (...list: object[]): Values => ({ storagePools: list });
  const pull = (concurrency: number, buffer: string, memory?: unknown): Values => ({
    'agent.pull.concurrency': concurrency,
    'agent.pull.buffer': buffer,
    ...(memory === undefined ? {} : { 'agent.resources.limits.memory': memory }),
  });
  const cases: [Values, RegExp][] = [
    [{ nonsense: 1 }, /additional properties 'nonsense' not allowed/],
    [{ 'agent.fencingLease': 'often' }, /\/agent\/fencingLease/],
    [pull(17, '0'), /\/agent\/pull\/concurrency/],
    [
      pull(8, '32Mi'),
      /8 pulls with a buffer of 32Mi need 616 MiB, agent\.resources\.limits\.memory is 512 MiB/,
    ],
    [pull(8, '32Mi', '600M'), /need 616 MiB, agent\.resources\.limits\.memory is 572 MiB/],
    [pull(8, '32Mi', 629145600), /need 616 MiB, agent\.resources\.limits\.memory is 600 MiB/],
    [pull(2, '0', '0.2Gi'), /need 210 MiB, agent\.resources\.limits\.memory is 204 MiB/],
    [pull(2, '0', 'lots'), /lots is no amount of memory/],
    [pull(1, '65Mi', '4Gi'), /agent\.pull\.buffer: 65Mi is more than 64Mi/],
    [{ 'agent.pull.bandwidth': '1Ki' }, /\/agent\/pull\/bandwidth/],
    [{ 'agent.ports.webdav': 8080 }, /agent\.ports: http and webdav are both 8080/],
    [{ 'manualSync.port': 8090 }, /manualSync\.port: 8090 is taken/],
    [{ kubeletDir: `/${'k'.repeat(50)}` }, /\/kubeletDir/],
    [pools(), /storagePools.*minItems/s],
    [pools({ name: 'a', path: 'relative' }), /storagePools\/0\/path/],
    [pools({ name: 'a', path: '/mnt/a', sizeEnforcement: 'on' }), /storagePools\/0\/sizeEnforcement/],
    [pools({ name: 'a', path: '/mnt/a/../../etc' }), /storagePools\/0\/path/],
    [pools({ name: 'a', path: '/tmp' }), /storagePools\/0\/path/],
    [pools({ name: 'a', path: '/run/simple-volume' }), /storagePools\/0\/path/],
    [pools({ name: 'a', path: '/mnt/a' }, { name: 'b', path: '/mnt/a/b' }), /the paths of a and b overlap/],
    [pools({ name: 'a', path: '/mnt/a' }, { name: 'a', path: '/mnt/b' }), /the name a is used twice/],
    [
      pools({ name: 'a', path: '/var/lib/kubelet/a' }),
      /path of a and kubeletDir \/var\/lib\/kubelet overlap/,
    ],
  ];
  for (const [values, words] of cases) t.match(refusal(values), words, JSON.stringify(values));
  for (const fits of [
    pull(8, '32Mi', '1G'),
    pull(8, '32Mi', '0.7Gi'),
    pull(4, '8Mi'),
    pull(16, '64Mi', '2Gi'),
  ])
    t.equal(refusal(fits), '', JSON.stringify(fits));
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
    for (const name of Object.keys(SETS)) {
      const pods = podsOf(objectsOf(name));
      for (const [workload, { spec }] of pods) {
        const own = /-(agent-|csi-node)/.test(workload);
        t.equal(spec.automountServiceAccountToken, own ? false : undefined, `${name}: ${workload}`);
        t.equal(spec.serviceAccountName === undefined, own, `${name}: ${workload}`);
        const containers = spec.containers as Container[];
        const privileged = containers.some((one) => one.securityContext?.privileged) || spec.hostPID === true;
        t.equal(privileged, workload.endsWith('csi-node'), 'only the node plugin');
        for (const { env } of containers)
          for (const one of env ?? []) t.notOk(one.valueFrom && 'secretKeyRef' in one.valueFrom, one.name);
      }
    }
  },
);

t.test('what an object names is there: ports, volumes, Secrets, accounts, selectors', { skip }, async (t) => {
  for (const name of Object.keys(SETS)) {
    const objects = objectsOf(name);
    const titles = new Set(objects.map(titleOf));
    const pods = podsOf(objects);
    const given = ['existingSecret', 'manualSync.existingSecret', 'security.existingSecret'].map(
      (one) => `Secret/${SETS[name]?.[one]}`,
    );
    const selected = (labels: Record<string, string>): Plain[] =>
      [...pods.values()].filter(({ metadata }) =>
        Object.entries(labels).every(([key, value]) => metadata.labels[key] === value),
      );
    const portsOf = (pod: Plain): { name: string; containerPort: number }[] =>
      (pod.spec.containers as Container[]).flatMap((one) => one.ports ?? []);

    for (const [workload, pod] of pods) {
      const at = `${name}: ${workload}`;
      t.strictSame(
        selected(
          pick(
            objects,
            [...titles].find((one) => one.endsWith(`/${workload}`) && /Set|Deploy/.test(one)) as string,
          ).spec.selector.matchLabels,
        ),
        [pod],
        `${at} selects its own pods`,
      );
      const volumes = new Set((pod.spec.volumes as { name: string }[]).map((one) => one.name));
      const mounted = new Set<string>();
      for (const container of pod.spec.containers as Container[]) {
        for (const { name: volume } of container.volumeMounts) {
          mounted.add(volume);
          t.ok(volumes.has(volume), `${at} has volume ${volume}`);
        }
        for (const kind of ['startupProbe', 'livenessProbe', 'readinessProbe']) {
          const probe = container[kind];
          if (probe)
            t.ok(
              container.ports?.some((one) => one.name === probe.httpGet.port),
              `${at} ${kind}`,
            );
          // The provisioner ends by itself when it loses its lease, and nobody waits for it.
          const probed =
            container.name !== 'csi-provisioner' &&
            !(container.name === 'kube-rbac-proxy' && kind === 'readinessProbe');
          t.equal(probe !== undefined, probed, `${at} ${container.name} ${kind}`);
        }
        for (const { name: variable } of container.env ?? [])
          t.match(variable, /^SIMPLE_VOLUME_/, `${at} ${variable}`);
        t.equal(container.securityContext.readOnlyRootFilesystem, true, `${at} ${container.name}`);
        t.ok(container.volumeMounts.length > 0 && container.image, at);
      }
      t.strictSame(
        [...volumes].filter((one) => !mounted.has(one)),
        [],
        `${at} mounts all its volumes`,
      );
      t.equal(
        new Set(portsOf(pod).map((one) => one.containerPort)).size,
        portsOf(pod).length,
        `${at}: no port twice`,
      );
      for (const volume of pod.spec.volumes as Plain[]) {
        const needed = volume.secret
          ? `Secret/${volume.secret.secretName}`
          : volume.configMap && `ConfigMap/${volume.configMap.name}`;
        if (needed) t.ok(titles.has(needed) || given.includes(needed), `${at} ${needed}`);
      }
      if (pod.spec.serviceAccountName) t.ok(titles.has(`ServiceAccount/${pod.spec.serviceAccountName}`), at);
      t.ok(pod.spec.priorityClassName || name === 'minimal', `${at} has a priority`);
    }

    for (const object of objects) {
      const at = `${name}: ${titleOf(object)}`;
      const { spec } = object;
      if (object.kind === 'Service') {
        const [pod] = selected(spec.selector);
        t.ok(
          portsOf(pod).some((one) => one.name === spec.ports[0].targetPort),
          at,
        );
      }
      if (object.kind === 'PodDisruptionBudget') {
        t.strictSame(selected(spec.selector.matchLabels), [pods.get('sv-controller')], at);
        t.equal(spec.maxUnavailable, 1, 'a drain takes one controller at a time and is never blocked');
      }
      if (object.kind === 'PodMonitor') {
        const found = selected(spec.selector.matchLabels).filter((pod) =>
          spec.selector.matchExpressions[0].values.includes(
            pod.metadata.labels['app.kubernetes.io/component'],
          ),
        );
        const ports = new Set(found.flatMap(portsOf).map((one) => one.name));
        for (const { port } of spec.podMetricsEndpoints) t.ok(ports.has(port), `${at} ${port}`);
      }
      if (object.kind === 'NetworkPolicy') {
        const chosen = selected(spec.podSelector.matchLabels);
        t.ok(chosen.length > 0, `${at} is of some pods`);
        const open = new Set(chosen.flatMap(portsOf).map((one) => one.containerPort));
        for (const rule of [...(spec.ingress ?? []), ...(spec.egress ?? [])])
          for (const { port } of rule.ports) t.ok(open.has(port), `${at} ${port}`);
      }
      if (/RoleBinding$/.test(object.kind)) {
        t.ok(titles.has(`${object.roleRef.kind}/${object.roleRef.name}`), at);
        t.ok(titles.has(`ServiceAccount/${object.subjects[0].name}`), at);
      }
    }
  }
});

t.test('each role takes its arguments as they are rendered', { skip }, async (t) => {
  const folder = mkdtempSync(path.join(tmpdir(), 'sv-chart-'));
  t.teardown(() => rmSync(folder, { recursive: true, force: true }));
  authority(folder);
  certificate(folder, 'tls');
  const file = (name: string, text: string): void =>
    writeFileSync(path.join(folder, name), text, { mode: 0o600 });
  file('token', 'a-token-of-sixteen-characters');
  // Names as in the mounted Secrets.
  for (const [name, of] of [
    ['tls.crt', 'tls.crt'],
    ['tls.key', 'tls.key'],
    ['ca.crt', 'ca.crt'],
  ] as const)
    file(name, readFileSync(path.join(folder, of), 'utf8'));
  const FIELDS: Record<string, string> = {
    'spec.nodeName': 'node-1',
    'status.podIP': 'fd00::7',
    'metadata.namespace': 'ns',
    'metadata.name': 'sv-controller-abc',
  };
  const read = (
    { args, env }: Container,
    options: readonly Option[],
  ): [Record<string, string | boolean>, NodeJS.ProcessEnv] => {
    const flags = args.slice(1).map((one): [string, string | boolean] => {
      const [, flag, value] = /^--([\w-]+)(?:=(.*))?$/s.exec(one) ?? [];
      t.ok(
        options.some((known) => known.flag === flag && (known.value === null) === (value === undefined)),
        one,
      );
      return [flag as string, value?.replace(/^\/(secret|trigger-tls)\//, `${folder}/`) ?? true];
    });
    const values = (env ?? []).map((one): [string, string] => {
      t.ok(
        options.some((known) => known.env === one.name),
        one.name,
      );
      return [one.name, one.value ?? (FIELDS[one.valueFrom?.fieldRef.fieldPath ?? ''] as string)];
    });
    return [Object.fromEntries(flags), Object.fromEntries(values)];
  };
  for (const name of Object.keys(SETS)) {
    for (const [workload, pod] of podsOf(objectsOf(name))) {
      const container = pod.spec.containers[0] as Container;
      const port = (of: string): number | undefined =>
        container.ports?.find((one) => one.name === of)?.containerPort;
      const [role] = container.args;
      const at = `${name}: ${workload}`;
      if (role === 'agent') {
        const config = parseConfig(...read(container, agentOptions));
        t.equal(config.http.port, port('http'), at);
        t.equal(config.webdav.port, port('webdav'), at);
        t.match(config, { node: 'node-1', advertiseHost: 'fd00::7', advertise: null, advertiseWebdav: null });
        t.equal(config.tls !== null, SETS[name]?.['security.tls'] !== false, at);
      } else if (role === 'csi-node') {
        const config = parseCsiNodeConfig(...read(container, csiNodeOptions));
        t.equal(config.health?.port, port('health'), at);
        const pools = [...podsOf(objectsOf(name)).keys()].filter((one) => one.includes('-agent-')).length;
        t.equal(config.agentSockets.length, pools, at);
      } else {
        t.equal(role, 'controller');
        const config = parseControllerConfig(...read(container, controllerOptions));
        t.equal(config.http.port, port('metrics'), at);
        if (config.trigger?.guard === 'builtin') t.equal(config.trigger.address.port, port('trigger'), at);
        t.equal(config.trigger === null, SETS[name]?.['manualSync.enabled'] === false, at);
      }
    }
  }
});

t.test('every address is good for IPv4, IPv6 and both', { skip }, async (t) => {
  for (const name of Object.keys(SETS)) {
    const text = template(SETS[name]);
    // Go takes 0.0.0.0 for all addresses of both families, Node does not.
    t.strictSame(
      [...new Set(text.match(/--[\w-]+=\S*0\.0\.0\.0\S*/g) ?? [])].filter(
        (one) => !one.startsWith('--secure-listen-address='),
      ),
      [],
      name,
    );
    t.notMatch(
      text,
      /\$\(SIMPLE_VOLUME_HOST\)/,
      'no URL is put together of an address that may need brackets',
    );
  }
  t.equal(pick(objectsOf('default'), 'Service/sv-trigger').spec.ipFamilyPolicy, 'PreferDualStack');
});
