/** Names that kubelet, the provisioner and the scheduler know the driver by. */
export const DRIVER = 'simple-volume.csi.shipstuff.io';

/** Node label and topology key in one: a node that has it is one of the pool's, and what is in the pool can go there. */
export const poolKey = (pool: string): string => `simple-volume.shipstuff.io/pool.${pool}`;

export const DEFAULT_POOL = 'default';
/** Size of a volume for which none was asked. */
export const DEFAULT_BYTES = 1024 ** 3;
