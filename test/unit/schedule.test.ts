import fc from 'fast-check';
import t from 'tap';
import { due, nextSlot, parseSchedule, type Schedule } from '../../controller/plan/schedule.ts';

const at = (text: string): number => Date.parse(text);
const iso = (ms: number | null): string | null => (ms === null ? null : new Date(ms).toISOString());
function read(text: string, zone?: string): Schedule {
  const schedule = parseSchedule(text, zone);
  if ('error' in schedule) throw new Error(`${text}: ${schedule.error}`);
  return schedule;
}

t.test('I1: full cron syntax: days, ranges, steps, lists and names count', (t) => {
  const from = at('2026-12-02T12:00:00Z'); // a Wednesday
  const rows: [string, string][] = [
    ['0 4 * * 0', '2026-12-06T04:00:00.000Z'],
    ['0 4 * * SUN', '2026-12-06T04:00:00.000Z'],
    ['*/15 9-17 * * MON-FRI', '2026-12-02T12:15:00.000Z'],
    ['0 4 1,15 * *', '2026-12-15T04:00:00.000Z'],
    ['0 4 L * *', '2026-12-31T04:00:00.000Z'],
    ['0 4 * * 1#1', '2026-12-07T04:00:00.000Z'],
    ['30 0 4 * * *', '2026-12-03T04:00:30.000Z'],
    ['0 0 29 2 *', '2028-02-29T00:00:00.000Z'],
    ['@daily', '2026-12-03T00:00:00.000Z'],
    ['CRON_TZ=Asia/Tokyo 0 4 * * *', '2026-12-02T19:00:00.000Z'],
    ['TZ=America/New_York 0 4 * * *', '2026-12-03T09:00:00.000Z'],
  ];
  for (const [text, expected] of rows) t.equal(iso(nextSlot(read(text), from)), expected, text);
  t.equal(
    iso(nextSlot(read('0 4 * * *', 'Asia/Tokyo'), from)),
    '2026-12-02T19:00:00.000Z',
    'the default zone',
  );
  t.end();
});

t.test('D41: what is no schedule says what is wrong with it', (t) => {
  const rows: [string, RegExp][] = [
    ['', /fields/],
    ['* * *', /3 fields instead of five/],
    ['* * * * * * *', /7 fields/],
    ['99 * * * *', /range 0-59/],
    ['*/0 * * * *', /0/],
    ['0 0 30 2 *', /day/],
    ['0 4\u00a0* * *', /fields/],
    ['@reboot', /fields/],
    ['H 4 * * *', /no cron field/],
    ['0 4 * * $(reboot)', /no cron field/],
    ['CRON_TZ=Mars/Olympus 0 4 * * *', /no time zone/],
    ['CRON_TZ=../../etc/passwd 0 4 * * *', /no time zone/],
    [`0 4 * * ${'1,'.repeat(200)}1`, /longer than 256/],
  ];
  for (const [text, expected] of rows) {
    const schedule = parseSchedule(text);
    t.match('error' in schedule ? schedule.error : JSON.stringify(schedule), expected, JSON.stringify(text));
  }
  t.end();
});

t.test('I1: a slot that passed while the controller was away runs once, however many there were', (t) => {
  const daily = read('0 4 * * *');
  const since = at('2026-11-01T00:00:00Z');
  const now = at('2026-12-02T12:00:00Z');
  const first = due(daily, since, at('2026-11-20T04:00:01Z'), now);
  t.equal(iso(first.slot), '2026-11-21T04:00:00.000Z');
  t.equal(iso(first.next), '2026-12-03T04:00:00.000Z');
  const after = due(daily, since, now, now + 1000);
  t.equal(after.slot, null, 'that run serves them all');
  t.equal(iso(after.next), '2026-12-03T04:00:00.000Z');
  t.equal(due(daily, now, null, now + 1000).slot, null, 'slots from before the schedule began are nobody’s');
  t.equal(iso(due(daily, since, null, now).slot), '2026-11-01T04:00:00.000Z');
  t.end();
});

t.test('a run that began exactly at its slot, or a second later, serves it', (t) => {
  const daily = read('0 4 * * *');
  const slot = at('2026-12-02T04:00:00Z');
  t.equal(due(daily, 0, slot - 86_400_000, slot - 1).slot, null);
  t.equal(due(daily, 0, slot - 86_400_000, slot).slot, slot, 'due in its very millisecond');
  t.equal(due(daily, 0, slot, slot).slot, null);
  t.equal(due(daily, 0, slot + 1000, slot + 2000).slot, null);
  t.end();
});

t.test('a clock that jumps back repeats nothing, one that jumps ahead makes one run', (t) => {
  const hourly = read('0 * * * *');
  const ran = at('2026-12-02T04:00:00Z');
  t.equal(due(hourly, 0, ran, at('2026-12-02T02:30:00Z')).slot, null, 'back: 03:00 does not come again');
  t.equal(due(hourly, 0, ran, at('2026-12-02T04:00:00Z')).slot, null);
  t.equal(iso(due(hourly, 0, ran, at('2026-12-02T05:00:00Z')).slot), '2026-12-02T05:00:00.000Z');
  const jumped = at('2027-06-01T00:30:00Z');
  t.ok(due(hourly, 0, ran, jumped).slot);
  t.equal(due(hourly, 0, jumped, jumped + 1).slot, null);
  t.end();
});

t.test('a change to summer time skips no slot, a change back runs none twice', (t) => {
  const night = read('CRON_TZ=Europe/Berlin 30 2 * * *');
  const served = (from: string, to: string): string[] => {
    const runs: string[] = [];
    let last = at(from);
    for (let now = last; now <= at(to); now += 600_000) {
      const { slot } = due(night, 0, last, now);
      if (slot === null) continue;
      runs.push(iso(now) as string);
      last = now;
    }
    return runs;
  };
  t.same(served('2026-03-28T12:00:00Z', '2026-03-30T12:00:00Z'), [
    '2026-03-29T01:30:00.000Z',
    '2026-03-30T00:30:00.000Z',
  ]);
  t.same(served('2026-10-24T12:00:00Z', '2026-10-26T12:00:00Z'), [
    '2026-10-25T00:30:00.000Z',
    '2026-10-26T01:30:00.000Z',
  ]);
  // A run by hand in the hour that comes twice does not bring the slot back; one in the gap does not swallow it.
  t.equal(iso(nextSlot(night, at('2026-10-25T01:10:00Z'))), '2026-10-26T01:30:00.000Z');
  t.equal(iso(nextSlot(night, at('2026-03-29T01:10:00Z'))), '2026-03-29T01:30:00.000Z');
  const hourly = read('CRON_TZ=Europe/Berlin 15 * * * *');
  t.equal(iso(nextSlot(hourly, at('2026-10-25T00:20:00Z'))), '2026-10-25T01:15:00.000Z', 'each hour: both');
  t.end();
});

t.test('property: looked at whenever, each slot is served once and none is served early', (t) => {
  const schedules = ['*/7 * * * *', '0 4 * * *', 'CRON_TZ=Europe/Berlin 30 2 * * *', '0 0 1 * *'].map((s) =>
    read(s),
  );
  fc.assert(
    fc.property(
      fc.constantFrom(...schedules),
      fc.integer({ min: at('2026-01-01T00:00:00Z'), max: at('2026-12-31T00:00:00Z') }),
      fc.array(fc.integer({ min: 1, max: 40 * 3_600_000 }), { maxLength: 25 }),
      (schedule, start, steps) => {
        let now = start;
        let last = start;
        for (const step of steps) {
          now += step;
          const { slot, next } = due(schedule, 0, last, now);
          if (slot !== null && (slot <= last || slot > now)) throw new Error(`${iso(slot)} at ${iso(now)}`);
          if (next !== null && next <= now) throw new Error(`next ${iso(next)} at ${iso(now)}`);
          if (slot !== null) last = now;
          if (due(schedule, 0, last, now).slot !== null) throw new Error(`twice at ${iso(now)}`);
        }
      },
    ),
    { numRuns: 300, seed: 5 },
  );
  t.pass('300 histories');
  t.end();
});
