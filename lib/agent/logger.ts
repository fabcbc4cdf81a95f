import pino from 'pino';
import type { Logger } from '../core/parts.ts';

export const LOG_LEVELS = ['debug', 'info', 'warn', 'error', 'silent'] as const;
export type LogLevel = (typeof LOG_LEVELS)[number];

function describe(error: unknown): object {
  if (!(error instanceof Error)) return { message: String(error) };
  const { name, message, code, stack, cause } = error as Error & { code?: unknown };
  return {
    type: name,
    message,
    ...(typeof code === 'string' ? { code } : {}),
    stack,
    ...(cause instanceof Error ? { cause: cause.message } : {}),
  };
}

/**
 * One JSON line per event on stdout. Secrets never get this far (they are not put into log objects); the
 * redaction is the second fence.
 */
export function createLogger(level: LogLevel, node: string): Logger {
  return pino(
    {
      level,
      base: { node },
      timestamp: pino.stdTimeFunctions.isoTime,
      formatters: { level: (label) => ({ level: label }) },
      // pino's own walks into causes and their fields; a line of the log needs none of that
      serializers: { err: describe },
      redact: {
        paths: [
          'token',
          'grant',
          '*.token',
          '*.grant',
          '*.authorization',
          '*.*.token',
          'headers.authorization',
        ],
        censor: '(redacted)',
      },
    },
    pino.destination({ fd: 1, sync: true }),
  ) as unknown as Logger;
}
