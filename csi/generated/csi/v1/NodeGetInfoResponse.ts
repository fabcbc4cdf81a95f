// Original file: csi.proto

import type { Topology as _csi_v1_Topology, Topology__Output as _csi_v1_Topology__Output } from '../../csi/v1/Topology.ts';
import type { Long } from '@grpc/proto-loader';

export interface NodeGetInfoResponse {
  'node_id'?: (string);
  'max_volumes_per_node'?: (number | string | Long);
  'accessible_topology'?: (_csi_v1_Topology | null);
}

export interface NodeGetInfoResponse__Output {
  'node_id': (string);
  'max_volumes_per_node': (string);
  'accessible_topology': (_csi_v1_Topology__Output | null);
}
