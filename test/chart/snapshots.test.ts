/**
 * What the chart renders, as text that a reviewer can read: the default in whole, other sets of values and each value
 * alone as what they change. `npm run snapshots` writes them anew; the difference belongs into the same commit.
 */
import { existsSync, readFileSync, writeFileSync } from 'node:fs';
import path from 'node:path';
import t from 'tap';
import { noKube } from '../kube/harness/programs.ts';
import {
  CHART,
  changes,
  leavesOf,
  ONLY_WITH,
  otherValue,
  parse,
  SETS,
  SNAPSHOTS,
  settable,
  steady,
  template,
} from './rendering.ts';

const skip = noKube(['helm']);
const write = process.env.SIMPLE_VOLUME_SNAPSHOTS === 'write';

function same(
  t: { equal(found: string, wanted: string, name: string): boolean },
  file: string,
  text: string,
): void {
  const full = path.join(SNAPSHOTS, file);
  if (write) writeFileSync(full, text);
  t.equal(existsSync(full) ? readFileSync(full, 'utf8') : '', text, `${file} (npm run snapshots)`);
}

t.test('sets of values', { skip }, async (t) => {
  const plain = template();
  same(t, 'default.yaml', steady(plain));
  for (const [name, values] of Object.entries(SETS)) {
    if (name === 'default') continue;
    same(t, `${name}.txt`, `${changes(plain, template(values)).join('\n')}\n`);
  }
});

t.test('every value has an effect, and this is it (I6)', { skip }, async (t) => {
  const values = parse(readFileSync(path.join(CHART, 'values.yaml'), 'utf8'))[0];
  const leaves = leavesOf(values);
  const plain = template();
  const parts: string[] = [];
  for (const leaf of leaves) {
    const other = otherValue(leaf);
    if (other === undefined) {
      t.fail(`${leaf} of values.yaml has no case in test/chart/rendering.ts`);
      continue;
    }
    const base = ONLY_WITH[leaf];
    const changed = changes(base ? template(base) : plain, template({ ...base, [settable(leaf)]: other }));
    t.ok(changed.length > 0, `${leaf} changes something`);
    parts.push(`${leaf}\n${changed.map((one) => `  ${one}\n`).join('')}`);
  }
  same(t, 'values.txt', parts.join('\n'));
});
