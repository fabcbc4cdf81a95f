import { SimpleVolumeError } from './errors.ts';

/** One complete, numbered state of a volume. Text form `<epoch>-<seq>`. */
export interface Generation {
  /** Grows by one with each promotion; the fencing token. 1..2^53-1. */
  epoch: number;
  /** Grows by one with each sealed batch and never restarts, not even when the epoch changes. */
  seq: number;
}

/** [epoch, first seq sealed in it], ascending. */
export type Lineage = [epoch: number, firstSeq: number][];

export const formatGeneration = (g: Generation): string => `${g.epoch}-${g.seq}`;

/** @throws SimpleVolumeError FIELD_INVALID when the text is not `<epoch>-<seq>`. */
export function parseGeneration(text: string, field = 'generation'): Generation {
  const m = /^([1-9]\d{0,14})-(0|[1-9]\d{0,14})$/.exec(text);
  if (!m)
    throw new SimpleVolumeError('FIELD_INVALID', `${field} must be <epoch>-<seq>, for example 1-42`, {
      field,
    });
  return { epoch: Number(m[1]), seq: Number(m[2]) };
}

/** Newer first by epoch, then by seq. Never by a clock. Negative: a is older. */
export const compareGenerations = (a: Generation, b: Generation): number =>
  a.epoch - b.epoch || a.seq - b.seq;

export const sameGeneration = (a: Generation | null, b: Generation | null): boolean =>
  a === b || (a !== null && b !== null && a.epoch === b.epoch && a.seq === b.seq);

/**
 * Whether `have` lies on the line of `lineage`: sealed before the next epoch began. A replica that holds
 * something else (a generation of a writer that was replaced) has no common base and needs a full sync.
 */
export function isAncestor(have: Generation, lineage: Lineage, newest: Generation): boolean {
  const at = lineage.findIndex(([epoch]) => epoch === have.epoch);
  if (at < 0) return false;
  const [, first] = lineage[at] as [number, number];
  const next = lineage[at + 1];
  if (have.seq < first) return false;
  return have.seq < (next ? next[1] : newest.seq + 1);
}
