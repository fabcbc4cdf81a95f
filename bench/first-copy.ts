import { spawn } from 'node:child_process';
import { mkdirSync, writeFileSync } from 'node:fs';
import { join } from 'node:path';
import { clock, LocalCluster } from '../lib/local/cluster.ts';
import { compareTrees, readTree } from '../lib/local/tree.ts';
import { findRclone } from '../lib/transfer/rclone-binary.ts';
import type { Figure, Measure } from './lib/figure.ts';

const VOLUME = { namespace: 'bench', volume: 'small' };
const FILES = 10_000;

export const figure: Figure = {
  title: 'first copy of 10,000 files of 4 KiB to one replica',
  method:
    'from the watch/start request until the replica is idle at the generation with all files; beside it `rclone copy` with its defaults from the same generation over the same WebDAV server',
  async run(say): Promise<Measure[]> {
    const cluster = await LocalCluster.start({ prefix: 'simple-volume-bench-', nodes: ['a', 'b'] });
    try {
      const live = cluster.agent('a').live(VOLUME);
      for (let i = 0; i < FILES; i++) {
        const folder = join(live, `folder-${String(i % 100).padStart(2, '0')}`);
        if (i < 100) mkdirSync(folder, { recursive: true });
        writeFileSync(join(folder, `file-${i}.bin`), Buffer.alloc(4096, i % 256).fill(String(i), 0, 8));
      }
      const started = clock();
      await cluster.watch('a', VOLUME, { targets: ['b'], debounce: '500ms' });
      const generation = await cluster.settle('a', VOLUME, 300_000);
      await cluster.reached('b', VOLUME, generation, 300_000);
      const ours = (clock() - started) / 1000;
      const differences = compareTrees(await readTree(live), await readTree(cluster.agent('b').live(VOLUME)));
      if (differences.length > 0)
        throw new Error(`the copy is not the same: ${differences.slice(0, 3).join('; ')}`);
      say(`simple-volume: ${ours.toFixed(1)} s; rclone copy takes about two minutes`);

      const peer = await rcloneCopy(cluster, join(cluster.folder, 'rclone'));
      return [
        { name: 'simple-volume', value: ours, unit: 's', target: 5 },
        { name: 'rclone copy', value: peer, unit: 's', note: `${(peer / ours).toFixed(1)} times as long` },
      ];
    } finally {
      await cluster.stop();
    }
  },
};

/** The peer: what a cron job with rclone would do. Seconds. */
async function rcloneCopy(cluster: LocalCluster, target: string): Promise<number> {
  const agent = cluster.agent('a');
  const found = await findRclone();
  const started = clock();
  const child = spawn(found.path, ['copy', 'peer:', target], {
    stdio: ['ignore', 'ignore', 'pipe'],
    env: {
      ...process.env,
      RCLONE_CONFIG: '/dev/null',
      RCLONE_CONFIG_PEER_TYPE: 'webdav',
      RCLONE_CONFIG_PEER_VENDOR: 'other',
      RCLONE_CONFIG_PEER_URL: `${agent.webdavUrl}/browse/${VOLUME.namespace}/${VOLUME.volume}`,
      RCLONE_CONFIG_PEER_BEARER_TOKEN: agent.token,
    },
  });
  let errors = '';
  child.stderr.on('data', (chunk: Buffer) => {
    errors = (errors + chunk.toString()).slice(-2000);
  });
  const code = await new Promise<number | null>((resolve) => child.once('close', resolve));
  if (code !== 0) throw new Error(`rclone copy ended with ${code}: ${errors}`);
  return (clock() - started) / 1000;
}
