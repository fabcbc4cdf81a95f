/** Databases of applications: never a log of one moment beside a database of another. */
import { type ChildProcess, spawn } from 'node:child_process';
import { once } from 'node:events';
import { cpSync, existsSync, mkdirSync, mkdtempSync, readdirSync, rmSync } from 'node:fs';
import { tmpdir } from 'node:os';
import { join } from 'node:path';
import { DatabaseSync } from 'node:sqlite';
import { setTimeout as sleep } from 'node:timers/promises';
import t from 'tap';
import { makeRig, QUICK, type Rig, treeDifferences } from './support.ts';

t.setTimeout(0); // the runner limits the file as a whole

async function writer(
  t: { teardown(fn: () => unknown): unknown },
  file: string,
  pause: number,
  mode: string,
): Promise<ChildProcess> {
  const child = spawn(
    process.execPath,
    [join(import.meta.dirname, 'sqlite-writer.ts'), file, String(pause), mode],
    { stdio: ['ignore', 'pipe', 'inherit'] },
  );
  t.teardown(() => child.kill('SIGKILL'));
  await once(child.stdout as NodeJS.ReadableStream, 'data');
  return child;
}

/** Opens the sealed copy as an application would after a failover; null when the generation has no database yet. */
function check(rig: Rig): { rows: number } | null {
  if (!existsSync(join(rig.data, 'db/app.db'))) return null;
  const copy = mkdtempSync(join(tmpdir(), 'sv-db-'));
  try {
    for (const name of readdirSync(join(rig.data, 'db')))
      cpSync(join(rig.data, 'db', name), join(copy, name));
    const db = new DatabaseSync(join(copy, 'app.db'));
    try {
      const { integrity_check: verdict } = db.prepare('PRAGMA integrity_check').get() as {
        integrity_check: string;
      };
      if (verdict !== 'ok') throw new Error(verdict);
      const tables = db.prepare("SELECT count(*) AS n FROM sqlite_schema WHERE name IN ('a', 'b')").get() as {
        n: number;
      };
      if (tables.n < 2) return { rows: 0 };
      const { n } = db.prepare('SELECT count(*) AS n FROM a JOIN b USING(id) WHERE a.v IS NOT b.v').get() as {
        n: number;
      };
      if (n !== 0) throw new Error(`${n} rows of the two tables differ: half a transaction`);
      return db.prepare('SELECT count(*) AS rows FROM a').get() as { rows: number };
    } finally {
      db.close();
    }
  } finally {
    rmSync(copy, { recursive: true, force: true });
  }
}

for (const [mode, pause] of [
  ['WAL', 5],
  ['WAL', 50],
  ['DELETE', 60],
  ['TRUNCATE', 60],
] as const)
  t.test(
    `a ${mode} database with a transaction every ${pause} ms is whole in every generation (D45)`,
    async (t) => {
      const rig = makeRig();
      t.teardown(() => rig.close());
      mkdirSync(join(rig.live, 'db'));
      await rig.source.start(QUICK, 1);
      const child = await writer(t, join(rig.live, 'db/app.db'), pause, mode);
      let seen = 0;
      let rows = 0;
      for (let i = 0; i < 12; i++) {
        await rig.source.flush();
        const served = await rig.source.open();
        const result = check(rig);
        served.release();
        if (result) {
          seen++;
          rows = Math.max(rows, result.rows);
        }
        await sleep(60);
      }
      t.ok(seen > 0, `${seen} generations with a database, all of them whole; ${rows} rows`);
      child.kill('SIGTERM');
      await once(child, 'exit');
      await rig.source.flush();
      await rig.source.flush();
      t.ok((check(rig) as { rows: number }).rows > 0);
      t.strictSame(
        treeDifferences(rig.live, rig.data),
        [],
        'and when the writer has gone, nothing of it is left out',
      );
      t.strictSame(rig.source.status().conditions, []);
    },
  );
