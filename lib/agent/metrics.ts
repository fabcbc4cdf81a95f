/** Prometheus metrics, read from the volumes' status when asked for: nothing is counted twice. */
import { monitorEventLoopDelay } from 'node:perf_hooks';
import { Counter, Gauge, Registry } from 'prom-client';
import type { VolumeStatus } from './api.ts';

const seqOf = (generation: string | null): number => (generation ? Number(generation.split('-')[1]) : 0);

export interface AgentMetrics {
  registry: Registry;
  pulls: Counter<'outcome'>;
  pulledBytes: Counter;
  stagedBytes: Counter;
  servedBytes: Counter;
  render(volumes: VolumeStatus[], ready: boolean): Promise<string>;
}

export function createMetrics(version: string): AgentMetrics {
  const registry = new Registry();
  const delay = monitorEventLoopDelay({ resolution: 100 });
  delay.enable();
  const registers = [registry];
  const gauge = <T extends string>(name: string, help: string, labelNames: readonly T[]): Gauge<T> =>
    new Gauge<T>({ name: `simple_volume_${name}`, help, labelNames: [...labelNames], registers });
  const V = ['namespace', 'volume'] as const;
  const info = gauge('build_info', 'Version of the agent', ['version'] as const);
  info.set({ version }, 1);
  const ready = gauge('agent_ready', '1 when the agent is ready (see /readyz)', [] as const);
  const state = gauge('volume_state', '1 for the role and state that the volume is in on this node', [
    ...V,
    'role',
    'state',
  ] as const);
  const epoch = gauge('volume_epoch', 'Highest epoch that this node has seen of the volume', V);
  const generation = gauge(
    'volume_generation_seq',
    'Sequence number of the newest generation on this node',
    V,
  );
  const entries = gauge('volume_entries', 'Entries of the newest generation', V);
  const bytes = gauge('volume_bytes', 'Bytes of the newest generation', V);
  const size = gauge('volume_size_bytes', 'Size of the volume as its claim has it; absent: none', V);
  const enforced = gauge(
    'volume_size_enforced',
    '1 when the file system holds the volume to its size, 0 when it does not; absent while it is not published',
    V,
  );
  const pending = gauge('source_pending_changes', 'Changed paths that no generation holds yet', V);
  const pendingAge = gauge(
    'source_oldest_pending_seconds',
    'Age of the oldest change that no generation holds yet',
    V,
  );
  const directories = gauge('source_watched_directories', 'Directories with a watch', V);
  const unwatched = gauge(
    'source_unwatched_directories',
    'Directories without a watch, compared from time to time',
    V,
  );
  const overflows = gauge('source_watch_overflows', 'Overflows of the kernel queue so far', V);
  const confirmed = gauge('source_target_confirmed_seq', 'Sequence number that a target has confirmed', [
    ...V,
    'target',
  ] as const);
  const fresh = gauge(
    'replica_fresh_age_seconds',
    'Time since the replica was last known complete; absent when never',
    V,
  );
  const condition = gauge('volume_condition', '1 for each condition of the volume', [...V, 'type'] as const);
  const lag = gauge(
    'event_loop_delay_p99_seconds',
    '99th percentile of the event loop delay since the last scrape',
    [] as const,
  );
  // The usual names, without the observers and timers of prom-client's defaults, which cost memory and wake the process.
  const process_ = (name: string, help: string): Gauge => new Gauge({ name, help, registers });
  const resident = process_('process_resident_memory_bytes', 'Resident memory of the process');
  const heap = process_('nodejs_heap_size_used_bytes', 'Used JavaScript heap');
  process_('process_start_time_seconds', 'Start of the process, Unix time').set(
    performance.timeOrigin / 1000,
  );
  const cpu = new Counter({
    name: 'process_cpu_seconds_total',
    help: 'CPU time of the process',
    registers,
  });
  const perScrape = [
    state,
    epoch,
    generation,
    entries,
    bytes,
    size,
    enforced,
    pending,
    pendingAge,
    directories,
    unwatched,
    overflows,
    confirmed,
    fresh,
    condition,
  ];
  const counter = <T extends string>(name: string, help: string, labelNames: readonly T[]): Counter<T> =>
    new Counter<T>({ name: `simple_volume_${name}`, help, labelNames: [...labelNames], registers });
  return {
    registry,
    pulls: counter('pulls_total', 'Pulls by outcome', ['outcome'] as const),
    pulledBytes: counter('pulled_bytes_total', 'Bytes received through rclone', [] as const),
    stagedBytes: counter('staged_bytes_total', 'Bytes written to the shadow tree', [] as const),
    servedBytes: counter('served_bytes_total', 'Bytes sent by the WebDAV tree', [] as const),
    async render(volumes, isReady) {
      for (const metric of perScrape) metric.reset();
      ready.set(isReady ? 1 : 0);
      lag.set(delay.percentile(99) / 1e9);
      delay.reset();
      const memory = process.memoryUsage();
      resident.set(memory.rss);
      heap.set(memory.heapUsed);
      const { user, system } = process.cpuUsage();
      cpu.reset();
      cpu.inc((user + system) / 1e6);
      for (const v of volumes) {
        const labels = { namespace: v.namespace, volume: v.volume };
        state.set({ ...labels, role: v.role, state: v.state }, 1);
        epoch.set(labels, v.epoch);
        generation.set(labels, seqOf(v.generation));
        entries.set(labels, v.entries);
        bytes.set(labels, v.bytes);
        for (const c of v.conditions) condition.set({ ...labels, type: c.type }, 1);
        if (v.role === 'active') {
          if (v.size?.bytes != null) size.set(labels, v.size.bytes);
          if (v.size?.enforced != null) enforced.set(labels, v.size.enforced ? 1 : 0);
          pending.set(labels, v.pending);
          pendingAge.set(labels, (v.pendingMs ?? 0) / 1000);
          directories.set(labels, v.watch.directories);
          unwatched.set(labels, v.watch.unwatched);
          overflows.set(labels, v.watch.overflows);
          for (const t of v.targets)
            confirmed.set({ ...labels, target: t.node ?? t.url }, seqOf(t.confirmed));
        } else if (v.freshAgeMs !== null) fresh.set(labels, v.freshAgeMs / 1000);
      }
      return registry.metrics();
    },
  };
}
