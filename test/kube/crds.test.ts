/** The CRDs on a real API server: what it takes, what it refuses, and what people see. */
import path from 'node:path';
import t from 'tap';
import { noKube } from './harness/programs.ts';
import { KubeServer } from './harness/server.ts';

const CRDS = path.join(import.meta.dirname, '../../chart/crds');
const NOW = '2026-01-02T03:04:05Z';

type Fields = Record<string, unknown>;

function volume(name: string, spec: Fields = {}): Fields & { spec: Fields } {
  return {
    apiVersion: 'storage.shipstuff.io/v1alpha1',
    kind: 'SimpleVolume',
    metadata: { name, namespace: 'default' },
    spec: { claimName: name, volumeName: 'pvc-1', storageClassName: 'fast', pool: 'default', ...spec },
  };
}

t.test('SimpleVolume and ClusterSimpleVolume', { skip: noKube() }, async (t) => {
  const server = await KubeServer.start({ crds: [CRDS] });
  t.teardown(() => server.stop());

  const create = (object: object): Promise<string> =>
    server.kubectl(['create', '--validate=strict', '-f', '-'], { input: JSON.stringify(object) });
  const patch = (name: string, body: object, subresource: string | null = 'status'): Promise<string> =>
    server.kubectl([
      'patch',
      'sv',
      name,
      '--type=merge',
      '-p',
      JSON.stringify(body),
      ...(subresource ? [`--subresource=${subresource}`] : []),
    ]);
  const status = (name: string, body: Fields): Promise<string> => patch(name, { status: body });

  await t.test('a whole object is taken and kept as it is', async (t) => {
    const policy = {
      replicationEnabled: true,
      includePaths: ['saves/**', 'server.json'],
      excludePaths: ['downloads/**'],
      pruneExcluded: false,
      debounce: '1m30s',
      consistencyMode: 'shadow',
      confirmedReplicas: 1,
      replicas: 2,
      fullSyncOnStart: false,
      fullSyncSchedule: '0 4 * * 0',
      requiredPaths: ['server.json'],
      ownerUid: 1000,
      ownerGid: 4294967294,
      fileMode: '0644',
      dirMode: '2775',
      failoverEnabled: true,
      gracePeriod: '500ms',
      maxStaleness: '1.5h',
      nodePriority: ['node-a', 'node-b.example.org'],
      fencing: 'lease',
    };
    await create(volume('whole', { policy }));
    const written = {
      observedGeneration: 1,
      phase: 'Active',
      activeNode: 'node-b',
      previousActiveNode: 'node-a',
      epoch: 2,
      generation: '2-41',
      replicasSummary: '2/2',
      freshAt: NOW,
      promotion: {
        epoch: 2,
        from: 'node-a',
        to: 'node-b',
        reason: 'NODE_LOST',
        planned: false,
        decidedAt: NOW,
        done: ['labels', 'pods'],
        leftBehind: '1-43 of node-a',
      },
      promotable: { version: 3, nodes: ['node-c'], adding: ['node-a'] },
      replicas: [
        {
          node: 'node-c',
          state: 'idle',
          generation: '2-41',
          freshAgeSeconds: 1,
          observedAt: NOW,
          message: '',
        },
        { node: 'node-a', state: 'error', observedAt: NOW },
      ],
      conditions: [
        { type: 'Ready', status: 'True', reason: 'AllWell', message: '', lastTransitionTime: NOW },
      ],
      lastFullSync: {
        id: 'f1',
        trigger: 'Manual',
        startedAt: NOW,
        endedAt: NOW,
        outcome: 'done',
        message: '',
      },
      nextFullSync: NOW,
      wouldFailOverTo: 'node-c',
      refused: [{ node: 'node-a', cause: 'STALE', message: 'too old' }],
    };
    await status('whole', written);
    const kept = JSON.parse(await server.kubectl(['get', 'sv', 'whole', '-o', 'json'])) as Fields;
    t.strictSame(kept.status, written);
    t.strictSame((kept.spec as Fields).policy, policy);
  });

  await t.test('the list reads like a dashboard', async (t) => {
    const [head, row] = (await server.kubectl(['get', 'sv', 'whole'])).split('\n');
    t.strictSame(head?.trim().split(/\s+/), [
      'NAME',
      'ACTIVE',
      'EPOCH',
      'PHASE',
      'REPLICAS',
      'GENERATION',
      'FRESH',
      'FAILS-OVER-TO',
      'AGE',
    ]);
    t.match(row?.trim().split(/\s+/), [
      'whole',
      'node-b',
      '2',
      'Active',
      '2/2',
      '2-41',
      /^\d+d$/,
      'node-c',
      /s$/,
    ]);
    const wide = await server.kubectl(['get', 'simplevolumes', '-o', 'wide']);
    t.match(wide, /POOL\s+VOLUME\s+MOVED/);
    t.match(wide, /default\s+pvc-1\s+NODE_LOST/);
  });

  await t.test('names, enums, durations and numbers out of their range are refused by field', async (t) => {
    const bad: [string, Fields, RegExp][] = [
      ['the name of another claim', { claimName: 'other' }, /name of the claim/],
      ['no pool', { pool: undefined }, /spec\.pool/],
      ['a pool that is no label', { pool: '../etc' }, /spec\.pool/],
      ['a volume name that is a path (D40)', { volumeName: '../x' }, /spec\.volumeName/],
      ['a duration without a unit (D41)', { policy: { debounce: '5' } }, /policy\.debounce/],
      ['a negative duration (D41)', { policy: { gracePeriod: '-1s' } }, /policy\.gracePeriod/],
      ['a duration that is a word (D41)', { policy: { maxStaleness: 'abc' } }, /policy\.maxStaleness/],
      ['a duration with an exponent (D41)', { policy: { maxStaleness: '1e9h' } }, /policy\.maxStaleness/],
      ['an unknown mode', { policy: { consistencyMode: 'both' } }, /consistencyMode/],
      ['unknown fencing', { policy: { fencing: 'maybe' } }, /fencing/],
      ['a mode that is not octal', { policy: { fileMode: '0648' } }, /fileMode/],
      ['a uid that is the reserved -1', { policy: { ownerUid: 4294967295 } }, /ownerUid/],
      ['a node name with a space', { policy: { nodePriority: ['a b'] } }, /nodePriority/],
      ['fewer than no replicas', { policy: { replicas: -1 } }, /replicas/],
      ['a field that nobody knows', { policy: { debonce: '2s' } }, /debonce/],
      ['force without a reason', { force: { action: 'Promote', node: 'a' } }, /reason/],
      ['Promote without a node', { force: { action: 'Promote', reason: 'r' } }, /node to promote/],
      ['LiftCondition without one', { force: { action: 'LiftCondition', reason: 'r' } }, /condition to lift/],
      ['an unknown action', { force: { action: 'Delete', reason: 'r' } }, /action/],
    ];
    for (const [what, spec, says] of bad) await t.rejects(create(volume('bad', spec)), says, what);
    t.match(
      await create(
        volume('forced', { force: { action: 'Promote', node: 'node-a', reason: 'disk is fine' } }),
      ),
      /created/,
    );
  });

  await t.test('which claim, volume and pool it is cannot be changed', async (t) => {
    await create(volume('fixed', { volumeName: '' }));
    await patch('fixed', { spec: { volumeName: 'pvc-9' } }, null);
    await t.rejects(patch('fixed', { spec: { volumeName: 'pvc-8' } }, null), /volumeName cannot be changed/);
    await t.rejects(patch('fixed', { spec: { claimName: 'x' } }, null), /claimName cannot be changed/);
    await t.rejects(patch('fixed', { spec: { pool: 'other' } }, null), /pool cannot be changed/);
  });

  await t.test('the epoch never falls, and never goes away', async (t) => {
    await create(volume('epochs'));
    await status('epochs', { epoch: 4, activeNode: 'node-a' });
    await t.rejects(status('epochs', { epoch: 3 }), /epoch never falls/);
    await t.rejects(patch('epochs', { status: { epoch: null } }), /epoch never falls/);
    await t.rejects(patch('epochs', { status: null }), /never/);
    await t.rejects(status('epochs', { epoch: -1 }), /epoch/);
    t.match(await status('epochs', { epoch: 5 }), /patched/);
    await patch('epochs', { status: { epoch: 0 } }, null);
    t.equal(
      await server.kubectl(['get', 'sv', 'epochs', '-o', 'jsonpath={.status.epoch}']),
      '5',
      'a write of the object leaves the status alone',
    );
  });

  await t.test(
    'another active node needs a higher epoch, and a promotion of that epoch to that node',
    async (t) => {
      await create(volume('active'));
      await status('active', { epoch: 1, activeNode: 'node-a' });
      await t.rejects(status('active', { activeNode: 'node-b' }), /higher status.epoch/);
      await t.rejects(status('active', { epoch: 2, activeNode: null }), /never goes away/);
      const promotion = {
        epoch: 2,
        from: 'node-a',
        to: 'node-b',
        reason: 'r',
        planned: true,
        decidedAt: NOW,
      };
      await t.rejects(status('active', { activeNode: 'node-b', promotion }), /must be status.epoch/);
      await t.rejects(status('active', { epoch: 2, promotion }), /must be status.activeNode/);
      t.match(await status('active', { epoch: 2, activeNode: 'node-b', promotion }), /patched/);
      await t.rejects(status('active', { epoch: 3, activeNode: 'node-c' }), /must be status.epoch/);
      await t.rejects(status('active', { activeNode: 'Node C', epoch: 3 }), /activeNode/);
    },
  );

  await t.test('the set of promotable nodes changes only with a higher version', async (t) => {
    await create(volume('sets'));
    await status('sets', { promotable: { version: 2, nodes: ['node-b'], adding: ['node-c'] } });
    await t.rejects(status('sets', { promotable: { version: 1 } }), /higher version/);
    await t.rejects(status('sets', { promotable: { nodes: [] } }), /higher version/);
    await t.rejects(status('sets', { promotable: null }), /never goes away/);
    t.match(
      await status('sets', { promotable: { version: 3, nodes: ['node-b', 'node-c'], adding: [] } }),
      /patched/,
    );
  });

  await t.test('values of the status are checked too', async (t) => {
    await create(volume('values'));
    const condition = { type: 'Ready', status: 'True', reason: 'Fine', message: '', lastTransitionTime: NOW };
    await t.rejects(status('values', { phase: 'Fine' }), /phase/);
    await t.rejects(status('values', { generation: '0-1' }), /generation/);
    await t.rejects(status('values', { replicasSummary: 'two' }), /replicasSummary/);
    await t.rejects(status('values', { freshAt: 'yesterday' }), /freshAt/);
    await t.rejects(status('values', { conditions: [{ ...condition, reason: 'not camel' }] }), /reason/);
    await t.rejects(status('values', { conditions: [condition, condition] }), /Duplicate/i);
    const twice = { node: 'node-a', state: 'idle', observedAt: NOW };
    await t.rejects(status('values', { replicas: [twice, twice] }), /Duplicate/i);
    t.match(await status('values', { replicas: [twice], conditions: [condition] }), /patched/);
  });

  await t.test('ClusterSimpleVolume: the mirror of a volume, also without its claim', async (t) => {
    const object = {
      apiVersion: 'storage.shipstuff.io/v1alpha1',
      kind: 'ClusterSimpleVolume',
      metadata: { name: 'pvc-1' },
      spec: { pool: 'default', claimRef: { namespace: 'games', name: 'world' } },
    };
    await create(object);
    const mirror = (body: Fields): Promise<string> =>
      server.kubectl([
        'patch',
        'csvol',
        'pvc-1',
        '--type=merge',
        '--subresource=status',
        '-p',
        JSON.stringify({ status: body }),
      ]);
    await mirror({ activeNode: 'node-a', epoch: 3, phase: 'Held', generation: '3-9', observedAt: NOW });
    const [head, row] = (await server.kubectl(['get', 'csvol'])).split('\n');
    t.match(head, /NAME\s+NAMESPACE\s+CLAIM\s+POOL\s+ACTIVE\s+EPOCH\s+PHASE\s+GENERATION\s+AGE/);
    t.match(row, /pvc-1\s+games\s+world\s+default\s+node-a\s+3\s+Held\s+3-9/);
    await t.rejects(mirror({ epoch: 2 }), /epoch never falls/);
    await t.rejects(mirror({ phase: 'Odd' }), /phase/);
    await t.rejects(create({ ...object, metadata: { name: 'pvc-2' }, spec: { pool: '' } }), /spec\.pool/);
    t.match(await create({ ...object, metadata: { name: 'pvc-3' }, spec: { pool: 'default' } }), /created/);
  });

  await t.test('every field explains itself', async (t) => {
    t.match(await server.kubectl(['explain', 'sv.status.epoch']), /Grows by one with each promotion/);
    t.match(await server.kubectl(['explain', 'csvol.spec.claimRef']), /claim that it is or was bound to/);
  });
});
