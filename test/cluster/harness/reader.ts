/**
 * Reads from the API server by the client of the controller, over connections that stay open. A kubectl takes a tenth of
 * a second of one of the two cores each time, and whoever waits for something asks often.
 */
import {
  CLAIMS,
  EVENTS,
  LEASES,
  NODES,
  PODS,
  SECRETS,
  SIMPLE_VOLUMES,
  STATEFUL_SETS,
  VOLUMES,
} from '../../../controller/cluster/index.ts';
import type { Kube, Resource } from '../../../controller/cluster/types.ts';
import { kubeOf } from '../../kube/helpers.ts';

// biome-ignore lint/suspicious/noExplicitAny: as the API gives it
export type Read = any;

/** As kubectl is told them. */
const KINDS: Readonly<Record<string, Resource<Read>>> = {
  node: NODES,
  nodes: NODES,
  pod: PODS,
  pods: PODS,
  pvc: CLAIMS,
  pv: VOLUMES,
  lease: LEASES,
  events: EVENTS,
  secret: SECRETS,
  secrets: SECRETS,
  statefulset: STATEFUL_SETS,
  simplevolumes: SIMPLE_VOLUMES,
  'simplevolumes.storage.shipstuff.io': SIMPLE_VOLUMES,
};

export class Reader {
  private readonly kubeconfig: string;
  private kube: Kube | null = null;

  /** @param kubeconfig is read with the first question */
  constructor(kubeconfig: string) {
    this.kubeconfig = kubeconfig;
  }

  knows(kind: string): boolean {
    return Object.hasOwn(KINDS, kind);
  }

  private ask(kind: string): { kube: Kube; resource: Resource<Read> } {
    this.kube ??= kubeOf(this.kubeconfig);
    return { kube: this.kube, resource: KINDS[kind] as Resource<Read> };
  }

  /** One object, null when there is none. */
  async get(kind: string, name: string, namespace: string): Promise<Read | null> {
    const { kube, resource } = this.ask(kind);
    return kube.find(resource, resource.namespaced ? { namespace, name } : { name });
  }

  /** @param namespace null: all */
  async list(kind: string, namespace: string | null, labelSelector: string): Promise<Read[]> {
    const { kube, resource } = this.ask(kind);
    const where = namespace === null || !resource.namespaced ? {} : { namespace };
    return Array.fromAsync(
      kube.list(resource, { ...where, ...(labelSelector === '' ? {} : { labelSelector }) }),
    );
  }

  close(): void {
    this.kube?.close();
    this.kube = null;
  }
}
