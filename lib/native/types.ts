/**
 * The addon's interface. Everything that touches a disk runs on the addon's own threads and settles a
 * Promise on the JavaScript thread. A rejected Promise carries `code` (an errno name such as `ENOSPC` or one
 * of the codes below), `errno`, `syscall` and `path` (Buffer). Formats of the buffers: docs/formats.md.
 */

/** Bytes of a name or a path relative to a volume's root; never a string. */
export type Bytes = Buffer;

export interface NativeError extends Error {
  /** errno name, or PATTERN_INVALID, FORMAT_INVALID, CONTENT_CHANGED, ROOT_LOST, CLOSED, CANCELLED, OPS_INVALID */
  code: string;
  errno?: number;
  syscall?: string;
  path?: Buffer;
}

/** The one implementation of include and exclude patterns. Immutable; shared by watch, scan and TypeScript. */
export interface Filter {
  /**
   * 0: not part of the volume's state and nothing below it is; 1: part of the state;
   * 2: a directory that is only on the way to something that may be included (kept as a directory).
   */
  match(path: Bytes, isDirectory: boolean): 0 | 1 | 2;
}

export interface WatchState {
  /** Names and directories now marked. */
  dirty: number;
  /** CLOCK_MONOTONIC milliseconds of the oldest and the newest mark, null when nothing is dirty. */
  firstMs: number | null;
  lastMs: number | null;
  /** Events of this volume seen so far (content, attribute or entry events; never decreases). */
  events: number;
  /** The root was deleted, moved or unmounted. */
  rootLost: boolean;
  /** Kernel queue overflows so far (each marks the whole volume for a rescan). */
  overflows: number;
  watches: number;
  /** Directories without a watch (ENOSPC, EACCES), to be rescanned from time to time. */
  unwatched: number;
  /** errno of the last failed inotify_add_watch, 0 if none. ENOSPC: fs.inotify.max_user_watches. */
  watchErrno: number;
  /** Directories that a new directory's own scanner has still to watch. */
  pendingDirs: number;
}

/** One inotify instance for all volumes of the agent. Throws EMFILE when there is none left. */
export interface Watcher {
  /**
   * Watches every directory that the filter can reach below `root` (absolute path). Resolves when all watches
   * are in place; existing content makes no marks: scan after this resolves and nothing is missed.
   */
  add(
    volume: number,
    root: Bytes,
    filter: Filter,
  ): Promise<{ directories: number; dev: number; ino: number }>;
  remove(volume: number): Promise<void>;
  state(volume: number): WatchState;
  /** Takes and clears the marks of a volume (format: watcher marks). Empty buffer: none. */
  take(volume: number): Buffer;
  /** Gives marks back that could not be dealt with; they are dirty again as of now. */
  putBack(volume: number, marks: Buffer): void;
  /** Resolves when every event that the kernel had queued at the time of the call is folded in. */
  barrier(): Promise<void>;
  /** Retries watches that failed (after ENOSPC). */
  retry(): Promise<void>;
  close(): Promise<void>;
}

export interface Scanner {
  /** Next records in path order, about maxBytes of them; null at the end. Kinds 4 and 5 are reported too. */
  next(maxBytes: number): Promise<Buffer | null>;
  close(): void;
}

export interface StageOptions {
  /** Absolute path of the tree that is read. */
  root: Bytes;
  /** Absolute path of the slots folder; ignored with hashOnly. */
  slots: Bytes;
  /** Absolute path of the tree that holds the base versions (the shadow's data), or null. */
  base: Bytes | null;
  /** Only hash and describe; copy nothing (`live` consistency, verification, comparison with a manifest). */
  hashOnly: boolean;
  /** How often a file that changes while it is read is tried again (default 3). */
  retries?: number;
}

export interface ApplyOptions {
  root: Bytes;
  slots: Bytes;
  /** Folder for old versions that are kept, or null. */
  retired: Bytes | null;
  /** Absolute path of the ops file. */
  ops: Bytes;
  /** Absolute path of the out file (phase 2), or null. */
  out: Bytes | null;
  phase: 1 | 2;
}

export interface UnpackOptions {
  slots: Bytes;
  /** Absolute path of the replica's tree (for patches), or null. */
  base: Bytes | null;
  /** unpack items */
  items: Buffer;
}

/** Checks and writes one pack while it arrives. Nothing but slots is written. */
export interface Unpacker {
  /** Resolves when the bytes are taken (that is the back-pressure). FORMAT_INVALID on any surprise. */
  write(chunk: Buffer): Promise<void>;
  /** After the last byte: verifies sizes and hashes, gives unpack results. FORMAT_INVALID when cut short. */
  end(): Promise<Buffer>;
  abort(): Promise<void>;
}

export interface PackOptions {
  /** Absolute path of the tree that holds the newest versions (current/data, or the live tree). */
  root: Bytes;
  /** Absolute path of the folder whose sub-folders are named by decimal seq and hold replaced files, or null. */
  retired: Bytes | null;
  /** Seq of the generation that is served: retired folders with this number or a higher one are looked at first, lowest first. */
  seq: number;
  /** pack items */
  items: Buffer;
  /** Also require the ctime of the record (live consistency). */
  strict?: boolean;
}

export interface PackReader {
  /** Finds the holes and adds up: length of the whole pack stream in bytes. CONTENT_CHANGED when a file is not the one described. */
  plan(): Promise<number>;
  /** At most `max` bytes of the stream from `offset` (any offset; sequential is fast); null at the end. */
  read(offset: number, max: number): Promise<Buffer | null>;
  close(): void;
}

export interface Native {
  version(): string;
  /** Throws PATTERN_INVALID with `pattern` and `reason`. No include = everything. Exclude beats include. */
  compileFilter(include: Bytes[], exclude: Bytes[]): Filter;
  /** `onWake` is called (on the JS thread, coalesced) when a clean volume became dirty or lost its root. */
  createWatcher(onWake: () => void, options?: { maxQueuedEvents?: number; maxWatches?: number }): Watcher;
  /** Records (no hash, no xattrs) of what is below `directory` ('' = root). deep=false: the directory itself and its direct children. */
  scan(root: Bytes, directory: Bytes, filter: Filter, deep: boolean): Scanner;
  /** One record per path of the list, same order, kind 0 where nothing is; with xattrs and link text. */
  stat(root: Bytes, paths: Buffer): Promise<Buffer>;
  stage(options: StageOptions, items: Buffer): Promise<Buffer>;
  apply(options: ApplyOptions): Promise<{
    operations: number;
    bytesWritten: number;
    /** directories left because of preserved contents */
    notEmpty: number;
    /** entries whose attributes or setgid bit the system would not take */
    xattrsFailed: number;
  }>;
  createUnpacker(options: UnpackOptions): Unpacker;
  createPackReader(options: PackOptions): PackReader;
  /** BLAKE3 (32 bytes) of a file, streamed. */
  hashFile(path: Bytes): Promise<Buffer>;
  /** BLAKE3 (32 bytes) of a buffer, on the calling thread: for small buffers. */
  hashBytes(data: Uint8Array): Buffer;
  /** syncfs of the file system that holds `path`. */
  syncFs(path: Bytes): Promise<void>;
  /** fdatasync of one file (or fsync of a directory). A missing file is no error. */
  syncFile(path: Bytes): Promise<void>;
  /** Removes what is at `path` below `root`, with all below it; follows nothing; ENOENT is no error. Counts entries. */
  removeTree(root: Bytes, path: Bytes): Promise<number>;
  /** What the file system of `directory` can do. */
  probe(directory: Bytes): Promise<{ type: string; reflink: boolean; xattrs: boolean; dev: number }>;
  /**
   * Makes a directory (its parent exists) that its file system can count by itself, where it can: a btrfs subvolume, or a
   * project on XFS and ext4; else a plain one. One that is there stays as it is. @returns whether it was made now
   */
  makeTree(path: Bytes, mode: number): Promise<boolean>;
  /** What is made below `directory` from now on counts as part of `tree`, where renames between them need that (XFS, ext4). */
  joinTree(directory: Bytes, tree: Bytes): Promise<void>;
  /**
   * Limits a tree of `makeTree` to `bytes`; 0: no limit. Needs CAP_SYS_ADMIN. Whatever hinders it is the `reason`.
   * @param others trees on the same disk: one of the same project must not be limited along
   * @returns used: what counts, bytes, while it is enforced
   */
  limitTree(
    tree: Bytes,
    bytes: number,
    others: readonly Bytes[],
  ): Promise<{ enforced: boolean; reason: string; used: number }>;
  /** Mounts `source` (a directory) on `target` too. For csi-node; paths are absolute and resolved as mount(2) does. */
  bindMount(source: Bytes, target: Bytes): Promise<void>;
  /**
   * Gives a bind mount these options and no others: ro, nosuid, nodev, noexec, noatime, nodiratime, relatime,
   * strictatime, nosymfollow. @throws EINVAL for any other
   */
  remountBind(target: Bytes, options: readonly string[]): Promise<void>;
  /** Covers a directory with an empty read-only tmpfs; `name` is what the mount table shows as its source. */
  coverMount(name: Bytes, target: Bytes): Promise<void>;
  /** Takes the mount on top away, never lazily. @throws EBUSY in use, EINVAL nothing is mounted there */
  unmount(target: Bytes): Promise<void>;
  /** CLOCK_BOOTTIME in milliseconds: goes on while suspended, one line for the whole boot. */
  bootMs(): number;
  /** Gives pages that the allocator holds and nobody uses back to the system. */
  trimMemory(): Promise<void>;
}
