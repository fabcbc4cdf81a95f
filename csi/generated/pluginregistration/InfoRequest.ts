// Original file: pluginregistration.proto


export interface InfoRequest {
}

export interface InfoRequest__Output {
}
