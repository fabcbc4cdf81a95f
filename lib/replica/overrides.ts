import type { ReplicaPolicy } from '../core/policy.ts';
import { Kind, kindOf, modeOf } from '../core/record.ts';

export type Overrides = Pick<ReplicaPolicy, 'ownerUid' | 'ownerGid' | 'fileMode' | 'dirMode'>;

/**
 * The record with the policy's owner and modes. The bits of a file mode that allow execution stay as on the
 * source. The same Buffer when nothing changes.
 */
export function withOverrides(record: Buffer, o: Overrides): Buffer {
  const kind = kindOf(record);
  const mode = modeOf(record);
  let wanted = mode;
  if (kind === Kind.file && o.fileMode !== null) wanted = o.fileMode | (mode & 0o111);
  else if (kind === Kind.directory && o.dirMode !== null) wanted = o.dirMode;
  const uid = o.ownerUid ?? record.readUInt32LE(8);
  const gid = o.ownerGid ?? record.readUInt32LE(12);
  if (kind === Kind.absent) return record;
  if (wanted === mode && uid === record.readUInt32LE(8) && gid === record.readUInt32LE(12)) return record;
  const copy = Buffer.from(record);
  copy.writeUInt16LE(wanted, 6);
  copy.writeUInt32LE(uid, 8);
  copy.writeUInt32LE(gid, 12);
  return copy;
}
