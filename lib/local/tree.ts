/**
 * Describes and compares trees by what an application could see: kinds, bytes, holes, modes, owners, times to
 * the nanosecond, link texts, hard links, extended attributes. It shares no code with the engine that it checks,
 * except that extended attributes, which Node cannot read, come from a reader that the caller may pass.
 */
import { createHash } from 'node:crypto';
import { createReadStream } from 'node:fs';
import { lstat, readdir, readlink } from 'node:fs/promises';

export interface TreeEntry {
  kind: 'file' | 'directory' | 'symlink' | 'other';
  mode: number;
  uid: number;
  gid: number;
  mtimeNs: bigint;
  size: number;
  /** Allocated bytes. */
  allocated: number;
  /** SHA-256 of the contents of a file, the text of a symbolic link in hex, else ''. */
  content: string;
  /** First path (in path order) of the hard-link group inside the tree, '' when there is no other link. */
  linkedTo: string;
  xattrs: string;
}

/** Path bytes as latin1 (one character a byte, so any name is told apart) -> entry. '' is the root. */
export type Tree = Map<string, TreeEntry>;

export type XattrReader = (paths: readonly string[]) => Promise<string[]>;

const printable = (path: string): string => JSON.stringify(Buffer.from(path, 'latin1').toString('utf8'));

function sha256(path: Buffer): Promise<string> {
  return new Promise((resolve, reject) => {
    const hash = createHash('sha256');
    createReadStream(path, { highWaterMark: 1 << 20 })
      .on('data', (chunk) => hash.update(chunk))
      .on('end', () => resolve(hash.digest('hex')))
      .on('error', reject);
  });
}

/** Walks a tree that nobody changes meanwhile; follows no link. */
export async function readTree(root: string, xattrs?: XattrReader): Promise<Tree> {
  const tree: Tree = new Map();
  const inodes = new Map<bigint, string>();
  const base = Buffer.from(root);
  const visit = async (path: Buffer, relative: Buffer): Promise<void> => {
    const st = await lstat(path, { bigint: true });
    const key = relative.toString('latin1');
    const kind = st.isFile()
      ? 'file'
      : st.isDirectory()
        ? 'directory'
        : st.isSymbolicLink()
          ? 'symlink'
          : 'other';
    let content = '';
    let linkedTo = '';
    if (kind === 'file') {
      content = await sha256(path);
      if (st.nlink > 1n) {
        linkedTo = inodes.get(st.ino) ?? key;
        inodes.set(st.ino, linkedTo);
      }
    } else if (kind === 'symlink') {
      content = (await readlink(path, { encoding: 'buffer' })).toString('hex');
    }
    tree.set(key, {
      kind,
      mode: Number(st.mode & 0o7777n),
      uid: Number(st.uid),
      gid: Number(st.gid),
      mtimeNs: st.mtimeNs,
      size: kind === 'directory' ? 0 : Number(st.size),
      allocated: Number(st.blocks) * 512,
      content,
      linkedTo,
      xattrs: '',
    });
    if (kind !== 'directory') return;
    const names = (await readdir(path, { encoding: 'buffer' })).sort(Buffer.compare);
    const slash = Buffer.from('/');
    for (const name of names) {
      await visit(
        Buffer.concat([path, slash, name]),
        relative.length === 0 ? name : Buffer.concat([relative, slash, name]),
      );
    }
  };
  await visit(base, Buffer.alloc(0));
  // A link whose partners are outside the tree, or that the walk met only once, is no group of the tree.
  const members = new Map<string, number>();
  for (const entry of tree.values()) members.set(entry.linkedTo, (members.get(entry.linkedTo) ?? 0) + 1);
  for (const entry of tree.values()) if (members.get(entry.linkedTo) === 1) entry.linkedTo = '';
  if (xattrs !== undefined) {
    const paths = [...tree.keys()];
    const found = await xattrs(paths);
    paths.forEach((path, i) => {
      (tree.get(path) as TreeEntry).xattrs = found[i] ?? '';
    });
  }
  return tree;
}

export interface CompareOptions {
  /** Also compare times of symbolic links and directories (default true). */
  times?: boolean;
  /** Allocation of a copy may be up to twice the original's plus this many bytes (default 1 MiB). */
  slack?: number;
}

/**
 * What differs, one line each (empty: the trees are the same). A copy may be sparser than its original; it may
 * not take more than twice its space.
 */
export function compareTrees(original: Tree, copy: Tree, options: CompareOptions = {}): string[] {
  const found: string[] = [];
  const slack = options.slack ?? 1024 * 1024;
  for (const [path, a] of original) {
    const b = copy.get(path);
    if (b === undefined) {
      found.push(`${printable(path)} is missing`);
      continue;
    }
    for (const field of ['kind', 'mode', 'uid', 'gid', 'size', 'content', 'linkedTo', 'xattrs'] as const) {
      if (a[field] !== b[field]) found.push(`${printable(path)} ${field}: ${a[field]} became ${b[field]}`);
    }
    if ((options.times ?? true) && a.kind !== 'symlink' && a.mtimeNs !== b.mtimeNs) {
      found.push(`${printable(path)} mtime: ${a.mtimeNs} became ${b.mtimeNs}`);
    }
    if (a.kind === 'file' && b.allocated > a.allocated * 2 + slack) {
      found.push(
        `${printable(path)} takes ${b.allocated} bytes, the original ${a.allocated}: holes were filled`,
      );
    }
  }
  for (const path of copy.keys())
    if (!original.has(path)) found.push(`${printable(path)} should not be there`);
  return found;
}

/** One SHA-256 over everything that compareTrees compares exactly: equal trees have equal digests. */
export function treeDigest(tree: Tree): string {
  const hash = createHash('sha256');
  for (const [path, e] of tree) {
    hash.update(
      `${Buffer.from(path, 'latin1').toString('hex')} ${e.kind} ${e.mode} ${e.uid} ${e.gid} ` +
        `${e.kind === 'symlink' ? 0 : e.mtimeNs} ${e.size} ${e.content} ${Buffer.from(e.linkedTo, 'latin1').toString('hex')} ${e.xattrs}\n`,
    );
  }
  return hash.digest('hex');
}
