import { type FileHandle, open, rm } from 'node:fs/promises';

const SECTION = 256 * 1024;

/**
 * A list of length-prefixed entries (u32 length of the whole entry first, as ops and records have it) that may
 * be longer than memory: a short one stays in memory, a longer one goes to a file in sections.
 */
export class Spool {
  readonly #path: string;
  #file: FileHandle | null = null;
  #sections: { at: number; bytes: number }[] = [];
  #parts: Buffer[] = [];
  #held = 0;
  #bytes = 0;
  count = 0;

  /** @param path where the file would be; it is made only when it is needed */
  constructor(path: string) {
    this.#path = path;
  }

  get bytes(): number {
    return this.#bytes + this.#held;
  }

  async add(entry: Buffer): Promise<void> {
    // a copy: entries are often views into a batch that would be kept alive by them
    this.#parts.push(Buffer.from(entry));
    this.#held += entry.length;
    this.count++;
    if (this.#held >= SECTION) await this.#flush();
  }

  async #flush(): Promise<void> {
    this.#file ??= await open(this.#path, 'w+', 0o600);
    const all = Buffer.concat(this.#parts);
    await writeAll(this.#file, all, this.#bytes);
    this.#sections.push({ at: this.#bytes, bytes: all.length });
    this.#bytes += all.length;
    this.#parts = [];
    this.#held = 0;
  }

  async #section(s: { at: number; bytes: number }): Promise<Buffer> {
    const all = Buffer.allocUnsafe(s.bytes);
    await readAll(this.#file as FileHandle, all, s.at);
    return all;
  }

  /** Pieces that are whole entries, in the order in which they were added. */
  async *pieces(): AsyncGenerator<Buffer> {
    for (const s of this.#sections) yield await this.#section(s);
    if (this.#held > 0) yield Buffer.concat(this.#parts);
  }

  async *entries(): AsyncGenerator<Buffer> {
    for await (const piece of this.pieces()) yield* entriesIn(piece);
  }

  /** The last entry first, in pieces. */
  async *reversedPieces(): AsyncGenerator<Buffer> {
    if (this.#held > 0) yield Buffer.concat(this.#parts.toReversed());
    for (const s of this.#sections.toReversed())
      yield Buffer.concat([...entriesIn(await this.#section(s))].reverse());
  }

  async remove(): Promise<void> {
    await this.#file?.close();
    if (this.#file) await rm(this.#path, { force: true });
    this.#file = null;
    this.#sections = [];
    this.#parts = [];
    this.#held = 0;
  }
}

export function* entriesIn(piece: Buffer): Generator<Buffer> {
  for (let at = 0; at < piece.length; ) {
    const n = piece.readUInt32LE(at);
    if (n < 4 || at + n > piece.length) throw new RangeError('list is cut short');
    yield piece.subarray(at, at + n);
    at += n;
  }
}

/** The length-prefixed entries of a file, one after the other. */
export async function* entriesOfFile(path: string): AsyncGenerator<Buffer> {
  const file = await open(path, 'r');
  try {
    const { size } = await file.stat();
    let want = SECTION;
    for (let pos = 0; pos < size; ) {
      const buffer = Buffer.allocUnsafe(Math.min(want, size - pos));
      await readAll(file, buffer, pos);
      let at = 0;
      while (at + 4 <= buffer.length) {
        const n = buffer.readUInt32LE(at);
        if (n < 4 || pos + at + n > size) throw new RangeError('list is cut short');
        if (at + n > buffer.length) break;
        yield buffer.subarray(at, at + n);
        at += n;
      }
      if (at === 0) {
        if (buffer.length < 4) throw new RangeError('list is cut short');
        want = Math.max(want, buffer.readUInt32LE(0));
      } else want = SECTION;
      pos += at;
    }
  } finally {
    await file.close();
  }
}

export async function writeAll(file: FileHandle, data: Buffer, at: number): Promise<void> {
  for (let done = 0; done < data.length; ) {
    const { bytesWritten } = await file.write(data, done, data.length - done, at + done);
    done += bytesWritten;
  }
}

async function readAll(file: FileHandle, into: Buffer, at: number): Promise<void> {
  for (let done = 0; done < into.length; ) {
    const { bytesRead } = await file.read(into, done, into.length - done, at + done);
    if (bytesRead === 0) throw new RangeError('list is cut short');
    done += bytesRead;
  }
}
