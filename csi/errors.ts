/** Errors of CSI calls: a gRPC code and a sentence. What other rooms throw is translated here, in one place. */
import { status } from '@grpc/grpc-js';
import { type ErrorCode, SimpleVolumeError } from '../lib/core/errors.ts';

export class CsiError extends Error {
  readonly code: status;
  constructor(code: status, message: string) {
    super(message);
    this.name = 'CsiError';
    this.code = code;
  }
}

const refuse =
  (code: status) =>
  (message: string): never => {
    throw new CsiError(code, message);
  };
export const invalid = refuse(status.INVALID_ARGUMENT);
export const notFound = refuse(status.NOT_FOUND);
export const exists = refuse(status.ALREADY_EXISTS);
export const precondition = refuse(status.FAILED_PRECONDITION);
export const unavailable = refuse(status.UNAVAILABLE);
export const exhausted = refuse(status.RESOURCE_EXHAUSTED);
export const outOfRange = refuse(status.OUT_OF_RANGE);

/** Ours to theirs. What is not named is INTERNAL: nobody can do anything about it but read the message. */
const CODES: Partial<Record<ErrorCode, status>> = {
  FIELD_INVALID: status.INVALID_ARGUMENT,
  NOT_FOUND: status.NOT_FOUND,
  VOLUME_UNKNOWN: status.NOT_FOUND,
  EPOCH_OLD: status.FAILED_PRECONDITION,
  VOLUME_ACTIVE: status.FAILED_PRECONDITION,
  VOLUME_IN_USE: status.FAILED_PRECONDITION,
  NOT_ACTIVE: status.FAILED_PRECONDITION,
  HELD: status.FAILED_PRECONDITION,
  NOT_READY: status.UNAVAILABLE,
  TIMEOUT: status.UNAVAILABLE,
  NO_SPACE: status.RESOURCE_EXHAUSTED,
  POOL_MISSING: status.UNAVAILABLE,
  POOL_FOREIGN: status.UNAVAILABLE,
};

/** Any error as what the caller gets. */
export function codeOf(error: unknown): { code: status; message: string } {
  if (error instanceof CsiError) return { code: error.code, message: error.message };
  if (error instanceof SimpleVolumeError)
    return { code: CODES[error.code] ?? status.INTERNAL, message: error.message };
  return { code: status.INTERNAL, message: error instanceof Error ? error.message : String(error) };
}
