/**
 * One SQLite file per volume: index, generations, epoch, journal. A damaged file concerns its own volume only.
 *
 * Commits wait for no disk (`synchronous=NORMAL` in WAL mode only syncs at checkpoints); where something must be
 * durable before the next step, durable() flushes the write-ahead log on the addon's threads. So the event loop
 * never waits for an fsync, and what was promised is on the disk all the same.
 */
import { mkdirSync, statSync } from 'node:fs';
import { join } from 'node:path';
import { DatabaseSync, type StatementSync } from 'node:sqlite';
import { setImmediate as nextTurn } from 'node:timers/promises';
import { Worker } from 'node:worker_threads';
import { SimpleVolumeError } from '../core/errors.ts';
import { decodeRuns, encodeRuns, type Run, unionRuns } from '../core/lists.ts';
import {
  encodeRecord,
  Flag,
  Kind,
  kindOf,
  linkGroupOf,
  pathOf,
  seqOf,
  sizeOf,
  withFields,
} from '../core/record.ts';
import type { GenerationRow, IndexReader, IndexSnapshot, Row, VolumeStore } from '../core/store.ts';

const SCHEMA_VERSION = 1;
const SCHEMA = `
  CREATE TABLE entry(path BLOB PRIMARY KEY, seq INTEGER NOT NULL, link BLOB, copy_ino BLOB NOT NULL, record BLOB NOT NULL) WITHOUT ROWID;
  CREATE INDEX entry_seq ON entry(seq);
  CREATE INDEX entry_link ON entry(link) WHERE link IS NOT NULL;
  CREATE TABLE chunk(path BLOB PRIMARY KEY, data BLOB NOT NULL) WITHOUT ROWID;
  CREATE TABLE removed(path BLOB PRIMARY KEY, seq INTEGER NOT NULL) WITHOUT ROWID;
  CREATE INDEX removed_seq ON removed(seq);
  CREATE TABLE run(path BLOB NOT NULL, seq INTEGER NOT NULL, runs BLOB, PRIMARY KEY(path, seq)) WITHOUT ROWID;
  CREATE TABLE meta(key TEXT PRIMARY KEY, value TEXT NOT NULL) WITHOUT ROWID;
  CREATE TABLE generation(seq INTEGER PRIMARY KEY, epoch INTEGER NOT NULL, sealed_at INTEGER NOT NULL, quiescent INTEGER NOT NULL, entries INTEGER NOT NULL, bytes INTEGER NOT NULL, changed INTEGER NOT NULL);
`;

/** Changed rows from which on a difference is read in path order. */
const MANY = 20_000;

/** Bytes of the write-ahead log after which its pages go into the database file. */
const LOG_BYTES = 4 * 1024 * 1024;

/** From here on (bytes) that takes longer than the event loop may be held, about 3 ms per MiB: a thread does it. */
const LARGE_LOG_BYTES = 6 * 1024 * 1024;

/** The thread that moves a large log. It syncs log and file itself, in SQLite's own order. */
const CHECKPOINT = `
const { workerData } = require('node:worker_threads');
const { DatabaseSync } = require('node:sqlite');
const db = new DatabaseSync(workerData);
db.exec('PRAGMA cache_size=-64; PRAGMA mmap_size=0; PRAGMA synchronous=NORMAL; PRAGMA wal_checkpoint(PASSIVE)');
db.close();
`;

/** Rows that nobody needs any more are removed in pieces of this many. */
const SWEEP_ROWS = 500;

/** Milliseconds of work in a transaction after which the event loop gets air. */
const SLICE_MS = 8;

type Blob = Uint8Array;
const buffer = (b: Blob): Buffer => Buffer.from(b.buffer, b.byteOffset, b.byteLength);

/** 8 bytes, little-endian: inode numbers can have 64 bits. */
function ino(value: bigint): Buffer {
  const b = Buffer.allocUnsafe(8);
  b.writeBigUInt64LE(value);
  return b;
}

/** Paths below a directory are those with this prefix; '0' is the byte after '/'. The root has all but itself. */
const subtree = (directory: Buffer): [from: Buffer, to: Buffer | null] =>
  directory.length === 0
    ? [Buffer.alloc(0), null]
    : [Buffer.concat([directory, Buffer.from('/')]), Buffer.concat([directory, Buffer.from('0')])];

interface EntryRow {
  record: Blob;
  copy_ino: Blob;
}

class Reader implements IndexReader {
  readonly db: DatabaseSync;
  readonly #statements = new Map<string, StatementSync>();

  constructor(db: DatabaseSync) {
    this.db = db;
  }

  sql(text: string): StatementSync {
    let s = this.#statements.get(text);
    if (!s) {
      s = this.db.prepare(text);
      this.#statements.set(text, s);
    }
    return s;
  }

  #row = (r: EntryRow): Row => ({
    record: buffer(r.record),
    copyIno: buffer(r.copy_ino).readBigUInt64LE(0),
  });

  get(path: Buffer): Row | undefined {
    const r = this.sql('SELECT record, copy_ino FROM entry WHERE path = ?').get(path) as unknown as
      | EntryRow
      | undefined;
    return r && this.#row(r);
  }

  chunks(path: Buffer): Buffer | undefined {
    const r = this.sql('SELECT data FROM chunk WHERE path = ?').get(path) as { data: Blob } | undefined;
    return r && buffer(r.data);
  }

  page(after: Buffer | null, limit: number, below?: Buffer): Row[] {
    const [from, to] = below === undefined ? [null, null] : subtree(below);
    const start = after && (!from || after.compare(from) > 0) ? after : from;
    // A blob is never NULL here: x'' sorts first, so "path > x''" leaves out only the root, which has no parent.
    const rows =
      start === null
        ? this.sql('SELECT record, copy_ino FROM entry ORDER BY path LIMIT ?').all(limit)
        : to
          ? this.sql(
              'SELECT record, copy_ino FROM entry WHERE path > ? AND path < ? ORDER BY path LIMIT ?',
            ).all(start, to, limit)
          : this.sql('SELECT record, copy_ino FROM entry WHERE path > ? ORDER BY path LIMIT ?').all(
              start,
              limit,
            );
    return (rows as unknown as EntryRow[]).map(this.#row);
  }

  changedSince(seq: number, after: Buffer | null, limit: number): Row[] {
    const beyond = after === null ? 'path >= ?2' : 'path > ?2';
    const from = after ?? Buffer.alloc(0);
    // A few changes are found by their numbers and sorted; with many it is cheaper to walk all paths in order.
    const page = (table: 'entry' | 'removed', columns: string): unknown[] => {
      const { n } = this.sql(
        `SELECT count(*) AS n FROM (SELECT 1 FROM ${table} WHERE seq > ? LIMIT ${MANY})`,
      ).get(seq) as { n: number };
      const where =
        n < MANY
          ? `path IN (SELECT path FROM ${table} INDEXED BY ${table}_seq WHERE seq > ?1 AND ${beyond} ORDER BY path LIMIT ?3)`
          : `+seq > ?1 AND ${beyond}`;
      return this.sql(`SELECT ${columns} FROM ${table} WHERE ${where} ORDER BY path LIMIT ?3`).all(
        seq,
        from,
        limit,
      );
    };
    const rows = (page('entry', 'record, copy_ino') as EntryRow[]).map(this.#row);
    for (const r of page('removed', 'path, seq') as { path: Blob; seq: number }[])
      rows.push({
        record: encodeRecord({ kind: Kind.absent, path: buffer(r.path), seq: r.seq }),
        copyIno: 0n,
      });
    return rows.sort((a, b) => pathOf(a.record).compare(pathOf(b.record))).slice(0, limit);
  }

  linkGroup(group: bigint): Row[] {
    if (group === 0n) return [];
    return (
      this.sql('SELECT record, copy_ino FROM entry WHERE link = ? ORDER BY path').all(
        ino(group),
      ) as unknown as EntryRow[]
    ).map(this.#row);
  }

  runsSince(path: Buffer, seq: number): Run[] | null {
    const row = this.get(path);
    if (!row || seq < (this.meta<number>('horizon') ?? 0)) return null;
    if (seqOf(row.record) <= seq) return [];
    const all = this.sql('SELECT seq, runs FROM run WHERE path = ? AND seq > ? ORDER BY seq').all(
      path,
      seq,
    ) as unknown as { seq: number; runs: Blob | null }[];
    // A content change that is not a patch (a new file, a whole copy) leaves a row without runs: not known then.
    if (all.length === 0 || all.some((r) => r.runs === null)) return null;
    return unionRuns(
      all.map((r) => decodeRuns(buffer(r.runs as Blob))),
      sizeOf(row.record),
    );
  }

  totals(): { entries: number; bytes: number } {
    return this.meta('totals') ?? { entries: 0, bytes: 0 };
  }

  meta<T>(key: string): T | undefined {
    const r = this.sql('SELECT value FROM meta WHERE key = ?').get(key) as { value: string } | undefined;
    return r && (JSON.parse(r.value) as T);
  }
}

class Snapshot extends Reader implements IndexSnapshot {
  close(): void {
    this.db.close();
  }
}

export interface StoreDeps {
  /** fdatasync of a file off the event loop (native.syncFile) */
  syncFile(path: Buffer): Promise<void>;
}

class SqliteVolumeStore extends Reader implements VolumeStore {
  readonly namespace: string;
  readonly volume: string;
  readonly #file: string;
  readonly #deps: StoreDeps;
  #tail: Promise<unknown> = Promise.resolve();
  #totals: { entries: number; bytes: number };
  #inTransaction = false;
  /** there may be rows below the horizon: always after a start */
  #unswept = true;
  #closed = false;

  constructor(db: DatabaseSync, file: string, namespace: string, volume: string, deps: StoreDeps) {
    super(db);
    this.#file = file;
    this.namespace = namespace;
    this.volume = volume;
    this.#deps = deps;
    this.#totals = super.totals();
  }

  override totals(): { entries: number; bytes: number } {
    return { ...this.#totals };
  }

  snapshot(): IndexSnapshot {
    const db = new DatabaseSync(this.#file, { readOnly: true });
    db.exec('PRAGMA cache_size=-256; PRAGMA mmap_size=0; BEGIN');
    db.prepare('SELECT count(*) FROM meta').get(); // the first read fixes the view
    return new Snapshot(db);
  }

  setMeta(key: string, value: unknown): void {
    this.sql(
      'INSERT INTO meta(key, value) VALUES(?, ?) ON CONFLICT(key) DO UPDATE SET value = excluded.value',
    ).run(key, JSON.stringify(value));
  }

  deleteMeta(key: string): void {
    this.sql('DELETE FROM meta WHERE key = ?').run(key);
  }

  #count(record: Buffer | undefined, sign: 1 | -1): void {
    if (!record) return;
    this.#totals.entries += sign;
    if (kindOf(record) === Kind.file) this.#totals.bytes += sign * sizeOf(record);
  }

  put(record: Buffer, copyIno: bigint, chunks: Buffer | null): void {
    const path = pathOf(record);
    const lean =
      record.readUInt32LE(108) === 0
        ? record
        : withFields(record, {
            chunks: Buffer.alloc(0),
            flags: (record[5] as number) & ~(Flag.chunksFull | Flag.chunksSparse),
          });
    this.#count(this.get(path)?.record, -1);
    this.#count(lean, 1);
    const group = linkGroupOf(lean);
    this.sql(
      `INSERT INTO entry(path, seq, link, copy_ino, record) VALUES(?, ?, ?, ?, ?)
       ON CONFLICT(path) DO UPDATE SET seq = excluded.seq, link = excluded.link, copy_ino = excluded.copy_ino, record = excluded.record`,
    ).run(path, seqOf(lean), group === 0n ? null : ino(group), ino(copyIno), lean);
    if (chunks)
      this.sql(
        'INSERT INTO chunk(path, data) VALUES(?, ?) ON CONFLICT(path) DO UPDATE SET data = excluded.data',
      ).run(path, chunks);
    else this.sql('DELETE FROM chunk WHERE path = ?').run(path);
    this.sql('DELETE FROM removed WHERE path = ?').run(path);
  }

  setCopy(path: Buffer, copyIno: bigint): void {
    this.sql('UPDATE entry SET copy_ino = ? WHERE path = ?').run(ino(copyIno), path);
  }

  remove(path: Buffer, seq: number): void {
    const row = this.get(path);
    if (row) this.#count(row.record, -1);
    this.sql('DELETE FROM entry WHERE path = ?').run(path);
    this.sql('DELETE FROM chunk WHERE path = ?').run(path);
    this.sql('DELETE FROM run WHERE path = ?').run(path);
    this.sql(
      'INSERT INTO removed(path, seq) VALUES(?, ?) ON CONFLICT(path) DO UPDATE SET seq = excluded.seq',
    ).run(path, seq);
  }

  putRuns(path: Buffer, seq: number, runs: Run[] | null): void {
    this.sql(
      'INSERT INTO run(path, seq, runs) VALUES(?, ?, ?) ON CONFLICT(path, seq) DO UPDATE SET runs = excluded.runs',
    ).run(path, seq, runs ? encodeRuns(runs) : null);
  }

  /** The horizon alone decides what can be told; the rows below it go bit by bit after the transaction. */
  prune(seq: number): void {
    if (seq <= this.horizon()) return;
    this.setMeta('horizon', seq);
    this.#unswept = true;
  }

  /** Removes what lies below the horizon, in pieces that are transactions of their own. */
  async #sweep(): Promise<void> {
    const removed = this.sql(
      'DELETE FROM removed WHERE path IN (SELECT path FROM removed WHERE seq <= ? LIMIT ?)',
    );
    const runs = this.sql(
      'DELETE FROM run WHERE seq <= ?1 AND path IN (SELECT DISTINCT path FROM run WHERE path > ?2 ORDER BY path LIMIT ?3)',
    );
    const nextRun = this.sql(
      'SELECT max(path) AS path FROM (SELECT DISTINCT path FROM run WHERE path > ? ORDER BY path LIMIT ?)',
    );
    const horizon = this.horizon();
    while (!this.#closed && Number(removed.run(horizon, SWEEP_ROWS).changes) > 0) await nextTurn();
    for (let after: Blob = Buffer.alloc(0); !this.#closed; await nextTurn()) {
      const { path } = nextRun.get(after, SWEEP_ROWS) as { path: Blob | null };
      if (path === null) {
        this.#unswept = false;
        return;
      }
      runs.run(horizon, after, SWEEP_ROWS);
      after = path;
    }
  }

  horizon(): number {
    return this.meta<number>('horizon') ?? 0;
  }

  /** Forgets the whole index (a tree that is replaced by another); generations and meta stay. */
  clearIndex(): void {
    this.db.exec('DELETE FROM entry; DELETE FROM chunk; DELETE FROM removed; DELETE FROM run;');
    this.#totals = { entries: 0, bytes: 0 };
    this.setMeta('totals', this.#totals);
  }

  addGeneration(row: GenerationRow): void {
    this.sql(
      `INSERT INTO generation(seq, epoch, sealed_at, quiescent, entries, bytes, changed) VALUES(?, ?, ?, ?, ?, ?, ?)
       ON CONFLICT(seq) DO UPDATE SET epoch = excluded.epoch, sealed_at = excluded.sealed_at, quiescent = excluded.quiescent,
         entries = excluded.entries, bytes = excluded.bytes, changed = excluded.changed`,
    ).run(row.seq, row.epoch, row.sealedAt, row.quiescent ? 1 : 0, row.entries, row.bytes, row.changed);
    // A row is small, but a busy volume seals a million a year.
    this.sql('DELETE FROM generation WHERE seq <= ? - 1000').run(row.seq);
  }

  dropGenerationsAfter(seq: number): void {
    this.sql('DELETE FROM generation WHERE seq > ?').run(seq);
  }

  generations(limit: number): GenerationRow[] {
    const rows = this.sql('SELECT * FROM generation ORDER BY seq DESC LIMIT ?').all(limit) as unknown as {
      seq: number;
      epoch: number;
      sealed_at: number;
      quiescent: number;
      entries: number;
      bytes: number;
      changed: number;
    }[];
    return rows.map((r) => ({
      seq: r.seq,
      epoch: r.epoch,
      sealedAt: r.sealed_at,
      quiescent: r.quiescent === 1,
      entries: r.entries,
      bytes: r.bytes,
      changed: r.changed,
    }));
  }

  transaction<T>(work: (breathe: () => Promise<void>) => Promise<T> | T): Promise<T> {
    const run = async (): Promise<T> => {
      const before = { ...this.#totals };
      const began = performance.now();
      let since = began;
      const breathe = async (): Promise<void> => {
        if (performance.now() - since < SLICE_MS) return;
        await nextTurn();
        since = performance.now();
      };
      this.db.exec('BEGIN IMMEDIATE');
      this.#inTransaction = true;
      try {
        const result = await work(breathe);
        // the commit of a long transaction is a slice of its own (20 ms for 100,000 rows)
        if (since !== began) await nextTurn();
        this.setMeta('totals', this.#totals);
        this.db.exec('COMMIT');
        return result;
      } catch (error) {
        this.#totals = before;
        if (this.db.isTransaction) this.db.exec('ROLLBACK');
        throw error;
      } finally {
        this.#inTransaction = false;
      }
    };
    const result = this.#tail.then(run, run);
    this.#tail = result.then(
      () => this.#tidy().catch(() => undefined),
      () => undefined,
    );
    return result;
  }

  async #tidy(): Promise<void> {
    if (this.#unswept) await this.#sweep();
    await this.#checkpoint();
  }

  /**
   * Moves a grown log into the database file without an fsync on this thread: the log is flushed by the addon
   * before, the file after. A reader that stands at the end of the log keeps it from being begun anew (and so from
   * being overwritten) before the file is on the disk (sqlite.org/wal.html, "Checkpointing").
   */
  async #checkpoint(): Promise<void> {
    const log = `${this.#file}-wal`;
    if (this.#closed) return;
    const { size } = statSync(log);
    if (size < LOG_BYTES) return;
    if (size >= LARGE_LOG_BYTES) return this.#checkpointInThread();
    await this.#deps.syncFile(Buffer.from(log));
    if (this.#closed) return;
    const guard = this.snapshot();
    try {
      this.db.exec('PRAGMA synchronous=OFF');
      try {
        this.db.exec('PRAGMA wal_checkpoint(PASSIVE)');
      } finally {
        this.db.exec('PRAGMA synchronous=NORMAL');
      }
      await this.#deps.syncFile(Buffer.from(this.#file));
    } finally {
      guard.close();
    }
  }

  #checkpointInThread(): Promise<void> {
    return new Promise<void>((resolve, reject) => {
      const thread = new Worker(CHECKPOINT, {
        eval: true,
        workerData: this.#file,
        env: {},
        execArgv: [],
        resourceLimits: { maxOldGenerationSizeMb: 16, maxYoungGenerationSizeMb: 2 },
      });
      thread.once('error', reject);
      thread.once('exit', () => resolve());
    });
  }

  async durable(): Promise<void> {
    await this.#deps.syncFile(Buffer.from(`${this.#file}-wal`));
  }

  /** Resolves when the work that follows a transaction is done too; a close after that leaves nobody at the file. */
  async settled(): Promise<void> {
    await this.#tail;
  }

  close(): void {
    if (this.#inTransaction) throw new Error('the store is closed in the middle of a transaction');
    this.#closed = true;
    this.db.close();
  }
}

export type OpenStore = SqliteVolumeStore;

/**
 * Opens (or makes) the store in `directory` (`<pool>/.simple-volume-state/volumes/<ns>/<vol>`).
 * @throws INTERNAL when the file is damaged or of a newer version; it says which file and what to do.
 */
export function openVolumeStore(
  directory: string,
  namespace: string,
  volume: string,
  deps: StoreDeps,
): OpenStore {
  mkdirSync(directory, { recursive: true, mode: 0o700 });
  const file = join(directory, 'state.db');
  let db: DatabaseSync | undefined;
  try {
    db = new DatabaseSync(file);
    db.exec(
      'PRAGMA busy_timeout=5000; PRAGMA journal_mode=WAL; PRAGMA synchronous=NORMAL; PRAGMA cache_size=-256; PRAGMA mmap_size=0; PRAGMA temp_store=MEMORY; PRAGMA wal_autocheckpoint=0; PRAGMA journal_size_limit=8388608;',
    );
    const { user_version: version } = db.prepare('PRAGMA user_version').get() as { user_version: number };
    if (version > SCHEMA_VERSION)
      throw new Error(
        `it has version ${version}, this agent knows up to ${SCHEMA_VERSION}; run a newer agent`,
      );
    if (version === 0) db.exec(`BEGIN IMMEDIATE; ${SCHEMA} PRAGMA user_version=${SCHEMA_VERSION}; COMMIT`);
    return new SqliteVolumeStore(db, file, namespace, volume, deps);
  } catch (error) {
    db?.close();
    throw new SimpleVolumeError(
      'INTERNAL',
      `the state of volume ${namespace}/${volume} in ${file} cannot be opened: ${(error as Error).message}`,
      { path: file, cause: error },
    );
  }
}
