/** The CSI project's own conformance suite against the real services, a real agent and real bind mounts. */
import { spawn } from 'node:child_process';
import { existsSync, readFileSync, writeFileSync } from 'node:fs';
import path from 'node:path';
import t from 'tap';
import { sleep } from '../../lib/local/cluster.ts';
import { kubeProgram, noKube } from '../kube/harness/programs.ts';
import { inOwnMounts, mounts, noMounts, POOL, TestCsi } from './support.ts';

const why = noKube(['csi-sanity']) || noMounts();
if (!why) await inOwnMounts(import.meta.filename);
t.setTimeout(170_000);

/**
 * What the suite leaves out because the driver does not claim it, each with the reason. Anything else that is skipped
 * fails the test.
 */
const SKIPS: readonly { what: RegExp; why: string }[] = [
  { what: /snapshot|GroupController|Group/i, why: 'no snapshots: backups and replicas are another thing' },
  {
    what: /ListVolumes|ControllerGetVolume |ListVolumeHealth|ControllerGetVolumeHealth/,
    why: 'a list would be a guess while a node is away, so none is offered',
  },
  {
    what: /Controller ?Publish(Volume)?|ControllerUnpublishVolume/,
    why: 'nothing is attached: NodePublishVolume asks who is active',
  },
  { what: /Modify ?Volume/i, why: 'no mutable parameters' },
  { what: /NodeStageVolume|NodeUnstageVolume|NodeStage/, why: 'one step is enough for a directory' },
  { what: /NodeGetStorageHealth/, why: "the health of a pool is the agent's metrics and readyz" },
  { what: /source volume|clone|volume content source/i, why: 'a volume cannot be made from another one' },
  { what: /volume limit|maximum number of volumes/i, why: 'a node has no limit of volumes' },
];

interface Report {
  SpecReports: {
    State: string;
    LeafNodeText: string;
    LeafNodeType: string;
    ContainerHierarchyTexts: string[] | null;
    Failure?: { Message: string };
  }[];
}

t.test('csi-sanity passes, and what it skips is not claimed', { skip: why }, async (t) => {
  const csi = await TestCsi.start(['a']);
  const node = csi.node('a');
  const parameters = path.join(csi.folder, 'parameters.yaml');
  writeFileSync(parameters, `csi.storage.k8s.io/pvc/namespace: sanity\npool: ${POOL}\n`);
  const report = path.join(csi.folder, 'report.json');
  // The controller's first decision for each volume that was made.
  let ended = false;
  const decides = (async () => {
    const { readdirSync } = await import('node:fs');
    const base = path.join(node.agent.pool, 'sanity');
    while (!ended) {
      for (const volume of existsSync(base) ? readdirSync(base) : [])
        if (!csi.records.has(`sanity/${volume}`))
          await csi.activate({ namespace: 'sanity', volume }, 'a').catch(() => undefined);
      await sleep(50);
    }
  })();
  const child = spawn(
    kubeProgram('csi-sanity') as string,
    [
      `--csi.endpoint=unix://${node.endpoint}`,
      `--csi.controllerendpoint=unix://${csi.endpoint}`,
      `--csi.mountdir=${node.kubelet}/mnt`,
      `--csi.stagingdir=${node.kubelet}/stage`,
      `--csi.testvolumesize=10485760`,
      `--csi.testvolumeexpandsize=20971520`,
      `--csi.testvolumeparameters=${parameters}`,
      `--ginkgo.json-report=${report}`,
      '--ginkgo.no-color',
      '--ginkgo.seed=1',
    ],
    { stdio: ['ignore', 'pipe', 'pipe'] },
  );
  let output = '';
  for (const stream of [child.stdout, child.stderr])
    stream.on('data', (chunk: Buffer) => {
      output += chunk;
    });
  await new Promise((resolve) => child.on('close', resolve));
  ended = true;
  await decides;
  if (!existsSync(report)) throw new Error(output);
  const [suite] = JSON.parse(readFileSync(report, 'utf8')) as Report[];
  const specs = (suite as Report).SpecReports.filter((one) => one.LeafNodeType === 'It');
  const named = specs.map((one) => ({
    ...one,
    name: [...(one.ContainerHierarchyTexts ?? []), one.LeafNodeText].join(' '),
  }));
  const passed = named.filter((one) => one.State === 'passed').length;
  for (const one of named.filter(({ State }) => !['passed', 'skipped', 'pending'].includes(State)))
    t.fail(`${one.name}: ${one.Failure?.Message ?? one.State}`);
  for (const one of named.filter(({ State }) => State === 'skipped' || State === 'pending'))
    t.ok(
      SKIPS.some(({ what }) => what.test(`${one.name} ${one.Failure?.Message ?? ''}`)),
      `skipped with a reason: ${one.name} (${one.Failure?.Message ?? ''})`,
    );
  t.ok(passed >= 43, `${passed} of ${named.length} passed`);
  t.strictSame(
    mounts().filter(({ point }) => point.startsWith(node.kubelet)),
    [],
    'no mount is left',
  );
  t.comment(`${passed} passed, ${named.length - passed} skipped`);
});
