/** The addon for arm64, built on this machine from the same sources: what cmake-js is for. */
import { execFile } from 'node:child_process';
import { mkdtempSync, readFileSync, rmSync } from 'node:fs';
import { tmpdir } from 'node:os';
import { join } from 'node:path';
import { fileURLToPath } from 'node:url';
import { promisify } from 'node:util';
import t from 'tap';
import { programPath } from '../packages.ts';

const root = fileURLToPath(new URL('../..', import.meta.url));
const compiler = programPath('aarch64-linux-gnu-g++');
/** e_machine of AArch64 (elf.h). */
const EM_AARCH64 = 183;

t.test(
  'cmake-js builds the addon for arm64 without a warning',
  { skip: compiler === null && 'aarch64-linux-gnu-g++ is not installed (Debian: g++-aarch64-linux-gnu)' },
  async (t) => {
    const out = mkdtempSync(join(tmpdir(), 'simple-volume-arm64-'));
    t.teardown(() => rmSync(out, { recursive: true, force: true }));
    const cmakeJs = join(root, 'node_modules/cmake-js/bin/cmake-js');
    const args = ['compile', '-d', 'native', '-O', out, '-a', 'arm64'];
    try {
      await promisify(execFile)(
        process.execPath,
        [cmakeJs, ...args, '--CDCMAKE_TOOLCHAIN_FILE=arm64.cmake'],
        { cwd: root, maxBuffer: 16 * 1024 * 1024 },
      );
    } catch (error) {
      const { stdout, stderr } = error as { stdout: string; stderr: string };
      t.fail(`${stdout}\n${stderr}`.slice(-4000));
      return;
    }
    const elf = readFileSync(join(out, 'Release/simple_volume.node'));
    t.equal(elf.toString('latin1', 1, 4), 'ELF');
    t.equal(elf.readUInt16LE(18), EM_AARCH64);
    t.ok(elf.includes('napi_register_module_v1'), 'it is an addon');
  },
);
