// Original file: csi.proto


export interface DeleteVolumeResponse {
}

export interface DeleteVolumeResponse__Output {
}
