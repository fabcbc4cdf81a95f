/** The kinds of objects that the controller reads and writes, with as much of their shape as it uses. */
import type { ClusterSimpleVolume, KubeObject, ObjectReference, Resource, SimpleVolume } from './types.ts';

function kind<T extends KubeObject>(
  group: string,
  version: string,
  plural: string,
  name: string,
  namespaced: boolean,
): Resource<T> {
  return { group, version, plural, kind: name, namespaced };
}

export interface Taint {
  key: string;
  value?: string;
  effect: 'NoSchedule' | 'PreferNoSchedule' | 'NoExecute';
}

export interface Node extends KubeObject {
  spec?: { unschedulable?: boolean; taints?: Taint[]; providerID?: string };
  status?: {
    conditions?: { type: string; status: string; reason?: string; lastTransitionTime?: string }[];
    allocatable?: Record<string, string>;
    capacity?: Record<string, string>;
    addresses?: { type: string; address: string }[];
    nodeInfo?: { bootID?: string; architecture?: string };
  };
}

export interface ContainerStatus {
  name: string;
  ready?: boolean;
  restartCount?: number;
  state?: {
    waiting?: { reason?: string; message?: string };
    running?: object;
    terminated?: { reason?: string };
  };
}

export interface Pod extends KubeObject {
  spec?: {
    nodeName?: string;
    nodeSelector?: Record<string, string>;
    affinity?: object;
    tolerations?: object[];
    volumes?: { name: string; persistentVolumeClaim?: { claimName: string; readOnly?: boolean } }[];
    containers?: {
      name: string;
      ports?: { name?: string; containerPort: number; protocol?: string }[];
      resources?: { requests?: Record<string, string>; limits?: Record<string, string> };
    }[];
    initContainers?: {
      name: string;
      restartPolicy?: string;
      resources?: { requests?: Record<string, string> };
    }[];
    terminationGracePeriodSeconds?: number;
    schedulingGates?: { name: string }[];
  };
  status?: {
    phase?: 'Pending' | 'Running' | 'Succeeded' | 'Failed' | 'Unknown';
    reason?: string;
    podIP?: string;
    podIPs?: { ip: string }[];
    startTime?: string;
    conditions?: { type: string; status: string; reason?: string; lastTransitionTime?: string }[];
    containerStatuses?: ContainerStatus[];
    initContainerStatuses?: ContainerStatus[];
  };
}

export interface PersistentVolumeClaim extends KubeObject {
  spec?: {
    storageClassName?: string;
    volumeName?: string;
    volumeMode?: string;
    accessModes?: string[];
    resources?: { requests?: Record<string, string> };
  };
  status?: { phase?: 'Pending' | 'Bound' | 'Lost'; capacity?: Record<string, string> };
}

export interface PersistentVolume extends KubeObject {
  spec?: {
    storageClassName?: string;
    persistentVolumeReclaimPolicy?: string;
    capacity?: Record<string, string>;
    claimRef?: { namespace?: string; name?: string; uid?: string };
    csi?: { driver: string; volumeHandle: string; volumeAttributes?: Record<string, string> };
    nodeAffinity?: object;
  };
  status?: { phase?: string };
}

export interface StorageClass extends KubeObject {
  provisioner: string;
  parameters?: Record<string, string>;
  reclaimPolicy?: string;
  volumeBindingMode?: string;
  allowVolumeExpansion?: boolean;
}

export interface Lease extends KubeObject {
  spec?: {
    holderIdentity?: string | null;
    leaseDurationSeconds?: number | null;
    acquireTime?: string | null;
    renewTime?: string | null;
    leaseTransitions?: number | null;
  };
}

export interface CoreEvent extends KubeObject {
  involvedObject: ObjectReference;
  type: string;
  reason: string;
  message: string;
  count?: number;
  firstTimestamp?: string;
  lastTimestamp?: string;
  source?: { component?: string; host?: string };
  reportingComponent?: string;
  reportingInstance?: string;
}

export interface TokenReview extends KubeObject {
  spec: { token: string; audiences?: string[] };
  status?: {
    authenticated?: boolean;
    audiences?: string[];
    error?: string;
    user?: { username?: string; uid?: string; groups?: string[]; extra?: Record<string, string[]> };
  };
}

export interface SubjectAccessReview extends KubeObject {
  spec: {
    user?: string;
    uid?: string;
    groups?: string[];
    extra?: Record<string, string[]>;
    resourceAttributes?: {
      namespace?: string;
      verb: string;
      group?: string;
      resource: string;
      subresource?: string;
      name?: string;
    };
  };
  status?: { allowed: boolean; denied?: boolean; reason?: string; evaluationError?: string };
}

/** A StatefulSet or a ReplicaSet, as far as it says how many pods it wants. */
export interface PodOwner extends KubeObject {
  spec?: { replicas?: number; ordinals?: { start?: number } };
}

export interface Secret extends KubeObject {
  data?: Record<string, string>;
  type?: string;
}

export const NODES = kind<Node>('', 'v1', 'nodes', 'Node', false);
export const PODS = kind<Pod>('', 'v1', 'pods', 'Pod', true);
export const CLAIMS = kind<PersistentVolumeClaim>(
  '',
  'v1',
  'persistentvolumeclaims',
  'PersistentVolumeClaim',
  true,
);
export const VOLUMES = kind<PersistentVolume>('', 'v1', 'persistentvolumes', 'PersistentVolume', false);
export const CLASSES = kind<StorageClass>('storage.k8s.io', 'v1', 'storageclasses', 'StorageClass', false);
export const LEASES = kind<Lease>('coordination.k8s.io', 'v1', 'leases', 'Lease', true);
export const EVENTS = kind<CoreEvent>('', 'v1', 'events', 'Event', true);
export const SECRETS = kind<Secret>('', 'v1', 'secrets', 'Secret', true);
export const STATEFUL_SETS = kind<PodOwner>('apps', 'v1', 'statefulsets', 'StatefulSet', true);
export const REPLICA_SETS = kind<PodOwner>('apps', 'v1', 'replicasets', 'ReplicaSet', true);
export const TOKEN_REVIEWS = kind<TokenReview>(
  'authentication.k8s.io',
  'v1',
  'tokenreviews',
  'TokenReview',
  false,
);
export const SUBJECT_ACCESS_REVIEWS = kind<SubjectAccessReview>(
  'authorization.k8s.io',
  'v1',
  'subjectaccessreviews',
  'SubjectAccessReview',
  false,
);
export const SIMPLE_VOLUMES = kind<SimpleVolume>(
  'storage.shipstuff.io',
  'v1alpha1',
  'simplevolumes',
  'SimpleVolume',
  true,
);
export const CLUSTER_SIMPLE_VOLUMES = kind<ClusterSimpleVolume>(
  'storage.shipstuff.io',
  'v1alpha1',
  'clustersimplevolumes',
  'ClusterSimpleVolume',
  false,
);

/** As in `apiVersion` of an object. */
export const apiVersion = (resource: Resource): string =>
  resource.group === '' ? resource.version : `${resource.group}/${resource.version}`;

/** What an Event about this object refers to. */
export function referenceTo(resource: Resource, object: KubeObject): ObjectReference {
  return {
    apiVersion: apiVersion(resource),
    kind: resource.kind,
    name: object.metadata.name,
    namespace: object.metadata.namespace,
    uid: object.metadata.uid,
  };
}

/** `namespace/name`, or `name`. */
export const keyOf = (object: { metadata: { namespace?: string; name: string } }): string =>
  object.metadata.namespace === undefined
    ? object.metadata.name
    : `${object.metadata.namespace}/${object.metadata.name}`;
