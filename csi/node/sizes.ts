/**
 * Holds published volumes to their size, by what the pool's file system can do (the addon's limitTree). The agent says
 * how large each may be; what came of it is told to the agent. A limit stands exactly while a volume is published: a
 * copy, which only the agent writes to, has none. What hinders a limit never hinders a pod.
 */
import type { Logger, VolumeName } from '../../lib/core/parts.ts';
import { volumeKey } from '../../lib/core/parts.ts';
import type { SizeOutcome } from '../../lib/fence/types.ts';

export interface TreeLimit {
  enforced: boolean;
  reason: string;
  /** what counts, bytes, while it is enforced */
  used: number;
}

export interface SizesDeps {
  /** limitTree of the addon; 0: no limit */
  limit(tree: string, bytes: number): Promise<TreeLimit>;
  /** ms */
  clock(): number;
  log: Logger;
  /** how long a publish waits for its limit, ms */
  waitMs?: number;
}

/** A file system that is busy (btrfs counting a large disk for the first time) keeps no pod waiting for longer. */
const WAIT_MS = 5_000;
/** What could not be enforced is tried again after this time: quotas may have been switched on. */
const AGAIN_MS = 60_000;

interface Kept {
  tree: string;
  /** what was asked for last; null: no limit */
  bytes: number | null;
  outcome: TreeLimit | null;
  at: number;
  /** one call a tree at a time, in the order in which they were asked for */
  last: Promise<void>;
}

export class Sizes {
  readonly #deps: SizesDeps;
  readonly #kept = new Map<string, Kept>();

  constructor(deps: SizesDeps) {
    this.#deps = deps;
  }

  /** Limits the tree of a volume that is published or about to be. Resolves when that is done, or after a while. */
  async set(name: VolumeName, tree: string, bytes: number | null): Promise<void> {
    const done = this.#ask(volumeKey(name), tree, bytes);
    let timer: NodeJS.Timeout | undefined;
    const late = new Promise<void>((resolve) => {
      timer = setTimeout(resolve, this.#deps.waitMs ?? WAIT_MS);
    });
    await Promise.race([done, late]);
    clearTimeout(timer);
  }

  /** The agent's newest word about a published volume: asked for again only when it is news. */
  heard(name: VolumeName, tree: string, bytes: number | null): void {
    const kept = this.#kept.get(volumeKey(name));
    const failed = kept?.bytes != null && kept.outcome?.enforced === false;
    const again = failed && this.#deps.clock() - kept.at >= AGAIN_MS;
    if (kept && kept.tree === tree && kept.bytes === bytes && !again) return;
    void this.#ask(volumeKey(name), tree, bytes);
  }

  /** What a limited volume holds, and how much it may; null: nothing limits it. */
  async usage(name: VolumeName): Promise<{ used: number; bytes: number } | null> {
    const one = this.of(name);
    if (!one?.enforced) return null;
    await this.set(name, one.tree, one.bytes);
    const now = this.of(name);
    return now?.enforced ? { used: now.used, bytes: now.bytes } : null;
  }

  /** null: nothing was tried yet, or nothing is limited */
  of(name: VolumeName): (TreeLimit & { bytes: number; tree: string }) | null {
    const kept = this.#kept.get(volumeKey(name));
    return kept?.outcome && kept.bytes !== null
      ? { ...kept.outcome, bytes: kept.bytes, tree: kept.tree }
      : null;
  }

  /** For the agent. */
  outcomes(names: readonly VolumeName[]): SizeOutcome[] {
    return names.flatMap(({ namespace, volume }) => {
      const one = this.of({ namespace, volume });
      if (!one) return [];
      const { bytes, enforced, reason } = one;
      return [{ namespace, volume, bytes, enforced, reason: reason.slice(0, 1024) }];
    });
  }

  #ask(key: string, tree: string, bytes: number | null): Promise<void> {
    const before = this.#kept.get(key);
    const kept: Kept = {
      tree,
      bytes,
      outcome: before?.bytes === bytes ? (before?.outcome ?? null) : null,
      at: this.#deps.clock(),
      last: Promise.resolve(),
    };
    this.#kept.set(key, kept);
    kept.last = (before?.last ?? Promise.resolve()).then(() => this.#carryOut(key, kept));
    return kept.last;
  }

  async #carryOut(key: string, kept: Kept): Promise<void> {
    const { log } = this.#deps;
    let outcome: TreeLimit;
    try {
      outcome = await this.#deps.limit(kept.tree, kept.bytes ?? 0);
    } catch (error) {
      outcome = { enforced: false, reason: (error as Error).message, used: 0 };
    }
    const said = kept.outcome?.reason;
    const news = !kept.outcome?.enforced;
    kept.outcome = outcome;
    kept.at = this.#deps.clock();
    if (kept.bytes === null) {
      if (this.#kept.get(key) === kept) this.#kept.delete(key);
      if (outcome.reason) log.warn({ volume: key, problem: outcome.reason }, 'a size limit cannot be lifted');
    } else if (outcome.enforced) {
      if (news) log.info({ volume: key, bytes: kept.bytes }, 'the volume is held to its size');
    } else if (outcome.reason !== said)
      log.warn({ volume: key, bytes: kept.bytes, problem: outcome.reason }, 'the size is not enforced');
  }
}
