/**
 * The cluster as the CSI Controller service sees it: nodes and volumes from the informers' copies, everything about data
 * from the agents themselves, asked anew each time. So it does not matter which replica of the controller is asked.
 */
import type { ClaimName, Holder, Lookup, VolumeCluster } from '../../csi/controller/cluster.ts';
import type { PoolSpace, VolumeName } from '../../lib/core/parts.ts';
import { type Agents, READ_MS, wasAnswered } from '../act/agents.ts';
import { CLAIMS, errorText, type Kube, type KubeObject, type Resource, VOLUMES } from '../cluster/index.ts';
import type { World } from '../observe.ts';
import { firstNode, type PlacementNode } from '../plan/placement.ts';
import { PREFIX } from '../plan/types.ts';

const SELECTED_NODE = 'volume.kubernetes.io/selected-node';

interface RecordReply {
  known: boolean;
  role: Holder['role'];
  epoch: number;
  bytes: number | null;
  watched: boolean;
}

/** What of the informers' copies is looked at. */
export type KnownWorld = {
  nodes: Pick<World['nodes'], 'get' | 'values'>;
  volumes: Pick<World['volumes'], 'get'>;
  synced: World['synced'];
};

/** One object as it is now; null: there is none. Asked by a list: the controller has no right to get single ones. */
async function current<T extends KubeObject>(
  kube: Pick<Kube, 'list'>,
  kind: Resource<T>,
  name: string,
  namespace?: string,
): Promise<T | null> {
  const options = {
    fieldSelector: `metadata.name=${name}`,
    ...(namespace === undefined ? {} : { namespace }),
  };
  for await (const one of kube.list(kind, options)) return one;
  return null;
}

export function csiCluster(kube: Pick<Kube, 'list'>, world: KnownWorld, agents: Agents): VolumeCluster {
  const inPool = (pool: string): string[] =>
    [...world.nodes.values()]
      .filter((one) => one.labels[`${PREFIX}pool.${pool}`] === 'true')
      .map((one) => one.name);
  const pools = (): string[] =>
    [
      ...new Set([
        ...agents.all().map((one) => one.pool),
        ...[...world.nodes.values()].flatMap((one) =>
          Object.entries(one.labels).flatMap(([key, value]) =>
            key.startsWith(`${PREFIX}pool.`) && value === 'true' ? [key.slice(`${PREFIX}pool.`.length)] : [],
          ),
        ),
      ]),
    ].sort();
  const query = ({ namespace, volume }: VolumeName): string =>
    `namespace=${encodeURIComponent(namespace)}&volume=${encodeURIComponent(volume)}`;
  const state = (pool: string, node: string): Promise<{ space: PoolSpace | null; volumes: number }> =>
    agents.call(pool, node, { path: '/replication/pool', timeoutMs: READ_MS });

  const candidates = async (pool: string): Promise<PlacementNode[]> => {
    const all = agents.all().filter((one) => one.pool === pool);
    return Promise.all(
      all.flatMap((agent) => {
        const node = world.nodes.get(agent.node);
        if (!node) return [];
        return [
          (async (): Promise<PlacementNode> => {
            let said: Awaited<ReturnType<typeof state>> | null = null;
            try {
              said = await state(pool, agent.node);
            } catch {
              // it does not answer: no node for anything new
            }
            return {
              ...node,
              inPool: node.labels[`${PREFIX}pool.${pool}`] === 'true',
              agentReady: agent.ready && said !== null,
              freeBytes: said?.space?.freeBytes ?? null,
              volumeCount: said?.volumes ?? 0,
            };
          })(),
        ];
      }),
    );
  };

  const cluster: VolumeCluster = {
    problem: () => (world.synced() ? null : 'the cluster has not been read yet'),
    pools,
    poolOf: ({ volume }) => world.volumes.get(volume)?.pool ?? null,
    async lookup(name, pool): Promise<Lookup> {
      const holders: Holder[] = [];
      const silent: Lookup['silent'] = [];
      await Promise.all(
        (pool === null ? pools() : [pool]).map(async (one) => {
          const addresses = agents.all().filter((agent) => agent.pool === one);
          for (const node of inPool(one))
            if (!addresses.some((agent) => agent.node === node))
              silent.push({ node, why: 'it has no agent' });
          await Promise.all(
            addresses.map(async ({ node }) => {
              try {
                const { known, role, epoch, bytes, watched } = await agents.call<RecordReply>(one, node, {
                  path: `/replication/volume/record?${query(name)}`,
                });
                if (known) holders.push({ pool: one, node, role, epoch, bytes, watched });
              } catch (error) {
                // A node that is not in the cluster any more is not waited for.
                if (world.nodes.get(node)) silent.push({ node, why: errorText(error) });
              }
            }),
          );
        }),
      );
      const byNode = (a: { node: string }, b: { node: string }): number => (a.node < b.node ? -1 : 1);
      return { holders: holders.sort(byNode), silent: silent.sort(byNode) };
    },
    async selectedNode({ namespace, name }: ClaimName) {
      // The informers' copy may be a moment behind, and the moment is now.
      const claim = await current(kube, CLAIMS, name, namespace);
      return claim?.metadata.annotations?.[SELECTED_NODE] ?? null;
    },
    async choose(pool, bytes, selected) {
      const nodes = await candidates(pool);
      if (selected !== null) {
        const node = nodes.find((one) => one.name === selected);
        // What the scheduler decided does not change with the weather: cordoned meanwhile is fine, no room is not.
        if (!node?.inPool)
          return { refused: `${selected}, where the pod is to run, is no node of pool ${pool}` };
        if (firstNode([{ ...node, unschedulable: false }], bytes) === selected) return { node: selected };
        return {
          refused: `${selected}, where the pod is to run, cannot take the volume: ${node.agentReady ? `pool ${pool} there has ${node.freeBytes ?? 'an unknown number of'} bytes free of ${bytes} that are asked for, or the node is not Ready` : 'its agent does not answer'}`,
        };
      }
      const node = firstNode(nodes, bytes);
      return node === null
        ? { refused: `no node of pool ${pool} is ready and has ${bytes} bytes free` }
        : { node };
    },
    async room(pool) {
      const nodes = await candidates(pool);
      return Math.max(0, ...nodes.flatMap((one) => (one.inPool && one.ready ? [one.freeBytes ?? 0] : [])));
    },
    create: (pool, node, { namespace, volume }, bytes) =>
      agents.call(pool, node, { path: '/replication/volume/create', body: { namespace, volume, bytes } }),
    async resize(pool, node, { namespace, volume }, bytes) {
      await agents.call(pool, node, {
        path: '/replication/volume/resize',
        body: { namespace, volume, bytes },
      });
    },
    async stopWatch(pool, node, { namespace, volume }, epoch) {
      try {
        await agents.call(pool, node, {
          path: '/replication/watch/stop',
          body: { namespace, volume, epoch },
        });
      } catch (error) {
        if (!wasAnswered(error) || !['NOT_ACTIVE', 'VOLUME_UNKNOWN'].includes(error.code)) throw error;
      }
    },
    async remove(pool, node, { namespace, volume }, epoch) {
      await agents.call(pool, node, {
        path: '/replication/volume/remove',
        body: { namespace, volume, epoch, evenActive: true, backups: true },
      });
    },
    async keeps({ volume }) {
      const pv = await current(kube, VOLUMES, volume);
      if (pv === null) return null;
      const { metadata, spec, status } = pv;
      if (spec?.persistentVolumeReclaimPolicy === 'Retain')
        return `PersistentVolume ${metadata.name} says Retain: its data is kept`;
      const ref = spec?.claimRef;
      if (!ref?.namespace || !ref.name || status?.phase === 'Released') return null;
      const claim = await current(kube, CLAIMS, ref.name, ref.namespace);
      return claim !== null && claim.metadata.uid === ref.uid
        ? `claim ${ref.namespace}/${ref.name} still has PersistentVolume ${metadata.name}`
        : null;
    },
  };
  return cluster;
}
