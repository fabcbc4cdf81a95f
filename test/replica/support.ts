/** A source that serves a folder, and a replica with a real store and the real addon, for the tests of lib/replica. */
import { spawnSync } from 'node:child_process';
import fs from 'node:fs';
import os from 'node:os';
import path from 'node:path';
import { SimpleVolumeError } from '../../lib/core/errors.ts';
import { formatGeneration, type Generation, isAncestor, type Lineage } from '../../lib/core/generation.ts';
import {
  decodeStageResults,
  encodePackItems,
  encodePaths,
  encodeStageItems,
  type PackItem,
  type Run,
} from '../../lib/core/lists.ts';
import { ManifestWriter } from '../../lib/core/manifest.ts';
import type {
  Clock,
  Condition,
  Logger,
  Offer,
  OfferedPack,
  Puller,
  PullSource,
  SyncRequest,
  VolumeName,
} from '../../lib/core/parts.ts';
import { DEFAULT_POLICY, type ReplicaPolicy } from '../../lib/core/policy.ts';
import {
  CHUNK,
  chunksOf,
  decodeRecord,
  EMPTY,
  encodeRecord,
  Flag,
  hashOf,
  inoOf,
  Kind,
  kindOf,
  LARGE,
  linkGroupOf,
  pathOf,
  recordsIn,
  sameMeta,
  seqOf,
  sizeOf,
  withFields,
} from '../../lib/core/record.ts';
import { native } from '../../lib/native/load.ts';
import type { Native } from '../../lib/native/types.ts';
import { type ReplicaOptions, ReplicaVolume } from '../../lib/replica/replica-volume.ts';
import { firstDifference } from '../../lib/source/prove.ts';
import { removeShadow } from '../../lib/source/seal.ts';
import { type OpenStore, openVolumeStore } from '../../lib/store/volume-store.ts';

export const NAME = { namespace: 'games', volume: 'world' };

/** A clock that a test moves. */
export class TestClock implements Clock {
  bootMs = 1_000_000;
  wallMs = Date.UTC(2026, 0, 2, 3, 4, 5);
  boot(): number {
    return this.bootMs;
  }
  now(): number {
    return this.wallMs;
  }
  setTimeout(fn: () => void, ms: number): { cancel(): void } {
    const timer = setTimeout(fn, ms);
    return { cancel: () => clearTimeout(timer) };
  }
  pass(ms: number): void {
    this.bootMs += ms;
    this.wallMs += ms;
  }
}

export interface Line {
  level: string;
  data: Record<string, unknown>;
  text: string;
}
export function testLog(): Logger & { lines: Line[] } {
  const lines: Line[] = [];
  const at = (level: string) => (data: object, text: string) =>
    void lines.push({ level, data: data as Record<string, unknown>, text });
  const log = {
    lines,
    debug: at('debug'),
    info: at('info'),
    warn: at('warn'),
    error: at('error'),
    child: () => log,
  };
  return log;
}

const key = (r: Buffer): string => pathOf(r).toString('latin1');

interface State {
  generation: Generation;
  records: Map<string, Buffer>;
}

/** A connection that is given up ends at once, whatever it waits for. */
function unlessAborted<T>(work: Promise<T> | T, signal: AbortSignal): Promise<T> {
  const aborted = new Promise<never>((_, reject) => {
    signal.addEventListener('abort', () => reject(signal.reason), { once: true });
  });
  return Promise.race([work, aborted]);
}

/** Serves the folder `root`. Seals by looking at everything; keeps all older states to tell differences. */
export class TestSource implements Puller {
  readonly root: string;
  readonly folder: string;
  epoch = 1;
  lineage: Lineage = [[1, 1]];
  states: State[] = [];
  #removed = new Map<string, number>();
  #includes: Buffer[] = [];
  #excludes: Buffer[] = [];
  offers = new Map<
    string,
    { state: State; base: Generation | null; entries: Buffer[]; runs: (Run[] | null)[] }
  >();
  confirmed: { generation: string; state: string; problems: Condition[] }[] = [];
  counts = { offers: 0, differences: 0, packs: 0, ordinals: 0, bytes: 0, done: 0 };
  /** path moved to: path that it had */
  moves = new Map<string, string>();
  /** number of a hard-link group by its inode: on another node the same files have other inodes */
  groupOf: (ino: bigint) => bigint = (ino) => ino;
  // what a test breaks
  down = false;
  onPack: ((data: Buffer, at: number) => Promise<Buffer | null> | Buffer | null) | null = null;
  onOffer: (() => Promise<void> | void) | null = null;
  alterOffer: ((o: Offer) => Offer) | null = null;
  #n = 0;

  constructor(root: string, folder: string) {
    this.root = root;
    this.folder = folder;
    fs.mkdirSync(root, { recursive: true });
    fs.mkdirSync(folder, { recursive: true });
  }

  filter(include: string[], exclude: string[]): void {
    this.#includes = include.map((p) => Buffer.from(p));
    this.#excludes = exclude.map((p) => Buffer.from(p));
  }

  get newest(): State {
    return this.states.at(-1) as State;
  }

  /** A new epoch on this folder: another node's writer. */
  promote(epoch: number): void {
    this.epoch = epoch;
    this.lineage = [...this.lineage, [epoch, (this.states.at(-1)?.generation.seq ?? 0) + 1]];
  }

  async seal(): Promise<Generation> {
    const seq = (this.states.at(-1)?.generation.seq ?? 0) + 1;
    const before = this.states.at(-1)?.records ?? new Map<string, Buffer>();
    const scanner = native.scan(
      Buffer.from(this.root),
      EMPTY,
      native.compileFilter(this.#includes, this.#excludes),
      true,
    );
    const paths: Buffer[] = [];
    for (let piece = await scanner.next(1 << 20); piece; piece = await scanner.next(1 << 20))
      for (const r of recordsIn(piece)) if (kindOf(r) <= Kind.symlink) paths.push(Buffer.from(pathOf(r)));
    scanner.close();
    const stated = [...recordsIn(await native.stat(Buffer.from(this.root), encodePaths(paths)))];
    const files = stated.filter((r) => kindOf(r) === Kind.file);
    const hashed = new Map(
      decodeStageResults(
        await native.stage(
          { root: Buffer.from(this.root), slots: EMPTY, base: null, hashOnly: true },
          encodeStageItems(files.map((r, id) => ({ id, slot: 0, patch: false, path: pathOf(r) }))),
        ),
      ).map((s) => [key(s.record), s.record]),
    );
    const records = new Map<string, Buffer>();
    for (const r of stated) {
      const found = hashed.get(key(r)) ?? r;
      const group = linkGroupOf(found);
      const now = group === 0n ? found : withFields(found, { linkGroup: this.groupOf(group) });
      const old = before.get(key(r));
      const same =
        old !== undefined &&
        sameMeta(old, now) &&
        hashOf(old).equals(hashOf(now)) &&
        sizeOf(old) === sizeOf(now) &&
        linkGroupOf(old) === linkGroupOf(now);
      records.set(key(r), withFields(now, { seq: same ? seqOf(old) : seq }));
    }
    for (const k of before.keys()) if (!records.has(k)) this.#removed.set(k, seq);
    for (const k of records.keys()) this.#removed.delete(k);
    const generation = { epoch: this.epoch, seq };
    this.states.push({ generation, records });
    return generation;
  }

  #need(): void {
    if (this.down) throw new SimpleVolumeError('PULL_FAILED', 'the source does not answer');
  }

  async offer(
    _source: PullSource,
    want: VolumeName & { epoch: number; have: Generation | null; full: boolean },
  ): Promise<Offer> {
    this.#need();
    this.counts.offers++;
    await this.onOffer?.();
    const state = this.newest;
    const have = want.have;
    const known =
      have &&
      !want.full &&
      isAncestor(have, this.lineage, state.generation) &&
      this.states.some((s) => s.generation.seq === have.seq && s.generation.epoch === have.epoch);
    const base = known ? have : null;
    if (base) this.counts.differences++;
    const id = `t${process.pid}-${++this.#n}`;
    const old = base && (this.states.find((s) => s.generation.seq === base.seq) as State);
    const changed = [...state.records.values()].filter((r) => !base || seqOf(r) > base.seq);
    const gone = base
      ? [...this.#removed]
          .filter(([, seq]) => seq > base.seq)
          .map(([k, seq]) => encodeRecord({ kind: Kind.absent, path: Buffer.from(k, 'latin1'), seq }))
      : [];
    const entries: Buffer[] = [];
    const runs: (Run[] | null)[] = [];
    for (const r of [...changed, ...gone].sort((a, b) => pathOf(a).compare(pathOf(b)))) {
      const f = decodeRecord(r);
      f.ino = 0n;
      f.ctimeNs = 0n;
      f.flags &= ~(Flag.chunksFull | Flag.chunksSparse);
      let list: Run[] | null = null;
      if (kindOf(r) === Kind.file && sizeOf(r) >= LARGE) {
        f.flags |= Flag.chunksFull;
        const was = old?.records.get(key(r));
        if (was && kindOf(was) === Kind.file && sizeOf(was) >= LARGE) {
          list = differing(was, r);
          f.flags = (f.flags & ~Flag.chunksFull) | Flag.chunksSparse;
          f.chunks = Buffer.concat(
            list.map((run) => {
              const n = run.offset / CHUNK;
              const b = Buffer.alloc(20);
              b.writeUInt32LE(n, 0);
              chunksOf(r).copy(b, 4, n * 16, n * 16 + 16);
              return b;
            }),
          );
        }
      } else f.chunks = EMPTY;
      const from = this.moves.get(key(r));
      if (base && from !== undefined && kindOf(r) === Kind.file && seqOf(r) === state.generation.seq) {
        f.flags |= Flag.moved;
        f.target = Buffer.from(from, 'latin1');
      }
      entries.push(encodeRecord(f));
      runs.push(list);
    }
    const file = Buffer.from(path.join(this.folder, id));
    const writer = await ManifestWriter.create(file, {
      ...NAME,
      generation: state.generation,
      base,
      lineage: this.lineage,
      quiescent: true,
    });
    for (const e of entries) await writer.add(e);
    const { bytes, hash } = await writer.finish(native.hashFile);
    this.offers.set(id, { state, base, entries, runs });
    const offer: Offer = {
      id,
      generation: state.generation,
      base,
      lineage: this.lineage,
      manifest: { bytes, hash: hash.toString('hex') },
      webdavPath: `/transfer/${id}/`,
    };
    return this.alterOffer ? this.alterOffer(offer) : offer;
  }

  async manifest(_source: PullSource, offer: Offer, file: string): Promise<void> {
    this.#need();
    fs.copyFileSync(path.join(this.folder, offer.id), file);
  }

  #items = new Map<string, PackItem[]>();

  async needs(_source: PullSource, offer: Offer, words: Uint32Array): Promise<OfferedPack[]> {
    this.#need();
    const { state, entries, runs } = this.offers.get(offer.id) as NonNullable<
      ReturnType<typeof this.offers.get>
    >;
    const packs: OfferedPack[] = [];
    let items: PackItem[] = [];
    const flush = (): void => {
      if (items.length === 0) return;
      const name = `pack-${String(packs.length).padStart(4, '0')}`;
      this.#items.set(`${offer.id}/${name}`, items);
      packs.push({ name, bytes: items.reduce((n, i) => n + sizeOf(i.record), 0), items: items.length });
      items = [];
    };
    for (let i = 0; i < words.length; ) {
      let ordinal = words[i++] as number;
      let asked: Run[] | null = null;
      if (ordinal >= 0x8000_0000) {
        ordinal -= 0x8000_0000;
        asked = [];
        for (let n = words[i++] as number; n > 0; n--)
          asked.push({ offset: (words[i++] as number) * CHUNK, length: (words[i++] as number) * CHUNK });
      }
      const entry = entries[ordinal] as Buffer;
      const record = state.records.get(key(entry)) as Buffer;
      const size = sizeOf(record);
      const list = (asked ?? runs[ordinal] ?? null)?.map((r) => ({
        offset: r.offset,
        length: Math.min(r.length, size - r.offset),
      }));
      items.push({
        ordinal,
        runs: list ?? null,
        ino: inoOf(record),
        record: withFields(record, { chunks: EMPTY, flags: Flag.hash }),
      });
      this.counts.ordinals++;
      if (items.length >= 50) flush();
    }
    flush();
    return packs;
  }

  async pack(
    _source: PullSource,
    offer: Offer,
    pack: OfferedPack,
    onData: (chunk: Buffer) => Promise<void>,
    signal: AbortSignal,
  ): Promise<void> {
    this.#need();
    const items = this.#items.get(`${offer.id}/${pack.name}`) as PackItem[];
    const reader = native.createPackReader({
      root: Buffer.from(this.root),
      retired: null,
      seq: 0,
      items: encodePackItems(items),
    });
    this.counts.packs++;
    try {
      for (let at = 0; ; ) {
        signal.throwIfAborted();
        const read = await reader.read(at, 64 * 1024);
        if (!read || read.length === 0) break;
        const data = this.onPack ? await unlessAborted(this.onPack(read, at), signal) : read;
        if (data === null) throw new SimpleVolumeError('PULL_FAILED', 'the source died');
        signal.throwIfAborted();
        await onData(data);
        this.counts.bytes += data.length;
        at += read.length;
      }
    } finally {
      reader.close();
    }
  }

  async done(_source: PullSource, offer: Offer): Promise<void> {
    this.counts.done++;
    this.offers.delete(offer.id);
    fs.rmSync(path.join(this.folder, offer.id), { force: true });
  }

  async confirm(
    _source: PullSource,
    body: VolumeName & { epoch: number; generation: Generation; state: string; problems: Condition[] },
  ): Promise<void> {
    this.#need();
    this.confirmed.push({
      generation: formatGeneration(body.generation),
      state: body.state,
      problems: body.problems,
    });
  }
}

/** Chunks of `now` that differ, and always the last one. */
function differing(was: Buffer, now: Buffer): Run[] {
  const count = Math.ceil(sizeOf(now) / CHUNK);
  const a = chunksOf(was);
  const b = chunksOf(now);
  const out: Run[] = [];
  for (let c = 0; c < count; c++)
    if (c === count - 1 || !a.subarray(c * 16, c * 16 + 16).equals(b.subarray(c * 16, c * 16 + 16)))
      out.push({ offset: c * CHUNK, length: CHUNK });
  return out;
}

export interface World {
  folder: string;
  source: TestSource;
  live: string;
  backups: string;
  incoming: string;
  store: OpenStore;
  clock: TestClock;
  log: ReturnType<typeof testLog>;
  replica: ReplicaVolume;
  request(more?: Partial<SyncRequest>): SyncRequest;
  /** asks for the newest and waits until nothing runs */
  sync(more?: Partial<SyncRequest>): Promise<void>;
  /** a new object over the same state, as after a restart */
  restart(more?: Partial<ReplicaOptions>): Promise<ReplicaVolume>;
  close(): Promise<void>;
}

export const POLICY: ReplicaPolicy = DEFAULT_POLICY;
export const PULL: PullSource = { url: 'http://a:1', webdavUrl: 'http://a:2', token: 'x', node: 'a' };

export function pathsOf(pool: string) {
  return {
    live: path.join(pool, 'games/world'),
    shadow: path.join(pool, '.simple-volume-shadows/games/world'),
    incoming: path.join(pool, '.simple-volume-incoming/games/world'),
    backups: path.join(pool, '.simple-volume-backups/games/world'),
    state: path.join(pool, '.simple-volume-state/volumes/games/world'),
  };
}

export async function world(
  options: Partial<ReplicaOptions> & { folder?: string; pool?: string; native?: Native } = {},
): Promise<World> {
  const folder = options.folder ?? fs.mkdtempSync(path.join(os.tmpdir(), 'sv-replica-'));
  const pool = options.pool ?? path.join(folder, 'pool');
  const paths = pathsOf(pool);
  const clock = new TestClock();
  const log = testLog();
  const source = new TestSource(path.join(folder, 'source'), path.join(folder, 'offers'));
  const store = openVolumeStore(paths.state, NAME.namespace, NAME.volume, { syncFile: native.syncFile });
  const make = (more: Partial<ReplicaOptions> = {}): ReplicaVolume =>
    new ReplicaVolume({
      name: NAME,
      paths,
      store,
      native,
      puller: source,
      clock,
      log,
      bootId: 'boot-1',
      mountsOf: () => [],
      firstDifference: (policy, signal) =>
        firstDifference({ native, store, root: Buffer.from(paths.live), policy }, signal),
      removeShadow: () => removeShadow(native, paths.shadow),
      ...options,
      ...more,
      limits: { floorBytes: 0, retryMinMs: 5, retryMaxMs: 20, ...options.limits, ...more.limits },
    });
  const w: World = {
    folder,
    source,
    live: paths.live,
    backups: paths.backups,
    incoming: paths.incoming,
    store,
    clock,
    log,
    replica: make(),
    request: (more = {}) => ({
      ...NAME,
      epoch: source.epoch,
      generation: source.states.at(-1)?.generation ?? null,
      source: PULL,
      echo: null,
      policy: POLICY,
      full: false,
      ...more,
    }),
    async sync(more = {}) {
      w.replica.sync(w.request(more));
      await settled(w.replica);
    },
    async restart(more = {}) {
      await w.replica.stop();
      w.replica = make(more);
      await w.replica.recover();
      return w.replica;
    },
    async close() {
      await w.replica.stop();
      store.close();
      fs.rmSync(folder, { recursive: true, force: true });
    },
  };
  await w.replica.recover();
  return w;
}

/** Until the replica is at rest, or failing. */
export async function settled(replica: ReplicaVolume, ms = 10_000): Promise<void> {
  const end = Date.now() + ms;
  for (;;) {
    await new Promise((r) => setTimeout(r, 5));
    const { state } = replica.status();
    if (!replica.busy && state !== 'empty') return;
    if (Date.now() > end) throw new Error(`still ${state} after ${ms} ms`);
  }
}

export async function until(what: () => boolean, ms = 10_000): Promise<void> {
  const end = Date.now() + ms;
  while (!what()) {
    if (Date.now() > end) throw new Error(`not within ${ms} ms: ${what}`);
    await new Promise((r) => setTimeout(r, 5));
  }
}

/** Everything about a tree that a replica has to have: one line per path. Directory times included. */
export function picture(root: string, options: { times?: boolean } = {}): string[] {
  const out: string[] = [];
  const inodes = new Map<string, number>();
  const walk = (at: Buffer, rel: Buffer): void => {
    const st = fs.lstatSync(at, { bigint: true });
    const mode = (Number(st.mode) & 0o7777).toString(8);
    const time = options.times === false ? '' : ` ${st.mtimeNs}`;
    const name = rel.toString('latin1') || '.';
    if (st.isDirectory()) {
      out.push(`${name}/ ${mode} ${st.uid}:${st.gid}${time}`);
      const names = fs.readdirSync(at, { encoding: 'buffer' }).sort(Buffer.compare);
      for (const n of names)
        walk(
          Buffer.concat([at, Buffer.from('/'), n]),
          rel.length ? Buffer.concat([rel, Buffer.from('/'), n]) : n,
        );
    } else if (st.isSymbolicLink()) {
      out.push(
        `${name} -> ${fs.readlinkSync(at, { encoding: 'buffer' }).toString('latin1')} ${st.uid}:${st.gid}${time}`,
      );
    } else if (st.isFile()) {
      const content = native.hashBytes(fs.readFileSync(at)).toString('hex').slice(0, 16);
      let links = '';
      if (st.nlink > 1n) {
        const k = `${st.ino}`;
        if (!inodes.has(k)) inodes.set(k, inodes.size);
        links = ` link${inodes.get(k)}`;
      }
      out.push(`${name} ${mode} ${st.uid}:${st.gid} ${st.size}${time} ${content}${links}`);
    } else out.push(`${name} special`);
  };
  walk(Buffer.from(root), EMPTY);
  return out;
}

/** The index says exactly what is on the disk, so that this replica can serve and be promoted. */
export async function indexFaults(w: World): Promise<string[]> {
  const faults: string[] = [];
  const rows = w.store.page(null, 1_000_000).map((r) => r.record);
  const now = [...recordsIn(await native.stat(Buffer.from(w.live), encodePaths(rows.map((r) => pathOf(r)))))];
  for (const [i, row] of rows.entries()) {
    const d = now[i] as Buffer;
    if (kindOf(row) !== kindOf(d))
      faults.push(`${key(row)}: kind ${kindOf(row)} but ${kindOf(d)} on the disk`);
    else if (row.compare(d, 16, 48, 16, 48) !== 0) faults.push(`${key(row)}: identity`);
    else if (!sameMeta(row, d)) faults.push(`${key(row)}: metadata`);
    if (kindOf(row) === Kind.file && sizeOf(row) >= LARGE && !w.store.chunks(pathOf(row)))
      faults.push(`${key(row)}: no chunks`);
  }
  return faults;
}

/** Writes a file, and the directories above it. */
export function put(root: string, name: string, data: string | Buffer): void {
  fs.mkdirSync(path.dirname(path.join(root, name)), { recursive: true });
  fs.writeFileSync(path.join(root, name), data);
}

/** A returning node over this folder dies at the named place. Gives what was written to standard error, and the signal. */
export const diesAt = (at: string, folder: string): { signal: string | null; stderr: string } =>
  spawnSync(process.execPath, [path.join(import.meta.dirname, 'aside-child.ts'), folder], {
    env: { ...process.env, SIMPLE_VOLUME_CRASH_AT: at },
    encoding: 'utf8',
  });
