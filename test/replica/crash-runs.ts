/** What crash.test.ts and crash-apply.test.ts share: a process that dies at a point, and what is found afterwards (A5, D35). */
import { spawnSync } from 'node:child_process';
import fs from 'node:fs';
import os from 'node:os';
import path from 'node:path';
import t from 'tap';
import { fill } from './crash-change.ts';
import { indexFaults, picture, world } from './support.ts';

t.setTimeout(300_000);

const child = path.join(import.meta.dirname, 'crash-child.ts');

export interface Point {
  at: string;
  /** which generation is held after recovery */
  held: '1-1' | '1-2';
  full?: boolean;
}

export function runPoints(points: Point[]): void {
  for (const { at, held, full } of points)
    t.test(`${at}${full ? ' in a full sync' : ''}: held afterwards ${held}`, async (t) => {
      const folder = fs.mkdtempSync(path.join(os.tmpdir(), 'sv-crash-'));
      const first = await world({ folder });
      fill(first.source.root);
      await first.source.seal();
      await first.sync();
      t.equal(first.replica.status().generation, '1-1');
      const old = picture(first.live);
      await first.replica.stop();
      first.store.close();

      const died = spawnSync(process.execPath, [child, folder, full ? 'full' : 'difference'], {
        env: { ...process.env, SIMPLE_VOLUME_CRASH_AT: at },
        encoding: 'utf8',
      });
      t.ok(died.signal === 'SIGKILL' || died.status === 137, `died there (${died.status} ${died.stderr})`);

      const w = await world({ folder });
      t.teardown(() => w.close());
      t.same(w.replica.status().conditions, []);
      t.equal(w.replica.status().generation, held);
      t.same(picture(w.live), held === '1-1' ? old : picture(w.source.root));
      t.same(await indexFaults(w), []);
      t.same(fs.readdirSync(w.incoming), []);
      // and it goes on from there
      await w.source.seal();
      await w.source.seal();
      fs.writeFileSync(path.join(w.source.root, 'after'), 'the crash');
      await w.source.seal();
      await w.sync({ full: true });
      t.same(w.replica.status().conditions, []);
      t.same(picture(w.live), picture(w.source.root));
      t.end();
    });
}
