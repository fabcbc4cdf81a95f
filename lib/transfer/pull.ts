/** The replica's side of a pull: control over HTTP, bytes through rclone. */
import { type FileHandle, open } from 'node:fs/promises';
import { SimpleVolumeError } from '../core/errors.ts';
import { formatGeneration, type Generation, type Lineage, parseGeneration } from '../core/generation.ts';
import type { HttpClient } from '../core/http-client.ts';
import { type HashFile, TRAILER } from '../core/manifest.ts';
import type { Offer, OfferedPack, Puller, PullSource } from '../core/parts.ts';
import { AGENT_TLS_NAME } from '../core/tls.ts';
import { Limit } from './limit.ts';
import { rcloneCat } from './rclone.ts';
import { openRelay } from './relay.ts';

export interface PullerOptions {
  http: HttpClient;
  /** absolute path of rclone; asked for at each pull, null while there is none */
  rclone: () => string | null;
  /** this node's name, as in its grants */
  node: string;
  hashFile: HashFile;
  caFile?: string | null;
  /** rclone processes at the same time, and packs of one volume; default 2 */
  limit?: number;
  /** read ahead of each, bytes; default 0 */
  bufferBytes?: number;
  /** waits as long as bytes that have arrived take at the rate that is allowed */
  rate?: (bytes: number, signal: AbortSignal) => Promise<void>;
  stallMs?: number;
  graceMs?: number;
  /** called with bytes that arrived */
  onReceived?: (bytes: number) => void;
}

/** A manifest has to be written by the source before the offer is answered. */
const OFFER_TIMEOUT = 120_000;
const END_MARK = 0xffff_ffff;

const bad = (what: string): SimpleVolumeError =>
  new SimpleVolumeError('PULL_FAILED', `the source answered something unexpected: ${what}`);

const count = (v: unknown, what: string): number => {
  if (typeof v !== 'number' || !Number.isSafeInteger(v) || v < 0) throw bad(what);
  return v;
};

/** The reply is another machine's word: checked field by field, it decides names and paths here. */
function parseOffer(raw: unknown): Offer {
  const o = raw as Record<string, unknown> | null;
  const m = o?.manifest as Record<string, unknown> | undefined;
  if (!o || !m) throw bad('no offer');
  if (typeof o.id !== 'string' || !/^[\w-]{8,64}$/.test(o.id)) throw bad('offer.id');
  if (typeof m.hash !== 'string' || !/^[0-9a-f]{64}$/.test(m.hash)) throw bad('offer.manifest.hash');
  if (o.webdavPath !== `/transfer/${o.id}/`) throw bad('offer.webdavPath');
  if (
    !Array.isArray(o.lineage) ||
    !o.lineage.every((p: unknown) => Array.isArray(p) && p.length === 2 && p.every(Number.isSafeInteger))
  )
    throw bad('offer.lineage');
  const generation = (v: unknown, what: string): Generation => {
    if (typeof v !== 'string') throw bad(what);
    return parseGeneration(v, what);
  };
  return {
    id: o.id,
    generation: generation(o.generation, 'offer.generation'),
    base: o.base === null ? null : generation(o.base, 'offer.base'),
    lineage: o.lineage as Lineage,
    manifest: { bytes: count(m.bytes, 'offer.manifest.bytes'), hash: m.hash },
    webdavPath: o.webdavPath,
  };
}

function parsePacks(raw: unknown): OfferedPack[] {
  const packs = (raw as { packs?: unknown } | null)?.packs;
  if (!Array.isArray(packs)) throw bad('no list of packs');
  return packs.map((p: Record<string, unknown>) => {
    if (typeof p?.name !== 'string' || !/^pack-\d{4,9}$/.test(p.name)) throw bad('a pack name');
    return { name: p.name, bytes: count(p.bytes, 'pack.bytes'), items: count(p.items, 'pack.items') };
  });
}

/** Keeps the last bytes of a stream. */
class Last {
  #bytes: Buffer = Buffer.alloc(0);
  readonly #n: number;
  constructor(n: number) {
    this.#n = n;
  }
  add(chunk: Buffer): void {
    this.#bytes =
      chunk.length >= this.#n
        ? Buffer.from(chunk.subarray(-this.#n))
        : Buffer.concat([this.#bytes, chunk]).subarray(-this.#n);
  }
  get(): Buffer {
    return this.#bytes;
  }
}

export function createPuller(options: PullerOptions): Puller {
  const { http, node, hashFile } = options;
  const limit = new Limit(options.limit ?? 2);
  const address = (source: PullSource, path: string): string => `${source.url.replace(/\/+$/, '')}${path}`;

  const cat = (
    source: PullSource,
    offer: Offer,
    name: string,
    signal: AbortSignal,
    onData: (chunk: Buffer) => Promise<void>,
  ): Promise<number> =>
    limit.run(signal, async () => {
      const url = new URL(source.webdavUrl.replace(/\/+$/, '') + offer.webdavPath);
      const relay =
        url.protocol === 'https:'
          ? await openRelay({
              host: url.hostname.replace(/^\[|\]$/g, ''), // an IPv6 address
              port: Number(url.port || 443),
            })
          : null;
      if (relay) url.host = AGENT_TLS_NAME;
      try {
        return await rcloneCat(
          {
            binary: options.rclone(),
            folder: url.href,
            name,
            token: source.token,
            signal,
            caFile: options.caFile ?? null,
            socket: relay?.socket ?? null,
            ...(options.bufferBytes === undefined ? {} : { bufferBytes: options.bufferBytes }),
            ...(options.stallMs === undefined ? {} : { stallMs: options.stallMs }),
            ...(options.graceMs === undefined ? {} : { graceMs: options.graceMs }),
          },
          async (chunk) => {
            options.onReceived?.(chunk.length);
            await options.rate?.(chunk.length, signal);
            await onData(chunk);
          },
        );
      } finally {
        await relay?.close();
      }
    });

  return {
    atOnce: options.limit ?? 2,

    async offer(source, want, signal) {
      const { body } = await http.call<unknown>({
        method: 'POST',
        url: address(source, '/replication/transfers'),
        token: source.token,
        body: {
          namespace: want.namespace,
          volume: want.volume,
          epoch: want.epoch,
          node,
          have: want.have && formatGeneration(want.have),
          full: want.full,
        },
        timeoutMs: OFFER_TIMEOUT,
        signal,
      });
      return parseOffer(body);
    },

    async manifest(source, offer, file, signal) {
      const { bytes, hash } = offer.manifest;
      if (bytes < TRAILER) throw bad('offer.manifest.bytes');
      const failed = (what: string): SimpleVolumeError =>
        new SimpleVolumeError('PULL_FAILED', `manifest of transfer ${offer.id}: ${what}`);
      // the body first, the trailer only after the hash of the body was found to be right
      const body = bytes - TRAILER;
      const out: FileHandle = await open(file, 'w', 0o600);
      try {
        let at = 0;
        const trailer = new Last(TRAILER);
        await cat(source, offer, 'manifest', signal, async (chunk) => {
          if (at + chunk.length > bytes) throw failed(`longer than the ${bytes} bytes that were offered`);
          trailer.add(chunk);
          const part = chunk.subarray(0, Math.max(0, body - at));
          for (let n = 0; n < part.length; )
            n += (await out.write(part, n, part.length - n, at + n)).bytesWritten;
          at += chunk.length;
        });
        if (at !== bytes) throw failed(`${at} of ${bytes} bytes arrived`);
        const found = await hashFile(Buffer.from(file));
        if (!found.equals(trailer.get()) || found.toString('hex') !== hash)
          throw new SimpleVolumeError(
            'VERIFY_FAILED',
            `manifest of transfer ${offer.id}: the hash does not match`,
          );
        await out.write(found, 0, TRAILER, body);
      } finally {
        await out.close();
      }
    },

    async needs(source, offer, ordinals, signal) {
      const body = Buffer.allocUnsafe(ordinals.length * 4);
      ordinals.forEach((o, i) => {
        body.writeUInt32LE(o, i * 4);
      });
      const reply = await http.call<unknown>({
        method: 'POST',
        url: address(source, `/replication/transfers/${offer.id}/needs`),
        token: source.token,
        body,
        timeoutMs: OFFER_TIMEOUT,
        signal,
      });
      return parsePacks(reply.body);
    },

    async pack(source, offer, pack, onData, signal) {
      const end = new Last(16);
      await cat(source, offer, pack.name, signal, (chunk) => {
        end.add(chunk);
        return onData(chunk);
      });
      const mark = end.get();
      if (mark.length < 16 || mark.readUInt32LE(0) !== END_MARK || mark.readUInt32LE(4) !== 0)
        throw new SimpleVolumeError('PULL_FAILED', `${pack.name} of transfer ${offer.id} was cut short`);
    },

    async done(source, offer) {
      await http.call({
        method: 'DELETE',
        url: address(source, `/replication/transfers/${offer.id}`),
        token: source.token,
      });
    },

    async confirm(source, body, signal) {
      await http.call({
        method: 'POST',
        url: address(source, '/replication/confirm'),
        token: source.token,
        body: { ...body, node, generation: formatGeneration(body.generation) },
        signal,
      });
    },
  };
}
