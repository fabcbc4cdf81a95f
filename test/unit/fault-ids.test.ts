/**
 * Faults and bugs that systems like this one are known for have numbers. Each number has a test that would show the
 * fault, and stands in that test's name. This test holds the list, so that none is lost when tests are moved or renamed.
 */
import { readdirSync, readFileSync } from 'node:fs';
import { join } from 'node:path';
import t from 'tap';

const ROOT = join(import.meta.dirname, '../..');
const range = (part: string, from: number, to: number, without: number[] = []): string[] =>
  Array.from({ length: to - from + 1 }, (_, i) => from + i)
    .filter((n) => !without.includes(n))
    .map((n) => `${part}${n}`);

/** A data loss, B failover and scheduling, C watching and staging, G CSI, H scale; D public bug reports. */
const IDS = [
  ...range('A', 1, 30),
  ...range('B', 1, 22),
  ...range('C', 1, 17),
  ...range('D', 1, 46, [8, 24, 29, 36, 39, 43, 44]),
  ...range('H', 1, 7),
  'F7',
  ...range('G', 1, 14),
  'I1',
  'I2',
];
/** What cannot be shown yet, and why. */
const NOT_YET: Readonly<Record<string, string>> = {
  D42: 'fsGroup on many files: needs kubelet',
};

const NAMES = {
  '.ts': [
    /\btest\(\s*'((?:\\.|[^'\\])*)'/g,
    /\btest\(\s*"((?:\\.|[^"\\])*)"/g,
    /\btest\(\s*`((?:\\.|[^`\\])*)`/g,
    // rows of a table of cases
    /\bname:\s*'((?:\\.|[^'\\])*)'/g,
    /\bname:\s*"((?:\\.|[^"\\])*)"/g,
  ],
  '.cc': [/\bTEST(?:_F|_P)?\(\s*\w+,\s*(\w+)\s*\)/g],
};

/** Id -> the files in which a test names it. */
function named(): Map<string, Set<string>> {
  const found = new Map<string, Set<string>>();
  for (const folder of ['test', 'native/test'])
    for (const file of readdirSync(join(ROOT, folder), { recursive: true, encoding: 'utf8' })) {
      const ext = file.endsWith('.ts') ? '.ts' : file.endsWith('.cc') ? '.cc' : null;
      if (ext === null || file.includes('node_modules') || file.endsWith('fault-ids.test.ts')) continue;
      const text = readFileSync(join(ROOT, folder, file), 'utf8');
      for (const pattern of NAMES[ext])
        for (const [, name] of text.matchAll(pattern))
          for (const [id] of (name as string)
            .replaceAll('_', ' ')
            .matchAll(/(?<![A-Za-z0-9.])[A-I]\d{1,2}(?![0-9A-Za-z])/g)) {
            if (!found.has(id)) found.set(id, new Set());
            found.get(id)?.add(`${folder}/${file}`);
          }
    }
  return found;
}

t.test('every known fault has a test that is named after it', (t) => {
  const found = named();
  const missing = IDS.filter((id) => !found.has(id) && !(id in NOT_YET));
  t.strictSame(missing, [], `no test is named after: ${missing.join(', ')}`);
  for (const [id, why] of Object.entries(NOT_YET))
    t.notOk(found.has(id), `${id} is named by a test: take it off the list of what is missing (${why})`);
  t.end();
});
