import type { FastifyInstance } from 'fastify';
import { parseDuration } from '../../core/duration.ts';
import { SimpleVolumeError } from '../../core/errors.ts';
import { parseGeneration } from '../../core/generation.ts';
import type { Condition, SyncRequest, VolumeName } from '../../core/parts.ts';
import type { AgentApi, Beat } from '../api.ts';
import { parseUrl } from '../config.ts';
import { BEAT, CONFIRM, FORCE, ID_PARAMS, PREPARE, SYNC } from '../schemas.ts';
import { parseMode, parseRelativePath } from './fields.ts';
import { requireVolume } from './scope.ts';

interface SyncBody extends VolumeName {
  epoch: number;
  generation?: string | null;
  source: { url: string; webdavUrl: string; grant?: string; token?: string; node?: string };
  echo?: number | null;
  policy?: {
    includePaths?: string[];
    excludePaths?: string[];
    pruneExcluded?: boolean;
    requiredPaths?: string[];
    ownerUid?: number | null;
    ownerGid?: number | null;
    fileMode?: number | string | null;
    dirMode?: number | string | null;
  };
}

export function parseSync(body: SyncBody, full: boolean): SyncRequest {
  const p = body.policy ?? {};
  return {
    namespace: body.namespace,
    volume: body.volume,
    epoch: body.epoch,
    generation: body.generation ? parseGeneration(body.generation) : null,
    source: {
      url: parseUrl(body.source.url, 'source.url'),
      webdavUrl: parseUrl(body.source.webdavUrl, 'source.webdavUrl'),
      token: (body.source.grant ?? body.source.token) as string,
      node: body.source.node ?? 'unknown',
    },
    echo: body.echo ?? null,
    full,
    policy: {
      includePaths: p.includePaths ?? [],
      excludePaths: p.excludePaths ?? [],
      pruneExcluded: p.pruneExcluded ?? false,
      requiredPaths: (p.requiredPaths ?? []).map((path, i) =>
        parseRelativePath(path, `policy.requiredPaths[${i}]`),
      ),
      ownerUid: p.ownerUid ?? null,
      ownerGid: p.ownerGid ?? null,
      fileMode: parseMode(p.fileMode),
      dirMode: parseMode(p.dirMode),
    },
  };
}

/** What a replica is told, and what it and the operator tell the source. */
export function syncRoutes(app: FastifyInstance, api: AgentApi): void {
  app.post<{ Body: SyncBody }>(
    '/replication/sync-batch',
    { schema: { body: SYNC } },
    async (request, reply) => reply.code(202).send(await api.syncBatch(parseSync(request.body, false))),
  );
  app.post<{ Body: SyncBody }>('/replication/full-sync', { schema: { body: SYNC } }, async (request, reply) =>
    reply.code(202).send(await api.fullSync(parseSync(request.body, true))),
  );
  app.get<{ Params: { id: string } }>(
    '/replication/full-sync/:id',
    { schema: { params: ID_PARAMS } },
    async (request) => {
      const run = api.fullSyncStatus(request.params.id);
      if (!run)
        throw new SimpleVolumeError(
          'NOT_FOUND',
          `no full sync with the id ${request.params.id} is known; ids are kept for the last 100 runs since the agent started`,
        );
      return run;
    },
  );
  app.post<{
    Body: VolumeName & {
      epoch: number;
      node: string;
      generation: string;
      state: string;
      problems?: Condition[];
    };
  }>('/replication/confirm', { schema: { body: CONFIRM }, config: { access: 'grant' } }, async (request) => {
    const body = request.body;
    requireVolume(request.principal, body, body.epoch, body.node);
    await api.confirm({
      ...body,
      generation: parseGeneration(body.generation),
      problems: body.problems ?? [],
    });
    return { ok: true };
  });
  app.post<{ Body: Beat }>('/replication/beat', { schema: { body: BEAT } }, async (request) =>
    api.beat(request.body),
  );
  app.post<{ Body: VolumeName & { epoch?: number; confirm?: number | 'all'; timeout?: string } }>(
    '/replication/prepare',
    { schema: { body: PREPARE } },
    async (request) => {
      const { namespace, volume, epoch, confirm, timeout } = request.body;
      return api.prepare({
        namespace,
        volume,
        epoch: epoch ?? null,
        confirm: confirm ?? 0,
        timeoutMs: timeout === undefined ? 30_000 : parseDuration(timeout, 'timeout', 0, 110_000),
      });
    },
  );
  app.post<{ Body: VolumeName & { epoch?: number; condition: string } }>(
    '/replication/force',
    { schema: { body: FORCE } },
    async (request) => api.force(request.body, request.body.epoch ?? null, request.body.condition),
  );
}
