/** What Linux says about a process (proc(5)). Sizes in bytes, times in seconds. */
import { readdirSync, readFileSync, statSync } from 'node:fs';

export interface Memory {
  rss: number;
  /** Private and shared pages, each shared page divided by its users. */
  pss: number;
  anonymous: number;
}

const KIB = 1024;

/** Parses `Name:   123 kB` lines, summing lines of the same name. */
export function parseKiB(text: string): Map<string, number> {
  const values = new Map<string, number>();
  for (const match of text.matchAll(/^(\w+):\s+(\d+) kB$/gm)) {
    const name = match[1] as string;
    values.set(name, (values.get(name) ?? 0) + Number(match[2]) * KIB);
  }
  return values;
}

/** null when the process has ended. */
export function memoryOf(pid: number): Memory | null {
  try {
    const values = parseKiB(readFileSync(`/proc/${pid}/smaps_rollup`, 'utf8'));
    return {
      rss: values.get('Rss') ?? 0,
      pss: values.get('Pss') ?? 0,
      anonymous: values.get('Anonymous') ?? 0,
    };
  } catch {
    return null;
  }
}

/** Bytes that the device of a directory has written so far (Documentation/block/stat.rst, field 7, sectors of 512). */
export function writtenTo(directory: string): number {
  const { dev } = statSync(directory, { bigint: true });
  // glibc's major() and minor(), makedev(3)
  const major = ((dev >> 8n) & 0xfffn) | ((dev >> 32n) & ~0xfffn);
  const minor = (dev & 0xffn) | ((dev >> 12n) & ~0xffn);
  const stat = readFileSync(`/sys/dev/block/${major}:${minor}/stat`, 'utf8').trim().split(/\s+/);
  return Number(stat[6]) * 512;
}

/** Fields 14 and 15 of /proc/pid/stat, in seconds; the name in field 2 may hold blanks and brackets. */
export function parseCpu(stat: string, ticksPerSecond = 100): number {
  const fields = stat.slice(stat.lastIndexOf(')') + 2).split(' ');
  return (Number(fields[11]) + Number(fields[12])) / ticksPerSecond;
}

export const cpuOf = (pid: number): number => parseCpu(readFileSync(`/proc/${pid}/stat`, 'utf8'));

/** Children, grandchildren and so on that live now. */
export function descendants(pid: number): number[] {
  const found: number[] = [];
  let tasks: string[] = [];
  try {
    tasks = readdirSync(`/proc/${pid}/task`);
  } catch {
    return found;
  }
  for (const task of tasks) {
    let text = '';
    try {
      text = readFileSync(`/proc/${pid}/task/${task}/children`, 'utf8');
    } catch {
      continue;
    }
    for (const child of text.trim().split(' ').filter(Boolean).map(Number))
      found.push(child, ...descendants(child));
  }
  return found;
}

/** Pages of files that the kernel keeps, the whole machine. */
export function pageCache(): number {
  const values = parseKiB(readFileSync('/proc/meminfo', 'utf8'));
  return (values.get('Cached') ?? 0) + (values.get('Buffers') ?? 0);
}

/** Highest sum of PSS of a process and all its descendants while it is watched. */
export class PeakWatcher {
  peak = 0;
  readonly #pid: number;
  readonly #timer: NodeJS.Timeout;

  constructor(pid: number, everyMs = 50) {
    this.#pid = pid;
    this.#timer = setInterval(() => this.#look(), everyMs);
  }

  #look(): void {
    let sum = 0;
    for (const pid of [this.#pid, ...descendants(this.#pid)]) sum += memoryOf(pid)?.pss ?? 0;
    this.peak = Math.max(this.peak, sum);
  }

  stop(): number {
    clearInterval(this.#timer);
    this.#look();
    return this.peak;
  }
}
