import type { Native } from '../native/types.ts';

/**
 * Gives back what nobody uses: V8's garbage, of which a start alone leaves several MiB that V8 would only collect with
 * much more work than a process at rest has, then the allocator's free pages. For moments of rest: it takes some ten
 * milliseconds. The long-running roles are started with --expose-gc (lib/cli/bin.js); without it only the latter.
 */
export async function giveBackMemory(native: Pick<Native, 'trimMemory'>): Promise<void> {
  await globalThis.gc?.({ type: 'major', execution: 'async' });
  await native.trimMemory();
}
