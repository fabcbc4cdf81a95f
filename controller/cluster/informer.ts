/**
 * A local copy of one kind. List, then watch from there; whatever ends the watch, it goes on behind the last version that
 * was heard, and lists anew when the server has forgotten that version, or when it is time. Only what `project` makes of an
 * object is kept.
 */
import { backoffMs } from './backoff.ts';
import { errorText, isKubeError, KubeError } from './errors.ts';
import { keyOf } from './resources.ts';
import type {
  Change,
  Informer,
  InformerCounters,
  InformerOptions,
  Key,
  KubeObject,
  Page,
  Resource,
  WatchEvent,
} from './types.ts';

const RELIST_MS = 30 * 60_000;
/** Bookmarks come about once a minute, if at all (see WatchOptions). */
const QUIET_MS = 90_000;
/** The server ends a watch after this, seconds, spread so that watches do not end together. */
const WATCH_SECONDS = [240, 480] as const;
const BACKOFF = { first: 500, longest: 30_000 };
/** A watch that ends sooner than this without a word counts as a failure, ms. */
const SHORT_WATCH_MS = 1000;

export function createInformer<T extends KubeObject, P>(options: InformerOptions<T, P>): Informer<P> {
  return new Copy(options);
}

interface Entry<P> {
  version: string;
  kept: P;
}

class Copy<T extends KubeObject, P> implements Informer<P> {
  readonly counters: InformerCounters = {
    lists: 0,
    watches: 0,
    events: 0,
    bookmarks: 0,
    gone: 0,
    silent: 0,
    errors: 0,
    unreadable: 0,
  };
  lastError: string | null = null;
  private readonly options: InformerOptions<T, P>;
  private entries = new Map<Key, Entry<P>>();
  private readonly indexes = new Map<string, Map<string, Set<Key>>>();
  private readonly listeners = new Set<(change: Change<P>) => void>();
  private readonly stopping = new AbortController();
  private running: Promise<void> | null = null;
  private isSynced = false;
  private readonly waiting = new Set<{ resolve: () => void; reject: (error: Error) => void }>();
  private heardAt: number | null = null;
  private relistAt = 0;
  private failures = 0;
  /** The server took the watch that is or was the last one. */
  private opened = false;
  private readonly complained = new Set<Key>();

  constructor(options: InformerOptions<T, P>) {
    this.options = options;
    for (const index of Object.keys(options.indexes ?? {})) this.indexes.set(index, new Map());
  }

  get kind(): Resource {
    return this.options.kind;
  }

  get size(): number {
    return this.entries.size;
  }

  get(key: Key): P | undefined {
    return this.entries.get(key)?.kept;
  }

  *values(): IterableIterator<P> {
    for (const { kept } of this.entries.values()) yield kept;
  }

  keys(): IterableIterator<Key> {
    return this.entries.keys();
  }

  by(index: string, value: string): P[] {
    const values = this.indexes.get(index);
    if (values === undefined) throw new Error(`${this.kind.plural} have no index ${index}`);
    return [...(values.get(value) ?? [])].flatMap((key) => this.entries.get(key)?.kept ?? []);
  }

  synced(): boolean {
    return this.isSynced;
  }

  whenSynced(): Promise<void> {
    if (this.isSynced) return Promise.resolve();
    return new Promise((resolve, reject) => {
      if (this.stopping.signal.aborted) reject(stopped(this.kind));
      else this.waiting.add({ resolve, reject });
    });
  }

  ageMs(): number {
    return this.heardAt === null ? Number.POSITIVE_INFINITY : this.options.clock.boot() - this.heardAt;
  }

  onChange(listener: (change: Change<P>) => void): () => void {
    this.listeners.add(listener);
    return () => this.listeners.delete(listener);
  }

  start(): void {
    if (this.running === null && !this.stopping.signal.aborted) this.running = this.run();
  }

  async stop(): Promise<void> {
    this.stopping.abort();
    for (const one of this.waiting) one.reject(stopped(this.kind));
    this.waiting.clear();
    await this.running;
  }

  private async run(): Promise<void> {
    const { clock } = this.options;
    const signal = this.stopping.signal;
    let version: string | null = null;
    while (!signal.aborted) {
      const started = clock.boot();
      const events = this.counters.events + this.counters.bookmarks;
      try {
        this.opened = false;
        if (version === null || clock.boot() >= this.relistAt) version = await this.list();
        version = await this.watch(version, (latest) => {
          version = latest;
        });
        const quiet = this.counters.events + this.counters.bookmarks === events;
        if (quiet && clock.boot() - started < SHORT_WATCH_MS) await this.pause();
        else this.failures = 0;
      } catch (error) {
        if (signal.aborted) break;
        if (!(isKubeError(error, 'Timeout') && this.opened)) this.lastError = errorText(error);
        if (isKubeError(error, 'Gone')) {
          this.counters.gone++;
          version = null;
        } else if (isKubeError(error, 'Timeout') && this.opened) {
          // Perhaps nothing happened, perhaps the connection is dead: only a new one tells.
          this.counters.silent++;
          continue;
        } else this.counters.errors++;
        this.options.logger.warn(
          { kind: this.kind.plural, failures: this.failures + 1, error: this.lastError },
          'the copy of the cluster is not up to date; trying again',
        );
        await this.pause(isKubeError(error) ? error.retryAfterMs : null);
      }
    }
  }

  private random(): number {
    return (this.options.random ?? Math.random)();
  }

  private pause(atLeast: number | null = null): Promise<void> {
    this.failures++;
    const ms = backoffMs(this.failures, this.options.backoffMs ?? BACKOFF, this.random());
    const signal = this.stopping.signal;
    return new Promise((resolve) => {
      const timer = this.options.clock.setTimeout(done, Math.max(ms, atLeast ?? 0));
      function done(): void {
        timer.cancel();
        signal.removeEventListener('abort', done);
        resolve();
      }
      if (signal.aborted) done();
      else signal.addEventListener('abort', done, { once: true });
    });
  }

  private heard(): void {
    this.heardAt = this.options.clock.boot();
  }

  /** A whole new list, page by page; only what differs is told. @returns its version */
  private async list(): Promise<string> {
    const { kube, kind, namespace, labelSelector, fieldSelector, clock } = this.options;
    const next = new Map<Key, Entry<P>>();
    let version = '';
    let token: string | undefined;
    const began = clock.boot();
    do {
      const page: Page<T> = await kube.page(kind, {
        namespace,
        labelSelector,
        fieldSelector,
        continue: token,
        timeoutMs: 30_000,
        signal: this.stopping.signal,
      });
      for (const object of page.items) {
        const key = keyOf(object);
        const entry = this.entryOf(key, object);
        if (entry !== undefined) next.set(key, entry);
      }
      version = page.resourceVersion;
      token = page.continue ?? undefined;
    } while (token !== undefined);
    this.counters.lists++;
    // The copy is as old as the moment in which the list was begun.
    this.heardAt = began;
    const longest = this.options.relistMs ?? RELIST_MS;
    this.relistAt = clock.boot() + longest * (1 - 0.2 * this.random());

    const before = this.entries;
    const changes: Change<P>[] = [];
    for (const [key, { kept }] of before) {
      if (!next.has(key)) changes.push({ key, before: kept, after: undefined });
    }
    for (const [key, entry] of next) {
      const had = before.get(key);
      if (had !== entry) changes.push({ key, before: had?.kept, after: entry.kept });
    }
    this.entries = next;
    for (const { key, before: old, after } of changes) this.reindex(key, old, after);
    if (!this.isSynced) {
      this.isSynced = true;
      for (const one of this.waiting) one.resolve();
      this.waiting.clear();
    }
    for (const change of changes) this.tell(change);
    return version;
  }

  /** @returns the version to go on from */
  private async watch(from: string, latest: (version: string) => void): Promise<string> {
    const { kube, kind, namespace, labelSelector, fieldSelector, clock } = this.options;
    const [least, most] = WATCH_SECONDS;
    const seconds = least + Math.floor(this.random() * (most - least));
    const left = Math.max(1, Math.ceil((this.relistAt - clock.boot()) / 1000));
    let version = from;
    this.counters.watches++;
    this.opened = false;
    await kube.watch(
      kind,
      {
        namespace,
        labelSelector,
        fieldSelector,
        resourceVersion: from,
        timeoutSeconds: Math.min(seconds, left),
        quietMs: this.options.quietMs ?? QUIET_MS,
        signal: this.stopping.signal,
        opened: () => {
          this.opened = true;
          this.heard();
        },
      },
      (event) => {
        this.heard();
        this.failures = 0;
        this.lastError = null;
        version = this.take(event) ?? version;
        latest(version);
      },
    );
    this.heard();
    return version;
  }

  private take(event: WatchEvent<T>): string | undefined {
    if (event.type === 'BOOKMARK') {
      this.counters.bookmarks++;
      return event.resourceVersion;
    }
    this.counters.events++;
    const key = keyOf(event.object);
    const had = this.entries.get(key);
    const entry = event.type === 'DELETED' ? undefined : this.entryOf(key, event.object);
    if (event.type === 'DELETED') this.complained.delete(key);
    if (entry !== had) {
      if (entry === undefined) this.entries.delete(key);
      else this.entries.set(key, entry);
      this.reindex(key, had?.kept, entry?.kept);
      this.tell({ key, before: had?.kept, after: entry?.kept });
    }
    return event.object.metadata.resourceVersion;
  }

  /** What is kept of an object; the entry of before when it is the same version or cannot be read. */
  private entryOf(key: Key, object: T): Entry<P> | undefined {
    const had = this.entries.get(key);
    const version = object.metadata.resourceVersion ?? '';
    if (had !== undefined && had.version === version && version !== '') return had;
    try {
      const kept = this.options.project(object);
      this.complained.delete(key);
      return kept === undefined ? undefined : { version, kept };
    } catch (error) {
      this.counters.unreadable++;
      if (!this.complained.has(key)) {
        this.complained.add(key);
        this.options.logger.error(
          { kind: this.kind.plural, key, error: errorText(error) },
          'an object cannot be read; the others are not concerned',
        );
      }
      return had;
    }
  }

  private reindex(key: Key, before: P | undefined, after: P | undefined): void {
    for (const [index, values] of this.indexes) {
      const of = this.options.indexes?.[index] as (kept: P) => readonly string[];
      const now = after === undefined ? [] : of(after);
      for (const value of before === undefined ? [] : of(before)) {
        if (now.includes(value)) continue;
        const keys = values.get(value);
        keys?.delete(key);
        if (keys?.size === 0) values.delete(value);
      }
      for (const value of now) {
        const keys = values.get(value);
        if (keys === undefined) values.set(value, new Set([key]));
        else keys.add(key);
      }
    }
  }

  private tell(change: Change<P>): void {
    for (const listener of this.listeners) {
      try {
        listener(change);
      } catch (error) {
        this.options.logger.error(
          { kind: this.kind.plural, key: change.key, error: errorText(error) },
          'a listener failed',
        );
      }
    }
  }
}

const stopped = (kind: Resource): KubeError =>
  new KubeError('Cancelled', `the informer of ${kind.plural} is stopped`, { notSent: true });
