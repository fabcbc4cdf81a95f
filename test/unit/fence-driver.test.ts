/** The leader's side of fencing at a take-over: what a leader before it may have granted is waited for, and written down. */
import t from 'tap';
import type { Agents } from '../../controller/act/agents.ts';
import { FENCE_LEASE_KEY, FenceDriver } from '../../controller/act/fence.ts';
import type { Kube, LeaderElection, SimpleVolume } from '../../controller/cluster/types.ts';
import { holdMs, MAX_LEASE_MS } from '../../lib/fence/timing.ts';
import { lines, ManualClock } from './remote.ts';

const NAME = { namespace: 'default', volume: 'pv-1' };
const OBJECT = {
  metadata: { namespace: 'default', name: 'world' },
  spec: { claimName: 'world', volumeName: 'pv-1', storageClassName: 'x', pool: 'p' },
  status: { epoch: 1, activeNode: 'a', promotable: { version: 2, nodes: ['b'] } },
} as SimpleVolume;

/** A leader of 8 s leases that takes over from whoever wrote `annotation` into the Lease. */
async function takesOver(annotation: string | undefined, objects: readonly SimpleVolume[] = [OBJECT]) {
  const clock = new ManualClock();
  const annotations: Record<string, string> =
    annotation === undefined ? {} : { [FENCE_LEASE_KEY]: annotation };
  const noted: string[] = [];
  const kube = {
    get: async () => ({ metadata: { name: 'lease', annotations: { ...annotations } } }),
    merge: async (_: unknown, __: unknown, patch: { metadata: { annotations: Record<string, string> } }) => {
      Object.assign(annotations, patch.metadata.annotations);
      noted.push(annotations[FENCE_LEASE_KEY] as string);
      return {};
    },
    async *list() {
      yield* objects;
    },
  } as unknown as Kube;
  const election = { identity: 'k', term: () => 7, leadsForMs: () => 15_000 } as unknown as LeaderElection;
  const driver = new FenceDriver({
    kube,
    agents: { all: () => [] } as unknown as Agents,
    election,
    lease: { namespace: 'system', name: 'lease' },
    clock,
    logger: lines(),
    leaseMs: 8000,
    onNews() {},
    onRead() {},
  });
  driver.start();
  await clock.pass(0);
  return { clock, driver, noted, waits: () => driver.state('p', NAME).fenceWaitMs };
}

t.test('B21: a Lease that does not say what was granted is waited for at its longest: 66.5 s', async (t) => {
  const { clock, driver, noted, waits } = await takesOver(undefined);
  t.ok(driver.ready(), 'it leads: watches, moves and full syncs go on meanwhile');
  t.equal(waits(), holdMs(MAX_LEASE_MS));
  t.equal(holdMs(MAX_LEASE_MS), 66_500);
  t.same(noted, [String(MAX_LEASE_MS)], 'who leads next in that time knows it too');
  await clock.pass(66_000);
  t.equal(waits(), 500);
  await clock.pass(1500);
  t.equal(waits(), 0);
  t.same(noted, [String(MAX_LEASE_MS), '8000'], 'then its own leases are all there are');
  driver.stop();
});

t.test(
  'a new installation, where no volume can have been granted to anybody, waits 25.8 s at most',
  async (t) => {
    const { clock, driver, noted, waits } = await takesOver(undefined, []);
    t.equal(noted.at(-1), '23000', 'a lease at the end of what another leader may have left of its time');
    driver.observe(OBJECT, null);
    t.equal(waits(), holdMs(23_000));
    await clock.pass(26_000);
    t.equal(waits(), 0);
    t.equal(noted.at(-1), '8000');
    driver.stop();
  },
);

t.test('B21: what the leader before has written down is waited for, a shorter one as the own', async (t) => {
  for (const [said, wait] of [
    ['20000', holdMs(20_000)],
    ['4000', holdMs(8000)],
    ['8000', holdMs(8000)],
    ['nonsense', 66_500],
    ['-5', 66_500],
    ['', 66_500],
  ] as const) {
    const { clock, driver, noted, waits } = await takesOver(said);
    t.equal(waits(), wait, JSON.stringify(said));
    t.ok(Number(noted.at(-1) ?? said) >= 8000, 'never less than what may be granted');
    await clock.pass(wait + 2000);
    t.equal(waits(), 0);
    driver.stop();
  }
});
