import { SimpleVolumeError } from '../../core/errors.ts';
import type { VolumeName } from '../../core/parts.ts';
import type { Principal } from '../api.ts';

/** A grant speaks for one volume, epoch and node; the agents' token for all. */
export function requireVolume(
  principal: Principal | null,
  name: VolumeName,
  epoch: number,
  node: string,
): void {
  if (principal?.kind !== 'grant') return;
  if (
    principal.namespace !== name.namespace ||
    principal.volume !== name.volume ||
    principal.epoch !== epoch ||
    principal.node !== node
  )
    throw new SimpleVolumeError(
      'FORBIDDEN',
      `the grant is for ${principal.namespace}/${principal.volume}, epoch ${principal.epoch}, node ${principal.node} only`,
    );
}
