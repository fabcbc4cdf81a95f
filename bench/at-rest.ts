import { appendFileSync, mkdirSync, writeFileSync } from 'node:fs';
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
    'smaps_rollup and CPU time of the process over 10 s, with one replica and the beat of 1 s; after it has seeded the replica, after a restart, and after every file was appended to (100,000 marks); the agent that is shipped with the heap limit that it is shipped with, so a heap too small for one of these would end the figure',
  async run(say): Promise<Measure[]> {
    const cluster = await LocalCluster.start({ prefix: 'simple-volume-bench-', nodes: ['a', 'b'] });
    try {
      const agent = cluster.agent('a');
      const live = agent.live(VOLUME);
      const folderOf = (i: number): string => join(live, `g${i % 100}`, `folder-${i}`);
      for (let i = 0; i < FOLDERS; i++) {
        const folder = folderOf(i);
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
      say('appending to every file');
      const { pid } = agent;
      for (let i = 0; i < FOLDERS; i++)
        for (let k = 0; k < FILES_EACH; k++) appendFileSync(join(folderOf(i), `f${k}`), '+');
      await cluster.reached('b', VOLUME, await cluster.settle('a', VOLUME, 600_000), 600_000);
      const burst = await resting();
      if (agent.pid !== pid) throw new Error('the agent ended during the burst');
      return [
        {
          name: 'RSS',
          value: fresh.rss,
          unit: 'MiB',
          target: 88,
          note: `after a restart; ${seeded.rss.toFixed(1)} after seeding, ${burst.rss.toFixed(1)} after the burst`,
        },
        {
          name: 'anonymous memory',
          value: fresh.anonymous,
          unit: 'MiB',
          target: 36,
          note: `${seeded.anonymous.toFixed(1)} after seeding, ${burst.anonymous.toFixed(1)} after the burst`,
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
