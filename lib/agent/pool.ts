/**
 * The pool: one directory on a local disk with a marker. A missing disk must never look like an empty pool,
 * so nothing here creates the pool's directory, and a marker is written only into a directory that is empty
 * (or that the operator said to adopt).
 */
import { randomUUID } from 'node:crypto';
import {
  closeSync,
  fsyncSync,
  mkdirSync,
  openSync,
  readdirSync,
  readFileSync,
  realpathSync,
  renameSync,
  statSync,
  writeSync,
} from 'node:fs';
import { rm, statfs, writeFile } from 'node:fs/promises';
import { dirname, join, relative } from 'node:path';
import { DatabaseSync } from 'node:sqlite';
import { SimpleVolumeError } from '../core/errors.ts';
import { checkName } from '../core/names.ts';
import type { PoolSpace, VolumeName, VolumePaths } from '../core/parts.ts';
import { POOL_FOLDERS } from '../core/pool-folders.ts';

export const MARKER = '.simple-volume-pool';
const FORMAT = 1;

export interface Marker {
  format: number;
  pool: string;
  id: string;
  node: string;
}

export interface PoolOptions {
  path: string;
  name: string;
  node: string;
  allowNonEmpty: boolean;
  expectId: string | null;
}

const refuse = (
  code: 'POOL_MISSING' | 'POOL_FOREIGN' | 'POOL_NOT_EMPTY',
  message: string,
  path: string,
): never => {
  throw new SimpleVolumeError(code, message, { path });
};

function readMarker(options: PoolOptions): Marker | null {
  const file = join(options.path, MARKER);
  let text: string;
  try {
    text = readFileSync(file, 'utf8');
  } catch (error) {
    if ((error as NodeJS.ErrnoException).code === 'ENOENT') return null;
    return refuse(
      'POOL_MISSING',
      `the marker ${file} cannot be read: ${(error as NodeJS.ErrnoException).code}`,
      file,
    );
  }
  let marker: Marker;
  try {
    marker = JSON.parse(text) as Marker;
  } catch {
    return refuse('POOL_FOREIGN', `the marker ${file} is not valid JSON; restore it or empty the pool`, file);
  }
  const { format, pool, id, node } = marker;
  if (typeof id !== 'string' || typeof pool !== 'string' || typeof node !== 'string')
    refuse('POOL_FOREIGN', `the marker ${file} lacks a field; expected format, pool, id and node`, file);
  if (format !== FORMAT)
    refuse(
      'POOL_FOREIGN',
      `the marker ${file} has format ${format}, this version reads format ${FORMAT}`,
      file,
    );
  if (pool !== options.name)
    refuse(
      'POOL_FOREIGN',
      `${options.path} belongs to pool "${pool}", not to "${options.name}" (--pool-name)`,
      file,
    );
  if (node !== options.node)
    refuse(
      'POOL_FOREIGN',
      `${options.path} belongs to node "${node}", not to "${options.node}" (--node)`,
      file,
    );
  if (options.expectId && id !== options.expectId)
    refuse(
      'POOL_FOREIGN',
      `${options.path} is pool ${id}, expected ${options.expectId} (--expect-pool-id)`,
      file,
    );
  return marker;
}

function syncFolder(path: string): void {
  const dir = openSync(path, 'r');
  try {
    fsyncSync(dir);
  } finally {
    closeSync(dir);
  }
}

function writeMarker(options: PoolOptions): Marker {
  const marker: Marker = { format: FORMAT, pool: options.name, id: randomUUID(), node: options.node };
  const tmp = join(options.path, `${MARKER}.tmp`);
  const fd = openSync(tmp, 'w', 0o600);
  try {
    writeSync(fd, `${JSON.stringify(marker, null, 2)}\n`);
    fsyncSync(fd);
  } finally {
    closeSync(fd);
  }
  renameSync(tmp, join(options.path, MARKER));
  syncFolder(options.path);
  return marker;
}

export class Pool {
  readonly path: string;
  readonly marker: Marker;
  readonly #options: PoolOptions;
  readonly #dev: number;
  readonly #ino: number;
  readonly #lock: DatabaseSync;

  private constructor(options: PoolOptions, marker: Marker, lock: DatabaseSync, dev: number, ino: number) {
    this.path = options.path;
    this.#options = options;
    this.marker = marker;
    this.#lock = lock;
    this.#dev = dev;
    this.#ino = ino;
  }

  /**
   * Opens the pool, marking it if it is new and empty.
   * @throws POOL_MISSING, POOL_FOREIGN, POOL_NOT_EMPTY, or HELD when another agent uses the pool.
   */
  static open(options: PoolOptions): Pool {
    let stat: import('node:fs').Stats;
    try {
      stat = statSync(options.path);
    } catch (error) {
      return refuse(
        'POOL_MISSING',
        `the pool ${options.path} is not there (${(error as NodeJS.ErrnoException).code}); mount its disk or create the directory, it is never created by itself`,
        options.path,
      );
    }
    if (!stat.isDirectory())
      refuse('POOL_MISSING', `the pool ${options.path} is not a directory`, options.path);
    let marker = readMarker(options);
    if (!marker) {
      if (options.expectId)
        refuse(
          'POOL_MISSING',
          `${options.path} has no marker ${MARKER} but pool ${options.expectId} is expected there: is its disk mounted?`,
          options.path,
        );
      const others = readdirSync(options.path).filter(
        (name) => name !== 'lost+found' && name !== `${MARKER}.tmp`,
      );
      if (others.length > 0 && !options.allowNonEmpty)
        refuse(
          'POOL_NOT_EMPTY',
          `${options.path} has no marker ${MARKER} and is not empty (${others.slice(0, 3).join(', ')}${others.length > 3 ? ', ...' : ''}); give an empty directory, or --allow-non-empty-pool to adopt it`,
          options.path,
        );
      marker = writeMarker(options);
    }
    for (const folder of Object.values(POOL_FOLDERS))
      mkdirSync(join(options.path, folder), { recursive: true, mode: 0o700 });
    const lock = new DatabaseSync(join(options.path, POOL_FOLDERS.state, 'lock.db'));
    try {
      // The lock is the kernel's (fcntl, through SQLite): it goes with the process, however that ends.
      lock.exec(
        'PRAGMA busy_timeout=0; PRAGMA locking_mode=EXCLUSIVE; PRAGMA journal_mode=DELETE; BEGIN EXCLUSIVE; CREATE TABLE IF NOT EXISTS held(pid INTEGER); COMMIT;',
      );
    } catch (error) {
      lock.close();
      throw new SimpleVolumeError(
        'HELD',
        `the pool ${options.path} is in use by another agent on this machine`,
        { path: options.path, cause: error },
      );
    }
    return new Pool(options, marker, lock, stat.dev, stat.ino);
  }

  /** Null while the pool is the directory that was opened and carries its marker; else the reason why not. */
  problem(): string | null {
    try {
      const stat = statSync(this.path);
      if (stat.dev !== this.#dev || stat.ino !== this.#ino)
        return `the pool ${this.path} is another directory or disk than at the start`;
      const marker = readMarker(this.#options);
      if (!marker) return `the pool ${this.path} has lost its marker ${MARKER}`;
      if (marker.id !== this.marker.id)
        return `the pool ${this.path} is now pool ${marker.id}, it was ${this.marker.id}`;
      return null;
    } catch (error) {
      return (error as Error).message;
    }
  }

  /** Whether something can be written (a full disk is no, a read-only remount is no). */
  async writable(): Promise<string | null> {
    const file = join(this.path, POOL_FOLDERS.state, 'probe');
    try {
      await writeFile(file, 'x', { flush: false });
      await rm(file);
      return null;
    } catch (error) {
      return `the pool ${this.path} cannot be written: ${(error as NodeJS.ErrnoException).code ?? error}`;
    }
  }

  /** null when the file system does not say. */
  async space(): Promise<PoolSpace | null> {
    try {
      const { bavail, blocks, bsize } = await statfs(this.path);
      return { freeBytes: bavail * bsize, totalBytes: blocks * bsize };
    } catch {
      return null;
    }
  }

  volume(name: VolumeName): VolumePaths {
    const namespace = checkName(name.namespace, 'namespace', 'label');
    const volume = checkName(name.volume, 'volume');
    const in_ = (folder: string): string => join(this.path, folder, namespace, volume);
    return {
      live: join(this.path, namespace, volume),
      shadow: in_(POOL_FOLDERS.shadows),
      incoming: in_(POOL_FOLDERS.incoming),
      backups: in_(POOL_FOLDERS.backups),
      state: join(this.path, POOL_FOLDERS.state, 'volumes', namespace, volume),
    };
  }

  /** Volumes that this pool has state of. */
  volumes(): VolumeName[] {
    const base = join(this.path, POOL_FOLDERS.state, 'volumes');
    const list = (dir: string): string[] => {
      try {
        return readdirSync(dir);
      } catch {
        return [];
      }
    };
    return list(base).flatMap((namespace) =>
      list(join(base, namespace)).map((volume) => ({ namespace, volume })),
    );
  }

  get trash(): string {
    return join(this.path, POOL_FOLDERS.trash);
  }

  /**
   * Takes folders of a volume (paths of `volume`) out of their places, durably and each at once; what is in the trash
   * has no name any more and is deleted in its own time.
   * @returns whether any of them was there
   * @throws HELD when a folder on the way is a link or a mount: what is behind it is none of this pool's; NOT_READY when the disk is away
   */
  discard(paths: readonly string[]): boolean {
    // On another disk than its own nothing would be found, which is not the same as gone.
    const problem = this.problem();
    if (problem !== null) throw new SimpleVolumeError('NOT_READY', problem);
    let any = false;
    const root = realpathSync(this.path);
    mkdirSync(this.trash, { recursive: true, mode: 0o700 });
    for (const path of paths) {
      try {
        const parent = dirname(path);
        if (realpathSync(parent) !== join(root, relative(this.path, parent)))
          throw new SimpleVolumeError(
            'HELD',
            `${parent} is no plain folder of the pool; nothing is removed`,
            {
              path: parent,
            },
          );
        renameSync(path, join(this.trash, randomUUID()));
        syncFolder(parent);
        any = true;
      } catch (error) {
        const { code } = error as NodeJS.ErrnoException;
        if (code === 'ENOENT') continue;
        if (code === 'EBUSY' || code === 'EXDEV')
          throw new SimpleVolumeError('HELD', `${path} is a mount; nothing is removed`, {
            path,
            cause: error,
          });
        throw error;
      }
    }
    if (any) syncFolder(this.trash);
    return any;
  }

  /** What is still to be deleted. */
  discarded(): string[] {
    return readdirSync(this.trash);
  }

  close(): void {
    this.#lock.close();
  }
}
