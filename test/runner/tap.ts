/**
 * Reads the TAP 14 that a test file prints (https://testanything.org/tap-version-14-specification.html) and counts
 * its named tests: a subtest without subtests of its own counts as one, and so does an assertion outside of any.
 */
export interface Counts {
  passed: number;
  failed: number;
  skipped: number;
}

export interface TapResult extends Counts {
  /** Names of what failed, outermost first, joined by " > ". */
  failures: string[];
  /** Names and reasons of what was skipped or is still to do. */
  skips: string[];
  /** What is wrong with the stream itself; each counts as a failure too. */
  problems: string[];
}

interface Point {
  ok: boolean;
  name: string;
  /** Reason of a skip or todo, null when it ran for real. */
  skip: string | null;
  subtest: boolean;
  children: Point[];
}

/** One nesting level while it is read. */
interface Level {
  points: Point[];
  plan: number | null;
  planSkip: string | null;
  announced: boolean;
}

const INDENT = 4;

function newLevel(): Level {
  return { points: [], plan: null, planSkip: null, announced: false };
}

function addUp(point: Point, trail: readonly string[], result: TapResult): void {
  const here = [...trail, point.name];
  const name = here.join(' > ');
  if (point.skip !== null) {
    result.skipped++;
    result.skips.push(point.skip === '' ? name : `${name} (${point.skip})`);
    return;
  }
  const subtests = point.children.filter((child) => child.subtest || child.skip !== null);
  if (subtests.length === 0) {
    if (point.ok) result.passed++;
    else {
      result.failed++;
      const child = point.children.find((one) => !one.ok && one.skip === null);
      result.failures.push(child ? `${name}: ${child.name}` : name);
    }
    return;
  }
  const before = result.failed;
  for (const child of subtests) addUp(child, here, result);
  if (!point.ok && result.failed === before) {
    result.failed++;
    result.failures.push(name);
  }
}

/**
 * Judges one test file.
 *
 * @param text its standard output
 * @param ending how the process ended: null for exit code 0, else a few words ("exit code 1", "killed by SIGSEGV")
 */
export function readTap(text: string, ending: string | null): TapResult {
  const result: TapResult = { passed: 0, failed: 0, skipped: 0, failures: [], skips: [], problems: [] };
  const levels: Level[] = [newLevel()];
  let yaml: string | null = null;

  for (const line of text.split('\n')) {
    if (yaml !== null) {
      if (line === `${yaml}...`) yaml = null;
      continue;
    }
    const spaces = /^ */.exec(line)?.[0].length ?? 0;
    if (spaces % INDENT === 2 && line.slice(spaces) === '---') {
      yaml = line.slice(0, spaces);
      continue;
    }
    if (spaces % INDENT !== 0) continue;
    const depth = spaces / INDENT;
    const rest = line.slice(spaces);
    const point = /^(not )?ok\b(?: +\d+)?(?: +- +| +|$)(.*)$/.exec(rest);
    const plan = /^1\.\.(\d+)(?:\s+#\s*(.*))?$/.exec(rest);
    if (!point && !plan && !/^# Subtest/.test(rest) && !rest.startsWith('Bail out!')) continue;
    while (levels.length <= depth) levels.push(newLevel());
    const level = levels[depth] as Level;

    if (rest.startsWith('Bail out!')) {
      result.problems.push(rest);
    } else if (plan) {
      level.plan = Number(plan[1]);
      if (level.plan === 0) level.planSkip = (plan[2] ?? '').replace(/^skip\S*\s*/i, '');
    } else if (point) {
      const below = levels.splice(depth + 1);
      const inner = below[0];
      const directive = /\s#\s*(skip|todo)\b\S*\s*(.*)$/i.exec(point[2] ?? '');
      // tap puts "# time=12ms" and, with a buffered subtest, " {" behind the name.
      const name = (point[2] ?? '')
        .replace(/\s#\s*(skip|todo|time=).*$/i, '')
        .replace(/\s\{$/, '')
        .trim();
      const made: Point = {
        ok: !point[1],
        name: name || '(unnamed)',
        skip: directive
          ? `${directive[1]?.toLowerCase() === 'todo' ? 'to do: ' : ''}${directive[2]?.trim()}`
          : null,
        subtest: level.announced || inner !== undefined,
        children: inner?.points ?? [],
      };
      if (inner?.plan === 0 && made.ok && made.skip === null && inner.planSkip) made.skip = inner.planSkip;
      level.announced = false;
      level.points.push(made);
    } else {
      level.announced = true;
    }
  }

  const top = levels[0] as Level;
  for (const point of top.points) addUp(point, [], result);
  if (top.plan === null) result.problems.push('no plan: the file ended before its tests did');
  else if (top.plan === 0 && top.points.length === 0) {
    result.skipped++;
    result.skips.push(`the whole file${top.planSkip ? ` (${top.planSkip})` : ''}`);
  } else if (top.plan !== top.points.length) {
    result.problems.push(`${top.plan} tests planned, ${top.points.length} seen`);
  }
  if (ending !== null && result.failed === 0) result.problems.push(ending);
  result.failed += result.problems.length;
  return result;
}
