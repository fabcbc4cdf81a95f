/** What Prometheus and Grafana are told: fields by the operator's own types, names by what the roles really say. */
import { spawnSync } from 'node:child_process';
import { readFileSync } from 'node:fs';
import path from 'node:path';
import t from 'tap';
import { type Readings, startHealth } from '../../controller/metrics.ts';
import { createMetrics } from '../../lib/agent/metrics.ts';
import { kubeProgram, noKube } from '../kube/harness/programs.ts';
import { CHART, type Plain, parse, SETS, template } from './rendering.ts';

const file = (name: string): string => readFileSync(path.join(CHART, 'files', name), 'utf8');
const ON = { 'monitoring.serviceMonitor': true, 'monitoring.rules': true, 'monitoring.dashboard': true };

/** Name of every series to its labels, as the agent and the controller write them. */
async function series(): Promise<Map<string, Set<string>>> {
  const found = new Map<string, Set<string>>();
  for (const one of createMetrics('1').registry.getMetricsAsArray() as Plain[])
    found.set(one.name, new Set(one.labelNames));
  const object = {
    metadata: { namespace: 'ns', name: 'claim' },
    status: {
      phase: 'Active',
      epoch: 1,
      replicasSummary: '1/2',
      conditions: [{ type: 'Fresh', status: 'True' }],
    },
  };
  const readings = {
    version: '1',
    leads: true,
    term: 1,
    objects: [object],
    informers: [],
    queue: { done: 0, failed: 0, ready: 0, delayed: 0, running: 0, stuck: 0, oldestReadyMs: 0 },
    kube: { byVerb: new Map(), failed: {}, throttledByServer: 0 },
    agents: [],
    fence: { polls: 0, failed: 0, takeovers: 0 },
    events: { written: 0, suppressed: 0, failed: 0, dropped: 0 },
    writes: new Map(),
    trigger: new Map(),
    promotions: { planned: 0, failover: 0 },
  } as unknown as Readings;
  const health = await startHealth({
    host: '127.0.0.1',
    port: 0,
    readings: () => readings,
    notReady: () => [],
  });
  const text = await (await fetch(`${health.url}/metrics`)).text();
  await health.close();
  for (const [, name] of text.matchAll(/^# TYPE (\S+)/gm)) found.set(name as string, new Set());
  for (const [, name, labels] of text.matchAll(/^(\w+)\{([^}]*)\}/gm))
    for (const [, label] of (labels as string).matchAll(/(\w+)="/g))
      found.get(name as string)?.add(label as string);
  return found;
}

/** Labels that Prometheus gives to every series of a pod. */
const OF_TARGET = ['namespace', 'pod', 'container', 'job', 'instance'];

t.test('alerts and dashboard ask for series and labels that exist', async (t) => {
  const known = await series();
  const alerts = (parse(file('alerts.yaml'))[0].groups as Plain[]).flatMap(({ rules }) => rules as Plain[]);
  const panels = JSON.parse(file('dashboard.json')).panels as Plain[];
  const asked: { at: string; expr: string; said: string }[] = [
    ...alerts.map((one) => ({ at: one.alert, expr: one.expr, said: JSON.stringify(one.annotations) })),
    ...panels.flatMap(({ title, targets }) =>
      (targets as Plain[]).map((one) => ({ at: title, expr: one.expr, said: one.legendFormat })),
    ),
  ];
  t.ok(alerts.length >= 6 && panels.length >= 8);
  for (const { at, expr, said } of asked) {
    const names = expr.match(/\bsimple_volume_\w+/g) ?? [];
    t.ok(names.length > 0, at);
    const labels = new Set(OF_TARGET);
    for (const name of names) {
      t.ok(known.has(name), `${at}: ${name}`);
      for (const label of known.get(name) ?? []) labels.add(label);
    }
    const used = [
      ...[...expr.matchAll(/by \(([^)]*)\)/g)].flatMap(([, list]) => (list as string).split(/,\s*/)),
      ...[...expr.matchAll(/[{,](\w+)(?:=|!=|=~)"/g)].map(([, label]) => label as string),
      ...[...said.matchAll(/\{\{\s*(?:\$labels\.)?(\w+)\s*\}\}/g)].map(([, label]) => label as string),
    ];
    for (const label of used) t.ok(labels.has(label), `${at}: ${label}`);
    t.equal(expr.match(/[({[]/g)?.length, expr.match(/[)}\]]/g)?.length, `${at}: every bracket is closed`);
  }
  for (const one of alerts) {
    t.match(one.for, /^\d+m$/, one.alert);
    t.match(one.labels.severity, /^(warning|critical)$/, one.alert);
    t.ok(one.annotations.summary && one.annotations.description, one.alert);
  }
  for (const [name, on] of known)
    if (name.endsWith('_volume_phase')) t.ok(on.has('claim'), 'labels are seen at all');
});

t.test(
  'the namespace of a volume is not replaced by that of the agents',
  { skip: noKube(['helm']) },
  async (t) => {
    const monitor = parse(template(ON)).find((one) => one.kind === 'PodMonitor');
    for (const one of monitor.spec.podMetricsEndpoints) t.equal(one.honorLabels, true, one.port);
    const [dashboard] = parse(template(ON)).filter((one) => one.metadata.labels.grafana_dashboard === '1');
    t.strictSame(JSON.parse(dashboard.data['simple-volume.json']), JSON.parse(file('dashboard.json')));
  },
);

t.test("the operator's types have every field", { skip: noKube(['helm', 'monitoring-check']) }, async (t) => {
  const check = (input: string): { status: number | null; stdout: string; stderr: string } =>
    spawnSync(kubeProgram('monitoring-check') as string, { input, encoding: 'utf8' });
  for (const values of [ON, SETS.everything, { ...ON, 'security.tls': false }])
    t.match(check(template(values)), { status: 0, stdout: 'PodMonitor\nPrometheusRule\n' });
  const wrong = check(template(ON).replace('honorLabels', 'honourLabels'));
  t.equal(wrong.status, 1);
  t.match(wrong.stderr, /unknown field .*honourLabels/);
});
