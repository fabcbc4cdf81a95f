import fc from 'fast-check';
import t from 'tap';
import { roleLabel } from '../../controller/plan/labels.ts';
import { atRest, pod, REPLICATED, type World } from './plan-world.ts';

// Nodes die and come back, are cordoned, agents fall silent, leaders forget everything and write only a part of their
// plans, pods land anywhere. Whatever the order: the world itself throws when a rule of the status or of the fence is
// broken (plan-world.ts), and when all is well again the volume and its workload must be too.

t.setTimeout(120_000);

type Deed =
  | {
      what: 'kill' | 'outage' | 'revive' | 'cordon' | 'uncordon' | 'silence' | 'speak' | 'elsewhere';
      on: string;
    }
  | { what: 'forget' | 'wait' | 'crash' | 'break' | 'mend' }
  | { what: 'partly'; writes: number };

const NAMES = ['a', 'b', 'c'];
const deed: fc.Arbitrary<Deed> = fc.oneof(
  fc.record({
    what: fc.constantFrom(
      'kill' as const,
      'outage',
      'outage',
      'revive',
      'revive',
      'cordon',
      'uncordon',
      'silence',
      'speak',
      'elsewhere',
    ),
    on: fc.constantFrom(...NAMES),
  }),
  fc.record({ what: fc.constantFrom('forget' as const, 'wait', 'wait', 'wait', 'crash', 'break', 'mend') }),
  fc.record({ what: fc.constant('partly' as const), writes: fc.nat(4) }),
);

function act(world: World, one: Deed): void {
  switch (one.what) {
    case 'outage':
      act(world, { what: 'kill', on: one.on });
      act(world, { what: 'wait' });
      break;
    case 'kill':
      world.kill(one.on);
      for (const victim of world.pods) if (victim.node === one.on) victim.deleting = true;
      break;
    case 'revive':
      world.revive(one.on);
      // Its kubelet is told at last which of its pods are to go.
      world.pods = world.pods.filter((victim) => victim.node !== one.on || !victim.deleting);
      if (world.pods.length === 0)
        world.pods.push(
          pod('game-0', null, {
            phase: 'Pending',
            ready: false,
            createdAt: world.now,
            uid: `again-${world.now}`,
          }),
        );
      break;
    case 'cordon':
      world.on(one.on).unschedulable = true;
      break;
    case 'uncordon':
      world.on(one.on).unschedulable = false;
      break;
    case 'silence':
      world.agent(one.on).reachable = false;
      break;
    case 'speak':
      if (world.on(one.on).ready) world.agent(one.on).reachable = true;
      break;
    case 'elsewhere':
      // A pod without a node selector; the kubelet of another node keeps it Pending.
      if (world.pods.every((other) => other.node === null))
        world.pods = [
          pod('game-0', one.on, {
            phase: 'Pending',
            ready: false,
            createdAt: world.now,
            uid: `else-${world.now}`,
          }),
        ];
      break;
    case 'forget':
      world.memory = { prepared: [], caughtUp: [], fullSyncs: [], manualSyncs: [] };
      break;
    case 'crash':
      for (const victim of world.pods)
        if (victim.phase === 'Running')
          Object.assign(victim, { ready: false, restarts: 3, waiting: ['CrashLoopBackOff'] });
      break;
    case 'break':
      world.refuse = (action) => action.kind === 'labelNode' || action.kind === 'annotatePv';
      break;
    case 'mend':
      world.refuse = () => false;
      break;
    case 'partly':
      world.step(1000, one.writes);
      break;
    case 'wait':
      for (let i = 0; i < 15; i += 1) look(world);
  }
}

/** One look, and what must hold in every plan. */
function look(world: World): void {
  const { status } = world;
  const plan = world.step();
  for (const action of plan.actions) {
    if (action.kind === 'startWatch' && action.node !== status.activeNode)
      throw new Error(`a watch on ${action.node}, active is ${status.activeNode}`);
    if (action.kind === 'startWatch' && action.body.epoch !== status.epoch)
      throw new Error('a watch of another epoch');
    if (action.kind === 'startWatch' && action.body.targets.some((one) => one.node === action.node))
      throw new Error('a copy of itself');
    if (action.kind === 'deletePod' && action.force) {
      const victim = world.observed().pods.find((one) => one.uid === action.uid);
      if (victim && victim.node === status.activeNode) throw new Error('force where the volume is');
    }
    if (
      action.kind === 'labelNode' &&
      action.labels[roleLabel('default', 'world')] === 'active' &&
      action.node !== status.activeNode
    )
      throw new Error(`the role label on ${action.node}`);
  }
  const ids = plan.actions.map((one) => one.id);
  if (new Set(ids).size !== ids.length) throw new Error(`an id twice: ${ids}`);
}

t.test('property: whatever happens, no rule is broken, and when all is well again so is the volume', (t) => {
  let moves = 0;
  let failovers = 0;
  fc.assert(
    fc.property(
      fc.array(deed, { minLength: 3, maxLength: 25 }),
      fc.constantFrom(
        REPLICATED,
        { ...REPLICATED, 'failover-fencing': 'none' },
        { 'replication-enabled': 'true' },
      ),
      (deeds, annotations) => {
        const world = atRest(NAMES, annotations);
        for (const one of deeds) {
          act(world, one);
          look(world);
          if (world.status.promotion?.planned === false) failovers += 1;
          if ((world.status.epoch ?? 0) > 1 && world.status.promotion?.planned) moves += 1;
        }
        for (const name of NAMES) {
          act(world, { what: 'revive', on: name });
          act(world, { what: 'uncordon', on: name });
          act(world, { what: 'speak', on: name });
        }
        act(world, { what: 'mend' });
        world.pods = world.pods.filter((one) => !one.deleting);
        for (const one of world.pods)
          if (one.phase === 'Running') Object.assign(one, { ready: true, restarts: 0, waiting: [] });
        for (let i = 0; i < 60; i += 1) {
          look(world);
          world.seal(world.status.activeNode as string);
        }
        const { activeNode } = world.status;
        const where = JSON.stringify({
          deeds,
          pods: world.pods.map(({ name, node, phase }) => ({ name, node, phase })),
          status: world.status,
          log: world.log.slice(-12),
        });
        if (world.status.phase !== 'Active') throw new Error(`phase ${world.status.phase}: ${where}`);
        if (world.labelled().join() !== activeNode) throw new Error(`labels ${world.labelled()}: ${where}`);
        const running = world.pods.filter((one) => one.phase === 'Running');
        if (running.some((one) => one.node !== activeNode)) throw new Error(`a pod elsewhere: ${where}`);
        if (world.pods.length > 0 && running.length === 0) throw new Error(`no pod runs: ${where}`);
        if (world.agents.filter((one) => one.volume?.role === 'active').length !== 1)
          throw new Error(`active: ${where}`);
      },
    ),
    { numRuns: 80, seed: 4 },
  );
  t.ok(moves > 20 && failovers > 20, `${moves} looks at moves and ${failovers} at failovers`);
  t.end();
});
