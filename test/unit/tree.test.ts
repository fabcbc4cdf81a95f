import { execFileSync } from 'node:child_process';
import {
  chmodSync,
  chownSync,
  cpSync,
  linkSync,
  lutimesSync,
  mkdirSync,
  mkdtempSync,
  rmSync,
  symlinkSync,
  truncateSync,
  unlinkSync,
  utimesSync,
  writeFileSync,
} from 'node:fs';
import { tmpdir } from 'node:os';
import { join } from 'node:path';
import t from 'tap';
import { compareTrees, readTree, treeDigest } from '../../lib/local/tree.ts';

const folder = mkdtempSync(join(tmpdir(), 'simple-volume-tree-'));
t.teardown(() => rmSync(folder, { recursive: true, force: true }));
const original = join(folder, 'original');
mkdirSync(join(original, 'sub', 'empty'), { recursive: true });
writeFileSync(join(original, 'one'), 'one');
writeFileSync(join(original, 'sub', 'two'), 'two');
linkSync(join(original, 'one'), join(original, 'sub', 'hard'));
symlinkSync('nowhere', join(original, 'soft'));
writeFileSync(join(original, 'sparse'), 'x');
truncateSync(join(original, 'sparse'), 4 * 1024 * 1024);
writeFileSync(Buffer.concat([Buffer.from(join(original, 'bad-')), Buffer.from([0xff, 0x0a])]), 'odd');

async function differences(name: string, change: (copy: string) => void): Promise<string[]> {
  const copy = join(folder, name);
  execFileSync('cp', ['-a', '--sparse=always', original, copy]);
  change(copy);
  const found = compareTrees(await readTree(original), await readTree(copy));
  rmSync(copy, { recursive: true });
  return found;
}

t.test('an exact copy has no difference and the same digest', async (t) => {
  const copy = join(folder, 'same');
  execFileSync('cp', ['-a', '--sparse=always', original, copy]);
  const [a, b] = [await readTree(original), await readTree(copy)];
  t.same(compareTrees(a, b), []);
  t.equal(treeDigest(a), treeDigest(b));
  t.equal(a.size, 9, 'the root, and a name that is no UTF-8, are entries');
});

const cases: [string, RegExp, (copy: string) => void][] = [
  ['other bytes of the same length', /"one" content/, (c) => writeKeepingTimes(join(c, 'one'), 'eno')],
  ['other length', /size/, (c) => writeFileSync(join(c, 'one'), 'longer')],
  ['other mode', /"one" mode: 420 became 384/, (c) => chmodSync(join(c, 'one'), 0o600)],
  ['other mode of a folder', /"sub" mode/, (c) => chmodSync(join(c, 'sub'), 0o700)],
  ['other time', /"one" mtime/, (c) => utimesSync(join(c, 'one'), 1, 1)],
  ['other time of a folder', /"sub\/empty" mtime/, (c) => utimesSync(join(c, 'sub', 'empty'), 1, 1)],
  ['a missing file', /"sub\/two" is missing/, (c) => unlinkSync(join(c, 'sub', 'two'))],
  [
    'a missing empty folder',
    /"sub\/empty" is missing/,
    (c) => rmSync(join(c, 'sub', 'empty'), { recursive: true }),
  ],
  ['one too many', /"extra" should not be there/, (c) => writeFileSync(join(c, 'extra'), '')],
  [
    'another link text',
    /"soft" content/,
    (c) => {
      unlinkSync(join(c, 'soft'));
      symlinkSync('elsewhere', join(c, 'soft'));
    },
  ],
  [
    'a file instead of a link',
    /"soft" kind: symlink became file/,
    (c) => {
      unlinkSync(join(c, 'soft'));
      writeFileSync(join(c, 'soft'), 'nowhere');
    },
  ],
  [
    'a hard link that was split',
    /linkedTo/,
    (c) => {
      unlinkSync(join(c, 'sub', 'hard'));
      cpSync(join(c, 'one'), join(c, 'sub', 'hard'), { preserveTimestamps: true });
    },
  ],
  [
    'holes that were filled',
    /holes were filled/,
    (c) => {
      execFileSync('cp', ['--sparse=never', join(original, 'sparse'), join(c, 'sparse')]);
    },
  ],
];
for (const [name, says, change] of cases) {
  t.test(`sees ${name}`, async (t) => {
    t.match((await differences('changed', change)).join('\n'), says);
  });
}

t.test('sees another owner', { skip: process.getuid?.() !== 0 && 'needs root' }, async (t) => {
  t.match(
    (await differences('owner', (c) => chownSync(join(c, 'one'), 1234, 1234))).join('\n'),
    /"one" uid: 0 became 1234/,
  );
});

t.test('sees other extended attributes, by a reader of its own', async (t) => {
  const reader = async (paths: readonly string[]): Promise<string[]> =>
    paths.map((path) => (path === 'one' ? 'user.a=1' : ''));
  t.match(compareTrees(await readTree(original, reader), await readTree(original)), [
    /xattrs: user\.a=1 became/,
  ]);
});

function writeKeepingTimes(file: string, text: string): void {
  execFileSync('sh', [
    '-c',
    'cp -p "$0" "$0.keep" && printf %s "$1" >"$0" && touch -r "$0.keep" "$0" && rm "$0.keep"',
    file,
    text,
  ]);
  lutimesSync(join(file, '..'), 1, 1);
}
