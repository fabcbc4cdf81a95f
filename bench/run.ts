/**
 * npm run bench [-- names]: measures, prints a table with the targets beside it, writes bench/results.json.
 * Nothing here passes or fails: a figure that misses its target is shown as such.
 */
import { execFile } from 'node:child_process';
import { readFileSync, writeFileSync } from 'node:fs';
import { cpus, release, totalmem } from 'node:os';
import { join } from 'node:path';
import { fileURLToPath } from 'node:url';
import { promisify } from 'node:util';
import { PROJECT } from '../lib/local/cluster.ts';
import { setUp } from '../lib/local/setup.ts';
import { type Figure, GIB, type Measure } from './lib/figure.ts';

/** In the order in which they are measured. Loaded one by one, so that asking for one does not need the others. */
const FIGURES: Record<string, () => Promise<{ figure: Figure }>> = {
  'write-to-visible': () => import('./write-to-visible.ts'),
  'first-copy': () => import('./first-copy.ts'),
  'one-percent': () => import('./one-percent.ts'),
  'at-rest': () => import('./at-rest.ts'),
  'seed-memory': () => import('./seed-memory.ts'),
  failover: () => import('./failover.ts'),
  move: () => import('./move.ts'),
  controller: () => import('./controller.ts'),
  cluster: () => import('./cluster.ts'),
};
/** Needs root and programs that take ten minutes to build: asked for by name (npm run bench:cluster). */
const BY_NAME_ONLY = ['cluster'];

interface Done {
  name: string;
  title: string;
  method: string;
  measures: Measure[];
  error?: string;
}

const shown = (measure: Measure): string =>
  `${measure.value.toFixed(measure.unit === 's' ? 2 : 1)} ${measure.unit}`;

function print(done: Done): void {
  process.stdout.write(`\n${done.name}: ${done.title}\n`);
  if (done.error !== undefined) process.stdout.write(`  failed: ${done.error}\n`);
  for (const measure of done.measures) {
    const target =
      measure.target === undefined
        ? ''
        : `${measure.value <= measure.target ? 'within' : 'MISSES'} ${measure.target} ${measure.unit}`;
    process.stdout.write(
      `  ${measure.name.padEnd(42)} ${shown(measure).padStart(12)}   ${target.padEnd(18)} ${measure.note ?? ''}`.trimEnd() +
        '\n',
    );
  }
}

const names = process.argv.slice(2);
const unknown = names.filter((name) => FIGURES[name] === undefined);
if (unknown.length > 0 || names.includes('--help')) {
  process.stderr.write(
    `figures: ${Object.keys(FIGURES).join(', ')} (default: all but ${BY_NAME_ONLY.join(', ')})\n`,
  );
  process.exit(2);
}
await setUp((text) => process.stderr.write(`${text}\n`));
// What is measured is what is shipped: from the sources an agent holds 15 MiB more.
await promisify(execFile)(process.execPath, [join(PROJECT, 'lib/build.mjs')]);
const results: Done[] = [];
for (const name of names.length > 0
  ? names
  : Object.keys(FIGURES).filter((one) => !BY_NAME_ONLY.includes(one))) {
  const { figure } = await (FIGURES[name] as () => Promise<{ figure: Figure }>)();
  const done: Done = { name, title: figure.title, method: figure.method, measures: [] };
  try {
    done.measures = await figure.run((text) => process.stderr.write(`  ${name}: ${text}\n`));
  } catch (error) {
    done.error = error instanceof Error ? error.message : String(error);
    process.exitCode = 1;
  }
  results.push(done);
  print(done);
}
const machine = {
  cpu: cpus()[0]?.model ?? 'unknown',
  cores: cpus().length,
  memoryGiB: Math.round(totalmem() / GIB),
  kernel: release(),
  node: process.version,
  arch: process.arch,
};
const file = fileURLToPath(new URL('results.json', import.meta.url));
let before: Done[] = [];
try {
  before = (JSON.parse(readFileSync(file, 'utf8')) as { figures: Done[] }).figures;
} catch {
  // The first run, or a file of another shape: it is written anew.
}
// A run of some figures keeps what an earlier one found of the others.
const all = Object.keys(FIGURES).flatMap((name) => {
  const found = results.find((one) => one.name === name) ?? before.find((one) => one.name === name);
  return found === undefined ? [] : [found];
});
writeFileSync(
  file,
  `${JSON.stringify({ measuredAt: new Date().toISOString(), machine, figures: all }, null, 2)}\n`,
);
process.stdout.write(`\nwritten: bench/results.json\n`);
