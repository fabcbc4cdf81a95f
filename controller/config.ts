/** Flags and environment of `simple-volume controller`, checked. */
import { existsSync, readFileSync } from 'node:fs';
import { hostname } from 'node:os';
import { resolve } from 'node:path';
import { type Address, type Option, parseAddress } from '../lib/agent/config.ts';
import { LOG_LEVELS, type LogLevel } from '../lib/agent/logger.ts';
import { parseDuration } from '../lib/core/duration.ts';
import { SimpleVolumeError } from '../lib/core/errors.ts';
import { checkName } from '../lib/core/names.ts';
import { MAX_LEASE_MS, MIN_LEASE_MS } from '../lib/fence/timing.ts';
import { parseSchedule } from './plan/schedule.ts';

const OWN_NAMESPACE = '/var/run/secrets/kubernetes.io/serviceaccount/namespace';

export const OPTIONS: Option[] = [
  {
    flag: 'namespace',
    value: 'NAME',
    env: 'SIMPLE_VOLUME_NAMESPACE',
    help: "namespace of the agents' pods and of the Lease (default: the own pod's)",
  },
  {
    flag: 'identity',
    value: 'NAME',
    env: 'SIMPLE_VOLUME_IDENTITY',
    help: 'unique name of this process (default: the host name)',
  },
  {
    flag: 'kubeconfig',
    value: 'FILE',
    env: 'SIMPLE_VOLUME_KUBECONFIG',
    help: 'how to reach the API server (default: KUBECONFIG, ~/.kube/config, the own pod)',
  },
  {
    flag: 'token-file',
    value: 'FILE',
    env: 'SIMPLE_VOLUME_TOKEN_FILE',
    help: "file with the agents' bearer token",
  },
  {
    flag: 'ca-file',
    value: 'FILE',
    env: 'SIMPLE_VOLUME_CA_FILE',
    help: 'PEM authorities that agents with TLS are checked against',
  },
  {
    flag: 'http',
    value: 'HOST:PORT',
    env: 'SIMPLE_VOLUME_HTTP',
    help: 'address of /healthz, /readyz and /metrics; a host * stands for all addresses, IPv4 and IPv6',
    fallback: '127.0.0.1:8080',
  },
  {
    flag: 'trigger',
    value: 'HOST:PORT|off',
    env: 'SIMPLE_VOLUME_TRIGGER',
    help: 'address of the manual full sync; a loopback address behind the proxy',
    fallback: '127.0.0.1:8082',
  },
  {
    flag: 'trigger-guard',
    value: 'proxy|builtin',
    env: 'SIMPLE_VOLUME_TRIGGER_GUARD',
    help: 'who asks the API server whether a caller may: kube-rbac-proxy in front, or this process',
    fallback: 'proxy',
  },
  {
    flag: 'trigger-tls-cert',
    value: 'FILE',
    env: 'SIMPLE_VOLUME_TRIGGER_TLS_CERT',
    help: 'PEM certificate of the trigger (builtin guard)',
  },
  {
    flag: 'trigger-tls-key',
    value: 'FILE',
    env: 'SIMPLE_VOLUME_TRIGGER_TLS_KEY',
    help: 'PEM key of the trigger (builtin guard)',
  },
  {
    flag: 'lease-name',
    value: 'NAME',
    env: 'SIMPLE_VOLUME_LEASE_NAME',
    help: 'name of the Lease by which the leader is elected',
    fallback: 'simple-volume-controller',
  },
  {
    flag: 'election',
    value: 'DURATION',
    env: 'SIMPLE_VOLUME_ELECTION',
    help: 'how long others wait for a sign of life of the leader',
    fallback: '15s',
  },
  {
    flag: 'fence-lease',
    value: 'DURATION',
    env: 'SIMPLE_VOLUME_FENCE_LEASE',
    help: 'how long a writer may go on without a renewal; the same as at the agents',
    fallback: '8s',
  },
  {
    flag: 'report',
    value: 'DURATION',
    env: 'SIMPLE_VOLUME_REPORT',
    help: 'between two questions for the state of all volumes of an agent',
    fallback: '2s',
  },
  {
    flag: 'csi-endpoint',
    value: 'FILE',
    env: 'SIMPLE_VOLUME_CSI_ENDPOINT',
    help: 'unix socket on which the CSI Controller service is offered to the provisioner (default: none)',
  },
  {
    flag: 'time-zone',
    value: 'NAME',
    env: 'SIMPLE_VOLUME_TIME_ZONE',
    help: 'time zone of full sync schedules',
    fallback: 'UTC',
  },
  {
    flag: 'full-sync-schedule',
    value: 'CRON',
    env: 'SIMPLE_VOLUME_FULL_SYNC_SCHEDULE',
    help: 'when the copies of claims that name no schedule are compared with their sources in full (default: never)',
  },
  {
    flag: 'log-level',
    value: LOG_LEVELS.join('|'),
    env: 'SIMPLE_VOLUME_LOG_LEVEL',
    help: 'how much is logged',
    fallback: 'info',
  },
];

export interface ControllerConfig {
  namespace: string;
  identity: string;
  kubeconfig: string | null;
  tokenFile: string;
  caFile: string | null;
  http: Address;
  trigger: {
    guard: 'proxy' | 'builtin';
    address: Address;
    tls: { certFile: string; keyFile: string } | null;
  } | null;
  leaseName: string;
  electionMs: number;
  fenceLeaseMs: number;
  reportMs: number;
  /** null: no CSI Controller service */
  csiEndpoint: string | null;
  timeZone: string;
  /** for claims that name none; null: none */
  fullSyncSchedule: string | null;
  logLevel: LogLevel;
}

/** Flags beat the environment. @throws FIELD_INVALID naming the flag */
export function parseControllerConfig(
  flags: Record<string, string | boolean | undefined>,
  env: NodeJS.ProcessEnv,
): ControllerConfig {
  const bad = (flag: string, text: string): never => {
    throw new SimpleVolumeError('FIELD_INVALID', `--${flag} ${text}`, { field: `--${flag}` });
  };
  const get = (flag: string): string | null => {
    const option = OPTIONS.find((one) => one.flag === flag) as Option;
    const value = flags[flag] ?? env[option.env] ?? option.fallback;
    return value === undefined || value === '' || typeof value === 'boolean' ? null : value;
  };
  const need = (flag: string): string =>
    get(flag) ??
    bad(flag, `is required (or ${OPTIONS.find((one) => one.flag === flag)?.env} in the environment)`);
  const oneOf = <T extends string>(flag: string, allowed: readonly T[]): T => {
    const value = need(flag);
    return allowed.includes(value as T)
      ? (value as T)
      : bad(flag, `must be one of ${allowed.join(', ')}; got ${JSON.stringify(value)}`);
  };
  const ownNamespace = existsSync(OWN_NAMESPACE) ? readFileSync(OWN_NAMESPACE, 'utf8').trim() : null;
  const guard = oneOf('trigger-guard', ['proxy', 'builtin']);
  const certFile = get('trigger-tls-cert');
  const keyFile = get('trigger-tls-key');
  if ((certFile === null) !== (keyFile === null))
    bad(
      certFile === null ? 'trigger-tls-cert' : 'trigger-tls-key',
      'is required together with the other one',
    );
  const csiEndpoint = get('csi-endpoint');
  const timeZone = need('time-zone');
  try {
    new Intl.DateTimeFormat('en', { timeZone });
  } catch {
    bad('time-zone', `must be a name of the IANA time zone database; got ${JSON.stringify(timeZone)}`);
  }
  const fullSyncSchedule = get('full-sync-schedule');
  if (fullSyncSchedule !== null) {
    const parsed = parseSchedule(fullSyncSchedule, timeZone);
    if ('error' in parsed)
      bad('full-sync-schedule', `${parsed.error}; got ${JSON.stringify(fullSyncSchedule)}`);
  }
  return {
    namespace: checkName(get('namespace') ?? ownNamespace ?? need('namespace'), '--namespace', 'label'),
    identity: checkName((get('identity') ?? hostname()).toLowerCase(), '--identity'),
    kubeconfig: get('kubeconfig'),
    tokenFile: need('token-file'),
    caFile: get('ca-file'),
    http: parseAddress(need('http'), 'http'),
    trigger:
      need('trigger') === 'off'
        ? null
        : {
            guard,
            address: parseAddress(need('trigger'), 'trigger'),
            tls: certFile && keyFile ? { certFile, keyFile } : null,
          },
    leaseName: checkName(need('lease-name'), '--lease-name'),
    electionMs: parseDuration(need('election'), '--election', 2000, 300_000),
    fenceLeaseMs: parseDuration(need('fence-lease'), '--fence-lease', MIN_LEASE_MS, MAX_LEASE_MS),
    reportMs: parseDuration(need('report'), '--report', 200, 60_000),
    csiEndpoint: csiEndpoint === null ? null : resolve(csiEndpoint),
    timeZone,
    fullSyncSchedule,
    logLevel: oneOf('log-level', LOG_LEVELS),
  };
}
