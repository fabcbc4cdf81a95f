import { existsSync, readFileSync, statSync } from 'node:fs';
import { isIP } from 'node:net';
import { resolve } from 'node:path';
import { parseDuration } from '../core/duration.ts';
import { SimpleVolumeError } from '../core/errors.ts';
import { checkName } from '../core/names.ts';
import { parseSize } from '../core/size.ts';
import { MAX_LEASE_MS, MIN_LEASE_MS } from '../fence/timing.ts';
import { LOG_LEVELS, type LogLevel } from './logger.ts';
import { readAuthorities, readTls, type TlsFiles } from './tls.ts';

export interface Address {
  host: string;
  port: number;
}

export const SIZE_ENFORCEMENTS = ['auto', 'off'] as const;
export type SizeEnforcement = (typeof SIZE_ENFORCEMENTS)[number];

export interface AgentConfig {
  node: string;
  poolName: string;
  poolPath: string;
  allowNonEmptyPool: boolean;
  /** refuse the pool unless its marker carries this id */
  expectPoolId: string | null;
  http: Address;
  webdav: Address;
  /** how other nodes reach this agent; null: derived from the listening address */
  advertise: string | null;
  advertiseWebdav: string | null;
  /** address or name that those two are made of where they are null; null: the listening address */
  advertiseHost: string | null;
  token: string;
  logLevel: LogLevel;
  browseAuth: boolean;
  beatMs: number;
  auditMs: number;
  /** longest fencing lease that this node takes or promises, ms */
  leaseMs: number;
  /** unix socket for csi-node; null: none */
  socket: string | null;
  /** null: plain HTTP */
  tls: TlsFiles | null;
  /** PEM authorities for other agents that serve TLS; null: the system's */
  caFile: string | null;
  /** auto: the pool's file system holds volumes to their size where it can */
  sizeEnforcement: SizeEnforcement;
  /** rclone processes at the same time */
  pulls: number;
  /** read ahead of each of them, bytes */
  pullBufferBytes: number;
  /** of all pulls together, bytes per second; 0: no ceiling */
  pullBytesPerSecond: number;
}

export interface Option {
  flag: string;
  value: string | null;
  env: string;
  help: string;
  fallback?: string;
}

/** Every flag with its environment variable. The table is what --help shows and what the parser reads. */
export const OPTIONS: Option[] = [
  {
    flag: 'node',
    value: 'NAME',
    env: 'SIMPLE_VOLUME_NODE',
    help: 'name of this node, as other agents know it',
  },
  { flag: 'pool-name', value: 'NAME', env: 'SIMPLE_VOLUME_POOL_NAME', help: 'name of the storage pool' },
  {
    flag: 'pool-path',
    value: 'DIR',
    env: 'SIMPLE_VOLUME_POOL_PATH',
    help: 'directory of the pool; must exist',
  },
  {
    flag: 'http',
    value: 'HOST:PORT',
    env: 'SIMPLE_VOLUME_HTTP',
    help: 'address of the HTTP API; a host * stands for all addresses, IPv4 and IPv6',
    fallback: '127.0.0.1:8080',
  },
  {
    flag: 'webdav',
    value: 'HOST:PORT',
    env: 'SIMPLE_VOLUME_WEBDAV',
    help: 'address of the read-only WebDAV tree; a host * stands for all addresses, IPv4 and IPv6',
    fallback: '127.0.0.1:8081',
  },
  {
    flag: 'token-file',
    value: 'FILE',
    env: 'SIMPLE_VOLUME_TOKEN_FILE',
    help: 'file with the bearer token (16 characters or more, not readable by others)',
  },
  {
    flag: 'allow-non-empty-pool',
    value: null,
    env: 'SIMPLE_VOLUME_ALLOW_NON_EMPTY_POOL',
    help: 'adopt a pool directory that is not empty and has no marker',
  },
  {
    flag: 'expect-pool-id',
    value: 'UUID',
    env: 'SIMPLE_VOLUME_EXPECT_POOL_ID',
    help: 'use the pool only if its marker has this id',
  },
  {
    flag: 'advertise',
    value: 'URL',
    env: 'SIMPLE_VOLUME_ADVERTISE',
    help: 'URL of the HTTP API as other nodes reach it',
  },
  {
    flag: 'advertise-webdav',
    value: 'URL',
    env: 'SIMPLE_VOLUME_ADVERTISE_WEBDAV',
    help: 'URL of the WebDAV tree as other nodes reach it',
  },
  {
    flag: 'advertise-host',
    value: 'HOST',
    env: 'SIMPLE_VOLUME_ADVERTISE_HOST',
    help: 'IPv4 or IPv6 address or name of which both URLs are made where they are not given',
  },
  {
    flag: 'browse-auth',
    value: 'on|off',
    env: 'SIMPLE_VOLUME_BROWSE_AUTH',
    help: 'ask for the token on /browse',
    fallback: 'on',
  },
  {
    flag: 'beat',
    value: 'DURATION',
    env: 'SIMPLE_VOLUME_BEAT',
    help: 'interval of the freshness beat',
    fallback: '1s',
  },
  {
    flag: 'audit',
    value: 'DURATION',
    env: 'SIMPLE_VOLUME_AUDIT',
    help: 'interval of the full comparison of each watched volume with its index',
    fallback: '15m',
  },
  {
    flag: 'lease',
    value: 'DURATION',
    env: 'SIMPLE_VOLUME_LEASE',
    help: 'how long a fencing lease lasts, the same on all nodes and the controller',
    fallback: '8s',
  },
  {
    flag: 'socket',
    value: 'FILE',
    env: 'SIMPLE_VOLUME_SOCKET',
    help: 'unix socket on which csi-node of this node asks how long writers may run',
  },
  {
    flag: 'tls-cert',
    value: 'FILE',
    env: 'SIMPLE_VOLUME_TLS_CERT',
    help: 'PEM certificate chain with the DNS name simple-volume-agent: both addresses serve TLS; renewed files are taken up',
  },
  {
    flag: 'tls-key',
    value: 'FILE',
    env: 'SIMPLE_VOLUME_TLS_KEY',
    help: 'PEM key of --tls-cert',
  },
  {
    flag: 'ca-file',
    value: 'FILE',
    env: 'SIMPLE_VOLUME_CA_FILE',
    help: 'PEM authorities that other agents are checked against',
  },
  {
    flag: 'size-enforcement',
    value: SIZE_ENFORCEMENTS.join('|'),
    env: 'SIMPLE_VOLUME_SIZE_ENFORCEMENT',
    help: "hold volumes to their size where the pool's file system can (btrfs, XFS, ext4); csi-node sets the limits",
    fallback: 'auto',
  },
  {
    flag: 'pulls',
    value: 'N',
    env: 'SIMPLE_VOLUME_PULLS',
    help: 'rclone processes at the same time, 1 to 16; each takes about 25 MiB and its buffer',
    fallback: '2',
  },
  {
    flag: 'pull-buffer',
    value: 'SIZE',
    env: 'SIMPLE_VOLUME_PULL_BUFFER',
    help: 'what each of them reads ahead, up to 64Mi',
    fallback: '0',
  },
  {
    flag: 'pull-bandwidth',
    value: 'SIZE',
    env: 'SIMPLE_VOLUME_PULL_BANDWIDTH',
    help: 'the most that all pulls together receive in a second, at least 64Ki; 0: no limit',
    fallback: '0',
  },
  {
    flag: 'log-level',
    value: LOG_LEVELS.join('|'),
    env: 'SIMPLE_VOLUME_LOG_LEVEL',
    help: 'how much is logged',
    fallback: 'info',
  },
];

const MiB = 1024 * 1024;

const bad = (flag: string, text: string): never => {
  throw new SimpleVolumeError('FIELD_INVALID', `--${flag} ${text}`, { field: `--${flag}` });
};

/**
 * What listens on all addresses of both families: libuv clears IPV6_V6ONLY. A kernel without IPv6 has no such address.
 * @param table exists where the kernel has IPv6, proc_net(5)
 */
export const allAddresses = (table = '/proc/net/if_inet6'): '::' | '0.0.0.0' =>
  existsSync(table) ? '::' : '0.0.0.0';

/** HOST:PORT; an IPv6 host in brackets, `*` for all addresses. Port 0 takes a free one. */
export function parseAddress(text: string, flag: string): Address {
  const m = /^(?:\[([0-9a-fA-F:.%a-z0-9]+)\]|([^:[\]/\s]+)):(\d{1,5})$/.exec(text);
  const port = Number(m?.[3]);
  if (!m || port > 65535 || (m[1] !== undefined && isIP(m[1].split('%')[0] as string) !== 6))
    return bad(
      flag,
      `must be HOST:PORT with a port from 0 to 65535, an IPv6 host in brackets ([::1]:8080); got ${JSON.stringify(text)}`,
    );
  return { host: m[2] === '*' ? allAddresses() : (m[1] ?? (m[2] as string)), port };
}

/** An IP address or a DNS name, without brackets. */
function parseHost(text: string, flag: string): string {
  const host = text.replace(/^\[(.*)\]$/, '$1');
  return isIP(host) !== 0 || /^[A-Za-z0-9]([-.A-Za-z0-9]{0,251}[A-Za-z0-9])?$/.test(host)
    ? host
    : bad(flag, `must be an IPv4 or IPv6 address or a DNS name; got ${JSON.stringify(text)}`);
}

export const addressUrl = (a: Address, scheme: 'http' | 'https' = 'http'): string =>
  `${scheme}://${isIP(a.host) === 6 ? `[${a.host}]` : a.host}:${a.port}`;

/** An http(s) URL without credentials, query or fragment; the trailing slash is dropped. */
export function parseUrl(text: string, field: string): string {
  const url = URL.parse(text);
  if (!url || !/^https?:$/.test(url.protocol) || url.username || url.password || url.search || url.hash)
    throw new SimpleVolumeError(
      'FIELD_INVALID',
      `${field} must be an http or https URL without user, password, query or fragment`,
      { field },
    );
  return url.href.replace(/\/+$/, '');
}

/** The bearer token. World-readable, empty and short ones are refused: a secret that everybody has is none. */
export function readToken(file: string, flag = 'token-file'): string {
  let text: string;
  try {
    if (statSync(file).mode & 0o004) bad(flag, `${file} can be read by everybody; chmod 0600 it`);
    text = readFileSync(file, 'utf8').trim();
  } catch (error) {
    if (error instanceof SimpleVolumeError) throw error;
    return bad(flag, `${file} cannot be read: ${(error as NodeJS.ErrnoException).code ?? error}`);
  }
  if (text.length < 16)
    bad(flag, `${file} must hold a token of at least 16 characters, it holds ${text.length}`);
  if (!/^[\x21-\x7e]+$/.test(text)) bad(flag, `${file} must hold one line of printable ASCII without blanks`);
  return text;
}

/** Plain values (flag name without dashes -> text or true) to a checked configuration. Flags beat the environment. */
export function parseConfig(
  flags: Record<string, string | boolean | undefined>,
  env: NodeJS.ProcessEnv,
): AgentConfig {
  const get = (flag: string): string | null => {
    const option = OPTIONS.find((o) => o.flag === flag) as Option;
    const value = flags[flag] ?? env[option.env] ?? option.fallback;
    return value === undefined || value === '' || typeof value === 'boolean' ? null : value;
  };
  const need = (flag: string): string =>
    get(flag) ??
    bad(flag, `is required (or ${OPTIONS.find((o) => o.flag === flag)?.env} in the environment)`);
  const yes = (flag: string): boolean => {
    const option = OPTIONS.find((o) => o.flag === flag) as Option;
    const value = flags[flag] ?? env[option.env] ?? false;
    if (typeof value === 'boolean') return value;
    if (/^(1|true|yes|on)$/i.test(value)) return true;
    return /^(0|false|no|off|)$/i.test(value)
      ? false
      : bad(flag, `must be true or false; got ${JSON.stringify(value)}`);
  };
  const level = need('log-level');
  if (!(LOG_LEVELS as readonly string[]).includes(level))
    bad('log-level', `must be one of ${LOG_LEVELS.join(', ')}; got ${JSON.stringify(level)}`);
  const browse = need('browse-auth');
  if (!/^(on|off)$/.test(browse)) bad('browse-auth', `must be on or off; got ${JSON.stringify(browse)}`);
  const expect = get('expect-pool-id');
  if (expect && !/^[0-9a-f-]{36}$/.test(expect))
    bad('expect-pool-id', `must be a UUID; got ${JSON.stringify(expect)}`);
  const pulls = need('pulls');
  if (!/^\d{1,2}$/.test(pulls) || Number(pulls) < 1 || Number(pulls) > 16)
    bad('pulls', `must be a whole number from 1 to 16; got ${JSON.stringify(pulls)}`);
  const sizes = need('size-enforcement');
  if (!(SIZE_ENFORCEMENTS as readonly string[]).includes(sizes))
    bad('size-enforcement', `must be one of ${SIZE_ENFORCEMENTS.join(', ')}; got ${JSON.stringify(sizes)}`);
  const bandwidth = need('pull-bandwidth').trim();
  const advertise = get('advertise');
  const socket = get('socket');
  const advertiseWebdav = get('advertise-webdav');
  const advertiseHost = get('advertise-host');
  for (const [flag, url] of [
    ['http', advertise],
    ['webdav', advertiseWebdav],
  ] as const) {
    if (need(flag).startsWith('*:') && url === null && advertiseHost === null)
      bad(flag, 'with the host * needs --advertise-host: nobody can be told to come to all addresses');
  }
  const certFile = get('tls-cert');
  const keyFile = get('tls-key');
  if ((certFile === null) !== (keyFile === null))
    bad(certFile === null ? 'tls-cert' : 'tls-key', 'is required together with the other one');
  const tls = certFile && keyFile ? { certFile: resolve(certFile), keyFile: resolve(keyFile) } : null;
  if (tls) readTls(tls);
  const caFile = get('ca-file');
  if (caFile !== null) readAuthorities(caFile);
  return {
    node: checkName(need('node'), '--node'),
    poolName: checkName(need('pool-name'), '--pool-name', 'label'),
    poolPath: resolve(need('pool-path')),
    allowNonEmptyPool: yes('allow-non-empty-pool'),
    expectPoolId: expect,
    http: parseAddress(need('http'), 'http'),
    webdav: parseAddress(need('webdav'), 'webdav'),
    advertise: advertise ? parseUrl(advertise, '--advertise') : null,
    advertiseWebdav: advertiseWebdav ? parseUrl(advertiseWebdav, '--advertise-webdav') : null,
    advertiseHost: advertiseHost === null ? null : parseHost(advertiseHost, 'advertise-host'),
    token: readToken(need('token-file')),
    logLevel: level as LogLevel,
    browseAuth: browse === 'on',
    beatMs: parseDuration(need('beat'), '--beat', 100, 60_000),
    auditMs: parseDuration(need('audit'), '--audit', 1000, 86_400_000),
    leaseMs: parseDuration(need('lease'), '--lease', MIN_LEASE_MS, MAX_LEASE_MS),
    socket: socket === null ? null : resolve(socket),
    tls,
    sizeEnforcement: sizes as SizeEnforcement,
    pulls: Number(pulls),
    pullBufferBytes: parseSize(need('pull-buffer'), '--pull-buffer', 0, 64 * MiB),
    pullBytesPerSecond:
      bandwidth === '0' ? 0 : parseSize(bandwidth, '--pull-bandwidth', 64 * 1024, 1024 ** 4),
    caFile: caFile === null ? null : resolve(caFile),
  };
}
