import { execFileSync } from 'node:child_process';
import {
  appendFileSync,
  chmodSync,
  closeSync,
  existsSync,
  linkSync,
  lstatSync,
  mkdirSync,
  openSync,
  readdirSync,
  readFileSync,
  renameSync,
  rmSync,
  symlinkSync,
  truncateSync,
  unlinkSync,
  utimesSync,
  writeFileSync,
  writeSync,
} from 'node:fs';
import { join } from 'node:path';
import { setTimeout as sleep } from 'node:timers/promises';
import t from 'tap';
import {
  Flag,
  flagsOf,
  inoOf,
  Kind,
  kindOf,
  linkGroupOf,
  pathOf,
  seqOf,
  targetOf,
  withFields,
} from '../../lib/core/record.ts';
import { native } from '../../lib/native/load.ts';
import type { Native } from '../../lib/native/types.ts';
import { makeBase, makeRig, QUICK, type Rig, type RigOptions, treeDifferences, until } from './support.ts';

t.setTimeout(0); // the runner limits the file as a whole

const b = (s: string): Buffer => Buffer.from(s);

/** A started volume with some content, sealed once. */
async function started(
  t: { teardown(fn: () => unknown): unknown },
  fill: (live: string) => void = () => {},
  options: RigOptions = {},
  policy = QUICK,
): Promise<Rig> {
  const rig = makeRig(options);
  t.teardown(() => rig.close());
  fill(rig.live);
  await rig.source.recover();
  await rig.source.start(policy, 1);
  await rig.source.flush();
  return rig;
}
const same = (rig: Rig): string[] => treeDifferences(rig.live, rig.data);
const conditions = (rig: Rig): string[] => rig.source.status().conditions.map((c) => c.type);
const many = (live: string, n = 30): void => {
  mkdirSync(join(live, 'd'));
  for (let i = 0; i < n; i++) writeFileSync(join(live, 'd', `f${i}`), `content ${i}`);
};
/** The addon with some calls replaced. */
const withNative = (change: Partial<Native>): RigOptions => ({
  deps: {
    native: new Proxy(native, { get: (n, key) => change[key as keyof Native] ?? n[key as keyof Native] }),
  },
});
const errno = (code: string): Error => Object.assign(new Error(`${code}: test`), { code });

t.test('an empty volume gets a first generation too', async (t) => {
  const rig = await started(t);
  t.strictSame(rig.source.generation(), { epoch: 1, seq: 1 });
  t.ok(rig.source.complete());
  t.strictSame(
    rig.sealed.map((s) => s.generation),
    [{ epoch: 1, seq: 1 }],
  );
});

t.test('an idle volume seals nothing more, and a second flush changes nothing', async (t) => {
  const rig = await started(t, (live) => many(live));
  await rig.source.flush();
  await sleep(200);
  t.strictSame(rig.source.generation(), { epoch: 1, seq: 1 });
  t.equal(rig.store.totals().entries, 32);
});

t.test(
  'changes are sealed by themselves after the debounce; one change is one generation (C11)',
  async (t) => {
    const rig = await started(t, (live) => many(live));
    writeFileSync(join(rig.live, 'd/f1'), 'new');
    await until('the second generation', () => rig.sealed.length === 2);
    await sleep(200);
    t.equal(rig.sealed.length, 2);
    t.strictSame(same(rig), []);
  },
);

t.test('constant writing does not starve the batches (C9)', async (t) => {
  const rig = await started(t, () => {}, {}, { ...QUICK, debounceMs: 500, maxDelayMs: 600 });
  const writer = setInterval(() => appendFileSync(join(rig.live, 'log'), 'line\n'), 20);
  t.teardown(() => clearInterval(writer));
  await until('three generations', () => rig.sealed.length >= 4, 8000);
  clearInterval(writer);
  await rig.source.flush();
  t.strictSame(same(rig), []);
});

t.test('an error in the middle of a batch loses nothing: its marks come back (A1, A8)', async (t) => {
  let failing = 0;
  const rig = await started(
    t,
    (live) => many(live),
    withNative({
      stage: (options, items) =>
        failing-- > 0 ? Promise.reject(errno('EIO')) : native.stage(options, items),
    }),
  );
  failing = 2;
  writeFileSync(join(rig.live, 'd/f3'), 'not lost');
  await until('the change is sealed', () => rig.sealed.length === 2);
  t.strictSame(same(rig), []);
  t.notOk(conditions(rig).includes('BatchFailed'), 'the condition is over');
});

t.test(
  'a full shadow disk is a condition and heals by itself; the application is not touched (D30)',
  async (t) => {
    let full = false;
    const rig = await started(
      t,
      (live) => many(live),
      withNative({
        stage: (options, items) => (full ? Promise.reject(errno('ENOSPC')) : native.stage(options, items)),
      }),
    );
    full = true;
    writeFileSync(join(rig.live, 'd/f3'), 'more');
    await until('the condition', () => conditions(rig).includes('NoSpace'));
    t.notOk(rig.source.complete());
    t.equal(readFileSync(join(rig.live, 'd/f3'), 'utf8'), 'more');
    t.equal(readFileSync(join(rig.data, 'd/f3'), 'utf8'), 'content 3', 'the last version stays');
    full = false;
    await until('sealed', () => rig.sealed.length === 2);
    t.strictSame(same(rig), []);
    t.strictSame(conditions(rig), []);
  },
);

t.test('what happened while the agent was down is the next batch (A8, A7)', async (t) => {
  let rig = await started(t, (live) => many(live));
  const { seq } = rig.source.generation() as { seq: number };
  rig = await rig.restart();
  t.teardown(() => rig.close());
  writeFileSync(join(rig.live, 'd/f1'), 'changed while down');
  unlinkSync(join(rig.live, 'd/f2'));
  mkdirSync(join(rig.live, 'new'));
  writeFileSync(join(rig.live, 'new/x'), 'x');
  renameSync(join(rig.live, 'd/f4'), join(rig.live, 'new/f4'));
  // same length, mtime set back (A4, D19)
  const s = lstatSync(join(rig.live, 'd/f5'));
  writeFileSync(join(rig.live, 'd/f5'), 'CONTENT 5');
  utimesSync(join(rig.live, 'd/f5'), s.atime, s.mtime);
  await rig.source.start(QUICK, 1);
  await rig.source.flush();
  t.strictSame(rig.source.generation(), { epoch: 1, seq: seq + 1 });
  t.strictSame(same(rig), []);
  t.equal(rig.source.status().lastBatch?.moved, 1, 'the renamed file was not copied');
});

t.test('a restart without changes seals nothing', async (t) => {
  let rig = await started(t, (live) => many(live));
  rig = await rig.restart();
  t.teardown(() => rig.close());
  await rig.source.start(QUICK, 1);
  await rig.source.flush();
  t.strictSame(rig.source.generation(), { epoch: 1, seq: 1 });
  t.ok(rig.source.complete());
});

t.test('a live tree that disappears is never a mass delete, and comes back by itself (A9)', async (t) => {
  const rig = await started(t, (live) => many(live));
  renameSync(rig.live, `${rig.live}-away`);
  await until('held', () => conditions(rig).includes('RootChanged'));
  await t.rejects(rig.source.flush(), { code: 'HELD' });
  t.notOk(rig.source.complete());
  t.equal(readdirSync(join(rig.data, 'd')).length, 30);
  renameSync(`${rig.live}-away`, rig.live);
  writeFileSync(join(rig.live, 'd/f1'), 'back');
  await until('released', () => rig.source.complete() && rig.sealed.length === 2, 15_000);
  t.strictSame(same(rig), []);
});

t.test('an empty directory in place of the volume is refused, also after a restart (D31, A12)', async (t) => {
  let rig = await started(t, (live) => many(live));
  rig = await rig.restart();
  t.teardown(() => rig.close());
  renameSync(rig.live, `${rig.live}-away`);
  mkdirSync(rig.live);
  await rig.source.start(QUICK, 1);
  t.equal(rig.source.status().state, 'held');
  await t.rejects(rig.source.flush(), { code: 'HELD' });
  t.equal(rig.store.totals().entries, 32);
  await t.rejects(rig.source.force('MassDelete'), { code: 'FIELD_INVALID' }, 'only what holds can be lifted');
  await rig.source.force('RootChanged').catch(() => undefined);
  t.strictSame(conditions(rig), ['MassDelete'], 'and the next guard stands behind it (A11)');
  await rig.source.force('MassDelete');
  t.equal(rig.store.totals().entries, 1);
  t.strictSame(same(rig), []);
});

t.test('deletions that were seen pass, those that nobody saw are held until force (A11)', async (t) => {
  let rig = await started(t, (live) => many(live, 40));
  rmSync(join(rig.live, 'd'), { recursive: true });
  await rig.source.flush();
  t.strictSame(same(rig), [], 'rm -r with the watch running is what the user wants');
  many(rig.live, 40);
  await rig.source.flush();
  rig = await rig.restart();
  t.teardown(() => rig.close());
  rmSync(join(rig.live, 'd'), { recursive: true });
  await rig.source.start(QUICK, 1);
  await t.rejects(rig.source.flush(), { code: 'HELD', message: /41 of 42 entries/ });
  t.equal(readdirSync(join(rig.data, 'd')).length, 40);
  await rig.source.force('MassDelete');
  t.strictSame(same(rig), []);
  t.strictSame(conditions(rig), []);
});

t.test('a mass delete cannot slip through in small batches', async (t) => {
  let rig = await started(t, (live) => many(live, 60), { deps: { batchLimit: 12 } });
  rig = await rig.restart();
  t.teardown(() => rig.close());
  rmSync(join(rig.live, 'd'), { recursive: true });
  await rig.source.start(QUICK, 1);
  await t.rejects(rig.source.flush(), { code: 'HELD' });
  t.equal(rig.store.totals().entries, 62);
});

t.test('nothing is sealed while a required path is missing; files and directories count (E5)', async (t) => {
  const rig = makeRig();
  t.teardown(() => rig.close());
  mkdirSync(join(rig.live, 'save'));
  symlinkSync('x', join(rig.live, 'save/link'));
  await rig.source.start({ ...QUICK, requiredPaths: ['save/', 'server.json'] }, 1);
  await t.rejects(rig.source.flush(), { code: 'HELD' });
  t.equal(rig.source.generation(), null);
  t.match(rig.source.status().conditions, [
    { type: 'RequiredPathMissing', paths: ['server.json'], count: 1 },
  ]);
  writeFileSync(join(rig.live, 'server.json'), '{}');
  await rig.source.flush();
  t.strictSame(same(rig), []);
  t.strictSame(conditions(rig), []);
  rmSync(join(rig.live, 'server.json'));
  await t.rejects(rig.source.flush(), { code: 'HELD' });
  t.ok(existsSync(join(rig.data, 'server.json')));
});

t.test('links, FIFOs, sockets and kind changes end nothing (C1, C2, C4, D13, D15)', async (t) => {
  const rig = await started(t, (live) => many(live, 3));
  symlinkSync('nope', join(rig.live, 'dangling'));
  symlinkSync('/etc/passwd', join(rig.live, 'absolute'));
  symlinkSync('loop', join(rig.live, 'loop'));
  execFileSync('mkfifo', [join(rig.live, 'fifo')]);
  await rig.source.flush();
  t.strictSame(same(rig), []);
  t.match(rig.source.status().conditions, [{ type: 'Unsupported', paths: ['fifo'], count: 1 }]);
  t.ok(rig.source.complete(), 'a FIFO is no pending change');
  rmSync(join(rig.live, 'd'), { recursive: true });
  writeFileSync(join(rig.live, 'd'), 'now a file');
  rmSync(join(rig.live, 'dangling'));
  mkdirSync(join(rig.live, 'dangling'));
  writeFileSync(join(rig.live, 'dangling/x'), 'x');
  rmSync(join(rig.live, 'fifo'));
  await rig.source.flush();
  t.strictSame(same(rig), []);
  t.strictSame(conditions(rig), []);
  rmSync(join(rig.live, 'd'));
  symlinkSync('dangling', join(rig.live, 'd'));
  rmSync(join(rig.live, 'absolute'));
  writeFileSync(join(rig.live, 'absolute'), 'file');
  await rig.source.flush();
  t.strictSame(same(rig), []);
});

t.test(
  'a file that cannot be read is reported, never deleted, and nothing is called complete (A10, D16)',
  async (t) => {
    let broken = false;
    const rig = await started(
      t,
      (live) => many(live),
      withNative({
        async stage(options, items) {
          const out = await native.stage(options, items);
          // as if read(2) had failed with EIO: every result becomes an error
          if (broken)
            for (let at = 0; at < out.length; at += out.readUInt32LE(at)) {
              out[at + 8] = 3;
              out[at + 9] = 0;
              out.writeUInt16LE(5, at + 10);
            }
          return out;
        },
      }),
    );
    broken = true;
    writeFileSync(join(rig.live, 'd/f1'), 'cannot be read');
    await rig.source.flush();
    t.match(rig.source.status().conditions, [{ type: 'Unreadable', paths: ['d/f1'] }]);
    t.notOk(rig.source.complete());
    t.equal(readFileSync(join(rig.data, 'd/f1'), 'utf8'), 'content 1', 'the last version stays');
    broken = false;
    appendFileSync(join(rig.live, 'd/f1'), '!');
    await rig.source.flush();
    t.strictSame(same(rig), []);
    t.ok(rig.source.complete());
  },
);

t.test('renames are renames: nothing is copied, whatever is renamed (lsyncd#225)', async (t) => {
  const rig = await started(t, (live) => {
    many(live);
    writeFileSync(join(live, 'big'), Buffer.alloc(3 << 20, 1));
    for (const n of [1, 2, 3]) writeFileSync(join(live, `log.${n}`), `log number ${n}`);
  });
  const inode = lstatSync(join(rig.data, 'big')).ino;
  renameSync(join(rig.live, 'd'), join(rig.live, 'e'));
  renameSync(join(rig.live, 'big'), join(rig.live, 'e/big'));
  // a chain over names that exist
  renameSync(join(rig.live, 'log.2'), join(rig.live, 'log.3'));
  renameSync(join(rig.live, 'log.1'), join(rig.live, 'log.2'));
  await rig.source.flush();
  t.strictSame(same(rig), []);
  t.match(rig.source.status().lastBatch, { bytesWritten: 0, moved: 33 });
  t.equal(lstatSync(join(rig.data, 'e/big')).ino, inode);
  const row = rig.store.get(b('e/big'));
  t.ok(flagsOf(row!.record) & Flag.moved);
  t.equal(targetOf(row!.record).toString(), 'big');
});

t.test('a file that was written after its rename is copied', async (t) => {
  const rig = await started(t, (live) => writeFileSync(join(live, 'a'), 'one'));
  const s = lstatSync(join(rig.live, 'a'));
  renameSync(join(rig.live, 'a'), join(rig.live, 'b'));
  const fd = openSync(join(rig.live, 'b'), 'r+');
  writeSync(fd, 'two');
  closeSync(fd);
  utimesSync(join(rig.live, 'b'), s.atime, s.mtime);
  await rig.source.flush();
  t.equal(readFileSync(join(rig.data, 'b'), 'utf8'), 'two');
  t.notOk(existsSync(join(rig.data, 'a')));
});

t.test('of a large file only the changed blocks are written, and differences know them', async (t) => {
  const rig = await started(t, (live) => writeFileSync(join(live, 'big'), Buffer.alloc(8 << 20, 7)));
  const inode = lstatSync(join(rig.data, 'big')).ino;
  const fd = openSync(join(rig.live, 'big'), 'r+');
  writeSync(fd, Buffer.alloc(10, 1), 0, 10, 1 << 20);
  writeSync(fd, Buffer.alloc(10, 2), 0, 10, 5 << 20);
  closeSync(fd);
  await rig.source.flush();
  t.strictSame(same(rig), []);
  t.ok((rig.source.status().lastBatch?.bytesWritten ?? 1e9) < 16_384);
  t.equal(lstatSync(join(rig.data, 'big')).ino, inode, 'patched in place');
  t.strictSame(rig.store.runsSince(b('big'), 1), [
    { offset: 1 << 20, length: 4096 },
    { offset: 5 << 20, length: 4096 },
  ]);
  truncateSync(join(rig.live, 'big'), 2 << 20);
  await rig.source.flush();
  truncateSync(join(rig.live, 'big'), 4 << 20);
  await rig.source.flush();
  t.strictSame(same(rig), []);
  const runs = rig.store.runsSince(b('big'), 1);
  t.ok(
    runs?.some((r) => r.offset <= 2 << 20 && r.offset + r.length >= 4 << 20),
    'what was cut off and grew back as zeros has changed',
  );
  appendFileSync(join(rig.live, 'big'), 'tail');
  await rig.source.flush();
  t.strictSame(same(rig), []);
});

t.test('a pinned generation stays as it was, whatever happens (A17)', async (t) => {
  const rig = await started(t, (live) => {
    many(live, 5);
    writeFileSync(join(live, 'big'), Buffer.alloc(2 << 20, 7));
  });
  const served = await rig.source.open();
  const read = (path: string): string | null => {
    const row = served.index.get(b(path));
    const folders = [
      ...readdirSync(join(rig.paths.shadow, 'retired'))
        .sort((x, y) => Number(x) - Number(y))
        .map((n) => join(rig.paths.shadow, 'retired', n)),
      rig.data,
    ];
    for (const folder of folders) {
      const file = join(folder, path);
      if (existsSync(file) && BigInt(lstatSync(file, { bigint: true }).ino) === row?.copyIno)
        return readFileSync(file, 'latin1');
    }
    return null;
  };
  const before = new Map(['d/f0', 'd/f1', 'd/f2', 'd/f3', 'd/f4', 'big'].map((p) => [p, read(p)]));
  writeFileSync(join(rig.live, 'd/f0'), 'replaced');
  unlinkSync(join(rig.live, 'd/f1'));
  renameSync(join(rig.live, 'd/f2'), join(rig.live, 'd/f2-moved'));
  chmodSync(join(rig.live, 'd/f3'), 0o600);
  const fd = openSync(join(rig.live, 'big'), 'r+');
  writeSync(fd, 'patched', 5000);
  closeSync(fd);
  await rig.source.flush();
  t.strictSame(same(rig), []);
  writeFileSync(join(rig.live, 'd/f0'), 'and once more');
  rmSync(join(rig.live, 'd'), { recursive: true });
  await rig.source.flush();
  for (const [path, content] of before) t.equal(read(path), content, path);
  t.strictSame(served.generation, { epoch: 1, seq: 1 });
  served.release();
  await until(
    'nothing is kept for nobody',
    () => readdirSync(join(rig.paths.shadow, 'retired')).length === 0,
  );
  served.release();
});

t.test(
  'a log that grows constantly is sealed again and again, each time as a state that it had (C3, D25)',
  async (t) => {
    const rig = await started(t, (live) => writeFileSync(join(live, 'log'), Buffer.alloc(4 << 20, 0x61)));
    let n = 0;
    const writer = setInterval(() => appendFileSync(join(rig.live, 'log'), `line ${n++}\n`.repeat(50)), 4);
    t.teardown(() => clearInterval(writer));
    for (let i = 0; i < 6; i++) {
      await rig.source.flush();
      const copy = readFileSync(join(rig.data, 'log'));
      t.ok(readFileSync(join(rig.live, 'log')).subarray(0, copy.length).equals(copy), 'a beginning of it');
    }
    clearInterval(writer);
    t.ok((rig.source.generation() as { seq: number }).seq >= 4);
    await rig.source.flush();
    t.strictSame(same(rig), []);
    t.strictSame(conditions(rig), []);
  },
);

t.test('pairs of files match in every generation that calls itself quiescent (A18)', async (t) => {
  const rig = await started(t);
  let n = 0;
  let stop = false;
  const writer = (async () => {
    while (!stop) {
      for (let burst = 0; burst < 5; burst++) {
        writeFileSync(join(rig.live, 'a'), String(n));
        await sleep(1);
        writeFileSync(join(rig.live, 'b'), String(n++));
      }
      await sleep(60);
    }
  })();
  let checked = 0;
  for (let i = 0; i < 25; i++) {
    const { quiescent } = await rig.source.flush();
    const served = await rig.source.open();
    if (quiescent && existsSync(join(rig.data, 'a'))) {
      const [x, y] = ['a', 'b'].map((p) => Number(readFileSync(join(rig.data, p), 'utf8')));
      t.ok(x === y || x === (y as number) + 1, `${x} ${y}: a state that there was`);
      checked++;
    }
    served.release();
  }
  stop = true;
  await writer;
  t.ok(checked > 3);
  await rig.source.flush();
  t.strictSame(same(rig), []);
});

t.test('an overflowing event queue costs time, no change (C6, D27)', async (t) => {
  const rig = await started(t, (live) => many(live, 5), { watcher: { maxQueuedEvents: 16 } });
  for (let round = 0; round < 6 && rig.source.status().watch.overflows === 0; round++) {
    for (let i = 0; i < 600; i++) writeFileSync(join(rig.live, `x${round}-${i}`), 'x');
    await rig.source.flush();
  }
  t.ok(rig.source.status().watch.overflows > 0);
  for (let i = 0; i < 300; i++) unlinkSync(join(rig.live, `x0-${i}`));
  await rig.source.flush();
  t.strictSame(same(rig), []);
});

t.test(
  'without watches the volume is still replicated, by scans, and says what it lacks (C7, D28)',
  async (t) => {
    const rig = await started(
      t,
      (live) => {
        for (let i = 0; i < 20; i++) mkdirSync(join(live, `d${i}`));
      },
      { watcher: { maxWatches: 5 } },
    );
    t.match(rig.source.status().conditions, [{ type: 'WatchBudgetExhausted', message: /max_user_watches/ }]);
    t.notOk(rig.source.complete(), 'nobody would tell of a change');
    for (let i = 0; i < 20; i++) writeFileSync(join(rig.live, `d${i}`, 'f'), 'x');
    t.ok((await rig.source.audit(0)) > 0);
    await rig.source.flush();
    t.strictSame(same(rig), []);
  },
);

t.test('hard links stay links, and a change through one name reaches all (D12, E4)', async (t) => {
  const rig = await started(t, (live) => {
    writeFileSync(join(live, 'h1'), 'one');
    linkSync(join(live, 'h1'), join(live, 'h2'));
    writeFileSync(join(live, 'lonely'), 'will get a name more');
  });
  t.equal(lstatSync(join(rig.data, 'h1')).nlink, 2);
  mkdirSync(join(rig.live, 'sub'));
  linkSync(join(rig.live, 'lonely'), join(rig.live, 'sub/second'));
  writeFileSync(join(rig.live, 'h2'), 'changed through the second name');
  await rig.source.flush();
  t.strictSame(same(rig), []);
  t.equal(lstatSync(join(rig.data, 'lonely')).ino, lstatSync(join(rig.data, 'sub/second')).ino);
  writeFileSync(join(rig.live, 'sub/second'), 'written under the new name');
  await rig.source.flush();
  t.strictSame(same(rig), []);
  // a copy of one name with other permissions must not pull the others with it
  writeFileSync(join(rig.live, 'tmp'), readFileSync(join(rig.live, 'h1')));
  renameSync(join(rig.live, 'tmp'), join(rig.live, 'h1'));
  chmodSync(join(rig.live, 'h1'), 0o600);
  await rig.source.flush();
  t.strictSame(same(rig), []);
  renameSync(join(rig.live, 'sub'), join(rig.live, 'sub2'));
  await rig.source.flush();
  t.strictSame(same(rig), []);
});

t.test('a further name changed by its own events only is found once more under the old one', async (t) => {
  const rig = await started(t, (live) => {
    mkdirSync(join(live, 'x'));
    mkdirSync(join(live, 'y'));
    writeFileSync(join(live, 'x/f'), 'v');
    linkSync(join(live, 'x/f'), join(live, 'y/f'));
  });
  appendFileSync(join(rig.live, 'y/f'), ' more');
  await rig.source.flush();
  t.equal(readFileSync(join(rig.data, 'x/f'), 'utf8'), 'v more');
  t.strictSame(same(rig), []);
});

t.test('a new epoch goes on with the numbers and appends to the lineage', async (t) => {
  const rig = await started(t, (live) => many(live, 3));
  await rig.source.stop();
  await rig.source.start(QUICK, 4);
  await rig.source.flush();
  t.strictSame(rig.source.generation(), { epoch: 4, seq: 2 });
  t.strictSame(rig.source.lineage(), [
    [1, 1],
    [4, 2],
  ]);
  t.ok(rig.source.canDiffFrom({ epoch: 1, seq: 1 }));
  t.notOk(rig.source.canDiffFrom({ epoch: 1, seq: 2 }), 'never was');
  t.notOk(rig.source.canDiffFrom({ epoch: 3, seq: 1 }), 'another line');
  await t.rejects(rig.source.start(QUICK, 3), { code: 'EPOCH_OLD' });
  await rig.source.start(QUICK, 4);
});

t.test(
  'a promoted replica keeps what it held: other inodes, no change; the shadow is put together anew',
  async (t) => {
    const first = await started(t, (live) => {
      many(live, 20);
      writeFileSync(join(live, 'big'), Buffer.alloc(2 << 20, 7));
      symlinkSync('big', join(live, 'l'));
    });
    // The index of a replica: the same rows, with inodes of another tree.
    const base = makeBase();
    execFileSync('cp', ['-a', `${first.live}/.`, join(base, 'live')]);
    const rig = makeRig({ base, deps: { batchLimit: 8 } });
    t.teardown(() => rig.close());
    await rig.store.transaction(() => {
      for (const { record } of first.store.page(null, 1000)) {
        const r = Buffer.from(record);
        r.writeBigUInt64LE(r.readBigUInt64LE(32) + 1_000_000n, 32);
        rig.store.put(r, 77n, first.store.chunks(pathOf(r)) ?? null);
      }
      for (const g of first.store.generations(1)) rig.store.addGeneration(g);
      rig.store.setMeta('lineage', [[1, 1]]);
    });
    await t.rejects(rig.source.open(), { code: /APPLYING|NOTHING_SEALED/ });
    await rig.source.recover();
    await rig.source.start(QUICK, 2);
    await rig.source.flush();
    t.strictSame(rig.source.generation(), { epoch: 2, seq: 2 });
    t.strictSame(treeDifferences(rig.live, rig.data), []);
    t.strictSame(
      rig.store.changedSince(1, null, 100).map((r) => pathOf(r.record).toString()),
      [],
      'nothing that replicas have to pull',
    );
    const served = await rig.source.open();
    t.equal(served.index.get(b('big'))?.copyIno, lstatSync(join(rig.data, 'big'), { bigint: true }).ino);
    served.release();
    await rig.source.stop();
  },
);

t.test('paths that a changed filter leaves out are no mass delete', async (t) => {
  const rig = await started(t, (live) => many(live, 40));
  await rig.source.start({ ...QUICK, excludePaths: ['d'] }, 1);
  await rig.source.flush();
  t.strictSame(conditions(rig), []);
  t.notOk(existsSync(join(rig.data, 'd')));
  await rig.source.start({ ...QUICK, includePaths: ['d/f1'] }, 1);
  await rig.source.flush();
  t.strictSame(readdirSync(join(rig.data, 'd')), ['f1']);
  await t.rejects(rig.source.start({ ...QUICK, includePaths: ['a['] }, 1), { code: 'PATTERN_INVALID' });
});

t.test('stop waits for the batch that is running (C14)', async (t) => {
  let staging = 0;
  const rig = await started(
    t,
    (live) => many(live, 3),
    withNative({
      async stage(options, items) {
        staging++;
        await sleep(150);
        try {
          return await native.stage(options, items);
        } finally {
          staging--;
        }
      },
    }),
  );
  writeFileSync(join(rig.live, 'd/f1'), 'slow');
  await until('staging', () => staging > 0);
  await rig.source.stop();
  t.equal(staging, 0);
  t.equal(rig.source.status().state, 'stopped');
});

t.test('live consistency: no shadow, the index alone, served from the live tree (A26, A27)', async (t) => {
  const policy = { ...QUICK, consistencyMode: 'live' as const };
  const rig = await started(
    t,
    (live) => {
      many(live, 5);
      writeFileSync(join(live, 'big'), Buffer.alloc(2 << 20, 7));
    },
    {},
    policy,
  );
  t.notOk(existsSync(join(rig.paths.shadow, 'current')));
  const fd = openSync(join(rig.live, 'big'), 'r+');
  writeSync(fd, 'x', 100_000);
  closeSync(fd);
  unlinkSync(join(rig.live, 'd/f1'));
  renameSync(join(rig.live, 'd/f2'), join(rig.live, 'd/g2'));
  mkdirSync(join(rig.live, 'empty'));
  chmodSync(join(rig.live, 'd'), 0o750);
  await rig.source.flush();
  t.strictSame(rig.source.generation(), { epoch: 1, seq: 2 });
  const served = await rig.source.open();
  t.equal(served.strict, true);
  t.equal(served.root.toString(), rig.live);
  t.equal(served.retired, null);
  const changed = new Map(
    served.index.changedSince(1, null, 100).map((r) => [pathOf(r.record).toString(), kindOf(r.record)]),
  );
  t.equal(changed.get('d/f1'), Kind.absent, 'deletions are told (A26)');
  t.equal(changed.get('d/f2'), Kind.absent);
  t.equal(changed.get('d/g2'), Kind.file);
  t.notOk(changed.has('d/f3'), 'chmod of a directory is not its contents (A27)');
  t.strictSame(served.runsSince(b('big'), 1), [{ offset: 65536, length: 65536 }]);
  served.release();
  // and over to a shadow: the copy is made, no generation is needed
  await rig.source.start(QUICK, 1);
  await rig.source.flush();
  t.strictSame(rig.source.generation(), { epoch: 1, seq: 2 });
  t.strictSame(same(rig), []);
  (await rig.source.open()).release();
});

t.test('odd names arrive byte by byte (D1, D2, D3, D4, D7, D9)', async (t) => {
  const names = [
    'é',
    'e\u0301',
    'hash#1',
    'q?a=1',
    '100%',
    'x%41',
    'a:b',
    'a\nb',
    ' lead',
    'trail ',
    '-rf',
    '*.txt',
    'back\\slash',
    '..data',
    'n'.repeat(255),
  ].map((n) => Buffer.from(n));
  names.push(Buffer.from('6261642dfffe', 'hex'));
  const rig = await started(t, (live) => {
    for (const [i, name] of names.entries())
      writeFileSync(Buffer.concat([b(live), b('/'), name]), `content ${i}`);
  });
  t.strictSame(same(rig), []);
  t.equal(readdirSync(rig.data).length, names.length);
});

t.test('a thousand new directories with a file each, none is missed (D21)', async (t) => {
  const rig = await started(t);
  for (let i = 0; i < 300; i++) {
    mkdirSync(join(rig.live, `${i}/b/c`), { recursive: true });
    writeFileSync(join(rig.live, `${i}/b/c/f`), 'x');
    if (i % 3 === 0) rmSync(join(rig.live, String(i)), { recursive: true });
  }
  await rig.source.flush();
  t.strictSame(same(rig), []);
  t.equal(await rig.source.audit(0), 0);
});

t.test('a file replaced by rename all the time is whole in every generation (D23)', async (t) => {
  const rig = await started(t);
  let n = 0;
  const writer = setInterval(() => {
    writeFileSync(join(rig.live, 't.tmp'), `version ${n++} `.repeat(500));
    renameSync(join(rig.live, 't.tmp'), join(rig.live, 't'));
  }, 2);
  t.teardown(() => clearInterval(writer));
  for (let i = 0; i < 8; i++) {
    await rig.source.flush();
    if (!existsSync(join(rig.data, 't'))) continue;
    const text = readFileSync(join(rig.data, 't'), 'utf8');
    t.match(text, /^(version \d+ )\1{499}$/);
  }
  clearInterval(writer);
  await rig.source.flush();
  t.strictSame(same(rig), []);
});

t.test('rows carry the generation in which they changed; nothing else is touched', async (t) => {
  const rig = await started(t, (live) => many(live, 3));
  writeFileSync(join(rig.live, 'd/f1'), 'new');
  await rig.source.flush();
  const seqs = rig.store.page(null, 100).map((r) => [pathOf(r.record).toString(), seqOf(r.record)]);
  t.strictSame(seqs, [
    ['', 1],
    ['d', 1],
    ['d/f0', 1],
    ['d/f1', 2],
    ['d/f2', 1],
  ]);
});

for (const [consistencyMode, batchLimit] of [
  ['shadow', 1000],
  ['shadow', 2],
  ['live', 1000],
  ['live', 2],
] as const)
  t.test(
    `a promoted replica with hard links: the old source's numbers end with the first generation (${consistencyMode}, ${batchLimit})`,
    async (t) => {
      const policy = { ...QUICK, consistencyMode };
      let rig = await started(
        t,
        (live) => {
          for (const g of ['g', 'h', 'k']) {
            writeFileSync(join(live, `${g}1`), 'the same content');
            for (const n of [2, 3]) linkSync(join(live, `${g}1`), join(live, `${g}${n}`));
          }
          writeFileSync(join(live, 'single'), 'single');
        },
        { deps: { batchLimit } },
        policy,
      );
      const inode = (path: string): bigint => lstatSync(join(rig.live, path), { bigint: true }).ino;
      await rig.source.stop();
      // As a replica holds it: identities of this tree, group numbers of another one (here each other's).
      const numbers = new Map([
        [inode('g1'), inode('h1')],
        [inode('h1'), inode('k1')],
        [inode('k1'), inode('g1')],
      ]);
      await rig.store.transaction(() => {
        for (const { record } of rig.store.page(null, 100)) {
          const linkGroup = numbers.get(linkGroupOf(record)) ?? 0n;
          rig.store.put(withFields(record, { linkGroup }), inoOf(record), null);
        }
        for (const key of ['copies', 'root']) rig.store.deleteMeta(key);
      });
      unlinkSync(join(rig.live, 'g1'));
      linkSync(join(rig.live, 'h1'), join(rig.live, 'h4'));
      rig = await rig.restart();
      t.teardown(() => rig.close());
      await rig.source.start(policy, 2);
      await rig.source.flush();
      t.strictSame(rig.source.generation(), { epoch: 2, seq: 2 });
      const wrong = (): string[] =>
        rig.store
          .page(null, 100)
          .filter(({ record }) => kindOf(record) === Kind.file)
          .map(({ record }) => [pathOf(record).toString(), linkGroupOf(record)] as const)
          .filter(([path, group]) => {
            const s = lstatSync(join(rig.live, path), { bigint: true });
            return group !== (s.nlink > 1n ? s.ino : 0n);
          })
          .map(([path, group]) => `${path} ${group}`);
      t.strictSame(wrong(), []);
      t.strictSame(
        rig.store.changedSince(1, null, 100).map((r) => pathOf(r.record).toString()),
        ['', 'g1', 'g2', 'g3', 'h1', 'h2', 'h3', 'h4', 'k1', 'k2', 'k3'],
        'replicas are told of all groups, and of nothing else',
      );
      if (consistencyMode === 'shadow') t.strictSame(same(rig), []);
      linkSync(join(rig.live, 'k1'), join(rig.live, 'k4'));
      unlinkSync(join(rig.live, 'h2'));
      appendFileSync(join(rig.live, 'g3'), ' changed');
      await rig.source.flush();
      t.strictSame(wrong(), []);
      if (consistencyMode === 'shadow') t.strictSame(same(rig), []);
      t.strictSame(
        rig.store.changedSince(2, null, 100).map((r) => pathOf(r.record).toString()),
        ['', 'g2', 'g3', 'h2', 'k4'],
      );
    },
  );

t.test('it says that it watches when it does: what comes from then on is seen (C15)', async (t) => {
  const rig = makeRig();
  t.teardown(() => rig.close());
  for (let i = 0; i < 40; i++) mkdirSync(join(rig.live, `a${i}/b/c`), { recursive: true });
  await rig.source.recover();
  t.equal(rig.source.status().state, 'stopped');
  await rig.source.start(QUICK, 1);
  t.notOk(
    ['watching', 'stopped'].includes(rig.source.status().state),
    'nothing is claimed before it is true',
  );
  await until('it says so', () => rig.source.status().state === 'watching');
  t.equal(rig.source.status().watch.directories, 121, 'each directory has its watch by then');
  for (let i = 0; i < 40; i++) writeFileSync(join(rig.live, `a${i}/b/c/at-once`), `${i}`);
  await until('all is found by its events', () => rig.store.totals().entries === 161);
  await rig.source.flush();
  t.strictSame(same(rig), []);
});

t.test('a start that cannot watch says so at once, not at the next look (C15)', async (t) => {
  const rig = makeRig();
  t.teardown(() => rig.close());
  await rig.source.recover();
  rmSync(rig.live, { recursive: true });
  await rig.source.start(QUICK, 1).catch(() => {});
  t.equal(rig.source.status().state, 'held');
  t.not(conditions(rig).length, 0);
});

t.test('what other volumes wake while a watch begins does not begin it twice', async (t) => {
  const rig = makeRig({
    deps: {
      native: {
        ...native,
        removeTree: async (...path) => {
          await sleep(20); // as on a busy machine
          return native.removeTree(...path);
        },
      },
    },
  });
  t.teardown(() => rig.close());
  writeFileSync(join(rig.live, 'f'), 'x');
  for (const epoch of [1, 2, 3]) {
    const started = rig.source.start(QUICK, epoch);
    rig.source.wake();
    await started;
    t.equal(rig.source.status().state, 'scanning');
  }
  await rig.source.flush();
  t.same(rig.source.status().conditions, []);
  t.same(
    rig.log.filter((line) => line.level === 'warn'),
    [],
  );
});
