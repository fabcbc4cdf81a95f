/** Flags and environment of `simple-volume csi-node`, checked. */
import path from 'node:path';
import { type Address, type Option, parseAddress } from '../lib/agent/config.ts';
import { LOG_LEVELS, type LogLevel } from '../lib/agent/logger.ts';
import { SimpleVolumeError } from '../lib/core/errors.ts';
import { checkName } from '../lib/core/names.ts';
import { DRIVER } from './driver.ts';
import { MAX_SOCKET_PATH } from './grpc.ts';

export const OPTIONS: Option[] = [
  {
    flag: 'node',
    value: 'NAME',
    env: 'SIMPLE_VOLUME_NODE',
    help: 'name of this node, as Kubernetes knows it',
  },
  {
    flag: 'agent-socket',
    value: 'FILE[,FILE...]',
    env: 'SIMPLE_VOLUME_AGENT_SOCKET',
    help: "the agent's unix socket (its --socket); one for each pool of this node",
  },
  {
    flag: 'kubelet-dir',
    value: 'DIR',
    env: 'SIMPLE_VOLUME_KUBELET_DIR',
    help: "kubelet's directory on the host (its --root-dir), seen here at the same path",
    fallback: '/var/lib/kubelet',
  },
  {
    flag: 'endpoint',
    value: 'FILE',
    env: 'SIMPLE_VOLUME_CSI_ENDPOINT',
    help: `unix socket of the CSI services (default: <kubelet-dir>/plugins/${DRIVER}/csi.sock)`,
  },
  {
    flag: 'registration-dir',
    value: 'DIR|off',
    env: 'SIMPLE_VOLUME_REGISTRATION_DIR',
    help: 'where kubelet looks for plugins (default: <kubelet-dir>/plugins_registry)',
  },
  {
    flag: 'state-dir',
    value: 'DIR',
    env: 'SIMPLE_VOLUME_STATE_DIR',
    help: 'where it is kept what is published, on the host (default: state beside the endpoint)',
  },
  {
    flag: 'cgroup-dir',
    value: 'DIR',
    env: 'SIMPLE_VOLUME_CGROUP_DIR',
    help: "the host's cgroups",
    fallback: '/sys/fs/cgroup',
  },
  {
    flag: 'health',
    value: 'HOST:PORT',
    env: 'SIMPLE_VOLUME_HEALTH',
    help: 'address of /healthz and /readyz; a host * stands for all addresses (default: none)',
  },
  {
    flag: 'log-level',
    value: LOG_LEVELS.join('|'),
    env: 'SIMPLE_VOLUME_LOG_LEVEL',
    help: 'how much is logged',
    fallback: 'info',
  },
];

export interface CsiNodeConfig {
  node: string;
  agentSockets: string[];
  kubeletDir: string;
  endpoint: string;
  /** null: kubelet is not told */
  registrationDir: string | null;
  stateDir: string;
  cgroupDir: string;
  /** null: none */
  health: Address | null;
  logLevel: LogLevel;
}

/** Flags beat the environment. @throws FIELD_INVALID naming the flag */
export function parseCsiNodeConfig(
  flags: Record<string, string | boolean | undefined>,
  env: NodeJS.ProcessEnv,
): CsiNodeConfig {
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
  const absolute = (flag: string, value: string): string =>
    path.isAbsolute(value)
      ? path.normalize(value).replace(/\/+$/, '')
      : bad(flag, 'must be an absolute path');
  const socket = (flag: string, value: string): string => {
    const file = absolute(flag, value);
    return Buffer.byteLength(file) <= MAX_SOCKET_PATH
      ? file
      : bad(
          flag,
          `must have at most ${MAX_SOCKET_PATH} bytes, a unix socket's path cannot be longer; got ${file}`,
        );
  };
  const kubeletDir = absolute('kubelet-dir', need('kubelet-dir'));
  const endpoint = socket('endpoint', get('endpoint') ?? `${kubeletDir}/plugins/${DRIVER}/csi.sock`);
  const registration = get('registration-dir') ?? `${kubeletDir}/plugins_registry`;
  const registrationDir = registration === 'off' ? null : absolute('registration-dir', registration);
  if (registrationDir !== null) socket('registration-dir', `${registrationDir}/${DRIVER}-reg.sock`);
  const health = get('health');
  const level = need('log-level');
  if (!(LOG_LEVELS as readonly string[]).includes(level))
    bad('log-level', `must be one of ${LOG_LEVELS.join(', ')}; got ${JSON.stringify(level)}`);
  const sockets = need('agent-socket')
    .split(',')
    .map((one) => socket('agent-socket', one.trim()));
  if (new Set(sockets).size !== sockets.length) bad('agent-socket', 'names a socket twice');
  return {
    node: checkName(need('node'), '--node'),
    agentSockets: sockets,
    kubeletDir,
    endpoint,
    registrationDir,
    stateDir: absolute('state-dir', get('state-dir') ?? path.join(path.dirname(endpoint), 'state')),
    cgroupDir: absolute('cgroup-dir', need('cgroup-dir')),
    health: health === null ? null : parseAddress(health, 'health'),
    logLevel: level as LogLevel,
  };
}
