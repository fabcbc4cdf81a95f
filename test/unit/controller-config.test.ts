/** Flags and environment of the controller. */
import t from 'tap';
import { OPTIONS, parseControllerConfig } from '../../controller/config.ts';

const NEEDED = { namespace: 'system', identity: 'one', 'token-file': '/tokens/agents' };

t.test('flags beat the environment, defaults fill the rest', async (t) => {
  const config = parseControllerConfig(
    { ...NEEDED, election: '20s' },
    {
      SIMPLE_VOLUME_ELECTION: '30s',
      SIMPLE_VOLUME_REPORT: '500ms',
      SIMPLE_VOLUME_TIME_ZONE: 'Europe/Berlin',
    },
  );
  t.match(config, {
    namespace: 'system',
    identity: 'one',
    tokenFile: '/tokens/agents',
    electionMs: 20_000,
    reportMs: 500,
    timeZone: 'Europe/Berlin',
    fenceLeaseMs: 8000,
    leaseName: 'simple-volume-controller',
    trigger: { guard: 'proxy', address: { host: '127.0.0.1', port: 8082 }, tls: null },
  });
  t.equal(parseControllerConfig({ ...NEEDED, trigger: 'off' }, {}).trigger, null);
});

t.test('what is wrong is refused by the name of its flag', async (t) => {
  for (const [flag, value] of [
    ['namespace', 'Not_A_Name'],
    ['http', 'nowhere'],
    ['trigger', '8082'],
    ['trigger-guard', 'none'],
    ['trigger-tls-cert', undefined],
    ['election', '1s'],
    ['fence-lease', '100ms'],
    ['report', '-1s'],
    ['time-zone', 'Mars/Olympus'],
    ['full-sync-schedule', 'every night'],
    ['log-level', 'loud'],
    ['token-file', ''],
  ] as const) {
    const flags = { ...NEEDED, ...(value === undefined ? { 'trigger-tls-key': '/key' } : { [flag]: value }) };
    t.throws(() => parseControllerConfig(flags, {}), { code: 'FIELD_INVALID', field: `--${flag}` }, flag);
  }
});

t.test('every flag has an environment variable of its own', async (t) => {
  t.equal(new Set(OPTIONS.map((one) => one.env)).size, OPTIONS.length);
  for (const one of OPTIONS) t.match(one.env, /^SIMPLE_VOLUME_[A-Z_]+$/);
});
