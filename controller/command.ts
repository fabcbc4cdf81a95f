/** `simple-volume controller`: flags to configuration, start, and a clean stop on SIGTERM. */
import type { Command } from 'commander';
import { systemClock } from '../lib/agent/clock.ts';
import { createLogger } from '../lib/agent/logger.ts';
import { declareOptions, flagsOf } from '../lib/cli/options.ts';
import { packageVersion } from '../lib/cli/program.ts';
import { SimpleVolumeError } from '../lib/core/errors.ts';
import { authorities, tokenFile } from './act/agents.ts';
import { OPTIONS, parseControllerConfig } from './config.ts';
import { Controller } from './controller.ts';

const STOP_LIMIT_MS = 15_000;

export function register(program: Command): void {
  const command = program
    .command('controller')
    .description('run the controller: place, replicate, move and fail over the volumes of the cluster')
    .allowExcessArguments(false);
  declareOptions(command, OPTIONS);
  command.action(async (options: Record<string, string | boolean | undefined>) => {
    const flags = flagsOf(OPTIONS, options);
    try {
      await run(parseControllerConfig(flags, process.env));
    } catch (error) {
      if (!(error instanceof SimpleVolumeError)) throw error;
      process.stderr.write(`simple-volume controller: ${error.message}\n`);
      process.exitCode = 2;
    }
  });
}

async function run(config: ReturnType<typeof parseControllerConfig>): Promise<void> {
  const { native } = await import('../lib/native/load.ts');
  const logger = createLogger(config.logLevel, config.identity);
  const token = tokenFile(config.tokenFile);
  const controller = await Controller.start({
    namespace: config.namespace,
    identity: config.identity,
    version: packageVersion(),
    kubeconfig: config.kubeconfig ?? undefined,
    token,
    ca: authorities(config.caFile),
    leaseName: config.leaseName,
    electionMs: config.electionMs,
    electionRenewMs: Math.max(500, Math.round(config.electionMs / 7.5)),
    fenceLeaseMs: config.fenceLeaseMs,
    reportMs: config.reportMs,
    plan: { timeZone: config.timeZone, defaultSchedule: config.fullSyncSchedule },
    health: config.http,
    trigger: config.trigger
      ? {
          guard: config.trigger.guard,
          ...config.trigger.address,
          tls: config.trigger.tls ?? undefined,
        }
      : null,
    csiEndpoint: config.csiEndpoint,
    clock: systemClock(native),
    logger,
  });
  logger.info({ health: controller.healthUrl, trigger: controller.triggerUrl }, 'the controller runs');
  let stopping = false;
  const stop = (signal: NodeJS.Signals): void => {
    if (stopping) process.exit(1);
    stopping = true;
    logger.info({ signal }, 'the controller is stopped');
    setTimeout(() => process.exit(1), STOP_LIMIT_MS).unref();
    controller.stop().then(
      () => process.exit(0),
      () => process.exit(1),
    );
  };
  process.on('SIGTERM', stop);
  process.on('SIGINT', stop);
}
