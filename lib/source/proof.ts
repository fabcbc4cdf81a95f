/**
 * What the newest generation is known to hold. Time is counted in cuts: each batch and each scan begins with one, and
 * everything that happened before a cut is in its batch, or is found by its scan.
 */

/** A scan of the whole tree. */
export interface WholeScan {
  /** it began with this one */
  cut: number;
  /** all directories had watches when it began */
  sighted: boolean;
}

export class Proof {
  readonly #sighted: () => boolean;
  #cuts = 0;
  #asOf = 0;
  /** the newest generation is on the disk, and holds everything as of this cut; null: not known */
  #heldAsOf: number | null = null;
  /** some directory had no watch since the last whole scan: events alone prove nothing */
  #blind = false;
  /** the last cut as of which a whole scan has seen everything */
  #scannedAsOf = 0;
  /** a scan that has looked at everything; what it found is dealt with by the next batch */
  #scan: WholeScan | null = null;
  /** a scan by batches that is under way */
  #whole: WholeScan | null = null;
  /** paths that a batch left out, with the last cut of which they hold everything */
  readonly #behind = new Map<string, number>();

  /** @param sighted whether all directories have a watch right now */
  constructor(sighted: () => boolean) {
    this.#sighted = sighted;
  }

  /** A new watch: what was known before it is not known any more. */
  begin(): void {
    this.#heldAsOf = null;
    this.#scannedAsOf = 0;
    this.#scan = null;
    this.#whole = null;
  }

  /** Begins a batch or a scan: its number. */
  cut(): number {
    return ++this.#cuts;
  }
  /** The last cut of which the batch that was sealed last holds everything. */
  get asOf(): number {
    return this.#asOf;
  }
  get heldAsOf(): number | null {
    return this.#heldAsOf;
  }
  get blind(): boolean {
    return this.#blind;
  }

  /** Looks whether every directory has a watch; once one had none, only a whole scan proves anything. */
  sighted(): boolean {
    const sighted = this.#sighted();
    if (!sighted) this.#blind = true;
    return sighted;
  }

  /** Batches begin to walk the whole tree; proven when the last of them is sealed. */
  walkBegan(scan: WholeScan): void {
    this.#whole = scan;
  }
  /** A scan has looked at everything: the next batch deals with what it found. */
  scanEnded(scan: WholeScan): void {
    this.#scan = scan;
  }
  /** The scan whose findings this batch deals with. */
  takeScan(): WholeScan | null {
    const scan = this.#scan;
    this.#scan = null;
    return scan;
  }
  /** The batch did not deal with all of them. */
  returnScan(scan: WholeScan | null): void {
    this.#scan ??= scan;
  }

  /**
   * A batch is about to be sealed that has dealt with everything as of its cut but for `waiting`. A path that is left
   * out holds what was there at the cut before the first batch that left it out; the slowest one decides.
   * @param scan the scan whose findings it dealt with
   */
  caughtUp(cut: number, scan: WholeScan | null, waiting: ReadonlySet<string>): void {
    for (const done of [this.#whole, scan]) if (done) this.#scanned(done);
    this.#whole = null;
    for (const key of this.#behind.keys()) if (!waiting.has(key)) this.#behind.delete(key);
    for (const key of waiting) if (!this.#behind.has(key)) this.#behind.set(key, cut - 1);
    this.sighted();
    const seen = this.#blind ? this.#scannedAsOf : cut;
    this.#asOf = Math.min(cut, seen, ...this.#behind.values());
  }

  #scanned(scan: WholeScan): void {
    this.#scannedAsOf = Math.max(this.#scannedAsOf, scan.cut);
    if (scan.sighted && this.sighted()) this.#blind = false;
  }

  /** What was caught up with is on the disk. */
  sealed(): void {
    this.#heldAsOf = this.#asOf;
  }
}
