import t from 'tap';
import { fits, headroom, parseQuantity, podRequests, quantityOf } from '../../controller/plan/fit.ts';
import { candidateLabel, roleLabel } from '../../controller/plan/labels.ts';
import type { ObservedNode, PodTemplate } from '../../controller/plan/types.ts';

const NODE: ObservedNode = {
  name: 'b',
  ready: true,
  unschedulable: false,
  inPool: true,
  deleting: false,
  labels: { zone: 'z1', size: '8' },
  taints: [],
  allocatable: { cpu: '2', memory: '4Gi', pods: '10', 'nvidia.com/gpu': '1' },
  requested: { cpu: 1500, memory: 2 * 2 ** 30 * 1000 },
  podCount: 3,
  volumeCount: 0,
};
const POOL = { freeBytes: null, needBytes: 0 };
const asks = (requests: Record<string, string>, more: Partial<PodTemplate> = {}): PodTemplate => ({
  containers: [{ name: 'c', resources: { requests } }],
  ...more,
});
const look = (spec: PodTemplate, change: Partial<ObservedNode> = {}): string =>
  fits({ ...NODE, ...change }, [spec], POOL).reason ?? 'ok';

t.test('quantities are read as the API means them', (t) => {
  const rows: [string, number | null][] = [
    ['1', 1000],
    ['500m', 500],
    ['0.1', 100],
    ['1.5Gi', 1.5 * 2 ** 30 * 1000],
    ['2e3', 2_000_000],
    ['1k', 1_000_000],
    ['100n', 1],
    ['0', 0],
    ['1Xi', null],
    ['', null],
    ['abc', null],
    ['1e9999', null],
  ];
  for (const [text, value] of rows) t.equal(parseQuantity(text), value, text);
  t.end();
});

t.test('a pod asks for its containers, or its hungriest init container, with sidecars and overhead', (t) => {
  t.same(
    podRequests({
      initContainers: [
        { name: 'i1', resources: { requests: { cpu: '1' } } },
        { name: 's', restartPolicy: 'Always', resources: { requests: { cpu: '100m' } } },
        { name: 'i2', resources: { requests: { cpu: '950m', memory: '1Mi' } } },
      ],
      containers: [
        { name: 'a', resources: { requests: { cpu: '200m' } } },
        { name: 'b', resources: { limits: { cpu: '300m', 'nvidia.com/gpu': '1' } } },
      ],
      overhead: { cpu: '10m' },
    }),
    { cpu: 1060, memory: 2 ** 20 * 1000, 'nvidia.com/gpu': 1000 },
  );
  t.same(podRequests({ containers: [] }), {});
  t.same(
    podRequests(asks({ cpu: '1' }, { resources: { requests: { cpu: '3' } } })),
    { cpu: 3000 },
    'pod level',
  );
  t.end();
});

t.test('B14: a node fits only with room for every resource, and says which one it lacks', (t) => {
  t.equal(look(asks({ cpu: '500m' })), 'ok', 'exactly what is left');
  t.equal(look(asks({ cpu: '501m' })), 'cpu: 501m are asked for, 500m of 2 are free');
  t.match(
    look(asks({ cpu: '1m' }), { requested: { cpu: 2000 } }),
    /cpu: 1m are asked for, 0 of 2/,
    'none is left',
  );
  t.equal(look(asks({}), { requested: { cpu: 2000 } }), 'ok', 'who asks for nothing fits');
  t.match(look(asks({ memory: '3Gi' })), /memory: 3072Mi are asked for, 2048Mi of 4096Mi/);
  t.equal(look(asks({ 'nvidia.com/gpu': '1' })), 'ok');
  t.match(
    look(asks({ 'nvidia.com/gpu': '1' }), { requested: { 'nvidia.com/gpu': 1000 } }),
    /nvidia.com\/gpu: 1 is/,
  );
  t.match(
    look(asks({ 'example.com/thing': '1' })),
    /example.com\/thing/,
    'a resource that the node lacks at all',
  );
  t.match(look(asks({ cpu: '1m' }), { allocatable: {} }), /cpu/);
  t.end();
});

t.test('B14: pod slots', (t) => {
  t.equal(look(asks({}), { podCount: 9 }), 'ok');
  t.match(look(asks({}), { podCount: 10 }), /pods: 10 are allowed on the node, 10 are there/);
  t.match(fits({ ...NODE, podCount: 9 }, [asks({}), asks({})], POOL).reason, /2 more are wanted/);
  t.end();
});

t.test('B14: taints need a toleration of key, value and effect', (t) => {
  const gpu = { taints: [{ key: 'gpu', value: 'yes', effect: 'NoSchedule' as const }] };
  t.match(look(asks({}), gpu), /taint: gpu=yes:NoSchedule is not tolerated/);
  const ok: PodTemplate['tolerations'] = [
    { key: 'gpu', value: 'yes' },
    { key: 'gpu', operator: 'Exists' },
    { operator: 'Exists' },
    { key: 'gpu', operator: 'Equal', value: 'yes', effect: 'NoSchedule' },
  ];
  for (const one of ok) t.equal(look(asks({}, { tolerations: [one] }), gpu), 'ok', JSON.stringify(one));
  const bad: PodTemplate['tolerations'] = [
    { key: 'gpu', value: 'no' },
    { key: 'gpu', value: 'yes', effect: 'NoExecute' },
    { key: 'cpu', operator: 'Exists' },
    { operator: 'Equal' },
  ];
  for (const one of bad) t.not(look(asks({}, { tolerations: [one] }), gpu), 'ok', JSON.stringify(one));
  t.equal(look(asks({}), { taints: [{ key: 'x', effect: 'PreferNoSchedule' }] }), 'ok');
  t.match(look(asks({}), { taints: [{ key: 'x', effect: 'NoExecute' }] }), /x:NoExecute/);
  t.end();
});

t.test('B14: node selectors and required affinity, but not the labels that follow the volume', (t) => {
  const selector = (nodeSelector: Record<string, string>) => look(asks({}, { nodeSelector }));
  t.equal(
    selector({ zone: 'z1', [roleLabel('d', 'w')]: 'active', [candidateLabel('d', 'w')]: 'true' }),
    'ok',
  );
  t.match(selector({ zone: 'z2' }), /nodeSelector: zone=z2 is wanted, the node has zone=z1/);
  t.match(selector({ 'simple-volume.shipstuff.io/pool.other-role': 'true' }), /no such label/);
  const affinity = (...terms: { matchExpressions?: object[]; matchFields?: object[] }[]) =>
    look(
      asks({}, {
        affinity: {
          nodeAffinity: { requiredDuringSchedulingIgnoredDuringExecution: { nodeSelectorTerms: terms } },
        },
      } as Partial<PodTemplate>),
    );
  const on = (key: string, operator: string, ...values: string[]) => ({
    matchExpressions: [{ key, operator, values }],
  });
  t.equal(affinity(on('zone', 'In', 'z1', 'z2')), 'ok');
  t.match(affinity(on('zone', 'NotIn', 'z1')), /nodeAffinity/);
  t.equal(affinity(on('zone', 'NotIn', 'z1'), on('size', 'Gt', '4')), 'ok', 'one of the terms is enough');
  t.match(affinity(on('size', 'Lt', '8')), /nodeAffinity/);
  t.match(affinity(on('zone', 'Gt', '4')), /nodeAffinity/, 'no number');
  t.equal(affinity(on('rack', 'DoesNotExist')), 'ok');
  t.match(affinity(on('rack', 'Exists')), /nodeAffinity/);
  t.match(affinity({}), /nodeAffinity/, 'an empty term matches nothing');
  t.equal(affinity({ matchFields: [{ key: 'metadata.name', operator: 'In', values: ['b'] }] }), 'ok');
  t.match(
    affinity({ matchFields: [{ key: 'metadata.name', operator: 'In', values: ['a'] }] }),
    /nodeAffinity/,
  );
  t.equal(affinity(on(roleLabel('d', 'w'), 'In', 'active')), 'ok');
  t.end();
});

t.test('B14: space in the pool', (t) => {
  const Gi = 2 ** 30;
  const space = (freeBytes: number | null, needBytes: number) =>
    fits(NODE, [], { freeBytes, needBytes }).reason ?? 'ok';
  t.equal(space(null, 5 * Gi), 'ok', 'not known, not checked');
  t.equal(space(Gi, Gi), 'ok');
  t.match(space(Gi / 2, Gi), /pool space: 1024Mi are needed, 512Mi are free/);
  t.equal(headroom(null), 64 * 2 ** 20);
  t.equal(headroom(10 * Gi), Gi / 2);
  t.equal(headroom(10_000 * Gi), Gi);
  t.end();
});

t.test('bytes are written as Kubernetes writes them', (t) => {
  for (const [bytes, text] of [
    [0, '0'],
    [1000, '1000'],
    [1024, '1Ki'],
    [1536 * 2 ** 20, '1536Mi'],
    [2 ** 40, '1Ti'],
    [2 ** 40 + 1, '1099511627777'],
  ] as const)
    t.equal(quantityOf(bytes), text);
  t.end();
});
