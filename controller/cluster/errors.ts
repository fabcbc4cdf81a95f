import type { KubeErrorReason } from './types.ts';

export interface KubeErrorDetails {
  /** HTTP status, null when there was no answer */
  status?: number | null;
  /** the server wants to be asked again after this, ms */
  retryAfterMs?: number | null;
  /** nothing of the request left this process */
  notSent?: boolean;
  cause?: unknown;
}

/** Every failure of a call to the API server. The message names the call and never holds a credential. */
export class KubeError extends Error {
  readonly reason: KubeErrorReason;
  readonly status: number | null;
  readonly retryAfterMs: number | null;
  readonly notSent: boolean;
  constructor(reason: KubeErrorReason, message: string, details: KubeErrorDetails = {}) {
    super(message, details.cause === undefined ? undefined : { cause: details.cause });
    this.name = 'KubeError';
    this.reason = reason;
    this.status = details.status ?? null;
    this.retryAfterMs = details.retryAfterMs ?? null;
    this.notSent = details.notSent ?? false;
  }

  /** Whether a write may have happened although it failed: the caller has to look before it does it again. */
  get unknownOutcome(): boolean {
    return (
      !this.notSent &&
      (this.reason === 'Timeout' ||
        this.reason === 'Unreachable' ||
        this.reason === 'BadReply' ||
        this.reason === 'Cancelled' ||
        this.reason === 'ServerError')
    );
  }
}

/** Whether this is a KubeError of one of these reasons. */
export function isKubeError(error: unknown, ...reasons: KubeErrorReason[]): error is KubeError {
  return error instanceof KubeError && (reasons.length === 0 || reasons.includes(error.reason));
}

/** What went wrong, in words, of anything that was thrown. */
export const errorText = (error: unknown): string => (error instanceof Error ? error.message : String(error));

/**
 * The reason of a status, with what the API server says of it in `Status.reason` where one HTTP status has two meanings
 * (https://kubernetes.io/docs/reference/using-api/api-concepts/#api-conventions).
 */
export function reasonOf(status: number, said: string | undefined): KubeErrorReason {
  switch (status) {
    case 401:
      return 'Unauthorized';
    case 403:
      return 'Forbidden';
    case 404:
      return 'NotFound';
    case 409:
      return said === 'AlreadyExists' ? 'AlreadyExists' : 'Conflict';
    case 410:
      return 'Gone';
    case 429:
      return 'TooManyRequests';
    default:
      return status >= 500 ? 'ServerError' : status >= 400 ? 'Invalid' : 'BadReply';
  }
}
