// The gate itself: what it counts, and that a test which fails, crashes or never ends cannot pass unseen.
import { readFileSync, writeFileSync } from 'node:fs';
import path from 'node:path';
import t from 'tap';
import { runProgram } from '../runner/process.ts';
import { runSteps, type Step } from '../runner/schedule.ts';
import { readTap } from '../runner/tap.ts';

const root = path.join(import.meta.dirname, '../..');

t.test('reading TAP', async (t) => {
  const read = (lines: string[], ending: string | null = null) => readTap(lines.join('\n'), ending);

  t.test('assertions at the top count one each', async (t) => {
    t.match(read(['ok 1 - a', 'not ok 2 - b', 'ok 3 - c # SKIP no disk', '1..3'], 'exit code 1'), {
      passed: 1,
      failed: 1,
      skipped: 1,
      failures: ['b'],
      skips: ['c (no disk)'],
      problems: [],
    });
  });

  t.test('a subtest counts as one test, whatever it asserts', async (t) => {
    const lines = [
      '# Subtest: one',
      '    ok 1 - x',
      '    ok 2 - y',
      '    1..2',
      'ok 1 - one # time=3ms',
      '1..1',
    ];
    t.match(read(lines), { passed: 1, failed: 0, skipped: 0 });
  });

  t.test('of nested subtests the innermost count, and a failure has the whole trail', async (t) => {
    const lines = [
      '# Subtest: outer',
      '    # Subtest: inner',
      '        ok 1 - x',
      '        not ok 2 - y',
      '          ---',
      '          diff: |',
      '            ok 7 - not a test, part of the diagnosis',
      '          ...',
      '        1..2',
      '    not ok 1 - inner # time=1ms',
      '    # Subtest: second',
      '        1..0',
      '    ok 2 - second',
      '    ok 3 - third # SKIP needs root',
      '    1..3',
      'not ok 1 - outer',
      '1..1',
    ];
    const result = read(lines, 'exit code 1');
    t.match(result, { passed: 1, failed: 1, skipped: 1, failures: ['outer > inner: y'], problems: [] });
    t.same(result.skips, ['outer > third (needs root)']);
  });

  t.test('a parent that fails by itself is a failure though its subtests passed', async (t) => {
    const lines = [
      '# Subtest: p',
      '    # Subtest: c',
      '        ok 1',
      '        1..1',
      '    ok 1 - c',
      '    not ok 2 - test unfinished',
      '    1..2',
      'not ok 1 - p',
      '1..1',
    ];
    t.match(read(lines, 'exit code 1'), { passed: 1, failed: 1, failures: ['p'] });
  });

  t.test('a to do is a skip, failing or not', async (t) => {
    t.match(read(['not ok 1 - later # TODO soon', '1..1']), {
      failed: 0,
      skipped: 1,
      skips: ['later (to do: soon)'],
    });
  });

  t.test('a whole file can be skipped', async (t) => {
    t.match(read(['TAP version 14', '1..0 # SKIP no overlayfs']), {
      passed: 0,
      failed: 0,
      skipped: 1,
      skips: ['the whole file (no overlayfs)'],
    });
  });

  t.test('a missing plan, a wrong plan, a bail-out and silence are failures', async (t) => {
    t.match(read(['ok 1 - a']), { passed: 1, failed: 1 }, 'no plan');
    t.match(read(['ok 1 - a', '1..2']), { passed: 1, failed: 1 }, 'one test is missing');
    t.match(read(['ok 1 - a', 'Bail out! no disk', '1..1']), { failed: 1, problems: ['Bail out! no disk'] });
    t.match(read([]), { passed: 0, failed: 1 }, 'nothing printed, exit code 0');
  });

  t.test('an exit code without a failed test is a failure', async (t) => {
    t.match(read(['ok 1 - a', '1..1'], 'killed by SIGSEGV'), {
      passed: 1,
      failed: 1,
      problems: ['killed by SIGSEGV'],
    });
  });
});

t.test('real test files', async (t) => {
  const folder = t.testdir();
  const judge = async (body: string, limitS = 20) => {
    const file = path.join(folder, 'x.test.ts');
    writeFileSync(
      file,
      `import t from ${JSON.stringify(path.join(root, 'node_modules/tap/dist/esm/index.js'))};\n${body}`,
    );
    const ended = await runProgram(process.execPath, [file], { cwd: folder, limitS });
    return { ...readTap(ended.stdout, ended.ending), all: ended.all };
  };

  t.test('passing, skipped and failing tests are told apart', async (t) => {
    const result = await judge(`
      t.test('good', async (t) => { t.ok(1); t.ok(2); });
      t.test('left out', { skip: 'no root' }, async (t) => { t.fail(); });
      t.test('bad', async (t) => { t.equal(1, 2, 'one is two'); });`);
    t.match(result, {
      passed: 1,
      failed: 1,
      skipped: 1,
      failures: ['bad: one is two'],
      skips: ['left out (no root)'],
    });
    t.match(result.all, /one is two/, 'the output is there to be shown');
  });

  t.test('a file that dies in the middle has failed', async (t) => {
    const result = await judge(`
      t.test('good', async (t) => { t.ok(1); });
      t.test('dies', async () => { process.kill(process.pid, 'SIGKILL'); await new Promise(() => {}); });`);
    t.ok(result.failed > 0);
    t.match(result.problems.join(), /SIGKILL/);
  });

  t.test('a file that exits with 0 before its tests has failed', async (t) => {
    t.ok((await judge(`t.test('never', async () => {}); process.reallyExit(0);`)).failed > 0);
    t.ok((await judge('process.exit(0)')).failed > 0);
  });

  t.test('a file that cannot be loaded has failed', async (t) => {
    t.ok((await judge(`import './not-there.ts';`)).failed > 0);
  });

  t.test('a file that hangs is ended with all that it started', async (t) => {
    const mark = path.join(folder, 'pid');
    const started = performance.now();
    const result = await judge(
      `import { spawn } from 'node:child_process';
       import { writeFileSync } from 'node:fs';
       const child = spawn('sleep', ['1000'], { stdio: 'inherit' });
       writeFileSync(${JSON.stringify(mark)}, String(child.pid));
       t.test('hangs', { timeout: 0 }, async () => { await new Promise(() => {}); });
       setInterval(() => {}, 1000);`,
      3,
    );
    t.ok(result.failed > 0);
    t.match(result.problems.join(), /time limit of 3 s/);
    t.ok(performance.now() - started < 10_000);
    // Ended, or ended and not yet collected by its new parent.
    let state = 'gone';
    try {
      state = /\) (\S)/.exec(readFileSync(`/proc/${readFileSync(mark, 'utf8')}/stat`, 'utf8'))?.[1] ?? '?';
    } catch {}
    t.ok(['gone', 'Z', 'X'].includes(state), state);
  });
});

t.test('steps', async (t) => {
  const wait = (ms: number) => new Promise((resolve) => setTimeout(resolve, ms));

  t.test('a step waits for what it needs, and never begins when that failed', async (t) => {
    const events: string[] = [];
    const step = (name: string, value: boolean, needs: string[] = []): Step<boolean> => ({
      name,
      needs,
      run: async () => {
        events.push(`+${name}`);
        await wait(10);
        events.push(`-${name}`);
        return value;
      },
    });
    const seen: Record<string, boolean | undefined> = {};
    await runSteps(
      [
        step('a', true),
        step('b', false),
        step('c', true, ['a']),
        step('d', true, ['b']),
        step('e', true, ['d']),
      ],
      4,
      (value) => value,
      ({ step: { name }, value }) => {
        seen[name] = value;
      },
    );
    t.same(seen, { a: true, b: false, c: true, d: undefined, e: undefined });
    t.ok(events.indexOf('-a') < events.indexOf('+c'));
    t.notOk(events.includes('+d') || events.includes('+e'));
  });

  t.test('no more at once than there are slots, and a lone one has them all', async (t) => {
    let now = 0;
    let most = 0;
    let withLone = 0;
    const step = (name: string, alone = false): Step<boolean> => ({
      name,
      alone,
      run: async () => {
        now++;
        most = Math.max(most, now);
        await wait(15);
        if (alone) withLone = Math.max(withLone, now);
        now--;
        return true;
      },
    });
    await runSteps([step('a'), step('b'), step('c'), step('lone', true), step('d')], 2, Boolean, () => {});
    t.equal(most, 2);
    t.equal(withLone, 1);
  });

  t.test('a step in the background takes no slot, and is waited for', async (t) => {
    const order: string[] = [];
    const step = (name: string, ms: number, more: Partial<Step<boolean>> = {}): Step<boolean> => ({
      name,
      ...more,
      run: async () => {
        order.push(`${name} begins`);
        await wait(ms);
        order.push(`${name} ends`);
        return true;
      },
    });
    await runSteps(
      [
        step('long', 60, { background: true }),
        step('a', 10),
        step('b', 5),
        step('c', 5, { needs: ['long'] }),
      ],
      1,
      Boolean,
      () => {},
    );
    t.strictSame(order, [
      'long begins',
      'a begins',
      'a ends',
      'b begins',
      'b ends',
      'long ends',
      'c begins',
      'c ends',
    ]);
  });

  t.test('a need that is no step is an error, not a step left out', async (t) => {
    await t.rejects(
      runSteps([{ name: 'a', needs: ['z'], run: async () => 1 }], 2, Boolean, () => {}),
      /needs z/,
    );
  });
});

t.test('the closing line and the exit code', async (t) => {
  const none = await runProgram(process.execPath, ['test/run.ts', 'no-such-test-file'], {
    cwd: root,
    limitS: 60,
  });
  t.equal(none.ending, 'exit code 1');
  t.equal(none.stdout.trimEnd().split('\n').at(-1), '0 passed, 1 failed');
});
