/** Whether a stuck pod of a lost node is still wanted: asked only where the pods do not tell. */
import t from 'tap';
import { VolumeMemory } from '../../controller/act/memory.ts';
import { KubeError, type PodOwner } from '../../controller/cluster/index.ts';
import { askOwner } from '../../controller/owner.ts';
import { ownerToAsk, wantsPod } from '../../controller/plan/workload.ts';
import { atRest, pod } from './plan-world.ts';

const OWNED = { controlledBy: { kind: 'StatefulSet', name: 'game', apiVersion: 'apps/v1' } };

function stuck() {
  const world = atRest();
  world.kill('a');
  world.pods = [pod('game-0', 'a', { ...OWNED, deleting: true, ready: false })];
  return world;
}

t.test('B9: a pod on a dead node that its scaled-down StatefulSet does not want moves nothing', (t) => {
  const world = stuck();
  world.recreate = 'never';
  world.workload = { wants: false };
  for (let i = 0; i < 12; i += 1) world.step(5000);
  t.match(world.status, { activeNode: 'a', epoch: 1 });
  t.match(world.condition('WorkloadHealthy'), { status: 'Unknown', reason: 'NoDemand' });
  t.equal(world.pods.length, 1, 'the pod is left to its node');
  world.workload = { wants: true };
  for (let i = 0; i < 40; i += 1) world.step(1000);
  t.match(world.status, { activeNode: 'b', epoch: 2 }, 'scaled up again it fails over');
  t.end();
});

t.test(
  'D33: a pod on a dead node whose StatefulSet wants it fails over, also when nobody could be asked',
  (t) => {
    for (const workload of [{ wants: true }, null]) {
      const world = stuck();
      world.workload = workload;
      world.settle();
      t.match(world.status, { activeNode: 'b', epoch: 2 });
    }
    t.end();
  },
);

t.test('the owner is asked only for a stuck pod of a lost node', (t) => {
  const asked = (change: (world: ReturnType<typeof stuck>) => void) => {
    const world = stuck();
    change(world);
    return ownerToAsk(world.observed());
  };
  t.same(
    asked(() => {}),
    { kind: 'StatefulSet', name: 'game', pod: 'game-0' },
  );
  t.equal(
    asked((w) => w.revive('a')),
    null,
    'its node answers: the pod just ends',
  );
  t.equal(
    asked((w) => w.pods.push(pod('game-1', null, { phase: 'Pending' }))),
    null,
    'another pod is there: one is wanted',
  );
  t.equal(
    asked((w) => Object.assign(w.pods[0] as object, { deleting: false })),
    null,
  );
  t.equal(
    asked((w) => Object.assign(w.pods[0] as object, { controlledBy: null })),
    null,
  );
  t.equal(
    asked((w) =>
      Object.assign(w.pods[0] as object, {
        controlledBy: { kind: 'StatefulSet', name: 'game', apiVersion: 'apps.example.org/v1' },
      }),
    ),
    null,
    'somebody else’s kind of that name',
  );
  t.end();
});

t.test('B9: which pods a StatefulSet or a ReplicaSet wants', (t) => {
  const set = (name: string, found: Parameters<typeof wantsPod>[1]) =>
    wantsPod({ kind: 'StatefulSet', pod: name }, found);
  t.equal(set('game-0', { deleting: false }), true, 'without a number it is one');
  t.equal(set('game-1', { deleting: false }), false);
  t.equal(set('game-1', { replicas: 2, deleting: false }), true);
  t.equal(set('game-0', { replicas: 0, deleting: false }), false);
  t.equal(set('game-10', { replicas: 3, deleting: false }), false, 'a number, no prefix');
  t.equal(set('game-5', { replicas: 1, start: 5, deleting: false }), true);
  t.equal(set('game-0', { replicas: 3, start: 5, deleting: false }), false);
  t.equal(set('game-0', { replicas: 1, deleting: true }), false, 'it is being deleted');
  t.equal(set('game-0', null), false, 'it is gone');
  t.equal(wantsPod({ kind: 'ReplicaSet', pod: 'x-abc' }, { replicas: 0, deleting: false }), false);
  t.equal(wantsPod({ kind: 'ReplicaSet', pod: 'x-abc' }, { replicas: 1, deleting: false }), true);
  t.end();
});

t.test('it is one request, not one a look; no answer stops the look, no right to ask does not', async (t) => {
  const world = stuck();
  let now = 0;
  let requests = 0;
  let answer: () => Promise<PodOwner | null> = async () => ({
    metadata: { name: 'game' },
    spec: { replicas: 0 },
  });
  const kube = {
    find: async () => {
      requests++;
      return (await answer()) as never;
    },
  };
  const clock = { boot: () => now, now: () => now, setTimeout: () => ({ cancel() {} }) };
  const memory = new VolumeMemory(clock);
  const warned: string[] = [];
  const ask = () =>
    askOwner(kube, world.observed(), memory, clock, { warn: (_, text) => void warned.push(text) });
  t.same(await ask(), { wants: false });
  t.same(await ask(), { wants: false });
  t.equal(requests, 1);
  now = 20_000;
  answer = async () => null;
  t.same(await ask(), { wants: false });
  t.equal(requests, 2);
  now = 40_000;
  answer = async () => {
    throw new KubeError('Unreachable', 'no answer');
  };
  await t.rejects(ask(), new KubeError('Unreachable', 'no answer'));
  answer = async () => {
    throw new KubeError('Forbidden', 'not allowed');
  };
  t.equal(await ask(), null);
  t.equal(warned.length, 1);
  world.revive('a');
  t.equal(await ask(), null, 'nobody is asked when there is no question');
  t.equal(requests, 4);
});
