/** JSON schemas of the HTTP API, with limits. `additionalProperties: false` everywhere: a misspelt field is an error, not a default. */
import { NAMESPACE_SCHEMA, NODE_SCHEMA, VOLUME_SCHEMA } from '../core/names.ts';
import { MAX_LEASE_MS, MIN_LEASE_MS } from '../fence/timing.ts';

export const EPOCH = { type: 'integer', minimum: 1, maximum: 999_999_999_999_999 } as const;
const GENERATION = {
  type: 'string',
  maxLength: 40,
  pattern: '^[1-9][0-9]{0,14}-(0|[1-9][0-9]{0,14})$',
} as const;
const NULLABLE_GENERATION = { anyOf: [GENERATION, { type: 'null' }] } as const;
const URL_TEXT = { type: 'string', minLength: 1, maxLength: 2048 } as const;
const TOKEN = { type: 'string', minLength: 1, maxLength: 4096, pattern: '^[\\x21-\\x7e]+$' } as const;
const DURATION = { type: 'string', maxLength: 40 } as const;
const PATTERNS = {
  type: 'array',
  maxItems: 1000,
  items: { type: 'string', minLength: 1, maxLength: 1024 },
} as const;
const PATHS = {
  type: 'array',
  maxItems: 1000,
  items: { type: 'string', minLength: 1, maxLength: 4096 },
} as const;
const ID32 = { anyOf: [{ type: 'integer', minimum: 0, maximum: 4_294_967_294 }, { type: 'null' }] } as const;
/** Permission bits: a number, or octal text such as "0664". */
const MODE = {
  anyOf: [
    { type: 'integer', minimum: 0, maximum: 0o7777 },
    { type: 'string', pattern: '^0?[0-7]{1,4}$' },
    { type: 'null' },
  ],
} as const;
const CLOCK = { anyOf: [{ type: 'number', minimum: 0, maximum: 1e15 }, { type: 'null' }] } as const;

const name = { namespace: NAMESPACE_SCHEMA, volume: VOLUME_SCHEMA } as const;
const object = (properties: object, required: string[]): object => ({
  type: 'object',
  additionalProperties: false,
  properties,
  required,
});

export const NAME_QUERY = object(name, ['namespace', 'volume']);
export const OPTIONAL_NAME_QUERY = {
  ...object(name, []),
  dependentRequired: { namespace: ['volume'], volume: ['namespace'] },
};
export const NAME_PARAMS = object({ ns: NAMESPACE_SCHEMA, vol: VOLUME_SCHEMA }, ['ns', 'vol']);
export const BACKUP_PARAMS = object(
  {
    ns: NAMESPACE_SCHEMA,
    vol: VOLUME_SCHEMA,
    stamp: {
      type: 'string',
      pattern: '^[0-9]{4}-[0-9]{2}-[0-9]{2}T[0-9]{2}-[0-9]{2}-[0-9]{2}Z(\\.[0-9]{1,3})?$',
    },
  },
  ['ns', 'vol', 'stamp'],
);
export const ID_PARAMS = object({ id: { type: 'string', pattern: '^[0-9a-zA-Z_-]{8,64}$' } }, ['id']);

const ownership = { ownerUid: ID32, ownerGid: ID32, fileMode: MODE, dirMode: MODE } as const;

/** Sizes of volumes, bytes. */
const BYTES = { type: 'integer', minimum: 1, maximum: Number.MAX_SAFE_INTEGER } as const;

export const WATCH_START = object(
  {
    ...name,
    epoch: EPOCH,
    bytes: BYTES,
    source: object({ url: URL_TEXT, webdavUrl: URL_TEXT }, []),
    targets: {
      type: 'array',
      maxItems: 64,
      items: object({ url: URL_TEXT, token: TOKEN, node: NODE_SCHEMA }, ['url', 'token']),
    },
    includePaths: PATTERNS,
    excludePaths: PATTERNS,
    debounce: DURATION,
    maxDelay: DURATION,
    consistencyMode: { type: 'string', enum: ['shadow', 'live'] },
    pruneExcluded: { type: 'boolean' },
    confirmedReplicas: { type: 'integer', minimum: 0, maximum: 64 },
    fullSyncOnStart: { type: 'boolean' },
    requiredPaths: PATHS,
    ...ownership,
  },
  ['namespace', 'volume', 'targets'],
);

export const WATCH_STOP = object({ ...name, epoch: EPOCH }, ['namespace', 'volume']);

export const SYNC = object(
  {
    ...name,
    epoch: EPOCH,
    generation: NULLABLE_GENERATION,
    source: {
      ...object({ url: URL_TEXT, webdavUrl: URL_TEXT, grant: TOKEN, token: TOKEN, node: NODE_SCHEMA }, [
        'url',
        'webdavUrl',
      ]),
      oneOf: [{ required: ['grant'] }, { required: ['token'] }],
    },
    echo: CLOCK,
    policy: object(
      {
        includePaths: PATTERNS,
        excludePaths: PATTERNS,
        pruneExcluded: { type: 'boolean' },
        requiredPaths: PATHS,
        ...ownership,
      },
      [],
    ),
  },
  ['namespace', 'volume', 'epoch', 'source'],
);

export const TRANSFER = object(
  { ...name, epoch: EPOCH, node: NODE_SCHEMA, have: NULLABLE_GENERATION, full: { type: 'boolean' } },
  ['namespace', 'volume', 'epoch', 'node', 'have'],
);

const CONDITION = object(
  {
    type: { type: 'string', maxLength: 64 },
    message: { type: 'string', maxLength: 4096 },
    since: { type: 'number' },
    paths: { type: 'array', maxItems: 100, items: { type: 'string', maxLength: 20_000 } },
    count: { type: 'integer', minimum: 0 },
  },
  ['type', 'message', 'since'],
);
export const CONFIRM = object(
  {
    ...name,
    epoch: EPOCH,
    node: NODE_SCHEMA,
    generation: GENERATION,
    state: { type: 'string', maxLength: 32 },
    problems: { type: 'array', maxItems: 32, items: CONDITION },
  },
  ['namespace', 'volume', 'epoch', 'node', 'generation', 'state'],
);

export const BEAT = object(
  {
    node: NODE_SCHEMA,
    bootId: { type: 'string', maxLength: 64 },
    volumes: {
      type: 'array',
      maxItems: 10_000,
      items: object(
        {
          ...name,
          epoch: EPOCH,
          generation: NULLABLE_GENERATION,
          complete: { type: 'boolean' },
          echo: CLOCK,
        },
        ['namespace', 'volume', 'epoch', 'generation', 'complete', 'echo'],
      ),
    },
  },
  ['node', 'volumes'],
);

export const PREPARE = object(
  {
    ...name,
    epoch: EPOCH,
    confirm: {
      anyOf: [
        { type: 'string', enum: ['all'] },
        { type: 'integer', minimum: 0, maximum: 64 },
      ],
    },
    timeout: DURATION,
  },
  ['namespace', 'volume'],
);
export const FORCE = object(
  { ...name, epoch: EPOCH, condition: { type: 'string', enum: ['MassDelete', 'RootChanged'] } },
  ['namespace', 'volume', 'condition'],
);

export const REMOVE = object(
  { ...name, epoch: EPOCH, evenActive: { type: 'boolean' }, backups: { type: 'boolean' } },
  ['namespace', 'volume', 'epoch'],
);

export const SIZE = object({ ...name, bytes: BYTES }, ['namespace', 'volume', 'bytes']);

const FENCING = { type: 'string', enum: ['lease', 'none'] } as const;
const BEAT_NUMBER = { type: 'integer', minimum: 1, maximum: Number.MAX_SAFE_INTEGER } as const;
const TERM = { type: 'integer', minimum: 0, maximum: Number.MAX_SAFE_INTEGER } as const;
const LEASE_LENGTH = { type: 'integer', minimum: MIN_LEASE_MS, maximum: MAX_LEASE_MS } as const;
const TOLD_SET = object(
  {
    version: { type: 'integer', minimum: 0, maximum: Number.MAX_SAFE_INTEGER },
    nodes: { type: 'array', maxItems: 64, items: NODE_SCHEMA },
  },
  ['version', 'nodes'],
);
const many = (items: object): object => ({ type: 'array', maxItems: 10_000, items });

export const FENCE_BEAT = object(
  {
    node: NODE_SCHEMA,
    beat: BEAT_NUMBER,
    volumes: many(object({ ...name, epoch: EPOCH }, ['namespace', 'volume', 'epoch'])),
  },
  ['node', 'beat', 'volumes'],
);
export const FENCE_POLL = object(
  {
    controller: { type: 'string', minLength: 1, maxLength: 253 },
    term: TERM,
    leaseMs: LEASE_LENGTH,
    beat: { anyOf: [BEAT_NUMBER, { type: 'null' }] },
    volumes: many(
      object({ ...name, epoch: EPOCH, renew: { type: 'boolean' }, fencing: FENCING, promotable: TOLD_SET }, [
        'namespace',
        'volume',
        'epoch',
        'renew',
        'fencing',
        'promotable',
      ]),
    ),
  },
  ['controller', 'term', 'leaseMs', 'beat', 'volumes'],
);
export const FENCE_CONSENT = object(
  {
    ...name,
    epoch: EPOCH,
    term: TERM,
    released: { anyOf: [EPOCH, { type: 'null' }] },
    insist: { type: 'boolean' },
  },
  ['namespace', 'volume', 'epoch', 'term', 'released', 'insist'],
);
export const FENCE_RELEASE = object({ ...name, epoch: EPOCH }, ['namespace', 'volume', 'epoch']);

const SPOKEN_AT = { type: 'number', minimum: 0, maximum: 1e15 } as const;
export const WRITER_REPORT = object(
  {
    at: SPOKEN_AT,
    writers: many(object(name, ['namespace', 'volume'])),
    freezer: object(
      {
        possible: { type: 'boolean' },
        reason: { type: 'string', maxLength: 1024 },
        cgroup: { anyOf: [{ type: 'string', enum: ['v1', 'v2'] }, { type: 'null' }] },
      },
      ['possible', 'reason', 'cgroup'],
    ),
    sizes: many(
      object(
        { ...name, bytes: BYTES, enforced: { type: 'boolean' }, reason: { type: 'string', maxLength: 1024 } },
        ['namespace', 'volume', 'bytes', 'enforced', 'reason'],
      ),
    ),
  },
  ['at', 'writers', 'freezer'],
);
export const WRITER_ANNOUNCEMENT = object({ ...name, at: SPOKEN_AT }, ['namespace', 'volume', 'at']);
