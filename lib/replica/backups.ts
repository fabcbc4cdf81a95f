/** What a returning node had, and what a full sync would have thrown away. Kept until somebody removes it. */
import { lstat, mkdir, opendir, readdir, rename, stat } from 'node:fs/promises';
import { dirname, join } from 'node:path';
import { SimpleVolumeError } from '../core/errors.ts';
import type { VolumeStore } from '../core/store.ts';
import type { Native } from '../native/types.ts';
import { ASIDE, DEMOTED, HELD } from './apply.ts';
import { crashPoint } from './crash.ts';
import { makeLive } from './live.ts';

const STAMP = /^\d{4}-\d{2}-\d{2}T\d{2}-\d{2}-\d{2}Z(?:\.\d{1,3})?$/;

export interface Backup {
  stamp: string;
  bytes: number;
  entries: number;
}

/** A tree on its way to the backups, or there and not yet replaced by a restored one. */
export interface Aside {
  stamp: string;
  state: 'moving' | 'moved';
}

const exists = async (path: string): Promise<boolean> => {
  try {
    await stat(path);
    return true;
  } catch (error) {
    if ((error as NodeJS.ErrnoException).code === 'ENOENT') return false;
    throw error;
  }
};

/** A name for a new backup: UTC to the second; a number is added when there is one of this second already. */
export async function newStamp(backups: string, now: number): Promise<string> {
  const base = new Date(now)
    .toISOString()
    .replace(/\.\d+Z$/, 'Z')
    .replaceAll(':', '-');
  for (let n = 0; ; n++) {
    const stamp = n === 0 ? base : `${base}.${n}`;
    if (!(await exists(join(backups, stamp)))) return stamp;
  }
}

export async function listBackups(backups: string): Promise<Backup[]> {
  let names: string[];
  try {
    names = await readdir(backups);
  } catch (error) {
    if ((error as NodeJS.ErrnoException).code === 'ENOENT') return [];
    throw error;
  }
  const out: Backup[] = [];
  for (const stamp of names.filter((n) => STAMP.test(n)).sort())
    out.push({ stamp, ...(await measure(Buffer.from(join(backups, stamp)))) });
  return out;
}

/** What a backup takes up: names, and bytes on the disk (holes do not count). Follows no link. */
async function measure(directory: Buffer): Promise<{ bytes: number; entries: number }> {
  const sum = { bytes: 0, entries: 0 };
  const waiting = [directory];
  for (let next = waiting.pop(); next; next = waiting.pop()) {
    const at = next;
    for await (const entry of await opendir(at, { encoding: 'buffer' as BufferEncoding })) {
      const path = Buffer.concat([at, SLASH, entry.name as unknown as Buffer]);
      sum.entries++;
      if (entry.isDirectory()) waiting.push(path);
      else sum.bytes += (await lstat(path)).blocks * 512;
    }
  }
  return sum;
}

const SLASH = Buffer.from('/');

/**
 * @param inUse stamp of the backup that a restore takes contents from, null: none
 * @throws NOT_FOUND; HELD for the one in use
 */
export async function removeBackup(
  native: Native,
  backups: string,
  stamp: string,
  inUse: string | null = null,
): Promise<void> {
  if (!STAMP.test(stamp) || !(await exists(join(backups, stamp))))
    throw new SimpleVolumeError('NOT_FOUND', `there is no backup ${JSON.stringify(stamp)}`);
  if (inUse === stamp)
    throw new SimpleVolumeError('HELD', `backup ${stamp} is in use: the volume is being restored`);
  await native.removeTree(Buffer.from(backups), Buffer.from(stamp));
}

/** Whether the tree has anything in it. A missing one has not. */
export async function hasEntries(live: string): Promise<boolean> {
  try {
    return (await readdir(live, { encoding: 'buffer' })).length > 0;
  } catch (error) {
    if ((error as NodeJS.ErrnoException).code === 'ENOENT') return false;
    throw error;
  }
}

export interface AsideDeps {
  native: Native;
  store: VolumeStore;
  live: string;
  backups: string;
  now: number;
  /** the new tree can be held to a size */
  countTrees: boolean;
}

/**
 * Moves the tree to the backups, once: the stamp is durable before the rename, so a retry finds it done and goes
 * on. Afterwards an empty tree stands in its place and nothing is held.
 */
export async function moveAside(d: AsideDeps): Promise<Aside> {
  const { store } = d;
  let aside = store.meta<Aside>(ASIDE);
  if (!aside) {
    aside = { stamp: await newStamp(d.backups, d.now), state: 'moving' };
    const begun = aside;
    await mkdir(d.backups, { recursive: true, mode: 0o700 });
    await store.transaction(() => store.setMeta(ASIDE, begun));
    await store.durable();
    crashPoint('replica.aside.noted');
  }
  if (aside.state === 'moving') {
    const to = join(d.backups, aside.stamp);
    if (!(await exists(to))) await rename(d.live, to);
    crashPoint('replica.aside.renamed');
    // the new tree is as closed as the old one was; the restore sets what the root shall have
    await makeLive(d.native, d.live, { mode: 0o700, counted: d.countTrees });
    await d.native.syncFile(Buffer.from(dirname(d.live)));
    await d.native.syncFile(Buffer.from(d.backups));
    const moved: Aside = { stamp: aside.stamp, state: 'moved' };
    await store.transaction(() => {
      store.setMeta(ASIDE, moved);
      store.deleteMeta(HELD);
      store.deleteMeta(DEMOTED);
    });
    await store.durable();
    crashPoint('replica.aside.moved');
    aside = moved;
  }
  return aside;
}
