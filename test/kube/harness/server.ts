/**
 * A real API server of our own: etcd and kube-apiserver on free ports of the loopback, in a folder that is removed
 * afterwards. Ready in a few seconds. Both end with the process that started them, whatever ends it.
 */
import { execFile } from 'node:child_process';
import { generateKeyPairSync, randomBytes } from 'node:crypto';
import { mkdirSync, mkdtempSync, readFileSync, rmSync, writeFileSync } from 'node:fs';
import https from 'node:https';
import net from 'node:net';
import os from 'node:os';
import path from 'node:path';
import { setTimeout as sleep } from 'node:timers/promises';
import { Program, tail } from './program.ts';
import { kubeProgram } from './programs.ts';

export interface KubeServerOptions {
  /** CRD files or folders that are applied once it is ready */
  crds?: readonly string[];
  /** More users besides `admin`: name to groups. Each has a token of its own, see `token`. */
  users?: Readonly<Record<string, readonly string[]>>;
  /** more flags of kube-apiserver */
  flags?: readonly string[];
}

const READY_MS = 60_000;

export async function freePort(): Promise<number> {
  const server = net.createServer();
  await new Promise<void>((resolve, reject) => {
    server.once('error', reject).listen(0, '127.0.0.1', resolve);
  });
  const { port } = server.address() as net.AddressInfo;
  await new Promise((resolve) => server.close(resolve));
  return port;
}

export class KubeServer {
  readonly folder: string;
  /** https://127.0.0.1:PORT */
  url = '';
  /** of the administrator */
  kubeconfig = '';
  private readonly options: KubeServerOptions;
  private readonly tokens = new Map<string, string>();
  private etcd: Program | null = null;
  private api: Program | null = null;
  private etcdPort = 0;
  private port = 0;

  private constructor(options: KubeServerOptions) {
    this.options = options;
    this.folder = mkdtempSync(path.join(os.tmpdir(), 'kube-'));
  }

  private program(name: string, args: readonly string[]): Program {
    const file = kubeProgram(name);
    if (file === null) throw new Error(`${name} is not built: node test/kube/harness/build.ts`);
    return new Program(name, path.join(this.folder, `${name}.log`), [file, ...args]);
  }

  /** Starts both and waits until the API server is ready. */
  static async start(options: KubeServerOptions = {}): Promise<KubeServer> {
    const server = new KubeServer(options);
    try {
      server.prepare();
      await server.begin();
      for (const crds of options.crds ?? []) {
        await server.kubectl(['apply', '-f', crds]);
        await server.kubectl(['wait', '--for=condition=Established', '--timeout=30s', '-f', crds]);
      }
      return server;
    } catch (error) {
      await server.stop();
      throw error;
    }
  }

  /** PEM of the authority behind the server's certificate. */
  get ca(): string {
    return readFileSync(path.join(this.folder, 'pki/apiserver.crt'), 'utf8');
  }

  /** PEM of the server's own certificate and key, which names 127.0.0.1: for a proxy that stands in for it. */
  get certificate(): { cert: string; key: string } {
    return { cert: this.ca, key: readFileSync(path.join(this.folder, 'pki/apiserver.key'), 'utf8') };
  }

  /** Bearer token of `admin` or of one of the users named at the start. */
  token(user = 'admin'): string {
    const token = this.tokens.get(user);
    if (token === undefined) throw new Error(`no user ${user}`);
    return token;
  }

  /** Writes a kubeconfig; `url` for a proxy in front, `token` for a service account's. */
  writeKubeconfig(name: string, options: { user?: string; token?: string; url?: string } = {}): string {
    const file = path.join(this.folder, `${name}.kubeconfig`);
    const config = {
      apiVersion: 'v1',
      kind: 'Config',
      clusters: [
        {
          name: 'test',
          cluster: {
            server: options.url ?? this.url,
            'certificate-authority-data': Buffer.from(this.ca).toString('base64'),
          },
        },
      ],
      users: [{ name, user: { token: options.token ?? this.token(options.user) } }],
      contexts: [{ name: 'test', context: { cluster: 'test', user: name } }],
      'current-context': 'test',
    };
    writeFileSync(file, JSON.stringify(config), { mode: 0o600 });
    return file;
  }

  /** Runs kubectl as the administrator. @throws Error with what it wrote to standard error */
  kubectl(args: readonly string[], options: { input?: string; kubeconfig?: string } = {}): Promise<string> {
    return new Promise((resolve, reject) => {
      const child = execFile(
        kubeProgram('kubectl') as string,
        [...args],
        {
          env: {
            PATH: process.env.PATH,
            KUBECONFIG: options.kubeconfig ?? this.kubeconfig,
            HOME: this.folder,
          },
          maxBuffer: 64 * 1024 * 1024,
          timeout: 60_000,
        },
        (error, stdout, stderr) => {
          if (error) reject(new Error(`kubectl ${args.join(' ')}: ${stderr.trim() || error.message}`));
          else resolve(stdout);
        },
      );
      child.stdin?.end(options.input ?? '');
    });
  }

  /** Applies objects. */
  async apply(...objects: object[]): Promise<void> {
    const input = JSON.stringify({ apiVersion: 'v1', kind: 'List', items: objects });
    await this.kubectl(['apply', '-f', '-'], { input });
  }

  /** SIGSTOP makes it silent without closing a connection, SIGCONT lets it go on. */
  signalApi(signal: NodeJS.Signals): void {
    this.api?.signal(signal);
  }

  /** Ends the API server alone; etcd keeps everything. */
  async stopApi(signal: NodeJS.Signals = 'SIGKILL'): Promise<void> {
    await this.api?.stop(signal);
    this.api = null;
  }

  /** Starts it again on the same port. */
  async startApi(): Promise<void> {
    const pki = path.join(this.folder, 'pki');
    this.api = this.program('kube-apiserver', [
      `--etcd-servers=http://127.0.0.1:${this.etcdPort}`,
      '--bind-address=127.0.0.1',
      `--secure-port=${this.port}`,
      '--advertise-address=127.0.0.1',
      '--endpoint-reconciler-type=none', // a loopback address is no valid endpoint
      `--cert-dir=${pki}`, // makes its own certificate there
      `--token-auth-file=${path.join(pki, 'tokens.csv')}`,
      `--service-account-key-file=${path.join(pki, 'sa.pub')}`,
      `--service-account-signing-key-file=${path.join(pki, 'sa.key')}`,
      '--service-account-issuer=https://kubernetes.default.svc',
      '--authorization-mode=Node,RBAC',
      '--service-cluster-ip-range=10.96.0.0/16',
      '--allow-privileged=true',
      '--profiling=false',
      // Pods are made here without a controller manager, which would have made their service account.
      '--disable-admission-plugins=ServiceAccount',
      ...(this.options.flags ?? []),
    ]);
    await this.ready();
  }

  async restart(signal: NodeJS.Signals = 'SIGKILL'): Promise<void> {
    await this.stopApi(signal);
    await this.startApi();
  }

  /** Forgets in etcd all versions before the present one, so that older ones are answered with 410 Gone. */
  async compact(): Promise<void> {
    const ask = async (what: string, body: object): Promise<{ header: { revision: string } }> => {
      const reply = await fetch(`http://127.0.0.1:${this.etcdPort}/v3/kv/${what}`, {
        method: 'POST',
        body: JSON.stringify(body),
      });
      if (!reply.ok) throw new Error(`etcd ${what}: ${await reply.text()}`);
      return (await reply.json()) as { header: { revision: string } };
    };
    const key = Buffer.from('a').toString('base64');
    const { header } = await ask('range', { key });
    await ask('compaction', { revision: header.revision, physical: true });
  }

  /** Ends both, waits for it and removes the folder. */
  async stop(): Promise<void> {
    await this.stopApi();
    await this.etcd?.stop();
    rmSync(this.folder, { recursive: true, force: true, maxRetries: 3 });
  }

  private prepare(): void {
    const pki = path.join(this.folder, 'pki');
    mkdirSync(pki);
    const users = { admin: ['system:masters'], ...this.options.users };
    const lines = Object.entries(users).map(([user, groups]) => {
      const token = randomBytes(24).toString('hex');
      this.tokens.set(user, token);
      return `${token},${user},${user},"${groups.join(',')}"\n`;
    });
    writeFileSync(path.join(pki, 'tokens.csv'), lines.join(''), { mode: 0o600 });
    const { privateKey, publicKey } = generateKeyPairSync('ec', { namedCurve: 'P-256' });
    writeFileSync(path.join(pki, 'sa.key'), privateKey.export({ type: 'sec1', format: 'pem' }), {
      mode: 0o600,
    });
    writeFileSync(path.join(pki, 'sa.pub'), publicKey.export({ type: 'spki', format: 'pem' }));
  }

  /** A port that was free a moment ago may be taken by now: then once more with others. */
  private async begin(): Promise<void> {
    for (let attempt = 1; ; attempt++) {
      try {
        const [client, peer, api] = [await freePort(), await freePort(), await freePort()];
        this.etcdPort = client;
        this.port = api;
        this.url = `https://127.0.0.1:${api}`;
        this.etcd = this.program('etcd', [
          `--data-dir=${path.join(this.folder, 'etcd')}`,
          '--unsafe-no-fsync',
          `--listen-client-urls=http://127.0.0.1:${client}`,
          `--advertise-client-urls=http://127.0.0.1:${client}`,
          `--listen-peer-urls=http://127.0.0.1:${peer}`,
          `--initial-advertise-peer-urls=http://127.0.0.1:${peer}`,
          `--initial-cluster=default=http://127.0.0.1:${peer}`,
          '--log-level=warn',
        ]);
        await this.startApi();
        this.kubeconfig = this.writeKubeconfig('admin');
        return;
      } catch (error) {
        await this.stopApi();
        await this.etcd?.stop();
        rmSync(path.join(this.folder, 'etcd'), { recursive: true, force: true });
        if (attempt === 3) throw error;
      }
    }
  }

  private async ready(): Promise<void> {
    const until = performance.now() + READY_MS;
    while (performance.now() < until) {
      if (!this.api?.running || !this.etcd?.running) {
        const logs = [this.etcd, this.api].map((program) => (program ? tail(program.log) : ''));
        throw new Error(`etcd or kube-apiserver ended:\n${logs.join('\n')}`);
      }
      if (await this.answersReady()) return;
      await sleep(100);
    }
    throw new Error(
      `kube-apiserver is not ready after ${READY_MS} ms:\n${this.api ? tail(this.api.log) : ''}`,
    );
  }

  private answersReady(): Promise<boolean> {
    return new Promise((resolve) => {
      const request = https.get(
        `${this.url}/readyz`,
        {
          // Only whether it is ready is asked here; its certificate may not be written yet.
          rejectUnauthorized: false,
          headers: { authorization: `Bearer ${this.token()}` },
          agent: false,
          timeout: 2000,
        },
        (response) => {
          response.resume();
          resolve(response.statusCode === 200);
        },
      );
      request.on('timeout', () => request.destroy());
      request.on('error', () => resolve(false));
    });
  }
}
