/** The mount table, as the kernel says it. Pure: text in, answers out (proc_pid_mountinfo(5)). */
import { POOL_FOLDERS } from '../../lib/core/pool-folders.ts';

export interface MountEntry {
  id: string;
  parent: string;
  device: string;
  /** path within its file system that is mounted */
  root: string;
  point: string;
  options: readonly string[];
  type: string;
  source: string;
}

const unescaped = (text: string): string =>
  text.replace(/\\([0-7]{3})/g, (_, octal: string) => String.fromCharCode(Number.parseInt(octal, 8)));

/** @param text read as latin1, so that any name survives */
export function parseMounts(text: string): MountEntry[] {
  const out: MountEntry[] = [];
  for (const line of text.split('\n')) {
    const fields = line.split(' ');
    const dash = fields.indexOf('-', 6);
    const [id, parent, device, root, point, options] = fields;
    if (dash < 0 || !id || !parent || !device || !root || !point || !options) continue;
    out.push({
      id,
      parent,
      device,
      root: unescaped(root),
      point: unescaped(point),
      options: options.split(','),
      type: fields[dash + 1] ?? '',
      source: unescaped(fields[dash + 2] ?? ''),
    });
  }
  return out;
}

/** What is mounted at exactly this path, the one on top last. */
export function stackAt(table: readonly MountEntry[], point: string): MountEntry[] {
  const left = table.filter((one) => one.point === point);
  const stack: MountEntry[] = [];
  // Each lies on its parent; the order of lines says nothing on newer kernels.
  let next = left.find((one) => !left.some((other) => other.id === one.parent));
  while (next) {
    stack.push(next);
    const { id } = next;
    next = left.find((one) => one.parent === id);
  }
  return stack.length === left.length ? stack : left;
}

const isBelow = (path: string, directory: string): boolean =>
  directory === '/' || path === directory || path.startsWith(`${directory}/`);

/** How a directory would look as a bind mount; null: nothing is mounted above it. */
export function placeOf(
  table: readonly MountEntry[],
  directory: string,
): { device: string; root: string } | null {
  let own: MountEntry | null = null;
  for (const one of table)
    if (isBelow(directory, one.point) && (!own || one.point.length >= own.point.length)) own = one;
  if (!own) return null;
  const inside = own.point === '/' ? directory : directory.slice(own.point.length);
  return { device: own.device, root: own.root === '/' ? inside || '/' : own.root + inside };
}

/** Of the file system that is put over a volume that has moved on. */
export const MOVED = 'simple-volume-moved';

/** As mountinfo marks the root of a directory that was removed. */
const DELETED = '//deleted';

export type Layer = 'volume' | 'moved' | 'foreign';

/**
 * What a mount at a target is.
 * @param tail `/<namespace>/<volume>`: for taking a mount away it is enough that it is of such a directory, also when
 *   the pool's disk is not where it was
 */
export function layerOf(
  entry: MountEntry,
  place: { device: string; root: string } | null,
  tail: string | null = null,
): Layer {
  if (entry.type === 'tmpfs' && entry.source === MOVED) return 'moved';
  const root = entry.root.endsWith(DELETED) ? entry.root.slice(0, -DELETED.length) : entry.root;
  if (place && entry.device === place.device && root === place.root) return 'volume';
  if (tail === null) return 'foreign';
  // What a node had that was replaced goes to the backups, and the mount of a pod that is still ending there with it.
  const aside = root.slice(0, root.lastIndexOf('/')).endsWith(`/${POOL_FOLDERS.backups}${tail}`);
  return root.endsWith(tail) || aside ? 'volume' : 'foreign';
}
