/**
 * The whole controller in simulated clusters: whatever happens to nodes, pods, agents, controllers and the network, at no
 * time are there two writers, is a stale or half-applied copy promoted, or is something lost that a live copy still had;
 * and when all is well again, so is the volume. For rules of the controller: without it, some cluster goes wrong.
 *
 * SIMPLE_VOLUME_SEEDS=5000 runs that many clusters. SIMPLE_VOLUME_SEED=123 runs one and prints its history
 * (SIMPLE_VOLUME_LOG=1: with what the controllers say).
 */
import t from 'tap';
import { createHttpClient } from '../../lib/core/http-client.ts';
import { KINDS, type Outcome, simulate } from './controller-world.ts';
import { MUTATIONS } from './mutations.ts';

t.setTimeout(3_600_000);
const SEEDS = Number(process.env.SIMPLE_VOLUME_SEEDS ?? 80);
const only = process.env.SIMPLE_VOLUME_SEED;
const verbose = process.env.SIMPLE_VOLUME_LOG === '1';

const names = Object.keys(KINDS);
const kindOf = (seed: number): string => names[seed % names.length] as string;

t.test(
  'whatever happens: one writer, nothing stale, nothing lost that is there, and well again',
  async (t) => {
    const from = only === undefined ? 1 : Number(only);
    const count = only === undefined ? SEEDS : 1;
    const sum: Record<string, number> = {};
    const failed: Outcome[] = [];
    for (let seed = from; seed < from + count && failed.length < 5; seed++) {
      const one = await simulate(seed, { ...KINDS[kindOf(seed)], verbose });
      for (const [name, value] of Object.entries(one.counts)) sum[name] = (sum[name] ?? 0) + value;
      if (one.bad !== null) failed.push(one);
      if (only !== undefined) t.comment(one.history.join('\n'));
    }
    for (const one of failed)
      t.comment(`seed ${one.seed} (${kindOf(one.seed)}): ${one.bad}\n${one.history.slice(-60).join('\n')}`);
    t.same(
      failed.map((one) => `seed ${one.seed}: ${one.bad}`),
      [],
    );
    t.comment(`${count} clusters: ${JSON.stringify(sum)}`);
    if (only !== undefined) return;
    // A world in which nothing happens would pass too.
    const least = (name: string, part: number): void => {
      t.ok((sum[name] ?? 0) > count * part, `${name}: ${sum[name]} in ${count} clusters`);
    };
    least('failovers', 0.3);
    least('planned', 0.3);
    least('writes', 20);
    least('stills', 0.2);
    least('kills', 0.005);
  },
);

t.test('the same seed is the same history', async (t) => {
  const [one, other] = [await simulate(3, KINDS.dense), await simulate(3, KINDS.dense)];
  t.same(one.history, other.history);
  t.same(one.counts, other.counts);
  t.not((await simulate(4, KINDS.dense)).history.join(), one.history.join());
});

t.test('a part that sets a real timer is noticed', async (t) => {
  const http = createHttpClient();
  t.teardown(() => http.close());
  const { bad } = await simulate(1, {
    mutation: {
      controller: () => {
        http.call({ url: 'http://127.0.0.1:1/', timeoutMs: 1 }).catch(() => {});
      },
    },
  });
  t.match(bad, /a real setTimeout is used/);
});

for (const { without, mutation, like, options } of only === undefined ? MUTATIONS : []) {
  t.test(`without ${without} some cluster goes wrong`, async (t) => {
    let found: Outcome | null = null;
    const count = 40;
    for (let seed = 1; seed <= count && !found; seed++) {
      const one = await simulate(seed, { ...options, mutation });
      if (one.bad !== null && like.test(one.bad)) found = one;
    }
    t.ok(found, found ? `seed ${found.seed}: ${found.bad}` : `not within ${count} clusters`);
    if (found) t.equal((await simulate(found.seed, options)).bad, null, 'with it the same cluster is fine');
  });
}
