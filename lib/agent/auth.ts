import { createHash, timingSafeEqual } from 'node:crypto';
import type { Authenticate, Principal } from './api.ts';

const digest = (text: string): Buffer => createHash('sha256').update(text).digest();

/**
 * Bearer tokens: the agents' own, compared by digest in constant time, or a grant that this agent minted.
 * @param grant checks a grant's signature and gives what it allows, or null
 */
export function createAuthenticate(token: string, grant: (text: string) => Principal | null): Authenticate {
  const expected = digest(token);
  return (authorization) => {
    const m = /^Bearer ([\x21-\x7e]{1,4096})$/.exec(authorization ?? '');
    if (!m) return null;
    const given = m[1] as string;
    if (timingSafeEqual(digest(given), expected)) return { kind: 'agent' };
    return given.startsWith('sv1.') ? grant(given) : null;
  };
}
