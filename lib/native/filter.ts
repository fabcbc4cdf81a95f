import type { Filter, Native } from './types.ts';

/** The filter of a policy. @throws NativeError PATTERN_INVALID, naming the pattern */
export function filterOf(
  native: Pick<Native, 'compileFilter'>,
  policy: { includePaths: readonly string[]; excludePaths: readonly string[] },
): Filter {
  const bytes = (patterns: readonly string[]): Buffer[] => patterns.map((one) => Buffer.from(one));
  return native.compileFilter(bytes(policy.includePaths), bytes(policy.excludePaths));
}
