import t from 'tap';
import { encodeRecord, Flag, Kind, type RecordFields, targetOf } from '../../lib/core/record.ts';
import {
  classify,
  isMassDelete,
  movedRecord,
  sameFileElsewhere,
  sameState,
  untouched,
} from '../../lib/source/classify.ts';

const rec = (f: Partial<RecordFields> = {}): Buffer =>
  encodeRecord({
    kind: Kind.file,
    path: Buffer.from('f'),
    size: 5,
    mode: 0o644,
    mtimeNs: 10n,
    ino: 7n,
    ctimeNs: 20n,
    flags: Flag.hash,
    hash: Buffer.alloc(32, 1),
    ...f,
  });
const dir = (f: Partial<RecordFields> = {}): Buffer =>
  rec({ kind: Kind.directory, size: 0, flags: 0, hash: Buffer.alloc(32), ...f });
const link = (f: Partial<RecordFields> = {}): Buffer =>
  dir({ kind: Kind.symlink, target: Buffer.from('to'), size: 2, ...f });

t.test('what a look means', async (t) => {
  const cases: [string, Buffer | undefined, Buffer, boolean, string][] = [
    ['never there', undefined, rec({ kind: Kind.absent }), false, 'none'],
    ['gone', rec(), rec({ kind: Kind.absent }), false, 'gone'],
    ['untouched', rec(), rec(), false, 'none'],
    ['untouched, but not in the copy yet', rec(), rec(), true, 'content'],
    ['new file', undefined, rec(), false, 'content'],
    ['other size', rec(), rec({ size: 6 }), false, 'content'],
    ['other mtime by a nanosecond (D19)', rec(), rec({ mtimeNs: 11n }), false, 'content'],
    [
      'same size, mtime set back: only the ctime tells (D19, A4)',
      rec(),
      rec({ ctimeNs: 21n }),
      false,
      'content',
    ],
    ['replaced by rename: another inode (D23)', rec(), rec({ ino: 8n }), false, 'content'],
    ['other mode', rec(), rec({ mode: 0o600 }), false, 'content'],
    ['new directory', undefined, dir(), false, 'directory'],
    ['directory untouched', dir(), dir(), false, 'none'],
    ['directory with another mtime', dir(), dir({ mtimeNs: 11n, ctimeNs: 21n }), false, 'directory'],
    [
      'directory with other attributes (D18)',
      dir(),
      dir({ xattrs: Buffer.from('x'), ctimeNs: 21n }),
      false,
      'directory',
    ],
    ['directory on another inode, else the same', dir(), dir({ ino: 9n, ctimeNs: 21n }), false, 'identity'],
    ['link with another text', link(), link({ target: Buffer.from('ot'), ctimeNs: 21n }), false, 'symlink'],
    ['link made again, the same', link(), link({ ino: 9n, ctimeNs: 21n }), false, 'identity'],
    ['directory became a file (C4)', dir(), rec(), false, 'content'],
    ['file became a link (C1)', rec(), link(), false, 'symlink'],
    ['FIFO (C2)', undefined, rec({ kind: Kind.special }), false, 'special'],
    [
      'cannot be looked at: not gone (A10)',
      rec(),
      rec({ kind: Kind.unreadable, uid: 13 }),
      false,
      'unreadable',
    ],
  ];
  for (const [name, base, now, missing, expected] of cases)
    t.equal(classify(base, now, missing), expected, name);
});

t.test('a scan without attributes trusts the ctime', async (t) => {
  t.ok(untouched(dir({ xattrs: Buffer.from('x') }), dir()));
  t.notOk(untouched(dir({ xattrs: Buffer.from('x') }), dir({ ctimeNs: 21n })));
  t.notOk(untouched(rec(), dir()));
});

t.test('the same state on another machine has another inode and ctime', async (t) => {
  t.ok(sameState(rec(), rec({ ino: 99n, ctimeNs: 99n })));
  t.notOk(sameState(rec(), rec({ hash: Buffer.alloc(32, 2) })));
  t.notOk(sameState(rec({ linkGroup: 7n }), rec()));
  t.notOk(sameState(rec(), rec({ uid: 1 })));
  t.notOk(sameState(rec({ flags: 0 }), rec({ flags: 0 })), 'without a hash nothing is known of the content');
});

t.test('a renamed file is known by inode, size and mtime; a hard link never', async (t) => {
  t.ok(sameFileElsewhere(rec(), rec({ path: Buffer.from('g'), ctimeNs: 30n })));
  t.notOk(sameFileElsewhere(rec(), rec({ mtimeNs: 11n })));
  t.notOk(sameFileElsewhere(rec(), rec({ size: 6 })));
  t.notOk(sameFileElsewhere(rec(), rec({ ino: 8n })));
  t.notOk(sameFileElsewhere(rec({ linkGroup: 7n }), rec({ linkGroup: 7n })));
  const moved = movedRecord(rec({ path: Buffer.from('g'), hash: Buffer.alloc(32), flags: 0 }), rec());
  t.ok(sameState(rec(), moved));
  t.equal(targetOf(moved).toString(), 'f');
});

t.test('the guard against mass deletes (A9, A11, D31)', async (t) => {
  const gone = (n: number, explained: boolean) =>
    Array.from({ length: n }, (_, i) => ({ path: Buffer.from(`${i}`), explained }));
  t.equal(isMassDelete(gone(1000, true), 1000).held, false, 'seen deletions are what the user wants');
  t.equal(isMassDelete(gone(51, false), 100).held, true);
  t.equal(isMassDelete(gone(50, false), 100).held, false, 'not more than half');
  t.equal(isMassDelete(gone(10, false), 10).held, false, 'not more than ten');
  t.equal(isMassDelete([...gone(60, true), ...gone(40, false)], 100).held, false);
  t.equal(isMassDelete([...gone(40, true), ...gone(60, false)], 100).held, true);
});
