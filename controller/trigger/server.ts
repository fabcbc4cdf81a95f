/**
 * The manual trigger over HTTP:
 *   POST /replication/full-sync/trigger?namespace=NS  {"namespace","claimName"}  -> 202 {started, id[, reason]}
 *   GET  /replication/full-sync/runs/ID?namespace=NS                             -> 200 how it goes or ended
 * The second also as POST, because a proxy that maps methods to verbs asks `get` for GET: whoever may create may then
 * ask with the permission that it has.
 */
import { readFileSync, statSync } from 'node:fs';
import http from 'node:http';
import https from 'node:https';
import type { AddressInfo } from 'node:net';
import { SimpleVolumeError } from '../../lib/core/errors.ts';
import { checkName } from '../../lib/core/names.ts';
import type { Logger } from '../../lib/core/parts.ts';
import { errorText } from '../cluster/index.ts';
import type { Guard } from './guard.ts';
import type { Runs } from './runs.ts';

const BODY_BYTES = 4096;
const REQUEST_MS = 10_000;
const CERTIFICATE_MS = 60_000;

export interface TriggerOptions {
  guard: Guard;
  runs: Runs;
  logger: Logger;
  host: string;
  /** 0 takes a free one */
  port: number;
  /** PEM files; needed with the builtin guard. Read anew when they change. */
  tls?: { certFile: string; keyFile: string } | undefined;
}

export interface TriggerServer {
  readonly url: string;
  readonly requests: ReadonlyMap<number, number>;
  close(): Promise<void>;
}

interface Answer {
  status: number;
  body: object;
  headers?: Record<string, string>;
}

const LOOPBACK = /^(127\.\d+\.\d+\.\d+|::1|localhost)$/;

/** @throws FIELD_INVALID for a set-up that would let anybody in */
export async function startTrigger(options: TriggerOptions): Promise<TriggerServer> {
  const { guard, tls } = options;
  if (guard.kind === 'proxy' && !LOOPBACK.test(options.host))
    throw new SimpleVolumeError(
      'FIELD_INVALID',
      `--trigger must listen on a loopback address when a proxy guards it; got ${options.host}`,
      { field: '--trigger' },
    );
  if (guard.kind === 'builtin' && tls === undefined)
    throw new SimpleVolumeError(
      'FIELD_INVALID',
      '--trigger-tls-cert and --trigger-tls-key are required with the builtin guard: bearer tokens travel over it',
      { field: '--trigger-tls-cert' },
    );
  const requests = new Map<number, number>();
  const serve = (request: http.IncomingMessage, response: http.ServerResponse): void => {
    void respond(options, request)
      .catch((error: unknown) => failure(options.logger, error))
      .then(({ status, body, headers }) => {
        requests.set(status, (requests.get(status) ?? 0) + 1);
        const text = Buffer.from(`${JSON.stringify(body)}\n`);
        // What is left of a body that nobody read must not be taken for the next request.
        const rest = request.complete ? {} : { connection: 'close' };
        response.writeHead(status, {
          'content-type': 'application/json',
          'content-length': text.length,
          'cache-control': 'no-store',
          ...rest,
          ...headers,
        });
        response.end(text);
      });
  };
  const limits = {
    requestTimeout: REQUEST_MS,
    headersTimeout: REQUEST_MS,
    connectionsCheckingInterval: 2000,
    maxHeaderSize: 16 * 1024,
  };
  const server = tls
    ? https.createServer({ ...limits, ...certificate(tls), minVersion: 'TLSv1.2' }, serve)
    : http.createServer(limits, serve);
  server.maxConnections = 128;
  let timer: NodeJS.Timeout | null = null;
  if (tls) {
    let seen = stamp(tls);
    timer = setInterval(() => {
      try {
        const now = stamp(tls);
        if (now === seen) return;
        (server as https.Server).setSecureContext(certificate(tls));
        seen = now;
      } catch (error) {
        options.logger.warn(
          { error: errorText(error) },
          'the new certificate of the trigger cannot be used; the old one stays',
        );
      }
    }, CERTIFICATE_MS);
    timer.unref();
  }
  await new Promise<void>((resolve, reject) => {
    server.once('error', reject).listen(options.port, options.host, resolve);
  });
  const { address, port, family } = server.address() as AddressInfo;
  return {
    url: `${tls ? 'https' : 'http'}://${family === 'IPv6' ? `[${address}]` : address}:${port}`,
    requests,
    async close() {
      if (timer) clearInterval(timer);
      const ended = new Promise((resolve) => server.close(resolve));
      server.closeIdleConnections();
      const late = setTimeout(() => server.closeAllConnections(), 2000);
      await ended;
      clearTimeout(late);
    },
  };
}

const certificate = (tls: { certFile: string; keyFile: string }): { cert: Buffer; key: Buffer } => ({
  cert: readFileSync(tls.certFile),
  key: readFileSync(tls.keyFile),
});
const stamp = (tls: { certFile: string; keyFile: string }): string =>
  [tls.certFile, tls.keyFile].map((file) => statSync(file).mtimeMs).join();

const errorBody = (code: string, message: string, field?: string): object => ({
  error: { code, message, ...(field === undefined ? {} : { field }) },
});

function failure(logger: Logger, error: unknown): Answer {
  if (error instanceof SimpleVolumeError) {
    return {
      status: error.status === 499 ? 503 : error.status,
      body: errorBody(error.code, error.message, error.field),
      ...(error.code === 'UNAUTHORIZED' ? { headers: { 'www-authenticate': 'Bearer' } } : {}),
    };
  }
  logger.warn({ error: errorText(error) }, 'a manual trigger failed');
  return {
    status: 503,
    body: errorBody('NOT_READY', 'the cluster could not be asked or written to; try again'),
  };
}

async function respond(options: TriggerOptions, request: http.IncomingMessage): Promise<Answer> {
  const url = URL.parse(request.url ?? '/', 'http://trigger');
  if (url === null) throw new SimpleVolumeError('FIELD_INVALID', 'the address is not valid');
  const run = /^\/replication\/full-sync\/runs\/([0-9a-z-]{8,64})$/.exec(url.pathname)?.[1];
  const trigger = url.pathname === '/replication/full-sync/trigger';
  if (!trigger && run === undefined) throw new SimpleVolumeError('NOT_FOUND', 'no such route');
  const methods = trigger ? ['POST'] : ['GET', 'POST'];
  if (!methods.includes(request.method ?? ''))
    return {
      status: 405,
      body: errorBody('METHOD_NOT_ALLOWED', `${request.method} is not one of ${methods.join(', ')}`),
      headers: { allow: methods.join(', ') },
    };
  const caller = await options.guard.authenticate(request.headers.authorization);
  const asked = url.searchParams.getAll('namespace');
  if (asked.length !== 1)
    throw new SimpleVolumeError('FIELD_INVALID', 'the query must name one namespace: ?namespace=NAME', {
      field: 'namespace',
    });
  const namespace = checkName(asked[0] as string, 'namespace', 'label');
  await options.guard.authorize(caller, namespace);
  if (run !== undefined) {
    request.resume();
    const found = await options.runs.find(namespace, run);
    if (found === null)
      throw new SimpleVolumeError(
        'NOT_FOUND',
        `no full sync ${run} is known in ${namespace}; of each volume the last one is kept`,
      );
    return { status: 200, body: found };
  }
  const body = parse(await readBody(request));
  if (body.namespace !== namespace)
    throw new SimpleVolumeError(
      'FORBIDDEN',
      `the body names the namespace ${body.namespace}, the query ${namespace}: permission was asked for the latter only`,
      { field: 'namespace' },
    );
  const started = await options.runs.start(namespace, body.claimName);
  if (started === null)
    throw new SimpleVolumeError(
      'NOT_FOUND',
      `${namespace}/${body.claimName} is no claim that simple-volume replicates`,
      { field: 'claimName' },
    );
  options.logger.info(
    { namespace, claim: body.claimName, caller: caller.name, ...started },
    'a full sync was asked for',
  );
  return { status: 202, body: started };
}

async function readBody(request: http.IncomingMessage): Promise<string> {
  const tooLarge = (): SimpleVolumeError =>
    new SimpleVolumeError('BODY_TOO_LARGE', `the body may have ${BODY_BYTES} bytes at most`);
  if (Number(request.headers['content-length'] ?? 0) > BODY_BYTES) throw tooLarge();
  return await new Promise((resolve, reject) => {
    const parts: Buffer[] = [];
    let bytes = 0;
    request.on('data', (part: Buffer) => {
      bytes += part.length;
      if (bytes > BODY_BYTES) {
        request.pause();
        reject(tooLarge());
      } else parts.push(part);
    });
    request.on('end', () => resolve(Buffer.concat(parts).toString('utf8')));
    request.on('error', () => reject(new SimpleVolumeError('BODY_INVALID', 'the body broke off')));
  });
}

function parse(text: string): { namespace: string; claimName: string } {
  let body: unknown;
  try {
    body = JSON.parse(text);
  } catch {
    throw new SimpleVolumeError('BODY_INVALID', 'the body must be a JSON object');
  }
  if (body === null || typeof body !== 'object' || Array.isArray(body))
    throw new SimpleVolumeError('BODY_INVALID', 'the body must be a JSON object');
  const fields = body as Record<string, unknown>;
  for (const field of Object.keys(fields)) {
    if (field !== 'namespace' && field !== 'claimName')
      throw new SimpleVolumeError('FIELD_INVALID', `${field.slice(0, 80)} is not a known field`, {
        field: field.slice(0, 80),
      });
  }
  const read = (field: 'namespace' | 'claimName', kind: 'label' | 'subdomain'): string => {
    const value = fields[field];
    if (typeof value !== 'string')
      throw new SimpleVolumeError('FIELD_INVALID', `${field} is required and must be a text`, { field });
    return checkName(value, field, kind);
  };
  return { namespace: read('namespace', 'label'), claimName: read('claimName', 'subdomain') };
}
