/** A volume's id is `<namespace>/<volume>`, as agents call it: the claim's namespace and the PersistentVolume's name. */
import { createHash } from 'node:crypto';
import { checkName } from '../lib/core/names.ts';
import type { VolumeName } from '../lib/core/parts.ts';
import { invalid } from './errors.ts';

export const volumeId = ({ namespace, volume }: VolumeName): string => `${namespace}/${volume}`;

/** null: no id of this driver. Nothing that is not two DNS names gets further, so no id can lead out of a pool. */
export function parseVolumeId(id: string): VolumeName | null {
  const at = id.indexOf('/');
  if (at < 0) return null;
  const [namespace, volume] = [id.slice(0, at), id.slice(at + 1)];
  try {
    return { namespace: checkName(namespace, 'volume_id', 'label'), volume: checkName(volume, 'volume_id') };
  } catch {
    return null;
  }
}

/** @throws INVALID_ARGUMENT when there is none */
export function needVolumeId(id: string): string {
  return id === '' ? invalid('volume_id is required') : id;
}

/**
 * What agents call a volume that is asked for under `name`. Kubernetes' names (`pvc-<uid>`) stay as they are; one that
 * is no DNS name becomes a hash, which no other name shares.
 */
export function volumeOf(name: string): string {
  try {
    return checkName(name, 'name');
  } catch {
    return `v-${createHash('sha256').update(name).digest('hex').slice(0, 40)}`;
  }
}
