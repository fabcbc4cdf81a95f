import fc from 'fast-check';
import t from 'tap';
import {
  decidedSet,
  firstNode,
  type PlacementInput,
  type PlacementNode,
  place,
  promotableStep,
  ZONE,
} from '../../controller/plan/placement.ts';
import type { Promotable } from '../../lib/fence/types.ts';

function node(name: string, change: Partial<PlacementNode> = {}): PlacementNode {
  return {
    name,
    ready: true,
    unschedulable: false,
    inPool: true,
    deleting: false,
    labels: {},
    volumeCount: 0,
    agentReady: true,
    freeBytes: null,
    ...change,
  };
}
function look(change: Partial<PlacementInput> = {}) {
  const present = change.present ?? [];
  return place({
    nodes: ['a', 'b', 'c', 'd'].map((name) => node(name)),
    activeNode: 'a',
    present,
    whole: present,
    alive: present,
    wanted: null,
    atLeast: 1,
    needed: [],
    priority: [],
    needBytes: 1000,
    ...change,
  });
}

t.test('without a number every other node of the pool holds a copy', (t) => {
  t.same(look().nodes, ['b', 'c', 'd']);
  t.same(look({ nodes: [node('a'), node('b'), node('c', { inPool: false })] }).nodes, ['b']);
  t.equal(look().missing, 0);
  t.end();
});

t.test('H3: with a number, as many as wanted, on the emptiest nodes', (t) => {
  const nodes = [
    node('a'),
    node('b', { volumeCount: 5 }),
    node('c', { volumeCount: 1 }),
    node('d', { volumeCount: 3 }),
  ];
  t.same(look({ nodes, wanted: 1 }).nodes, ['c']);
  t.same(look({ nodes, wanted: 2 }).nodes, ['c', 'd']);
  t.match(look({ nodes, wanted: 9 }), { nodes: ['b', 'c', 'd'], missing: 6 });
  t.same(look({ nodes, wanted: 0 }).nodes, []);
  t.end();
});

t.test('zones are spread where they are named, the priority list goes first', (t) => {
  const nodes = [
    node('a', { labels: { [ZONE]: 'z1' } }),
    node('b', { labels: { [ZONE]: 'z1' } }),
    node('c', { labels: { [ZONE]: 'z2' }, volumeCount: 9 }),
    node('d', { labels: { [ZONE]: 'z2' } }),
    node('e', { labels: { [ZONE]: 'z3' }, volumeCount: 5 }),
  ];
  t.same(look({ nodes, wanted: 1 }).nodes, ['d']);
  t.same(look({ nodes, wanted: 2 }).nodes, ['d', 'e']);
  t.same(look({ nodes, wanted: 1, priority: ['zz', 'b'] }).nodes, ['b']);
  t.end();
});

t.test(
  'no churn: a copy stays where it is, whatever is emptier, and also on a node that is not Ready',
  (t) => {
    const nodes = [node('a'), node('b'), node('c', { volumeCount: 50 }), node('d')];
    t.same(look({ nodes, wanted: 1, present: ['c'] }).nodes, ['c']);
    const down = [node('a'), node('b', { ready: false, agentReady: false }), node('c'), node('d')];
    t.same(look({ nodes: down, wanted: 2, present: ['b', 'c'] }).nodes, ['b', 'c']);
    t.same(
      look({ nodes: down, wanted: 2, present: ['b', 'c'], alive: ['c'] }).nodes,
      ['b', 'c'],
      'one is still alive',
    );
    t.same(look({ nodes: down, present: ['b', 'c'] }).nodes, ['b', 'c', 'd']);
    t.same(look({ nodes: down, present: [] }).nodes, ['c', 'd'], 'a new one is not begun there');
    t.match(look({ nodes: down, present: [] }).unfit, { b: /not Ready/ });
    t.end();
  },
);

t.test(
  'a lost copy is replaced only when too few living ones are left, and is let go when all others are whole',
  (t) => {
    const nodes = [node('a'), node('b', { ready: false, agentReady: false }), node('c'), node('d')];
    t.same(look({ nodes, wanted: 1, present: ['b'], alive: [] }).nodes, ['b', 'c']);
    t.same(look({ nodes, wanted: 2, atLeast: 2, present: ['b', 'c'], alive: ['c'] }).nodes, ['b', 'c', 'd']);
    // b is back: one of the two goes, but not before the other is whole.
    const back = { present: ['b', 'c'], wanted: 1 };
    t.same(look({ ...back, alive: ['b', 'c'], whole: ['b'] }), {
      nodes: ['b'],
      missing: 0,
      dropped: ['c'],
      unfit: {},
    });
    t.same(look({ ...back, alive: ['b', 'c'], whole: [] }).nodes, ['b', 'c']);
    t.same(look({ ...back, alive: [], whole: ['b', 'c'] }).nodes, ['b', 'c', 'd'].slice(0, 3));
    t.same(look({ ...back, alive: ['b', 'c'], whole: ['b', 'c'], priority: ['c'] }).nodes, ['c']);
    t.end();
  },
);

t.test(
  'nodes that left the pool or the cluster lose their copy, the active node never counts as one',
  (t) => {
    const nodes = [node('a'), node('b', { inPool: false }), node('c')];
    t.match(look({ nodes, present: ['b', 'c', 'gone'] }), { nodes: ['c'], dropped: ['b', 'gone'] });
    t.match(look({ nodes, present: ['a'], wanted: 1 }), { nodes: ['c'], dropped: [] });
    t.end();
  },
);

t.test(
  'a node where a pod waits gets a copy beyond the number; cordoned, full and broken ones get none',
  (t) => {
    t.same(look({ wanted: 1, present: ['b'], needed: ['d'] }).nodes, ['b', 'd']);
    t.same(
      look({ wanted: 1, present: ['b', 'd'], needed: ['d'] }).nodes,
      ['d'],
      'and it is the one that stays',
    );
    const nodes = [
      node('a'),
      node('b', { unschedulable: true }),
      node('c', { freeBytes: 999 }),
      node('d', { agentReady: false }),
      node('e', { deleting: true }),
      node('f', { freeBytes: 1000 }),
    ];
    const { unfit, ...rest } = look({ nodes });
    t.match(rest, { nodes: ['f'], missing: 0 });
    t.match(unfit, { b: /cordoned/, c: /less than 1 MiB free/, d: /agent/, e: /deleted/ });
    t.end();
  },
);

t.test('B16: a new volume goes to the emptiest node with room, not to the first by name', (t) => {
  const nodes = [
    node('a', { volumeCount: 3, freeBytes: 9000 }),
    node('b', { volumeCount: 1, freeBytes: 500 }),
    node('c', { volumeCount: 2, freeBytes: 5000 }),
    node('d', { volumeCount: 2, freeBytes: 7000 }),
  ];
  t.equal(firstNode(nodes, 1000), 'd');
  t.equal(firstNode(nodes, 10_000), null);
  t.end();
});

t.test('with a lease what leaves the promotable set does so at once, what comes is told first', (t) => {
  const at = (version: number, nodes: string[], adding: string[] = []): Promotable => ({
    version,
    nodes,
    adding,
  });
  t.same(promotableStep(null, ['b', 'c'], 'lease', null, null), at(1, [], ['b', 'c']));
  t.equal(
    promotableStep(at(1, [], ['b', 'c']), ['b', 'c'], 'lease', 'lease', null),
    null,
    'not acknowledged',
  );
  t.equal(promotableStep(at(2, [], ['b', 'c']), ['b', 'c'], 'lease', 'lease', 1), null, 'an older one');
  t.same(promotableStep(at(2, [], ['b', 'c']), ['b', 'c'], 'lease', 'lease', 2), at(3, ['b', 'c']));
  t.same(promotableStep(at(3, ['b', 'c']), ['b', 'd'], 'lease', 'lease', 3), at(4, ['b']), 'removal alone');
  t.same(promotableStep(at(4, ['b']), ['b', 'd'], 'lease', 'lease', null), at(5, ['b'], ['d']));
  t.equal(promotableStep(at(3, ['b', 'c']), ['c', 'b'], 'lease', 'lease', 3), null);
  t.end();
});

t.test('a writer that was not leased is told of its lease before anybody may replace it', (t) => {
  const none = { version: 7, nodes: ['b', 'c'], adding: [] };
  t.same(promotableStep(none, ['b', 'c'], 'lease', 'none', 7), { version: 8, nodes: [], adding: ['b', 'c'] });
  t.same(promotableStep({ version: 8, nodes: [], adding: ['b'] }, ['b'], 'none', 'lease', null), {
    version: 9,
    nodes: ['b'],
    adding: [],
  });
  t.equal(promotableStep({ version: 9, nodes: ['b'], adding: [] }, ['b'], 'none', 'none', null), null);
  t.same(decidedSet({ version: 3, nodes: ['b', 'c'], adding: ['d'] }, 'c', ['a']), {
    version: 4,
    nodes: ['a', 'b', 'd'],
    adding: [],
  });
  t.end();
});

t.test(
  'property: the order of facts does not matter, doing it again changes nothing, and no number is undercut',
  (t) => {
    const names = ['a', 'b', 'c', 'd', 'e'];
    const arbitrary = fc.record({
      nodes: fc.tuple(
        ...names.map((name) =>
          fc
            .record({
              ready: fc.boolean(),
              unschedulable: fc.constantFrom(false, false, true),
              inPool: fc.constantFrom(true, true, false),
              volumeCount: fc.nat(3),
              zone: fc.constantFrom('1', '2'),
            })
            .map(({ zone, ...rest }) => node(name, { ...rest, labels: { [ZONE]: zone } })),
        ),
      ),
      present: fc.subarray(names),
      whole: fc.subarray(names),
      alive: fc.subarray(names),
      needed: fc.subarray(names, { maxLength: 1 }),
      priority: fc.subarray(names),
      wanted: fc.constantFrom(null, 0, 1, 2, 3),
      atLeast: fc.constantFrom(1, 2),
    });
    fc.assert(
      fc.property(arbitrary, (given) => {
        // What has no copy yet has no whole one.
        const facts = { ...given, whole: given.whole.filter((name) => given.present.includes(name)) };
        const first = look({ ...facts, nodes: [...facts.nodes] });
        const turned = look({
          ...facts,
          nodes: [...facts.nodes].reverse(),
          present: [...facts.present].reverse(),
        });
        if (JSON.stringify(first.nodes) !== JSON.stringify(turned.nodes)) throw new Error('order matters');
        const alive = [...facts.alive, ...first.nodes.filter((name) => !facts.present.includes(name))];
        const again = look({ ...facts, nodes: [...facts.nodes], present: first.nodes, alive });
        if (JSON.stringify(again.nodes) !== JSON.stringify(first.nodes))
          throw new Error(`${first.nodes} then ${again.nodes}`);
        if (first.nodes.includes('a')) throw new Error('a copy on the active node');
        const kept = facts.present.filter((name) => first.nodes.includes(name)).length;
        const inPool = facts.nodes.filter((one) => one.inPool && one.name !== 'a').map((one) => one.name);
        const could = facts.present.filter((name) => inPool.includes(name)).length;
        if (kept < Math.min(could, facts.wanted ?? 99)) throw new Error('a copy was given up without need');
      }),
      { numRuns: 5000, seed: 2 },
    );
    t.pass('5000 clusters');
    t.end();
  },
);
