/**
 * The controller's side of the agents' HTTP API. Short limits everywhere, one breaker and few slots per agent: an agent
 * that hangs costs its own volumes a refused call, and nobody else anything.
 */
import { readFileSync, statSync } from 'node:fs';
import { isIP } from 'node:net';
import { readToken } from '../../lib/agent/config.ts';
import { SimpleVolumeError } from '../../lib/core/errors.ts';
import { createHttpClient, type HttpClient, RemoteError } from '../../lib/core/http-client.ts';
import type { Clock } from '../../lib/core/parts.ts';
import { AGENT_TLS_NAME } from '../../lib/core/tls.ts';
import type { Pod } from '../cluster/index.ts';

/** Who an agent's pods are. */
export const AGENT_LABELS = 'app.kubernetes.io/component=agent';
/** Label or annotation of an agent's pod: the pool that it serves. */
export const POOL_KEY = 'simple-volume.shipstuff.io/pool';
/** Annotation of an agent's pod: `https` where the agents serve TLS. */
export const SCHEME_KEY = 'simple-volume.shipstuff.io/scheme';

/** Longest for a question, milliseconds. */
export const READ_MS = 3000;
/** Longest for anything else, milliseconds. */
export const WRITE_MS = 5000;

/** One agent as its pod says. */
export interface AgentAddress {
  node: string;
  pool: string;
  /** of the HTTP API */
  url: string;
  webdavUrl: string;
  /** the pod is Ready, which means that the agent's own readyz says so */
  ready: boolean;
  /** changes with every new pod */
  uid: string;
  pod: string;
}

const hostOf = (ip: string): string => (isIP(ip) === 6 ? `[${ip}]` : ip);

/**
 * Where an agent is, read from its pod: IP, ports by name (`http`, `webdav`), node, and pool from a label or an
 * annotation. Null for a pod that is not placed yet, ended, or is no agent's.
 */
export function agentOfPod(pod: Pod): AgentAddress | null {
  const { metadata, spec, status } = pod;
  const node = spec?.nodeName;
  const ip = status?.podIP ?? status?.podIPs?.[0]?.ip;
  const pool = metadata.labels?.[POOL_KEY] ?? metadata.annotations?.[POOL_KEY];
  if (!node || !ip || !pool || isIP(ip) === 0) return null;
  if (status?.phase === 'Succeeded' || status?.phase === 'Failed') return null;
  const port = (name: string): number | undefined =>
    spec?.containers?.flatMap((one) => one.ports ?? []).find((one) => one.name === name)?.containerPort;
  const http = port('http');
  const webdav = port('webdav');
  if (http === undefined || webdav === undefined) return null;
  const scheme = metadata.annotations?.[SCHEME_KEY] === 'https' ? 'https' : 'http';
  return {
    node,
    pool,
    url: `${scheme}://${hostOf(ip)}:${http}`,
    webdavUrl: `${scheme}://${hostOf(ip)}:${webdav}`,
    ready:
      metadata.deletionTimestamp === undefined &&
      (status?.conditions?.some((one) => one.type === 'Ready' && one.status === 'True') ?? false),
    uid: metadata.uid ?? '',
    pod: metadata.name,
  };
}

/**
 * The agents' token from a file (a mounted Secret): read anew when the file changed, so that a rotated Secret needs no
 * restart. A file that cannot be read any more leaves the last good token in use.
 */
export function tokenFile(file: string): () => string {
  let token = readToken(file);
  let seen = statSync(file).mtimeMs;
  return () => {
    try {
      const { mtimeMs } = statSync(file);
      if (mtimeMs !== seen) {
        token = readToken(file);
        seen = mtimeMs;
      }
    } catch {
      // a Secret's folder is exchanged as a whole; the next call reads it
    }
    return token;
  };
}

/** PEM authorities of a file, undefined without one. */
export const authorities = (file: string | null): string | undefined =>
  file === null ? undefined : readFileSync(file, 'utf8');

export interface AgentCall {
  method?: 'GET' | 'POST' | 'DELETE';
  /** with a leading slash */
  path: string;
  body?: unknown;
  /** at most WRITE_MS; default READ_MS for GET, WRITE_MS otherwise */
  timeoutMs?: number;
  signal?: AbortSignal | undefined;
  maxBytes?: number;
  /**
   * The once-a-second poll, which is itself the probe that closes a breaker: it passes an open one and takes no slot.
   * The caller sees to it that only one is under way.
   */
  probe?: boolean;
}

export interface BreakerState {
  node: string;
  pool: string;
  /** failures in a row without any answer */
  failures: number;
  open: boolean;
  running: number;
  waiting: number;
}

export interface AgentsOptions {
  clock: Clock;
  /** bearer token for an agent; never logged */
  token: (agent: AgentAddress) => string;
  /** PEM of the authorities for agents that serve TLS */
  ca?: string | undefined;
  /** calls at the same time per agent; default 4 */
  perAgent?: number;
  /** calls that may wait for a slot per agent; more are refused at once; default 64 */
  queued?: number;
  /** unanswered calls in a row until the breaker opens; default 2 */
  failures?: number;
  /** first and longest time for which it stays open, ms; default 1,000 and 15,000 */
  openMs?: { first: number; longest: number };
  /** default: the shared client */
  http?: HttpClient;
}

interface Lane {
  address: AgentAddress;
  failures: number;
  openUntil: number;
  /** one call may try whether an agent whose time is over answers again */
  trying: boolean;
  running: number;
  waiting: { go: () => void; fail: (error: Error) => void }[];
}

export const agentKey = (pool: string, node: string): string => `${pool}/${node}`;

/** Whether an agent gave this answer, as opposed to none. */
export const wasAnswered = (error: unknown): error is RemoteError =>
  error instanceof RemoteError && error.answered !== null;

export class Agents {
  private readonly options: AgentsOptions;
  private readonly http: HttpClient;
  private readonly lanes = new Map<string, Lane>();
  private closed = false;

  constructor(options: AgentsOptions) {
    this.options = options;
    this.http =
      options.http ??
      createHttpClient({
        maxSockets: (options.perAgent ?? 4) + 2,
        serverName: AGENT_TLS_NAME,
        ...(options.ca === undefined ? {} : { ca: options.ca }),
      });
  }

  /** The agents that there are now. A new pod starts with a closed breaker. */
  set(agents: readonly AgentAddress[]): void {
    const keep = new Set<string>();
    for (const address of agents) {
      const key = agentKey(address.pool, address.node);
      const lane = this.lanes.get(key);
      // Of two pods on a node (one is being replaced) the Ready one counts, then the one seen first.
      if (keep.has(key) && lane && (lane.address.ready || !address.ready)) continue;
      keep.add(key);
      if (lane) {
        if (lane.address.uid !== address.uid || lane.address.url !== address.url) {
          lane.failures = 0;
          lane.openUntil = Number.NEGATIVE_INFINITY;
        }
        lane.address = address;
      } else {
        this.lanes.set(key, {
          address,
          failures: 0,
          openUntil: Number.NEGATIVE_INFINITY,
          trying: false,
          running: 0,
          waiting: [],
        });
      }
    }
    for (const [key, lane] of this.lanes) {
      if (keep.has(key)) continue;
      this.lanes.delete(key);
      for (const { fail } of lane.waiting.splice(0)) fail(this.away(lane.address, 'its pod is gone'));
    }
  }

  all(): AgentAddress[] {
    return [...this.lanes.values()].map((lane) => lane.address);
  }

  find(pool: string, node: string): AgentAddress | null {
    return this.lanes.get(agentKey(pool, node))?.address ?? null;
  }

  /** Whether its breaker is closed: it answered lately, or nobody asked. */
  answers(pool: string, node: string): boolean {
    const lane = this.lanes.get(agentKey(pool, node));
    return lane !== undefined && lane.failures < this.failureLimit;
  }

  token(address: AgentAddress): string {
    return this.options.token(address);
  }

  states(): BreakerState[] {
    return [...this.lanes.values()].map((lane) => ({
      node: lane.address.node,
      pool: lane.address.pool,
      failures: lane.failures,
      open: lane.failures >= this.failureLimit,
      running: lane.running,
      waiting: lane.waiting.length,
    }));
  }

  private get failureLimit(): number {
    return this.options.failures ?? 2;
  }

  private away(address: AgentAddress, why: string): RemoteError {
    return new RemoteError('NOT_READY', `the agent of ${address.node} is not asked: ${why}`, null);
  }

  /**
   * One call. @throws RemoteError: with `answered` when the agent refused, without when it did not answer or was not
   * asked (breaker open, too many waiting, no pod).
   */
  async call<T>(pool: string, node: string, call: AgentCall): Promise<T> {
    const lane = this.lanes.get(agentKey(pool, node));
    if (this.closed || !lane)
      throw new RemoteError('NOT_READY', `${node} has no agent pod of pool ${pool}`, null);
    if (call.probe) return await this.send<T>(lane, call);
    await this.enter(lane);
    try {
      return await this.send<T>(lane, call);
    } finally {
      lane.trying = false;
      this.release(lane);
    }
  }

  private admitted(lane: Lane): void {
    if (lane.failures < this.failureLimit) return;
    if (this.options.clock.boot() < lane.openUntil || lane.trying)
      throw this.away(lane.address, `it did not answer ${lane.failures} times in a row`);
    lane.trying = true;
  }

  /** Takes a slot, or waits until one is handed over. */
  private async enter(lane: Lane): Promise<void> {
    if (lane.running < (this.options.perAgent ?? 4)) lane.running++;
    else {
      if (lane.waiting.length >= (this.options.queued ?? 64))
        throw this.away(lane.address, 'too many calls wait for it');
      await new Promise<void>((resolve, reject) => {
        lane.waiting.push({ go: resolve, fail: reject });
      });
    }
    try {
      this.admitted(lane);
    } catch (error) {
      // The next one in line finds the same closed door, at once.
      this.release(lane);
      throw error;
    }
  }

  private release(lane: Lane): void {
    const next = lane.waiting.shift();
    if (next) next.go();
    else lane.running--;
  }

  private async send<T>(lane: Lane, call: AgentCall): Promise<T> {
    const { address } = lane;
    const read = (call.method ?? (call.body === undefined ? 'GET' : 'POST')) === 'GET';
    const timeoutMs = Math.min(call.timeoutMs ?? (read ? READ_MS : WRITE_MS), WRITE_MS);
    try {
      const reply = await this.http.call<T>({
        ...(call.method === undefined ? {} : { method: call.method }),
        url: `${address.url}${call.path}`,
        token: this.options.token(address),
        ...(call.body === undefined ? {} : { body: call.body }),
        timeoutMs,
        ...(call.signal === undefined ? {} : { signal: call.signal }),
        ...(call.maxBytes === undefined ? {} : { maxBytes: call.maxBytes }),
      });
      this.heard(lane, address);
      return reply.body;
    } catch (error) {
      if (wasAnswered(error)) this.heard(lane, address);
      else if (error instanceof SimpleVolumeError && error.code !== 'CANCELLED') this.missed(lane, address);
      throw error;
    }
  }

  private heard(lane: Lane, address: AgentAddress): void {
    if (lane.address.uid === address.uid) lane.failures = 0;
  }

  private missed(lane: Lane, address: AgentAddress): void {
    if (lane.address.uid !== address.uid) return;
    lane.failures++;
    if (lane.failures < this.failureLimit) return;
    const { first, longest } = this.options.openMs ?? { first: 1000, longest: 15_000 };
    const ms = Math.min(longest, first * 2 ** Math.min(20, lane.failures - this.failureLimit));
    lane.openUntil = this.options.clock.boot() + ms;
  }

  close(): void {
    this.closed = true;
    for (const lane of this.lanes.values())
      for (const { fail } of lane.waiting.splice(0))
        fail(this.away(lane.address, 'the controller is stopped'));
    this.http.close();
  }
}
