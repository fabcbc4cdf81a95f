/**
 * A node that is lost is evidence for a failover, so it is asked for where it is written, not in a copy: a watch can be
 * silent for a minute and a half, and after an outage of the API server the copies come back one by one.
 */
import { type Kube, NODES } from './cluster/index.ts';
import type { Clock } from './cluster/types.ts';
import type { Observed } from './plan/types.ts';

/** All volumes of a lost node share one question a second. */
const GOOD_MS = 1000;

export class NodesNow {
  private readonly kube: Pick<Kube, 'find'>;
  private readonly clock: Pick<Clock, 'boot'>;
  private readonly asked = new Map<string, { at: number; ready: Promise<boolean> }>();

  constructor(kube: Pick<Kube, 'find'>, clock: Pick<Clock, 'boot'>) {
    this.kube = kube;
    this.clock = clock;
  }

  /**
   * Where the copy calls the active node NotReady, what the API server says now counts.
   * @throws KubeError when it cannot be asked: nothing is decided then
   */
  async confirm(observed: Observed): Promise<void> {
    const active = observed.nodes.find((one) => one.name === observed.object?.status?.activeNode);
    if (active && !active.ready) active.ready = await this.ready(active.name);
  }

  private ready(name: string): Promise<boolean> {
    const now = this.clock.boot();
    const known = this.asked.get(name);
    if (known && now - known.at < GOOD_MS) return known.ready;
    for (const [other, { at }] of this.asked) if (now - at >= GOOD_MS) this.asked.delete(other);
    const ready = this.kube
      .find(NODES, { name }, { urgent: true })
      .then(
        (node) =>
          node?.status?.conditions?.some((one) => one.type === 'Ready' && one.status === 'True') ?? false,
      );
    this.asked.set(name, { at: now, ready });
    ready.catch(() => this.asked.delete(name));
    return ready;
  }
}
