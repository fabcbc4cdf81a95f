/**
 * When a full sync is due: cron expressions with a time zone (cron-parser), as pure functions of the times that the
 * caller gives.
 *
 * A slot is a moment that the expression names. Whatever ended or began at or after a slot has served it, so a slot
 * that passed while the controller was away runs once, when it is back, however many there were; and never twice,
 * because a run that is noted serves every slot before it. A clock that jumps back makes no slot run again (the last
 * run then lies in the future and serves what comes until then); one that jumps ahead makes at most one run.
 */
import { type CronExpression, CronExpressionParser } from 'cron-parser';

/** Longest expression, with its time zone. The CRD has the same limit. */
export const MAX_SCHEDULE = 256;
/** What a claim says that has no scheduled full syncs, whatever the default is. */
export const NO_SCHEDULE = 'off';

export interface Schedule {
  /** five or six fields, or a name as `@daily` */
  expression: string;
  timeZone: string;
}

const NAMED = /^@(?:yearly|annually|monthly|weekly|daily|hourly|weekdays|weekends)$/;
const ZONE = /^(?:CRON_TZ|TZ)=(\S+)\s+(.+)$/;
/** What a field may hold. `H` (a moment picked by a hash) is left out: it is another one for each reader. */
const FIELD = /^[0-9A-Za-z*?,\-/#]{1,100}$/;

function isZone(name: string): boolean {
  if (!/^[A-Za-z0-9_+\-/]{1,64}$/.test(name)) return false;
  try {
    new Intl.DateTimeFormat('en', { timeZone: name });
    return true;
  } catch {
    return false;
  }
}

const open = (schedule: Schedule, at: number): CronExpression =>
  CronExpressionParser.parse(schedule.expression, {
    currentDate: new Date(at),
    tz: schedule.timeZone,
  });

/**
 * Reads a schedule: a cron expression of five fields (minute, hour, day of month, month, day of week) or six (a second
 * in front), or a name such as `@daily`; `CRON_TZ=Europe/Berlin` in front names the time zone.
 * @param timeZone the one of an expression that names none
 * @returns the schedule, or what is wrong with the text
 */
export function parseSchedule(text: string, timeZone = 'UTC'): Schedule | { error: string } {
  const trimmed = text.trim();
  if (trimmed.length > MAX_SCHEDULE) return { error: `longer than ${MAX_SCHEDULE} characters` };
  const named = ZONE.exec(trimmed);
  const zone = named?.[1] ?? timeZone;
  const expression = (named?.[2] ?? trimmed).trim();
  if (!isZone(zone)) return { error: `no time zone ${JSON.stringify(zone.slice(0, 64))} is known` };
  if (!NAMED.test(expression)) {
    const fields = expression.split(/[ \t]+/);
    if (fields.length !== 5 && fields.length !== 6)
      return { error: `it has ${fields.length} fields instead of five (or six, with seconds in front)` };
    const odd = fields.find((field) => !FIELD.test(field) || /H/.test(field.replace(/THU|MARCH/gi, '')));
    if (odd !== undefined) return { error: `the field ${JSON.stringify(odd.slice(0, 40))} is no cron field` };
  }
  const schedule = { expression, timeZone: zone };
  try {
    // Also finds days that never come (30 February).
    open(schedule, 0).next();
  } catch (error) {
    return { error: error instanceof Error ? error.message : String(error) };
  }
  return schedule;
}

const HOUR_MS = 3_600_000;

/** Making one costs a hundred times what using it does; there are some 600 zones at most. */
const formats = new Map<string, Intl.DateTimeFormat>();

/** How a zone's clock differs from UTC at a moment, for comparing only. */
function offset(timeZone: string, at: number): string {
  let format = formats.get(timeZone);
  if (format === undefined) {
    format = new Intl.DateTimeFormat('en', { timeZone, timeZoneName: 'longOffset' });
    formats.set(timeZone, format);
  }
  return format.formatToParts(at).find((part) => part.type === 'timeZoneName')?.value ?? '';
}

/**
 * The first slot after `at`, wall clock ms; null: none comes. A slot in the hour that a change to summer time leaves
 * out comes right after it; one in the hour that comes twice comes in the first of the two only (an expression that
 * names each hour: in both).
 */
export function nextSlot(schedule: Schedule, at: number): number | null {
  try {
    // Within a change of the clock the parser's answer depends on where it starts, so it starts well before.
    const changes =
      offset(schedule.timeZone, at - 3 * HOUR_MS) !== offset(schedule.timeZone, at + 3 * HOUR_MS);
    const slots = open(schedule, changes ? at - 3 * HOUR_MS : at);
    for (;;) {
      const slot = slots.next().getTime();
      if (slot > at) return slot;
    }
  } catch {
    return null;
  }
}

export interface Due {
  /** the first slot that nothing has served yet; null: nothing is due */
  slot: number | null;
  /** the next one that will be due; null: none comes */
  next: number | null;
}

/**
 * Whether a run is due.
 * @param since when the schedule began to count: its volume's or its own beginning, wall clock ms; slots before are nobody's
 * @param lastRun when the last run of any kind began, wall clock ms; null: there was none
 */
export function due(schedule: Schedule, since: number, lastRun: number | null, now: number): Due {
  const first = nextSlot(schedule, Math.max(since, lastRun ?? Number.NEGATIVE_INFINITY));
  return first !== null && first <= now
    ? { slot: first, next: nextSlot(schedule, now) }
    : { slot: null, next: first };
}
