// The one list of what the addon is made of, for binding.gyp, CMake and the stamp of install.mjs:
//   node native/sources.mjs [arch]      prints the sources of the addon, one a line, relative to the repository
// A new file under native/addon, native/engine or native/vendor is picked up by being there.
import { readdirSync } from 'node:fs';
import path from 'node:path';
import { fileURLToPath } from 'node:url';

export const root = path.dirname(path.dirname(fileURLToPath(import.meta.url)));

/** All files below a folder of the repository, relative to the repository, sorted. */
export function filesBelow(folder) {
  const found = [];
  const walk = (relative) => {
    for (const entry of readdirSync(path.join(root, relative), { withFileTypes: true })) {
      const name = `${relative}/${entry.name}`;
      if (entry.isDirectory()) walk(name);
      else if (entry.isFile()) found.push(name);
    }
  };
  try {
    walk(folder);
  } catch (error) {
    if (error.code !== 'ENOENT') throw error;
  }
  return found.sort();
}

/** The addon's sources for a CPU ("x64" or "arm64", as process.arch has it): vendored code has files for one only. */
export function addonSources(arch) {
  const foreign = arch === 'arm64' ? /x86|sse|avx/i : /neon/i;
  return [
    ...filesBelow('native/addon').filter((name) => name.endsWith('.cc')),
    ...filesBelow('native/engine').filter((name) => name.endsWith('.cc')),
    ...filesBelow('native/vendor').filter(
      (name) => /\.(c|cc|S)$/.test(name) && !foreign.test(path.basename(name)),
    ),
  ];
}

if (process.argv[1] && path.resolve(process.argv[1]) === fileURLToPath(import.meta.url)) {
  console.log(addonSources(process.argv[2] ?? process.arch).join('\n'));
}
