/** One program of the test run: its output kept, its time limited, its whole process group ended. */
import { spawn } from 'node:child_process';

export interface Ended {
  /** Null when all is well, else "exit code 1", "killed by SIGSEGV", "time limit of 60 s". */
  ending: string | null;
  stdout: string;
  /** Standard output and standard error as they came. */
  all: string;
}

const KEEP_BYTES = 32 * 1024 * 1024;
const running = new Set<number>();

/** Ends every program that is still running (the runner itself was told to stop). */
export function endAll(): void {
  for (const pid of running) killGroup(pid);
}

function killGroup(pid: number): void {
  try {
    process.kill(-pid, 'SIGKILL');
  } catch {
    // It is gone already.
  }
}

/**
 * Runs a program to its end.
 *
 * @param limitS seconds after which it is ended with all that it started
 */
export function runProgram(
  program: string,
  args: readonly string[],
  options: { cwd: string; env?: NodeJS.ProcessEnv; limitS: number },
): Promise<Ended> {
  return new Promise((resolve) => {
    const out: Buffer[] = [];
    const all: Buffer[] = [];
    let bytes = 0;
    let late = false;
    const child = spawn(program, args, {
      cwd: options.cwd,
      env: { ...process.env, ...options.env },
      stdio: ['ignore', 'pipe', 'pipe'],
      detached: true,
    });
    const pid = child.pid;
    if (pid !== undefined) running.add(pid);
    const timer = setTimeout(() => {
      late = true;
      if (pid !== undefined) killGroup(pid);
    }, options.limitS * 1000);
    const keep = (chunk: Buffer, standard: boolean): void => {
      bytes += chunk.length;
      if (bytes > KEEP_BYTES) return;
      all.push(chunk);
      if (standard) out.push(chunk);
    };
    child.stdout.on('data', (chunk: Buffer) => keep(chunk, true));
    child.stderr.on('data', (chunk: Buffer) => keep(chunk, false));
    const done = (ending: string | null): void => {
      clearTimeout(timer);
      if (pid !== undefined) {
        running.delete(pid);
        killGroup(pid); // what it left behind
      }
      resolve({ ending, stdout: Buffer.concat(out).toString(), all: Buffer.concat(all).toString() });
    };
    child.on('error', (error) => done(`cannot start ${program}: ${error.message}`));
    // What a test leaves running may hold the pipes open: its exit counts, and the pipes get a moment to drain.
    child.on('exit', (code, signal) => {
      const ending = late
        ? `time limit of ${options.limitS} s`
        : signal !== null
          ? `killed by ${signal}`
          : code !== 0
            ? `exit code ${code}`
            : null;
      const grace = setTimeout(() => done(ending), 2000);
      child.on('close', () => {
        clearTimeout(grace);
        done(ending);
      });
    });
  });
}
