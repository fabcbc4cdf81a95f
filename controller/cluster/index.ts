/** The controller's room for Kubernetes: what the other rooms import. */
export { type BackoffOptions, backoffMs } from './backoff.ts';
export { createKube, type KubeOptions } from './client.ts';
export { type Connection, type ConnectionOptions, openConnection } from './connection.ts';
export { errorText, isKubeError, KubeError } from './errors.ts';
export { createInformer } from './informer.ts';
export { createLeaderElection } from './leader.ts';
export { createWorkQueue } from './queue.ts';
export { createRecorder } from './recorder.ts';
export * from './resources.ts';
export type * from './types.ts';
