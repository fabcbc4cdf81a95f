import t from 'tap';
import { KubeError } from '../../../controller/cluster/errors.ts';
import { createRecorder } from '../../../controller/cluster/recorder.ts';
import type { CoreEvent } from '../../../controller/cluster/resources.ts';
import { FakeClock, FakeCluster, silent } from './fake.ts';

const VOLUME = {
  apiVersion: 'storage.shipstuff.io/v1alpha1',
  kind: 'SimpleVolume',
  name: 'world',
  namespace: 'games',
  uid: 'u-1',
};
const STALE = { type: 'Warning', reason: 'FailoverBlocked', message: 'no copy is fresh' } as const;

function setUp(more: object = {}) {
  const clock = new FakeClock();
  const cluster = new FakeCluster();
  const recorder = createRecorder({ kube: cluster.kube, clock, logger: silent, instance: 'pod-1', ...more });
  const events = (): CoreEvent[] => [...cluster.objects.values()] as CoreEvent[];
  return { clock, cluster, recorder, events };
}

t.test('one Event per object, reason and cause, counted up and not written each time', async (t) => {
  const { clock, cluster, recorder, events } = setUp();
  for (let i = 0; i < 1000; i++) {
    recorder.event(VOLUME, STALE);
    await clock.advance(1000);
  }
  await recorder.flush();
  t.equal(events().length, 1);
  t.match(events()[0], {
    metadata: { namespace: 'games' },
    involvedObject: VOLUME,
    type: 'Warning',
    reason: 'FailoverBlocked',
    message: 'no copy is fresh',
    count: 1000,
    reportingInstance: 'pod-1',
  });
  t.ok(cluster.writes <= 5, `${cluster.writes} writes in 1000 s`);
  recorder.event(VOLUME, { ...STALE, cause: 'node-b' });
  recorder.event(VOLUME, { ...STALE, reason: 'Moved', type: 'Normal' });
  recorder.event({ ...VOLUME, name: 'other', uid: 'u-2' }, STALE);
  await clock.advance(0);
  t.equal(events().length, 4);
});

t.test('another text of the same cause is written soon, and not each time', async (t) => {
  const { clock, cluster, recorder, events } = setUp();
  for (let i = 0; i < 100; i++) {
    recorder.event(VOLUME, { ...STALE, message: `try ${i}` });
    await clock.advance(100);
  }
  await clock.advance(10_000);
  t.equal(events()[0]?.message, 'try 99');
  t.equal(events()[0]?.count, 100);
  t.ok(cluster.writes <= 3, `${cluster.writes}`);
});

t.test('the next controller counts the same Event up', async (t) => {
  const { clock, cluster, recorder, events } = setUp();
  recorder.event(VOLUME, STALE);
  await recorder.flush();
  const next = createRecorder({ kube: cluster.kube, clock, logger: silent });
  next.event(VOLUME, STALE);
  await next.flush();
  t.equal(events().length, 1);
  t.equal(events()[0]?.count, 2);
});

t.test('an Event that the API server has forgotten is made anew', async (t) => {
  const { clock, cluster, recorder, events } = setUp();
  recorder.event(VOLUME, STALE);
  await recorder.flush();
  cluster.objects.clear();
  await clock.advance(3_600_000);
  recorder.event(VOLUME, STALE);
  await recorder.flush();
  t.equal(events().length, 1);
});

t.test('made-up causes of one object cannot flood the cluster', async (t) => {
  const { clock, recorder, events } = setUp();
  for (let i = 0; i < 500; i++) recorder.event(VOLUME, { ...STALE, cause: `c${i}` });
  await clock.advance(0);
  t.equal(events().length, 25);
  t.equal(recorder.counters.dropped, 475);
  recorder.event({ ...VOLUME, uid: 'u-2' }, STALE);
  await clock.advance(120_000);
  t.equal(events().length, 26, 'others are not concerned');
  for (let i = 0; i < 10; i++) recorder.event(VOLUME, { ...STALE, cause: `d${i}` });
  await clock.advance(0);
  t.equal(events().length, 28, 'after two minutes two more');
});

t.test('an API server that is away: written later, and given up in the end without harm', async (t) => {
  const { clock, cluster, recorder, events } = setUp();
  cluster.before = () => {
    throw new KubeError('Unreachable', 'away');
  };
  recorder.event(VOLUME, STALE);
  await clock.advance(2000);
  cluster.before = () => {};
  await clock.advance(5000);
  t.equal(events().length, 1);
  cluster.before = () => {
    throw new KubeError('Forbidden', 'no');
  };
  recorder.event(VOLUME, { ...STALE, cause: 'x' });
  await clock.advance(0);
  t.equal(recorder.counters.failed, 1);
  cluster.before = () => {};
  recorder.event(VOLUME, { ...STALE, cause: 'x' });
  await clock.advance(0);
  t.equal(events().length, 2, 'the next time is written');
});

t.test(
  'long texts are cut, long names give valid ones, cluster-scoped objects have theirs in default',
  async (t) => {
    const { recorder, events } = setUp();
    recorder.event(
      { apiVersion: 'v1', kind: 'Node', name: `${'n'.repeat(229)}.${'x'.repeat(23)}` },
      { ...STALE, message: 'm'.repeat(5000) },
    );
    await recorder.flush();
    const event = events()[0] as CoreEvent;
    t.equal(event.metadata.namespace, 'default');
    t.equal(event.message.length, 1024);
    t.ok(event.metadata.name.length <= 253);
    t.match(event.metadata.name, /^[a-z0-9]([-a-z0-9]*[a-z0-9])?(\.[a-z0-9]([-a-z0-9]*[a-z0-9])?)*$/);
  },
);
