/** Two controllers, as processes: one decides; one that was paused and goes on does no harm (B21). */
import { type ChildProcess, spawn } from 'node:child_process';
import { once } from 'node:events';
import { writeFileSync } from 'node:fs';
import path from 'node:path';
import tap from 'tap';
import { LEASES } from '../../controller/cluster/index.ts';
import { noKube } from './harness/programs.ts';
import { freePort } from './harness/server.ts';
import { LEASE, SYSTEM, TestCluster, until } from './test-cluster.ts';

const ROOT = path.join(import.meta.dirname, '../..');

tap.test('two controllers: one decides (B21)', { skip: noKube(), timeout: 60_000 }, async (t) => {
  const cluster = await TestCluster.start({ nodes: ['a', 'b', 'c'] });
  const token = path.join(cluster.server.folder, 'agents-token');
  writeFileSync(token, cluster.agents.token, { mode: 0o600 });
  const children = new Map<string, { child: ChildProcess; output: string[]; health: string }>();
  const start = async (identity: string): Promise<void> => {
    const port = await freePort();
    const child = spawn(
      'setpriv',
      [
        ...['--pdeathsig', 'KILL', process.execPath, path.join(ROOT, 'lib/cli/bin.js'), 'controller'],
        ...['--namespace', SYSTEM, '--identity', identity, '--kubeconfig', cluster.server.kubeconfig],
        ...['--token-file', token, '--http', `127.0.0.1:${port}`, '--trigger', 'off'],
        ...['--election', '3s', '--fence-lease', '4s', '--report', '300ms'],
      ],
      { stdio: ['ignore', 'pipe', 'pipe'], env: { ...process.env, SIMPLE_VOLUME_SOURCES: '1' } },
    );
    const output: string[] = [];
    child.stdout?.on('data', (part: Buffer) => output.push(part.toString()));
    child.stderr?.on('data', (part: Buffer) => output.push(part.toString()));
    children.set(identity, { child, output, health: `http://127.0.0.1:${port}` });
    await until(`${identity} is ready`, async () => {
      if (child.exitCode !== null) throw new Error(output.join(''));
      return (await fetch(`http://127.0.0.1:${port}/readyz`)).status === 200;
    });
  };
  const kill = async (child: ChildProcess, signal: NodeJS.Signals): Promise<void> => {
    if (child.exitCode !== null || child.signalCode !== null) return;
    child.kill('SIGCONT');
    child.kill(signal);
    await once(child, 'exit');
  };
  t.teardown(async () => {
    for (const { child } of children.values()) await kill(child, 'SIGKILL');
    await cluster.stop();
  });
  const leader = async (): Promise<string> =>
    (await cluster.kube.find(LEASES, { namespace: SYSTEM, name: LEASE }))?.spec?.holderIdentity ?? '';
  await start('one');
  await until('it leads', async () => (await leader()) === 'one');
  await start('two');
  await cluster.claim('saves', {
    'failover-enabled': 'true',
    'failover-grace-period': '1s',
    'failover-max-staleness': '5m',
  });
  await cluster.workload('saves', 'a');
  await cluster.settled('saves');
  t.equal(await leader(), 'one');

  await t.test(
    'the leader is paused, the other one fails the volume over by what the copies say, the first one goes on (B2, B21)',
    async (t) => {
      children.get('one')?.child.kill('SIGSTOP');
      await until('the other one leads', async () => (await leader()) === 'two');
      await cluster.lose('a');
      const object = await cluster.waitFor(
        'saves',
        'is finished',
        ({ status }) => status?.epoch === 2 && status.promotion?.done.length === 7,
        30_000,
      );
      const seen = cluster.agents.seen.length;
      children.get('one')?.child.kill('SIGCONT');
      await new Promise((resolve) => setTimeout(resolve, 2500));
      t.equal(await leader(), 'two');
      const after = await cluster.object('saves');
      t.equal(after?.status?.epoch, 2);
      t.equal(after?.status?.activeNode, object.status?.activeNode);
      t.strictSame(
        cluster.agents.seen
          .slice(seen)
          .filter((one) => Number(one.body.epoch) < 2 && one.path.includes('start')),
        [],
        'nobody is told anything of the old epoch',
      );
      t.equal(children.get('one')?.child.exitCode, null, 'it waits again');
    },
  );

  await t.test(
    'SIGTERM: the Lease is given back and the other one leads at once (a rolling update)',
    async (t) => {
      const two = children.get('two');
      const started = performance.now();
      two?.child.kill('SIGTERM');
      await until('the first one leads', async () => (await leader()) === 'one', 3000);
      t.ok(performance.now() - started < 3000);
      await until('it has ended', () => two?.child.exitCode !== null, 10_000);
      t.equal(two?.child.exitCode, 0);
      await cluster.back('a');
      await until(
        'the old watch is ended by the new leader',
        () => cluster.agents.agent('a').volume('default/pv-saves')?.role === 'replica',
        15_000,
      );
    },
  );

  await t.test('no token in what the controllers log', async (t) => {
    for (const { output } of children.values()) t.notOk(output.join('').includes(cluster.agents.token));
  });
});
