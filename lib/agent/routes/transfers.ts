import type { FastifyInstance } from 'fastify';
import { SimpleVolumeError } from '../../core/errors.ts';
import { formatGeneration, parseGeneration } from '../../core/generation.ts';
import type { VolumeName } from '../../core/parts.ts';
import type { AgentApi, Principal } from '../api.ts';
import { ID_PARAMS, TRANSFER } from '../schemas.ts';
import { requireVolume } from './scope.ts';

/** Four bytes per wanted entry: room for four million entries. */
const NEEDS_LIMIT = 16 * 1024 * 1024;

/** The source's side of a pull. The bytes themselves go over WebDAV. */
export function transferRoutes(app: FastifyInstance, api: AgentApi): void {
  app.addContentTypeParser(
    'application/octet-stream',
    { parseAs: 'buffer', bodyLimit: NEEDS_LIMIT },
    (_request, body, done) => done(null, body),
  );

  app.post<{ Body: VolumeName & { epoch: number; node: string; have: string | null; full?: boolean } }>(
    '/replication/transfers',
    { schema: { body: TRANSFER }, config: { access: 'grant' } },
    async (request, reply) => {
      const body = request.body;
      requireVolume(request.principal, body, body.epoch, body.node);
      const offer = await api.createTransfer({
        ...body,
        have: body.have ? parseGeneration(body.have, 'have') : null,
        full: body.full ?? false,
      });
      return reply.code(201).send({
        ...offer,
        generation: formatGeneration(offer.generation),
        base: offer.base && formatGeneration(offer.base),
      });
    },
  );
  app.post<{ Params: { id: string }; Body: Buffer }>(
    '/replication/transfers/:id/needs',
    { schema: { params: ID_PARAMS }, config: { access: 'grant' }, bodyLimit: NEEDS_LIMIT },
    async (request) => {
      const body = request.body;
      if (!Buffer.isBuffer(body) || body.length % 4 !== 0)
        throw new SimpleVolumeError(
          'BODY_INVALID',
          'the body must be application/octet-stream: one little-endian 32-bit ordinal per wanted entry',
        );
      const ordinals = new Uint32Array(body.length / 4);
      for (let i = 0; i < ordinals.length; i++) ordinals[i] = body.readUInt32LE(i * 4);
      return { packs: await api.transferNeeds(request.params.id, request.principal as Principal, ordinals) };
    },
  );
  app.delete<{ Params: { id: string } }>(
    '/replication/transfers/:id',
    { schema: { params: ID_PARAMS }, config: { access: 'grant' } },
    async (request, reply) => {
      await api.dropTransfer(request.params.id, request.principal as Principal);
      return reply.code(204).send();
    },
  );
}
