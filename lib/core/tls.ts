/**
 * TLS between the parts. Agents are reached by addresses of pods, which no certificate can know beforehand, so every
 * agent's certificate carries this one DNS name and callers check for it, whatever address they dialled. Who an agent
 * is beyond that says its bearer token.
 */
export const AGENT_TLS_NAME = 'simple-volume-agent';
