/** A source volume on temp folders with the real addon, and a comparison of two trees in every respect. */
import { createHash } from 'node:crypto';
import {
  lstatSync,
  mkdirSync,
  mkdtempSync,
  readdirSync,
  readFileSync,
  readlinkSync,
  rmSync,
  type Stats,
  statSync,
} from 'node:fs';
import { tmpdir } from 'node:os';
import { join } from 'node:path';
import type { Generation } from '../../lib/core/generation.ts';
import type { Clock, Logger, VolumePaths } from '../../lib/core/parts.ts';
import { DEFAULT_POLICY, type VolumePolicy } from '../../lib/core/policy.ts';
import { native } from '../../lib/native/load.ts';
import type { Watcher } from '../../lib/native/types.ts';
import { type SourceDeps, SourceVolume } from '../../lib/source/source-volume.ts';
import { type OpenStore, openVolumeStore } from '../../lib/store/volume-store.ts';

export const clock: Clock = {
  boot: () => native.bootMs(),
  now: () => Date.now(),
  setTimeout(fn, ms) {
    const timer = setTimeout(fn, ms);
    return { cancel: () => clearTimeout(timer) };
  },
};

export function silentLog(sink: { level: string; data: object; text: string }[] = []): Logger {
  const at =
    (level: string) =>
    (data: object, text: string): void => {
      sink.push({ level, data, text });
      if (process.env.DEBUG_LOG) console.error(level, text, JSON.stringify(data));
    };
  const log: Logger = {
    debug: at('debug'),
    info: at('info'),
    warn: at('warn'),
    error: at('error'),
    child: () => log,
  };
  return log;
}

export const QUICK: VolumePolicy = { ...DEFAULT_POLICY, debounceMs: 40, maxDelayMs: 400 };

export interface Rig {
  base: string;
  live: string;
  data: string;
  paths: VolumePaths;
  store: OpenStore;
  source: SourceVolume;
  watcher: Watcher;
  sealed: { generation: Generation; quiescent: boolean; caughtUp: boolean }[];
  cuts: number;
  log: { level: string; data: object; text: string }[];
  /** the same folders taken up again, as after a restart of the agent */
  restart(): Promise<Rig>;
  close(): Promise<void>;
}

export interface RigOptions {
  watcher?: { maxQueuedEvents?: number; maxWatches?: number };
  deps?: Partial<SourceDeps>;
  base?: string;
}

export function makeBase(): string {
  const base = mkdtempSync(join(tmpdir(), 'sv-source-'));
  mkdirSync(join(base, 'live'));
  return base;
}

export function makeRig(options: RigOptions = {}): Rig {
  const base = options.base ?? makeBase();
  const paths: VolumePaths = {
    live: join(base, 'live'),
    shadow: join(base, 'shadow'),
    incoming: join(base, 'incoming'),
    backups: join(base, 'backups'),
    state: join(base, 'state'),
  };
  const store = openVolumeStore(paths.state, 'ns', 'vol', { syncFile: (p) => native.syncFile(p) });
  const rig = {
    base,
    live: paths.live,
    data: join(paths.shadow, 'current', 'data'),
    paths,
    store,
    sealed: [],
    cuts: 0,
    log: [],
  } as unknown as Rig;
  rig.watcher = native.createWatcher(() => rig.source.wake(), options.watcher ?? {});
  let running = 0;
  const waiting: (() => void)[] = [];
  rig.source = new SourceVolume({
    name: { namespace: 'ns', volume: 'vol' },
    paths,
    store,
    native,
    watcher: rig.watcher,
    watchNumber: 1,
    clock,
    log: silentLog(rig.log),
    jobs: {
      async run(work) {
        while (running >= 2) await new Promise<void>((r) => waiting.push(r));
        running++;
        try {
          return await work();
        } finally {
          running--;
          waiting.shift()?.();
        }
      },
    },
    onCut: () => {
      rig.cuts++;
    },
    onSealed: (generation, quiescent, caughtUp) => rig.sealed.push({ generation, quiescent, caughtUp }),
    ...options.deps,
  });
  let open = true;
  const shut = async (): Promise<void> => {
    if (!open) return;
    open = false;
    await rig.source.stop();
    await rig.watcher.close();
    store.close();
  };
  rig.restart = async () => {
    await shut();
    rig.close = async () => {};
    const next = makeRig({ ...options, base });
    await next.source.recover();
    return next;
  };
  rig.close = async () => {
    await shut();
    rmSync(base, { recursive: true, force: true });
  };
  return rig;
}

export async function until(what: string, test: () => boolean, ms = 10_000): Promise<void> {
  for (const end = Date.now() + ms; !test(); ) {
    if (Date.now() > end) throw new Error(`timed out: ${what}`);
    await new Promise((r) => setTimeout(r, 10));
  }
}

/** A line per entry with everything that is part of the state. */
export function describeTree(
  root: string,
  skip: (kind: string) => boolean = () => false,
): Map<string, string> {
  const out = new Map<string, string>();
  const groups = new Map<string, string[]>();
  const walk = (dir: Buffer, rel: Buffer): void => {
    for (const name of readdirSync(dir, { encoding: 'buffer' }).sort(Buffer.compare)) {
      const path = Buffer.concat([dir, Buffer.from('/'), name]);
      const relative = rel.length === 0 ? name : Buffer.concat([rel, Buffer.from('/'), name]);
      const key = relative.toString('latin1');
      const s = lstatSync(path, { bigint: true });
      const meta = `${(s.mode & 0o7777n).toString(8)} ${s.uid}:${s.gid} ${s.mtimeNs}`;
      if (s.isSymbolicLink())
        out.set(key, `link ${s.uid}:${s.gid} ${s.mtimeNs} ${readlinkSync(path, { encoding: 'latin1' })}`);
      else if (s.isDirectory()) {
        out.set(key, `dir ${meta}`);
        walk(path, relative);
      } else if (s.isFile()) {
        // Names of one file within this tree; a copy that is kept for a reader elsewhere is no name of it.
        if (s.nlink > 1n) groups.set(String(s.ino), [...(groups.get(String(s.ino)) ?? []), key]);
        const sum = createHash('sha256').update(readFileSync(path)).digest('hex').slice(0, 16);
        out.set(key, `file ${meta} ${s.size} ${sum}`);
      } else if (!skip('special')) out.set(key, 'special');
    }
  };
  const s = statSync(root, { bigint: true });
  out.set('', `dir ${(s.mode & 0o7777n).toString(8)} ${s.uid}:${s.gid} ${s.mtimeNs}`);
  walk(Buffer.from(root), Buffer.alloc(0));
  for (const [first, ...others] of groups.values())
    for (const key of others) out.set(key, `${out.get(key)} =${first}`);
  return out;
}

/** What is different, at most ten lines; empty: nothing. */
export function treeDifferences(a: string, b: string): string[] {
  const x = describeTree(a, (k) => k === 'special');
  const y = describeTree(b, (k) => k === 'special');
  const out: string[] = [];
  for (const [path, text] of x)
    if (y.get(path) !== text) out.push(`${JSON.stringify(path)}: ${text} | ${y.get(path) ?? 'missing'}`);
  for (const [path, text] of y) if (!x.has(path)) out.push(`${JSON.stringify(path)}: missing | ${text}`);
  return out.slice(0, 10);
}

export type { Stats };
