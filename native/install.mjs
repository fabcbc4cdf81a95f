// npm's `install` step: builds the addon into build/Release/simple_volume.node with npm's own node-gyp and the
// headers inside the pinned Node package, so nothing is fetched besides npm packages. Skipped when sources, flags
// and tools are what they were. Plain JavaScript: an older Node must be able to run it.
import { spawn, spawnSync } from 'node:child_process';
import { createHash } from 'node:crypto';
import {
  existsSync,
  mkdirSync,
  readFileSync,
  realpathSync,
  rmSync,
  symlinkSync,
  writeFileSync,
} from 'node:fs';
import { createRequire } from 'node:module';
import path from 'node:path';
import { addonSources, filesBelow, root } from './sources.mjs';

const output = path.join(root, 'build/Release/simple_volume.node');
const stampFile = path.join(root, 'build/simple_volume.stamp');
const say = (text) => console.log(`simple-volume addon: ${text}`);

function fail(text) {
  console.error(`simple-volume addon: ${text}`);
  process.exit(1);
}

/** The folder of the pinned Node package (bin/node and include/node), or undefined on a CPU that has none. */
function pinnedNode() {
  try {
    const require = createRequire(import.meta.url);
    return path.dirname(require.resolve(`node-linux-${process.arch}/package.json`));
  } catch {
    return undefined;
  }
}

/** node-gyp as npm brings it along. */
function nodeGyp() {
  const given = process.env.npm_config_node_gyp;
  if (given && existsSync(given)) return given;
  for (const folder of (process.env.PATH ?? '').split(':')) {
    const npm = path.join(folder, 'npm');
    if (!existsSync(npm)) continue;
    const found = path.join(path.dirname(realpathSync(npm)), '../node_modules/node-gyp/bin/node-gyp.js');
    if (existsSync(found)) return found;
  }
  return undefined;
}

/** Changes whenever the addon has to be built anew. */
function stampOf(nodeDir) {
  const hash = createHash('sha256');
  hash.update(`${process.arch} ${nodeDir} ${process.env.CXX ?? ''} ${process.env.CXXFLAGS ?? ''}\n`);
  const compiler = spawnSync(process.env.CXX ?? 'g++', ['-dumpfullversion'], { encoding: 'utf8' });
  hash.update(compiler.stdout ?? '');
  const require = createRequire(import.meta.url);
  hash.update(require('node-addon-api/package.json').version);
  hash.update(readFileSync(path.join(nodeDir, 'include/node/node_version.h')));
  const headers = ['native/addon', 'native/engine', 'native/vendor']
    .flatMap(filesBelow)
    .filter((f) => f.endsWith('.h'));
  const inputs = ['binding.gyp', 'native/sources.mjs', 'native/install.mjs', 'package.json'];
  for (const file of [...inputs, ...addonSources(process.arch), ...headers]) {
    hash.update(`\n${file}\n`).update(readFileSync(path.join(root, file)));
  }
  return hash.digest('hex');
}

if (process.platform !== 'linux') fail(`Linux only; this is ${process.platform}`);
const pinned = pinnedNode();
const nodeDir = pinned ?? process.env.npm_config_nodedir;
if (!nodeDir || !existsSync(path.join(nodeDir, 'include/node/node_api.h'))) {
  fail(
    `no Node headers: the package node-linux-${process.arch} is not installed (is it an optional dependency that was left out with --omit=optional?)`,
  );
}
const stamp = stampOf(nodeDir);
// npm links the commands of dependencies, not the project's own: with this `npx simple-volume` finds it at once.
try {
  const bin = path.join(root, 'node_modules/.bin/simple-volume');
  if (existsSync(path.dirname(bin)) && !existsSync(bin)) symlinkSync('../../lib/cli/bin.js', bin);
} catch (error) {
  if (error.code !== 'EEXIST') say(`npx simple-volume will not be found: ${error.message}`);
}

if (existsSync(output) && existsSync(stampFile) && readFileSync(stampFile, 'utf8') === stamp) {
  say('up to date');
  process.exit(0);
}
const python = process.env.PYTHON ?? process.env.npm_config_python ?? 'python3';
if (spawnSync(python, ['-c', 'import sys; assert sys.version_info >= (3, 8)']).status !== 0) {
  fail(`node-gyp needs Python 3.8 or newer, and "${python}" is none (Debian: apt-get install python3)`);
}
for (const tool of ['make', process.env.CXX ?? 'g++']) {
  if (spawnSync(tool, ['--version']).status !== 0) {
    fail(`"${tool}" is needed to build the addon (Debian: apt-get install g++ make)`);
  }
}
const gyp = nodeGyp();
if (!gyp) fail('node-gyp not found; it comes with npm: run `npm install`');

const started = Date.now();
say(`building ${addonSources(process.arch).length} files with ${path.basename(nodeDir)} headers`);
rmSync(stampFile, { force: true });
const jobs = process.env.JOBS ?? '2';
const env = { ...process.env };
// node-gyp runs `node` for binding.gyp: the pinned one.
if (pinned) env.PATH = `${path.join(pinned, 'bin')}:${env.PATH}`;
const child = spawn(
  process.execPath,
  [gyp, 'configure', 'build', '--release', `--nodedir=${nodeDir}`, `-j${jobs}`],
  {
    cwd: root,
    env,
    stdio: ['ignore', 'pipe', 'pipe'],
  },
);
const log = [];
for (const stream of [child.stdout, child.stderr]) {
  let rest = '';
  stream.setEncoding('utf8').on('data', (text) => {
    const lines = (rest + text).split('\n');
    rest = lines.pop();
    for (const line of lines) {
      log.push(line);
      const file = /^\s+(?:CXX|CC|SOLINK_MODULE)\S* Release\/(?:obj\.target\/)?(\S+)/.exec(line)?.[1];
      if (file) say(path.basename(file));
      else if (/warning:|error:/.test(line)) console.error(line);
    }
  });
}
child.on('close', (code) => {
  if (code !== 0 || !existsSync(output)) {
    console.error(log.join('\n'));
    fail(`the build failed (node-gyp ended with ${code}); its output is above`);
  }
  mkdirSync(path.dirname(stampFile), { recursive: true });
  writeFileSync(stampFile, stamp);
  say(`built in ${((Date.now() - started) / 1000).toFixed(1)} s`);
});
