/**
 * The manifest: an index, or the difference of two, as it travels (docs/formats.md, "Manifest"). The writer
 * streams; the reader streams too and believes nothing: a manifest comes from another machine and decides
 * which names are made in the replica's tree.
 */
import { type FileHandle, open } from 'node:fs/promises';
import { SimpleVolumeError } from './errors.ts';
import {
  formatGeneration,
  type Generation,
  isAncestor,
  type Lineage,
  parseGeneration,
} from './generation.ts';
import {
  CHUNK,
  CHUNK_HASH,
  ctimeNsOf,
  Flag,
  flagsOf,
  HEAD,
  inoOf,
  Kind,
  kindOf,
  LARGE,
  linkGroupOf,
  pathOf,
  printablePath,
  seqOf,
  sizeOf,
  targetOf,
  xattrsOf,
} from './record.ts';

const MAGIC = Buffer.from('SVMF');
const VERSION = 1;
const FIXED = 12;
export const TRAILER = 32;

/** Limits of what a reader accepts. */
export const LIMITS = {
  header: 1024 * 1024,
  path: 4096,
  component: 255,
  symlink: 4095,
  xattrs: 64 * 1024,
  size: 2 ** 53,
  /** Bytes of one record. 16 bytes per 64 KiB chunk: a file of 1 TiB. Bounds the reader's memory. */
  record: 256 * 1024 * 1024 + 128 * 1024,
  /** Entries; an ordinal keeps its highest bit free. */
  count: 2 ** 31 - 1,
  lineage: 10_000,
} as const;

export interface ManifestHeader {
  namespace: string;
  volume: string;
  generation: Generation;
  /** null: all entries; else only what changed since */
  base: Generation | null;
  lineage: Lineage;
  quiescent: boolean;
  count: number;
  /** sum of the sizes of the file entries */
  bytes: number;
}

/** BLAKE3 of a whole file (the addon's hashFile). */
export type HashFile = (path: Buffer) => Promise<Buffer>;

const invalid = (what: string, path?: Buffer): SimpleVolumeError =>
  new SimpleVolumeError(
    'MANIFEST_INVALID',
    `manifest refused: ${what}${path ? ` (${printablePath(path)})` : ''}`,
    path ? { path: printablePath(path) } : {},
  );

const headerJson = (h: ManifestHeader): string =>
  JSON.stringify({
    namespace: h.namespace,
    volume: h.volume,
    generation: formatGeneration(h.generation),
    base: h.base && formatGeneration(h.base),
    lineage: h.lineage,
    quiescent: h.quiescent,
    count: h.count,
    bytes: h.bytes,
  });

/** Writes a manifest file piece by piece; count and bytes of the header are filled in at the end. */
export class ManifestWriter {
  readonly #file: FileHandle;
  readonly #path: Buffer;
  readonly #header: ManifestHeader;
  readonly #headerRoom: number;
  #parts: Buffer[] = [];
  #held = 0;
  #offset: number;

  private constructor(file: FileHandle, path: Buffer, header: ManifestHeader, room: number) {
    this.#file = file;
    this.#path = path;
    this.#header = header;
    this.#headerRoom = room;
    this.#offset = FIXED + room;
  }

  /** @param file absolute path; must not exist */
  static async create(
    file: Buffer,
    header: Omit<ManifestHeader, 'count' | 'bytes'>,
  ): Promise<ManifestWriter> {
    const full = { ...header, count: 0, bytes: 0 };
    // 40 blanks: room for the digits of the two numbers that are known only at the end
    const room = Buffer.byteLength(headerJson(full)) + 40;
    return new ManifestWriter(await open(file, 'wx', 0o600), file, full, room);
  }

  /** Adds a record and gives its offset in the file. The caller keeps the order of paths. */
  async add(record: Buffer): Promise<number> {
    const at = this.#offset;
    this.#parts.push(record);
    this.#held += record.length;
    this.#offset += record.length;
    this.#header.count++;
    if (kindOf(record) === Kind.file) this.#header.bytes += sizeOf(record);
    if (this.#held >= 256 * 1024) await this.#flush();
    return at;
  }

  get count(): number {
    return this.#header.count;
  }

  async #flush(): Promise<void> {
    if (this.#held === 0) return;
    const all = Buffer.concat(this.#parts, this.#held);
    const at = this.#offset - this.#held;
    this.#parts = [];
    this.#held = 0;
    await writeAll(this.#file, all, at);
  }

  /** Writes the rest and the trailer; closes the file. Bytes of the whole file, and its trailer. */
  async finish(hashFile: HashFile): Promise<{ bytes: number; hash: Buffer }> {
    try {
      await this.#flush();
      const head = Buffer.alloc(FIXED + this.#headerRoom, ' ');
      MAGIC.copy(head);
      head.writeUInt16LE(VERSION, 4);
      head.writeUInt16LE(0, 6);
      head.writeUInt32LE(this.#headerRoom, 8);
      head.write(headerJson(this.#header), FIXED, 'utf8');
      await writeAll(this.#file, head, 0);
      const hash = await hashFile(this.#path);
      await writeAll(this.#file, hash, this.#offset);
      return { bytes: this.#offset + TRAILER, hash };
    } finally {
      await this.#file.close();
    }
  }

  async abort(): Promise<void> {
    await this.#file.close();
  }
}

async function writeAll(file: FileHandle, data: Buffer, at: number): Promise<void> {
  for (let done = 0; done < data.length; ) {
    const { bytesWritten } = await file.write(data, done, data.length - done, at + done);
    done += bytesWritten;
  }
}

async function readAll(file: FileHandle, at: number, length: number): Promise<Buffer> {
  const out = Buffer.allocUnsafeSlow(length);
  for (let done = 0; done < length; ) {
    const { bytesRead } = await file.read(out, done, length - done, at + done);
    if (bytesRead === 0) throw invalid('cut short');
    done += bytesRead;
  }
  return out;
}

const isCount = (v: unknown, max: number = Number.MAX_SAFE_INTEGER): v is number =>
  typeof v === 'number' && Number.isSafeInteger(v) && v >= 0 && v <= max;

function parseHeader(text: string): ManifestHeader {
  let raw: Record<string, unknown>;
  try {
    raw = JSON.parse(text) as Record<string, unknown>;
  } catch {
    throw invalid('the header is not JSON');
  }
  if (raw === null || typeof raw !== 'object' || Array.isArray(raw))
    throw invalid('the header is not an object');
  const { namespace, volume, generation, base, lineage, quiescent, count, bytes } = raw;
  const generationOf = (v: unknown, field: string): Generation => {
    try {
      return parseGeneration(String(v), field);
    } catch {
      throw invalid(`header.${field} is not <epoch>-<seq>`);
    }
  };
  if (typeof namespace !== 'string' || typeof volume !== 'string')
    throw invalid('header.namespace and header.volume must be text');
  if (typeof quiescent !== 'boolean') throw invalid('header.quiescent must be true or false');
  if (!isCount(count, LIMITS.count)) throw invalid(`header.count must be 0 to ${LIMITS.count}`);
  if (!isCount(bytes)) throw invalid('header.bytes must be a whole number');
  if (!Array.isArray(lineage) || lineage.length === 0 || lineage.length > LIMITS.lineage)
    throw invalid(`header.lineage must have 1 to ${LIMITS.lineage} entries`);
  const line: Lineage = [];
  for (const pair of lineage as unknown[]) {
    if (!Array.isArray(pair) || pair.length !== 2 || !isCount(pair[0]) || !isCount(pair[1]))
      throw invalid('header.lineage must be pairs of numbers');
    const last = line.at(-1);
    if (last && (pair[0] <= last[0] || pair[1] < last[1])) throw invalid('header.lineage must ascend');
    line.push([pair[0], pair[1]]);
  }
  const g = generationOf(generation, 'generation');
  const b = base === null ? null : generationOf(base, 'base');
  if (!isAncestor(g, line, g)) throw invalid('header.lineage does not hold the generation');
  if (b && (b.seq > g.seq || !isAncestor(b, line, g)))
    throw invalid('header.base is not an ancestor of the generation');
  return { namespace, volume, generation: g, base: b, lineage: line, quiescent, count, bytes };
}

/** Checks paths as they may appear in a manifest; gives what is wrong, or null. */
function faultOfPath(path: Buffer): string | null {
  if (path.length > LIMITS.path) return `path longer than ${LIMITS.path} bytes`;
  for (let start = 0; start <= path.length; ) {
    let end = path.indexOf(0x2f, start);
    if (end < 0) end = path.length;
    const n = end - start;
    if (n === 0) return start === 0 && path.length > 0 ? 'absolute path' : 'empty path component';
    if (n > LIMITS.component) return `path component longer than ${LIMITS.component} bytes`;
    if (path[start] === 0x2e && (n === 1 || (n === 2 && path[start + 1] === 0x2e)))
      return n === 1 ? "path component '.'" : "path component '..'";
    start = end + 1;
  }
  return path.includes(0) ? 'path with a NUL byte' : null;
}

const XATTR_ALLOWED = /^(?:user\.[^\0]+|system\.posix_acl_(?:access|default))$/s;

function faultOfXattrs(x: Buffer): string | null {
  let previous: Buffer | null = null;
  for (let at = 0; at < x.length; ) {
    if (at + 6 > x.length) return 'xattrs cut short';
    const nameLen = x.readUInt16LE(at);
    const valueLen = x.readUInt32LE(at + 2);
    const name = x.subarray(at + 6, at + 6 + nameLen);
    if (nameLen === 0 || nameLen > 255 || at + 6 + nameLen + valueLen > x.length) return 'xattrs cut short';
    if (!XATTR_ALLOWED.test(name.toString('latin1'))) return 'xattr of a namespace that is not carried';
    if (previous && previous.compare(name) >= 0) return 'xattrs out of order';
    previous = name;
    at += 6 + nameLen + valueLen;
  }
  return null;
}

interface Open {
  path: Buffer;
  directory: boolean;
}

/**
 * Checks one record after the other. Keeps only the entries that the next one may lie under: in path order
 * all of them are beginnings of it, so there are never more than a path has bytes.
 */
class Checker {
  readonly #header: ManifestHeader;
  readonly #open: Open[] = [];
  #previous: Buffer | null = null;
  #count = 0;
  #bytes = 0;

  constructor(header: ManifestHeader) {
    this.#header = header;
  }

  check(r: Buffer): void {
    const pathLen = r.readUInt32LE(96);
    const targetLen = r.readUInt32LE(100);
    const xattrsLen = r.readUInt32LE(104);
    const chunksLen = r.readUInt32LE(108);
    if (HEAD + pathLen + targetLen + xattrsLen + chunksLen !== r.length)
      throw invalid('record lengths do not add up');
    const path = pathOf(r);
    const kind = kindOf(r);
    const isRoot = path.length === 0;
    const fault = isRoot ? null : faultOfPath(path);
    if (fault) throw invalid(fault, path.subarray(0, LIMITS.path));
    if (this.#previous && this.#previous.compare(path) >= 0)
      throw invalid(this.#previous.equals(path) ? 'path twice' : 'paths out of order', path);
    this.#checkKind(r, kind, path);
    this.#checkPlace(path, kind);
    this.#previous = path;
    if (++this.#count > this.#header.count) throw invalid('more entries than the header says');
    if (kind === Kind.file) this.#bytes += sizeOf(r);
  }

  #checkKind(r: Buffer, kind: Kind, path: Buffer): void {
    const difference = this.#header.base !== null;
    const flags = flagsOf(r);
    const size = Number(r.readBigUInt64LE(16));
    const target = targetOf(r);
    const xattrs = xattrsOf(r);
    const chunks = r.readUInt32LE(108);
    if (kind !== Kind.file && kind !== Kind.directory && kind !== Kind.symlink && kind !== Kind.absent)
      throw invalid(`entry of kind ${kind}`, path);
    if (kind === Kind.absent && !difference) throw invalid('removed path in a full manifest', path);
    if (path.length === 0 && kind !== Kind.directory) throw invalid('the root is not a directory');
    if (r.readUInt16LE(6) > 0o7777) throw invalid('mode beyond 07777', path);
    if (inoOf(r) !== 0n || ctimeNsOf(r) !== 0n) throw invalid('inode or ctime in a manifest', path);
    if (seqOf(r) > this.#header.generation.seq) throw invalid('entry newer than the generation', path);
    if (xattrs.length > LIMITS.xattrs) throw invalid(`more than ${LIMITS.xattrs} bytes of xattrs`, path);
    const fault = faultOfXattrs(xattrs);
    if (fault) throw invalid(fault, path);
    if (kind !== Kind.file) {
      if (chunks > 0 || flags & (Flag.chunksFull | Flag.chunksSparse | Flag.moved | Flag.hash))
        throw invalid('hash or chunks on something that is not a file', path);
      if (linkGroupOf(r) !== 0n) throw invalid('link group on something that is not a file', path);
    }
    if (kind === Kind.symlink) {
      if (target.length === 0 || target.length > LIMITS.symlink || target.includes(0))
        throw invalid(`symlink text must be 1 to ${LIMITS.symlink} bytes without NUL`, path);
      if (size !== target.length) throw invalid('symlink size is not the length of its text', path);
    } else if (kind === Kind.file) {
      this.#checkFile(r, flags, size, target, path);
    } else {
      if (size !== 0) throw invalid('size on a directory or removed path', path);
      if (target.length > 0) throw invalid('target on a directory or removed path', path);
    }
  }

  #checkFile(r: Buffer, flags: number, size: number, target: Buffer, path: Buffer): void {
    const difference = this.#header.base !== null;
    if (!(size <= LIMITS.size)) throw invalid('size beyond 2^53', path);
    if (!(flags & Flag.hash)) throw invalid('file without a hash', path);
    if (flags & Flag.moved) {
      const fault = difference ? faultOfPath(target) : 'moved file in a full manifest';
      if (fault) throw invalid(`moved from: ${fault}`, path);
    } else if (target.length > 0) throw invalid('target on a file', path);
    const bytes = r.readUInt32LE(108);
    const full = (flags & Flag.chunksFull) !== 0;
    const sparse = (flags & Flag.chunksSparse) !== 0;
    const count = Math.ceil(size / CHUNK);
    if (size < LARGE) {
      if (bytes > 0 || full || sparse) throw invalid('chunks on a small file', path);
      return;
    }
    if (full === sparse) throw invalid('a large file must have one chunk list', path);
    if (full) {
      if (bytes !== count * CHUNK_HASH) throw invalid('number of chunks does not match the size', path);
      return;
    }
    if (!difference) throw invalid('list of changed chunks in a full manifest', path);
    const entry = 4 + CHUNK_HASH;
    if (bytes % entry !== 0) throw invalid('list of changed chunks cut short', path);
    let last = -1;
    for (let at = r.length - bytes; at < r.length; at += entry) {
      const index = r.readUInt32LE(at);
      if (index <= last || index >= count)
        throw invalid('changed chunks out of order or beyond the size', path);
      last = index;
    }
  }

  #checkPlace(path: Buffer, kind: Kind): void {
    const open = this.#open;
    // `a`, `a-b`, `a/x`: an entry may still get children while what follows begins with it and goes on below '0'
    for (let top = open.at(-1); top; top = open.at(-1)) {
      const n = top.path.length;
      if (
        n === 0 ||
        (path.length > n && path.compare(top.path, 0, n, 0, n) === 0 && (path[n] as number) <= 0x2f)
      )
        break;
      open.pop();
    }
    if (path.length > 0) {
      const parentEnd = Math.max(0, path.lastIndexOf(0x2f));
      let parent: Open | null = null;
      for (const o of open) {
        const n = o.path.length;
        if (n !== 0 && path[n] !== 0x2f) continue;
        if (!o.directory && kind !== Kind.absent)
          throw invalid('entry below something that is not a directory', path);
        if (n === parentEnd) parent = o;
      }
      if (this.#header.base === null && !parent) throw invalid('entry without its directory', path);
    }
    open.push({ path: Buffer.from(path), directory: kind === Kind.directory });
  }

  finish(): void {
    if (this.#count !== this.#header.count)
      throw invalid(`${this.#count} entries, the header says ${this.#header.count}`);
    if (this.#bytes !== this.#header.bytes)
      throw invalid(`${this.#bytes} bytes of files, the header says ${this.#header.bytes}`);
    if (this.#header.base === null && this.#count === 0) throw invalid('no entries, not even the root');
  }
}

export interface ManifestBatch {
  /** ordinal of the first record */
  first: number;
  records: Buffer[];
}

export interface OpenManifest {
  /**
   * Hash of the first `length` bytes of a file: checks the trailer. Left out after a pull, which has checked it
   * while it arrived. (The addon's hashFile takes whole files only and does not do here.)
   */
  hashPrefix?: (path: Buffer, length: number) => Promise<Buffer>;
  /** refuse a manifest of another volume, generation or base */
  expect?: Partial<Pick<ManifestHeader, 'namespace' | 'volume' | 'generation' | 'base'>>;
}

/**
 * Reads a manifest in batches. Every record is checked; MANIFEST_INVALID says what is wrong and where. What
 * was seen before is valid in itself, but only a run to the end says that the manifest is whole.
 */
export class ManifestReader {
  readonly header: ManifestHeader;
  readonly #file: FileHandle;
  readonly #start: number;
  readonly #end: number;

  private constructor(file: FileHandle, header: ManifestHeader, start: number, end: number) {
    this.#file = file;
    this.header = header;
    this.#start = start;
    this.#end = end;
  }

  static async open(path: Buffer, options: OpenManifest = {}): Promise<ManifestReader> {
    const file = await open(path, 'r');
    try {
      const { size } = await file.stat();
      if (size < FIXED + TRAILER) throw invalid('cut short');
      const fixed = await readAll(file, 0, FIXED);
      if (!fixed.subarray(0, 4).equals(MAGIC)) throw invalid('not a manifest');
      if (fixed.readUInt16LE(4) !== VERSION || fixed.readUInt16LE(6) !== 0)
        throw invalid(`version ${fixed.readUInt16LE(4)} is not known`);
      const headerLen = fixed.readUInt32LE(8);
      if (headerLen > LIMITS.header) throw invalid('header larger than 1 MiB');
      if (FIXED + headerLen + TRAILER > size) throw invalid('cut short');
      if (options.hashPrefix) {
        const trailer = await readAll(file, size - TRAILER, TRAILER);
        if (!(await options.hashPrefix(path, size - TRAILER)).equals(trailer))
          throw invalid('the checksum at its end does not match');
      }
      const header = parseHeader((await readAll(file, FIXED, headerLen)).toString('utf8'));
      checkExpected(header, options.expect ?? {});
      return new ManifestReader(file, header, FIXED + headerLen, size - TRAILER);
    } catch (error) {
      await file.close();
      throw error;
    }
  }

  /** From the first record; may be called again. The Buffers stay valid. */
  async *batches(about: number = 256 * 1024): AsyncGenerator<ManifestBatch> {
    const maxBytes = Math.max(about, HEAD);
    const checker = new Checker(this.header);
    let pos = this.#start;
    let ordinal = 0;
    let want = maxBytes;
    while (pos < this.#end) {
      const buf = await readAll(this.#file, pos, Math.min(want, this.#end - pos));
      const records: Buffer[] = [];
      let at = 0;
      want = maxBytes;
      while (at + 4 <= buf.length) {
        const n = buf.readUInt32LE(at);
        if (n < HEAD || n > LIMITS.record)
          throw invalid(`record of ${n} bytes at entry ${ordinal + records.length}`);
        if (pos + at + n > this.#end) throw invalid('cut short');
        if (at + n > buf.length) {
          if (at === 0) want = n;
          break;
        }
        const record = buf.subarray(at, at + n);
        checker.check(record);
        records.push(record);
        at += n;
      }
      if (at === 0 && want === maxBytes) throw invalid('cut short');
      if (records.length > 0) yield { first: ordinal, records };
      ordinal += records.length;
      pos += at;
    }
    checker.finish();
  }

  async close(): Promise<void> {
    await this.#file.close();
  }
}

function checkExpected(header: ManifestHeader, expect: NonNullable<OpenManifest['expect']>): void {
  if (
    (expect.namespace !== undefined && expect.namespace !== header.namespace) ||
    (expect.volume !== undefined && expect.volume !== header.volume)
  )
    throw invalid(`it is of volume ${header.namespace}/${header.volume}`);
  if (expect.generation && formatGeneration(expect.generation) !== formatGeneration(header.generation))
    throw invalid(`it is of generation ${formatGeneration(header.generation)}`);
  if (expect.base !== undefined) {
    const text = (g: Generation | null): string => (g ? formatGeneration(g) : 'none');
    if (text(expect.base) !== text(header.base)) throw invalid(`its base is ${text(header.base)}`);
  }
}
