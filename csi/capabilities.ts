/** Which ways of using a volume there are: one node at a time, as a file system. */
import type { VolumeCapability__Output as Capability } from './generated/csi/v1/VolumeCapability.ts';

/** Access modes that hold: all of one node. */
const MODES: ReadonlySet<string> = new Set([
  'SINGLE_NODE_WRITER',
  'SINGLE_NODE_READER_ONLY',
  'SINGLE_NODE_SINGLE_WRITER',
  'SINGLE_NODE_MULTI_WRITER',
]);

/** Per-mount options that a bind mount can have (mount(8), mount_setattr(2)); all others belong to file systems. */
const FLAGS: ReadonlySet<string> = new Set([
  'ro',
  'rw',
  'noexec',
  'exec',
  'nosuid',
  'suid',
  'nodev',
  'dev',
  'noatime',
  'atime',
  'nodiratime',
  'diratime',
  'relatime',
]);

/** Why a volume cannot be used like this; null: it can. */
export function capabilityProblem(capability: Capability | null | undefined): string | null {
  if (!capability) return 'volume_capability is required';
  if (capability.access_type === 'block')
    return 'block volumes are not offered: a volume is a directory (volumeMode Filesystem)';
  if (!capability.mount) return 'volume_capability must say mount';
  const mode = capability.access_mode?.mode ?? 'UNKNOWN';
  if (!MODES.has(mode))
    return `access mode ${mode} is not offered: a volume is written and read on one node at a time (ReadWriteOnce, ReadWriteOncePod)`;
  const unknown = capability.mount.mount_flags.find((flag) => !FLAGS.has(flag));
  if (unknown !== undefined)
    return `mount option ${JSON.stringify(unknown)} is not one of ${[...FLAGS].join(', ')}`;
  return null;
}

/** What only a provisioner can ask for: a volume has no file system of its own. */
export function fsTypeProblem(capability: Capability): string | null {
  const type = capability.mount?.fs_type ?? '';
  return type === ''
    ? null
    : `fsType ${JSON.stringify(type)} cannot be had: a volume is a directory on the pool's file system`;
}
