import t from 'tap';
import { planVolume } from '../../controller/plan/volume.ts';
import { atRest, node, pod, REPLICATED, World } from './plan-world.ts';

const P = 'simple-volume.shipstuff.io/';

t.test(
  'a new claim comes to rest: active on its first node, copies on the others, everything says so',
  (t) => {
    const world = atRest();
    t.match(world.status, {
      activeNode: 'a',
      epoch: 1,
      phase: 'Active',
      replicasSummary: '2/2',
      wouldFailOverTo: 'b',
    });
    t.same(world.labelled(), ['a']);
    t.equal(world.volume?.annotations[`${P}active-node`], 'a');
    t.equal(world.volume?.annotations[`${P}epoch`], '1');
    t.equal(world.claim?.annotations[`${P}active-node`], 'a');
    for (const type of [
      'Ready',
      'Replicating',
      'Fresh',
      'FailoverPossible',
      'PolicyValid',
      'FencingPossible',
      'WorkloadHealthy',
    ])
      t.equal(world.condition(type)?.status, 'True', type);
    t.same(world.status.promotable?.nodes, ['b', 'c']);
    t.equal(world.decisions, 1);
    t.end();
  },
);

t.test('an idle volume costs no writes: its status stays the very same', (t) => {
  const world = atRest();
  const seen = new Set<string>();
  for (let i = 0; i < 240; i += 1) {
    world.step();
    seen.add(JSON.stringify(world.status));
  }
  t.ok(seen.size >= 3 && seen.size <= 6, `only its ages are brought up to date, once a minute: ${seen.size}`);
  t.same(
    world.log.filter((id) => id !== 'mirror'),
    [],
  );
  t.end();
});

t.test('claims of other drivers and classes are none of our business', (t) => {
  const world = new World(['a'], REPLICATED);
  world.volume = { ...(world.volume as NonNullable<typeof world.volume>), driver: 'other.example.com' };
  t.match(planVolume(world.observed()), { ours: false, actions: [], status: null, events: [] });
  world.volume = null;
  world.claim = { ...(world.claim as NonNullable<typeof world.claim>), provisioner: 'other.example.com' };
  t.match(planVolume(world.observed()), { ours: false, actions: [] });
  world.claim = {
    ...(world.claim as NonNullable<typeof world.claim>),
    provisioner: 'simple-volume.csi.shipstuff.io',
  };
  t.match(
    planVolume(world.observed()),
    { ours: true, actions: [] },
    'B17: an unbound claim is the provisioner’s',
  );
  t.end();
});

t.test(
  'D33/B4: a StatefulSet pod on a dead node: failover, force deletion, the new pod runs where the data is',
  (t) => {
    const world = atRest();
    world.kill('a');
    (world.pods[0] as { deleting: boolean }).deleting = true;
    world.fence.fenceWaitMs = 5000;
    for (let i = 0; i < 9; i += 1) world.step();
    t.equal(world.status.activeNode, 'a', 'not within the grace period');
    world.settle();
    t.match(world.status, { activeNode: 'b', previousActiveNode: 'a', epoch: 2 });
    t.match(world.pods, [{ name: 'game-0', node: 'b', phase: 'Running' }]);
    t.same(world.labelled(), ['b']);
    t.ok(world.log.includes('deletePod:game-0'));
    const told = world.events.filter((one) => one.reason === 'FailedOver');
    t.match(
      told[0]?.message,
      /b is promoted with generation 1-1.*at most the last/,
      'names generation and age',
    );
    t.match(world.status.promotion, { from: 'a', to: 'b', planned: false, epoch: 2 });
    t.equal(world.status.promotion?.done.length, 7);
    t.equal(world.volume?.annotations[`${P}previous-active-node`], 'a');
    t.end();
  },
);

t.test('B4: a dead node whose pod nobody has marked: NotReady alone starts the grace period', (t) => {
  for (const gone of [false, true]) {
    const world = atRest();
    Object.assign(world.agent('a'), { reachable: false });
    // The API keeps the last word of the kubelet: Running and Ready, not being deleted.
    if (gone) world.nodes = world.nodes.filter((one) => one.name !== 'a');
    else world.on('a').ready = false;
    for (let i = 0; i < 9; i += 1) world.step();
    t.equal(world.status.epoch, 1, 'not within the grace period');
    t.match(world.condition('WorkloadHealthy'), { status: 'False', message: /a is not Ready/ });
    t.match(world.pods[0], { name: 'game-0', ready: true, deleting: false, phase: 'Running' });
    for (let i = 0; i < 6; i += 1) world.step();
    t.match(world.status, { activeNode: 'b', epoch: 2 }, gone ? 'node object deleted' : 'node not Ready');
    world.settle();
    t.match(world.pods, [{ node: 'b', phase: 'Running' }]);
  }
  t.end();
});

t.test('the grace period is never shortened by the whole seconds of the status', (t) => {
  const world = atRest();
  world.now = Math.floor(world.now / 1000) * 1000 + 900;
  const killed = world.now;
  world.kill('a');
  for (let i = 0; i < 200 && world.status.epoch === 1; i += 1) world.step(100);
  const after = world.now - killed;
  t.equal(world.status.epoch, 2);
  t.ok(after >= 10_000 && after < 11_500, `promoted ${after} ms after the loss, the grace period is 10 s`);
  t.end();
});

t.test('what moved is looked at again in the moment in which it may be activated', (t) => {
  const world = atRest();
  world.kill('a');
  for (let i = 0; i < 30 && world.status.epoch === 1; i += 1) world.step();
  world.fence.activationWaitMs = 700;
  t.equal(planVolume(world.observed()).nextLookMs, 700);
  t.end();
});

t.test('B7: a kubelet that is away for less than the grace period is no failure', (t) => {
  const world = atRest();
  for (let round = 0; round < 5; round += 1) {
    world.on('a').ready = false;
    for (let i = 0; i < 6; i += 1) world.step();
    world.on('a').ready = true;
    for (let i = 0; i < 6; i += 1) world.step();
  }
  t.match(world.status, { activeNode: 'a', epoch: 1 }, 'the times are not added up');
  t.end();
});

t.test('B4: pods that the kubelet was starting when its node died do not hold the failover', (t) => {
  for (const change of [
    { phase: 'Pending', ready: false, initializing: true },
    { phase: 'Pending', ready: false, waiting: ['ContainerCreating'] },
    { ready: false },
  ] as const) {
    const world = atRest();
    Object.assign(world.pods[0] as object, change);
    world.on('a').ready = false;
    world.agent('a').reachable = false;
    for (let i = 0; i < 15; i += 1) world.step();
    t.match(world.status, { activeNode: 'b', epoch: 2 });
  }
  t.end();
});

t.test('B6/B22: a drained node: pods that the scheduler has not spoken of yet do not hold the move', (t) => {
  const world = atRest();
  world.mute = true;
  world.on('a').unschedulable = true;
  // kubectl drain: the pod is evicted before the first look.
  world.pods = [pod('game-0', null, { phase: 'Pending', ready: false, createdAt: world.now, uid: 'next' })];
  world.settle();
  t.match(world.status, { activeNode: 'b', epoch: 2, promotion: { planned: true } });
  t.match(world.pods, [{ node: 'b', phase: 'Running' }]);
  t.end();
});

t.test('B6/B7: a pod that is still starting on a cordoned node is moved once it runs or is evicted', (t) => {
  const world = atRest();
  const starting = pod('game-0', 'a', { phase: 'Pending', ready: false, initializing: true, uid: 'slow' });
  world.pods = [starting];
  world.on('a').unschedulable = true;
  world.settle();
  t.match(world.status, { activeNode: 'b', epoch: 2, promotion: { planned: true } });
  t.match(world.pods, [{ node: 'b', phase: 'Running' }]);
  t.end();
});

t.test('the lease of the lost node is withheld, and nothing is written before it has ended', (t) => {
  const world = atRest();
  Object.assign(world.on('a'), { ready: false });
  world.fence.fenceWaitMs = 4000;
  let withheld = false;
  for (let i = 0; i < 30 && world.status.epoch === 1; i += 1) {
    const before = world.fence.fenceWaitMs;
    const plan = world.step();
    withheld ||= plan.withholdLease;
    if (world.decisions === 2) t.equal(before, 0, 'the fence was over');
  }
  t.ok(withheld);
  t.equal(world.status.activeNode, 'b');
  t.ok(
    world.log.indexOf('prepare:salvage:1:b') < world.log.lastIndexOf('decide:2'),
    'A14: the agent still answers, so what its frozen writer left is fetched first',
  );
  t.end();
});

t.test('a lost node that its copies still hear: what it wrote until it stood still is fetched', (t) => {
  const world = atRest();
  world.on('a').ready = false;
  world.fence.fenceWaitMs = 9300;
  world.promiseMs = 9300;
  let withheld: number | null = null;
  let fetched = 0;
  let stands = 0;
  while (world.status.epoch === 1 && world.log.length < 1000) {
    const at = world.now;
    const before = world.log.length;
    if (world.step().withholdLease) withheld ??= at;
    if (world.log.slice(before).includes('prepare:salvage:1:b')) fetched = at;
    if (world.toldAt !== null) stands = world.toldAt + world.promiseMs;
    if (world.decisions === 2) {
      t.ok(fetched >= stands && stands > 0, `fetched ${fetched - stands} ms after it stood still`);
      const took = at - (withheld ?? 0);
      t.ok(took >= 9300 && took < 13_000, `the copy lets go beside the controller, not after it: ${took} ms`);
    }
  }
  t.match(world.status, { activeNode: 'b', epoch: 2 });
  t.end();
});

t.test(
  'with a lease a lost node need not be noticed by Kubernetes: that its agent is silent is enough',
  (t) => {
    const world = atRest();
    // The power is gone, and for the API the node is Ready and its pod too.
    Object.assign(world.agent('a'), { reachable: false });
    const [old] = world.pods;
    let seconds = 0;
    for (; seconds < 40 && world.status.epoch === 1; seconds += 1) world.step();
    t.equal(world.status.activeNode, 'b');
    t.ok(seconds >= 10 && seconds <= 14, `after the grace period and at once: ${seconds} s`);
    t.equal(world.on('a').ready, true);
    world.settle();
    t.notOk(
      world.pods.some((one) => one.uid === old?.uid),
      'what nobody ends there is taken off',
    );
    t.match(world.pods, [{ node: 'b', phase: 'Running' }]);
    t.end();
  },
);

t.test('a silent agent moves nothing without a lease, nor while its pod is being replaced', (t) => {
  const none = atRest(['a', 'b', 'c'], { ...REPLICATED, 'failover-fencing': 'none' });
  Object.assign(none.agent('a'), { reachable: false });
  for (let i = 0; i < 60; i += 1) none.step();
  t.match(none.status, { activeNode: 'a', epoch: 1 });
  t.equal(none.condition('WorkloadHealthy')?.status, 'True');
  const replaced = atRest();
  replaced.agents = replaced.agents.filter((one) => one.node !== 'a');
  for (let i = 0; i < 60; i += 1) replaced.step();
  t.match(replaced.status, { activeNode: 'a', epoch: 1 });
  const back = atRest();
  Object.assign(back.agent('a'), { reachable: false });
  for (let i = 0; i < 5; i += 1) back.step();
  t.equal(back.condition('WorkloadHealthy')?.status, 'False');
  Object.assign(back.agent('a'), { reachable: true });
  for (let i = 0; i < 60; i += 1) back.step();
  t.match(
    back.status,
    { activeNode: 'a', epoch: 1, phase: 'Active' },
    'back within the grace period: nothing',
  );
  t.end();
});

t.test('copies that still hear a node which the controller does not hear refuse, and nothing moves', (t) => {
  const world = atRest();
  Object.assign(world.agent('a'), { reachable: false });
  world.refuse = (action) => action.kind === 'decide';
  for (let i = 0; i < 60; i += 1) world.step();
  t.match(world.status, { activeNode: 'a', epoch: 1 });
  t.match(world.pods, [{ node: 'a', phase: 'Running' }], 'the workload is left alone');
  world.refuse = () => false;
  Object.assign(world.agent('a'), { reachable: true });
  world.settle();
  t.match(world.status, { activeNode: 'a', epoch: 1, phase: 'Active' });
  t.end();
});

t.test('B11/D33: with a stale copy it stays down and says why, once', (t) => {
  const world = atRest();
  world.kill('a');
  for (const name of ['b', 'c']) Object.assign(world.agent(name).volume as object, { freshAgeMs: 9e6 });
  for (let i = 0; i < 30; i += 1) world.step();
  t.match(world.status, { activeNode: 'a', epoch: 1, phase: 'Held' });
  const refused = world.events.filter((one) => one.reason === 'FailoverRefused');
  t.equal(new Set(refused.map((one) => one.cause)).size, 1, 'one Event, counted up');
  t.match(refused[0], { type: 'Warning', message: /b: last known complete.*c: last known complete/s });
  t.match(world.condition('FailoverPossible'), {
    status: 'False',
    message: /b: last known complete too long ago/,
  });
  t.match(world.status.refused, [
    { node: 'b', cause: 'STALE' },
    { node: 'c', cause: 'STALE' },
  ]);
  t.equal(world.status.wouldFailOverTo, undefined);
  t.end();
});

t.test('an operator’s force promotes a stale copy, once, whatever else changes in the spec', (t) => {
  const world = atRest();
  world.kill('a');
  for (const name of ['b', 'c']) Object.assign(world.agent(name).volume as object, { freshAgeMs: 9e6 });
  for (let i = 0; i < 15; i += 1) world.step();
  const object = world.object as NonNullable<typeof world.object>;
  object.spec.force = { action: 'Promote', node: 'c', reason: 'a is burnt' };
  world.settle();
  t.match(world.status, { activeNode: 'c', epoch: 2 });
  t.match(world.condition('Forced'), { status: 'True', reason: 'Done' });
  t.match(world.status.promotion?.reason, /a is burnt/);
  world.annotate({ 'replication-debounce': '7s' });
  world.kill('c');
  world.revive('a');
  Object.assign(world.agent('b').volume as object, { freshAgeMs: 500 });
  world.settle();
  t.equal(world.status.activeNode !== 'c', true, 'the old force does not hold the volume there');
  t.end();
});

t.test('force is refused with a reason where it would promote half of a copy or nothing', (t) => {
  const world = atRest();
  const object = world.object as NonNullable<typeof world.object>;
  object.spec.force = { action: 'Promote', node: 'zz', reason: 'try' };
  world.settle();
  t.match(world.condition('Forced'), { status: 'False', reason: 'Refused', message: /zz holds no copy/ });
  t.equal(world.events.filter((one) => one.reason === 'ForceRefused').length, 1);
  t.equal(world.status.epoch, 1);
  t.equal(world.status.phase, 'Active', 'the volume itself is well');
  object.spec.force = { action: 'LiftCondition', condition: 'Ready', reason: 'x' };
  world.settle();
  t.match(world.condition('Forced'), { status: 'False', message: /MassDelete and RootChanged/ });
  object.spec.force = undefined as never;
  delete object.spec.force;
  world.settle();
  t.equal(world.condition('Forced'), undefined);
  t.end();
});

t.test('A9: a held volume says so and waits; an operator lifts it', (t) => {
  const world = atRest();
  const report = world.agent('a').volume as NonNullable<ReturnType<typeof world.agent>['volume']>;
  report.conditions = [{ type: 'MassDelete', message: '900 of 1000 files would go', since: 0 }];
  world.step();
  t.equal(world.status.phase, 'Held');
  t.match(world.condition('MassDelete'), { status: 'True', message: /a: 900 of 1000/ });
  t.match(world.condition('Replicating'), { status: 'False', reason: 'Held' });
  t.equal(world.events.filter((one) => one.reason === 'MassDelete').length, 1);
  (world.object as NonNullable<typeof world.object>).spec.force = {
    action: 'LiftCondition',
    condition: 'MassDelete',
    reason: 'I meant it',
  };
  world.settle();
  t.equal(world.status.phase, 'Active');
  t.match(world.condition('Forced'), { status: 'True', reason: 'Done' });
  t.equal(world.condition('MassDelete'), undefined);
  t.end();
});

t.test(
  'B6: a cordon is a planned move: flush, stop, release, last flush, then the decision; nothing is lost',
  (t) => {
    const world = atRest();
    world.on('a').unschedulable = true;
    world.settle();
    t.match(world.status, { activeNode: 'b', epoch: 2, phase: 'Active', promotion: { planned: true } });
    t.match(world.pods, [{ node: 'b', phase: 'Running' }]);
    const order = world.log.filter((id) => /prepare|delete|release|decide/.test(id));
    const at = (id: string): number => order.indexOf(id);
    t.ok(at('prepare:flush:1:b') < at('deletePod:game-0'), order.join(' '));
    t.ok(at('deletePod:game-0') < order.lastIndexOf('releaseLease:a'), 'a writer must be gone');
    t.ok(order.lastIndexOf('releaseLease:a') < at('prepare:last:1:b'));
    t.ok(at('prepare:last:1:b') < at('decide:2'));
    t.equal(world.agent('a').volume?.role, 'replica', 'the old node is a copy now');
    t.equal(world.events.filter((one) => one.reason === 'FailedOver').length, 0);
    t.equal(world.events.filter((one) => one.reason === 'Moved').length, 1);
    t.end();
  },
);

/** A move from a to b is decided, the last flush just having found more than b's own report says; then b is lost. */
function targetLost(nodes: string[]): World {
  const world = atRest(nodes);
  world.on('a').unschedulable = true;
  while (world.log.every((id) => !id.startsWith('prepare:last:'))) world.step(100);
  const says = (node: string, generation: string): void => {
    const report = world.agents.find((one) => one.node === node)?.volume;
    if (report) report.generation = generation;
  };
  // b has confirmed 1-9; what it says of itself is older
  says('a', '1-9');
  for (const node of ['b', 'c']) says(node, '1-8');
  (world.memory.prepared.at(-1) as { generation: string }).generation = '1-9';
  while (world.status.epoch === 1) world.step(100);
  says('c', '1-9');
  world.kill('b');
  world.on('a').unschedulable = false;
  return world;
}

t.test('the node that a move goes to is lost at once: a copy that is as far is promoted', (t) => {
  const world = targetLost(['a', 'b', 'c']);
  t.match(world.status, { activeNode: 'b', epoch: 2, promotion: { from: 'a', base: '1-9' } });
  world.agent('a').reachable = false; // neither is there who was left
  world.settle();
  t.match(world.status, { activeNode: 'c', epoch: 3, phase: 'Degraded', promotion: { planned: false } });
  t.match(world.pods, [{ node: 'c', phase: 'Running' }]);
  t.end();
});

t.test(
  'the node that a move goes to is lost at once: the node that was left goes on, with everything',
  (t) => {
    const world = targetLost(['a', 'b']);
    t.same(world.status.promotable?.nodes, ['a'], 'b would not write without its word');
    world.settle();
    t.match(world.status, { activeNode: 'a', epoch: 3, promotion: { planned: false, base: '1-9' } });
    t.match(world.pods, [{ node: 'a', phase: 'Running' }]);
    t.end();
  },
);

t.test('a node that was left by a move and is not as it was left is no candidate', (t) => {
  for (const generation of ['1-8', '1-10', null]) {
    const world = targetLost(['a', 'b']);
    (world.agent('a').volume as { generation: string | null }).generation = generation;
    world.settle();
    t.match(world.status, { activeNode: 'b', epoch: 2 }, `${generation}`);
  }
  const late = targetLost(['a', 'b']);
  late.now += 600_000;
  late.settle();
  t.match(late.status, { activeNode: 'b', epoch: 2 }, 'nor after longer than the allowed staleness');
  t.end();
});

t.test('a drained volume goes where the next pod is put, by one move and not by two', (t) => {
  for (const gapMs of [0, 500, 1500]) {
    const world = atRest();
    world.recreate = 'anywhere';
    world.gapMs = gapMs;
    world.prefers = 'c'; // the copies alone would say b
    world.on('a').unschedulable = true;
    for (let i = 0; i < 200 && world.status.epoch === 1; i += 1) world.step(100);
    world.settle();
    t.match(world.status, { activeNode: 'c', epoch: 2, promotion: { planned: true } }, `after ${gapMs} ms`);
    t.match(world.pods, [{ node: 'c', phase: 'Running' }]);
  }
  t.end();
});

t.test(
  'a move waits no longer than two seconds for a next pod, and not for one that nobody can place',
  (t) => {
    const moved = (change: (world: World) => void): number => {
      const world = atRest();
      change(world);
      world.on('a').unschedulable = true;
      while (world.log.every((id) => !id.startsWith('prepare:last:'))) world.step(100);
      const flushed = world.now;
      for (let i = 0; i < 200 && world.status.epoch === 1; i += 1) world.step(100);
      t.match(world.status, { activeNode: 'b', epoch: 2 });
      return world.now - flushed;
    };
    const never = moved((world) => {
      world.recreate = 'anywhere';
      world.gapMs = 60_000;
    });
    t.ok(never > 1500 && never <= 2500, `nobody came within ${never} ms`);
    const selector = moved(() => {});
    t.ok(selector <= 500, `a pod that waits for the labels: ${selector} ms`);
    t.end();
  },
);

t.test(
  'B6: without failover a cordon moves nothing, and neither does it stop a pod that would not come back',
  (t) => {
    const off = atRest(['a', 'b'], { 'replication-enabled': 'true' });
    off.on('a').unschedulable = true;
    off.settle();
    t.equal(off.status.activeNode, 'a');
    const bare = atRest();
    Object.assign(bare.pods[0] as object, { controlledBy: null });
    bare.on('a').unschedulable = true;
    bare.settle();
    t.equal(bare.status.activeNode, 'a');
    t.equal(bare.pods.length, 1);
    t.end();
  },
);

t.test(
  'B6: a move goes through although nobody wants the volume between the old pod and the next one of a StatefulSet',
  (t) => {
    const world = atRest();
    world.gapMs = 15_000;
    world.on('a').unschedulable = true;
    world.settle();
    t.match(world.status, { activeNode: 'b', epoch: 2, promotion: { planned: true } });
    t.match(world.pods, [{ node: 'b', phase: 'Running' }]);
    const crashes = atRest();
    crashes.gapMs = 15_000;
    for (let i = 0; i < 60 && crashes.status.epoch === 1; i += 1) {
      for (const one of crashes.pods)
        if (one.phase === 'Running') Object.assign(one, { ready: false, restarts: 5 });
      crashes.step(2000);
    }
    t.match(crashes.status, { activeNode: 'b', epoch: 2, promotion: { planned: true } });
    t.end();
  },
);

t.test(
  'a move whose target goes away is given up or goes elsewhere, also after the lease was given back',
  (t) => {
    const world = atRest();
    world.on('a').unschedulable = true;
    while (world.fence.released === null) world.step();
    world.kill('b');
    world.settle();
    t.match(world.status, { activeNode: 'c', epoch: 2 });
    const alone = atRest(['a', 'b']);
    alone.on('a').unschedulable = true;
    while (alone.fence.released === null) alone.step();
    alone.kill('b');
    alone.on('a').unschedulable = false;
    alone.settle();
    t.match(alone.status, { activeNode: 'a', epoch: 2, promotion: { from: 'a', to: 'a' } });
    t.match(alone.pods, [{ node: 'a', phase: 'Running' }]);
    t.end();
  },
);

t.test(
  'the volume follows the pod: a pod without a node selector lands elsewhere, nothing is lost, nobody edits labels',
  (t) => {
    for (const annotations of [REPLICATED, { 'replication-enabled': 'true' }]) {
      const world = atRest(['a', 'b', 'c'], annotations);
      world.pods = [pod('game-1', 'c', { phase: 'Pending', ready: false, createdAt: world.now })];
      world.settle();
      t.match(world.status, { activeNode: 'c', epoch: 2, promotion: { planned: true } });
      t.match(
        world.pods,
        [{ name: 'game-1', node: 'c', phase: 'Running' }],
        'the waiting pod is not deleted',
      );
      t.same(world.labelled(), ['c']);
      t.ok(world.log.indexOf('prepare:last:1:c') < world.log.indexOf('decide:2'));
    }
    t.end();
  },
);

t.test('the volume follows the pod also to a node without a copy: one is made first', (t) => {
  const world = atRest(['a', 'b', 'c'], { ...REPLICATED, 'replication-replicas': '1' });
  t.same(
    world.status.replicas?.map((one) => one.node),
    ['b'],
  );
  world.pods = [pod('game-1', 'c', { phase: 'Pending', ready: false, createdAt: world.now })];
  world.settle();
  t.equal(world.status.activeNode, 'c');
  t.equal(world.status.replicas?.length, 1, 'and afterwards there are as many copies as wanted');
  t.end();
});

t.test('A11/B11: with the source dead a pod that landed elsewhere does not decide; freshness does', (t) => {
  const world = atRest();
  world.kill('a');
  world.pods = [
    pod('game-0', 'a', { deleting: true, ready: false }),
    pod('game-1', 'c', {
      phase: 'Pending',
      ready: false,
      createdAt: world.now,
      controlledBy: { kind: 'ReplicaSet', name: 'x' },
    }),
  ];
  Object.assign(world.agent('c').volume as object, { freshAgeMs: 9e6 });
  world.settle();
  t.equal(world.status.activeNode, 'b');
  t.end();
});

t.test('B2: a controller that has just begun knows from the copies how fresh they are', (t) => {
  const world = atRest();
  // The old one was on the node that is lost, with all that it remembered.
  world.kill('a');
  world.memory = { prepared: [], caughtUp: [], fullSyncs: [], manualSyncs: [] };
  world.fence.acknowledged = null;
  for (const name of ['a', 'b', 'c']) world.agent(name).reportAgeMs = null;
  for (const name of ['b', 'c']) world.agent(name).reachable = false;
  for (let i = 0; i < 12; i += 1) {
    world.step();
    for (const name of ['a', 'b', 'c']) world.agent(name).reportAgeMs = null;
  }
  t.equal(world.status.epoch, 1, 'nothing is promoted by what was true once');
  for (const name of ['b', 'c']) Object.assign(world.agent(name), { reachable: true, reportAgeMs: 100 });
  world.settle();
  t.match(world.status, { activeNode: 'b', epoch: 2 });
  t.end();
});

t.test('D32: a controller that reaches no agent moves nothing while the nodes are Ready', (t) => {
  const world = atRest();
  for (const agent of world.agents) agent.reachable = false;
  for (let i = 0; i < 40; i += 1) {
    const plan = world.step();
    t.notOk(plan.actions.some((one) => one.kind === 'decide' || one.kind === 'deletePod'));
    t.notOk(plan.withholdLease);
  }
  t.match(world.status, { activeNode: 'a', epoch: 1 });
  t.match(world.condition('Ready'), { status: 'False', reason: 'AgentUnreachable' });
  t.end();
});

t.test('B10: a debug pod on another node moves nothing while the workload is healthy', (t) => {
  const world = atRest();
  world.pods.push(pod('aaa-debug', 'c', { phase: 'Pending', ready: false, controlledBy: null }));
  world.settle();
  t.match(world.status, { activeNode: 'a', epoch: 1 });
  t.same(world.labelled(), ['a']);
  t.equal(world.pods.length, 2);
  t.end();
});

t.test('B7/B8/B9: starting pods, finished Jobs and claims that nobody wants are no failures', (t) => {
  const pods: [string, Parameters<typeof pod>[2]][] = [
    ['image pull', { phase: 'Pending', ready: false, waiting: ['ImagePullBackOff'] }],
    ['init container', { phase: 'Pending', ready: false, initializing: true }],
    ['slow start', { ready: false }],
    ['completed Job', { phase: 'Succeeded', ready: false }],
    ['evicted', { phase: 'Failed', ready: false }],
    ['being stopped', { deleting: true }],
  ];
  for (const [what, change] of pods) {
    const world = atRest();
    world.recreate = 'never';
    world.pods = [pod('game-0', 'a', change)];
    for (let i = 0; i < 40; i += 1) world.step(5000);
    t.match(world.status, { activeNode: 'a', epoch: 1 }, what);
    t.equal(world.pods.length, 1, `${what}: the pod is left alone`);
  }
  const unwanted = atRest();
  unwanted.pods = [];
  unwanted.kill('a');
  for (let i = 0; i < 40; i += 1) unwanted.step(5000);
  t.match(unwanted.status, { activeNode: 'a', epoch: 1 });
  t.end();
});

t.test('B7/B22: a workload that crashes wherever it is does not wander from node to node', (t) => {
  const world = atRest();
  const crash = (): void => {
    for (const one of world.pods)
      if (one.phase === 'Running')
        Object.assign(one, { ready: false, restarts: 5, waiting: ['CrashLoopBackOff'] });
  };
  for (let i = 0; i < 120; i += 1) {
    crash();
    world.step(2000);
  }
  t.equal(world.status.epoch, 2, 'one try elsewhere, with nothing lost');
  t.match(world.status.promotion, { planned: true });
  t.equal(world.status.phase, 'Held');
  t.match(world.condition('Ready')?.message, /not moved again/);
  t.end();
});

t.test('a node whose lease was given back for a move that is refused now goes on in a new epoch', (t) => {
  const world = atRest();
  const crash = (): void => {
    for (const one of world.pods)
      if (one.phase === 'Running')
        Object.assign(one, { ready: false, restarts: 5, waiting: ['CrashLoopBackOff'] });
  };
  for (let i = 0; i < 120; i += 1) {
    crash();
    world.step(2000);
  }
  t.match(world.status, { epoch: 2, phase: 'Held' });
  const { activeNode } = world.status;
  // A cordon began a move, which gave the lease back; the cordon is taken away, and the workload is as bad as before.
  world.fence.released = 2;
  const agent = world.agent(activeNode as string);
  t.equal(agent.reachable, true);
  world.step(2000);
  world.step(2000);
  t.match(world.status, { activeNode, epoch: 3, promotion: { from: activeNode, to: activeNode } });
  t.end();
});

t.test('A13/B5/D34: a returning node is a copy, its old pod counts for nothing, nothing moves back', (t) => {
  const world = atRest();
  world.kill('a');
  world.recreate = 'selector';
  world.settle();
  t.equal(world.status.activeNode, 'b');
  world.revive('a');
  world.pods.push(pod('a-old', 'a', { deleting: true }));
  t.equal(world.agent('a').volume?.role, 'active', 'it still thinks so');
  world.step();
  t.ok(world.log.includes('stopWatch:a'), 'its old watch is stopped');
  world.seal('b');
  world.settle();
  t.match(world.status, { activeNode: 'b', epoch: 2 });
  t.same(world.labelled(), ['b']);
  t.ok(world.status.replicas?.some((one) => one.node === 'a'));
  t.match(
    world.pods.find((one) => one.name === 'game-0'),
    { node: 'b', phase: 'Running' },
  );
  t.end();
});

t.test('a second failure after the first is survived, each with its own epoch', (t) => {
  const world = atRest();
  world.kill('a');
  world.settle();
  world.seal(world.status.activeNode as string);
  world.settle();
  world.kill('b');
  world.settle();
  t.match(world.status, { activeNode: 'c', epoch: 3, previousActiveNode: 'b' });
  t.match(world.pods, [{ node: 'c', phase: 'Running' }]);
  t.end();
});

t.test('a newer generation on a node that may not be promoted is fetched before the promotion', (t) => {
  const world = atRest(['a', 'b', 'c'], { ...REPLICATED, 'failover-node-priority': 'b' });
  world.kill('a');
  Object.assign(world.agent('c').volume as object, { generation: '1-9' });
  world.settle();
  t.equal(world.status.activeNode, 'b');
  t.ok(world.log.indexOf('catchUp:catchUp:1:b:c:1-9') < world.log.indexOf('decide:2'));
  t.equal(world.status.promotion?.leftBehind, undefined);
  const late = atRest(['a', 'b', 'c'], { ...REPLICATED, 'failover-node-priority': 'b' });
  late.kill('a');
  Object.assign(late.agent('c').volume as object, { generation: '1-9' });
  for (let i = 0; i < 100 && late.status.activeNode === 'a'; i += 1) {
    late.memory.caughtUp = [{ tag: 'catchUp:1:b:c:1-9', ok: false, error: 'TIMEOUT', ageMs: 0 }];
    late.step();
  }
  late.settle();
  t.equal(late.status.activeNode, 'b');
  t.match(late.status.promotion?.leftBehind, /c holds 1-9, which b could not fetch in time: TIMEOUT/);
  t.match(late.events.find((one) => one.reason === 'FailedOver')?.message, /Left behind: c holds 1-9/);
  t.end();
});

t.test('what was fetched for a failover that was called off does not count for the next one', (t) => {
  for (const generation of ['1-7', '1-9']) {
    const world = atRest(['a', 'b', 'c'], { ...REPLICATED, 'failover-node-priority': 'b' });
    // b once fetched 1-7 from c, then a came back and c alone got more.
    world.memory.caughtUp.push({ tag: `catchUp:1:b:c:${generation}`, ok: true, error: null, ageMs: 40_000 });
    world.kill('a');
    Object.assign(world.agent('c').volume as object, { generation: '1-9' });
    world.settle();
    t.match(world.status, { activeNode: 'b', epoch: 2 });
    const fetched = world.log.indexOf('catchUp:catchUp:1:b:c:1-9');
    t.ok(fetched >= 0 && fetched < world.log.indexOf('decide:2'), 'it is fetched now');
  }
  t.end();
});

t.test('nothing is decided by a controller that does not lead or has not read the volume', (t) => {
  const world = atRest();
  world.kill('a');
  world.fence.fenceWaitMs = null;
  for (let i = 0; i < 40; i += 1) world.step();
  t.equal(world.status.epoch, 1);
  t.notOk(world.log.some((id) => id.startsWith('decide') || id.startsWith('deletePod')));
  t.end();
});

t.test('an agent that has seen a newer epoch stops every decision', (t) => {
  const world = atRest();
  world.kill('a');
  Object.assign(world.agent('c').volume as object, { epoch: 7 });
  for (let i = 0; i < 30; i += 1) world.step();
  t.match(world.status, { activeNode: 'a', epoch: 1, phase: 'Held' });
  t.match(world.condition('Ready'), { reason: 'RecordOutOfDate' });
  t.end();
});

t.test('B18: where the volume is, the claim’s editor does not decide', (t) => {
  const world = atRest();
  world.annotate({ 'active-node': 'c', 'previous-active-node': 'b' });
  world.settle();
  t.match(world.status, { activeNode: 'a', epoch: 1 });
  t.equal(world.claim?.annotations[`${P}active-node`], 'a', 'it is put right');
  t.end();
});

t.test(
  'a lost record is taken up from the volume’s own annotations; an agent that knows more stops that',
  (t) => {
    const world = atRest();
    world.kill('a');
    world.settle();
    world.object = null;
    world.settle();
    t.match(world.status, { activeNode: 'b', epoch: 2 });
    t.ok((world.status.promotable?.version ?? 0) > 1e12, 'above every version that the active node may know');
    t.same(world.status.promotable?.nodes, ['c']);
    const gone = atRest();
    gone.object = null;
    (gone.volume as { annotations: object }).annotations = {};
    gone.settle();
    t.match(gone.status, { activeNode: 'a', epoch: 1 }, 'from the agent that says that it is active');
    const unclear = atRest();
    unclear.object = null;
    Object.assign(unclear.agent('c').volume as object, { epoch: 9 });
    unclear.settle();
    t.match(unclear.status, { phase: 'Held' });
    t.equal(unclear.status.activeNode, undefined);
    t.match(unclear.events.at(-1), { reason: 'RecordLost' });
    t.end();
  },
);

t.test('nothing begins before the first node has said what it knows', (t) => {
  const world = new World(['a', 'b'], REPLICATED);
  world.agent('a').reportAgeMs = null;
  world.agent('a').reachable = false;
  world.settle();
  t.equal(world.status.activeNode, undefined);
  t.match(world.status, { phase: 'Pending' });
  Object.assign(world.agent('a'), { reportAgeMs: 100, reachable: true });
  world.settle();
  t.equal(world.status.activeNode, 'a');
  t.end();
});

t.test('the object deleted by hand comes back with what it knew', (t) => {
  const world = atRest();
  world.kill('a');
  world.settle();
  (world.object as NonNullable<typeof world.object>).metadata.deletionTimestamp = new Date(
    world.now,
  ).toISOString();
  world.settle();
  t.match(world.status, { activeNode: 'b', epoch: 2 });
  t.equal(world.object?.metadata.deletionTimestamp, undefined);
  t.end();
});

t.test(
  'B13: a deleted claim leaves no watch, no labels and no object; its finalizer waits for all of it',
  (t) => {
    const world = atRest();
    world.claim = null;
    world.pods = [];
    world.agent('a').reachable = false;
    for (let i = 0; i < 5; i += 1) world.step();
    t.match(world.status, { phase: 'Deleting' });
    t.ok(world.object, 'the watch of a node that does not answer is waited for');
    t.match(world.condition('Ready')?.message, /a still has a watch/);
    world.agent('a').reachable = true;
    world.settle();
    t.equal(world.object, null);
    t.same(world.labelled(), []);
    t.notOk(world.nodes.some((one) => Object.keys(one.labels).length > 0));
    t.equal((world.agent('a').volume as { state: string }).state, 'stopped');
    const lost = atRest();
    lost.claim = null;
    lost.volume = { ...(lost.volume as NonNullable<typeof lost.volume>), reclaimPolicy: 'Retain' };
    lost.kill('a');
    lost.nodes = lost.nodes.filter((one) => one.name !== 'a');
    lost.agents = lost.agents.filter((one) => one.node !== 'a');
    lost.step();
    t.match(
      lost.condition('Ready')?.message,
      / The data stays in default\/pvc-1 of pool default on b, c \(reclaim policy Retain\)\.$/,
      'it is said where its data stays',
    );
    lost.settle();
    t.equal(lost.object, null, 'a node that is gone from the cluster is not waited for');
    t.end();
  },
);

t.test('a claim that asks for more than it has grows, whatever of it was done before', (t) => {
  const world = atRest();
  const GiB = 2 ** 30;
  const planned = (requestedBytes: number, bytes: number | null, capacityBytes: number | null): unknown => {
    world.claim = { ...(world.claim as NonNullable<typeof world.claim>), requestedBytes, capacityBytes };
    world.volume = { ...(world.volume as NonNullable<typeof world.volume>), bytes };
    return planVolume(world.observed()).actions.find((one) => one.kind === 'expand');
  };
  t.equal(planned(GiB, GiB, GiB), undefined);
  t.match(planned(2 * GiB, GiB, GiB), { bytes: 2 * GiB });
  t.match(planned(2 * GiB, 2 * GiB, GiB), { bytes: 2 * GiB }, 'a crash before the claim was told');
  t.equal(planned(2 * GiB, 2 * GiB, 2 * GiB), undefined);
  t.equal(planned(GiB, 5 * GiB, 5 * GiB), undefined, 'bound to a larger volume');
  t.equal(planned(2 * GiB, GiB, null), undefined, 'not bound yet');
  t.equal(planned(2 * GiB, null, GiB), undefined);
  planned(3 * GiB, GiB, GiB);
  world.settle();
  t.match(world.claim, { capacityBytes: 3 * GiB });
  t.match(world.volume, { bytes: 3 * GiB });
  t.end();
});

t.test('a claim of the same name with another volume starts anew', (t) => {
  const world = atRest();
  world.volume = {
    ...(world.volume as NonNullable<typeof world.volume>),
    name: 'pvc-2',
    annotations: {},
    firstNode: 'b',
  };
  world.step();
  t.match(world.status, { phase: 'Deleting' });
  t.end();
});

t.test('B13: replication switched off ends the watch and the labels; on again it goes on', (t) => {
  const world = atRest();
  world.annotate({ 'replication-enabled': 'false' });
  world.settle();
  t.equal((world.agent('a').volume as { state: string }).state, 'stopped');
  t.same(world.labelled(), []);
  t.match(world.condition('Replicating'), { status: 'False', reason: 'Disabled' });
  t.match(world.condition('FencingPossible'), { reason: 'NotNeeded' });
  t.same(world.status.promotable?.nodes, []);
  t.equal(world.pods.length, 1, 'the workload runs on');
  world.annotate({ 'replication-enabled': 'true' });
  world.settle();
  t.match(world.status, { phase: 'Active', replicasSummary: '2/2', epoch: 1 });
  t.same(world.labelled(), ['a']);
  t.end();
});

t.test('D41: a bad annotation is one Event and one condition; the last good policy stays; it heals', (t) => {
  const world = atRest();
  world.annotate({ 'replication-debounce': 'soon', 'replication-enabled': 'false' });
  world.settle();
  t.match(world.condition('PolicyValid'), {
    status: 'False',
    reason: 'BadAnnotation',
    message: /replication-debounce is "soon"; allowed: a duration/,
  });
  t.equal(world.events.filter((one) => one.reason === 'BadAnnotation').length, 1);
  t.equal(world.object?.spec.policy?.replicationEnabled, true);
  t.equal((world.agent('a').volume as { state: string }).state, 'watching');
  world.annotate({ 'replication-debounce': '5s', 'replication-enabled': 'true' });
  world.settle();
  t.equal(world.condition('PolicyValid')?.status, 'True');
  t.equal(world.object?.spec.policy?.debounce, '5s');
  t.match(world.agent('a').volume, { policy: { debounceMs: 5000 } }, 'the agent is told');
  world.annotate({ 'replication-debonce': '5s' });
  world.settle();
  t.match(world.events.at(-1), {
    reason: 'UnknownAnnotation',
    message: /did you mean .*replication-debounce/,
  });
  t.end();
});

t.test(
  'a node on which freezing is impossible is a condition before anything happens, and counts as not fenced',
  (t) => {
    const world = new World(['a', 'b', 'c'], REPLICATED);
    world.pods = [pod('game-0', 'a')];
    world.agent('a').freezer = { possible: false, reason: 'no cgroup of this pod was found', cgroup: null };
    world.settle();
    t.match(world.condition('FencingPossible'), {
      status: 'False',
      reason: 'NotPossible',
      message: /no cgroup of this pod/,
    });
    t.equal(world.events.filter((one) => one.reason === 'FencingNotPossible').length, 1);
    t.equal(planVolume(world.observed()).fencing, 'none');
    t.same(world.status.promotable?.nodes, ['b', 'c'], 'nobody has to be asked');
    world.agent('a').reachable = false;
    for (let i = 0; i < 30; i += 1) world.step();
    t.equal(world.status.epoch, 1, 'none: promotion waits for NotReady');
    world.kill('a');
    world.settle();
    t.equal(world.status.activeNode, 'b');
    t.end();
  },
);

t.test(
  'A2/A3: a node whose copy is not whole is no candidate, and becomes promotable only when it is',
  (t) => {
    const world = new World(['a', 'b', 'c'], REPLICATED);
    world.pods = [pod('game-0', 'a')];
    world.agent('c').reachable = false;
    world.settle();
    t.same(world.status.promotable?.nodes, ['b']);
    t.equal(world.status.phase, 'Active', 'one that never answered is not wanted yet');
    world.agent('c').reachable = true;
    world.settle();
    t.same(world.status.promotable?.nodes, ['b', 'c']);
    t.end();
  },
);

t.test('B14: a node whose pool is full is not promoted, and its free bytes cost no writes', (t) => {
  const world = atRest();
  world.agent('b').freeBytes = 1000;
  world.step();
  t.match(world.status, {
    wouldFailOverTo: 'c',
    refused: [{ node: 'b', cause: 'NO_FIT', message: /pool space: 64Mi are needed/ }],
  });
  const before = structuredClone(world.status);
  for (const free of [2000, 3 * 2 ** 20, 2 ** 25]) {
    world.agent('b').freeBytes = free;
    world.step(10);
    t.same(world.status.refused, before.refused);
  }
  world.kill('a');
  world.settle();
  t.equal(world.status.activeNode, 'c');
  t.end();
});

t.test('B14: a pool without room gets no new copy, and why is told in steady words', (t) => {
  const world = atRest(['a', 'b'], REPLICATED);
  world.nodes.push(node('c'));
  world.agents.push({ ...world.agent('b'), node: 'c', url: 'http://c:8080', volume: null, freeBytes: 10 });
  world.annotate({ 'replication-replicas': '2' });
  world.settle();
  t.match(world.condition('Replicating'), {
    reason: 'TooFewNodes',
    message: /c: its pool has less than 65 MiB/,
  });
  world.agent('c').freeBytes = 2 ** 40;
  world.settle();
  t.equal(world.status.replicas?.length, 2);
  t.end();
});

t.test('B14: the node that is promoted fits the workload', (t) => {
  const world = atRest();
  world.on('b').requested = { cpu: 3800 };
  world.step();
  t.equal(world.status.wouldFailOverTo, 'c');
  t.match(world.status.refused, [
    { node: 'b', cause: 'NO_FIT', message: /cpu: 500m are asked for, 200m of 4 are free/ },
  ]);
  world.kill('a');
  world.settle();
  t.equal(world.status.activeNode, 'c');
  t.end();
});

t.test(
  'B15: a refused patch on one node holds nothing back, and every prefix of the steps ends in the same place',
  (t) => {
    const stubborn = atRest();
    stubborn.refuse = (action) => action.kind === 'labelNode' && action.node === 'a';
    stubborn.kill('a');
    for (let i = 0; i < 40; i += 1) stubborn.step();
    t.equal(stubborn.status.activeNode, 'b');
    t.match(stubborn.pods, [{ node: 'b', phase: 'Running' }], 'pods are deleted all the same');
    stubborn.refuse = () => false;
    stubborn.settle();
    t.same(stubborn.labelled(), ['b']);

    for (let prefix = 0; prefix < 10; prefix += 1) {
      const world = atRest();
      world.kill('a');
      for (let i = 0; i < 40 && world.status.epoch === 1; i += 1) world.step();
      // The leader dies after so many writes; all that it remembered is gone.
      world.step(1000, prefix);
      world.memory = { prepared: [], caughtUp: [], fullSyncs: [], manualSyncs: [] };
      world.settle();
      t.match(world.status, { activeNode: 'b', epoch: 2, phase: 'Degraded' }, `after ${prefix} writes`);
      t.match(world.pods, [{ node: 'b', phase: 'Running' }]);
      t.same(world.labelled(), ['b']);
      t.equal(world.volume?.annotations[`${P}active-node`], 'b');
      t.equal(world.decisions, 2, 'one decision, whoever carries it out');
    }
    t.end();
  },
);

t.test('a planned move ends in the same place when leaders die at every step', (t) => {
  for (let every = 1; every < 6; every += 1) {
    const world = atRest();
    world.on('a').unschedulable = true;
    for (
      let i = 0;
      i < 200 && (world.status.epoch === 1 || world.status.promotion?.done.length !== 7);
      i += 1
    ) {
      world.step(1000, i % every === 0 ? 1 : 9);
      if (i % every === 0) world.memory = { prepared: [], caughtUp: [], fullSyncs: [], manualSyncs: [] };
    }
    world.settle();
    if (every === 1) continue; // memory never lives long enough for the flush to be known
    t.match(world.status, { activeNode: 'b', epoch: 2, phase: 'Active' }, `every ${every}`);
    t.match(world.pods, [{ node: 'b', phase: 'Running' }]);
  }
  t.end();
});

t.test('force deletion only where the kubelet is gone and the new epoch is known', (t) => {
  const world = atRest();
  world.kill('a');
  let forced = 0;
  for (let i = 0; i < 40; i += 1) {
    const plan = world.step();
    for (const action of plan.actions)
      if (action.kind === 'deletePod' && action.force) {
        forced += 1;
        t.equal(world.agent('b').volume?.role, 'active');
      }
  }
  t.ok(forced > 0);
  const planned = atRest();
  planned.on('a').unschedulable = true;
  for (let i = 0; i < 30; i += 1)
    for (const action of planned.step().actions)
      if (action.kind === 'deletePod') t.equal(action.force, false);
  t.end();
});

t.test('D41: a claim that never had a good policy says that it is not replicated, until it has one', (t) => {
  const world = new World(['a', 'b'], { ...REPLICATED, 'replication-replicas': 'many' });
  world.settle();
  t.match(world.condition('PolicyValid'), {
    status: 'False',
    message: /no good policy before.*not replicated/s,
  });
  t.match(world.condition('Replicating'), { status: 'False', reason: 'Disabled' });
  t.equal(world.object?.spec.policy, undefined, 'what stands in for it is not remembered as good');
  t.equal(world.status.replicas?.length, 0);
  world.annotate({ 'replication-replicas': '1' });
  world.settle();
  t.equal(world.condition('PolicyValid')?.status, 'True');
  t.equal(world.status.replicas?.length, 1);
  world.annotate({ 'replication-replicas': 'none' });
  world.settle();
  t.match(world.condition('PolicyValid'), { status: 'False', message: /last good policy stays/ });
  t.equal(world.status.replicas?.length, 1);
  t.end();
});

t.test(
  'E2: owners are the source’s, whatever the pods run as; where an annotation differs from them, a warning',
  (t) => {
    const world = atRest();
    world.pods = [
      pod('game-0', 'a', {
        spec: { containers: [{ name: 'c' }], securityContext: { runAsUser: 1000, fsGroup: 1000 } },
      }),
    ];
    world.settle();
    t.match(
      world.agent('a').volume,
      { policy: { ownerUid: null, ownerGid: null } },
      'E2: owners as on the source',
    );
    world.annotate({ 'replication-owner-uid': '2000' });
    world.settle();
    t.match(world.agent('a').volume, { policy: { ownerUid: 2000 } }, 'an annotation wins');
    const warned = () => [
      ...new Set(world.events.filter((one) => one.reason === 'OwnerMismatch').map((one) => one.message)),
    ];
    t.equal(warned().length, 1);
    t.match(warned()[0], /owner-uid is 2000, the pods run as 1000/);
    world.annotate({ 'replication-owner-uid': '1000', 'replication-owner-gid': '3000' });
    world.settle();
    t.match(world.agent('a').volume, { policy: { ownerUid: 1000, ownerGid: 3000 } });
    t.equal(warned().length, 2);
    t.match(warned()[1], /owner-gid is 3000, the pods run as 1000/);
    // An image with a user of its own says nothing to Kubernetes; root may write anything.
    for (const securityContext of [{}, { runAsUser: 0, fsGroup: 5 }]) {
      const quiet = atRest(['a', 'b'], {
        ...REPLICATED,
        'replication-owner-uid': '7',
        'replication-owner-gid': '7',
      });
      quiet.pods = [pod('game-0', 'a', { spec: { containers: [{ name: 'c' }], securityContext } })];
      quiet.settle();
      t.notOk(quiet.events.some((one) => one.reason === 'OwnerMismatch'));
    }
    t.end();
  },
);

t.test(
  'A8: an agent that comes back under another address gets its watch anew, others are told of it',
  (t) => {
    const world = atRest();
    world.agent('b').url = 'http://b2:8080';
    world.settle();
    t.same(
      (world.agent('a').volume as { targets: { url: string }[] }).targets.map((one) => one.url),
      ['http://b2:8080', 'http://c:8080'],
    );
    t.equal(world.log.filter((id) => id === 'startWatch:a').length, 1);
    t.end();
  },
);

t.test('the active node is told of the size, and what becomes of it is a condition', (t) => {
  const world = atRest();
  const volume = world.volume as NonNullable<typeof world.volume>;
  const size = (now: object | undefined): void => {
    const { size: _, ...report } = world.agent('a').volume as { size?: object };
    world.agent('a').volume = { ...report, ...(now ? { size: now } : {}) } as never;
  };
  world.volume = { ...volume, bytes: 4096 };
  world.settle();
  t.notOk(world.log.includes('startWatch:a'), 'an agent that says nothing of sizes is left alone');
  t.equal(world.condition('SizeEnforced'), undefined);
  size({ bytes: null, enforced: false, reason: 'no size is recorded' });
  const plan = planVolume(world.observed());
  const start = plan.actions.find((one) => one.kind === 'startWatch');
  t.match(start, { node: 'a', body: { bytes: 4096 } }, 'one that does not know it is told');
  for (const [now, status, reason] of [
    [{ bytes: 4096, enforced: null, reason: 'nothing is published' }, 'Unknown', 'NotPublished'],
    [{ bytes: 4096, enforced: true, reason: '' }, 'True', 'Enforced'],
    [{ bytes: 4096, enforced: false, reason: 'project quotas are off' }, 'False', 'NotEnforced'],
  ] as const) {
    size(now);
    const events = world.events.length;
    world.step();
    t.match(world.condition('SizeEnforced'), { status, reason }, reason);
    t.equal(world.events.length, events, 'a file system without quotas is no Event of each volume');
  }
  t.match(world.condition('SizeEnforced')?.message, /^a: project quotas are off/);
  t.equal(world.status.phase, 'Active');
  size({ bytes: 8192, enforced: true, reason: '' });
  t.notOk(
    planVolume(world.observed()).actions.some((one) => one.kind === 'startWatch'),
    'a volume that was grown is not told the smaller size of a PersistentVolume that follows',
  );
  t.end();
});

t.test(
  'A8: an active agent that comes back under another address gets its watch anew, so that its copies ask there',
  (t) => {
    const world = atRest();
    Object.assign(world.agent('a'), { url: 'http://a2:8080', webdavUrl: 'http://a2:8081' });
    world.settle();
    t.same((world.agent('a').volume as { source: object }).source, {
      url: 'http://a2:8080',
      webdavUrl: 'http://a2:8081',
    });
    t.equal(world.log.filter((id) => id === 'startWatch:a').length, 1);
    t.end();
  },
);

t.test(
  'a copy that is not wanted any more is removed from its node, late and only when all others are well',
  (t) => {
    const fewer = () => {
      const world = atRest(['a', 'b', 'c', 'd']);
      world.annotate({ 'replication-replicas': '2' });
      world.settle();
      return world;
    };
    const removed = (world: ReturnType<typeof fewer>) =>
      world.log.filter((id) => id.startsWith('removeCopy:')).join();
    const late = (world: ReturnType<typeof fewer>, name = 'd') =>
      Object.assign(world.agent(name).volume as object, { freshAgeMs: 700_000 });

    const world = fewer();
    t.same(
      world.status.replicas?.map((one) => one.node),
      ['b', 'c'],
    );
    t.equal(removed(world), '', 'a number that was wrong for some minutes costs nothing');
    t.ok(world.agent('d').volume, 'its data is still there');
    late(world);
    world.settle();
    t.equal(removed(world), 'removeCopy:d', 'once');
    t.equal(world.agent('d').volume, null);
    t.equal(world.events.filter((one) => one.reason === 'CopyRemoved').length, 1);

    const stays: [string, (world: ReturnType<typeof fewer>) => void][] = [
      ['a wanted copy is stale', (w) => Object.assign(w, { seal() {} })],
      ['a wanted copy is away', (w) => Object.assign(w.agent('b'), { reachable: false })],
      ['a wanted copy is empty', (w) => Object.assign(w.agent('b').volume as object, { generation: null })],
      ['the source is away', (w) => Object.assign(w.agent('a'), { reachable: false })],
      ['the source is lost', (w) => w.kill('a')],
      ['it is mounted', (w) => Object.assign(w.agent('d'), { mounted: true })],
      ['it has seen more', (w) => Object.assign(w.agent('d').volume as object, { epoch: 2 })],
      ['the claim is being deleted', (w) => Object.assign(w.claim as object, { deleting: true })],
      ['replication is off', (w) => w.annotate({ 'replication-enabled': 'false' })],
    ];
    for (const [what, change] of stays) {
      const w = fewer();
      late(w);
      change(w);
      if (what === 'a wanted copy is stale')
        for (const name of ['b', 'c']) Object.assign(w.agent(name).volume as object, { freshAgeMs: 9e6 });
      const plan = planVolume(w.observed());
      t.notOk(
        plan.actions.some((one) => one.kind === 'removeCopy'),
        what,
      );
    }

    const none = atRest(['a', 'b']);
    none.annotate({ 'replication-replicas': '0' });
    none.settle();
    late(none, 'b');
    none.settle();
    t.ok(none.agent('b').volume, 'the last whole copy stays');

    const left = atRest(['a', 'b', 'c']);
    left.on('c').inPool = false;
    left.settle();
    late(left, 'c');
    left.settle();
    t.equal(removed(left), 'removeCopy:c', 'a node that left the pool');
    t.end();
  },
);

t.test('a new node of the pool gets a copy, one that leaves loses it', (t) => {
  const world = atRest(['a', 'b']);
  world.nodes.push(node('d'));
  world.agents.push({ ...world.agent('b'), node: 'd', url: 'http://d:8080', volume: null });
  world.settle();
  t.match(world.status, { replicasSummary: '2/2', promotable: { nodes: ['b', 'd'] } });
  world.on('d').inPool = false;
  world.settle();
  t.match(world.status, { replicasSummary: '1/1', promotable: { nodes: ['b'] } });
  t.end();
});

t.test('a move goes on while the next pod is not scheduled yet, and is not drawn back by it', (t) => {
  const cordoned = atRest();
  cordoned.mute = true;
  cordoned.on('a').unschedulable = true;
  cordoned.settle();
  t.match(cordoned.status, { activeNode: 'b', epoch: 2 });
  const forced = atRest();
  forced.mute = true;
  (forced.object as NonNullable<typeof forced.object>).spec.force = {
    action: 'Promote',
    node: 'c',
    reason: 'repair',
  };
  forced.settle();
  t.match(forced.status, { activeNode: 'c', epoch: 2, promotion: { planned: true } });
  const broken = atRest();
  broken.mute = true;
  Object.assign(broken.pods[0] as object, { ready: false, restarts: 4 });
  broken.settle();
  t.match(broken.status, { activeNode: 'b', epoch: 2, promotion: { planned: true } });
  t.match(broken.pods, [{ node: 'b', phase: 'Running' }]);
  t.end();
});

t.test('a lost node whose agent still answers is flushed before the promotion, also without a lease', (t) => {
  const world = atRest(['a', 'b', 'c'], { ...REPLICATED, 'failover-fencing': 'none' });
  world.on('a').ready = false;
  world.settle();
  t.equal(world.status.activeNode, 'b');
  const salvage = world.log.indexOf('prepare:salvage:1:b');
  t.ok(salvage >= 0 && salvage < world.log.indexOf('decide:2'));
  t.end();
});

t.test('a pod that cannot end on the lost node does not keep the volume from the new pod', (t) => {
  const world = atRest(['a', 'b', 'c'], { ...REPLICATED, 'failover-fencing': 'none' });
  // Its kubelet is gone, its agent answers: nobody may take the pod off. A ReplicaSet makes the next one all the same.
  world.on('a').ready = false;
  for (let i = 0; i < 40 && world.pods[0]?.deleting !== true; i += 1) world.step();
  t.match(world.status, { activeNode: 'b', epoch: 2 });
  world.pods.push(
    pod('game-1', 'c', { phase: 'Pending', ready: false, createdAt: world.now + 1000, uid: 'next' }),
  );
  for (let i = 0; i < 20; i += 1) world.step();
  t.match(world.status, { activeNode: 'c', epoch: 3, promotion: { planned: true } });
  t.match(world.pods, [
    { name: 'game-0', node: 'a', deleting: true },
    { name: 'game-1', node: 'c', phase: 'Running' },
  ]);
  t.end();
});

t.test(
  'D32: a silent node that Kubernetes calls Ready: its copies decide, and an agent being restarted is not silent',
  (t) => {
    const silent = (change: object = {}) => {
      const world = atRest();
      Object.assign(world.agent('a'), { reachable: false, ...change });
      return world;
    };
    const decided = (world: ReturnType<typeof silent>) => {
      let seen: { insist?: boolean } = {};
      world.refuse = (action) => {
        if (action.kind === 'decide') seen = action;
        return action.kind === 'decide';
      };
      for (let i = 0; i < 15; i += 1) world.step();
      return seen.insist;
    };
    t.equal(decided(silent()), false, 'copies that hear it are not told to let go of it');
    const lost = silent();
    lost.on('a').ready = false;
    t.equal(decided(lost), true, 'Kubernetes agrees that it is lost');
    t.equal(
      decided(silent({ ready: false })),
      undefined,
      'its agent is being replaced: csi-node too, perhaps',
    );
    t.end();
  },
);

t.test(
  'a schedule for all claims: what a claim says itself goes before it, and off means never (I6)',
  (t) => {
    const defaultSchedule = '0 4 * * *';
    const planned = (annotations: Record<string, string>) => {
      const world = new World(['a', 'b'], annotations);
      world.options = { defaultSchedule };
      world.pods = [pod('game-0', 'a')];
      world.settle();
      return { policy: world.object?.spec.policy?.fullSyncSchedule, next: world.status.nextFullSync };
    };
    t.match(planned(REPLICATED), { policy: defaultSchedule, next: /T04:00:00/ });
    const own = { ...REPLICATED, 'replication-full-sync-schedule': '30 5 * * *' };
    t.match(planned(own), { policy: '30 5 * * *', next: /T05:30:00/ });
    const off = planned({ ...REPLICATED, 'replication-full-sync-schedule': 'off' });
    t.equal(off.policy, 'off');
    t.notOk(off.next);
    t.notOk(planned({}).policy, 'nothing is synced where nothing is replicated');
    t.end();
  },
);
