/** The steady beat from a source to its replicas: what it claims, and above all what it must not claim. */
import t from 'tap';
import type { Generation } from '../../lib/core/generation.ts';
import type { Target } from '../../lib/core/parts.ts';
import { Beats, type BeatVolume } from '../../lib/source/beats.ts';
import { lines, ManualClock, ManualHttp, turn } from './remote.ts';

interface Answer {
  generation: string | null;
  state: string;
  epoch: number;
}

function rig(settle?: () => Promise<void>) {
  const clock = new ManualClock();
  const http = new ManualHttp();
  const log = lines();
  const beats = new Beats({
    http,
    clock,
    log,
    node: 'a',
    bootId: 'boot',
    intervalMs: 1000,
    ...(settle ? { settle } : {}),
  });
  const target: Target = { url: 'http://b', token: 'secret', node: null };
  const volume = (name: string, generation: Generation | null = { epoch: 1, seq: 4 }) => {
    const v = {
      namespace: 'ns',
      volume: name,
      epoch: 1,
      state: { generation, complete: true, asOf: null as number | null },
      answers: [] as Answer[],
      look: () => v.state,
      answer: (_: Target, held: string | null, state: string, epoch: number) => {
        v.answers.push({ generation: held, state, epoch });
      },
    };
    return v satisfies BeatVolume;
  };
  const reply = (at: number, ...names: string[]) => ({
    node: 'b',
    clock: at,
    volumes: names.map((name) => ({
      namespace: 'ns',
      volume: name,
      epoch: 1,
      generation: '1-4',
      state: 'idle',
    })),
  });
  return { clock, http, log, beats, target, volume, reply };
}

t.test('one request carries all volumes of a pair, and the first one has no echo', async (t) => {
  const { clock, http, beats, target, volume, reply } = rig();
  const x = volume('x');
  const y = volume('y', null);
  beats.add(target, x);
  beats.add({ ...target }, y);
  await turn();
  const first = http.only();
  t.equal(first.request.url, 'http://b/replication/beat');
  t.equal(first.request.token, 'secret');
  t.equal(first.request.method, 'POST');
  t.ok((first.request.timeoutMs ?? 0) >= 2000 && (first.request.timeoutMs ?? 0) <= 5000, 'a hung one ends');
  await first.answer(reply(700, 'x'));
  await clock.pass(1000);
  const { body } = http.only();
  t.strictSame(body, {
    node: 'a',
    bootId: 'boot',
    volumes: [
      { namespace: 'ns', volume: 'x', epoch: 1, generation: '1-4', complete: true, echo: 700 },
      { namespace: 'ns', volume: 'y', epoch: 1, generation: null, complete: true, echo: 700 },
    ],
  });
  t.equal(first.body.volumes[0].echo, null);
  t.equal(target.node, 'b', 'the name is learnt from the answer');
  t.strictSame(x.answers, [{ generation: '1-4', state: 'idle', epoch: 1 }]);
  t.strictSame(y.answers, [], 'nothing is made up for a volume that the answer leaves out');
});

t.test(
  'the echo is from before the look: an answer that comes while it looks is for the next beat',
  async (t) => {
    const gates: (() => void)[] = [];
    const { clock, http, beats, target, volume, reply } = rig(
      () => new Promise<void>((resolve) => gates.push(resolve)),
    );
    const x = volume('x');
    beats.add(target, x);
    gates.shift()?.();
    await turn();
    await http.only().answer(reply(100, 'x'));
    await clock.pass(1000);
    t.strictSame(http.open(), [], 'nothing is said before the kernel has told everything');
    // an event that waited in the kernel is known now
    x.state = { generation: { epoch: 1, seq: 4 }, complete: false, asOf: null };
    gates.shift()?.();
    await turn();
    t.match(http.only().body.volumes[0], { complete: false, echo: 100 });
  },
);

t.test('a lost answer leaves the echo as it was: never fresher than true', async (t) => {
  const { clock, http, beats, target, volume, reply } = rig();
  beats.add(target, volume('x'));
  await turn();
  await http.only().answer(reply(100, 'x'));
  await clock.pass(1000);
  await http.only().lose();
  await clock.pass(1000);
  t.equal(http.only().body.volumes[0].echo, 100);
  t.equal(beats.echo(target), 100);
  t.equal(beats.lastAnswerMs(target), 2000);
});

t.test('a hung target gets no second request meanwhile, and delays no other target', async (t) => {
  const { clock, http, log, beats, target, volume, reply } = rig();
  const other: Target = { url: 'http://c', token: 's', node: null };
  const x = volume('x');
  beats.add(target, x);
  beats.add(other, x);
  await turn();
  for (let i = 0; i < 4; i++) {
    await http.only('//c').answer({ ...reply(i, 'x'), node: 'c' });
    await clock.pass(1000);
  }
  t.equal(http.open('//b').length, 1);
  t.equal(http.calls.filter((c) => c.request.url.includes('//b')).length, 1);
  for (let i = 0; i < 12; i++) {
    await http.only('//b').lose();
    await clock.pass(1000);
  }
  t.equal(log.all.filter((l) => l.text.includes('does not answer')).length, 1, 'said once, not each second');
  t.notMatch(JSON.stringify(log.all), /secret/);
});

t.test('when the events of the kernel cannot be had, nothing is called complete', async (t) => {
  const { http, beats, target, volume } = rig(() => Promise.reject(new Error('closed')));
  const x = volume('x');
  beats.add(target, x);
  await turn();
  t.match(http.only().body.volumes[0], { generation: '1-4', complete: false });
});

t.test('what is not complete now may have been at an earlier time: then that time is told', async (t) => {
  const { clock, http, beats, target, volume, reply } = rig();
  const x = volume('x');
  beats.add(target, x);
  await turn();
  await http.only().answer(reply(100, 'x'));
  x.state = { generation: { epoch: 1, seq: 4 }, complete: false, asOf: 40 };
  await clock.pass(1000);
  t.match(http.only().body.volumes[0], { generation: '1-4', complete: true, echo: 40 });
  await http.only().answer(reply(1100, 'x'));
  x.state = { generation: { epoch: 1, seq: 4 }, complete: true, asOf: 40 };
  await clock.pass(1000);
  t.match(http.only().body.volumes[0], { complete: true, echo: 1100 });
});

t.test('a volume that cannot be looked at concerns itself only', async (t) => {
  const { clock, http, beats, target, volume, reply } = rig();
  const x = volume('x');
  const broken = volume('broken');
  broken.look = () => {
    throw new Error('disk I/O error');
  };
  beats.add(target, broken);
  beats.add(target, x);
  await turn();
  await http.only().answer(reply(1, 'x'));
  await clock.pass(1000);
  t.strictSame(
    http.only().body.volumes.map((v: { volume: string }) => v.volume),
    ['x'],
  );
});

t.test('a callback that fails is no failed beat of the others', async (t) => {
  const { clock, http, beats, target, volume, reply } = rig();
  const bad = volume('bad');
  bad.answer = () => {
    throw new Error('bad');
  };
  const x = volume('x');
  beats.add(target, bad);
  beats.add(target, x);
  await turn();
  await http.only().answer(reply(1, 'bad', 'x'));
  await clock.pass(1000);
  t.equal(x.answers.length, 1);
  t.equal(http.only().body.volumes.length, 2);
});

t.test('the answer tells the epoch that the replica has seen', async (t) => {
  const { http, beats, target, volume, reply } = rig();
  const x = volume('x');
  beats.add(target, x);
  await turn();
  const answer = reply(1, 'x');
  Object.assign(answer.volumes[0] as object, { epoch: 2, generation: '2-9' });
  await http.only().answer(answer);
  t.strictSame(x.answers, [{ generation: '2-9', state: 'idle', epoch: 2 }]);
});

t.test('a removed volume is not spoken of any more; the last one ends the beats of the pair', async (t) => {
  const { clock, http, beats, target, volume, reply } = rig();
  const x = volume('x');
  const y = volume('y');
  beats.add(target, x);
  beats.add(target, y);
  await turn();
  await http.only().answer(reply(5, 'x', 'y'));
  beats.remove(target, x);
  await clock.pass(1000);
  t.strictSame(
    http.only().body.volumes.map((v: { volume: string }) => v.volume),
    ['y'],
  );
  beats.remove(target, y);
  await http.only().answer(reply(6, 'y'));
  await clock.pass(10_000);
  t.strictSame(http.open(), []);
  t.equal(clock.waiting, 0);
  t.equal(beats.echo(target), null, 'an echo of an earlier watch is none');
  beats.add(target, x);
  await turn();
  t.equal(http.only().body.volumes[0].echo, null);
});

t.test('stop in the middle of a beat cancels it and waits for its end', async (t) => {
  const { clock, http, beats, target, volume } = rig();
  beats.add(target, volume('x'));
  await turn();
  const call = http.only();
  await beats.stop();
  t.notOk(call.open);
  await clock.pass(10_000);
  t.equal(http.calls.length, 1);
  t.equal(clock.waiting, 0);
});

t.test("a target's name is asked for when no beat has told it yet", async (t) => {
  const { http, beats, target } = rig();
  const asked = beats.nodeOf(target, new AbortController().signal);
  await turn();
  t.strictSame(http.only().body.volumes, [], 'without claiming anything');
  await http.only().answer({ node: 'b', clock: 9, volumes: [] });
  t.equal(await asked, 'b');
  t.equal(beats.echo(target), null);
});
