/** Opens a copy of the demonstration's data the way an application would, and says what is in it. */
import { closeSync, existsSync, openSync, readdirSync, readFileSync, readSync } from 'node:fs';
import { join } from 'node:path';
import { DatabaseSync } from 'node:sqlite';
import {
  BLOCK,
  KINDS,
  type Kind,
  logLine,
  REGION_SLOTS,
  regionBlock,
  regionOffset,
  type Stamp,
  saveSum,
} from './writer.ts';

export interface CopyReport {
  /** Newest record of each kind in the copy, null: none. */
  newest: Record<Kind, Stamp | null>;
  counts: Record<Kind, number>;
  /** What is wrong, one line each; empty: everything is whole. */
  faults: string[];
}

const later = (a: Stamp | null, b: Stamp): Stamp => (a === null || b.n > a.n ? b : a);

/** Reads all that the writer left in `folder`. Opening the database recovers it, exactly as its owner would. */
export function checkCopy(folder: string): CopyReport {
  const faults: string[] = [];
  const newest: CopyReport['newest'] = { database: null, save: null, log: null, region: null };
  const counts: CopyReport['counts'] = { database: 0, save: 0, log: 0, region: 0 };
  const note = (stamp: Stamp): void => {
    newest[stamp.kind] = later(newest[stamp.kind], stamp);
    counts[stamp.kind] += 1;
  };

  const file = join(folder, 'ledger.db');
  if (!existsSync(file)) faults.push('ledger.db is missing');
  else {
    const database = new DatabaseSync(file);
    try {
      const verdict = database.prepare('PRAGMA integrity_check').all() as { integrity_check: string }[];
      if (verdict.length !== 1 || verdict[0]?.integrity_check !== 'ok') {
        faults.push(
          `ledger.db: integrity_check says ${verdict.map((row) => row.integrity_check).join('; ')}`,
        );
      }
      const rows = database.prepare('SELECT n, at, body, sum FROM records ORDER BY n').all() as {
        n: number;
        at: number;
        body: string;
        sum: string;
      }[];
      for (const row of rows) {
        if (row.sum !== saveSum(row.n, row.at, row.body))
          faults.push(`ledger.db: record ${row.n} is not what was written`);
        note({ kind: 'database', n: row.n, at: row.at });
      }
    } catch (error) {
      faults.push(`ledger.db: ${error instanceof Error ? error.message : error}`);
    } finally {
      database.close();
    }
  }

  for (const name of existsSync(join(folder, 'saves')) ? readdirSync(join(folder, 'saves')) : []) {
    // A temporary file of the moment of the cut is no save yet.
    if (name.endsWith('.tmp')) continue;
    try {
      const save = JSON.parse(readFileSync(join(folder, 'saves', name), 'utf8')) as {
        n: number;
        at: number;
        body: string;
        sum: string;
      };
      if (save.sum !== saveSum(save.n, save.at, save.body))
        faults.push(`saves/${name} is not what was written`);
      note({ kind: 'save', n: save.n, at: save.at });
    } catch (error) {
      faults.push(`saves/${name} is torn: ${error instanceof Error ? error.message : error}`);
    }
  }

  if (existsSync(join(folder, 'events.log'))) {
    const lines = readFileSync(join(folder, 'events.log'), 'utf8').split('\n');
    // The last line may have been under way when the writer died; every other one must be right.
    const rest = lines.pop() as string;
    let before = 0;
    for (const line of lines) {
      const [n, at] = line.split(' ').map(Number) as [number, number];
      if (`${line}\n` !== logLine(n, at))
        faults.push(`events.log: a line is not what was written: ${JSON.stringify(line.slice(0, 60))}`);
      else if (n <= before) faults.push(`events.log: ${n} comes after ${before}`);
      else note({ kind: 'log', n, at });
      before = n;
    }
    if (rest !== '' && !/^\d+( \d*( [0-9a-f]{0,16})?)?$/.test(rest))
      faults.push('events.log: its end is no part of a line');
  } else faults.push('events.log is missing');

  if (existsSync(join(folder, 'region.bin'))) {
    const fd = openSync(join(folder, 'region.bin'), 'r');
    const block = Buffer.alloc(BLOCK);
    for (let slot = 0; slot < REGION_SLOTS; slot++) {
      readSync(fd, block, 0, BLOCK, regionOffset(slot));
      if (block.every((byte) => byte === 0)) continue;
      const n = Number(block.readBigUInt64LE(0));
      const at = Number(block.readBigUInt64LE(8));
      if (!block.equals(regionBlock(n, at)))
        faults.push(`region.bin: the block of slot ${slot} is a mix of two writes`);
      else note({ kind: 'region', n, at });
    }
    closeSync(fd);
  } else faults.push('region.bin is missing');
  return { newest, counts, faults };
}

/** Milliseconds between the newest write that the application made and the newest one in the copy, by kind. */
export function lostByKind(written: ReadonlyMap<Kind, Stamp>, copy: CopyReport): Map<Kind, number> {
  const lost = new Map<Kind, number>();
  for (const kind of KINDS) {
    const last = written.get(kind);
    const kept = copy.newest[kind];
    if (last === undefined) continue;
    if (kept === null) lost.set(kind, Number.POSITIVE_INFINITY);
    else lost.set(kind, kept.n >= last.n ? 0 : last.at - kept.at);
  }
  return lost;
}

/** The worst of all kinds, milliseconds. */
export const lostMs = (written: ReadonlyMap<Kind, Stamp>, copy: CopyReport): number =>
  Math.max(0, ...lostByKind(written, copy).values());
