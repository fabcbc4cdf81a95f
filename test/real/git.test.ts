import { fileURLToPath } from 'node:url';
import t from 'tap';
import {
  decide,
  generationsPass,
  killNode,
  Load,
  must,
  needs,
  promote,
  replicate,
  run,
  sleep,
  startCluster,
  waitFor,
} from './harness.ts';

t.setTimeout(280_000);
const VOLUME = { namespace: 'real', volume: 'repository' };

t.test(
  'a git repository under commits, repacks, branch deletes and gc: the copy passes git fsck --full',
  { skip: needs('git'), timeout: 180_000 },
  async (t) => {
    const cluster = await startCluster(t);
    const live = await replicate(cluster, VOLUME);
    const load = new Load(fileURLToPath(new URL('git-load.sh', import.meta.url)), [live]);
    t.teardown(() => load.end());
    const commits = (): string[] => load.output.split('\n').filter((line) => /^\d+ \d+$/.test(line));
    await waitFor(
      'sixty commits',
      () => {
        if (!load.running) throw new Error(load.output);
        return commits().length >= 60;
      },
      60_000,
    );
    await generationsPass(cluster, VOLUME, 3);
    await sleep(150);
    await killNode(cluster, 'a', load);
    const written = Number(commits().at(-1)?.split(' ')[0]);

    const decision = await decide(cluster, VOLUME);
    const folder = await promote(cluster, VOLUME, decision);
    const env = {
      GIT_CONFIG_NOSYSTEM: '1',
      HOME: folder,
      GIT_CONFIG_COUNT: '1',
      GIT_CONFIG_KEY_0: 'safe.directory',
      GIT_CONFIG_VALUE_0: '*',
    };
    const fsck = await run('git', ['fsck', '--full', '--no-dangling'], { cwd: folder, env });
    t.equal(fsck.code, 0, `git fsck: ${fsck.stdout} ${fsck.stderr}`);
    const kept = Number((await must('git', ['rev-list', '--count', 'main'], { cwd: folder, env })).trim());
    t.ok(kept > 0 && kept <= written + 1, `${kept} of ${written} commits are in the copy`);
    await must('git', ['checkout', '-q', '-f', 'main'], { cwd: folder, env });
    await must(
      'git',
      [
        '-c',
        'user.name=t',
        '-c',
        'user.email=t@example.org',
        'commit',
        '-q',
        '--allow-empty',
        '-m',
        'goes on',
      ],
      { cwd: folder, env },
    );
    t.pass('commits go on in the copy');
  },
);
