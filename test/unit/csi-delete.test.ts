/** DeleteVolume against a played cluster: what real agents show only by chance. */
import t from 'tap';
import type { VolumeCluster } from '../../csi/controller/cluster.ts';
import { ControllerService } from '../../csi/controller/service.ts';
import { SimpleVolumeError } from '../../lib/core/errors.ts';
import type { Logger } from '../../lib/core/parts.ts';

const quiet: Logger = { debug() {}, info() {}, warn() {}, error() {}, child: () => quiet };

/** One node whose watch is begun anew so many times just before the volume is removed. */
function played(begun: number, refusal: 'VOLUME_ACTIVE' | 'VOLUME_IN_USE' = 'VOLUME_ACTIVE') {
  const log: string[] = [];
  let watched = true;
  let there = true;
  const cluster: Partial<VolumeCluster> = {
    problem: () => null,
    poolOf: () => 'default',
    keeps: async () => null,
    lookup: async () => ({
      holders: there ? [{ pool: 'default', node: 'a', role: 'active', epoch: 1, bytes: 1, watched }] : [],
      silent: [],
    }),
    stopWatch: async () => {
      log.push('stop');
      watched = false;
    },
    remove: async () => {
      log.push('remove');
      if (begun-- > 0) {
        watched = true;
        throw new SimpleVolumeError(refusal, 'no');
      }
      there = false;
    },
  };
  const service = new ControllerService(cluster as VolumeCluster, quiet);
  return { log, delete: () => service.delete({ volume_id: 'ns/pvc-1', secrets: {} }) };
}

t.test('a watch that a decision begins between stop and removal is stopped too', async (t) => {
  for (const begun of [0, 1, 2]) {
    const one = played(begun);
    t.strictSame(await one.delete(), {});
    t.strictSame(one.log, Array.from({ length: begun + 1 }, () => ['stop', 'remove']).flat());
  }
});

t.test('one that is begun again and again, or a volume in use, is refused', async (t) => {
  const again = played(100);
  await t.rejects(again.delete(), { code: 'VOLUME_ACTIVE' });
  t.equal(again.log.length, 6);
  const used = played(100, 'VOLUME_IN_USE');
  await t.rejects(used.delete(), { code: 'VOLUME_IN_USE' });
  t.strictSame(used.log, ['stop', 'remove'], 'nothing is tried again');
});
