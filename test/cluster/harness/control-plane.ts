/** The control plane: etcd, API server, controller manager and scheduler in a network namespace of their own. */
import { execFileSync } from 'node:child_process';
import { generateKeyPairSync, randomBytes } from 'node:crypto';
import { mkdirSync, readFileSync, writeFileSync } from 'node:fs';
import path from 'node:path';
import { setTimeout as sleep } from 'node:timers/promises';
import { authority, certificate } from '../../certificates.ts';
import { Program, run } from '../../kube/harness/program.ts';
import { kubeProgram } from '../../kube/harness/programs.ts';
import type { Instance } from './instance.ts';

/** Seconds until a node that says nothing is NotReady (Kubernetes itself: 50), and how often that is looked at. */
export const MONITOR_GRACE_S = 12;
const MONITOR_PERIOD_S = 2;
const READY_MS = 90_000;
const API_PORT = 6443;
const KUBELET_CLIENT = 'kube-apiserver-kubelet-client';

/** Its users, as Kubernetes' own roles name them; nodes are added. */
const USERS: Readonly<Record<string, readonly string[]>> = {
  admin: ['system:masters'],
  'system:kube-controller-manager': [],
  'system:kube-scheduler': [],
  'system:kube-proxy': [],
};

export class ControlPlane {
  readonly instance: Instance;
  readonly folder: string;
  readonly url: string;
  /** kubeconfig of the administrator */
  readonly kubeconfig: string;
  private readonly logs: string;
  private readonly tokens = new Map<string, string>();
  private readonly programs = new Map<string, Program>();

  constructor(instance: Instance, folder: string, logs: string) {
    this.instance = instance;
    this.folder = path.join(folder, 'control-plane');
    this.logs = logs;
    this.url = `https://${instance.address}:${API_PORT}`;
    this.kubeconfig = path.join(folder, 'kubeconfig');
  }

  /** Certificate of the authority that kubelets believe in. */
  get kubeletAuthority(): string {
    return path.join(this.folder, 'ca.crt');
  }

  async start(): Promise<void> {
    mkdirSync(this.folder, { recursive: true });
    this.makeNetwork();
    this.makeKeys();
    this.startEtcd();
    await this.startApi();
    writeFileSync(this.kubeconfig, this.configOf('admin'), { mode: 0o600 });
    await this.kubectl(
      ['apply', '-f', '-'],
      JSON.stringify({
        apiVersion: 'v1',
        kind: 'List',
        items: [
          binding('cluster-proxy', 'system:node-proxier', 'system:kube-proxy'),
          binding('cluster-kubelets', 'system:kubelet-api-admin', KUBELET_CLIENT),
        ],
      }),
    );
    this.startManagers();
  }

  /** Writes the kubeconfig of a user. */
  writeConfig(user: string, file: string): void {
    writeFileSync(file, this.configOf(user), { mode: 0o600 });
  }

  /** Runs kubectl as the administrator. @throws Error with what it wrote to standard error */
  async kubectl(args: readonly string[], input = '', limitMs = 60_000): Promise<string> {
    const env = { PATH: process.env.PATH, KUBECONFIG: this.kubeconfig, HOME: this.folder };
    const { stdout } = await run(kubeProgram('kubectl') as string, args, { input, env, limitMs });
    return stdout;
  }

  /** Ends a program of the control plane; `start...` brings it back with what etcd holds. */
  async stop(name: string, signal: NodeJS.Signals = 'SIGKILL'): Promise<void> {
    await this.programs.get(name)?.stop(signal);
    this.programs.delete(name);
  }

  async stopAll(): Promise<void> {
    await Promise.all([...this.programs.values()].map((program) => program.stop()));
    this.programs.clear();
  }

  /** @throws Error when one of them has ended by itself */
  check(): void {
    for (const program of this.programs.values()) program.check();
  }

  async startApi(): Promise<void> {
    const { address, services } = this.instance;
    const at = (name: string): string => path.join(this.folder, name);
    this.launch('kube-apiserver', [
      '--etcd-servers=http://127.0.0.1:2379',
      `--bind-address=${address}`,
      `--advertise-address=${address}`,
      `--secure-port=${API_PORT}`,
      `--cert-dir=${this.folder}`, // makes its own certificate there
      `--token-auth-file=${at('tokens.csv')}`,
      `--service-account-key-file=${at('sa.pub')}`,
      `--service-account-signing-key-file=${at('sa.key')}`,
      '--service-account-issuer=https://kubernetes.default.svc',
      '--authorization-mode=Node,RBAC',
      '--enable-admission-plugins=NodeRestriction',
      `--service-cluster-ip-range=${services}`,
      '--allow-privileged=true',
      '--profiling=false',
      `--kubelet-client-certificate=${at('kubelet-client.crt')}`,
      `--kubelet-client-key=${at('kubelet-client.key')}`,
      '--kubelet-preferred-address-types=InternalIP',
    ]);
    const until = performance.now() + READY_MS;
    const env = { PATH: process.env.PATH, HOME: this.folder };
    const config = path.join(this.folder, 'admin.kubeconfig');
    for (;;) {
      this.check();
      try {
        this.writeConfig('admin', config); // its certificate is there soon after the start
        const args = [`--kubeconfig=${config}`, 'get', '--raw', '/readyz'];
        await run(kubeProgram('kubectl') as string, args, { env, limitMs: 5000 });
        return;
      } catch (error) {
        if (performance.now() > until) throw error;
      }
      await sleep(200);
    }
  }

  startManagers(): void {
    const config = (user: string): string => {
      const file = path.join(this.folder, `${user.replace('system:', '')}.kubeconfig`);
      this.writeConfig(user, file);
      return file;
    };
    this.launch('kube-controller-manager', [
      `--kubeconfig=${config('system:kube-controller-manager')}`,
      '--use-service-account-credentials',
      `--service-account-private-key-file=${path.join(this.folder, 'sa.key')}`,
      `--root-ca-file=${path.join(this.folder, 'apiserver.crt')}`,
      '--leader-elect=false',
      `--node-monitor-grace-period=${MONITOR_GRACE_S}s`,
      `--node-monitor-period=${MONITOR_PERIOD_S}s`,
      '--allocate-node-cidrs=false',
      '--bind-address=127.0.0.1',
    ]);
    this.launch('kube-scheduler', [
      `--kubeconfig=${config('system:kube-scheduler')}`,
      '--leader-elect=false',
      '--bind-address=127.0.0.1',
    ]);
  }

  private startEtcd(): void {
    this.launch('etcd', [
      `--data-dir=${path.join(this.folder, 'etcd')}`,
      '--unsafe-no-fsync',
      '--listen-client-urls=http://127.0.0.1:2379',
      '--advertise-client-urls=http://127.0.0.1:2379',
      '--listen-peer-urls=http://127.0.0.1:2380',
      '--initial-advertise-peer-urls=http://127.0.0.1:2380',
      '--initial-cluster=default=http://127.0.0.1:2380',
      '--log-level=warn',
    ]);
  }

  private launch(name: string, args: string[]): void {
    const argv = ['nsenter', `--net=/run/netns/${this.instance.name}`, kubeProgram(name) as string, ...args];
    this.programs.set(name, new Program(name, path.join(this.logs, `${name}.log`), argv));
  }

  /**
   * A bridge in a network namespace of its own joins the nodes, so that neither routes nor forwarding of the machine
   * change. One link leads out to the machine, for kubectl.
   */
  private makeNetwork(): void {
    const { name, address, hostAddress, prefix, pods } = this.instance;
    const ip = (...args: string[]): void => void execFileSync('ip', args);
    const inside = (...args: string[]): void => ip('-n', name, ...args);
    ip('netns', 'add', name);
    inside('link', 'set', 'lo', 'up');
    inside('link', 'add', 'nodes', 'type', 'bridge');
    inside('addr', 'add', `${address}/${prefix}`, 'dev', 'nodes');
    inside('link', 'set', 'nodes', 'up');
    ip('link', 'add', name, 'type', 'veth', 'peer', 'name', 'machine', 'netns', name);
    inside('link', 'set', 'machine', 'master', 'nodes', 'up');
    ip('addr', 'add', `${hostAddress}/${prefix}`, 'dev', name);
    ip('link', 'set', name, 'up');
    ip('route', 'add', pods, 'via', address);
    execFileSync('nsenter', [
      `--net=/run/netns/${name}`,
      'sh',
      '-c',
      'echo 1 > /proc/sys/net/ipv4/ip_forward',
    ]);
  }

  private makeKeys(): void {
    const users = { ...USERS };
    for (const node of this.instance.nodes) users[`system:node:${node.name}`] = ['system:nodes'];
    const lines = Object.entries(users).map(([user, groups]) => {
      const token = randomBytes(24).toString('hex');
      this.tokens.set(user, token);
      return `${token},${user},${user},"${groups.join(',')}"\n`;
    });
    writeFileSync(path.join(this.folder, 'tokens.csv'), lines.join(''), { mode: 0o600 });
    const { privateKey, publicKey } = generateKeyPairSync('ec', { namedCurve: 'P-256' });
    const key = privateKey.export({ type: 'sec1', format: 'pem' });
    writeFileSync(path.join(this.folder, 'sa.key'), key, { mode: 0o600 });
    writeFileSync(path.join(this.folder, 'sa.pub'), publicKey.export({ type: 'spki', format: 'pem' }));
    authority(this.folder);
    certificate(this.folder, 'kubelet-client', { dns: 'kubelet-client', subject: KUBELET_CLIENT });
  }

  private configOf(user: string): string {
    const ca = readFileSync(path.join(this.folder, 'apiserver.crt'));
    const cluster = { server: this.url, 'certificate-authority-data': ca.toString('base64') };
    return JSON.stringify({
      apiVersion: 'v1',
      kind: 'Config',
      clusters: [{ name: this.instance.name, cluster }],
      users: [{ name: user, user: { token: this.tokens.get(user) } }],
      contexts: [{ name: this.instance.name, context: { cluster: this.instance.name, user } }],
      'current-context': this.instance.name,
    });
  }
}

const binding = (name: string, role: string, user: string): object => ({
  apiVersion: 'rbac.authorization.k8s.io/v1',
  kind: 'ClusterRoleBinding',
  metadata: { name },
  roleRef: { apiGroup: 'rbac.authorization.k8s.io', kind: 'ClusterRole', name: role },
  subjects: [{ apiGroup: 'rbac.authorization.k8s.io', kind: 'User', name: user }],
});
