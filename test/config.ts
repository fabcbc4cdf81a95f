/** What the gate (test/run.ts) asks for, in one place. */
import os from 'node:os';

/** Tools and headers of the C++ builds. `file` is how one sees that the package is there. */
export const BUILD_PACKAGES: readonly { name: string; file: string }[] = [
  { name: 'g++', file: '/usr/bin/g++' },
  { name: 'make', file: '/usr/bin/make' },
  { name: 'cmake', file: '/usr/bin/cmake' },
  { name: 'ninja-build', file: '/usr/bin/ninja' },
  { name: 'libgtest-dev', file: '/usr/include/gtest/gtest.h' },
];

/** Programs at the same time. */
export const SLOTS = Math.min(4, Math.max(2, os.availableParallelism()));

/** Seconds that one test file may take, by the start of its path; the first match counts. */
export const TIME_LIMITS_S: readonly { under: string; seconds: number }[] = [
  { under: 'test/unit/', seconds: 120 },
  { under: 'test/real/', seconds: 300 },
  { under: 'test/image/', seconds: 900 },
  { under: 'test/kube', seconds: 300 },
  { under: 'test/chart/', seconds: 420 },
  { under: 'test/cluster/claims.test.ts', seconds: 1500 },
  { under: 'test/cluster/', seconds: 1200 },
  { under: 'test/', seconds: 180 },
];

/** Seconds that one build may take. */
export const BUILD_LIMIT_S = 1800;
/** Seconds that the C++ tests may take. */
export const CPP_LIMIT_S = 900;

/** GoogleTest filter of `npm run test:unit`. */
export const QUICK_CPP_TESTS = '-*Storm*:*Random*:*Crash*:*Fuzz*:*D25_*:*C3_*';

/** Least part of lines that the tests must execute, in percent. */
export const MINIMUM_COVERAGE = {
  /** native/engine, by the C++ tests alone. */
  cpp: 90,
  /** lib and controller, by the TypeScript tests and the processes that they start. */
  typescript: 85,
};

/** What TypeScript coverage counts. */
export const COVERAGE_INCLUDE: readonly string[] = ['lib/**/*.ts', 'controller/**/*.ts', 'csi/**/*.ts'];
/** Entry points and types without a line to execute, and the demonstration. */
export const COVERAGE_EXCLUDE: readonly string[] = [
  'lib/demo/**',
  'lib/**/types.ts',
  'controller/**/types.ts',
  'lib/core/parts.ts',
];
