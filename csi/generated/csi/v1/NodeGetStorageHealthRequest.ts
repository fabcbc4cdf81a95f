// Original file: csi.proto


export interface NodeGetStorageHealthRequest {
  'secrets'?: ({[key: string]: string});
}

export interface NodeGetStorageHealthRequest__Output {
  'secrets': ({[key: string]: string});
}
