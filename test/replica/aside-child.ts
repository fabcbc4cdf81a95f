/** Run by returning.test.ts: a returning node that dies while its tree goes to the backups. */
import { settled, world } from './support.ts';

const w = await world({ folder: process.argv[2] as string });
await w.source.seal();
w.source.promote(2);
await w.source.seal();
w.replica.sync(w.request());
await settled(w.replica);
process.exit(0);
