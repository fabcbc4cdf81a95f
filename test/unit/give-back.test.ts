// Memory that nobody uses goes back to the system when work is over.
import { execFile } from 'node:child_process';
import path from 'node:path';
import { promisify } from 'node:util';
import t from 'tap';
import { GiveBack } from '../../lib/agent/give-back.ts';

function setUp() {
  const state = { trims: 0, busy: false };
  const memory = new GiveBack({
    trim: async () => {
      state.trims++;
    },
    busy: () => state.busy,
  });
  return { state, memory };
}

t.test('nothing done, nothing given back', async (t) => {
  const { state, memory } = setUp();
  for (let i = 0; i < 30; i++) await memory.look();
  t.equal(state.trims, 0);
});

t.test('given back once, at the first look that finds nothing new', async (t) => {
  const { state, memory } = setUp();
  memory.worked();
  await memory.look();
  t.equal(state.trims, 0, 'work was done right before');
  await memory.look();
  t.equal(state.trims, 1);
  for (let i = 0; i < 30; i++) await memory.look();
  t.equal(state.trims, 1);
  memory.worked();
  await memory.look();
  await memory.look();
  t.equal(state.trims, 2);
});

t.test('a long batch is waited for', async (t) => {
  const { state, memory } = setUp();
  memory.worked();
  state.busy = true;
  for (let i = 0; i < 6; i++) await memory.look();
  t.equal(state.trims, 0);
  state.busy = false;
  await memory.look();
  t.equal(state.trims, 1);
});

t.test('under steady work it happens at every twelfth look', async (t) => {
  const { state, memory } = setUp();
  for (let i = 0; i < 120; i++) {
    memory.worked();
    await memory.look();
  }
  t.equal(state.trims, 10);
});

t.test('the addon gives back freed pages in the middle of the heap', async (t) => {
  // Every 16th filter stays, so that the heap cannot shrink from its end.
  const body = `
    const { readFileSync } = require('node:fs');
    const { setTimeout: pause } = require('node:timers/promises');
    const native = require(${JSON.stringify(path.join(import.meta.dirname, '../../build/Release/simple_volume.node'))});
    const anonymous = () => Number(/Anonymous:\\s+(\\d+)/.exec(readFileSync('/proc/self/smaps_rollup', 'utf8'))[1]);
    const patterns = Array.from({ length: 60 }, (_, i) => Buffer.from('folder-' + i + '/' + 'x'.repeat(200)));
    const make = () => Array.from({ length: 2000 }, () => native.compileFilter(patterns, []));
    (async () => {
      let all = make();
      all = all.filter((_, i) => i % 16 === 0);
      await pause(50);
      gc();
      await pause(200);
      const before = anonymous();
      await native.trimMemory();
      console.log(before - anonymous(), all.length);
    })();`;
  const { stdout } = await promisify(execFile)(process.execPath, ['--expose-gc', '-e', body], {
    env: { ...process.env, MALLOC_ARENA_MAX: '1' },
  });
  const [freed = 0, kept] = stdout.split(' ').map(Number);
  t.equal(kept, 125);
  t.ok(freed > 20 * 1024, `${freed} KiB of about 35 MiB`);
});
