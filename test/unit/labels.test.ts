import fc from 'fast-check';
import t from 'tap';
import { sweepLabels } from '../../controller/act/sweep.ts';
import { KubeError } from '../../controller/cluster/index.ts';
import {
  candidateLabel,
  isVolumeLabel,
  labelChanges,
  labelId,
  orphanLabels,
  roleLabel,
} from '../../controller/plan/labels.ts';

const P = 'simple-volume.shipstuff.io/';
const NAME = /^[A-Za-z0-9]([-A-Za-z0-9_.]{0,61}[A-Za-z0-9])?$/;
const node = (name: string, labels: Record<string, string> = {}) => ({ name, labels });

t.test('short names are whole', (t) => {
  t.equal(roleLabel('default', 'world'), `${P}default.world-role`);
  t.equal(candidateLabel('default', 'world'), `${P}default.world-candidate`);
  t.end();
});

t.test('B12/D40: long names that share a prefix get different labels', (t) => {
  const zero = labelId('production', 'data-minecraft-survival-server-with-many-mods-0');
  const one = labelId('production', 'data-minecraft-survival-server-with-many-mods-1');
  t.not(zero, one);
  t.ok(zero.length <= 53);
  const long = 'x'.repeat(253);
  t.match(roleLabel('n', long).slice(P.length), NAME);
  t.match(candidateLabel('n'.repeat(63), long).slice(P.length), NAME);
  t.not(labelId('a', `${'b'.repeat(60)}.c`), labelId('a', `${'b'.repeat(60)}.d`));
  // A claim that is named like the shortened name of another one is still another one.
  t.not(labelId(zero.slice(0, zero.indexOf('.')), zero.slice(zero.indexOf('.') + 1).replace('_', '-')), zero);
  t.end();
});

t.test('property: different claims have different, valid labels', (t) => {
  const label = fc.stringMatching(/^[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?$/);
  const name = fc.oneof(
    label,
    fc.array(label, { minLength: 2, maxLength: 4 }).map((parts) =>
      parts
        .join('.')
        .slice(0, 250)
        .replace(/[.-]+$/, ''),
    ),
    fc.constantFrom('a', 'b').map((end) => `${'same-long-prefix-'.repeat(4)}${end}`),
  );
  const seen = new Map<string, string>();
  fc.assert(
    fc.property(fc.oneof(label, fc.constant('pool')), name, (namespace, claim) => {
      const id = labelId(namespace, claim);
      if (!NAME.test(`${id}-candidate`) || !NAME.test(`${id}-role`)) throw new Error(id);
      const before = seen.get(id);
      if (before !== undefined && before !== `${namespace}/${claim}`)
        throw new Error(`${before} is ${id} too`);
      seen.set(id, `${namespace}/${claim}`);
    }),
    { numRuns: 5000, seed: 11 },
  );
  t.ok(seen.size > 2000);
  t.end();
});

t.test('a label of a pool is no label of a volume, whatever namespace and claim are called', (t) => {
  t.not(roleLabel('pool', 'x'), `${P}pool.x-role`);
  t.same(
    orphanLabels([node('a', { [`${P}pool.x-candidate`]: 'true', [`${P}pool.y-role`]: 'active' })], new Set()),
    [],
  );
  t.equal(isVolumeLabel(`${P}pool.x-candidate`), false);
  t.equal(isVolumeLabel(roleLabel('default', 'world')), true);
  t.end();
});

t.test('exactly one node is called active, copies are candidates, the rest is taken away', (t) => {
  const role = roleLabel('d', 'w');
  const candidate = candidateLabel('d', 'w');
  const nodes = [
    node('a', { [role]: 'active', [candidate]: 'true', other: 'x' }),
    node('b', { [candidate]: 'true' }),
    node('c', { [candidate]: 'true' }),
    node('d', { [role]: 'yes' }),
  ];
  t.same(labelChanges('d', 'w', { active: 'b', candidates: ['a', 'b'] }, nodes), [
    { node: 'a', labels: { [role]: null } },
    { node: 'b', labels: { [role]: 'active' } },
    { node: 'c', labels: { [candidate]: null } },
    { node: 'd', labels: { [role]: null } },
  ]);
  t.same(labelChanges('d', 'w', { active: 'a', candidates: ['a', 'b'] }, nodes.slice(0, 2)), []);
  t.end();
});

t.test('B13/H6: labels of volumes that are deleted or not replicated any more are removed', (t) => {
  const nodes = [
    node('a', {
      [roleLabel('d', 'w')]: 'active',
      [roleLabel('d', 'gone')]: 'active',
      'example.com/x-role': 'active',
    }),
    node('b', { [candidateLabel('d', 'gone')]: 'true', [`${P}my.own-role`]: 'something else' }),
    node('c', { [candidateLabel('n'.repeat(60), 'long-gone')]: 'true' }),
  ];
  t.same(orphanLabels(nodes, new Set([labelId('d', 'w')])), [
    { node: 'a', labels: { [roleLabel('d', 'gone')]: null } },
    { node: 'b', labels: { [candidateLabel('d', 'gone')]: null } },
    { node: 'c', labels: { [candidateLabel('n'.repeat(60), 'long-gone')]: null } },
  ]);
  t.same(labelChanges('d', 'w', { active: null, candidates: [] }, nodes), [
    { node: 'a', labels: { [roleLabel('d', 'w')]: null } },
  ]);
  t.end();
});

t.test('H6: a sweep takes off what nobody knows, and goes on when a node is gone or refuses', async (t) => {
  const nodes = [
    node('a', { [roleLabel('d', 'w')]: 'active', [roleLabel('d', 'gone')]: 'active' }),
    node('b', { [candidateLabel('d', 'gone')]: 'true' }),
    node('c', { [candidateLabel('d', 'gone')]: 'true', [`${P}pool.default`]: 'true' }),
    node('d', { [candidateLabel('d', 'w')]: 'true', 'kubernetes.io/hostname': 'd' }),
  ];
  const patches: [string, unknown][] = [];
  const warned: string[] = [];
  const logger = { info() {}, warn: (_: object, text: string) => void warned.push(text) };
  const kube = {
    merge: async (_: unknown, { name }: { name: string }, patch: unknown) => {
      if (name === 'a') throw new KubeError('NotFound', 'gone');
      if (name === 'b') throw new KubeError('ServerError', 'not now');
      patches.push([name, patch]);
      return {} as never;
    },
  };
  t.equal(await sweepLabels(kube, nodes, ['d/w', 'other/claim'], logger), 1);
  t.same(patches, [['c', { metadata: { labels: { [candidateLabel('d', 'gone')]: null } } }]]);
  t.equal(warned.length, 1);
  const led = { merge: () => Promise.reject(new KubeError('NotLeader', 'no more')) };
  await t.rejects(sweepLabels(led, nodes, ['d/w'], logger), new KubeError('NotLeader', 'no more'));
});
