import type { FastifyInstance } from 'fastify';
import type { VolumeName } from '../../core/parts.ts';
import type {
  FenceBeat,
  FenceConsentRequest,
  FencePoll,
  FenceReleaseRequest,
  WriterAnnouncement,
  WriterReport,
} from '../../fence/types.ts';
import type { AgentApi } from '../api.ts';
import {
  FENCE_BEAT,
  FENCE_CONSENT,
  FENCE_POLL,
  FENCE_RELEASE,
  NAME_PARAMS,
  WRITER_ANNOUNCEMENT,
  WRITER_REPORT,
} from '../schemas.ts';

/** Ten thousand volumes with long names in one beat or poll. */
const BODY_LIMIT = 8 * 1024 * 1024;

/** Between agents, and from the leading controller. */
export function fenceRoutes(app: FastifyInstance, api: AgentApi): void {
  app.post<{ Body: FenceBeat }>(
    '/replication/fence/beat',
    { schema: { body: FENCE_BEAT }, bodyLimit: BODY_LIMIT },
    async (request) => api.fencing().beat(request.body),
  );
  app.post<{ Body: FencePoll }>(
    '/replication/fence/poll',
    { schema: { body: FENCE_POLL }, bodyLimit: BODY_LIMIT },
    async (request) => api.fencing().poll(request.body),
  );
  app.post<{ Body: FenceConsentRequest }>(
    '/replication/fence/consent',
    { schema: { body: FENCE_CONSENT } },
    async (request) => api.fencing().consent(request.body),
  );
  app.post<{ Body: FenceReleaseRequest }>(
    '/replication/fence/release',
    { schema: { body: FENCE_RELEASE } },
    async (request) => api.fencing().release(request.body),
  );
}

/** On the agent's unix socket, for csi-node of the same pod: who can open the socket may ask. */
export function writerRoutes(app: FastifyInstance, api: AgentApi): void {
  app.post<{ Body: WriterReport }>(
    '/fence/report',
    { schema: { body: WRITER_REPORT }, bodyLimit: BODY_LIMIT, config: { access: 'public' } },
    async (request) => api.fencing().report(request.body),
  );
  app.post<{ Body: WriterAnnouncement }>(
    '/fence/announce',
    { schema: { body: WRITER_ANNOUNCEMENT }, config: { access: 'public' } },
    async (request) => api.fencing().announce(request.body),
  );
  app.get('/pool', { config: { access: 'public' } }, async () => api.about());
  app.get<{ Params: { ns: string; vol: string } }>(
    '/fence/volumes/:ns/:vol',
    { schema: { params: NAME_PARAMS }, config: { access: 'public' } },
    async (request): Promise<unknown> => {
      const name: VolumeName = { namespace: request.params.ns, volume: request.params.vol };
      return api.fencing().lease(name);
    },
  );
}
