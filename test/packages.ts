/**
 * Debian packages that some tests use, in one place. As root on Debian the test runner installs what is missing
 * (`apt-get install --no-install-recommends`); elsewhere those tests skip and name what they lack.
 */
import { execFileSync } from 'node:child_process';
import { accessSync, constants, existsSync } from 'node:fs';
import { delimiter, join } from 'node:path';

export interface SystemPackage {
  /** Name in Debian. */
  name: string;
  /** A program (or another file) that it brings. */
  program: string;
  /** Where that is, when it is not on the PATH. */
  folder?: string;
  /** Suites (folders below test/) that use it. */
  suites: readonly string[];
}

export const PACKAGES: readonly SystemPackage[] = [
  { name: 'git', program: 'git', suites: ['real'] },
  { name: 'sqlite3', program: 'sqlite3', suites: ['real'] },
  { name: 'redis-server', program: 'redis-server', suites: ['real'] },
  { name: 'redis-tools', program: 'redis-check-aof', suites: ['real'] },
  { name: 'minetest-server', program: 'minetestserver', suites: ['real'] },
  { name: 'cadaver', program: 'cadaver', suites: ['real'] },
  { name: 'curl', program: 'curl', suites: ['real'] },
  { name: 'chromium', program: 'chromium', suites: ['real'] },
  { name: 'attr', program: 'getfattr', suites: ['real'] },
  { name: 'g++-aarch64-linux-gnu', program: 'aarch64-linux-gnu-g++', suites: ['image'] },
  { name: 'qemu-user', program: 'qemu-aarch64', suites: ['image'] },
  { name: 'containernetworking-plugins', program: 'bridge', folder: '/usr/lib/cni', suites: ['cluster'] },
  { name: 'libseccomp-dev', program: 'seccomp.h', folder: '/usr/include', suites: ['cluster'] },
  { name: 'pkg-config', program: 'pkg-config', suites: ['cluster'] },
  { name: 'nftables', program: 'nft', suites: ['cluster'] },
  { name: 'busybox-static', program: 'busybox', suites: ['cluster'] },
  { name: 'iproute2', program: 'ip', suites: ['cluster'] },
  { name: 'ccache', program: 'ccache', suites: ['native'] },
  { name: 'xfsprogs', program: 'mkfs.xfs', suites: ['native'] },
  { name: 'btrfs-progs', program: 'mkfs.btrfs', suites: ['native', 'csi', 'cluster'] },
];

/** Debian keeps servers and games out of the usual PATH. */
const EXTRA_FOLDERS = ['/usr/local/sbin', '/usr/sbin', '/sbin', '/usr/games'];

/** Absolute path of a program, null when it is not installed. */
export function programPath(program: string): string | null {
  for (const folder of [...(process.env.PATH ?? '').split(delimiter), ...EXTRA_FOLDERS]) {
    if (folder === '') continue;
    const path = join(folder, program);
    try {
      accessSync(path, constants.X_OK);
      return path;
    } catch {
      // Not in this folder.
    }
  }
  return null;
}

const missing = ({ program, folder }: SystemPackage): boolean =>
  folder === undefined ? programPath(program) === null : !existsSync(join(folder, program));

/** Packages of these suites (all when none is named) whose program is missing. */
export function missingPackages(suites: readonly string[] = []): SystemPackage[] {
  return PACKAGES.filter(
    (one) => (suites.length === 0 || one.suites.some((suite) => suites.includes(suite))) && missing(one),
  );
}

/**
 * Installs packages when that is possible here.
 * @returns null when all are there afterwards, else the reason why not
 */
export function installPackages(packages: readonly SystemPackage[]): string | null {
  if (packages.length === 0) return null;
  const names = packages.map((one) => one.name);
  if (!existsSync('/etc/debian_version')) return `not Debian; missing: ${names.join(' ')}`;
  if (process.getuid?.() !== 0) return `not root; missing: ${names.join(' ')}`;
  const run = (args: string[]): void => {
    execFileSync('apt-get', args, {
      stdio: ['ignore', 'ignore', 'pipe'],
      timeout: 600_000,
      // No server of a package may start by itself: the tests start their own on their own ports.
      env: { ...process.env, DEBIAN_FRONTEND: 'noninteractive', RUNLEVEL: '1' },
    });
  };
  try {
    try {
      run(['install', '-y', '--no-install-recommends', ...names]);
    } catch {
      // The lists may be older than the archive.
      run(['update']);
      run(['install', '-y', '--no-install-recommends', ...names]);
    }
  } catch (error) {
    const text = String((error as { stderr?: Buffer }).stderr ?? error).trim();
    return `apt-get install ${names.join(' ')} failed: ${text.split('\n').slice(-2).join(' ')}`;
  }
  const left = packages.filter(missing);
  return left.length === 0
    ? null
    : `still missing after the installation: ${left.map((one) => one.program).join(' ')}`;
}
