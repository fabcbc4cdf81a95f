/** Entry of the command; lib/cli/bin.js starts it with the right Node and the right flags. */
import { runProgram } from './program.ts';

try {
  const code = await runProgram(process.argv.slice(2));
  if (code !== undefined) process.exitCode = code;
} catch (error) {
  process.stderr.write(`simple-volume: ${error instanceof Error ? error.message : String(error)}\n`);
  if (process.env.SIMPLE_VOLUME_DEBUG && error instanceof Error) process.stderr.write(`${error.stack}\n`);
  process.exitCode = 1;
}
