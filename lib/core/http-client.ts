/**
 * JSON over HTTP between agents, and from the controller to agents. One small client for all: bounded replies,
 * a time limit that covers the whole exchange, cancellable, and no credential in any error text.
 */
import http from 'node:http';
import https from 'node:https';
import { ERRORS, type ErrorCode, SimpleVolumeError } from './errors.ts';

export interface HttpCall {
  method?: 'GET' | 'POST' | 'DELETE';
  /** absolute http:// or https:// address */
  url: string;
  /** sent as `Authorization: Bearer` */
  token?: string | null;
  /** a Buffer travels as application/octet-stream, anything else as JSON */
  body?: unknown;
  /** milliseconds for connecting, sending and the whole reply; default 10,000 */
  timeoutMs?: number;
  signal?: AbortSignal;
  /** largest reply, bytes; default 4 MiB */
  maxBytes?: number;
}

export interface HttpReply<T> {
  status: number;
  body: T;
}

export interface HttpClient {
  /**
   * The parsed reply of a 2xx.
   * @throws RemoteError for any other status, for a reply that is no JSON, TIMEOUT, CANCELLED, and NOT_READY
   * when nobody answers.
   */
  call<T>(call: HttpCall): Promise<HttpReply<T>>;
  /** Closes idle and busy connections. */
  close(): void;
}

/** An error that the other side answered (its own code where the catalogue knows it), or that kept it from answering. */
export class RemoteError extends SimpleVolumeError {
  /** HTTP status of the answer, null when there was none */
  readonly answered: number | null;
  constructor(code: ErrorCode, message: string, answered: number | null, cause?: unknown) {
    super(code, message, cause === undefined ? {} : { cause });
    this.name = 'RemoteError';
    this.answered = answered;
  }
}

const DEFAULT_TIMEOUT_MS = 10_000;
const DEFAULT_MAX_BYTES = 4 * 1024 * 1024;

/** Scheme, host, port and path: user, password and query never reach a log. */
export function printableUrl(url: string): string {
  try {
    const { protocol, host, pathname } = new URL(url);
    return `${protocol}//${host}${pathname}`;
  } catch {
    return '(not a valid URL)';
  }
}

/** Errors of the catalogue as they travel: `{"error":{"code","message","field"}}`. */
function answeredError(call: string, status: number, text: string): RemoteError {
  let code: unknown;
  let message = '';
  try {
    const { error } = JSON.parse(text) as { error?: { code?: unknown; message?: unknown } };
    code = error?.code;
    if (typeof error?.message === 'string') message = error.message.slice(0, 500);
  } catch {
    // not one of ours; the status says enough
  }
  const known =
    typeof code === 'string' && Object.hasOwn(ERRORS, code)
      ? (code as ErrorCode)
      : status === 401
        ? 'UNAUTHORIZED'
        : status === 403
          ? 'FORBIDDEN'
          : status === 404
            ? 'NOT_FOUND'
            : status === 429 || status === 503
              ? 'NOT_READY'
              : 'INTERNAL';
  return new RemoteError(known, `${call} answered ${status}${message ? `: ${message}` : ''}`, status);
}

export interface HttpClientOptions {
  /** connections kept open per host; default 4 */
  maxSockets?: number;
  /** PEM of the authorities that https agents are checked against; default: the system's */
  ca?: string;
  /** DNS name that certificates must have, whatever host is dialled; default: the host */
  serverName?: string;
}

export function createHttpClient(options: HttpClientOptions = {}): HttpClient {
  const shared = {
    keepAlive: true,
    keepAliveMsecs: 10_000,
    maxSockets: options.maxSockets ?? 4,
    maxFreeSockets: 2,
  };
  const plain = new http.Agent(shared);
  const secure = new https.Agent({
    ...shared,
    ...(options.ca === undefined ? {} : { ca: options.ca }),
    ...(options.serverName === undefined ? {} : { servername: options.serverName }),
  });

  function exchange<T>(call: HttpCall, url: URL, retried: boolean): Promise<HttpReply<T>> {
    const method = call.method ?? (call.body === undefined ? 'GET' : 'POST');
    const name = `${method} ${printableUrl(call.url)}`;
    const max = call.maxBytes ?? DEFAULT_MAX_BYTES;
    const timeoutMs = call.timeoutMs ?? DEFAULT_TIMEOUT_MS;
    const binary = Buffer.isBuffer(call.body);
    const payload =
      call.body === undefined
        ? null
        : binary
          ? (call.body as Buffer)
          : Buffer.from(JSON.stringify(call.body));
    const headers: http.OutgoingHttpHeaders = { accept: 'application/json' };
    if (payload) {
      headers['content-type'] = binary ? 'application/octet-stream' : 'application/json';
      headers['content-length'] = payload.length;
    } else if (method !== 'GET') headers['content-length'] = 0;
    if (call.token) headers.authorization = `Bearer ${call.token}`;

    return new Promise((resolve, reject) => {
      let settled = false;
      let seen = false;
      const finish = (error: RemoteError | null, reply?: HttpReply<T>): void => {
        if (settled) return;
        settled = true;
        clearTimeout(timer);
        call.signal?.removeEventListener('abort', cancelled);
        if (error) {
          request.destroy();
          reject(error);
        } else resolve(reply as HttpReply<T>);
      };
      const cancelled = (): void => finish(new RemoteError('CANCELLED', `${name} was cancelled`, null));
      const failed = (error: NodeJS.ErrnoException): void => {
        // A kept connection that the other side closed just now: the request was not dealt with, once more on a new one.
        if (!retried && !seen && !settled && request.reusedSocket && error.code === 'ECONNRESET') {
          settled = true;
          clearTimeout(timer);
          call.signal?.removeEventListener('abort', cancelled);
          exchange<T>(call, url, true).then(resolve, reject);
          return;
        }
        finish(new RemoteError('NOT_READY', `${name} failed: ${error.code ?? 'no answer'}`, null));
      };
      const timer = setTimeout(
        () => finish(new RemoteError('TIMEOUT', `${name} did not answer within ${timeoutMs} ms`, null)),
        timeoutMs,
      );
      const request = (url.protocol === 'https:' ? https : http).request(
        url,
        { method, headers, agent: url.protocol === 'https:' ? secure : plain },
        (response) => {
          seen = true;
          const parts: Buffer[] = [];
          let bytes = 0;
          response.on('data', (part: Buffer) => {
            bytes += part.length;
            if (bytes > max)
              finish(
                new RemoteError(
                  'BODY_TOO_LARGE',
                  `${name} answered more than ${max} bytes`,
                  response.statusCode ?? null,
                ),
              );
            else parts.push(part);
          });
          response.on('error', failed);
          response.on('aborted', () => failed(Object.assign(new Error('aborted'), { code: 'ECONNRESET' })));
          response.on('end', () => {
            const status = response.statusCode ?? 0;
            const text = Buffer.concat(parts).toString('utf8');
            if (status < 200 || status > 299) return finish(answeredError(name, status, text));
            try {
              finish(null, { status, body: (text === '' ? null : JSON.parse(text)) as T });
            } catch {
              finish(new RemoteError('BODY_INVALID', `${name} answered something that is not JSON`, status));
            }
          });
        },
      );
      request.on('error', failed);
      if (call.signal?.aborted) return cancelled();
      call.signal?.addEventListener('abort', cancelled, { once: true });
      if (payload) request.write(payload);
      request.end();
    });
  }

  return {
    async call<T>(call: HttpCall): Promise<HttpReply<T>> {
      let url: URL;
      try {
        url = new URL(call.url);
      } catch {
        throw new RemoteError('FIELD_INVALID', 'the address of the other agent is not a valid URL', null);
      }
      if (url.protocol !== 'http:' && url.protocol !== 'https:')
        throw new RemoteError('FIELD_INVALID', `${url.protocol} is not http: or https:`, null);
      // Credentials in an address would be sent by node:http; only `token` may be a credential.
      url.username = '';
      url.password = '';
      return await exchange<T>(call, url, false);
    },
    close(): void {
      plain.destroy();
      secure.destroy();
    },
  };
}
