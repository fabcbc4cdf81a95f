/**
 * From verified slots to the next generation: plan file, durable journal, the moves, and the index in one
 * transaction. From the journal on it only goes forward; before it nothing of the volume was touched.
 */
import { mkdir, open, readdir, stat } from 'node:fs/promises';
import { join } from 'node:path';
import { SimpleVolumeError } from '../core/errors.ts';
import { type Lineage, parseGeneration } from '../core/generation.ts';
import { decodeApplied, Op, type Run } from '../core/lists.ts';
import type { Clock } from '../core/parts.ts';
import {
  CHUNK,
  chunksOf,
  Flag,
  flagsOf,
  Kind,
  kindOf,
  LARGE,
  pathOf,
  printablePath,
  seqOf,
  sizeOf,
} from '../core/record.ts';
import type { VolumeStore } from '../core/store.ts';
import type { Native } from '../native/types.ts';
import { asRow, fullChunks, isFile, sameContent } from './content.ts';
import { crashPoint } from './crash.ts';
import { entriesOfFile, type Spool, writeAll } from './spool.ts';

export const JOURNAL = 'replicaJournal';
export const HELD = 'held';
/** This node was the active one until a newer epoch began, and its tree is not dealt with yet. */
export const DEMOTED = 'demoted';

export interface Demoted {
  /** the epoch in which it was the active node */
  epoch: number;
  /** all that was ever written, when the lease was given back and nothing was left to seal; null: not handed over */
  generation?: string | null;
}

/** What this replica holds, as kept in the volume's state. */
export interface Held {
  generation: string;
  quiescent: boolean;
  /** false: something of it cannot exist here (names that the file system refuses) */
  complete: boolean;
  /** the newest generation that was held with everything in it */
  lastComplete: string | null;
  refusedCount: number;
  /** latin1 path, errno */
  refused: [string, string][];
  /** entries whose attributes the file system would not take */
  xattrsFailed: number;
  /** filter and overrides that the index was made with */
  policy: string;
  missing: string[];
}

/** An apply that has begun. Its files lie in the incoming folder. */
export interface Journal {
  held: Held;
  lineage: Lineage;
  full: boolean;
  phase: 1 | 2;
  /** folder of the backups that takes what is removed or replaced, null: it is dropped */
  retired: string | null;
  changed: number;
  sealedAt: number;
  /** paths that must be there */
  required: string[];
}

export interface ApplyDeps {
  native: Native;
  store: VolumeStore;
  clock: Clock;
  live: string;
  incoming: string;
  backups: string;
}

const file = (d: ApplyDeps, name: string): string => join(d.incoming, name);

/** Removes whatever lies in the incoming folder. */
export async function clearIncoming(native: Native, incoming: string): Promise<void> {
  let names: Buffer[];
  try {
    names = await readdir(incoming, { encoding: 'buffer' });
  } catch (error) {
    if ((error as NodeJS.ErrnoException).code === 'ENOENT') return;
    throw error;
  }
  for (const name of names) await native.removeTree(Buffer.from(incoming), name);
}

/** Writes the plan where a recovery finds it. */
export async function writePlan(
  d: ApplyDeps,
  plan: { operationsInOrder(keepOld: boolean): AsyncGenerator<Buffer>; rows: Spool },
  keepOld: boolean,
): Promise<void> {
  await writeFrom(file(d, 'ops'), plan.operationsInOrder(keepOld));
  await writeFrom(file(d, 'rows'), plan.rows.pieces());
  await mkdir(file(d, 'slots'), { recursive: true, mode: 0o700 });
}

async function writeFrom(path: string, pieces: AsyncIterable<Buffer>): Promise<void> {
  const out = await open(path, 'w', 0o600);
  try {
    let at = 0;
    for await (const piece of pieces) {
      await writeAll(out, piece, at);
      at += piece.length;
    }
  } finally {
    await out.close();
  }
}

/** Makes everything pulled and planned durable, then the intention itself. After this there is no way back. */
export async function begin(d: ApplyDeps, journal: Journal): Promise<void> {
  if (journal.retired) await mkdir(join(d.backups, journal.retired), { recursive: true, mode: 0o700 });
  crashPoint('replica.journal.before_sync');
  await d.native.syncFs(Buffer.from(d.incoming));
  crashPoint('replica.journal.before');
  await d.store.transaction(() => d.store.setMeta(JOURNAL, journal));
  crashPoint('replica.journal.committed');
  await d.store.durable();
  crashPoint('replica.journal.durable');
}

/**
 * Carries out what the journal says, from wherever it was left. Gives what is held now.
 * Repeating it after a crash or an error gives the same.
 */
export async function carryOut(d: ApplyDeps, journal: Journal): Promise<Held> {
  const options = {
    root: Buffer.from(d.live),
    slots: Buffer.from(file(d, 'slots')),
    retired: journal.retired ? Buffer.from(join(d.backups, journal.retired)) : null,
    ops: Buffer.from(file(d, 'ops')),
  };
  let state = journal;
  await stat(file(d, 'ops'));
  if (state.phase === 1) {
    await d.native.apply({ ...options, out: null, phase: 1 });
    crashPoint('replica.phase1.applied');
    // the takes must be on the disk before the note that they are done
    await d.native.syncFs(Buffer.from(d.live));
    state = { ...state, phase: 2 };
    const next = state;
    await d.store.transaction(() => d.store.setMeta(JOURNAL, next));
    await d.store.durable();
    crashPoint('replica.phase1.durable');
  }
  const result = (await d.native.apply({ ...options, out: Buffer.from(file(d, 'out')), phase: 2 })) as {
    xattrsFailed?: number;
  };
  crashPoint('replica.phase2.applied');
  await d.native.syncFs(Buffer.from(d.live));
  crashPoint('replica.phase2.durable');
  const held: Held = { ...state.held, xattrsFailed: result.xattrsFailed ?? 0 };
  await commit(d, state, held);
  crashPoint('replica.commit.before_durable');
  await d.store.durable();
  crashPoint('replica.commit.durable');
  await clearIncoming(d.native, d.incoming);
  return held;
}

async function commit(d: ApplyDeps, journal: Journal, held: Held): Promise<void> {
  const { store } = d;
  const generation = parseGeneration(held.generation);
  await store.transaction(async (breathe) => {
    for await (const record of entriesOfFile(file(d, 'rows'))) {
      if (kindOf(record) === Kind.absent) store.remove(pathOf(record), seqOf(record));
      else putRow(store, record, record.readBigUInt64LE(32), null);
      await breathe();
    }
    for await (const { record, identity } of applied(file(d, 'ops'), file(d, 'out'))) {
      putRow(store, record, identity.readBigUInt64LE(16), identity);
      await breathe();
    }
    held.missing = journal.required.filter((path) => store.get(requiredPath(path)) === undefined);
    // what was removed before this generation is not known here
    if (journal.full) store.prune(generation.seq);
    store.dropGenerationsAfter(generation.seq);
    const { entries, bytes } = store.totals();
    store.addGeneration({
      ...generation,
      sealedAt: journal.sealedAt,
      quiescent: held.quiescent,
      entries,
      bytes,
      changed: journal.changed,
    });
    store.setMeta('lineage', journal.lineage);
    store.setMeta(HELD, held);
    store.deleteMeta(JOURNAL);
    store.deleteMeta(ASIDE);
    crashPoint('replica.commit.mid');
  });
}

export const ASIDE = 'aside';

/** A required path as it stands in the index. */
export const requiredPath = (path: string): Buffer => Buffer.from(path.replace(/^\/+|\/+$/g, ''));

/** @param identity size, mtime, inode, ctime as apply found them; null: they are in the record */
function putRow(store: VolumeStore, record: Buffer, copyIno: bigint, identity: Buffer | null): void {
  const path = pathOf(record);
  const row = asRow(record);
  if (identity) identity.copy(row, 24, 8, 32);
  let chunks: Buffer | null = null;
  const old = isFile(record) ? store.get(path)?.record : undefined;
  const unchanged = old !== undefined && sameContent(old, record);
  if (isFile(record) && sizeOf(record) >= LARGE) {
    const had = store.chunks(path);
    chunks = fullChunks(record, had) ?? (unchanged ? (had ?? null) : null);
    if (!chunks)
      throw new SimpleVolumeError('INTERNAL', `no chunk list for ${printablePath(path)}`, {
        path: printablePath(path),
      });
    row[5] = flagsOf(row) | Flag.large;
    if (!unchanged) store.putRuns(path, seqOf(record), changedRuns(record, old !== undefined));
  }
  store.put(row, copyIno, chunks);
}

/** Where a large file changed, as far as the manifest says; null: anywhere. */
function changedRuns(record: Buffer, hadBefore: boolean): Run[] | null {
  if (!hadBefore || !(flagsOf(record) & Flag.chunksSparse)) return null;
  const list = chunksOf(record);
  const size = sizeOf(record);
  const runs: Run[] = [];
  for (let at = 0; at + 20 <= list.length; at += 20) {
    const offset = list.readUInt32LE(at) * CHUNK;
    const length = Math.min(CHUNK, size - offset);
    const last = runs.at(-1);
    if (last && last.offset + last.length === offset) last.length += length;
    else runs.push({ offset, length });
  }
  return runs;
}

const LEAVES_ENTRY: ReadonlySet<number> = new Set([
  Op.put,
  Op.symlink,
  Op.link,
  Op.patch,
  Op.patchCopy,
  Op.meta,
]);

/** Status of a directory that was to be removed and still has preserved content. */
const STILL_THERE = 1;

/** The operations that leave an index row, each with what stands at its path now. Both files have the same order. */
async function* applied(
  opsFile: string,
  outFile: string,
): AsyncGenerator<{ record: Buffer; identity: Buffer }> {
  const out = entriesOfFile(outFile);
  try {
    let next = await out.next();
    for await (const op of entriesOfFile(opsFile)) {
      const kind = op[4] as number;
      if (kind === Op.take || kind === Op.remove) continue;
      const record = op.subarray(20 + op.readUInt32LE(8));
      const found = next.done ? null : decodeApplied(next.value, 0);
      // a removed directory is named only when it is still there, and then by its status
      if (kind === Op.rmdir && found?.value.status !== STILL_THERE) continue;
      if (!found?.value.path.equals(pathOf(record))) {
        if (kind === Op.rmdir) continue;
        throw new SimpleVolumeError('INTERNAL', `apply did not tell of ${printablePath(pathOf(record))}`);
      }
      const { status, identity } = found.value;
      next = await out.next();
      if (status !== STILL_THERE && LEAVES_ENTRY.has(kind)) yield { record, identity };
    }
  } finally {
    await out.return(undefined);
  }
}
