import type { FastifyInstance } from 'fastify';
import type { VolumeName } from '../../core/parts.ts';
import type { AgentApi } from '../api.ts';
import { BACKUP_PARAMS, NAME_PARAMS, NAME_QUERY, REMOVE } from '../schemas.ts';

/** State of the volumes on this node, in either role, and the backups of what a returning node had. */
export function volumeRoutes(app: FastifyInstance, api: AgentApi): void {
  app.get('/replication/volumes', async () => ({
    volumes: api.volumes(),
    pool: await api.poolSpace(),
  }));
  app.get<{ Params: { ns: string; vol: string } }>(
    '/replication/volumes/:ns/:vol',
    { schema: { params: NAME_PARAMS } },
    async (request) => api.volume({ namespace: request.params.ns, volume: request.params.vol }),
  );
  app.post<{ Body: VolumeName & { epoch: number; evenActive?: boolean; backups?: boolean } }>(
    '/replication/volume/remove',
    { schema: { body: REMOVE } },
    async (request) => {
      const { namespace, volume, epoch, evenActive, backups } = request.body;
      return api.removeVolume({
        namespace,
        volume,
        epoch,
        evenActive: evenActive ?? false,
        backups: backups ?? false,
      });
    },
  );
  app.get<{ Querystring: VolumeName }>(
    '/replication/backups',
    { schema: { querystring: NAME_QUERY } },
    async (request) => ({ backups: await api.backups(request.query) }),
  );
  app.delete<{ Params: { ns: string; vol: string; stamp: string } }>(
    '/replication/backups/:ns/:vol/:stamp',
    { schema: { params: BACKUP_PARAMS } },
    async (request, reply) => {
      await api.removeBackup(
        { namespace: request.params.ns, volume: request.params.vol },
        request.params.stamp,
      );
      return reply.code(204).send();
    },
  );
}
