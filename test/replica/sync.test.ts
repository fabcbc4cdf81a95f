import { execFileSync } from 'node:child_process';
import fs from 'node:fs';
import path from 'node:path';
import t from 'tap';
import { formatGeneration } from '../../lib/core/generation.ts';
import { native } from '../../lib/native/load.ts';
import { indexFaults, picture, settled, until, world } from './support.ts';

const put = (root: string, name: string, data: string | Buffer, mode = 0o644): void => {
  const file = path.join(root, name);
  fs.mkdirSync(path.dirname(file), { recursive: true });
  fs.writeFileSync(file, data, { mode });
  fs.chmodSync(file, mode);
};

t.test('the first sync makes the tree exactly as it is on the source, and confirms it', async (t) => {
  const w = await world();
  t.teardown(() => w.close());
  const { root } = w.source;
  put(root, 'a.txt', 'one');
  put(root, 'dir/b.sh', '#!', 0o755);
  put(root, 'dir/empty', '');
  put(root, 'large', Buffer.alloc(3_000_001, 7));
  fs.mkdirSync(path.join(root, 'nothing in it'));
  fs.symlinkSync('../nowhere', path.join(root, 'dir/link'));
  put(root, 'same', 'x');
  fs.linkSync(path.join(root, 'same'), path.join(root, 'dir/same'));
  fs.chownSync(path.join(root, 'a.txt'), 1000, 2000);
  fs.utimesSync(path.join(root, 'dir'), 5, 1_000_000.5);
  await w.source.seal();
  t.equal(w.replica.status().state, 'empty');
  await w.sync({ echo: 900_000 });
  t.same(w.replica.status().conditions, []);
  t.equal(w.replica.status().state, 'idle');
  t.same(picture(w.live), picture(root));
  t.equal(w.replica.status().generation, '1-1');
  t.same(w.source.confirmed, [{ generation: '1-1', state: 'idle', problems: [] }]);
  t.equal(w.replica.status().freshAgeMs, 100_000);
  t.same(await indexFaults(w), []);
  t.same(fs.readdirSync(w.incoming), [], 'nothing pulled is left');
});

t.test('a difference: contents, removals, renames, types, modes, links', async (t) => {
  const w = await world();
  t.teardown(() => w.close());
  const { root } = w.source;
  put(root, 'keep/a', 'a');
  put(root, 'keep/b', 'b');
  put(root, 'gone/deep/c', 'c');
  put(root, 'file-to-dir', 'x');
  put(root, 'dir-to-file/inner/y', 'y');
  put(root, 'dir-to-link/z', 'z');
  fs.symlinkSync('a', path.join(root, 'link'));
  put(root, 'big', Buffer.alloc(2_000_000, 1));
  put(root, 'old-name', Buffer.alloc(100_000, 3));
  put(root, 'h1', 'hard');
  fs.linkSync(path.join(root, 'h1'), path.join(root, 'h2'));
  await w.source.seal();
  await w.sync();
  t.same(picture(w.live), picture(root));
  w.source.counts.ordinals = 0;

  fs.rmSync(path.join(root, 'gone'), { recursive: true });
  fs.rmSync(path.join(root, 'file-to-dir'));
  put(root, 'file-to-dir/now', 'n');
  fs.rmSync(path.join(root, 'dir-to-file'), { recursive: true });
  put(root, 'dir-to-file', 'f');
  fs.rmSync(path.join(root, 'dir-to-link'), { recursive: true });
  fs.symlinkSync('keep', path.join(root, 'dir-to-link'));
  fs.chmodSync(path.join(root, 'keep/a'), 0o4711);
  fs.writeFileSync(path.join(root, 'keep/b'), 'B in place');
  const fd = fs.openSync(path.join(root, 'big'), 'r+');
  fs.writeSync(fd, 'changed', 1_000_000);
  fs.closeSync(fd);
  fs.renameSync(path.join(root, 'old-name'), path.join(root, 'keep/new-name'));
  w.source.moves.set('keep/new-name', 'old-name');
  fs.rmSync(path.join(root, 'link'));
  fs.symlinkSync('b', path.join(root, 'link'));
  fs.linkSync(path.join(root, 'h1'), path.join(root, 'a-third-name'));
  fs.rmSync(path.join(root, 'h2'));
  await w.source.seal();
  await w.sync();
  t.same(w.replica.status().conditions, []);
  t.equal(w.source.counts.differences, 1);
  t.same(picture(w.live), picture(root));
  t.same(await indexFaults(w), []);
  t.equal(w.source.counts.ordinals, 4, 'pulled: dir-to-file, file-to-dir/now, keep/b and a patch of big');
  t.ok(w.source.counts.bytes < 3_000_000);
});

t.test('A1: a batch that failed is healed by the next one', async (t) => {
  const w = await world();
  t.teardown(() => w.close());
  put(w.source.root, 'base', '0');
  await w.source.seal();
  await w.sync();
  put(w.source.root, 'x', 'missed');
  await w.source.seal();
  w.source.down = true;
  await w.sync();
  t.equal(w.replica.status().state, 'error');
  t.match(w.replica.status().conditions, [{ type: 'PullFailed' }]);
  t.equal(w.replica.status().generation, '1-1');
  t.equal(w.replica.status().wanted, '1-2');
  put(w.source.root, 'y', 'next');
  await w.source.seal();
  w.source.down = false;
  await w.sync();
  t.same(picture(w.live), picture(w.source.root));
  t.equal(w.replica.status().generation, '1-3');
});

t.test('D30: the source comes back, the replica catches up by itself', async (t) => {
  const w = await world();
  t.teardown(() => w.close());
  put(w.source.root, 'x', '1');
  await w.source.seal();
  w.source.down = true;
  await w.sync();
  w.source.down = false;
  await until(() => w.replica.status().state === 'idle');
  t.same(picture(w.live), picture(w.source.root));
  t.same(w.replica.status().conditions, []);
});

t.test('A5, D35: a source that dies in the middle of a pack leaves the tree as it was', async (t) => {
  const w = await world();
  t.teardown(() => w.close());
  put(w.source.root, 'f', Buffer.alloc(500_000, 1));
  await w.source.seal();
  await w.sync();
  const before = picture(w.live);
  put(w.source.root, 'f', Buffer.alloc(600_000, 2));
  put(w.source.root, 'g', 'new');
  await w.source.seal();
  w.source.onPack = (data, at) => (at > 200_000 ? null : data);
  await w.sync();
  t.equal(w.replica.status().state, 'error');
  t.same(picture(w.live), before);
  w.source.onPack = null;
  await until(() => w.replica.status().state === 'idle');
  t.same(picture(w.live), picture(w.source.root));
});

t.test('A5: a wrong byte on the way never reaches the tree', async (t) => {
  const w = await world();
  t.teardown(() => w.close());
  put(w.source.root, 'f', Buffer.alloc(500_000, 1));
  await w.source.seal();
  w.source.onPack = (data, at) => {
    const copy = Buffer.from(data);
    if (at > 200_000 && at < 300_000) copy[1000] = 0xee;
    return copy;
  };
  await w.sync();
  t.match(w.replica.status().conditions, [{ type: 'PullFailed', message: /wrong content/ }]);
  t.equal(w.replica.status().generation, null);
  t.same(fs.readdirSync(w.live), []);
  w.source.onPack = null;
  await until(() => w.replica.status().state === 'idle');
  t.same(picture(w.live), picture(w.source.root));
});

t.test('what was verified before a failure is not pulled again', async (t) => {
  const w = await world();
  t.teardown(() => w.close());
  for (let i = 0; i < 120; i++) put(w.source.root, `f${i}`, `content ${i}`);
  await w.source.seal();
  let packs = 0;
  w.source.onPack = (data, at) => (at === 0 && ++packs === 3 ? null : data);
  w.source.counts.ordinals = 0;
  await w.sync();
  w.source.onPack = null;
  await until(() => w.replica.status().state === 'idle');
  t.same(picture(w.live), picture(w.source.root));
  t.equal(w.source.counts.ordinals, 120 + 20);
});

t.test('packs are pulled two at a time; one that fails does not cost the one beside it', async (t) => {
  const w = await world();
  t.teardown(() => w.close());
  for (let i = 0; i < 420; i++) put(w.source.root, `f${i}`, `content ${i}`);
  await w.source.seal();
  let packs = 0;
  let open = 0;
  let most = 0;
  const pack = w.source.pack.bind(w.source);
  w.source.pack = async (...args) => {
    most = Math.max(most, ++open);
    await pack(...args).finally(() => open--);
  };
  w.source.onPack = async (data, at) => {
    if (at !== 0) return data;
    const number = ++packs;
    await new Promise((resolve) => setTimeout(resolve, number === 4 ? 60 : 20));
    return number === 3 ? null : data;
  };
  w.source.counts.ordinals = 0;
  await w.sync();
  t.equal(w.replica.status().state, 'error');
  t.same(fs.readdirSync(w.live), []);
  t.equal(packs, 4, 'no further pack was begun');
  w.source.onPack = null;
  await until(() => w.replica.status().state === 'idle');
  t.same(picture(w.live), picture(w.source.root));
  t.equal(most, 2);
  t.equal(w.source.counts.ordinals, 420 + 420 - 3 * 50, 'what the three good packs brought is kept');
});

t.test('H5: a request that comes during a pull is seen to right after it, and nothing is lost', async (t) => {
  const w = await world();
  t.teardown(() => w.close());
  put(w.source.root, 'f', Buffer.alloc(300_000, 1));
  await w.source.seal();
  let blocked: (() => void) | null = null;
  w.source.onPack = async (data) => {
    if (!blocked) await new Promise<void>((r) => (blocked = r));
    return data;
  };
  w.replica.sync(w.request());
  await until(() => blocked !== null);
  t.equal(w.replica.status().state, 'pulling');
  put(w.source.root, 'g', 'second');
  await w.source.seal();
  w.replica.sync(w.request());
  w.replica.sync(w.request());
  w.source.onPack = null;
  (blocked as unknown as () => void)();
  await settled(w.replica);
  await until(() => w.replica.status().generation === '1-2');
  t.same(picture(w.live), picture(w.source.root));
  t.equal(w.source.counts.offers, 2, 'one pull each, never two at once');
});

t.test('A5: a pull from a source that is gone is left as soon as another one is named', async (t) => {
  const w = await world();
  t.teardown(() => w.close());
  put(w.source.root, 'f', Buffer.alloc(300_000, 1));
  await w.source.seal();
  let silent = false;
  w.source.onPack = (data) => {
    if (silent) return data;
    silent = true;
    return new Promise<Buffer>(() => {}); // its power is cut: no byte, and no end either
  };
  w.replica.sync(w.request());
  await until(() => silent);
  w.replica.sync(w.request());
  await new Promise((resolve) => setTimeout(resolve, 50));
  t.equal(w.replica.status().state, 'pulling', 'the same source again changes nothing');
  const other = { url: 'http://b:1', webdavUrl: 'http://b:2', token: 'x', node: 'b' };
  w.replica.sync(w.request({ source: other }));
  await settled(w.replica);
  t.same(picture(w.live), picture(w.source.root));
  t.same(w.replica.status().conditions, [], 'that is no failure');
});

t.test('A14: an older epoch is refused, and the highest one survives a restart', async (t) => {
  const w = await world();
  t.teardown(() => w.close());
  put(w.source.root, 'f', '1');
  await w.source.seal();
  w.source.promote(3);
  await w.source.seal();
  await w.sync();
  t.equal(w.replica.epoch(), 3);
  t.throws(() => w.replica.sync(w.request({ epoch: 2 })), { code: 'EPOCH_OLD' });
  await w.restart();
  t.throws(() => w.replica.sync(w.request({ epoch: 2 })), { code: 'EPOCH_OLD' });
  t.throws(() => w.replica.fullSync(w.request({ epoch: 2 })), { code: 'EPOCH_OLD' });
});

t.test('A14: the epoch is durable before anything is asked of the new source', async (t) => {
  const w = await world();
  t.teardown(() => w.close());
  put(w.source.root, 'f', '1');
  await w.source.seal();
  w.source.promote(5);
  await w.source.seal();
  let seen = 0;
  w.source.onOffer = () => {
    seen = w.store.meta<number>('epoch') ?? 0;
  };
  await w.sync();
  t.equal(seen, 5);
});

t.test('A14: an active node refuses, a mounted tree is not written to and comes forward later', async (t) => {
  let mounts: string[] = [];
  let active = false;
  const w = await world({ mountsOf: () => mounts, isActive: () => active });
  t.teardown(() => w.close());
  put(w.source.root, 'f', '1');
  await w.source.seal();
  active = true;
  t.throws(() => w.replica.sync(w.request()), { code: 'VOLUME_ACTIVE' });
  active = false;
  mounts = ['/var/lib/kubelet/pods/x/volumes/y/mount'];
  t.throws(() => w.replica.sync(w.request()), { code: 'VOLUME_IN_USE' });
  t.match(w.replica.status().conditions, [{ type: 'InUse' }]);
  t.notOk(fs.existsSync(w.live));
  mounts = [];
  await until(() => w.replica.status().state === 'idle');
  t.same(picture(w.live), picture(w.source.root));
});

t.test('a tree that is mounted while the pull runs is not touched', async (t) => {
  let mounts: string[] = [];
  const w = await world({ mountsOf: () => mounts });
  t.teardown(() => w.close());
  put(w.source.root, 'f', '1');
  await w.source.seal();
  w.source.onPack = (data) => {
    mounts = ['/somewhere'];
    return data;
  };
  await w.sync();
  t.match(w.replica.status().conditions, [{ type: 'InUse' }]);
  t.same(fs.readdirSync(w.live), []);
  w.source.onPack = null;
  mounts = [];
  await until(() => w.replica.status().state === 'idle');
  t.same(picture(w.live), picture(w.source.root));
});

t.test('A15: a promotion cancels a pull and gives the generation held', async (t) => {
  const w = await world();
  t.teardown(() => w.close());
  put(w.source.root, 'f', '1');
  await w.source.seal();
  await w.sync();
  const before = picture(w.live);
  put(w.source.root, 'f', Buffer.alloc(400_000, 2));
  await w.source.seal();
  let blocked: (() => void) | null = null;
  w.source.onPack = async (data) => {
    if (!blocked) await new Promise<void>((r) => (blocked = r));
    return data;
  };
  w.replica.sync(w.request());
  await until(() => blocked !== null);
  const promoted = w.replica.promote(2);
  setTimeout(() => (blocked as unknown as () => void)(), 30);
  const held = await promoted;
  t.equal(held && formatGeneration(held), '1-1');
  t.same(picture(w.live), before);
  t.equal(w.replica.epoch(), 2);
  t.throws(() => w.replica.sync(w.request({ epoch: 2 })), { code: 'VOLUME_ACTIVE' });
  t.throws(() => w.replica.sync(w.request({ epoch: 1 })), { code: 'EPOCH_OLD' });
  await t.rejects(w.replica.promote(1), { code: 'EPOCH_OLD' });
});

t.test('required paths: a state without one is applied and the lack is told', async (t) => {
  const w = await world();
  t.teardown(() => w.close());
  put(w.source.root, 'f', '1');
  await w.source.seal();
  const policy = { ...w.request().policy, requiredPaths: ['server.json', 'f'] };
  await w.sync({ policy });
  t.match(w.replica.status(), {
    generation: '1-1',
    conditions: [{ type: 'RequiredPathMissing', paths: ['server.json'] }],
  });
  put(w.source.root, 'server.json', '{}');
  await w.source.seal();
  await w.sync({ policy });
  t.same(w.replica.status().conditions, []);
});

t.test('a source with an older state of the same epoch does not take back what is here', async (t) => {
  const w = await world();
  t.teardown(() => w.close());
  put(w.source.root, 'f', '1');
  await w.source.seal();
  await w.source.seal();
  await w.sync();
  const before = picture(w.live);
  w.source.states = [];
  fs.rmSync(path.join(w.source.root, 'f'));
  await w.source.seal();
  await w.sync();
  t.match(w.replica.status(), { generation: '1-2', conditions: [{ message: /already holds 1-2/ }] });
  t.same(picture(w.live), before);
});

t.test('a patch of a failed attempt is never used for another version of the file', async (t) => {
  const w = await world();
  t.teardown(() => w.close());
  for (let i = 0; i < 60; i++) put(w.source.root, `z${i}`, '1');
  put(w.source.root, 'big', Buffer.alloc(2_000_000, 1));
  await w.source.seal();
  await w.sync();
  for (let i = 0; i < 60; i++) put(w.source.root, `z${i}`, `two ${i}`);
  const patched = Buffer.alloc(2_000_000, 1);
  patched.write('changed', 1_000_000);
  fs.writeFileSync(path.join(w.source.root, 'big'), patched);
  await w.source.seal();
  // the first pack, with the patch, is verified; the second one fails
  let packs = 0;
  w.source.onPack = (data, at) => (at === 0 && ++packs % 2 === 0 ? null : data);
  w.replica.sync(w.request());
  await until(() => w.log.lines.some((l) => l.data.failures === 1));
  const fd = fs.openSync(path.join(w.live, 'big'), 'r+');
  fs.writeSync(fd, 'somebody was here', 500_000);
  fs.closeSync(fd);
  w.source.onPack = null;
  await until(() => w.replica.status().state === 'idle');
  t.same(picture(w.live), picture(w.source.root));
  t.same(await indexFaults(w), []);
});

t.test('A12: a pool whose disk is gone is not written to', async (t) => {
  let problem: string | null = 'the pool has lost its marker';
  const w = await world({ poolProblem: () => problem });
  t.teardown(() => w.close());
  put(w.source.root, 'f', '1');
  await w.source.seal();
  t.throws(() => w.replica.sync(w.request()), { code: 'POOL_MISSING' });
  t.notOk(fs.existsSync(w.live));
  t.notOk(fs.existsSync(w.incoming));
  problem = null;
  await until(() => w.replica.status().state === 'idle');
  t.same(picture(w.live), picture(w.source.root));
});

t.test(
  'D18: attributes are kept; where the file system takes none it is told once and not tried for ever',
  async (t) => {
    let failing = 0;
    const w = await world({
      native: { ...native, apply: async (o) => ({ ...(await native.apply(o)), xattrsFailed: failing }) },
    });
    t.teardown(() => w.close());
    const attributes = (root: string): string =>
      execFileSync(
        'python3',
        [
          '-c',
          'import os,sys\nfor p in ("f","d"):\n q=os.path.join(sys.argv[1],p)\n print(p,[(n,os.getxattr(q,n)) for n in sorted(os.listxattr(q))])',
          root,
        ],
        { encoding: 'utf8' },
      );
    put(w.source.root, 'f', '1');
    fs.mkdirSync(path.join(w.source.root, 'd'));
    for (const name of ['f', 'd'])
      execFileSync('python3', [
        '-c',
        'import os,sys; os.setxattr(sys.argv[1],"user.k",b"v")',
        path.join(w.source.root, name),
      ]);
    await w.source.seal();
    await w.sync();
    t.match(attributes(w.live), /user\.k/);
    t.equal(attributes(w.live), attributes(w.source.root));
    failing = 2;
    put(w.source.root, 'f', '2');
    await w.source.seal();
    await w.sync();
    t.match(w.replica.status(), {
      state: 'idle',
      generation: '1-2',
      conditions: [{ type: 'Unsupported', count: 2 }],
    });
    const { offers } = w.source.counts;
    await w.sync();
    t.equal(w.source.counts.offers, offers, 'the same generation is not pulled again for it');
  },
);
