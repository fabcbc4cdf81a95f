// `npm run build`: what is shipped, in dist/: one minified bundle a long-running role (only what that role uses),
// one for all other verbs, the addon, and bin.js that picks among them. Skipped when up to date.
import { createHash } from 'node:crypto';
import { copyFileSync, existsSync, mkdirSync, readFileSync, rmSync, writeFileSync } from 'node:fs';
import path from 'node:path';
import { fileURLToPath } from 'node:url';
import { build } from 'esbuild';

const root = path.dirname(path.dirname(fileURLToPath(import.meta.url)));
const dist = path.join(root, 'dist');
const stampFile = path.join(dist, '.stamp');
const addon = path.join(root, 'build/Release/simple_volume.node');

/** Roles with a bundle of their own: the file that exports their `register`. */
const ROLES = {
  agent: 'lib/agent/command.ts',
  controller: 'controller/command.ts',
  'csi-node': 'csi/command.ts',
};

// CommonJS packages inside an ES module bundle ask for these.
const banner = [
  "import { createRequire as svCreateRequire } from 'node:module';",
  "import svPath from 'node:path';",
  'const require = svCreateRequire(import.meta.url);',
  'const __filename = import.meta.filename;',
  'const __dirname = svPath.dirname(__filename);',
].join('\n');

/**
 * Of @kubernetes/client-node the controller uses its KubeConfig alone, so that file is taken and not the index, which
 * loads a thousand models. What KubeConfig only needs for requests of its own is left out: none is ever made
 * (controller/cluster/connection.ts).
 */
const LEFT_OUT = {
  undici: ['Agent', 'ProxyAgent'],
  './gen/index.js': ['createConfiguration', 'ServerConfiguration'],
};
const slimKubernetes = {
  name: 'slim-kubernetes',
  setup({ onResolve, onLoad, resolve }) {
    onResolve({ filter: /^@kubernetes\/client-node$/ }, ({ importer, kind, resolveDir }) =>
      resolve('@kubernetes/client-node/dist/config.js', { importer, kind, resolveDir }),
    );
    onResolve({ filter: /^(undici|\.\/gen\/index\.js)$/ }, ({ path: name, importer }) =>
      importer.includes('/@kubernetes/client-node/') ? { path: name, namespace: 'left-out' } : undefined,
    );
    onLoad({ filter: /./, namespace: 'left-out' }, ({ path: name }) => ({
      contents: LEFT_OUT[name]
        .map((one) => `export function ${one}() { throw new Error('${one} is not part of this bundle'); }`)
        .join('\n'),
    }));
  },
};

/**
 * An ES module that imports a module of Node is given the value of each of its exports, also of those that are only made
 * when somebody looks: node:http then brings undici with it (for WebSocket), node:crypto the whole of Web Crypto. Nobody
 * uses these; in each agent they cost 6 MiB of anonymous memory. `require` does not look.
 */
const byRequire = {
  name: 'by-require',
  setup({ onResolve, onLoad }) {
    onResolve({ filter: /^(node:)?(http|crypto)$/ }, ({ kind, path: name }) =>
      kind === 'require-call' ? undefined : { path: name, namespace: 'by-require' },
    );
    onLoad({ filter: /./, namespace: 'by-require' }, ({ path: name }) => ({
      contents: `module.exports = require(${JSON.stringify(name)});`,
    }));
  },
};

/**
 * What packages ask for at the top of a file and only use in ways that are not used here: prom-client brings the module
 * `cluster` for metrics of several processes (1.3 MiB), pino threads for transports.
 */
const unused = {
  name: 'unused',
  setup({ onResolve, onLoad }) {
    onResolve({ filter: /^(cluster|thread-stream)$/ }, ({ path: name, importer }) =>
      /\/node_modules\/(prom-client|pino)\//.test(importer) ? { path: name, namespace: 'unused' } : undefined,
    );
    onLoad({ filter: /./, namespace: 'unused' }, ({ path: name }) => ({
      contents: `module.exports = class { constructor() { throw new Error('${name} is not part of this bundle'); } };`,
    }));
  },
};

const common = {
  absWorkingDir: root,
  bundle: true,
  platform: 'node',
  format: 'esm',
  target: 'node24',
  minify: true,
  keepNames: true, // error names are part of messages
  sourcemap: 'external',
  legalComments: 'linked',
  charset: 'ascii', // a single wider character makes the engine keep the whole text with two bytes each
  metafile: true,
  plugins: [slimKubernetes, byRequire, unused],
  logLevel: 'warning',
  banner: { js: banner },
};

/** The bundles, without writing them anywhere. */
async function bundles() {
  const wanted = [{ name: 'main', options: { entryPoints: [path.join(root, 'lib/cli/main.ts')] } }];
  for (const [role, file] of Object.entries(ROLES)) {
    const contents = `
      import { runMain } from './lib/cli/run-main.ts';
      import { register } from './${file}';
      await runMain([{ name: ${JSON.stringify(role)}, description: '', load: async () => ({ register }) }]);`;
    wanted.push({
      name: role,
      options: { stdin: { contents, resolveDir: root, sourcefile: `${role}.ts`, loader: 'ts' } },
    });
  }
  return Promise.all(
    wanted.map(async ({ name, options }) => {
      const outfile = path.join(dist, `${name}.js`);
      return { name, ...(await build({ ...common, ...options, outfile, write: false })) };
    }),
  );
}

if (!existsSync(addon)) {
  console.error('simple-volume build: the addon is not built: run `npm install` first');
  process.exit(1);
}
const started = performance.now();
const made = await bundles();
const hash = createHash('sha256');
for (const bundle of made) for (const file of bundle.outputFiles) hash.update(file.contents);
for (const file of [addon, 'package.json', 'lib/cli/bin.js'].map((f) => path.resolve(root, f))) {
  hash.update(readFileSync(file));
}
const stamp = hash.digest('hex');
if (existsSync(stampFile) && readFileSync(stampFile, 'utf8') === stamp) {
  writeFileSync(stampFile, stamp); // its time says: no older than the sources
  console.log('simple-volume build: dist is up to date');
  process.exit(0);
}
rmSync(dist, { recursive: true, force: true });
mkdirSync(dist, { recursive: true });
for (const bundle of made) {
  for (const file of bundle.outputFiles) writeFileSync(file.path, file.contents);
  const bytes = bundle.outputFiles.find((file) => file.path.endsWith('.js')).contents.length;
  console.log(`simple-volume build: dist/${bundle.name}.js, ${(bytes / 1024).toFixed(0)} KiB`);
}
copyFileSync(addon, path.join(dist, 'simple_volume.node'));
copyFileSync(path.join(root, 'lib/cli/bin.js'), path.join(dist, 'bin.js'));
const { name, version, license } = JSON.parse(readFileSync(path.join(root, 'package.json'), 'utf8'));
writeFileSync(
  path.join(dist, 'package.json'),
  `${JSON.stringify({ name, version, license, type: 'module', bin: { 'simple-volume': './bin.js' } }, null, 2)}\n`,
);
writeFileSync(stampFile, stamp);
console.log(`simple-volume build: done in ${((performance.now() - started) / 1000).toFixed(1)} s`);
