/** Real agents: hard links stay hard links when another node takes over, on a replica that held the old generation. */
import fs from 'node:fs';
import path from 'node:path';
import t from 'tap';
import { LocalCluster, waitFor } from '../../lib/local/cluster.ts';
import { differences, replica, source } from './support.ts';

t.setTimeout(300_000);
const cluster = await LocalCluster.start({ nodes: ['a', 'b', 'c'], prefix: 'sv-links-' });
t.teardown(() => cluster.stop());
const a = cluster.agent('a');
const b = cluster.agent('b');
const c = cluster.agent('c');
const fast = { debounce: '50ms' };

for (const consistencyMode of ['shadow', 'live'] as const)
  t.test(`hard links over a failover, ${consistencyMode} consistency`, async (t) => {
    const volume = { namespace: 'links', volume: consistencyMode };
    const live = a.live(volume);
    fs.mkdirSync(path.join(live, 'd'), { recursive: true });
    const content = Buffer.alloc(100_000, 7);
    for (let g = 0; g < 12; g++) {
      fs.writeFileSync(path.join(live, `g${g}-1`), content);
      fs.linkSync(path.join(live, `g${g}-1`), path.join(live, `g${g}-2`));
      fs.linkSync(path.join(live, `g${g}-1`), path.join(live, `d/g${g}-3`));
    }
    await cluster.watch('a', volume, { targets: ['b', 'c'], epoch: 1, consistencyMode, ...fast });
    await cluster.settle('a', volume);
    for (const node of ['b', 'c']) t.same(await differences(cluster, volume, 'a', node), [], node);

    await a.end('SIGKILL');
    // The inodes of the old tree are free for other files now: their numbers come back in other groups.
    fs.rmSync(live, { recursive: true });
    const at = (name: string): string => path.join(b.live(volume), name);
    for (let g = 0; g < 12; g++) {
      fs.writeFileSync(at(`new${g}-1`), content);
      fs.linkSync(at(`new${g}-1`), at(`d/new${g}-2`));
    }
    fs.linkSync(at('g1-1'), at('g1-4'));
    fs.unlinkSync(at('g2-1'));
    await cluster.watch('b', volume, { targets: ['c'], epoch: 2, consistencyMode, ...fast });
    await waitFor(
      'the first generation of epoch 2',
      async () => (await source(b, volume)).generation?.startsWith('2-') === true,
    );
    await cluster.settle('b', volume);
    t.same(await differences(cluster, volume, 'b', 'c'), [], 'the first generation');
    t.equal((await replica(c, volume)).lastPull?.full, false);

    fs.linkSync(at('g3-1'), at('g3-4'));
    fs.linkSync(at('g2-2'), at('d/g2-4'));
    fs.unlinkSync(at('g4-2'));
    fs.appendFileSync(at('d/g5-3'), 'changed through one name');
    fs.unlinkSync(at('d/g1-3'));
    await cluster.settle('b', volume);
    t.same(await differences(cluster, volume, 'b', 'c'), [], 'what followed');
    fs.linkSync(at('g4-1'), at('g4-2'));
    fs.linkSync(at('d/g5-3'), at('g5-9'));
    await cluster.settle('b', volume);
    t.same(await differences(cluster, volume, 'b', 'c'), [], 'and again');
    t.equal((await replica(c, volume)).lastPull?.full, false);
    await b.call('POST', '/replication/watch/stop', { ...volume, epoch: 2 });
    if (!a.running) await a.start();
  });
