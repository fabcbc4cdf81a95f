/** csi-node as a whole: what is kept, who is asked, who is served, and in which order. */
import { existsSync, mkdirSync, readFileSync, renameSync, writeFileSync } from 'node:fs';
import path from 'node:path';
import { giveBackMemory } from '../lib/agent/garbage.ts';
import type { Logger } from '../lib/core/parts.ts';
import { native } from '../lib/native/load.ts';
import type { CsiNodeConfig } from './config.ts';
import { DRIVER } from './driver.ts';
import { AgentSocket } from './freeze/agent-client.ts';
import { bootClock } from './freeze/boot-clock.ts';
import { findHierarchy, findPodCgroup, probeFreezer } from './freeze/cgroup.ts';
import { type GrpcServer, serve } from './grpc.ts';
import { type Health, serveHealth } from './health.ts';
import { identityService } from './identity.ts';
import { type Mounter, systemMounter } from './node/mounter.ts';
import { NodeService } from './node/node.ts';
import type { About } from './node/pool-agent.ts';
import { Records } from './node/records.ts';
import { registrationService } from './registration.ts';

/** After a start that is over by then. */
const AT_REST_MS = 15_000;

export interface CsiNode {
  endpoint: string;
  /** port of /healthz and /readyz */
  health: number | null;
  stop(): Promise<void>;
}

/** Which agent serves which pool, kept: after a restart it is known before the agent answers. */
function readPools(file: string): Record<string, About> {
  try {
    return existsSync(file) ? (JSON.parse(readFileSync(file, 'utf8')) as Record<string, About>) : {};
  } catch {
    return {}; // asked anew
  }
}

export async function startCsiNode(
  config: CsiNodeConfig,
  version: string,
  log: Logger,
  options: { mounter?: Mounter; waitMs?: number } = {},
): Promise<CsiNode> {
  mkdirSync(config.stateDir, { recursive: true, mode: 0o700 });
  const poolsFile = path.join(config.stateDir, 'pools.json');
  const pools = readPools(poolsFile);
  const freezer = probeFreezer(config.cgroupDir);
  log.info({ ...freezer }, freezer.possible ? 'pods can be stopped' : 'pods cannot be stopped');
  const service = new NodeService({
    node: config.node,
    kubeletDir: config.kubeletDir,
    agents: config.agentSockets.map((file) => ({
      socket: new AgentSocket(file),
      known: pools[file] ?? null,
    })),
    records: new Records(path.join(config.stateDir, 'publishes'), log),
    mounter: options.mounter ?? systemMounter,
    clock: bootClock,
    bootId: readFileSync('/proc/sys/kernel/random/boot_id', 'utf8').trim(),
    freezer,
    find: (uid) => {
      const hierarchy = findHierarchy(config.cgroupDir);
      if (!hierarchy) throw new Error(`no cgroup hierarchy with a freezer below ${config.cgroupDir}`);
      return findPodCgroup(hierarchy, uid);
    },
    limit: (tree, bytes, others) =>
      native.limitTree(Buffer.from(tree), bytes, bytes === 0 ? [] : others().map((one) => Buffer.from(one))),
    log,
    ...(options.waitMs === undefined ? {} : { waitMs: options.waitMs }),
  });
  const remember = (): void => {
    const known = service.pools();
    writeFileSync(
      `${poolsFile}.tmp`,
      JSON.stringify(
        Object.fromEntries(config.agentSockets.flatMap((file, i) => (known[i] ? [[file, known[i]]] : []))),
      ),
    );
    renameSync(`${poolsFile}.tmp`, poolsFile);
  };
  const stopping = new AbortController();
  service.start();
  const servers: GrpcServer[] = [];
  let registrar: GrpcServer | null = null;
  let registered = config.registrationDir === null;
  let health: Health | null = null;
  let atRest: NodeJS.Timeout | undefined;
  const stop = async (): Promise<void> => {
    stopping.abort();
    clearTimeout(atRest);
    await health?.close();
    await Promise.all([...servers, ...(registrar ? [registrar] : [])].map((one) => one.close()));
    await service.stop();
  };
  try {
    servers.push(
      await serve(
        config.endpoint,
        [identityService(version, () => service.problem()), service.service()],
        log,
      ),
    );
    if (config.health !== null)
      health = await serveHealth(config.health, () =>
        // Where there is no pool there is nothing to be ready for.
        service.problem() !== null || registered ? null : 'kubelet has not registered the driver yet',
      );
  } catch (error) {
    await stop();
    throw error;
  }
  // kubelet asks for the node's pools when it sees the socket, and once; for another pool it has to see a new one.
  const announce = async (): Promise<void> => {
    remember();
    if (config.registrationDir === null) return;
    await registrar?.close();
    registrar = null;
    if (stopping.signal.aborted) return;
    registrar = await serve(
      path.join(config.registrationDir, `${DRIVER}-reg.sock`),
      [
        registrationService(config.endpoint, log, (done) => {
          registered = done;
        }),
      ],
      log,
    );
  };
  void service
    .learn(stopping.signal, announce)
    .catch((error: Error) => log.error({ err: error }, 'kubelet is not told of the driver'));
  atRest = setTimeout(() => void giveBackMemory(native).catch(() => undefined), AT_REST_MS).unref();
  return { endpoint: config.endpoint, health: health?.port ?? null, stop };
}
