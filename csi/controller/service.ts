/**
 * The Controller service. It keeps nothing: a volume is on the nodes, so that each replica of the controller gives the
 * same answers, at the same time too, and a call that is repeated finds what the first one did.
 */

import { checkName } from '../../lib/core/names.ts';
import type { Logger, VolumeName } from '../../lib/core/parts.ts';
import { capabilityProblem, fsTypeProblem } from '../capabilities.ts';
import { DEFAULT_BYTES, DEFAULT_POOL, poolKey } from '../driver.ts';
import { exhausted, exists, invalid, notFound, outOfRange, precondition, unavailable } from '../errors.ts';
import type { CapacityRange__Output } from '../generated/csi/v1/CapacityRange.ts';
import type { ControllerExpandVolumeRequest__Output } from '../generated/csi/v1/ControllerExpandVolumeRequest.ts';
import type { CreateVolumeRequest__Output } from '../generated/csi/v1/CreateVolumeRequest.ts';
import type { DeleteVolumeRequest__Output } from '../generated/csi/v1/DeleteVolumeRequest.ts';
import type { GetCapacityRequest__Output } from '../generated/csi/v1/GetCapacityRequest.ts';
import type { ValidateVolumeCapabilitiesRequest__Output } from '../generated/csi/v1/ValidateVolumeCapabilitiesRequest.ts';
import type { VolumeCapability__Output } from '../generated/csi/v1/VolumeCapability.ts';
import type { Service } from '../grpc.ts';
import { needVolumeId, parseVolumeId, volumeId, volumeOf } from '../volume-id.ts';
import type { Holder, Lookup, VolumeCluster } from './cluster.ts';

/** What the provisioner adds with --extra-create-metadata. */
const METADATA = 'csi.storage.k8s.io/';
const CLAIM_NAMESPACE = `${METADATA}pvc/namespace`;
const CLAIM_NAME = `${METADATA}pvc/name`;
const VOLUME_NAME = `${METADATA}pv/name`;
/** Parameters of a StorageClass. */
const PARAMETERS = ['pool'];

interface Range {
  required: number;
  /** Infinity: none */
  limit: number;
}

function rangeOf(range: CapacityRange__Output | null): Range {
  const required = Number(range?.required_bytes ?? 0);
  const limit = Number(range?.limit_bytes ?? 0);
  if (required < 0 || limit < 0) outOfRange('capacity_range must not be negative');
  if (!Number.isSafeInteger(required) || !Number.isSafeInteger(limit))
    outOfRange(`capacity_range is larger than any disk: ${range?.required_bytes} to ${range?.limit_bytes}`);
  if (limit > 0 && required > limit)
    outOfRange(`capacity_range wants at least ${required} and at most ${limit} bytes`);
  return { required, limit: limit === 0 ? Number.POSITIVE_INFINITY : limit };
}

function checkParameters(parameters: Record<string, string>): void {
  for (const key of Object.keys(parameters))
    if (!PARAMETERS.includes(key) && !key.startsWith(METADATA))
      invalid(
        `parameter ${JSON.stringify(key)} is not known; a StorageClass may say: ${PARAMETERS.join(', ')}`,
      );
}

const poolOf = (parameters: Record<string, string>): string => parameters.pool || DEFAULT_POOL;

function checkCapabilities(capabilities: readonly VolumeCapability__Output[], field: string): void {
  if (capabilities.length === 0) invalid(`${field} is required`);
  for (const capability of capabilities) {
    const problem = capabilityProblem(capability) ?? fsTypeProblem(capability);
    if (problem !== null) invalid(problem);
  }
}

/** Whose word counts: the active node's, of the newest epoch. */
function best(holders: readonly Holder[]): Holder | undefined {
  return [...holders].sort(
    (a, b) =>
      b.epoch - a.epoch ||
      Number(b.role === 'active') - Number(a.role === 'active') ||
      (a.node < b.node ? -1 : 1),
  )[0];
}
const sizeOf = (holders: readonly Holder[]): number | null => {
  const sizes = holders.flatMap((one) => (one.bytes === null ? [] : [one.bytes]));
  return sizes.length === 0 ? null : Math.max(...sizes);
};
const silence = (lookup: Lookup): string =>
  lookup.silent.map(({ node, why }) => `${node} (${why})`).join('; ');

/** How often a deletion begins anew when a watch was started in between. */
const REMOVE_ROUNDS = 3;

export class ControllerService {
  readonly #cluster: VolumeCluster;
  readonly #log: Logger;
  readonly #locks = new Map<string, Promise<void>>();

  constructor(cluster: VolumeCluster, log: Logger) {
    this.#cluster = cluster;
    this.#log = log;
  }

  async #one<T>(key: string, work: () => Promise<T>): Promise<T> {
    const before = this.#locks.get(key);
    let done: () => void = () => undefined;
    const mine = new Promise<void>((resolve) => {
      done = resolve;
    });
    this.#locks.set(key, mine);
    try {
      await before;
      return await work();
    } finally {
      if (this.#locks.get(key) === mine) this.#locks.delete(key);
      done();
    }
  }

  #ready(): void {
    const problem = this.#cluster.problem();
    if (problem !== null) unavailable(problem);
  }

  async create(request: CreateVolumeRequest__Output): Promise<object> {
    const { name, parameters } = request;
    if (name === '') invalid('name is required');
    checkCapabilities(request.volume_capabilities, 'volume_capabilities');
    if (request.volume_content_source)
      invalid('a volume cannot be made from a snapshot or from another volume; leave dataSource out');
    if (Object.keys(request.mutable_parameters).length > 0)
      invalid('mutable_parameters are not offered (VolumeAttributesClass)');
    checkParameters(parameters);
    const range = rangeOf(request.capacity_range);
    const pool = poolOf(parameters);
    const namespace = parameters[CLAIM_NAMESPACE];
    if (!namespace)
      invalid(`parameter ${CLAIM_NAMESPACE} is missing: the provisioner needs --extra-create-metadata`);
    const volume: VolumeName = {
      namespace: checkName(namespace as string, CLAIM_NAMESPACE, 'label'),
      volume: volumeOf(parameters[VOLUME_NAME] || name),
    };
    this.#ready();
    if (!this.#cluster.pools().includes(pool))
      invalid(
        `parameter pool: there is no pool ${JSON.stringify(pool)}; there is ${this.#cluster.pools().join(', ') || 'none yet'}`,
      );
    const { requisite = [], preferred = [] } = request.accessibility_requirements ?? {};
    const places = requisite.length > 0 ? requisite : preferred;
    if (places.length > 0 && !places.some(({ segments }) => segments[poolKey(pool)] === 'true'))
      exhausted(`pool ${pool} cannot be reached from where the volume is wanted (${poolKey(pool)})`);
    return this.#one(volumeId(volume), () => this.#create(volume, pool, range, parameters));
  }

  async #create(
    volume: VolumeName,
    pool: string,
    range: Range,
    parameters: Record<string, string>,
  ): Promise<object> {
    const answer = (node: string, bytes: number): object => ({
      volume: {
        volume_id: volumeId(volume),
        capacity_bytes: `${bytes}`,
        volume_context: { pool, node },
        accessible_topology: [{ segments: { [poolKey(pool)]: 'true' } }],
      },
    });
    const { holders } = await this.#cluster.lookup(volume, pool);
    const known = best(holders);
    if (known) {
      const bytes = sizeOf(holders);
      if (bytes === null)
        return exists(
          `${volumeId(volume)} exists on ${known.node} and was not made by this driver for a claim`,
        );
      if (bytes < range.required || bytes > range.limit)
        return exists(
          `${volumeId(volume)} exists with ${bytes} bytes; ${range.required}${range.limit === Number.POSITIVE_INFINITY ? '' : ` to ${range.limit}`} were asked for`,
        );
      // Changes nothing, and says so when what was made is gone.
      if (known.bytes !== null) await this.#cluster.create(pool, known.node, volume, bytes);
      return answer(known.node, bytes);
    }
    const bytes = range.required > 0 ? range.required : Math.min(DEFAULT_BYTES, range.limit);
    const [namespace, claim] = [parameters[CLAIM_NAMESPACE], parameters[CLAIM_NAME]];
    const selected = namespace && claim ? await this.#cluster.selectedNode({ namespace, name: claim }) : null;
    const chosen = await this.#cluster.choose(pool, bytes, selected);
    if ('refused' in chosen) return exhausted(chosen.refused);
    const made = await this.#cluster.create(pool, chosen.node, volume, bytes);
    this.#log.info({ volume: volumeId(volume), pool, node: chosen.node, bytes }, 'volume made');
    return answer(chosen.node, made.bytes);
  }

  /** Everywhere or not yet: a node that does not answer may have the data, so the call is repeated until it does. */
  async delete(request: DeleteVolumeRequest__Output): Promise<object> {
    const id = needVolumeId(request.volume_id);
    const name = parseVolumeId(id);
    // Never one of ours, so there is nothing of it.
    if (name === null) return {};
    this.#ready();
    return this.#one(id, async () => {
      const keeps = await this.#cluster.keeps(name);
      if (keeps !== null) precondition(keeps);
      const lookup = await this.#removeAll(name);
      if (lookup.silent.length > 0)
        unavailable(
          `${id} is deleted on ${lookup.holders.length} nodes, and not yet on those that do not answer: ${silence(lookup)}`,
        );
      this.#log.info({ volume: id, nodes: lookup.holders.map((one) => one.node) }, 'volume deleted');
      return {};
    });
  }

  /** A first decision may be under way: a watch that begins between the end of the old one and the removal ends too. */
  async #removeAll(name: VolumeName): Promise<Lookup> {
    for (let round = 1; ; round++) {
      const lookup = await this.#cluster.lookup(name, this.#cluster.poolOf(name));
      const epoch = Math.max(1, ...lookup.holders.map((one) => one.epoch));
      for (const { pool, node, watched, epoch: own } of lookup.holders)
        if (watched) await this.#cluster.stopWatch(pool, node, name, own);
      try {
        for (const { pool, node } of lookup.holders) await this.#cluster.remove(pool, node, name, epoch);
        return lookup;
      } catch (error) {
        if (round === REMOVE_ROUNDS || (error as { code?: unknown }).code !== 'VOLUME_ACTIVE') throw error;
      }
    }
  }

  /** Those who have it. NOT_FOUND only when everybody said no. */
  async #existing(id: string): Promise<{ name: VolumeName; holders: Holder[] }> {
    const name = parseVolumeId(id) ?? notFound(`${JSON.stringify(id)} is no volume of this driver`);
    this.#ready();
    const lookup = await this.#cluster.lookup(name, this.#cluster.poolOf(name));
    if (lookup.holders.length > 0) return { name, holders: lookup.holders };
    return lookup.silent.length > 0
      ? unavailable(`whether ${id} exists is not known: ${silence(lookup)}`)
      : notFound(`there is no volume ${id}`);
  }

  async validate(request: ValidateVolumeCapabilitiesRequest__Output): Promise<object> {
    const id = needVolumeId(request.volume_id);
    const { volume_capabilities, volume_context, parameters } = request;
    if (volume_capabilities.length === 0) invalid('volume_capabilities is required');
    const { holders } = await this.#existing(id);
    const problem = [
      ...volume_capabilities.map((one) => capabilityProblem(one) ?? fsTypeProblem(one)),
      ...Object.entries(volume_context).map(([key, value]) =>
        key === 'pool' && !holders.some((one) => one.pool === value)
          ? `the volume is not in pool ${JSON.stringify(value)}`
          : null,
      ),
      ...Object.keys(parameters).map((key) =>
        PARAMETERS.includes(key) || key.startsWith(METADATA)
          ? null
          : `parameter ${JSON.stringify(key)} is not known`,
      ),
    ].find((one) => one !== null);
    return problem === undefined
      ? { confirmed: { volume_capabilities, volume_context, parameters } }
      : { message: problem };
  }

  async expand(request: ControllerExpandVolumeRequest__Output): Promise<object> {
    const id = needVolumeId(request.volume_id);
    if (!request.capacity_range) invalid('capacity_range is required');
    const range = rangeOf(request.capacity_range);
    if (request.volume_capability) checkCapabilities([request.volume_capability], 'volume_capability');
    return this.#one(id, async () => {
      const { name, holders } = await this.#existing(id);
      const now = sizeOf(holders) ?? 0;
      if (now > range.limit) outOfRange(`${id} has ${now} bytes already, at most ${range.limit} are wanted`);
      const bytes = Math.max(now, range.required);
      if (bytes > now) {
        const own = best(holders) as Holder;
        const room = await this.#cluster.room(own.pool);
        if (bytes - now > room)
          outOfRange(
            `${bytes - now} more bytes are wanted, no node of pool ${own.pool} has more than ${room} free`,
          );
        // The node that counts first: what it has noted is true, the copies follow.
        await this.#cluster.resize(own.pool, own.node, name, bytes);
        for (const one of holders)
          if (one !== own) await this.#cluster.resize(one.pool, one.node, name, bytes);
      }
      return { capacity_bytes: `${bytes}`, node_expansion_required: true };
    });
  }

  async capacity(request: GetCapacityRequest__Output): Promise<object> {
    for (const capability of request.volume_capabilities)
      if ((capabilityProblem(capability) ?? fsTypeProblem(capability)) !== null)
        return { available_capacity: '0' };
    checkParameters(request.parameters);
    this.#ready();
    const pool = poolOf(request.parameters);
    const segments = request.accessible_topology?.segments ?? {};
    const elsewhere = Object.keys(segments).length > 0 && segments[poolKey(pool)] !== 'true';
    const room = elsewhere || !this.#cluster.pools().includes(pool) ? 0 : await this.#cluster.room(pool);
    return { available_capacity: `${room}`, maximum_volume_size: { value: `${room}` } };
  }

  service(): Service {
    const capabilities = [
      'CREATE_DELETE_VOLUME',
      'GET_CAPACITY',
      'EXPAND_VOLUME',
      'SINGLE_NODE_MULTI_WRITER',
    ];
    return {
      name: 'csi.v1.Controller',
      methods: {
        CreateVolume: (request) => this.create(request),
        DeleteVolume: (request) => this.delete(request),
        ValidateVolumeCapabilities: (request) => this.validate(request),
        ControllerExpandVolume: (request) => this.expand(request),
        GetCapacity: (request) => this.capacity(request),
        ControllerGetCapabilities: () => ({ capabilities: capabilities.map((type) => ({ rpc: { type } })) }),
      },
    };
  }
}
