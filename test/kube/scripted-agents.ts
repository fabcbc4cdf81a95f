/**
 * Agents that are played: real HTTP, the real fencing machine, no data. They keep the rules that the controller relies
 * on (an older epoch is refused, one node is active, replicas get what the active one seals) and can hang, refuse or be
 * away. Many of them fit into one process.
 */
import http from 'node:http';
import type { AddressInfo } from 'node:net';
import { copyState } from '../../lib/core/replica-state.ts';
import { NO_STATE, NodeFence } from '../../lib/fence/node.ts';

export type AgentMode = 'answers' | 'hangs' | 'away';

export interface PlayedVolume {
  namespace: string;
  volume: string;
  role: 'active' | 'replica';
  epoch: number;
  generation: string | null;
  state: string;
  /** boot clock; when it was last known complete */
  freshAt: number | null;
  policy: Record<string, unknown>;
  targets: { url: string; node: string }[];
  conditions: { type: string; message: string; since: number }[];
}

export interface SeenCall {
  node: string;
  method: string;
  path: string;
  body: Record<string, unknown>;
  at: number;
}

const now = (): number => performance.now();
const seqOf = (generation: string | null): number => Number(generation?.split('-')[1] ?? 0);

class Refusal extends Error {
  readonly status: number;
  readonly code: string;
  constructor(status: number, code: string, message = code) {
    super(message);
    this.status = status;
    this.code = code;
  }
}

export class PlayedAgent {
  readonly node: string;
  readonly volumes = new Map<string, PlayedVolume>();
  /** volumes that a pod has mounted here */
  readonly mounted = new Set<string>();
  fence: NodeFence;
  mode: AgentMode = 'answers';
  /** answers this to calls whose path contains the key */
  readonly refuse = new Map<string, { status: number; code: string }>();
  port = 0;
  freezer = { possible: true, reason: 'played', cgroup: 'v2' as const };
  /** generations stop travelling from here */
  cut = false;
  /** whoever asks over HTTP gets no answer, the other nodes do: the controller alone is cut off from it */
  deaf = false;
  fullSyncMs = 50;
  /** when the leader or a replica last vouched for its writers: a poll that it answered, or a beat that was answered */
  vouchedAt = Number.NEGATIVE_INFINITY;
  space = { freeBytes: 2 ** 40, totalBytes: 2 ** 41 };
  /** bytes of the volumes that were told to grow */
  readonly sizes = new Map<string, number>();
  private readonly cluster: PlayedAgents;
  private readonly runs = new Map<string, { volume: string; ends: number }>();
  private server: http.Server | null = null;

  constructor(cluster: PlayedAgents, node: string) {
    this.cluster = cluster;
    this.node = node;
    this.fence = new NodeFence(node, cluster.leaseMs, 1 + Math.floor(Math.random() * 1e6));
  }

  get url(): string {
    return `http://127.0.0.1:${this.port}`;
  }

  async start(): Promise<void> {
    const server = http.createServer((request, response) => void this.serve(request, response));
    server.keepAliveTimeout = 30_000;
    await new Promise<void>((resolve) => server.listen(this.port, '127.0.0.1', resolve));
    this.port = (server.address() as AddressInfo).port;
    this.server = server;
  }

  async stop(): Promise<void> {
    this.server?.closeAllConnections();
    await new Promise((resolve) => this.server?.close(resolve) ?? resolve(null));
    this.server = null;
  }

  /** From now on. `away`: connections are cut, as when the node has lost its power. */
  set(mode: AgentMode): void {
    this.mode = mode;
    if (mode === 'away') this.server?.closeAllConnections();
  }

  volume(key: string): PlayedVolume | undefined {
    return this.volumes.get(key);
  }

  private async serve(request: http.IncomingMessage, response: http.ServerResponse): Promise<void> {
    const parts: Buffer[] = [];
    request.on('error', () => {});
    response.on('error', () => {});
    try {
      for await (const part of request) parts.push(part as Buffer);
    } catch {
      return;
    }
    if (this.mode === 'away' || this.deaf) return void request.socket.destroy();
    if (this.mode === 'hangs') return;
    const [path = '', query] = (request.url ?? '').split('?');
    const text = Buffer.concat(parts).toString();
    const body = (text === '' ? Object.fromEntries(new URLSearchParams(query)) : JSON.parse(text)) as Record<
      string,
      unknown
    >;
    if (!path.startsWith('/replication/fence/poll') && path !== '/replication/volumes')
      this.cluster.seen.push({ node: this.node, method: request.method ?? '', path, body, at: now() });
    else this.cluster.polls++;
    this.cluster.called(this.node, path, body);
    let status = 200;
    let answer: unknown;
    try {
      if (request.headers.authorization !== `Bearer ${this.cluster.token}`)
        throw new Refusal(401, 'UNAUTHORIZED');
      for (const [part, { status, code }] of this.refuse)
        if (path.includes(part)) throw new Refusal(status, code);
      answer = this.answer(request.method ?? '', path, body);
    } catch (error) {
      status = error instanceof Refusal ? error.status : 500;
      const code = error instanceof Refusal ? error.code : 'INTERNAL';
      answer = { error: { code, message: (error as Error).message } };
    }
    const reply = Buffer.from(JSON.stringify(answer ?? {}));
    response.writeHead(status, { 'content-type': 'application/json', 'content-length': reply.length });
    response.end(reply);
  }

  private known(body: Record<string, unknown>): PlayedVolume {
    const found = this.volumes.get(`${body.namespace}/${body.volume}`);
    if (!found) throw new Refusal(404, 'VOLUME_UNKNOWN');
    if (typeof body.epoch === 'number' && body.epoch < found.epoch) throw new Refusal(409, 'EPOCH_OLD');
    return found;
  }

  /** Makes a volume known here, as a pull or a watch would. */
  open(name: { namespace: string; volume: string }, role: 'active' | 'replica', epoch: number): PlayedVolume {
    const key = `${name.namespace}/${name.volume}`;
    let found = this.volumes.get(key);
    if (!found) {
      found = {
        namespace: name.namespace,
        volume: name.volume,
        role,
        epoch,
        generation: null,
        state: role === 'active' ? 'watching' : 'empty',
        freshAt: null,
        policy: {},
        targets: [],
        conditions: [],
      };
      this.volumes.set(key, found);
      this.fence.open(name, role, epoch, NO_STATE, now());
    } else if (found.role !== role || found.epoch !== epoch) {
      found.role = role;
      found.epoch = epoch;
      this.fence.changed(name, role, epoch, now());
    }
    return found;
  }

  private answer(method: string, path: string, body: Record<string, unknown>): unknown {
    const status = /^\/replication\/volumes\/([^/]+)\/([^/]+)$/.exec(path);
    if (status) return this.report(this.known({ namespace: status[1], volume: status[2] }));
    const run = /^\/replication\/full-sync\/([^/]+)$/.exec(path)?.[1];
    if (run !== undefined && method === 'GET') {
      const found = this.runs.get(run);
      if (!found) throw new Refusal(404, 'NOT_FOUND');
      return { id: run, state: now() >= found.ends ? 'done' : 'running' };
    }
    switch (path) {
      case '/replication/volumes':
        return { volumes: [...this.volumes.values()].map((one) => this.report(one)), pool: this.space };
      case '/replication/watch/start':
        return this.watchStart(body);
      case '/replication/watch/stop': {
        const one = this.known(body);
        if (one.role !== 'active') throw new Refusal(409, 'NOT_ACTIVE');
        one.state = 'stopped';
        return this.report(one);
      }
      case '/replication/prepare': {
        const one = this.known(body);
        if (one.role !== 'active') throw new Refusal(409, 'NOT_ACTIVE');
        this.seal(one);
        const confirmed = one.targets
          .map((target) => target.node)
          .filter(
            (node) =>
              this.cluster.agents.get(node)?.volume(`${one.namespace}/${one.volume}`)?.generation ===
              one.generation,
          );
        return { generation: one.generation, quiescent: true, confirmed };
      }
      case '/replication/sync-batch': {
        const one = this.open(
          body as unknown as { namespace: string; volume: string },
          'replica',
          body.epoch as number,
        );
        one.generation = (body.generation as string) ?? one.generation;
        one.state = 'idle';
        one.freshAt = now();
        return { state: one.state, generation: one.generation };
      }
      case '/replication/full-sync': {
        const one = this.known(body);
        const key = `${one.namespace}/${one.volume}`;
        for (const [id, old] of this.runs)
          if (old.volume === key && now() < old.ends)
            return { id, started: false, reason: 'already-running' };
        const id = `run-${this.node}-${this.runs.size + 1}-${Math.floor(now())}`;
        this.runs.set(id, { volume: key, ends: now() + this.fullSyncMs });
        return { id, started: true };
      }
      case '/replication/pool':
        return { space: this.space, volumes: this.volumes.size };
      case '/replication/volume/record': {
        const found = this.volumes.get(`${body.namespace}/${body.volume}`);
        if (!found) return { known: false };
        const { role, epoch, state } = found;
        return {
          known: true,
          role,
          epoch,
          bytes: this.sizes.get(found.volume) ?? null,
          watched: state !== 'stopped',
        };
      }
      case '/replication/volume/resize':
        this.known(body);
        this.sizes.set(body.volume as string, body.bytes as number);
        return { bytes: body.bytes };
      case '/replication/volume/remove': {
        const key = `${body.namespace}/${body.volume}`;
        if (!this.volumes.has(key)) return { removed: false };
        const one = this.known(body);
        if (one.role === 'active') throw new Refusal(409, 'VOLUME_ACTIVE');
        this.volumes.delete(key);
        this.fence.close(one);
        return { removed: true };
      }
      case '/replication/force': {
        const one = this.known(body);
        one.conditions = one.conditions.filter((c) => c.type !== body.condition);
        return this.report(one);
      }
      case '/replication/fence/poll':
        this.vouchedAt = now();
        return this.fence.poll(body as never, now()).reply;
      case '/replication/fence/consent':
        return this.fence.consent(body as never, now()).reply;
      case '/replication/fence/release': {
        const name = body as unknown as { namespace: string; volume: string };
        const outcome = this.fence.release(name, body.epoch as number, now());
        if ('refused' in outcome)
          throw new Refusal(409, outcome.refused === 'WRITER_RUNS' ? 'VOLUME_IN_USE' : outcome.refused);
        return { node: this.node, epoch: body.epoch, released: true };
      }
      default:
        throw new Refusal(404, 'NOT_FOUND');
    }
  }

  private watchStart(body: Record<string, unknown>): unknown {
    const name = body as unknown as { namespace: string; volume: string };
    const epoch = (body.epoch as number | undefined) ?? 1;
    const known = this.volumes.get(`${name.namespace}/${name.volume}`);
    if (known && epoch < known.epoch) throw new Refusal(409, 'EPOCH_OLD');
    const one = this.open(name, 'active', epoch);
    const { namespace: _, volume: __, epoch: ___, source: ____, targets, debounce, ...policy } = body;
    const text = String(debounce ?? '2s');
    const debounceMs = text.endsWith('ms') ? Number.parseInt(text, 10) : Number.parseFloat(text) * 1000;
    one.policy = { ...policy, debounceMs, maxDelayMs: debounceMs * 5 };
    one.targets = (targets as { url: string; node: string; token: string }[]).map(({ url, node, token }) => {
      if (token !== this.cluster.token) throw new Refusal(400, 'FIELD_INVALID', 'a token is wrong');
      return { url, node };
    });
    one.state = 'watching';
    if (one.generation === null || Number(one.generation.split('-')[0]) !== epoch) this.seal(one);
    else this.deliver(one);
    return this.report(one);
  }

  /** A new generation, and to the targets that answer. */
  seal(one: PlayedVolume): void {
    one.generation = `${one.epoch}-${seqOf(one.generation) + 1}`;
    this.deliver(one);
  }

  deliver(one: PlayedVolume): void {
    if (this.cut) return;
    for (const { node } of one.targets) {
      const target = this.cluster.agents.get(node);
      if (target?.mode !== 'answers' || target === this || target.cut) continue;
      const key = `${one.namespace}/${one.volume}`;
      if ((target.volumes.get(key)?.epoch ?? 0) > one.epoch) continue;
      const copy = target.open(one, 'replica', one.epoch);
      copy.generation = one.generation;
      copy.state = 'idle';
      copy.freshAt = now();
    }
  }

  private report(one: PlayedVolume): object {
    const key = `${one.namespace}/${one.volume}`;
    const shared = {
      namespace: one.namespace,
      volume: one.volume,
      role: one.role,
      state: one.state,
      epoch: one.epoch,
      generation: one.generation,
      entries: 3,
      bytes: 3000,
      conditions: one.conditions,
    };
    if (one.role === 'replica')
      return {
        ...shared,
        wanted: one.generation,
        freshAgeMs: one.freshAt === null ? null : now() - one.freshAt,
        lastPull: null,
        source: null,
      };
    return {
      ...shared,
      quiescent: true,
      delivered: one.generation,
      pending: 0,
      pendingMs: null,
      policy: one.policy,
      targets: one.targets.map(({ url, node }) => {
        const copy = this.cluster.agents.get(node)?.volumes.get(key);
        return {
          url,
          node,
          confirmed: copy?.epoch === one.epoch ? copy.generation : null,
          state: copy ? copyState({ state: copy.state as never, conditions: [] }) : 'unknown',
          lastError: null,
          lastAnswerMs: 100,
        };
      }),
      watch: { directories: 1, unwatched: 0, overflows: 0, events: 0 },
      lastBatch: null,
    };
  }

  /** Once in a while: beats to peers, csi-node's report, and freshness from the active node. */
  beat(): void {
    if (this.mode !== 'answers') return;
    const at = now();
    const writers = [...this.mounted].map((key) => {
      const [namespace, volume] = key.split('/') as [string, string];
      return { namespace, volume };
    });
    this.fence.report(writers, this.freezer, at, at);
    for (const peer of this.fence.peers()) {
      const other = this.cluster.agents.get(peer);
      const beat = this.fence.beatFor(peer, at);
      if (!beat || !other || other.mode !== 'answers' || other.cut || this.cut) continue;
      this.vouchedAt = at;
      this.fence.beatAnswered(peer, other.fence.beat(beat, at).reply, now());
    }
    for (const one of this.volumes.values())
      if (one.role === 'active' && one.state === 'watching') this.deliver(one);
  }

  /** Whether a writer of this volume may run here now, as csi-node would be told. */
  mayWrite(namespace: string, volume: string): boolean {
    const lease = this.fence.lease({ namespace, volume }, now());
    return lease.role === 'active' && (lease.remainingMs === null || lease.remainingMs > 0);
  }
}

export class PlayedAgents {
  readonly agents = new Map<string, PlayedAgent>();
  readonly token = 'played-agents-token-0123456789';
  readonly leaseMs: number;
  /** every call but polls and reports */
  readonly seen: SeenCall[] = [];
  polls = 0;
  /** told of each call that has arrived, before it is carried out */
  called: (node: string, path: string, body: Record<string, unknown>) => void = () => {};
  private timer: NodeJS.Timeout | null = null;
  private readonly beatMs: number;

  constructor(leaseMs: number, beatMs = 200) {
    this.leaseMs = leaseMs;
    this.beatMs = beatMs;
  }

  async add(node: string): Promise<PlayedAgent> {
    const agent = new PlayedAgent(this, node);
    await agent.start();
    this.agents.set(node, agent);
    this.timer ??= setInterval(() => {
      for (const one of this.agents.values()) one.beat();
    }, this.beatMs);
    return agent;
  }

  agent(node: string): PlayedAgent {
    const found = this.agents.get(node);
    if (!found) throw new Error(`no agent ${node}`);
    return found;
  }

  calls(part: string, node?: string): SeenCall[] {
    return this.seen.filter((one) => one.path.includes(part) && (node === undefined || one.node === node));
  }

  async stop(): Promise<void> {
    if (this.timer) clearInterval(this.timer);
    await Promise.all([...this.agents.values()].map((one) => one.stop()));
  }
}
