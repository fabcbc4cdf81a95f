/** The cluster of the tests itself: whatever ends it, nothing is left on the machine. */
import { type ChildProcess, spawn } from 'node:child_process';
import { existsSync, readdirSync, readFileSync } from 'node:fs';
import path from 'node:path';
import t from 'tap';
import { waitFor } from '../../lib/local/cluster.ts';
import { Cluster, noCluster } from './harness/cluster.ts';
import { instance, isTaken } from './harness/instance.ts';
import { hierarchies } from './harness/leftovers.ts';

const NUMBER = 9;
const names = instance(NUMBER);
const scopes = [names.name, ...names.nodes.map(({ scope }) => scope)];

/** What a cluster of this number has on the machine beside its folder and its processes. */
const traces = (): string[] =>
  [
    ...scopes.map((name) => `/run/netns/${name}`),
    `/sys/class/net/${names.name}`,
    ...hierarchies().flatMap((hierarchy) => scopes.map((name) => path.join(hierarchy, name))),
  ].filter((file) => existsSync(file));

/** Processes whose arguments name a folder. */
const processesOf = (folder: string): string[] =>
  readdirSync('/proc').filter((pid) => {
    try {
      return /^\d+$/.test(pid) && readFileSync(`/proc/${pid}/cmdline`, 'utf8').includes(folder);
    } catch {
      return false; // it has just ended
    }
  });

/** A cluster without the chart in a process of its own, with a pod's worth of what nodes do. */
async function inAnotherProcess(): Promise<{
  child: ChildProcess;
  folder: string;
  ended: Promise<number | null>;
}> {
  const script = `
    const { Cluster } = await import('./test/cluster/harness/cluster.ts');
    const cluster = await Cluster.start({ number: ${NUMBER}, values: null });
    await cluster.apply({ apiVersion: 'v1', kind: 'Pod', metadata: { name: 'p', labels: { app: 'p' } },
      spec: { containers: [{ name: 'c', image: 'busybox:1.37', command: ['sleep', '1000'] }] } });
    await cluster.podRunning('app=p');
    process.stdout.write('folder ' + cluster.folder + '\\n');
    setInterval(() => {}, 1000);`;
  const child = spawn(process.execPath, ['--input-type=module', '-e', script], {
    cwd: path.resolve(import.meta.dirname, '../..'),
    stdio: ['ignore', 'pipe', 'inherit'],
    env: { ...process.env, TAP: '' },
  });
  const ended = new Promise<number | null>((resolve) => child.once('exit', resolve));
  let text = '';
  child.stdout.setEncoding('utf8').on('data', (more: string) => {
    text += more;
  });
  const folder = await waitFor(
    'the cluster of another process',
    () => {
      if (child.exitCode !== null) throw new Error(`it ended with ${child.exitCode}`);
      return /^folder (.+)$/m.exec(text)?.[1];
    },
    180_000,
  );
  return { child, folder, ended };
}

t.test('a cluster leaves nothing behind', { skip: noCluster(), timeout: 540_000 }, async (t) => {
  t.strictSame(traces(), [], 'before');

  await t.test('after a signal', async (t) => {
    const { child, folder, ended } = await inAnotherProcess();
    t.ok(traces().length > 20, 'it is there');
    t.ok(isTaken(NUMBER));
    await t.rejects(Cluster.start({ number: NUMBER, values: null }), /is running already/);
    child.kill('SIGINT');
    t.equal(await ended, 130);
    t.strictSame(traces(), []);
    t.strictSame(processesOf(folder), []);
    t.notOk(existsSync(folder));
    t.notOk(isTaken(NUMBER));
  });

  await t.test(
    'after a kill: its processes end by themselves, the next of its number removes the rest',
    async (t) => {
      const { child, folder, ended } = await inAnotherProcess();
      child.kill('SIGKILL');
      await ended;
      await waitFor('its processes end', () => processesOf(folder).length === 0);
      t.ok(existsSync(folder));
      t.notOk(isTaken(NUMBER));
      const next = await Cluster.start({ number: NUMBER, values: null });
      t.teardown(() => next.stop());
      t.notOk(existsSync(folder));
      const [node] = next.nodes;
      await node?.powerCut();
      await next.stop();
      t.strictSame(traces(), []);
      t.strictSame(processesOf(next.folder), []);
      t.notOk(existsSync(next.folder));
    },
  );
});
