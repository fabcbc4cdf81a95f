/** The agent's unix socket for csi-node: what a reboot or a killed process left is no obstacle, and nothing else is touched. */
import { spawn } from 'node:child_process';
import { once } from 'node:events';
import {
  existsSync,
  lstatSync,
  mkdirSync,
  mkdtempSync,
  readFileSync,
  rmSync,
  symlinkSync,
  writeFileSync,
} from 'node:fs';
import { tmpdir } from 'node:os';
import { join } from 'node:path';
import Fastify from 'fastify';
import t from 'tap';
import { listenOnSocket } from '../../lib/agent/server.ts';

const app = (t: { teardown(fn: () => unknown): unknown }) => {
  const made = Fastify();
  t.teardown(() => made.close());
  return made;
};

/** A short path: a socket's has at most 107 bytes (unix(7)). */
function folder(t: { teardown(fn: () => unknown): unknown }): string {
  const made = mkdtempSync(join(tmpdir(), 'sv-sock-'));
  t.teardown(() => rmSync(made, { recursive: true, force: true }));
  return made;
}

t.test('D37: a socket file that nobody listens on any more is replaced', async (t) => {
  const path = join(folder(t), 'agent.sock');
  const before = spawn(process.execPath, [
    '-e',
    `require('net').createServer().listen(${JSON.stringify(path)})`,
  ]);
  while (!existsSync(path)) await new Promise((resolve) => setTimeout(resolve, 10));
  before.kill('SIGKILL');
  await once(before, 'exit');
  t.ok(lstatSync(path).isSocket(), 'it is left behind, as at a power cut');
  await listenOnSocket(app(t), path);
  t.ok(lstatSync(path).isSocket());
  t.equal(lstatSync(path).mode & 0o777, 0o600, 'for root alone');
});

t.test('D37: what is no socket stays as it is, and that is an error', async (t) => {
  const at = folder(t);
  writeFileSync(join(at, 'file'), 'important');
  await t.rejects(listenOnSocket(app(t), join(at, 'file')), { code: 'EADDRINUSE' });
  t.equal(readFileSync(join(at, 'file'), 'utf8'), 'important');
  mkdirSync(join(at, 'dir'));
  await t.rejects(listenOnSocket(app(t), join(at, 'dir')));
  t.ok(lstatSync(join(at, 'dir')).isDirectory());
  symlinkSync(join(at, 'file'), join(at, 'link'));
  await t.rejects(listenOnSocket(app(t), join(at, 'link')));
  t.ok(existsSync(join(at, 'file')));
});
