/**
 * Rules of the controller that are taken out, one by one, around the product's code: each makes a simulated cluster go
 * wrong.
 */

import type { VolumeMemory } from '../../controller/act/memory.ts';
import { PODS } from '../../controller/cluster/index.ts';
import type { SimpleVolume } from '../../controller/cluster/types.ts';
import type { Controller } from '../../controller/controller.ts';
import type { Memory } from '../../controller/plan/types.ts';
import { KINDS, type Mutation, type WorldOptions } from './controller-world.ts';

/** What a mutation may change of a part, without regard to what is private. */
type Open = Record<string, (...args: never[]) => unknown>;
const open = (part: object): Open => part as unknown as Open;

/** Replaces a method of one object. */
function wrap(part: object, name: string, by: (original: (...args: unknown[]) => unknown) => unknown): void {
  const original = (open(part)[name] as (...args: unknown[]) => unknown).bind(part);
  (part as Record<string, unknown>)[name] = by(original);
}

/** The memory of a volume as the planner reads it, changed. */
function remembering(change: (memory: Memory, view: () => Memory) => Memory): Mutation {
  return {
    controller: (controller: Controller) => {
      const own = controller as unknown as { memory(key: string): VolumeMemory };
      const get = own.memory.bind(controller);
      own.memory = (key) => {
        const memory = get(key);
        if (!Object.hasOwn(memory, 'view')) {
          const view = memory.view.bind(memory);
          memory.view = (manual) => change(view(manual), () => view(manual));
        }
        return memory;
      };
    },
  };
}

export interface Place {
  without: string;
  mutation: Mutation;
  /** trouble in which it shows within a few clusters */
  options: WorldOptions;
  /** what goes wrong then */
  like: RegExp;
}

const ok = { ok: true } as const;
export const MUTATIONS: Place[] = [
  {
    without: 'the wait for the lease of the old writer, and the consent of the new one',
    options: { only: ['unheardLong'], fencing: 'lease', seconds: 60, trouble: 3 },
    like: /two writers|goes on in epoch|by force/,
    mutation: {
      controller: ({ fence }) => {
        wrap(fence, 'mayPromote', () => () => ok);
        wrap(fence, 'askConsent', () => async (...args: unknown[]) => ({
          node: args[1],
          epoch: (args[2] as { epoch: number }).epoch,
          term: fence.term(),
          consent: true,
          code: 'CONSENT',
          waitMs: 0,
          seen: 0,
        }));
        wrap(fence, 'state', (original) => (...args: unknown[]) => ({
          ...(original(...args) as object),
          ...(fence.ready() ? { fenceWaitMs: 0, activationWaitMs: 0 } : {}),
        }));
      },
    },
  },
  {
    without: 'the consent of the replica',
    options: { only: ['unheardLong'], fencing: 'lease', seconds: 60, trouble: 3 },
    like: /two writers|goes on in epoch|by force/,
    mutation: {
      controller: ({ fence }) =>
        wrap(fence, 'askConsent', () => async (...args: unknown[]) => ({
          node: args[1],
          epoch: (args[2] as { epoch: number }).epoch,
          term: fence.term(),
          consent: true,
          code: 'CONSENT',
          waitMs: 0,
          seen: 0,
        })),
    },
  },
  {
    without: 'an end of the renewals, and the wait for those that were given',
    options: { only: ['silent'], fencing: 'lease', seconds: 80, trouble: 3 },
    like: /two writers|goes on in epoch|by force/,
    mutation: {
      controller: ({ fence }) => {
        wrap(fence, 'withhold', () => () => undefined);
        const { mayPromote } = fence;
        fence.mayPromote = (...args) => {
          const verdict = mayPromote.apply(fence, args);
          return !verdict.ok && verdict.code === 'LEASE_GRANTED' ? ok : verdict;
        };
        wrap(fence, 'state', (original) => (...args: unknown[]) => ({
          ...(original(...args) as object),
          ...(fence.ready() ? { fenceWaitMs: 0, activationWaitMs: 0 } : {}),
        }));
      },
    },
  },
  {
    without: 'a look at how old a copy is',
    options: { only: ['behindAll'], seconds: 100, trouble: 3, set: { maxStalenessMs: 15_000 } },
    like: /a stale copy/,
    mutation: {
      report: (report) => {
        if (report.role === 'replica' && report.generation !== null) report.freshAgeMs = 0;
      },
    },
  },
  {
    without: 'the newer generation of another live copy, or a word about it',
    options: {
      only: ['behind'],
      seconds: 80,
      trouble: 3,
      set: { nodes: 3, priority: true, maxStalenessMs: 60_000, graceMs: 1000 },
    },
    like: /could be read/,
    mutation: {
      ...remembering((memory) => ({
        ...memory,
        caughtUp: new Proxy([...memory.caughtUp], {
          get: (list, key) =>
            key === 'filter'
              ? () => [{ tag: '', ok: false, error: 'not asked', ageMs: 0 }]
              : Reflect.get(list, key),
        }),
      })),
      // And nobody says so.
      world: ({ api }) => {
        const change = api.change.bind(api);
        api.change = (kind, name, only, subresource, make) =>
          change(kind, name, only, subresource, (before) => {
            const made = structuredClone(make(before)) as SimpleVolume;
            delete made.status?.promotion?.leftBehind;
            return made;
          });
      },
    },
  },
  {
    without: 'the last flush of a planned move',
    options: { only: ['cordon'], seconds: 60, set: { nodes: 3, debounce: '5s' } },
    like: /planned move .* loses/,
    mutation: remembering((memory) => ({
      ...memory,
      prepared: [
        ...memory.prepared,
        ...Array.from({ length: 20 }, (_, epoch) => epoch).flatMap((epoch) =>
          ['a', 'b', 'c', 'd'].map((node) => ({
            tag: `last:${epoch}:${node}`,
            ok: true,
            generation: null,
            confirmed: [node],
            error: null,
            ageMs: 1,
          })),
        ),
      ],
    })),
  },
  {
    without: 'compare-and-swap, and the rules of the CRD that cover for it',
    options: KINDS.dense as WorldOptions,
    like: /./,
    mutation: {
      world: ({ api }) => {
        api.compare = false;
        api.rules = false;
      },
    },
  },
  {
    without: 'leadership',
    options: { only: ['split'], fencing: 'lease', seconds: 80, trouble: 3 },
    like: /./,
    mutation: {
      world: ({ api }) => {
        api.rules = false;
      },
      controller: ({ election }) => {
        election.leads = () => true;
        election.leadsForMs = () => 4000;
        election.term = () => 1;
      },
    },
  },
  {
    without: 'a look at whether a copy is in the middle of an apply',
    options: {
      only: ['power'],
      seconds: 90,
      set: { nodes: 3, slowApply: 0.3, graceMs: 1000, maxStalenessMs: 60_000 },
    },
    like: /in the middle of an apply/,
    mutation: {
      report: (report) => {
        if (report.role === 'replica' && report.state === 'applying') report.state = 'idle';
      },
    },
  },
  {
    without: 'a fence before the pod is taken off its dead node',
    options: { only: ['silent', 'unheardLong'], fencing: 'lease', seconds: 80, trouble: 3 },
    like: /by force/,
    mutation: {
      controller: ({ world, kube, election }) => {
        const { observe } = world;
        world.observe = (...args) => {
          const observed = observe.apply(world, args);
          for (const pod of observed?.pods ?? []) {
            const node = observed?.nodes.find((one) => one.name === pod.node);
            if (node?.ready !== false || !election.leads()) continue;
            const name = { namespace: 'default', name: pod.name };
            kube.delete(PODS, name, { uid: pod.uid, gracePeriodSeconds: 0 }).catch(() => {});
          }
          return observed;
        };
      },
    },
  },
  {
    without: 'the question whether the node is still called NotReady',
    options: {
      only: ['lateCopy'],
      fencing: 'none',
      seconds: 120,
      trouble: 0.4,
      set: { graceMs: 20_000, maxStalenessMs: 60_000 },
    },
    like: /although Kubernetes calls/,
    mutation: {
      controller: (controller) =>
        wrap((controller as unknown as { nodesNow: object }).nodesNow, 'confirm', () => async () => {}),
    },
  },
];
