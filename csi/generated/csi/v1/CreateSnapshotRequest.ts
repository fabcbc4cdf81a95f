// Original file: csi.proto

import type { TopologyRequirement as _csi_v1_TopologyRequirement, TopologyRequirement__Output as _csi_v1_TopologyRequirement__Output } from '../../csi/v1/TopologyRequirement.ts';

export interface CreateSnapshotRequest {
  'source_volume_id'?: (string);
  'name'?: (string);
  'secrets'?: ({[key: string]: string});
  'parameters'?: ({[key: string]: string});
  'accessibility_requirements'?: (_csi_v1_TopologyRequirement | null);
}

export interface CreateSnapshotRequest__Output {
  'source_volume_id': (string);
  'name': (string);
  'secrets': ({[key: string]: string});
  'parameters': ({[key: string]: string});
  'accessibility_requirements': (_csi_v1_TopologyRequirement__Output | null);
}
