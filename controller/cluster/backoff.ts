/** Pauses that double, with jitter, so that many clients do not come back in step. */
export interface BackoffOptions {
  first: number;
  longest: number;
}

/**
 * @param failures in a row, 1 for the first
 * @param random 0..1
 * @returns milliseconds: the doubled pause, less up to a quarter
 */
export function backoffMs(failures: number, { first, longest }: BackoffOptions, random: number): number {
  const whole = Math.min(longest, first * 2 ** Math.min(Math.max(0, failures - 1), 30));
  return Math.round(whole * (1 - random / 4));
}
