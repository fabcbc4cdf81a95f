/**
 * The one suite of tree cases: what a tree is at first and what is done to it. Every case runs through the stager
 * alone, the transfer alone, the applier alone and the whole pipeline (the files beside this one), and the result
 * must be the source in kinds, bytes, holes, modes, owners, nanosecond times, attributes and links.
 */
import { execFileSync } from 'node:child_process';
import fs from 'node:fs';

export interface TreeCase {
  /** behaviour, with the id of its source */
  name: string;
  /** makes the first tree below an existing, empty directory */
  start(at: At): void;
  /** changes it; no change: the first tree alone is the case */
  change?(at: At): void;
}

/** Path below the case's root, from text or bytes. */
export type At = (...parts: (string | Buffer)[]) => Buffer;

export const atRoot =
  (root: string): At =>
  (...parts) =>
    Buffer.concat(
      parts.flatMap((p, i) => [i === 0 ? Buffer.from(`${root}/`) : Buffer.from('/'), Buffer.from(p)]),
    );

const write = (path: Buffer, data: string | Buffer = 'content', mode = 0o644): void => {
  fs.writeFileSync(path, data);
  fs.chmodSync(path, mode);
};
const mkdir = (path: Buffer): void => {
  fs.mkdirSync(path, { recursive: true });
};
/** Overwrites part of a file in place. */
const poke = (path: Buffer, offset: number, data: string | Buffer): void => {
  const fd = fs.openSync(path, 'r+');
  const bytes = Buffer.from(data as string);
  fs.writeSync(fd, bytes, 0, bytes.length, offset);
  fs.closeSync(fd);
};
const python = (code: string, ...args: Buffer[]): void => {
  execFileSync('python3', [
    '-c',
    `import os,sys,socket\na=[bytes.fromhex(x) for x in sys.argv[1:]]\n${code}`,
    ...args.map((a) => a.toString('hex')),
  ]);
};
const setXattr = (path: Buffer, name: string, value: string): void =>
  python(
    `os.setxattr(a[0], ${JSON.stringify(name)}, ${JSON.stringify(value)}.encode(), follow_symlinks=False)`,
    path,
  );
const fill = (size: number, seed: number): Buffer => {
  const b = Buffer.allocUnsafe(size);
  let x = seed * 2654435761 + 1;
  for (let i = 0; i + 4 <= size; i += 4) {
    x = (Math.imul(x, 1664525) + 1013904223) >>> 0;
    b.writeUInt32LE(x, i);
  }
  b.fill(seed, size - (size % 4));
  return b;
};

const odd: (string | Buffer)[] = [
  'hash#1',
  'q?a=1',
  '100%',
  'x%41',
  'x%25',
  'a:b',
  'line\nbreak',
  'tab\there',
  '\u007fdel',
  '\u0001ctl',
  ' lead',
  'trail ',
  '-rf',
  '#x',
  ';y',
  'a[1].txt',
  '{x}.txt',
  '*.txt',
  '..data',
  '...',
  'back\\slash',
  'quote\'"',
  '&<>',
  'x.rclonelink',
  'tmp-link',
  'manifest',
  'pack-0000',
  Buffer.from([0x62, 0xff, 0xfe]),
  'bad-\u201bFF\u201bFE',
  Buffer.concat([Buffer.from('bad-'), Buffer.from([0xff, 0xfe])]),
  'emoji-\u{1f600}',
];

export const CASES: TreeCase[] = [
  {
    name: 'D1: names that normalise alike both arrive',
    start: (at) => {
      write(at('\u00e9'), 'nfc');
      write(at('e\u0301'), 'nfd');
    },
  },
  {
    name: 'D2, D3, D4, D5, D6, D9, C16, E6: odd names arrive byte for byte, as files and as directories',
    start: (at) => {
      for (const [i, name] of odd.entries()) write(at(name), `file ${i}`);
      mkdir(at('dirs'));
      odd.forEach((name, i) => {
        mkdir(at('dirs', name));
        write(at('dirs', name, 'x'), `below ${i}`);
      });
    },
    change: (at) => {
      for (const [i, name] of odd.entries())
        if (i % 2) fs.rmSync(at(name));
        else write(at(name), `changed ${i}`);
      for (const name of odd.slice(0, 9)) fs.rmSync(at('dirs', name), { recursive: true });
    },
  },
  {
    name: 'D7: a name of 255 bytes, and long twins that differ at the end',
    start: (at) => {
      write(at('n'.repeat(255)), 'long');
      write(at(`${'t'.repeat(130)}0123456789`), 'twin a');
      write(at(`${'t'.repeat(130)}9876543210`), 'twin b');
    },
    change: (at) => write(at('n'.repeat(255)), 'long, changed'),
  },
  {
    name: 'D10: holes stay holes, at the begin, in the middle and at the end',
    start: (at) => {
      write(at('hole'), '');
      fs.truncateSync(at('hole'), 64 << 20);
      poke(at('hole'), 32 << 20, 'island');
      write(at('all-hole'), '');
      fs.truncateSync(at('all-hole'), 3 << 20);
      write(at('small-hole'), '');
      fs.truncateSync(at('small-hole'), 100_000);
      poke(at('small-hole'), 90_000, 'x');
    },
    change: (at) => {
      poke(at('hole'), 5 << 20, fill(9000, 3));
      fs.truncateSync(at('hole'), (60 << 20) + 7);
      fs.truncateSync(at('all-hole'), 5 << 20);
    },
  },
  {
    name: 'D12: hard links stay one file, and a change reaches every name',
    start: (at) => {
      mkdir(at('a'));
      write(at('a', 'one'), 'linked');
      fs.linkSync(at('a', 'one'), at('two'));
      fs.linkSync(at('a', 'one'), at('z three'));
      write(at('single'), 'alone');
    },
    change: (at) => {
      poke(at('two'), 0, 'LINKED');
      fs.linkSync(at('single'), at('not alone'));
      fs.rmSync(at('z three'));
    },
  },
  {
    name: 'D13: links that dangle, are absolute, loop or escape are kept as text and never followed',
    start: (at) => {
      fs.symlinkSync('nope', at('dangling'));
      fs.symlinkSync('/etc/passwd', at('absolute'));
      fs.symlinkSync('loop', at('loop'));
      fs.symlinkSync('../../../etc', at('escape'));
      fs.symlinkSync(Buffer.from([0x61, 0xff, 0x62]), at('bytes'));
      fs.symlinkSync('x'.repeat(4000), at('long'));
      mkdir(at('d'));
      fs.symlinkSync('d', at('to-dir'));
    },
    change: (at) => {
      fs.rmSync(at('dangling'));
      fs.rmSync(at('absolute'));
      fs.symlinkSync('/etc/hosts', at('absolute'));
      fs.rmSync(at('loop'));
      write(at('loop'), 'a file now');
    },
  },
  {
    name: 'D14: a directory that becomes a link to elsewhere takes nothing with it',
    start: (at) => {
      mkdir(at('d', 'sub'));
      write(at('d', 'sub', 'f'), 'mine');
    },
    change: (at) => {
      fs.rmSync(at('d'), { recursive: true });
      fs.symlinkSync('/', at('d'));
    },
  },
  {
    name: 'F7: a link that becomes a directory is replaced, not written through',
    start: (at) => fs.symlinkSync('/tmp', at('evil')),
    change: (at) => {
      fs.rmSync(at('evil'));
      mkdir(at('evil', 'sub'));
      write(at('evil', 'sub', 'f'), 'inside');
    },
  },
  {
    name: 'D17, E1: modes, setuid, setgid, sticky and owners',
    start: (at) => {
      [0o4755, 0o2755, 0o600, 0o000, 0o444, 0o777, 0o755].forEach((mode, i) => {
        write(at(`m${i}`), `mode ${i}`, mode);
        fs.chownSync(at(`m${i}`), 1000 + i, 2000 + i);
        fs.chmodSync(at(`m${i}`), mode);
      });
      mkdir(at('shared'));
      fs.chownSync(at('shared'), 7, 8);
      fs.chmodSync(at('shared'), 0o3775);
      fs.symlinkSync('m0', at('l'));
      fs.lchownSync(at('l'), 55, 66);
    },
    change: (at) => {
      fs.chmodSync(at('m0'), 0o755);
      fs.chownSync(at('m2'), 1, 1);
      fs.chmodSync(at('shared'), 0o700);
    },
  },
  {
    name: 'D18: extended attributes of files and directories',
    start: (at) => {
      write(at('f'), 'x');
      mkdir(at('d'));
      setXattr(at('f'), 'user.one', 'value');
      setXattr(at('f'), 'user.two', 'v'.repeat(2000));
      setXattr(at('d'), 'user.dir', 'value');
    },
    change: (at) => {
      python('os.removexattr(a[0], "user.one")', at('f'));
      setXattr(at('d'), 'user.dir', 'other');
    },
  },
  {
    name: 'D19, A4: same size and time restored after a change of content',
    start: (at) => {
      write(at('same'), 'aaaa');
      write(at('same-large'), fill(2 << 20, 5));
      fs.utimesSync(at('same'), 1_600_000_000, 1_600_000_000);
      fs.utimesSync(at('same-large'), 1_600_000_000, 1_600_000_000);
    },
    change: (at) => {
      poke(at('same'), 0, 'bbbb');
      poke(at('same-large'), 1_000_000, 'changed');
      fs.utimesSync(at('same'), 1_600_000_000, 1_600_000_000);
      fs.utimesSync(at('same-large'), 1_600_000_000, 1_600_000_000);
    },
  },
  {
    name: 'D19: times to the nanosecond, before 1970 and far ahead',
    start: (at) => {
      write(at('ns'), 'x');
      python('os.utime(a[0], ns=(1700000000123456789, 1700000000123456789))', at('ns'));
      write(at('old'), 'x');
      python('os.utime(a[0], ns=(-123456789, -123456789))', at('old'));
      mkdir(at('d'));
      python('os.utime(a[0], ns=(1500000000000000001, 1500000000000000001))', at('d'));
    },
    change: (at) => python('os.utime(a[0], ns=(1700000000123456790, 1700000000123456790))', at('ns')),
  },
  {
    name: 'D20: empty files and empty directories come and go; truncation to nothing arrives',
    start: (at) => {
      write(at('zero'), '');
      write(at('shrinks'), fill(1 << 20, 9));
      mkdir(at('empty', 'nested', 'deep'));
      mkdir(at('goes'));
    },
    change: (at) => {
      fs.truncateSync(at('shrinks'), 0);
      fs.rmSync(at('zero'));
      fs.rmdirSync(at('goes'));
      fs.rmdirSync(at('empty', 'nested', 'deep'));
    },
  },
  {
    name: 'content of every size around the borders of chunks and large files',
    start: (at) => {
      for (const size of [
        1,
        4095,
        4096,
        4097,
        65535,
        65536,
        65537,
        131072,
        (1 << 20) - 1,
        1 << 20,
        (1 << 20) + 1,
        3_000_001,
      ])
        write(at(`s${size}`), fill(size, size % 251));
    },
    change: (at) => {
      for (const size of [1, 4097, 65536, 65537, (1 << 20) - 1, 1 << 20, (1 << 20) + 1, 3_000_001])
        poke(at(`s${size}`), size - 1, 'Z');
      poke(at('s3000001'), 0, 'AAAA');
    },
  },
  {
    name: 'a large file changes in blocks, grows, shrinks and gets holes punched',
    start: (at) => {
      for (const name of ['blocks', 'grows', 'shrinks', 'punched', 'same-end'])
        write(at(name), fill(4 << 20, 11));
    },
    change: (at) => {
      for (let i = 0; i < 20; i++) poke(at('blocks'), i * 200_001, `changed ${i}`);
      fs.appendFileSync(at('grows'), fill(300_001, 12));
      fs.truncateSync(at('shrinks'), (2 << 20) + 13);
      execFileSync('fallocate', [
        '--punch-hole',
        '--offset',
        '1048576',
        '--length',
        '1048576',
        at('punched').toString(),
      ]);
      fs.truncateSync(at('same-end'), 1_000_000);
    },
  },
  {
    name: 'F1: renames of files, over files, and a whole directory moved',
    start: (at) => {
      for (const n of ['a', 'b', 'c']) write(at(n), `content of ${n}`);
      mkdir(at('dir', 'sub'));
      for (let i = 0; i < 20; i++) write(at('dir', 'sub', `f${i}`), fill(5000, i));
      write(at('big'), fill(2 << 20, 21));
    },
    change: (at) => {
      fs.renameSync(at('a'), at('moved'));
      fs.renameSync(at('b'), at('c'));
      fs.renameSync(at('dir'), at('renamed'));
      fs.renameSync(at('big'), at('renamed', 'sub', 'big'));
    },
  },
  {
    name: 'F1: two files and two directories change places (RENAME_EXCHANGE)',
    start: (at) => {
      write(at('x'), 'was x');
      write(at('y'), 'was y, longer');
      mkdir(at('dx'));
      mkdir(at('dy'));
      write(at('dx', 'f'), 'in dx');
      write(at('dy', 'g'), 'in dy');
    },
    change: (at) => {
      const exchange = (a: Buffer, b: Buffer): void =>
        python(
          'import ctypes\nif ctypes.CDLL(None, use_errno=True).syscall(316 if os.uname().machine == "x86_64" else 276, -100, a[0], -100, a[1], 2): raise OSError(ctypes.get_errno())',
          a,
          b,
        );
      exchange(at('x'), at('y'));
      exchange(at('dx'), at('dy'));
    },
  },
  {
    name: 'C4: every kind becomes every other kind',
    start: (at) => {
      for (const to of ['file', 'dir', 'link']) {
        write(at(`file-${to}`), 'file');
        mkdir(at(`dir-${to}`, 'below'));
        write(at(`dir-${to}`, 'below', 'x'), 'x');
        fs.symlinkSync('target', at(`link-${to}`));
      }
    },
    change: (at) => {
      for (const from of ['file', 'dir', 'link'])
        for (const to of ['file', 'dir', 'link']) {
          const path = at(`${from}-${to}`);
          fs.rmSync(path, { recursive: true });
          if (to === 'file') write(path, `now a file, was ${from}`);
          if (to === 'dir') {
            mkdir(path);
            write(at(`${from}-${to}`, 'y'), 'y');
          }
          if (to === 'link') fs.symlinkSync(`was-${from}`, path);
        }
    },
  },
  {
    name: 'C.A2: a directory removed and made again under the same name',
    start: (at) => {
      mkdir(at('d', 'e'));
      for (let i = 0; i < 30; i++) write(at('d', 'e', `${i}`), `${i}`);
    },
    change: (at) => {
      fs.rmSync(at('d'), { recursive: true });
      mkdir(at('d', 'e'));
      write(at('d', 'e', 'new'), 'new');
      write(at('d', 'e', '5'), 'five again');
    },
  },
  {
    name: 'D21: a deep tree made at once, and one moved in',
    start: (at) => mkdir(at('here')),
    change: (at) => {
      mkdir(at('1', '2', '3', '4', '5'));
      write(at('1', '2', '3', '4', '5', 'leaf'), 'leaf');
      for (let i = 0; i < 21; i++) {
        mkdir(at('here', 'tree', `${i}`));
        write(at('here', 'tree', `${i}`, 'f'), `${i}`);
      }
      fs.renameSync(at('here', 'tree'), at('tree'));
    },
  },
  {
    name: 'D22: a directory renamed twice while it is written to',
    start: (at) => {
      mkdir(at('d', 'sub'));
      write(at('d', 'sub', 'old'), 'old');
    },
    change: (at) => {
      fs.renameSync(at('d'), at('e'));
      write(at('e', 'sub', 'between'), 'between');
      fs.renameSync(at('e'), at('f'));
      write(at('f', 'sub', 'x'), 'x');
    },
  },
  {
    name: 'D23: written aside and renamed over, many times',
    start: (at) => write(at('t'), 'first'),
    change: (at) => {
      for (let i = 0; i < 200; i++) {
        write(at('t.tmp'), `version ${i} `.repeat(100));
        fs.renameSync(at('t.tmp'), at('t'));
      }
    },
  },
  {
    name: 'O_TMPFILE linked into place, and a file removed while it is open',
    start: (at) => write(at('gone'), 'gone'),
    change: (at) => {
      python(
        'import ctypes\nd=os.path.dirname(a[0])\nf=os.open(d, os.O_TMPFILE|os.O_RDWR, 0o640)\nos.write(f, b"from nowhere")\nx=ctypes.CDLL(None, use_errno=True).linkat(-100, b"/proc/self/fd/%d" % f, -100, a[0], 0x400)\nif x: raise OSError(ctypes.get_errno())\nos.write(f, b", and more")',
        at('linked'),
      );
      const fd = fs.openSync(at('gone'), 'r+');
      fs.rmSync(at('gone'));
      fs.writeSync(fd, 'unseen');
      fs.closeSync(fd);
    },
  },
  {
    name: 'a path near PATH_MAX, and names that sort between a directory and what is below it',
    start: (at) => {
      mkdir(at('a'));
      for (const n of ['a-b', 'a.b', 'a b', 'a0']) write(at(n), n);
      write(at('a', 'x'), 'below');
      const deep = Array.from({ length: 14 }, () => 'd'.repeat(200));
      mkdir(at(...deep));
      write(at(...deep, 'leaf'), 'deep');
    },
    change: (at) => {
      fs.rmSync(at('a'), { recursive: true });
      write(at('a'), 'a file between its neighbours');
    },
  },
];

/** Sockets, FIFOs and devices: present in the tree, never read, reported, not replicated. */
export function addSpecials(at: At): string[] {
  execFileSync('mkfifo', [at('fifo').toString()]);
  python('s=socket.socket(socket.AF_UNIX)\nos.chdir(os.path.dirname(a[0]))\ns.bind("socket")', at('socket'));
  return ['fifo', 'socket'];
}
