/** Statistics of the benchmarks. */

/**
 * Percentile by nearest rank: the smallest value that at least `p` percent of all values do not exceed. No value
 * is invented by interpolation, so the worst probe is never smoothed away.
 * @param p above 0, at most 100
 * @throws RangeError without values or for another `p`
 */
export function percentile(values: readonly number[], p: number): number {
  if (values.length === 0) throw new RangeError('no values');
  if (!(p > 0 && p <= 100)) throw new RangeError(`percentile ${p} is not in (0, 100]`);
  const sorted = [...values].sort((a, b) => a - b);
  return sorted[Math.ceil((p / 100) * sorted.length) - 1] as number;
}

export interface Summary {
  count: number;
  min: number;
  p50: number;
  p99: number;
  max: number;
}

/** @throws RangeError without values */
export const summary = (values: readonly number[]): Summary => ({
  count: values.length,
  min: Math.min(...values),
  p50: percentile(values, 50),
  p99: percentile(values, 99),
  max: percentile(values, 100),
});

/**
 * `count` different whole numbers below `limit`, ascending, the same for the same seed.
 * @throws RangeError when there are not that many
 */
export function sample(count: number, limit: number, seed: number): number[] {
  if (count > limit) throw new RangeError(`${count} different numbers below ${limit}`);
  const random = generator(seed);
  const chosen = new Set<number>();
  while (chosen.size < count) chosen.add(Math.floor(random() * limit));
  return [...chosen].sort((a, b) => a - b);
}

/** Numbers in [0, 1) that are the same for the same seed (mulberry32; not for secrets). */
export function generator(seed: number): () => number {
  let state = seed >>> 0;
  return () => {
    state = (state + 0x6d2b79f5) >>> 0;
    let t = state;
    t = Math.imul(t ^ (t >>> 15), t | 1);
    t ^= t + Math.imul(t ^ (t >>> 7), t | 61);
    return ((t ^ (t >>> 14)) >>> 0) / 4_294_967_296;
  };
}
