// Which rclone is taken, and what is said about an old one.
import { chmodSync, mkdirSync, writeFileSync } from 'node:fs';
import path from 'node:path';
import t from 'tap';
import { cachedRclonePath, findRclone, judgeVersion } from '../../lib/transfer/rclone-binary.ts';

/** A folder with a program `rclone` that prints this version. */
function fake(folder: string, version: string): string {
  mkdirSync(folder, { recursive: true });
  const file = path.join(folder, 'rclone');
  writeFileSync(file, `#!/bin/sh\necho "rclone ${version}"\n`);
  chmodSync(file, 0o755);
  return file;
}

t.test('a version without the two CVEs passes without a word', async (t) => {
  t.same(judgeVersion('rclone v1.76.0\n- os/version: debian\n', 'x'), { version: '1.76.0', warning: null });
  t.same(judgeVersion('rclone v1.75.0-DEV', 'x'), { version: '1.75.0-DEV', warning: null });
  t.same(judgeVersion('rclone v2.0', 'x'), { version: '2.0', warning: null });
});

t.test('an older one works with a warning that names both CVEs', async (t) => {
  for (const version of ['1.63.0', '1.74.9']) {
    const { warning } = judgeVersion(`rclone v${version}`, 'x');
    t.match(warning, /CVE-2026-71313 and CVE-2026-54572/, version);
  }
});

t.test('before 1.63 it is refused, and so is what is no rclone', async (t) => {
  t.throws(() => judgeVersion('rclone v1.62.9', '/x/rclone'), {
    code: 'RCLONE_MISSING',
    message: /1\.62\.9/,
  });
  t.throws(() => judgeVersion('rclone v0.99.0', '/x/rclone'), { code: 'RCLONE_MISSING' });
  t.throws(() => judgeVersion('hello', '/x/rclone'), { code: 'RCLONE_MISSING' });
});

t.test('SIMPLE_VOLUME_RCLONE beats the cache, the cache beats the PATH', async (t) => {
  const folder = t.testdir();
  const onPath = fake(path.join(folder, 'bin'), 'v1.70.0');
  const named = fake(path.join(folder, 'own'), 'v1.71.0');
  const env: NodeJS.ProcessEnv = { PATH: `${path.dirname(onPath)}:/usr/bin:/bin`, XDG_CACHE_HOME: folder };
  t.match(await findRclone(env), { path: onPath, version: '1.70.0', warning: /CVE/ });
  const cached = cachedRclonePath(env) as string;
  t.equal(path.relative(folder, cached).split(path.sep).slice(0, 2).join('/'), 'simple-volume/rclone');
  fake(path.dirname(cached), 'v1.76.0');
  t.match(await findRclone(env), { path: cached, version: '1.76.0', warning: null });
  t.match(await findRclone({ ...env, SIMPLE_VOLUME_RCLONE: named }), { path: named, version: '1.71.0' });
});

t.test('a named one that is missing is an error, not a reason to take another', async (t) => {
  const folder = t.testdir();
  const onPath = fake(path.join(folder, 'bin'), 'v1.76.0');
  const env = { PATH: path.dirname(onPath), SIMPLE_VOLUME_RCLONE: path.join(folder, 'none') };
  await t.rejects(findRclone(env), { code: 'RCLONE_MISSING', message: /none does not run/ });
});

t.test('an unusable one on the PATH is passed over for the next', async (t) => {
  const folder = t.testdir();
  const old = fake(path.join(folder, 'a'), 'v1.50.0');
  const good = fake(path.join(folder, 'b'), 'v1.76.0');
  const env = { PATH: `${path.dirname(old)}:${path.dirname(good)}:/usr/bin:/bin`, XDG_CACHE_HOME: folder };
  t.match(await findRclone(env), { path: good });
  await t.rejects(findRclone({ ...env, PATH: path.dirname(old) }), {
    message: /1\.50\.0; 1\.63\.0 or newer/,
  });
});

t.test('none at all: the error says what to do', async (t) => {
  const env = { PATH: '/nonexistent', XDG_CACHE_HOME: t.testdir() };
  await t.rejects(findRclone(env), {
    code: 'RCLONE_MISSING',
    message: /npm run rclone.*SIMPLE_VOLUME_RCLONE/,
  });
});
