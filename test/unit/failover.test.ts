import fc from 'fast-check';
import t from 'tap';
import {
  type DecisionCode,
  decideFailover,
  type FailoverAction,
  type FailoverInput,
  type FailoverNode,
  type FailoverReplica,
  type FailoverVolume,
  type FailoverWorkload,
  type ReplicaCode,
  type ReplicaState,
} from '../../controller/plan/failover.ts';
import { copyState } from '../../lib/core/replica-state.ts';

// Node a was active in epoch 1 and died 100 s ago; b and c hold copies that were complete a second ago.
const NOW = 1_000_000;

function node(name: string, change: Partial<FailoverNode> = {}): FailoverNode {
  return { name, ready: true, schedulable: true, reachable: true, fit: { ok: true }, ...change };
}
const dead = (name: string): FailoverNode => node(name, { ready: false, reachable: false });

function replica(name: string, change: Partial<FailoverReplica> = {}): FailoverReplica {
  return {
    node: name,
    generation: '1-40',
    epoch: 1,
    state: 'idle',
    freshAgeMs: 900,
    reportAgeMs: 100,
    reachable: true,
    inUse: false,
    ...change,
  };
}

interface Change {
  volume?: Partial<FailoverVolume>;
  workload?: Partial<FailoverWorkload>;
  nodes?: FailoverNode[];
  replicas?: FailoverReplica[];
  force?: FailoverInput['force'];
}

function input(change: Change = {}): FailoverInput {
  return {
    now: NOW,
    volume: {
      namespace: 'default',
      name: 'world',
      epoch: 1,
      activeNode: 'a',
      failoverEnabled: true,
      gracePeriodMs: 60_000,
      maxStalenessMs: 120_000,
      nodePriority: [],
      fencing: 'lease',
      leaseEnded: true,
      ...change.volume,
    },
    workload: { healthyPod: false, withoutSince: NOW - 100_000, cause: 'no-pod', ...change.workload },
    nodes: change.nodes ?? [dead('a'), node('b'), node('c')],
    replicas: change.replicas ?? [replica('b'), replica('c')],
    force: change.force ?? null,
  };
}

interface Row {
  name: string;
  when: Change;
  action: FailoverAction;
  code?: DecisionCode;
  target?: string;
  catchUpFrom?: string;
  loss?: { atMostMs: number | null; generation: string };
  /** node -> code that must be among its reasons */
  says?: Record<string, ReplicaCode>;
  because?: RegExp;
}

const running: Partial<FailoverWorkload> = { healthyPod: true, withoutSince: null };
const alive = [node('a'), node('b'), node('c')];
const cordoned = [node('a', { schedulable: false }), node('b'), node('c')];
const force = { node: 'b', reason: 'a is burnt', by: 'ann' };

const rows: Row[] = [
  // The ordinary case
  {
    name: 'promotes a fresh replica after the grace period, with the loss named',
    when: {},
    action: 'promote',
    code: 'NODE_LOST',
    target: 'b',
    loss: { atMostMs: 1000, generation: '1-40' },
    because: /b is promoted with generation 1-40, epoch 2; at most the last 1\.0 s are lost/,
  },
  { name: 'is opt-in', when: { volume: { failoverEnabled: false } }, action: 'none', code: 'DISABLED' },
  {
    name: 'has nothing to do without an active node',
    when: { volume: { activeNode: null } },
    action: 'none',
    code: 'NO_ACTIVE_NODE',
  },
  {
    name: 'does nothing while a healthy pod runs',
    when: { workload: running, nodes: alive },
    action: 'none',
    code: 'HEALTHY',
  },
  {
    name: 'waits for the grace period',
    when: { workload: { withoutSince: NOW - 59_999 } },
    action: 'wait',
    code: 'GRACE',
  },
  {
    name: 'promotes at exactly the end of the grace period',
    when: { workload: { withoutSince: NOW - 60_000 } },
    action: 'promote',
  },
  {
    name: 'starts the grace period when the loss was never seen before',
    when: { workload: { withoutSince: null } },
    action: 'wait',
    code: 'GRACE',
  },
  {
    name: 'treats a clock that went backwards as a grace period that just began',
    when: { workload: { withoutSince: NOW + 5000 } },
    action: 'wait',
    code: 'GRACE',
  },
  {
    name: 'waits for the end of the lease',
    when: { volume: { leaseEnded: false } },
    action: 'wait',
    code: 'FENCE_PENDING',
    because: /b would be promoted/,
  },
  {
    name: 'D32: without a lease waits for NotReady, even when the agent is gone',
    when: {
      volume: { fencing: 'none', leaseEnded: false },
      nodes: [node('a', { reachable: false }), node('b'), node('c')],
      workload: { cause: 'unhealthy' },
    },
    action: 'wait',
    code: 'FENCE_PENDING',
  },
  {
    name: 'without a lease NotReady is enough',
    when: { volume: { fencing: 'none', leaseEnded: false } },
    action: 'promote',
    target: 'b',
  },
  {
    name: 'an active node that the cluster no longer knows is lost',
    when: { nodes: [node('b'), node('c')] },
    action: 'promote',
    code: 'NODE_LOST',
    target: 'b',
  },
  {
    name: 'D32: with a lease an unreachable node need not be NotReady',
    when: {
      nodes: [node('a', { reachable: false }), node('b'), node('c')],
      workload: { cause: 'unhealthy' },
    },
    action: 'promote',
    code: 'WORKLOAD_LOST',
    target: 'b',
  },

  // Freshness
  {
    name: 'A1: a replica that missed a batch is not fresh because of a later one: freshness is what it says of itself',
    when: { replicas: [replica('b', { state: 'behind', freshAgeMs: 500_000 }), replica('c')] },
    action: 'promote',
    target: 'c',
    says: { b: 'STALE' },
  },
  {
    name: 'A2: a replica that was never seeded is no candidate although it got a batch',
    when: { replicas: [replica('b', { generation: null, freshAgeMs: 10 })] },
    action: 'refuse',
    code: 'NO_CANDIDATE',
    says: { b: 'NO_COPY' },
  },
  {
    name: 'A3: a replica that was never known complete is no candidate, whatever the priority list says',
    when: { volume: { nodePriority: ['c'] }, replicas: [replica('b'), replica('c', { freshAgeMs: null })] },
    action: 'promote',
    target: 'b',
    says: { c: 'FRESHNESS_UNKNOWN' },
  },
  {
    name: 'A29: the age of the report is added to the age that it names',
    when: { replicas: [replica('b', { freshAgeMs: 60_000, reportAgeMs: 60_001 })] },
    action: 'refuse',
    says: { b: 'STALE' },
  },
  {
    name: 'exactly the allowed staleness is fresh',
    when: { replicas: [replica('b', { freshAgeMs: 119_000, reportAgeMs: 1000 })] },
    action: 'promote',
    target: 'b',
    loss: { atMostMs: 120_000, generation: '1-40' },
  },
  {
    name: 'a nonsense age is no age',
    when: { replicas: [replica('b', { freshAgeMs: -5 }), replica('c', { reportAgeMs: Number.NaN })] },
    action: 'refuse',
    says: { b: 'FRESHNESS_UNKNOWN', c: 'FRESHNESS_UNKNOWN' },
  },
  {
    name: 'B1: an idle volume stays fresh: an old generation that was complete a second ago is promoted',
    when: { workload: { withoutSince: NOW - 86_400_000 }, replicas: [replica('b', { generation: '1-1' })] },
    action: 'promote',
    target: 'b',
    loss: { atMostMs: 1000, generation: '1-1' },
  },
  {
    name: 'B22: when none is fresh enough nothing is promoted, each replica says why, and the way to force is named',
    when: { replicas: [replica('b', { freshAgeMs: 600_000 }), replica('c', { reachable: false })] },
    action: 'refuse',
    code: 'NO_CANDIDATE',
    says: { b: 'STALE', c: 'UNREACHABLE' },
    because:
      /b: last known complete 600\.1 s ago.*c: its agent does not answer.*force the promotion of one copy by its node name/,
  },
  {
    name: 'no replica at all is refused, not ignored',
    when: { replicas: [] },
    action: 'refuse',
    code: 'NO_CANDIDATE',
    because: /there is no replica/,
  },

  // Half-way replicas
  {
    name: 'A16/D35: never a replica in the middle of an apply',
    when: { replicas: [replica('b', { state: 'applying', generation: '1-41' }), replica('c')] },
    action: 'promote',
    target: 'c',
    says: { b: 'APPLYING' },
  },
  {
    name: 'A16/D35: the only replica is applying: waits for it instead of giving up',
    when: { replicas: [replica('b', { state: 'applying' })] },
    action: 'wait',
    code: 'CANDIDATE_BUSY',
    says: { b: 'APPLYING' },
  },
  {
    name: 'D35: applying and stale is not worth waiting for',
    when: { replicas: [replica('b', { state: 'applying', freshAgeMs: 1e9 })] },
    action: 'refuse',
    code: 'NO_CANDIDATE',
  },
  {
    name: 'D35: a replica that still pulls has its previous generation whole',
    when: { replicas: [replica('b', { state: 'pulling' })] },
    action: 'promote',
    target: 'b',
  },
  {
    name: 'a replica whose state nobody knows is no candidate',
    when: { replicas: [replica('b', { state: 'unknown' })] },
    action: 'refuse',
    says: { b: 'STATE_UNKNOWN' },
  },
  {
    name: 'a replica with an error is no candidate',
    when: { replicas: [replica('b', { state: 'error' })] },
    action: 'refuse',
    says: { b: 'REPLICA_ERROR' },
  },
  {
    name: 'A14: a tree that a pod uses is no candidate',
    when: { replicas: [replica('b', { inUse: true })] },
    action: 'refuse',
    says: { b: 'IN_USE' },
  },

  // Epochs and returning nodes
  {
    name: 'A13/D34: a returning node of an older epoch with a newer-looking copy is never promoted by itself',
    when: {
      volume: {
        epoch: 2,
        activeNode: 'b',
        lineage: [
          [1, 1],
          [2, 41],
        ],
      },
      nodes: [node('a'), dead('b'), node('c')],
      replicas: [
        replica('a', { generation: '1-99', epoch: 1 }),
        replica('c', { generation: '2-43', epoch: 2 }),
      ],
    },
    action: 'promote',
    target: 'c',
    says: { a: 'EPOCH_OLD' },
  },
  {
    name: 'A24/D34: a returning node that has heard of the new epoch but still holds its own old line is refused',
    when: {
      volume: {
        epoch: 2,
        activeNode: 'b',
        lineage: [
          [1, 1],
          [2, 41],
        ],
      },
      nodes: [node('a'), dead('b'), node('c')],
      replicas: [replica('a', { generation: '1-45', epoch: 2 })],
    },
    action: 'refuse',
    says: { a: 'DIVERGED' },
  },
  {
    name: 'a copy of the older epoch that the newest one was built on is on its line',
    when: {
      volume: {
        epoch: 2,
        activeNode: 'b',
        lineage: [
          [1, 1],
          [2, 41],
        ],
      },
      nodes: [node('a'), dead('b'), node('c')],
      replicas: [replica('c', { generation: '1-40', epoch: 2 })],
    },
    action: 'promote',
    target: 'c',
  },
  {
    name: 'without a known line only generations of the newest epoch count',
    when: {
      volume: { epoch: 2, activeNode: 'b' },
      nodes: [node('a'), dead('b'), node('c')],
      replicas: [replica('c', { generation: '1-40', epoch: 2 })],
    },
    action: 'refuse',
    says: { c: 'DIVERGED' },
  },
  {
    name: 'B18: a cluster record older than what a replica has seen decides nothing',
    when: { replicas: [replica('b'), replica('c', { epoch: 2 })] },
    action: 'refuse',
    code: 'EPOCH_AHEAD',
    says: { c: 'EPOCH_AHEAD' },
  },
  {
    name: 'the active node is never its own successor',
    when: {
      nodes: [node('a', { reachable: false, ready: false }), node('b')],
      replicas: [replica('a'), replica('b')],
    },
    action: 'promote',
    target: 'b',
    says: { a: 'ACTIVE_NODE' },
  },
  {
    name: 'two reports under one node name count for nothing',
    when: { replicas: [replica('b'), replica('b', { generation: '1-50' }), replica('c')] },
    action: 'promote',
    target: 'c',
    says: { b: 'DUPLICATE_REPORT' },
  },
  {
    name: 'text that is no generation is no copy',
    when: { replicas: [replica('b', { generation: '40' })] },
    action: 'refuse',
    says: { b: 'NO_COPY' },
  },

  // Nodes
  {
    name: 'a node that is not Ready is refused',
    when: { nodes: [dead('a'), node('b', { ready: false }), node('c')] },
    action: 'promote',
    target: 'c',
    says: { b: 'NODE_NOT_READY' },
  },
  {
    name: 'a cordoned node is refused',
    when: { nodes: [dead('a'), node('b', { schedulable: false }), node('c')] },
    action: 'promote',
    target: 'c',
    says: { b: 'NODE_UNSCHEDULABLE' },
  },
  {
    name: 'a replica without a node in the cluster is refused',
    when: { nodes: [dead('a'), node('c')] },
    action: 'promote',
    target: 'c',
    says: { b: 'NODE_UNKNOWN' },
  },
  {
    name: 'B14: a node without room is refused, with the reason',
    when: { nodes: [dead('a'), node('b', { fit: { ok: false, reason: 'cpu: 0 of 500m free' } }), node('c')] },
    action: 'promote',
    target: 'c',
    says: { b: 'NO_FIT' },
  },
  {
    name: 'an agent that does not answer is refused although its last report was good',
    when: { nodes: [dead('a'), node('b', { reachable: false }), node('c')] },
    action: 'promote',
    target: 'c',
    says: { b: 'UNREACHABLE' },
  },

  // Place and data
  {
    name: 'the newest generation wins without a priority list',
    when: { replicas: [replica('b', { generation: '1-40' }), replica('c', { generation: '1-41' })] },
    action: 'promote',
    target: 'c',
    says: { c: 'NEWEST_GENERATION' },
  },
  {
    name: 'numbers are compared as numbers',
    when: { replicas: [replica('b', { generation: '1-9' }), replica('c', { generation: '1-10' })] },
    action: 'promote',
    target: 'c',
  },
  {
    name: 'the name breaks ties',
    when: { replicas: [replica('c'), replica('b')] },
    action: 'promote',
    target: 'b',
    says: { b: 'SAME_GENERATION_BY_NAME' },
  },
  {
    name: 'B20: priority picks the place, freshness the data: the newer generation is fetched first',
    when: {
      volume: { nodePriority: ['x', 'b'] },
      replicas: [
        replica('b', { freshAgeMs: 109_000, reportAgeMs: 1000 }),
        replica('c', { generation: '1-44', freshAgeMs: 900 }),
      ],
    },
    action: 'promote',
    target: 'b',
    catchUpFrom: 'c',
    loss: { atMostMs: 1000, generation: '1-44' },
    says: { b: 'BEHIND_ANOTHER' },
  },
  {
    name: 'B20: the data may come from a node that the workload does not fit on',
    when: {
      nodes: [dead('a'), node('b'), node('c', { schedulable: false, fit: { ok: false } })],
      replicas: [replica('b'), replica('c', { generation: '1-44' })],
    },
    action: 'promote',
    target: 'b',
    catchUpFrom: 'c',
  },
  {
    name: 'nothing is fetched from a replica that is applying, unreachable or of another line',
    when: {
      volume: { nodePriority: ['b'] },
      nodes: [dead('a'), node('b'), node('c'), node('d'), node('e')],
      replicas: [
        replica('b'),
        replica('c', { generation: '1-50', state: 'applying' }),
        replica('d', { generation: '1-51', reachable: false }),
        replica('e', { generation: '1-52', epoch: 0 }),
      ],
    },
    action: 'promote',
    target: 'b',
    loss: { atMostMs: 1000, generation: '1-40' },
  },
  {
    name: 'B20: a preferred node that is too stale is not chosen at all',
    when: {
      volume: { nodePriority: ['b'] },
      replicas: [replica('b', { freshAgeMs: 130_000 }), replica('c')],
    },
    action: 'promote',
    target: 'c',
    says: { b: 'STALE' },
  },

  // What is no failure
  {
    name: 'B7: a pod that pulls its image on a healthy node is no failure',
    when: { nodes: alive, workload: { cause: 'pending' } },
    action: 'none',
    code: 'STARTING',
  },
  {
    name: 'B7: a pod that "is starting" on a dead node is one',
    when: { workload: { cause: 'pending' } },
    action: 'promote',
    target: 'b',
  },
  {
    name: 'B8: a completed Job wants nothing',
    when: { workload: { cause: 'completed' } },
    action: 'none',
    code: 'COMPLETED',
  },
  {
    name: 'B9: a claim that nobody wants stays where it is, also when its node dies',
    when: { workload: { cause: 'no-demand' } },
    action: 'none',
    code: 'NO_DEMAND',
  },
  {
    name: 'B5/A13: a pod that the API still calls healthy on a dead node is not healthy',
    when: { workload: { healthyPod: true } },
    action: 'promote',
    target: 'b',
  },

  // Planned moves
  {
    name: 'B6: a cordon with a healthy pod is a planned move, not a failover',
    when: { nodes: cordoned, workload: running },
    action: 'planned-move',
    code: 'CORDONED',
    target: 'b',
    because: /last flush and confirmation first.*nothing is lost/,
  },
  {
    name: 'B6: a drained node that answers is a planned move, without any grace',
    when: { nodes: cordoned, workload: { cause: 'unschedulable', withoutSince: NOW } },
    action: 'planned-move',
    code: 'CORDONED',
    target: 'b',
  },
  {
    name: 'B6: a cordon with no place to go leaves the pod alone',
    when: { nodes: [node('a', { schedulable: false }), node('b', { ready: false })], workload: running },
    action: 'wait',
    code: 'NO_TARGET',
  },
  {
    name: 'B6: a cordoned node whose agent is silent keeps its healthy pod',
    when: { nodes: [node('a', { schedulable: false, reachable: false }), node('b')], workload: running },
    action: 'wait',
    code: 'CORDONED',
  },
  {
    name: 'a planned move follows the priority list and needs no freshness: the flush brings it',
    when: {
      nodes: cordoned,
      workload: running,
      volume: { nodePriority: ['c'] },
      replicas: [replica('b'), replica('c', { freshAgeMs: 1e9, generation: '1-3' })],
    },
    action: 'planned-move',
    target: 'c',
  },
  {
    name: 'a planned move does not go to a replica that is applying',
    when: {
      nodes: cordoned,
      workload: running,
      replicas: [replica('b', { state: 'applying' }), replica('c')],
    },
    action: 'planned-move',
    target: 'c',
  },
  {
    name: 'B11: a pod that was scheduled elsewhere makes a planned move to it, never a silent switch',
    when: { nodes: alive, workload: { cause: 'pending', waitingOn: 'c' } },
    action: 'planned-move',
    code: 'POD_ELSEWHERE',
    target: 'c',
  },
  {
    name: 'B11: a pod that waits on a node without a copy moves nothing',
    when: { nodes: [...alive, node('d')], workload: { cause: 'pending', waitingOn: 'd' } },
    action: 'wait',
    code: 'NO_TARGET',
  },
  {
    name: 'B11: with the source dead the freshness gate decides, not the place of the pod',
    when: {
      workload: { cause: 'pending', waitingOn: 'c' },
      replicas: [replica('b'), replica('c', { freshAgeMs: 1e9 })],
    },
    action: 'promote',
    target: 'b',
  },
  {
    name: 'a broken pod on a node that answers is moved after the grace period with nothing lost',
    when: { nodes: alive, workload: { cause: 'unhealthy' } },
    action: 'planned-move',
    code: 'WORKLOAD_LOST',
    target: 'b',
  },

  // Force
  {
    name: 'force lifts opt-in, grace and staleness for the named node, with the reason recorded',
    when: {
      force,
      volume: { failoverEnabled: false },
      workload: { withoutSince: NOW },
      replicas: [replica('b', { freshAgeMs: 9e6 }), replica('c')],
    },
    action: 'promote',
    code: 'FORCED',
    target: 'b',
    says: { b: 'FORCED', c: 'NOT_FORCED' },
    because: /ann forced it \(a is burnt\)/,
  },
  {
    name: 'force on a copy of unknown age says that the loss is unknown',
    when: { force, replicas: [replica('b', { freshAgeMs: null })] },
    action: 'promote',
    target: 'b',
    loss: { atMostMs: null, generation: '1-40' },
    because: /how much is lost is not known/,
  },
  {
    name: 'force still fetches the newer generation of a live replica',
    when: { force, replicas: [replica('b', { freshAgeMs: 9e6 }), replica('c', { generation: '1-41' })] },
    action: 'promote',
    target: 'b',
    catchUpFrom: 'c',
  },
  {
    name: 'force never promotes a replica in the middle of an apply',
    when: { force, replicas: [replica('b', { state: 'applying' })] },
    action: 'refuse',
    code: 'FORCE_INVALID',
    because: /in the middle of applying/,
  },
  {
    name: 'force never promotes what does not answer',
    when: { force, replicas: [replica('b', { reachable: false })] },
    action: 'refuse',
    code: 'FORCE_INVALID',
  },
  {
    name: 'force needs a reason',
    when: { force: { node: 'b', reason: ' ' } },
    action: 'refuse',
    code: 'FORCE_INVALID',
  },
  {
    name: 'force names a node that holds a copy',
    when: { force: { node: 'x', reason: 'y' } },
    action: 'refuse',
    code: 'FORCE_INVALID',
  },
  {
    name: 'force with a living source is a planned move',
    when: { force, nodes: alive, workload: running },
    action: 'planned-move',
    code: 'FORCED',
    target: 'b',
  },
  {
    name: 'force waits for the lease',
    when: { force, volume: { leaseEnded: false } },
    action: 'wait',
    code: 'FENCE_PENDING',
  },
  {
    name: 'force does not make a second writer where nothing stops the first',
    when: {
      force,
      volume: { fencing: 'none' },
      nodes: [node('a', { reachable: false }), node('b')],
      workload: running,
    },
    action: 'refuse',
    code: 'FENCE_IMPOSSIBLE',
  },
  {
    name: 'force does not overrule a newer epoch',
    when: { force, replicas: [replica('b', { epoch: 3 })] },
    action: 'refuse',
    code: 'EPOCH_AHEAD',
  },
];

for (const row of rows) {
  t.test(row.name, (t) => {
    const given = input(row.when);
    const decision = decideFailover(given);
    t.equal(decision.action, row.action, decision.because);
    if (row.code !== undefined) t.equal(decision.code, row.code);
    t.equal(decision.target, row.target ?? decision.target);
    t.equal(decision.catchUpFrom, row.catchUpFrom, 'where the data comes from');
    if (row.loss !== undefined) t.same(decision.dataLoss, row.loss);
    if (row.because !== undefined) t.match(decision.because, row.because);
    for (const [name, code] of Object.entries(row.says ?? {})) {
      const verdict = decision.perReplica.find((one) => one.node === name);
      t.ok(
        verdict?.reasons.some((reason) => reason.code === code),
        `${name} says ${code}: ${JSON.stringify(verdict)}`,
      );
    }
    const moves = decision.action === 'promote' || decision.action === 'planned-move';
    t.equal(decision.epoch, given.volume.epoch + (moves ? 1 : 0), 'epoch');
    t.equal(decision.target !== undefined, moves, 'a target exactly when something moves');
    t.equal(decision.dataLoss !== undefined, decision.action === 'promote');
    t.equal(decision.perReplica.length, given.replicas.length, 'every replica is answered for');
    t.equal(decision.perReplica.filter((one) => one.verdict === 'chosen').length, moves ? 1 : 0);
    t.ok(
      decision.perReplica.every((one) => one.verdict !== 'refused' || one.reasons.length > 0),
      'no refusal without a reason',
    );
    t.end();
  });
}

t.test('a dead source is no fault of its copies, a full disk is one', (t) => {
  const condition = (type: string) => ({ type, message: '', since: 0 });
  t.equal(
    copyState({ state: 'error', conditions: [condition('PullFailed'), condition('Unsupported')] }),
    'behind',
  );
  t.equal(copyState({ state: 'error', conditions: [condition('NoSpace')] }), 'error');
  t.equal(copyState({ state: 'error', conditions: [condition('PullFailed'), condition('InUse')] }), 'error');
  t.equal(copyState({ state: 'error', conditions: [] }), 'error');
  t.equal(copyState({ state: 'applying', conditions: [] }), 'applying');
  t.equal(copyState({ state: 'verifying', conditions: [] }), 'pulling');
  t.equal(copyState({ state: 'empty', conditions: [] }), 'behind');
  t.equal(copyState({ state: 'something new' as 'idle', conditions: [] }), 'unknown');
  t.end();
});

const names = ['a', 'b', 'c', 'd'];
const states: ReplicaState[] = ['idle', 'pulling', 'applying', 'behind', 'error', 'unknown'];
const anyReplica = (name: string): fc.Arbitrary<FailoverReplica> =>
  fc.record({
    node: fc.constant(name),
    generation: fc.oneof(
      { weight: 1, arbitrary: fc.constant(null) },
      {
        weight: 9,
        arbitrary: fc
          .tuple(fc.constantFrom(1, 2, 2, 2, 2, 2), fc.integer({ min: 0, max: 12 }))
          .map(([e, s]) => `${e}-${s}`),
      },
    ),
    epoch: fc.oneof(
      { weight: 2, arbitrary: fc.constantFrom(1, 3) },
      { weight: 40, arbitrary: fc.constant(2) },
    ),
    state: fc.constantFrom(...states, 'idle', 'idle', 'idle', 'idle'),
    freshAgeMs: fc.option(fc.integer({ min: 0, max: 3000 }), { freq: 5 }),
    reportAgeMs: fc.integer({ min: 0, max: 500 }),
    reachable: fc.constantFrom(true, true, true, false),
    inUse: fc.constantFrom(false, false, false, true),
  });
const anyNode = (name: string): fc.Arbitrary<FailoverNode> =>
  fc.record({
    name: fc.constant(name),
    ready:
      name === 'a' ? fc.constantFrom(false, false, false, true) : fc.constantFrom(true, true, true, false),
    schedulable: fc.constantFrom(true, true, true, false),
    reachable: fc.constantFrom(true, true, true, false),
    fit: fc.constantFrom({ ok: true }, { ok: true }, { ok: false, reason: 'full' }),
  });
const anyInput: fc.Arbitrary<FailoverInput> = fc.record({
  now: fc.constant(100_000),
  volume: fc.record({
    namespace: fc.constant('n'),
    name: fc.constant('v'),
    epoch: fc.constant(2),
    activeNode: fc.constantFrom('a', 'a', 'a', 'b'),
    failoverEnabled: fc.constantFrom(true, true, true, false),
    gracePeriodMs: fc.constant(1000),
    maxStalenessMs: fc.constant(2000),
    nodePriority: fc.shuffledSubarray(names),
    lineage: fc.constant<[number, number][]>([
      [1, 1],
      [2, 6],
    ]),
    fencing: fc.constantFrom('lease' as const, 'none' as const),
    leaseEnded: fc.constantFrom(true, true, false),
  }),
  workload: fc.record({
    healthyPod: fc.constantFrom(false, false, true),
    withoutSince: fc.constantFrom(null, 99_500, 90_000, 90_000, 90_000),
    cause: fc.constantFrom(
      'no-pod' as const,
      'unhealthy' as const,
      'pending' as const,
      'unschedulable' as const,
      'completed' as const,
    ),
    waitingOn: fc.constantFrom(null, null, null, 'c'),
  }),
  nodes: fc.tuple(...names.map(anyNode)).map((nodes) => nodes as FailoverNode[]),
  replicas: fc
    .tuple(...names.map(anyReplica))
    .chain((all) => fc.shuffledSubarray(all as FailoverReplica[], { minLength: 1 })),
  force: fc.constantFrom(null, null, null, { node: 'c', reason: 'tested' }),
});

t.test('property: a promotion never takes what the rules forbid, whatever the input', (t) => {
  let promotions = 0;
  fc.assert(
    fc.property(anyInput, (given) => {
      const decision = decideFailover(given);
      if (decision.action !== 'promote' && decision.action !== 'planned-move') return;
      const chosen = given.replicas.find((one) => one.node === decision.target);
      const place = given.nodes.find((one) => one.name === decision.target);
      if (chosen === undefined || place === undefined) throw new Error('target without a replica or a node');
      const forced = given.force !== null && given.force !== undefined;
      const bad = [
        chosen.state === 'applying' || chosen.state === 'unknown' ? 'half or unknown' : null,
        chosen.reachable && place.reachable ? null : 'unreachable',
        place.ready && place.schedulable ? null : 'no place for a pod',
        chosen.node === given.volume.activeNode ? 'the node that is left' : null,
        chosen.inUse ? 'in use' : null,
        chosen.generation === null ? 'no copy' : null,
        given.replicas.some((one) => one.epoch > 2) ? 'the record is out of date' : null,
      ];
      if (decision.action === 'promote') {
        promotions += 1;
        const [epoch, seq] = (chosen.generation ?? '0-0').split('-').map(Number) as [number, number];
        if (!forced) {
          bad.push(
            chosen.epoch === 2 ? null : 'old epoch',
            epoch === 2 || seq < 6 ? null : 'another line',
            chosen.freshAgeMs !== null && chosen.freshAgeMs + chosen.reportAgeMs <= 2000 ? null : 'stale',
            chosen.state === 'error' ? 'error' : null,
            place.fit.ok ? null : 'no fit',
          );
        }
        const active = given.nodes.find((one) => one.name === given.volume.activeNode);
        if (given.volume.fencing === 'lease')
          bad.push(given.volume.leaseEnded ? null : 'the old writer may run');
        else if (!forced) bad.push(active?.ready === true ? 'the old writer may run' : null);
      }
      const found = bad.filter((one) => one !== null);
      if (found.length > 0) throw new Error(`${decision.action} of ${decision.target}: ${found.join(', ')}`);
    }),
    { numRuns: 20_000, seed: 7 },
  );
  t.ok(promotions > 300, `the generator reached ${promotions} promotions`);
  t.end();
});

t.test(
  'property: the same facts in another order give the same decision, and nothing is changed in the input',
  (t) => {
    const shuffled = anyInput.chain((given) =>
      fc.record({
        given: fc.constant(given),
        nodes: fc.shuffledSubarray([...given.nodes], { minLength: given.nodes.length }),
        replicas: fc.shuffledSubarray([...given.replicas], { minLength: given.replicas.length }),
      }),
    );
    fc.assert(
      fc.property(shuffled, ({ given, nodes, replicas }) => {
        const before = JSON.stringify(given);
        const first = JSON.stringify(decideFailover(given));
        const again = JSON.stringify(decideFailover({ ...given, nodes, replicas }));
        if (first !== again) throw new Error(`${first}\n${again}`);
        if (JSON.stringify(given) !== before) throw new Error('the input was changed');
      }),
      { numRuns: 5000, seed: 8 },
    );
    t.pass('5000 orders');
    t.end();
  },
);

t.test('a second failure right after the first: copies at the base of the promotion count', (t) => {
  // b was promoted at 1-40 and died before anything of epoch 2 reached c.
  const after = (base: string | null, copy: Partial<FailoverReplica>) =>
    decideFailover(
      input({
        volume: { epoch: 2, activeNode: 'b', base },
        nodes: [dead('a'), dead('b'), node('c')],
        replicas: [replica('c', copy)],
      }),
    );
  for (const epoch of [1, 2])
    for (const generation of ['1-40', '1-38'])
      t.match(after('1-40', { epoch, generation }), { action: 'promote', target: 'c', epoch: 3 });
  t.equal(after('1-40', { generation: '1-41' }).action, 'refuse', 'what b never had is another line');
  t.equal(after('2-40', { epoch: 1 }).action, 'refuse', 'of an older epoch nothing is known');
  t.equal(after(null, { epoch: 1 }).action, 'refuse');
  t.equal(after('1-40', { freshAgeMs: 200_000 }).action, 'refuse', 'and it must be fresh like any other');
  t.equal(after('1-40', { state: 'applying' }).action, 'wait');
  const newer = decideFailover(
    input({
      volume: { epoch: 2, activeNode: 'b', base: '1-40', nodePriority: ['c'] },
      nodes: [dead('a'), dead('b'), node('c'), node('d')],
      replicas: [replica('c', { epoch: 1 }), replica('d', { epoch: 2, generation: '2-41' })],
    }),
  );
  t.match(newer, { action: 'promote', target: 'c', catchUpFrom: 'd' }, 'what came later is fetched first');
  t.end();
});
