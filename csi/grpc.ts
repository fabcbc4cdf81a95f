/**
 * gRPC on unix sockets: the services' definitions from the generated tables, handlers that are plain async functions,
 * and a server that only root can reach. An error in one call ends that call and nothing else.
 */
import { lstatSync, mkdirSync, unlinkSync } from 'node:fs';
import { dirname } from 'node:path';
import {
  makeGenericClientConstructor,
  Server,
  ServerCredentials,
  type ServerUnaryCall,
  type ServiceClientConstructor,
  type ServiceDefinition,
  type sendUnaryData,
  status,
} from '@grpc/grpc-js';
import type { IConversionOptions, INamespace, Type } from 'protobufjs/light.js';
import protobuf from 'protobufjs/light.js';
import type { Logger } from '../lib/core/parts.ts';
import { CsiError, codeOf } from './errors.ts';
import tables from './generated/tables.json' with { type: 'json' };

const root = protobuf.Root.fromJSON(tables as unknown as INamespace);
/** How messages are told to the services: what the generated types (csi/generated) say. */
const PLAIN: IConversionOptions = { longs: String, enums: String, defaults: true, oneofs: true };

const encoder =
  (type: Type) =>
  (message: object): Buffer =>
    Buffer.from(type.encode(type.fromObject(message as Record<string, unknown>)).finish());
const decoder =
  (type: Type) =>
  (bytes: Buffer): object =>
    type.toObject(type.decode(bytes), PLAIN);

/**
 * Made from the tables by protobufjs itself. @grpc/proto-loader does the same and describes each message once more in
 * terms of protobuf, which nobody asks for and which stays in memory.
 */
function definitionOf(name: string): ServiceDefinition {
  const service = root.lookupService(name);
  return Object.fromEntries(
    service.methodsArray.map((method) => {
      method.resolve();
      const { resolvedRequestType: request, resolvedResponseType: response } = method;
      if (!request || !response)
        throw new Error(`the messages of ${name}.${method.name} are not in the tables`);
      return [
        method.name,
        {
          path: `/${name}/${method.name}`,
          requestStream: false,
          responseStream: false,
          requestSerialize: encoder(request),
          requestDeserialize: decoder(request),
          responseSerialize: encoder(response),
          responseDeserialize: decoder(response),
          originalName: method.name[0]?.toLowerCase() + method.name.slice(1),
        },
      ];
    }),
  );
}

/** Constructor of clients of a service such as `csi.v1.Node`; its `service` is the definition. */
export const clientOf = (name: string): ServiceClientConstructor =>
  makeGenericClientConstructor(definitionOf(name), name);

// biome-ignore lint/suspicious/noExplicitAny: each method has its own message; the services' types say which
type Method = (request: any) => Promise<unknown> | unknown;

export interface Service {
  /** for example `csi.v1.Node` */
  name: string;
  /** what is not here answers UNIMPLEMENTED */
  methods: Readonly<Record<string, Method>>;
}

/** Longest path of a unix socket, bytes (sun_path of unix(7), its NUL left out). */
export const MAX_SOCKET_PATH = 107;

export interface GrpcServer {
  path: string;
  /** Running calls have this long to end, ms. */
  close(graceMs?: number): Promise<void>;
}

/**
 * Serves on a unix socket. A socket that an earlier process left is replaced; anything else at that path is not touched.
 * The socket is made without access for others.
 */
export async function serve(path: string, services: readonly Service[], log: Logger): Promise<GrpcServer> {
  if (Buffer.byteLength(path) > MAX_SOCKET_PATH)
    throw new Error(`the path of a unix socket has at most ${MAX_SOCKET_PATH} bytes: ${path}`);
  const server = new Server({
    'grpc.max_receive_message_length': 1024 * 1024,
    'grpc.max_concurrent_streams': 64,
  });
  for (const { name, methods } of services) {
    const definition = definitionOf(name);
    const handlers = Object.fromEntries(
      Object.keys(definition).map((method) => [method, unary(method, methods[method], log)]),
    );
    server.addService(definition, handlers);
  }
  mkdirSync(dirname(path), { recursive: true });
  const there = lstatSync(path, { throwIfNoEntry: false });
  if (there?.isSocket()) unlinkSync(path);
  else if (there) throw new Error(`${path} exists and is no socket`);
  // umask(2) is what bind(2) uses; bindAsync binds before it gives the thread back.
  const mask = process.umask(0o177);
  try {
    await new Promise<void>((resolve, reject) => {
      server.bindAsync(`unix:${path}`, ServerCredentials.createInsecure(), (error) =>
        error ? reject(error) : resolve(),
      );
    });
  } finally {
    process.umask(mask);
  }
  return {
    path,
    close: (graceMs = 2000) =>
      new Promise((resolve) => {
        const timer = setTimeout(() => server.forceShutdown(), graceMs);
        server.tryShutdown(() => {
          clearTimeout(timer);
          resolve();
        });
      }),
  };
}

function unary(name: string, method: Method | undefined, log: Logger) {
  return (call: ServerUnaryCall<unknown, unknown>, answer: sendUnaryData<unknown>): void => {
    const started = performance.now();
    const run = async (): Promise<unknown> => {
      if (!method) throw new CsiError(status.UNIMPLEMENTED, `${name} is not offered`);
      return method(call.request);
    };
    run().then(
      (response) => {
        log.debug({ call: name, ms: Math.round(performance.now() - started) }, 'CSI call');
        answer(null, response);
      },
      (error: unknown) => {
        const { code, message } = codeOf(error);
        // Requests carry secrets and are never logged.
        const line = { call: name, code: status[code], message, ms: Math.round(performance.now() - started) };
        if (code === status.INTERNAL) log.error({ ...line, err: error as Error }, 'CSI call failed');
        else log.info(line, 'CSI call refused');
        answer({ code, details: message });
      },
    );
  };
}
