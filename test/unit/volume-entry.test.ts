/** The role of a volume on one node, over parts that fail. */
import { mkdirSync, mkdtempSync, rmSync } from 'node:fs';
import { tmpdir } from 'node:os';
import { join } from 'node:path';
import t from 'tap';
import type { WatchStart } from '../../lib/agent/api.ts';
import { VolumeEntry, type VolumeParts } from '../../lib/agent/volume-entry.ts';
import type { VolumePaths } from '../../lib/core/parts.ts';
import { DEFAULT_POLICY } from '../../lib/core/policy.ts';
import { native } from '../../lib/native/load.ts';
import type { SourceVolume } from '../../lib/source/source-volume.ts';
import { openVolumeStore } from '../../lib/store/volume-store.ts';
import { silentLog } from '../source/support.ts';

t.test('a watch that could not begin is begun by the next request, the same one too', async (t) => {
  const base = mkdtempSync(join(tmpdir(), 'sv-entry-'));
  t.teardown(() => rmSync(base, { recursive: true }));
  const paths = Object.fromEntries(
    ['live', 'shadow', 'incoming', 'backups', 'state'].map((name) => [name, join(base, name)]),
  ) as unknown as VolumePaths;
  mkdirSync(paths.live);
  const store = openVolumeStore(paths.state, 'ns', 'vol', { syncFile: (p) => native.syncFile(p) });
  t.teardown(() => store.close());
  const calls: string[] = [];
  let fails = true;
  const source = {
    start: async () => {
      calls.push('start');
      if (fails) throw new Error('not now');
    },
    stop: async () => void calls.push('stop'),
    status: () => ({ role: 'active' }),
  } as unknown as SourceVolume;
  const parts = {
    source: () => source,
    startDelivery: () => void calls.push('delivery'),
    stopDelivery: async () => undefined,
    withTargets: (_entry: VolumeEntry, status: object) => status,
    sizeStatus: () => ({ bytes: null, enforced: null, reason: '' }),
    roleChanged: () => undefined,
  } as unknown as VolumeParts;
  const entry = new VolumeEntry({ namespace: 'ns', volume: 'vol' }, paths, store, silentLog(), parts);
  const watch: WatchStart = {
    namespace: 'ns',
    volume: 'vol',
    epoch: 1,
    targets: [],
    policy: DEFAULT_POLICY,
    sourceUrl: null,
    sourceWebdavUrl: null,
    bytes: null,
  } as unknown as WatchStart;
  await t.rejects(entry.start(watch), /not now/);
  t.same(calls.splice(0), ['start', 'stop'], 'and nothing of it goes on half begun');
  await t.rejects(entry.start(watch), /not now/);
  calls.length = 0;
  fails = false;
  await entry.start(watch);
  t.same(calls.splice(0).slice(-2), ['start', 'delivery']);
  await entry.start(watch);
  t.same(calls, [], 'one that runs is left alone');
});
