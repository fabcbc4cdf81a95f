/**
 * Where the API server is and who we are there: kubeconfig, in-cluster configuration and authentication are
 * @kubernetes/client-node's; the requests themselves go through node:https with connections that are kept, because that
 * library opens a TLS connection for every call (its issue 2893), follows no Retry-After and stops its informers at the
 * first error.
 */
import http from 'node:http';
import https from 'node:https';
import { KubeConfig } from '@kubernetes/client-node';
import type { Clock } from './types.ts';

/** How old credentials may get before they are asked for again, ms. Tokens in files change about once an hour. */
const CREDENTIALS_MS = 30_000;

export interface Prepared {
  headers: http.OutgoingHttpHeaders;
  /** for calls: connections are kept */
  calls: http.Agent | https.Agent;
  /** for watches: each has a connection of its own */
  watches: http.Agent | https.Agent;
}

export interface Connection {
  readonly server: URL;
  /** of the kubeconfig's context or of the own pod */
  readonly namespace: string | null;
  /** Fresh credentials and the agents that go with them. */
  prepare(): Promise<Prepared>;
  /** The server did not take the credentials: they are read anew, whatever their age. */
  renew(): void;
  /** Closes kept connections that are idle: one of them just turned out to be dead. */
  dropIdle(): void;
  close(): void;
}

export interface ConnectionOptions {
  /** path of a kubeconfig; default: KUBECONFIG, ~/.kube/config, in-cluster, in that order */
  kubeconfig?: string;
  clock: Clock;
  /** connections for calls at the same time; default 8 */
  maxSockets?: number;
}

/** @throws Error when the kubeconfig cannot be read or names no cluster */
export function openConnection(options: ConnectionOptions): Connection {
  const load = (): KubeConfig => {
    const config = new KubeConfig();
    if (options.kubeconfig !== undefined) config.loadFromFile(options.kubeconfig);
    else config.loadFromDefault();
    return config;
  };
  let config = load();
  const cluster = config.getCurrentCluster();
  if (!cluster?.server) throw new Error('the kubeconfig names no cluster in its current context');
  const server = new URL(cluster.server);
  const secure = server.protocol === 'https:';
  let prepared: Prepared | null = null;
  let material = '';
  let preparedAt = Number.NEGATIVE_INFINITY;
  let preparing: Promise<Prepared> | null = null;

  const closeAgents = (): void => {
    // A proxy's agent serves both.
    for (const agent of new Set([prepared?.calls, prepared?.watches])) agent?.destroy();
  };

  async function refresh(): Promise<Prepared> {
    const asked: https.RequestOptions = { headers: {} };
    await config.applyToHTTPSOptions(asked);
    const headers = { ...(asked.headers as http.OutgoingHttpHeaders) };
    for (const [name, value] of Object.entries(headers)) {
      // A token file may end in a line break.
      if (typeof value === 'string') headers[name] = value.trim();
    }
    if (typeof asked.auth === 'string')
      headers.authorization = `Basic ${Buffer.from(asked.auth).toString('base64')}`;
    const { ca, cert, key, servername, rejectUnauthorized } = asked;
    const now = JSON.stringify([ca, cert, key, servername, rejectUnauthorized].map((one) => String(one)));
    if (prepared === null || now !== material) {
      const old = prepared;
      const shared = { keepAlive: true, keepAliveMsecs: 10_000, scheduling: 'lifo' as const };
      const tls = {
        ...(ca === undefined ? {} : { ca }),
        ...(cert === undefined ? {} : { cert }),
        ...(key === undefined ? {} : { key }),
        ...(servername === undefined ? {} : { servername }),
        ...(rejectUnauthorized === undefined ? {} : { rejectUnauthorized }),
      };
      const make = (maxSockets: number): http.Agent | https.Agent =>
        secure
          ? new https.Agent({ ...shared, ...tls, maxSockets })
          : new http.Agent({ ...shared, maxSockets });
      const proxied = cluster?.proxyUrl ? (asked.agent as https.Agent) : null;
      prepared = {
        headers,
        calls: proxied ?? make(options.maxSockets ?? 8),
        watches: proxied ?? make(Number.POSITIVE_INFINITY),
      };
      material = now;
      // Requests under way end on their own; what is idle must not be used with the old material.
      if (old) dropIdle(old);
    } else prepared = { ...prepared, headers };
    preparedAt = options.clock.boot();
    return prepared;
  }

  function dropIdle(of: Prepared): void {
    for (const sockets of Object.values(of.calls.freeSockets)) {
      for (const socket of sockets ?? []) socket.destroy();
    }
  }

  return {
    server,
    namespace: config.getContextObject(config.getCurrentContext())?.namespace?.trim() || null,
    async prepare() {
      if (prepared !== null && options.clock.boot() - preparedAt < CREDENTIALS_MS) return prepared;
      preparing ??= refresh().finally(() => {
        preparing = null;
      });
      return preparing;
    },
    renew() {
      preparedAt = Number.NEGATIVE_INFINITY;
      try {
        config = load();
      } catch {
        // What was read before stays; the next answer tells.
      }
    },
    dropIdle() {
      if (prepared) dropIdle(prepared);
    },
    close: closeAgents,
  };
}
