/**
 * The tree cases through everything: two real agents, the tree on one, its copy on the other, by watch, stage,
 * offer, rclone, verify and apply. In `shadow` consistency the shadow must be the source too.
 */
import fs from 'node:fs';
import t from 'tap';
import { LocalCluster } from '../../lib/local/cluster.ts';
import { compareTrees, readTree } from '../../lib/local/tree.ts';
import { addSpecials, atRoot, CASES } from './cases.ts';
import { xattrReader } from './support.ts';

const cluster = await LocalCluster.start({ nodes: ['a', 'b'], prefix: 'sv-cases-' });
t.teardown(() => cluster.stop());
const a = cluster.agent('a');
const b = cluster.agent('b');
const tree = (root: string): ReturnType<typeof readTree> => readTree(root, xattrReader(Buffer.from(root)));

for (const consistencyMode of ['shadow', 'live'] as const)
  for (const [i, c] of CASES.entries())
    t.test(`${consistencyMode}: ${c.name}`, async (t) => {
      const volume = { namespace: consistencyMode, volume: `case-${i}` };
      fs.mkdirSync(a.live(volume), { recursive: true });
      const at = atRoot(a.live(volume));
      c.start(at);
      await cluster.watch('a', volume, { targets: ['b'], debounce: '50ms', consistencyMode });
      for (const step of ['the first tree', 'the changed tree']) {
        if (step === 'the changed tree') {
          if (!c.change) break;
          c.change(at);
        }
        await cluster.settle('a', volume);
        const source = await tree(a.live(volume));
        t.same(compareTrees(source, await tree(b.live(volume))), [], `${step} on the replica`);
        if (consistencyMode === 'shadow')
          t.same(compareTrees(source, await tree(a.shadow(volume))), [], `${step} in the shadow`);
      }
      const { conditions } = (await a.status(volume)) as { conditions: { type: string }[] };
      t.same(conditions, [], 'and nothing to complain about');
      await a.call('POST', '/replication/watch/stop', volume);
    });

t.test('D15, C2: a FIFO and a socket are listed and stop nothing', async (t) => {
  const volume = { namespace: 'shadow', volume: 'specials' };
  fs.mkdirSync(a.live(volume), { recursive: true });
  const names = addSpecials(atRoot(a.live(volume)));
  fs.writeFileSync(`${a.live(volume)}/file`, 'x');
  await cluster.watch('a', volume, { targets: ['b'], debounce: '50ms' });
  await cluster.settle('a', volume);
  t.same(fs.readdirSync(b.live(volume)), ['file']);
  const status = (await a.status(volume)) as { conditions: { type: string; paths?: string[] }[] };
  t.same(status.conditions.find((c) => c.type === 'Unsupported')?.paths?.sort(), names.sort());
});
