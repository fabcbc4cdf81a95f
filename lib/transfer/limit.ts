import { SimpleVolumeError } from '../core/errors.ts';

/** At most `limit` at once; the others wait in order and can give up. */
export class Limit {
  #free: number;
  readonly #waiting: (() => void)[] = [];
  constructor(limit: number) {
    this.#free = limit;
  }
  async run<T>(signal: AbortSignal, work: () => Promise<T>): Promise<T> {
    if (signal.aborted) throw new SimpleVolumeError('CANCELLED', 'cancelled before it began');
    if (this.#free > 0) this.#free--;
    else await this.#turn(signal);
    try {
      return await work();
    } finally {
      const next = this.#waiting.shift();
      if (next) next();
      else this.#free++;
    }
  }
  #turn(signal: AbortSignal): Promise<void> {
    return new Promise((resolve, reject) => {
      const go = (): void => {
        signal.removeEventListener('abort', stop);
        resolve();
      };
      const stop = (): void => {
        this.#waiting.splice(this.#waiting.indexOf(go), 1);
        reject(new SimpleVolumeError('CANCELLED', 'cancelled while waiting for its turn'));
      };
      signal.addEventListener('abort', stop, { once: true });
      this.#waiting.push(go);
    });
  }
}
