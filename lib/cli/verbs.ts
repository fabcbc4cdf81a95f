/**
 * What `simple-volume` can do: one entry a verb. Its file exports `register(program: Command): void` and is loaded
 * only when the verb is used, so that no role pays for another's packages.
 */
import type { Command } from 'commander';

export interface Verb {
  name: string;
  /** One line for --help. */
  description: string;
  load(): Promise<{ register(program: Command): void }>;
}

export const VERBS: readonly Verb[] = [
  {
    name: 'agent',
    description:
      'run the agent of a storage node: watch, stage, serve, pull and apply the volumes of one pool',
    load: () => import('../agent/command.ts'),
  },
  {
    name: 'csi-node',
    description: 'run the CSI driver of a node: mount volumes into pods and stop writers whose lease ended',
    load: () => import('../../csi/command.ts'),
  },
  {
    name: 'controller',
    description: 'run the controller: place, replicate, move and fail over the volumes of the cluster',
    load: () => import('../../controller/command.ts'),
  },
];
