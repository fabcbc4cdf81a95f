/**
 * A simulated cluster that runs the real fencing code: three nodes (agent and csi-node), two controllers, an API
 * server. Clocks drift, messages are lost, late and reordered, links are cut, leaders are paused, agents and csi-node
 * restart, writes to the API server arrive late. One volume; at every moment at most one writer may run.
 */
import { type WriterFence as Fence, WriterFence } from '../../csi/freeze/writer-fence.ts';
import { LeaderFence, nextPromotable, toldSet, type VolumeRecord } from '../../lib/fence/leader.ts';
import { type FenceState, NO_STATE, NodeFence, type Role, type Save } from '../../lib/fence/node.ts';
import { type FenceRules, PROTOCOL } from '../../lib/fence/rules.ts';
import { CLOCK_DRIFT } from '../../lib/fence/timing.ts';
import type {
  FenceBeat,
  FenceBeatReply,
  FenceConsentReply,
  FenceConsentRequest,
  FencePoll,
  FencePollReply,
  Promotable,
  ToldSet,
} from '../../lib/fence/types.ts';

/** Rules that the callers of lib/fence keep; also taken out one by one. */
export interface CallerRules {
  /** a process counts its beats from a random number */
  freshNumbers: boolean;
  /** what lib/fence hands out as `save` is durable before the answer leaves */
  saved: boolean;
  /** csi-node freezes by its own timer, not only when the agent answers */
  ownTimer: boolean;
  /** csi-node counts from when it asked */
  countFromAsked: boolean;
  /** a writer belongs to the epoch in which it was published */
  ownEpoch: boolean;
}
export const CALLERS: Readonly<CallerRules> = {
  freshNumbers: true,
  saved: true,
  ownTimer: true,
  countFromAsked: true,
  ownEpoch: true,
};

/** How often things go wrong; 1 is usual. */
export interface Trouble {
  /** messages that arrive many seconds late */
  stuck: number;
  /** changes of the promotable set */
  sets: number;
  /** restarts and hangs of agents and csi-node */
  restarts: number;
  /** planned moves */
  moves: number;
  /** leaders that stop for a while */
  pauses: number;
  /** reads of the API server that fail or are slow */
  reads: number;
}
export const USUAL: Readonly<Trouble> = { stuck: 1, sets: 1, restarts: 1, moves: 1, pauses: 1, reads: 1 };
export const WILD: Readonly<Trouble> = { ...USUAL, stuck: 5, sets: 5, restarts: 5 };

export interface Options {
  rules?: Partial<FenceRules>;
  callers?: Partial<CallerRules>;
  /** how many times more of each kind of trouble than usual */
  trouble?: Partial<Trouble>;
  /** no faults, and nobody moves anything */
  calm?: boolean;
  seconds?: number;
}
export interface Outcome {
  seed: number;
  /** what went wrong; null: nothing */
  bad: string | null;
  promotions: number;
  planned: number;
  kills: number;
  thaws: number;
  /** ms without a writer */
  still: number;
  history: string[];
}

const NAME = { namespace: 'default', volume: 'v' };
const LEASE = 8_000;
const STEP = 50;
const FREEZE_MS = 300;
const NODES = ['a', 'b', 'c'] as const;
const CONTROLLERS = ['k1', 'k2'] as const;
type NodeName = (typeof NODES)[number];

class Random {
  #s: number;
  constructor(seed: number) {
    this.#s = (seed * 2_654_435_761 + 12_345) >>> 0;
  }
  /** mulberry32 */
  next(): number {
    this.#s = (this.#s + 0x6d2b79f5) >>> 0;
    let t = this.#s;
    t = Math.imul(t ^ (t >>> 15), t | 1);
    t ^= t + Math.imul(t ^ (t >>> 7), t | 61);
    return ((t ^ (t >>> 14)) >>> 0) / 4_294_967_296;
  }
  chance(p: number): boolean {
    return this.next() < p;
  }
  pick<T>(from: readonly T[]): T {
    return from[Math.floor(this.next() * from.length)] as T;
  }
  /** exponential with this mean */
  wait(mean: number): number {
    return -Math.log(1 - this.next()) * mean;
  }
}

interface Clock {
  rate: number;
  offset: number;
}

interface Durable {
  role: Role;
  epoch: number;
  fence: FenceState;
}

class Node {
  readonly name: NodeName;
  readonly clock: Clock;
  disk: Durable;
  fence!: NodeFence;
  /** real time until which the agent is down or hangs */
  awayUntil = 0;
  beatAt = Number.NEGATIVE_INFINITY;
  batchAt = 0;
  /* csi-node */
  csiAwayUntil = 0;
  askAt = 0;
  wanted = true;
  /** the announcement of a writer is under way */
  publishing = false;
  writer: Fence | null = null;
  /** epoch that csi-node noted when it published */
  publishedIn = 0;
  writing = false;
  /** real time when the freezing that was ordered is done; Infinity: none */
  stillAt = Number.POSITIVE_INFINITY;
  constructor(name: NodeName, clock: Clock, disk: Durable) {
    this.name = name;
    this.clock = clock;
    this.disk = disk;
  }
}

class Controller {
  readonly name: (typeof CONTROLLERS)[number];
  readonly clock: Clock;
  readonly fence: LeaderFence;
  term = 0;
  pausedUntil = 0;
  loopAt = 0;
  pollAt = Number.NEGATIVE_INFINITY;
  read: { record: VolumeRecord; rv: number } | null = null;
  replies = new Map<string, FencePollReply>();
  attempt: { epoch: number; target: NodeName; planned: boolean } | null = null;
  consent: FenceConsentReply | null = null;
  writing = false;
  plannedUntil = 0;
  constructor(name: (typeof CONTROLLERS)[number], clock: Clock, rules: FenceRules) {
    this.name = name;
    this.clock = clock;
    this.fence = new LeaderFence(name, LEASE, rules);
  }
}

type Message =
  | { kind: 'beat'; body: FenceBeat }
  | { kind: 'beatReply'; body: FenceBeatReply }
  | { kind: 'poll'; body: FencePoll }
  | { kind: 'pollReply'; body: FencePollReply }
  | { kind: 'consent'; body: FenceConsentRequest }
  | { kind: 'consentReply'; body: FenceConsentReply }
  | { kind: 'activate'; epoch: number; set: ToldSet }
  | { kind: 'batch'; epoch: number }
  | { kind: 'release'; epoch: number }
  | { kind: 'csi'; work: () => void }
  | { kind: 'read'; term: number; record: VolumeRecord; rv: number }
  | {
      kind: 'write';
      term: number;
      rv: number;
      epoch: number;
      activeNode: NodeName;
      promotable: Promotable;
      planned: boolean;
    }
  | { kind: 'written'; term: number; record: VolumeRecord | null; rv: number };

interface Sent {
  at: number;
  order: number;
  from: string;
  to: string;
  message: Message;
}

/** A binary heap by time. */
class Queue {
  readonly #heap: Sent[] = [];
  #before(a: Sent, b: Sent): boolean {
    return a.at < b.at || (a.at === b.at && a.order < b.order);
  }
  get first(): Sent | undefined {
    return this.#heap[0];
  }
  push(one: Sent): void {
    const h = this.#heap;
    let i = h.push(one) - 1;
    while (i > 0) {
      const up = (i - 1) >> 1;
      if (!this.#before(one, h[up] as Sent)) break;
      h[i] = h[up] as Sent;
      i = up;
    }
    h[i] = one;
  }
  pop(): Sent {
    const h = this.#heap;
    const top = h[0] as Sent;
    const last = h.pop() as Sent;
    if (h.length > 0) {
      let i = 0;
      for (;;) {
        let down = 2 * i + 1;
        if (down >= h.length) break;
        if (down + 1 < h.length && this.#before(h[down + 1] as Sent, h[down] as Sent)) down++;
        if (!this.#before(h[down] as Sent, last)) break;
        h[i] = h[down] as Sent;
        i = down;
      }
      h[i] = last;
    }
    return top;
  }
}

export function simulate(seed: number, options: Options = {}): Outcome {
  const random = new Random(seed);
  const rules: FenceRules = { ...PROTOCOL, ...options.rules };
  const callers: CallerRules = { ...CALLERS, ...options.callers };
  const trouble: Trouble = { ...USUAL, ...options.trouble };
  const end = (options.seconds ?? 240) * 1000;
  const history: string[] = [];
  const outcome: Outcome = {
    seed,
    bad: null,
    promotions: 0,
    planned: 0,
    kills: 0,
    thaws: 0,
    still: 0,
    history,
  };
  let t = 0;
  const note = (text: string): void => {
    history.push(`${(t / 1000).toFixed(2)} ${text}`);
    if (history.length > 400) history.splice(0, 100);
  };

  const clock = (): Clock => ({
    // Half of the clocks run at the ends of what is allowed.
    rate: 1 + (random.chance(0.5) ? random.pick([-1, 1]) : random.next() * 2 - 1) * CLOCK_DRIFT,
    offset: (random.next() - 0.5) * 2e6,
  });
  const now = (who: { clock: Clock }): number => t * who.clock.rate + who.clock.offset;

  // The API server.
  let status: VolumeRecord = {
    ...NAME,
    epoch: 1,
    activeNode: 'a',
    fencing: 'lease',
    promotable: { version: 1, nodes: ['b', 'c'], adding: [] },
  };
  let rv = 1;
  /** newest epoch in which something was written */
  let newest = 0;
  let leader: { name: string; until: number; term: number } = { name: '', until: -1, term: 0 };

  const firstBeat = (): number => (callers.freshNumbers ? 1 + Math.floor(random.next() * 2 ** 47) : 1);
  const start = (node: Node): void => {
    node.fence = new NodeFence(node.name, LEASE, firstBeat(), rules);
    node.fence.open(NAME, node.disk.role, node.disk.epoch, node.disk.fence, now(node));
  };
  const nodes = NODES.map((name) => {
    const role: Role = name === 'a' ? 'active' : 'replica';
    const told = name === 'a' ? { version: 1, nodes: ['b', 'c'], epoch: 1 } : null;
    const node = new Node(name, clock(), { role, epoch: 1, fence: { ...NO_STATE, told } });
    start(node);
    return node;
  });
  const controllers = CONTROLLERS.map((name) => new Controller(name, clock(), rules));
  const nodeOf = (name: string): Node => nodes.find((n) => n.name === name) as Node;
  const save = (node: Node, saves: readonly Save[]): void => {
    if (callers.saved) for (const { state } of saves) node.disk.fence = state;
  };

  // The network.
  const everybody = [...NODES, ...CONTROLLERS, 'api'];
  const cut = new Set<string>();
  const link = (a: string, b: string): string => (a < b ? `${a} ${b}` : `${b} ${a}`);
  const queue = new Queue();
  let order = 0;
  const push = (at: number, from: string, to: string, message: Message): void =>
    queue.push({ at, order: order++, from, to, message });
  const send = (from: string, to: string, message: Message): void => {
    if (cut.has(link(from, to)) || random.chance(0.05)) return;
    let delay = random.wait(50);
    // Stuck in a retransmission queue.
    if (random.chance(0.05 * trouble.stuck)) delay += random.wait(15_000);
    push(t + delay, from, to, message);
  };

  const setRole = (node: Node, role: Role, epoch: number): void => {
    node.disk.role = role;
    node.disk.epoch = epoch;
    node.fence.changed(NAME, role, epoch, now(node));
  };

  const toNode = (node: Node, from: string, message: Message): void => {
    const at = now(node);
    switch (message.kind) {
      case 'beat': {
        const { reply, save: saves } = node.fence.beat(message.body, at);
        save(node, saves);
        send(node.name, from, { kind: 'beatReply', body: reply });
        return;
      }
      case 'beatReply':
        node.fence.beatAnswered(from, message.body, at);
        return;
      case 'poll': {
        const { reply, save: saves } = node.fence.poll(message.body, at);
        save(node, saves);
        send(node.name, from, { kind: 'pollReply', body: reply });
        return;
      }
      case 'consent': {
        const { reply, save: saves } = node.fence.consent(message.body, at);
        save(node, saves);
        send(node.name, from, { kind: 'consentReply', body: reply });
        return;
      }
      case 'activate': {
        const { disk } = node;
        if (message.epoch < disk.epoch || (disk.role === 'replica' && message.epoch === disk.epoch)) return;
        if (message.epoch > disk.epoch || disk.role === 'replica') {
          note(`${node.name} is activated in epoch ${message.epoch}`);
          setRole(node, 'active', message.epoch);
        }
        const told = node.fence.told(NAME, message.epoch, message.set, 'lease');
        if (told) save(node, [told]);
        return;
      }
      case 'batch':
        if (message.epoch < node.disk.epoch) return;
        if (message.epoch > node.disk.epoch) {
          if (node.disk.role === 'active') note(`${node.name} steps down for epoch ${message.epoch}`);
          setRole(node, 'replica', message.epoch);
        }
        return;
      case 'release': {
        const answer = node.fence.release(NAME, message.epoch, at);
        if ('refused' in answer) return;
        if (answer.save) {
          save(node, [answer.save]);
          note(`${node.name} releases epoch ${message.epoch}`);
        }
        return;
      }
      case 'csi':
        message.work();
        return;
    }
  };

  const toController = (k: Controller, from: string, message: Message): void => {
    const at = now(k);
    switch (message.kind) {
      case 'pollReply':
        k.fence.answered(message.body, at);
        if (message.body.term === k.term) k.replies.set(from, message.body);
        return;
      case 'consentReply':
        if (k.attempt && message.body.node === k.attempt.target && message.body.epoch === k.attempt.epoch)
          k.consent = message.body;
        return;
      case 'read':
        if (message.term !== k.term && rules.readAfterTakeover) return;
        if (k.read && message.rv < k.read.rv) return;
        k.read = { record: message.record, rv: message.rv };
        k.fence.observe(message.record);
        return;
      case 'written':
        if (message.term !== k.term) return;
        k.writing = false;
        if (message.record && (!k.read || message.rv >= k.read.rv)) {
          k.read = { record: message.record, rv: message.rv };
          k.fence.observe(message.record);
        }
        return;
    }
  };

  const toApi = (from: string, message: Message): void => {
    if (message.kind !== 'write') return;
    if (message.rv !== rv) {
      send('api', from, { kind: 'written', term: message.term, record: null, rv });
      return;
    }
    if (message.epoch > status.epoch) {
      outcome.promotions++;
      if (message.planned) outcome.planned++;
      note(
        `${from} writes: epoch ${message.epoch} on ${message.activeNode}, was ${status.activeNode}${message.planned ? ' (planned)' : ''}`,
      );
    } else
      note(
        `${from} writes set ${message.promotable.version}: ${message.promotable.nodes} + ${message.promotable.adding}`,
      );
    status = {
      ...status,
      epoch: message.epoch,
      activeNode: message.activeNode,
      promotable: message.promotable,
    };
    rv++;
    send('api', from, { kind: 'written', term: message.term, record: status, rv });
  };

  const write = (
    k: Controller,
    activeNode: NodeName,
    epoch: number,
    promotable: Promotable,
    planned = false,
  ): void => {
    const read = k.read as { rv: number };
    k.writing = true;
    send(k.name, 'api', { kind: 'write', term: k.term, rv: read.rv, epoch, activeNode, promotable, planned });
  };

  const control = (k: Controller): void => {
    const at = now(k);
    const api = !cut.has(link(k.name, 'api'));
    if (api) {
      // 6 s by the store's clock, 4 s by the own.
      if (leader.name === k.name && t < leader.until && k.term === leader.term) {
        leader.until = t + 6_000;
        k.fence.extend(at + 4_000);
      } else if (t >= leader.until) {
        leader = { name: k.name, until: t + 6_000, term: leader.term + 1 };
        k.term = leader.term;
        if (rules.readAfterTakeover) k.read = null;
        k.replies.clear();
        k.attempt = null;
        k.consent = null;
        k.writing = false;
        k.plannedUntil = 0;
        k.fence.takeOver(at, k.term, at + 4_000, LEASE);
        note(`${k.name} leads, term ${k.term}`);
      }
    }
    if (k.term === 0 || (rules.onlyWhileLeading && !k.fence.leads(at))) return;
    if (api && random.chance(0.8 / trouble.reads))
      push(t + random.wait(30 * trouble.reads), 'api', k.name, {
        kind: 'read',
        term: k.term,
        record: status,
        rv,
      });
    if (!k.read) return;
    const { record } = k.read;
    const active = record.activeNode as NodeName;
    if (at - k.pollAt >= 1_000) {
      k.pollAt = at;
      for (const node of NODES) {
        const body = k.fence.poll(node, at);
        if (body) send(k.name, node, { kind: 'poll', body });
      }
    }
    // Who is active in the record must be active in fact.
    const reply = k.replies.get(active)?.volumes[0];
    if (
      reply &&
      (reply.role !== 'active' || reply.epoch < record.epoch) &&
      k.fence.activationWaitMs(NAME, at) === 0
    )
      send(k.name, active, { kind: 'activate', epoch: record.epoch, set: toldSet(record.promotable) });
    if (!k.writing || random.chance(0.02)) {
      // The set: every other node, now and then without one of them.
      const others = NODES.filter((n) => n !== active);
      const wanted = random.chance(0.03 * trouble.sets) ? others.filter(() => random.chance(0.5)) : null;
      const next = wanted
        ? nextPromotable(record.promotable, wanted, k.fence.acknowledged(NAME), rules)
        : random.chance(0.2 * trouble.sets)
          ? nextPromotable(record.promotable, others, k.fence.acknowledged(NAME), rules)
          : null;
      if (next) {
        write(k, active, record.epoch, next);
        return;
      }
    }
    // A planned move: the pod goes, then the lease is given back.
    if (k.plannedUntil === 0 && !options.calm && random.chance(0.004 * trouble.moves)) {
      k.plannedUntil = t + 20_000;
      nodeOf(active).wanted = random.chance(0.1);
    }
    if (k.plannedUntil > 0 && t > k.plannedUntil) {
      k.plannedUntil = 0;
      for (const node of nodes) node.wanted = true;
      k.fence.withhold(NAME, false);
    }
    const planned = k.plannedUntil > 0;
    if (planned) {
      if (random.chance(0.1)) k.fence.withhold(NAME, true);
      if (k.fence.released(NAME) === null && random.chance(0.3))
        send(k.name, active, { kind: 'release', epoch: record.epoch });
    }
    // Eager: promotes whenever the fence is over.
    const targets = [...record.promotable.nodes] as NodeName[];
    const released = k.fence.released(NAME);
    if (released !== null && random.chance(0.2)) targets.push(active);
    if (targets.length === 0) return;
    const over = k.fence.fenceWaitMs(NAME, at) === 0;
    if (k.attempt && k.attempt.epoch <= record.epoch) k.attempt = null;
    if (over || planned) {
      if (!k.attempt || random.chance(0.2)) {
        const target = random.pick(targets);
        const seen = Math.max(0, ...[...k.replies.values()].flatMap((r) => r.volumes.map((v) => v.epoch)));
        const epoch = 1 + Math.max(record.epoch, random.chance(0.5) ? seen : 0);
        if (!k.attempt || k.attempt.epoch !== epoch || k.attempt.target !== target) k.consent = null;
        k.attempt = { epoch, target, planned: released !== null };
      }
      const { epoch, target } = k.attempt;
      send(k.name, target, {
        kind: 'consent',
        body: { ...NAME, epoch, term: k.term, released, insist: random.chance(0.1) },
      });
    }
    if (k.attempt && k.consent) {
      const { epoch, target, planned: moved } = k.attempt;
      const verdict = k.fence.mayPromote(NAME, target, epoch, k.consent, at);
      if (verdict.ok && (!k.writing || random.chance(0.05))) {
        k.consent = null;
        const { version, nodes: set } = record.promotable;
        write(
          k,
          target,
          epoch,
          { version: version + 1, nodes: set.filter((n) => n !== target), adding: [] },
          moved,
        );
      }
    }
  };

  /** csi-node announces the writer first; only the answer to that says whether and how long it may run. */
  const publish = (node: Node): void => {
    const askedAt = now(node);
    node.publishing = true;
    push(t + random.wait(5), node.name, node.name, {
      kind: 'csi',
      work: () => {
        const lease = node.fence.announce(NAME, askedAt, now(node));
        push(t + random.wait(20), 'agent', node.name, {
          kind: 'csi',
          work: () => {
            node.publishing = false;
            const end = askedAt + (lease.remainingMs ?? 0);
            if (!node.wanted || lease.role !== 'active' || lease.released || now(node) >= end) return;
            node.publishedIn = lease.epoch;
            node.writer = new WriterFence(lease.epoch, end);
            node.writing = true;
            note(`${node.name} starts a writer in epoch ${lease.epoch}`);
          },
        });
      },
    });
  };

  const csiAsk = (node: Node): void => {
    const askedAt = now(node);
    const writers = node.writer || node.publishing ? [NAME] : [];
    // The question goes to the agent of the same pod; the answer may take its time.
    push(t + random.wait(5), node.name, node.name, {
      kind: 'csi',
      work: () => {
        node.fence.report(writers, null, askedAt, now(node));
        const lease = node.fence.lease(NAME, now(node));
        const delay = random.chance(0.02 * trouble.restarts) ? random.wait(4_000) : random.wait(5);
        push(t + delay, 'agent', node.name, {
          kind: 'csi',
          work: () => {
            if (t < node.csiAwayUntil) return;
            const counted = callers.countFromAsked ? askedAt : now(node);
            if (node.writer) {
              const renewed = callers.ownEpoch
                ? lease
                : { ...lease, epoch: node.writer.epoch ?? lease.epoch };
              node.writer.answer(renewed, counted);
              return;
            }
            if (node.wanted && !node.publishing && lease.role === 'active') publish(node);
          },
        });
      },
    });
  };

  const csi = (node: Node): void => {
    if (t < node.csiAwayUntil) return;
    if (t - node.askAt >= 500) {
      node.askAt = t;
      csiAsk(node);
    }
    if (!node.writer) return;
    if (!node.wanted && random.chance(0.05)) {
      node.writer = null;
      node.writing = false;
      node.stillAt = Number.POSITIVE_INFINITY;
      note(`${node.name}: the pod ended`);
      return;
    }
    const order = callers.ownTimer || t - node.askAt < 2 * STEP ? node.writer.decide(now(node)) : 'run';
    if (order === 'run') {
      node.stillAt = Number.POSITIVE_INFINITY;
      if (!node.writing) {
        node.writing = true;
        outcome.thaws++;
        note(`${node.name} is thawed`);
      }
      return;
    }
    if (node.writing) {
      if (node.stillAt === Number.POSITIVE_INFINITY) node.stillAt = t + FREEZE_MS;
      if (t < node.stillAt) return;
      node.writing = false;
      note(`${node.name} is frozen (${order})`);
    }
    if (order === 'kill') {
      outcome.kills++;
      note(`${node.name}: the frozen writer is killed`);
      node.writer = null;
    }
  };

  while (t < end) {
    t += STEP;
    const p = STEP / 1000;
    // Faults.
    if (!options.calm) {
      if (random.chance(p / 8)) {
        const one = random.pick(everybody);
        const other = random.pick(everybody);
        const key = link(one, other);
        if (one !== other && !cut.delete(key)) cut.add(key);
      }
      if (random.chance(p / 25)) cut.clear();
      if (random.chance(p / 15)) {
        const one = random.pick([...NODES, ...CONTROLLERS]);
        for (const other of everybody) if (other !== one) cut.add(link(one, other));
        note(`${one} is cut off`);
      }
      if (random.chance((p * trouble.pauses) / 20))
        random.pick(controllers).pausedUntil = t + random.wait(12_000);
      if (random.chance((p * trouble.restarts) / 40)) {
        const node = random.pick(nodes);
        note(`the agent of ${node.name} restarts`);
        start(node);
      }
      if (random.chance((p * trouble.restarts) / 40)) random.pick(nodes).awayUntil = t + random.wait(8_000);
      if (random.chance((p * trouble.restarts) / 80)) {
        const node = random.pick(nodes);
        if (node.writer) {
          note(`csi-node of ${node.name} restarts`);
          node.writer = new WriterFence(node.publishedIn, Number.NEGATIVE_INFINITY);
        }
      }
    }
    // Messages.
    while ((queue.first?.at ?? Number.POSITIVE_INFINITY) <= t) {
      const one = queue.pop();
      const { from, to, message } = one;
      if (from !== to && from !== 'agent' && cut.has(link(from, to))) continue;
      if (to === 'api') toApi(from, message);
      else if ((NODES as readonly string[]).includes(to)) {
        const node = nodeOf(to);
        if (node.awayUntil > t && from !== 'agent') push(node.awayUntil + 1, from, to, message);
        else toNode(node, from, message);
      } else {
        const k = controllers.find((c) => c.name === to) as Controller;
        if (k.pausedUntil > t) push(k.pausedUntil + 1, from, to, message);
        else toController(k, from, message);
      }
    }
    for (const k of controllers) {
      if (k.pausedUntil > t || t - k.loopAt < 500) continue;
      k.loopAt = t;
      control(k);
    }
    for (const node of nodes) {
      if (node.awayUntil <= t && now(node) - node.beatAt >= 1_000) {
        node.beatAt = now(node);
        for (const peer of node.fence.peers()) {
          const body = node.fence.beatFor(peer, now(node));
          if (body) send(node.name, peer, { kind: 'beat', body });
        }
      }
      if (node.awayUntil <= t && node.disk.role === 'active' && t - node.batchAt >= 2_000) {
        node.batchAt = t;
        for (const other of NODES)
          if (other !== node.name) send(node.name, other, { kind: 'batch', epoch: node.disk.epoch });
      }
      csi(node);
    }
    const writers = nodes.filter((node) => node.writing);
    if (writers.length === 0) outcome.still += STEP;
    for (const { name, publishedIn } of writers) {
      if (publishedIn < newest && !outcome.bad)
        outcome.bad = `${name} goes on in epoch ${publishedIn} after epoch ${newest} was written`;
      newest = Math.max(newest, publishedIn);
    }
    if (writers.length > 1)
      outcome.bad = `two writers: ${writers.map((w) => `${w.name} (epoch ${w.publishedIn})`).join(' and ')}`;
    if (outcome.bad) {
      note(outcome.bad);
      break;
    }
  }
  return outcome;
}
