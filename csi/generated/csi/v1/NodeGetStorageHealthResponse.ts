// Original file: csi.proto

import type { StorageHealthErrorType as _csi_v1_StorageHealthErrorType, StorageHealthErrorType__Output as _csi_v1_StorageHealthErrorType__Output } from '../../csi/v1/StorageHealthErrorType.ts';
import type { VolumeCapability as _csi_v1_VolumeCapability, VolumeCapability__Output as _csi_v1_VolumeCapability__Output } from '../../csi/v1/VolumeCapability.ts';

export interface _csi_v1_NodeGetStorageHealthResponse_StorageBackendHealth {
  'status'?: (_csi_v1_StorageHealthErrorType);
  'reason'?: (string);
  'message'?: (string);
  'volume_capability'?: (_csi_v1_VolumeCapability | null);
}

export interface _csi_v1_NodeGetStorageHealthResponse_StorageBackendHealth__Output {
  'status': (_csi_v1_StorageHealthErrorType__Output);
  'reason': (string);
  'message': (string);
  'volume_capability': (_csi_v1_VolumeCapability__Output | null);
}

export interface NodeGetStorageHealthResponse {
  'backend_health'?: (_csi_v1_NodeGetStorageHealthResponse_StorageBackendHealth)[];
}

export interface NodeGetStorageHealthResponse__Output {
  'backend_health': (_csi_v1_NodeGetStorageHealthResponse_StorageBackendHealth__Output)[];
}
