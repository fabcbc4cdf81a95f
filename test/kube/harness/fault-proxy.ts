/**
 * What lies between a client and an API server when things go wrong. `WireProxy` passes bytes (TLS stays end to end)
 * and can go silent, slow or away; `RequestProxy` ends TLS itself and can answer or spoil single requests.
 */
import type http from 'node:http';
import https from 'node:https';
import net from 'node:net';

/** `pass`; `silent`: connections stay open and nothing gets through; `refuse`: cut, and none are taken. */
export type WireMode = 'pass' | 'silent' | 'refuse';

export class WireProxy {
  /** https://127.0.0.1:PORT */
  url = '';
  /** connections taken so far */
  connections = 0;
  private mode: WireMode = 'pass';
  private delayMs = 0;
  private readonly target: URL;
  private readonly server: net.Server;
  private readonly pairs = new Set<readonly [net.Socket, net.Socket]>();
  /** What waits for the wire to pass again, in order. */
  private held: (() => void)[] = [];

  private constructor(target: string) {
    this.target = new URL(target);
    this.server = net.createServer((near) => this.connect(near));
  }

  static async start(target: string): Promise<WireProxy> {
    const proxy = new WireProxy(target);
    proxy.url = `https://127.0.0.1:${await listen(proxy.server)}`;
    return proxy;
  }

  /** Connections that are open. */
  get open(): number {
    return this.pairs.size;
  }

  /** From now on; what was held back while silent is passed on when it passes again. */
  set(mode: WireMode): void {
    this.mode = mode;
    if (mode === 'refuse') this.cut();
    if (mode === 'pass') for (const go of this.held.splice(0)) go();
  }

  /** Every piece of data takes this long in each direction. */
  delay(ms: number): void {
    this.delayMs = ms;
  }

  /** Breaks all connections; new ones are taken as before. */
  cut(): void {
    for (const [near, far] of this.pairs) {
      near.resetAndDestroy();
      far.destroy();
    }
    this.held = [];
  }

  async stop(): Promise<void> {
    this.set('refuse');
    await new Promise((resolve) => this.server.close(resolve));
  }

  private connect(near: net.Socket): void {
    if (this.mode === 'refuse') {
      near.resetAndDestroy();
      return;
    }
    this.connections++;
    const far = net.connect(Number(this.target.port), this.target.hostname);
    const pair = [near, far] as const;
    this.pairs.add(pair);
    const over = (): void => {
      this.pairs.delete(pair);
      near.destroy();
      far.destroy();
    };
    for (const [from, to] of [
      [near, far],
      [far, near],
    ] as const) {
      from.on('data', (data) => this.when(() => to.writable && to.write(data)));
      from.on('error', () => this.when(over));
      from.on('close', () => this.when(over));
      from.setNoDelay(true);
    }
  }

  private when(pass: () => void): void {
    const now = (): void => {
      if (this.mode === 'silent') this.held.push(pass);
      else pass();
    };
    if (this.delayMs > 0) setTimeout(now, this.delayMs);
    else now();
  }
}

export interface Fault {
  /** answers this instead of asking the API server; `body` is a Status object made of it unless given */
  status?: number;
  headers?: Record<string, string>;
  body?: string;
  /** before it is passed on or answered, ms */
  delayMs?: number;
  /** the connection breaks: `before` the server is asked, or `after` it has done it, so that the answer is lost */
  cut?: 'before' | 'after';
}

/** A request as a fault is chosen for it. */
export interface SeenRequest {
  method: string;
  /** with its query */
  path: string;
  watch: boolean;
  body: string;
}

export class RequestProxy {
  url = '';
  /** every request, also those with a fault */
  readonly seen: SeenRequest[] = [];
  /** The fault of a request, null to pass it on. */
  fault: (request: SeenRequest) => Fault | null = () => null;
  private readonly target: URL;
  private readonly server: https.Server;
  private readonly upstream: https.Agent;

  private constructor(target: string, certificate: { cert: string; key: string }) {
    this.target = new URL(target);
    this.upstream = new https.Agent({ keepAlive: true, ca: certificate.cert });
    this.server = https.createServer(certificate, (request, response) => void this.serve(request, response));
  }

  /** @param certificate of the server: clients that trust it trust the proxy too */
  static async start(target: string, certificate: { cert: string; key: string }): Promise<RequestProxy> {
    const proxy = new RequestProxy(target, certificate);
    proxy.url = `https://127.0.0.1:${await listen(proxy.server)}`;
    return proxy;
  }

  /** Breaks all connections of clients; new ones are taken. */
  cut(): void {
    this.server.closeAllConnections();
  }

  async stop(): Promise<void> {
    this.server.closeAllConnections();
    this.upstream.destroy();
    await new Promise((resolve) => this.server.close(resolve));
  }

  private async serve(request: http.IncomingMessage, response: http.ServerResponse): Promise<void> {
    const path = request.url ?? '/';
    const parts: Buffer[] = [];
    request.on('error', () => {});
    response.on('error', () => {});
    for await (const part of request) parts.push(part as Buffer);
    const seen = {
      method: request.method ?? 'GET',
      path,
      watch: /[?&]watch=(true|1)/.test(path),
      body: Buffer.concat(parts).toString(),
    };
    this.seen.push(seen);
    const fault = this.fault(seen) ?? {};
    if (fault.delayMs) await new Promise((resolve) => setTimeout(resolve, fault.delayMs));
    if (fault.cut === 'before') {
      request.socket.destroy();
      return;
    }
    if (fault.status !== undefined) {
      const status = { apiVersion: 'v1', kind: 'Status', status: 'Failure', code: fault.status };
      const body = fault.body ?? JSON.stringify({ ...status, message: 'made up by a test' });
      response.writeHead(fault.status, { 'content-type': 'application/json', ...fault.headers }).end(body);
      return;
    }
    const onward = https.request(
      this.target,
      {
        method: seen.method,
        path,
        headers: { ...request.headers, host: this.target.host },
        agent: this.upstream,
      },
      (answer) => {
        if (fault.cut === 'after') {
          answer.resume();
          answer.on('end', () => request.socket.destroy());
          return;
        }
        response.writeHead(answer.statusCode ?? 502, answer.headers);
        response.flushHeaders();
        answer.pipe(response);
        answer.on('error', () => response.destroy());
        answer.on('aborted', () => response.destroy());
      },
    );
    onward.on('error', () => response.destroy());
    response.on('close', () => onward.destroy());
    onward.end(Buffer.concat(parts));
  }
}

function listen(server: net.Server): Promise<number> {
  return new Promise((resolve, reject) => {
    server.once('error', reject).listen(0, '127.0.0.1', () => {
      resolve((server.address() as net.AddressInfo).port);
    });
  });
}
