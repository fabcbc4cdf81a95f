/** A clock and the other side of HTTP, both in a test's hand. */
import type { HttpCall, HttpClient, HttpReply } from '../../lib/core/http-client.ts';
import { RemoteError } from '../../lib/core/http-client.ts';
import type { Clock, Logger } from '../../lib/core/parts.ts';

export class ManualClock implements Clock {
  #ms = 5_000;
  #timers = new Set<{ at: number; fn: () => void }>();
  boot(): number {
    return this.#ms;
  }
  now(): number {
    return 1_700_000_000_000 + this.#ms;
  }
  setTimeout(fn: () => void, ms: number): { cancel(): void } {
    const timer = { at: this.#ms + ms, fn };
    this.#timers.add(timer);
    return { cancel: () => void this.#timers.delete(timer) };
  }
  get waiting(): number {
    return this.#timers.size;
  }
  /** Time passes; what falls due runs in its order, and what it began gets its turn. */
  async pass(ms: number): Promise<void> {
    const end = this.#ms + ms;
    for (;;) {
      await turn();
      const [next] = [...this.#timers].filter((t) => t.at <= end).sort((a, b) => a.at - b.at);
      if (!next) break;
      this.#timers.delete(next);
      this.#ms = Math.max(this.#ms, next.at);
      next.fn();
    }
    this.#ms = end;
    await turn();
  }
}

/** Everything that can go on without time passing has gone on. */
export async function turn(): Promise<void> {
  for (let i = 0; i < 5; i++) await new Promise((resolve) => setImmediate(resolve));
}

// biome-ignore lint/suspicious/noExplicitAny: a test looks into bodies of any shape
type Body = any;

export class Call {
  readonly request: HttpCall;
  readonly body: Body;
  open = true;
  readonly #settle: { resolve(reply: HttpReply<unknown>): void; reject(error: Error): void };
  constructor(
    request: HttpCall,
    settle: { resolve(reply: HttpReply<unknown>): void; reject(error: Error): void },
  ) {
    this.request = request;
    this.body = JSON.parse(JSON.stringify(request.body ?? null));
    this.#settle = settle;
  }
  answer(body: unknown): Promise<void> {
    this.open = false;
    this.#settle.resolve({ status: 200, body });
    return turn();
  }
  refuse(code: 'EPOCH_OLD' | 'VOLUME_IN_USE' | 'INTERNAL', status = 409): Promise<void> {
    this.open = false;
    this.#settle.reject(new RemoteError(code, `refused: ${code}`, status));
    return turn();
  }
  lose(error: Error = new RemoteError('TIMEOUT', 'no answer', null)): Promise<void> {
    this.open = false;
    this.#settle.reject(error);
    return turn();
  }
}

/** Calls wait until the test answers them; a cancelled one is rejected like the real client does. */
export class ManualHttp implements HttpClient {
  readonly calls: Call[] = [];
  call<T>(request: HttpCall): Promise<HttpReply<T>> {
    return new Promise<HttpReply<T>>((resolve, reject) => {
      const call = new Call(request, { resolve: resolve as (r: HttpReply<unknown>) => void, reject });
      this.calls.push(call);
      const cancel = (): void =>
        void (call.open && call.lose(new RemoteError('CANCELLED', 'cancelled', null)));
      if (request.signal?.aborted) cancel();
      else request.signal?.addEventListener('abort', cancel, { once: true });
    });
  }
  close(): void {}
  /** Unanswered calls to addresses with `part` in them. */
  open(part = ''): Call[] {
    return this.calls.filter((c) => c.open && c.request.url.includes(part));
  }
  /** The only unanswered one. */
  only(part = ''): Call {
    const [call, ...more] = this.open(part);
    if (!call || more.length > 0)
      throw new Error(`${more.length + (call ? 1 : 0)} calls wait for an answer, not one: ${part}`);
    return call;
  }
}

export function lines(): Logger & { all: { level: string; data: Record<string, unknown>; text: string }[] } {
  const all: { level: string; data: Record<string, unknown>; text: string }[] = [];
  const at = (level: string) => (data: object, text: string) =>
    void all.push({ level, data: data as Record<string, unknown>, text });
  const log = {
    all,
    debug: at('debug'),
    info: at('info'),
    warn: at('warn'),
    error: at('error'),
    child: () => log,
  };
  return log;
}
