/**
 * `node csi/generate.ts [FOLDER]`: csi/generated from csi/proto, with what @grpc/proto-loader brings along. The result is
 * committed: nothing has to be generated at install, and no role reads or parses .proto files when it starts (the tables
 * are JSON, part of the bundle). test/csi/generated.test.ts says when it is out of date.
 */
import { execFileSync } from 'node:child_process';
import { existsSync, mkdirSync, readdirSync, readFileSync, rmSync, writeFileSync } from 'node:fs';
import { createRequire } from 'node:module';
import path from 'node:path';

const PROTO = path.join(import.meta.dirname, 'proto');
const FILES = ['csi.proto', 'pluginregistration.proto'];
/** Services that are served or asked, and what they refer to, is all that the tables keep. */
const SERVICES = ['csi.v1.Identity', 'csi.v1.Controller', 'csi.v1.Node', 'pluginregistration.Registration'];

interface Reflected {
  nested?: Record<string, Reflected>;
  fields?: Record<string, { type: string; keyType?: string }>;
  methods?: Record<string, { requestType: string; responseType: string }>;
  [key: string]: unknown;
}

interface Protobuf {
  Root: new () => {
    resolvePath: (origin: string, target: string) => string | null;
    loadSync(files: string[], options: object): { toJSON(options?: object): Reflected };
  };
}

function tables(): Reflected {
  const require = createRequire(createRequire(import.meta.url).resolve('@grpc/proto-loader'));
  const protobuf = require('protobufjs') as Protobuf;
  const root = new protobuf.Root();
  root.resolvePath = (_origin, target) => {
    const own = path.join(PROTO, target);
    // csi.proto's options need the descriptor of descriptors; other common types are built in
    return existsSync(own)
      ? own
      : target === 'google/protobuf/descriptor.proto'
        ? require.resolve('protobufjs/google/protobuf/descriptor.proto')
        : target;
  };
  const all = root.loadSync(FILES, { keepCase: true }).toJSON();
  const csi = all.nested?.csi?.nested?.v1 as Reflected;
  for (const name of Object.keys(csi.nested ?? {}))
    if (csi.nested?.[name]?.methods && !SERVICES.includes(`csi.v1.${name}`)) delete csi.nested[name];
  // Options of fields and their extensions are for people and for other generators.
  const strip = (node: Reflected): void => {
    delete node.options;
    delete node.comment;
    for (const method of Object.values(node.methods ?? {}) as Record<string, unknown>[]) {
      delete method.options;
      delete method.parsedOptions;
    }
    for (const name of Object.keys(node.nested ?? {})) {
      const child = node.nested?.[name] as Reflected;
      if ('extend' in child) delete node.nested?.[name];
      else strip(child);
    }
    for (const field of Object.values(node.fields ?? {})) {
      const { options, comment, ...kept } = field as Record<string, unknown>;
      for (const key of Object.keys(field)) delete (field as Record<string, unknown>)[key];
      Object.assign(field, kept);
      // proto3 packs repeated numbers by default; nothing here differs
      if (options && (options as Record<string, unknown>).proto3_optional)
        Object.assign(field, { options: { proto3_optional: true } });
    }
  };
  strip(all);
  const google = all.nested?.google?.nested?.protobuf?.nested ?? {};
  for (const name of Object.keys(google))
    if (!/^(Timestamp|\w+Value)$/.test(name) || name === 'EnumValue') delete google[name];
  return all;
}

/** Where it was generated is nobody's business, and what no message refers to is left out. */
function prune(folder: string): void {
  const files = readdirSync(folder, { recursive: true, encoding: 'utf8' })
    .filter((name) => name.endsWith('.ts'))
    .map((name) => path.join(folder, name));
  const text = new Map(files.map((file) => [file, readFileSync(file, 'utf8').replaceAll(`${PROTO}/`, '')]));
  const needed = new Set<string>();
  const visit = (file: string): void => {
    if (needed.has(file)) return;
    needed.add(file);
    for (const [, to] of (text.get(file) as string).matchAll(/from '(\.[^']+)'/g))
      visit(path.join(path.dirname(file), to as string));
  };
  for (const service of SERVICES) visit(path.join(folder, `${service.replaceAll('.', '/')}.ts`));
  for (const file of files)
    if (needed.has(file)) writeFileSync(file, text.get(file) as string);
    else rmSync(file);
}

export function generate(folder: string): void {
  rmSync(folder, { recursive: true, force: true });
  mkdirSync(folder, { recursive: true });
  const require = createRequire(import.meta.url);
  const tool = path.join(
    path.dirname(require.resolve('@grpc/proto-loader/package.json')),
    'build/bin/proto-loader-gen-types.js',
  );
  execFileSync(
    process.execPath,
    [
      tool,
      '--keepCase',
      '--longs=String',
      '--enums=String',
      '--defaults',
      '--oneofs',
      '--grpcLib=@grpc/grpc-js',
      '--importFileExtension=.ts',
      `--includeDirs=${PROTO}`,
      `--outDir=${folder}`,
      ...FILES,
    ],
    { stdio: ['ignore', 'ignore', 'inherit'] },
  );
  prune(folder);
  writeFileSync(path.join(folder, 'tables.json'), `${JSON.stringify(tables())}\n`);
}

if (import.meta.main) {
  const folder = process.argv[2] ?? path.join(import.meta.dirname, 'generated');
  generate(folder);
  console.log(`${folder}: ${readFileSync(path.join(folder, 'tables.json')).length} bytes of tables`);
}
