/** A node with many volumes is lost: every one of them is seen to, not the first few again and again (B19). */
import tap from 'tap';
import { noKube } from './harness/programs.ts';
import { TestCluster, until } from './test-cluster.ts';

const COUNT = 40;

tap.test(
  'forty volumes of a lost node all fail over (B19)',
  { skip: noKube(), timeout: 100_000 },
  async (t) => {
    const cluster = await TestCluster.start({ nodes: ['a', 'b', 'c'] });
    // The client's own limits as they are shipped.
    const options = cluster.options('one');
    delete options.kubeRate;
    const controller = await cluster.controllerOf(options);
    t.teardown(async () => {
      await controller.stop();
      await cluster.stop();
    });
    const names = Array.from({ length: COUNT }, (_, i) => `many-${i}`);
    for (const name of names) {
      await cluster.claim(name, {
        'failover-enabled': 'true',
        'failover-grace-period': '1s',
        'failover-max-staleness': '5m',
      });
      await cluster.pod(`${name}-0`, name, 'a');
    }
    for (const name of names) await cluster.settled(name);
    const lost = performance.now();
    await cluster.lose('a');
    const promoted = new Map<string, number>();
    await until(
      'all have failed over',
      async () => {
        for (const name of names)
          if (!promoted.has(name) && (await cluster.object(name))?.status?.epoch === 2)
            promoted.set(name, performance.now() - lost);
        return promoted.size === COUNT;
      },
      40_000,
    );
    const times = [...promoted.values()].sort((x, y) => x - y);
    const [first, last] = [times[0] as number, times.at(-1) as number];
    t.comment(`first ${Math.round(first)} ms, last ${Math.round(last)} ms`);
    t.ok(last - first < 15_000, 'the last one waits for its turn, not for the others to be finished');
    await until('all are finished', async () => {
      for (const name of names)
        if ((await cluster.object(name))?.status?.promotion?.done.length !== 7) return false;
      return true;
    });
    for (const name of names) t.equal((await cluster.object(name))?.status?.epoch, 2, `${name}: once`);
  },
);
