import { execFileSync } from 'node:child_process';
import fs from 'node:fs';
import os from 'node:os';
import path from 'node:path';
import t from 'tap';
import { DEFAULT_POLICY } from '../../lib/core/policy.ts';
import { indexFaults, picture, settled, until, type World, world } from './support.ts';

const put = (root: string, name: string, data: string | Buffer, mode = 0o644): void => {
  const file = path.join(root, name);
  fs.mkdirSync(path.dirname(file), { recursive: true });
  fs.writeFileSync(file, data, { mode });
  fs.chmodSync(file, mode);
};
const read = (w: World, name: string): string => fs.readFileSync(path.join(w.live, name), 'utf8');

async function fullSync(w: World, more = {}): Promise<string> {
  const { id, started } = w.replica.fullSync(w.request(more));
  if (!started) throw new Error('not started');
  await until(() => w.replica.fullSyncRun(id)?.state !== 'running');
  await settled(w.replica);
  return id;
}

t.test('A4: same size, same mtime, other bytes: a full sync repairs it and pulls nothing else', async (t) => {
  const w = await world();
  t.teardown(() => w.close());
  for (let i = 0; i < 20; i++) put(w.source.root, `d/f${i}`, `content ${i}`);
  await w.source.seal();
  await w.sync();
  const file = path.join(w.live, 'd/f3');
  const { atime, mtime } = fs.statSync(file);
  fs.writeFileSync(file, 'CONTENT 3');
  fs.utimesSync(file, atime, mtime);
  w.source.counts.ordinals = 0;
  await w.sync();
  t.equal(w.source.counts.ordinals, 0, 'a plain sync of the same generation does not look');
  const id = await fullSync(w);
  t.match(w.replica.fullSyncRun(id), { state: 'done', generation: '1-1' });
  t.equal(w.source.counts.ordinals, 1);
  t.same(picture(w.live), picture(w.source.root));
  t.same(await indexFaults(w), []);
  await fullSync(w);
  t.equal(w.source.counts.ordinals, 1, 'the second one finds nothing to do');
});

t.test(
  'a full sync repairs whatever was done to the tree: modes, missing, unknown, types, links',
  async (t) => {
    const w = await world();
    t.teardown(() => w.close());
    const { root } = w.source;
    put(root, 'a', 'a');
    put(root, 'mode', 'm', 0o600);
    put(root, 'missing/deep', 'x');
    put(root, 'type', 'file');
    put(root, 'dir/inside', 'i');
    fs.symlinkSync('a', path.join(root, 'link'));
    put(root, 'h1', 'h');
    fs.linkSync(path.join(root, 'h1'), path.join(root, 'h2'));
    put(root, 's1', 'single');
    put(root, 's2', 'single');
    put(root, 'large', Buffer.alloc(3_000_000, 5));
    for (let i = 0; i < 30; i++) put(root, `many/${i}`, 'x');
    await w.source.seal();
    await w.sync();
    const l = (name: string): string => path.join(w.live, name);
    fs.chmodSync(l('mode'), 0o777);
    fs.rmSync(l('missing'), { recursive: true });
    fs.rmSync(l('type'));
    fs.mkdirSync(l('type/x'), { recursive: true });
    fs.rmSync(l('dir'), { recursive: true });
    fs.writeFileSync(l('dir'), 'now a file');
    fs.rmSync(l('link'));
    fs.symlinkSync('/etc/passwd', l('link'));
    fs.rmSync(l('h2'));
    fs.copyFileSync(l('h1'), l('h2'));
    fs.rmSync(l('s2'));
    fs.linkSync(l('s1'), l('s2'));
    put(w.live, 'unknown/f', 'u');
    execFileSync('mkfifo', [l('fifo')]);
    const fd = fs.openSync(l('large'), 'r+');
    fs.writeSync(fd, 'rot', 1_500_000);
    fs.closeSync(fd);
    fs.utimesSync(w.live, 1, 1);
    w.source.counts.bytes = 0;
    await fullSync(w);
    t.same(w.replica.status().conditions, []);
    t.same(picture(w.live), picture(root));
    t.same(await indexFaults(w), []);
    t.ok(w.source.counts.bytes < 200_000, 'of the large file only the chunk that differs is pulled');
  },
);

t.test('an index that is lost: what is on the disk is read and kept', async (t) => {
  const w = await world();
  t.teardown(() => w.close());
  put(w.source.root, 'a', 'a');
  put(w.source.root, 'b/c', Buffer.alloc(200_000, 1));
  await w.source.seal();
  fs.cpSync(w.source.root, w.live, { recursive: true, preserveTimestamps: true });
  put(w.live, 'stray', 'nobody knows');
  await w.sync();
  t.equal(w.source.counts.ordinals, 0, 'nothing is pulled');
  t.same(picture(w.live), picture(w.source.root));
  const [backup] = await w.replica.backups();
  t.ok(backup, 'what was there of unknown origin is kept');
  t.equal(fs.readFileSync(path.join(w.backups, String(backup?.stamp), 'stray'), 'utf8'), 'nobody knows');
});

const EXCLUDING = { ...DEFAULT_POLICY, excludePaths: ['save/cache/**'] };

t.test('A30: a directory that goes away does not take preserved content with it', async (t) => {
  const w = await world();
  t.teardown(() => w.close());
  w.source.filter([], EXCLUDING.excludePaths);
  put(w.source.root, 'save/a', 'a');
  put(w.source.root, 'save/cache/mine', 'of the source');
  put(w.source.root, 'other', 'o');
  await w.source.seal();
  await w.sync({ policy: EXCLUDING });
  put(w.live, 'save/cache/local', 'preserved');
  fs.rmSync(path.join(w.source.root, 'save'), { recursive: true });
  await w.source.seal();
  await w.sync({ policy: EXCLUDING });
  t.same(w.replica.status().conditions, []);
  t.equal(read(w, 'save/cache/local'), 'preserved');
  t.notOk(fs.existsSync(path.join(w.live, 'save/a')));
  await fullSync(w, { policy: EXCLUDING });
  t.equal(read(w, 'save/cache/local'), 'preserved');

  // and when a file comes in its place it is kept in the backups
  fs.writeFileSync(path.join(w.source.root, 'save'), 'a file now');
  await w.source.seal();
  await w.sync({ policy: EXCLUDING });
  t.same(w.replica.status().conditions, []);
  t.equal(read(w, 'save'), 'a file now');
  const [backup] = await w.replica.backups();
  t.equal(
    fs.readFileSync(path.join(w.backups, String(backup?.stamp), 'save/cache/local'), 'utf8'),
    'preserved',
  );
});

t.test('excluded content is left alone by default and removed with pruneExcluded', async (t) => {
  const w = await world();
  t.teardown(() => w.close());
  w.source.filter([], EXCLUDING.excludePaths);
  for (let i = 0; i < 10; i++) put(w.source.root, `save/${i}`, 'a');
  await w.source.seal();
  await w.sync({ policy: EXCLUDING });
  put(w.live, 'save/cache/local', 'x');
  await fullSync(w, { policy: EXCLUDING });
  t.equal(read(w, 'save/cache/local'), 'x');
  const prune = { ...EXCLUDING, pruneExcluded: true };
  await w.sync({ policy: prune });
  t.same(picture(w.live), picture(w.source.root));
});

t.test('paths that the filter no longer covers are left on the disk', async (t) => {
  const w = await world();
  t.teardown(() => w.close());
  for (let i = 0; i < 10; i++) put(w.source.root, `save/${i}`, 'a');
  put(w.source.root, 'logs/l', 'log');
  await w.source.seal();
  await w.sync();
  w.source.filter([], ['logs']);
  await w.source.seal();
  await w.sync({ policy: { ...DEFAULT_POLICY, excludePaths: ['logs'] } });
  t.same(w.replica.status().conditions, []);
  t.equal(read(w, 'logs/l'), 'log');
  t.equal(w.store.get(Buffer.from('logs/l')), undefined, 'but it is no part of the state');
});

t.test('A21: a state that would take more than half away leaves the old one in the backups', async (t) => {
  const w = await world();
  t.teardown(() => w.close());
  for (let i = 0; i < 10; i++) put(w.source.root, `world/f${i}`, `${i}`);
  await w.source.seal();
  await w.sync();
  // an include that matches nothing, with prune: the manifest has the root alone
  w.source.filter(['word'], []);
  await w.source.seal();
  const policy = { ...DEFAULT_POLICY, includePaths: ['word'], pruneExcluded: true };
  await w.sync({ policy });
  t.same(w.replica.status().conditions, []);
  t.same(fs.readdirSync(w.live), []);
  const backups = await w.replica.backups();
  t.equal(backups.length, 1);
  t.equal(fs.readFileSync(path.join(w.backups, String(backups[0]?.stamp), 'world/f7'), 'utf8'), '7');
  await fullSync(w, { policy });
  t.equal((await w.replica.backups()).length, 1, 'once');
});

t.test(
  'E3, D5, D17: overrides of owner and modes; executable bits, setgid and what is not covered',
  async (t) => {
    const w = await world();
    t.teardown(() => w.close());
    put(w.source.root, 'bin/run.sh', '#!', 0o755);
    put(w.source.root, 'bin/data', 'd', 0o600);
    await w.source.seal();
    const policy = { ...DEFAULT_POLICY, ownerUid: 1234, ownerGid: 4321, fileMode: 0o664, dirMode: 0o2775 };
    await w.sync({ policy });
    const mode = (name: string): string => (fs.statSync(path.join(w.live, name)).mode & 0o7777).toString(8);
    t.equal(mode('bin/run.sh'), '775');
    t.equal(mode('bin/data'), '664');
    t.equal(mode('bin'), '2775');
    t.equal(fs.statSync(path.join(w.live, 'bin/data')).uid, 1234);
    t.equal(fs.statSync(path.join(w.live, 'bin/data')).gid, 4321);
    t.same(await indexFaults(w), []);
    const ctime = fs.statSync(path.join(w.live, 'bin/data')).ctimeMs;
    await fullSync(w, { policy });
    t.equal(
      fs.statSync(path.join(w.live, 'bin/data')).ctimeMs,
      ctime,
      'a full sync has nothing to set again',
    );
    // new overrides for the same generation
    await w.sync({ policy: { ...policy, fileMode: 0o640 } });
    t.equal(mode('bin/data'), '640');
    t.equal(mode('bin/run.sh'), '751');
    t.equal(w.source.counts.ordinals, 2, 'contents were pulled once');
    // only what is included is changed
    w.source.filter(['bin/run.sh'], []);
    await w.source.seal();
    await w.sync({ policy: { ...policy, includePaths: ['bin/run.sh'], fileMode: 0o600 } });
    t.equal(mode('bin/data'), '640');
    t.equal(mode('bin/run.sh'), '711');
    t.equal(mode('bin'), '755', 'a directory on the way is as on the source');
  },
);

t.test('full syncs: an id, one at a time, an outcome', async (t) => {
  const w = await world();
  t.teardown(() => w.close());
  put(w.source.root, 'a', 'a');
  await w.source.seal();
  let go: (() => void) | null = null;
  w.source.onOffer = () => new Promise<void>((r) => (go = r));
  const first = w.replica.fullSync(w.request());
  t.equal(first.started, true);
  t.match(w.replica.fullSync(w.request()), { id: first.id, started: false, reason: 'already-running' });
  t.match(w.replica.fullSyncRun(first.id), { state: 'running' });
  await until(() => go !== null);
  w.source.onOffer = null;
  (go as unknown as () => void)();
  await until(() => w.replica.fullSyncRun(first.id)?.state === 'done');
  t.match(w.replica.fullSyncRun(first.id), { generation: '1-1' });
  t.equal(w.replica.fullSyncRun('nonsense'), null);
  w.source.down = true;
  const second = w.replica.fullSync(w.request());
  await until(() => w.replica.fullSyncRun(second.id)?.state === 'failed');
  t.match(w.replica.fullSyncRun(second.id), { error: /does not answer/ });
});

t.test('I2: a full sync that was asked for during a plain one runs after it', async (t) => {
  const w = await world();
  t.teardown(() => w.close());
  put(w.source.root, 'a', 'a');
  await w.source.seal();
  await w.sync();
  put(w.source.root, 'b', 'b');
  await w.source.seal();
  let go: (() => void) | null = null;
  w.source.onOffer = () => new Promise<void>((r) => (go = r));
  w.replica.sync(w.request());
  await until(() => go !== null);
  const { id } = w.replica.fullSync(w.request());
  w.source.onOffer = null;
  (go as unknown as () => void)();
  await until(() => w.replica.fullSyncRun(id)?.state === 'done');
  t.equal(w.source.counts.offers, 3);
  t.equal(w.source.counts.differences, 1);
});

t.test('A6, D30: not enough room: nothing is touched, and it comes right by itself', async (t) => {
  const pool = fs.mkdtempSync(path.join(os.tmpdir(), 'sv-small-'));
  execFileSync('mount', ['-t', 'tmpfs', '-o', 'size=6m', 'tmpfs', pool]);
  const w = await world({ pool });
  t.teardown(async () => {
    await w.close();
    // lazily: objects that the garbage collector has not seen yet may hold a folder open
    execFileSync('umount', ['-l', pool]);
    fs.rmdirSync(pool);
  });
  put(w.source.root, 'save', Buffer.alloc(1_000_000, 1));
  await w.source.seal();
  await w.sync();
  const before = picture(w.live);
  fs.writeFileSync(path.join(pool, 'hog'), Buffer.alloc(3_500_000));
  put(w.source.root, 'save', Buffer.alloc(2_000_000, 2));
  await w.source.seal();
  await w.sync();
  t.match(w.replica.status(), { state: 'error', generation: '1-1', conditions: [{ type: 'NoSpace' }] });
  t.same(picture(w.live), before);
  fs.rmSync(path.join(pool, 'hog'));
  await until(() => w.replica.status().state === 'idle');
  t.same(picture(w.live), picture(w.source.root));
  t.same(w.replica.status().conditions, []);
});

t.test('A6: the disk fills up while contents arrive', async (t) => {
  const pool = fs.mkdtempSync(path.join(os.tmpdir(), 'sv-small-'));
  execFileSync('mount', ['-t', 'tmpfs', '-o', 'size=6m', 'tmpfs', pool]);
  const w = await world({ pool });
  t.teardown(async () => {
    await w.close();
    // lazily: objects that the garbage collector has not seen yet may hold a folder open
    execFileSync('umount', ['-l', pool]);
    fs.rmdirSync(pool);
  });
  put(w.source.root, 'save', Buffer.alloc(1_000_000, 1));
  await w.source.seal();
  await w.sync();
  const before = picture(w.live);
  put(w.source.root, 'save', Buffer.alloc(2_000_000, 2));
  await w.source.seal();
  w.source.onPack = (data, at) => {
    if (at === 0) fs.writeFileSync(path.join(pool, 'hog'), Buffer.alloc(3_600_000));
    return data;
  };
  await w.sync();
  t.match(w.replica.status(), { generation: '1-1', conditions: [{ type: 'NoSpace' }] });
  t.same(picture(w.live), before);
  w.source.onPack = null;
  fs.rmSync(path.join(pool, 'hog'));
  await until(() => w.replica.status().state === 'idle');
  t.same(picture(w.live), picture(w.source.root));
});

t.test(
  'names that the file system here refuses are left out, told, and not confirmed as complete',
  async (t) => {
    const refuse = async (_d: string, name: Buffer): Promise<string | null> =>
      name.includes(0x3a) || name.includes(0x2a) ? 'EINVAL' : null;
    const w = await world({ tryName: refuse });
    t.teardown(() => w.close());
    put(w.source.root, 'fine', 'f');
    put(w.source.root, 'bad:dir/inside', 'b');
    put(w.source.root, 'bad:file', 'b');
    await w.source.seal();
    await w.sync({ echo: 5 });
    t.match(w.replica.status(), {
      state: 'behind',
      generation: null,
      freshAgeMs: null,
      conditions: [{ type: 'Unsupported', count: 3, paths: [/bad:dir \(EINVAL\)/, /inside/, /bad:file/] }],
    });
    t.same(fs.readdirSync(w.live), ['fine']);
    t.same(w.source.confirmed, []);
    w.source.counts.offers = 0;
    put(w.source.root, 'bad:dir/second', 's');
    put(w.source.root, 'fine', 'F');
    await w.source.seal();
    await w.sync();
    t.equal(w.source.counts.differences, 1);
    t.equal(read(w, 'fine'), 'F');
    t.match(w.replica.status().conditions, [{ type: 'Unsupported', count: 4 }]);
    fs.rmSync(path.join(w.source.root, 'bad:dir'), { recursive: true });
    fs.rmSync(path.join(w.source.root, 'bad:file'));
    await w.source.seal();
    await w.sync();
    t.match(w.replica.status(), { state: 'idle', generation: '1-3', conditions: [] });
    t.match(w.source.confirmed, [{ generation: '1-3' }]);
  },
);

t.test(
  'D13, D14: link texts are reproduced and never followed; a link in the way is replaced, not passed',
  async (t) => {
    const w = await world();
    t.teardown(() => w.close());
    const outside = fs.mkdtempSync(path.join(os.tmpdir(), 'sv-outside-'));
    t.teardown(() => fs.rmSync(outside, { recursive: true }));
    for (const [n, text] of ['nope', '/etc/passwd', 'loop', '../../../etc'].entries())
      fs.symlinkSync(text, path.join(w.source.root, `l${n}`));
    put(w.source.root, 'd/f', 'inside');
    put(w.source.root, 'e', 'e');
    put(w.source.root, 'z', 'z');
    await w.source.seal();
    await w.sync();
    t.same(picture(w.live), picture(w.source.root));
    fs.rmSync(path.join(w.live, 'd'), { recursive: true });
    fs.symlinkSync(outside, path.join(w.live, 'd'));
    put(w.source.root, 'd/f', 'INSIDE');
    await w.source.seal();
    await w.sync();
    t.same(picture(w.live), picture(w.source.root));
    t.same(fs.readdirSync(outside), []);
  },
);
