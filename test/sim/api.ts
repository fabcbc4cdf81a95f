/**
 * A simulated API server and the client that the controller uses on it: versions, compare-and-swap, patches, watches
 * with their faults, the rules of the CRD. A request may be late, lost before or after it was carried out, refused.
 */
import { KubeError, NODES, PODS } from '../../controller/cluster/index.ts';
import type {
  CallOptions,
  DeleteOptions,
  JsonPatchStep,
  Kube,
  KubeCounters,
  KubeObject,
  ListOptions,
  ObjectName,
  Page,
  PatchOptions,
  Resource,
  SimpleVolume,
  WatchEvent,
  WatchOptions,
  WriteOptions,
} from '../../controller/cluster/types.ts';
import type { Process, Random, Time } from './time.ts';

export type Stored = KubeObject & { spec?: unknown; status?: unknown };

const freeze = <T>(value: T): T => {
  if (value !== null && typeof value === 'object' && !Object.isFrozen(value)) {
    Object.freeze(value);
    for (const one of Object.values(value)) freeze(one);
  }
  return value;
};
const copy = <T>(value: T): T => JSON.parse(JSON.stringify(value)) as T;

/** RFC 7386 */
function merged(target: unknown, patch: unknown): unknown {
  if (patch === null || typeof patch !== 'object' || Array.isArray(patch)) return patch;
  const out: Record<string, unknown> =
    target !== null && typeof target === 'object' && !Array.isArray(target)
      ? { ...(target as Record<string, unknown>) }
      : {};
  for (const [key, value] of Object.entries(patch))
    if (value === null) delete out[key];
    else out[key] = merged(out[key], value);
  return out;
}

export interface Line {
  version: number;
  type: 'ADDED' | 'MODIFIED' | 'DELETED';
  object: Stored;
}

interface Watcher {
  kind: string;
  tell(line: Line | { version: number; type: 'BOOKMARK' }): void;
}

export const keyOfName = (name: { namespace?: string | undefined; name: string }): string =>
  name.namespace === undefined ? name.name : `${name.namespace}/${name.name}`;

/** Who writes: the controllers go through SimKube, everything else of Kubernetes is played and writes at once. */
export class SimApi {
  readonly time: Time;
  version = 1000;
  /** watches can't begin before this one */
  forgotten = 0;
  readonly kinds = new Map<string, Map<string, Stored>>();
  readonly log = new Map<string, Line[]>();
  readonly watchers = new Set<Watcher>();
  /** the rules of the CRD are kept; tests take them out */
  rules = true;
  /** a version that is named must be the present one; tests take that out */
  compare = true;
  /** called before an object is stored; throws to refuse it */
  admit: (kind: string, before: Stored | null, after: Stored | null) => void = () => {};
  #uids = 0;

  constructor(time: Time) {
    this.time = time;
  }

  stamp(): string {
    return new Date(EPOCH_MS + this.time.now).toISOString().replace(/\.\d{3}Z$/, 'Z');
  }

  all<T extends KubeObject>(kind: Resource<T>): T[] {
    return [...(this.kinds.get(kind.plural)?.values() ?? [])] as unknown as T[];
  }
  find<T extends KubeObject>(kind: Resource<T>, name: ObjectName): T | null {
    return (this.kinds.get(kind.plural)?.get(keyOfName(name)) ?? null) as T | null;
  }

  #store(kind: string, type: Line['type'], key: string, object: Stored): Stored {
    let objects = this.kinds.get(kind);
    if (!objects) {
      objects = new Map();
      this.kinds.set(kind, objects);
    }
    this.version++;
    const kept = freeze({
      ...object,
      metadata: { ...object.metadata, resourceVersion: String(this.version) },
    }) as Stored;
    if (type === 'DELETED') objects.delete(key);
    else objects.set(key, kept);
    const line: Line = { version: this.version, type, object: kept };
    const lines = this.log.get(kind) ?? [];
    lines.push(line);
    this.log.set(kind, lines);
    for (const watcher of [...this.watchers]) if (watcher.kind === kind) watcher.tell(line);
    return kept;
  }

  create<T extends KubeObject>(kind: Resource<T>, given: T): T {
    const key = keyOfName(given.metadata);
    if (this.kinds.get(kind.plural)?.has(key))
      throw new KubeError('AlreadyExists', `${kind.plural} ${key} exists`, { status: 409 });
    const object = copy(given) as Stored;
    object.metadata.uid ??= `uid-${++this.#uids}`;
    object.metadata.creationTimestamp = this.stamp();
    object.metadata.generation = 1;
    if (kind.group === 'storage.shipstuff.io') delete object.status;
    this.#check(kind.plural, null, object);
    this.admit(kind.plural, null, object);
    return this.#store(kind.plural, 'ADDED', key, object) as unknown as T;
  }

  /** One change of an object, whoever makes it. */
  change<T extends KubeObject>(
    kind: Resource<T>,
    name: ObjectName,
    only: { uid?: string | undefined; resourceVersion?: string | undefined },
    subresource: string | undefined,
    make: (before: Stored) => Stored,
  ): T {
    const key = keyOfName(name);
    const before = this.kinds.get(kind.plural)?.get(key);
    if (!before) throw new KubeError('NotFound', `${kind.plural} ${key} is not there`, { status: 404 });
    if (only.uid !== undefined && only.uid !== before.metadata.uid)
      throw new KubeError('Conflict', `${kind.plural} ${key} is another one`, { status: 409 });
    if (
      this.compare &&
      only.resourceVersion !== undefined &&
      only.resourceVersion !== before.metadata.resourceVersion
    )
      throw new KubeError('Conflict', `${kind.plural} ${key} was written meanwhile`, { status: 409 });
    const made = copy(make(before));
    const own = ['simplevolumes', 'clustersimplevolumes', 'nodes', 'pods'].includes(kind.plural);
    const after: Stored =
      subresource === 'status'
        ? { ...before, status: made.status }
        : { ...made, ...(own ? { status: before.status } : {}) };
    after.metadata = {
      ...(subresource === 'status' ? before.metadata : made.metadata),
      name: before.metadata.name,
      ...(before.metadata.namespace === undefined ? {} : { namespace: before.metadata.namespace }),
      uid: before.metadata.uid as string,
      creationTimestamp: before.metadata.creationTimestamp as string,
      ...(before.metadata.deletionTimestamp === undefined
        ? {}
        : { deletionTimestamp: before.metadata.deletionTimestamp }),
      resourceVersion: before.metadata.resourceVersion as string,
      generation:
        (before.metadata.generation ?? 1) +
        (JSON.stringify(before.spec) === JSON.stringify(after.spec) ? 0 : 1),
    };
    if (JSON.stringify(after) === JSON.stringify(before)) return before as unknown as T;
    this.#check(kind.plural, before, after);
    this.admit(kind.plural, before, after);
    const gone = after.metadata.deletionTimestamp !== undefined && !after.metadata.finalizers?.length;
    return this.#store(
      kind.plural,
      gone && kind.plural !== 'pods' ? 'DELETED' : 'MODIFIED',
      key,
      after,
    ) as unknown as T;
  }

  remove<T extends KubeObject>(kind: Resource<T>, name: ObjectName, options: DeleteOptions = {}): boolean {
    const key = keyOfName(name);
    const before = this.kinds.get(kind.plural)?.get(key);
    if (!before) return false;
    if (options.uid !== undefined && options.uid !== before.metadata.uid)
      throw new KubeError('Conflict', `${kind.plural} ${key} is another one`, { status: 409 });
    const pod = kind.plural === PODS.plural;
    const now =
      options.gracePeriodSeconds === 0 ||
      (pod ? !(before.spec as { nodeName?: string }).nodeName : !before.metadata.finalizers?.length);
    if (now) {
      this.admit(kind.plural, before, null);
      this.#store(kind.plural, 'DELETED', key, before);
    } else if (before.metadata.deletionTimestamp === undefined)
      this.#store(kind.plural, 'MODIFIED', key, {
        ...before,
        metadata: { ...before.metadata, deletionTimestamp: this.stamp() },
      });
    return true;
  }

  /** The rules of chart/crds, in words of their messages. */
  #check(kind: string, before: Stored | null, after: Stored): void {
    if (!this.rules || kind !== 'simplevolumes') return;
    const was = (before as SimpleVolume | null)?.status;
    const is = (after as SimpleVolume).status;
    const refuse = (why: string): never => {
      throw new KubeError('Invalid', `simplevolumes: ${why}`, { status: 422 });
    };
    if (was?.epoch !== undefined && !(is?.epoch !== undefined && is.epoch >= was.epoch))
      refuse('status.epoch never falls and never goes away');
    if (is?.promotion && is.promotion.epoch !== is.epoch)
      refuse('status.promotion.epoch must be status.epoch');
    if (is?.promotion && is.promotion.to !== is.activeNode)
      refuse('status.promotion.to must be status.activeNode');
    if (
      was?.activeNode !== undefined &&
      !(
        is?.activeNode !== undefined &&
        (is.activeNode === was.activeNode || (is.epoch ?? 0) > (was.epoch ?? 0))
      )
    )
      refuse('status.activeNode changes only together with a higher status.epoch');
    if (
      was?.promotable &&
      !(
        is?.promotable &&
        (JSON.stringify(is.promotable) === JSON.stringify(was.promotable) ||
          is.promotable.version > was.promotable.version)
      )
    )
      refuse('status.promotable changes only together with a higher version');
    for (const one of is?.conditions ?? [])
      if (!/^[A-Za-z]([A-Za-z0-9_,:]*[A-Za-z0-9_])?$/.test(one.reason)) refuse(`a reason ${one.reason}`);
  }
}

/** True time 0 as a wall clock. */
export const EPOCH_MS = Date.parse('2026-12-02T12:00:00Z');

/** What can go wrong between a controller and the API server. */
export interface ApiFaults {
  /** no requests get through */
  cut(): boolean;
  /** one way, ms */
  delay(): number;
  /** what the server answers instead of doing it; null: it does it */
  refuses(write: boolean): KubeError | null;
  /** a write was carried out, its answer is on its way */
  wrote(what: string): void;
}

export interface SentWrite {
  at: number;
  who: string;
}

/** The client of one controller process. */
export class SimKube implements Kube {
  readonly counters: KubeCounters = {
    requests: 0,
    byVerb: new Map(),
    failed: {},
    throttledByServer: 0,
    waitedMs: 0,
    connections: 0,
  };
  readonly #api: SimApi;
  readonly #process: Process;
  readonly #faults: ApiFaults;
  readonly #random: Random;
  readonly #allowed: (() => boolean) | null;
  readonly #root: SimKube;
  /** watches that are open, for faults */
  readonly watches = new Set<{ break(silently: boolean): void }>();
  /** when the write that is carried out now was sent; for what is checked about it */
  static sent: SentWrite | null = null;
  closed = false;

  constructor(
    api: SimApi,
    process: Process,
    faults: ApiFaults,
    random: Random,
    allowed: (() => boolean) | null = null,
    root: SimKube | null = null,
  ) {
    this.#api = api;
    this.#process = process;
    this.#faults = faults;
    this.#random = random;
    this.#allowed = allowed;
    this.#root = root ?? this;
  }

  gated(allowed: () => boolean): Kube {
    const before = this.#allowed;
    return new SimKube(
      this.#api,
      this.#process,
      this.#faults,
      this.#random,
      before ? () => before() && allowed() : allowed,
      this.#root,
    );
  }

  close(): void {
    this.#root.closed = true;
  }

  async #call<T>(what: string, write: boolean, options: CallOptions, carryOut: () => T): Promise<T> {
    const { clock } = this.#process;
    const ends = clock.boot() + (options.timeoutMs ?? 10_000);
    for (;;) {
      if (this.#root.closed) throw new KubeError('Cancelled', 'the client is closed', { notSent: true });
      try {
        return await this.#exchange(what, write, options, ends, carryOut);
      } catch (error) {
        const wait = error instanceof KubeError && error.status === 429 ? (error.retryAfterMs ?? 1000) : null;
        if (wait === null || clock.boot() + wait > ends) throw error;
        await this.#process.sleep(wait);
      }
    }
  }

  #exchange<T>(
    what: string,
    write: boolean,
    options: CallOptions,
    ends: number,
    carryOut: () => T,
  ): Promise<T> {
    const { clock, time } = this.#process;
    this.#root.counters.requests++;
    return new Promise((resolve, reject) => {
      let sent = false;
      let over = false;
      const end = (settle: () => void): void => {
        if (over) return;
        over = true;
        timer.cancel();
        options.signal?.removeEventListener('abort', cancelled);
        settle();
      };
      const fail = (error: KubeError): void => end(() => reject(error));
      const cancelled = (): void =>
        fail(new KubeError('Cancelled', `${what} was cancelled`, { notSent: !sent }));
      const timer = clock.setTimeout(
        () => fail(new KubeError('Timeout', `${what} was not answered in time`, { notSent: !sent })),
        Math.max(0, ends - clock.boot()),
      );
      if (options.signal?.aborted) return cancelled();
      options.signal?.addEventListener('abort', cancelled, { once: true });
      const send = (): void => {
        if (over) return;
        if (this.#faults.cut()) {
          if (this.#random.chance(0.4))
            fail(new KubeError('Unreachable', `${what} failed: ECONNREFUSED`, { notSent: true }));
          return;
        }
        if (write && this.#allowed && !this.#allowed()) {
          fail(new KubeError('NotLeader', `${what}: this controller does not lead`, { notSent: true }));
          return;
        }
        sent = true;
        const sentAt = time.now;
        // On its way: it arrives whether or not anybody still waits for the answer.
        time.after(this.#faults.delay(), () => {
          let answer: () => void;
          const refused = this.#faults.refuses(write);
          try {
            if (refused) throw refused;
            SimKube.sent = { at: sentAt, who: this.#process.name };
            const result = carryOut();
            answer = () => end(() => resolve(result));
            if (write) this.#faults.wrote(what);
          } catch (error) {
            if (!(error instanceof KubeError)) throw error;
            answer = () => fail(error);
          } finally {
            SimKube.sent = null;
          }
          if (this.#faults.cut()) return;
          if (this.#random.chance(0.005)) {
            time.after(
              this.#faults.delay(),
              () => fail(new KubeError('Unreachable', `${what} failed: ECONNRESET`)),
              this.#process,
            );
            return;
          }
          time.after(this.#faults.delay(), answer, this.#process);
        });
      };
      if (this.#random.chance(0.1)) time.after(this.#random.wait(20), send, this.#process);
      else send();
    });
  }

  get<T extends KubeObject>(kind: Resource<T>, name: ObjectName, options: CallOptions = {}): Promise<T> {
    return this.#call(`GET ${kind.plural}`, false, options, () => {
      const found = this.#api.find(kind, name);
      if (!found) throw new KubeError('NotFound', `${kind.plural} ${keyOfName(name)}`, { status: 404 });
      return found;
    });
  }

  find<T extends KubeObject>(
    kind: Resource<T>,
    name: ObjectName,
    options: CallOptions = {},
  ): Promise<T | null> {
    return this.#call(`GET ${kind.plural}`, false, options, () => this.#api.find(kind, name));
  }

  page<T extends KubeObject>(kind: Resource<T>, options: ListOptions = {}): Promise<Page<T>> {
    if (options.fieldSelector || options.labelSelector) throw new Error('no selectors here');
    return this.#call(`LIST ${kind.plural}`, false, options, () => ({
      items: this.#api.all(kind),
      resourceVersion: String(this.#api.version),
      continue: null,
    }));
  }

  async *list<T extends KubeObject>(kind: Resource<T>, options: ListOptions = {}): AsyncIterable<T> {
    yield* (await this.page(kind, options)).items;
  }

  create<T extends KubeObject>(kind: Resource<T>, object: T, options: WriteOptions = {}): Promise<T> {
    return this.#call(`POST ${kind.plural}`, true, options, () => this.#api.create(kind, object));
  }

  replace<T extends KubeObject>(kind: Resource<T>, object: T, options: WriteOptions = {}): Promise<T> {
    const given = copy(object) as Stored;
    const { resourceVersion, uid } = object.metadata;
    if (!resourceVersion) throw new KubeError('Invalid', 'no resourceVersion', { notSent: true });
    return this.#call(`PUT ${kind.plural}${options.subresource ? '/status' : ''}`, true, options, () =>
      this.#api.change(kind, object.metadata, { uid, resourceVersion }, options.subresource, () => given),
    );
  }

  merge<T extends KubeObject>(
    kind: Resource<T>,
    name: ObjectName,
    patch: object,
    options: PatchOptions = {},
  ): Promise<T> {
    const given = copy(patch);
    return this.#call(`PATCH ${kind.plural}`, true, options, () =>
      this.#api.change(
        kind,
        name,
        { uid: options.uid, resourceVersion: options.resourceVersion },
        options.subresource,
        (before) => merged(before, given) as Stored,
      ),
    );
  }

  jsonPatch<T extends KubeObject>(
    _kind: Resource<T>,
    _name: ObjectName,
    _steps: readonly JsonPatchStep[],
  ): Promise<T> {
    throw new Error('the controller sends no JSON patches');
  }

  delete<T extends KubeObject>(
    kind: Resource<T>,
    name: ObjectName,
    options: DeleteOptions = {},
  ): Promise<boolean> {
    return this.#call(`DELETE ${kind.plural}`, true, options, () => this.#api.remove(kind, name, options));
  }

  raw(): Promise<unknown> {
    throw new Error('nothing is asked raw here');
  }

  watch<T extends KubeObject>(
    kind: Resource<T>,
    options: WatchOptions,
    event: (event: WatchEvent<T>) => void,
  ): Promise<void> {
    const { clock, time } = this.#process;
    const what = `WATCH ${kind.plural}`;
    this.#root.counters.requests++;
    return new Promise((resolve, reject) => {
      let over = false;
      let dead = false;
      let heard = clock.boot();
      let limit = Math.min(15_000, options.quietMs);
      let lastAt = 0;
      let timer: { cancel(): void } | null = null;
      const watcher: Watcher = { kind: kind.plural, tell: () => {} };
      const handle = {
        break: (silently: boolean): void => {
          dead = true;
          if (!silently) fail(new KubeError('Unreachable', `${what} broke: ECONNRESET`));
        },
      };
      const end = (settle: () => void): void => {
        if (over) return;
        over = true;
        timer?.cancel();
        this.#api.watchers.delete(watcher);
        this.#root.watches.delete(handle);
        options.signal?.removeEventListener('abort', cancelled);
        settle();
      };
      const fail = (error: KubeError): void => end(() => reject(error));
      const cancelled = (): void => fail(new KubeError('Cancelled', `${what} was cancelled`));
      const look = (): void => {
        if (over) return;
        const left = heard + limit - clock.boot();
        if (left <= 0) fail(new KubeError('Timeout', `${what} heard nothing for ${limit} ms`));
        else timer = clock.setTimeout(look, left);
      };
      const line: (() => void)[] = [];
      /** The first of the line; while the link is cut it waits, or the connection dies of it. */
      const arrive = (): void => {
        if (over || dead) return;
        if (this.#faults.cut()) {
          const fate = this.#random.next();
          if (fate < 0.2) dead = true;
          else if (fate < 0.4) handle.break(false);
          else time.after(500, arrive, this.#process);
          return;
        }
        heard = clock.boot();
        line.shift()?.();
        if (line.length > 0) time.at(lastAt, arrive, this.#process);
      };
      /** In order, as TCP does it. */
      const deliver = (run: () => void): void => {
        if (over || dead) return;
        lastAt = Math.max(lastAt, time.now + this.#faults.delay());
        line.push(run);
        if (line.length === 1) time.at(lastAt, arrive, this.#process);
      };
      if (options.signal?.aborted) return cancelled();
      options.signal?.addEventListener('abort', cancelled, { once: true });
      look();
      if (this.#faults.cut()) {
        if (this.#random.chance(0.4)) fail(new KubeError('Unreachable', `${what} broke: ECONNREFUSED`));
        return;
      }
      time.after(this.#faults.delay(), () => {
        if (over) return;
        const refused = this.#faults.refuses(false);
        if (refused) return deliver(() => fail(refused));
        const from = Number(options.resourceVersion);
        if (from < this.#api.forgotten)
          return deliver(() => fail(new KubeError('Gone', `${what}: too old`, { status: 410 })));
        this.#root.watches.add(handle);
        deliver(() => {
          limit = options.quietMs;
          options.opened?.();
        });
        watcher.tell = (line) => {
          deliver(() =>
            line.type === 'BOOKMARK'
              ? event({ type: 'BOOKMARK', resourceVersion: String(line.version) })
              : event({ type: line.type, object: line.object as unknown as T }),
          );
        };
        const lines = this.#api.log.get(kind.plural) ?? [];
        let first = lines.length;
        while (first > 0 && (lines[first - 1] as Line).version > from) first--;
        for (let i = first; i < lines.length; i++) watcher.tell(lines[i] as Line);
        this.#api.watchers.add(watcher);
        const bookmark = (): void => {
          if (over || dead) return;
          watcher.tell({ version: this.#api.version, type: 'BOOKMARK' });
          time.after(60_000, bookmark);
        };
        time.after(60_000, bookmark);
        time.after(options.timeoutSeconds * 1000, () => deliver(() => end(resolve)));
      });
    });
  }
}

export const isNode = (kind: string): boolean => kind === NODES.plural;
