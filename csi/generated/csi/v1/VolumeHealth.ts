// Original file: csi.proto

import type { VolumeHealthErrorType as _csi_v1_VolumeHealthErrorType, VolumeHealthErrorType__Output as _csi_v1_VolumeHealthErrorType__Output } from '../../csi/v1/VolumeHealthErrorType.ts';

export interface _csi_v1_VolumeHealth_VolumeHealthEntry {
  'status'?: (_csi_v1_VolumeHealthErrorType);
  'reason'?: (string);
  'message'?: (string);
}

export interface _csi_v1_VolumeHealth_VolumeHealthEntry__Output {
  'status': (_csi_v1_VolumeHealthErrorType__Output);
  'reason': (string);
  'message': (string);
}

export interface VolumeHealth {
  'volume_id'?: (string);
  'health_statuses'?: (_csi_v1_VolumeHealth_VolumeHealthEntry)[];
}

export interface VolumeHealth__Output {
  'volume_id': (string);
  'health_statuses': (_csi_v1_VolumeHealth_VolumeHealthEntry__Output)[];
}
