import t from 'tap';
import { Agents } from '../../../controller/act/agents.ts';
import { NODES, SIMPLE_VOLUMES } from '../../../controller/cluster/index.ts';
import type { Kube, KubeObject, Resource, WatchEvent } from '../../../controller/cluster/types.ts';
import { World } from '../../../controller/observe.ts';
import { candidateLabel, roleLabel } from '../../../controller/plan/labels.ts';
import { PREFIX } from '../../../controller/plan/types.ts';
import { FakeClock, settle, silent } from './fake.ts';

const node = (version: number, labels: Record<string, string>, ready = 'True'): KubeObject =>
  ({
    metadata: {
      name: 'n1',
      resourceVersion: String(version),
      labels: { [`${PREFIX}pool.default`]: 'true', ...labels },
    },
    status: { conditions: [{ type: 'Ready', status: ready }] },
  }) as KubeObject;

const volume = (name: string, active: string): KubeObject =>
  ({
    metadata: { namespace: 'default', name, resourceVersion: '1', uid: name },
    spec: { claimName: name, volumeName: `pv-${name}`, storageClassName: 'fast', pool: 'default' },
    status: { activeNode: active, epoch: 1 },
  }) as KubeObject;

/** A cluster whose lists are given and whose watches tell what the test tells. */
function clusterOf(lists: [Resource, KubeObject[]][]): {
  kube: Kube;
  tell: (kind: Resource, object: KubeObject) => Promise<void>;
} {
  const watches = new Map<string, (event: WatchEvent<KubeObject>) => void>();
  const kube = {
    page: async (kind: Resource) => ({
      items: lists.find(([one]) => one.plural === kind.plural)?.[1] ?? [],
      resourceVersion: '1',
      continue: null,
    }),
    watch: (
      kind: Resource,
      options: { signal: AbortSignal },
      event: (one: WatchEvent<KubeObject>) => void,
    ) => {
      watches.set(kind.plural, event);
      return new Promise<void>((_, reject) => {
        options.signal.addEventListener('abort', () => reject(new Error('stopped')));
      });
    },
  } as unknown as Kube;
  return {
    kube,
    async tell(kind, object) {
      watches.get(kind.plural)?.({ type: 'MODIFIED', object });
      await settle();
    },
  };
}

t.test('a change of a node wakes whom it concerns', async (t) => {
  const { kube, tell } = clusterOf([
    [NODES as Resource, [node(1, {})]],
    [SIMPLE_VOLUMES as Resource, [volume('here', 'n1'), volume('there', 'n2')]],
  ]);
  const clock = new FakeClock();
  const woken: string[] = [];
  const agents = new Agents({ clock, token: () => 'x' });
  const world = new World({
    kube,
    namespace: 'system',
    agents,
    clock,
    logger: silent,
    changed: (key, delayMs = 0) => woken.push(`${key} ${delayMs === 0 ? 'now' : 'soon'}`),
  });
  t.teardown(async () => {
    await world.stop();
    agents.close();
  });
  world.start();
  await world.whenSynced();
  const after = async (
    version: number,
    labels: Record<string, string>,
    ready?: string,
  ): Promise<string[]> => {
    woken.length = 0;
    await tell(NODES as Resource, node(version, labels, ready));
    return [...woken].sort();
  };
  const role = { [roleLabel('default', 'here')]: 'active' };
  const both = { ...role, [candidateLabel('default', 'there')]: 'true' };
  t.same(await after(2, role), ['default/here now'], 'the label of a volume: that volume, at once');
  t.same(await after(3, both), ['default/there now'], 'the same of one that is active elsewhere');
  t.same(await after(4, both), [], 'a heartbeat: nobody');
  t.same(await after(5, role), ['default/there now'], 'a label that is gone');
  t.same(
    await after(6, { ...role, disk: 'fast' }),
    ['default/here soon', 'default/there soon'],
    'a label that pods may ask for: all of its pool, soon',
  );
  t.same(
    await after(7, { ...role, disk: 'fast' }, 'Unknown'),
    ['default/here now', 'default/there soon'],
    'NotReady: its volumes at once',
  );
});
