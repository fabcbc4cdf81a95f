// Original file: csi.proto

export const VolumeHealthErrorType = {
  UNKNOWN_VOLUME_HEALTH_TYPE: 'UNKNOWN_VOLUME_HEALTH_TYPE',
  DEGRADED: 'DEGRADED',
  INACCESSIBLE: 'INACCESSIBLE',
  DATA_LOSS: 'DATA_LOSS',
} as const;

export type VolumeHealthErrorType =
  | 'UNKNOWN_VOLUME_HEALTH_TYPE'
  | 0
  | 'DEGRADED'
  | 1
  | 'INACCESSIBLE'
  | 2
  | 'DATA_LOSS'
  | 3

export type VolumeHealthErrorType__Output = typeof VolumeHealthErrorType[keyof typeof VolumeHealthErrorType]
