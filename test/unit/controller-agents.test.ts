/** The controller's client of the agents: discovery from pods, breaker, slots, and what never gets into an error. */
import { mkdtempSync, rmSync, utimesSync, writeFileSync } from 'node:fs';
import { tmpdir } from 'node:os';
import path from 'node:path';
import t from 'tap';
import { type AgentAddress, Agents, agentOfPod, tokenFile } from '../../controller/act/agents.ts';
import type { Pod } from '../../controller/cluster/index.ts';
import type { RemoteError } from '../../lib/core/http-client.ts';
import { PlayedAgents } from '../kube/scripted-agents.ts';

const clock = {
  boot: () => performance.now(),
  now: () => Date.now(),
  setTimeout(fn: () => void, ms: number) {
    const timer = setTimeout(fn, ms);
    return { cancel: () => clearTimeout(timer) };
  },
};

function pod(more: { ip?: string; ports?: object[]; status?: object; metadata?: object } = {}): Pod {
  return {
    metadata: {
      name: 'agent-x',
      namespace: 'system',
      uid: 'u',
      labels: {
        'app.kubernetes.io/component': 'agent',
        'simple-volume.shipstuff.io/pool': 'fast',
      },
      ...more.metadata,
    },
    spec: {
      nodeName: 'n1',
      containers: [
        {
          name: 'agent',
          ports: (more.ports as never) ?? [
            { name: 'http', containerPort: 8080 },
            { name: 'webdav', containerPort: 9091 },
          ],
        },
      ],
    },
    status: {
      phase: 'Running',
      podIP: more.ip ?? '10.0.0.5',
      conditions: [{ type: 'Ready', status: 'True' }],
      ...more.status,
    },
  };
}

t.test('where an agent is: ports by name, not by number; IPv6 in brackets (I5)', async (t) => {
  t.match(agentOfPod(pod()), {
    node: 'n1',
    pool: 'fast',
    url: 'http://10.0.0.5:8080',
    webdavUrl: 'http://10.0.0.5:9091',
    ready: true,
  });
  t.match(agentOfPod(pod({ ip: 'fd00::5' })), {
    url: 'http://[fd00::5]:8080',
    webdavUrl: 'http://[fd00::5]:9091',
  });
  t.match(
    agentOfPod(
      pod({
        metadata: {
          labels: {},
          annotations: {
            'simple-volume.shipstuff.io/pool': 'slow',
            'simple-volume.shipstuff.io/scheme': 'https',
          },
        },
      }),
    ),
    { pool: 'slow', url: 'https://10.0.0.5:8080' },
  );
  t.equal(agentOfPod(pod({ metadata: { deletionTimestamp: '2026-01-01T00:00:00Z' } }))?.ready, false);
  t.equal(agentOfPod(pod({ ports: [{ name: 'http', containerPort: 8080 }] })), null, 'no webdav port');
  t.equal(agentOfPod(pod({ metadata: { labels: {} } })), null, 'no pool');
  t.equal(agentOfPod(pod({ status: { phase: 'Failed' } })), null);
  t.equal(agentOfPod(pod({ ip: 'x/../..' })), null, 'an address that is none');
});

t.test(
  'the token is read anew when its file changes, and an unreadable one leaves the old (secret rotation)',
  async (t) => {
    const folder = mkdtempSync(path.join(tmpdir(), 'token-'));
    t.teardown(() => rmSync(folder, { recursive: true }));
    const file = path.join(folder, 'token');
    writeFileSync(file, 'first-token-0123456789\n', { mode: 0o600 });
    const token = tokenFile(file);
    t.equal(token(), 'first-token-0123456789');
    writeFileSync(file, 'second-token-0123456789\n');
    utimesSync(file, 1, 1);
    t.equal(token(), 'second-token-0123456789');
    rmSync(file);
    t.equal(token(), 'second-token-0123456789');
    t.throws(() => tokenFile(path.join(folder, 'none')), { code: 'FIELD_INVALID' });
  },
);

t.test('calls', async (t) => {
  const played = new PlayedAgents(4000);
  for (const node of ['a', 'b']) await played.add(node);
  const addresses = (): AgentAddress[] =>
    [...played.agents.values()].map((one) => ({
      node: one.node,
      pool: 'default',
      url: one.url,
      webdavUrl: one.url,
      ready: true,
      uid: `uid-${one.node}`,
      pod: `agent-${one.node}`,
    }));
  const agents = new Agents({
    clock,
    token: () => played.token,
    perAgent: 2,
    queued: 4,
    openMs: { first: 300, longest: 300 },
  });
  agents.set(addresses());
  t.teardown(async () => {
    agents.close();
    await played.stop();
  });
  const ask = (node: string, timeoutMs = 400): Promise<unknown> =>
    agents.call('default', node, { path: '/replication/volumes', timeoutMs });
  const failure = async (work: Promise<unknown>): Promise<RemoteError> =>
    await work.then(
      () => t.fail('it did not fail') as never,
      (error: RemoteError) => error,
    );

  await t.test(
    'a hung agent is asked no more after two time-outs, others are not delayed (B3, D19)',
    async (t) => {
      played.agent('a').set('hangs');
      const hung = [ask('a'), ask('a')].map((one) => one.catch((error: RemoteError) => error.code));
      const started = performance.now();
      await Promise.all(Array.from({ length: 20 }, () => ask('b').catch(() => null)));
      t.ok(performance.now() - started < 350, 'the other one answers at once');
      t.strictSame(await Promise.all(hung), ['TIMEOUT', 'TIMEOUT']);
      const refused = performance.now();
      t.match(await failure(ask('a')), { code: 'NOT_READY', answered: null });
      t.ok(performance.now() - refused < 50, 'refused without waiting');
      t.equal(agents.answers('default', 'a'), false);
      t.equal(agents.answers('default', 'b'), true);
    },
  );

  await t.test(
    'it is asked again after a while, by one call first, and the poll closes the breaker at once',
    async (t) => {
      await new Promise((resolve) => setTimeout(resolve, 350));
      const three = await Promise.all([ask('a'), ask('a'), ask('a')].map((one) => failure(one)));
      t.equal(three.filter((one) => one.code === 'TIMEOUT').length, 1, 'one tries, the others are refused');
      played.agent('a').set('answers');
      await agents.call('default', 'a', { path: '/replication/volumes', probe: true });
      t.equal(agents.answers('default', 'a'), true);
      await ask('a');
    },
  );

  await t.test('an agent that refuses has answered', async (t) => {
    played.agent('a').refuse.set('/replication/volumes', { status: 409, code: 'EPOCH_OLD' });
    for (let i = 0; i < 4; i++) t.match(await failure(ask('a')), { code: 'EPOCH_OLD', answered: 409 });
    t.equal(agents.answers('default', 'a'), true);
    played.agent('a').refuse.clear();
  });

  await t.test('few slots, a short line, the rest is refused at once', async (t) => {
    played.agent('a').set('hangs');
    const all = Array.from({ length: 10 }, () => failure(ask('a')));
    const codes = (await Promise.all(all)).map((one) => one.code);
    const late = codes.filter((one) => one === 'TIMEOUT').length;
    t.ok(late >= 2 && late <= 3, `two slots, and one that followed before the breaker opened: ${late}`);
    t.equal(codes.filter((one) => one === 'NOT_READY').length, 10 - late);
    played.agent('a').set('answers');
  });

  await t.test('a new pod starts with a closed breaker; one that is gone is not asked', async (t) => {
    agents.set(addresses().map((one) => ({ ...one, uid: `${one.uid}-2` })));
    t.equal(agents.answers('default', 'a'), true);
    await ask('a');
    agents.set(addresses().filter((one) => one.node === 'b'));
    t.match(await failure(ask('a')), { code: 'NOT_READY' });
  });

  await t.test('no error holds the token', async (t) => {
    const error = await failure(agents.call('default', 'b', { path: '/replication/none' }));
    t.notOk(JSON.stringify([error.message, error.stack, error]).includes(played.token));
  });
});
