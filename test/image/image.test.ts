/** The image as it is built without Docker, and what runs in it. */
import { execFileSync, spawn } from 'node:child_process';
import {
  chmodSync,
  existsSync,
  lstatSync,
  mkdirSync,
  mkdtempSync,
  readdirSync,
  readFileSync,
  rmSync,
  writeFileSync,
} from 'node:fs';
import { tmpdir } from 'node:os';
import path from 'node:path';
import t from 'tap';
import { buildImage } from '../../chart/image/oci.ts';
import { ARCHITECTURES, type Architecture, assemble, missingFor } from '../../chart/image/rootfs.ts';
import { freePorts, LocalCluster, waitFor } from '../../lib/local/cluster.ts';
import { differences, fill } from '../agent/support.ts';
import { programPath } from '../packages.ts';

const OWN = process.arch as Architecture;
const OTHER = ARCHITECTURES.find((one) => one !== OWN) as Architecture;
const LIMIT_BYTES = 90e6;
const root = mkdtempSync(path.join(tmpdir(), 'sv-image-'));
const quiet = (): void => {};
const dist = path.resolve(import.meta.dirname, '../../dist');

t.before(() => {
  execFileSync(process.execPath, ['lib/build.mjs'], { cwd: path.dirname(dist), stdio: 'ignore' });
});
t.teardown(() => rmSync(root, { recursive: true, force: true }));

/** Files and links below a folder; no link is followed. */
const files = (folder: string): string[] =>
  execFileSync('find', ['.', '-not', '-type', 'd', '-printf', '%P\\n'], { cwd: folder, encoding: 'utf8' })
    .trim()
    .split('\n');

/** The whole image in one folder. */
function unpacked(arch: Architecture): string {
  const parts = assemble(arch, path.join(root, `parts-${arch}`), quiet);
  const whole = path.join(root, arch);
  mkdirSync(whole);
  for (const part of [parts.base, parts.app]) execFileSync('cp', ['-a', `${part}/.`, whole]);
  return whole;
}

t.test('the image of this machine', { skip: missingFor(OWN) ?? false, timeout: 170_000 }, async (t) => {
  const whole = unpacked(OWN);

  t.test('nothing is in it but Node, rclone, libraries and the roles: no shell', async (t) => {
    const known =
      /^(etc\/(passwd|group|nsswitch\.conf)|usr\/bin\/(node|rclone)|usr\/local\/bin\/simple-volume|usr\/lib\/lib[\w+-]+\.so\.\d+|lib(64)?\/ld-linux[\w.-]+|lib|usr\/lib\/simple-volume\/[\w-]+\.(js|node|json|js\.LEGAL\.txt)|usr\/lib\/simple-volume\/LICENSE)$/;
    t.strictSame(
      files(whole).filter((name) => !known.test(name)),
      [],
    );
    for (const program of ['sh', 'bash', 'busybox', 'env'])
      t.notOk(
        files(whole).some((name) => path.basename(name) === program),
        program,
      );
  });

  t.test('it is at most 90 MB to pull, and the same inputs give the same image', async (t) => {
    const file = path.join(root, 'image.tar');
    const [first] = await buildImage([OWN], file, 'simple-volume:test', quiet);
    t.ok(
      (first?.compressedBytes ?? Number.POSITIVE_INFINITY) <= LIMIT_BYTES,
      `${first?.compressedBytes} bytes`,
    );
    const folder = path.join(root, 'layout');
    mkdirSync(folder);
    execFileSync('tar', ['-xf', file, '-C', folder]);
    const index = JSON.parse(readFileSync(path.join(folder, 'index.json'), 'utf8'));
    t.match(index.manifests[0].annotations, { 'io.containerd.image.name': 'simple-volume:test' });
    const [again] = await buildImage([OWN], file, 'simple-volume:test', quiet);
    t.equal(again?.digest, first?.digest);
  });

  const alone = process.getuid?.() === 0 && programPath('unshare') !== null;
  t.test('its roles run in it', { skip: alone ? false : 'needs root and unshare' }, async (t) => {
    const folder = mkdtempSync(path.join(tmpdir(), 'sv-image-run-'));
    t.teardown(() => rmSync(folder, { recursive: true, force: true }));
    mkdirSync(path.join(whole, folder), { recursive: true });
    // What a container runtime gives to every container.
    for (const name of ['proc', 'dev']) mkdirSync(path.join(whole, name), { recursive: true });
    const enter =
      'mount --bind "$0" "$1$0" && mount --bind /proc "$1/proc" && mount --bind /dev "$1/dev" && root="$1" && shift && ' +
      'exec chroot "$root" /usr/local/bin/simple-volume "$@"';
    const command = ['unshare', '--mount', '--propagation', 'private', 'sh', '-c', enter, folder, whole];
    // Nothing of the host's environment may be what makes it work.
    const env = { PATH: process.env.PATH, HOME: '/' };
    const run = (...args: string[]): string =>
      execFileSync(command[0] as string, [...command.slice(1), ...args], { encoding: 'utf8', env });
    t.equal(
      run('--version').trim(),
      JSON.parse(readFileSync(path.join(dist, 'package.json'), 'utf8')).version,
    );
    for (const role of ['agent', 'controller'])
      t.match(run(role, '--help'), new RegExp(`Usage: simple-volume ${role}`));
    const cluster = await LocalCluster.start({ nodes: ['a', 'b'], folder, command });
    t.teardown(() => cluster.stop());
    const volume = { namespace: 'default', volume: 'v' };
    mkdirSync(cluster.agent('a').live(volume), { recursive: true });
    fill(cluster.agent('a').live(volume), 20, 100_000);
    await cluster.watch('a', volume, { targets: ['b'], debounce: '200ms' });
    await waitFor(
      'the copy',
      async () => (await differences(cluster, volume, 'a', 'b')).length === 0,
      30_000,
    );
  });
});

const emulator = programPath(OTHER === 'arm64' ? 'qemu-aarch64' : 'qemu-x86_64');
const noOther = missingFor(OTHER) ?? (emulator === null ? 'qemu-user is not installed' : false);

t.test(`the image for ${OTHER}, cross-built`, { skip: noOther, timeout: 600_000 }, async (t) => {
  const whole = unpacked(OTHER);
  const MACHINE = { x64: 62, arm64: 183 }[OTHER]; // e_machine, elf.h
  const foreign = files(whole).filter((name) => {
    const file = path.join(whole, name);
    if (lstatSync(file).isSymbolicLink()) return false;
    const head = readFileSync(file).subarray(0, 20);
    return head.toString('latin1', 1, 4) === 'ELF' && head.readUInt16LE(18) !== MACHINE;
  });
  t.strictSame(foreign, [], 'every binary is of that architecture');

  const home = path.join(whole, 'usr/lib/simple-volume');
  const emulated = ['-L', whole, path.join(whole, 'usr/bin/node')];
  const qemu = (...args: string[]): string =>
    execFileSync(emulator as string, [...emulated, ...args], { encoding: 'utf8', timeout: 120_000 });

  t.test('the command, every role and rclone start', async (t) => {
    const { version } = JSON.parse(readFileSync(path.join(home, 'package.json'), 'utf8'));
    t.equal(qemu(path.join(home, 'main.js'), '--version').trim(), version);
    for (const role of readdirSync(home).filter((name) => /^(agent|controller|csi-node)\.js$/.test(name))) {
      const name = role.replace('.js', '');
      t.match(qemu(path.join(home, role), name, '--help'), new RegExp(`Usage: simple-volume ${name}`));
    }
    const rclone = ['-L', whole, path.join(whole, 'usr/bin/rclone'), 'version'];
    t.match(execFileSync(emulator as string, rclone, { encoding: 'utf8' }), /^rclone v1\./);
  });

  t.test('the addon computes what it computes here, and SQLite works', async (t) => {
    const script = `
      const { createRequire } = require('node:module');
      const native = createRequire('/')(process.argv[1]);
      const { DatabaseSync } = require('node:sqlite');
      const db = new DatabaseSync(':memory:');
      const bytes = Buffer.alloc(300000, 'simple-volume');
      const filter = native.compileFilter([Buffer.from('saves/**')], [Buffer.from('**/*.tmp')]);
      console.log(JSON.stringify({
        arch: process.arch,
        hash: native.hashBytes(bytes).toString('hex'),
        kept: ['saves/a', 'saves/a.tmp', 'other'].map((p) => filter.match(Buffer.from(p), false)),
        sqlite: db.prepare('select 20 + 3 as n').get().n,
      }));`;
    const there = JSON.parse(qemu('-e', script, path.join(home, 'simple_volume.node')));
    const here = JSON.parse(
      execFileSync(process.execPath, ['-e', script, path.join(dist, 'simple_volume.node')], {
        encoding: 'utf8',
      }),
    );
    t.equal(there.arch, OTHER);
    t.strictSame({ ...there, arch: 0 }, { ...here, arch: 0 });
  });

  // The emulator knows no openat2(2) (qemu 7.2), so no volume can be watched under it.
  t.test('an agent opens its pool, finds rclone and is ready', async (t) => {
    const folder = mkdtempSync(path.join(tmpdir(), 'sv-image-arm-'));
    const pool = path.join(folder, 'pool');
    mkdirSync(pool);
    writeFileSync(path.join(folder, 'token'), 'a-token-of-enough-length\n', { mode: 0o600 });
    const rclone = path.join(folder, 'rclone');
    writeFileSync(rclone, `#!/bin/sh\nexec ${emulator} -L ${whole} ${whole}/usr/bin/rclone "$@"\n`);
    chmodSync(rclone, 0o755);
    const [http, webdav] = await freePorts(2);
    const agent = spawn(
      emulator as string,
      [
        ...[...emulated, path.join(home, 'agent.js'), 'agent', '--node', 'a', '--pool-name', 'p'],
        ...['--pool-path', pool, '--token-file', path.join(folder, 'token')],
        ...['--http', `127.0.0.1:${http}`, '--webdav', `127.0.0.1:${webdav}`],
      ],
      { env: { ...process.env, SIMPLE_VOLUME_RCLONE: rclone }, stdio: 'ignore' },
    );
    const ended = new Promise((resolve) => agent.once('exit', (code) => resolve(code)));
    t.teardown(async () => {
      agent.kill('SIGKILL');
      await ended;
      rmSync(folder, { recursive: true, force: true });
    });
    await waitFor(
      'ready',
      async () => (await fetch(`http://127.0.0.1:${http}/readyz`)).status === 200,
      60_000,
    );
    t.ok(existsSync(path.join(pool, '.simple-volume-pool')));
    agent.kill('SIGTERM');
    t.equal(await ended, 0, 'it stops cleanly');
  });
});
