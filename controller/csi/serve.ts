/** The CSI Controller service, on a unix socket of the controller's pod. Every replica serves; only its own provisioner asks. */
import { ControllerService } from '../../csi/controller/service.ts';
import { type GrpcServer, serve } from '../../csi/grpc.ts';
import { identityService } from '../../csi/identity.ts';
import type { Logger } from '../../lib/core/parts.ts';
import type { Agents } from '../act/agents.ts';
import type { Kube } from '../cluster/index.ts';
import { csiCluster, type KnownWorld } from './cluster.ts';

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
