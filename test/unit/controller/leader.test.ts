import t from 'tap';
import { KubeError } from '../../../controller/cluster/errors.ts';
import { createLeaderElection } from '../../../controller/cluster/leader.ts';
import { LEASES, type Lease } from '../../../controller/cluster/resources.ts';
import type { Clock, Kube, LeaderElection } from '../../../controller/cluster/types.ts';
import { holdMs, MARGIN_MS } from '../../../lib/fence/timing.ts';
import { FakeClock, FakeCluster, silent } from './fake.ts';

const LEASE = { namespace: 'system', name: 'controller' };
const D = 15_000;

function elector(
  cluster: FakeCluster,
  clock: Clock,
  identity: string,
  kube: Kube = cluster.kube,
): LeaderElection {
  return createLeaderElection({
    kube,
    lease: LEASE,
    identity,
    clock,
    logger: silent,
    durationMs: D,
    renewMs: 2000,
    random: () => 0.5,
  });
}
const lease = (cluster: FakeCluster): Lease =>
  cluster.objects.get(`leases/${LEASE.namespace}/${LEASE.name}`) as Lease;

t.test(
  'without a Lease one of two leads, after the time that a leader of a deleted one may have left',
  async (t) => {
    const clock = new FakeClock();
    const cluster = new FakeCluster();
    const [a, b] = [elector(cluster, clock, 'a'), elector(cluster, clock, 'b')];
    a.start();
    b.start();
    await clock.advance(holdMs(D) - 1);
    t.notOk(a.leads() || b.leads());
    await clock.advance(4000);
    t.equal([a, b].filter((one) => one.leads()).length, 1);
    const first = a.leads() ? a : b;
    t.equal(first.term(), lease(cluster).spec?.leaseTransitions);
    t.equal(a.holder(), first.identity);
    t.equal(b.holder(), first.identity);
    await clock.advance(60_000);
    t.ok(first.leads(), 'and stays so');
    await a.stop();
    await b.stop();
    t.equal(clock.waiting, 0, 'no timer is left');
  },
);

t.test(
  'the Lease that the chart makes is led by at once, with a number above those of an earlier installation',
  async (t) => {
    const clock = new FakeClock();
    const cluster = new FakeCluster();
    await cluster.kube.create(LEASES, { metadata: { ...LEASE } });
    const [a, b] = [elector(cluster, clock, 'a'), elector(cluster, clock, 'b')];
    a.start();
    b.start();
    await clock.advance(0);
    t.equal([a, b].filter((one) => one.leads()).length, 1);
    t.equal(lease(cluster).spec?.leaseTransitions, Math.floor(clock.now() / 60_000));
    await a.stop();
    await b.stop();
  },
);

t.test('who stops gives the Lease back and leads no more; the next one need not wait', async (t) => {
  const clock = new FakeClock();
  const cluster = new FakeCluster();
  const a = elector(cluster, clock, 'a');
  const told: boolean[] = [];
  a.onChange((leads) => told.push(leads));
  a.onChange(() => {
    throw new Error('a listener that fails concerns nobody');
  });
  a.start();
  await clock.advance(20_000);
  t.ok(a.leads());
  const term = a.term() as number;
  await a.stop();
  t.notOk(a.leads());
  t.equal(a.term(), null);
  t.strictSame(told, [true, false]);
  t.equal(lease(cluster).spec?.holderIdentity, '');
  const b = elector(cluster, clock, 'b');
  b.start();
  await clock.advance(0);
  t.ok(b.leads());
  t.equal(b.term(), term + 1, 'the number of the leadership grows');
  await b.stop();
});

t.test('cut off from the API server it leads no more before another may, and hears of it', async (t) => {
  const clock = new FakeClock();
  const cluster = new FakeCluster();
  const a = elector(cluster, clock, 'a');
  a.start();
  await clock.advance(20_000);
  let ended = Number.NaN;
  a.onChange((leads) => {
    if (!leads) ended = clock.boot();
  });
  const renewed = Date.parse(lease(cluster).spec?.renewTime as string) - clock.now() + clock.boot();
  cluster.before = () => {
    throw new KubeError('Unreachable', 'cut');
  };
  await clock.advance(D);
  t.notOk(a.leads());
  t.ok(ended <= renewed + D - MARGIN_MS + 1, `${ended} after ${renewed}`);
  t.equal(a.leadsForMs(), 0);
  t.match(a.lastError, /cut/);
  cluster.before = () => {};
  const term = lease(cluster).spec?.leaseTransitions;
  await clock.advance(3000);
  t.ok(a.leads(), 'nobody came meanwhile: it goes on');
  t.equal(a.term(), term, 'with the same number');
  await a.stop();
});

t.test('a process that was stopped knows at once that its time is over', async (t) => {
  const clock = new FakeClock();
  const cluster = new FakeCluster();
  const a = elector(cluster, clock, 'a');
  a.start();
  await clock.advance(20_000);
  t.ok(a.leads());
  clock.skip(D);
  t.notOk(a.leads(), 'before any timer has run');
  t.equal(a.term(), null);
  await a.stop();
});

t.test('a renewal counts from when it was sent, however late its answer is', async (t) => {
  const clock = new FakeClock();
  const cluster = new FakeCluster();
  const a = elector(cluster, clock, 'a');
  a.start();
  await clock.advance(20_000);
  cluster.after = () => new Promise((resolve) => clock.setTimeout(resolve, 4000));
  await clock.advance(5900);
  t.ok(a.leadsForMs() <= D - MARGIN_MS - 1800, `${a.leadsForMs()}`);
  const stopping = a.stop();
  t.notOk(a.leads(), 'at once, though an answer is still under way');
  await clock.advance(10_000);
  await stopping;
  t.equal(lease(cluster).spec?.holderIdentity, '');
});

t.test('a write whose answer was lost is found, and not taken for another leader', async (t) => {
  const clock = new FakeClock();
  const cluster = new FakeCluster();
  const a = elector(cluster, clock, 'a');
  a.start();
  let lost = 0;
  cluster.after = (verb) => {
    if (verb === 'create' || verb === 'replace') {
      if (lost++ % 2 === 0) throw new KubeError('Timeout', 'lost');
    }
  };
  await clock.advance(60_000);
  t.ok(lost > 5);
  t.ok(a.leads());
  t.equal(a.holder(), 'a');
  await a.stop();
});

t.test('when the Lease is deleted its leader makes it anew; no number comes twice', async (t) => {
  const clock = new FakeClock();
  const cluster = new FakeCluster();
  const [a, b] = [elector(cluster, clock, 'a'), elector(cluster, clock, 'b')];
  a.start();
  await clock.advance(20_000);
  b.start();
  await clock.advance(5000);
  const term = a.term() as number;
  cluster.objects.clear();
  await clock.advance(2500);
  t.ok(a.leads());
  t.notOk(b.leads());
  t.equal(lease(cluster).spec?.holderIdentity, 'a');
  t.equal(a.term(), term);
  await a.stop();
  cluster.objects.clear();
  await clock.advance(holdMs(D) + 3000);
  t.ok(b.leads());
  t.ok((b.term() as number) > term);
  await b.stop();
});

t.test('somebody else in the Lease ends it at once, whatever the own clock says', async (t) => {
  const clock = new FakeClock();
  const cluster = new FakeCluster();
  const a = elector(cluster, clock, 'a');
  a.start();
  await clock.advance(20_000);
  const { metadata, spec } = lease(cluster);
  await cluster.kube.replace(LEASES, { metadata, spec: { ...spec, holderIdentity: 'thief' } });
  await clock.advance(2500);
  t.notOk(a.leads());
  t.equal(a.holder(), 'thief');
  await clock.advance(holdMs(D) - 4000);
  t.notOk(a.leads());
  await clock.advance(6000);
  t.ok(a.leads(), 'silent for long enough');
  await a.stop();
});

/** Small, seeded random numbers (mulberry32). */
function random(seed: number): () => number {
  let state = seed;
  return () => {
    state = (state + 0x6d2b79f5) | 0;
    let x = Math.imul(state ^ (state >>> 15), 1 | state);
    x = (x + Math.imul(x ^ (x >>> 7), 61 | x)) ^ x;
    return ((x ^ (x >>> 14)) >>> 0) / 4294967296;
  };
}

/** A process with a clock that is off by up to 2 %, which can be stopped (SIGSTOP) with all that it waits for. */
class Machine implements Clock {
  private readonly base: FakeClock;
  private readonly rate: number;
  private held: (() => void)[] | null = null;
  constructor(base: FakeClock, rate: number) {
    this.base = base;
    this.rate = rate;
  }
  boot(): number {
    return this.base.boot() * this.rate + 5000;
  }
  now(): number {
    return this.base.now();
  }
  setTimeout(fn: () => void, ms: number): { cancel(): void } {
    let over = false;
    const timer = this.base.setTimeout(() => this.run(() => !over && fn()), ms / this.rate);
    return {
      cancel: () => {
        over = true;
        timer.cancel();
      },
    };
  }
  run(fn: () => void): void {
    if (this.held) this.held.push(fn);
    else fn();
  }
  pause(): void {
    this.held ??= [];
  }
  goOn(): void {
    const held = this.held ?? [];
    this.held = null;
    for (const fn of held) fn();
  }
}

t.test(
  'never two leaders: lost and late messages, drifting clocks, stopped processes, deleted Leases',
  async (t) => {
    let changes = 0;
    let paused = 0;
    for (let seed = 1; seed <= 60; seed++) {
      const chance = random(seed);
      const base = new FakeClock();
      const cluster = new FakeCluster();
      const machines = [0.98, 1.02, 1].map((rate) => new Machine(base, rate));
      const electors = machines.map((machine, i) => {
        const wait = (ms: number): Promise<void> =>
          new Promise((resolve) => base.setTimeout(() => machine.run(resolve), ms));
        // Each process has a network of its own in front of the same cluster.
        const own = new FakeCluster();
        own.before = async () => {
          await wait(chance() * 300);
          if (chance() < 0.08) throw new KubeError('Unreachable', 'lost on the way');
          if (chance() < 0.05) await wait(chance() * 20_000);
        };
        own.after = async () => {
          await wait(chance() < 0.1 ? chance() * 20_000 : chance() * 300);
          if (chance() < 0.08) throw new KubeError('Timeout', 'the answer was lost');
        };
        Object.defineProperty(own, 'objects', { value: cluster.objects });
        Object.defineProperty(own, 'version', {
          get: () => cluster.version,
          set: (value: number) => {
            cluster.version = value;
          },
        });
        const election = elector(own, machine, `p${i}`);
        election.onChange((leads) => leads && changes++);
        election.start();
        return election;
      });
      const terms = new Map<number, string>();
      for (let step = 0; step < 600; step++) {
        await base.advance(200 + chance() * 300);
        const leading = electors.filter((one) => one.leads());
        if (leading.length > 1) t.fail(`seed ${seed}, step ${step}: ${leading.map((one) => one.identity)}`);
        for (const one of leading) {
          const holder = terms.get(one.term() as number);
          if (holder !== undefined && holder !== one.identity) t.fail(`seed ${seed}: a number came twice`);
          terms.set(one.term() as number, one.identity);
        }
        const machine = machines[Math.floor(chance() * 3)] as Machine;
        if (chance() < 0.01) {
          machine.pause();
          paused++;
        } else if (chance() < 0.05) machine.goOn();
        // An operator who deletes the Lease: never before the last leader has begun to hold it.
        if (chance() < 0.002 && leading.length === 1) cluster.objects.clear();
      }
      for (const machine of machines) machine.goOn();
      const stopped = Promise.all(electors.map((one) => one.stop()));
      await base.advance(100_000);
      await stopped;
    }
    t.ok(changes > 150, `${changes} leaderships`);
    t.ok(paused > 200, `${paused} stops`);
  },
);
