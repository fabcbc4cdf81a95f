/**
 * Which rclone pulls: the one of SIMPLE_VOLUME_RCLONE, the slim one that native/rclone/build.ts put into the cache
 * folder, or one on the PATH, in that order.
 */
import { execFile } from 'node:child_process';
import { createHash } from 'node:crypto';
import { accessSync, constants, existsSync, readFileSync, statSync } from 'node:fs';
import os from 'node:os';
import path from 'node:path';
import { promisify } from 'node:util';
import { SimpleVolumeError } from '../core/errors.ts';

/** Older ones write in place, so a pull that breaks off leaves half a file under its final name. */
const OLDEST = [1, 63, 0] as const;
/** The first release without CVE-2026-71313 and CVE-2026-54572. */
const FIXED = [1, 75, 0] as const;

/** The version that native/rclone/go.mod pins. */
export const RCLONE_VERSION = '1.76.0';
/** Arguments of `go build`: static, without paths of the building machine and without debug information. */
export const RCLONE_BUILD_ARGUMENTS = [
  'build',
  '-trimpath',
  '-ldflags',
  `-s -w -X github.com/rclone/rclone/fs.Version=v${RCLONE_VERSION}`,
];

export interface Rclone {
  /** absolute path */
  path: string;
  /** as `rclone version` says, without the leading v */
  version: string;
  /** what the operator should know about this version, null if nothing */
  warning: string | null;
}

/** The folder for what is built once and used by every checkout of this user. */
export function cacheFolder(env: NodeJS.ProcessEnv = process.env): string {
  const base = env.XDG_CACHE_HOME || path.join(env.HOME || os.homedir(), '.cache');
  return path.join(base, 'simple-volume');
}

/** The folder native/rclone of the checkout that this code is from, null in an installation without sources. */
export function rcloneSources(): string | null {
  const candidates = ['../../native/rclone', '../native/rclone'].map((p) =>
    path.join(import.meta.dirname, p),
  );
  return candidates.find((folder) => existsSync(path.join(folder, 'go.sum'))) ?? null;
}

/** Where the slim rclone of exactly these sources lives once it is built; null without sources. */
export function cachedRclonePath(env: NodeJS.ProcessEnv = process.env): string | null {
  const sources = rcloneSources();
  if (sources === null) return null;
  const hash = createHash('sha256').update(RCLONE_BUILD_ARGUMENTS.join('\0'));
  for (const file of ['main.go', 'go.mod', 'go.sum']) {
    hash.update(`\0${file}\0`).update(readFileSync(path.join(sources, file)));
  }
  const key = `${RCLONE_VERSION}-${hash.digest('hex').slice(0, 16)}-${process.arch}`;
  return path.join(cacheFolder(env), 'rclone', key, 'rclone');
}

/** All programs called `rclone` on the PATH, in its order. */
export function rclonesOnPath(env: NodeJS.ProcessEnv = process.env): string[] {
  return (env.PATH ?? '')
    .split(':')
    .filter((folder) => path.isAbsolute(folder))
    .map((folder) => path.join(folder, 'rclone'))
    .filter(executable);
}

function executable(file: string): boolean {
  try {
    accessSync(file, constants.X_OK);
    return statSync(file).isFile();
  } catch {
    return false;
  }
}

function older(version: readonly number[], than: readonly number[]): boolean {
  for (let i = 0; i < 3; i++) {
    const difference = (version[i] ?? 0) - (than[i] ?? 0);
    if (difference !== 0) return difference < 0;
  }
  return false;
}

/**
 * Judges what `rclone version` printed.
 *
 * @returns the version and a warning or null
 * @throws RCLONE_MISSING when it is no rclone or older than 1.63
 */
export function judgeVersion(output: string, file: string): { version: string; warning: string | null } {
  const match = /^rclone v((\d+)\.(\d+)(?:\.(\d+))?\S*)/m.exec(output);
  if (!match) throw new SimpleVolumeError('RCLONE_MISSING', `${file} does not say that it is an rclone`);
  const version = match[1] as string;
  const numbers = [match[2], match[3], match[4] ?? 0].map(Number);
  if (older(numbers, OLDEST)) {
    throw new SimpleVolumeError(
      'RCLONE_MISSING',
      `${file} is rclone ${version}; ${OLDEST.join('.')} or newer is needed`,
    );
  }
  const warning = older(numbers, FIXED)
    ? `rclone ${version} has CVE-2026-71313 and CVE-2026-54572; ${FIXED.join('.')} or newer has not`
    : null;
  return { version, warning };
}

/**
 * Starts a program with `version` and judges it.
 *
 * @param file absolute path
 * @throws RCLONE_MISSING when it cannot be started, is no rclone or is too old
 */
export async function inspectRclone(file: string): Promise<Rclone> {
  let output: string;
  try {
    const env = {
      PATH: process.env.PATH ?? '/usr/bin:/bin',
      HOME: '/nonexistent',
      RCLONE_CONFIG: '/dev/null',
    };
    output = (await promisify(execFile)(file, ['version'], { env, timeout: 20_000 })).stdout;
  } catch (cause) {
    const reason = (cause as Error).message.split('\n')[0];
    throw new SimpleVolumeError('RCLONE_MISSING', `${file} does not run: ${reason}`, { cause });
  }
  return { path: file, ...judgeVersion(output, file) };
}

/**
 * Finds the rclone to use.
 *
 * @param env SIMPLE_VOLUME_RCLONE names one (and then no other is tried), PATH, XDG_CACHE_HOME and HOME say where
 *   to look else
 * @throws RCLONE_MISSING naming what was found and why it does not do
 */
export async function findRclone(env: NodeJS.ProcessEnv = process.env): Promise<Rclone> {
  if (env.SIMPLE_VOLUME_RCLONE) return inspectRclone(path.resolve(env.SIMPLE_VOLUME_RCLONE));
  const cached = cachedRclonePath(env);
  const candidates = [...(cached !== null && executable(cached) ? [cached] : []), ...rclonesOnPath(env)];
  const problems: string[] = [];
  for (const file of candidates) {
    try {
      return await inspectRclone(file);
    } catch (error) {
      problems.push((error as Error).message);
    }
  }
  const where =
    rcloneSources() === null ? 'on the PATH' : 'in the cache (`npm run rclone` builds it) or on the PATH';
  const found = problems.length > 0 ? problems.join('; ') : `no rclone was found ${where}`;
  throw new SimpleVolumeError('RCLONE_MISSING', `${found}; SIMPLE_VOLUME_RCLONE can name one`);
}
