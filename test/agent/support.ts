/** What the tests with real agents share: trees of data, comparisons, the parts of a request that they repeat. */
import fs from 'node:fs';
import path from 'node:path';
import type { ReplicaStatus, SourceStatus, VolumeName } from '../../lib/core/parts.ts';
import { AgentRefusal, type LocalAgent, type LocalCluster } from '../../lib/local/cluster.ts';
import { compareTrees, readTree } from '../../lib/local/tree.ts';
import { xattrReader } from '../cases/support.ts';

export const tree = (root: string): ReturnType<typeof readTree> =>
  readTree(root, xattrReader(Buffer.from(root)));

/** What differs between the volume's tree on two nodes; empty: nothing. */
export async function differences(
  cluster: LocalCluster,
  volume: VolumeName,
  from: string,
  to: string,
): Promise<string[]> {
  return compareTrees(
    await tree(cluster.agent(from).live(volume)),
    await tree(cluster.agent(to).live(volume)),
  );
}

export const source = async (agent: LocalAgent, volume: VolumeName): Promise<SourceStatus> => {
  const status = await agent.status(volume);
  if (status?.role !== 'active') throw new Error(`${agent.node} is not active: ${JSON.stringify(status)}`);
  return status;
};

export const replica = async (agent: LocalAgent, volume: VolumeName): Promise<ReplicaStatus> => {
  const status = await agent.status(volume);
  if (status?.role !== 'replica') throw new Error(`${agent.node} is no replica: ${JSON.stringify(status)}`);
  return status;
};

/** Files with contents that do not repeat. */
export function fill(root: string, files: number, bytes: number, seed = 1): void {
  let state = seed >>> 0 || 1;
  const block = Buffer.alloc(bytes);
  for (let i = 0; i < files; i++) {
    for (let at = 0; at + 4 <= bytes; at += 4) {
      state ^= state << 13;
      state ^= state >>> 17;
      state ^= state << 5;
      block.writeUInt32LE(state >>> 0, at);
    }
    const file = path.join(root, `d${i % 10}`, `f${i}`);
    fs.mkdirSync(path.dirname(file), { recursive: true });
    fs.writeFileSync(file, block);
  }
}

/** The refusal of a call that must be refused. */
export async function refusal(call: Promise<unknown>): Promise<AgentRefusal> {
  try {
    await call;
  } catch (error) {
    if (error instanceof AgentRefusal) return error;
    throw error;
  }
  throw new Error('the call was not refused');
}

/** Body of a sync request that names `from` as the source. */
export const syncBody = (
  from: LocalAgent,
  volume: VolumeName,
  epoch: number,
  generation: string | null = null,
): object => ({
  ...volume,
  epoch,
  generation,
  source: { url: from.url, webdavUrl: from.webdavUrl, token: from.token, node: from.node },
});
