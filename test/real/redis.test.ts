import { existsSync, mkdirSync, readdirSync } from 'node:fs';
import { connect } from 'node:net';
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
  run,
  sleep,
  startCluster,
  waitFor,
} from './harness.ts';

t.setTimeout(280_000);
const VOLUME = { namespace: 'real', volume: 'redis' };

function server(folder: string, port: number): Load {
  return new Load('redis-server', [
    ...['--port', String(port), '--bind', '127.0.0.1', '--dir', folder, '--daemonize', 'no', '--save', ''],
    ...['--appendonly', 'yes', '--appendfsync', 'everysec', '--aof-load-truncated', 'yes'],
    ...['--auto-aof-rewrite-percentage', '20', '--auto-aof-rewrite-min-size', '256kb'],
  ]);
}

const ask = async (port: number, ...command: string[]): Promise<string> =>
  (await must('redis-cli', ['-p', String(port), ...command], { limitMs: 10_000 })).trim();

const encode = (...words: string[]): string =>
  `*${words.length}\r\n${words.map((word) => `$${Buffer.byteLength(word)}\r\n${word}\r\n`).join('')}`;

/** Numbers pairs of keys that must match, inside MULTI, and counts what the server acknowledged. */
function writeLoad(port: number): { acknowledged(): { n: number; at: number }; stop(): void } {
  const socket = connect(port, '127.0.0.1');
  socket.on('error', () => {});
  let n = 0;
  let done = { n: 0, at: 0 };
  let text = '';
  socket.on('data', (chunk) => {
    text += chunk.toString('latin1');
    // Each transaction ends with the reply of EXEC: an array of the counter and two OKs.
    for (
      let match = /\*3\r\n:(\d+)\r\n\+OK\r\n\+OK\r\n/.exec(text);
      match !== null;
      match = /\*3\r\n:(\d+)\r\n\+OK\r\n\+OK\r\n/.exec(text)
    ) {
      done = { n: Number(match[1]), at: Date.now() };
      text = text.slice(match.index + match[0].length);
    }
  });
  const timer = setInterval(() => {
    for (let i = 0; i < 4; i++) {
      n += 1;
      const value = `${n}:${'v'.repeat(200 + (n % 300))}`;
      socket.write(
        encode('MULTI') +
          encode('INCR', 'counter') +
          encode('SET', `left:${n % 500}`, value) +
          encode('SET', `right:${n % 500}`, value) +
          encode('EXEC'),
      );
    }
  }, 10);
  return {
    acknowledged: () => done,
    stop: () => {
      clearInterval(timer);
      socket.destroy();
    },
  };
}

t.test(
  'redis with an append-only file that is being rewritten: the copy passes redis-check-aof and a server starts on it',
  { skip: needs('redis-server', 'redis-check-aof'), timeout: 180_000 },
  async (t) => {
    const cluster = await startCluster(t);
    const [portA, portB] = (await freePorts(2)) as [number, number];
    mkdirSync(cluster.agent('a').live(VOLUME), { recursive: true });
    const redis = server(cluster.agent('a').live(VOLUME), portA);
    t.teardown(() => redis.end());
    await waitFor('redis', async () => (await ask(portA, 'PING')) === 'PONG');
    const load = writeLoad(portA);
    t.teardown(() => load.stop());
    await replicate(cluster, VOLUME);
    let rewrites = 0;
    for (let i = 0; i < 4; i++) {
      await run('redis-cli', ['-p', String(portA), 'BGREWRITEAOF']);
      await generationsPass(cluster, VOLUME, 1);
      await sleep(200);
      rewrites = Number(
        /aof_rewrites:(\d+)/.exec(await ask(portA, 'INFO', 'stats', 'persistence'))?.[1] ?? 0,
      );
    }
    t.ok(rewrites >= 2, `${rewrites} rewrites ended while it replicated`);

    await killNode(cluster, 'a', redis);
    const written = load.acknowledged();
    load.stop();
    t.ok(written.n > 500, `${written.n} transactions were acknowledged`);
    const decision = await decide(cluster, VOLUME);
    const folder = await promote(cluster, VOLUME, decision);
    const aof = join(folder, 'appendonlydir');
    t.ok(
      existsSync(join(aof, 'appendonly.aof.manifest')),
      `the manifest is there: ${readdirSync(folder)} ${existsSync(aof) ? readdirSync(aof) : ''}`,
    );
    const checked = await run('redis-check-aof', [join(aof, 'appendonly.aof.manifest')]);
    t.equal(checked.code, 0, `redis-check-aof: ${checked.stdout.split('\n').slice(-6).join(' ')}`);

    const again = server(folder, portB);
    t.teardown(() => again.end());
    await waitFor('redis on the copy', async () => {
      if (!again.running) throw new Error(again.output.split('\n').slice(-5).join('\n'));
      return (await ask(portB, 'PING')) === 'PONG';
    });
    const counter = Number(await ask(portB, 'GET', 'counter'));
    t.ok(
      counter > 0 && counter <= written.n + 400,
      `the copy counts to ${counter}, acknowledged were ${written.n}`,
    );
    const promised = decision.dataLoss?.atMostMs ?? 0;
    // 400 transactions a second at most were made, so the count tells the time that is missing.
    t.ok(
      (written.n - counter) / 400 <= promised / 1000 + 1,
      `${written.n - counter} of ${written.n} are lost, at most ${Math.round(promised)} ms were announced`,
    );
    let torn = 0;
    for (let i = 0; i < 500; i++) {
      const [left, right] = (await ask(portB, 'MGET', `left:${i}`, `right:${i}`)).split('\n');
      if (left !== right) torn += 1;
    }
    t.equal(torn, 0, 'both halves of every transaction');
  },
);
