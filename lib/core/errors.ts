/**
 * The one catalogue of errors. `code` is stable and part of the HTTP interface, `status` its HTTP status.
 * The message names the field, path or node and what is allowed; it never holds a token.
 */
export const ERRORS = {
  FIELD_INVALID: 400,
  BODY_INVALID: 400,
  PATTERN_INVALID: 400,
  UNAUTHORIZED: 401,
  FORBIDDEN: 403,
  NOT_FOUND: 404,
  VOLUME_UNKNOWN: 404,
  TRANSFER_UNKNOWN: 404,
  METHOD_NOT_ALLOWED: 405,
  EPOCH_OLD: 409,
  VOLUME_ACTIVE: 409,
  VOLUME_IN_USE: 409,
  NOT_ACTIVE: 409,
  NOTHING_SEALED: 409,
  BASE_UNKNOWN: 409,
  HELD: 409,
  BODY_TOO_LARGE: 413,
  TOO_MANY_TRANSFERS: 429,
  INTERNAL: 500,
  CONTENT_CHANGED: 503,
  NOT_READY: 503,
  APPLYING: 503,
  TIMEOUT: 504,
  NO_SPACE: 507,
  POOL_MISSING: 503,
  POOL_FOREIGN: 503,
  POOL_NOT_EMPTY: 503,
  PULL_FAILED: 502,
  VERIFY_FAILED: 502,
  RCLONE_MISSING: 503,
  MANIFEST_INVALID: 502,
  CANCELLED: 499,
} as const;
export type ErrorCode = keyof typeof ERRORS;

/** EDQUOT of Linux on all CPUs; Node has no name for it and gives the number alone. */
const EDQUOT = 122;

/** Whether what failed found the disk, or what may be used of it, full. */
export function isNoSpace(error: unknown): boolean {
  const { code, errno } = error as { code?: unknown; errno?: unknown };
  return code === 'NO_SPACE' || code === 'ENOSPC' || code === 'EDQUOT' || errno === -EDQUOT;
}

export interface ErrorDetails {
  field?: string;
  path?: string;
  node?: string;
  cause?: unknown;
}

export class SimpleVolumeError extends Error {
  readonly code: ErrorCode;
  readonly field: string | undefined;
  readonly path: string | undefined;
  readonly node: string | undefined;
  constructor(code: ErrorCode, message: string, details: ErrorDetails = {}) {
    super(message, details.cause === undefined ? undefined : { cause: details.cause });
    this.name = 'SimpleVolumeError';
    this.code = code;
    this.field = details.field;
    this.path = details.path;
    this.node = details.node;
  }
  get status(): number {
    return ERRORS[this.code];
  }
}
