/**
 * The published targets on the disk of the host, one small file each, written whole or not at all, so that csi-node
 * knows after any crash what it may have mounted. What is mounted is never taken from here, only from the mount table.
 */
import { createHash } from 'node:crypto';
import {
  closeSync,
  fsyncSync,
  mkdirSync,
  openSync,
  readdirSync,
  readFileSync,
  renameSync,
  rmSync,
  writeSync,
} from 'node:fs';
import { join } from 'node:path';
import type { Logger } from '../../lib/core/parts.ts';
import type { PublishRecord } from './plan.ts';

const FORMAT = 1;

export class Records {
  readonly #folder: string;
  readonly #all = new Map<string, PublishRecord>();

  /** Reads what there is. A file that cannot be read is put aside: what it was about is found in the mount table. */
  constructor(folder: string, log: Logger) {
    this.#folder = folder;
    mkdirSync(folder, { recursive: true, mode: 0o700 });
    for (const name of readdirSync(folder)) {
      const file = join(folder, name);
      if (name.endsWith('.tmp')) rmSync(file, { force: true });
      if (!name.endsWith('.json')) continue;
      try {
        const { format, record } = JSON.parse(readFileSync(file, 'utf8')) as {
          format: number;
          record: PublishRecord;
        };
        if (format !== FORMAT || typeof record.target !== 'string' || this.#file(record.target) !== file)
          throw new Error(`not a record of format ${FORMAT}`);
        this.#all.set(record.target, record);
      } catch (error) {
        renameSync(file, `${file}.bad`);
        log.error({ file, problem: (error as Error).message }, 'a record of a mount cannot be read');
      }
    }
  }

  #file(target: string): string {
    return join(this.#folder, `${createHash('sha256').update(target).digest('hex').slice(0, 32)}.json`);
  }

  get(target: string): PublishRecord | null {
    return this.#all.get(target) ?? null;
  }

  all(): PublishRecord[] {
    return [...this.#all.values()];
  }

  of(volumeId: string): PublishRecord[] {
    return this.all().filter((one) => one.volumeId === volumeId);
  }

  /** Durable when it returns. */
  put(record: PublishRecord): void {
    const file = this.#file(record.target);
    const fd = openSync(`${file}.tmp`, 'w', 0o600);
    try {
      writeSync(fd, JSON.stringify({ format: FORMAT, record }));
      fsyncSync(fd);
    } finally {
      closeSync(fd);
    }
    renameSync(`${file}.tmp`, file);
    this.#sync();
    this.#all.set(record.target, record);
  }

  delete(target: string): void {
    if (!this.#all.has(target)) return;
    rmSync(this.#file(target), { force: true });
    this.#sync();
    this.#all.delete(target);
  }

  #sync(): void {
    const fd = openSync(this.#folder, 'r');
    try {
      fsyncSync(fd);
    } finally {
      closeSync(fd);
    }
  }
}
