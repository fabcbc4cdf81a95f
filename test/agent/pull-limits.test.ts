/** The knobs of a faster, or gentler, seed. */
import { mkdirSync } from 'node:fs';
import t from 'tap';
import { LocalCluster, waitFor } from '../../lib/local/cluster.ts';
import { differences, fill } from './support.ts';

const KIB = 1024;

for (const { name, flags, atLeastMs } of [
  // 1,024 KiB at 512 KiB a second; the first chunk is passed on before it is waited for.
  {
    name: 'a bandwidth limit holds for all pulls together',
    flags: ['--pull-bandwidth', '512Ki'],
    atLeastMs: 1500,
  },
  {
    name: 'more pulls with buffers bring the same',
    flags: ['--pulls', '4', '--pull-buffer', '1Mi'],
    atLeastMs: 0,
  },
])
  t.test(name, { timeout: 90_000 }, async (t) => {
    const cluster = await LocalCluster.start({ nodes: ['a', 'b'], prefix: 'sv-limits-', flags });
    t.teardown(() => cluster.stop());
    const began = performance.now();
    for (const volume of ['one', 'two'].map((one) => ({ namespace: 'default', volume: one }))) {
      mkdirSync(cluster.agent('a').live(volume), { recursive: true });
      fill(cluster.agent('a').live(volume), 8, 64 * KIB);
      await cluster.watch('a', volume, { targets: ['b'], debounce: '50ms' });
    }
    for (const volume of ['one', 'two'].map((one) => ({ namespace: 'default', volume: one })))
      await waitFor(
        `the copy of ${volume.volume}`,
        async () => (await differences(cluster, volume, 'a', 'b')).length === 0,
        60_000,
      );
    t.ok(performance.now() - began >= atLeastMs, `${Math.round(performance.now() - began)} ms`);
  });
