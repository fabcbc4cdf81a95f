interface Open {
  path: Buffer;
  /** what the directory shall be; null: it goes away, or neither manifest nor index know it */
  record: Buffer | null;
  due: boolean;
}

/** Path of the directory that holds `path`. */
export const parentOf = (path: Buffer): Buffer => path.subarray(0, Math.max(0, path.lastIndexOf(0x2f)));

/** Whether `path` may be below `directory`, or something that sorts after `path` still may. */
function mayStillCome(directory: Buffer, path: Buffer): boolean {
  const n = directory.length;
  if (n === 0) return true;
  if (path.length === n) return path.equals(directory);
  return path.length > n && path.compare(directory, 0, n, 0, n) === 0 && (path[n] as number) <= 0x2f;
}

/**
 * Whatever is made or removed in a directory changes its mtime, so its metadata is set again afterwards, the
 * deepest directory first. Works along with a walk in path order and keeps only the directories on the way down.
 */
export class Directories {
  readonly #open: Open[] = [];
  readonly #lookup: (path: Buffer) => Buffer | null;
  readonly #emit: (record: Buffer) => Promise<void>;

  /**
   * @param lookup the record of a directory that the walk itself did not bring
   * @param emit takes the records of directories whose metadata is to be set, children before parents
   */
  constructor(lookup: (path: Buffer) => Buffer | null, emit: (record: Buffer) => Promise<void>) {
    this.#lookup = lookup;
    this.#emit = emit;
  }

  /** The walk has come to `path`. */
  async at(path: Buffer): Promise<void> {
    for (let top = this.#open.at(-1); top && !mayStillCome(top.path, path); top = this.#open.at(-1))
      await this.#pop();
  }

  async #pop(): Promise<void> {
    const top = this.#open.pop();
    if (top?.due && top.record) await this.#emit(top.record);
  }

  /** A directory at which the walk stands. due: its metadata is to be set in any case. null: it goes away. */
  add(path: Buffer, record: Buffer | null, due: boolean): void {
    const there = this.#find(path);
    if (there) {
      there.record = record;
      there.due ||= due;
    } else this.#insert({ path, record, due });
  }

  /** An entry is made or removed in the directory `path`. */
  touch(path: Buffer): void {
    let there = this.#find(path);
    if (!there) {
      there = { path: Buffer.from(path), record: this.#lookup(path), due: true };
      this.#insert(there);
    }
    there.due = true;
  }

  /** The walk itself brought this directory. */
  knows(path: Buffer): boolean {
    return this.#find(path) !== undefined;
  }

  #find(path: Buffer): Open | undefined {
    return this.#open.findLast((o) => o.path.length === path.length && o.path.equals(path));
  }

  #insert(o: Open): void {
    let i = this.#open.length;
    while (i > 0 && (this.#open[i - 1] as Open).path.length > o.path.length) i--;
    this.#open.splice(i, 0, o);
  }

  async finish(): Promise<void> {
    while (this.#open.length > 0) await this.#pop();
  }
}
