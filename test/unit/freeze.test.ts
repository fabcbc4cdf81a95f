/** csi-node's decision and its own timer, without any cgroup; names of cgroups. */
import t from 'tap';
import {
  type FreezeError,
  findPodCgroup,
  firstIsOfPod,
  ownCgroup,
  podCgroupPaths,
  probeFreezer,
} from '../../csi/freeze/cgroup.ts';
import { type Freezable, Freezer, type WriterName } from '../../csi/freeze/freezer.ts';
import { WriterFence } from '../../csi/freeze/writer-fence.ts';
import type { Logger, VolumeName } from '../../lib/core/parts.ts';
import type { WriterLease } from '../../lib/fence/types.ts';

const UID = '0f2d9a3c-5b1e-4c7a-9d2f-8e6b7a1c3d4e';
const quiet: Logger = { debug() {}, info() {}, warn() {}, error() {}, child: () => quiet };
const name = { namespace: 'default', volume: 'v' };
const pod: WriterName = { ...name, podUid: UID };
const lease = (
  epoch: number,
  remainingMs: number | null,
  change: Partial<WriterLease> = {},
): WriterLease => ({
  ...name,
  role: 'active',
  epoch,
  fencing: 'lease',
  released: false,
  remainingMs,
  ...change,
});

t.test('every name that kubelet gives to a pod of each QoS class is looked for', async (t) => {
  const paths = podCgroupPaths(UID);
  const _ = UID.replaceAll('-', '_');
  for (const path of [
    `kubepods/pod${UID}`,
    `kubepods/burstable/pod${UID}`,
    `kubepods/besteffort/pod${UID}`,
    `kubepods.slice/kubepods-pod${_}.slice`,
    `kubepods.slice/kubepods-burstable.slice/kubepods-burstable-pod${_}.slice`,
    `kubepods.slice/kubepods-besteffort.slice/kubepods-besteffort-pod${_}.slice`,
    `kubelet/kubepods/burstable/pod${UID}`,
    `kubelet.slice/kubelet-kubepods.slice/kubelet-kubepods-burstable.slice/kubelet-kubepods-burstable-pod${_}.slice`,
  ])
    t.ok(paths.includes(path), path);
  t.ok(podCgroupPaths('0123456789abcdef0123456789abcdef').length > 0, 'a static pod');
});

t.test('F7: what is no pod UID never becomes a path', async (t) => {
  for (const bad of ['', '..', '../../system.slice', `${UID}/../..`, UID.toUpperCase(), `${UID}x`, 'pod'])
    t.throws(() => podCgroupPaths(bad), /is no pod UID/, bad);
});

t.test('the own cgroup is read for either version', async (t) => {
  const text = '9:name=systemd:/\n6:cpu,freezer:/kubepods/podx/a:b\n0::/unified/me\n';
  t.equal(ownCgroup('v1', text), '/kubepods/podx/a:b');
  t.equal(ownCgroup('v2', text), '/unified/me');
  t.equal(ownCgroup('v2', '1:freezer:/'), null);
});

t.test('a node in a namespace of its own (kind) is not taken for a pod that sees only itself', async (t) => {
  const own = '6:freezer:/kubepods/burstable/podx/a\n0::/kubepods/burstable/podx/a\n';
  t.notOk(firstIsOfPod('6:freezer:/\n0::/\n', own), 'cgroup v1, hostPID');
  t.notOk(firstIsOfPod('0::/../../../init.scope\n', '0::/\n'), 'cgroup v2, hostPID');
  t.ok(firstIsOfPod(own, own), 'cgroup v1, the first process is csi-node');
  t.ok(firstIsOfPod(own.replace('/a\n', '/pause\n'), own), 'cgroup v1, it is the pause of its pod');
  t.ok(firstIsOfPod('0::/\n', '0::/\n'), 'cgroup v2, the first process is csi-node');
});

t.test('a node without a freezer says so before anything happens', async (t) => {
  const base = t.testdir({ freezer: {} });
  t.match(probeFreezer(base), { possible: false, reason: /no cgroup hierarchy/, cgroup: null });
});

t.test('a plain folder or a link with the name of a pod is refused', async (t) => {
  const root = t.testdir({
    kubepods: {
      [`pod${UID}`]: {},
      burstable: { [`pod${UID.replace('0', '1')}`]: t.fixture('symlink', '/tmp') },
    },
  });
  const fault = (uid: string): string | null => {
    try {
      findPodCgroup({ version: 'v2', root }, uid, null);
      return null;
    } catch (error) {
      return (error as FreezeError).fault;
    }
  };
  t.equal(fault(UID), 'NOT_A_POD');
  t.equal(fault(UID.replace('0', '1')), 'NOT_A_POD');
  t.equal(fault(UID.replace('0', '2')), 'NOT_FOUND');
});

t.test(
  'decision: a lease counts from the question, is never shortened, and ends with its epoch',
  async (t) => {
    const one = new WriterFence(3, Number.NEGATIVE_INFINITY);
    t.equal(one.decide(0), 'freeze', 'nothing known: it stands still');
    one.answer(lease(3, 5000), 1000);
    t.equal(one.decide(5999), 'run');
    t.equal(one.decide(6000), 'freeze');
    one.answer(lease(3, 0), 2000);
    t.equal(one.end, 6000, 'an agent that restarted and holds no lease takes nothing back');
    one.answer(lease(2, 90_000), 2000);
    t.equal(one.end, 6000, 'an older epoch gives nothing');
    one.answer({ ...lease(0, 0), role: 'none' }, 2000);
    one.answer(lease(3, 90_000, { role: 'replica' }), 2000);
    t.equal(one.end, 6000, 'nor does a node that is not active');
    one.answer(lease(3, 0, { released: true }), 2500);
    t.equal(one.decide(2500), 'freeze', 'a released lease is over at once');
    one.answer(lease(4, 9000, { role: 'replica' }), 2600);
    t.equal(one.decide(2600), 'kill');
    one.answer(lease(3, 9000), 2700);
    t.equal(one.decide(2700), 'kill', 'for good');
  },
);

t.test('decision: without fencing it runs without end, until an answer says otherwise', async (t) => {
  const one = new WriterFence(1, 0);
  one.answer(lease(1, null, { fencing: 'none' }), 0);
  t.equal(one.decide(1e12), 'run');
  one.answer(lease(1, 4000), 100);
  t.equal(one.decide(4100), 'freeze');
});

/** A world with a clock of its own: timers fire in order when it is moved on. */
class World {
  at = 0;
  #timers: { at: number; fn: () => void; gone: boolean }[] = [];
  readonly orders: string[] = [];
  isFrozen = false;
  gone = false;
  stuck = false;
  killable = true;
  answer: (asked: VolumeName[]) => Promise<WriterLease[]> = async () => [];
  questions = 0;
  readonly freezer: Freezer;
  constructor() {
    const world = this;
    const cgroup: Freezable = {
      path: '/fake',
      get exists() {
        return !world.gone;
      },
      frozen: () => world.isFrozen,
      async freeze() {
        if (world.stuck) throw new Error('it waits for a disk');
        world.orders.push(`freeze ${world.at}`);
        world.isFrozen = true;
        return 0;
      },
      async thaw() {
        world.orders.push(`thaw ${world.at}`);
        world.isFrozen = false;
      },
      async kill() {
        if (!world.isFrozen) throw new Error('killed while it ran');
        world.orders.push(`kill ${world.at}`);
        world.isFrozen = false;
        world.gone = true;
      },
    };
    this.freezer = new Freezer({
      clock: () => this.at,
      setTimeout: (fn, ms) => {
        const timer = { at: this.at + ms, fn, gone: false };
        this.#timers.push(timer);
        return { cancel: () => Object.assign(timer, { gone: true }) };
      },
      ask: (volumes) => {
        this.questions++;
        return this.answer(volumes);
      },
      makeHarmless: async () => {
        this.orders.push(`harmless ${this.at}${this.isFrozen ? ' frozen' : ' RUNNING'}`);
        if (!this.killable) throw new Error('the mount is busy');
      },
      find: () => cgroup,
      log: quiet,
    });
  }
  /** Lets pending promises settle, then moves the clock on in steps. */
  async until(at: number): Promise<void> {
    for (;;) {
      for (let i = 0; i < 20; i++) await Promise.resolve();
      const due = this.#timers.filter((x) => !x.gone && x.at <= at).sort((a, b) => a.at - b.at)[0];
      if (!due) break;
      this.at = Math.max(this.at, due.at);
      due.gone = true;
      due.fn();
    }
    this.at = at;
    for (let i = 0; i < 20; i++) await Promise.resolve();
  }
}

for (const [what, answer] of [
  ['hangs', () => new Promise<never>(() => {})],
  ['fails', () => Promise.reject(new Error('ECONNREFUSED'))],
  [
    'throws',
    () => {
      throw new Error('broken');
    },
  ],
  ['knows nothing', async () => []],
] as const)
  t.test(`an agent that ${what}: the writer is frozen at the last known end all the same`, async (t) => {
    const w = new World();
    w.answer = answer;
    w.freezer.add(pod, 1, { lease: lease(1, 5000), askedAt: 0 });
    await w.until(4999);
    t.same(w.orders, []);
    await w.until(5100);
    t.same(w.orders, ['freeze 5000']);
    await w.until(20_000);
    t.same(w.orders, ['freeze 5000'], 'and stays so');
    t.ok(w.questions > 5, `it goes on asking: ${w.questions} times`);
    await w.freezer.stop();
  });

t.test('a renewal thaws; a late answer counts from its question', async (t) => {
  const w = new World();
  let remaining = 0;
  w.answer = async () => [lease(1, remaining)];
  w.freezer.add(pod, 1, { lease: lease(1, 3000), askedAt: 0 });
  await w.until(5500);
  t.same(w.orders, ['freeze 3000']);
  remaining = 4000;
  await w.until(6500);
  t.same(w.orders, ['freeze 3000', 'thaw 6000']);
  // From now on answers take 5 s: they are worth nothing when they come.
  w.answer = (asked) => {
    void asked;
    const from = w.at;
    return new Promise((resolve) => {
      const look = (): void => {
        if (w.at >= from + 5000) resolve([lease(1, 4000)]);
        else void Promise.resolve().then(() => later.push(look));
      };
      const later: (() => void)[] = [];
      waiting.push(() => {
        for (const fn of later.splice(0)) fn();
      });
      look();
    });
  };
  const waiting: (() => void)[] = [];
  for (let at = 7000; at <= 16_000; at += 500) {
    await w.until(at);
    for (const fn of waiting) fn();
  }
  t.same(w.orders.slice(0, 3), ['freeze 3000', 'thaw 6000', 'freeze 10000']);
  t.equal(w.orders.length, 3, 'no answer from before its end thaws it');
  await w.freezer.stop();
});

t.test(
  'a newer epoch: frozen, made harmless, killed; a mount that resists delays the kill, never the freeze',
  async (t) => {
    const w = new World();
    w.answer = async () => [lease(2, 0, { role: 'replica' })];
    w.killable = false;
    w.freezer.add(pod, 1, { lease: lease(1, 8000), askedAt: 0 });
    await w.until(1500);
    t.equal(w.orders[0], 'freeze 0', 'at once, though the lease has not ended');
    t.ok(w.orders.includes('harmless 0 frozen'));
    t.notOk(w.orders.some((order) => order.startsWith('kill')));
    t.match(w.freezer.status()[0], { state: 'frozen', problem: 'the mount is busy' });
    w.killable = true;
    await w.until(2000);
    t.match(w.orders.at(-1), /^kill/);
    t.notOk(w.orders.some((order) => /RUNNING|thaw/.test(order)));
    t.same(w.freezer.volumes(), [], 'no writer is left');
    await w.until(9000);
    t.equal(w.orders.filter((order) => order.startsWith('kill')).length, 1);
    await w.freezer.stop();
  },
);

t.test('taken up anew: it first looks whether the lease ran out', async (t) => {
  const over = new World();
  over.answer = async () => [lease(1, 0)];
  over.freezer.add(pod, 1, null);
  await over.until(600);
  t.same(over.orders, ['freeze 500']);
  const silent = new World();
  silent.answer = () => new Promise(() => {});
  silent.freezer.add(pod, 1, null);
  await silent.until(600);
  t.same(silent.orders, ['freeze 500'], 'no answer is no lease');
  const good = new World();
  good.answer = async () => [lease(1, 4000)];
  good.isFrozen = true;
  good.freezer.add(pod, 1, null);
  await good.until(900);
  t.same(good.orders, ['thaw 0'], 'what the process before had frozen is thawed when the lease is good');
  for (const w of [over, silent, good]) await w.freezer.stop();
});

t.test('a pod that does not freeze is a problem that is told, and tried again', async (t) => {
  const w = new World();
  w.stuck = true;
  w.freezer.add(pod, 1, { lease: lease(1, 100), askedAt: 0 });
  await w.until(1000);
  t.match(w.freezer.status()[0], { state: 'running', problem: 'it waits for a disk', remainingMs: 0 });
  w.stuck = false;
  await w.until(1200);
  t.match(w.freezer.status()[0], { state: 'frozen', problem: null });
  await w.freezer.stop();
});
