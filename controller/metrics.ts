/** Prometheus metrics and health of the controller, on a port of their own. Read from what is there when asked for. */
import http from 'node:http';
import type { AddressInfo } from 'node:net';
import { Counter, Gauge, Registry } from 'prom-client';
import type { BreakerState } from './act/agents.ts';
import type { Informer, KubeCounters, SimpleVolume, WorkQueueState } from './cluster/types.ts';

export interface Readings {
  version: string;
  leads: boolean;
  term: number | null;
  objects: Iterable<SimpleVolume>;
  informers: readonly Informer<unknown>[];
  queue: WorkQueueState;
  kube: KubeCounters;
  agents: readonly BreakerState[];
  fence: { polls: number; failed: number; takeovers: number };
  events: { written: number; suppressed: number; failed: number; dropped: number };
  writes: ReadonlyMap<string, number>;
  trigger: ReadonlyMap<number, number>;
  promotions: { planned: number; failover: number };
}

export interface HealthServer {
  readonly url: string;
  close(): Promise<void>;
}

export interface HealthOptions {
  host: string;
  port: number;
  readings: () => Readings;
  /** reasons why it is not ready; empty: it is */
  notReady: () => string[];
}

export async function startHealth(options: HealthOptions): Promise<HealthServer> {
  const render = createRender();
  const server = http.createServer({ requestTimeout: 10_000 }, (request, response) => {
    const send = (status: number, type: string, body: string): void => {
      response.writeHead(status, { 'content-type': type, 'content-length': Buffer.byteLength(body) });
      response.end(request.method === 'HEAD' ? undefined : body);
    };
    request.resume();
    if (request.method !== 'GET' && request.method !== 'HEAD')
      return send(405, 'text/plain', 'GET or HEAD\n');
    switch (request.url?.split('?')[0]) {
      case '/healthz':
        return send(200, 'application/json', '{"status":"ok"}\n');
      case '/readyz': {
        const reasons = options.notReady();
        const ready = reasons.length === 0;
        return send(ready ? 200 : 503, 'application/json', `${JSON.stringify({ ready, reasons })}\n`);
      }
      case '/metrics':
        render(options.readings()).then(
          (text) => send(200, 'text/plain; version=0.0.4; charset=utf-8', text),
          () => send(500, 'text/plain', 'the metrics could not be read\n'),
        );
        return;
      default:
        return send(404, 'text/plain', 'no such page\n');
    }
  });
  server.maxConnections = 64;
  await new Promise<void>((resolve, reject) => {
    server.once('error', reject).listen(options.port, options.host, resolve);
  });
  const { address, port, family } = server.address() as AddressInfo;
  return {
    url: `http://${family === 'IPv6' ? `[${address}]` : address}:${port}`,
    async close() {
      const ended = new Promise((resolve) => server.close(resolve));
      server.closeAllConnections();
      await ended;
    },
  };
}

function createRender(): (readings: Readings) => Promise<string> {
  const registry = new Registry();
  const registers = [registry];
  const gauge = <T extends string>(name: string, help: string, labelNames: readonly T[] = []): Gauge<T> =>
    new Gauge<T>({ name: `simple_volume_controller_${name}`, help, labelNames: [...labelNames], registers });
  const counter = <T extends string>(name: string, help: string, labelNames: readonly T[] = []): Counter<T> =>
    new Counter<T>({
      name: `simple_volume_controller_${name}`,
      help,
      labelNames: [...labelNames],
      registers,
    });
  const info = gauge('build_info', 'Version of the controller', ['version'] as const);
  const leads = gauge('leads', '1 while this process leads');
  const term = gauge('term', 'Number of the own leadership; 0 when it does not lead');
  const V = ['namespace', 'claim'] as const;
  const phase = gauge('volume_phase', '1 for the phase of the volume', [...V, 'phase'] as const);
  const epoch = gauge('volume_epoch', 'Epoch of the volume', V);
  const wanted = gauge('volume_replicas_wanted', 'Copies wanted besides the active one', V);
  const fresh = gauge('volume_replicas_fresh', 'Copies that are fresh enough', V);
  const condition = gauge('volume_condition', '1 for a condition that is True, 0 for False', [
    ...V,
    'type',
  ] as const);
  const kept = gauge('objects', 'Objects in the local copies', ['kind'] as const);
  const age = gauge('informer_age_seconds', 'Time since the API server was last heard', ['kind'] as const);
  const lists = counter('informer_lists_total', 'Lists made', ['kind'] as const);
  const events = counter('informer_events_total', 'Events of watches', ['kind'] as const);
  const errors = counter('informer_errors_total', 'Failed lists and watches', ['kind'] as const);
  const queue = gauge('queue', 'Volumes in the queue', ['state'] as const);
  const oldest = gauge('queue_oldest_seconds', 'How long the volume that waits longest is ready');
  const work = counter('work_total', 'Looks at volumes', ['outcome'] as const);
  const requests = counter('kube_requests_total', 'Requests to the API server', [
    'verb',
    'resource',
  ] as const);
  const failures = counter('kube_failures_total', 'Failed requests to the API server', ['reason'] as const);
  const throttled = counter('kube_throttled_total', 'Times the API server asked to come back later');
  const breaker = gauge('agent_answers', '1 while the agent answers', ['pool', 'node'] as const);
  const polls = counter('fence_polls_total', 'Polls of agents', ['outcome'] as const);
  const takeovers = counter('takeovers_total', 'Leaderships begun');
  const written = counter('events_total', 'Events', ['outcome'] as const);
  const writes = counter('writes_total', 'Writes to cluster and agents', ['what'] as const);
  const trigger = counter('trigger_requests_total', 'Requests of the manual trigger', ['status'] as const);
  const promotions = counter('promotions_total', 'Promotions written by this process', ['kind'] as const);
  const resident = new Gauge({
    name: 'process_resident_memory_bytes',
    help: 'Resident memory of the process',
    registers,
  });
  const heap = new Gauge({ name: 'nodejs_heap_size_used_bytes', help: 'Used JavaScript heap', registers });
  return async (r) => {
    registry.resetMetrics();
    info.set({ version: r.version }, 1);
    leads.set(r.leads ? 1 : 0);
    term.set(r.term ?? 0);
    // Both replicas see all volumes; only the leader speaks of them, so that sums are right.
    if (r.leads) {
      for (const { metadata, status } of r.objects) {
        const labels = { namespace: metadata.namespace ?? '', claim: metadata.name };
        phase.set({ ...labels, phase: status?.phase ?? 'Pending' }, 1);
        epoch.set(labels, status?.epoch ?? 0);
        const [have, want] = (status?.replicasSummary ?? '0/0').split('/').map(Number);
        fresh.set(labels, have ?? 0);
        wanted.set(labels, want ?? 0);
        for (const one of status?.conditions ?? [])
          if (one.status !== 'Unknown')
            condition.set({ ...labels, type: one.type }, one.status === 'True' ? 1 : 0);
      }
    }
    for (const one of r.informers) {
      const kind = { kind: one.kind.kind };
      kept.set(kind, one.size);
      if (Number.isFinite(one.ageMs())) age.set(kind, one.ageMs() / 1000);
      lists.inc(kind, one.counters.lists);
      events.inc(kind, one.counters.events);
      errors.inc(kind, one.counters.errors);
    }
    for (const state of ['ready', 'delayed', 'running', 'stuck'] as const)
      queue.set({ state }, r.queue[state]);
    oldest.set(r.queue.oldestReadyMs / 1000);
    work.inc({ outcome: 'done' }, r.queue.done);
    work.inc({ outcome: 'failed' }, r.queue.failed);
    for (const [what, count] of r.kube.byVerb) {
      const [verb = '', resource = ''] = what.split(' ');
      requests.inc({ verb, resource }, count);
    }
    for (const [reason, count] of Object.entries(r.kube.failed)) failures.inc({ reason }, count);
    throttled.inc(r.kube.throttledByServer);
    for (const one of r.agents) breaker.set({ pool: one.pool, node: one.node }, one.open ? 0 : 1);
    polls.inc({ outcome: 'answered' }, r.fence.polls - r.fence.failed);
    polls.inc({ outcome: 'failed' }, r.fence.failed);
    takeovers.inc(r.fence.takeovers);
    for (const [outcome, count] of Object.entries(r.events)) written.inc({ outcome }, count);
    for (const [what, count] of r.writes) writes.inc({ what }, count);
    for (const [status, count] of r.trigger) trigger.inc({ status: String(status) }, count);
    promotions.inc({ kind: 'planned' }, r.promotions.planned);
    promotions.inc({ kind: 'failover' }, r.promotions.failover);
    const memory = process.memoryUsage();
    resident.set(memory.rss);
    heap.set(memory.heapUsed);
    return registry.metrics();
  };
}
