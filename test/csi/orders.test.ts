/**
 * Any order of calls, crashes and moves, by seeds: csi-node as it is, on a mount table that is played, with an agent that
 * is played. After every step: no mount without its record, never two layers, nothing mounted anew on a node that is not
 * active; and never a refusal of what must succeed.
 */
import { mkdirSync, mkdtempSync, realpathSync, rmSync } from 'node:fs';
import { tmpdir } from 'node:os';
import path from 'node:path';
import t from 'tap';
import type { AgentSocket } from '../../csi/freeze/agent-client.ts';
import type { Mounter } from '../../csi/node/mounter.ts';
import { MOVED, type MountEntry, stackAt } from '../../csi/node/mounts.ts';
import { NodeService } from '../../csi/node/node.ts';
import { Records } from '../../csi/node/records.ts';
import type { WriterLease } from '../../lib/fence/types.ts';
import { quiet } from './support.ts';

t.setTimeout(170_000);
const folder = realpathSync(mkdtempSync(path.join(tmpdir(), 'sv-orders-')));
t.teardown(() => rmSync(folder, { recursive: true, force: true }));

/** xorshift32 */
function dice(seed: number): (n: number) => number {
  let state = seed * 2654435761 || 1;
  return (n) => {
    state ^= state << 13;
    state ^= state >>> 17;
    state ^= state << 5;
    return (state >>> 0) % n;
  };
}

class Crash extends Error {}

/** A mount table in memory; can die before or after each change. */
class PlayedMounts implements Mounter {
  entries: MountEntry[] = [];
  next = 100;
  dieIn = -1;
  constructor() {
    this.entries.push(entry('1', '0', '/', '/', 'ext4', 'disk'));
  }
  private change(work: () => void): void {
    if (this.dieIn === 1) {
      this.dieIn = -1;
      throw new Crash();
    }
    work();
    if (this.dieIn === 2) {
      this.dieIn = -1;
      throw new Crash();
    }
    if (this.dieIn > 2) this.dieIn -= 2;
  }
  table(): MountEntry[] {
    return this.entries.map((one) => ({ ...one }));
  }
  private on(target: string): string {
    return stackAt(this.entries, target).at(-1)?.id ?? '1';
  }
  async bind(source: string, target: string): Promise<void> {
    this.change(() =>
      this.entries.push(entry(`${this.next++}`, this.on(target), source, target, 'ext4', 'disk')),
    );
  }
  async remount(target: string, options: readonly string[]): Promise<void> {
    this.change(() => {
      const top = this.entries.find((one) => one.id === this.on(target)) as MountEntry;
      top.options = options.includes('ro') ? ['ro'] : ['rw'];
    });
  }
  async cover(target: string): Promise<void> {
    this.change(() =>
      this.entries.push(entry(`${this.next++}`, this.on(target), '/', target, 'tmpfs', MOVED)),
    );
  }
  async umount(target: string): Promise<void> {
    this.change(() => {
      const top = this.on(target);
      if (top === '1') throw new Error('not mounted');
      this.entries = this.entries.filter((one) => one.id !== top);
    });
  }
}
const entry = (
  id: string,
  parent: string,
  root: string,
  point: string,
  type: string,
  source: string,
): MountEntry => ({
  id,
  parent,
  root,
  point,
  type,
  source,
  device: type === 'tmpfs' ? '0:9' : '8:1',
  options: ['rw'],
});

const V = { namespace: 'ns', volume: 'v' };
const ID = 'ns/v';
const SIZE = 4096;

interface World {
  role: WriterLease['role'];
  epoch: number;
  away: boolean;
  reported: string[];
}

async function history(seed: number, steps: number): Promise<string | null> {
  const roll = dice(seed);
  const home = path.join(folder, `${seed}`);
  const pool = path.join(home, 'pool');
  const kubelet = path.join(home, 'k');
  mkdirSync(path.join(pool, 'ns/v'), { recursive: true });
  const world: World = { role: 'active', epoch: 1, away: false, reported: [] };
  const lease = (): WriterLease => ({
    ...V,
    role: world.role,
    epoch: world.epoch,
    fencing: 'none',
    released: false,
    remainingMs: null,
    sizeBytes: world.role === 'active' ? SIZE : null,
  });
  const socket = {
    pool: async () => ({ node: 'a', pool: 'p', path: pool }),
    announce: async () => {
      if (world.away) throw new Error('away');
      return lease();
    },
    report: async ({ writers }: { writers: { volume: string }[] }) => {
      if (world.away) throw new Error('away');
      world.reported = writers.map(({ volume }) => volume);
      return { node: 'a', volumes: writers.map(() => lease()) };
    },
    lease: async () => lease(),
  } as unknown as AgentSocket;
  const mounter = new PlayedMounts();
  let boot = 'boot-1';
  let limit = 0;
  let records = new Records(path.join(home, 'state'), quiet);
  const start = (): NodeService => {
    records = new Records(path.join(home, 'state'), quiet);
    const made = new NodeService({
      node: 'a',
      kubeletDir: kubelet,
      agents: [{ socket, known: { node: 'a', pool: 'p', path: pool } }],
      records,
      mounter,
      clock: () => performance.now(),
      bootId: boot,
      freezer: { possible: false, reason: 'played', cgroup: null },
      find: () => {
        throw new Error('played');
      },
      limit: async (_tree, bytes) => {
        limit = bytes;
        return { enforced: bytes !== 0, reason: '', used: 0 };
      },
      log: quiet,
      waitMs: 0,
      reportMs: 3_600_000,
    });
    made.start();
    return made;
  };
  let service = start();
  const targets = [0, 1, 2].map((n) => {
    const parent = path.join(
      kubelet,
      `pods/0000000${n}-0000-4000-8000-000000000000/volumes/kubernetes.io~csi/v`,
    );
    mkdirSync(parent, { recursive: true });
    return path.join(parent, 'mount');
  });
  /** what kubelet believes: published since this boot and epoch */
  const believed = new Map<string, { epoch: number; readonly: boolean }>();
  const done: string[] = [];
  for (let i = 0; i < steps; i++) {
    const target = targets[roll(3)] as string;
    const which = roll(12);
    const crash = roll(4) === 0;
    const readonly = target === targets[2];
    const before = stackAt(mounter.entries, target).length;
    const layers = stackAt(mounter.entries, target).filter(({ type }) => type !== 'tmpfs').length;
    const had = records.get(target)?.moved === false;
    mounter.dieIn = crash ? 1 + roll(4) : -1;
    let problem: string | null = null;
    try {
      if (which < 4) {
        done.push(`publish ${target.slice(-60, -50)}`);
        await service.publish({
          volume_id: ID,
          target_path: target,
          readonly,
          volume_context: { pool: 'p' },
          volume_capability: {
            access_type: 'mount',
            mount: { fs_type: '', mount_flags: [], volume_mount_group: '' },
            access_mode: { mode: 'SINGLE_NODE_MULTI_WRITER' },
          },
          publish_context: {},
          staging_target_path: '',
          secrets: {},
        } as never);
        if (before === 0 && (world.role !== 'active' || world.away))
          problem = 'mounted where it is not active';
        const top = stackAt(mounter.entries, target).at(-1);
        if (!top || top.options[0] !== (readonly ? 'ro' : 'rw') || top.type === 'tmpfs')
          problem = `published, and there is ${JSON.stringify(top)}`;
        if (before === 0 && limit !== SIZE) problem = `published, and limited to ${limit}`;
        believed.set(target, { epoch: world.epoch, readonly });
      } else if (which < 7) {
        done.push('unpublish');
        await service.unpublish({ volume_id: ID, target_path: target });
        believed.delete(target);
        if (stackAt(mounter.entries, target).length > 0) problem = 'unpublished, and still mounted';
        if (records.get(target)) problem = 'unpublished, and still recorded';
      } else if (which === 7) {
        done.push('restart');
        await service.stop();
        service = start();
      } else if (which === 8) {
        done.push('reboot');
        await service.stop();
        boot = `boot-after-${i}`;
        mounter.entries = mounter.entries.filter((one) => one.id === '1');
        believed.clear();
        service = start();
        if (records.all().length > 0) problem = 'records of before the restart of the machine';
      } else if (which === 9) {
        world.away = !world.away;
        done.push(`away ${world.away}`);
      } else if (which === 10) {
        world.role = world.role === 'active' ? 'replica' : 'active';
        world.epoch++;
        done.push(`${world.role} ${world.epoch}`);
      } else {
        done.push('nothing');
      }
    } catch (error) {
      const { message } = error as Error;
      if (error instanceof Crash) {
        done.push('crash');
        mounter.dieIn = -1;
        await service.stop();
        service = start();
      } else if (which >= 4 && which < 7) problem = `an unpublish was refused: ${message}`;
      else if (which < 4) {
        done.push(`refused: ${message}`);
        const own = records.get(target);
        const moved = own?.moved === true || (own !== null && own.epoch !== world.epoch && before > 0);
        if (world.role === 'active' && !world.away && !moved) problem = `a wrong refusal: ${message}`;
        // A newer epoch that is heard of meanwhile covers it, which is another thing.
        const bare = stackAt(mounter.entries, target).filter(({ type }) => type !== 'tmpfs').length;
        if (bare !== layers) problem = 'a refusal changed what is mounted';
      } else problem = message;
    }
    mounter.dieIn = -1;
    for (const one of targets) {
      const stack = stackAt(mounter.entries, one);
      const volumes = stack.filter(({ type }) => type !== 'tmpfs');
      if (volumes.length > 1) problem ??= `${volumes.length} layers`;
      if (volumes.length > 0 && !records.get(one)) problem ??= 'a mount without a record';
    }
    if (records.all().length === 0) {
      // The limit of what a crash left is taken away beside the start.
      for (let n = 0; n < 20 && limit !== 0; n++) await new Promise((resolve) => setImmediate(resolve));
      if (limit !== 0) problem ??= 'nothing is published, and it is still limited';
    }
    if (!world.away && problem === null && which < 7) {
      const written = records.all().length > 0;
      if (which >= 4 && which < 7 && had && !written && world.reported.length > 0) {
        // the last unpublish says so at once
        problem = 'the agent was not told that nothing is published any more';
      }
    }
    if (problem !== null) {
      await service.stop();
      return `seed ${seed}, step ${i}: ${problem}\n${done.slice(-12).join('\n')}`;
    }
  }
  await service.stop();
  rmSync(home, { recursive: true, force: true });
  return null;
}

t.test(
  'D37, D38, G4, G5: no order of calls, crashes, restarts and moves leaks a mount or a limit, stacks one or refuses wrongly',
  async (t) => {
    const seeds = Number(process.env.SEEDS ?? 300);
    for (let seed = 1; seed <= seeds; seed++) {
      const problem = await history(seed, 40);
      if (problem !== null) {
        t.fail(problem);
        return;
      }
    }
    t.pass(`${seeds} histories of 40 steps`);
  },
);
