import { spawn } from 'node:child_process';
import { readFileSync, writeFileSync } from 'node:fs';
import { join } from 'node:path';
import { clock, LocalCluster, sleep } from '../lib/local/cluster.ts';
import type { Figure, Measure } from './lib/figure.ts';
import { generator, summary } from './lib/stats.ts';

const VOLUME = { namespace: 'bench', volume: 'visible' };
const PROBES = 64;

/** Writes a small file and waits until both replicas show exactly it; seconds. */
async function probe(cluster: LocalCluster, number: number): Promise<number> {
  const name = `probe-${number % 8}`;
  const text = `${number} ${'.'.repeat(500)}`;
  const started = clock();
  writeFileSync(join(cluster.agent('a').live(VOLUME), name), text);
  const left = new Set(['b', 'c']);
  while (left.size > 0) {
    for (const node of left) {
      try {
        if (readFileSync(join(cluster.agent(node).live(VOLUME), name), 'utf8') === text) left.delete(node);
      } catch {
        // Not there yet.
      }
    }
    if (left.size > 0) await sleep(4);
    if (clock() - started > 60_000)
      throw new Error(`${name} did not reach ${[...left].join(', ')} within 60 s`);
  }
  return (clock() - started) / 1000;
}

const WRITER = `
const { appendFileSync, writeFileSync, renameSync } = require('node:fs');
let n = 0;
setInterval(() => {
  n += 1;
  appendFileSync('log', 'line ' + n + ' of a writer that never pauses\\n');
  if (n % 5 === 0) { writeFileSync('save.tmp', 'x'.repeat(20000) + n); renameSync('save.tmp', 'save-' + (n % 20)); }
}, 10);
`;

export const figure: Figure = {
  title: 'from a write to both replicas showing it, debounce 500 ms',
  method: `${PROBES} probes, each a small file written on the active node and polled for every 4 ms in the trees of both replicas`,
  async run(say): Promise<Measure[]> {
    const cluster = await LocalCluster.start({ prefix: 'simple-volume-bench-' });
    try {
      await cluster.watch('a', VOLUME, { targets: ['b', 'c'], debounce: '500ms' });
      await cluster.settle('a', VOLUME);
      const random = generator(1);
      const quiet: number[] = [];
      await probe(cluster, 0);
      for (let i = 1; i <= PROBES; i++) {
        quiet.push(await probe(cluster, i));
        await sleep(200 + random() * 300);
        if (i % 16 === 0) say(`quiet: ${i} of ${PROBES}`);
      }
      const writer = spawn(process.execPath, ['-e', WRITER], {
        cwd: cluster.agent('a').live(VOLUME),
        stdio: 'ignore',
      });
      const busy: number[] = [];
      try {
        await sleep(3000);
        for (let i = 1; i <= PROBES; i++) {
          busy.push(await probe(cluster, PROBES + i));
          // The start of a probe must not keep step with the batches.
          await sleep(random() * 1000);
          if (i % 16 === 0) say(`beside a writer: ${i} of ${PROBES}`);
        }
      } finally {
        writer.kill('SIGKILL');
      }
      const q = summary(quiet);
      const b = summary(busy);
      return [
        { name: 'quiet volume, p50', value: q.p50, unit: 's', target: 0.9 },
        {
          name: 'quiet volume, p99',
          value: q.p99,
          unit: 's',
          target: 1.5,
          note: `worst ${q.max.toFixed(2)} s`,
        },
        { name: 'beside a writer that never pauses, p50', value: b.p50, unit: 's' },
        {
          name: 'beside a writer that never pauses, p99',
          value: b.p99,
          unit: 's',
          target: 3.5,
          note: `worst ${b.max.toFixed(2)} s`,
        },
      ];
    } finally {
      await cluster.stop();
    }
  },
};
