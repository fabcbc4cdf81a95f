// Original file: pluginregistration.proto


export interface RegistrationStatusResponse {
}

export interface RegistrationStatusResponse__Output {
}
