import { mkdirSync, writeFileSync } from 'node:fs';
import { join } from 'node:path';
import type { SourceStatus } from '../lib/core/parts.ts';
import { LocalCluster, sleep, waitFor } from '../lib/local/cluster.ts';
import { type Figure, type Measure, MIB } from './lib/figure.ts';
import { cpuOf, memoryOf } from './lib/proc.ts';

const VOLUME = { namespace: 'bench', volume: 'rest' };
const FOLDERS = 10_000;
const FILES_EACH = 10;
const WINDOW_MS = 10_000;
/** The agent gives memory back some seconds after its last work. */
const GIVE_BACK_MS = 15_000;

export const figure: Figure = {
  title: 'the agent of the active node at rest, 10,000 folders and 100,000 files watched',
  method:
    'smaps_rollup and CPU time of the process over 10 s, with one replica and the beat of 1 s; after it has seeded the replica and after a restart, 15 s after the last work; the bundle and the flags that are shipped',
  async run(say): Promise<Measure[]> {
    const cluster = await LocalCluster.start({ prefix: 'simple-volume-bench-', nodes: ['a', 'b'] });
    try {
      const agent = cluster.agent('a');
      const live = agent.live(VOLUME);
      for (let i = 0; i < FOLDERS; i++) {
        const folder = join(live, `g${i % 100}`, `folder-${i}`);
        mkdirSync(folder, { recursive: true });
        for (let k = 0; k < FILES_EACH; k++) writeFileSync(join(folder, `f${k}`), `${i} ${k}`);
      }
      say('tree made');
      await cluster.watch('a', VOLUME, { targets: ['b'], debounce: '1s' });
      await cluster.reached('b', VOLUME, await cluster.settle('a', VOLUME, 600_000), 600_000);
      const resting = async (): Promise<{ rss: number; anonymous: number; cpu: number }> => {
        await waitFor(
          'the first scan',
          async () => {
            const status = (await agent.status(VOLUME)) as SourceStatus | null;
            return (
              status?.state === 'watching' && status.pending === 0 && status.watch.directories >= FOLDERS
            );
          },
          120_000,
        );
        await sleep(GIVE_BACK_MS);
        const pid = agent.pid as number;
        const before = cpuOf(pid);
        await sleep(WINDOW_MS);
        const cpu = ((cpuOf(pid) - before) / (WINDOW_MS / 1000)) * 100;
        const memory = memoryOf(pid);
        if (memory === null) throw new Error('the agent ended');
        return { rss: memory.rss / MIB, anonymous: memory.anonymous / MIB, cpu };
      };
      const seeded = await resting();
      say('restarting');
      await agent.stop();
      await agent.start(60_000);
      const fresh = await resting();
      return [
        {
          name: 'RSS',
          value: fresh.rss,
          unit: 'MiB',
          target: 88,
          note: `after a restart; ${seeded.rss.toFixed(1)} after seeding`,
        },
        {
          name: 'anonymous memory',
          value: fresh.anonymous,
          unit: 'MiB',
          target: 36,
          note: `${seeded.anonymous.toFixed(1)} after seeding`,
        },
        {
          name: 'CPU over 10 s',
          value: fresh.cpu,
          unit: '%',
          target: 0.5,
          note: `${seeded.cpu.toFixed(1)} % after it had seeded; aimed at 0 %, rounded`,
        },
      ];
    } finally {
      await cluster.stop();
    }
  },
};
