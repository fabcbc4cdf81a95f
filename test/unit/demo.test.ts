import { execFileSync, spawn } from 'node:child_process';
import {
  appendFileSync,
  closeSync,
  mkdirSync,
  mkdtempSync,
  openSync,
  readdirSync,
  readFileSync,
  rmSync,
  truncateSync,
  writeFileSync,
  writeSync,
} from 'node:fs';
import { tmpdir } from 'node:os';
import { join } from 'node:path';
import { DatabaseSync } from 'node:sqlite';
import { fileURLToPath } from 'node:url';
import t from 'tap';
import { checkCopy, lostMs } from '../../lib/demo/check.ts';
import { rowsOf } from '../../lib/demo/view.ts';
import { type Kind, regionOffset, type Stamp } from '../../lib/demo/writer.ts';
import type { VolumeStatus } from '../../lib/local/cluster.ts';

const folder = mkdtempSync(join(tmpdir(), 'simple-volume-demo-test-'));
const whole = join(folder, 'whole');
t.teardown(() => rmSync(folder, { recursive: true, force: true }));
const written = new Map<Kind, Stamp>();

t.before(async () => {
  mkdirSync(whole);
  const script = fileURLToPath(new URL('../../lib/demo/writer.ts', import.meta.url));
  const child = spawn(process.execPath, [script, whole, '800'], { stdio: ['ignore', 'pipe', 'inherit'] });
  let text = '';
  child.stdout.on('data', (chunk: Buffer) => {
    text += chunk.toString();
    if (text.split('\n').length > 600) child.kill('SIGKILL');
  });
  await new Promise((resolve) => child.once('close', resolve));
  for (const line of text.split('\n').slice(0, -1)) {
    const stamp = JSON.parse(line) as Stamp;
    written.set(stamp.kind, stamp);
  }
});

/** A copy of the killed writer's folder with one thing done to it. */
function damaged(name: string, change: (copy: string) => void): string[] {
  const copy = join(folder, name);
  execFileSync('cp', ['-a', '--sparse=always', whole, copy]);
  change(copy);
  const { faults } = checkCopy(copy);
  rmSync(copy, { recursive: true });
  return faults;
}

t.test('what a killed writer leaves is whole, and nothing that it reported is missing', (t) => {
  const copy = join(folder, 'opened');
  execFileSync('cp', ['-a', '--sparse=always', whole, copy]);
  const report = checkCopy(copy);
  t.same(report.faults, []);
  t.equal(lostMs(written, report), 0);
  for (const kind of ['database', 'save', 'log', 'region'] as const) {
    t.ok(report.counts[kind] > 10, `${report.counts[kind]} of ${kind}`);
    t.ok((report.newest[kind] as Stamp).n >= (written.get(kind) as Stamp).n);
  }
  t.end();
});

t.test('an older copy tells how many milliseconds it lacks, by the worst kind', (t) => {
  const stamp = (kind: Kind, n: number, at: number): Stamp => ({ kind, n, at });
  const copy = {
    newest: { database: stamp('database', 5, 1000), save: null, log: stamp('log', 7, 1200), region: null },
    counts: { database: 1, save: 0, log: 1, region: 0 },
    faults: [],
  };
  t.equal(
    lostMs(
      new Map([
        ['database', stamp('database', 9, 1700)],
        ['log', stamp('log', 8, 1300)],
      ]),
      copy,
    ),
    700,
  );
  t.equal(lostMs(new Map([['database', stamp('database', 4, 900)]]), copy), 0);
  t.equal(lostMs(new Map([['save', stamp('save', 1, 1)]]), copy), Number.POSITIVE_INFINITY);
  t.end();
});

t.test('every kind of damage is seen', (t) => {
  const saves = readdirSync(join(whole, 'saves')).filter((name) => name.endsWith('.json'));
  const save = saves[0] as string;
  t.match(
    damaged('torn', (copy) => truncateSync(join(copy, 'saves', save), 40)),
    [/is torn/],
  );
  t.match(
    damaged('changed', (copy) => {
      const file = join(copy, 'saves', save);
      writeFileSync(file, readFileSync(file, 'utf8').replace('yyy', 'yzy'));
    }),
    [/not what was written/],
  );
  t.match(
    damaged('log', (copy) => {
      const file = join(copy, 'events.log');
      const lines = readFileSync(file, 'utf8').split('\n');
      writeFileSync(file, [lines[0], lines[2], lines[1], ...lines.slice(3)].join('\n'));
    }),
    [/comes after/],
  );
  t.match(
    damaged('log-byte', (copy) => appendFileSync(join(copy, 'events.log'), 'rubbish\n')),
    [/not what was written/],
  );
  t.match(
    damaged('block', (copy) => {
      const fd = openSync(join(copy, 'region.bin'), 'r+');
      // Half a block of zeros in each slot that holds one: the mix that a torn copy would show.
      for (let slot = 0; slot < 512; slot++)
        writeSync(fd, Buffer.alloc(2048, 0), 0, 2048, regionOffset(slot) + 2048);
      closeSync(fd);
    })[0] ?? '',
    /mix of two writes/,
  );
  t.ok(
    damaged('database', (copy) => {
      const file = join(copy, 'ledger.db');
      const db = new DatabaseSync(file);
      db.exec("UPDATE records SET body = 'other' WHERE n = (SELECT min(n) FROM records)");
      db.close();
    }).some((fault) => /record \d+ is not what was written/.test(fault)),
  );
  t.match(
    damaged('missing', (copy) => rmSync(join(copy, 'events.log'))),
    [/missing/],
  );
  t.match(
    damaged('no-region', (copy) => rmSync(join(copy, 'region.bin'))),
    [/missing/],
  );
  t.match(
    damaged('no-database', (copy) => rmSync(join(copy, 'ledger.db')))[0] ?? '',
    /ledger\.db is missing/,
  );
  t.end();
});

t.test('the table says who is active, how far the others are behind, and who does not answer', (t) => {
  const rows = rowsOf(
    new Map<string, VolumeStatus | null | 'away'>([
      ['a', { role: 'active', generation: '1-12', pending: 3, state: 'watching' } as VolumeStatus],
      ['b', { role: 'replica', generation: '1-10', freshAgeMs: 1500, state: 'pulling' } as VolumeStatus],
      ['c', 'away'],
      ['d', null],
    ]),
  );
  t.match(rows, [
    { node: 'a', role: 'active', generation: '1-12', lag: '3 changes wait' },
    { node: 'b', role: 'replica', lag: '2 behind', fresh: '1.5 s ago', state: 'pulling' },
    { node: 'c', state: 'does not answer' },
    { node: 'd', state: 'no volume yet' },
  ]);
  t.end();
});
