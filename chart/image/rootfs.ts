/**
 * `node chart/image/rootfs.ts --out DIR [--arch x64|arm64]`: the whole content of the image as a folder: Node, the
 * libraries that it is linked with, the slim rclone, the bundled roles with the addon, and nothing else. The
 * Dockerfile and the builder without Docker (oci.ts) both take it from here, so there is one image.
 *
 * For the machine's own architecture it takes what `npm install`, `npm run build` and `npm run rclone` have made. For
 * the other one it cross-builds: the addon by cmake-js, rclone by Go, Node from its npm package, the C libraries of
 * Debian's cross compiler (g++-aarch64-linux-gnu).
 */
import { execFileSync } from 'node:child_process';
import {
  chmodSync,
  copyFileSync,
  cpSync,
  existsSync,
  mkdirSync,
  mkdtempSync,
  readdirSync,
  readFileSync,
  realpathSync,
  renameSync,
  rmSync,
  symlinkSync,
  writeFileSync,
} from 'node:fs';
import path from 'node:path';
import { parseArgs } from 'node:util';
import {
  cachedRclonePath,
  cacheFolder,
  RCLONE_BUILD_ARGUMENTS,
  rcloneSources,
} from '../../lib/transfer/rclone-binary.ts';

export const ARCHITECTURES = ['x64', 'arm64'] as const;
export type Architecture = (typeof ARCHITECTURES)[number];

const PROJECT = path.resolve(import.meta.dirname, '../..');
/** Where the roles are in the image. */
const HOME = 'usr/lib/simple-volume';
/** The user of every part that needs no root. */
export const NONROOT = 65532;

interface Toolchain {
  /** prefix of binutils and the compiler; null: this machine's own */
  prefix: string;
  /** where its shared libraries are */
  libraries: readonly string[];
  /** absolute path of the dynamic loader in the image */
  loader: string;
  goarch: string;
}

const FOREIGN: Record<Architecture, Toolchain> = {
  x64: {
    prefix: 'x86_64-linux-gnu-',
    libraries: ['/usr/x86_64-linux-gnu/lib'],
    loader: '/lib64/ld-linux-x86-64.so.2',
    goarch: 'amd64',
  },
  arm64: {
    prefix: 'aarch64-linux-gnu-',
    libraries: ['/usr/aarch64-linux-gnu/lib'],
    loader: '/lib/ld-linux-aarch64.so.1',
    goarch: 'arm64',
  },
};
const OWN_LIBRARIES: Record<Architecture, readonly string[]> = {
  x64: ['/lib/x86_64-linux-gnu', '/usr/lib/x86_64-linux-gnu', '/lib64', '/usr/lib64'],
  arm64: ['/lib/aarch64-linux-gnu', '/usr/lib/aarch64-linux-gnu', '/lib', '/usr/lib64'],
};

export function toolchain(arch: Architecture): Toolchain {
  return arch === process.arch
    ? { ...FOREIGN[arch], prefix: '', libraries: OWN_LIBRARIES[arch] }
    : FOREIGN[arch];
}

/** Why the image of this architecture cannot be assembled here; null when it can. */
export function missingFor(arch: Architecture): string | null {
  const { prefix } = toolchain(arch);
  const needed = [`${prefix}readelf`, `${prefix}strip`, ...(prefix ? [`${prefix}g++`, 'go'] : [])];
  const missing = needed.filter((program) => {
    try {
      execFileSync(program, [program === 'go' ? 'version' : '--version'], { stdio: 'ignore' });
      return false;
    } catch {
      return true;
    }
  });
  return missing.length === 0 ? null : `not installed: ${missing.join(', ')}`;
}

type Say = (line: string) => void;

const run = (program: string, args: string[], cwd = PROJECT, env = process.env): string =>
  execFileSync(program, args, { cwd, env, encoding: 'utf8', maxBuffer: 64 * 1024 * 1024 });

/** What a cross-build of exactly these inputs has made once is taken from the cache folder. */
function cached(name: string, key: string, make: (file: string) => void): string {
  const folder = path.join(cacheFolder(), 'image', key);
  const file = path.join(folder, name);
  if (existsSync(file)) return file;
  mkdirSync(folder, { recursive: true });
  const scratch = mkdtempSync(path.join(folder, '.new-'));
  try {
    make(path.join(scratch, name));
    renameSync(path.join(scratch, name), file);
  } finally {
    rmSync(scratch, { recursive: true, force: true });
  }
  return file;
}

/** The pinned Node for an architecture. */
function nodeBinary(arch: Architecture, say: Say): string {
  const installed = path.join(PROJECT, `node_modules/node-linux-${arch}/bin/node`);
  if (existsSync(installed)) return installed;
  const { optionalDependencies } = JSON.parse(readFileSync(path.join(PROJECT, 'package.json'), 'utf8')) as {
    optionalDependencies: Record<string, string>;
  };
  const name = `node-linux-${arch}`;
  const version = optionalDependencies[name];
  const lock = JSON.parse(readFileSync(path.join(PROJECT, 'package-lock.json'), 'utf8')) as {
    packages: Record<string, { integrity?: string }>;
  };
  const integrity = lock.packages[`node_modules/${name}`]?.integrity;
  if (!integrity) throw new Error(`package-lock.json has no hash of ${name}`);
  return cached('node', `${name}-${version}`, (file) => {
    say(`taking Node ${version} for ${arch} from its npm package`);
    const folder = path.dirname(file);
    const [packed] = JSON.parse(
      run('npm', ['pack', `${name}@${version}`, '--json', '--pack-destination', folder], folder),
    ) as { filename: string; integrity: string }[];
    if (packed?.integrity !== integrity)
      throw new Error(`${name}@${version} is not the package that package-lock.json pins`);
    run('tar', ['-xzf', path.join(folder, packed.filename), '-C', folder, 'package/bin/node']);
    renameSync(path.join(folder, 'package/bin/node'), file);
  });
}

function rcloneBinary(arch: Architecture, say: Say): string {
  const own = cachedRclonePath();
  const sources = rcloneSources();
  if (own === null || sources === null) throw new Error('native/rclone is not here');
  if (arch === process.arch) {
    if (process.env.SIMPLE_VOLUME_RCLONE) return process.env.SIMPLE_VOLUME_RCLONE;
    if (!existsSync(own)) throw new Error('the slim rclone is not built: run `npm run rclone`');
    return own;
  }
  const key = path.basename(path.dirname(own)).replace(process.arch, arch);
  return cached('rclone', `rclone-${key}`, (file) => {
    say(`building the slim rclone for ${arch} (a minute the first time)`);
    const env = {
      ...process.env,
      CGO_ENABLED: '0',
      GOFLAGS: '-mod=readonly',
      GOARCH: toolchain(arch).goarch,
    };
    run('go', [...RCLONE_BUILD_ARGUMENTS, '-p', '2', '-o', file, '.'], sources, env);
  });
}

/** The addon for another architecture, by cmake-js; the one of dist for this one. */
function addon(arch: Architecture, scratch: string, say: Say): string {
  if (arch === process.arch) return path.join(PROJECT, 'dist/simple_volume.node');
  say(`building the addon for ${arch} with cmake-js`);
  const args = ['compile', '-d', 'native', '-O', scratch, '-a', arch];
  run(process.execPath, [
    path.join(PROJECT, 'node_modules/cmake-js/bin/cmake-js'),
    ...args,
    `--CDCMAKE_TOOLCHAIN_FILE=${arch}.cmake`,
  ]);
  return path.join(scratch, 'Release/simple_volume.node');
}

/** Names of the shared libraries that a file is linked with. */
function needed(readelf: string, file: string): string[] {
  const text = run(readelf, ['--dynamic', '--wide', file]);
  return [...text.matchAll(/\(NEEDED\)\s+Shared library: \[([^\]]+)\]/g)].map((m) => m[1] as string);
}

function copyLibraries(arch: Architecture, files: readonly string[], root: string): void {
  const { prefix, libraries, loader } = toolchain(arch);
  const seen = new Set<string>();
  const queue = [...files];
  for (let file = queue.pop(); file !== undefined; file = queue.pop()) {
    for (const name of needed(`${prefix}readelf`, file)) {
      if (seen.has(name)) continue;
      seen.add(name);
      const found = libraries.map((folder) => path.join(folder, name)).find((one) => existsSync(one));
      if (!found) throw new Error(`${name}, which ${file} needs, is in none of ${libraries.join(', ')}`);
      // /usr/lib is a default of every loader; one folder for all, whatever the distribution's layout.
      const target =
        name === path.basename(loader) ? path.join(root, loader) : path.join(root, 'usr/lib', name);
      mkdirSync(path.dirname(target), { recursive: true });
      copyFileSync(realpathSync(found), target);
      chmodSync(target, 0o755);
      queue.push(found);
    }
  }
  if (!existsSync(path.join(root, loader))) {
    const found = libraries
      .map((folder) => path.join(folder, path.basename(loader)))
      .find((f) => existsSync(f));
    if (!found) throw new Error(`the loader ${loader} is in none of ${libraries.join(', ')}`);
    mkdirSync(path.dirname(path.join(root, loader)), { recursive: true });
    copyFileSync(realpathSync(found), path.join(root, loader));
    chmodSync(path.join(root, loader), 0o755);
  }
}

/**
 * Assembles `root`, which must not exist or be empty. It has two parts, so that an upgrade pulls little: `base` (Node,
 * rclone, libraries, user names) and `app` (the roles).
 * @throws Error that names what is missing
 */
export function assemble(arch: Architecture, root: string, say: Say): { base: string; app: string } {
  if (existsSync(root) && readdirSync(root).length > 0) throw new Error(`${root} is not empty`);
  if (!existsSync(path.join(PROJECT, 'dist/bin.js')))
    throw new Error('dist is not built: run `npm run build`');
  const base = path.join(root, 'base');
  const app = path.join(root, 'app');
  const scratch = path.join(root, 'scratch');
  for (const folder of ['etc', 'usr/bin', 'usr/lib', 'usr/local/bin', 'usr/share/doc', 'var/lib'])
    mkdirSync(path.join(base, folder), { recursive: true });
  mkdirSync(path.join(base, 'tmp'));
  chmodSync(path.join(base, 'tmp'), 0o1777);
  symlinkSync('usr/lib', path.join(base, 'lib'));
  const { prefix } = toolchain(arch);

  const place = (from: string, to: string): string => {
    const target = path.join(base, to);
    copyFileSync(from, target);
    chmodSync(target, 0o755);
    return target;
  };
  const node = place(nodeBinary(arch, say), 'usr/bin/node');
  run(`${prefix}strip`, ['--strip-debug', node]);
  place(rcloneBinary(arch, say), 'usr/bin/rclone');
  const built = addon(arch, scratch, say);
  copyLibraries(arch, [node, built], base);
  writeFileSync(
    path.join(base, 'etc/passwd'),
    `root:x:0:0:root:/:/sbin/nologin\nnonroot:x:${NONROOT}:${NONROOT}:nonroot:/:/sbin/nologin\n`,
  );
  writeFileSync(path.join(base, 'etc/group'), `root:x:0:\nnonroot:x:${NONROOT}:\n`);
  writeFileSync(path.join(base, 'etc/nsswitch.conf'), 'passwd: files\ngroup: files\nhosts: files dns\n');

  const home = path.join(app, HOME);
  mkdirSync(home, { recursive: true });
  for (const name of readdirSync(path.join(PROJECT, 'dist'))) {
    // Maps are for developers, the stamp for the build.
    if (name.endsWith('.map') || name.startsWith('.') || name === 'simple_volume.node') continue;
    cpSync(path.join(PROJECT, 'dist', name), path.join(home, name));
  }
  const bin = readFileSync(path.join(home, 'bin.js'), 'utf8');
  writeFileSync(path.join(home, 'bin.js'), bin.replace(/^#!.*/, '#!/usr/bin/node')); // there is no env(1)
  chmodSync(path.join(home, 'bin.js'), 0o755);
  copyFileSync(built, path.join(home, 'simple_volume.node'));
  copyFileSync(path.join(PROJECT, 'LICENSE'), path.join(home, 'LICENSE'));
  mkdirSync(path.join(app, 'usr/local/bin'), { recursive: true });
  symlinkSync(`/${HOME}/bin.js`, path.join(app, 'usr/local/bin/simple-volume'));
  rmSync(scratch, { recursive: true, force: true });
  return { base, app };
}

if (import.meta.main) {
  const { values } = parseArgs({ options: { arch: { type: 'string' }, out: { type: 'string' } } });
  const arch = ARCHITECTURES.find((one) => one === (values.arch ?? process.arch));
  if (arch === undefined || values.out === undefined) {
    console.error(`usage: node chart/image/rootfs.ts --out DIR [--arch ${ARCHITECTURES.join('|')}]`);
    process.exit(2);
  }
  assemble(arch, path.resolve(values.out), (line) => console.error(`image: ${line}`));
}
