import { randomFillSync } from 'node:crypto';
import { mkdirSync, writeFileSync } from 'node:fs';
import { join } from 'node:path';
import { clock, LocalCluster } from '../lib/local/cluster.ts';
import { type Figure, type Measure, MIB } from './lib/figure.ts';
import { PeakWatcher, pageCache } from './lib/proc.ts';

const VOLUME = { namespace: 'bench', volume: 'seed' };

export const figure: Figure = {
  title: 'peak memory while a volume of 2 GiB is seeded',
  method:
    'highest sum of PSS of an agent and its rclone, looked at every 50 ms, for source and replica separately; the volume is two files of 512 MiB, 64 of 8 MiB and 4,096 of 128 KiB',
  async run(say): Promise<Measure[]> {
    const cluster = await LocalCluster.start({ prefix: 'simple-volume-bench-', nodes: ['a', 'b'] });
    try {
      const live = cluster.agent('a').live(VOLUME);
      const make = (folder: string, count: number, size: number): void => {
        mkdirSync(join(live, folder), { recursive: true });
        const data = Buffer.alloc(size);
        for (let i = 0; i < count; i++) writeFileSync(join(live, folder, `f${i}`), randomFillSync(data));
      };
      make('huge', 2, 512 * MIB);
      make('large', 64, 8 * MIB);
      make('medium', 4096, 128 * 1024);
      say('tree made');
      const source = new PeakWatcher(cluster.agent('a').pid as number);
      const replica = new PeakWatcher(cluster.agent('b').pid as number);
      const cacheBefore = pageCache();
      const started = clock();
      await cluster.watch('a', VOLUME, { targets: ['b'], debounce: '1s' });
      await cluster.reached('b', VOLUME, await cluster.settle('a', VOLUME, 600_000), 600_000);
      const seconds = (clock() - started) / 1000;
      const grown = pageCache() - cacheBefore;
      return [
        { name: 'source: agent', value: source.stop() / MIB, unit: 'MiB', target: 125 },
        { name: 'replica: agent and rclone', value: replica.stop() / MIB, unit: 'MiB', target: 125 },
        { name: 'page cache grown by (whole machine)', value: grown / MIB, unit: 'MiB' },
        {
          name: 'time',
          value: seconds,
          unit: 's',
          note: `${(2048 / seconds).toFixed(0)} MiB/s with staging and both disks the same`,
        },
      ];
    } finally {
      await cluster.stop();
    }
  },
};
