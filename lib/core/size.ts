/** Sizes as people write them in Kubernetes: bytes, or with a binary suffix. */
import { SimpleVolumeError } from './errors.ts';

const FACTORS: Record<string, number> = { '': 1, Ki: 1024, Mi: 1024 ** 2, Gi: 1024 ** 3 };

/**
 * Bytes of a text such as `0`, `512Ki` or `8Mi`.
 * @throws FIELD_INVALID naming `field` and what is allowed
 */
export function parseSize(text: string, field: string, min: number, max: number): number {
  const match = /^(\d{1,15})(Ki|Mi|Gi)?$/.exec(text.trim());
  const bytes = match ? Number(match[1]) * (FACTORS[match[2] ?? ''] as number) : Number.NaN;
  if (!(bytes >= min && bytes <= max))
    throw new SimpleVolumeError(
      'FIELD_INVALID',
      `${field} must be a size from ${formatSize(min)} to ${formatSize(max)}, in bytes or with Ki, Mi or Gi; got ${JSON.stringify(text)}`,
      { field },
    );
  return bytes;
}

/** The shortest text without a fraction. */
export function formatSize(bytes: number): string {
  for (const suffix of ['Gi', 'Mi', 'Ki'])
    if (bytes > 0 && bytes % (FACTORS[suffix] as number) === 0)
      return `${bytes / (FACTORS[suffix] as number)}${suffix}`;
  return String(bytes);
}
