import { execFileSync } from 'node:child_process';
import { randomFillSync } from 'node:crypto';
import {
  closeSync,
  fsyncSync,
  mkdirSync,
  mkdtempSync,
  openSync,
  rmSync,
  symlinkSync,
  writeSync,
} from 'node:fs';
import { join } from 'node:path';
import type { ReplicaStatus } from '../lib/core/parts.ts';
import { LocalCluster } from '../lib/local/cluster.ts';
import { compareTrees, readTree } from '../lib/local/tree.ts';
import { type Figure, GIB, type Measure, MIB } from './lib/figure.ts';
import { writtenTo } from './lib/proc.ts';
import { sample } from './lib/stats.ts';

const VOLUME = { namespace: 'bench', volume: 'large' };
const BLOCK = 4096;

export const figure: Figure = {
  title: 'one file of 1 GiB of random bytes, 1 % of its 4 KiB blocks changed in place',
  method:
    "wire: what the source's WebDAV server sent for the change; disk: sectors that the source's device wrote for it, after the application's own blocks were flushed; the replica's pool is in memory. write_bytes of /proc/<pid>/io is no measure here: with large folios the kernel counts a whole folio for a block of 4 KiB (200 such writes: 0.8 MB on the device, 82 MB in write_bytes)",
  async run(say): Promise<Measure[]> {
    const cluster = await LocalCluster.create({ prefix: 'simple-volume-bench-', nodes: ['a', 'b'] });
    const memory = mkdtempSync('/dev/shm/simple-volume-bench-');
    try {
      symlinkSync(memory, cluster.agent('b').pool);
      for (const node of ['a', 'b']) await cluster.agent(node).start();
      const source = cluster.agent('a');
      const live = source.live(VOLUME);
      mkdirSync(live, { recursive: true });
      const file = join(live, 'data.bin');
      const fd = openSync(file, 'w+');
      const piece = Buffer.alloc(4 * MIB);
      for (let at = 0; at < GIB; at += piece.length)
        writeSync(fd, randomFillSync(piece), 0, piece.length, at);
      fsyncSync(fd);
      await cluster.watch('a', VOLUME, { targets: ['b'], debounce: '1s' });
      await cluster.reached('b', VOLUME, await cluster.settle('a', VOLUME, 300_000), 300_000);
      execFileSync('sync');
      say('seeded');

      const sentBefore = (await source.metric('simple_volume_served_bytes_total')) ?? 0;
      const block = Buffer.alloc(BLOCK);
      for (const at of sample(Math.round(GIB / BLOCK / 100), GIB / BLOCK, 3)) {
        writeSync(fd, randomFillSync(block), 0, BLOCK, at * BLOCK);
      }
      fsyncSync(fd);
      closeSync(fd);
      const writtenBefore = writtenTo(source.pool);
      await cluster.reached('b', VOLUME, await cluster.settle('a', VOLUME, 300_000), 300_000);
      execFileSync('sync');
      const written = writtenTo(source.pool) - writtenBefore;
      const sent = ((await source.metric('simple_volume_served_bytes_total')) ?? Number.NaN) - sentBefore;
      const pulled =
        ((await cluster.agent('b').status(VOLUME)) as ReplicaStatus).lastPull?.bytes ?? Number.NaN;
      const differences = compareTrees(await readTree(live), await readTree(cluster.agent('b').live(VOLUME)));
      if (differences.length > 0)
        throw new Error(`the copy is not the same: ${differences.slice(0, 3).join('; ')}`);
      return [
        {
          name: 'bytes on the wire',
          value: (sent / GIB) * 100,
          unit: '%',
          target: 3,
          note: `${(sent / MIB).toFixed(1)} MiB; the replica counted ${(pulled / MIB).toFixed(1)} MiB`,
        },
        {
          name: 'bytes written at the source',
          value: (written / GIB) * 100,
          unit: '%',
          target: 3,
          note: `${(written / MIB).toFixed(1)} MiB`,
        },
      ];
    } finally {
      await cluster.stop();
      rmSync(memory, { recursive: true, force: true });
    }
  },
};
