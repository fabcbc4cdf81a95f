// Finds and loads the addon: beside the bundle when shipped (dist/simple_volume.node), else build/Release of the
// checkout.
import { existsSync } from 'node:fs';
import { createRequire } from 'node:module';
import path from 'node:path';
import type { Native } from './types.ts';

function locate(): string {
  const here = import.meta.dirname;
  const candidates = [
    path.join(here, 'simple_volume.node'),
    path.join(here, '../../build/Release/simple_volume.node'),
  ];
  const found = candidates.find((file) => existsSync(file));
  if (found === undefined) {
    throw new Error(
      `the native addon is not built (looked for ${candidates.join(', ')}): run \`npm install\``,
    );
  }
  return found;
}

/** The addon. Loaded on import; throws when it is not built. */
export const native = createRequire(import.meta.url)(locate()) as Native;

/** The addon, for those who take it as a value. */
export function loadNative(): Native {
  return native;
}
