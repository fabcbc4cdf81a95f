/** The only place that mounts: mount(8) and umount(8), bounded in time. Tests put another one in its place. */
import { execFile } from 'node:child_process';
import { readFileSync } from 'node:fs';
import { MOVED, type MountEntry, parseMounts } from './mounts.ts';

export interface Mounter {
  table(): MountEntry[];
  bind(source: string, target: string): Promise<void>;
  /** Options of this mount alone, on top of those that it has. */
  remount(target: string, options: readonly string[]): Promise<void>;
  /** Covers the target with something empty and read-only. */
  cover(target: string): Promise<void>;
  /** Takes the mount on top away. Never lazily: what is still in use must not look as if it were gone. */
  umount(target: string): Promise<void>;
}

const LIMIT_MS = 20_000;

function run(program: string, args: readonly string[]): Promise<void> {
  return new Promise((resolve, reject) => {
    execFile(
      program,
      args,
      { timeout: LIMIT_MS, killSignal: 'SIGKILL', env: { PATH: process.env.PATH ?? '', LC_ALL: 'C' } },
      (error, _stdout, stderr) => {
        if (!error) resolve();
        else reject(new Error(`${program}: ${stderr.trim() || error.message}`));
      },
    );
  });
}

/** The host's. Paths are resolved by the caller: `-c` keeps mount(8) from resolving them once more. */
export const systemMounter: Mounter = {
  table: () => parseMounts(readFileSync('/proc/self/mountinfo', 'latin1')),
  bind: (source, target) => run('mount', ['-c', '-n', '--bind', '--', source, target]),
  remount: (target, options) =>
    run('mount', ['-c', '-n', '-o', `remount,bind,${options.join(',')}`, '--', target]),
  cover: (target) =>
    run('mount', ['-c', '-n', '-t', 'tmpfs', '-o', 'ro,size=4k,mode=0555', '--', MOVED, target]),
  umount: (target) => run('umount', ['-c', '-n', '--', target]),
};
