/** What runs on volumes and beside them: full syncs by hand through both guards; SQLite, redis and minetest after a power cut. */
import { chmodSync, copyFileSync, existsSync, mkdirSync, readdirSync, readFileSync, rmSync } from 'node:fs';
import path from 'node:path';
import t, { type Test } from 'tap';
import { parse } from 'yaml';
import { NO_RBAC_PROXY, rbacProxy } from '../kube/harness/programs.ts';
import { installPackages, missingPackages, programPath } from '../packages.ts';
import { DATABASES, MOD, told, WORLD } from '../real/minetest-world.ts';
import {
  CHART,
  Cluster,
  type KubeObject,
  noCluster,
  RELEASE,
  type RunningPod,
  SYSTEM,
  type VolumeRef,
} from './harness/cluster.ts';
import { applicationImage, PRODUCT_IMAGE, pack } from './harness/images.ts';
import { claim, deployment, deploymentOf } from './harness/objects.ts';
import { steps } from './harness/steps.ts';

const FAILOVER_MS = 180_000;
/** Three writers that never pause close a batch after five times their debounce of 1 s at the latest; then it travels. */
const LOST_LIMIT_MS = 20_000;
const APPLICATIONS = 'docker.io/library/applications:test';
const TRIGGER = `${RELEASE}-trigger.${SYSTEM}.svc`;
const PROGRAMS = ['redis-server', 'redis-cli', 'redis-check-aof', 'sqlite3'];
const MINETEST = '/usr/lib/minetest/minetestserver';
const MINETEST_FILES = '/usr/share/games/minetest';

/** Why the applications cannot run here; false: they can. */
function noApplications(): string | false {
  const wanted = missingPackages(['real']).filter(
    ({ name }) => name.startsWith('redis') || name.startsWith('minetest') || name === 'sqlite3',
  );
  const problem = installPackages(wanted);
  if (problem !== null) return problem;
  const missing = [
    ...PROGRAMS.filter((program) => programPath(program) === null),
    ...[MINETEST, MINETEST_FILES].filter((file) => !existsSync(file)),
  ];
  return missing.length > 0 ? `not installed: ${missing.join(', ')}` : false;
}

/**
 * Money moves between accounts, each move is numbered, and their sum never changes. First it says what it finds: whether
 * the file is sound, how many moves there are, the sum. Then each committed move.
 */
const BANK = `
const { DatabaseSync } = require('node:sqlite');
const { existsSync, writeSync } = require('node:fs');
const say = (line) => writeSync(1, line + '\\n');
const old = existsSync('/data/bank.db');
const db = new DatabaseSync('/data/bank.db');
const one = (sql) => Object.values(db.prepare(sql).get())[0];
if (old) {
  const found = { check: one('PRAGMA integrity_check'), mode: one('PRAGMA journal_mode'), moves: one('SELECT count(*) FROM moves'),
    last: one('SELECT max(n) FROM moves'), at: one('SELECT max(at) FROM moves'), sum: one('SELECT sum(money) FROM accounts'),
    replayed: one('SELECT count(*) FROM accounts JOIN (SELECT id, 1000 + coalesce(sum(d), 0) AS m FROM (SELECT id, 0 AS d FROM accounts UNION ALL SELECT b, amount FROM moves UNION ALL SELECT a, -amount FROM moves) GROUP BY id) x USING (id) WHERE money <> m') };
  say('found ' + JSON.stringify(found));
}
db.exec('PRAGMA journal_mode=WAL; PRAGMA synchronous=FULL; PRAGMA wal_autocheckpoint=50');
db.exec('BEGIN; CREATE TABLE IF NOT EXISTS accounts (id INTEGER PRIMARY KEY, money INTEGER NOT NULL);' +
  'CREATE TABLE IF NOT EXISTS moves (n INTEGER PRIMARY KEY, a INTEGER, b INTEGER, amount INTEGER, at INTEGER, filler BLOB)');
if (one('SELECT count(*) FROM accounts') === 0) for (let i = 0; i < 20; i++) db.exec('INSERT INTO accounts VALUES (' + i + ', 1000)');
db.exec('COMMIT');
let n = one('SELECT coalesce(max(n), 0) FROM moves');
const timer = setInterval(() => {
  n++;
  const [a, b, amount, at] = [(n * 7) % 20, (n * 11 + 3) % 20, n % 97, Date.now()];
  db.exec('BEGIN IMMEDIATE');
  db.prepare('UPDATE accounts SET money = money - ? WHERE id = ?').run(amount, a);
  db.prepare('UPDATE accounts SET money = money + ? WHERE id = ?').run(amount, b);
  db.prepare('INSERT INTO moves VALUES (?, ?, ?, ?, ?, ?)').run(n, a, b, amount, at, Buffer.alloc(n % 3000, n % 256));
  db.exec('COMMIT');
  say('done ' + n + ' ' + at);
}, 100);
process.on('SIGTERM', () => { clearInterval(timer); db.close(); process.exit(0); });
`;
const BANK_SUM = 20_000;

/** A counter and a list of its values that grow in one transaction each; their file is rewritten now and then. */
const REDIS = `trap 'redis-cli shutdown; exit 0' TERM
manifest=/data/appendonlydir/appendonly.aof.manifest
if [ -e $manifest ]; then
  if redis-check-aof $manifest > /tmp/check 2>&1; then echo 'aof sound'; else echo 'aof broken'; cat /tmp/check; fi
  old=yes
fi
redis-server --dir /data --bind 127.0.0.1 --save '' --appendonly yes --appendfsync always > /tmp/server 2>&1 &
until [ "$(redis-cli ping 2>/dev/null)" = PONG ]; do
  sleep 0.2; kill -0 $! 2>/dev/null || { cat /tmp/server; exit 1; }
done
[ -n "$old" ] && echo "found $(redis-cli get count) $(redis-cli llen values) $(redis-cli lindex values -1) $(redis-cli get at)"
n=0
while true; do
  n=$((n+1)); t=$(date +%s)
  c=$(redis-cli eval "local n = redis.call('incr', 'count'); redis.call('rpush', 'values', n); redis.call('set', 'at', ARGV[1]); return n" 0 $t) || exit 1
  echo "done $c $t"
  [ $((n % 40)) = 0 ] && redis-cli bgrewriteaof > /dev/null
  sleep 0.1
done`;

const MINETEST_SERVER = `trap 'kill -TERM $server; wait $server; exit 0' TERM
if [ -e /data/world ]; then
  for name in ${DATABASES.join(' ')}; do
    [ -e /data/world/$name ] && echo "$name $(sqlite3 /data/world/$name 'pragma integrity_check')"
  done
else
  mkdir -p /data/new/worldmods/builder
  cp /seed/world.mt /data/new/; cp /seed/init.lua /seed/mod.conf /data/new/worldmods/builder/
  mv /data/new /data/world
fi
export HOME=/tmp MINETEST_USER_PATH=/tmp
minetestserver --world /data/world --gameid minetest --port 30000 --config /seed/minetest.conf --logfile '' 2>&1 &
server=$!
wait $server; exit 1`;

/** Asks the trigger from inside a pod, with the token and the authority of that pod. Prints status and body. */
const ASK = `
const [to, body, auth] = process.argv.slice(1);
const { readFileSync } = require('node:fs');
const token = auth === 'own' ? readFileSync('/var/run/secrets/kubernetes.io/serviceaccount/token', 'utf8') : null;
const request = require('node:https').request('https://${TRIGGER}' + to, {
  method: 'POST', ca: readFileSync('/authority/ca.crt'), timeout: 20000,
  headers: { 'content-type': 'application/json', ...(token ? { authorization: 'Bearer ' + token } : {}) },
}, (response) => {
  let text = '';
  response.on('data', (part) => { text += part; }).on('end', () => console.log(JSON.stringify({ status: response.statusCode, text })));
});
request.on('timeout', () => request.destroy(new Error('no answer')));
request.on('error', (error) => { console.error(error.message); process.exit(1); });
request.end(body);
`;

t.test('applications', { skip: noCluster(), timeout: 840_000 }, async (t) => {
  const cluster = await Cluster.start({ say: (line) => t.comment(line) });
  t.teardown(() => cluster.stop());
  let step = steps(t, cluster);

  /* Full syncs by hand */

  let synced: VolumeRef;
  let source: RunningPod;
  const allowed = 'backup';
  const refused = 'default';

  await step('a volume has two copies, and two pods stand by to ask for full syncs', async () => {
    await cluster.apply(
      claim('synced'),
      deployment('synced', 'synced', {
        script:
          "trap 'exit 0' TERM; echo whole > /data/one; echo more > /data/two; sync; while true; do sleep 1; done",
      }),
    );
    source = await cluster.podRunning('app=synced');
    synced = await cluster.volumeOf('synced');
    await cluster.kubectl(['create', 'namespace', 'other']);
    await cluster.apply(path.join(CHART, 'examples/manual-sync-rbac.yaml'));
    const secret = await cluster.get('secret', `${RELEASE}-trigger`, SYSTEM);
    const service = await cluster.get('service', `${RELEASE}-trigger`, SYSTEM);
    const authority = Buffer.from(secret.data['ca.crt'], 'base64').toString();
    await cluster.apply({
      apiVersion: 'v1',
      kind: 'ConfigMap',
      metadata: { name: 'trigger-authority' },
      data: { 'ca.crt': authority },
    });
    for (const account of [allowed, refused]) await cluster.apply(caller(account, service.spec.clusterIP));
    for (const account of [allowed, refused]) await cluster.podRunning(`app=caller-${account}`);
    for (const { name } of cluster.others(source.node))
      await cluster.waitFor(
        `the copy on ${name}`,
        async () =>
          cluster.read(name, synced, 'two') === 'more\n' && cluster.read(name, synced, 'one') === 'whole\n',
      );
  });

  const ask = async (
    account: string,
    to: string,
    body: object,
    auth: 'own' | 'none' = 'own',
  ): Promise<{ status: number; body: KubeObject }> => {
    const out = await cluster.exec(`caller-${account}`, [
      '/usr/bin/node',
      '-e',
      ASK,
      to,
      JSON.stringify(body),
      auth,
    ]);
    const { status, text } = JSON.parse(out) as { status: number; text: string };
    let parsed: KubeObject = text;
    try {
      parsed = JSON.parse(text);
    } catch {
      // A proxy's own words.
    }
    return { status, body: parsed };
  };
  const START = '/replication/full-sync/trigger';
  const runs = async (): Promise<string | undefined> =>
    (await cluster.simpleVolume(synced)).status.lastFullSync?.id;

  const throughGuard = async (t: Test, guard: string): Promise<void> => {
    const body = { namespace: 'default', claimName: 'synced' };
    const before = await runs();
    t.equal((await ask(allowed, `${START}?namespace=default`, body, 'none')).status, 401, 'without a token');
    t.equal(
      (await ask(refused, `${START}?namespace=default`, body)).status,
      403,
      'an account without the right',
    );
    t.equal(
      (await ask(allowed, `${START}?namespace=other`, { ...body, namespace: 'other' })).status,
      403,
      'in another namespace',
    );
    const smuggled = await ask(allowed, `${START}?namespace=default`, { ...body, namespace: 'other' });
    t.ok(
      smuggled.status >= 400 && smuggled.status < 500,
      `allowed in one, asked for another: ${smuggled.status}`,
    );
    t.equal(await runs(), before, 'nothing was started by any of them');

    // What no event tells: the copies are changed behind their agents' backs.
    const [first, second] = cluster.others(source.node).map(({ name }) => name) as [string, string];
    rmSync(cluster.tree(first, synced, 'one'));
    rmSync(cluster.tree(second, synced, 'two'));
    const started = await ask(allowed, `${START}?namespace=default`, body);
    t.match(started, { status: 202, body: { started: true, id: String } }, 'the account of the example may');
    const ended = await cluster.waitFor('the full sync has ended', async () => {
      const to = `/replication/full-sync/runs/${started.body.id}?namespace=default`;
      const { status, body: run } = await ask(allowed, to, {});
      if (status !== 200) throw new Error(JSON.stringify(run));
      return run.state === 'ended' && run;
    });
    t.match(ended, { outcome: 'Succeeded' });
    t.equal(await runs(), started.body.id, 'the status tells of it');
    for (const name of [first, second]) {
      t.strictSame(
        await cluster.differences(synced, source.node, name),
        [],
        `the copy on ${name} is whole again`,
      );
    }
    // The token went through it; it is in no log.
    const token = (
      await cluster.exec(`caller-${allowed}`, [
        '/usr/bin/node',
        '-p',
        "require('fs').readFileSync('/var/run/secrets/kubernetes.io/serviceaccount/token', 'utf8')",
      ])
    ).trim();
    const signature = token.split('.')[2] as string;
    t.ok(signature.length > 40, 'a token');
    for (const pod of await cluster.parts('controller')) {
      const logs = await cluster.kubectl(['logs', '-n', SYSTEM, pod.metadata.name, '--all-containers']);
      t.notOk(logs.includes(signature), `no token in the logs of ${pod.metadata.name} (${guard})`);
    }
  };

  await step('a pod starts a full sync with its own token; the built-in guard lets nobody else', (t) =>
    throughGuard(t, 'builtin'),
  );

  const proxy = rbacProxy();
  await t.test('the same through kube-rbac-proxy', { skip: proxy === null && NO_RBAC_PROXY }, async (t) => {
    const values = parse(readFileSync(path.join(CHART, 'values.yaml'), 'utf8')) as KubeObject;
    const folder = path.join(cluster.folder, 'kube-rbac-proxy');
    mkdirSync(folder);
    copyFileSync(proxy as string, path.join(folder, 'kube-rbac-proxy'));
    chmodSync(path.join(folder, 'kube-rbac-proxy'), 0o755);
    const file = path.join(cluster.folder, 'kube-rbac-proxy.tar');
    pack(values.manualSync.proxy.image, folder, file, ['/kube-rbac-proxy']);
    await cluster.loadImage(file);
    await cluster.install({ manualSync: { guard: 'proxy' } });
    await cluster.waitFor('controllers with the proxy alone', async () => {
      const pods = await cluster.parts('controller');
      return (
        pods.length === 2 &&
        pods.every((pod) => pod.spec.containers.length === 3 && !pod.metadata.deletionTimestamp)
      );
    });
    await throughGuard(t, 'proxy');
  });

  /* Applications and a power cut */

  const skip = noApplications();
  await t.test('SQLite, redis and a minetest server on one node, whose power is cut', { skip }, async (t) => {
    step = steps(t, cluster);
    const file = path.join(cluster.folder, 'applications.tar');
    const programs = [...PROGRAMS.map((program) => programPath(program) as string), MINETEST];
    const lost = 'n2';
    const near = {
      affinity: {
        nodeAffinity: {
          preferredDuringSchedulingIgnoredDuringExecution: [
            {
              weight: 100,
              preference: {
                matchExpressions: [{ key: 'kubernetes.io/hostname', operator: 'In', values: [lost] }],
              },
            },
          ],
        },
      },
    };
    const names = ['sqlite', 'redis', 'minetest'] as const;
    const volumes = new Map<string, VolumeRef>();
    const first = new Map<string, RunningPod>();
    const logOf = (pod: RunningPod): Promise<string> => cluster.kubectl(['logs', pod.name]);

    await step('they run, and write', async (t) => {
      applicationImage(APPLICATIONS, file, programs, { [MINETEST_FILES]: MINETEST_FILES });
      await cluster.loadImage(file);
      await cluster.apply(
        {
          apiVersion: 'v1',
          kind: 'ConfigMap',
          metadata: { name: 'seed' },
          data: {
            'init.lua': MOD,
            'mod.conf': 'name = builder\n',
            'world.mt': WORLD,
            'minetest.conf':
              'server_map_save_interval = 1\nserver_announce = false\nbind_address = 127.0.0.1\n',
          },
        },
        ...names.map((name) => claim(name)),
        workload('sqlite', PRODUCT_IMAGE, ['/usr/bin/node', '-e', BANK], near),
        workload('redis', APPLICATIONS, ['sh', '-c', REDIS], near),
        workload('minetest', APPLICATIONS, ['sh', '-c', MINETEST_SERVER], near),
      );
      for (const name of names) {
        first.set(name, await cluster.podRunning(`app=${name}`, { limitMs: 120_000 }));
        volumes.set(name, await cluster.volumeOf(name));
        t.equal(first.get(name)?.node, lost, `${name} is where it shall be`);
      }
      const pod = (name: string): RunningPod => first.get(name) as RunningPod;
      await cluster.waitFor(
        'the bank moves money',
        async () => acknowledged(await logOf(pod('sqlite'))).n >= 100,
        120_000,
      );
      await cluster.waitFor(
        'redis counts, and its file was rewritten',
        async () => acknowledged(await logOf(pod('redis'))).n >= 100,
        120_000,
      );
      // The server commits its mods' storage every ten seconds.
      await cluster.waitFor(
        'the world is built',
        async () => told(await logOf(pod('minetest')), 'built') >= 400,
        180_000,
      );
    });

    const before = new Map<string, string>();
    await step('power cut: each runs elsewhere', async (t) => {
      await cluster.leadElsewhere(lost);
      for (const name of names) await cluster.failoverReady(volumes.get(name) as VolumeRef, 120_000);
      await cluster.node(lost).powerCut();
      for (const name of names) before.set(name, deadLog(cluster, first.get(name) as RunningPod));
      for (const name of names) {
        const pod = await cluster.podRunning(`app=${name}`, { not: [lost], limitMs: FAILOVER_MS });
        first.set(name, pod);
        // Its next pod may run on either node: the volume follows it, when it was put on the other one, by a second move.
        const { status } = await cluster.simpleVolume(volumes.get(name) as VolumeRef);
        t.equal(status.activeNode, pod.node, `${name} is where its pod is`);
        t.ok(status.epoch >= 2 && status.previousActiveNode !== pod.node, `${name}: epoch ${status.epoch}`);
      }
    });

    await step(
      'SQLite: the copy is sound, every transaction is whole, the numbers have no gap',
      async (t) => {
        const log = await cluster.waitFor('the bank goes on', async () => {
          const text = await logOf(first.get('sqlite') as RunningPod);
          return acknowledged(text).n > 0 && text;
        });
        const found = JSON.parse(/^found (.*)$/m.exec(log)?.[1] ?? 'null') as KubeObject;
        const last = acknowledged(before.get('sqlite') as string);
        t.match(found, { check: 'ok', mode: 'wal', sum: BANK_SUM, replayed: 0 });
        t.equal(found.moves, found.last, 'moves 1 to the last, none is missing');
        t.ok(found.last > 0 && found.last <= last.n + 1, `${found.last} of ${last.n}`);
        lossOf(t, 'SQLite', last.n - found.last, last.at - found.at);
      },
    );

    await step('redis: redis-check-aof finds no fault, every transaction is whole', async (t) => {
      const log = await cluster.waitFor('redis goes on', async () => {
        const text = await logOf(first.get('redis') as RunningPod);
        return acknowledged(text).n > 0 && text;
      });
      t.match(log, /^aof sound$/m, log.slice(0, 2000));
      const [, count, length, value, at] = /^found (\d+) (\d+) (\d+) (\d+)$/m.exec(log) ?? [];
      t.equal(length, count, 'the list is as long as the counter says');
      t.equal(value, count, 'and ends with it');
      const last = acknowledged(before.get('redis') as string);
      t.ok(Number(count) > 0 && Number(count) <= last.n + 1, `${count} of ${last.n}`);
      lossOf(t, 'redis', last.n - Number(count), (last.at - Number(at)) * 1000);
    });

    await step(
      'minetest: its databases are sound, the server finds the world that it remembers',
      async (t) => {
        const log = await cluster.waitFor(
          'the server builds on',
          async () => {
            const text = await logOf(first.get('minetest') as RunningPod);
            return told(text, 'built') > 0 && text;
          },
          120_000,
        );
        for (const name of DATABASES) {
          const [, said] = new RegExp(`^${name} (.*)$`, 'm').exec(log) ?? [];
          if (said === undefined)
            t.equal(name, 'auth.sqlite', `${name} is there (without players that file need not)`);
          else t.equal(said, 'ok', name);
        }
        const built = told(before.get('minetest') as string, 'built');
        const [remembers, finds] = [told(log, 'remembers'), told(log, 'finds')];
        t.ok(remembers > 0 && remembers <= built + 10, `it remembers ${remembers} of ${built} blocks`);
        // The map is saved once a second, the counter every ten: either may be ahead, never by more than was built since.
        t.ok(finds > 0 && finds <= built + 60, `it finds ${finds} of them`);
        t.comment(`minetest: ${built} blocks were built, ${finds} are found, ${remembers} remembered`);
      },
    );

    await step(
      'the node comes back: its old data is in the backups, and it holds copies of all three',
      async (t) => {
        await cluster.node(lost).start();
        for (const name of names) {
          const volume = volumes.get(name) as VolumeRef;
          await cluster.waitFor(
            `two copies of ${name}`,
            async () => (await cluster.simpleVolume(volume)).status.replicasSummary === '2/2',
            FAILOVER_MS,
          );
          const backups = cluster.backups(lost, volume);
          t.equal(backups.length, 1, `one backup of ${name}`);
          t.ok(readdirSync(backups[0] as string).length > 0, 'with something in it');
          t.equal(
            (await cluster.podRunning(`app=${name}`)).uid,
            first.get(name)?.uid,
            `${name} was not disturbed`,
          );
        }
      },
    );
  });
});

/** A pod that waits to be told to ask, with its account's token and the trigger's authority. */
function caller(account: string, address: string): object {
  return {
    apiVersion: 'v1',
    kind: 'Pod',
    metadata: { name: `caller-${account}`, labels: { app: `caller-${account}` } },
    spec: {
      serviceAccountName: account,
      terminationGracePeriodSeconds: 0,
      // As a name server would say; none runs here.
      hostAliases: [{ ip: address, hostnames: [TRIGGER] }],
      containers: [
        {
          name: 'app',
          image: PRODUCT_IMAGE,
          imagePullPolicy: 'IfNotPresent',
          command: ['/usr/bin/node', '-e', 'setInterval(() => {}, 60000)'],
          volumeMounts: [{ name: 'authority', mountPath: '/authority' }],
        },
      ],
      volumes: [{ name: 'authority', configMap: { name: 'trigger-authority' } }],
    },
  };
}

/** A Deployment of one pod with a claim of its name at /data, and the seed of the world. */
function workload(name: string, image: string, command: string[], spec: object): object {
  return deploymentOf(name, {
    ...spec,
    terminationGracePeriodSeconds: 10,
    containers: [
      {
        name: 'app',
        image,
        imagePullPolicy: 'IfNotPresent',
        command,
        volumeMounts: [
          { name: 'data', mountPath: '/data' },
          { name: 'seed', mountPath: '/seed' },
        ],
      },
    ],
    volumes: [
      { name: 'data', persistentVolumeClaim: { claimName: name } },
      { name: 'seed', configMap: { name: 'seed' } },
    ],
  });
}

/** The last number that a writer said was done, and its time. */
function acknowledged(log: string): { n: number; at: number } {
  const [, n, at] = [...log.matchAll(/^done (\d+) (\d+)$/gm)].at(-1) ?? [];
  return { n: Number(n ?? 0), at: Number(at ?? 0) };
}

/** What a pod of a node that is off had said, without what kubelet's format adds to each line. */
function deadLog(cluster: Cluster, pod: RunningPod): string {
  const folder = path.join(cluster.node(pod.node).podLogs, `${pod.namespace}_${pod.name}_${pod.uid}`, 'app');
  const files = readdirSync(folder).sort();
  return files
    .map((file) => readFileSync(path.join(folder, file), 'utf8').replace(/^\S+ \S+ \S+ /gm, ''))
    .join('');
}

function lossOf(t: Test, what: string, writes: number, ms: number): void {
  t.comment(
    `${what}: ${Math.max(0, writes)} acknowledged writes of the last ${(Math.max(0, ms) / 1000).toFixed(1)} s were lost`,
  );
  t.ok(ms <= LOST_LIMIT_MS, `${(ms / 1000).toFixed(1)} s of writes`);
}
