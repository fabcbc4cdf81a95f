/** Two real processes and one Lease. */
import { type ChildProcess, spawn } from 'node:child_process';
import path from 'node:path';
import { setTimeout as sleep } from 'node:timers/promises';
import t from 'tap';
import { createRecorder, LEASES, referenceTo } from '../../controller/cluster/index.ts';
import { WireProxy } from './harness/fault-proxy.ts';
import { noKube } from './harness/programs.ts';
import { KubeServer } from './harness/server.ts';
import { CONFIG_MAPS, clock, configMap, kubeOf, quiet, until } from './helpers.ts';

const DURATION_MS = 3000;

t.test('leader election between processes', { skip: noKube() }, async (t) => {
  const server = await KubeServer.start();
  const kube = kubeOf(server.kubeconfig);
  await kube.create(CONFIG_MAPS, configMap('deeds'));
  const wire = await WireProxy.start(server.url);
  const children: ChildProcess[] = [];
  t.teardown(async () => {
    for (const child of children) child.kill('SIGKILL');
    kube.close();
    await wire.stop();
    await server.stop();
  });

  function begin(identity: string, kubeconfig = server.kubeconfig) {
    const script = path.join(import.meta.dirname, 'leading-process.ts');
    const child = spawn(process.execPath, [script, kubeconfig, identity, String(DURATION_MS)], {
      stdio: ['ignore', 'pipe', 'inherit'],
    });
    children.push(child);
    const said: string[] = [];
    child.stdout.setEncoding('utf8').on('data', (text: string) => said.push(...text.trim().split('\n')));
    return { child, said, leads: () => said.at(-1)?.startsWith('leads') ?? false };
  }
  const deeds = async (): Promise<Record<string, string>> =>
    (await kube.get(CONFIG_MAPS, { namespace: 'default', name: 'deeds' })).data ?? {};
  const holder = async (): Promise<string | null | undefined> =>
    (await kube.find(LEASES, { namespace: 'default', name: 'leader' }))?.spec?.holderIdentity;

  const a = begin('a');
  await until('a leads', a.leads, 30_000);
  const b = begin('b', server.writeKubeconfig('b', { url: wire.url }));

  await t.test('a leader that was stopped writes nothing when it goes on and another leads', async (t) => {
    await until('a has written', () => a.leads());
    await sleep(1000);
    t.equal((await deeds()).last, 'a');
    a.child.kill('SIGSTOP');
    await until('b leads', b.leads, 30_000);
    await sleep(500);
    t.equal((await deeds()).last, 'b');
    // From here on a must not write any more: its next deed would be seen.
    await kube.merge(CONFIG_MAPS, { namespace: 'default', name: 'deeds' }, { data: { a: 'none' } });
    a.child.kill('SIGCONT');
    await sleep(1500);
    t.match(await deeds(), { a: 'none', last: 'b' });
    t.equal(await holder(), 'b');
    t.equal(a.said.at(-1), 'ended');
  });

  await t.test('cut off from the API server it stops in time, and the other waits for that', async (t) => {
    const cut = performance.now();
    wire.set('silent');
    await until('a leads again', a.leads, 30_000);
    t.ok(performance.now() - cut > DURATION_MS - 300, 'not before its time was over');
    t.equal(b.said.at(-1), 'ended');
    wire.set('pass');
    await sleep(1500);
    t.equal((await deeds()).last, 'a');
    t.equal(await holder(), 'a');
  });

  await t.test('each leadership has a number of its own, higher than all before', async (t) => {
    const terms = [...a.said, ...b.said]
      .filter((line) => line.startsWith('leads'))
      .map((line) => Number(line.split(' ')[1]));
    t.equal(new Set(terms).size, 3);
    const ofA = a.said.filter((line) => line.startsWith('leads')).map((line) => Number(line.split(' ')[1]));
    t.ok((ofA[1] as number) > (ofA[0] as number) + 1, `${terms}`);
  });

  await t.test('Events: one, counted up, as kubectl shows it', async (t) => {
    const about = referenceTo(
      CONFIG_MAPS,
      await kube.get(CONFIG_MAPS, { namespace: 'default', name: 'deeds' }),
    );
    for (let i = 0; i < 3; i++) {
      // As three controllers, one after the other.
      const recorder = createRecorder({ kube, clock, logger: quiet });
      for (let j = 0; j < 5; j++)
        recorder.event(about, { type: 'Warning', reason: 'Tried', message: 'it was tried' });
      await recorder.flush();
      t.equal(recorder.counters.failed, 0);
    }
    const events = JSON.parse(await server.kubectl(['get', 'events', '-o', 'json'])) as {
      items: { reason: string; count: number }[];
    };
    t.match(events.items, [{ reason: 'Tried', count: 15 }]);
    t.match(await server.kubectl(['get', 'events']), /Warning\s+Tried\s+configmap\/deeds\s+it was tried/);
  });
});
