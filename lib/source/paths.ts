/** Paths as bytes: keys for maps, parents, and the companions of an SQLite database. */

/** One character per byte: equal strings are equal paths. */
export const keyOf = (path: Buffer): string => path.toString('latin1');

/** '' for what is directly below the root; null for the root itself. */
export function parentOf(path: Buffer): Buffer | null {
  if (path.length === 0) return null;
  return path.subarray(0, Math.max(0, path.lastIndexOf(0x2f)));
}

/** Whether `path` or a directory above it is in the set. */
export function coveredBy(path: Buffer, keys: ReadonlySet<string>): boolean {
  if (keys.size === 0) return false;
  for (let p: Buffer | null = path; p; p = parentOf(p)) if (keys.has(keyOf(p))) return true;
  return false;
}

/** Whether `path` lies below `directory` ('' = the root). */
export const isBelow = (path: Buffer, directory: Buffer): boolean =>
  directory.length === 0
    ? path.length > 0
    : path.length > directory.length &&
      path[directory.length] === 0x2f &&
      path.compare(directory, 0, directory.length, 0, directory.length) === 0;

/**
 * The files that SQLite keeps beside a database (sqlite.org/tempfiles.html). Together with it they are one unit:
 * a log of one moment beside a database of another corrupts it.
 */
export const COMPANIONS = ['-journal', '-wal', '-shm'].map((s) => Buffer.from(s));

/** The database that `path` may be a companion of, null when its name is none of theirs. */
export function databaseOf(path: Buffer): Buffer | null {
  for (const suffix of COMPANIONS) {
    const n = path.length - suffix.length;
    if (n > 0 && path[n - 1] !== 0x2f && path.compare(suffix, 0, suffix.length, n) === 0)
      return path.subarray(0, n);
  }
  return null;
}
export const companionsOf = (database: Buffer): Buffer[] =>
  COMPANIONS.map((suffix) => Buffer.concat([database, suffix]));
