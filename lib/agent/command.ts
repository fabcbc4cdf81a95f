/** `simple-volume agent`: flags to configuration, start, and a clean stop on SIGTERM. */
import type { Command } from 'commander';
import { declareOptions, flagsOf } from '../cli/options.ts';
import { SimpleVolumeError } from '../core/errors.ts';
import { OPTIONS, parseConfig } from './config.ts';

const STOP_LIMIT_MS = 10_000;

export function register(program: Command): void {
  const command = program
    .command('agent')
    .description(
      'run the agent of a storage node: watch, stage, serve, pull and apply the volumes of one pool',
    )
    .allowExcessArguments(false);
  declareOptions(command, OPTIONS);
  command.action(async (options: Record<string, string | boolean | undefined>) => {
    const flags = flagsOf(OPTIONS, options);
    let config: ReturnType<typeof parseConfig>;
    try {
      config = parseConfig(flags, process.env);
    } catch (error) {
      if (!(error instanceof SimpleVolumeError)) throw error;
      process.stderr.write(`simple-volume agent: ${error.message}\n`);
      process.exitCode = 2;
      return;
    }
    const { Agent } = await import('./agent.ts');
    const agent = await Agent.start(config);
    let stopping = false;
    const stop = (signal: NodeJS.Signals): void => {
      if (stopping) process.exit(1);
      stopping = true;
      setTimeout(() => process.exit(1), STOP_LIMIT_MS).unref();
      agent.stop(`got ${signal}`).then(
        () => process.exit(0),
        () => process.exit(1),
      );
    };
    process.on('SIGTERM', stop);
    process.on('SIGINT', stop);
  });
}
