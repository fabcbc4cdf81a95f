/** What a look at one path means, compared with the index. Pure: records in, a word out. */
import {
  EMPTY,
  Flag,
  flagsOf,
  inoOf,
  Kind,
  kindOf,
  linkGroupOf,
  pathOf,
  sameIdentity,
  sizeOf,
  targetOf,
  withFields,
  xattrsOf,
} from '../core/record.ts';

/**
 * none: nothing to do. identity: the same state on another inode or with another ctime, only the index learns it.
 * content: a file that has to be read (whether its bytes differ is known only then). directory, symlink: made or
 * given other metadata. gone: is no more. special, unreadable: cannot be carried, to be reported.
 */
export type Change =
  | 'none'
  | 'identity'
  | 'content'
  | 'directory'
  | 'symlink'
  | 'gone'
  | 'special'
  | 'unreadable';

/** Mode and owner. */
const samePermissions = (a: Buffer, b: Buffer): boolean => a.compare(b, 6, 16, 6, 16) === 0;
const sameMtime = (a: Buffer, b: Buffer): boolean => a.compare(b, 24, 32, 24, 32) === 0;

/**
 * @param base the index row's record; undefined: the path is not in the index
 * @param now what stat says, with attributes and link text; kind absent when nothing is there
 * @param copyMissing the copy that is served does not have this path yet
 */
export function classify(base: Buffer | undefined, now: Buffer, copyMissing: boolean): Change {
  const kind = kindOf(now);
  switch (kind) {
    case Kind.absent:
      return base ? 'gone' : 'none';
    case Kind.special:
      return 'special';
    case Kind.unreadable:
      return 'unreadable';
    case Kind.file:
      // A changed ctime alone may be a write whose mtime was set back: only reading tells.
      return base &&
        !copyMissing &&
        kindOf(base) === kind &&
        sameIdentity(base, now) &&
        samePermissions(base, now) &&
        // differs without an event only when the row is from another node's source, which numbered its own inodes
        linkGroupOf(base) === linkGroupOf(now)
        ? 'none'
        : 'content';
    default: {
      const change = kind === Kind.directory ? 'directory' : 'symlink';
      if (!base || copyMissing || !sameState(base, now)) return change;
      return sameIdentity(base, now) ? 'none' : 'identity';
    }
  }
}

/**
 * Whether a scan's record (no attributes, no link text) shows that nothing happened since the index row was
 * written. The ctime answers for what the scan does not read: it changes with every attribute and cannot be set.
 */
export function untouched(base: Buffer, scanned: Buffer): boolean {
  return (
    kindOf(base) === kindOf(scanned) &&
    sameIdentity(base, scanned) &&
    samePermissions(base, scanned) &&
    linkGroupOf(base) === linkGroupOf(scanned)
  );
}

/** Whether two rows are the same state of the volume: all that a replica is told, without inode and ctime. */
export function sameState(a: Buffer, b: Buffer): boolean {
  const kind = kindOf(a);
  if (kind !== kindOf(b) || !samePermissions(a, b) || !sameMtime(a, b) || !xattrsOf(a).equals(xattrsOf(b)))
    return false;
  if (kind === Kind.symlink) return targetOf(a).equals(targetOf(b));
  if (kind !== Kind.file) return true;
  return sameContent(a, b) && linkGroupOf(a) === linkGroupOf(b);
}

/** Mode, owner, mtime and attributes: what a metadata operation sets. */
export const sameFileMeta = (a: Buffer, b: Buffer): boolean =>
  samePermissions(a, b) && sameMtime(a, b) && xattrsOf(a).equals(xattrsOf(b));

/** Both hashes are known and equal. */
export const sameContent = (a: Buffer, b: Buffer): boolean =>
  sizeOf(a) === sizeOf(b) &&
  (flagsOf(a) & flagsOf(b) & Flag.hash) !== 0 &&
  a.compare(b, 64, 96, 64, 96) === 0;

/** Whether `now` can be the file of `gone` under another name: inode, size and mtime; a rename changes the ctime. */
export const sameFileElsewhere = (gone: Buffer, now: Buffer): boolean =>
  kindOf(gone) === Kind.file &&
  kindOf(now) === Kind.file &&
  linkGroupOf(gone) === 0n &&
  linkGroupOf(now) === 0n &&
  (flagsOf(gone) & Flag.hash) !== 0 &&
  inoOf(gone) === inoOf(now) &&
  sizeOf(gone) === sizeOf(now) &&
  sameMtime(gone, now);

const CONTENT_FLAGS = Flag.hash | Flag.sparse | Flag.large;

/** `now` with the content (hash, flags) of `known`, and the path that it had there. */
export const movedRecord = (now: Buffer, known: Buffer): Buffer =>
  withFields(now, {
    flags: (flagsOf(known) & CONTENT_FLAGS) | Flag.moved,
    hash: known.subarray(64, 96),
    target: pathOf(known),
    chunks: EMPTY,
  });

export interface Gone {
  path: Buffer;
  /** somebody saw it deleted or moved away, or the filter no longer covers it */
  explained: boolean;
}

/** More than half of a volume, and more than this many entries, do not disappear without a delete event. */
export const GUARD_MIN = 10;
export function isMassDelete(gone: Iterable<Gone>, entries: number): { held: boolean; unexplained: number } {
  let unexplained = 0;
  for (const g of gone) if (!g.explained) unexplained++;
  return { held: unexplained > GUARD_MIN && unexplained > entries / 2, unexplained };
}
