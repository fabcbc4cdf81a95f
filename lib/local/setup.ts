/** Makes a checkout ready to run agents: the addon built, an rclone found or built. Quick when both are there. */
import { spawn } from 'node:child_process';
import { join } from 'node:path';
import { findRclone } from '../transfer/rclone-binary.ts';
import { PROJECT } from './cluster.ts';

/** Runs one of the project's own scripts; its output is shown only when it fails. */
function script(...args: string[]): Promise<void> {
  return new Promise((resolve, reject) => {
    const child = spawn(process.execPath, args, { cwd: PROJECT, stdio: ['ignore', 'pipe', 'pipe'] });
    let output = '';
    for (const stream of [child.stdout, child.stderr]) {
      stream.on('data', (chunk: Buffer) => {
        output = (output + chunk.toString()).slice(-8000);
      });
    }
    child.once('error', reject);
    child.once('close', (code) =>
      code === 0 ? resolve() : reject(new Error(`node ${args.join(' ')} ended with ${code}:\n${output}`)),
    );
  });
}

/**
 * @param say told what takes long, before it starts
 * @returns path of the rclone that the agents will use
 */
export async function setUp(say: (text: string) => void): Promise<string> {
  const long = setTimeout(() => say('building the addon (once, about a minute) ...'), 1000);
  try {
    await script(join(PROJECT, 'native/install.mjs'));
  } finally {
    clearTimeout(long);
  }
  try {
    return (await findRclone()).path;
  } catch {
    say('building a slim rclone (once, some minutes) ...');
    await script(join(PROJECT, 'native/rclone/build.ts'));
    return (await findRclone()).path;
  }
}
