import { rm } from 'node:fs/promises';
import { DatabaseSync, type StatementSync } from 'node:sqlite';

/** One member of a hard-link group as the manifest lists it. */
export interface Member {
  group: bigint;
  ordinal: number;
  /** with owner and modes as they shall be */
  record: Buffer;
  /** the wanted content stands at the path now */
  present: boolean;
  /** inode at the path now, 0n: no file there */
  ino: bigint;
  metaSame: boolean;
  /** flag of the manifest: the content was at this path in the base */
  movedFrom: Buffer | null;
}

/** A file whose unchanged content was somewhere else in the base. */
export interface Moved {
  ordinal: number;
  record: Buffer;
  from: Buffer;
}

/**
 * What a plan must look up out of path order: hard-link groups, moves, and which of the replica's own files a
 * difference concerns. A throw-away database beside the pulled files, made only when it is needed, so that a
 * rename of a folder with a million files does not sit in memory.
 */
export class Scratch {
  readonly #path: string;
  #db: DatabaseSync | null = null;
  #cache = new Map<string, StatementSync>();

  constructor(path: string) {
    this.#path = path;
  }

  #open(): DatabaseSync {
    if (this.#db) return this.#db;
    const db = new DatabaseSync(this.#path);
    db.exec(`PRAGMA journal_mode = OFF; PRAGMA synchronous = OFF; PRAGMA locking_mode = EXCLUSIVE; PRAGMA cache_size = -1024;
      CREATE TABLE member (grp INTEGER, hash BLOB, path BLOB, ordinal INTEGER, record BLOB, present INTEGER, ino INTEGER, same INTEGER, moved BLOB,
        PRIMARY KEY (grp, hash, path)) WITHOUT ROWID;
      CREATE TABLE moved (source BLOB, ordinal INTEGER, record BLOB, PRIMARY KEY (source, ordinal)) WITHOUT ROWID;
      CREATE TABLE touched (path BLOB PRIMARY KEY, hash BLOB, free INTEGER, linked INTEGER) WITHOUT ROWID;
      CREATE TABLE regroup (grp INTEGER PRIMARY KEY);
      CREATE TABLE leader (ino INTEGER PRIMARY KEY);
      BEGIN`);
    this.#db = db;
    return db;
  }

  #sql(text: string): StatementSync {
    let s = this.#cache.get(text);
    if (!s) {
      s = this.#open().prepare(text);
      s.setReadBigInts(true);
      this.#cache.set(text, s);
    }
    return s;
  }

  get empty(): boolean {
    return this.#db === null;
  }

  /** The replica's own file at `path` is removed or changed. free: its content is not needed there any more. */
  touch(path: Buffer, hash: Buffer, free: boolean, linked: boolean): void {
    this.#sql('INSERT OR REPLACE INTO touched VALUES (?, ?, ?, ?)').run(
      path,
      hash,
      free ? 1 : 0,
      linked ? 1 : 0,
    );
  }
  isTouched(path: Buffer): boolean {
    return this.#db !== null && this.#sql('SELECT 1 FROM touched WHERE path = ?').get(path) !== undefined;
  }
  /** Takes the content at `path` for a move, once: true when it was free and is the wanted one. */
  takeFree(path: Buffer, hash: Buffer, linked: boolean): boolean {
    if (!this.#db) return false;
    const { changes } = this.#sql(
      'UPDATE touched SET free = 0 WHERE path = ? AND hash = ? AND free = 1 AND (linked = 0 OR ?)',
    ).run(path, hash, linked ? 1 : 0);
    return Number(changes) === 1;
  }

  member(m: Member, hash: Buffer, path: Buffer): void {
    this.#sql('INSERT INTO member VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?)').run(
      BigInt.asIntN(64, m.group),
      hash,
      path,
      m.ordinal,
      m.record,
      m.present ? 1 : 0,
      BigInt.asIntN(64, m.ino),
      m.metaSame ? 1 : 0,
      m.movedFrom,
    );
  }
  /** The groups, each with all members of one content, in path order. */
  *groups(): Generator<Member[]> {
    if (!this.#db) return;
    let group: Member[] = [];
    let key: { grp: bigint; hash: Buffer } | null = null;
    for (const row of this.#sql('SELECT * FROM member ORDER BY grp, hash, path').iterate()) {
      const grp = row.grp as bigint;
      const hash = Buffer.from(row.hash as Uint8Array);
      if (key && (key.grp !== grp || !key.hash.equals(hash))) {
        yield group;
        group = [];
      }
      key = { grp, hash };
      group.push({
        group: BigInt.asUintN(64, grp),
        ordinal: Number(row.ordinal),
        record: Buffer.from(row.record as Uint8Array),
        present: row.present === 1n,
        ino: BigInt.asUintN(64, row.ino as bigint),
        metaSame: row.same === 1n,
        movedFrom: row.moved ? Buffer.from(row.moved as Uint8Array) : null,
      });
    }
    if (group.length > 0) yield group;
  }

  /** A member of this group goes away: the identity of the others changes. */
  regroup(group: bigint): void {
    this.#sql('INSERT OR IGNORE INTO regroup VALUES (?)').run(BigInt.asIntN(64, group));
  }
  regrouped(): bigint[] {
    if (!this.#db) return [];
    return this.#sql('SELECT grp FROM regroup')
      .all()
      .map((r) => BigInt.asUintN(64, r.grp as bigint));
  }
  /** Claims an inode for a group; false when another group has it. */
  claim(ino: bigint): boolean {
    return (
      Number(this.#sql('INSERT OR IGNORE INTO leader VALUES (?)').run(BigInt.asIntN(64, ino)).changes) === 1
    );
  }

  move(m: Moved): void {
    this.#sql('INSERT INTO moved VALUES (?, ?, ?)').run(m.from, m.ordinal, m.record);
  }
  *moves(): Generator<Moved> {
    if (!this.#db) return;
    for (const row of this.#sql('SELECT * FROM moved ORDER BY source, ordinal').iterate())
      yield {
        from: Buffer.from(row.source as Uint8Array),
        ordinal: Number(row.ordinal),
        record: Buffer.from(row.record as Uint8Array),
      };
  }

  async close(): Promise<void> {
    this.#cache.clear();
    this.#db?.close();
    this.#db = null;
    await rm(this.#path, { force: true });
  }
}
