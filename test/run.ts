/**
 * The gate: everything that a change has to pass, with one closing line "N passed, N failed, N skipped".
 *
 *   npm test                     everything
 *   npm run test:unit            test/unit and the C++ tests, no sanitizers
 *   npm test -- pull rclone      the test files whose path contains one of these words
 *   npm test -- --no-coverage    without the coverage minimum of TypeScript
 */
import { globSync, mkdirSync, mkdtempSync, readFileSync, rmSync } from 'node:fs';
import os from 'node:os';
import path from 'node:path';
import { parseArgs } from 'node:util';
import {
  BUILD_LIMIT_S,
  COVERAGE_EXCLUDE,
  COVERAGE_INCLUDE,
  MINIMUM_COVERAGE,
  QUICK_CPP_TESTS,
  SLOTS,
  TIME_LIMITS_S,
} from './config.ts';
import { CLUSTER_PROGRAMS } from './kube/harness/programs.ts';
import { build, type CppResult, forgetCoverage, lineCoverage, runTests } from './runner/cpp.ts';
import { endAll, runProgram } from './runner/process.ts';
import { type Outcome, runSteps, type Step } from './runner/schedule.ts';
import { type Counts, readTap } from './runner/tap.ts';

interface Result extends Counts {
  /** A few words behind the step's name. */
  notes: string[];
  /** Printed whole when something failed. */
  output: string;
}

const root = path.dirname(import.meta.dirname);
const { values, positionals } = parseArgs({
  allowPositionals: true,
  options: { 'no-coverage': { type: 'boolean', default: false } },
});
const unit = positionals[0] === 'unit' && positionals.length === 1;
const words = unit ? [] : positionals;
const whole = !unit && words.length === 0;
const coverage = whole && !values['no-coverage'];

const files = globSync('test/**/*.test.ts', { cwd: root })
  .filter((file) => (unit ? file.startsWith('test/unit/') : true))
  .filter((file) => words.length === 0 || words.some((word) => file.includes(word)))
  .sort();
const started = performance.now();
const coverageFolder = path.join(root, 'coverage/raw');
const scratch = mkdtempSync(path.join(os.tmpdir(), 'simple-volume-test-'));

const fine: Result = { passed: 1, failed: 0, skipped: 0, notes: [], output: '' };
/** Set-up is no test: it counts only when it fails. */
const ready: Result = { ...fine, passed: 0 };

function failed(note: string, output: string): Result {
  return { passed: 0, failed: 1, skipped: 0, notes: [note], output };
}

/** A step that is one program: it passes when the program ends with 0. */
function command(
  name: string,
  program: string,
  args: readonly string[],
  more: { needs?: readonly string[]; setup?: boolean; limitS?: number; last?: boolean } = {},
): Step<Result> {
  return {
    name,
    ...(more.needs ? { needs: more.needs } : {}),
    async run() {
      const ended = await runProgram(program, args, { cwd: root, limitS: more.limitS ?? 300 });
      if (ended.ending !== null) return failed(ended.ending, ended.all);
      const lastLine = ended.stdout.trim().split('\n').at(-1) ?? '';
      return { ...(more.setup ? ready : fine), notes: more.last && lastLine !== '' ? [lastLine] : [] };
    },
  };
}

/** Several tests that ran a second time under other conditions count as one check, unless one fails. */
function asOneCheck(result: CppResult): Result {
  if (result.failed > 0) return result;
  return { ...fine, notes: [`${result.passed} tests`], skipped: 0, output: '' };
}

function sanitizer(name: string, folder: string, flag: string, env: NodeJS.ProcessEnv): Step<Result> {
  return {
    name,
    needs: ['packages'],
    async run() {
      const broken = await build(root, folder, [`-DSANITIZE=${flag}`]);
      return broken ?? asOneCheck(await runTests(root, folder, { ...env, TMPDIR: scratch }));
    },
  };
}

const timeLimit = (file: string): number =>
  TIME_LIMITS_S.find(({ under }) => file.startsWith(under))?.seconds ?? 120;

/** Programs that are built beside everything else, and which test files wait for them. */
const BUILDS: readonly {
  name: string;
  programs: readonly string[];
  under: readonly string[];
  needs?: readonly string[];
}[] = [
  { name: 'kube programs', programs: [], under: ['test/kube', 'test/chart'] },
  { name: 'csi-sanity', programs: ['csi-sanity'], under: ['test/csi/sanity'] },
  { name: 'helm', programs: ['helm', 'kubeconform', 'monitoring-check'], under: ['test/chart'] },
  // After the packages: runc needs a C library.
  { name: 'cluster programs', programs: CLUSTER_PROGRAMS, under: ['test/cluster'], needs: ['packages'] },
];
const needs = (file: string, under: readonly string[]): boolean => under.some((one) => file.startsWith(one));

function testFile(file: string): Step<Result> {
  return {
    name: file,
    // A cluster is three machines' worth of work, and its time-outs are those of a cluster.
    alone: file.startsWith('test/cluster/'),
    needs: [
      'addon',
      'C++ build',
      'rclone',
      ...BUILDS.filter(({ under }) => needs(file, under)).map(({ name }) => name),
    ],
    async run() {
      const env: NodeJS.ProcessEnv = {
        TMPDIR: scratch,
        SIMPLE_VOLUME_SOURCES: '1',
        // the runner's limit counts, not tap's own of 30 s
        TAP_TIMEOUT: String(timeLimit(file)),
      };
      if (coverage) env.NODE_V8_COVERAGE = coverageFolder;
      const args = ['--enable-source-maps', '--disable-warning=ExperimentalWarning', file];
      const ended = await runProgram(process.execPath, args, { cwd: root, env, limitS: timeLimit(file) });
      const tap = readTap(ended.stdout, ended.ending);
      const skips = tap.skips.map((skip) => `skipped: ${skip}`);
      return { ...tap, notes: [...tap.problems, ...tap.failures, ...skips], output: ended.all };
    },
  };
}

const steps: Step<Result>[] = [];
const builds: Step<Result>[] = [];
for (const { name, programs, under, needs: wanted = [] } of BUILDS) {
  if (!files.some((file) => needs(file, under))) continue;
  const build = command(name, process.execPath, ['test/kube/harness/build.ts', ...programs], {
    setup: true,
    limitS: BUILD_LIMIT_S,
    last: true,
    needs: wanted,
  });
  builds.push({ ...build, background: true });
}
steps.push(
  ...builds.filter((step) => step.needs?.length === 0),
  command(
    'packages',
    process.execPath,
    ['test/runner/install-packages.ts', ...(whole ? [] : ['--build-only'])],
    {
      setup: true,
      limitS: 900,
      last: true,
    },
  ),
  ...builds.filter((step) => step.needs?.length !== 0),
  command('addon', process.execPath, ['native/install.mjs'], { setup: true, limitS: BUILD_LIMIT_S }),
  command('rclone', process.execPath, ['native/rclone/build.ts'], {
    setup: true,
    limitS: BUILD_LIMIT_S,
    last: true,
  }),
  {
    name: 'C++ build',
    needs: ['packages', 'addon'],
    run: async () => (await build(root, 'cpp', ['-DTEST_ADDON=ON'])) ?? ready,
  },
);
if (words.length === 0) {
  steps.push({
    name: 'C++ tests',
    needs: ['C++ build'],
    // The quick part leaves out what takes long because it repeats much: seeds, crashes, storms.
    run: () =>
      runTests(root, 'cpp', { TMPDIR: scratch, ...(whole ? {} : { GTEST_FILTER: QUICK_CPP_TESTS }) }),
  });
}
if (whole) {
  steps.push(
    command('format and lint (biome)', 'node_modules/.bin/biome', ['check', '--error-on-warnings'], {}),
    command('types (tsc)', 'node_modules/.bin/tsc', ['--noEmit'], {}),
    sanitizer('C++ tests, address and undefined behaviour sanitizer', 'cpp-asan', 'address,undefined', {
      ASAN_OPTIONS: 'detect_leaks=1:strict_string_checks=1:detect_stack_use_after_return=1',
      UBSAN_OPTIONS: 'print_stacktrace=1:halt_on_error=1',
    }),
    sanitizer('C++ tests, thread sanitizer', 'cpp-tsan', 'thread', { TSAN_OPTIONS: 'halt_on_error=1' }),
    {
      name: 'C++ coverage',
      needs: ['packages'],
      async run() {
        const broken = await build(root, 'cpp-coverage', ['-DCOVERAGE=ON']);
        if (broken) return broken;
        forgetCoverage(root, 'cpp-coverage');
        const tests = await runTests(root, 'cpp-coverage', { TMPDIR: scratch });
        if (tests.failed > 0) return tests;
        const lines = await lineCoverage(root, 'cpp-coverage');
        if (typeof lines === 'string') return failed('not measured', lines);
        const note = `${lines.percent.toFixed(1)} % of lines, at least ${MINIMUM_COVERAGE.cpp} asked for`;
        const list = lines.files
          .map((one) => `${one.percent.toFixed(1).padStart(6)} %  ${one.file}`)
          .join('\n');
        return lines.percent >= MINIMUM_COVERAGE.cpp ? { ...fine, notes: [note] } : failed(note, list);
      },
    },
  );
}
// The longest first: real programs, then the others. What runs alone is last: a slot that waits is lost.
const order = (file: string): number =>
  file.startsWith('test/real/') ? 0 : file.startsWith('test/cluster/') ? 2 : 1;
steps.push(...files.toSorted((a, b) => order(a) - order(b)).map(testFile));

const total: Counts = { passed: 0, failed: 0, skipped: 0 };
const failedSteps: string[] = [];
const running = new Map<string, number>();
let done = 0;

const clock = (): string => `[${((performance.now() - started) / 1000).toFixed(1).padStart(6)} s]`;

function report({ step, value, seconds }: Outcome<Result>): void {
  running.delete(step.name);
  done++;
  const count = `${done}/${steps.length}`;
  if (value === undefined) {
    total.failed++;
    failedSteps.push(step.name);
    console.log(`${clock()} ${count} NOT RUN ${step.name}: a step that it needs has failed`);
    return;
  }
  total.passed += value.passed;
  total.failed += value.failed;
  total.skipped += value.skipped;
  const took = `${seconds.toFixed(1)} s`;
  if (value.failed === 0) {
    const counts = value.passed > 1 || value.skipped > 0 ? `, ${value.passed} passed` : '';
    const skipped = value.skipped > 0 ? `, ${value.skipped} skipped` : '';
    const notes = value.notes.length > 0 ? `: ${value.notes.join('; ')}` : '';
    console.log(`${clock()} ${count} ok      ${step.name} (${took}${counts}${skipped})${notes}`);
    return;
  }
  failedSteps.push(step.name);
  console.log(`${clock()} ${count} FAILED  ${step.name} (${took}, ${value.failed} failed)`);
  for (const note of value.notes) console.log(`           ${note}`);
  console.log(value.output.trimEnd().replace(/^/gm, '    | '));
}

/** Checks the part of lines that ran, after all tests are done. */
async function typescriptCoverage(): Promise<Result> {
  const c8 = [
    'node_modules/c8/bin/c8.js',
    'report',
    `--temp-directory=${coverageFolder}`,
    `--reports-dir=${path.join(root, 'coverage')}`,
    '--reporter=json-summary',
    '--reporter=text',
    '--reporter=lcovonly',
    '--all',
    '--src=.',
    '--merge-async',
    ...COVERAGE_INCLUDE.map((pattern) => `--include=${pattern}`),
    ...COVERAGE_EXCLUDE.map((pattern) => `--exclude=${pattern}`),
  ];
  const ended = await runProgram(process.execPath, c8, { cwd: root, limitS: 300 });
  if (ended.ending !== null) return failed(ended.ending, ended.all);
  const summary = JSON.parse(readFileSync(path.join(root, 'coverage/coverage-summary.json'), 'utf8')) as {
    total: { lines: { pct: number } };
  };
  const percent = summary.total.lines.pct;
  const note = `${percent} % of lines, at least ${MINIMUM_COVERAGE.typescript} asked for`;
  return percent >= MINIMUM_COVERAGE.typescript ? { ...fine, notes: [note] } : failed(note, ended.stdout);
}

for (const signal of ['SIGINT', 'SIGTERM'] as const) {
  process.on(signal, () => {
    endAll();
    rmSync(scratch, { recursive: true, force: true });
    process.exit(130);
  });
}
const heartbeat = setInterval(() => {
  const now = performance.now();
  const list = [...running].map(([name, since]) => `${name} (${((now - since) / 1000).toFixed(0)} s)`);
  console.log(`${clock()} running: ${list.join(', ')}`);
}, 20_000);

try {
  if (files.length === 0) {
    total.failed++;
    failedSteps.push(`no test file has one of these in its path: ${words.join(' ')}`);
  } else {
    if (coverage) {
      rmSync(coverageFolder, { recursive: true, force: true });
      mkdirSync(coverageFolder, { recursive: true });
    }
    console.log(`${steps.length} steps, ${SLOTS} at once, Node ${process.versions.node}`);
    await runSteps(
      steps,
      SLOTS,
      (value) => value.failed === 0,
      report,
      (step) => running.set(step.name, performance.now()),
    );
    if (coverage) {
      const began = performance.now();
      const value = await typescriptCoverage();
      const step = { name: 'TypeScript coverage', run: typescriptCoverage };
      steps.push(step);
      report({ step, value, seconds: (performance.now() - began) / 1000 });
    }
  }
} finally {
  clearInterval(heartbeat);
  rmSync(scratch, { recursive: true, force: true });
}
if (failedSteps.length > 0) console.log(`\nfailed:\n${failedSteps.map((name) => `  ${name}`).join('\n')}`);
console.log(
  `${total.passed} passed, ${total.failed} failed${total.skipped > 0 ? `, ${total.skipped} skipped` : ''}`,
);
process.exit(total.failed === 0 ? 0 : 1);
