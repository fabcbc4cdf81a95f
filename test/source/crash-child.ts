/** Seals a prepared change and dies where SIMPLE_VOLUME_CRASH_AT says. Arguments: base folder. */
import { makeRig, QUICK } from './support.ts';

const rig = makeRig({ base: process.argv[2] as string });
// A reader keeps the generation, so that replaced files are set aside too.
if (process.argv[3] === 'pinned') await rig.source.open();
await rig.source.start(QUICK, 1);
await rig.source.flush();
await rig.source.stop();
await rig.watcher.close();
process.exit(0);
