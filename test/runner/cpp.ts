/** The C++ side of the gate: builds by CMake, GoogleTest runs, line coverage by gcov. */
import { existsSync, globSync, readFileSync, rmSync } from 'node:fs';
import path from 'node:path';
import { cacheFolder } from '../../lib/transfer/rclone-binary.ts';
import { BUILD_LIMIT_S, CPP_LIMIT_S } from '../config.ts';
import { programPath } from '../packages.ts';
import { runProgram } from './process.ts';
import type { Counts } from './tap.ts';

export interface CppResult extends Counts {
  /** For the report: what failed and what was skipped. */
  notes: string[];
  /** Printed when something failed. */
  output: string;
}

function failure(note: string, output: string): CppResult {
  return { passed: 0, failed: 1, skipped: 0, notes: [note], output };
}

/**
 * What was compiled before, in whatever checkout, is taken from the compiler cache, where there is one: the sanitizers'
 * builds take ten minutes of two cores. ccache looks at everything that goes into a file, the flags and the compiler too.
 */
function compilerCache(root: string): { flags: string[]; env: NodeJS.ProcessEnv } {
  const ccache = programPath('ccache');
  if (ccache === null) return { flags: [], env: {} };
  return {
    flags: [`-DCMAKE_CXX_COMPILER_LAUNCHER=${ccache}`],
    env: {
      CCACHE_DIR: path.join(process.env.SIMPLE_VOLUME_CACHE || cacheFolder(process.env), 'ccache'),
      CCACHE_BASEDIR: root,
      CCACHE_NOHASHDIR: '1',
      CCACHE_MAXSIZE: '1G',
    },
  };
}

/** Configures and builds into build/<folder>; null when it worked. */
export async function build(
  root: string,
  folder: string,
  flags: readonly string[],
): Promise<CppResult | null> {
  const target = path.join(root, 'build', folder);
  const cache = compilerCache(root);
  const configure = ['-S', path.join(root, 'native'), '-B', target, '-G', 'Ninja', ...cache.flags, ...flags];
  const configured = await runProgram('cmake', configure, { cwd: root, limitS: 120 });
  if (configured.ending !== null) return failure(`cmake: ${configured.ending}`, configured.all);
  const made = await runProgram('cmake', ['--build', target, '-j', '2'], {
    cwd: root,
    env: cache.env,
    limitS: BUILD_LIMIT_S,
  });
  return made.ending === null ? null : failure(`build: ${made.ending}`, made.all);
}

interface GoogleReport {
  testsuites: {
    name: string;
    testsuite: { name: string; result: string; failures?: unknown[] }[];
  }[];
}

/** Runs the GoogleTest program of build/<folder> and counts its tests. */
export async function runTests(
  root: string,
  folder: string,
  env: NodeJS.ProcessEnv = {},
): Promise<CppResult> {
  const target = path.join(root, 'build', folder);
  const report = path.join(target, 'report.json');
  rmSync(report, { force: true });
  const program = path.join(target, 'engine_tests');
  // ThreadSanitizer of GCC 12 cannot live with the address randomization of newer kernels.
  const thread = folder.includes('tsan') && existsSync('/usr/bin/setarch');
  const command = thread ? 'setarch' : program;
  const args = [...(thread ? ['-R', program] : []), `--gtest_output=json:${report}`, '--gtest_color=no'];
  const ended = await runProgram(command, args, { cwd: target, env, limitS: CPP_LIMIT_S });
  const result: CppResult = { passed: 0, failed: 0, skipped: 0, notes: [], output: ended.all };
  if (!existsSync(report)) return failure(`no report: ${ended.ending ?? 'it ended early'}`, ended.all);
  for (const suite of (JSON.parse(readFileSync(report, 'utf8')) as GoogleReport).testsuites) {
    for (const test of suite.testsuite) {
      const name = `${suite.name}.${test.name}`;
      if (test.failures !== undefined && test.failures.length > 0) {
        result.failed++;
        result.notes.push(name);
      } else if (test.result === 'SKIPPED') {
        result.skipped++;
        result.notes.push(`skipped: ${name}`);
      } else result.passed++;
    }
  }
  if (ended.ending !== null && result.failed === 0) {
    result.failed++;
    result.notes.push(ended.ending);
  }
  if (result.passed + result.failed === 0) {
    result.failed++;
    result.notes.push('no test ran');
  }
  return result;
}

interface GcovFile {
  file: string;
  lines: { line_number: number; count: number }[];
}

/** Percent of the engine's lines that the tests of build/<folder> executed, and the files with the least. */
export async function lineCoverage(
  root: string,
  folder: string,
): Promise<{ percent: number; files: { file: string; percent: number }[] } | string> {
  const target = path.join(root, 'build', folder);
  const data = globSync('**/*.gcda', { cwd: target });
  const ended = await runProgram('gcov', ['--json-format', '--stdout', ...data], {
    cwd: target,
    limitS: 120,
  });
  if (ended.ending !== null) return `gcov: ${ended.ending}\n${ended.all}`;
  const engine = path.join(root, 'native/engine/');
  const files = new Map<string, Map<number, boolean>>();
  for (const line of ended.stdout.split('\n')) {
    if (!line.startsWith('{')) continue;
    for (const one of (JSON.parse(line) as { files: GcovFile[] }).files) {
      const file = path.resolve(target, one.file);
      if (!file.startsWith(engine)) continue;
      const lines = files.get(file) ?? new Map<number, boolean>();
      files.set(file, lines);
      for (const { line_number, count } of one.lines) {
        lines.set(line_number, (lines.get(line_number) ?? false) || count > 0);
      }
    }
  }
  let all = 0;
  let hit = 0;
  const list: { file: string; percent: number }[] = [];
  for (const [file, lines] of files) {
    const executed = [...lines.values()].filter(Boolean).length;
    all += lines.size;
    hit += executed;
    list.push({ file: path.relative(root, file), percent: (100 * executed) / lines.size });
  }
  if (all === 0) return 'gcov saw no line of native/engine';
  return { percent: (100 * hit) / all, files: list.sort((a, b) => a.percent - b.percent) };
}

/** Forgets what earlier runs of build/<folder> counted. */
export function forgetCoverage(root: string, folder: string): void {
  const target = path.join(root, 'build', folder);
  for (const file of globSync('**/*.gcda', { cwd: target })) rmSync(path.join(target, file));
}
