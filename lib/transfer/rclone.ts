/** One rclone process for one file of a transfer. Its standard output is the content. */
import { type ChildProcess, spawn } from 'node:child_process';
import { SimpleVolumeError } from '../core/errors.ts';

export interface CatOptions {
  /** absolute path of the rclone binary; null: there is none */
  binary: string | null;
  /** WebDAV folder, without the file's name */
  folder: string;
  /** a plain name (`manifest`, `pack-0000`) */
  name: string;
  /** bearer token or grant: goes into the environment of the process, never into its arguments */
  token: string;
  /** PEM file with the authorities for https, null: the system's */
  caFile?: string | null;
  /** read ahead of what is taken, bytes; default 0 */
  bufferBytes?: number;
  /** unix socket to dial instead of the URL's host */
  socket?: string | null;
  signal: AbortSignal;
  /** ms without a byte after which the transfer is given up; default 60,000 */
  stallMs?: number;
  /** ms between SIGTERM and SIGKILL; default 2,000 */
  graceMs?: number;
}

/** Exit codes of rclone (https://rclone.org/docs/#exit-code). */
const EXITS: Record<number, string> = {
  1: 'an error without a category',
  2: 'usage',
  3: 'folder not found',
  4: 'file not found',
  5: 'a temporary error, retries used up',
  6: 'less serious errors',
  7: 'a fatal error',
  8: 'transfer limit reached',
  9: 'nothing transferred',
  10: 'duration limit reached',
};

const argumentsFor = ({ name, bufferBytes = 0 }: CatOptions): string[] => [
  'cat',
  `:webdav:${name}`,
  // no configuration of the machine or user counts
  ...['--config', '/dev/null'],
  // a number alone would be KiB
  ...['--buffer-size', bufferBytes === 0 ? '0' : `${bufferBytes}B`],
  ...['--transfers', '1'],
  ...['--checkers', '1'],
  ...['--multi-thread-streams', '0'],
  ...['--retries', '1'],
  ...['--low-level-retries', '3'],
  ...['--contimeout', '10s'],
  ...['--timeout', '60s'],
  ...['--stats', '0'],
  ...['--log-level', 'ERROR'],
];

function environment(o: CatOptions): NodeJS.ProcessEnv {
  return {
    PATH: process.env.PATH ?? '/usr/bin:/bin',
    HOME: '/nonexistent',
    RCLONE_WEBDAV_URL: o.folder,
    RCLONE_WEBDAV_VENDOR: 'other',
    RCLONE_WEBDAV_BEARER_TOKEN: o.token,
    // by environment: a binary that does not know the option ignores it (its default is 10 ms before every request)
    RCLONE_WEBDAV_PACER_MIN_SLEEP: '1ms',
    ...(o.socket ? { RCLONE_WEBDAV_UNIX_SOCKET: o.socket } : {}),
    ...(o.caFile ? { RCLONE_CA_CERT: o.caFile } : {}),
    GOMEMLIMIT: `${40 + Math.ceil((o.bufferBytes ?? 0) / 2 ** 20)}MiB`,
    GOGC: '50',
    GOMAXPROCS: '2',
  };
}

/** The last lines of stderr, without what is secret. */
class Tail {
  #text = '';
  readonly #secret: string;
  constructor(secret: string) {
    this.#secret = secret;
  }
  add(piece: string): void {
    this.#text = (this.#text + piece).slice(-8192);
  }
  lines(): string {
    return this.#text
      .replaceAll(this.#secret, '(token)')
      .replace(/sv1\.[\w-]+\.[\w-]+/g, '(grant)')
      .replace(/(bearer|basic)\s+\S+/gi, '$1 (redacted)')
      .trim()
      .split('\n')
      .slice(-3)
      .map((l) => l.slice(0, 400))
      .join('; ');
  }
}

/** Signals the whole process group; it is gone when that fails. */
function signalGroup(child: ChildProcess, signal: NodeJS.Signals): void {
  try {
    if (child.pid !== undefined) process.kill(-child.pid, signal);
  } catch {
    // ESRCH: nobody left
  }
}

/**
 * Streams a file through `rclone cat`. `onData` gives the back-pressure; the time that it takes does not count
 * as a stall. When this settles the process and its group are gone.
 * @returns bytes received
 * @throws RCLONE_MISSING, CANCELLED, PULL_FAILED (with rclone's last words), or what onData throws
 */
export async function rcloneCat(o: CatOptions, onData: (chunk: Buffer) => Promise<void>): Promise<number> {
  if (o.binary === null)
    throw new SimpleVolumeError('RCLONE_MISSING', 'no rclone was found; nothing can be pulled to this node');
  if (o.signal.aborted) throw new SimpleVolumeError('CANCELLED', `pull of ${o.name} was cancelled`);
  const stallMs = o.stallMs ?? 60_000;
  const child = spawn(o.binary, argumentsFor(o), {
    env: environment(o),
    cwd: '/',
    stdio: ['ignore', 'pipe', 'pipe'],
    detached: true,
  });
  const failedToStart = new Promise<NodeJS.ErrnoException>((resolve) => child.once('error', resolve));
  const ended = new Promise<{ code: number | null; signal: NodeJS.Signals | null }>((resolve) =>
    child.once('close', (code, signal) => resolve({ code, signal })),
  );
  child.once('exit', () => {
    // whatever it has started goes with it; a helper that left the group must not keep us waiting either
    signalGroup(child, 'SIGKILL');
    setTimeout(() => child.stderr.destroy(), 1000).unref();
  });
  const tail = new Tail(o.token);
  child.stderr.setEncoding('utf8').on('data', (piece: string) => tail.add(piece));

  let stopped: SimpleVolumeError | null = null;
  let killer: NodeJS.Timeout | null = null;
  const stop = (why: SimpleVolumeError): void => {
    if (stopped) return;
    stopped = why;
    signalGroup(child, 'SIGTERM');
    killer = setTimeout(() => signalGroup(child, 'SIGKILL'), o.graceMs ?? 2000);
    child.stdout.destroy();
  };
  const cancelled = (): void => stop(new SimpleVolumeError('CANCELLED', `pull of ${o.name} was cancelled`));
  o.signal.addEventListener('abort', cancelled, { once: true });
  const watch = (): NodeJS.Timeout =>
    setTimeout(
      () => stop(new SimpleVolumeError('PULL_FAILED', `pull of ${o.name}: no byte for ${stallMs / 1000} s`)),
      stallMs,
    );

  let received = 0;
  let thrown: unknown = null;
  let stall = watch();
  try {
    for await (const chunk of child.stdout) {
      clearTimeout(stall);
      received += (chunk as Buffer).length;
      await onData(chunk as Buffer);
      stall = watch();
    }
  } catch (error) {
    thrown = error;
    if (!stopped) stop(new SimpleVolumeError('CANCELLED', 'the receiver failed'));
    else thrown = null;
  }
  // after the last byte the process may linger; the stall watch ends that too
  const end = await Promise.race([ended, failedToStart]);
  clearTimeout(stall);
  o.signal.removeEventListener('abort', cancelled);
  if (end instanceof Error) {
    throw new SimpleVolumeError(
      end.code === 'ENOENT' || end.code === 'EACCES' ? 'RCLONE_MISSING' : 'PULL_FAILED',
      `rclone does not start (${o.binary}): ${end.code ?? end.message}`,
    );
  }
  if (killer) clearTimeout(killer);
  if (thrown !== null) throw thrown;
  if (stopped) throw stopped;
  if (end.code !== 0) {
    const how =
      end.code === null
        ? `was killed by ${end.signal}`
        : `ended with ${end.code} (${EXITS[end.code] ?? 'unknown'})`;
    const words = tail.lines();
    throw new SimpleVolumeError(
      'PULL_FAILED',
      `pull of ${o.name}: rclone ${how}${words ? `: ${words}` : ''}`,
    );
  }
  return received;
}
