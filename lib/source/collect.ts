/**
 * A tree against the index: a scan and the index pages, both in path order, walked side by side. Memory does not
 * grow with the tree. The same walk serves the start after a restart, overflows, and the periodic audit.
 */
import { Kind, kindOf, pathOf, recordsIn } from '../core/record.ts';
import type { IndexReader, Row } from '../core/store.ts';
import type { Filter, Native } from '../native/types.ts';
import { untouched } from './classify.ts';
import { coveredBy, keyOf } from './paths.ts';

const PAGE = 512;
const SCAN_BYTES = 256 * 1024;
/** Longer than any name: nothing below a directory sorts after this. */
const AFTER_ALL = Buffer.alloc(256, 0xff);
const SLASH = Buffer.from('/');

/** Rows of a directory itself and of what is below it (deep), or of its direct children only. Path order. */
export function* rowsOf(index: IndexReader, directory: Buffer, deep: boolean): Generator<Row> {
  const self = index.get(directory);
  if (self) yield self;
  const prefix = directory.length === 0 ? 0 : directory.length + 1;
  let after: Buffer = directory;
  for (;;) {
    const rows = index.page(after, PAGE, directory);
    let jump: Buffer | null = null;
    for (const row of rows) {
      const path = pathOf(row.record);
      if (path.length <= prefix) continue;
      if (deep) {
        yield row;
        continue;
      }
      const slash = path.indexOf(0x2f, prefix);
      jump = slash < 0 ? null : path.subarray(0, slash);
      if (!jump) yield row;
      else break;
    }
    if (jump) after = Buffer.concat([jump, SLASH, AFTER_ALL]);
    else if (rows.length < PAGE) return;
    else after = pathOf((rows.at(-1) as Row).record);
  }
}

export interface Difference {
  path: Buffer;
  /** differs: new or touched; gone: in the index only; special, unreadable: cannot be carried */
  what: 'differs' | 'gone' | 'special' | 'unreadable';
  /** of unreadable */
  errno: number;
}

export interface CompareOptions {
  native: Pick<Native, 'scan'>;
  index: IndexReader;
  filter: Filter;
  /** absolute path of the live tree */
  root: Buffer;
  /** relative; '' = the root */
  directory: Buffer;
  /** false: the directory and its direct children */
  deep: boolean;
  /** rows without a copy differ too */
  copies: boolean;
  /** called for each index row that the walk has passed */
  passed?: () => void;
  /** awaited after each piece of the scan */
  pace?: () => Promise<void>;
}

/**
 * Everything at or below a directory that is not as the index says. Each difference is a hint: the caller looks at
 * the path itself. Throws when the scan cannot be finished: half a scan would look like deletions.
 */
export async function* compare(options: CompareOptions): AsyncGenerator<Difference> {
  const { native, index, filter, root, directory, deep, copies, pace, passed } = options;
  const rows = rowsOf(index, directory, deep);
  const next = (): Row | undefined => {
    const { value } = rows.next();
    if (value) passed?.();
    return value as Row | undefined;
  };
  let row = next();
  // What could not be looked into: the index keeps what it knows of it.
  const closed = new Set<string>();
  const gone = (path: Buffer): Difference | null =>
    coveredBy(path, closed) ? null : { path: Buffer.from(path), what: 'gone', errno: 0 };
  const scanner = native.scan(root, directory, filter, deep);
  try {
    for (;;) {
      const piece = await scanner.next(SCAN_BYTES);
      if (!piece) break;
      for (const record of recordsIn(piece)) {
        const path = pathOf(record);
        let order = row ? pathOf(row.record).compare(path) : 1;
        while (row && order < 0) {
          const difference = gone(pathOf(row.record));
          if (difference) yield difference;
          row = next();
          order = row ? pathOf(row.record).compare(path) : 1;
        }
        const base = row && order === 0 ? row : undefined;
        if (base) row = next();
        const kind = kindOf(record);
        if (kind === Kind.unreadable) {
          closed.add(keyOf(path));
          yield { path: Buffer.from(path), what: 'unreadable', errno: record.readUInt32LE(8) };
        } else if (kind === Kind.special) {
          yield { path: Buffer.from(path), what: base ? 'differs' : 'special', errno: 0 };
        } else if (!base || !untouched(base.record, record) || (copies && base.copyIno === 0n)) {
          yield { path: Buffer.from(path), what: 'differs', errno: 0 };
        }
      }
      await pace?.();
    }
    while (row) {
      const difference = gone(pathOf(row.record));
      if (difference) yield difference;
      row = next();
    }
  } finally {
    scanner.close();
  }
}
