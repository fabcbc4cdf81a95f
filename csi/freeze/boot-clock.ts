import { readFileSync } from 'node:fs';

/**
 * Milliseconds since the machine started, also those that it slept: the clock of leases in csi-node, without loading
 * the addon. /proc/uptime is CLOCK_BOOTTIME in hundredths of a second (proc(5)); rounded down, it is never ahead, so
 * the end of a lease that was read from it is never late by more than the 10 ms that the fence's margin covers.
 */
export const bootClock = (): number => Number.parseFloat(readFileSync('/proc/uptime', 'utf8')) * 1000;
