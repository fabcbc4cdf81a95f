/**
 * The application of the demonstration: a process of its own that writes the four kinds of files that a small
 * server writes, each record with a number and the time, so that afterwards anybody can tell exactly which
 * writes a copy has. Whatever was written is reported on stdout, one JSON line each, after the write returned.
 *
 *   node writer.ts <folder> [records per second]
 */
import { createHash } from 'node:crypto';
import {
  closeSync,
  existsSync,
  ftruncateSync,
  mkdirSync,
  openSync,
  readFileSync,
  renameSync,
  writeFileSync,
  writeSync,
} from 'node:fs';
import { join } from 'node:path';
import { DatabaseSync } from 'node:sqlite';
import { pathToFileURL } from 'node:url';

export const KINDS = ['database', 'save', 'log', 'region'] as const;
export type Kind = (typeof KINDS)[number];

export interface Stamp {
  kind: Kind;
  /** Number of the record; grows by one with each, over all kinds. */
  n: number;
  /** Wall clock, milliseconds. */
  at: number;
}

export const SAVES = 40;
export const REGION_BYTES = 64 * 1024 * 1024;
export const REGION_SLOTS = 512;
export const BLOCK = 4096;
const REGION_EVERY_MS = 1000;
const REGION_BLOCKS = 16;

/** Where the block of record `n` lies: spread over the file, so that it stays mostly holes. */
export const regionOffset = (slot: number): number => slot * (REGION_BYTES / REGION_SLOTS);

/** A block that proves by itself that it is whole: a head and a body that follows from it. */
export function regionBlock(n: number, at: number): Buffer {
  const block = Buffer.alloc(BLOCK, (n % 251) + 1);
  block.writeBigUInt64LE(BigInt(n), 0);
  block.writeBigUInt64LE(BigInt(at), 8);
  return block;
}

export const saveSum = (n: number, at: number, body: string): string =>
  createHash('sha256').update(`${n} ${at} ${body}`).digest('hex');

export const logLine = (n: number, at: number): string =>
  `${n} ${at} ${createHash('sha256').update(`${n} ${at}`).digest('hex').slice(0, 16)}\n`;

function run(folder: string, perSecond: number): void {
  const report = (kind: Kind, n: number, at: number): void => {
    writeSync(1, `${JSON.stringify({ kind, n, at })}\n`);
  };
  mkdirSync(join(folder, 'saves'), { recursive: true });
  const database = new DatabaseSync(join(folder, 'ledger.db'));
  database.exec('PRAGMA journal_mode=WAL; PRAGMA synchronous=NORMAL;');
  database.exec(
    'CREATE TABLE IF NOT EXISTS records (n INTEGER PRIMARY KEY, at INTEGER, body TEXT, sum TEXT)',
  );
  const insert = database.prepare('INSERT INTO records VALUES (?, ?, ?, ?)');
  const log = openSync(join(folder, 'events.log'), 'a');
  const regionFile = join(folder, 'region.bin');
  const region = openSync(regionFile, existsSync(regionFile) ? 'r+' : 'w+');
  ftruncateSync(region, REGION_BYTES);
  // Goes on after what a predecessor wrote, on whichever node that was.
  const numberFile = join(folder, 'next');
  const max = database.prepare('SELECT max(n) AS n FROM records').get() as { n: number | null };
  let n = Math.max(max.n ?? 0, existsSync(numberFile) ? Number(readFileSync(numberFile, 'utf8')) : 0) + 1;

  let nextSave = 0;
  const tick = (): void => {
    let at = Date.now();
    const body = 'x'.repeat(50 + (n % 200));
    insert.run(n, at, body, saveSum(n, at, body));
    report('database', n, at);

    n += 1;
    at = Date.now();
    const target = join(folder, 'saves', `slot-${String(Math.floor(n / 3) % SAVES).padStart(2, '0')}.json`);
    const text = 'y'.repeat(500 + (n % 3000));
    writeFileSync(`${target}.tmp`, JSON.stringify({ n, at, body: text, sum: saveSum(n, at, text) }));
    renameSync(`${target}.tmp`, target);
    report('save', n, at);

    n += 1;
    at = Date.now();
    writeSync(log, logLine(n, at));
    report('log', n, at);

    // As a game server saves its world: some blocks in place, then a pause.
    if (at >= nextSave) {
      nextSave = at + REGION_EVERY_MS;
      for (let i = 0; i < REGION_BLOCKS; i++) {
        n += 1;
        at = Date.now();
        writeSync(region, regionBlock(n, at), 0, BLOCK, regionOffset((n * 7919) % REGION_SLOTS));
        report('region', n, at);
      }
    }

    writeFileSync(`${numberFile}.tmp`, String(n));
    renameSync(`${numberFile}.tmp`, numberFile);
    n += 1;
  };
  const timer = setInterval(tick, Math.max(1, Math.round(3000 / perSecond)));
  const stop = (): void => {
    clearInterval(timer);
    database.close();
    closeSync(log);
    closeSync(region);
    process.exit(0);
  };
  process.once('SIGTERM', stop);
  process.once('SIGINT', stop);
}

if (process.argv[1] !== undefined && import.meta.url === pathToFileURL(process.argv[1]).href) {
  const [folder, rate] = process.argv.slice(2);
  if (folder === undefined) throw new Error('usage: writer.ts <folder> [records per second]');
  run(folder, Number(rate ?? 150));
}
