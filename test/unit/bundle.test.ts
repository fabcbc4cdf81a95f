// What is shipped behaves like the sources, and no role carries another's packages.
import { execFile } from 'node:child_process';
import { cpSync, readFileSync } from 'node:fs';
import path from 'node:path';
import { promisify } from 'node:util';
import t from 'tap';

const root = path.join(import.meta.dirname, '../..');
const run = (args: string[], cwd = root) => promisify(execFile)(process.execPath, args, { cwd });

t.test('npm run build makes bundles that run on their own', async (t) => {
  await run(['lib/build.mjs']);
  t.match((await run(['lib/build.mjs'])).stdout, /up to date/, 'a second run has nothing to do');

  const place = t.testdir();
  cpSync(path.join(root, 'dist'), place, { recursive: true });
  const bin = path.join(place, 'bin.js');
  const { version } = JSON.parse(readFileSync(path.join(root, 'package.json'), 'utf8')) as {
    version: string;
  };
  t.equal((await run([bin, '--version'], place)).stdout, `${version}\n`);
  t.match((await run([bin, 'agent', '--help'], place)).stdout, /--pool-path/);
  await t.rejects(run([bin, 'agent', '--nope'], place), { code: 2, stderr: /unknown option '--nope'/ });
  await t.rejects(run([bin, 'agent'], place), { code: 2, stderr: /--/ }, 'a flag that is missing is named');
});

t.test('the agent bundle holds neither the Kubernetes client nor gRPC', async (t) => {
  const sources = JSON.parse(readFileSync(path.join(root, 'dist/agent.js.map'), 'utf8')) as {
    sources: string[];
  };
  const packages = new Set(sources.sources.map((one) => /node_modules\/((?:@[^/]+\/)?[^/]+)/.exec(one)?.[1]));
  t.ok(packages.has('webdav-server') && packages.has('fastify'));
  t.notOk(packages.has('@kubernetes/client-node') || packages.has('@grpc/grpc-js'));
});

t.test('the controller bundle holds of the Kubernetes client what it uses: no models, no undici', (t) => {
  const { sources } = JSON.parse(readFileSync(path.join(root, 'dist/controller.js.map'), 'utf8')) as {
    sources: string[];
  };
  t.ok(sources.some((one) => /@kubernetes\/client-node\/.*\/config\./.test(one)));
  t.notOk(sources.some((one) => /node_modules\/undici\/|client-node\/.*\/models\/V1Pod\./.test(one)));
  t.end();
});

t.test('no role loads the parts of Node that nobody uses: undici, Web Crypto', async (t) => {
  const told = `process.on('exit', () => console.error('loaded', process.moduleLoadList.join()))`;
  const preload = ['--import', `data:text/javascript,${encodeURIComponent(told)}`];
  for (const role of ['agent', 'controller', 'csi-node']) {
    const bundle = path.join(root, 'dist', `${role}.js`);
    t.notMatch(readFileSync(bundle, 'utf8'), /\bfrom\s*"(node:)?(http|crypto)"/, `${role}: by require`);
    const { stderr } = await run([...preload, bundle, role, '--help']);
    const loaded = stderr.slice(stderr.indexOf('loaded '));
    t.match(loaded, /NativeModule https?,/, role);
    t.notMatch(loaded, /internal\/deps\/undici|internal\/crypto\/webcrypto|NativeModule cluster,/, role);
  }
});
