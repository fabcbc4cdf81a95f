/**
 * Who may trigger a full sync: whoever RBAC allows `create` on `simplevolumes/manualsync` in the volume's namespace.
 * Behind kube-rbac-proxy that question has been asked already; without it the controller asks it itself.
 */
import { createHash } from 'node:crypto';
import { SimpleVolumeError } from '../../lib/core/errors.ts';
import type { Clock } from '../../lib/core/parts.ts';
import { type Kube, SUBJECT_ACCESS_REVIEWS, TOKEN_REVIEWS, type TokenReview } from '../cluster/index.ts';

/** Throws UNAUTHORIZED or FORBIDDEN; NOT_READY when the question could not be asked. */
export interface Guard {
  readonly kind: 'proxy' | 'builtin';
  /** Who asks. Before anything else of the request is looked at. */
  authenticate(authorization: string | undefined): Promise<Caller>;
  authorize(caller: Caller, namespace: string): Promise<void>;
}

/** What is known of the asking account; the token itself is not part of it. */
export interface Caller {
  name: string;
  uid?: string | undefined;
  groups?: string[] | undefined;
  extra?: Record<string, string[]> | undefined;
}

/** The proxy in the same pod has authenticated and authorized; the server listens on loopback only. */
export const proxyGuard: Guard = {
  kind: 'proxy',
  authenticate: async () => ({ name: 'kube-rbac-proxy' }),
  authorize: async () => {},
};

/** How long an answer of the API server is used, milliseconds. A withdrawn permission works this much longer. */
const YES_MS = 10_000;
const NO_MS = 2000;
const CACHED = 1000;
const CALL_MS = 8000;

class Answers<T> {
  private readonly entries = new Map<string, { value: T; until: number }>();
  private readonly clock: Clock;
  constructor(clock: Clock) {
    this.clock = clock;
  }
  get(key: string): T | undefined {
    const entry = this.entries.get(key);
    if (entry === undefined) return undefined;
    if (this.clock.boot() < entry.until) return entry.value;
    this.entries.delete(key);
    return undefined;
  }
  set(key: string, value: T, ms: number): void {
    // Bounded: tokens of strangers must not fill the memory. The oldest goes first.
    if (this.entries.size >= CACHED) this.entries.delete(this.entries.keys().next().value as string);
    this.entries.set(key, { value, until: this.clock.boot() + ms });
  }
}

/** TokenReview and SubjectAccessReview, answers kept for a moment. Tokens are kept as digests only. */
export function builtinGuard(kube: Kube, clock: Clock): Guard {
  const callers = new Answers<Caller | null>(clock);
  const allowed = new Answers<boolean>(clock);
  const ask = async <T>(what: string, question: () => Promise<T>): Promise<T> => {
    try {
      return await question();
    } catch (cause) {
      throw new SimpleVolumeError('NOT_READY', `the API server could not be asked ${what}; try again`, {
        cause,
      });
    }
  };
  return {
    kind: 'builtin',
    async authenticate(authorization) {
      const token = /^Bearer ([\x21-\x7e]{1,8192})$/i.exec(authorization ?? '')?.[1];
      if (token === undefined)
        throw new SimpleVolumeError(
          'UNAUTHORIZED',
          'a bearer token of a ServiceAccount is required: Authorization: Bearer <token>',
        );
      const key = createHash('sha256').update(token).digest('base64');
      let caller = callers.get(key);
      if (caller === undefined) {
        const review = await ask('whose the token is', () =>
          kube.create(TOKEN_REVIEWS, { metadata: { name: '' }, spec: { token } } as TokenReview, {
            timeoutMs: CALL_MS,
          }),
        );
        const user = review.status?.authenticated ? review.status.user : undefined;
        caller = user?.username
          ? { name: user.username, uid: user.uid, groups: user.groups, extra: user.extra }
          : null;
        callers.set(key, caller, caller === null ? NO_MS : YES_MS);
      }
      if (caller === null)
        throw new SimpleVolumeError('UNAUTHORIZED', 'the API server does not know this bearer token');
      return caller;
    },
    async authorize(caller, namespace) {
      const key = JSON.stringify([caller, namespace]);
      let yes = allowed.get(key);
      if (yes === undefined) {
        const review = await ask('what the caller may do', () =>
          kube.create(
            SUBJECT_ACCESS_REVIEWS,
            {
              metadata: { name: '' },
              spec: {
                user: caller.name,
                ...(caller.uid === undefined ? {} : { uid: caller.uid }),
                ...(caller.groups === undefined ? {} : { groups: caller.groups }),
                ...(caller.extra === undefined ? {} : { extra: caller.extra }),
                resourceAttributes: {
                  namespace,
                  verb: 'create',
                  group: 'storage.shipstuff.io',
                  resource: 'simplevolumes',
                  subresource: 'manualsync',
                },
              },
            },
            { timeoutMs: CALL_MS },
          ),
        );
        yes = review.status?.allowed === true && review.status.denied !== true;
        allowed.set(key, yes, yes ? YES_MS : NO_MS);
      }
      if (!yes)
        throw new SimpleVolumeError(
          'FORBIDDEN',
          `${caller.name} may not create simplevolumes/manualsync (storage.shipstuff.io) in the namespace ${namespace}`,
        );
    },
  };
}
