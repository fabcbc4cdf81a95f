/** Writes transactions into a WAL database as fast as told until it is ended. Arguments: file, ms between two. */
import { DatabaseSync } from 'node:sqlite';

const [, , file, pause, mode] = process.argv as string[];
const db = new DatabaseSync(file as string);
db.exec(`PRAGMA journal_mode=${mode ?? 'WAL'}; PRAGMA synchronous=OFF; PRAGMA wal_autocheckpoint=50; PRAGMA busy_timeout=5000;
  CREATE TABLE IF NOT EXISTS a(id INTEGER PRIMARY KEY, v TEXT); CREATE TABLE IF NOT EXISTS b(id INTEGER PRIMARY KEY, v TEXT);`);
let n = 0;
const step = (): void => {
  const text = `${n} `.repeat(20 + (n % 300));
  db.exec('BEGIN');
  db.prepare('INSERT OR REPLACE INTO a VALUES(?, ?)').run(n % 500, text);
  db.prepare('INSERT OR REPLACE INTO b VALUES(?, ?)').run(n % 500, text);
  db.exec('COMMIT');
  n++;
};
process.on('SIGTERM', () => {
  db.close();
  process.exit(0);
});
setInterval(step, Number(pause));
console.log('ready');
