/** Images of a cluster as tar files that containerd imports; nothing is pulled. */
import { execFileSync } from 'node:child_process';
import { createHash } from 'node:crypto';
import {
  copyFileSync,
  cpSync,
  existsSync,
  lstatSync,
  mkdirSync,
  mkdtempSync,
  readdirSync,
  readFileSync,
  readlinkSync,
  realpathSync,
  renameSync,
  rmSync,
  symlinkSync,
  writeFileSync,
} from 'node:fs';
import path from 'node:path';
import { buildImage } from '../../../chart/image/oci.ts';
import type { Architecture } from '../../../chart/image/rootfs.ts';
import { cachedRclonePath, cacheFolder } from '../../../lib/transfer/rclone-binary.ts';
import { CSI_PROVISIONER_VERSION, kubeProgram } from '../../kube/harness/programs.ts';
import { programPath } from '../../packages.ts';

const PROJECT = path.resolve(import.meta.dirname, '../../..');
const VERSION = (JSON.parse(readFileSync(path.join(PROJECT, 'package.json'), 'utf8')) as { version: string })
  .version;

/** What the chart asks for by default. */
export const PRODUCT_IMAGE = `ghcr.io/shipstuff/simple-volume:${VERSION}`;
export const PROVISIONER_IMAGE = `registry.k8s.io/sig-storage/csi-provisioner:v${CSI_PROVISIONER_VERSION}`;
export const PAUSE_IMAGE = 'registry.k8s.io/pause:3.10';
/** A shell and small tools, as the chart's examples name it. */
export const SHELL_IMAGE = 'docker.io/library/busybox:1.37';

type Say = (line: string) => void;

/** Writes a folder as an image of one layer (the format of `docker save`). */
export function pack(tag: string, folder: string, out: string, entrypoint: readonly string[] = []): void {
  const scratch = mkdtempSync(`${out}-`);
  try {
    const owners = ['--owner=0', '--group=0', '--numeric-owner', '--sort=name', '--mtime=@0'];
    const layer = path.join(scratch, 'layer.tar');
    execFileSync('tar', ['-c', ...owners, '-f', layer, '-C', folder, '.']);
    const diff = createHash('sha256').update(readFileSync(layer)).digest('hex');
    const config = JSON.stringify({
      architecture: process.arch === 'x64' ? 'amd64' : process.arch,
      os: 'linux',
      config: { Entrypoint: entrypoint, Env: ['PATH=/usr/local/bin:/usr/bin:/bin'] },
      rootfs: { type: 'layers', diff_ids: [`sha256:${diff}`] },
    });
    writeFileSync(path.join(scratch, 'config.json'), config);
    writeFileSync(
      path.join(scratch, 'manifest.json'),
      JSON.stringify([{ Config: 'config.json', RepoTags: [tag], Layers: ['layer.tar'] }]),
    );
    execFileSync('tar', ['-c', '-f', out, '-C', scratch, 'manifest.json', 'config.json', 'layer.tar']);
  } finally {
    rmSync(scratch, { recursive: true, force: true });
  }
}

/** Puts a program into a folder that becomes an image, with the shared libraries that ldd(1) names. */
export function addProgram(folder: string, program: string, target = '/usr/bin'): void {
  const copy = (from: string, to: string): void => {
    mkdirSync(path.dirname(path.join(folder, to)), { recursive: true });
    if (!existsSync(path.join(folder, to))) copyFileSync(realpathSync(from), path.join(folder, to));
  };
  copy(program, path.join(target, path.basename(program)));
  let libraries: string;
  try {
    libraries = execFileSync('ldd', [program], { encoding: 'utf8', stdio: ['ignore', 'pipe', 'ignore'] });
  } catch {
    return; // linked statically
  }
  for (const [, file] of libraries.matchAll(/(?:=> |^\s*)(\/\S+) \(0x/gm))
    copy(file as string, file as string);
}

/** Fills a folder with busybox under all its names. */
function addShell(folder: string): void {
  const busybox = programPath('busybox');
  if (busybox === null) throw new Error('busybox is not installed (Debian: busybox-static)');
  const bin = path.join(folder, 'bin');
  mkdirSync(bin, { recursive: true });
  copyFileSync(busybox, path.join(bin, 'busybox'));
  for (const name of execFileSync(busybox, ['--list'], { encoding: 'utf8' }).trim().split('\n'))
    if (name !== 'busybox') symlinkSync('busybox', path.join(bin, name));
  mkdirSync(path.join(folder, 'tmp'), { mode: 0o1777 });
  mkdirSync(path.join(folder, 'etc'));
  writeFileSync(path.join(folder, 'etc/passwd'), 'root:x:0:0:root:/:/bin/sh\n');
  writeFileSync(path.join(folder, 'etc/group'), 'root:x:0:\n');
}

/** An image with a shell and these programs, for scenarios with real applications. */
export function applicationImage(
  tag: string,
  out: string,
  programs: readonly string[],
  files: Readonly<Record<string, string>> = {},
): void {
  const folder = mkdtempSync(`${out}-`);
  try {
    addShell(folder);
    for (const program of programs) addProgram(folder, program);
    for (const [target, source] of Object.entries(files)) {
      mkdirSync(path.dirname(path.join(folder, target)), { recursive: true });
      cpSync(source, path.join(folder, target), { recursive: true, dereference: true });
    }
    pack(tag, folder, out);
  } finally {
    rmSync(folder, { recursive: true, force: true });
  }
}

/** Changes with every byte that goes into the product's image. */
function keyOfProduct(): string {
  const hash = createHash('sha256');
  const add = (file: string): void => {
    const stat = lstatSync(file);
    if (stat.isDirectory())
      for (const name of readdirSync(file).sort()) {
        if (!name.endsWith('.map')) add(path.join(file, name));
      }
    else
      hash
        .update(`\0${path.relative(PROJECT, file)}\0`)
        .update(stat.isSymbolicLink() ? readlinkSync(file) : readFileSync(file));
  };
  for (const name of ['dist', 'chart/image', 'package.json', 'LICENSE']) add(path.join(PROJECT, name));
  hash.update(cachedRclonePath() ?? '').update(process.version);
  return hash.digest('hex').slice(0, 16);
}

/** The product's image of this checkout, made once for the same content. */
async function productImage(say: Say): Promise<string> {
  execFileSync(process.execPath, ['lib/build.mjs'], { cwd: PROJECT, stdio: ['ignore', 'ignore', 'pipe'] });
  const folder = path.join(cacheFolder(), 'cluster');
  const file = path.join(folder, `product-${keyOfProduct()}.tar`);
  if (existsSync(file)) return file;
  say('building the image of this checkout');
  mkdirSync(folder, { recursive: true });
  for (const name of readdirSync(folder)) if (name.startsWith('product-')) rmSync(path.join(folder, name));
  const scratch = `${file}.${process.pid}`;
  await buildImage([process.arch as Architecture], scratch, PRODUCT_IMAGE, say);
  renameSync(scratch, file);
  return file;
}

/** Makes the images that every cluster needs. Returns their files, those first that everything else waits for. */
export async function baseImages(folder: string, pause: string, say: Say): Promise<string[]> {
  mkdirSync(folder, { recursive: true });
  const made = (name: string, tag: string, fill: (root: string) => void, entrypoint: string[]): string => {
    const out = path.join(folder, `${name}.tar`);
    const root = mkdtempSync(`${out}-`);
    try {
      fill(root);
      pack(tag, root, out, entrypoint);
      return out;
    } finally {
      rmSync(root, { recursive: true, force: true });
    }
  };
  return [
    made('pause', PAUSE_IMAGE, (root) => copyFileSync(pause, path.join(root, 'pause')), ['/pause']),
    made('shell', SHELL_IMAGE, addShell, []),
    made(
      'provisioner',
      PROVISIONER_IMAGE,
      (root) => copyFileSync(kubeProgram('csi-provisioner') as string, path.join(root, 'csi-provisioner')),
      ['/csi-provisioner'],
    ),
    await productImage(say),
  ];
}
