/**
 * The same named places as in the addon (native/engine/crash_point.h): SIMPLE_VOLUME_CRASH_AT=<name> ends the
 * process there, as a power cut would. For tests of recovery.
 */
const at = process.env.SIMPLE_VOLUME_CRASH_AT;

export function crashPoint(name: string): void {
  if (at === name) process.kill(process.pid, 'SIGKILL');
}
