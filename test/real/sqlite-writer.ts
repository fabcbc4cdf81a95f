/**
 * A bank in SQLite (WAL): each transaction moves money between accounts, writes the move into a journal with a
 * checksum, and rewrites a blob. The sum of all accounts never changes; a copy in which it did is half of one.
 * Prints the number of each committed move.
 *
 *   node sqlite-writer.ts <file>
 */
import { createHash } from 'node:crypto';
import { writeSync } from 'node:fs';
import { DatabaseSync } from 'node:sqlite';

const [file] = process.argv.slice(2);
if (file === undefined) throw new Error('usage: sqlite-writer.ts <file>');
const database = new DatabaseSync(file);
database.exec(`
  PRAGMA journal_mode=WAL;
  PRAGMA synchronous=NORMAL;
  PRAGMA wal_autocheckpoint=100;
  CREATE TABLE IF NOT EXISTS accounts (id INTEGER PRIMARY KEY, money INTEGER NOT NULL);
  CREATE TABLE IF NOT EXISTS moves (n INTEGER PRIMARY KEY, a INTEGER, b INTEGER, amount INTEGER, sum TEXT);
  CREATE INDEX IF NOT EXISTS moves_by_sum ON moves (sum);
  CREATE TABLE IF NOT EXISTS blobs (id INTEGER PRIMARY KEY, n INTEGER, data BLOB, sum TEXT);
`);
if ((database.prepare('SELECT count(*) AS n FROM accounts').get() as { n: number }).n === 0) {
  database.exec('BEGIN');
  for (let i = 0; i < 100; i++) database.prepare('INSERT INTO accounts VALUES (?, 1000)').run(i);
  database.exec('COMMIT');
}
const take = database.prepare('UPDATE accounts SET money = money - ? WHERE id = ?');
const give = database.prepare('UPDATE accounts SET money = money + ? WHERE id = ?');
const journal = database.prepare('INSERT INTO moves VALUES (?, ?, ?, ?, ?)');
const blob = database.prepare('INSERT OR REPLACE INTO blobs VALUES (?, ?, ?, ?)');
let n = (database.prepare('SELECT coalesce(max(n), 0) AS n FROM moves').get() as { n: number }).n;

setInterval(() => {
  n += 1;
  const a = (n * 31) % 100;
  const b = (n * 57 + 13) % 100;
  const amount = n % 97;
  const data = Buffer.alloc(1000 + ((n * 37) % 9000), n % 256);
  database.exec('BEGIN IMMEDIATE');
  take.run(amount, a);
  give.run(amount, b);
  journal.run(n, a, b, amount, createHash('sha256').update(`${n} ${a} ${b} ${amount}`).digest('hex'));
  blob.run(n % 200, n, data, createHash('sha256').update(data).digest('hex'));
  database.exec('COMMIT');
  writeSync(1, `${n} ${Date.now()}\n`);
}, 5);
