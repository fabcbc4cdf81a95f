/** The addon's border of filters, scans and the watcher: bytes in and out, errors with codes, workers, and the exit. */
import { spawn } from 'node:child_process';
import * as fs from 'node:fs';
import path from 'node:path';
import { Worker } from 'node:worker_threads';
import t from 'tap';
import { decodeMarks, encodeMarks, encodePaths, type Mark, MarkBit, MarkType } from '../../lib/core/lists.ts';
import { Kind, kindOf, pathOf, recordsIn, targetOf, uidOf } from '../../lib/core/record.ts';
import { native } from '../../lib/native/load.ts';
import type { Filter, NativeError, Watcher } from '../../lib/native/types.ts';

const b = (s: string): Buffer => Buffer.from(s);
const everything = (): Filter => native.compileFilter([], []);
const thrown = (call: () => unknown): NativeError & { pattern?: Buffer; reason?: string } => {
  try {
    call();
  } catch (error) {
    return error as NativeError;
  }
  throw new Error('nothing was thrown');
};

async function scanAll(
  root: string,
  directory: Buffer,
  filter: Filter,
  deep: boolean,
  bytes = 4096,
): Promise<Buffer[]> {
  const scanner = native.scan(b(root), directory, filter, deep);
  const out: Buffer[] = [];
  for (;;) {
    const part = await scanner.next(bytes);
    if (part === null) return out;
    out.push(...recordsIn(part));
  }
}
async function marksOf(watcher: Watcher, volume: number): Promise<Mark[]> {
  await watcher.barrier();
  return decodeMarks(watcher.take(volume));
}
const named = (marks: Mark[], name: Buffer): Mark | undefined => marks.find((m) => m.path.equals(name));

t.test('filters answer 0, 1 and 2, and name the pattern that is wrong', async (t) => {
  const filter = native.compileFilter([b('world/region/*.mca'), b('save')], [b('save/cache')]);
  t.equal(filter.match(b('world'), true), 2);
  t.equal(filter.match(b('world/region/r.mca'), false), 1);
  t.equal(filter.match(b('world/other'), false), 0);
  t.equal(filter.match(b('save/x/y'), false), 1);
  t.equal(filter.match(b('save/cache/y'), false), 0);
  t.equal(
    native.compileFilter([Buffer.from([0x5b, 0x80, 0x2d, 0xff, 0x5d])], []).match(Buffer.from([0xfe]), false),
    1,
  );
  const error = thrown(() => native.compileFilter([b('ok')], [b('a/[x')]));
  t.equal(error.code, 'PATTERN_INVALID');
  t.same(error.pattern, b('a/[x'));
  t.match(error.reason, /\]/);
  t.throws(() => native.compileFilter(['text' as unknown as Buffer], []), TypeError);
  t.throws(() => native.compileFilter('text' as unknown as Buffer[], []), TypeError);
  t.throws(() => filter.match('text' as unknown as Buffer, false), TypeError);
});

t.test('scan and stat carry names as bytes, in the order of paths', async (t) => {
  const dir = t.testdir({ a: { x: '1' }, 'a-b': '2', d: {} });
  const odd = Buffer.from([0x62, 0xff, 0xfe, 0x0a]);
  fs.writeFileSync(Buffer.concat([b(`${dir}/`), odd]), 'x');
  fs.symlinkSync('a/x', `${dir}/link`);
  const records = await scanAll(dir, b(''), everything(), true, 1);
  t.same(records.map(pathOf), [b(''), b('a'), b('a-b'), b('a/x'), odd, b('d'), b('link')]);
  t.same((await scanAll(dir, b('a'), everything(), false)).map(pathOf), [b('a'), b('a/x')]);
  const stats = [
    ...recordsIn(await native.stat(b(dir), encodePaths([odd, b('link'), b('a/x/y'), b('none'), b('d')]))),
  ];
  t.same(stats.map(kindOf), [Kind.file, Kind.symlink, Kind.absent, Kind.absent, Kind.directory]);
  t.same(targetOf(stats[1] as Buffer), b('a/x'));
  await t.rejects(native.stat(b(`${dir}/none`), encodePaths([b('x')])), {
    code: 'ENOENT',
    path: b(`${dir}/none`),
  });
  await t.rejects(native.stat(b(dir), b('\x09\0\0\0')), { code: 'FORMAT_INVALID' });
  await t.rejects(native.scan(b(`${dir}/none`), b(''), everything(), true).next(10), { code: 'ENOENT' });
  t.throws(() => native.scan(b(dir), b(''), {} as Filter, true), TypeError);
});

t.test('a scan that is closed never looks like a scan that ended', async (t) => {
  const dir = t.testdir({ a: '1', b: '2', c: '3' });
  const scanner = native.scan(b(dir), b(''), everything(), true);
  t.ok(await scanner.next(1));
  scanner.close();
  t.equal(thrown(() => scanner.next(1)).code, 'CLOSED');
  scanner.close();
});

// An idle watcher keeps no process alive, so the file has to while it waits for one.
const alive = setInterval(() => {}, 1000);
t.teardown(() => clearInterval(alive));

t.test('a change makes a mark, rings once, and can be given back', async (t) => {
  const dir = t.testdir({ live: { d: {} } });
  const root = path.join(dir, 'live');
  let rung = 0;
  let ring = (): void => {};
  const watcher = native.createWatcher(() => {
    rung++;
    ring();
  });
  t.teardown(() => watcher.close());
  const added = await watcher.add(7, b(root), everything());
  const stat = fs.statSync(root, { bigint: true });
  t.equal(added.directories, 2);
  t.equal(BigInt(added.ino), stat.ino);
  t.equal((await native.probe(b(dir))).dev, added.dev);
  t.same(watcher.take(7), b(''));
  t.match(watcher.state(7), {
    dirty: 0,
    firstMs: null,
    lastMs: null,
    rootLost: false,
    watches: 2,
    unwatched: 0,
    watchErrno: 0,
  });

  const rang = new Promise<void>((resolve) => {
    ring = resolve;
  });
  const odd = Buffer.from([0x64, 0x2f, 0xff, 0x0a]);
  fs.writeFileSync(Buffer.concat([b(`${root}/`), odd]), 'x');
  const alive = setInterval(() => {}, 1000); // the watcher itself does not keep the process alive
  await rang;
  clearInterval(alive);
  await watcher.barrier();
  t.equal(rung, 1);
  const state = watcher.state(7);
  t.ok(state.dirty >= 1 && state.events >= 1);
  t.ok(state.firstMs !== null && state.lastMs !== null && state.firstMs <= state.lastMs);
  const taken = watcher.take(7);
  const mark = named(decodeMarks(taken), odd);
  t.equal(mark?.type, MarkType.path);
  t.equal((mark?.bits ?? 0) & MarkBit.created, MarkBit.created);
  t.ok(named(decodeMarks(taken), b('d')), 'the directory has a new mtime');
  t.equal(watcher.state(7).dirty, 0);
  watcher.putBack(7, encodeMarks([mark as Mark]));
  t.same(decodeMarks(watcher.take(7)), [mark]);
  t.equal(thrown(() => watcher.putBack(7, b('xx'))).code, 'FORMAT_INVALID');
  t.equal(thrown(() => watcher.state(8)).code, 'ENOENT');
  t.throws(() => watcher.state(-1), RangeError);
});

t.test('a new tree is marked when it is watched, a lost root is said', async (t) => {
  const dir = t.testdir({ live: {}, tree: { a: { b: { f: 'x' } } } });
  const root = path.join(dir, 'live');
  const watcher = native.createWatcher(() => {});
  t.teardown(() => watcher.close());
  await watcher.add(1, b(root), everything());
  fs.renameSync(path.join(dir, 'tree'), path.join(root, 'tree'));
  t.match(
    (await marksOf(watcher, 1)).filter((m) => m.type === MarkType.subtree),
    [{ path: b('tree') }],
  );
  t.equal(watcher.state(1).watches, 4);
  await t.rejects(watcher.add(1, b(dir), everything()), { code: 'EEXIST' });
  await t.rejects(watcher.add(2, b(`${dir}/none`), everything()), { code: 'ENOENT' });
  fs.renameSync(root, path.join(dir, 'gone'));
  await watcher.barrier();
  t.equal(watcher.state(1).rootLost, true);
  await watcher.remove(1);
  t.equal(thrown(() => watcher.state(1)).code, 'ENOENT');
});

t.test('without watches left the errno is told, and retry() mends it', async (t) => {
  const dir = t.testdir({ a: { b: {} }, c: {} });
  const watcher = native.createWatcher(() => {}, { maxWatches: 2 });
  t.teardown(() => watcher.close());
  await watcher.add(1, b(dir), everything());
  t.match(watcher.state(1), { watches: 2, unwatched: 2, watchErrno: 28 });
  fs.rmSync(path.join(dir, 'a'), { recursive: true });
  fs.rmSync(path.join(dir, 'c'), { recursive: true });
  await watcher.barrier();
  await watcher.retry();
  t.match(watcher.state(1), { watches: 1, unwatched: 0, watchErrno: 0 });
});

t.test('close is idempotent, and what comes after it says CLOSED', async (t) => {
  const watcher = native.createWatcher(() => {});
  const dir = t.testdir({ d: {} });
  await watcher.add(1, b(dir), everything());
  const first = watcher.close();
  await Promise.all([first, watcher.close()]);
  await watcher.close();
  for (const call of [
    () => watcher.take(1),
    () => watcher.barrier(),
    () => watcher.state(1),
    () => watcher.retry(),
  ]) {
    t.equal(thrown(call).code, 'CLOSED');
  }
});

t.test(
  'unreadable is not absent',
  { skip: process.getuid?.() === 0 ? 'root reads everything' : false },
  async (t) => {
    const dir = t.testdir({ d: { f: 'x' } });
    fs.chmodSync(`${dir}/d`, 0);
    t.teardown(() => fs.chmodSync(`${dir}/d`, 0o755));
    const records = await scanAll(dir, b(''), everything(), true);
    t.equal(kindOf(records[1] as Buffer), Kind.unreadable);
    t.equal(uidOf(records[1] as Buffer), 13);
  },
);

const loader = new URL('../../lib/native/load.ts', import.meta.url).href;

t.test('workers have watchers of their own and may end with them open', async (t) => {
  const dir = t.testdir({ a: {}, b: {} });
  const script = `
    import fs from 'node:fs';
    import { parentPort, workerData } from 'node:worker_threads';
    const { native } = await import(workerData.loader);
    const watcher = native.createWatcher(() => parentPort.postMessage('rung'));
    await watcher.add(1, Buffer.from(workerData.root), native.compileFilter([], []));
    fs.writeFileSync(workerData.root + '/f', 'x');
    await watcher.barrier();
    parentPort.postMessage(watcher.take(1).length > 0 ? 'marked' : 'nothing');
    for (let i = 0; i < 50; i++) watcher.barrier();
    if (workerData.hold) setInterval(() => fs.writeFileSync(workerData.root + '/f', 'x'), 1);
    else process.exit(0);
  `;
  const run = (name: string, hold: boolean): Promise<string[]> =>
    new Promise((resolve, reject) => {
      const worker = new Worker(new URL(`data:text/javascript,${encodeURIComponent(script)}`), {
        workerData: { loader, root: path.join(dir, name), hold },
      });
      const heard: string[] = [];
      worker.on('message', (m: string) => {
        heard.push(m);
        if (hold && heard.includes('rung') && heard.includes('marked')) void worker.terminate();
      });
      worker.on('error', reject);
      worker.on('exit', () => resolve(heard));
    });
  const [a, held] = await Promise.all([run('a', false), run('b', true)]);
  t.ok(a?.includes('marked'));
  t.ok(held?.includes('marked') && held.includes('rung'));
});

t.test('the process exits with an open watcher, and an idle one does not keep it alive', async (t) => {
  const dir = t.testdir({ d: {} });
  const script = (end: string): string => `
    const { native } = await import(${JSON.stringify(loader)});
    const watcher = native.createWatcher(() => {});
    await watcher.add(1, Buffer.from(${JSON.stringify(dir)}), native.compileFilter([], []));
    (await import('node:fs')).writeFileSync(${JSON.stringify(`${dir}/f`)}, 'x');
    watcher.barrier();
    ${end}`;
  for (const end of ['', 'process.exit(0);', 'await watcher.barrier(); watcher.close();']) {
    const child = spawn(process.execPath, ['--input-type=module', '-e', script(end)], { stdio: 'inherit' });
    const [status, signal] = await new Promise<[number | null, string | null]>((resolve) =>
      child.on('exit', (c, s) => resolve([c, s])),
    );
    t.same([status, signal], [0, null], end || 'falls off the end');
  }
});
