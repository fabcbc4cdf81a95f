/**
 * A cluster of agents on this machine: real processes on loopback, each with a pool of its own in one folder.
 * The demonstration, the benchmarks and the tests with real programs run on it, so all three see exactly what
 * `simple-volume agent` does and nothing that only works inside one process.
 */
import { type ChildProcess, spawn } from 'node:child_process';
import { randomBytes } from 'node:crypto';
import { closeSync, existsSync, mkdirSync, openSync, readFileSync, rmSync, writeFileSync } from 'node:fs';
import { mkdtemp } from 'node:fs/promises';
import { request as httpRequest } from 'node:http';
import { request as tlsRequest } from 'node:https';
import { createServer } from 'node:net';
import { tmpdir } from 'node:os';
import { join } from 'node:path';
import { fileURLToPath } from 'node:url';
import { addressUrl } from '../agent/config.ts';
import { compareGenerations, type Generation, parseGeneration } from '../core/generation.ts';
import type { ReplicaStatus, SourceStatus, VolumeName } from '../core/parts.ts';
import { POOL_FOLDERS } from '../core/pool-folders.ts';
import { type CopyState, copyState } from '../core/replica-state.ts';
import { AGENT_TLS_NAME } from '../core/tls.ts';

const LOOPBACK = '127.0.0.1';

export const PROJECT = fileURLToPath(new URL('../..', import.meta.url));

export type VolumeStatus = SourceStatus | ReplicaStatus;

/** What the agent answers instead of 2xx. */
export class AgentRefusal extends Error {
  readonly status: number;
  readonly code: string;
  constructor(status: number, code: string, message: string) {
    super(`${status} ${code}: ${message}`);
    this.name = 'AgentRefusal';
    this.status = status;
    this.code = code;
  }
}

export const sleep = (ms: number): Promise<void> => new Promise((resolve) => setTimeout(resolve, ms));

/** Monotonic milliseconds. */
export const clock = (): number => performance.now();

/**
 * Asks until `probe` gives something else than null, undefined or false.
 * @param limitMs after this time the promise rejects, naming `what` and the last error of `probe`
 */
export async function waitFor<T>(
  what: string,
  probe: () => Promise<T | null | undefined | false> | T | null | undefined | false,
  limitMs = 30_000,
  everyMs = 50,
): Promise<T> {
  const end = clock() + limitMs;
  let last: unknown = null;
  for (;;) {
    try {
      const value = await probe();
      if (value !== null && value !== undefined && value !== false) return value;
      last = null;
    } catch (error) {
      last = error;
    }
    if (clock() > end) {
      const why = last instanceof Error ? `: ${last.message}` : '';
      throw new Error(`${what}: not within ${limitMs} ms${why}`);
    }
    await sleep(everyMs);
  }
}

/**
 * One request on a connection of its own: a kept one may have been closed by the agent while this process was busy
 * writing files, and then a request fails that the agent never saw.
 */
function request(
  method: string,
  url: string,
  headers: Record<string, string> = {},
  body = '',
  limitMs = 10_000,
  ca?: string,
): Promise<{ status: number; text: string }> {
  return new Promise((resolve, reject) => {
    const sent = (url.startsWith('https:') ? tlsRequest : httpRequest)(
      url,
      {
        method,
        ...(ca === undefined ? {} : { ca, servername: AGENT_TLS_NAME }),
        agent: false,
        signal: AbortSignal.timeout(limitMs),
        headers: { ...headers, 'content-length': Buffer.byteLength(body) },
      },
      (response) => {
        const pieces: Buffer[] = [];
        response.on('data', (piece: Buffer) => pieces.push(piece));
        response.on('end', () =>
          resolve({ status: response.statusCode ?? 0, text: Buffer.concat(pieces).toString() }),
        );
        response.on('error', reject);
      },
    );
    sent.on('error', reject);
    sent.end(body);
  });
}

/** TCP ports that were free a moment ago, all different. */
export async function freePorts(count: number): Promise<number[]> {
  const servers = await Promise.all(
    Array.from({ length: count }, () => {
      const server = createServer();
      return new Promise<typeof server>((resolve, reject) => {
        server.once('error', reject);
        server.listen(0, '127.0.0.1', () => resolve(server));
      });
    }),
  );
  const ports = servers.map((server) => (server.address() as { port: number }).port);
  await Promise.all(servers.map((server) => new Promise((resolve) => server.close(resolve))));
  return ports;
}

export interface LocalTls {
  cert: string;
  key: string;
  ca: string;
}

export interface AgentOptions {
  node: string;
  /** Folder for the pool, the token and the log. */
  folder: string;
  httpPort: number;
  webdavPort: number;
  /** How it is reached, default 127.0.0.1; with any other it listens on all addresses. */
  host?: string;
  token: string;
  /** Further flags of `simple-volume agent`. */
  flags?: readonly string[];
  env?: Readonly<Record<string, string>>;
  /** Files with a certificate, its key and the authority: the agents serve TLS. */
  tls?: LocalTls;
  /** Command that starts the agent instead of this checkout's own, e.g. the bundled one. */
  command?: readonly string[];
}

/** The command of this checkout, or of SIMPLE_VOLUME_COMMAND (blank-separated) when that is set. */
export function agentCommand(): string[] {
  const given = process.env.SIMPLE_VOLUME_COMMAND;
  if (given !== undefined && given.trim() !== '') return given.trim().split(/\s+/);
  return [process.execPath, join(PROJECT, 'lib/cli/bin.js')];
}

/**
 * Puts a process under PR_SET_PDEATHSIG (prctl(2)), so that agents don't outlive a test that was killed. Where
 * util-linux has no setpriv they do.
 */
function diesWithUs(): string[] {
  const setpriv = ['/usr/bin/setpriv', '/bin/setpriv'].find((file) => existsSync(file));
  return setpriv ? [setpriv, '--pdeathsig', 'KILL'] : [];
}

/** One agent process and what is needed to talk to it. */
export class LocalAgent {
  readonly node: string;
  readonly pool: string;
  readonly url: string;
  readonly webdavUrl: string;
  readonly token: string;
  readonly logFile: string;
  readonly #options: AgentOptions;
  readonly #ca: string | undefined;
  #child: ChildProcess | null = null;
  #ended: Promise<{ code: number | null; signal: NodeJS.Signals | null }> | null = null;

  constructor(options: AgentOptions) {
    this.#options = options;
    this.node = options.node;
    this.token = options.token;
    this.pool = join(options.folder, `pool-${options.node}`);
    this.logFile = join(options.folder, `agent-${options.node}.log`);
    const scheme = options.tls ? 'https' : 'http';
    const host = options.host ?? LOOPBACK;
    this.url = addressUrl({ host, port: options.httpPort }, scheme);
    this.webdavUrl = addressUrl({ host, port: options.webdavPort }, scheme);
    this.#ca = options.tls && readFileSync(options.tls.ca, 'utf8');
  }

  get pid(): number | null {
    return this.running ? (this.#child?.pid ?? null) : null;
  }

  get running(): boolean {
    return this.#child !== null && this.#child.exitCode === null && this.#child.signalCode === null;
  }

  /** Starts the process and waits until it says that it is ready. The pool survives from one start to the next. */
  async start(limitMs = 60_000): Promise<void> {
    if (this.running) return;
    const { folder, httpPort, webdavPort, tls, host } = this.#options;
    const listen = host === undefined ? LOOPBACK : '*';
    mkdirSync(this.pool, { recursive: true });
    const tokenFile = join(folder, `token-${this.node}`);
    if (!existsSync(tokenFile)) writeFileSync(tokenFile, `${this.token}\n`, { mode: 0o600 });
    const [program, ...args] = [...diesWithUs(), ...(this.#options.command ?? agentCommand())];
    if (program === undefined) throw new Error('no command to start an agent with');
    const log = openSync(this.logFile, 'a');
    try {
      const child = spawn(
        program,
        [
          ...args,
          'agent',
          ...['--node', this.node, '--pool-name', 'local', '--pool-path', this.pool],
          ...['--http', `${listen}:${httpPort}`, '--webdav', `${listen}:${webdavPort}`],
          ...(host === undefined ? [] : ['--advertise-host', host]),
          ...(tls ? ['--tls-cert', tls.cert, '--tls-key', tls.key, '--ca-file', tls.ca] : []),
          ...['--token-file', tokenFile],
          ...(this.#options.flags ?? []),
        ],
        {
          cwd: folder,
          stdio: ['ignore', log, log],
          env: { ...process.env, ...this.#options.env },
        },
      );
      this.#child = child;
      this.#ended = new Promise((resolve) => {
        child.once('error', () => resolve({ code: 127, signal: null }));
        child.once('exit', (code, signal) => resolve({ code, signal }));
      });
    } finally {
      closeSync(log);
    }
    await waitFor(
      `agent ${this.node}`,
      async () => {
        if (!this.running) {
          throw new Error(`it ended at once; the end of ${this.logFile}:\n${this.logTail()}`);
        }
        return (await this.#request('GET', '/readyz')).status === 200;
      },
      limitMs,
    ).catch((error: unknown) => {
      throw new Error(
        `${error instanceof Error ? error.message : error}\nlog: ${this.logFile}\n${this.logTail()}`,
      );
    });
  }

  /** Last lines of its log, for error messages. */
  logTail(lines = 12): string {
    try {
      return readFileSync(this.logFile, 'utf8').trimEnd().split('\n').slice(-lines).join('\n');
    } catch {
      return '';
    }
  }

  /** Ends it and waits. `SIGTERM` is the clean stop, `SIGKILL` the power cut of a process. */
  async end(signal: NodeJS.Signals): Promise<{ code: number | null; signal: NodeJS.Signals | null } | null> {
    if (this.#child === null || this.#ended === null) return null;
    if (this.running) this.#child.kill(signal);
    const ended = await this.#ended;
    this.#child = null;
    return ended;
  }

  /** Clean stop; kills what has not stopped after 15 s. */
  async stop(): Promise<void> {
    const child = this.#child;
    if (child === null) return;
    const late = setTimeout(() => child.kill('SIGKILL'), 15_000);
    try {
      await this.end('SIGTERM');
    } finally {
      clearTimeout(late);
    }
  }

  #request(
    method: string,
    path: string,
    headers: Record<string, string> = {},
    body = '',
    limitMs = 10_000,
  ): Promise<{ status: number; text: string }> {
    return request(method, `${this.url}${path}`, headers, body, limitMs, this.#ca);
  }

  /**
   * One request with the agent's token.
   * @throws AgentRefusal for an answer that is not 2xx; an error of the socket when the agent is away
   */
  async call<T = unknown>(method: string, path: string, body?: unknown, limitMs = 120_000): Promise<T> {
    const { status, text } = await this.#request(
      method,
      path,
      {
        authorization: `Bearer ${this.token}`,
        ...(body === undefined ? {} : { 'content-type': 'application/json' }),
      },
      body === undefined ? '' : JSON.stringify(body),
      limitMs,
    );
    if (status < 200 || status > 299) {
      let code = 'UNKNOWN';
      let message = text.slice(0, 500);
      try {
        const error = (JSON.parse(text) as { error: { code: string; message: string } }).error;
        code = error.code;
        message = error.message;
      } catch {
        // Not one of the agent's own errors: the text says more than nothing.
      }
      throw new AgentRefusal(status, code, message);
    }
    return (text === '' ? null : JSON.parse(text)) as T;
  }

  /** Where the volume's tree is on this node: the live tree on the active node, the applied copy on a replica. */
  live(volume: VolumeName): string {
    return join(this.pool, volume.namespace, volume.volume);
  }

  /** The newest sealed generation as plain files, on the active node. */
  shadow(volume: VolumeName): string {
    return join(this.pool, '.simple-volume-shadows', volume.namespace, volume.volume, 'current', 'data');
  }

  backups(volume: VolumeName): string {
    return join(this.pool, POOL_FOLDERS.backups, volume.namespace, volume.volume);
  }

  /** Status in either role; null while the agent does not know the volume. */
  async status(volume: VolumeName, limitMs = 5000): Promise<VolumeStatus | null> {
    try {
      return await this.call<VolumeStatus>(
        'GET',
        `/replication/volumes/${volume.namespace}/${volume.volume}`,
        undefined,
        limitMs,
      );
    } catch (error) {
      if (error instanceof AgentRefusal && error.status === 404) return null;
      throw error;
    }
  }

  /** One sample of its Prometheus metrics, summed over all labels; null when there is none of that name. */
  async metric(name: string): Promise<number | null> {
    const { text } = await this.#request('GET', '/metrics');
    let sum: number | null = null;
    for (const line of text.split('\n')) {
      const match = /^([a-zA-Z_:][a-zA-Z0-9_:]*)(?:\{[^}]*\})?\s+(\S+)/.exec(line);
      if (match?.[1] === name) sum = (sum ?? 0) + Number(match[2]);
    }
    return sum;
  }
}

export interface WatchOptions {
  epoch?: number;
  targets: readonly string[];
  debounce?: string;
  maxDelay?: string;
  includePaths?: readonly string[];
  excludePaths?: readonly string[];
  confirmedReplicas?: number;
  consistencyMode?: 'shadow' | 'live';
}

export interface ClusterOptions {
  /** Default: a new folder under the system's temporary one. */
  folder?: string;
  /** Default: a, b, c. */
  nodes?: readonly string[];
  flags?: readonly string[];
  env?: Readonly<Record<string, string>>;
  command?: readonly string[];
  tls?: LocalTls;
  /** How the agents are reached, default 127.0.0.1. */
  host?: string;
  /** Prefix of the temporary folder. */
  prefix?: string;
}

/** What the failover decision needs to know of a node's copy; the shape of controller/plan's own input. */
export interface ReplicaReport {
  node: string;
  generation: string | null;
  epoch: number;
  state: CopyState;
  freshAgeMs: number | null;
  reportAgeMs: number;
  reachable: boolean;
  inUse: boolean;
}

/** Several agents, by node name. */
export class LocalCluster {
  readonly folder: string;
  readonly agents: ReadonlyMap<string, LocalAgent>;
  readonly #ownsFolder: boolean;

  private constructor(folder: string, agents: ReadonlyMap<string, LocalAgent>, ownsFolder: boolean) {
    this.folder = folder;
    this.agents = agents;
    this.#ownsFolder = ownsFolder;
  }

  /** Chooses ports and tokens and starts nothing. */
  static async create(options: ClusterOptions = {}): Promise<LocalCluster> {
    const nodes = options.nodes ?? ['a', 'b', 'c'];
    const folder = options.folder ?? (await mkdtemp(join(tmpdir(), options.prefix ?? 'simple-volume-')));
    mkdirSync(folder, { recursive: true });
    const ports = await freePorts(nodes.length * 2);
    const agents = new Map(
      nodes.map((node, i): [string, LocalAgent] => [
        node,
        new LocalAgent({
          node,
          folder,
          httpPort: ports[i * 2] as number,
          webdavPort: ports[i * 2 + 1] as number,
          token: randomBytes(24).toString('base64url'),
          ...(options.flags === undefined ? {} : { flags: options.flags }),
          ...(options.env === undefined ? {} : { env: options.env }),
          ...(options.host === undefined ? {} : { host: options.host }),
          ...(options.command === undefined ? {} : { command: options.command }),
          ...(options.tls === undefined ? {} : { tls: options.tls }),
        }),
      ]),
    );
    return new LocalCluster(folder, agents, options.folder === undefined);
  }

  /** Chooses, starts all and waits until all are ready. */
  static async start(options: ClusterOptions = {}): Promise<LocalCluster> {
    const cluster = await LocalCluster.create(options);
    try {
      await Promise.all([...cluster.agents.values()].map((agent) => agent.start()));
    } catch (error) {
      await cluster.stop();
      throw error;
    }
    return cluster;
  }

  agent(node: string): LocalAgent {
    const agent = this.agents.get(node);
    if (agent === undefined) throw new Error(`no agent of the name ${node}`);
    return agent;
  }

  /** Makes `node` the active one of `volume` with the other nodes named as targets. */
  async watch(node: string, volume: VolumeName, options: WatchOptions): Promise<SourceStatus> {
    const { targets, ...rest } = options;
    const agent = this.agent(node);
    mkdirSync(agent.live(volume), { recursive: true });
    return agent.call<SourceStatus>('POST', '/replication/watch/start', {
      ...volume,
      source: { url: agent.url, webdavUrl: agent.webdavUrl },
      targets: targets.map((name) => {
        const target = this.agent(name);
        return { url: target.url, token: target.token, node: name };
      }),
      ...rest,
    });
  }

  /**
   * Seals all that is there now and waits until every target holds it.
   * @returns the generation
   */
  async settle(node: string, volume: VolumeName, limitMs = 60_000): Promise<string> {
    const end = clock() + limitMs;
    const agent = this.agent(node);
    const targets = (await agent.status(volume)) as SourceStatus | null;
    const wanted = targets?.targets.length ?? 0;
    for (;;) {
      const left = Math.max(1000, Math.min(100_000, end - clock()));
      try {
        const reply = await agent.call<{ generation: string; confirmed: string[] }>(
          'POST',
          '/replication/prepare',
          { ...volume, confirm: 'all', timeout: `${Math.round(left)}ms` },
        );
        if (reply.confirmed.length >= wanted) return reply.generation;
        if (clock() > end)
          throw new Error(
            `${reply.generation} was confirmed by ${reply.confirmed.join(', ') || 'nobody'} only`,
          );
      } catch (error) {
        // one request may wait for less than a large first copy takes
        if (!(error instanceof AgentRefusal && error.code === 'TIMEOUT') || clock() > end) throw error;
      }
    }
  }

  /** Waits until the copy on `node` is at `generation` or newer, and idle. */
  async reached(
    node: string,
    volume: VolumeName,
    generation: string,
    limitMs = 60_000,
  ): Promise<ReplicaStatus> {
    const wanted = parseGeneration(generation);
    let last: VolumeStatus | null = null;
    return waitFor(
      `${node} at ${generation}`,
      async () => {
        last = await this.agent(node).status(volume);
        if (last === null || last.role !== 'replica' || last.state !== 'idle' || last.generation === null)
          return null;
        return compareGenerations(parseGeneration(last.generation), wanted) >= 0 ? last : null;
      },
      limitMs,
    ).catch((error: unknown) => {
      throw new Error(
        `${error instanceof Error ? error.message : error}; last status ${JSON.stringify(last)}`,
      );
    });
  }

  /** What each of `nodes` says of its copy, in the shape that the failover decision takes. */
  async reports(volume: VolumeName, nodes: readonly string[]): Promise<ReplicaReport[]> {
    return Promise.all(
      nodes.map(async (node): Promise<ReplicaReport> => {
        const asked = clock();
        const none: ReplicaReport = {
          node,
          generation: null,
          epoch: 0,
          state: 'unknown',
          freshAgeMs: null,
          reportAgeMs: 0,
          reachable: false,
          inUse: false,
        };
        try {
          const status = await this.agent(node).status(volume);
          if (status === null || status.role !== 'replica') return { ...none, reachable: true };
          return {
            ...none,
            generation: status.generation,
            epoch: status.epoch,
            state: copyState(status),
            freshAgeMs: status.freshAgeMs,
            // The answer may be as old as the request.
            reportAgeMs: clock() - asked,
            reachable: true,
          };
        } catch {
          return none;
        }
      }),
    );
  }

  /** Where the logs are, one path a line. */
  logs(): string {
    return [...this.agents.values()].map((agent) => agent.logFile).join('\n');
  }

  /** Stops all agents; the folder is kept when `keep` or when the caller gave it. */
  async stop(keep = false): Promise<void> {
    await Promise.all([...this.agents.values()].map((agent) => agent.stop()));
    if (this.#ownsFolder && !keep) rmSync(this.folder, { recursive: true, force: true });
  }
}

/** The newest of some generations in text form, null when there is none. */
export function newest(generations: readonly (string | null)[]): string | null {
  let best: { text: string; at: Generation } | null = null;
  for (const text of generations) {
    if (text === null) continue;
    const at = parseGeneration(text);
    if (best === null || compareGenerations(at, best.at) > 0) best = { text, at };
  }
  return best?.text ?? null;
}
