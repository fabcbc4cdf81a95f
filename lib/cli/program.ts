/** The command line as a whole: help, version, and the way from a verb to its file. */
import { existsSync, readFileSync } from 'node:fs';
import path from 'node:path';
import { Command, CommanderError } from 'commander';
import type { Verb } from './verbs.ts';

/** Exit code of a command line that was not understood. */
const USAGE = 2;

/** The version of the package: beside the bundle when shipped, else at the top of the checkout. */
export function packageVersion(): string {
  const files = ['package.json', '../../package.json'].map((name) => path.join(import.meta.dirname, name));
  const file = files.find((name) => existsSync(name));
  if (file === undefined) throw new Error('package.json is missing from the installation');
  return (JSON.parse(readFileSync(file, 'utf8')) as { version: string }).version;
}

function programOf(): Command {
  return new Command()
    .name('simple-volume')
    .description('Asynchronous replicated local volumes for small Kubernetes clusters')
    .version(packageVersion(), '-V, --version', 'print the version')
    .helpOption('-h, --help', 'print this help')
    .helpCommand('help [command]', 'print the help of a command')
    .showHelpAfterError('(simple-volume --help lists what there is)')
    .showSuggestionAfterError(true)
    .exitOverride();
}

/**
 * Runs one command line.
 *
 * @param args what follows the program's name
 * @param verbs what can be asked for
 * @returns the exit code: 0, 2 when the line was not understood; undefined when a verb took over (it sets
 *   process.exitCode itself, and may go on running)
 */
export async function runProgram(
  args: readonly string[],
  verbs: readonly Verb[],
): Promise<number | undefined> {
  const program = programOf();
  const asked = args[0] === 'help' ? args[1] : args.find((arg) => !arg.startsWith('-'));
  for (const verb of verbs) {
    if (verb.name === asked) (await verb.load()).register(program);
    else program.command(verb.name).description(verb.description);
  }
  for (const command of program.commands)
    command.exitOverride().showHelpAfterError(`(simple-volume ${command.name()} --help lists what there is)`);
  if (args.length === 0) {
    program.outputHelp({ error: true });
    return USAGE;
  }
  try {
    await program.parseAsync(args, { from: 'user' });
    return undefined;
  } catch (error) {
    if (!(error instanceof CommanderError)) throw error;
    return error.exitCode === 0 ? 0 : USAGE;
  }
}
