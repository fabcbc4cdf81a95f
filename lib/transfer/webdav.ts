/**
 * The agent's WebDAV tree, read-only: `/browse/<namespace>/<volume>/...` for people and clients, and
 * `/transfer/<id>/` for pulls.
 *
 * webdav-server carries the protocol (dispatch, OPTIONS); what it would do badly never reaches it: a guard in
 * front decodes the target, checks the caller, limits the body, and hands it a request for '/' without
 * headers. GET, HEAD and PROPFIND are ours and stream. (Its own end the process on a target that is not valid
 * UTF-8 or on a large Content-Length, and hold whole folders in memory.)
 *
 * Symbolic links are part of a volume but not of this tree: a browser sees `name -> target`, PROPFIND leaves
 * them out, GET is 403. None is ever followed.
 */
import {
  createServer,
  type IncomingHttpHeaders,
  type IncomingMessage,
  type Server,
  type ServerResponse,
} from 'node:http';
import { createServer as createTlsServer } from 'node:https';
import type { AddressInfo, Socket } from 'node:net';
import webdav from 'webdav-server';
import { SimpleVolumeError } from '../core/errors.ts';
import type { Clock, Logger, ServedGeneration, ServedVolume, VolumeName } from '../core/parts.ts';
import { hashOf, Kind, kindOf, mtimeNsOf, pathOf, sizeOf, targetOf } from '../core/record.ts';
import type { Row } from '../core/store.ts';
import { childrenOf, isDirectory, openContent, type View, Views } from './browse.ts';
import type { Principal } from './grant.ts';
import { type ByteRange, checkConditions, httpDate, parseRange, parseTarget, rangeApplies } from './http.ts';
import type { Offers, Reading, TransferFile } from './offers.ts';
import {
  type Entry,
  FINITE_DEPTH,
  MULTISTATUS_CLOSE,
  MULTISTATUS_OPEN,
  PAGE_CLOSE,
  PAGE_CSP,
  pageOpen,
  pageRow,
  propfindEntry,
} from './render.ts';

const BODY_LIMIT = 64 * 1024;
const PIECE = 256 * 1024;
const ALLOW = 'OPTIONS, GET, HEAD, PROPFIND';

export interface WebdavOptions {
  offers: Offers;
  /** volumes that can be browsed now, in the order of their names */
  volumes: { list(): ServedVolume[]; get(name: VolumeName): ServedVolume | null };
  /** checks an Authorization header of the form `Bearer <token or grant>` */
  authenticate: (authorization: string | undefined) => Principal | null;
  /** false: `/browse` is open to everybody who can reach the port */
  browseAuth: boolean;
  /** PEM certificate chain and key; null: plain HTTP */
  tls?: { cert: Buffer; key: Buffer } | null;
  clock: Clock;
  log: Logger;
  /** called with the bytes of bodies that were sent */
  onSent?: (bytes: number) => void;
  /** ms without a byte after which a connection ends; default 2 minutes */
  idleMs?: number;
}

interface Ask {
  segments: Buffer[];
  headers: IncomingHttpHeaders;
  principal: Principal | null;
}

type Resource =
  | {
      kind: 'collection';
      at: Buffer[];
      modifiedMs: number | null;
      served: ServedGeneration | null;
      children: () => Iterable<Entry>;
    }
  | {
      kind: 'file';
      at: Buffer[];
      size: number;
      modifiedMs: number | null;
      etag: string;
      type: string;
      open: (abort: () => void) => Promise<Reading>;
    };

const notFound = (): SimpleVolumeError => new SimpleVolumeError('NOT_FOUND', 'nothing is at this path');
const bytes = (text: string): Buffer => Buffer.from(text, 'latin1');

/** Only types that a browser shows without running anything. */
const TYPES: Record<string, string> = {
  txt: 'text/plain; charset=utf-8',
  log: 'text/plain; charset=utf-8',
  md: 'text/plain; charset=utf-8',
  json: 'text/plain; charset=utf-8',
  yaml: 'text/plain; charset=utf-8',
  yml: 'text/plain; charset=utf-8',
  toml: 'text/plain; charset=utf-8',
  ini: 'text/plain; charset=utf-8',
  cfg: 'text/plain; charset=utf-8',
  conf: 'text/plain; charset=utf-8',
  properties: 'text/plain; charset=utf-8',
  csv: 'text/plain; charset=utf-8',
  png: 'image/png',
  jpg: 'image/jpeg',
  jpeg: 'image/jpeg',
  gif: 'image/gif',
  webp: 'image/webp',
};
const typeOf = (name: Buffer): string =>
  TYPES[/\.([a-z]{1,10})$/.exec(name.toString('latin1').toLowerCase())?.[1] ?? ''] ??
  'application/octet-stream';

const modifiedOf = (row: Row): number => Number(mtimeNsOf(row.record) / 1_000_000n);
const etagOf = (row: Row): string => `"${hashOf(row.record).toString('hex', 0, 16)}"`;

function entryOf(row: Row, name: Buffer): Entry | null {
  const kind = kindOf(row.record);
  const modifiedMs = modifiedOf(row);
  if (kind === Kind.directory) return { name, kind: 'collection', size: null, modifiedMs, etag: null };
  if (kind === Kind.file)
    return { name, kind: 'file', size: sizeOf(row.record), modifiedMs, etag: etagOf(row) };
  if (kind === Kind.symlink)
    return { name, kind: 'symlink', size: null, modifiedMs, etag: null, target: targetOf(row.record) };
  return null;
}

const plainFolder = (name: string): Entry => ({
  name: bytes(name),
  kind: 'collection',
  size: null,
  modifiedMs: null,
  etag: null,
});

/** webdav-server sends these on its own; no page elsewhere may read what a browser here may. */
function stripHeaders(response: ServerResponse): void {
  for (const name of response.getHeaderNames())
    if (name.startsWith('access-control-') || name === 'ms-author-via' || name === 'server')
      response.removeHeader(name);
  response.setHeader('DAV', '1');
  response.setHeader('Allow', ALLOW);
}

/** Waits until the response takes more; rejects when the client is gone. */
const drained = (response: ServerResponse): Promise<void> =>
  new Promise((resolve, reject) => {
    const done = (error?: Error): void => {
      response.off('drain', ok);
      response.off('close', gone);
      if (error) reject(error);
      else resolve();
    };
    const ok = (): void => done();
    const gone = (): void => done(new SimpleVolumeError('CANCELLED', 'the client is gone'));
    response.on('drain', ok);
    response.on('close', gone);
    if (response.destroyed || response.closed) gone();
  });

async function put(response: ServerResponse, data: Buffer | string): Promise<void> {
  if (response.destroyed) throw new SimpleVolumeError('CANCELLED', 'the client is gone');
  if (!response.write(data)) await drained(response);
}

export class Webdav {
  readonly server: Server;
  readonly #options: WebdavOptions;
  readonly #dav: InstanceType<typeof webdav.v2.WebDAVServer>;
  readonly #asks = new WeakMap<IncomingMessage, Ask>();
  readonly #views: Views;

  constructor(options: WebdavOptions) {
    this.#options = options;
    this.#views = new Views(options.clock);
    this.#dav = this.#carrier();
    const limits = {
      maxHeaderSize: 16 * 1024,
      headersTimeout: 10_000,
      requestTimeout: 30_000,
      keepAliveTimeout: 30_000,
      connectionsCheckingInterval: 5000,
      noDelay: true,
    };
    const answer = (request: IncomingMessage, response: ServerResponse): void =>
      void this.#guard(request, response);
    this.server = options.tls
      ? createTlsServer({ ...limits, ...options.tls }, answer)
      : createServer(limits, answer);
    this.server.maxConnections = 256;
    this.server.setTimeout(options.idleMs ?? 120_000);
    this.server.on('clientError', (error: NodeJS.ErrnoException, socket: Socket) => {
      if (socket.destroyed || !socket.writable) return void socket.destroy();
      const status =
        error.code === 'HPE_HEADER_OVERFLOW' ? '431 Request Header Fields Too Large' : '400 Bad Request';
      socket.end(`HTTP/1.1 ${status}\r\nConnection: close\r\nContent-Length: 0\r\n\r\n`);
    });
  }

  listen(port: number, host: string): Promise<AddressInfo> {
    return new Promise((resolve, reject) => {
      this.server.once('error', reject);
      this.server.listen(port, host, () => {
        this.server.off('error', reject);
        resolve(this.server.address() as AddressInfo);
      });
    });
  }

  /** Ends what is sent from a volume and gives its generations back. */
  async dropVolume(name: VolumeName): Promise<void> {
    await this.#views.dropVolume(name);
  }

  async close(): Promise<void> {
    const closed = new Promise<void>((resolve) => this.server.close(() => resolve()));
    this.server.closeAllConnections();
    await closed;
    await this.#views.close();
  }

  #carrier(): InstanceType<typeof webdav.v2.WebDAVServer> {
    const { v2 } = webdav;
    const dav = new v2.WebDAVServer({
      requireAuthentification: false,
      // the guard has checked the caller
      httpAuthentication: {
        askForAuthentication: () => ({}),
        getUser: (_context, callback) =>
          callback(null as unknown as Error, { uid: 'guarded', username: 'guarded' } as never),
      },
    });
    const ours = {
      chunked: (context: { request: IncomingMessage; response: ServerResponse }): void =>
        void this.#answer(context.request, context.response),
    };
    for (const name of Object.keys(dav.methods)) if (name !== 'options') delete dav.methods[name];
    for (const name of ['GET', 'HEAD', 'PROPFIND']) dav.method(name, ours);
    dav.beforeRequest((context, next) => {
      context.response.removeAllListeners('error');
      context.response.on('error', () => undefined);
      stripHeaders(context.response);
      next();
    });
    return dav;
  }

  async #guard(request: IncomingMessage, response: ServerResponse): Promise<void> {
    try {
      request.on('error', () => undefined);
      response.on('error', () => undefined);
      const method = request.method ?? '';
      if (!['OPTIONS', 'GET', 'HEAD', 'PROPFIND'].includes(method)) {
        response.setHeader('Allow', ALLOW);
        throw new SimpleVolumeError('METHOD_NOT_ALLOWED', 'this tree is read-only');
      }
      const segments = parseTarget(request.url ?? '');
      const { headers } = request;
      await this.#body(request);
      const principal = method === 'OPTIONS' ? null : this.#who(segments, headers.authorization);
      this.#asks.set(request, { segments, headers, principal });
      request.url = '/';
      request.headers = { host: 'localhost' };
      this.#dav.executeRequest(request, response);
    } catch (error) {
      this.#fail(request, response, error);
    }
  }

  /** Reads the body to its end and forgets it (PROPFIND's list of properties: all of ours are always told). */
  async #body(request: IncomingMessage): Promise<void> {
    const tooLarge = new SimpleVolumeError('BODY_TOO_LARGE', `a body has at most ${BODY_LIMIT} bytes`);
    if (Number(request.headers['content-length'] ?? 0) > BODY_LIMIT) throw tooLarge;
    if (
      request.headers['content-length'] === undefined &&
      request.headers['transfer-encoding'] === undefined
    ) {
      request.resume();
      return;
    }
    let n = 0;
    for await (const piece of request) {
      n += (piece as Buffer).length;
      if (n > BODY_LIMIT) throw tooLarge;
    }
  }

  /** @throws UNAUTHORIZED, FORBIDDEN */
  #who(segments: Buffer[], authorization: string | undefined): Principal | null {
    const area = segments[0]?.toString('latin1') ?? '';
    if (area !== 'transfer' && !this.#options.browseAuth) return null;
    let text = authorization;
    // browsers, cadaver and davfs2 know Basic only: any user, the token as password
    const basic = /^Basic ([A-Za-z0-9+/=]{1,8192})$/i.exec(authorization ?? '');
    if (basic) {
      const pair = Buffer.from(basic[1] as string, 'base64').toString('latin1');
      const colon = pair.indexOf(':');
      text = colon < 0 ? undefined : `Bearer ${pair.slice(colon + 1)}`;
    }
    const principal = this.#options.authenticate(text);
    if (!principal)
      throw new SimpleVolumeError(
        'UNAUTHORIZED',
        'a token is required: Bearer, or Basic with the token as password',
      );
    if (principal.kind === 'grant' && area !== 'transfer')
      throw new SimpleVolumeError('FORBIDDEN', 'a transfer grant opens /transfer only');
    return principal;
  }

  async #answer(request: IncomingMessage, response: ServerResponse): Promise<void> {
    let view: View | null = null;
    try {
      const ask = this.#asks.get(request);
      if (!ask) throw new SimpleVolumeError('INTERNAL', 'a request went past the guard');
      const { segments } = ask;
      let resource: Resource;
      const area = segments[0]?.toString('latin1');
      if (area === 'browse' && segments.length >= 3) {
        const volume = this.#volume(segments);
        view = await this.#views.acquire(volume);
        view.onStop(() => response.destroy());
        resource = this.#browse(view.served, segments);
      } else if (area === 'transfer') resource = await this.#transfer(ask);
      else resource = this.#top(segments);
      if (request.method === 'PROPFIND') await this.#propfind(ask, resource, response);
      else if (resource.kind === 'collection') await this.#page(request, resource, response);
      else await this.#send(request, ask, resource, response);
    } catch (error) {
      this.#fail(request, response, error);
    } finally {
      view?.release();
    }
  }

  #volume(segments: Buffer[]): ServedVolume {
    const name = {
      namespace: (segments[1] as Buffer).toString('latin1'),
      volume: (segments[2] as Buffer).toString('latin1'),
    };
    const volume = this.#options.volumes.get(name);
    if (!volume) throw notFound();
    return volume;
  }

  #top(segments: Buffer[]): Resource {
    const folder = (names: string[]): Resource => ({
      kind: 'collection',
      at: segments,
      modifiedMs: null,
      served: null,
      children: () => names.map(plainFolder),
    });
    if (segments.length === 0) return folder(['browse']);
    if (segments[0]?.toString('latin1') !== 'browse') throw notFound();
    const volumes = this.#options.volumes.list().filter((v) => v.generation() !== null);
    if (segments.length === 1) return folder([...new Set(volumes.map((v) => v.namespace))]);
    const namespace = segments[1]?.toString('latin1');
    const names = volumes.filter((v) => v.namespace === namespace).map((v) => v.volume);
    if (names.length === 0) throw notFound();
    return folder(names);
  }

  #browse(served: ServedGeneration, segments: Buffer[]): Resource {
    const slash = bytes('/');
    const parts = segments.slice(3).flatMap((s, i) => (i === 0 ? [s] : [slash, s]));
    const path = Buffer.concat(parts);
    const row = served.index.get(path);
    if (!row) throw notFound();
    const kind = kindOf(row.record);
    if (isDirectory(row)) {
      const { index } = served;
      const prefix = path.length === 0 ? 0 : path.length + 1;
      return {
        kind: 'collection',
        at: segments,
        modifiedMs: modifiedOf(row),
        served,
        *children() {
          for (const child of childrenOf(index, path)) {
            const entry = entryOf(child, pathOf(child.record).subarray(prefix));
            if (entry) yield entry;
          }
        },
      };
    }
    if (kind === Kind.symlink)
      throw new SimpleVolumeError('FORBIDDEN', 'this is a symbolic link; links are not followed');
    if (kind !== Kind.file) throw notFound();
    return {
      kind: 'file',
      at: segments,
      size: sizeOf(row.record),
      modifiedMs: modifiedOf(row),
      etag: etagOf(row),
      type: typeOf(segments.at(-1) as Buffer),
      open: () => openContent(served, row),
    };
  }

  async #transfer(ask: Ask): Promise<Resource> {
    const { segments } = ask;
    const principal = ask.principal as Principal;
    const { offers } = this.#options;
    const [, id, name] = segments.map((s) => s.toString('latin1'));
    if (!id || segments.length > 3) throw notFound();
    const etag = (f: TransferFile): string => `"${id}.${f.name}"`;
    if (name === undefined) {
      const files = offers.files(id, principal);
      if (!files) throw notFound();
      return {
        kind: 'collection',
        at: segments,
        modifiedMs: null,
        served: null,
        children: () =>
          files.map((f) => ({
            name: bytes(f.name),
            kind: 'file',
            size: f.known,
            modifiedMs: null,
            etag: etag(f),
          })),
      };
    }
    const file = offers.file(id, name, principal);
    if (!file) throw notFound();
    return {
      kind: 'file',
      at: segments,
      size: await file.length(),
      modifiedMs: null,
      etag: etag(file),
      type: 'application/octet-stream',
      open: (abort) => file.open(abort),
    };
  }

  async #propfind(ask: Ask, r: Resource, response: ServerResponse): Promise<void> {
    const depth = ask.headers.depth;
    if (depth !== '0' && depth !== '1') {
      // RFC 4918 section 9.1: no Depth means infinity
      const known = depth === undefined || String(depth).toLowerCase() === 'infinity';
      response.writeHead(known ? 403 : 400, {
        'Content-Type': 'application/xml; charset=utf-8',
        'Content-Length': Buffer.byteLength(FINITE_DEPTH),
      });
      response.end(FINITE_DEPTH);
      return;
    }
    response.writeHead(207, {
      'Content-Type': 'application/xml; charset=utf-8',
      'Cache-Control': 'no-store',
    });
    const self: Entry = {
      name: r.at.at(-1) ?? bytes('/'),
      kind: r.kind,
      size: r.kind === 'file' ? r.size : null,
      modifiedMs: r.modifiedMs,
      etag: r.kind === 'file' ? r.etag : null,
    };
    await this.#stream(
      response,
      MULTISTATUS_OPEN + propfindEntry(r.at, self),
      MULTISTATUS_CLOSE,
      r,
      depth === '1',
      (e) => (e.kind === 'symlink' ? '' : propfindEntry([...r.at, e.name], e)),
    );
  }

  async #page(request: IncomingMessage, r: Resource, response: ServerResponse): Promise<void> {
    response.writeHead(200, {
      'Content-Type': 'text/html; charset=utf-8',
      'Content-Security-Policy': PAGE_CSP,
      'X-Content-Type-Options': 'nosniff',
      'Referrer-Policy': 'no-referrer',
      'Cache-Control': 'no-store',
    });
    if (request.method === 'HEAD') return void response.end();
    const served = r.kind === 'collection' ? r.served : null;
    await this.#stream(response, pageOpen(r.at, served), PAGE_CLOSE, r, true, (e) => pageRow(r.at, e));
  }

  /** Writes a listing in pieces as the client takes them. */
  async #stream(
    response: ServerResponse,
    open: string,
    close: string,
    r: Resource,
    deep: boolean,
    line: (e: Entry) => string,
  ): Promise<void> {
    let text = open;
    if (deep && r.kind === 'collection')
      for (const entry of r.children()) {
        text += line(entry);
        if (text.length < 32 * 1024) continue;
        await put(response, text);
        // a reading of the index is synchronous: let others in between
        await new Promise((resolve) => setImmediate(resolve));
        text = '';
      }
    response.end(text + close);
  }

  async #send(
    request: IncomingMessage,
    ask: Ask,
    r: Resource & { kind: 'file' },
    response: ServerResponse,
  ): Promise<void> {
    response.setHeader('ETag', r.etag);
    if (r.modifiedMs !== null) response.setHeader('Last-Modified', httpDate(r.modifiedMs));
    response.setHeader('Accept-Ranges', 'bytes');
    response.setHeader('Cache-Control', 'no-cache');
    const condition = checkConditions(ask.headers, r);
    if (condition !== 200) return void response.writeHead(condition).end();
    response.setHeader('Content-Type', r.type);
    // whatever a volume holds, it runs nothing in a browser
    response.setHeader('X-Content-Type-Options', 'nosniff');
    response.setHeader('Content-Security-Policy', "sandbox; default-src 'none'");
    let range: ByteRange = { start: 0, end: r.size };
    let status = 200;
    const wanted = rangeApplies(ask.headers, r) ? parseRange(ask.headers.range, r.size) : null;
    if (wanted === 'unsatisfiable') {
      response.setHeader('Content-Range', `bytes */${r.size}`);
      response.writeHead(416, { 'Content-Length': 0 }).end();
      return;
    }
    if (wanted) {
      range = wanted;
      status = 206;
      response.setHeader('Content-Range', `bytes ${range.start}-${range.end - 1}/${r.size}`);
    }
    const length = { 'Content-Length': range.end - range.start };
    if (request.method === 'HEAD') return void response.writeHead(status, length).end();
    const reading = await r.open(() => response.destroy());
    try {
      response.writeHead(status, length);
      await this.#pump(response, reading, range);
      response.end();
    } finally {
      await reading.close();
    }
  }

  /** Sends a range; the next piece is read while the last one is sent. */
  async #pump(response: ServerResponse, reading: Reading, { start, end }: ByteRange): Promise<void> {
    const read = (at: number): Promise<Buffer | null> => {
      const p = reading.read(at, Math.min(PIECE, end - at));
      p.catch(() => undefined);
      return p;
    };
    let at = start;
    let next = at < end ? read(at) : null;
    try {
      while (next) {
        const piece = await next;
        if (!piece || piece.length === 0)
          throw new SimpleVolumeError('CONTENT_CHANGED', 'the content ended early');
        at += piece.length;
        next = at < end ? read(at) : null;
        await put(response, piece);
        this.#options.onSent?.(piece.length);
      }
    } finally {
      // no read may be under way when the reading is closed
      await next?.catch(() => undefined);
    }
  }

  #fail(request: IncomingMessage, response: ServerResponse, error: unknown): void {
    const known = error instanceof SimpleVolumeError ? error : null;
    if (response.destroyed) return;
    if (!known) this.#options.log.error({ err: error, method: request.method }, 'webdav request failed');
    else if (response.headersSent && known.code !== 'CANCELLED')
      this.#options.log.warn({ code: known.code, reason: known.message }, 'webdav answer cut short');
    // a cut connection is the only way left to say that the body is not complete
    if (response.headersSent) return void response.destroy();
    const code = known?.code ?? 'INTERNAL';
    const message = known?.message ?? 'internal error; the log has the details';
    const body = `${JSON.stringify({ error: { code, message } })}\n`;
    for (const name of response.getHeaderNames())
      if (name !== 'allow' && name !== 'dav') response.removeHeader(name);
    if (code === 'UNAUTHORIZED')
      response.setHeader('WWW-Authenticate', 'Basic realm="simple-volume", charset="UTF-8"');
    if (known?.status === 503) response.setHeader('Retry-After', '5');
    // an unread body would stand in the way of the next request
    if (!request.complete) response.setHeader('Connection', 'close');
    response.writeHead(known && known.status !== 499 ? known.status : known ? 503 : 500, {
      'Content-Type': 'application/json; charset=utf-8',
      'Content-Length': Buffer.byteLength(body),
    });
    response.end(request.method === 'HEAD' ? undefined : body);
  }
}
