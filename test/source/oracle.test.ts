/** At rest the shadow is the source: kinds, bytes, modes, owners, ns times, links, hard links, whatever happened. */
import { rmSync } from 'node:fs';
import t from 'tap';
import { encodePaths } from '../../lib/core/lists.ts';
import { Kind, kindOf, pathOf, recordsIn } from '../../lib/core/record.ts';
import { native } from '../../lib/native/load.ts';
import { compare } from '../../lib/source/collect.ts';
import { RandomWriter } from './random-writer.ts';
import { makeRig, QUICK, type Rig, treeDifferences } from './support.ts';

t.setTimeout(0); // the runner limits the file as a whole

const SEEDS = (process.env.ORACLE_SEEDS ?? '1,2,3,4,5,6').split(',').map(Number);
const BATCHES = Number(process.env.ORACLE_BATCHES ?? 12);

/** Index, shadow and totals agree with each other. */
function indexFaults(rig: Rig): string[] {
  const faults: string[] = [];
  const entries = { n: 0 };
  let bytes = 0;
  for (let after: Buffer | null = null; ; ) {
    const rows = rig.store.page(after, 100);
    for (const row of rows) {
      entries.n++;
      if (kindOf(row.record) === Kind.file) bytes += Number(row.record.readBigUInt64LE(16));
      if (row.copyIno === 0n) faults.push(`no copy: ${pathOf(row.record).toString('latin1')}`);
    }
    if (rows.length < 100) break;
    after = pathOf((rows.at(-1) as { record: Buffer }).record);
  }
  const totals = rig.store.totals();
  if (totals.entries !== entries.n || totals.bytes !== bytes)
    faults.push(`totals ${JSON.stringify(totals)} but ${entries.n}, ${bytes}`);
  return faults;
}

async function whatAnAuditFinds(rig: Rig): Promise<string[]> {
  const out: string[] = [];
  const filter = native.compileFilter([], []);
  for await (const d of compare({
    native,
    index: rig.store,
    filter,
    root: Buffer.from(rig.live),
    directory: Buffer.alloc(0),
    deep: true,
    copies: true,
  })) {
    if (d.what === 'special') continue;
    const row = rig.store.get(d.path)?.record;
    const [now] = [...recordsIn(await native.stat(Buffer.from(rig.live), encodePaths([d.path])))];
    // A further name that came and went leaves nothing but another ctime, and no event under this name.
    if (
      row &&
      now &&
      kindOf(row) === kindOf(now) &&
      row.compare(now, 16, 40, 16, 40) === 0 &&
      row.compare(now, 48, 56, 48, 56) === 0
    )
      continue;
    const text = (r: Buffer | undefined): string =>
      r ? `${kindOf(r)} ${r.subarray(16, 56).toString('hex')}` : '-';
    out.push(`${d.path.toString('latin1')} ${d.what}: ${text(row)} | ${text(now)}`);
  }
  return out;
}

for (const seed of SEEDS)
  t.test(`random operations, seed ${seed}`, async (t) => {
    let rig = makeRig({ deps: seed % 3 === 0 ? { batchLimit: 7 } : {} });
    t.teardown(() => rig.close());
    const writer = new RandomWriter(rig.live, seed);
    for (let i = 0; i < 20; i++) writer.step();
    await rig.source.start(QUICK, 1);
    for (let batch = 0; batch < BATCHES; batch++) {
      const quiet = batch % 2 === 0;
      const pinned = batch % 3 === 1 && rig.source.generation() ? await rig.source.open() : null;
      for (let i = 0; i < 25; i++) {
        writer.step();
        // the batches run in between, so moves and deletions fall into different ones
        if (!quiet) await new Promise((r) => setTimeout(r, writer.int(12)));
      }
      if (batch === 5) {
        rig = await rig.restart();
        for (let i = 0; i < 10; i++) writer.step();
        await rig.source.start(QUICK, 1);
      }
      try {
        await rig.source.flush();
      } catch (error) {
        t.fail(`batch ${batch}: ${(error as Error).stack}`);
        console.error(rig.source.status(), rig.log.slice(-5));
        return;
      }
      const held = rig.source.status().conditions.find((c) => c.type === 'MassDelete');
      if (held) await rig.source.force('MassDelete');
      pinned?.release();
      const differences = treeDifferences(rig.live, rig.data);
      const faults = indexFaults(rig);
      if (differences.length + faults.length > 0) {
        t.fail(`batch ${batch} after ${writer.done} operations`, {
          differences,
          faults,
          status: rig.source.status(),
          log: rig.log.slice(-5),
        });
        if (process.env.ORACLE_KEEP) rig.close = async () => {};
        return;
      }
      const untold = await whatAnAuditFinds(rig);
      if (untold.length > 0) {
        t.fail(`batch ${batch} after ${writer.done} operations: an audit finds what no event told`, {
          untold,
          log: rig.log.slice(-5),
        });
        return;
      }
      t.pass(`batch ${batch}: shadow and index are the source`);
    }
    rmSync(rig.base, { recursive: true, force: true });
  });
