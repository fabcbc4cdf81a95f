import { readFileSync } from 'node:fs';
import type { Clock } from '../core/parts.ts';
import type { Native } from '../native/types.ts';

/** The real clock: CLOCK_BOOTTIME from the addon, so that a suspended board counts its sleep as age. */
export function systemClock(native: Pick<Native, 'bootMs'>): Clock {
  return {
    boot: () => native.bootMs(),
    now: () => Date.now(),
    setTimeout(fn, ms) {
      const timer = setTimeout(fn, ms);
      return { cancel: () => clearTimeout(timer) };
    },
  };
}

/** The kernel's id of this boot (random(4), /proc/sys/kernel/random/boot_id): boot clocks of two boots don't compare. */
export function bootId(): string {
  return readFileSync('/proc/sys/kernel/random/boot_id', 'utf8').trim();
}
