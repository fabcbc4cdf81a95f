/** Run by crash.test.ts: brings a replica from 1-1 to 1-2 and dies at SIMPLE_VOLUME_CRASH_AT. */
import { change } from './crash-change.ts';
import { settled, world } from './support.ts';

const folder = process.argv[2] as string;
const w = await world({ folder });
await w.source.seal();
change(w.source);
await w.source.seal();
w.replica.sync(w.request({ full: process.argv[3] === 'full', echo: 123 }));
await settled(w.replica);
process.exit(w.replica.status().state === 'idle' ? 0 : 1);
