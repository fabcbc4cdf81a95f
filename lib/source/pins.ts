/** Who reads which generation: as long as somebody does, what it consists of is kept. */
export class Pins {
  readonly #held = new Map<object, number>();

  /** Pins a generation; the function that comes back releases it, once. */
  pin(seq: number, released: () => void): () => void {
    const key = {};
    this.#held.set(key, seq);
    return () => {
      if (this.#held.delete(key)) released();
    };
  }
  get any(): boolean {
    return this.#held.size > 0;
  }
  /** Seq of the oldest generation that is read, null: none. */
  oldest(): number | null {
    let oldest: number | null = null;
    for (const seq of this.#held.values()) if (oldest === null || seq < oldest) oldest = seq;
    return oldest;
  }
}
