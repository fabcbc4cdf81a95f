/** Steps of a scenario: each needs what the one before it has done. */
import type { Test } from 'tap';
import type { Cluster } from './cluster.ts';

/**
 * Returns how to run one step. After one has failed, what is known of the cluster is kept and the others are skipped:
 * they would only wait for what cannot come.
 */
export function steps(
  t: Test,
  cluster: Cluster,
): (name: string, run: (t: Test) => Promise<void>) => Promise<void> {
  let failed: string | null = null;
  return async (name, run) => {
    if (failed !== null) {
      await t.test(name, { skip: `after a failure in: ${failed}` }, () => {});
      return;
    }
    const result = await t.test(name, run);
    if (result?.ok === true) return;
    failed = name;
    t.comment(await cluster.dump(name));
  };
}
