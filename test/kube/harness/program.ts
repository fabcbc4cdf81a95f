/** Programs of test clusters: each ends with this process (prctl(2), PR_SET_PDEATHSIG) and writes a log of its own. */
import { type ChildProcess, execFile, spawn } from 'node:child_process';
import { closeSync, openSync, readdirSync, readFileSync } from 'node:fs';
import { createInterface } from 'node:readline';

/** The last lines of a file, empty when there is none. */
export function tail(file: string, lines = 15): string {
  try {
    return readFileSync(file, 'utf8').trimEnd().split('\n').slice(-lines).join('\n');
  } catch {
    return '';
  }
}

export class Program {
  readonly name: string;
  readonly log: string;
  private readonly child: ChildProcess;
  private readonly ended: Promise<void>;
  private over = false;

  /** @param argv the program by its absolute path and its arguments */
  constructor(name: string, log: string, argv: readonly string[], env: NodeJS.ProcessEnv = process.env) {
    this.name = name;
    this.log = log;
    const out = openSync(log, 'a');
    // prctl(2), PR_SET_PDEATHSIG, kept over the execve of nsenter
    this.child = spawn('setpriv', ['--pdeathsig', 'KILL', ...argv], { stdio: ['ignore', out, out], env });
    closeSync(out);
    this.ended = new Promise((resolve) => {
      const gone = (): void => {
        this.over = true;
        resolve();
      };
      this.child.on('exit', gone).on('error', gone);
    });
  }

  get running(): boolean {
    return !this.over;
  }

  get pid(): number {
    return this.child.pid ?? 0;
  }

  /** @throws Error with the end of its log when it has ended */
  check(): void {
    if (this.over) throw new Error(`${this.name} ended:\n${tail(this.log)}`);
  }

  signal(signal: NodeJS.Signals): void {
    if (!this.over) this.child.kill(signal);
  }

  /** Until it is really gone, also when it was stopped with SIGSTOP: a port is free only then. */
  async stop(signal: NodeJS.Signals = 'SIGKILL'): Promise<void> {
    this.signal('SIGCONT');
    this.signal(signal);
    await this.ended;
  }

  async gone(): Promise<void> {
    await this.ended;
  }
}

/** Processes that a process has started. */
export function childrenOf(pid: number): number[] {
  const children: number[] = [];
  for (const name of readdirSync('/proc')) {
    if (!/^\d+$/.test(name)) continue;
    try {
      const text = readFileSync(`/proc/${name}/stat`, 'latin1');
      if (Number(text.slice(text.lastIndexOf(')') + 2).split(' ')[1]) === pid) children.push(Number(name));
    } catch {
      // It has just ended.
    }
  }
  return children;
}

export interface Output {
  stdout: string;
  stderr: string;
}

/**
 * Runs a program to its end.
 * @throws Error with what it wrote to standard error
 */
export function run(
  program: string,
  args: readonly string[],
  options: { input?: string; env?: NodeJS.ProcessEnv; limitMs?: number; cwd?: string } = {},
): Promise<Output> {
  return new Promise((resolve, reject) => {
    const { input = '', limitMs = 60_000, ...rest } = options;
    const child = execFile(
      program,
      [...args],
      { ...rest, timeout: limitMs, killSignal: 'SIGKILL', maxBuffer: 256 * 1024 * 1024 },
      (error, stdout, stderr) => {
        if (!error) return resolve({ stdout, stderr });
        const why = stderr.trim() || (error.killed ? `not within ${limitMs} ms` : error.message);
        reject(new Error(`${program.split('/').at(-1)} ${args.join(' ').slice(0, 300)}: ${why}`));
      },
    );
    child.stdin?.on('error', () => {}); // it may end without reading all of it
    child.stdin?.end(input);
  });
}

/** Runs a program and tells its lines as they come. Returns what ends it. */
export function follow(argv: readonly string[], line: (text: string) => void): () => void {
  const child = spawn('setpriv', ['--pdeathsig', 'KILL', ...argv], { stdio: ['ignore', 'pipe', 'ignore'] });
  const reader = createInterface({ input: child.stdout });
  reader.on('line', line);
  return () => {
    child.kill('SIGKILL');
    reader.close();
  };
}
