/**
 * One of up to ten clusters on this machine: everything that it makes outside its folder (network namespaces, cgroups,
 * addresses) is named after its number, so that it is found again whatever became of the process that made it.
 */
import { closeSync, mkdirSync, openSync, readFileSync, rmSync, writeSync } from 'node:fs';
import path from 'node:path';

export const NODE_COUNT = 3;
const INSTANCES = 10;
/** Not below the folder for temporary files, which may be another one for every process. */
const RECORDS = '/run/simple-volume-clusters';

export interface Instance {
  number: number;
  /** network namespace of the control plane, and the start of the nodes' */
  name: string;
  /** address of the control plane, which is every node's gateway too */
  address: string;
  /** address of this machine, from which the API server can be reached */
  hostAddress: string;
  /** length of the prefix of both */
  prefix: number;
  /** CIDR of the Services */
  services: string;
  /** the Service of a name server */
  dnsService: string;
  /** CIDR of all pods */
  pods: string;
  nodes: readonly NodeNames[];
}

export interface NodeNames {
  /** n1 ... */
  name: string;
  /** its network namespace and its cgroup */
  scope: string;
  address: string;
  mac: string;
  /** CIDR of its pods */
  pods: string;
}

export function instance(number: number): Instance {
  if (!Number.isInteger(number) || number < 0 || number >= INSTANCES)
    throw new RangeError(`a cluster's number is 0 to ${INSTANCES - 1}, not ${number}`);
  const name = `sv${number}`;
  const nodes = Array.from({ length: NODE_COUNT }, (_, index) => ({
    name: `n${index + 1}`,
    scope: `${name}-n${index + 1}`,
    address: `10.66.${number}.${11 + index}`,
    // The same after a power cut: neighbours keep what they know of it.
    mac: `02:53:56:00:0${number}:0${index + 1}`,
    pods: `10.77.${number * 16 + index + 1}.0/24`,
  }));
  return {
    number,
    name,
    address: `10.66.${number}.1`,
    hostAddress: `10.66.${number}.254`,
    prefix: 24,
    services: `10.96.${number}.0/24`,
    dnsService: `10.96.${number}.10`,
    pods: `10.77.${number * 16}.0/20`,
    nodes,
  };
}

/** When a process began, in ticks since the start of the machine; null when there is none. Field 22 of proc(5) stat. */
function beginOf(pid: number): string | null {
  try {
    const text = readFileSync(`/proc/${pid}/stat`, 'latin1');
    return text.slice(text.lastIndexOf(')') + 2).split(' ')[19] ?? null;
  } catch {
    return null;
  }
}

interface Record {
  pid: number;
  begin: string;
  folder: string;
}

const recordOf = (number: number): string => path.join(RECORDS, String(number));

/** Who has taken a number, and where; null when nobody has. */
function readRecord(number: number): Record | null {
  try {
    return JSON.parse(readFileSync(recordOf(number), 'utf8')) as Record;
  } catch {
    return null;
  }
}

/** Whether a living process has this number. */
export function isTaken(number: number): boolean {
  const record = readRecord(number);
  return record !== null && beginOf(record.pid) === record.begin;
}

/** The folder of the run that last had this number and did not give it back. */
export function forgottenFolder(number: number): string | null {
  return readRecord(number)?.folder ?? null;
}

/**
 * Takes a number for this process.
 * @param wanted null for the first that is free
 * @param cleanUp called for a number whose process is gone, before it is taken
 * @throws Error when it is not free
 */
export function take(wanted: number | null, folder: string, cleanUp: (number: number) => void): Instance {
  mkdirSync(RECORDS, { recursive: true, mode: 0o700 });
  const candidates = wanted === null ? Array.from({ length: INSTANCES }, (_, n) => n) : [wanted];
  for (const number of candidates) {
    const chosen = instance(number);
    if (isTaken(number)) continue;
    cleanUp(number);
    rmSync(recordOf(number), { force: true });
    try {
      const file = openSync(recordOf(number), 'wx', 0o600);
      const record: Record = { pid: process.pid, begin: beginOf(process.pid) ?? '', folder };
      writeSync(file, JSON.stringify(record));
      closeSync(file);
      return chosen;
    } catch (error) {
      if ((error as NodeJS.ErrnoException).code !== 'EEXIST') throw error;
    }
  }
  throw new Error(
    wanted === null
      ? 'all ten clusters of this machine are running'
      : `cluster ${wanted} is running already; SIMPLE_VOLUME_CLUSTER names another number`,
  );
}

export function giveBack(number: number): void {
  rmSync(recordOf(number), { force: true });
}
