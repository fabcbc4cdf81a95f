/** `simple-volume csi-node`: flags to configuration, start, and a clean stop on SIGTERM. */
import type { Command } from 'commander';
import { createLogger } from '../lib/agent/logger.ts';
import { declareOptions, flagsOf } from '../lib/cli/options.ts';
import { packageVersion } from '../lib/cli/program.ts';
import { SimpleVolumeError } from '../lib/core/errors.ts';
import { OPTIONS, parseCsiNodeConfig } from './config.ts';

const STOP_LIMIT_MS = 10_000;

export function register(program: Command): void {
  const command = program
    .command('csi-node')
    .description('run the CSI driver of a node: mount volumes into pods and stop writers whose lease ended')
    .allowExcessArguments(false);
  declareOptions(command, OPTIONS);
  command.action(async (options: Record<string, string | boolean | undefined>) => {
    try {
      const config = parseCsiNodeConfig(flagsOf(OPTIONS, options), process.env);
      const { startCsiNode } = await import('./run.ts');
      const log = createLogger(config.logLevel, config.node);
      const running = await startCsiNode(config, packageVersion(), log);
      log.info({ endpoint: running.endpoint }, 'csi-node serves');
      let stopping = false;
      const stop = (signal: NodeJS.Signals): void => {
        if (stopping) process.exit(1);
        stopping = true;
        log.info({ signal }, 'csi-node is stopped; what is mounted stays');
        setTimeout(() => process.exit(1), STOP_LIMIT_MS).unref();
        running.stop().then(
          () => process.exit(0),
          () => process.exit(1),
        );
      };
      process.on('SIGTERM', stop);
      process.on('SIGINT', stop);
    } catch (error) {
      if (!(error instanceof SimpleVolumeError)) throw error;
      process.stderr.write(`simple-volume csi-node: ${error.message}\n`);
      process.exitCode = 2;
    }
  });
}
