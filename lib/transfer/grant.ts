/**
 * Grants: what a source lets one replica do for one volume and epoch. A replica never learns the source's own
 * token, and what stands in rclone's environment opens no more than this one volume.
 */
import { createHmac, hkdfSync, timingSafeEqual } from 'node:crypto';
import type { VolumeName } from '../core/parts.ts';

export interface GrantScope extends VolumeName {
  epoch: number;
  /** the replica's node */
  node: string;
}

/** Who asks: an agent or the controller (with the token), or a replica with a grant. */
export type Principal = { kind: 'agent' } | ({ kind: 'grant' } & GrantScope);

const PREFIX = 'sv1.';
const LIMIT = 4096;

export interface Grants {
  /** The grant as text: `sv1.<scope>.<signature>`. The same scope gives the same text. */
  mint(scope: GrantScope): string;
  /** What a grant allows, null when it was not minted here (another token, changed, or no grant at all). */
  verify(text: string): ({ kind: 'grant' } & GrantScope) | null;
}

/** @param token the agent's own token; the signing key is derived from it and the token itself signs nothing */
export function createGrants(token: string): Grants {
  const key = Buffer.from(hkdfSync('sha256', token, 'simple-volume', 'transfer grant v1', 32));
  const sign = (payload: string): Buffer => createHmac('sha256', key).update(payload).digest();
  return {
    mint({ namespace, volume, epoch, node }) {
      const json = JSON.stringify({ k: 'transfer', ns: namespace, vol: volume, epoch, node });
      const payload = Buffer.from(json).toString('base64url');
      return `${PREFIX}${payload}.${sign(payload).toString('base64url')}`;
    },
    verify(text) {
      if (text.length > LIMIT || !text.startsWith(PREFIX)) return null;
      const [payload, signature, more] = text.slice(PREFIX.length).split('.');
      if (!payload || !signature || more !== undefined) return null;
      const given = Buffer.from(signature, 'base64url');
      const expected = sign(payload);
      if (given.length !== expected.length || !timingSafeEqual(given, expected)) return null;
      // base64 has several spellings of the same bytes; only the minted one counts
      if (expected.toString('base64url') !== signature) return null;
      try {
        const { k, ns, vol, epoch, node } = JSON.parse(
          Buffer.from(payload, 'base64url').toString(),
        ) as Record<string, unknown>;
        if (k !== 'transfer' || typeof ns !== 'string' || typeof vol !== 'string') return null;
        if (!Number.isSafeInteger(epoch) || typeof node !== 'string') return null;
        return { kind: 'grant', namespace: ns, volume: vol, epoch: epoch as number, node };
      } catch {
        return null;
      }
    },
  };
}

/** Whether a caller may touch what belongs to `owner`. */
export const allows = (principal: Principal, owner: GrantScope): boolean =>
  principal.kind === 'agent' ||
  (principal.namespace === owner.namespace &&
    principal.volume === owner.volume &&
    principal.epoch === owner.epoch &&
    principal.node === owner.node);
