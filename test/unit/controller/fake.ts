/** A clock that only moves when told, and a cluster in memory: for tests of controller/cluster without a network. */
import { KubeError } from '../../../controller/cluster/errors.ts';
import { keyOf } from '../../../controller/cluster/resources.ts';
import type {
  Clock,
  Kube,
  KubeObject,
  Logger,
  ObjectName,
  Resource,
} from '../../../controller/cluster/types.ts';

/** Lets everything that is ready run. */
export const settle = (): Promise<void> => new Promise((resolve) => setImmediate(resolve));

export class FakeClock implements Clock {
  private time = 0;
  private id = 0;
  private readonly timers = new Map<number, { at: number; fn: () => void }>();

  boot(): number {
    return this.time;
  }
  now(): number {
    return 1_700_000_000_000 + this.time;
  }
  setTimeout(fn: () => void, ms: number): { cancel(): void } {
    const id = ++this.id;
    this.timers.set(id, { at: this.time + Math.max(0, ms), fn });
    return { cancel: () => this.timers.delete(id) };
  }
  get waiting(): number {
    return this.timers.size;
  }
  /** Runs every timer in its turn until `ms` have passed. */
  async advance(ms: number): Promise<void> {
    const until = this.time + ms;
    await settle();
    for (;;) {
      let next: [number, { at: number; fn: () => void }] | null = null;
      for (const one of this.timers) if (next === null || one[1].at < next[1].at) next = one;
      if (next === null || next[1].at > until) break;
      this.time = Math.max(this.time, next[1].at);
      this.timers.delete(next[0]);
      next[1].fn();
      await settle();
    }
    this.time = until;
    await settle();
  }
  /** Time passes and nothing runs: a process that is stopped. */
  skip(ms: number): void {
    this.time += ms;
  }
}

export const silent: Logger = {
  debug() {},
  info() {},
  warn() {},
  error() {},
  child: () => silent,
};

/** Compare and swap as the API server does it, and whatever a test wants to go wrong. */
export class FakeCluster {
  readonly objects = new Map<string, KubeObject>();
  version = 0;
  writes = 0;
  /** Before a call does its work; may wait or throw. */
  before: (verb: string) => Promise<void> | void = () => {};
  /** After it, before the answer. */
  after: (verb: string) => Promise<void> | void = () => {};

  private key(kind: Resource, name: ObjectName): string {
    return `${kind.plural}/${keyOf({ metadata: { ...name } as { name: string; namespace?: string } })}`;
  }
  private async call<T>(verb: string, work: () => T): Promise<T> {
    await this.before(verb);
    const result = structuredClone(work());
    await this.after(verb);
    return result;
  }
  private put<T extends KubeObject>(key: string, object: T): T {
    this.writes++;
    const metadata = { uid: `u${this.version}`, ...object.metadata, resourceVersion: String(++this.version) };
    const kept = structuredClone({ ...object, metadata });
    this.objects.set(key, kept);
    return kept;
  }
  private there<T extends KubeObject>(kind: Resource<T>, name: ObjectName, version?: string): T {
    const object = this.objects.get(this.key(kind, name)) as T | undefined;
    if (object === undefined) throw new KubeError('NotFound', 'not there', { status: 404 });
    if (version !== undefined && object.metadata.resourceVersion !== version)
      throw new KubeError('Conflict', 'another version', { status: 409 });
    return object;
  }

  get kube(): Kube {
    const kube: Pick<Kube, 'get' | 'find' | 'create' | 'replace' | 'merge' | 'gated'> = {
      get: (kind, name) => this.call('get', () => this.there(kind, name)),
      find: async (kind, name) => {
        try {
          return await kube.get(kind, name);
        } catch (error) {
          if (error instanceof KubeError && error.reason === 'NotFound') return null;
          throw error;
        }
      },
      create: (kind, object) =>
        this.call('create', () => {
          const key = this.key(kind, object.metadata);
          if (this.objects.has(key)) throw new KubeError('AlreadyExists', 'there already', { status: 409 });
          return this.put(key, object);
        }),
      replace: (kind, object) =>
        this.call('replace', () => {
          this.there(kind, object.metadata, object.metadata.resourceVersion);
          return this.put(this.key(kind, object.metadata), object);
        }),
      merge: (kind, name, patch, options = {}) =>
        this.call('merge', () => {
          const object = this.there(kind, name, options.resourceVersion);
          return this.put(this.key(kind, name), { ...object, ...patch, metadata: object.metadata });
        }),
      gated: () => this.kube,
    };
    return kube as Kube;
  }
}
