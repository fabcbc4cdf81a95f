import { mkdir, open, rm } from 'node:fs/promises';
import { join } from 'node:path';

/** PATH_MAX of Linux with its NUL (linux/limits.h): no call takes a longer path. */
const PATH_MAX = 4096;

/** Names that some file system refuses: long, not UTF-8, characters of FAT, exFAT and NTFS, trailing dot or blank. */
const AWKWARD: Buffer[] = [
  Buffer.alloc(255, 0x61),
  Buffer.from([0x62, 0xff, 0xfe]),
  Buffer.from('c:*?"<>|\\'),
  Buffer.from('d.'),
  Buffer.from('e '),
  Buffer.from([0x66, 0x01, 0x0a]),
];

/** errno name when the directory's file system refuses the name, null when it takes it. */
export async function tryName(directory: string, name: Buffer): Promise<string | null> {
  const path = Buffer.concat([Buffer.from(`${directory}/`), name]);
  try {
    await (await open(path, 'w', 0o600)).close();
    await rm(path, { force: true });
    return null;
  } catch (error) {
    const code = (error as NodeJS.ErrnoException).code ?? 'EIO';
    if (['ENAMETOOLONG', 'EINVAL', 'EILSEQ', 'EPERM'].includes(code)) return code;
    throw error;
  }
}

/**
 * Finds out before anything is changed whether a path can exist here. A file system that takes the awkward names
 * takes all; on another each new name is tried in a folder beside the pulled files.
 */
export class NameCheck {
  readonly #directory: string;
  readonly #try: (directory: string, name: Buffer) => Promise<string | null>;
  #takesAll: boolean | null = null;

  constructor(incoming: string, attempt: typeof tryName = tryName) {
    this.#directory = join(incoming, 'names');
    this.#try = attempt;
  }

  async refuses(path: Buffer): Promise<string | null> {
    if (path.length >= PATH_MAX) return 'ENAMETOOLONG';
    if (this.#takesAll === null) {
      await mkdir(this.#directory, { recursive: true, mode: 0o700 });
      this.#takesAll = true;
      for (const name of AWKWARD) if (await this.#try(this.#directory, name)) this.#takesAll = false;
    }
    if (this.#takesAll) return null;
    await mkdir(this.#directory, { recursive: true, mode: 0o700 });
    return this.#try(this.#directory, path.subarray(path.lastIndexOf(0x2f) + 1));
  }
}
