/**
 * `npm run cluster [-- --number N] [--values FILE]`: a Kubernetes of three nodes on this machine with the chart
 * installed, to try things on. Ctrl-C takes it down. Needs root; Go the first time.
 */
import { spawnSync } from 'node:child_process';
import path from 'node:path';
import { createInterface } from 'node:readline/promises';
import { parseArgs } from 'node:util';
import { CLUSTER_PROGRAMS, kubeProgram } from '../kube/harness/programs.ts';
import { installPackages, missingPackages } from '../packages.ts';
import { CHART, Cluster, type Cut, noCluster, SYSTEM } from './harness/cluster.ts';

const PROJECT = path.dirname(CHART);
const say = (line: string): void => console.error(`cluster: ${line}`);

const { values } = parseArgs({ options: { number: { type: 'string' }, values: { type: 'string' } } });

const problem = installPackages(missingPackages(['cluster']));
if (problem !== null) say(problem);
// Each does nothing when its work is done already.
const builds = [
  ['test/kube/harness/build.ts', ...CLUSTER_PROGRAMS],
  ['native/install.mjs'],
  ['native/rclone/build.ts'],
];
for (const args of builds)
  spawnSync(process.execPath, args, { cwd: PROJECT, stdio: ['ignore', 'ignore', 'inherit'] });
const missing = noCluster();
if (missing !== false) {
  say(missing);
  process.exit(1);
}

const cluster = await Cluster.start({
  say,
  ...(values.number ? { number: Number(values.number) } : {}),
  ...(values.values ? { valueFiles: [path.resolve(values.values)] } : {}),
}).catch((error: Error) => {
  say(error.message);
  process.exit(1);
});

/** What can be done to the nodes while it runs: a word, a node's name, more words. */
const COMMANDS: Record<string, { help: string; run(node: string, more: string[]): Promise<unknown> }> = {
  cut: { help: 'power cut', run: (node) => cluster.node(node).powerCut() },
  return: { help: 'power is back', run: (node) => cluster.node(node).start() },
  part: {
    help: 'partition from all, api or agents',
    run: (node, kinds) => cluster.partition(node, ...((kinds.length > 0 ? kinds : ['all']) as Cut[])),
  },
  heal: { help: 'end of the partition', run: (node) => cluster.heal(node) },
  kubelet: { help: 'restart of its kubelet', run: (node) => cluster.node(node).restartKubelet() },
};

console.log(`
export KUBECONFIG=${cluster.kubeconfig} PATH=${path.dirname(kubeProgram('kubectl') as string)}:$PATH

kubectl get pods -n ${SYSTEM} -o wide
kubectl apply -f ${CHART}/examples/demo.yaml
kubectl get sv -A -w

Pools: ${cluster.nodes.map((node) => node.pool).join(' ')}
Here, with a node's name (n1, n2, n3):
${Object.entries(COMMANDS)
  .map(([word, { help }]) => `  ${word.padEnd(8)} ${help}`)
  .join('\n')}
Ctrl-C takes everything down.
`);

const lines = createInterface({ input: process.stdin });
lines.on('SIGINT', () => process.exit(130));
for await (const line of lines) {
  const [word = '', node = '', ...more] = line.trim().split(/\s+/);
  if (word === '') continue;
  try {
    const command = COMMANDS[word];
    if (!command) throw new Error(`known are ${Object.keys(COMMANDS).join(', ')}`);
    await command.run(node, more);
    say(`${word} ${node}: done`);
  } catch (error) {
    say(error instanceof Error ? error.message : String(error));
  }
}
// No terminal: until a signal comes.
await new Promise<never>(() => setInterval(() => {}, 60_000));
