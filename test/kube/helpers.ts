/** What tests of controller/cluster on a real API server share. */
import { createKube, openConnection } from '../../controller/cluster/index.ts';
import type { Clock, Kube, KubeObject, Logger, Resource } from '../../controller/cluster/types.ts';

export const clock: Clock = {
  boot: () => performance.now(),
  now: () => Date.now(),
  setTimeout(fn, ms) {
    const timer = setTimeout(fn, ms);
    return { cancel: () => clearTimeout(timer) };
  },
};

export const quiet: Logger = {
  debug() {},
  info() {},
  warn() {},
  error() {},
  child: () => quiet,
};

export interface ConfigMap extends KubeObject {
  data?: Record<string, string>;
}
export const CONFIG_MAPS: Resource<ConfigMap> = {
  group: '',
  version: 'v1',
  plural: 'configmaps',
  kind: 'ConfigMap',
  namespaced: true,
};

export const configMap = (name: string, data: Record<string, string> = {}): ConfigMap => ({
  metadata: { name, namespace: 'default' },
  data,
});

export const kubeOf = (kubeconfig: string, rate = { perSecond: 1000, burst: 1000 }): Kube =>
  createKube({ connection: openConnection({ kubeconfig, clock }), clock, rate });

/** Waits for something to become true. @throws Error with `what` when it does not in time */
export async function until(what: string, check: () => boolean, limitMs = 60_000): Promise<void> {
  const ends = performance.now() + limitMs;
  while (!check()) {
    if (performance.now() > ends) throw new Error(`not within ${limitMs} ms: ${what}`);
    await new Promise((resolve) => setTimeout(resolve, 20));
  }
}
