/**
 * Comparisons of a batch that outlive it: a batch takes in only so many paths, and the next one goes on where it
 * stopped, so that a first copy of millions of files is one walk and not one per batch. What changes behind the walk
 * is told by events.
 */
import { type Mark, MarkBit, MarkType } from '../core/lists.ts';
import { type CompareOptions, compare, type Difference } from './collect.ts';

/** A directory that has to be compared. */
export interface Scan {
  path: Buffer;
  /** with all below it */
  deep: boolean;
  /** of the mark that asked for it */
  bits: number;
}

/** What a batch that took in as much as it may leaves to the next one. */
export interface Rest {
  /** begun */
  walk: Walk | null;
  /** not begun */
  scans: Scan[];
  /** latin1 paths that somebody was seen deleting; they explain what the walk misses */
  deleted: Set<string>;
}

export class Walk {
  readonly scan: Scan;
  readonly #differences: AsyncGenerator<Difference>;
  #pace: () => Promise<void> = async () => {};
  #passed: () => void = () => {};

  constructor(options: Omit<CompareOptions, 'directory' | 'deep' | 'pace' | 'passed'>, scan: Scan) {
    this.scan = scan;
    this.#differences = compare({
      ...options,
      directory: scan.path,
      deep: scan.deep,
      pace: () => this.#pace(),
      passed: () => this.#passed(),
    });
  }

  /** @param pace awaited after each piece @param passed called for each index row that the walk has passed */
  async next(pace: () => Promise<void>, passed: () => void): Promise<Difference | null> {
    this.#pace = pace;
    this.#passed = passed;
    const { value, done } = await this.#differences.next();
    return done ? null : value;
  }

  async close(): Promise<void> {
    await this.#differences.return(undefined);
  }
}

/** The marks that bring the same work again, from its start. */
export function marksOf(rest: Rest): Mark[] {
  const scans = rest.walk ? [rest.walk.scan, ...rest.scans] : rest.scans;
  return [
    ...scans.map(({ path, deep, bits }) => ({
      type: deep ? MarkType.subtree : MarkType.directory,
      bits,
      path,
    })),
    ...[...rest.deleted].map((key) => ({
      type: MarkType.path,
      bits: MarkBit.deleted,
      path: Buffer.from(key, 'latin1'),
    })),
  ];
}
