/** What people see of a volume: the newest sealed generation, told from its index alone. */
import { constants, type FileHandle, open, readdir } from 'node:fs/promises';
import { SimpleVolumeError } from '../core/errors.ts';
import { sameGeneration } from '../core/generation.ts';
import {
  type Clock,
  type ServedGeneration,
  type ServedVolume,
  type VolumeName,
  volumeKey,
} from '../core/parts.ts';
import { Kind, kindOf, pathOf, printablePath } from '../core/record.ts';
import type { IndexReader, Row } from '../core/store.ts';
import type { Reading } from './offers.ts';

const SLASH = Buffer.from('/');
/** Above every name in a directory's subtree: a name has at most 255 bytes. */
const AFTER_ALL = Buffer.alloc(256, 0xff);

/**
 * Direct children of a directory, in path order. What lies deeper is skipped, not read: one query per
 * sub-directory that has contents.
 */
export function* childrenOf(index: IndexReader, directory: Buffer, limit = 256): Generator<Row> {
  const prefix = directory.length === 0 ? 0 : directory.length + 1;
  let after: Buffer | null = directory;
  for (;;) {
    const rows: Row[] = index.page(after, limit, directory);
    let deep: Buffer | null = null;
    for (const row of rows) {
      const p = pathOf(row.record);
      if (p.length <= prefix) continue;
      const slash = p.indexOf(0x2f, prefix);
      deep = slash < 0 ? null : p.subarray(0, slash);
      if (!deep) yield row;
    }
    if (rows.length < limit) return;
    after = deep ? Buffer.concat([deep, SLASH, AFTER_ALL]) : pathOf((rows.at(-1) as Row).record);
  }
}

/**
 * Opens a file below a tree for reading, name by name, so that no symbolic link is followed whatever somebody
 * does to the tree meanwhile. (Node has no openat2; /proc/self/fd/N stands for the directory that is open.)
 */
async function openBelow(tree: Buffer, path: Buffer): Promise<FileHandle> {
  const { O_RDONLY, O_DIRECTORY, O_NOFOLLOW, O_NONBLOCK } = constants;
  let directory = await open(tree, O_RDONLY | O_DIRECTORY);
  try {
    for (let at = 0; ; ) {
      const slash = path.indexOf(0x2f, at);
      const name = path.subarray(at, slash < 0 ? path.length : slash);
      const full = Buffer.concat([Buffer.from(`/proc/self/fd/${directory.fd}/`), name]);
      if (slash < 0) return await open(full, O_RDONLY | O_NOFOLLOW | O_NONBLOCK);
      const next = await open(full, O_RDONLY | O_DIRECTORY | O_NOFOLLOW);
      await directory.close();
      directory = next;
      at = slash + 1;
    }
  } finally {
    await directory.close();
  }
}

/**
 * A pinned file of the agent's own copy is known by its inode (its contents stay, its times may change with a
 * newer generation). A file of the live tree must be exactly the one that was hashed.
 */
async function isTheFile(file: FileHandle, row: Row, strict: boolean): Promise<boolean> {
  const s = await file.stat({ bigint: true });
  const r = row.record;
  return (
    s.isFile() &&
    s.size === r.readBigUInt64LE(16) &&
    (strict || row.copyIno === 0n ? s.mtimeNs === r.readBigInt64LE(24) : s.ino === row.copyIno) &&
    (!strict || (s.ino === r.readBigUInt64LE(32) && s.ctimeNs === r.readBigInt64LE(40)))
  );
}

async function tryOpen(tree: Buffer, row: Row, strict: boolean): Promise<FileHandle | null> {
  let file: FileHandle;
  try {
    file = await openBelow(tree, pathOf(row.record));
  } catch (error) {
    const { code } = error as NodeJS.ErrnoException;
    if (code === 'ENOENT' || code === 'ENOTDIR' || code === 'ELOOP' || code === 'ENXIO') return null;
    throw error;
  }
  if (await isTheFile(file, row, strict)) return file;
  await file.close();
  return null;
}

/**
 * The content of a file of the generation: from the tree, or from where a newer generation has put it.
 * @throws CONTENT_CHANGED when neither is the file that the index describes (only in live consistency)
 */
export async function openContent(served: ServedGeneration, row: Row): Promise<Reading> {
  const { strict } = served;
  let file = await tryOpen(served.root, row, strict);
  if (!file && served.retired) {
    const names = await readdir(served.retired).catch(() => [] as string[]);
    const numbers = names.filter((n) => /^\d+$/.test(n)).map(Number);
    // the folder of the generation that replaced the file: one of the newer ones
    const newer = numbers.filter((n) => n >= served.generation.seq).sort((a, b) => a - b);
    for (const n of newer) {
      file = await tryOpen(Buffer.concat([served.retired, Buffer.from(`/${n}`)]), row, strict);
      if (file) break;
    }
    // replaced between the first look and now
    file ??= await tryOpen(served.root, row, strict);
  }
  if (!file) throw changed(row);
  const handle = file;
  return {
    read: async (offset, max) => {
      const b = Buffer.allocUnsafeSlow(max);
      const { bytesRead } = await handle.read(b, 0, max, offset);
      if (!(await isTheFile(handle, row, strict))) throw changed(row);
      return bytesRead === 0 ? null : b.subarray(0, bytesRead);
    },
    close: () => handle.close(),
  };
}

const changed = (row: Row): SimpleVolumeError =>
  new SimpleVolumeError(
    'CONTENT_CHANGED',
    `the file has changed since the generation was sealed: ${printablePath(pathOf(row.record))}`,
    { path: printablePath(pathOf(row.record)) },
  );

export const isDirectory = (row: Row): boolean => kindOf(row.record) === Kind.directory;

/** A generation in use. Release exactly once. */
export interface View {
  served: ServedGeneration;
  /** ends what is being sent when the volume stops */
  onStop(abort: () => void): void;
  release(): void;
}

interface Shared {
  volume: ServedVolume;
  served: ServedGeneration;
  users: Set<{ abort: (() => void) | null }>;
  stale: boolean;
  linger: { cancel(): void } | null;
  empty: (() => void) | null;
}

/** Shares an open generation between the requests of the next moments: a WebDAV client makes many. */
export class Views {
  readonly #clock: Clock;
  readonly #lingerMs: number;
  readonly #open = new Map<string, Promise<Shared>>();
  readonly #all = new Set<Shared>();

  constructor(clock: Clock, lingerMs = 2000) {
    this.#clock = clock;
    this.#lingerMs = lingerMs;
  }

  async acquire(volume: ServedVolume): Promise<View> {
    const key = volumeKey(volume);
    for (;;) {
      let opening = this.#open.get(key);
      const fresh = !opening;
      if (!opening) {
        opening = volume.open().then((served) => {
          const shared: Shared = {
            volume,
            served,
            users: new Set(),
            stale: false,
            linger: null,
            empty: null,
          };
          this.#all.add(shared);
          return shared;
        });
        this.#open.set(key, opening);
        opening.catch(() => this.#forget(key, opening as Promise<Shared>));
      }
      const shared = await opening;
      const current = fresh || sameGeneration(volume.generation(), shared.served.generation);
      if (current && shared.volume === volume && !shared.stale) return this.#use(key, opening, shared);
      // the volume has moved on: the last user gives this generation back
      shared.stale = true;
      this.#forget(key, opening);
      if (shared.users.size === 0) this.#end(shared);
    }
  }

  #forget(key: string, opening: Promise<Shared>): void {
    if (this.#open.get(key) === opening) this.#open.delete(key);
  }

  #use(key: string, opening: Promise<Shared>, shared: Shared): View {
    shared.linger?.cancel();
    shared.linger = null;
    const user: { abort: (() => void) | null } = { abort: null };
    shared.users.add(user);
    return {
      served: shared.served,
      onStop: (abort) => {
        user.abort = abort;
        if (shared.stale && shared.empty) abort();
      },
      release: () => {
        if (!shared.users.delete(user) || shared.users.size > 0) return;
        if (shared.stale) this.#end(shared);
        else
          shared.linger = this.#clock.setTimeout(() => {
            if (shared.users.size > 0) return;
            this.#forget(key, opening);
            this.#end(shared);
          }, this.#lingerMs);
      },
    };
  }

  #end(shared: Shared): void {
    shared.linger?.cancel();
    if (this.#all.delete(shared)) shared.served.release();
    shared.empty?.();
  }

  /** Gives a volume's generations back; what is being sent ends. */
  async dropVolume(name: VolumeName): Promise<void> {
    const key = volumeKey(name);
    await this.#open.get(key)?.catch(() => undefined);
    this.#open.delete(key);
    await Promise.all(
      [...this.#all]
        .filter((s) => volumeKey(s.volume) === key)
        .map(async (s) => {
          s.stale = true;
          if (s.users.size === 0) return this.#end(s);
          await new Promise<void>((resolve) => {
            s.empty = resolve;
            for (const u of [...s.users]) u.abort?.();
          });
        }),
    );
  }

  async close(): Promise<void> {
    await Promise.all([...this.#all].map((s) => this.dropVolume(s.volume)));
  }
}
