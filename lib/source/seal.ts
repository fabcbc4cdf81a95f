/**
 * Sealing: a plan becomes the next generation, durably, and the shadow becomes exactly that. The generation exists
 * from the moment at which its index rows and the journal are on the disk; the shadow follows by operations that
 * can be repeated, so that a crash at any point is finished at the next start.
 */
import { mkdir, open, readdir, rm } from 'node:fs/promises';
import { join } from 'node:path';
import type { Generation, Lineage } from '../core/generation.ts';
import { decodeApplied, slotName } from '../core/lists.ts';
import { pathOf, printablePath } from '../core/record.ts';
import type { VolumeStore } from '../core/store.ts';
import type { Native } from '../native/types.ts';
import { crashPoint } from './crash-point.ts';
import type { Plan } from './plan.ts';

export interface ShadowPaths {
  /** .simple-volume-shadows/<ns>/<vol> */
  home: string;
  data: string;
  retired: string;
  slots: string;
  ops: string;
  out: string;
}

export const shadowPaths = (home: string): ShadowPaths => ({
  home,
  data: join(home, 'current', 'data'),
  retired: join(home, 'retired'),
  slots: join(home, 'slots'),
  ops: join(home, 'plan'),
  out: join(home, 'outcome'),
});

/** Removes what is kept of the copy below `home`, once the active role is over. Offers below it are left alone. */
export async function removeShadow(native: Pick<Native, 'removeTree'>, home: string): Promise<void> {
  for (const name of ['current', 'retired', 'slots'])
    await native.removeTree(Buffer.from(home), Buffer.from(name));
}

interface Journal {
  /** 1: files are being taken aside; 2: everything else */
  phase: 1 | 2;
  /** number of the folder for replaced files; null: nothing is kept */
  retired: number | null;
}

/** Meta key of Copies. */
export const COPIES = 'copies';

/** What the copy in the shadow is a copy of. */
export interface Copies {
  mode: 'shadow' | 'live';
  epoch: number;
  seq: number | null;
  /** false while the copy is being put together: nothing is served from it */
  complete: boolean;
  /** the index is ahead of the generation: the one that will be sealed when the copy is complete */
  ahead: boolean;
}

export interface SealOptions {
  /** the generation that the plan leads to; null: rows only (nothing that a replica has to know of changed, or more is to come) */
  generation: (Generation & { quiescent: boolean }) | null;
  lineage: Lineage;
  /** seq of the generation that is being replaced */
  previous: number;
  pinned: boolean;
  copies: Copies;
  /** wall clock, ms */
  now: number;
  /** something else that belongs to the same transaction */
  also?: () => void;
}

export class Sealer {
  readonly #native: Native;
  readonly #store: VolumeStore;
  readonly #paths: ShadowPaths;

  constructor(native: Native, store: VolumeStore, paths: ShadowPaths) {
    this.#native = native;
    this.#store = store;
    this.#paths = paths;
  }

  /** Whether a sealed plan has still to be carried out. */
  get unfinished(): boolean {
    return this.#store.meta<Journal>('journal') !== undefined;
  }

  /**
   * @throws before the generation exists: nothing has happened. Once it exists (`unfinished`), redo() has to be
   * called until it succeeds.
   */
  async seal(plan: Plan, options: SealOptions): Promise<void> {
    const store = this.#store;
    const journal: Journal | null =
      plan.ops.length === 0
        ? null
        : { phase: plan.hasTakes ? 1 : 2, retired: options.pinned ? options.previous : null };
    if (journal) {
      await this.#writeOps(plan.ops);
      crashPoint('seal.ops');
      await this.#native.syncFs(Buffer.from(this.#paths.home));
      crashPoint('seal.synced');
    }
    await store.transaction(async (breathe) => {
      const { generation } = options;
      const seq = generation?.seq ?? options.previous + 1;
      for (const path of plan.removes) {
        store.remove(path, seq);
        await breathe();
      }
      for (const put of plan.puts) {
        store.put(put.record, put.copyIno, put.chunks);
        if (put.runs !== undefined) store.putRuns(pathOf(put.record), seq, put.runs);
        await breathe();
      }
      if (generation) {
        const { entries, bytes } = store.totals();
        store.addGeneration({
          epoch: generation.epoch,
          seq: generation.seq,
          quiescent: generation.quiescent,
          sealedAt: options.now,
          entries,
          bytes,
          changed: plan.changed + plan.removed,
        });
        store.setMeta('lineage', options.lineage);
        store.deleteMeta('held');
      }
      store.setMeta(COPIES, options.copies);
      if (journal) store.setMeta('journal', journal);
      options.also?.();
    });
    crashPoint('seal.committed');
    if (!journal && !options.generation) return;
    await store.durable();
    crashPoint('seal.durable');
    if (journal) await this.redo();
  }

  async #writeOps(ops: Buffer[]): Promise<void> {
    const file = await open(this.#paths.ops, 'w', 0o600);
    try {
      for (let at = 0; at < ops.length; at += 1024) {
        const piece = Buffer.concat(ops.slice(at, at + 1024));
        for (let done = 0; done < piece.length; )
          done += (await file.write(piece, done, piece.length - done)).bytesWritten;
      }
    } finally {
      await file.close();
    }
  }

  /** Carries out what the journal says; nothing when there is none. May be repeated. */
  async redo(): Promise<void> {
    const journal = this.#store.meta<Journal>('journal');
    if (!journal) return;
    const { data, slots, retired, ops, out, home } = this.#paths;
    const folder = journal.retired === null ? null : join(retired, String(journal.retired));
    if (folder) await mkdir(folder, { recursive: true, mode: 0o700 });
    const options = {
      root: Buffer.from(data),
      slots: Buffer.from(slots),
      retired: folder === null ? null : Buffer.from(folder),
      ops: Buffer.from(ops),
      out: Buffer.from(out),
    };
    if (journal.phase === 1) {
      await this.#native.apply({ ...options, phase: 1 });
      crashPoint('seal.taken');
      // Once other files have taken the names of what was set aside, setting aside must not be repeated.
      await this.#native.syncFs(Buffer.from(home));
      await this.#store.transaction(() => this.#store.setMeta('journal', { ...journal, phase: 2 }));
      await this.#store.durable();
    }
    crashPoint('seal.phase2');
    await this.#native.apply({ ...options, phase: 2 });
    crashPoint('seal.applied');
    await this.#native.syncFs(Buffer.from(home));
    await this.#noteCopies();
    crashPoint('seal.noted');
    await this.#store.durable();
    await this.clearSlots();
    await rm(ops, { force: true });
    await rm(out, { force: true });
  }

  /** The inodes of the shadow's files, by which they are known from now on; and the journal is done. */
  async #noteCopies(): Promise<void> {
    const file = await open(this.#paths.out, 'r');
    try {
      await this.#store.transaction(async (breathe) => {
        let rest = Buffer.alloc(0);
        for (;;) {
          const piece = Buffer.allocUnsafe(256 * 1024);
          const { bytesRead } = await file.read(piece, 0, piece.length);
          if (bytesRead === 0) break;
          rest = Buffer.concat([rest, piece.subarray(0, bytesRead)]);
          let at = 0;
          for (let next = decodeApplied(rest, at); next; next = decodeApplied(rest, at)) {
            if (next.value.status === 0) this.#store.setCopy(next.value.path, next.value.ino);
            at = next.next;
            await breathe();
          }
          rest = Buffer.from(rest.subarray(at));
        }
        if (rest.length > 0) throw new Error(`${printablePath(Buffer.from(this.#paths.out))} is cut short`);
        this.#store.deleteMeta('journal');
      });
    } finally {
      await file.close();
    }
  }

  /** Removes all slots. Only when no plan needs them. */
  async clearSlots(): Promise<void> {
    for (const name of await readdir(this.#paths.slots))
      await rm(join(this.#paths.slots, name), { force: true });
  }

  async dropSlots(slots: Iterable<number>): Promise<void> {
    for (const slot of slots) await rm(join(this.#paths.slots, slotName(slot)), { force: true });
  }

  /** With `copies` for a shadow tree, else only the folder that offers are made in. */
  async makeFolders(copies: boolean): Promise<void> {
    const { home, data, retired, slots } = this.#paths;
    for (const folder of copies ? [home, data, retired, slots] : [home])
      await mkdir(folder, { recursive: true, mode: 0o700 });
  }

  /** Replaced files of generations before `oldest` (null: all of them) are of no use to anybody any more. */
  async clearRetired(oldest: number | null): Promise<void> {
    let names: string[];
    try {
      names = await readdir(this.#paths.retired);
    } catch (error) {
      if ((error as NodeJS.ErrnoException).code === 'ENOENT') return;
      throw error;
    }
    for (const name of names)
      if (oldest === null || !/^\d+$/.test(name) || Number(name) < oldest)
        await this.#native.removeTree(Buffer.from(this.#paths.retired), Buffer.from(name));
  }
}
