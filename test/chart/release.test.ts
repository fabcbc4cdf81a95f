/** What a release publishes: the workflows, the Dockerfile and the packaged chart, checked against this repository. */
import { execFileSync, spawnSync } from 'node:child_process';
import { cpSync, existsSync, mkdirSync, mkdtempSync, readFileSync, rmSync, symlinkSync } from 'node:fs';
import { tmpdir } from 'node:os';
import path from 'node:path';
import t from 'tap';
import { parse as parseYaml } from 'yaml';
import { noKube } from '../kube/harness/programs.ts';
import { CHART, helm, type Plain, parse, RELEASE, steady, template } from './rendering.ts';

const root = path.resolve(import.meta.dirname, '../..');
const read = (file: string): string => readFileSync(path.join(root, file), 'utf8');
const json = (file: string): Plain => JSON.parse(read(file));
const WORKFLOWS = ['.github/workflows/test.yml', '.github/workflows/release.yml'];
/** YAML 1.2, in which `on` is a word. */
const workflow = (file: string): Plain => parseYaml(read(file));
const scratch = (t: { teardown(fn: () => void): void }): string => {
  const folder = mkdtempSync(path.join(tmpdir(), 'sv-release-'));
  t.teardown(() => rmSync(folder, { recursive: true, force: true }));
  return folder;
};

t.test(
  'package, lock and chart are of one version, and the chart takes the image that is published',
  async (t) => {
    const { version, devDependencies, dependencies } = json('package.json');
    const lock = json('package-lock.json').packages[''];
    t.equal(lock.version, version);
    t.strictSame([lock.dependencies, lock.devDependencies], [dependencies, devDependencies]);
    const chart = parse(read('chart/Chart.yaml'))[0];
    t.equal(chart.version, version);
    t.equal(chart.appVersion, version);
    const values = parse(read('chart/values.yaml'))[0];
    const owner = new URL(chart.home).pathname.slice(1);
    t.equal(values.image.repository, `ghcr.io/${owner}`);
    const names = workflow('.github/workflows/release.yml').jobs.image.steps.find(
      (one: Plain) => one.id === 'names',
    );
    t.equal(names.with.images, `ghcr.io/\${{ github.repository }}`);
    t.match(names.with.tags, 'type=semver,pattern={{version}}', 'the tag that the chart asks for');
  },
);

t.test(
  'workflows: what they run is here, what they use is pinned, and nothing is published untested (I7)',
  async (t) => {
    const scripts = json('package.json').scripts;
    for (const file of WORKFLOWS) {
      const { jobs, permissions } = workflow(file);
      t.strictSame(permissions, { contents: 'read' }, `${file}: no right that not every job needs`);
      for (const [name, job] of Object.entries<Plain>(jobs)) {
        const at = `${file} ${name}`;
        if (job.uses) {
          t.ok(existsSync(path.join(root, job.uses)), `${at} ${job.uses}`);
          t.ok('workflow_call' in workflow(job.uses).on, `${at} may be called`);
          continue;
        }
        t.ok(job['timeout-minutes'] > 0, `${at} ends`);
        for (const need of [job.needs ?? []].flat()) t.ok(need in jobs, `${at} needs ${need}`);
        for (const step of job.steps) {
          if (step.uses) {
            t.match(step.uses, /^[\w-]+\/[\w-]+@[0-9a-f]{40}$/, `${at} ${step.uses}`);
            if (step.uses.startsWith('actions/checkout@'))
              t.equal(step.with['persist-credentials'], false, at);
            for (const key of ['file', 'go-version-file', 'cache-dependency-path'])
              if (step.with?.[key])
                t.ok(existsSync(path.join(root, step.with[key])), `${at} ${step.with[key]}`);
            continue;
          }
          t.equal(spawnSync('bash', ['-n'], { input: step.run }).status, 0, `${at}: ${step.run}`);
          // What comes from outside is no part of a script.
          t.notMatch(step.run, /\$\{\{/, at);
          for (const [, script] of step.run.matchAll(/npm run ([\w:-]+)/g))
            t.ok(script in scripts, `${at} ${script}`);
          for (const [, script] of step.run.matchAll(/bash (\S+)/g))
            t.ok(existsSync(path.join(root, script)), `${at} ${script}`);
        }
      }
    }
    const { jobs, on } = workflow('.github/workflows/release.yml');
    t.strictSame(on, { push: { tags: ['v*'] } });
    t.strictSame(
      [jobs.gate.uses, jobs.image.needs, jobs.chart.needs],
      ['./.github/workflows/test.yml', 'gate', 'image'],
    );
    const push = jobs.image.steps.find((one: Plain) => one.uses?.startsWith('docker/build-push-action@'));
    t.match(push.with, { platforms: 'linux/amd64,linux/arm64', push: true, file: 'chart/image/Dockerfile' });
    const { matrix } = workflow('.github/workflows/test.yml').jobs.gate.strategy;
    t.strictSame(matrix.runner, ['ubuntu-24.04', 'ubuntu-24.04-arm'], 'both architectures are tested');
  },
);

t.test(
  'the chart as it is packaged renders what the folder renders',
  { skip: noKube(['helm']) },
  async (t) => {
    const folder = scratch(t);
    const run = workflow('.github/workflows/release.yml').jobs.chart.steps.find((one: Plain) =>
      one.run?.includes('helm package'),
    );
    const [, args] = /^helm package (.*)$/m.exec(run.run) as unknown as [string, string];
    const { version } = json('package.json');
    const real = args
      .replaceAll('"$version"', version)
      .split(' ')
      .map((one) => (one === 'chart' ? CHART : one === 'dist' ? folder : one));
    helm(['package', ...real]);
    const archive = path.join(folder, `simple-volume-${version}.tgz`);
    t.ok(existsSync(archive), 'the name that is pushed');
    const files = execFileSync('tar', ['-tzf', archive], { encoding: 'utf8' }).trim().split('\n');
    for (const needed of [
      'values.schema.json',
      'crds/simplevolumes.storage.shipstuff.io.yaml',
      'files/alerts.yaml',
      'templates/NOTES.txt',
      'examples/demo.yaml',
    ])
      t.ok(files.includes(`simple-volume/${needed}`), needed);
    t.strictSame(
      files.filter((one) => /image|\.ts$/.test(one)),
      [],
      'nothing of the build',
    );
    t.equal(
      steady(helm(['template', RELEASE, archive, '--namespace', 'simple-volume-system'])),
      steady(template()),
    );
  },
);

t.test('what the Dockerfile copies is enough to build the roles', { timeout: 120_000 }, async (t) => {
  const folder = scratch(t);
  const [, build] = read('chart/image/Dockerfile').split(/^FROM .* AS build$/m) as [string, string];
  for (const [, line] of (build.split(/^FROM /m)[0] as string).matchAll(/^COPY (?!--from)(.*)$/gm)) {
    const parts = (line as string).split(' ');
    const to = parts.pop() as string;
    for (const from of parts) {
      t.ok(existsSync(path.join(root, from)), from);
      const target = to === './' ? path.join(folder, path.basename(from)) : path.join(folder, to);
      mkdirSync(path.dirname(target), { recursive: true });
      cpSync(path.join(root, from), target, { recursive: true });
    }
  }
  symlinkSync(path.join(root, 'node_modules'), path.join(folder, 'node_modules'));
  // Compiled already: the addon's own sources are tested by building it in the first place.
  cpSync(
    path.join(root, 'build/Release/simple_volume.node'),
    path.join(folder, 'build/Release/simple_volume.node'),
  );
  const run = (...args: string[]): { status: number | null; stderr: string } =>
    spawnSync(process.execPath, args, { cwd: folder, encoding: 'utf8' });
  const built = run('lib/build.mjs');
  t.equal(built.status, 0, built.stderr);
  const checked = run('--check', 'native/install.mjs');
  t.equal(checked.status, 0, checked.stderr);
  const rootfs = run('-e', "import('./chart/image/rootfs.ts').then(() => process.exit(0))");
  t.equal(rootfs.status, 0, rootfs.stderr);
  t.match(
    spawnSync(process.execPath, ['dist/bin.js', '--version'], { cwd: folder, encoding: 'utf8' }).stdout,
    json('package.json').version,
  );
});
