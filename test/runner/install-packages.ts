/** Installs the Debian packages that the tests use, where that is allowed; says what is missing where it is not. */
import { execFileSync } from 'node:child_process';
import { existsSync } from 'node:fs';
import { BUILD_PACKAGES } from '../config.ts';
import { installPackages, missingPackages } from '../packages.ts';

function installBuildPackages(): void {
  const names = BUILD_PACKAGES.filter((one) => !existsSync(one.file)).map((one) => one.name);
  if (names.length === 0) return;
  if (!existsSync('/etc/debian_version') || process.getuid?.() !== 0) {
    throw new Error(`needed and not here: ${names.join(' ')} (Debian: apt-get install ${names.join(' ')})`);
  }
  console.log(`installing ${names.join(' ')}`);
  const env = { ...process.env, DEBIAN_FRONTEND: 'noninteractive' };
  const stdio = ['ignore', 'inherit', 'inherit'] as const;
  const install = ['install', '-y', '--no-install-recommends', ...names];
  try {
    execFileSync('apt-get', install, { stdio: [...stdio], env });
  } catch {
    // The lists may be older than the archive.
    execFileSync('apt-get', ['update'], { stdio: [...stdio], env });
    execFileSync('apt-get', install, { stdio: [...stdio], env });
  }
}

installBuildPackages();
// Programs of single tests: a test whose program is missing skips and names it, so this is no failure.
if (!process.argv.includes('--build-only')) {
  const missing = missingPackages();
  if (missing.length > 0) console.log(`installing ${missing.map((one) => one.name).join(' ')}`);
  const reason = installPackages(missing);
  if (reason !== null) console.log(`note: ${reason}`);
}
