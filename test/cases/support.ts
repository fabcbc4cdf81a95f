/** What the three runners of single parts share: a scan of a tree, its contents as slots, and a plan between two trees. */
import fs from 'node:fs';
import os from 'node:os';
import path from 'node:path';
import {
  decodeStageResults,
  encodeOp,
  encodePaths,
  encodeStageItems,
  Op,
  type StageResult,
  slotName,
} from '../../lib/core/lists.ts';
import { flagsOf, Kind, kindOf, linkGroupOf, pathOf, recordsIn } from '../../lib/core/record.ts';
import { native } from '../../lib/native/load.ts';

export const everything = native.compileFilter([], []);

export class Scratch {
  readonly folder: string;
  #slots = 1;
  constructor() {
    this.folder = fs.mkdtempSync(path.join(os.tmpdir(), 'sv-case-'));
  }
  dir(name: string): Buffer {
    const dir = path.join(this.folder, name);
    fs.mkdirSync(dir, { recursive: true, mode: 0o700 });
    return Buffer.from(dir);
  }
  slot(): number {
    return this.#slots++;
  }
  remove(): void {
    fs.rmSync(this.folder, { recursive: true, force: true });
  }
}

/** All records below a root with attributes and link texts, in path order. */
export async function describe(root: Buffer): Promise<Buffer[]> {
  const scanner = native.scan(root, Buffer.alloc(0), everything, true);
  const paths: Buffer[] = [];
  for (;;) {
    const piece = await scanner.next(64 * 1024);
    if (!piece) break;
    for (const r of recordsIn(piece)) paths.push(Buffer.from(pathOf(r)));
  }
  scanner.close();
  return [...recordsIn(await native.stat(root, encodePaths(paths)))];
}

/** Stages the files among the records; by path (latin1). */
export async function stageAll(
  s: Scratch,
  root: Buffer,
  records: Buffer[],
  options: { hashOnly?: boolean; base?: Buffer | null; index?: Map<string, Buffer> } = {},
): Promise<Map<string, StageResult & { slot: number }>> {
  const files = records.filter((r) => kindOf(r) === Kind.file);
  const items = files.map((r, id) => {
    const base = options.index?.get(pathOf(r).toString('latin1'));
    return { id, slot: s.slot(), patch: base !== undefined, path: pathOf(r), ...(base ? { base } : {}) };
  });
  const results = decodeStageResults(
    await native.stage(
      { root, slots: s.dir('slots'), base: options.base ?? null, hashOnly: options.hashOnly ?? false },
      encodeStageItems(items),
    ),
  );
  return new Map(
    results.map((r) => {
      const item = items[r.id] as (typeof items)[number];
      return [item.path.toString('latin1'), { ...r, slot: item.slot }];
    }),
  );
}

export const slotFile = (s: Scratch, folder: string, slot: number): string =>
  path.join(s.folder, folder, slotName(slot));

/** A plain plan from the old records to the new ones; contents come from `slots` (slotKind 1 or 2). */
export function planBetween(
  before: Buffer[],
  after: Buffer[],
  staged: Map<string, StageResult & { slot: number }>,
): Buffer[] {
  const key = (r: Buffer): string => pathOf(r).toString('latin1');
  const old = new Map(before.map((r) => [key(r), r]));
  const now = new Map(after.map((r) => [key(r), r]));
  const removes: Buffer[] = [];
  for (const r of [...before].reverse()) {
    const next = now.get(key(r));
    const wasDir = kindOf(r) === Kind.directory;
    if (next && (kindOf(next) === Kind.directory) === wasDir) continue;
    removes.push(encodeOp(wasDir ? Op.rmdir : Op.remove, r));
  }
  const mkdirs: Buffer[] = [];
  const puts: Buffer[] = [];
  const links: Buffer[] = [];
  const patches: Buffer[] = [];
  const metas: Buffer[] = [];
  const dirs: Buffer[] = [];
  const groups = new Map<bigint, Buffer>();
  for (const r of after) {
    const was = old.get(key(r));
    if (kindOf(r) === Kind.directory) {
      if (pathOf(r).length > 0 && (!was || kindOf(was) !== Kind.directory))
        mkdirs.push(encodeOp(Op.mkdir, r));
      dirs.unshift(encodeOp(Op.meta, r));
    } else if (kindOf(r) === Kind.symlink) puts.push(encodeOp(Op.symlink, r));
    else if (kindOf(r) === Kind.file) {
      const s = staged.get(key(r)) as StageResult & { slot: number };
      const record = s.record;
      const group = linkGroupOf(record);
      const first = group ? groups.get(group) : undefined;
      if (first) {
        links.push(encodeOp(Op.link, record, 0, first));
        continue;
      }
      if (group) groups.set(group, pathOf(record));
      if (s.slotKind === 1) puts.push(encodeOp(Op.put, record, s.slot));
      else if (s.slotKind === 2) patches.push(encodeOp(Op.patch, record, s.slot));
      else metas.push(encodeOp(Op.meta, record));
    }
  }
  return [...removes, ...mkdirs, ...puts, ...links, ...patches, ...metas, ...dirs];
}

export async function applyPlan(s: Scratch, root: Buffer, slots: string, ops: Buffer[]): Promise<void> {
  const file = path.join(s.folder, 'ops');
  fs.writeFileSync(file, Buffer.concat(ops));
  for (const phase of [1, 2] as const)
    await native.apply({
      root,
      slots: s.dir(slots),
      retired: null,
      ops: Buffer.from(file),
      out: null,
      phase,
    });
}

/** Extended attributes as readTree wants them. */
export const xattrReader =
  (root: Buffer) =>
  async (paths: readonly string[]): Promise<string[]> => {
    const list = encodePaths(paths.map((p) => Buffer.from(p, 'latin1')));
    const { xattrsOf } = await import('../../lib/core/record.ts');
    return [...recordsIn(await native.stat(root, list))].map((r) => xattrsOf(r).toString('hex'));
  };

export const isHashed = (r: Buffer): boolean => (flagsOf(r) & 1) !== 0;
