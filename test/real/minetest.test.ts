import { existsSync, mkdirSync, writeFileSync } from 'node:fs';
import { join } from 'node:path';
import t from 'tap';
import {
  decide,
  freePorts,
  generationsPass,
  killNode,
  Load,
  must,
  needs,
  promote,
  replicate,
  sleep,
  startCluster,
  waitFor,
} from './harness.ts';
import { DATABASES, MOD, told, WORLD } from './minetest-world.ts';

t.setTimeout(280_000);
const VOLUME = { namespace: 'real', volume: 'world' };

function server(world: string, folder: string, port: number): Load {
  const config = join(folder, `minetest-${port}.conf`);
  writeFileSync(config, 'server_map_save_interval = 1\nserver_announce = false\nbind_address = 127.0.0.1\n');
  return new Load(
    'minetestserver',
    ['--world', world, '--gameid', 'minetest', '--port', String(port), '--config', config, '--logfile', ''],
    { env: { HOME: folder, MINETEST_USER_PATH: folder } },
  );
}

const last = (load: Load, what: string): number => told(load.output, what);

t.test(
  'a minetest world that is being built: the server starts on the copy and finds what it remembers',
  { skip: needs('minetestserver', 'sqlite3'), timeout: 180_000 },
  async (t) => {
    const cluster = await startCluster(t);
    const [portA, portB] = (await freePorts(2)) as [number, number];
    const live = cluster.agent('a').live(VOLUME);
    mkdirSync(join(live, 'worldmods', 'builder'), { recursive: true });
    writeFileSync(join(live, 'worldmods', 'builder', 'init.lua'), MOD);
    writeFileSync(join(live, 'worldmods', 'builder', 'mod.conf'), 'name = builder\n');
    writeFileSync(join(live, 'world.mt'), WORLD);
    const startedAt = performance.now();
    const first = server(live, cluster.folder, portA);
    t.teardown(() => first.end());
    await waitFor(
      'the world to be built',
      () => {
        if (!first.running) throw new Error(first.output.split('\n').slice(-10).join('\n'));
        // The server commits its mods' storage for the first time after ten seconds (m_mod_storage_save_timer).
        return last(first, 'built') >= 10 && performance.now() - startedAt > 12_000;
      },
      60_000,
    );
    await replicate(cluster, VOLUME);
    // When the dead server had built how much, to hold what the copy remembers against the announced loss.
    const history: { at: number; built: number }[] = [];
    const sampling = setInterval(
      () => history.push({ at: performance.now(), built: last(first, 'built') }),
      50,
    );
    t.teardown(() => clearInterval(sampling));
    await generationsPass(cluster, VOLUME, 4);
    await sleep(300);
    const conditions = (await cluster.agent('a').status(VOLUME))?.conditions ?? [];
    await killNode(cluster, 'a', first);
    clearInterval(sampling);
    const built = last(first, 'built');

    const decision = await decide(cluster, VOLUME);
    const asOf = performance.now() - (decision.dataLoss?.atMostMs ?? 0);
    const world = await promote(cluster, VOLUME, decision);
    for (const name of DATABASES) {
      if (!existsSync(join(world, name))) {
        t.not(name, 'map.sqlite', 'the map is there');
        continue;
      }
      t.equal((await must('sqlite3', [join(world, name), 'pragma integrity_check'])).trim(), 'ok', name);
    }
    const second = server(world, cluster.folder, portB);
    t.teardown(() => second.end());
    await waitFor(
      'the server on the copy',
      () => {
        if (!second.running) throw new Error(second.output.split('\n').slice(-10).join('\n'));
        return last(second, 'built') > 0;
      },
      60_000,
    );
    const remembers = last(second, 'remembers');
    const finds = last(second, 'finds');
    // The server itself commits once a second, and says every tenth block.
    const least = (history.findLast((one) => one.at <= asOf - 2000)?.built ?? 0) - 10;
    t.ok(
      remembers >= least && remembers <= built + 10,
      `it remembers ${remembers} of ${built}; by the announced loss of ${Math.round(decision.dataLoss?.atMostMs ?? 0)} ms at least ${least} (${JSON.stringify(conditions)})`,
    );
    // The map is saved once a second at most, so it may be some blocks behind the counter, never empty.
    t.ok(finds > 0 && finds <= remembers + 60, `it finds ${finds} blocks`);
    await second.end('SIGTERM');
  },
);
