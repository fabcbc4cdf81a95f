// Original file: csi.proto

import type { VolumeHealth as _csi_v1_VolumeHealth, VolumeHealth__Output as _csi_v1_VolumeHealth__Output } from '../../csi/v1/VolumeHealth.ts';

export interface ControllerGetVolumeHealthResponse {
  'volume_health'?: (_csi_v1_VolumeHealth | null);
}

export interface ControllerGetVolumeHealthResponse__Output {
  'volume_health': (_csi_v1_VolumeHealth__Output | null);
}
