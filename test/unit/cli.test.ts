// The command line: help and version everywhere, exit 2 for what was not understood, any Node as the outer one.
import { spawn } from 'node:child_process';
import { existsSync, readFileSync } from 'node:fs';
import path from 'node:path';
import t from 'tap';

const bin = path.join(import.meta.dirname, '../../lib/cli/bin.js');
const packageFile = path.join(import.meta.dirname, '../../package.json');
const { version } = JSON.parse(readFileSync(packageFile, 'utf8')) as { version: string };

function run(
  args: string[],
  node = process.execPath,
): Promise<{ code: number | null; out: string; err: string }> {
  return new Promise((resolve) => {
    const child = spawn(node, [bin, ...args], {
      stdio: ['ignore', 'pipe', 'pipe'],
      env: { ...process.env, SIMPLE_VOLUME_SOURCES: '1' },
    });
    let out = '';
    let err = '';
    child.stdout.on('data', (text) => {
      out += text;
    });
    child.stderr.on('data', (text) => {
      err += text;
    });
    child.on('close', (code) => resolve({ code, out, err }));
  });
}

t.test('--version is the version of package.json', async (t) => {
  t.match(await run(['--version']), { code: 0, out: `${version}\n`, err: '' });
});

t.test('--help lists the commands, and a command has its own', async (t) => {
  t.match(await run(['--help']), { code: 0, out: /Commands:.*agent/s, err: '' });
  t.match(await run(['agent', '--help']), { code: 0, out: /--pool-path/, err: '' });
});

t.test('an unknown command or flag is named, exit 2, nothing on standard output', async (t) => {
  t.match(await run(['agnet']), { code: 2, out: '', err: /unknown command 'agnet'.*agent/s });
  t.match(await run(['--wat']), { code: 2, out: '', err: /unknown option '--wat'/ });
  t.match(await run(['agent', '--nope']), {
    code: 2,
    out: '',
    err: /unknown option '--nope'.*agent --help/s,
  });
  t.match(await run([]), { code: 2, out: '', err: /Usage: simple-volume/ });
});

const outer = ['/usr/bin/node', '/usr/local/bin/node'].find((file) => existsSync(file));
t.test('an older Node hands over to the pinned one', { skip: !outer && 'no other Node here' }, async (t) => {
  t.match(await run(['--version'], outer), { code: 0, out: `${version}\n`, err: '' });
  t.match(await run(['agent', '--nope'], outer), { code: 2, err: /unknown option/ });
});
