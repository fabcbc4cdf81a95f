/** The tree cases through the transfer alone: packs made from one tree become slots with the same bytes elsewhere. */
import { execFileSync } from 'node:child_process';
import fs from 'node:fs';
import t from 'tap';
import {
  decodeUnpackResults,
  encodePackItems,
  encodeUnpackItems,
  type PackItem,
  type UnpackItem,
  UnpackStatus,
} from '../../lib/core/lists.ts';
import { inoOf, pathOf } from '../../lib/core/record.ts';
import { native } from '../../lib/native/load.ts';
import { atRoot, CASES } from './cases.ts';
import { describe, Scratch, slotFile, stageAll } from './support.ts';

/** Serves the items and receives them in pieces of changing sizes. */
async function transfer(
  s: Scratch,
  root: Buffer,
  send: PackItem[],
  take: UnpackItem[],
  base: Buffer | null,
): Promise<{ status: number[]; bytes: number }> {
  const reader = native.createPackReader({ root, retired: null, seq: 1, items: encodePackItems(send) });
  const unpacker = native.createUnpacker({ slots: s.dir('received'), base, items: encodeUnpackItems(take) });
  const total = await reader.plan();
  let at = 0;
  for (let step = 1; ; step = (step * 7 + 13) % 100_003) {
    const piece = await reader.read(at, step);
    if (!piece) break;
    await unpacker.write(piece);
    at += piece.length;
  }
  if (at !== total) throw new Error(`the pack has ${at} bytes, planned were ${total}`);
  reader.close();
  return { status: decodeUnpackResults(await unpacker.end()).map((r) => r.status), bytes: at };
}

for (const c of CASES)
  t.test(c.name, async (t) => {
    const s = new Scratch();
    t.teardown(() => s.remove());
    const live = s.dir('live');
    const at = atRoot(live.toString());
    c.start(at);
    const first = await describe(live);
    const before = await stageAll(s, live, first, { hashOnly: true });
    for (const changed of [false, true]) {
      if (changed && !c.change) continue;
      if (changed) {
        // What was there before is the replica's tree, so that large files can travel as patches.
        execFileSync('cp', [
          '-a',
          '--sparse=always',
          '--no-target-directory',
          live.toString(),
          s.dir('replica').toString(),
        ]);
        c.change?.(at);
      }
      const records = changed ? await describe(live) : first;
      const index = new Map([...before].map(([name, r]) => [name, r.record]));
      const staged = await stageAll(
        s,
        live,
        records,
        changed ? { hashOnly: true, index } : { hashOnly: true },
      );
      const send: PackItem[] = [];
      const take: (UnpackItem & { name: string })[] = [];
      [...staged].forEach(([name, r], ordinal) => {
        const base = index.get(name);
        const patch =
          changed &&
          r.runs.length > 0 &&
          base !== undefined &&
          fs.existsSync(Buffer.concat([s.dir('replica'), Buffer.from('/'), pathOf(base)]));
        send.push({ ordinal, runs: patch ? r.runs : null, ino: inoOf(r.record), record: r.record });
        take.push({ ordinal, patch, slot: s.slot(), record: r.record, name, ...(patch ? { base } : {}) });
      });
      const { status } = await transfer(s, live, send, take, changed ? s.dir('replica') : null);
      t.ok(
        status.every((v) => v === UnpackStatus.ok),
        `all verified: ${status}`,
      );
      for (const item of take) {
        if (item.patch) continue;
        const source = Buffer.concat([live, Buffer.from('/'), pathOf(item.record)]);
        const slot = slotFile(s, 'received', item.slot);
        t.ok(fs.readFileSync(slot).equals(fs.readFileSync(source)), item.name);
        const [a, b] = [fs.statSync(source), fs.statSync(slot)];
        t.ok(b.blocks <= a.blocks * 2 + 16, `${item.name} keeps its holes`);
      }
    }
  });

t.test('a flipped byte anywhere is found, and nothing is left behind', async (t) => {
  const s = new Scratch();
  t.teardown(() => s.remove());
  const live = s.dir('live');
  for (const [name, size] of [
    ['a', 10],
    ['b', 70_000],
    ['c', 1_200_000],
  ] as const)
    fs.writeFileSync(`${live}/${name}`, Buffer.alloc(size, name));
  const staged = [...(await stageAll(s, live, await describe(live), { hashOnly: true })).values()];
  const reader = native.createPackReader({
    root: live,
    retired: null,
    seq: 1,
    items: encodePackItems(staged.map((r, ordinal) => ({ ordinal, runs: null, ino: 0n, record: r.record }))),
  });
  const pack = (await reader.read(0, 10 << 20)) as Buffer;
  for (let i = 0; i < 120; i++) {
    const bad = Buffer.from(pack);
    const at = i < 60 ? i : Math.floor((i * pack.length) / 120);
    bad[at] = (bad[at] as number) ^ (1 << (i % 8));
    const unpacker = native.createUnpacker({
      slots: s.dir('received'),
      base: null,
      items: encodeUnpackItems(
        staged.map((r, ordinal) => ({ ordinal, patch: false, slot: s.slot(), record: r.record })),
      ),
    });
    let found = false;
    let cutOff = false;
    try {
      await unpacker.write(bad);
      found = decodeUnpackResults(await unpacker.end()).some((r) => r.status !== UnpackStatus.ok);
    } catch (error) {
      found = (error as { code?: string }).code === 'FORMAT_INVALID';
      cutOff = true;
    }
    t.ok(found, `byte ${at}`);
    // Cut off, nothing stays; at its end, the slots are the caller's.
    if (cutOff) await unpacker.abort();
    else
      for (const name of fs.readdirSync(s.dir('received').toString()))
        fs.rmSync(`${s.dir('received')}/${name}`);
    t.same(fs.readdirSync(s.dir('received').toString()), []);
  }
});
