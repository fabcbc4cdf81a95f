// The job pool of the addon: errors, teardown with work under way, and that it keeps nobody waiting.
import { execFile } from 'node:child_process';
import { createRequire } from 'node:module';
import path from 'node:path';
import { promisify } from 'node:util';
import t from 'tap';

const addonFile = path.join(import.meta.dirname, '../../build/cpp/simple_volume_test.node');
const addon = createRequire(import.meta.url)(addonFile) as {
  run(milliseconds: number, mode: string): Promise<Buffer>;
};

/** Runs a snippet in a process of its own, in which `run` is the addon's. */
async function script(body: string): Promise<{ code: number; stdout: string; stderr: string }> {
  const source = `const { run } = require(${JSON.stringify(addonFile)});\n${body}`;
  try {
    const done = await promisify(execFile)(process.execPath, ['-e', source], { timeout: 30_000 });
    return { code: 0, ...done };
  } catch (error) {
    const failed = error as { code: number; stdout: string; stderr: string };
    return { code: failed.code, stdout: failed.stdout, stderr: failed.stderr };
  }
}

t.test('a job answers with what it made', async (t) => {
  t.equal((await addon.run(0, 'ok')).length, 100_000);
});

t.test('an errno of the engine arrives with code, errno, syscall and the path as bytes', async (t) => {
  await t.rejects(addon.run(0, 'errno'), {
    code: 'ENOSPC',
    errno: -28,
    syscall: 'openat2',
    path: Buffer.from([0x61, 0xff]),
    message: "ENOSPC: No space left on device, openat2 'a\\xff'",
  });
});

t.test('an engine code, memory exhaustion and a failing finish reject too', async (t) => {
  await t.rejects(addon.run(0, 'engine'), { code: 'FORMAT_INVALID', message: 'not a record' });
  await t.rejects(addon.run(0, 'memory'), { code: 'ENOMEM' });
  await t.rejects(addon.run(0, 'finish'), { name: 'TypeError', message: 'finish failed' });
});

t.test('two jobs run at once', async (t) => {
  const started = performance.now();
  await Promise.all([addon.run(150, 'ok'), addon.run(150, 'ok')]);
  t.ok(performance.now() - started < 290, 'two jobs of 150 ms take less than their sum');
});

t.test('a pending job keeps the process alive, an idle pool does not', async (t) => {
  const done = await script("run(200, 'ok').then(() => console.log('settled'))");
  t.match(done, { code: 0, stdout: 'settled\n' });
});

t.test('process.exit with jobs under way ends at once with its code', async (t) => {
  const started = performance.now();
  const done = await script(
    "for (let i = 0; i < 8; i++) run(5000, 'ok'); setTimeout(() => process.exit(7), 50)",
  );
  t.equal(done.code, 7, done.stderr);
  t.ok(performance.now() - started < 4000, 'it did not wait for the jobs');
});

t.test('workers that are terminated while their jobs run and settle harm nobody', async (t) => {
  const done = await script(`
    const { Worker } = require('node:worker_threads');
    const source = \`const { run } = require(${JSON.stringify(addonFile)});
      (async () => { for (;;) { run(1, 'errno').catch(() => {}); run(20, 'ok'); await run(2, 'ok'); } })();\`;
    (async () => {
      for (let i = 0; i < 15; i++) {
        const worker = new Worker(source, { eval: true });
        await new Promise((resolve) => setTimeout(resolve, 60));
        await worker.terminate();
      }
      console.log((await run(1, 'ok')).length);
    })();`);
  t.match(done, { code: 0, stdout: '100000\n' }, done.stderr);
});
