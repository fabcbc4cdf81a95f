// Original file: csi.proto


export interface DeleteVolumeRequest {
  'volume_id'?: (string);
  'secrets'?: ({[key: string]: string});
}

export interface DeleteVolumeRequest__Output {
  'volume_id': (string);
  'secrets': ({[key: string]: string});
}
