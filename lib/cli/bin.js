#!/usr/bin/env node
// The command `simple-volume`. Plain JavaScript: whatever Node starts it, the pinned one goes on. Long-running roles
// get a small heap; minified bundles (dist/) are taken where they are built, else the sources.
import { spawn } from 'node:child_process';
import { existsSync, readdirSync, statSync } from 'node:fs';
import { createRequire } from 'node:module';
import { constants } from 'node:os';
import path from 'node:path';
import { fileURLToPath } from 'node:url';

const here = path.dirname(fileURLToPath(import.meta.url));
// In a checkout this is lib/cli/bin.js; what is shipped has its bundles beside it.
const shipped = existsSync(path.join(here, 'main.js'));
const root = path.join(here, '../..');
const bundles = shipped ? here : path.join(root, 'dist');

const OLDEST_NODE = [24, 15];
/**
 * Roles that run for months beside workloads: the most MiB of heap. It is a ceiling against a leak and costs nothing
 * at rest. Each path of a batch takes 1.6 KiB until it is sealed; the agent's has room for the 65,536 marks that a
 * volume can have at once (110 MiB), twice over. The controller uses 37 MiB with 1,000 volumes on 50 nodes.
 */
const HEAP_MIB = { agent: 256, 'csi-node': 32, controller: 160 };

function isOld() {
  const [major, minor] = process.versions.node.split('.').map(Number);
  return major < OLDEST_NODE[0] || (major === OLDEST_NODE[0] && minor < OLDEST_NODE[1]);
}

/** The pinned Node (an optional dependency), or undefined. */
function pinnedNode() {
  try {
    const folder = path.dirname(
      createRequire(import.meta.url).resolve(`node-linux-${process.arch}/package.json`),
    );
    const file = path.join(folder, 'bin/node');
    return existsSync(file) ? file : undefined;
  } catch {
    return undefined;
  }
}

const args = process.argv.slice(2);
const role = args.find((arg) => !arg.startsWith('-')) ?? '';
const heap = Object.hasOwn(HEAP_MIB, role) ? HEAP_MIB[role] : undefined;

/** Whether a source of the checkout was changed after dist was built. */
function stale() {
  if (shipped) return false;
  let built;
  try {
    built = statSync(path.join(bundles, '.stamp')).mtimeMs;
  } catch {
    return true;
  }
  for (const room of ['lib', 'controller', 'csi']) {
    let names = [];
    try {
      names = readdirSync(path.join(root, room), { recursive: true });
    } catch {
      continue; // not there
    }
    for (const name of names) {
      if (name.endsWith('.ts') && statSync(path.join(root, room, name)).mtimeMs > built) return true;
    }
  }
  return false;
}

/** A bundle of the role, the bundle of everything else, or the sources (also when they are newer). */
function program() {
  const names = heap === undefined ? ['main.js'] : [`${role}.js`, 'main.js'];
  const found = names.map((name) => path.join(bundles, name)).find((file) => existsSync(file));
  if (shipped && found) return found;
  if (!process.env.SIMPLE_VOLUME_SOURCES && found && !stale()) return found;
  return path.join(root, 'lib/cli/main.ts');
}

let node = process.execPath;
if (isOld()) {
  node = pinnedNode();
  if (node === undefined) {
    console.error(
      `simple-volume: Node ${OLDEST_NODE.join('.')} or newer is needed; this is ${process.versions.node}, and the ` +
        `package node-linux-${process.arch} (an optional dependency) is not installed.`,
    );
    process.exit(1);
  }
}

const main = program();
const flags = ['--disable-warning=ExperimentalWarning'];
if (heap !== undefined) {
  // --optimize-for-size: 6 to 10 MiB less after a scan, no measurable time. --no-turbofan: 5 MiB less, since the
  // last of the compilers is never paged in; the one before it (maglev) stays.
  flags.push(
    `--max-old-space-size=${heap}`,
    '--max-semi-space-size=1',
    '--optimize-for-size',
    '--no-turbofan',
    '--expose-gc', // garbage is collected once work is over (lib/agent/garbage.ts): 4 MiB of an agent at rest
  );
}
const env = { ...process.env };
if (heap !== undefined && env.MALLOC_ARENA_MAX === undefined) env.MALLOC_ARENA_MAX = '1';
const argv = [node, ...flags, main, ...args];

if (node === process.execPath && heap === undefined) {
  // Nothing to change: go on in this process.
  process.argv[1] = main;
  await import(main);
} else if (typeof process.execve === 'function') {
  // The same process becomes the new one: signals, exit code and memory are its own.
  const { emitWarning } = process;
  process.emitWarning = () => {};
  try {
    process.execve(node, argv, env);
  } finally {
    process.emitWarning = emitWarning;
  }
} else {
  const child = spawn(node, argv.slice(1), { env, stdio: 'inherit' });
  for (const signal of ['SIGTERM', 'SIGINT', 'SIGHUP', 'SIGUSR1', 'SIGUSR2']) {
    process.on(signal, () => child.kill(signal));
  }
  child.on('error', (error) => {
    console.error(`simple-volume: cannot start ${node}: ${error.message}`);
    process.exit(1);
  });
  child.on('exit', (code, signal) => {
    process.exit(signal === null ? code : 128 + (constants.signals[signal] ?? 0));
  });
}
