import { randomBytes } from 'node:crypto';
import { closeSync, mkdirSync, mkdtempSync, openSync, rmSync, writeSync } from 'node:fs';
import { tmpdir } from 'node:os';
import { join } from 'node:path';
import { Controller } from '../controller/controller.ts';
import { AgentSocket } from '../csi/freeze/agent-client.ts';
import { freePorts, LocalAgent } from '../lib/local/cluster.ts';
import { noKube } from '../test/kube/harness/programs.ts';
import { TestCluster, until } from '../test/kube/test-cluster.ts';
import { type Figure, GIB, type Measure, MIB } from './lib/figure.ts';
import { summary } from './lib/stats.ts';

const MOVES = 6;
const FILES = 64;
const NODES = ['a', 'b'] as const;
const VOLUME = { namespace: 'default', volume: 'pv-world' };
const TOKEN = 'bench-token-0123456789abcdef';

const bootMs = (): number => Math.round(performance.now());
const sleep = (ms: number): Promise<void> => new Promise((resolve) => setTimeout(resolve, ms));

/** csi-node as the agent sees it: it reports once a second, and at once when something was published or not any more. */
class CsiNode {
  readonly writers = new Set<string>();
  readonly agent: AgentSocket;
  private readonly timer: NodeJS.Timeout;
  constructor(socket: string) {
    this.agent = new AgentSocket(socket);
    this.timer = setInterval(() => this.report(), 1000);
  }
  report(): void {
    const writers = [...this.writers].map((volume) => ({ namespace: VOLUME.namespace, volume }));
    const freezer = { possible: true, reason: 'played', cgroup: 'v2' as const };
    this.agent.report({ at: bootMs(), writers, freezer }).catch(() => {});
  }
  /** Whether NodePublish may go on. */
  async mayPublish(): Promise<boolean> {
    const lease = await this.agent.announce({ ...VOLUME, at: bootMs() });
    return lease.role === 'active' && !lease.released && lease.remainingMs !== 0;
  }
  stop(): void {
    clearInterval(this.timer);
  }
}

function fill(folder: string): void {
  const size = GIB / FILES;
  const block = randomBytes(MIB);
  mkdirSync(folder, { recursive: true });
  for (let i = 0; i < FILES; i++) {
    const file = openSync(join(folder, `f${i}`), 'w');
    for (let at = 0; at < size; at += MIB) {
      block.writeUInt32LE(i * 65_536 + at / MIB);
      writeSync(file, block);
    }
    closeSync(file);
  }
}

export const figure: Figure = {
  title: 'a planned move (cordon) of an idle volume of 1 GiB between two nodes: how long nobody may write',
  method: `real API server, two real agents, controller in process as it is set up by default; csi-node and kubelet are played; ${MOVES} moves; from when csi-node has unmounted the volume on the old node until it may publish it on the new one (asked every 20 ms); no peer exists`,
  async run(say): Promise<Measure[]> {
    const missing = noKube();
    if (missing) throw new Error(String(missing));
    const folder = mkdtempSync(join(tmpdir(), 'move-'));
    const cluster = await TestCluster.start({ nodes: [], leaseMs: 8000 });
    const ports = await freePorts(4);
    const agents = new Map<string, LocalAgent>();
    const csi = new Map<string, CsiNode>();
    let controller: Controller | null = null;
    try {
      for (const [i, node] of NODES.entries()) {
        const [http, webdav] = [ports[i * 2] as number, ports[i * 2 + 1] as number];
        const socket = join(folder, `${node}.sock`);
        const flags = ['--lease', '8s', '--socket', socket];
        const agent = new LocalAgent({
          node,
          folder,
          httpPort: http,
          webdavPort: webdav,
          token: TOKEN,
          flags,
        });
        agents.set(node, agent);
        csi.set(node, new CsiNode(socket));
        await agent.start();
        await cluster.node(node);
        await cluster.agentPod({ node, http, webdav });
      }
      const of = <T>(map: Map<string, T>, node: string): T => map.get(node) as T;
      let stopped = 0;
      cluster.mount = (node, _key, mounted) => {
        const one = of(csi, node);
        if (mounted) one.writers.add(VOLUME.volume);
        else {
          one.writers.delete(VOLUME.volume);
          stopped = performance.now();
        }
        one.report();
      };
      controller = await Controller.start(
        cluster.options('bench', {
          token: () => TOKEN,
          electionMs: 15_000,
          electionRenewMs: 2000,
          reportMs: 2000,
          kubeRate: { perSecond: 50, burst: 100 },
        }),
      );
      fill(of(agents, 'a').live(VOLUME));
      await cluster.claim('world', { 'failover-enabled': 'true', 'failover-max-staleness': '5m' });
      await cluster.workload('world', 'a');
      await cluster.settled('world', 1, 300_000);
      say('1 GiB is replicated');
      const pauses: number[] = [];
      const flushes: number[] = [];
      for (let move = 1; move <= MOVES; move++) {
        const [from, to] = move % 2 === 1 ? ['a', 'b'] : ['b', 'a'];
        await sleep(11_000);
        stopped = 0;
        const begun = performance.now();
        await cluster.cordon(from as string, true);
        await until('the pod ends', () => stopped > 0, 60_000);
        flushes.push((stopped - begun) / 1000);
        const there = of(csi, to as string);
        for (const ends = performance.now() + 60_000; !(await there.mayPublish()); await sleep(20))
          if (performance.now() > ends) throw new Error('it may not be published on the new node after 60 s');
        pauses.push((performance.now() - stopped) / 1000);
        say(`move ${move}: ${pauses.at(-1)?.toFixed(2)} s`);
        await cluster.cordon(from as string, false);
        await cluster.settled('world', 1, 120_000);
      }
      const [pause, flush] = [summary(pauses), summary(flushes)];
      return [
        {
          name: 'nobody may write',
          value: pause.max,
          unit: 's',
          target: 3,
          note: `slowest of ${pause.count}; median ${pause.p50.toFixed(2)}, quickest ${pause.min.toFixed(2)} s`,
        },
        {
          name: 'cordon until the pod has ended',
          value: flush.p50,
          unit: 's',
          note: 'while it still writes: the first flush, and a played kubelet that looks every 0.2 s',
        },
      ];
    } finally {
      await controller?.stop();
      for (const one of csi.values()) one.stop();
      await Promise.all([...agents.values()].map((one) => one.end('SIGKILL')));
      await cluster.stop();
      rmSync(folder, { recursive: true, force: true });
    }
  },
};
