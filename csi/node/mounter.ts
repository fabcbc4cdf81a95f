/** The only place that mounts, by the addon: the image has no mount(8). Tests put another one in its place. */
import { readFileSync } from 'node:fs';
import { native } from '../../lib/native/load.ts';
import { MOVED, type MountEntry, parseMounts, stackAt } from './mounts.ts';

export interface Mounter {
  table(): MountEntry[];
  bind(source: string, target: string): Promise<void>;
  /** Options of this mount alone, on top of those that it has. */
  remount(target: string, options: readonly string[]): Promise<void>;
  /** Covers the target with something empty and read-only. */
  cover(target: string): Promise<void>;
  /** Takes the mount on top away. Never lazily: what is still in use must not look as if it were gone. */
  umount(target: string): Promise<void>;
}

/** Options that a mount inherits from its source, and would lose by a remount that does not name them. */
const KEPT = ['ro', 'nosuid', 'nodev', 'noexec', 'noatime', 'nodiratime', 'relatime', 'nosymfollow'];

const table = (): MountEntry[] => parseMounts(readFileSync('/proc/self/mountinfo', 'latin1'));

/** As the mount table has it. */
const asSeen = (target: string): string => Buffer.from(target).toString('latin1');

/** The host's. Paths are resolved by the caller. */
export const systemMounter: Mounter = {
  table,
  bind: (source, target) => native.bindMount(Buffer.from(source), Buffer.from(target)),
  remount: (target, options) => {
    const has = stackAt(table(), asSeen(target)).at(-1)?.options ?? [];
    const times = options.some((one) => one.endsWith('atime'));
    // `rw` is no flag of its own: it is the absence of `ro`.
    const given = new Set([...(options.includes('rw') ? ['ro'] : []), ...options]);
    const kept = KEPT.filter(
      (one) => has.includes(one) && !given.has(one) && !(times && one.endsWith('atime')),
    );
    const wanted = [...kept, ...options].filter((one) => one !== 'rw');
    return native.remountBind(Buffer.from(target), [...new Set(wanted)]);
  },
  cover: (target) => native.coverMount(Buffer.from(MOVED), Buffer.from(target)),
  umount: (target) => native.unmount(Buffer.from(target)),
};
