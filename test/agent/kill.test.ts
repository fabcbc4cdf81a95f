/** Power cuts of processes in the middle of a pull of a few hundred megabytes. */
import fs from 'node:fs';
import path from 'node:path';
import t from 'tap';
import { LocalCluster, waitFor } from '../../lib/local/cluster.ts';
import { compareTrees } from '../../lib/local/tree.ts';
import { differences, fill, tree } from './support.ts';

t.setTimeout(300_000);
const MB = 1024 * 1024;
const cluster = await LocalCluster.start({ nodes: ['a', 'b'], prefix: 'sv-kill-' });
t.teardown(() => cluster.stop());
const a = cluster.agent('a');
const b = cluster.agent('b');
const volume = { namespace: 'kill', volume: 'large' };
const live = a.live(volume);
const pulled = (): number => {
  // Contents that have arrived and wait for the rest; several are open at a time only in their own slots.
  const walk = (dir: string): number => {
    let sum = 0;
    let entries: fs.Dirent[] = [];
    try {
      entries = fs.readdirSync(dir, { withFileTypes: true });
    } catch {
      return 0;
    }
    for (const entry of entries) {
      const at = path.join(dir, entry.name);
      try {
        sum += entry.isDirectory() ? walk(at) : fs.statSync(at).size;
      } catch {
        // gone meanwhile
      }
    }
    return sum;
  };
  return walk(path.join(b.pool, '.simple-volume-incoming', 'kill', 'large'));
};

/** 300 MB that come into the volume at once, so that one generation holds all of them. */
const appear = (name: string, seed: number): void => {
  const aside = path.join(a.pool, `aside-${name}`);
  fill(aside, 60, 5 * MB, seed);
  fs.renameSync(aside, path.join(live, name));
};

fill(live, 20, 1000);
await cluster.watch('a', volume, { targets: ['b'], debounce: '50ms' });
const first = await cluster.settle('a', volume);
const firstTree = await tree(live);

t.test(
  'a replica killed in the middle of a pull is at a whole generation afterwards, and completes',
  async (t) => {
    appear('more', 7);
    await waitFor('the pull is under way', () => pulled() > 20 * MB, 60_000, 2);
    await b.end('SIGKILL');
    t.same(compareTrees(firstTree, await tree(b.live(volume))), [], 'the tree is the generation before');
    await b.start();
    await cluster.settle('a', volume, 100_000);
    t.same(await differences(cluster, volume, 'a', 'b'), []);
  },
);

t.test(
  'a source killed in the middle of a pull: the replica keeps its generation and has all after the restart',
  async (t) => {
    const before = await tree(b.live(volume));
    const held = (await b.status(volume))?.generation;
    appear('again', 9);
    await waitFor('the pull is under way', () => pulled() > 20 * MB, 60_000, 2);
    await a.end('SIGKILL');
    await waitFor('the replica has noticed', async () => {
      const status = await b.status(volume);
      return status?.conditions.some((one) => one.type === 'PullFailed');
    });
    t.equal((await b.status(volume))?.generation, held);
    t.same(compareTrees(before, await tree(b.live(volume))), [], 'not one byte of the new generation');
    await a.start();
    const generation = await cluster.settle('a', volume, 100_000);
    t.not(generation, first);
    t.same(await differences(cluster, volume, 'a', 'b'), []);
    t.same((await b.status(volume))?.conditions, []);
  },
);
