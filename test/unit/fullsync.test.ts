import t from 'tap';
import { FULL_SYNCS, Turns } from '../../controller/act/operations.ts';
import { atRest, REPLICATED, START, type World } from './plan-world.ts';

const end = (world: World, state: 'done' | 'failed' = 'done', error: string | null = null): void => {
  world.memory.fullSyncs = world.memory.fullSyncs.map((one) => ({ ...one, state, error }));
};
const last = (world: World) => world.status.lastFullSync;
const asked = (world: World): number => world.log.filter((id) => id.startsWith('fullSync:')).length;

t.test(
  'H7: on start: once for each epoch, on every copy, and not again after a restart of the controller',
  (t) => {
    const world = atRest(['a', 'b', 'c'], { ...REPLICATED, 'replication-full-sync-on-start': 'true' });
    t.match(last(world), { trigger: 'Start' });
    t.equal(last(world)?.endedAt, undefined);
    t.same(
      world.memory.fullSyncs.map((one) => one.node),
      ['b', 'c'],
    );
    end(world);
    world.settle();
    t.match(last(world), { outcome: 'Succeeded', message: '2 copies are as the source' });
    const before = last(world)?.id;
    world.memory.fullSyncs = [];
    world.settle();
    t.equal(last(world)?.id, before, 'a new leader runs none');
    world.kill('a');
    world.settle();
    t.equal(world.status.epoch, 2);
    t.not(last(world)?.id, before, 'a new epoch runs its own');
    t.end();
  },
);

t.test('a new leader goes on with a run that is under way: it asks the replicas again', (t) => {
  const world = atRest(['a', 'b', 'c'], { ...REPLICATED, 'replication-full-sync-on-start': 'true' });
  const id = last(world)?.id;
  const before = asked(world);
  world.memory.fullSyncs = [];
  world.step();
  t.equal(asked(world), before + 1);
  t.equal(last(world)?.id, id, 'the same run');
  end(world);
  world.settle();
  t.equal(last(world)?.outcome, 'Succeeded');
  t.end();
});

t.test(
  'I1: by schedule: in its slot, and a slot that passed while the controller was away runs once',
  (t) => {
    const world = atRest(['a', 'b'], { ...REPLICATED, 'replication-full-sync-schedule': '0 4 * * *' });
    t.equal(world.status.nextFullSync, '2026-12-03T04:00:00.000Z');
    t.equal(last(world), undefined, 'a schedule that is new owes nothing');
    world.now = Date.parse('2026-12-03T03:59:00Z');
    world.step();
    t.equal(last(world), undefined);
    world.now = Date.parse('2026-12-08T12:00:00Z');
    world.settle();
    t.match(last(world), { trigger: 'Schedule', id: `schedule-${Date.parse('2026-12-03T04:00:00Z')}` });
    end(world);
    world.settle();
    t.equal(last(world)?.outcome, 'Succeeded');
    t.equal(world.status.nextFullSync, '2026-12-09T04:00:00.000Z');
    const { id } = last(world) as { id: string };
    for (let i = 0; i < 20; i += 1) world.step(60_000);
    t.equal(last(world)?.id, id, 'once');
    world.now = START;
    world.settle();
    t.equal(last(world)?.id, id, 'also when the clock jumps back');
    t.end();
  },
);

t.test('a slot whose time comes while the source is away is run when it is back, not forgotten', (t) => {
  const world = atRest(['a', 'b'], {
    'replication-enabled': 'true',
    'replication-full-sync-schedule': '0 4 * * *',
  });
  world.agent('a').reachable = false;
  world.now = Date.parse('2026-12-03T04:00:10Z');
  world.settle();
  t.equal(last(world), undefined);
  t.equal(world.status.nextFullSync, '2026-12-03T04:00:00.000Z', 'still owed');
  world.agent('a').reachable = true;
  world.settle();
  t.match(last(world), { trigger: 'Schedule' });
  t.end();
});

t.test('a changed schedule counts from now, not from the old one’s next slot', (t) => {
  const world = atRest(['a', 'b'], { ...REPLICATED, 'replication-full-sync-schedule': '0 4 1 1 *' });
  t.equal(world.status.nextFullSync, '2027-01-01T04:00:00.000Z');
  world.annotate({ 'replication-full-sync-schedule': '0 * * * *' });
  world.step();
  world.step();
  t.equal(world.status.nextFullSync, '2026-12-02T13:00:00.000Z');
  t.equal(last(world), undefined);
  world.annotate({ 'replication-full-sync-schedule': null });
  world.step();
  world.step();
  t.equal(world.status.nextFullSync, undefined);
  t.end();
});

t.test(
  'I2: by hand: it has the id that the caller was told, waits for a running one, and its end can be read',
  (t) => {
    const world = atRest();
    world.memory.manualSyncs = [{ id: 'manual-1', requestedAt: world.now }];
    world.step();
    t.match(last(world), { id: 'manual-1', trigger: 'Manual' });
    t.same(world.memory.manualSyncs, [], 'taken in');
    world.memory.manualSyncs = [{ id: 'manual-2', requestedAt: world.now }];
    world.settle();
    t.equal(last(world)?.id, 'manual-1', 'one at a time');
    t.equal(world.memory.manualSyncs.length, 1, 'and the second one is not dropped');
    end(world, 'failed', 'no space');
    world.step();
    t.match(
      world.events.find((one) => one.reason === 'FullSyncFailed'),
      { type: 'Warning', message: /b: no space; c: no space/ },
    );
    world.settle();
    t.equal(last(world)?.id, 'manual-2');
    t.end();
  },
);

t.test('a request that was taken in and whose answer was lost is taken in again, not run again', (t) => {
  const world = atRest();
  world.memory.manualSyncs = [{ id: 'manual-1', requestedAt: world.now }];
  world.step();
  end(world);
  world.step();
  world.memory.manualSyncs = [{ id: 'manual-1', requestedAt: world.now }];
  world.step();
  t.same(world.memory.manualSyncs, []);
  t.match(last(world), { id: 'manual-1', outcome: 'Succeeded' });
  t.end();
});

t.test('copies that do not answer are named; one that failed does not hide those that succeeded', (t) => {
  const world = atRest();
  world.memory.manualSyncs = [{ id: 'manual-1', requestedAt: world.now }];
  world.step();
  world.agent('c').reachable = false;
  world.memory.fullSyncs = world.memory.fullSyncs.map((one) =>
    one.node === 'b' ? { ...one, state: 'done' } : one,
  );
  world.settle();
  t.match(last(world), { outcome: 'Partial', message: /c: its agent does not answer/ });
  t.end();
});

t.test('A15: a promotion cancels the run, so does switching replication off', (t) => {
  const world = atRest();
  world.memory.manualSyncs = [{ id: 'manual-1', requestedAt: world.now }];
  world.step();
  world.kill('a');
  world.settle();
  t.equal(world.status.epoch, 2);
  t.match(last(world), { id: 'manual-1', outcome: 'Cancelled', message: /moved/ });
  const off = atRest();
  off.memory.manualSyncs = [{ id: 'manual-1', requestedAt: off.now }];
  off.step();
  off.annotate({ 'replication-enabled': 'false' });
  off.settle();
  t.match(last(off), { outcome: 'Cancelled', message: /switched off/ });
  t.end();
});

t.test('a run that hangs ends after a day', (t) => {
  const world = atRest();
  world.memory.manualSyncs = [{ id: 'manual-1', requestedAt: world.now }];
  world.step();
  world.now += 25 * 3_600_000;
  world.settle();
  t.match(last(world), { outcome: 'Failed', message: /not done after 24 h/ });
  t.end();
});

t.test('H7: full syncs of many volumes take turns', async (t) => {
  const turns = new Turns(FULL_SYNCS);
  let running = 0;
  let most = 0;
  const ended: number[] = [];
  await Promise.allSettled(
    Array.from({ length: 20 }, (_, i) =>
      turns.take(async () => {
        most = Math.max(most, ++running);
        await new Promise((resolve) => setTimeout(resolve, 2));
        running--;
        ended.push(i);
        if (i % 3 === 0) throw new Error('a run that fails gives its turn back');
      }),
    ),
  );
  t.equal(most, FULL_SYNCS);
  t.same(ended, [...Array(20).keys()], 'in order of arrival');
});
