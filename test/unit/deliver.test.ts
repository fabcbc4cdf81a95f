/** Telling replicas of generations: each target in its own lane, nothing claimed that is not held. */
import t from 'tap';
import type { Generation } from '../../lib/core/generation.ts';
import type { Target } from '../../lib/core/parts.ts';
import { DEFAULT_POLICY } from '../../lib/core/policy.ts';
import type { Beats } from '../../lib/source/beats.ts';
import { Delivery } from '../../lib/source/deliver.ts';
import { lines, ManualClock, ManualHttp, turn } from './remote.ts';

const g = (seq: number, epoch = 1): Generation => ({ epoch, seq });

function rig(options: { epoch?: number; confirmedReplicas?: number; names?: (string | null)[] } = {}) {
  const { epoch = 1, confirmedReplicas = 1, names = ['b', 'c'] } = options;
  const clock = new ManualClock();
  const http = new ManualHttp();
  const log = lines();
  const echoes = new Map<string, number>();
  const asked: { target: Target; signal: AbortSignal; tell(name: string): void; fail(e: Error): void }[] = [];
  const beats = {
    echo: (target: Target) => echoes.get(target.url) ?? null,
    lastAnswerMs: () => 12,
    nodeOf: (target: Target, signal: AbortSignal) =>
      new Promise<string>((tell, fail) => asked.push({ target, signal, tell, fail })),
  } as unknown as Beats;
  const targets = names.map((node, i) => ({ url: `http://${'bcd'[i]}`, token: `token-${i}`, node }));
  const delivery = new Delivery(
    {
      http,
      clock,
      log,
      beats,
      node: 'a',
      grant: (scope) => `grant of ${scope.node} for ${scope.volume} in ${scope.epoch}`,
      random: () => 1,
    },
    {
      namespace: 'ns',
      volume: 'vol',
      epoch,
      url: 'http://a:1',
      webdavUrl: 'http://a:2',
      targets,
      policy: { ...DEFAULT_POLICY, confirmedReplicas },
    },
  );
  const taken = { state: 'pulling', generation: null };
  return { clock, http, log, echoes, asked, delivery, targets, taken };
}

t.test('every target is told, each with a grant of its own', async (t) => {
  const { http, delivery, taken } = rig();
  delivery.sealed(g(1), 1);
  await turn();
  t.equal(http.open().length, 2);
  const { request, body } = http.only('//b');
  t.equal(request.url, 'http://b/replication/sync-batch');
  t.equal(request.token, 'token-0');
  t.match(body, {
    namespace: 'ns',
    volume: 'vol',
    epoch: 1,
    generation: '1-1',
    echo: null,
    source: { url: 'http://a:1', webdavUrl: 'http://a:2', node: 'a', grant: 'grant of b for vol in 1' },
  });
  t.equal(http.only('//c').body.source.grant, 'grant of c for vol in 1');
  t.notMatch(JSON.stringify(body), /token-/, 'no token of an agent travels');
  await http.only('//b').answer(taken);
  t.match(delivery.status(), [
    { node: 'b', state: 'pulling', confirmed: null, lastError: null },
    { node: 'c', state: 'unknown', confirmed: null },
  ]);
});

t.test('a target that hangs delays nobody and is told only the newest when it is back', async (t) => {
  const { clock, http, delivery, taken } = rig();
  for (let seq = 1; seq <= 5; seq++) {
    delivery.sealed(g(seq), seq);
    await turn();
    await http.only('//c').answer(taken);
    delivery.holds('c', g(seq), 'idle');
    await clock.pass(100);
  }
  t.equal(http.only('//b').body.generation, '1-1', 'one request at a time');
  t.ok((http.only('//b').request.timeoutMs ?? Infinity) <= 10_000, 'and it ends');
  await http.only('//b').answer(taken);
  t.equal(http.only('//b').body.generation, '1-5', '2 to 4 are not told: the difference has them');
  await http.only('//b').answer(taken);
  t.strictSame(http.open(), []);
  t.strictSame(delivery.holders(g(5)), ['c']);
});

t.test('a lost answer is tried again, later and later, at most every 30 s, and never given up', async (t) => {
  const { clock, http, log, delivery, taken } = rig({ names: ['b'] });
  delivery.sealed(g(1), 1);
  await turn();
  const pauses: number[] = [];
  for (let i = 0; i < 12; i++) {
    await http.only().lose();
    t.match(delivery.status(), [{ state: 'unreachable', lastError: 'no answer' }]);
    const from = clock.boot();
    while (http.open().length === 0) await clock.pass(50);
    pauses.push(clock.boot() - from);
  }
  t.strictSame(pauses.slice(0, 4), [250, 500, 1000, 2000]);
  t.equal(pauses.at(-1), 30_000);
  t.equal(log.all.filter((l) => l.level === 'warn').length, 1, 'one line, not one per attempt');
  t.notMatch(JSON.stringify(log.all), /token-|grant/);
  await http.only().answer(taken);
  t.match(delivery.status(), [{ state: 'pulling', lastError: null }]);
});

t.test('a generation that is sealed while a failed target waits goes out at once', async (t) => {
  const { clock, http, delivery, taken } = rig({ names: ['b'] });
  delivery.sealed(g(1), 1);
  await turn();
  await http.only().refuse('VOLUME_IN_USE');
  t.match(delivery.status(), [{ state: 'refused' }]);
  delivery.sealed(g(2), 2);
  await turn();
  t.equal(http.only().body.generation, '1-2');
  await http.only().answer(taken);
  await clock.pass(60_000);
  t.strictSame(http.open(), [], 'and the old attempt is not made once more');
});

t.test('late and double confirmations take nothing back and add nothing', async (t) => {
  const { delivery } = rig({ names: ['b', 'c'], confirmedReplicas: 2 });
  delivery.sealed(g(2), 1);
  await turn();
  delivery.holds('b', g(2), 'idle');
  delivery.holds('b', g(2), 'idle');
  t.equal(delivery.delivered(), null, 'twice the same node is one copy');
  delivery.holds('c', g(2), 'idle');
  t.strictSame(delivery.delivered(), g(2));
  delivery.holds('b', g(1), 'idle');
  t.strictSame(delivery.holders(g(2)), ['b', 'c'], 'an older confirmation that was late');
  delivery.holds('stranger', g(9), 'idle');
  t.strictSame(delivery.holders(g(9)), []);
});

t.test('a beat tells what is held now, also when that is less', async (t) => {
  const { delivery, targets } = rig({ names: ['b'] });
  delivery.sealed(g(3), 1);
  await turn();
  const [b] = targets as [Target];
  delivery.beat(b, '1-3', 'idle', 1);
  t.strictSame(delivery.holders(g(3)), ['b']);
  delivery.beat(b, '1-2', 'behind', 1);
  t.strictSame(delivery.holders(g(3)), []);
  t.strictSame(delivery.holders(g(2)), ['b']);
  delivery.beat(b, null, 'empty', 1);
  t.strictSame(delivery.holders(g(1)), [], 'a disk that was replaced');
});

t.test('an idle replica that lags is told again, a working one is not', async (t) => {
  const { clock, http, delivery, targets, taken } = rig({ names: ['b'] });
  const [b] = targets as [Target];
  delivery.sealed(g(3), 1);
  await turn();
  await http.only().answer(taken);
  await clock.pass(6000);
  for (const state of ['pulling', 'verifying', 'applying']) delivery.beat(b, '1-2', state, 1);
  await turn();
  t.strictSame(http.open(), []);
  delivery.beat(b, '1-2', 'idle', 1);
  delivery.beat(b, '1-2', 'idle', 1);
  await turn();
  t.equal(http.only().body.generation, '1-3', 'once');
  await http.only().answer(taken);
  delivery.beat(b, '1-2', 'idle', 1);
  await turn();
  t.strictSame(http.open(), [], 'not before it had time to begin');
  delivery.beat(b, '1-3', 'idle', 1);
  await clock.pass(6000);
  delivery.beat(b, '1-3', 'idle', 1);
  await turn();
  t.strictSame(http.open(), [], 'nor when it has everything');
});

t.test('A14: a newer epoch ends this writer: by a refusal, and by the answer to a beat', async (t) => {
  const { clock, http, delivery, targets } = rig();
  const [, c] = targets as [Target, Target];
  delivery.sealed(g(7), 1);
  await turn();
  await http.only('//b').refuse('EPOCH_OLD');
  t.ok(delivery.superseded());
  await clock.pass(120_000);
  t.strictSame(http.open('//b'), [], 'nothing more is sent there');
  const idle = rig();
  idle.delivery.resume(g(7));
  await turn();
  for (const call of idle.http.open()) await call.answer({ state: 'idle', generation: '1-7' });
  t.notOk(idle.delivery.superseded());
  idle.delivery.beat(idle.targets[1] as Target, '2-9', 'idle', 2);
  t.ok(idle.delivery.superseded(), 'a volume at rest learns it too');
  t.strictSame(idle.delivery.holders(g(7)), [], 'a generation of another line is none of ours');
  t.match(idle.delivery.status()[1], { state: 'superseded' });
  idle.delivery.holds('c', g(9, 2), 'idle');
  t.strictSame(idle.delivery.holders(g(7)), []);
  delivery.beat(c, '1-7', 'idle', 1);
  t.strictSame(delivery.holders(g(7)), ['c'], 'the others keep what they said');
});

t.test('what an older epoch left on a replica does not count as held', async (t) => {
  const { delivery, targets } = rig({ epoch: 2, names: ['b'] });
  delivery.sealed(g(41, 2), 1);
  delivery.beat(targets[0] as Target, '1-50', 'idle', 1);
  t.strictSame(delivery.holders(g(41, 2)), []);
  t.notOk(delivery.superseded());
});

t.test('the echo of a batch is of the cut that it holds everything of', async (t) => {
  const { http, echoes, delivery, taken } = rig({ names: ['b'] });
  echoes.set('http://b', 100);
  delivery.cut(1);
  echoes.set('http://b', 200); // answered while the batch was being staged
  delivery.sealed(g(1), 1);
  await turn();
  t.equal(http.only().body.echo, 100);
  await http.only().answer(taken);
  echoes.set('http://b', 300);
  delivery.cut(2);
  echoes.set('http://b', 400);
  delivery.cut(3);
  // a file did not hold still: everything is there as of cut 2 only
  delivery.sealed(g(2), 2);
  await turn();
  t.equal(http.only().body.echo, 300);
  await http.only().answer(taken);
  delivery.sealed(g(3), 1);
  await turn();
  t.equal(http.only().body.echo, null, 'a cut that is forgotten says nothing');
  await http.only().answer(taken);
  delivery.resume(g(4));
  await turn();
  t.equal(http.only().body.echo, null, 'neither does a start: nobody knows when it was cut');
});

t.test('generation and echo of one request are of one moment', async (t) => {
  const { http, echoes, asked, delivery, taken } = rig({ names: [null] });
  echoes.set('http://b', 100);
  delivery.cut(1);
  delivery.sealed(g(1), 1);
  await turn();
  echoes.set('http://b', 900);
  delivery.cut(2);
  delivery.sealed(g(2), 2);
  asked[0]?.tell('b');
  await turn();
  t.match(http.only().body, { generation: '1-1', echo: 100 });
  await http.only().answer(taken);
  t.match(http.only().body, { generation: '1-2', echo: 900 });
});

t.test('the clock at a cut can be asked for until a later one counts', async (t) => {
  const { echoes, delivery, targets } = rig({ names: ['b'] });
  const [b] = targets as [Target];
  t.equal(delivery.echoAt(b, 1), null);
  echoes.set('http://b', 100);
  delivery.cut(1);
  echoes.set('http://b', 200);
  delivery.cut(2);
  t.equal(delivery.echoAt(b, 1), 100);
  t.equal(delivery.echoAt(b, null), null);
  delivery.sealed(g(1), 2);
  t.equal(delivery.echoAt(b, 1), null);
  t.equal(delivery.echoAt(b, 2), 200);
});

t.test('a cut before any answer of the replica gives no echo', async (t) => {
  const { http, echoes, delivery } = rig({ names: ['b'] });
  delivery.cut(1);
  echoes.set('http://b', 50);
  delivery.sealed(g(1), 1);
  await turn();
  t.equal(http.only().body.echo, null);
});

t.test('a file that is behind for ever does not make memory grow', async (t) => {
  const { http, echoes, delivery } = rig({ names: ['b'] });
  for (let n = 1; n <= 5000; n++) {
    echoes.set('http://b', n);
    delivery.cut(n);
  }
  delivery.sealed(g(1), 1);
  await turn();
  t.equal(http.only().body.echo, null, 'cut 1 is forgotten; that costs freshness, not truth');
});

t.test('waitForHolders ends with the holders, at its time, or with the delivery', async (t) => {
  const { clock, delivery } = rig();
  delivery.sealed(g(1), 1);
  await turn();
  const both = delivery.waitForHolders(g(1), 2, 60_000);
  delivery.holds('b', g(1), 'idle');
  await clock.pass(100);
  delivery.holds('c', g(2), 'idle');
  t.strictSame(await both, ['b', 'c'], 'a newer one counts');
  const late = delivery.waitForHolders(g(2), 2, 3000);
  await clock.pass(3000);
  t.strictSame(await late, ['c']);
  t.strictSame(await delivery.waitForHolders(g(2), 2, 0), ['c'], 'with no time it only looks');
  const stopped = delivery.waitForHolders(g(9), 1, 60_000);
  delivery.stop();
  t.strictSame(await stopped, []);
});

t.test('stop in the middle: running requests are cancelled, nothing is sent afterwards', async (t) => {
  const { clock, http, asked, log, delivery } = rig({ names: ['b', null] });
  delivery.sealed(g(1), 1);
  await turn();
  const call = http.only('//b');
  delivery.stop();
  await turn();
  t.notOk(call.open, 'cancelled');
  t.ok(asked[0]?.signal.aborted);
  asked[0]?.fail(new Error('cancelled'));
  delivery.sealed(g(2), 2);
  await clock.pass(60_000);
  t.equal(http.calls.length, 1);
  t.equal(clock.waiting, 0);
  t.strictSame(log.all, [], 'a stop is no failure');
});

t.test('with no confirmation wanted the newest counts as delivered', async (t) => {
  const { delivery } = rig({ confirmedReplicas: 0 });
  t.equal(delivery.delivered(), null);
  delivery.sealed(g(3), 1);
  t.strictSame(delivery.delivered(), g(3));
});

t.test('C17: what one target answers changes nothing of what another one failed at', async (t) => {
  const { http, delivery, taken } = rig();
  delivery.sealed(g(1), 1);
  await turn();
  await http.only('//b').refuse('INTERNAL', 500);
  await http.only('//c').answer(taken);
  delivery.holds('c', g(1), 'idle');
  t.match(delivery.status(), [
    { node: 'b', confirmed: null, lastError: /refused: INTERNAL/ },
    { node: 'c', confirmed: '1-1', lastError: null },
  ]);
  // and the other way round
  delivery.sealed(g(2), 2);
  await turn();
  await http.only('//b').answer(taken);
  await http.only('//c').refuse('INTERNAL', 500);
  t.match(delivery.status(), [{ lastError: null }, { confirmed: '1-1', lastError: /refused/ }]);
});
