/** Flags of a role from its table of options. */
import type { Command } from 'commander';

export interface RoleOption {
  /** as typed, without the dashes */
  flag: string;
  env: string;
  help: string;
  /** name of its value; null: a switch */
  value?: string | null | undefined;
  fallback?: string | null | undefined;
}

export function declareOptions(command: Command, options: readonly RoleOption[]): void {
  for (const o of options)
    command.option(
      `--${o.flag}${o.value ? ` <${o.value}>` : ''}`,
      `${o.help}${o.fallback ? ` (default: ${o.fallback})` : ''} [${o.env}]`,
    );
}

/** What was given, by the names as typed: commander gives camelCase. */
export const flagsOf = (
  options: readonly RoleOption[],
  given: Record<string, string | boolean | undefined>,
): Record<string, string | boolean | undefined> =>
  Object.fromEntries(
    options.map((o) => [o.flag, given[o.flag.replace(/-(\w)/g, (_, c: string) => c.toUpperCase())]]),
  );
