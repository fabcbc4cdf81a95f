import t from 'tap';
import { type LabelChange, labelChanges } from '../../controller/plan/labels.ts';
import {
  annotationActions,
  leftPods,
  moveStep,
  promotionSteps,
  SELECTED_NODE,
  STEPS,
  staleWatches,
  watchRuns,
} from '../../controller/plan/promotion.ts';
import type { Observed, PromotionRecord, WatchBody } from '../../controller/plan/types.ts';
import { parseAnnotations, toWatchBody } from '../../controller/policy/annotations.ts';
import { atRest, copy, NAME, pod, source, type World } from './plan-world.ts';

const RECORD: PromotionRecord = {
  epoch: 2,
  from: 'a',
  to: 'b',
  reason: 'tested',
  planned: false,
  decidedAt: '2026-12-02T13:00:00Z',
  done: [],
};
const PLACED = { activeNode: 'b', previousActiveNode: 'a', epoch: 2 };

function body(world: World): WatchBody {
  const { policy } = parseAnnotations(world.claim?.annotations ?? {});
  const targets = ['a', 'c'].map((node) => ({ node, url: `http://${node}:8080` }));
  return toWatchBody(policy, NAME, 2, { url: 'http://b:8080', webdavUrl: 'http://b:8081' }, targets);
}
const labels = (o: Observed): LabelChange[] =>
  labelChanges('default', 'world', { active: 'b', candidates: ['b', 'c'] }, o.nodes);
const look = (world: World, record: PromotionRecord = RECORD, change: Partial<Observed> = {}) => {
  const o = { ...world.observed(), ...change };
  return promotionSteps(record, o, {
    body: body(world),
    labels: labels(o),
    replicates: true,
    fencing: 'lease',
    placed: PLACED,
  });
};
const kinds = (plan: ReturnType<typeof look>): string[] =>
  [...new Set(plan.actions.map((one) => one.kind))].sort();

/** Each makes one step of the decision true in the world. */
const CARRIED_OUT: Record<string, (world: World) => void> = {
  demoteOld: (world) => {
    world.agent('a').volume = copy(2, '2-2');
  },
  promoteNew: (world) => {
    world.agent('b').volume = source(body(world), 2, '2-2');
  },
  annotatePv: (world) => {
    for (const action of annotationActions(world.observed(), PLACED))
      if (action.kind === 'annotatePv')
        (world.volume as { annotations: object }).annotations = {
          ...world.volume?.annotations,
          ...action.annotations,
        };
  },
  annotatePvc: (world) => {
    for (const action of annotationActions(world.observed(), PLACED))
      if (action.kind === 'annotatePvc')
        (world.claim as { annotations: object }).annotations = {
          ...world.claim?.annotations,
          ...action.annotations,
        };
  },
  labels: (world) => {
    for (const change of labels(world.observed())) {
      const { labels: has } = world.on(change.node);
      world.on(change.node).labels = Object.fromEntries(
        Object.entries({ ...has, ...change.labels }).filter(
          (one): one is [string, string] => one[1] !== null,
        ),
      );
    }
  },
  deletePods: (world) => {
    world.pods = [];
  },
};
const ACTION: Record<string, string> = {
  demoteOld: 'stopWatch',
  promoteNew: 'startWatch',
  annotatePv: 'annotatePv',
  annotatePvc: 'annotatePvc',
  labels: 'labelNode',
  deletePods: 'deletePod',
};

t.test('B15: from every subset of what may be done already, exactly the rest is still to be done', (t) => {
  const names = Object.keys(CARRIED_OUT);
  for (let bits = 0; bits < 2 ** names.length; bits += 1) {
    const world = atRest();
    const done = names.filter((_, i) => (bits & (1 << i)) !== 0);
    for (const name of done) CARRIED_OUT[name]?.(world);
    const plan = look(world);
    const rest = names.filter((name) => !done.includes(name)).map((name) => ACTION[name] as string);
    t.same(kinds(plan), rest.sort(), done.join(' '));
    t.equal(plan.finished, rest.length === 0);
    t.same(
      names.filter((name) => (plan.done as string[]).includes(name)),
      done,
    );
    const again = look(world, { ...RECORD, done: plan.done });
    t.same(again.actions, plan.actions, 'noting it changes nothing');
  }
  t.end();
});

t.test('what is noted as done stays done: pods that come later are not deleted', (t) => {
  const world = atRest();
  for (const name of Object.keys(CARRIED_OUT)) CARRIED_OUT[name]?.(world);
  t.same(look(world).done, [...STEPS]);
  world.pods = [pod('later', 'a', { createdAt: Date.parse('2026-12-02T12:00:00Z') })];
  t.equal(look(world).finished, false, 'one from before the decision goes');
  t.equal(look(world, { ...RECORD, done: [...STEPS] }).finished, true, 'but not once all were gone');
  world.pods = [pod('later', 'a', { createdAt: Date.parse('2026-12-02T14:00:00Z') })];
  t.equal(look(world).finished, true);
  t.end();
});

t.test(
  'stale pods: those of the node that was left; not those that have ended, wait for a node or are where it is',
  (t) => {
    const world = atRest();
    world.pods = [
      pod('old', 'a'),
      pod('done', 'a', { phase: 'Succeeded' }),
      pod('unscheduled', null, { phase: 'Pending' }),
      pod('there', 'b', { phase: 'Pending' }),
      pod('third', 'c', { phase: 'Pending' }),
      pod('debug', 'c', { phase: 'Pending', controlledBy: null }),
    ];
    const deleted = (record = RECORD): string[] =>
      look(world, record).actions.flatMap((one) => (one.kind === 'deletePod' ? [one.name] : []));
    t.same(deleted(), ['old', 'third'], 'B8 and the keeping of unbound pods');
    const { from: _, ...first } = RECORD;
    t.same(deleted(first), [], 'a first placing deletes nothing');
    t.same(deleted({ ...RECORD, to: 'a' }), [], 'neither does a node that goes on');
    t.end();
  },
);

t.test('a pod of before the decision that was seen too late is ended all the same', (t) => {
  const world = atRest();
  const late = Date.parse('2026-12-02T14:00:00Z');
  world.pods = [
    pod('old', 'a'),
    pod('third', 'c'),
    pod('there', 'b'),
    pod('pending', 'a', { phase: 'Pending' }),
    pod('debug', 'c', { controlledBy: null }),
    pod('going', 'a', { deleting: true }),
    pod('later', 'a', { createdAt: late }),
  ];
  const left = (record: PromotionRecord): string[] =>
    leftPods(record, world.observed()).flatMap((one) =>
      one.kind === 'deletePod' && !one.force ? [one.name] : [],
    );
  t.same(left(RECORD), [], 'while the decision is carried out that is its own step');
  t.same(left({ ...RECORD, done: [...STEPS] }), ['old', 'third']);
  t.end();
});

t.test(
  'force deletion: only with the kubelet gone, the new node active, and the writer fenced or unreachable',
  (t) => {
    const world = atRest();
    const force = (): boolean => look(world).actions.some((one) => one.kind === 'deletePod' && one.force);
    t.equal(force(), false);
    world.kill('a');
    t.equal(force(), false, 'nobody knows the new epoch yet');
    CARRIED_OUT.promoteNew?.(world);
    t.equal(force(), true);
    (world.pods[0] as { deleting: boolean }).deleting = true;
    t.equal(force(), true, 'B4: also one that is Terminating for ever');
    world.on('a').ready = true;
    t.same(
      look(world).actions.filter((one) => one.kind === 'deletePod'),
      [],
      'on a node that is back its kubelet does it',
    );
    t.end();
  },
);

t.test('a node is not activated before every older lease has ended', (t) => {
  const world = atRest();
  for (const activationWaitMs of [null, 5000])
    t.notOk(
      kinds(look(world, RECORD, { fence: { ...world.fence, activationWaitMs } })).includes('startWatch'),
    );
  t.ok(kinds(look(world)).includes('startWatch'));
  world.agent('b').reachable = false;
  t.notOk(kinds(look(world)).includes('startWatch'));
  t.end();
});

t.test(
  'an old watch is stopped with its own epoch, which never makes its node the active one of a newer',
  (t) => {
    const world = atRest();
    t.match(staleWatches(world.observed(), 'b', 2), [{ kind: 'stopWatch', node: 'a', epoch: 1 }]);
    t.same(staleWatches(world.observed(), 'a', 1), []);
    world.agent('a').reachable = false;
    t.same(staleWatches(world.observed(), 'b', 2), []);
    t.end();
  },
);

t.test('B17: selected-node is taken off a bound claim only, and only when it names another node', (t) => {
  const world = atRest();
  const set = (value: string): void => {
    (world.claim as { annotations: object }).annotations = {
      ...world.claim?.annotations,
      [SELECTED_NODE]: value,
    };
  };
  set('a');
  t.match(
    annotationActions(world.observed(), PLACED).find((one) => one.kind === 'annotatePvc'),
    {
      annotations: { [SELECTED_NODE]: null },
    },
  );
  set('b');
  const kept = annotationActions(world.observed(), PLACED).find((one) => one.kind === 'annotatePvc');
  t.notOk(SELECTED_NODE in ((kept as { annotations: object }).annotations ?? {}));
  world.volume = null;
  t.same(annotationActions(world.observed(), PLACED), []);
  t.end();
});

t.test('a watch is told anew when anything of it differs, and left alone when nothing does', (t) => {
  const world = atRest();
  const wanted = body(world);
  const agent = (change: object = {}) => ({
    ...world.agent('b'),
    volume: { ...source(wanted, 2, '2-1'), ...change },
  });
  t.equal(watchRuns(agent(), wanted), true);
  t.equal(watchRuns(agent({ targets: [...source(wanted, 2, null).targets].reverse() }), wanted), true);
  t.equal(watchRuns(undefined, wanted), false);
  t.equal(watchRuns({ ...world.agent('b'), volume: copy(2, '2-1') }, wanted), false);
  for (const change of [{ epoch: 1 }, { state: 'stopped' }, { state: 'failed' }, { targets: [] }])
    t.equal(watchRuns(agent(change), wanted), false, JSON.stringify(change));
  const others: Partial<WatchBody>[] = [
    { includePaths: ['x'] },
    { excludePaths: ['x'] },
    { requiredPaths: ['x'] },
    { debounce: '9s' },
    { consistencyMode: 'live' },
    { pruneExcluded: true },
    { confirmedReplicas: 2 },
    { ownerUid: 5 },
    { ownerGid: 5 },
    { fileMode: 0o600 },
    { dirMode: 0o700 },
  ];
  for (const change of others)
    t.equal(watchRuns(agent(), { ...wanted, ...change }), false, JSON.stringify(change));
  t.end();
});

t.test('a planned move: each step waits for what it needs, and a failed flush is tried again', (t) => {
  const world = atRest();
  const step = (users = world.pods) =>
    moveStep(world.observed(), { from: 'a', target: 'b', epoch: 1, users });
  const flushed = (name: string, change: object = {}): void => {
    world.memory.prepared.push({
      tag: `${name}:1:b`,
      ok: true,
      generation: '1-2',
      confirmed: ['b'],
      error: null,
      ageMs: 0,
      ...change,
    });
  };
  t.match(step(), {
    ready: false,
    stopping: false,
    actions: [{ kind: 'prepare', confirm: ['b'], tag: 'flush:1:b' }],
  });
  flushed('flush', { ok: false, confirmed: [], error: 'TIMEOUT', ageMs: 2000 });
  t.match(step(), { actions: [], waitsFor: /the last attempt failed: TIMEOUT/, nextLookMs: 8000 });
  world.memory.prepared[0] = {
    ...(world.memory.prepared[0] as (typeof world.memory.prepared)[0]),
    ageMs: 10_000,
  };
  t.equal(step().actions.length, 1);
  flushed('flush', { confirmed: ['c'] });
  t.match(step().actions[0], { kind: 'prepare' }, 'confirmed by the target, not by somebody');
  flushed('flush');
  world.memory.prepared = world.memory.prepared.slice(-1);
  t.match(step(), {
    stopping: true,
    actions: [{ kind: 'releaseLease' }, { kind: 'deletePod', force: false }],
  });
  t.match(step(world.pods.map((one) => ({ ...one, deleting: true }))).actions, [{ kind: 'releaseLease' }]);
  t.match(step([]).actions, [{ kind: 'releaseLease', node: 'a', epoch: 1 }]);
  world.memory.prepared = [];
  flushed('flush', { ageMs: 300_000 });
  t.match(step([]).actions, [{ kind: 'prepare' }], 'an old flush would leave too much for the last one');
  world.fence.released = 1;
  t.match(step([]), { ready: false, actions: [{ kind: 'prepare', tag: 'last:1:b' }] });
  flushed('last', { ageMs: 300_000 });
  t.match(step([]), { ready: true, actions: [] }, 'nobody has written since');
  t.end();
});
