/** A controller as small as can be: leads, and while it leads writes its term into a ConfigMap ten times a second. */
import { createLeaderElection } from '../../controller/cluster/index.ts';
import { CONFIG_MAPS, clock, kubeOf, quiet } from './helpers.ts';

const [kubeconfig, identity, durationMs] = process.argv.slice(2) as [string, string, string];
const kube = kubeOf(kubeconfig);
const election = createLeaderElection({
  kube,
  lease: { namespace: 'default', name: 'leader' },
  identity,
  clock,
  logger: quiet,
  durationMs: Number(durationMs),
  renewMs: 200,
});
const writes = kube.gated(() => election.leads());
election.onChange((leads) => console.log(leads ? `leads ${election.term()}` : 'ended'));
election.start();
for (;;) {
  if (election.leads()) {
    const data = { [identity]: String(election.term()), last: identity };
    await writes.merge(CONFIG_MAPS, { namespace: 'default', name: 'deeds' }, { data }).catch(() => {});
  }
  await new Promise((resolve) => setTimeout(resolve, 100));
}
