/** A volume for the tests of the transfer room: a real directory, described by the addon, with an index in memory. */
import { readdirSync, readlinkSync, rmSync, statSync } from 'node:fs';
import { lstat, mkdir, readdir, readlink } from 'node:fs/promises';
import type { AddressInfo } from 'node:net';
import path from 'node:path';
import type { Generation, Lineage } from '../../lib/core/generation.ts';
import { decodeStageResults, encodeStageItems, type Run, StageStatus } from '../../lib/core/lists.ts';
import type { Clock, Logger, ServedGeneration, ServedVolume, VolumeName } from '../../lib/core/parts.ts';
import {
  chunksOf,
  EMPTY,
  encodeRecord,
  Flag,
  hashOf,
  inoOf,
  Kind,
  kindOf,
  pathOf,
  sameMeta,
  seqOf,
  sizeOf,
  withFields,
} from '../../lib/core/record.ts';
import type { IndexSnapshot, Row } from '../../lib/core/store.ts';
import { native } from '../../lib/native/load.ts';
import { createGrants, type Principal } from '../../lib/transfer/grant.ts';
import { Offers, type OffersOptions } from '../../lib/transfer/offers.ts';
import { findRclone } from '../../lib/transfer/rclone-binary.ts';
import { Webdav, type WebdavOptions } from '../../lib/transfer/webdav.ts';

export const clock: Clock = {
  boot: () => performance.now(),
  now: () => Date.now(),
  setTimeout(fn, ms) {
    const timer = setTimeout(fn, ms);
    return { cancel: () => clearTimeout(timer) };
  },
};

export interface TestLogger extends Logger {
  lines: { level: string; data: object; text: string }[];
}
export function testLogger(): TestLogger {
  const lines: TestLogger['lines'] = [];
  const at = (level: string) => (data: object, text: string) => void lines.push({ level, data, text });
  const log: TestLogger = {
    lines,
    debug: at('debug'),
    info: at('info'),
    warn: at('warn'),
    error: at('error'),
    child: () => log,
  };
  return log;
}

type Chunks = Map<string, Buffer>;
const key = (p: Buffer): string => p.toString('latin1');

/** The newest state in memory; opened generations are copies. */
export class MemoryIndex implements IndexSnapshot {
  readonly rows: Row[];
  readonly #chunks: Chunks;
  readonly #runs: Map<string, { seq: number; runs: Run[] }[]>;
  readonly #removed: Row[];
  closed = false;
  constructor(
    rows: Row[],
    chunks: Chunks,
    removed: Row[],
    runs: Map<string, { seq: number; runs: Run[] }[]>,
  ) {
    this.rows = rows;
    this.#chunks = chunks;
    this.#removed = removed;
    this.#runs = runs;
  }
  #open(): void {
    if (this.closed) throw new Error('the index is closed');
  }
  get(p: Buffer): Row | undefined {
    this.#open();
    return this.rows.find((r) => pathOf(r.record).equals(p));
  }
  chunks(p: Buffer): Buffer | undefined {
    this.#open();
    return this.#chunks.get(key(p));
  }
  page(after: Buffer | null, limit: number, below?: Buffer): Row[] {
    this.#open();
    const prefix = below?.length ? Buffer.concat([below, Buffer.from('/')]) : EMPTY;
    const inside = (p: Buffer): boolean =>
      !below || p.equals(below) || p.subarray(0, prefix.length).equals(prefix);
    return this.rows
      .filter((r) => {
        const p = pathOf(r.record);
        return (after === null || p.compare(after) > 0) && inside(p);
      })
      .slice(0, limit);
  }
  changedSince(seq: number, after: Buffer | null, limit: number): Row[] {
    this.#open();
    return [...this.rows, ...this.#removed]
      .filter((r) => seqOf(r.record) > seq && (after === null || pathOf(r.record).compare(after) > 0))
      .sort((a, b) => pathOf(a.record).compare(pathOf(b.record)))
      .slice(0, limit);
  }
  linkGroup(): Row[] {
    return [];
  }
  runsSince(p: Buffer, seq: number): Run[] | null {
    this.#open();
    const known = this.#runs.get(key(p)) ?? [];
    const later = known.filter((r) => r.seq > seq);
    return later.length > 0 ? later.flatMap((r) => r.runs) : null;
  }
  totals(): { entries: number; bytes: number } {
    return { entries: this.rows.length, bytes: this.rows.reduce((n, r) => n + sizeOf(r.record), 0) };
  }
  meta<T>(): T | undefined {
    return undefined;
  }
  close(): void {
    this.closed = true;
  }
}

export class TestVolume implements ServedVolume {
  readonly namespace: string;
  readonly volume: string;
  readonly root: string;
  readonly retired: string;
  readonly offers: string;
  strict = false;
  quiescent = true;
  horizon = 1;
  current: Generation | null = null;
  line: Lineage = [[1, 1]];
  pins = 0;
  opened: MemoryIndex[] = [];
  #rows: Row[] = [];
  #chunks: Chunks = new Map();
  #removed: Row[] = [];
  #runs = new Map<string, { seq: number; runs: Run[] }[]>();

  constructor(base: string, name: VolumeName = { namespace: 'default', volume: 'world' }) {
    this.namespace = name.namespace;
    this.volume = name.volume;
    this.root = path.join(base, 'data');
    this.retired = path.join(base, 'retired');
    this.offers = path.join(base, 'offers');
  }

  epoch(): number {
    return this.line.at(-1)![0];
  }
  generation(): Generation | null {
    return this.current;
  }
  lineage(): Lineage {
    return this.line;
  }
  canDiffFrom(base: Generation): boolean {
    return (
      base.epoch === 1 && base.seq >= this.horizon && this.current !== null && base.seq <= this.current.seq
    );
  }

  async open(): Promise<ServedGeneration> {
    if (!this.current) throw Object.assign(new Error('nothing sealed'), { code: 'NOTHING_SEALED' });
    const index = new MemoryIndex([...this.#rows], new Map(this.#chunks), [...this.#removed], this.#runs);
    this.opened.push(index);
    this.pins++;
    let released = false;
    return {
      generation: this.current,
      lineage: this.line,
      quiescent: this.quiescent,
      index,
      root: Buffer.from(this.root),
      retired: Buffer.from(this.retired),
      strict: this.strict,
      runsSince: (p, seq) => index.runsSince(p, seq),
      closeIndex: () => index.close(),
      release: () => {
        if (released) throw new Error('released twice');
        released = true;
        index.close();
        this.pins--;
      },
    };
  }

  /** Describes the directory as the next generation. */
  async seal(runs: Map<string, Run[]> = new Map()): Promise<Generation> {
    const seq = (this.current?.seq ?? 0) + 1;
    const { rows, chunks } = await describe(this.root);
    const old = new Map(this.#rows.map((r) => [key(pathOf(r.record)), r]));
    this.#rows = rows.map((row) => {
      const before = old.get(key(pathOf(row.record)));
      old.delete(key(pathOf(row.record)));
      const same =
        before && sameMeta(before.record, row.record) && hashOf(before.record).equals(hashOf(row.record));
      return same
        ? { ...row, record: withFields(row.record, { seq: seqOf(before.record) }) }
        : { ...row, record: withFields(row.record, { seq }) };
    });
    this.#removed = this.#removed.filter((r) => !rows.some((n) => pathOf(n.record).equals(pathOf(r.record))));
    for (const gone of old.values())
      this.#removed.push({
        record: encodeRecord({ kind: Kind.absent, path: pathOf(gone.record), seq }),
        copyIno: 0n,
      });
    for (const [p, r] of runs) this.#runs.set(p, [...(this.#runs.get(p) ?? []), { seq, runs: r }]);
    this.#chunks = chunks;
    this.current = { epoch: this.epoch(), seq };
    return this.current;
  }
  row(p: string | Buffer): Row {
    const row = this.#rows.find((r) => pathOf(r.record).equals(Buffer.from(p)));
    if (!row) throw new Error(`no row ${p}`);
    return row;
  }
  setRow(p: string, change: (record: Buffer) => Buffer): void {
    this.#rows = this.#rows.map((r) =>
      pathOf(r.record).equals(Buffer.from(p)) ? { ...r, record: change(r.record) } : r,
    );
  }
}

/** Rows of a directory, contents hashed by the addon. */
async function describe(root: string): Promise<{ rows: Row[]; chunks: Chunks }> {
  const rows: Row[] = [];
  const chunks: Chunks = new Map();
  const files: Buffer[] = [];
  const visit = async (rel: Buffer): Promise<void> => {
    const full = Buffer.concat([Buffer.from(`${root}/`), rel]);
    const s = await lstat(full, { bigint: true });
    const meta = {
      mode: Number(s.mode & 0o7777n),
      uid: Number(s.uid),
      gid: Number(s.gid),
      mtimeNs: s.mtimeNs,
    };
    const same = { ...meta, ino: s.ino, ctimeNs: s.ctimeNs, path: rel };
    if (s.isDirectory()) {
      rows.push({ record: encodeRecord({ kind: Kind.directory, ...same }), copyIno: 0n });
      for (const name of await readdir(full, { encoding: 'buffer' }))
        await visit(rel.length === 0 ? name : Buffer.concat([rel, Buffer.from('/'), name]));
    } else if (s.isSymbolicLink()) {
      const target = await readlink(full, { encoding: 'buffer' });
      rows.push({
        record: encodeRecord({ kind: Kind.symlink, size: target.length, target, ...same }),
        copyIno: 0n,
      });
    } else if (s.isFile()) files.push(rel);
  };
  await visit(EMPTY);
  const results = decodeStageResults(
    await native.stage(
      { root: Buffer.from(root), slots: EMPTY, base: null, hashOnly: true },
      encodeStageItems(files.map((p, id) => ({ id, slot: 0, patch: false, path: p }))),
    ),
  );
  for (const r of results) {
    if (r.status !== StageStatus.ok) throw new Error(`stage: status ${r.status} errno ${r.errno}`);
    const list = Buffer.from(chunksOf(r.record));
    const record = withFields(r.record, { chunks: EMPTY });
    record[5] = record[5]! & ~(Flag.chunksFull | Flag.chunksSparse);
    if (kindOf(record) !== Kind.file) throw new Error('stage: not a file');
    if (list.length > 0) chunks.set(key(pathOf(record)), list);
    rows.push({ record, copyIno: inoOf(record) });
  }
  rows.sort((a, b) => pathOf(a.record).compare(pathOf(b.record)));
  return { rows, chunks };
}

export interface Lab {
  volume: TestVolume;
  offers: Offers;
  webdav: Webdav;
  url: string;
  log: TestLogger;
  token: string;
  grant: (change?: object) => string;
  agent: Principal;
  /** what a grant for node-b opens */
  replica: Principal & { kind: 'grant' };
  fetch: (target: string, init?: RequestInit & { anonymous?: boolean }) => Promise<Response>;
  close: () => Promise<void>;
}

/** A volume, its offers and the WebDAV server on loopback. */
export async function startLab(
  base: string,
  options: { browseAuth?: boolean; offers?: Partial<OffersOptions>; webdav?: Partial<WebdavOptions> } = {},
): Promise<Lab> {
  await mkdir(path.join(base, 'data'), { recursive: true });
  const volume = new TestVolume(base);
  const log = testLogger();
  const token = 'token-of-this-agent+/=';
  const grants = createGrants(token);
  const scope = { namespace: 'default', volume: 'world', epoch: 1, node: 'node-b' };
  const offers = new Offers({ native, clock, log, ...options.offers });
  const authenticate = (header: string | undefined): Principal | null => {
    const given = /^Bearer (.+)$/.exec(header ?? '')?.[1];
    return given === token ? { kind: 'agent' } : given ? grants.verify(given) : null;
  };
  const volumes = {
    list: () => [volume],
    get: (n: VolumeName) => (n.namespace === volume.namespace && n.volume === volume.volume ? volume : null),
  };
  const webdav = new Webdav({
    offers,
    volumes,
    authenticate,
    browseAuth: options.browseAuth ?? true,
    clock,
    log,
    ...options.webdav,
  });
  const { port } = (await webdav.listen(0, '127.0.0.1')) as AddressInfo;
  const url = `http://127.0.0.1:${port}`;
  return {
    volume,
    offers,
    webdav,
    url,
    log,
    token,
    grant: (change = {}) => grants.mint({ ...scope, ...change }),
    agent: { kind: 'agent' },
    replica: { kind: 'grant', ...scope },
    fetch: (target, init = {}) =>
      fetch(url + target, {
        redirect: 'manual',
        ...init,
        headers: {
          ...(init.anonymous ? {} : { authorization: `Bearer ${token}` }),
          ...(init.headers as object),
        },
      }),
    close: async () => {
      await offers.close();
      await webdav.close();
    },
  };
}

/** Regular files that this process has open, as the kernel lists them. */
export function openFiles(): string[] {
  const out: string[] = [];
  for (const fd of readdirSync('/proc/self/fd'))
    try {
      const target = readlinkSync(`/proc/self/fd/${fd}`);
      if (target.startsWith('/') && !target.startsWith('/dev') && !target.startsWith('/proc'))
        out.push(target);
    } catch {
      // closed meanwhile
    }
  return out;
}

/** The rclone that an agent would use; the tests of this room need one. */
export const testRclone = async (): Promise<string> => (await findRclone()).path;

export const exists = (p: string): boolean => statSync(p, { throwIfNoEntry: false }) !== undefined;
export const remove = (p: string): void => rmSync(p, { recursive: true, force: true });
