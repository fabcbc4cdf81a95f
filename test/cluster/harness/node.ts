/**
 * One node: network, mount and PID namespace of its own with containerd, kube-proxy and kubelet. Killing the first
 * process of the PID namespace and removing the network is its power cut; starting it anew on the same folders, with a
 * boot id of its own, is its return. What a machine's memory had not yet written is not lost by that.
 */
import { execFileSync } from 'node:child_process';
import { randomUUID } from 'node:crypto';
import { existsSync, mkdirSync, readFileSync, writeFileSync } from 'node:fs';
import path from 'node:path';
import { setTimeout as sleep } from 'node:timers/promises';
import { childrenOf, Program, run, tail } from '../../kube/harness/program.ts';
import { kubeProgram } from '../../kube/harness/programs.ts';
import { programPath } from '../../packages.ts';
import type { ControlPlane } from './control-plane.ts';
import { PAUSE_IMAGE } from './images.ts';
import type { Instance, NodeNames } from './instance.ts';
import {
  hierarchies,
  makeCgroups,
  removeCgroups,
  removeNamespace,
  thaw,
  unifiedCgroups,
} from './leftovers.ts';

const START_MS = 60_000;
const BOOT_ID = '/proc/sys/kernel/random/boot_id';
/** Where the chart's first pool is by default. */
const POOL = '/var/lib/simple-volume';
/** Settings of the whole machine that kubelet writes; a node gets copies of its own. */
const MACHINE_SETTINGS = [
  'vm/overcommit_memory',
  'vm/panic_on_oom',
  'kernel/panic',
  'kernel/panic_on_oops',
  'kernel/keys/root_maxkeys',
  'kernel/keys/root_maxbytes',
];

export type Cut = 'all' | 'api' | 'agents';

export class ClusterNode {
  readonly name: string;
  /** folder of all its data */
  readonly folder: string;
  /** the pool's directory, as this machine sees it */
  readonly pool: string;
  private readonly names: NodeNames;
  private readonly instance: Instance;
  private readonly control: ControlPlane;
  private readonly logs: string;
  private readonly pause: string;
  private first: Program | null = null;
  private readonly programs = new Map<string, Program>();

  constructor(
    names: NodeNames,
    instance: Instance,
    control: ControlPlane,
    folder: string,
    logs: string,
    pause: string,
  ) {
    this.names = names;
    this.name = names.name;
    this.instance = instance;
    this.control = control;
    this.logs = logs;
    this.pause = pause;
    this.folder = path.join(folder, names.name);
    this.pool = path.join(this.folder, 'pool');
  }

  get running(): boolean {
    return this.first?.running === true;
  }

  /** Where the logs of its containers are, also after the node has ended. */
  get podLogs(): string {
    return path.join(this.folder, 'pods');
  }

  /** Starts it, for the first time or after a power cut. */
  async start(): Promise<void> {
    if (this.running) throw new Error(`${this.name} is running`);
    this.makeNetwork();
    makeCgroups(this.names.scope);
    this.writeFiles();
    const script = path.join(this.folder, 'first.sh');
    const separate = [
      '--mount',
      '--pid',
      '--fork',
      '--kill-child',
      '--mount-proc',
      '--propagation',
      'private',
    ];
    if (!unifiedCgroups()) separate.push('--cgroup');
    this.first = new Program(
      `${this.name} (first process)`,
      this.log('first'),
      this.inCgroups(['nsenter', this.network(), 'unshare', ...separate, 'sh', script]),
    );
    await this.until('its file systems', () => existsSync(path.join(this.folder, 'ready')));
    this.launch('containerd', ['--config', path.join(this.folder, 'containerd.toml')]);
    const socket = path.join(this.folder, 'run-containerd/containerd.sock');
    await this.until('containerd', () => existsSync(socket));
    this.launch('kube-proxy', ['--config', path.join(this.folder, 'proxy.json')]);
    this.startKubelet();
  }

  /** Gives its pool a disk of its own with btrfs. */
  makeDisk(): void {
    mkdirSync(this.pool, { recursive: true });
    const image = path.join(this.folder, 'disk');
    execFileSync('truncate', ['-s', '64G', image]);
    execFileSync(programPath('mkfs.btrfs') ?? 'mkfs.btrfs', ['-q', image]);
    execFileSync('mount', ['-o', 'loop', image, this.pool]);
  }

  /** Loads an image from a file. */
  async loadImage(file: string): Promise<void> {
    await this.enter(kubeProgram('ctr') as string, ['-n', 'k8s.io', 'images', 'import', file], {
      limitMs: 120_000,
    });
  }

  /** Gives an image that it has another name beside the old one. */
  async tagImage(image: string, name: string): Promise<void> {
    await this.enter(kubeProgram('ctr') as string, ['-n', 'k8s.io', 'images', 'tag', image, name]);
  }

  /** Everything on it is over at once, and it is out of the network. */
  async powerCut(): Promise<void> {
    const first = this.first;
    if (first === null) throw new Error(`${this.name} is off`);
    execFileSync('ip', ['-n', this.instance.name, 'link', 'del', this.name]);
    for (const pid of childrenOf(first.pid)) process.kill(pid, 'SIGKILL');
    const ended = first.gone();
    // A frozen process dies when it is thawed; its death is under way by then, so it does nothing any more.
    const thawing = setInterval(() => thaw(this.names.scope), 100);
    await ended;
    clearInterval(thawing);
    await Promise.all([...this.programs.values()].map((program) => program.gone()));
    this.programs.clear();
    this.first = null;
    removeNamespace(this.names.scope, this.names.scope);
    removeCgroups(this.names.scope);
  }

  startKubelet(): void {
    this.launch('kubelet', [
      `--config=${path.join(this.folder, 'kubelet.json')}`,
      `--kubeconfig=${path.join(this.folder, 'kubelet.kubeconfig')}`,
      `--hostname-override=${this.name}`,
      `--node-ip=${this.names.address}`,
      '--root-dir=/var/lib/kubelet',
      '--v=2',
    ]);
  }

  /** Ends kubelet; containers go on. */
  async stopKubelet(signal: NodeJS.Signals = 'SIGKILL'): Promise<void> {
    const kubelet = this.programs.get('kubelet');
    if (!kubelet) return;
    for (const pid of childrenOf(kubelet.pid)) process.kill(pid, signal); // nsenter(1) waits for it
    await kubelet.gone();
    this.programs.delete('kubelet');
  }

  async restartKubelet(signal: NodeJS.Signals = 'SIGKILL'): Promise<void> {
    await this.stopKubelet(signal);
    this.startKubelet();
  }

  /** Runs a program of this machine in the node's namespaces. */
  enter(
    program: string,
    args: readonly string[],
    options: { input?: string; limitMs?: number } = {},
  ): Promise<{ stdout: string; stderr: string }> {
    const [command = '', ...rest] = this.inCgroups(['nsenter', ...this.namespaces(), program, ...args]);
    return run(command, rest, options);
  }

  /** Kills the first process of all containers of this name. kubelet starts them anew. */
  async killContainer(name: string): Promise<void> {
    const ctr = kubeProgram('ctr') as string;
    const filter = `labels."io.kubernetes.container.name"==${name}`;
    const { stdout } = await this.enter(ctr, ['-n', 'k8s.io', 'containers', 'list', '-q', filter]);
    const kill = ['-n', 'k8s.io', 'tasks', 'kill', '--signal', 'SIGKILL'];
    // Those that have ended before are still listed.
    await Promise.allSettled(
      stdout
        .split(/\s+/)
        .filter(Boolean)
        .map((id) => this.enter(ctr, [...kill, id])),
    );
  }

  /**
   * Drops what goes between this node and some addresses, in both directions and in the middle of connections.
   * @param addresses null for every address; what stays on the node is never dropped
   */
  async cut(addresses: readonly string[] | null): Promise<void> {
    const from = addresses === null ? '' : `ip saddr { ${addresses.join(', ')} }`;
    const to = addresses === null ? '' : `ip daddr { ${addresses.join(', ')} }`;
    await this.heal();
    // Before and after the translation of Service addresses.
    const rules = `table ip cut {
      chain in { type filter hook prerouting priority raw; policy accept; iifname "eth0" ${from} drop; }
      chain out { type filter hook postrouting priority srcnat + 10; policy accept; oifname "eth0" ${to} drop; }
    }`;
    await run('nsenter', [this.network(), 'nft', '-f', '-'], { input: rules });
  }

  async heal(): Promise<void> {
    const rules = 'table ip cut {}\ndelete table ip cut\n';
    await run('nsenter', [this.network(), 'nft', '-f', '-'], { input: rules });
  }

  private network(): string {
    return `--net=/run/netns/${this.names.scope}`;
  }

  private log(name: string): string {
    return path.join(this.logs, `${this.name}-${name}.log`);
  }

  /** Arguments of nsenter(1). Its /sys stays the machine's: `ip netns exec` would hide the cgroups. */
  private namespaces(): string[] {
    const [pid] = this.first ? childrenOf(this.first.pid) : [];
    if (pid === undefined) throw new Error(`${this.name} is off`);
    const cgroups = unifiedCgroups() ? [] : ['--cgroup'];
    return [`--target=${pid}`, '--mount', '--pid', '--net', ...cgroups];
  }

  /**
   * A command that runs in the node's own cgroups, so that with their namespace every path in /proc/self/cgroup is
   * one below what the node has mounted. In v2 a cgroup with children holds no process; there containers have
   * namespaces of their own.
   */
  private inCgroups(command: readonly string[]): string[] {
    if (unifiedCgroups()) return [...command];
    const files = hierarchies().map((hierarchy) => `${hierarchy}/${this.names.scope}/cgroup.procs`);
    const enter = `for file in ${files.join(' ')}; do echo $$ > $file; done; exec "$@"`;
    return ['/bin/sh', '-c', enter, 'sh', ...command];
  }

  private launch(name: string, args: readonly string[]): void {
    const file = kubeProgram(name) as string;
    const argv = this.inCgroups(['nsenter', ...this.namespaces(), file, ...args]);
    // containerd finds its shim and runc there.
    const folders = ['containerd-shim-runc-v2', 'runc'].map((one) =>
      path.dirname(kubeProgram(one) as string),
    );
    const env = { ...process.env, PATH: [...folders, process.env.PATH, '/usr/sbin', '/sbin'].join(':') };
    this.programs.set(name, new Program(`${name} of ${this.name}`, this.log(name), argv, env));
  }

  private async until(what: string, probe: () => boolean): Promise<void> {
    const end = performance.now() + START_MS;
    while (!probe()) {
      this.first?.check();
      for (const program of this.programs.values()) program.check();
      if (performance.now() > end)
        throw new Error(`${this.name} waits for ${what}:\n${tail(this.log('first'))}`);
      await sleep(50);
    }
  }

  private makeNetwork(): void {
    const { scope, address, mac, pods } = this.names;
    const { name: hub, address: gateway, prefix } = this.instance;
    const ip = (...args: string[]): void => void execFileSync('ip', args);
    const inside = (...args: string[]): void => ip('-n', scope, ...args);
    ip('netns', 'add', scope);
    ip('-n', hub, 'link', 'add', this.name, 'type', 'veth', 'peer', 'name', 'eth0', 'netns', scope);
    ip('-n', hub, 'link', 'set', this.name, 'master', 'nodes', 'up');
    inside('link', 'set', 'eth0', 'address', mac);
    inside('addr', 'add', `${address}/${prefix}`, 'dev', 'eth0');
    inside('link', 'set', 'eth0', 'up');
    inside('link', 'set', 'lo', 'up');
    inside('route', 'add', 'default', 'via', gateway);
    ip('-n', hub, 'route', 'replace', pods, 'via', address);
    execFileSync('nsenter', [this.network(), 'sh', '-c', 'echo 1 > /proc/sys/net/ipv4/ip_forward']);
  }

  private writeFiles(): void {
    for (const name of [
      'kubelet',
      'containerd',
      'run-containerd',
      'cni',
      'cni-state',
      'pool',
      'pods',
      'settings',
    ])
      mkdirSync(path.join(this.folder, name), { recursive: true });
    const at = (name: string): string => path.join(this.folder, name);
    execFileSync('rm', ['-f', at('ready')]);
    writeFileSync(at('boot_id'), `${randomUUID()}\n`);
    for (const name of MACHINE_SETTINGS) {
      if (existsSync(`/proc/sys/${name}`))
        writeFileSync(at(`settings/${name.replaceAll('/', '.')}`), readFileSync(`/proc/sys/${name}`));
    }
    writeFileSync(
      at('cni/10-pods.conflist'),
      JSON.stringify({
        cniVersion: '1.0.0',
        name: 'pods',
        plugins: [
          {
            type: 'bridge',
            bridge: 'cni0',
            isGateway: true,
            ipMasq: false,
            hairpinMode: true,
            ipam: {
              type: 'host-local',
              dataDir: '/var/lib/cni',
              ranges: [[{ subnet: this.names.pods }]],
              routes: [{ dst: '0.0.0.0/0' }],
            },
          },
        ],
      }),
    );
    this.writeContainerSpec();
    writeFileSync(at('containerd.toml'), this.containerdConfig());
    writeFileSync(at('kubelet.json'), JSON.stringify(this.kubeletConfig()));
    this.control.writeConfig(`system:node:${this.name}`, at('kubelet.kubeconfig'));
    this.control.writeConfig('system:kube-proxy', at('proxy.kubeconfig'));
    writeFileSync(
      at('proxy.json'),
      JSON.stringify({
        apiVersion: 'kubeproxy.config.k8s.io/v1alpha1',
        kind: 'KubeProxyConfiguration',
        mode: 'nftables',
        clientConnection: { kubeconfig: at('proxy.kubeconfig') },
        hostnameOverride: this.name,
        clusterCIDR: this.instance.pods,
        // Settings of the whole machine stay as they are.
        conntrack: { maxPerCore: 0, min: 0, tcpEstablishedTimeout: '0s', tcpCloseWaitTimeout: '0s' },
      }),
    );
    writeFileSync(at('first.sh'), this.firstScript());
  }

  /** A container sees the node's boot id too: what must not outlive a power cut is told by it. */
  private writeContainerSpec(): void {
    const spec = JSON.parse(
      execFileSync(kubeProgram('ctr') as string, ['oci', 'spec'], { encoding: 'utf8' }),
    ) as Record<string, unknown>;
    // runc runs it in the container's new root folder, when all is mounted there.
    const args = ['mount', '--bind', path.join(this.folder, 'boot_id'), BOOT_ID.slice(1)];
    const hooks = { createContainer: [{ path: '/usr/bin/mount', args }] };
    writeFileSync(path.join(this.folder, 'base-spec.json'), JSON.stringify({ ...spec, hooks }));
  }

  private containerdConfig(): string {
    const runtime = "plugins.'io.containerd.cri.v1.runtime'";
    return `version = 3
root = "/var/lib/containerd"
state = "/run/containerd"
[grpc]
  address = "/run/containerd/containerd.sock"
[plugins.'io.containerd.cri.v1.images']
  snapshotter = "overlayfs"
  [plugins.'io.containerd.cri.v1.images'.pinned_images]
    sandbox = "${PAUSE_IMAGE}"
[${runtime}]
  # A container's own score of the OOM killer may need a capability that this machine does not give.
  restrict_oom_score_adj = true
[${runtime}.containerd.runtimes.runc]
  runtime_type = "io.containerd.runc.v2"
  base_runtime_spec = "${this.folder}/base-spec.json"
[${runtime}.cni]
  bin_dirs = ["/usr/lib/cni"]
  conf_dir = "${this.folder}/cni"
`;
  }

  private kubeletConfig(): object {
    return {
      apiVersion: 'kubelet.config.k8s.io/v1beta1',
      kind: 'KubeletConfiguration',
      authentication: {
        anonymous: { enabled: false },
        webhook: { enabled: true },
        x509: { clientCAFile: this.control.kubeletAuthority },
      },
      authorization: { mode: 'Webhook' },
      containerRuntimeEndpoint: 'unix:///run/containerd/containerd.sock',
      failCgroupV1: false,
      failSwapOn: false,
      cgroupDriver: 'cgroupfs',
      cgroupsPerQOS: true,
      enforceNodeAllocatable: [],
      nodeStatusUpdateFrequency: '3s',
      nodeLeaseDurationSeconds: 8,
      clusterDomain: 'cluster.local',
      clusterDNS: [this.instance.dnsService], // nothing answers there unless a scenario runs one
      evictionHard: { 'memory.available': '1Mi', 'nodefs.available': '1%', 'imagefs.available': '1%' },
      imageGCHighThresholdPercent: 100,
      syncFrequency: '5s',
      shutdownGracePeriod: '0s',
    };
  }

  /** File systems of the node. Nothing of the machine's own /var/lib, /run and /var/log is touched. */
  private firstScript(): string {
    const { folder } = this;
    const binds: [string, string][] = [
      ['kubelet', '/var/lib/kubelet'],
      ['containerd', '/var/lib/containerd'],
      ['cni-state', '/var/lib/cni'],
      ['pool', POOL],
      ['pods', '/var/log/pods'],
      ['run-containerd', '/run/containerd'],
    ];
    const settings = MACHINE_SETTINGS.filter((name) => existsSync(`/proc/sys/${name}`)).map(
      (name) => `mount --bind ${folder}/settings/${name.replaceAll('/', '.')} /proc/sys/${name}`,
    );
    // Several kubelets on one machine: each takes its own part for the whole.
    const cgroups = hierarchies().map(
      (hierarchy) => `mount --bind ${hierarchy}/${this.names.scope} ${hierarchy}`,
    );
    return `set -e
for folder in /var/lib /var/log /run; do mount -t tmpfs none $folder; done
rm -rf ${folder}/run-containerd/* ${folder}/cni-state/*
mkdir -p /var/log/containers /run/netns /run/lock
${binds.map(([from, to]) => `mkdir -p ${to}; mount --bind ${folder}/${from} ${to}`).join('\n')}
${settings.join('\n')}
${cgroups.join('\n')}
mount --bind ${folder}/boot_id ${BOOT_ID}
mount --make-rshared /
touch ${folder}/ready
exec ${this.pause}
`;
  }
}
