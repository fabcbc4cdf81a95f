/** Bad input of every kind on a real API server: each concerns its own volume only, and says what is allowed (D41). */
import tap from 'tap';
import { CLAIMS, CLASSES, NODES, VOLUMES } from '../../controller/cluster/index.ts';
import { labelId } from '../../controller/plan/labels.ts';
import { DRIVER, PREFIX } from '../../controller/plan/types.ts';
import { noKube } from './harness/programs.ts';
import { TestCluster, until } from './test-cluster.ts';

tap.test('bad input', { skip: noKube(), timeout: 100_000 }, async (t) => {
  const cluster = await TestCluster.start({ nodes: ['a', 'b', 'c'] });
  const controller = await cluster.controller();
  t.teardown(async () => {
    await controller.stop();
    await cluster.stop();
  });
  const { kube, agents } = cluster;
  const annotate = (claim: string, values: Record<string, string | null>) =>
    kube.merge(
      CLAIMS,
      { namespace: 'default', name: claim },
      {
        metadata: {
          annotations: Object.fromEntries(
            Object.entries(values).map(([key, value]) => [PREFIX + key, value]),
          ),
        },
      },
    );
  const events = async (claim: string, reason: string): Promise<string[]> =>
    (await cluster.events(claim)).filter((one) => one.reason === reason).map((one) => one.message);
  await cluster.claim('good', { 'failover-enabled': 'true' });
  await cluster.workload('good', 'a');
  await cluster.settled('good');

  await t.test(
    'values that are wrong: each is quoted with what is allowed, the last good policy stays',
    async (t) => {
      await cluster.claim('wrong', { 'replication-debounce': '3s' });
      await cluster.workload('wrong', 'a');
      await cluster.settled('wrong');
      const calls = agents.calls('/watch/start').length;
      const bad: Record<string, string> = {
        'replication-debounce': '5 seconds',
        'replication-replicas': '1.5',
        'replication-full-sync-schedule': '* * *',
        'failover-max-staleness': '-1s',
        'replication-file-mode': '0999',
        'replication-consistency-mode': 'eventual',
        'replication-required-paths': '../etc/passwd',
      };
      await annotate('wrong', bad);
      await until('each has its Event', async () => (await events('wrong', 'BadAnnotation')).length === 7);
      const told = await events('wrong', 'BadAnnotation');
      for (const [key, value] of Object.entries(bad)) {
        const mine = told.find((one) => one.startsWith(`${PREFIX}${key} is`));
        t.ok(mine?.includes(value) && mine.includes('; allowed: '), `${key}: ${mine}`);
      }
      const { spec, status } = (await cluster.object('wrong')) as NonNullable<
        Awaited<ReturnType<typeof cluster.object>>
      >;
      t.equal(spec.policy?.debounce, '3s');
      t.equal(status?.phase, 'Active', 'it goes on as before');
      t.equal(agents.calls('/watch/start').length, calls);
      await annotate('wrong', Object.fromEntries(Object.keys(bad).map((key) => [key, null])));
      await cluster.waitFor('wrong', 'is good again', (one) =>
        one.status?.conditions?.some((c) => c.type === 'PolicyValid' && c.status === 'True'),
      );
    },
  );

  await t.test('a claim that never had a good policy is not replicated, and says so', async (t) => {
    await cluster.claim('never', { 'replication-replicas': 'many' });
    const { status } = await cluster.waitFor('never', 'says so', (one) =>
      one.status?.conditions?.some((c) => c.type === 'PolicyValid' && c.status === 'False'),
    );
    t.match(status?.conditions?.find((one) => one.type === 'PolicyValid')?.message, /many.*not replicated/s);
    t.match((await events('never', 'BadAnnotation'))[0], /"many"; allowed: a whole number from 0 to 64/);
    t.equal(agents.agent('b').volume('default/pv-never'), undefined);
  });

  await t.test(
    'unknown nodes of a priority list and unknown keys: an Event, everything else as asked',
    async (t) => {
      await annotate('good', { 'failover-node-priority': 'nowhere,c', 'replication-debounse': '1s' });
      await until('the node is named', async () =>
        (await events('good', 'PolicyWarning')).some((one) => one.includes('nowhere')),
      );
      await until('the key is named', async () =>
        (await events('good', 'UnknownAnnotation')).some(
          (one) => one.includes('debounse') && one.includes('replication-debounce'),
        ),
      );
      const { status } = await cluster.waitFor(
        'good',
        'prefers c',
        (one) => one.status?.wouldFailOverTo === 'c',
      );
      t.equal(status?.phase, 'Active');
      await annotate('good', { 'failover-node-priority': null, 'replication-debounse': null });
    },
  );

  await t.test(
    'long names that begin alike have labels of their own, and neither is cut short (B12, D40)',
    async (t) => {
      const long = `data-${'minecraft-survival-server-with-mods-'.repeat(5)}`;
      const names = [`${long}0`, `${long}1`];
      for (const [i, name] of names.entries()) {
        await cluster.claim(name, {}, { node: i === 0 ? 'a' : 'b' });
        await cluster.pod(`user-${i}`, name, i === 0 ? 'a' : 'b');
      }
      for (const name of names) await cluster.settled(name);
      const roles = new Map<string, string[]>();
      for (const name of names) roles.set(name, []);
      await until('both are labelled', async () => {
        for (const name of names) roles.set(name, []);
        for await (const node of kube.list(NODES))
          for (const name of names)
            if (node.metadata.labels?.[`${PREFIX}${labelId('default', name)}-role`] === 'active')
              roles.get(name)?.push(node.metadata.name);
        return names.every((name) => roles.get(name)?.length === 1);
      });
      t.strictSame([...roles.values()], [['a'], ['b']]);
      await kube.merge(
        CLAIMS,
        { namespace: 'default', name: names[0] as string },
        { metadata: { finalizers: null } },
      );
      await cluster.end(names[0] as string);
      await kube.delete(CLAIMS, { namespace: 'default', name: names[0] as string });
      await until('the first one is gone', async () => (await cluster.object(names[0] as string)) === null);
      t.equal((await cluster.object(names[1] as string))?.status?.phase, 'Active');
      const b = await kube.get(NODES, { name: 'b' });
      t.equal(b.metadata.labels?.[`${PREFIX}${labelId('default', names[1] as string)}-role`], 'active');
    },
  );

  await t.test(
    'claims of another class, of none, and one that is not bound are left alone (B17)',
    async (t) => {
      await kube.create(CLASSES, {
        apiVersion: 'storage.k8s.io/v1',
        kind: 'StorageClass',
        metadata: { name: 'other' },
        provisioner: 'example.org/other',
      });
      const claim = (name: string, storageClassName: string | undefined, volumeName?: string) =>
        kube.create(CLAIMS, {
          apiVersion: 'v1',
          kind: 'PersistentVolumeClaim',
          metadata: {
            name,
            namespace: 'default',
            annotations: {
              [`${PREFIX}replication-enabled`]: 'true',
              [`${PREFIX}replication-debounce`]: 'nonsense',
              'volume.kubernetes.io/selected-node': 'c',
            },
          },
          spec: {
            ...(storageClassName === undefined ? {} : { storageClassName }),
            ...(volumeName === undefined ? {} : { volumeName }),
            accessModes: ['ReadWriteOnce'],
            resources: { requests: { storage: '1Gi' } },
          },
        });
      await kube.create(VOLUMES, {
        apiVersion: 'v1',
        kind: 'PersistentVolume',
        metadata: { name: 'pv-foreign' },
        spec: {
          storageClassName: 'other',
          capacity: { storage: '1Gi' },
          accessModes: ['ReadWriteOnce'],
          claimRef: { namespace: 'default', name: 'foreign' },
          csi: { driver: 'example.org.csi', volumeHandle: 'x' },
        } as never,
      });
      await claim('foreign', 'other', 'pv-foreign');
      await claim('classless', '');
      await claim('unbound', 'fast');
      await new Promise((resolve) => setTimeout(resolve, 1500));
      for (const name of ['foreign', 'classless', 'unbound']) {
        t.equal(await cluster.object(name), null, name);
        const { metadata } = await kube.get(CLAIMS, { namespace: 'default', name });
        t.equal(metadata.annotations?.['volume.kubernetes.io/selected-node'], 'c');
        t.equal(metadata.annotations?.[`${PREFIX}active-node`], undefined);
        t.strictSame(await cluster.events(name), []);
      }
      t.not(DRIVER, 'example.org.csi');
      t.equal((await cluster.object('good'))?.status?.phase, 'Active', 'nobody else was concerned');
    },
  );
});
