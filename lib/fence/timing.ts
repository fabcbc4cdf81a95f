/** The lengths of time of the fencing protocol and why they are enough (docs/fencing.md, "What is waited for"). */

/** How long a renewal or promise lasts when nothing else is configured, milliseconds. */
export const LEASE_MS = 8_000;
/** Less leaves no room for a lost request or two; more makes failover slow. */
export const MIN_LEASE_MS = 4_000;
export const MAX_LEASE_MS = 60_000;

/**
 * How far the rate of any clock may be off, as a part of 1: 2 %. A quartz is off by 0.02 %, and the kernel's
 * time discipline may slew CLOCK_BOOTTIME by 0.05 % more (adjtimex(2), 500 ppm).
 */
export const CLOCK_DRIFT = 0.02;

/** For what happens between the end of a lease and the last byte: a timer that fires late, freezing itself. Milliseconds. */
export const MARGIN_MS = 500;

/** Between two beats, milliseconds. */
export const BEAT_MS = 1_000;

/**
 * How long a replica that was told to let go of the active node gives it nothing beyond the hold, ms: what that node
 * still has is fetched then (30 s at most), and its writer has to stand still until the decision.
 */
export const SILENCE_MS = 35_000;

/**
 * How long a grantor waits after it granted a lease of `leaseMs`, on its own clock. The slowest clock against the
 * fastest is (1 + d) / (1 - d), less than 1 + 5 d for every drift d up to half; what is left beyond the drift is room
 * for the freezer.
 */
export const holdMs = (leaseMs: number): number => Math.ceil(leaseMs * (1 + 5 * CLOCK_DRIFT)) + MARGIN_MS;

/** A configured lease as it is used. */
export const boundedLease = (leaseMs: number): number =>
  Math.min(MAX_LEASE_MS, Math.max(MIN_LEASE_MS, Math.round(leaseMs)));
