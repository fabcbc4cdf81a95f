/** An authority and certificates of agents, made by openssl as an operator would. */
import { execFileSync } from 'node:child_process';
import { writeFileSync } from 'node:fs';
import path from 'node:path';
import { AGENT_TLS_NAME } from '../lib/core/tls.ts';

const openssl = (folder: string, ...args: string[]): void => {
  execFileSync('openssl', args, { cwd: folder, stdio: ['ignore', 'ignore', 'pipe'] });
};

const newKey = ['-newkey', 'ec', '-pkeyopt', 'ec_paramgen_curve:prime256v1', '-nodes'];

/** Absolute path of the authority's PEM in `folder`; its key is beside it. */
export function authority(folder: string, name = 'ca'): string {
  const subject = ['-subj', `/CN=${name}`, '-days', '30'];
  openssl(folder, 'req', '-x509', ...newKey, '-keyout', `${name}.key`, '-out', `${name}.crt`, ...subject);
  return path.join(folder, `${name}.crt`);
}

/** A certificate of that authority with its key. */
export function certificate(
  folder: string,
  name: string,
  options: { ca?: string; dns?: string; subject?: string } = {},
): { cert: string; key: string } {
  const { ca = 'ca', dns = AGENT_TLS_NAME, subject = name } = options;
  writeFileSync(path.join(folder, `${name}.ext`), `subjectAltName=DNS:${dns}\n`);
  openssl(
    folder,
    'req',
    ...newKey,
    '-keyout',
    `${name}.key`,
    '-out',
    `${name}.csr`,
    '-subj',
    `/CN=${subject}`,
  );
  const signed = ['-CA', `${ca}.crt`, '-CAkey', `${ca}.key`, '-CAcreateserial', '-days', '30'];
  openssl(
    folder,
    ...['x509', '-req', '-in', `${name}.csr`, ...signed],
    ...['-out', `${name}.crt`, '-extfile', `${name}.ext`],
  );
  return { cert: path.join(folder, `${name}.crt`), key: path.join(folder, `${name}.key`) };
}
