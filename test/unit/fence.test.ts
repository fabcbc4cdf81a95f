/** The parts of the fencing protocol by themselves; that they hold together is test/sim/fence.test.ts. */
import t from 'tap';
import { ActiveFence } from '../../lib/fence/active.ts';
import { BeatLog } from '../../lib/fence/beats.ts';
import { LeaderFence, nextPromotable, type VolumeRecord } from '../../lib/fence/leader.ts';
import { HEARD_MS, NO_STATE, NodeFence, REPORT_FRESH_MS } from '../../lib/fence/node.ts';
import { ReplicaFence } from '../../lib/fence/replica.ts';
import {
  boundedLease,
  CLOCK_DRIFT,
  holdMs,
  LEASE_MS,
  MARGIN_MS,
  MAX_LEASE_MS,
  MIN_LEASE_MS,
} from '../../lib/fence/timing.ts';
import type { FencePoll, FencePollReply } from '../../lib/fence/types.ts';

const V = { namespace: 'default', volume: 'v' };

t.test('the hold covers the lease on the slowest clock, with room to freeze', async (t) => {
  for (const lease of [MIN_LEASE_MS, LEASE_MS, MAX_LEASE_MS]) {
    const slowest = (lease * (1 + CLOCK_DRIFT)) / (1 - CLOCK_DRIFT);
    t.ok(
      holdMs(lease) - slowest >= MARGIN_MS,
      `${lease}: ${(holdMs(lease) - slowest).toFixed(0)} ms of room`,
    );
  }
  t.equal(holdMs(LEASE_MS), 9_300);
  t.same([boundedLease(1), boundedLease(8_000.4), boundedLease(1e9)], [MIN_LEASE_MS, 8_000, MAX_LEASE_MS]);
});

t.test('beats: numbers grow, what is kept is bounded in number and in time', async (t) => {
  const log = new BeatLog(1_000);
  t.equal(log.send(5), 1_000);
  t.equal(log.sentAt(1_000), 5);
  t.equal(log.sentAt(999), undefined);
  for (let i = 0; i < 5_000; i++) log.send(10 + i / 1000);
  t.ok(log.size <= 512, `${log.size} are kept`);
  t.equal(log.sentAt(1_000), undefined);
  const last = log.send(20);
  log.send(20 + MAX_LEASE_MS + 1);
  t.equal(log.sentAt(last), undefined, 'older than any lease');
});

t.test('active: a renewal counts from the beat; the own limit and the grantor’s both hold', async (t) => {
  const beats = new BeatLog(1);
  const one = new ActiveFence({ epoch: 2, released: false, promotable: null }, 0, 8_000);
  t.notOk(one.mayWrite(0), 'nothing yet');
  const beat = beats.send(100);
  one.renewed(beat, 2, 8_000, beats, 5_000);
  t.equal(one.until(), 8_100);
  one.renewed(beats.send(200), 2, 60_000, beats, 300);
  t.equal(one.until(), 8_200, 'never longer than the own lease');
  one.renewed(beats.send(4_000), 2, 4_000, beats, 4_000);
  t.equal(one.until(), 8_200, 'a shorter one takes nothing back');
  one.renewed(beats.send(5_000), 1, 8_000, beats, 5_000);
  one.renewed(99_999, 2, 8_000, beats, 5_000);
  t.equal(one.until(), 8_200, 'another epoch and an unknown number count for nothing');
  one.promised('b', beats.send(6_000), 2, 8_000, beats, 6_000);
  t.equal(one.until(), 8_200, 'promises count for nothing while no set is known');
  one.release();
  t.equal(one.until(), Number.NEGATIVE_INFINITY);
});

t.test('active: all promotable nodes must have promised; the set takes newer versions only', async (t) => {
  const beats = new BeatLog(1);
  const one = new ActiveFence(
    { epoch: 1, released: false, promotable: { version: 3, nodes: ['b', 'c'] } },
    0,
    8_000,
  );
  one.promised('b', beats.send(100), 1, 8_000, beats, 100);
  t.equal(one.until(), Number.NEGATIVE_INFINITY);
  one.promised('c', beats.send(50), 1, 8_000, beats, 100);
  t.equal(one.until(), 8_050, 'the earliest of them');
  t.notOk(one.told({ version: 3, nodes: [] }));
  t.notOk(one.told({ version: 2, nodes: [] }), 'a late message with an empty set');
  t.equal(one.until(), 8_050);
  t.ok(one.told({ version: 4, nodes: ['b', 'c', 'd'] }));
  t.equal(one.until(), Number.NEGATIVE_INFINITY, 'd has not promised');
  t.ok(one.told({ version: 5, nodes: [] }));
  t.equal(one.until(), Number.POSITIVE_INFINITY, 'nobody can replace it');
  t.equal(one.remainingMs(1_000), 8_000, 'csi-node is never told more than one lease');
});

t.test('replica: bound for the hold after a promise and after a start, by its own clock', async (t) => {
  const one = new ReplicaFence({ epoch: 1, longestLeaseMs: 0 }, 0, 8_000);
  t.equal(one.boundMs(0), 9_300);
  t.same(one.consent(2, null, false, 9_299), { code: 'PROMISED', waitMs: 1 });
  t.ok(one.beat(1, 9_000));
  t.same(one.consent(2, null, false, 18_299), { code: 'PROMISED', waitMs: 1 });
  t.same(one.consent(2, null, false, 18_300), { code: 'CONSENT', waitMs: 0 });
  t.notOk(one.beat(1, 18_300), 'the older epoch gets no promise any more');
  t.ok(one.beat(2, 18_300));
  t.same(one.consent(1, null, false, 99_999), { code: 'EPOCH_OLD', waitMs: 0 });
  const long = new ReplicaFence({ epoch: 1, longestLeaseMs: 60_000 }, 0, 8_000);
  t.equal(long.boundMs(0), holdMs(60_000), 'a lease that was longer before the restart binds as long');
  t.ok(new ReplicaFence({ epoch: 1, longestLeaseMs: 4_000 }, 0, 8_000).mustNoteLease);
});

t.test('replica: a release lifts the promise to that epoch, not to a newer one', async (t) => {
  const one = new ReplicaFence({ epoch: 1, longestLeaseMs: 0 }, 0, 8_000);
  one.beat(3, 100);
  t.equal(one.consent(4, 2, false, 200).code, 'PROMISED');
  t.equal(one.consent(4, 4, false, 200).code, 'PROMISED', 'nor does one of the very epoch that is asked for');
  t.equal(one.consent(4, 3, false, 200).code, 'CONSENT');
});

t.test('replica: whom the leader insists on gives no further promise, for a while', async (t) => {
  const one = new ReplicaFence({ epoch: 1, longestLeaseMs: 0 }, 0, 8_000);
  one.beat(1, 20_000);
  t.equal(one.consent(2, null, true, 20_500).code, 'PROMISED');
  t.notOk(one.beat(1, 21_000));
  t.equal(one.consent(2, null, true, 29_300).code, 'CONSENT');
  const left = new ReplicaFence({ epoch: 1, longestLeaseMs: 0 }, 0, 8_000);
  left.consent(2, null, true, 0);
  t.notOk(left.beat(1, 9_300 + 34_999), 'long enough to fetch what the active node still has');
  t.ok(left.beat(1, 9_300 + 35_000), 'a leader that went away holds nobody up for ever');
});

t.test('the set: removals at once, additions told first', async (t) => {
  const set = { version: 5, nodes: ['b', 'c'], adding: [] };
  t.equal(nextPromotable(set, ['c', 'b'], 5), null);
  t.same(nextPromotable(set, ['b', 'd'], 5), { version: 6, nodes: ['b'], adding: [] }, 'removal first');
  const told = { version: 7, nodes: ['b'], adding: ['d'] };
  t.same(nextPromotable({ version: 6, nodes: ['b'], adding: [] }, ['b', 'd'], 6), told);
  t.equal(nextPromotable(told, ['b', 'd'], 6), null, 'the acknowledgement of version 6 is not enough');
  t.equal(nextPromotable(told, ['b', 'd'], 8), null, 'nor any other');
  t.same(nextPromotable(told, ['b', 'd'], 7), { version: 8, nodes: ['b', 'd'], adding: [] });
  t.same(nextPromotable(told, ['b'], 7), { version: 8, nodes: ['b'], adding: [] }, 'no longer wanted');
});

const record = (change: Partial<VolumeRecord> = {}): VolumeRecord => ({
  ...V,
  epoch: 1,
  activeNode: 'a',
  fencing: 'lease',
  promotable: { version: 1, nodes: ['b'], adding: [] },
  ...change,
});
const reply = (term: number, beat: number, change: object = {}): FencePollReply => ({
  node: 'a',
  term,
  beat,
  freezer: null,
  volumes: [
    {
      ...V,
      role: 'active',
      epoch: 1,
      released: false,
      fencing: 'lease',
      promotable: { version: 1, nodes: ['b'] },
      remainingMs: 0,
      ...change,
    },
  ],
});

t.test(
  'leader: renews for a beat that it heard in this term, and counts the hold from when it heard it',
  async (t) => {
    const k = new LeaderFence('k', 8_000);
    t.equal(k.poll('a', 0), null, 'it does not lead');
    k.takeOver(0, 1, 1e9, 8_000);
    t.equal(k.fenceWaitMs(V, 100), null, 'it has not read the volume');
    k.observe(record());
    t.equal(k.fenceWaitMs(V, 0), 9_300, 'an earlier leader may have granted until now');
    t.match(k.poll('a', 0), { beat: null, volumes: [{ renew: false }] });
    k.answered(reply(0, 7), 500);
    t.match(k.poll('a', 500), { beat: null }, 'a reply to another term');
    k.answered(reply(1, 8), 20_000);
    t.equal(k.fenceWaitMs(V, 25_000), 0, 'heard, but nothing granted');
    t.match(k.poll('a', 25_000), { beat: 8, volumes: [{ renew: true }] });
    t.equal(k.fenceWaitMs(V, 25_000), 4_300);
    t.match(k.mayPromote(V, 'b', 2, null, 40_000), { code: 'NO_CONSENT' });
    const yes = { node: 'b', epoch: 2, term: 1, consent: true, code: 'CONSENT', waitMs: 0, seen: 2 } as const;
    t.match(k.mayPromote(V, 'b', 2, yes, 25_000), { code: 'LEASE_GRANTED', waitMs: 4_300 });
    t.same(k.mayPromote(V, 'b', 2, yes, 29_300), { ok: true });
    t.match(k.mayPromote(V, 'b', 2, { ...yes, term: 2 }, 40_000), { code: 'NO_CONSENT' });
    t.match(k.mayPromote(V, 'c', 2, { ...yes, node: 'c' }, 40_000), { code: 'NOT_PROMOTABLE' });
    t.match(k.mayPromote(V, 'b', 1, yes, 40_000), { code: 'EPOCH_OLD' });
    t.match(k.mayPromote(V, 'b', 2, yes, 1e9), { code: 'NOT_LEADING' });
    k.stepDown();
    t.equal(k.poll('a', 100), null);
  },
);

t.test(
  'leader: an unknown earlier lease is waited for at its longest; withholding stops renewals',
  async (t) => {
    const k = new LeaderFence('k', 8_000);
    k.takeOver(0, 1, 1e9, null);
    k.observe(record());
    t.equal(k.fenceWaitMs(V, 0), holdMs(MAX_LEASE_MS));
    k.answered(reply(1, 8), 100);
    k.withhold(V, true);
    t.match(k.poll('a', 200), { volumes: [{ renew: false }] });
    k.answered(reply(1, 9, { released: true }), 300);
    t.equal(k.released(V), 1);
    t.equal(k.fenceWaitMs(V, 300), 0, 'a lease that was given back is waited for by nobody');
    k.forget(V);
    t.equal(k.fenceWaitMs(V, 300), null);
  },
);

t.test(
  'leader: what moved is activated at once by a new leader too, when the node before has given its lease back',
  async (t) => {
    const moved = record({ epoch: 2, activeNode: 'b' });
    const took = (): LeaderFence => {
      const k = new LeaderFence('k', 8_000);
      k.takeOver(0, 1, 1e9, 8_000);
      return k;
    };
    const decides = took();
    decides.observe(record());
    decides.answered(reply(1, 8, { released: true }), 100);
    decides.observe(moved);
    t.equal(decides.activationWaitMs(V, 200), 0, 'it decided itself');
    const finds = took();
    finds.observe(moved);
    t.equal(finds.activationWaitMs(V, 200), 9_100, 'another one did: who knows what was granted');
    finds.answered(reply(1, 8), 200);
    t.equal(finds.activationWaitMs(V, 200), 9_100, 'the node before still counts on its lease');
    finds.answered(reply(1, 9, { released: true, epoch: 0 }), 300);
    t.equal(finds.activationWaitMs(V, 300), 9_000, 'a lease of another epoch');
    finds.answered(reply(2, 9, { released: true }), 300);
    t.equal(finds.activationWaitMs(V, 300), 9_000, 'a reply to another term');
    finds.answered(reply(1, 9, { released: true }), 300);
    t.equal(finds.activationWaitMs(V, 300), 0);
    finds.observe(record({ epoch: 3, activeNode: 'c' }));
    t.equal(finds.activationWaitMs(V, 300), 9_000, 'it counts for that one move');
    const fails = took();
    fails.observe(record());
    fails.observe(moved);
    t.equal(fails.activationWaitMs(V, 300), 9_000, 'a failover');
  },
);

t.test('leader: a change from none to lease counts when the active node has confirmed it', async (t) => {
  const k = new LeaderFence('k', 8_000);
  k.takeOver(0, 1, 1e9, 8_000);
  k.observe(record({ fencing: 'none' }));
  t.equal(k.fenceWaitMs(V, 0), 0, 'without fencing there is nothing to wait for');
  k.answered(reply(1, 8, { fencing: 'none' }), 10_000);
  k.observe(record());
  t.ok((k.fenceWaitMs(V, 200_000) ?? 0) > 0, 'a node that died before it heard of it freezes nobody');
  k.answered(reply(1, 9), 201_000);
  t.equal(k.fenceWaitMs(V, 201_000), 9_300, 'and csi-node hears it with its next question');
  t.equal(k.fenceWaitMs(V, 210_300), 0);
});

t.test('node: csi-node is asked before a lease is given back, and its silence is no answer', async (t) => {
  const node = new NodeFence('a', 8_000, 1);
  node.open(V, 'active', 1, NO_STATE, 0);
  t.same(node.release(V, 1, 0), { refused: 'WRITER_RUNS' });
  const freezer = { possible: true, reason: 'x', cgroup: 'v2' } as const;
  node.report([], freezer, 10, 100);
  t.equal(node.announce(V, 11, 101).role, 'active');
  node.report([], freezer, 10.5, 102);
  t.same(node.release(V, 1, 103), { refused: 'WRITER_RUNS' }, 'a report from before the announcement');
  node.report([], freezer, 12, 200);
  t.same(node.release(V, 1, 201 + REPORT_FRESH_MS), { refused: 'WRITER_RUNS' }, 'too old');
  t.match(node.freezer(201 + REPORT_FRESH_MS), { possible: false, reason: /does not report/ });
  const released = node.release(V, 1, 300);
  t.match(released, { save: { state: { released: 1 } } });
  const again = new NodeFence('a', 8_000, 1);
  again.open(V, 'active', 1, (released as { save: { state: typeof NO_STATE } }).save.state, 0);
  const poll: FencePoll = {
    controller: 'k',
    term: 1,
    leaseMs: 8_000,
    beat: null,
    volumes: [{ ...V, epoch: 1, renew: false, fencing: 'lease', promotable: { version: 1, nodes: [] } }],
  };
  const { reply: first } = again.poll(poll, 10);
  again.poll({ ...poll, beat: first.beat, volumes: [{ ...poll.volumes[0]!, renew: true }] }, 20);
  t.match(again.lease(V, 20), { released: true, remainingMs: 0 }, 'for good, also after a restart');
});

t.test('node: without fencing a writer runs without end, until the mode or the epoch changes', async (t) => {
  const node = new NodeFence('a', 8_000, 1);
  node.open(V, 'active', 1, NO_STATE, 0);
  t.equal(node.lease(V, 0).remainingMs, 0, 'what it was never told is a lease');
  t.match(node.told(V, 1, { version: 1, nodes: ['b'] }, 'none'), { state: { fencing: 'none' } });
  t.equal(node.lease(V, 0).remainingMs, null);
  t.same(node.peers(), []);
  node.changed(V, 'active', 2, 10);
  t.match(node.lease(V, 10), { epoch: 2, fencing: 'lease', remainingMs: 0 });
  node.changed(V, 'replica', 3, 20);
  t.match(node.lease(V, 20), { role: 'replica', epoch: 3, remainingMs: 0 });
});

t.test(
  'node: without fencing a writer is started only where the leader has lately named the node active',
  async (t) => {
    const node = new NodeFence('a', 8_000, 1);
    node.open(V, 'active', 1, NO_STATE, 0);
    const poll = (epoch: number, nodes: string[]): FencePoll => ({
      controller: 'k',
      term: 1,
      leaseMs: 8_000,
      beat: null,
      volumes: [{ ...V, epoch, renew: false, fencing: 'none', promotable: { version: epoch, nodes } }],
    });
    node.poll(poll(1, ['b']), 100);
    t.equal(node.announce(V, 1, 100).remainingMs, null);
    // It has been replaced meanwhile and nobody tells it: its polls name the volume no more.
    node.poll({ ...poll(1, ['b']), volumes: [] }, 100 + HEARD_MS);
    t.equal(node.announce(V, 2, 101 + HEARD_MS).remainingMs, 0);
    t.equal(node.lease(V, 101 + HEARD_MS).remainingMs, null, 'one that runs is not stopped');
    node.poll(poll(2, ['b']), 200 + HEARD_MS);
    t.equal(node.announce(V, 3, 200 + HEARD_MS).remainingMs, 0, 'another epoch says nothing');
    const state = node.state(V) as typeof NO_STATE;
    const again = new NodeFence('a', 8_000, 1);
    again.open(V, 'active', 1, state, 0);
    t.equal(again.announce(V, 4, 10).remainingMs, 0, 'nor what was heard before a restart');
    again.poll(poll(1, ['b']), 20);
    t.equal(again.announce(V, 5, 20).remainingMs, null);
    const single = new NodeFence('a', 8_000, 1);
    single.open(V, 'active', 1, NO_STATE, 0);
    single.told(V, 1, { version: 1, nodes: [] }, 'none');
    t.equal(single.announce(V, 6, 0).remainingMs, null, 'where nobody can be promoted nobody is asked');
  },
);
