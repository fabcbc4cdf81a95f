/**
 * What is to be done about a target: plain data in and out, no system call. What is there comes from the mount table
 * and the disk, what was promised from the record; the steps are carried out in order by node.ts, and are the same again
 * after a crash in the middle.
 */
import type { Layer } from './mounts.ts';

/** One published target, durable before anything is mounted. */
export interface PublishRecord {
  volumeId: string;
  namespace: string;
  volume: string;
  pool: string;
  target: string;
  /** null: not told; then its writer cannot be stopped */
  podUid: string | null;
  /** in which it was published; null: lost */
  epoch: number | null;
  accessMode: string;
  readOnly: boolean;
  flags: readonly string[];
  /** of the boot in which it was mounted: nothing of another one is left */
  bootId: string;
  /** another node goes on with the volume: the target shows an empty read-only file system */
  moved: boolean;
  /** size as last told, bytes; null: never */
  bytes: number | null;
}

export type Refusal = { refuse: 'ALREADY_EXISTS' | 'FAILED_PRECONDITION'; message: string };

export type PublishStep =
  | { do: 'mkdir' }
  /** durable, before the mount */
  | { do: 'record' }
  | { do: 'bind' }
  | { do: 'remount'; flags: readonly string[] };

/** What is found at a target. */
export interface Found {
  /** null: nothing there */
  kind: 'directory' | 'other' | null;
  /** from the bottom to the top */
  layers: readonly { layer: Layer; options: readonly string[] }[];
}

export interface Wanted {
  volumeId: string;
  accessMode: string;
  readOnly: boolean;
  flags: readonly string[];
  podUid: string | null;
}

const SINGLE = 'SINGLE_NODE_SINGLE_WRITER';
const sameList = (a: readonly string[], b: readonly string[]): boolean =>
  [...a].sort().join() === [...b].sort().join();

/** Options that the mount must show; what is the default shows nothing. */
export function wantedOptions(readOnly: boolean, flags: readonly string[]): string[] {
  const off = new Set(['rw', 'exec', 'suid', 'dev', 'atime', 'diratime', 'relatime']);
  return [
    ...new Set([readOnly ? 'ro' : 'rw', ...flags.filter((flag) => flag !== 'ro' && flag !== 'rw')]),
  ].filter((flag) => flag === 'rw' || !off.has(flag));
}

/** What is known without asking anybody: whether this target may be what is wanted at all. */
export function judgePublish(
  wanted: Wanted,
  record: PublishRecord | null,
  others: readonly PublishRecord[],
  found: Found,
): Refusal | null {
  const { volumeId, accessMode } = wanted;
  if (record && record.volumeId !== volumeId)
    return {
      refuse: 'ALREADY_EXISTS',
      message: `${record.volumeId} is published at this target`,
    };
  if (record?.moved)
    return {
      refuse: 'FAILED_PRECONDITION',
      message: `${volumeId} went on to another node while it was published here: this pod must end first`,
    };
  if (
    record &&
    (record.readOnly !== wanted.readOnly ||
      // of a record that was lost only what the mount shows is known
      (record.epoch !== null &&
        (!sameList(record.flags, wanted.flags) || record.accessMode !== accessMode))) &&
    found.layers.length > 0
  )
    return {
      refuse: 'ALREADY_EXISTS',
      message: `${volumeId} is published at this target in another way (${record.readOnly ? 'read-only' : 'writable'}, ${record.accessMode}${record.flags.length ? `, ${record.flags.join(',')}` : ''})`,
    };
  const living = others.filter((one) => one.volumeId === volumeId && !one.moved);
  if (living.length > 0 && (accessMode === SINGLE || living.some((one) => one.accessMode === SINGLE)))
    return {
      refuse: 'FAILED_PRECONDITION',
      message: `${volumeId} is published at ${living[0]?.target} already, and one of the two is to be the only pod (ReadWriteOncePod)`,
    };
  if (found.kind === 'other')
    return { refuse: 'FAILED_PRECONDITION', message: 'the target exists and is no directory' };
  const strange = found.layers.find(({ layer }) => layer !== 'volume');
  if (strange)
    return {
      refuse: 'FAILED_PRECONDITION',
      message: 'something else is mounted at the target; it is not covered and not taken away',
    };
  return null;
}

/** The steps from what is found to what is wanted. Mounted as it should be: none. */
export function publishSteps(wanted: Wanted, record: PublishRecord | null, found: Found): PublishStep[] {
  const steps: PublishStep[] = [];
  if (found.kind === null) steps.push({ do: 'mkdir' });
  const top = found.layers.at(-1);
  if (!record || !top || record.epoch === null) steps.push({ do: 'record' });
  if (!top) steps.push({ do: 'bind' });
  const options = wantedOptions(wanted.readOnly, wanted.flags);
  const plain = options.length === 1 && options[0] === 'rw';
  if (top ? !options.every((one) => top.options.includes(one)) : !plain)
    steps.push({ do: 'remount', flags: options });
  return steps;
}

export type UnpublishStep = { do: 'umount' } | { do: 'rmdir' } | { do: 'forget' };

/** Every layer of ours comes off, however many there are; then the directory, which is empty, then the record. */
export function unpublishSteps(
  volumeId: string,
  record: PublishRecord | null,
  found: Found,
): Refusal | UnpublishStep[] {
  if (record && record.volumeId !== volumeId)
    return {
      refuse: 'FAILED_PRECONDITION',
      message: `${record.volumeId} is published at this target, not ${volumeId}`,
    };
  if (found.layers.some(({ layer }) => layer === 'foreign'))
    return {
      refuse: 'FAILED_PRECONDITION',
      message: 'something that is not this volume is mounted at the target; it is not taken away',
    };
  return [
    ...found.layers.map(() => ({ do: 'umount' }) as const),
    ...(found.kind === 'directory' ? [{ do: 'rmdir' } as const] : []),
    ...(record ? [{ do: 'forget' } as const] : []),
  ];
}
