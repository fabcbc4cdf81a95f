/** A seeded writer: the same seed does the same to a tree. Names are bytes. */
import {
  chmodSync,
  closeSync,
  constants,
  ftruncateSync,
  linkSync,
  lstatSync,
  lutimesSync,
  mkdirSync,
  openSync,
  readdirSync,
  renameSync,
  rmdirSync,
  rmSync,
  symlinkSync,
  unlinkSync,
  utimesSync,
  writeFileSync,
  writeSync,
} from 'node:fs';

/** mulberry32 */
export function prng(seed: number): () => number {
  let a = seed >>> 0;
  return () => {
    a = (a + 0x6d2b79f5) >>> 0;
    let t = a;
    t = Math.imul(t ^ (t >>> 15), t | 1);
    t ^= t + Math.imul(t ^ (t >>> 7), t | 61);
    return ((t ^ (t >>> 14)) >>> 0) / 4294967296;
  };
}

/** Never through a link of its own making: that leads out of the tree. */
const ANEW = constants.O_WRONLY | constants.O_CREAT | constants.O_TRUNC | constants.O_NOFOLLOW;

function writeAnew(path: Buffer, data: Buffer): void {
  const fd = openSync(path, ANEW);
  try {
    writeFileSync(fd, data);
  } finally {
    closeSync(fd);
  }
}

const NAMES = [
  'a',
  'b',
  'c',
  'dd',
  'a-b',
  'a.b',
  'x y',
  '-rf',
  '#h',
  '100%',
  'é',
  'e\u0301',
  'n\nl',
  '[1]',
].map((n) => Buffer.from(n));
NAMES.push(Buffer.from([0xff, 0xfe, 0x62]), Buffer.alloc(200, 0x6c));

export class RandomWriter {
  readonly random: () => number;
  readonly root: Buffer;
  readonly maxLarge: number;
  done = 0;

  constructor(root: string, seed: number, maxLarge = 3 * 1024 * 1024) {
    this.root = Buffer.from(root);
    this.random = prng(seed);
    this.maxLarge = maxLarge;
  }

  int(n: number): number {
    return Math.floor(this.random() * n);
  }
  pick<T>(list: T[]): T | undefined {
    return list[this.int(list.length)];
  }

  all(): { path: Buffer; kind: 'dir' | 'file' | 'link' | 'other' }[] {
    const out: { path: Buffer; kind: 'dir' | 'file' | 'link' | 'other' }[] = [];
    const walk = (dir: Buffer): void => {
      for (const name of readdirSync(dir, { encoding: 'buffer' }).sort(Buffer.compare)) {
        const path = Buffer.concat([dir, Buffer.from('/'), name]);
        const s = lstatSync(path);
        out.push({
          path,
          kind: s.isDirectory() ? 'dir' : s.isFile() ? 'file' : s.isSymbolicLink() ? 'link' : 'other',
        });
        if (s.isDirectory()) walk(path);
      }
    };
    walk(this.root);
    return out;
  }

  somewhere(dirs: Buffer[]): Buffer {
    const dir = this.int(3) === 0 ? this.root : (this.pick(dirs) ?? this.root);
    return Buffer.concat([dir, Buffer.from('/'), this.pick(NAMES) as Buffer]);
  }

  bytes(n: number): Buffer {
    const b = Buffer.alloc(n);
    const step = Math.max(1, Math.floor(n / 64));
    for (let i = 0; i < n; i += step) b[i] = this.int(256);
    return b;
  }

  /** One operation; what the file system refuses (a directory in the way ...) is no error. */
  step(): void {
    const all = this.all();
    const dirs = all.filter((e) => e.kind === 'dir').map((e) => e.path);
    const files = all.filter((e) => e.kind === 'file').map((e) => e.path);
    const any = all.map((e) => e.path);
    const target = this.somewhere(dirs);
    const file = this.pick(files);
    const thing = this.pick(any);
    this.done++;
    try {
      switch (this.int(22)) {
        case 0:
        case 1:
        case 2:
          writeAnew(target, this.bytes(this.int(6000)));
          break;
        case 3:
          if (file) writeAnew(file, this.bytes(this.int(6000)));
          break;
        case 4: {
          // large
          const fd = openSync(target, ANEW);
          writeSync(fd, this.bytes(1024 * 1024 + this.int(this.maxLarge - 1024 * 1024)));
          closeSync(fd);
          break;
        }
        case 5:
        case 6:
          if (file) {
            // in place, some blocks
            const size = lstatSync(file).size;
            const fd = openSync(file, 'r+');
            for (let i = 0; i < 3; i++)
              writeSync(fd, this.bytes(1 + this.int(5000)), 0, undefined, this.int(size + 1));
            closeSync(fd);
          }
          break;
        case 7:
          if (file) {
            const fd = openSync(file, 'r+');
            const size = lstatSync(file).size;
            ftruncateSync(fd, this.int(2) ? Math.floor(size / 2) : size + this.int(300_000));
            closeSync(fd);
          }
          break;
        case 8: {
          const fd = openSync(target, ANEW);
          ftruncateSync(fd, 2 * 1024 * 1024);
          writeSync(fd, this.bytes(4096), 0, 4096, 1024 * 1024);
          closeSync(fd);
          break;
        }
        case 9:
        case 10:
          mkdirSync(target, { mode: this.int(2) ? 0o755 : 0o700 });
          break;
        case 11:
          if (thing) renameSync(thing, target);
          break;
        case 12:
          if (file) renameSync(file, target);
          break;
        case 13:
          if (thing && this.int(2) === 0) rmSync(thing, { recursive: true });
          break;
        case 14:
          if (file) unlinkSync(file);
          break;
        case 15:
          if (file) linkSync(file, target);
          break;
        case 16:
          symlinkSync(this.pick(['nope', '/nonexistent/absolute', '../../..', 'a', '.']) as string, target);
          break;
        case 17:
          if (thing && !lstatSync(thing).isSymbolicLink()) chmodSync(thing, 0o600 | this.int(0o7777));
          break;
        case 18:
          if (thing) {
            const at = 1_600_000_000 + this.int(1_000_000) + 0.25;
            if (lstatSync(thing).isSymbolicLink()) lutimesSync(thing, at, at);
            else utimesSync(thing, at, at);
          }
          break;
        case 19: {
          const dir = this.pick(dirs);
          if (dir) rmdirSync(dir);
          break;
        }
        case 20:
          if (file) {
            // as editors do it
            const tmp = Buffer.concat([file, Buffer.from('.tmp')]);
            writeAnew(tmp, this.bytes(this.int(3000)));
            renameSync(tmp, file);
          }
          break;
        default:
          if (file) {
            // same size, mtime set back (D19)
            const s = lstatSync(file);
            const fd = openSync(file, 'r+');
            if (s.size > 0) writeSync(fd, this.bytes(1), 0, 1, this.int(s.size));
            closeSync(fd);
            utimesSync(file, s.atime, s.mtime);
          }
      }
    } catch (error) {
      const { code } = error as NodeJS.ErrnoException;
      if (
        ![
          'EEXIST',
          'ENOENT',
          'ENOTDIR',
          'EISDIR',
          'ENOTEMPTY',
          'EINVAL',
          'ELOOP',
          'ENAMETOOLONG',
          'EPERM',
          'ERR_FS_EISDIR',
        ].includes(code ?? '')
      )
        throw error;
    }
  }
}
