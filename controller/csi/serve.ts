/** The CSI Controller service, on a unix socket of the controller's pod. Every replica serves; only its own provisioner asks. */
import { ControllerService } from '../../csi/controller/service.ts';
import { type GrpcServer, serve } from '../../csi/grpc.ts';
import { identityService } from '../../csi/identity.ts';
import { volumeId } from '../../csi/volume-id.ts';
import type { Logger, VolumeName } from '../../lib/core/parts.ts';
import type { Agents } from '../act/agents.ts';
import type { Kube } from '../cluster/index.ts';
import { csiCluster, type KnownWorld } from './cluster.ts';

/** Makes a volume larger as a call of ControllerExpandVolume does. */
export function expander(
  kube: Pick<Kube, 'list'>,
  world: KnownWorld,
  agents: Agents,
  log: Logger,
): (name: VolumeName, bytes: number) => Promise<number> {
  const service = new ControllerService(csiCluster(kube, world, agents), log);
  return async (name, bytes) => {
    const request = {
      volume_id: volumeId(name),
      capacity_range: { required_bytes: `${bytes}`, limit_bytes: '0' },
      secrets: {},
      volume_capability: null,
    };
    const { capacity_bytes } = (await service.expand(request)) as { capacity_bytes: string };
    return Number(capacity_bytes);
  };
}

export function serveCsi(
  endpoint: string,
  version: string,
  kube: Pick<Kube, 'list'>,
  world: KnownWorld,
  agents: Agents,
  log: Logger,
): Promise<GrpcServer> {
  const cluster = csiCluster(kube, world, agents);
  return serve(
    endpoint,
    [identityService(version, () => cluster.problem()), new ControllerService(cluster, log).service()],
    log,
  );
}
