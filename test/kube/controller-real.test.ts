/** The controller on a real API server with real agents: what is in the files after a failover, a return and a move. */
import { randomBytes } from 'node:crypto';
import { mkdirSync, mkdtempSync, readdirSync, readFileSync, rmSync, writeFileSync } from 'node:fs';
import http from 'node:http';
import { tmpdir } from 'node:os';
import path from 'node:path';
import tap from 'tap';
import { PODS } from '../../controller/cluster/index.ts';
import { freePorts, LocalAgent } from '../../lib/local/cluster.ts';
import { noKube } from './harness/programs.ts';
import { TestCluster, until } from './test-cluster.ts';

const VOLUME = { namespace: 'default', volume: 'pv-world' };
const TOKEN = 'real-agents-token-0123456789';

/** csi-node as the agent sees it: once a second it says which volumes it has mounted. */
class PlayedCsiNode {
  readonly writers = new Set<string>();
  private readonly socket: string;
  private readonly timer: NodeJS.Timeout;
  constructor(socket: string) {
    this.socket = socket;
    this.timer = setInterval(() => this.report(), 300);
  }
  private report(): void {
    const writers = [...this.writers].map((volume) => ({ namespace: 'default', volume }));
    const body = JSON.stringify({
      at: Math.round(performance.now()),
      writers,
      freezer: { possible: true, reason: 'played', cgroup: 'v2' },
    });
    const request = http.request({
      socketPath: this.socket,
      path: '/fence/report',
      method: 'POST',
      headers: { 'content-type': 'application/json', 'content-length': Buffer.byteLength(body) },
    });
    request.on('error', () => {});
    request.on('response', (response) => response.resume());
    request.end(body);
  }
  stop(): void {
    clearInterval(this.timer);
  }
}

function tree(folder: string): Record<string, string> {
  const found: Record<string, string> = {};
  for (const entry of readdirSync(folder, { recursive: true, withFileTypes: true }))
    if (entry.isFile()) {
      const file = path.join(entry.parentPath, entry.name);
      found[path.relative(folder, file)] = readFileSync(file).toString('base64').slice(0, 200);
    }
  return found;
}

tap.test('failover, return and move with real agents', { skip: noKube(), timeout: 60_000 }, async (t) => {
  const folder = mkdtempSync(path.join(tmpdir(), 'real-'));
  const nodes = ['a', 'b', 'c'];
  const cluster = await TestCluster.start({ nodes: [], leaseMs: 4000 });
  const ports = await freePorts(6);
  const csi = new Map<string, PlayedCsiNode>();
  const agents = new Map(
    nodes.map((node, i) => {
      const socket = path.join(folder, `${node}.sock`);
      csi.set(node, new PlayedCsiNode(socket));
      return [
        node,
        new LocalAgent({
          node,
          folder,
          httpPort: ports[i * 2] as number,
          webdavPort: ports[i * 2 + 1] as number,
          token: TOKEN,
          flags: ['--lease', '4s', '--socket', socket],
        }),
      ];
    }),
  );
  const agent = (node: string): LocalAgent => agents.get(node) as LocalAgent;
  await Promise.all([...agents.values()].map((one) => one.start()));
  for (const [i, node] of nodes.entries()) {
    await cluster.node(node);
    await cluster.agentPod({ node, http: ports[i * 2] as number, webdav: ports[i * 2 + 1] as number });
  }
  const controller = await cluster.controller('one', { token: () => TOKEN });
  t.teardown(async () => {
    await controller.stop();
    for (const one of csi.values()) one.stop();
    await Promise.all([...agents.values()].map((one) => one.end('SIGKILL')));
    await cluster.stop();
    rmSync(folder, { recursive: true, force: true });
  });
  const live = (node: string): string => agent(node).live(VOLUME);
  const replicated = async (active: string, replicas: string[]): Promise<void> => {
    await until('all copies hold the newest generation', async () => {
      const source = await agent(active).status(VOLUME);
      if (source?.role !== 'active' || source.pending > 0 || !source.generation) return false;
      for (const node of replicas) {
        const copy = await agent(node).status(VOLUME);
        if (copy?.generation !== source.generation) return false;
      }
      return JSON.stringify(tree(live(active))) === JSON.stringify(tree(agent(active).shadow(VOLUME)));
    });
  };

  mkdirSync(live('a'), { recursive: true });
  for (let i = 0; i < 20; i++) {
    mkdirSync(path.join(live('a'), `d${i % 3}`), { recursive: true });
    writeFileSync(path.join(live('a'), `d${i % 3}/f${i}`), randomBytes(5000 + i));
  }
  csi.get('a')?.writers.add(VOLUME.volume);
  await cluster.claim('world', {
    'failover-enabled': 'true',
    'failover-grace-period': '1s',
    'failover-max-staleness': '5m',
    'replication-debounce': '200ms',
  });
  await cluster.workload('world', 'a');
  await cluster.settled('world');
  await replicated('a', ['b', 'c']);

  let active = '';
  await t.test('a dead node: the promoted copy has every byte that was confirmed (D33)', async (t) => {
    const before = tree(live('a'));
    t.equal(Object.keys(before).length, 20);
    csi.get('a')?.writers.clear();
    await agent('a').end('SIGKILL');
    await cluster.lose('a');
    // Written after the last confirmation: nobody else has it.
    writeFileSync(path.join(live('a'), 'unconfirmed'), 'written when nobody heard');
    const { status } = await cluster.waitFor(
      'world',
      'is finished',
      (object) => object.status?.epoch === 2 && object.status.promotion?.done.length === 7,
      30_000,
    );
    active = status?.activeNode as string;
    t.strictSame(tree(live(active)), before);
    t.match(await agent(active).status(VOLUME), { role: 'active', epoch: 2 });
  });

  await t.test(
    'the node comes back: a replica again, and what only it had is kept aside (D34)',
    async (t) => {
      writeFileSync(path.join(live(active), 'after'), 'the failover');
      await agent('a').start();
      await cluster.back('a');
      await replicated(
        active,
        nodes.filter((node) => node !== active),
      );
      t.strictSame(tree(live('a')), tree(live(active)));
      t.equal(tree(live('a')).unconfirmed, undefined);
      const kept = tree(agent('a').backups(VOLUME));
      t.ok(
        Object.keys(kept).some((name) => name.endsWith('unconfirmed')),
        JSON.stringify(Object.keys(kept)),
      );
      t.equal((await cluster.object('world'))?.status?.epoch, 2, 'not promoted back');
    },
  );

  await t.test(
    'a cordon with a writing pod: the last write arrives before the new node is active (B6)',
    async (t) => {
      await cluster.settled('world');
      await cluster.pod('game-2', 'world', active);
      csi.get(active)?.writers.add(VOLUME.volume);
      await cluster.waitFor('world', 'has a healthy pod', ({ status }) => status?.phase === 'Active');
      let written = 0;
      const writer = setInterval(
        () => writeFileSync(path.join(live(active), 'log'), `line ${++written}`),
        50,
      );
      await cluster.cordon(active, true);
      // kubelet: the pod ends, then its volume is unmounted.
      await until(
        'the pod is asked to go',
        async () => (await cluster.kube.find(PODS, { namespace: 'default', name: 'game-2' })) === null,
      );
      clearInterval(writer);
      const last = `line ${written}`;
      csi.get(active)?.writers.clear();
      const { status } = await cluster.waitFor(
        'world',
        'has moved',
        (object) => object.status?.epoch === 3,
        25_000,
      );
      t.equal(status?.promotion?.planned, true);
      const to = status?.activeNode as string;
      t.not(to, active);
      await until('it is active there', async () => (await agent(to).status(VOLUME))?.role === 'active');
      t.equal(readFileSync(path.join(live(to), 'log'), 'utf8'), last);
    },
  );
});
