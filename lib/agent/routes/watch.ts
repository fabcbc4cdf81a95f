import type { FastifyInstance } from 'fastify';
import { parseDuration } from '../../core/duration.ts';
import type { VolumeName } from '../../core/parts.ts';
import { DEFAULT_POLICY } from '../../core/policy.ts';
import type { AgentApi, WatchStart } from '../api.ts';
import { parseUrl } from '../config.ts';
import { OPTIONAL_NAME_QUERY, WATCH_START, WATCH_STOP } from '../schemas.ts';
import { parseMode, parseRelativePath } from './fields.ts';

interface StartBody extends VolumeName {
  epoch?: number;
  bytes?: number;
  source?: { url?: string; webdavUrl?: string };
  targets: { url: string; token: string; node?: string }[];
  includePaths?: string[];
  excludePaths?: string[];
  debounce?: string;
  maxDelay?: string;
  consistencyMode?: 'shadow' | 'live';
  pruneExcluded?: boolean;
  confirmedReplicas?: number;
  fullSyncOnStart?: boolean;
  requiredPaths?: string[];
  ownerUid?: number | null;
  ownerGid?: number | null;
  fileMode?: number | string | null;
  dirMode?: number | string | null;
}

/** The documented start request to plain, checked data. */
export function parseWatchStart(body: StartBody): WatchStart {
  const debounceMs =
    body.debounce === undefined
      ? DEFAULT_POLICY.debounceMs
      : parseDuration(body.debounce, 'debounce', 10, 3_600_000);
  return {
    namespace: body.namespace,
    volume: body.volume,
    epoch: body.epoch ?? null,
    bytes: body.bytes ?? null,
    sourceUrl: body.source?.url ? parseUrl(body.source.url, 'source.url') : null,
    sourceWebdavUrl: body.source?.webdavUrl ? parseUrl(body.source.webdavUrl, 'source.webdavUrl') : null,
    targets: body.targets.map((t, i) => ({
      url: parseUrl(t.url, `targets[${i}].url`),
      token: t.token,
      node: t.node ?? null,
    })),
    policy: {
      includePaths: body.includePaths ?? [],
      excludePaths: body.excludePaths ?? [],
      consistencyMode: body.consistencyMode ?? DEFAULT_POLICY.consistencyMode,
      debounceMs,
      maxDelayMs:
        body.maxDelay === undefined
          ? debounceMs * 5
          : parseDuration(body.maxDelay, 'maxDelay', debounceMs, 86_400_000),
      pruneExcluded: body.pruneExcluded ?? false,
      confirmedReplicas: body.confirmedReplicas ?? DEFAULT_POLICY.confirmedReplicas,
      fullSyncOnStart: body.fullSyncOnStart ?? false,
      requiredPaths: (body.requiredPaths ?? []).map((p, i) => parseRelativePath(p, `requiredPaths[${i}]`)),
      ownerUid: body.ownerUid ?? null,
      ownerGid: body.ownerGid ?? null,
      fileMode: parseMode(body.fileMode),
      dirMode: parseMode(body.dirMode),
    },
  };
}

export function watchRoutes(app: FastifyInstance, api: AgentApi): void {
  app.post<{ Body: StartBody }>(
    '/replication/watch/start',
    { schema: { body: WATCH_START } },
    async (request) => api.watchStart(parseWatchStart(request.body)),
  );
  app.post<{ Body: VolumeName & { epoch?: number } }>(
    '/replication/watch/stop',
    { schema: { body: WATCH_STOP } },
    async (request) => api.watchStop(request.body, request.body.epoch ?? null),
  );
  app.get<{ Querystring: Partial<VolumeName> }>(
    '/replication/watch/status',
    { schema: { querystring: OPTIONAL_NAME_QUERY } },
    async (request) => {
      const { namespace, volume } = request.query;
      return { watches: api.watchStatus(namespace && volume ? { namespace, volume } : null) };
    },
  );
}
