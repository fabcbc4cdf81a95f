/**
 * The same named places as in the addon (native/engine/crash_point.h): SIMPLE_VOLUME_CRASH_AT=<name>[:<n>] ends the
 * process when the place is reached for the n-th time, as a power cut would. For tests of recovery.
 */
const [wanted, count] = (process.env.SIMPLE_VOLUME_CRASH_AT ?? '').split(':');
let left = Number(count ?? 1);

export function crashPoint(name: string): void {
  if (wanted === name && --left === 0) process.kill(process.pid, 'SIGKILL');
}
