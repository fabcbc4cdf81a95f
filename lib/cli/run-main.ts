/** From the command line to the exit code of the process. */
import { runProgram } from './program.ts';
import type { Verb } from './verbs.ts';

/** Runs the process's own command line; a bundle of one role gives only its own verb. */
export async function runMain(verbs: readonly Verb[]): Promise<void> {
  try {
    const code = await runProgram(process.argv.slice(2), verbs);
    if (code !== undefined) process.exitCode = code;
  } catch (error) {
    process.stderr.write(`simple-volume: ${error instanceof Error ? error.message : String(error)}\n`);
    if (process.env.SIMPLE_VOLUME_DEBUG && error instanceof Error) process.stderr.write(`${error.stack}\n`);
    process.exitCode = 1;
  }
}
