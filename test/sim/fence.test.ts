/**
 * Never two writers: the real code of lib/fence and of csi-node's decision, in simulated clusters. And for each rule
 * that it was needed: without it, some cluster has two writers.
 *
 * SIMPLE_VOLUME_FENCE_SEEDS=20000 runs that many clusters of each kind, and looks for each missing rule further.
 * SIMPLE_VOLUME_FENCE_SEED=123 runs one seed of each kind and prints its history.
 */
import t from 'tap';
import type { FenceRules } from '../../lib/fence/rules.ts';
import { PROTOCOL } from '../../lib/fence/rules.ts';
import { CALLERS, type CallerRules, type Options, type Outcome, simulate, WILD } from './fence-world.ts';

t.setTimeout(3_600_000);
const more = Number(process.env.SIMPLE_VOLUME_FENCE_SEEDS ?? 0);
const only = process.env.SIMPLE_VOLUME_FENCE_SEED;

const KINDS: [name: string, seeds: number, options: Options][] = [
  ['usual trouble', 300, {}],
  ['wild: sets, restarts and stuck messages five times as often', 150, { trouble: WILD }],
  ['many planned moves', 100, { trouble: { moves: 10, sets: 3 } }],
  ['leaders that stop and read late', 100, { trouble: { pauses: 4, reads: 5 } }],
  ['agents that restart all the time', 50, { trouble: { restarts: 10, stuck: 5 } }],
];

for (const [name, seeds, options] of KINDS) {
  t.test(`no two writers: ${name}`, async (t) => {
    const sum = { promotions: 0, planned: 0, kills: 0, thaws: 0, still: 0 };
    const from = only === undefined ? 0 : Number(only);
    const count = only === undefined ? Math.max(seeds, more) : 1;
    const failed: Outcome[] = [];
    for (let seed = from; seed < from + count && failed.length === 0; seed++) {
      const one = simulate(seed, options);
      if (one.bad || only !== undefined) failed.push(one);
      for (const key of ['promotions', 'planned', 'kills', 'thaws', 'still'] as const) sum[key] += one[key];
    }
    for (const one of failed) t.comment(`seed ${one.seed}: ${one.bad}\n${one.history.join('\n')}`);
    t.same(
      failed.filter((one) => one.bad).map((one) => `seed ${one.seed}: ${one.bad}`),
      [],
    );
    t.comment(`${count} clusters of 240 s: ${JSON.stringify(sum)}`);
    if (only !== undefined) return;
    // A world in which nothing happens would pass too.
    t.ok(sum.promotions > count / 4, `${sum.promotions} promotions`);
    t.ok(sum.planned > 0, `${sum.planned} of them planned`);
    t.ok(sum.thaws > 0, `${sum.thaws} writers were thawed`);
    t.ok(sum.kills > 0, `${sum.kills} frozen writers were killed`);
    t.ok(sum.still < count * 240_000 * 0.75, 'and a writer runs most of the time');
  });
}

t.test('a healthy cluster that loses one message in twenty freezes nobody', async (t) => {
  const all = Array.from({ length: 20 }, (_, seed) => simulate(seed, { calm: true }));
  t.same([...new Set(all.map((one) => one.bad))], [null]);
  t.equal(
    all.reduce((sum, one) => sum + one.thaws + one.promotions, 0),
    0,
  );
  t.ok(
    all.every((one) => one.still < 5_000),
    'the writer runs from the first seconds on',
  );
});

/** Where a missing rule shows: clusters from this seed on, with this trouble. */
interface Place {
  from: number;
  trouble?: Options['trouble'];
  /** rules that cover for this one: taken out too, and the same cluster is fine when only they are missing */
  covered?: (keyof FenceRules)[];
}

/** Found by search; each shows within a few clusters. */
const RULES: Record<keyof FenceRules, Place> = {
  countFromSent: { from: 5 },
  everyReplica: { from: 0 },
  versionedSet: { from: 360, trouble: { stuck: 6, sets: 8 } },
  ownEpochOnly: { from: 325, trouble: { moves: 20 } },
  fullPromise: { from: 115 },
  refuseOlderEpoch: { from: 0 },
  promiseBinds: { from: 0 },
  boundAfterStart: { from: 10, trouble: { restarts: 10 } },
  waitForGrants: { from: 0, covered: ['waitBeforeActivating'] },
  waitAfterTakeover: { from: 85 },
  onlyWhileLeading: { from: 5 },
  readAfterTakeover: { from: 460, trouble: { pauses: 4, reads: 5 } },
  waitBeforeActivating: { from: 230 },
  addInTwoSteps: { from: 10 },
  exactAcknowledgement: { from: 165, trouble: { stuck: 12, sets: 6 } },
  waitAfterAddition: { from: 60, trouble: { moves: 10, sets: 8 } },
  releaseWhenStopped: { from: 85, trouble: { moves: 10, restarts: 5 } },
};
const CALLER_RULES: Record<keyof CallerRules, Place> = {
  freshNumbers: { from: 35, trouble: { restarts: 10, stuck: 5 } },
  saved: { from: 0, trouble: { restarts: 10 } },
  ownTimer: { from: 0 },
  countFromAsked: { from: 10 },
  ownEpoch: { from: 0, trouble: { moves: 10 } },
};
const WITHIN = 40;

const places: [kind: 'rules' | 'callers', rule: string, place: Place][] = [
  ...Object.keys(PROTOCOL).map((rule): ['rules', string, Place] => [
    'rules',
    rule,
    RULES[rule as keyof FenceRules],
  ]),
  ...Object.keys(CALLERS).map((rule): ['callers', string, Place] => [
    'callers',
    rule,
    CALLER_RULES[rule as keyof CallerRules],
  ]),
];
for (const [kind, rule, { from, trouble = {}, covered = [] }] of only === undefined ? places : []) {
  t.test(`without the rule ${rule} there are two writers somewhere`, async (t) => {
    const out = (rules: string[]): Options => ({
      trouble,
      [kind]: Object.fromEntries(rules.map((one) => [one, false])),
    });
    let found: Outcome | null = null;
    for (let seed = from; seed < from + Math.max(WITHIN, more) && !found; seed++) {
      const one = simulate(seed, out([rule, ...covered]));
      if (one.bad && (covered.length === 0 || !simulate(seed, out(covered)).bad)) found = one;
    }
    t.ok(found, `not within ${Math.max(WITHIN, more)} clusters from ${from} on`);
    if (!found) return;
    t.comment(`seed ${found.seed}: ${found.bad}`);
    t.equal(simulate(found.seed, { trouble }).bad, null, 'with it the same cluster has one');
  });
}
