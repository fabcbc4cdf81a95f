/** csi-node's questions to the agent of its pod, over the agent's unix socket. */
import http from 'node:http';
import { ERRORS, type ErrorCode } from '../../lib/core/errors.ts';
import { RemoteError } from '../../lib/core/http-client.ts';
import type { VolumeName } from '../../lib/core/parts.ts';
import type {
  WriterAnnouncement,
  WriterLease,
  WriterReport,
  WriterReportReply,
} from '../../lib/fence/types.ts';

const LIMIT_MS = 2_000;
const MAX_BYTES = 8 * 1024 * 1024;

export class AgentSocket {
  readonly #path: string;
  readonly #limitMs: number;

  /** @param limitMs how long one question may take in all */
  constructor(path: string, limitMs = LIMIT_MS) {
    this.#path = path;
    this.#limitMs = limitMs;
  }

  /** All that is published on this node, also what is only announced; the answer says how long each may be written. */
  report(report: WriterReport, signal?: AbortSignal): Promise<WriterReportReply> {
    return this.#call('POST', '/fence/report', report, signal);
  }

  /** Before a volume is published. Count the answer from before the question; only it allows to start a writer. */
  announce(announcement: WriterAnnouncement, signal?: AbortSignal): Promise<WriterLease> {
    return this.#call('POST', '/fence/announce', announcement, signal);
  }

  /** Which pool the agent serves, and where. Answered also while the pool is not usable. */
  pool(signal?: AbortSignal): Promise<{ node: string; pool: string; path: string }> {
    return this.#call('GET', '/pool', undefined, signal);
  }

  /** How long the writer of this volume may run. */
  lease({ namespace, volume }: VolumeName, signal?: AbortSignal): Promise<WriterLease> {
    return this.#call(
      'GET',
      `/fence/volumes/${encodeURIComponent(namespace)}/${encodeURIComponent(volume)}`,
      undefined,
      signal,
    );
  }

  /** @throws RemoteError NOT_READY when the agent is away, TIMEOUT, or what it answered */
  #call<T>(method: string, path: string, body: unknown, signal?: AbortSignal): Promise<T> {
    const payload = body === undefined ? null : Buffer.from(JSON.stringify(body));
    const limit = AbortSignal.timeout(this.#limitMs);
    const name = `${method} ${path} of the agent`;
    return new Promise((resolve, reject) => {
      const fail = (error: Error & { code?: string }): void =>
        reject(
          limit.aborted
            ? new RemoteError('TIMEOUT', `${name}: no answer within ${this.#limitMs} ms`, null)
            : new RemoteError('NOT_READY', `${name} failed: ${error.code ?? error.message}`, null),
        );
      const request = http.request(
        {
          socketPath: this.#path,
          method,
          path,
          agent: false,
          signal: signal ? AbortSignal.any([limit, signal]) : limit,
          headers: payload
            ? { 'content-type': 'application/json', 'content-length': payload.length }
            : { accept: 'application/json' },
        },
        (response) => {
          const parts: Buffer[] = [];
          let bytes = 0;
          response.on('data', (part: Buffer) => {
            bytes += part.length;
            if (bytes > MAX_BYTES) request.destroy(new Error('the answer is too long'));
            else parts.push(part);
          });
          response.on('error', fail);
          response.on('end', () => {
            const status = response.statusCode ?? 0;
            try {
              const answer = JSON.parse(Buffer.concat(parts).toString('utf8')) as T & {
                error?: { code?: string; message?: string };
              };
              if (status >= 200 && status < 300) return resolve(answer);
              const code = answer.error?.code;
              reject(
                new RemoteError(
                  code !== undefined && Object.hasOwn(ERRORS, code) ? (code as ErrorCode) : 'INTERNAL',
                  `${name} answered ${status}: ${answer.error?.message ?? ''}`,
                  status,
                ),
              );
            } catch {
              reject(new RemoteError('BODY_INVALID', `${name} answered ${status} without JSON`, status));
            }
          });
        },
      );
      request.on('error', fail);
      request.end(payload ?? undefined);
    });
  }
}
