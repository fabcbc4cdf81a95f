/**
 * `node test/kube/harness/build.ts [program...]`: builds etcd, kube-apiserver and kubectl (or the named programs) from
 * their Go modules into the cache folder outside the checkout: about 8 minutes on two cores the first time, nothing
 * afterwards. Progress on standard error, one closing line on standard output. Without Go it says so and ends well:
 * the tests that need the programs then skip by name.
 */
import { spawn, spawnSync } from 'node:child_process';
import {
  closeSync,
  existsSync,
  mkdirSync,
  mkdtempSync,
  openSync,
  readdirSync,
  renameSync,
  rmSync,
} from 'node:fs';
import os from 'node:os';
import path from 'node:path';
import {
  ALL_PROGRAMS,
  API_PROGRAMS,
  kubeProgram,
  MODULES,
  moduleFolder,
  type ProgramModule,
  programsFolder,
} from './programs.ts';

const GO_MINOR = 26;
/** Set in the process that builds: `1` when it holds the lock. */
const LOCKED = 'SIMPLE_VOLUME_KUBE_LOCKED';

type Say = (line: string) => void;

/** Why Go cannot build here, null when it can. */
function goProblem(): string | null {
  const asked = spawnSync('go', ['env', 'GOVERSION', 'GOTOOLCHAIN'], { encoding: 'utf8' });
  if (asked.status !== 0) return 'Go is not installed';
  const [version = '', toolchain = ''] = asked.stdout.split('\n');
  const minor = Number(/^go1\.(\d+)/.exec(version)?.[1] ?? 0);
  // From 1.21 on Go fetches the version that a module asks for, unless it is told not to (go.dev/doc/toolchain).
  if (minor >= GO_MINOR || (minor >= 21 && toolchain !== 'local')) return null;
  return `${version || 'this Go'} is too old, 1.${GO_MINOR} is needed`;
}

function run(program: string, args: string[], cwd: string, cgo: boolean, say: Say): Promise<void> {
  return new Promise((resolve, reject) => {
    const child = spawn(program, args, {
      cwd,
      env: { ...process.env, CGO_ENABLED: cgo ? '1' : '0', GOFLAGS: '-mod=readonly' },
      stdio: ['ignore', 'ignore', 'pipe'],
    });
    let rest = '';
    let last = '';
    child.stderr.setEncoding('utf8').on('data', (text: string) => {
      const lines = (rest + text).split('\n');
      rest = lines.pop() ?? '';
      for (const line of lines) {
        last = line || last;
        // Thousands of lines about single downloads say nothing; errors do.
        if (line.trim() !== '' && !line.startsWith('go: downloading')) say(line);
      }
    });
    child.on('error', reject);
    child.on('close', (code, signal) => {
      if (code === 0) resolve();
      else reject(new Error(`${program} ${args[0]} ended with ${signal ?? code}: ${rest || last}`));
    });
  });
}

/** Builds programs of one module into `target`, each moved there whole. */
async function buildModule(
  module: ProgramModule,
  programs: string[],
  target: string,
  say: Say,
): Promise<void> {
  const scratch = mkdtempSync(path.join(target, '.new-'));
  const started = Date.now();
  const beat = setInterval(
    () => say(`${module.version}: still building (${Math.round((Date.now() - started) / 1000)} s)`),
    15_000,
  );
  say(`${module.version}: building ${programs.join(', ')}`);
  try {
    const packages = programs.map((program) => module.packages[program] as string);
    const out = packages.length === 1 ? path.join(scratch, programs[0] as string) : `${scratch}/`;
    const flags = ['-trimpath', '-buildvcs=false', '-p', '2', '-ldflags', module.linkerFlags];
    if (module.cgo) flags.push('-tags', module.cgo.tags);
    await run('go', ['build', ...flags, '-o', out, ...packages], module.folder, !!module.cgo, say);
    for (const program of programs) renameSync(path.join(scratch, program), path.join(target, program));
    say(`${module.version}: done in ${Math.round((Date.now() - started) / 1000)} s`);
  } finally {
    clearInterval(beat);
    rmSync(scratch, { recursive: true, force: true });
  }
}

/** Builds those that are not there yet. Returns what was asked for and could not be built. */
export async function buildPrograms(programs: readonly string[], say: Say): Promise<string[]> {
  for (const module of MODULES) {
    const target = moduleFolder(module);
    const missing = programs.filter(
      (program) => module.packages[program] && !existsSync(path.join(target, program)),
    );
    if (missing.length === 0) continue;
    const absent = (module.cgo?.headers ?? []).filter((name) => !existsSync(`/usr/include/${name}`));
    if (absent.length > 0) {
      say(`${module.version}: not built, no ${absent.join(', ')} below /usr/include`);
      continue;
    }
    mkdirSync(target, { recursive: true });
    if (process.env[LOCKED] === '1') {
      // Nobody else builds here now: what lies about is of a build that was killed.
      for (const name of readdirSync(target)) {
        if (name.startsWith('.new-')) rmSync(path.join(target, name), { recursive: true, force: true });
      }
    }
    await buildModule(module, missing, target, say);
  }
  return programs.filter((program) => kubeProgram(program) === null);
}

/** Waits for another build and keeps a third one out: the kernel drops the lock when its holder dies, whatever killed it. */
function underLock(args: string[]): never {
  const lock = path.join(programsFolder(), '.lock');
  mkdirSync(path.dirname(lock), { recursive: true });
  closeSync(openSync(lock, 'a'));
  const again = [process.execPath, import.meta.filename, ...args];
  const env = { ...process.env, [LOCKED]: '1' };
  const stdio = ['ignore', 'inherit', 'inherit'] as const;
  const taken = 75; // EX_TEMPFAIL, sysexits(3): no code of the build itself
  let ended = spawnSync('flock', ['--nonblock', '--conflict-exit-code', `${taken}`, lock, ...again], {
    env,
    stdio: [...stdio],
  });
  if (ended.status === taken) {
    console.error('kube: another build is under way, waiting for it');
    ended = spawnSync('flock', [lock, ...again], { env, stdio: [...stdio] });
  }
  // No flock here: two builds at once are a waste and no harm, each program is moved into its place whole.
  if (ended.error) {
    const alone = { env: { ...process.env, [LOCKED]: 'no' }, stdio: [...stdio] };
    ended = spawnSync(again[0] as string, again.slice(1), alone);
  }
  process.exit(ended.status ?? 1);
}

if (import.meta.main) {
  const args = process.argv.slice(2);
  const programs = args.length > 0 ? args : [...API_PROGRAMS];
  const unknown = programs.filter((program) => !ALL_PROGRAMS.includes(program));
  if (unknown.length > 0) {
    console.error(`kube: no such program: ${unknown.join(', ')}; known are ${ALL_PROGRAMS.join(', ')}`);
    process.exit(2);
  }
  if (programs.every((program) => kubeProgram(program) !== null)) {
    console.log(path.dirname(kubeProgram(programs[0] as string) as string));
    process.exit(0);
  }
  const problem = goProblem();
  if (problem !== null) {
    console.log(`not built: ${problem}`);
    process.exit(0);
  }
  if (process.env[LOCKED] === undefined) underLock(args);
  os.setPriority(15); // whatever else runs here comes first
  const say: Say = (line) => console.error(`kube: ${line}`);
  const missing = await buildPrograms(programs, say);
  console.log(
    missing.length > 0
      ? `not built: ${missing.join(', ')}`
      : path.dirname(kubeProgram(programs[0] as string) as string),
  );
}
