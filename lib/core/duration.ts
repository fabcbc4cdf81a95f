import { SimpleVolumeError } from './errors.ts';

const UNITS: Record<string, number> = { ms: 1, s: 1000, m: 60_000, h: 3_600_000 };

/**
 * Milliseconds of a duration such as `500ms`, `2s`, `1m30s` (Go's notation, the one Kubernetes uses).
 * @throws FIELD_INVALID naming the field, when the text is anything else or outside min..max (ms).
 */
export function parseDuration(text: string, field: string, min = 0, max = 86_400_000): number {
  const whole = /^(?:\d+(?:\.\d+)?(?:ms|s|m|h))+$/.test(text);
  let ms = 0;
  if (whole)
    for (const [, n, unit] of text.matchAll(/(\d+(?:\.\d+)?)(ms|s|m|h)/g))
      ms += Number(n) * (UNITS[unit as string] as number);
  if (!whole || !Number.isFinite(ms) || ms < min || ms > max)
    throw new SimpleVolumeError(
      'FIELD_INVALID',
      `${field} must be a duration such as 500ms, 2s or 1m30s, from ${formatDuration(min)} to ${formatDuration(max)}; got ${JSON.stringify(text)}`,
      { field },
    );
  return Math.round(ms);
}

export function formatDuration(ms: number): string {
  if (ms < 1000) return `${Math.round(ms)}ms`;
  const h = Math.floor(ms / 3_600_000);
  const m = Math.floor((ms % 3_600_000) / 60_000);
  const s = (ms % 60_000) / 1000;
  return `${h ? `${h}h` : ''}${m ? `${m}m` : ''}${s || !(h || m) ? `${Number(s.toFixed(3))}s` : ''}`;
}
