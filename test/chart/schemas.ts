/**
 * JSON schemas for kubeconform out of what an API server says of itself (/openapi/v3): no download, exactly the version
 * that the tests run, and our own CRDs with it. Strict: a field that the API does not know is an error.
 */
import { mkdirSync, writeFileSync } from 'node:fs';
import https from 'node:https';
import path from 'node:path';
import type { KubeServer } from '../kube/harness/server.ts';
import type { Plain } from './rendering.ts';

/** Where kubeconform looks for a schema below the folder. A core group has its version for a name. */
export const LOCATION = '{{ .Group }}_{{ .ResourceAPIVersion }}_{{ .ResourceKind }}.json';

interface Kind {
  group: string;
  version: string;
  kind: string;
}

function get(server: KubeServer, at: string): Promise<Plain> {
  return new Promise((resolve, reject) => {
    https
      .get(
        `${server.url}${at}`,
        {
          ca: server.ca,
          headers: { authorization: `Bearer ${server.token()}`, accept: 'application/json' },
          agent: false,
          timeout: 20_000,
        },
        (response) => {
          const pieces: Buffer[] = [];
          response.on('data', (piece: Buffer) => pieces.push(piece));
          response.on('error', reject);
          response.on('end', () => {
            if (response.statusCode === 200) resolve(JSON.parse(Buffer.concat(pieces).toString()));
            else reject(new Error(`${at}: ${response.statusCode}`));
          });
        },
      )
      .on('error', reject);
  });
}

/** OpenAPI 3.0 to JSON schema: other places of definitions, and closed objects. */
function closed(schema: Plain): Plain {
  if (Array.isArray(schema)) return schema.map(closed);
  if (typeof schema !== 'object' || schema === null) return schema;
  if (typeof schema.$ref === 'string')
    return { $ref: schema.$ref.replace('#/components/schemas/', '#/definitions/') };
  const result: Plain = {};
  for (const [key, value] of Object.entries(schema as Record<string, Plain>)) {
    if (key === 'properties')
      result[key] = Object.fromEntries(
        Object.entries(value as Record<string, Plain>).map(([name, one]) => [name, closed(one)]),
      );
    else if (['items', 'additionalProperties', 'allOf', 'anyOf', 'oneOf', 'not'].includes(key))
      result[key] = closed(value);
    else if (
      ['type', 'required', 'enum', 'pattern', 'minLength', 'maxLength', 'minimum', 'maximum'].includes(key)
    )
      result[key] = value;
  }
  if (
    result.properties &&
    result.additionalProperties === undefined &&
    !schema['x-kubernetes-preserve-unknown-fields']
  )
    result.additionalProperties = false;
  return result;
}

/** Writes one file for each kind that the server knows. Returns how many. */
export async function writeSchemas(server: KubeServer, folder: string): Promise<number> {
  mkdirSync(folder, { recursive: true });
  let count = 0;
  const { paths } = (await get(server, '/openapi/v3')) as {
    paths: Record<string, { serverRelativeURL: string }>;
  };
  for (const [at, { serverRelativeURL }] of Object.entries(paths)) {
    if (!/^apis?\/(.*\/)?v\d[^/]*$/.test(at)) continue;
    const document = await get(server, serverRelativeURL);
    const all = (document.components?.schemas ?? {}) as Record<string, Plain>;
    const definitions = Object.fromEntries(Object.entries(all).map(([name, one]) => [name, closed(one)]));
    const [, group, version] = /^apis?\/(?:(.*)\/)?(v\d[^/]*)$/.exec(at) as unknown as [
      string,
      string | undefined,
      string,
    ];
    for (const [name, schema] of Object.entries(all)) {
      const kinds = (schema['x-kubernetes-group-version-kind'] ?? []) as Kind[];
      // What many groups share (DeleteOptions and the like) names them all and is nobody's own.
      const own =
        kinds.length === 1 && kinds[0]?.group === (group ?? '') && kinds[0].version === version
          ? kinds[0]
          : null;
      if (!own) continue;
      const file = `${group ?? version}_${version}_${own.kind.toLowerCase()}.json`;
      writeFileSync(
        path.join(folder, file),
        JSON.stringify({
          $schema: 'http://json-schema.org/draft-07/schema#',
          $ref: `#/definitions/${name}`,
          definitions,
        }),
      );
      count++;
    }
  }
  return count;
}
