/** The network between nodes, controllers and the API server: links that are cut, slow, or keep a message for long. */
import { SimpleVolumeError } from '../../lib/core/errors.ts';
import { type HttpCall, type HttpClient, type HttpReply, RemoteError } from '../../lib/core/http-client.ts';
import type { Process, Random, Time } from './time.ts';

export interface Server {
  /** the program that listens now; null: none */
  process: Process | null;
  /** the machine is there: without it nobody refuses a connection either */
  up: boolean;
  handle(method: string, path: string, body: Record<string, unknown>): unknown;
}

export class Net {
  readonly #time: Time;
  readonly #random: Random;
  readonly #cut = new Map<string, number>();
  /** when a link was last cut or whole again, true time */
  readonly changedAt = new Map<string, number>();
  readonly servers = new Map<string, Server>();
  /** chance of a message that is kept in a retransmission queue, and for how long on average */
  stuck = 0.01;
  stuckMs = 4_000;
  latencyMs = 6;

  constructor(time: Time, random: Random) {
    this.#time = time;
    this.#random = random;
  }

  static link(a: string, b: string): string {
    return a < b ? `${a} ${b}` : `${b} ${a}`;
  }

  cut(a: string, b: string): void {
    const link = Net.link(a, b);
    this.#cut.set(link, (this.#cut.get(link) ?? 0) + 1);
    this.changedAt.set(link, this.#time.now);
  }
  heal(a: string, b: string): void {
    const link = Net.link(a, b);
    const left = (this.#cut.get(link) ?? 0) - 1;
    if (left > 0) this.#cut.set(link, left);
    else this.#cut.delete(link);
    this.changedAt.set(link, this.#time.now);
  }
  healAll(): void {
    this.#cut.clear();
  }
  isCut(a: string, b: string): boolean {
    return this.#cut.has(Net.link(a, b));
  }
  /** whole for this long, ms */
  wholeFor(a: string, b: string): number {
    return this.isCut(a, b)
      ? 0
      : this.#time.now - (this.changedAt.get(Net.link(a, b)) ?? Number.NEGATIVE_INFINITY);
  }

  delay(): number {
    const d = 0.2 + this.#random.wait(this.latencyMs);
    return this.#random.chance(this.stuck) ? d + this.#random.wait(this.stuckMs) : d;
  }

  /** JSON over HTTP from one program to the agents, as the real client behaves. */
  client(from: Process, name: string): HttpClient {
    let closed = false;
    return {
      close: () => {
        closed = true;
      },
      call: <T>(call: HttpCall): Promise<HttpReply<T>> => {
        const url = new URL(call.url);
        const method = call.method ?? (call.body === undefined ? 'GET' : 'POST');
        const what = `${method} ${url.pathname}`;
        const to = url.hostname;
        const server = this.servers.get(to);
        const timeoutMs = call.timeoutMs ?? 10_000;
        return new Promise((resolve, reject) => {
          let over = false;
          const end = (settle: () => void): void => {
            if (over) return;
            over = true;
            timer.cancel();
            call.signal?.removeEventListener('abort', cancelled);
            settle();
          };
          const fail = (code: 'TIMEOUT' | 'CANCELLED' | 'NOT_READY', why: string): void =>
            end(() => reject(new RemoteError(code, `${what} ${why}`, null)));
          const cancelled = (): void => fail('CANCELLED', 'was cancelled');
          const timer = from.clock.setTimeout(
            () => fail('TIMEOUT', `did not answer within ${timeoutMs} ms`),
            timeoutMs,
          );
          if (closed || call.signal?.aborted) return cancelled();
          call.signal?.addEventListener('abort', cancelled, { once: true });
          const gone = (): boolean => this.isCut(name, to) || server === undefined || !server.up;
          if (gone()) {
            if (this.#random.chance(0.3))
              this.#time.after(this.delay(), () => fail('NOT_READY', 'failed: EHOSTUNREACH'), from);
            return;
          }
          const listener = server?.process ?? null;
          if (listener === null) {
            this.#time.after(this.delay(), () => fail('NOT_READY', 'failed: ECONNREFUSED'), from);
            return;
          }
          const arrive = (): void => {
            if (gone()) return;
            // As JSON would have it: nothing of the answer is shared.
            const body = (call.body ?? {}) as Record<string, unknown>;
            Promise.resolve()
              .then(() => (server as Server).handle(method, url.pathname, body))
              .then(
                (reply): [number, unknown] => [200, reply],
                (error: unknown): [number, unknown] => {
                  if (!(error instanceof SimpleVolumeError)) throw error;
                  return [error.status, error];
                },
              )
              .then(([status, reply]) => {
                if (!listener.alive || gone()) return;
                const answer = (): void => {
                  if (this.isCut(name, to)) return;
                  if (status === 200) end(() => resolve({ status, body: reply as T }));
                  else {
                    const { code, message } = reply as SimpleVolumeError;
                    end(() =>
                      reject(new RemoteError(code, `${what} answered ${status}: ${message}`, status)),
                    );
                  }
                };
                this.#time.after(this.delay(), answer, from);
              });
          };
          this.#time.after(this.delay(), arrive, listener);
        });
      },
    };
  }
}
