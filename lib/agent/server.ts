/** The HTTP server: limits, authentication before any body is read, and one shape of error. */
import { chmodSync, lstatSync, unlinkSync } from 'node:fs';
import Fastify, { type FastifyError, type FastifyInstance, type FastifyRequest } from 'fastify';
import { type ErrorCode, SimpleVolumeError } from '../core/errors.ts';
import type { Logger } from '../core/parts.ts';
import type { AgentApi, Authenticate, Principal } from './api.ts';
import { fenceRoutes, writerRoutes } from './routes/fence.ts';
import { healthRoutes } from './routes/health.ts';
import { syncRoutes } from './routes/sync.ts';
import { transferRoutes } from './routes/transfers.ts';
import { volumeRoutes } from './routes/volumes.ts';
import { watchRoutes } from './routes/watch.ts';
import type { ServedTls } from './tls.ts';

declare module 'fastify' {
  interface FastifyRequest {
    principal: Principal | null;
  }
  interface FastifyContextConfig {
    /** public: no token; grant: the agents' token or a grant; default: the agents' token only */
    access?: 'public' | 'grant';
  }
}

const MiB = 1024 * 1024;

type Finding = NonNullable<FastifyError['validation']>[number];

/** A schema's finding as a sentence that names the field and what is allowed. */
export function explain(finding: Finding, context: string): { field: string; message: string } {
  const at = finding.instancePath
    .split('/')
    .filter(Boolean)
    .map((p) => p.replaceAll('~1', '/').replaceAll('~0', '~'));
  const p = finding.params as Record<string, unknown>;
  if (finding.keyword === 'required' || finding.keyword === 'dependentRequired')
    at.push(String(p.missingProperty));
  if (finding.keyword === 'additionalProperties') at.push(String(p.additionalProperty));
  const field =
    at.reduce(
      (text, part) => (/^\d+$/.test(part) ? `${text}[${part}]` : text ? `${text}.${part}` : part),
      '',
    ) || context;
  const allowed: Record<string, string> = {
    required: 'is required',
    dependentRequired: 'is required together with the other name',
    additionalProperties: 'is not a known field',
    enum: `must be one of ${(p.allowedValues as unknown[] | undefined)?.map((v) => JSON.stringify(v)).join(', ')}`,
    pattern: `must match ${p.pattern}`,
    type: `must be of type ${p.type}`,
    minimum: `must be ${p.comparison} ${p.limit}`,
    maximum: `must be ${p.comparison} ${p.limit}`,
    minLength: `must have at least ${p.limit} characters`,
    maxLength: `must have at most ${p.limit} characters`,
    maxItems: `must have at most ${p.limit} entries`,
  };
  return { field, message: `${field} ${allowed[finding.keyword] ?? finding.message ?? 'is not valid'}` };
}

const errorBody = (
  code: ErrorCode,
  message: string,
  extra: { field?: string | undefined; path?: string | undefined; node?: string | undefined } = {},
): object => ({
  error: {
    code,
    message,
    ...(extra.field ? { field: extra.field } : {}),
    ...(extra.path ? { path: extra.path } : {}),
    ...(extra.node ? { node: extra.node } : {}),
  },
});

/**
 * Listens on a unix socket that only root (or who runs the agent) can open. A file that an earlier process left is
 * replaced; anything else at that path is not touched.
 */
export async function listenOnSocket(app: FastifyInstance, path: string): Promise<void> {
  const there = lstatSync(path, { throwIfNoEntry: false });
  if (there?.isSocket()) unlinkSync(path);
  // Made without access for others from the start: umask(2) is what bind(2) uses.
  const mask = process.umask(0o177);
  try {
    await app.listen({ path });
  } finally {
    process.umask(mask);
  }
  chmodSync(path, 0o600);
}

/** The API on the agent's unix socket, for csi-node of the same pod. */
export function createSocketServer(api: AgentApi, log: Logger): FastifyInstance {
  const app = createBase(() => null, log);
  writerRoutes(app, api);
  return app;
}

/** @param tls null: plain HTTP */
export function createServer(
  api: AgentApi,
  authenticate: Authenticate,
  log: Logger,
  tls: ServedTls | null = null,
): FastifyInstance {
  const app = createBase(authenticate, log, tls);
  healthRoutes(app, api);
  watchRoutes(app, api);
  syncRoutes(app, api);
  transferRoutes(app, api);
  volumeRoutes(app, api);
  fenceRoutes(app, api);
  return app;
}

/** Limits, authentication and errors without any route. */
function createBase(authenticate: Authenticate, log: Logger, tls: ServedTls | null = null): FastifyInstance {
  const limits = { maxHeaderSize: 16 * 1024, headersTimeout: 10_000 };
  const app = Fastify({
    logger: false,
    bodyLimit: MiB,
    requestTimeout: 120_000,
    connectionTimeout: 120_000,
    keepAliveTimeout: 30_000,
    maxRequestsPerSocket: 0,
    trustProxy: false,
    exposeHeadRoutes: false,
    routerOptions: { maxParamLength: 300, ignoreTrailingSlash: false },
    ...(tls ? { https: { ...limits, ...tls } } : { http: limits }),
    ajv: {
      customOptions: {
        coerceTypes: false,
        removeAdditional: false,
        useDefaults: false,
        allErrors: false,
        strict: false,
      },
    },
  });
  app.server.maxConnections = 512;
  app.decorateRequest('principal', null);

  app.addHook('onRequest', async (request: FastifyRequest) => {
    const access = request.routeOptions.config?.access;
    if (access === 'public') return;
    const principal = authenticate(request.headers.authorization);
    if (!principal)
      throw new SimpleVolumeError(
        'UNAUTHORIZED',
        'a bearer token is required: Authorization: Bearer <token>',
      );
    if (principal.kind === 'grant' && access !== 'grant')
      throw new SimpleVolumeError('FORBIDDEN', 'a transfer grant does not allow this call');
    request.principal = principal;
  });

  app.setErrorHandler((error: FastifyError | SimpleVolumeError, request, reply) => {
    if (error instanceof SimpleVolumeError) {
      if (error.code === 'UNAUTHORIZED') reply.header('www-authenticate', 'Bearer');
      return reply
        .code(error.status === 499 ? 503 : error.status)
        .send(errorBody(error.code, error.message, error));
    }
    if (error.validation?.[0]) {
      // Of an anyOf the last finding is the umbrella; the first one names the place.
      const { field, message } = explain(error.validation[0], error.validationContext ?? 'body');
      return reply.code(400).send(errorBody('FIELD_INVALID', message, { field }));
    }
    if (error.statusCode === 413)
      return reply
        .code(413)
        .send(errorBody('BODY_TOO_LARGE', 'the body is larger than allowed (1 MiB; needs: 16 MiB)'));
    if (error.statusCode && error.statusCode < 500)
      return reply.code(error.statusCode).send(errorBody('BODY_INVALID', error.message));
    log.error(
      { err: error, method: request.method, route: request.routeOptions.url, requestId: request.id },
      'request failed',
    );
    return reply.code(500).send(errorBody('INTERNAL', 'internal error; the log has the details', {}));
  });
  app.setNotFoundHandler(async (request) => {
    throw new SimpleVolumeError(
      'NOT_FOUND',
      `no such route: ${request.method} ${request.url.split('?')[0]?.slice(0, 200)}`,
    );
  });

  return app;
}
