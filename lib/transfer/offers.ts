/**
 * The source's side of a pull. An offer pins one generation: its manifest stands in a file, and packs are put
 * together from the pinned files while they are read. The same for the active node and for a replica that
 * helps another one to catch up.
 */
import { randomBytes } from 'node:crypto';
import { type FileHandle, mkdir, open, readdir } from 'node:fs/promises';
import path from 'node:path';
import { setImmediate } from 'node:timers/promises';
import { isNoSpace, SimpleVolumeError } from '../core/errors.ts';
import type { Generation } from '../core/generation.ts';
import { decodeRuns, encodePackItems, type PackItem, type Run, unionRuns } from '../core/lists.ts';
import {
  type Clock,
  type Logger,
  type Offer,
  type OfferedPack,
  type ServedGeneration,
  type ServedVolume,
  type VolumeName,
  volumeKey,
} from '../core/parts.ts';
import { CHUNK, Flag, HEAD, Kind, printablePath, sizeOf } from '../core/record.ts';
import type { Native, NativeError, PackReader } from '../native/types.ts';
import { allows, type GrantScope, type Principal } from './grant.ts';
import { ENTRY, writeOffer } from './offer-writer.ts';

/** A pack holds at most so many items and about so many bytes (docs/formats.md, "Pack"). */
const PACK_ITEMS = 4096;
const PACK_BYTES = 64 * 1024 * 1024;
/** Items of all packs of one transfer together. */
const ITEMS_LIMIT = 8_000_000;
const RANGES = 0x8000_0000;

export interface OffersOptions {
  native: Pick<Native, 'createPackReader' | 'hashFile' | 'removeTree'>;
  clock: Clock;
  log: Logger;
  /** ms after which a transfer that nobody touched is dropped; default 5 minutes */
  idleMs?: number;
  /** transfers open at the same time; default 64 */
  limit?: number;
}

/** One reading of a file of a transfer. */
export interface Reading {
  /** At most `max` bytes from `offset`; null at the end. */
  read(offset: number, max: number): Promise<Buffer | null>;
  close(): Promise<void>;
}

/** A file of a transfer's folder. */
export interface TransferFile {
  name: string;
  /** bytes, null: not planned yet */
  known: number | null;
  length(): Promise<number>;
  /** @param abort called when the transfer is dropped meanwhile */
  open(abort: () => void): Promise<Reading>;
}

interface Pack {
  name: string;
  words: Uint32Array;
  items: number;
  bytes: number;
  length: number | null;
  planning: Promise<number> | null;
}

/** A reader that was planned and not yet read from: a client asks for the length first. */
interface Spare {
  pack: Pack;
  reader: PackReader;
}
/** Of one transfer at most: as many as a replica pulls at once. */
const SPARES = 2;

interface Transfer {
  id: string;
  owner: GrantScope;
  parent: string;
  folder: string;
  served: ServedGeneration;
  count: number;
  manifestBytes: number;
  packs: Pack[];
  items: number;
  touched: number;
  readers: Set<() => void>;
  /** the oldest first */
  spares: Spare[];
  dropped: Promise<void> | null;
  idle: (() => void) | null;
}

/** A transfer whose manifest is being written. */
interface Creation {
  key: string;
  cancelled: boolean;
  done: Promise<void>;
}

interface Item {
  ordinal: number;
  /** null: the whole file, or the runs that the offer knows */
  chunks: Run[] | null;
}

/** One item per ordinal; with bit 31: a word n and n pairs {first chunk, chunks}. */
function* itemsIn(words: Uint32Array): Generator<{ item: Item; from: number }> {
  const bad = (text: string): SimpleVolumeError =>
    new SimpleVolumeError('FIELD_INVALID', `needs: ${text}`, { field: 'needs' });
  for (let at = 0; at < words.length; ) {
    const from = at;
    const word = words[at++] as number;
    let chunks: Run[] | null = null;
    if (word >= RANGES) {
      const n = words[at++] ?? 0;
      if (n < 1 || n > 65_535 || at + 2 * n > words.length) throw bad('a list of chunks is cut short');
      chunks = [];
      let next = 0;
      for (let i = 0; i < n; i++) {
        const first = words[at++] as number;
        const count = words[at++] as number;
        if (first < next || count === 0) throw bad('chunks must ascend and not overlap');
        next = first + count;
        chunks.push({ offset: first * CHUNK, length: count * CHUNK });
      }
    }
    yield { item: { ordinal: word % RANGES, chunks }, from };
  }
}

/** Runs of the chunks asked for; null, the whole file, when that is all of them. */
function wantedRuns(chunks: Run[], size: number): Run[] | null {
  const runs = unionRuns([chunks], size);
  return runs[0]?.length === size ? null : runs;
}

/** Reads a file in blocks and keeps the last one: ordinals mostly ascend. */
class Window {
  readonly #file: FileHandle;
  #block: Buffer = Buffer.alloc(0);
  #start = 0;
  constructor(file: FileHandle) {
    this.#file = file;
  }
  async get(at: number, length: number): Promise<Buffer> {
    if (at < this.#start || at + length > this.#start + this.#block.length) {
      const block = Buffer.allocUnsafe(Math.max(length, 64 * 1024));
      let n = 0;
      while (n < block.length) {
        const { bytesRead } = await this.#file.read(block, n, block.length - n, at + n);
        if (bytesRead === 0) break;
        n += bytesRead;
      }
      if (n < length) throw new SimpleVolumeError('INTERNAL', 'a file of an offer is shorter than it was');
      this.#block = block.subarray(0, n);
      this.#start = at;
    }
    return this.#block.subarray(at - this.#start, at - this.#start + length);
  }
  close(): Promise<void> {
    return this.#file.close();
  }
}

const u64 = (b: Buffer, at: number): number => Number(b.readBigUInt64LE(at));

/** Errors of the addon and of the file system as the catalogue has them. */
export function translate(error: unknown): unknown {
  const { code, path: at, message } = error as NativeError;
  if (error instanceof SimpleVolumeError || typeof code !== 'string') return error;
  const details = { cause: error, ...(at && Buffer.isBuffer(at) ? { path: printablePath(at) } : {}) };
  if (code === 'CONTENT_CHANGED' || code === 'ENOENT')
    return new SimpleVolumeError(
      'CONTENT_CHANGED',
      `a file is not the one that the generation describes${details.path ? `: ${details.path}` : ''}`,
      details,
    );
  if (isNoSpace(error))
    return new SimpleVolumeError('NO_SPACE', `no space for the offer: ${message}`, details);
  return error;
}

export class Offers {
  readonly #options: Required<OffersOptions>;
  readonly #transfers = new Map<string, Transfer>();
  readonly #cleaned = new Map<string, Promise<void>>();
  readonly #creations = new Set<Creation>();
  #sweep: { cancel(): void } | null = null;

  constructor(options: OffersOptions) {
    this.#options = { idleMs: 5 * 60_000, limit: 64, ...options };
  }

  /** Transfers that are open now. */
  get size(): number {
    return this.#transfers.size;
  }

  /**
   * Offers the newest generation of a volume to a node: the difference from what it has where that can be
   * told, else everything. An earlier transfer of the same volume to the same node ends.
   * @param parent absolute folder for offers of this volume (`<shadow>/offers`)
   * @throws NOTHING_SEALED, APPLYING (from the volume), TOO_MANY_TRANSFERS, NO_SPACE
   */
  async create(
    volume: ServedVolume,
    parent: string,
    want: { epoch: number; node: string; have: Generation | null; full: boolean },
  ): Promise<Offer> {
    const { native, clock, limit, log } = this.#options;
    const owner: GrantScope = {
      namespace: volume.namespace,
      volume: volume.volume,
      epoch: want.epoch,
      node: want.node,
    };
    for (const t of [...this.#transfers.values()])
      if (volumeKey(t.owner) === volumeKey(owner) && t.owner.node === owner.node) await this.#drop(t);
    if (this.#transfers.size + this.#creations.size >= limit)
      throw new SimpleVolumeError(
        'TOO_MANY_TRANSFERS',
        `${limit} transfers are open on this node; one that nobody touches ends after ${this.#options.idleMs / 1000} s`,
      );
    let finished = (): void => undefined;
    const creation: Creation = {
      key: volumeKey(owner),
      cancelled: false,
      done: new Promise<void>((resolve) => {
        finished = resolve;
      }),
    };
    this.#creations.add(creation);
    try {
      await this.#clean(parent);
      const served = await volume.open();
      const id = randomBytes(16).toString('hex');
      const folder = path.join(parent, id);
      try {
        const base = !want.full && want.have && volume.canDiffFrom(want.have) ? want.have : null;
        await mkdir(folder, { mode: 0o700 });
        const written = await writeOffer(folder, volume, served, base, native.hashFile, () => {
          if (creation.cancelled)
            throw new SimpleVolumeError('NOT_READY', 'the volume was stopped on this node just now');
        });
        served.closeIndex();
        this.#transfers.set(id, {
          id,
          owner,
          parent,
          folder,
          served,
          count: written.count,
          manifestBytes: written.bytes,
          packs: [],
          items: 0,
          touched: clock.boot(),
          readers: new Set(),
          spares: [],
          dropped: null,
          idle: null,
        });
        this.#arm();
        log.debug({ ...owner, transfer: id, entries: written.count, base }, 'transfer offered');
        return {
          id,
          generation: served.generation,
          base,
          lineage: served.lineage,
          manifest: { bytes: written.bytes, hash: written.hash.toString('hex') },
          webdavPath: `/transfer/${id}/`,
        };
      } catch (error) {
        served.release();
        await native.removeTree(Buffer.from(parent), Buffer.from(id)).catch(() => undefined);
        throw translate(error);
      }
    } finally {
      this.#creations.delete(creation);
      finished();
    }
  }

  /** Offers of an earlier run are of no use to anybody. */
  #clean(parent: string): Promise<void> {
    let done = this.#cleaned.get(parent);
    if (!done) {
      done = (async () => {
        await mkdir(parent, { recursive: true, mode: 0o700 });
        for (const name of await readdir(parent, { encoding: 'buffer' }))
          await this.#options.native.removeTree(Buffer.from(parent), name);
      })();
      this.#cleaned.set(parent, done);
      done.catch(() => this.#cleaned.delete(parent));
    }
    return done;
  }

  #find(id: string, principal: Principal): Transfer | null {
    const t = this.#transfers.get(id);
    if (!t || t.dropped || !allows(principal, t.owner)) return null;
    t.touched = this.#options.clock.boot();
    return t;
  }
  #need(id: string, principal: Principal): Transfer {
    const t = this.#find(id, principal);
    if (!t)
      throw new SimpleVolumeError(
        'TRANSFER_UNKNOWN',
        'no such transfer: it ended, or nobody touched it for too long',
      );
    return t;
  }

  /**
   * Turns wanted entries into packs; may be called again for more.
   * @throws TRANSFER_UNKNOWN, FIELD_INVALID when an ordinal is not a file of the manifest
   */
  async needs(id: string, principal: Principal, words: Uint32Array): Promise<OfferedPack[]> {
    const t = this.#need(id, principal);
    const index = new Window(await open(path.join(t.folder, 'index')));
    const made: Pack[] = [];
    let from = 0;
    let items = 0;
    let bytes = 0;
    let added = 0;
    const close = (to: number): void => {
      if (items === 0) return;
      made.push({
        name: '',
        words: words.slice(from, to),
        items,
        bytes: bytes + 8 + 16,
        length: null,
        planning: null,
      });
      from = to;
      items = 0;
      bytes = 0;
    };
    try {
      for (const { item, from: start } of itemsIn(words)) {
        const wrong = (text: string): SimpleVolumeError =>
          new SimpleVolumeError('FIELD_INVALID', `needs: entry ${item.ordinal} ${text}`, { field: 'needs' });
        if (item.ordinal >= t.count) throw wrong(`is not in the manifest (it has ${t.count})`);
        const entry = await index.get(item.ordinal * ENTRY, ENTRY);
        if (entry[48] !== Kind.file) throw wrong('is not a file');
        const wire = item.chunks ? item.chunks.reduce((n, r) => n + r.length, 0) : u64(entry, 16);
        if (items > 0 && (items >= PACK_ITEMS || bytes + wire > PACK_BYTES)) close(start);
        items++;
        bytes += wire + 16 * Math.ceil(wire / (1024 * 1024));
        // most answers come from the block that is held: let others in between
        if (added % 1024 === 0) await setImmediate();
        if (t.items + ++added > ITEMS_LIMIT)
          throw wrong(`is one too many: a transfer has at most ${ITEMS_LIMIT} items`);
      }
      close(words.length);
    } finally {
      await index.close();
    }
    t.items += added;
    for (const pack of made) {
      pack.name = `pack-${String(t.packs.length).padStart(4, '0')}`;
      t.packs.push(pack);
    }
    return made.map(({ name, bytes: n, items: count }) => ({ name, bytes: n, items: count }));
  }

  /** The files of a transfer's folder, null when there is no such transfer for this caller. */
  files(id: string, principal: Principal): TransferFile[] | null {
    const t = this.#find(id, principal);
    return t && [this.#manifestFile(t), ...t.packs.map((p) => this.#packFile(t, p))];
  }
  file(id: string, name: string, principal: Principal): TransferFile | null {
    const t = this.#find(id, principal);
    if (!t) return null;
    if (name === 'manifest') return this.#manifestFile(t);
    const pack = /^pack-\d{4,}$/.test(name) ? t.packs[Number(name.slice(5))] : undefined;
    return pack?.name === name ? this.#packFile(t, pack) : null;
  }

  #manifestFile(t: Transfer): TransferFile {
    return {
      name: 'manifest',
      known: t.manifestBytes,
      length: async () => t.manifestBytes,
      open: async (abort) => {
        const file = await open(path.join(t.folder, 'manifest'));
        return await this.#reading(t, abort, {
          read: async (offset, max) => {
            const b = Buffer.allocUnsafe(max);
            const { bytesRead } = await file.read(b, 0, max, offset);
            return bytesRead === 0 ? null : b.subarray(0, bytesRead);
          },
          close: () => file.close(),
        });
      },
    };
  }

  #packFile(t: Transfer, pack: Pack): TransferFile {
    return {
      name: pack.name,
      known: pack.length,
      length: async () => {
        if (pack.length !== null) return pack.length;
        pack.planning ??= this.#plan(t, pack).finally(() => {
          pack.planning = null;
        });
        return await pack.planning;
      },
      open: async (abort) => {
        let reader: PackReader;
        const spare = t.spares.findIndex((s) => s.pack === pack);
        if (spare >= 0) {
          reader = (t.spares.splice(spare, 1)[0] as Spare).reader;
        } else {
          reader = await this.#reader(t, pack);
          try {
            await reader.plan();
          } catch (error) {
            reader.close();
            throw translate(error);
          }
        }
        return await this.#reading(t, abort, {
          read: async (offset, max) => {
            try {
              return await reader.read(offset, max);
            } catch (error) {
              throw translate(error);
            }
          },
          close: async () => reader.close(),
        });
      },
    };
  }

  async #plan(t: Transfer, pack: Pack): Promise<number> {
    const reader = await this.#reader(t, pack);
    try {
      pack.length = await reader.plan();
    } catch (error) {
      reader.close();
      throw translate(error);
    }
    if (t.dropped) reader.close();
    else t.spares.push({ pack, reader });
    while (t.spares.length > SPARES) t.spares.shift()?.reader.close();
    return pack.length;
  }

  /** Describes the pack's files to the addon: from the offer's own files, the volume's index has moved on. */
  async #reader(t: Transfer, pack: Pack): Promise<PackReader> {
    const windows: Window[] = [];
    const window = async (name: string): Promise<Window> => {
      const w = new Window(await open(path.join(t.folder, name)));
      windows.push(w);
      return w;
    };
    try {
      const index = await window('index');
      const manifest = await window('manifest');
      const runsFile = await window('runs');
      const items: PackItem[] = [];
      for (const { item } of itemsIn(pack.words)) {
        if (items.length % 1024 === 0) await setImmediate();
        const entry = await index.get(item.ordinal * ENTRY, ENTRY);
        const length = Math.min(entry.readUInt32LE(36), HEAD + 4096);
        const ino = entry.readBigUInt64LE(8);
        const ctime = entry.readBigInt64LE(40);
        const runsLen = entry.readUInt32LE(32);
        const runsAt = u64(entry, 24);
        const head = await manifest.get(u64(entry, 0), length);
        const pathLen = head.readUInt32LE(96);
        // only what the reader looks at: without link text, xattrs and chunks
        const record = Buffer.from(head.subarray(0, HEAD + pathLen));
        record.writeUInt32LE(record.length, 0);
        record.fill(0, 100, 112);
        record[5] = head[5]! & (Flag.hash | Flag.sparse | Flag.large);
        record.writeBigUInt64LE(ino, 32);
        record.writeBigInt64LE(ctime, 40);
        const known =
          runsLen > 0 || head[5]! & Flag.chunksSparse
            ? decodeRuns(Buffer.from(await runsFile.get(runsAt, runsLen)))
            : null;
        items.push({
          ordinal: item.ordinal,
          runs: item.chunks ? wantedRuns(item.chunks, sizeOf(record)) : known,
          ino,
          record,
        });
      }
      return this.#options.native.createPackReader({
        root: t.served.root,
        retired: t.served.retired,
        seq: t.served.generation.seq,
        items: encodePackItems(items),
        strict: t.served.strict,
      });
    } finally {
      for (const w of windows) await w.close();
    }
  }

  async #reading(t: Transfer, abort: () => void, inner: Reading): Promise<Reading> {
    if (t.dropped) {
      await inner.close();
      throw new SimpleVolumeError('TRANSFER_UNKNOWN', 'the transfer has just ended');
    }
    t.readers.add(abort);
    let closed: Promise<void> | null = null;
    return {
      read: async (offset, max) => {
        t.touched = this.#options.clock.boot();
        return await inner.read(offset, max);
      },
      close: () => {
        closed ??= (async () => {
          await inner.close();
          t.touched = this.#options.clock.boot();
          t.readers.delete(abort);
          if (t.readers.size === 0) t.idle?.();
        })();
        return closed;
      },
    };
  }

  /** Ends a transfer; an unknown one is no error (the answer to an earlier DELETE may have been lost). */
  async drop(id: string, principal: Principal): Promise<void> {
    const t = this.#find(id, principal);
    if (t) await this.#drop(t);
  }

  /** Ends all transfers of a volume and gives its pins back: the volume stops. */
  async dropVolume(name: VolumeName): Promise<void> {
    await this.#dropAll((key) => key === volumeKey(name));
  }

  async close(): Promise<void> {
    await this.#dropAll(() => true);
    this.#sweep?.cancel();
    this.#sweep = null;
  }

  async #dropAll(which: (key: string) => boolean): Promise<void> {
    const creations = [...this.#creations].filter((c) => which(c.key));
    for (const c of creations) c.cancelled = true;
    await Promise.all(creations.map((c) => c.done));
    await Promise.all(
      [...this.#transfers.values()].filter((t) => which(volumeKey(t.owner))).map((t) => this.#drop(t)),
    );
  }

  #drop(t: Transfer): Promise<void> {
    t.dropped ??= (async () => {
      for (const abort of [...t.readers]) abort();
      if (t.readers.size > 0)
        await new Promise<void>((resolve) => {
          t.idle = resolve;
        });
      for (const { reader } of t.spares.splice(0)) reader.close();
      t.served.release();
      this.#transfers.delete(t.id);
      await this.#options.native
        .removeTree(Buffer.from(t.parent), Buffer.from(t.id))
        .catch((err: unknown) =>
          this.#options.log.warn({ err, transfer: t.id }, 'folder of a transfer not removed'),
        );
    })();
    return t.dropped;
  }

  #arm(): void {
    if (this.#sweep || this.#transfers.size === 0) return;
    const { clock, idleMs } = this.#options;
    this.#sweep = clock.setTimeout(
      () => {
        this.#sweep = null;
        for (const t of this.#transfers.values())
          if (t.readers.size === 0 && clock.boot() - t.touched >= idleMs) {
            this.#options.log.info({ ...t.owner, transfer: t.id }, 'transfer dropped: nobody touched it');
            void this.#drop(t);
          }
        this.#arm();
      },
      Math.max(10, idleMs / 10),
    );
  }
}
