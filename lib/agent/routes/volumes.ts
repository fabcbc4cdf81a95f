import type { FastifyInstance } from 'fastify';
import type { VolumeName } from '../../core/parts.ts';
import type { AgentApi } from '../api.ts';
import { BACKUP_PARAMS, NAME_PARAMS, NAME_QUERY, REMOVE, SIZE } from '../schemas.ts';

const nameOf = ({ namespace, volume }: VolumeName): VolumeName => ({ namespace, volume });

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
  app.post<{ Body: VolumeName & { bytes: number } }>(
    '/replication/volume/create',
    { schema: { body: SIZE } },
    async (request) => api.createVolume(nameOf(request.body), request.body.bytes),
  );
  app.post<{ Body: VolumeName & { bytes: number } }>(
    '/replication/volume/resize',
    { schema: { body: SIZE } },
    async (request) => api.resizeVolume(nameOf(request.body), request.body.bytes),
  );
  app.get('/replication/pool', async () => api.poolState());
  app.get<{ Querystring: VolumeName }>(
    '/replication/volume/record',
    { schema: { querystring: NAME_QUERY } },
    async (request) => api.record(request.query),
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
