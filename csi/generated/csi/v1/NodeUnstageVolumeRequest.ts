// Original file: csi.proto


export interface NodeUnstageVolumeRequest {
  'volume_id'?: (string);
  'staging_target_path'?: (string);
}

export interface NodeUnstageVolumeRequest__Output {
  'volume_id': (string);
  'staging_target_path': (string);
}
