/** The client: typed calls to the API server, each with an end, none faster than allowed. See types.ts for its promises. */
import http from 'node:http';
import https from 'node:https';
import type { TLSSocket } from 'node:tls';
import type { Connection } from './connection.ts';
import { KubeError, reasonOf } from './errors.ts';
import { RateLimit } from './rate.ts';
import { apiVersion } from './resources.ts';
import type {
  CallOptions,
  Clock,
  DeleteOptions,
  JsonPatchStep,
  Kube,
  KubeCounters,
  KubeObject,
  ListOptions,
  ObjectName,
  Page,
  PatchOptions,
  Resource,
  WatchEvent,
  WatchOptions,
  WriteOptions,
} from './types.ts';

const CALL_MS = 10_000;
const PAGE = 500;
const MAX_REPLY_BYTES = 64 * 1024 * 1024;
/** An object may have 1.5 MiB in etcd, and the JSON of a watch says it in one line. */
const MAX_LINE_BYTES = 16 * 1024 * 1024;
/** For the answer's first byte of a watch, ms. */
const WATCH_START_MS = 15_000;
const UNFIT_PATCH = /the server rejected our request due to an error in our request/;
/** Reviews ask; they change nothing. */
const REVIEWS = ['authentication.k8s.io', 'authorization.k8s.io'];

export interface KubeOptions {
  connection: Connection;
  clock: Clock;
  /** own limit; default 20 requests a second, 40 at once */
  rate?: { perSecond: number; burst: number };
  /** shown in the API server's audit log */
  userAgent?: string;
}

interface Request {
  /** for the counters, as a role's rules say it: `patch simplevolumes/status` */
  counted: string;
  method: 'GET' | 'POST' | 'PUT' | 'PATCH' | 'DELETE';
  path: string;
  body?: unknown;
  contentType?: string;
  write: boolean;
  options: CallOptions;
}

interface Reply {
  status: number;
  retryAfterMs: number | null;
  text: string;
}

interface Shared {
  options: KubeOptions;
  limit: RateLimit;
  counters: KubeCounters;
  watches: Set<AbortController>;
  closed: boolean;
}

export function createKube(options: KubeOptions): Kube {
  return new Client(
    {
      options,
      limit: new RateLimit({ ...(options.rate ?? { perSecond: 20, burst: 40 }), clock: options.clock }),
      counters: {
        requests: 0,
        failed: {},
        throttledByServer: 0,
        waitedMs: 0,
        connections: 0,
        byVerb: new Map(),
      },
      watches: new Set(),
      closed: false,
    },
    null,
  );
}

/** `/api/v1/...` or `/apis/GROUP/VERSION/...` of a kind or of one object. */
function pathOf(
  kind: Resource,
  name: { namespace?: string | undefined; name?: string },
  sub?: string,
): string {
  const parts = [kind.group === '' ? `/api/${kind.version}` : `/apis/${kind.group}/${kind.version}`];
  if (kind.namespaced && name.namespace !== undefined)
    parts.push(`namespaces/${encodeURIComponent(name.namespace)}`);
  parts.push(kind.plural);
  if (name.name !== undefined) {
    if (name.name === '') throw new KubeError('Invalid', `a ${kind.kind} without a name`, { notSent: true });
    if (kind.namespaced && name.namespace === undefined)
      throw new KubeError('Invalid', `a ${kind.kind} without a namespace`, { notSent: true });
    parts.push(encodeURIComponent(name.name));
  }
  if (sub !== undefined) parts.push(sub);
  return parts.join('/');
}

function withQuery(path: string, query: Record<string, string | number | boolean | undefined>): string {
  const search = new URLSearchParams();
  for (const [name, value] of Object.entries(query)) {
    if (value !== undefined && value !== '') search.set(name, String(value));
  }
  return search.size === 0 ? path : `${path}?${search}`;
}

/** Seconds or an HTTP date (RFC 9110, 10.2.3). */
export function parseRetryAfter(text: string | undefined, now: number): number | null {
  if (text === undefined) return null;
  if (/^\d{1,6}$/.test(text.trim())) return Number(text) * 1000;
  const date = Date.parse(text);
  return Number.isNaN(date) ? null : Math.max(0, date - now);
}

class Client implements Kube {
  private readonly shared: Shared;
  private readonly allowed: (() => boolean) | null;

  constructor(shared: Shared, allowed: (() => boolean) | null) {
    this.shared = shared;
    this.allowed = allowed;
  }

  get counters(): KubeCounters {
    return this.shared.counters;
  }

  gated(allowed: () => boolean): Kube {
    const before = this.allowed;
    return new Client(this.shared, before ? () => before() && allowed() : allowed);
  }

  close(): void {
    this.shared.closed = true;
    for (const watch of this.shared.watches) watch.abort();
    this.shared.options.connection.close();
  }

  get<T extends KubeObject>(kind: Resource<T>, name: ObjectName, options: CallOptions = {}): Promise<T> {
    return this.json<T>({
      counted: counted('get', kind),
      method: 'GET',
      path: pathOf(kind, name),
      write: false,
      options,
    });
  }

  async find<T extends KubeObject>(
    kind: Resource<T>,
    name: ObjectName,
    options: CallOptions = {},
  ): Promise<T | null> {
    try {
      return await this.get(kind, name, options);
    } catch (error) {
      if (error instanceof KubeError && error.reason === 'NotFound') return null;
      throw error;
    }
  }

  async page<T extends KubeObject>(kind: Resource<T>, options: ListOptions = {}): Promise<Page<T>> {
    const path = withQuery(pathOf(kind, { namespace: options.namespace }), {
      labelSelector: options.labelSelector,
      fieldSelector: options.fieldSelector,
      limit: options.limit ?? PAGE,
      continue: options.continue,
      resourceVersion: options.resourceVersion,
    });
    const list = await this.json<{
      items?: T[] | null;
      metadata?: { resourceVersion?: string; continue?: string };
    }>({ counted: counted('list', kind), method: 'GET', path, write: false, options });
    const resourceVersion = list.metadata?.resourceVersion;
    if (!resourceVersion || (list.items !== null && !Array.isArray(list.items)))
      throw new KubeError('BadReply', `GET ${path.split('?')[0]} answered something that is not a list`);
    return { items: list.items ?? [], resourceVersion, continue: list.metadata?.continue || null };
  }

  async *list<T extends KubeObject>(kind: Resource<T>, options: ListOptions = {}): AsyncIterable<T> {
    let next: string | null = options.continue ?? null;
    do {
      const page: Page<T> = await this.page(kind, { ...options, continue: next ?? undefined });
      yield* page.items;
      next = page.continue;
    } while (next !== null);
  }

  create<T extends KubeObject>(kind: Resource<T>, object: T, options: WriteOptions = {}): Promise<T> {
    return this.json<T>({
      counted: counted('create', kind),
      method: 'POST',
      path: withQuery(pathOf(kind, { namespace: object.metadata.namespace }), dryRun(options)),
      body: { ...object, apiVersion: apiVersion(kind), kind: kind.kind },
      write: !REVIEWS.includes(kind.group),
      options,
    });
  }

  async replace<T extends KubeObject>(kind: Resource<T>, object: T, options: WriteOptions = {}): Promise<T> {
    if (!object.metadata.resourceVersion)
      throw new KubeError('Invalid', `replacing a ${kind.kind} needs its resourceVersion`, { notSent: true });
    return await this.json<T>({
      counted: counted('update', kind, options.subresource),
      method: 'PUT',
      path: withQuery(pathOf(kind, object.metadata, options.subresource), dryRun(options)),
      body: { ...object, apiVersion: apiVersion(kind), kind: kind.kind },
      write: true,
      options,
    });
  }

  async merge<T extends KubeObject>(
    kind: Resource<T>,
    name: ObjectName,
    patch: object,
    options: PatchOptions = {},
  ): Promise<T> {
    const only = {
      ...(options.resourceVersion === undefined ? {} : { resourceVersion: options.resourceVersion }),
      ...(options.uid === undefined ? {} : { uid: options.uid }),
    };
    const asked = patch as { metadata?: object };
    try {
      return await this.json<T>({
        counted: counted('patch', kind, options.subresource),
        method: 'PATCH',
        path: withQuery(pathOf(kind, name, options.subresource), dryRun(options)),
        body: Object.keys(only).length > 0 ? { ...patch, metadata: { ...asked.metadata, ...only } } : patch,
        contentType: 'application/merge-patch+json',
        write: true,
        options,
      });
    } catch (error) {
      // Another object of the same name is answered as an attempt to change its uid.
      if (
        options.uid &&
        error instanceof KubeError &&
        error.status === 422 &&
        /metadata\.uid/.test(error.message)
      )
        throw new KubeError('Conflict', error.message, { status: 422 });
      throw error;
    }
  }

  async jsonPatch<T extends KubeObject>(
    kind: Resource<T>,
    name: ObjectName,
    steps: readonly JsonPatchStep[],
    options: WriteOptions = {},
  ): Promise<T> {
    try {
      return await this.json<T>({
        counted: counted('patch', kind, options.subresource),
        method: 'PATCH',
        path: withQuery(pathOf(kind, name, options.subresource), dryRun(options)),
        body: steps,
        contentType: 'application/json-patch+json',
        write: true,
        options,
      });
    } catch (error) {
      // A step that does not fit the object is answered with a 422 that names no field (apiserver, patch.go).
      if (error instanceof KubeError && error.status === 422 && UNFIT_PATCH.test(error.message))
        throw new KubeError('Conflict', error.message, { status: 422 });
      throw error;
    }
  }

  async delete<T extends KubeObject>(
    kind: Resource<T>,
    name: ObjectName,
    options: DeleteOptions = {},
  ): Promise<boolean> {
    const preconditions = {
      ...(options.uid === undefined ? {} : { uid: options.uid }),
      ...(options.resourceVersion === undefined ? {} : { resourceVersion: options.resourceVersion }),
    };
    const body = {
      apiVersion: 'v1',
      kind: 'DeleteOptions',
      ...(options.gracePeriodSeconds === undefined ? {} : { gracePeriodSeconds: options.gracePeriodSeconds }),
      ...(options.propagation === undefined ? {} : { propagationPolicy: options.propagation }),
      ...(Object.keys(preconditions).length > 0 ? { preconditions } : {}),
    };
    try {
      await this.json({
        counted: counted('delete', kind),
        method: 'DELETE',
        path: pathOf(kind, name),
        body,
        write: true,
        options,
      });
      return true;
    } catch (error) {
      if (error instanceof KubeError && error.reason === 'NotFound') return false;
      throw error;
    }
  }

  async raw(path: string, options: CallOptions = {}): Promise<unknown> {
    return await this.json({ counted: 'get other', method: 'GET', path, write: false, options });
  }

  private count(what: string): void {
    const { counters } = this.shared;
    counters.requests++;
    counters.byVerb.set(what, (counters.byVerb.get(what) ?? 0) + 1);
  }

  /* One call with its waiting and its repetitions. */

  private async json<T>(request: Request): Promise<T> {
    const { counters } = this.shared;
    try {
      const text = await this.call(request);
      try {
        return JSON.parse(text) as T;
      } catch {
        throw new KubeError('BadReply', `${name(request)} answered something that is not JSON`);
      }
    } catch (error) {
      const reason = error instanceof KubeError ? error.reason : 'BadReply';
      counters.failed[reason] = (counters.failed[reason] ?? 0) + 1;
      throw error;
    }
  }

  private async call(request: Request): Promise<string> {
    const { options, limit, counters } = this.shared;
    const { clock, connection } = options;
    const ends = clock.boot() + (request.options.timeoutMs ?? CALL_MS);
    let renewed = false;
    let again = false;
    for (;;) {
      if (this.shared.closed) throw new KubeError('Cancelled', 'the client is closed', { notSent: true });
      if (!request.options.urgent) {
        let wait = limit.reserve();
        while (wait > 0) {
          if (clock.boot() + wait > ends)
            throw new KubeError(
              limit.pausedMs() > 0 ? 'TooManyRequests' : 'Timeout',
              `${name(request)} would have to wait ${Math.round(wait)} ms for its turn`,
              { notSent: true, retryAfterMs: wait },
            );
          counters.waitedMs += wait;
          await this.sleep(wait, request);
          wait = limit.pausedMs();
        }
      }
      let reply: Reply;
      try {
        reply = await this.exchange(request, ends);
      } catch (error) {
        const closed = error instanceof ClosedConnection;
        if (closed && request.method === 'GET' && !again) {
          again = true;
          continue;
        }
        throw closed ? error.error : error;
      }
      const { status, retryAfterMs } = reply;
      if (status >= 200 && status < 300) return reply.text;
      const error = answeredError(request, reply);
      if (status === 401 && !renewed) {
        renewed = true;
        connection.renew();
        continue;
      }
      if (status === 429 || (status === 503 && retryAfterMs !== null)) {
        counters.throttledByServer++;
        const wait = retryAfterMs ?? 1000;
        limit.pause(wait);
        if (clock.boot() + wait > ends) throw error;
        // Others wait in `reserve`; what is urgent waits here.
        if (request.options.urgent) await this.sleep(wait, request);
        continue;
      }
      throw error;
    }
  }

  private sleep(ms: number, request: Request): Promise<void> {
    const signal = request.options.signal;
    return new Promise((resolve, reject) => {
      const cancelled = (): void => {
        timer.cancel();
        reject(new KubeError('Cancelled', `${name(request)} was cancelled`, { notSent: true }));
      };
      const timer = this.shared.options.clock.setTimeout(() => {
        signal?.removeEventListener('abort', cancelled);
        resolve();
      }, ms);
      if (signal?.aborted) cancelled();
      else signal?.addEventListener('abort', cancelled, { once: true });
    });
  }

  private async exchange(request: Request, ends: number): Promise<Reply> {
    const { clock, connection, userAgent } = this.shared.options;
    const what = name(request);
    const signal = request.options.signal;
    let sent = false;
    let outgoing: http.ClientRequest | null = null;
    let timer: { cancel(): void } | null = null;
    let cancelled: (() => void) | null = null;
    const gaveUp = new Promise<never>((_, reject) => {
      const stop = (error: KubeError): void => {
        reject(error);
        outgoing?.destroy();
      };
      timer = clock.setTimeout(
        () => {
          connection.dropIdle();
          stop(new KubeError('Timeout', `${what} was not answered in time`, { notSent: !sent }));
        },
        Math.max(0, ends - clock.boot()),
      );
      cancelled = () => stop(new KubeError('Cancelled', `${what} was cancelled`, { notSent: !sent }));
      if (signal?.aborted) cancelled();
      else signal?.addEventListener('abort', cancelled, { once: true });
    });
    gaveUp.catch(() => {});
    const run = async (): Promise<Reply> => {
      let prepared: Awaited<ReturnType<Connection['prepare']>>;
      try {
        prepared = await connection.prepare();
      } catch (cause) {
        throw new KubeError('Unauthorized', `${what}: no credentials: ${(cause as Error).message}`, {
          notSent: true,
          cause,
        });
      }
      const payload = request.body === undefined ? null : Buffer.from(JSON.stringify(request.body));
      const headers: http.OutgoingHttpHeaders = {
        ...prepared.headers,
        accept: 'application/json',
        'user-agent': userAgent ?? 'simple-volume',
        ...(payload === null
          ? {}
          : { 'content-type': request.contentType ?? 'application/json', 'content-length': payload.length }),
      };
      return await new Promise<Reply>((resolve, reject) => {
        let answered = false;
        const made = (connection.server.protocol === 'https:' ? https : http).request(
          urlOf(connection.server, request.path),
          { method: request.method, headers, agent: prepared.calls },
          (response) => {
            answered = true;
            const parts: Buffer[] = [];
            let bytes = 0;
            response.on('data', (part: Buffer) => {
              bytes += part.length;
              if (bytes > MAX_REPLY_BYTES) {
                reject(new KubeError('BadReply', `${what} answered more than ${MAX_REPLY_BYTES} bytes`));
                made.destroy();
              } else parts.push(part);
            });
            response.on('error', broken);
            response.on('end', () => {
              if (!response.complete) return broken(new Error('the answer broke off'));
              resolve({
                status: response.statusCode ?? 0,
                retryAfterMs: parseRetryAfter(response.headers['retry-after'], clock.now()),
                text: Buffer.concat(parts).toString('utf8'),
              });
            });
          },
        );
        outgoing = made;
        const broken = (error: NodeJS.ErrnoException): void => {
          const failure = new KubeError('Unreachable', `${what} failed: ${error.code ?? error.message}`, {
            notSent: !sent,
            cause: error,
          });
          // A kept connection that the server had closed: reads may be asked again at once.
          reject(!answered && made.reusedSocket ? new ClosedConnection(failure) : failure);
        };
        made.on('error', broken);
        made.on('socket', (socket) => {
          const send = (): void => {
            // The very last moment: the lease may have ended while the connection was made.
            if (request.write && this.allowed && !this.allowed()) {
              reject(
                new KubeError('NotLeader', `${what} was not sent: this controller does not lead`, {
                  notSent: true,
                }),
              );
              made.destroy();
              return;
            }
            sent = true;
            made.end(payload ?? undefined);
          };
          const secured = socket as TLSSocket & { secureConnecting?: boolean };
          if (!socket.connecting && !secured.secureConnecting) send();
          else {
            this.shared.counters.connections++;
            socket.once(secured.secureConnecting === undefined ? 'connect' : 'secureConnect', send);
          }
        });
      });
    };
    this.count(request.counted);
    try {
      return await Promise.race([run(), gaveUp]);
    } finally {
      (timer as { cancel(): void } | null)?.cancel();
      if (cancelled) signal?.removeEventListener('abort', cancelled);
    }
  }

  async watch<T extends KubeObject>(
    kind: Resource<T>,
    options: WatchOptions,
    event: (event: WatchEvent<T>) => void,
  ): Promise<void> {
    const { clock, connection, userAgent } = this.shared.options;
    const path = withQuery(pathOf(kind, { namespace: options.namespace }), {
      watch: true,
      allowWatchBookmarks: true,
      resourceVersion: options.resourceVersion,
      timeoutSeconds: options.timeoutSeconds,
      labelSelector: options.labelSelector,
      fieldSelector: options.fieldSelector,
    });
    const what = `WATCH ${kind.plural}`;
    if (this.shared.closed || options.signal?.aborted)
      throw new KubeError('Cancelled', `${what} was cancelled`, { notSent: true });
    const closing = new AbortController();
    this.shared.watches.add(closing);
    this.count(counted('watch', kind));
    let timer: { cancel(): void } | null = null;
    const cancelled = (): void => closing.abort();
    options.signal?.addEventListener('abort', cancelled, { once: true });
    try {
      const prepared = await connection.prepare();
      await new Promise<void>((resolve, reject) => {
        let heard = clock.boot();
        let limit = Math.min(WATCH_START_MS, options.quietMs);
        const fail = (error: KubeError): void => {
          reject(error);
          made.destroy();
        };
        const look = (): void => {
          const left = heard + limit - clock.boot();
          if (left <= 0) fail(new KubeError('Timeout', `${what} heard nothing for ${limit} ms`));
          else timer = clock.setTimeout(look, left);
        };
        const made = (connection.server.protocol === 'https:' ? https : http).request(
          urlOf(connection.server, path),
          {
            headers: {
              ...prepared.headers,
              accept: 'application/json',
              'user-agent': userAgent ?? 'simple-volume',
            },
            agent: prepared.watches,
          },
        );
        const broken = (error: NodeJS.ErrnoException): void => {
          reject(
            new KubeError('Unreachable', `${what} broke: ${error.code ?? error.message}`, { cause: error }),
          );
        };
        made.on('error', broken);
        made.on('response', (response) => {
          heard = clock.boot();
          response.on('error', broken);
          const status = response.statusCode ?? 0;
          if (status !== 200) {
            const parts: Buffer[] = [];
            response.on('data', (part: Buffer) => parts.push(part));
            response.on('end', () => {
              if (status === 401) connection.renew();
              const retryAfterMs = parseRetryAfter(response.headers['retry-after'], clock.now());
              if (status === 429 && retryAfterMs !== null) this.shared.limit.pause(retryAfterMs);
              const text = Buffer.concat(parts).toString('utf8');
              fail(answered(what, { status, retryAfterMs, text }));
            });
            return;
          }
          limit = options.quietMs;
          options.opened?.();
          const lines = new Lines((line) => {
            const read = readEvent<T>(what, line);
            if (read !== null) event(read);
          });
          response.on('data', (part: Buffer) => {
            heard = clock.boot();
            try {
              lines.add(part);
            } catch (error) {
              fail(
                error instanceof KubeError
                  ? error
                  : new KubeError('BadReply', `${what}: ${(error as Error).message}`, { cause: error }),
              );
            }
          });
          response.on('end', () => {
            if (response.complete) resolve();
            else broken(new Error('it broke off'));
          });
        });
        closing.signal.addEventListener(
          'abort',
          () => fail(new KubeError('Cancelled', `${what} was cancelled`)),
          { once: true },
        );
        if (closing.signal.aborted) fail(new KubeError('Cancelled', `${what} was cancelled`));
        look();
        made.end();
      });
    } catch (error) {
      const failure =
        error instanceof KubeError
          ? error
          : new KubeError('Unauthorized', `${what}: ${(error as Error).message}`, { cause: error });
      const { failed } = this.shared.counters;
      failed[failure.reason] = (failed[failure.reason] ?? 0) + 1;
      throw failure;
    } finally {
      (timer as { cancel(): void } | null)?.cancel();
      options.signal?.removeEventListener('abort', cancelled);
      this.shared.watches.delete(closing);
    }
  }
}

/** A request that met a kept connection which was closed: nothing was answered. */
class ClosedConnection extends Error {
  readonly error: KubeError;
  constructor(error: KubeError) {
    super(error.message);
    this.error = error;
  }
}

const dryRun = (options: WriteOptions): Record<string, string | undefined> => ({
  dryRun: options.dryRun ? 'All' : undefined,
  fieldManager: 'simple-volume',
});

const counted = (verb: string, kind: Resource, sub?: string): string =>
  `${verb} ${kind.plural}${sub === undefined ? '' : `/${sub}`}`;

/** Without the query: selectors are long and say little. */
const name = (request: Request): string => `${request.method} ${request.path.split('?')[0]}`;

/** The server's address may have a path of its own (a proxy in front). */
const urlOf = (server: URL, path: string): URL =>
  new URL(server.pathname.replace(/\/+$/, '') + path, server.origin);

const answeredError = (request: Request, reply: Reply): KubeError => answered(name(request), reply);

function answered(what: string, reply: Reply): KubeError {
  let reason: string | undefined;
  let message = '';
  try {
    const status = JSON.parse(reply.text) as { reason?: unknown; message?: unknown };
    if (typeof status.reason === 'string') reason = status.reason;
    if (typeof status.message === 'string') message = status.message.slice(0, 1000);
  } catch {
    // no Status object; the number says enough
  }
  return new KubeError(
    reasonOf(reply.status, reason),
    `${what} answered ${reply.status}${message ? `: ${message}` : ''}`,
    { status: reply.status, retryAfterMs: reply.retryAfterMs },
  );
}

function readEvent<T extends KubeObject>(what: string, line: string): WatchEvent<T> | null {
  const read = JSON.parse(line) as { type?: string; object?: unknown };
  switch (read.type) {
    case 'ADDED':
    case 'MODIFIED':
    case 'DELETED':
      return { type: read.type, object: read.object as T };
    case 'BOOKMARK': {
      const version = (read.object as KubeObject | undefined)?.metadata?.resourceVersion;
      return version ? { type: 'BOOKMARK', resourceVersion: version } : null;
    }
    case 'ERROR': {
      const status = read.object as { code?: number; reason?: string; message?: string } | undefined;
      const code = status?.code ?? 500;
      throw new KubeError(reasonOf(code, status?.reason), `${what} ended: ${status?.message ?? code}`, {
        status: code,
      });
    }
    default:
      return null; // of a newer API
  }
}

/** Cuts bytes into lines without putting the whole stream together. */
class Lines {
  private parts: Buffer[] = [];
  private bytes = 0;
  private readonly line: (line: string) => void;

  constructor(line: (line: string) => void) {
    this.line = line;
  }

  add(part: Buffer): void {
    let from = 0;
    for (let at = part.indexOf(10); at >= 0; at = part.indexOf(10, from)) {
      this.parts.push(part.subarray(from, at));
      const whole = this.parts.length === 1 ? (this.parts[0] as Buffer) : Buffer.concat(this.parts);
      this.parts = [];
      this.bytes = 0;
      from = at + 1;
      if (whole.length > 0) this.line(whole.toString('utf8'));
    }
    if (from < part.length) {
      this.bytes += part.length - from;
      if (this.bytes > MAX_LINE_BYTES)
        throw new KubeError('BadReply', `a line of a watch is longer than ${MAX_LINE_BYTES} bytes`);
      this.parts.push(part.subarray(from));
    }
  }
}
