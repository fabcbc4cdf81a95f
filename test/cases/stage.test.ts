/** The tree cases through the stager alone: every slot is the file, every record describes it. */
import fs from 'node:fs';
import t from 'tap';
import { SlotKind, StageStatus } from '../../lib/core/lists.ts';
import { hashOf, Kind, kindOf, mtimeNsOf, pathOf, sizeOf, targetOf } from '../../lib/core/record.ts';
import { addSpecials, atRoot, CASES } from './cases.ts';
import { describe, Scratch, slotFile, stageAll } from './support.ts';

const onDisk = (root: Buffer, path: Buffer): Buffer =>
  Buffer.concat([root, Buffer.from(path.length ? '/' : ''), path]);

for (const c of CASES)
  t.test(c.name, async (t) => {
    const s = new Scratch();
    t.teardown(() => s.remove());
    const live = s.dir('live');
    const at = atRoot(live.toString());
    for (const step of [c.start, c.change]) {
      if (!step) continue;
      step(at);
      const records = await describe(live);
      const staged = await stageAll(s, live, records);
      const wrong: string[] = [];
      for (const r of records) {
        const file = onDisk(live, pathOf(r));
        const stat = fs.lstatSync(file, { bigint: true });
        const name = pathOf(r).toString('latin1');
        if (mtimeNsOf(r) !== stat.mtimeNs) wrong.push(`${name}: mtime`);
        if (kindOf(r) === Kind.symlink && !fs.readlinkSync(file, { encoding: 'buffer' }).equals(targetOf(r)))
          wrong.push(`${name}: target`);
        if (kindOf(r) !== Kind.file) continue;
        const result = staged.get(name);
        if (result?.status !== StageStatus.ok || result.slotKind !== SlotKind.whole) {
          wrong.push(`${name}: status ${result?.status}, slot ${result?.slotKind}`);
          continue;
        }
        const slot = slotFile(s, 'slots', result.slot);
        if (!fs.readFileSync(slot).equals(fs.readFileSync(file))) wrong.push(`${name}: bytes`);
        const copy = fs.statSync(slot, { bigint: true });
        if (copy.blocks > stat.blocks * 2n + 16n)
          wrong.push(`${name}: holes were filled (${copy.blocks} of ${stat.blocks} blocks)`);
        if (copy.mode & 0o77n) wrong.push(`${name}: the slot can be read by others`);
        if (BigInt(sizeOf(result.record)) !== stat.size) wrong.push(`${name}: size`);
      }
      t.same(wrong, []);
      t.ok(records.length > 1);
      // The hash is of the content alone: a second reading without copying finds the same.
      const again = await stageAll(s, live, records, { hashOnly: true });
      for (const [name, r] of staged)
        t.ok(hashOf(r.record).equals(hashOf((again.get(name) as typeof r).record)), name);
    }
  });

t.test('D15, C2: FIFOs and sockets are told, never opened', async (t) => {
  const s = new Scratch();
  t.teardown(() => s.remove());
  const live = s.dir('live');
  const names = addSpecials(atRoot(live.toString()));
  const records = await describe(live);
  for (const name of names)
    t.equal(kindOf(records.find((r) => pathOf(r).toString() === name) as Buffer), Kind.special, name);
});
