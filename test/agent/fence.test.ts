/** Fencing between real agents: leases by a leader, promises among agents, promotion, return, release, restarts. */
import { existsSync, mkdirSync, mkdtempSync, readFileSync, rmSync, statSync, writeFileSync } from 'node:fs';
import { request } from 'node:http';
import { tmpdir } from 'node:os';
import { join } from 'node:path';
import t from 'tap';
import { AgentSocket } from '../../csi/freeze/agent-client.ts';
import { LeaderFence, nextPromotable, type VolumeRecord } from '../../lib/fence/leader.ts';
import { holdMs } from '../../lib/fence/timing.ts';
import type { FenceConsentReply, FencePollReply, WriterLease } from '../../lib/fence/types.ts';
import { freePorts, LocalAgent, sleep, waitFor } from '../../lib/local/cluster.ts';
import { refusal } from './support.ts';

t.setTimeout(170_000);
const LEASE = 4_000;
const HOLD = holdMs(LEASE);
const V = { namespace: 'fence', volume: 'v' };
const NODES = ['a', 'b', 'c'];

const folder = mkdtempSync(join(tmpdir(), 'sv-fence-'));
const ports = await freePorts(6);
const agents = new Map(
  NODES.map((node, i) => [
    node,
    new LocalAgent({
      node,
      folder,
      httpPort: ports[2 * i] as number,
      webdavPort: ports[2 * i + 1] as number,
      token: `token-of-the-agent-${node}`,
      flags: ['--lease', `${LEASE}ms`, '--socket', join(folder, `${node}.sock`)],
    }),
  ]),
);
const agent = (node: string): LocalAgent => agents.get(node) as LocalAgent;
t.teardown(async () => {
  leader.stop();
  await Promise.all([...agents.values()].map((one) => one.stop()));
  rmSync(folder, { recursive: true, force: true });
});

const now = (): number => performance.now();
const csi = (node: string): AgentSocket => new AgentSocket(join(folder, `${node}.sock`));
const freezer = { possible: true, reason: 'a test', cgroup: 'v2' as const };
const report = async (node: string, publishes: boolean): Promise<WriterLease | null> =>
  (await csi(node).report({ at: now(), writers: publishes ? [V] : [], freezer })).volumes[0] ?? null;
const remaining = async (node: string): Promise<number> => (await csi(node).lease(V)).remainingMs ?? -1;

/** The controller: polls all agents as the real one does. */
class Leader {
  readonly fence = new LeaderFence('test', LEASE);
  readonly replies = new Map<string, FencePollReply>();
  record: VolumeRecord = {
    ...V,
    epoch: 1,
    activeNode: 'a',
    fencing: 'lease',
    promotable: { version: 1, nodes: [], adding: [] },
  };
  #timer: NodeJS.Timeout | null = null;
  write(change: Partial<VolumeRecord>): void {
    this.record = { ...this.record, ...change };
    this.fence.observe(this.record);
  }
  lead(term: number): void {
    this.fence.takeOver(now(), term, Number.POSITIVE_INFINITY, LEASE);
    this.fence.observe(this.record);
    this.replies.clear();
    this.stop();
    this.#timer = setInterval(() => {
      for (const node of NODES) void this.poll(node).catch(() => {});
    }, 250);
  }
  stop(): void {
    if (this.#timer) clearInterval(this.#timer);
    this.#timer = null;
  }
  async poll(node: string): Promise<FencePollReply | null> {
    const body = this.fence.poll(node, now());
    if (!body) return null;
    const reply = await agent(node).call<FencePollReply>('POST', '/replication/fence/poll', body, 2_000);
    this.fence.answered(reply, now());
    this.replies.set(node, reply);
    return reply;
  }
  consent(node: string, change: object = {}): Promise<FenceConsentReply> {
    return agent(node).call('POST', '/replication/fence/consent', {
      ...V,
      epoch: this.record.epoch + 1,
      term: this.fence.term,
      released: this.fence.released(V),
      insist: false,
      ...change,
    });
  }
}
const leader = new Leader();
const watch = (node: string, epoch: number, targets: string[]): Promise<unknown> => {
  mkdirSync(agent(node).live(V), { recursive: true });
  return agent(node).call('POST', '/replication/watch/start', {
    ...V,
    epoch,
    debounce: '100ms',
    source: { url: agent(node).url, webdavUrl: agent(node).webdavUrl },
    targets: targets.map((name) => ({ url: agent(name).url, token: agent(name).token, node: name })),
  });
};

await Promise.all([...agents.values()].map((one) => one.start()));

t.test('a node that was just made active writes nothing before it holds a lease', async (t) => {
  await watch('a', 1, ['b', 'c']);
  writeFileSync(join(agent('a').live(V), 'file'), 'one');
  await agent('a').call('POST', '/replication/prepare', { ...V, confirm: 'all', timeout: '30s' });
  t.match(await csi('a').lease(V), { role: 'active', epoch: 1, fencing: 'lease', remainingMs: 0 });
  t.match(await csi('b').lease(V), { role: 'replica', epoch: 1, remainingMs: 0 });
  t.match(await csi('b').lease({ ...V, volume: 'unknown' }), { role: 'none', remainingMs: 0 });
  leader.lead(1);
  await waitFor('the lease of a', async () => (await remaining('a')) > 0);
  t.ok((await remaining('a')) <= LEASE, 'never more than one lease');
  t.match(await csi('a').announce({ ...V, at: now() }), { role: 'active', epoch: 1 });
  t.match(await report('a', true), { role: 'active', epoch: 1 });
  await waitFor('csi-node is heard through the poll', () => leader.replies.get('a')?.freezer?.possible);
});

t.test('replicas become promotable in two steps, and hold their promises', async (t) => {
  const first = nextPromotable(leader.record.promotable, ['b', 'c'], leader.fence.acknowledged(V));
  t.same(first, { version: 2, nodes: [], adding: ['b', 'c'] });
  leader.write({ promotable: first as NonNullable<typeof first> });
  await waitFor('a acknowledges', () => leader.fence.acknowledged(V) === 2);
  const second = nextPromotable(leader.record.promotable, ['b', 'c'], leader.fence.acknowledged(V));
  t.same(second, { version: 3, nodes: ['b', 'c'], adding: [] });
  leader.write({ promotable: second as NonNullable<typeof second> });
  await waitFor('a knows version 3', () => leader.fence.acknowledged(V) === 3);
  await sleep(1_200);
  const no = await leader.consent('b');
  t.match(no, { node: 'b', consent: false, code: 'PROMISED' });
  t.ok(no.waitMs > 0 && no.waitMs <= HOLD, `${no.waitMs} ms`);
  t.match(await leader.consent('a'), { consent: false, code: 'ACTIVE' });
  t.match(await leader.consent('b', { volume: 'unknown' }), { consent: false, code: 'UNKNOWN' });
});

t.test('D32: a control plane that is away freezes nobody while all replicas can be reached', async (t) => {
  leader.stop();
  await sleep(LEASE + 1_500);
  t.ok((await remaining('a')) > 0, `${await remaining('a')} ms are left`);
});

t.test(
  'without the leader one replica that is off ends the lease; with the leader it does not',
  async (t) => {
    await agent('c').stop();
    await waitFor('the lease of a ends', async () => (await remaining('a')) === 0, LEASE + 2_000);
    leader.lead(2);
    await waitFor('the lease of a is renewed', async () => (await remaining('a')) > 0, 3_000);
    await agent('c').start();
    const no = await leader.consent('c');
    t.match(no, { code: 'PROMISED' }, 'a replica that starts anew is bound as if it had promised just now');
    t.ok(no.waitMs > HOLD - 3_000, `${no.waitMs} ms`);
  },
);

t.test('the set that was acknowledged survives a restart of the agent', async (t) => {
  await agent('a').end('SIGKILL');
  await agent('a').start();
  const reply = await waitFor('a answers', () => leader.poll('a'));
  t.match(
    reply.volumes.find((v) => v.volume === 'v'),
    { role: 'active', epoch: 1, promotable: { version: 3, nodes: ['b', 'c'] } },
  );
  await waitFor('a is renewed', async () => (await remaining('a')) > 0, 5_000);
});

t.test('D32: a dead node: promoted when every lease has surely ended, and never before', async (t) => {
  await waitFor('nothing of the take-over is waited for', () => leader.fence.fenceWaitMs(V, now()) !== null);
  await agent('a').end('SIGKILL');
  const died = now();
  let consent: FenceConsentReply | null = null;
  let early = 0;
  await waitFor(
    'the promotion may be written',
    async () => {
      consent = await leader.consent('b');
      const verdict = leader.fence.mayPromote(V, 'b', 2, consent, now());
      if (verdict.ok && now() - died < LEASE - 1_500) early++;
      return verdict.ok;
    },
    HOLD + 5_000,
  );
  const took = now() - died;
  t.equal(early, 0);
  t.ok(took > LEASE - 1_500 && took < HOLD + 2_500, `${took.toFixed(0)} ms after its end`);
  t.match(await leader.consent('b'), { code: 'CONSENT' }, 'asked again it says the same');
  leader.write({ epoch: 2, activeNode: 'b', promotable: { version: 4, nodes: ['c'], adding: [] } });
  t.equal(leader.fence.activationWaitMs(V, now()), 0);
  await watch('b', 2, ['a', 'c']);
  await waitFor('b holds the lease of epoch 2', async () => (await remaining('b')) > 0, 5_000);
  t.match(await csi('b').lease(V), { role: 'active', epoch: 2 });
});

t.test('the old node comes back: no lease, no promise, and csi-node learns of the newer epoch', async (t) => {
  await agent('a').start();
  const back = await csi('a').lease(V);
  t.ok(back.role === 'replica' || back.remainingMs === 0, JSON.stringify(back));
  const old = await agent('c').call<{ volumes: object[] }>('POST', '/replication/fence/beat', {
    node: 'a',
    beat: 1,
    volumes: [{ ...V, epoch: 1 }],
  });
  await waitFor('a has stepped down', async () => (await csi('a').lease(V)).epoch === 2, 30_000);
  t.match(await csi('a').lease(V), { role: 'replica', epoch: 2, remainingMs: 0 });
  const later = await agent('c').call<{ volumes: object[] }>('POST', '/replication/fence/beat', {
    node: 'a',
    beat: 2,
    volumes: [{ ...V, epoch: 1 }],
  });
  t.match(later.volumes[0], { promised: false, epoch: 2 });
  t.ok(old.volumes[0]);
});

t.test('a planned move waits for nothing: the lease is given back when no writer is there', async (t) => {
  const release = (epoch: number): Promise<unknown> =>
    agent('b').call('POST', '/replication/fence/release', { ...V, epoch });
  t.equal((await refusal(release(2))).code, 'VOLUME_IN_USE', 'csi-node of b has said nothing yet');
  await report('b', true);
  t.equal((await refusal(release(2))).code, 'VOLUME_IN_USE');
  await report('b', false);
  await csi('b').announce({ ...V, at: now() });
  t.equal((await refusal(release(2))).code, 'VOLUME_IN_USE', 'a pod is just being started');
  await report('b', false);
  t.equal((await refusal(release(1))).code, 'EPOCH_OLD');
  t.match(await release(2), { node: 'b', epoch: 2, released: true });
  writeFileSync(join(agent('b').live(V), 'last'), 'what the last flush finds');
  await agent('b').call('POST', '/replication/prepare', { ...V, confirm: 'all', timeout: '30s' });
  t.match(await csi('b').lease(V), { released: true, remainingMs: 0 });
  t.match(await csi('b').announce({ ...V, at: now() }), { released: true, remainingMs: 0 });
  await waitFor('the leader hears it', () => leader.fence.released(V) === 2);
  t.equal(leader.fence.fenceWaitMs(V, now()), 0);
  const consent = await leader.consent('c');
  t.match(consent, { consent: true }, 'the promise to b binds no more');
  t.same(leader.fence.mayPromote(V, 'c', 3, consent, now()), { ok: true });

  await agent('b').end('SIGKILL');
  await agent('b').start();
  t.match(await csi('b').lease(V), { role: 'active', released: true, remainingMs: 0 }, 'for good');
  t.match(await leader.consent('b'), { consent: true }, 'it may itself go on, in a new epoch');
  leader.write({ epoch: 3, activeNode: 'c', promotable: { version: 5, nodes: [], adding: [] } });
  await watch('c', 3, ['a', 'b']);
  await waitFor('c holds the lease of epoch 3', async () => (await remaining('c')) > 0, 5_000);

  await waitFor('b is a copy of epoch 3', async () => {
    const status = await agent('b').status(V);
    return status?.role === 'replica' && status.generation?.startsWith('3-');
  });
  t.equal(readFileSync(join(agent('b').live(V), 'last'), 'utf8'), 'what the last flush finds');
  t.notOk(existsSync(agent('b').backups(V)), 'what was handed over in good order is no case for the backups');
});

t.test('the promise to a released epoch is lifted by naming that epoch only', async (t) => {
  t.match(await leader.consent('a', { epoch: 2 }), { code: 'EPOCH_OLD', consent: false });
});

t.test(
  'insisting: a replica stops promising, so that the wait ends though the active node beats',
  async (t) => {
    leader.write({ promotable: { version: 6, nodes: [], adding: ['a'] } });
    await waitFor('c acknowledges', () => leader.fence.acknowledged(V) === 6);
    leader.write({ promotable: { version: 7, nodes: ['a'], adding: [] } });
    await waitFor('c knows version 7', () => leader.fence.acknowledged(V) === 7);
    // A question before a has promised would be answered by a consent, which binds it.
    await sleep(3_000);
    t.match(await leader.consent('a'), { consent: false, code: 'PROMISED' });
    leader.fence.withhold(V, true);
    await waitFor(
      'a consents and no lease is left',
      async () => {
        const consent = await leader.consent('a', { insist: true });
        return leader.fence.mayPromote(V, 'a', 4, consent, now()).ok;
      },
      2 * HOLD,
    );
    t.equal(await remaining('c'), 0, 'the lease of c has ended by then, though it beats');
    t.match(await csi('c').lease(V), { role: 'active', epoch: 3, released: false });
  },
);

t.test('borders: no token, bad fields, the socket', async (t) => {
  const bare = (path: string): Promise<number> =>
    new Promise((resolve, reject) => {
      const sent = request(`${agent('a').url}${path}`, { method: 'POST' }, (response) => {
        response.resume();
        resolve(response.statusCode ?? 0);
      });
      sent.on('error', reject);
      sent.end();
    });
  for (const path of ['beat', 'poll', 'consent', 'release'])
    t.equal(await bare(`/replication/fence/${path}`), 401, path);
  t.equal(await bare('/fence/announce'), 401, 'what csi-node asks is not served over the network');
  for (const [path, body, field] of [
    ['beat', { node: 'a', beat: 0, volumes: [] }, /beat/],
    ['beat', { node: '../a', beat: 1, volumes: [] }, /node/],
    ['poll', { controller: 'k', term: 1, leaseMs: 1, beat: null, volumes: [] }, /leaseMs/],
    ['poll', { controller: 'k', term: 1, leaseMs: LEASE, beat: 1.5, volumes: [] }, /beat/],
    ['consent', { ...V, epoch: 3, term: 1, released: null }, /insist/],
    ['release', { ...V }, /epoch/],
  ] as const) {
    const no = await refusal(agent('a').call('POST', `/replication/fence/${path}`, body));
    t.equal(no.status, 400, path);
    t.match(no.message, field);
  }
  t.equal(statSync(join(folder, 'a.sock')).mode & 0o077, 0, 'only its owner opens the socket');
  await t.rejects(csi('a').lease({ namespace: 'fence', volume: '../x' }), { code: 'FIELD_INVALID' });
  await t.rejects(new AgentSocket(join(folder, 'nobody.sock')).lease(V), { code: 'NOT_READY' });
});
