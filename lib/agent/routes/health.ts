import type { FastifyInstance } from 'fastify';
import type { AgentApi } from '../api.ts';

/** Liveness, truthful readiness and metrics. Without a token: they say nothing of contents. */
export function healthRoutes(app: FastifyInstance, api: AgentApi): void {
  app.get('/healthz', { config: { access: 'public' } }, async () => ({ status: 'ok' }));
  app.get('/readyz', { config: { access: 'public' } }, async (_request, reply) => {
    const { ready, reasons } = await api.readiness();
    return reply.code(ready ? 200 : 503).send({ ready, reasons });
  });
  app.get('/metrics', { config: { access: 'public' } }, async (_request, reply) =>
    reply.type('text/plain; version=0.0.4; charset=utf-8').send(await api.metrics()),
  );
}
