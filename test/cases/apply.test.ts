/** The tree cases through the applier alone: plans that make one tree into another, also when they are repeated. */
import fs from 'node:fs';
import t from 'tap';
import { compareTrees, readTree } from '../../lib/local/tree.ts';
import { atRoot, CASES } from './cases.ts';
import { applyPlan, describe, planBetween, Scratch, stageAll, xattrReader } from './support.ts';

for (const c of CASES)
  t.test(c.name, async (t) => {
    const s = new Scratch();
    t.teardown(() => s.remove());
    const live = s.dir('live');
    const copy = s.dir('copy');
    const at = atRoot(live.toString());
    const compare = async (): Promise<string[]> =>
      compareTrees(
        await readTree(live.toString(), xattrReader(live)),
        await readTree(copy.toString(), xattrReader(copy)),
      );
    c.start(at);
    let records = await describe(live);
    let staged = await stageAll(s, live, records);
    const first = planBetween(await describe(copy), records, staged);
    await applyPlan(s, copy, 'slots', first);
    t.same(await compare(), [], 'the first tree');
    await applyPlan(s, copy, 'slots', first);
    t.same(await compare(), [], 'the same plan again changes nothing');
    if (!c.change) return;
    const index = new Map([...staged].map(([name, r]) => [name, r.record]));
    c.change(at);
    const before = await describe(copy);
    records = await describe(live);
    staged = await stageAll(s, live, records, { base: copy, index });
    const plan = planBetween(before, records, staged);
    await applyPlan(s, copy, 'slots', plan);
    t.same(await compare(), [], 'the changed tree');
    await applyPlan(s, copy, 'slots', plan);
    t.same(await compare(), [], 'the same plan again changes nothing');
    t.notOk(
      fs.readdirSync(s.dir('slots').toString()).some((name) => name.startsWith('tmp')),
      'no temporary names are left',
    );
  });
