/** The agent's certificate, and its renewal: cert-manager and kubelet replace the files under a running process. */
import { X509Certificate } from 'node:crypto';
import { readFileSync, statSync } from 'node:fs';
import type { Server as HttpServer } from 'node:http';
import { Server as TlsServer } from 'node:tls';
import { SimpleVolumeError } from '../core/errors.ts';
import type { Logger } from '../core/parts.ts';
import { AGENT_TLS_NAME } from '../core/tls.ts';

export interface TlsFiles {
  /** PEM certificate chain */
  certFile: string;
  /** PEM key */
  keyFile: string;
}

export interface ServedTls {
  cert: Buffer;
  key: Buffer;
  minVersion: 'TLSv1.2';
}

const wrong = (flag: string, text: string): never => {
  throw new SimpleVolumeError('FIELD_INVALID', `--${flag} ${text}`, { field: `--${flag}` });
};

function read(flag: string, file: string): Buffer {
  try {
    return readFileSync(file);
  } catch (error) {
    return wrong(flag, `${file} cannot be read: ${(error as NodeJS.ErrnoException).code ?? error}`);
  }
}

/**
 * Both files, checked.
 * @throws FIELD_INVALID naming the flag: unreadable, not PEM, another key, without the name that callers look for
 */
export function readTls({ certFile, keyFile }: TlsFiles): ServedTls {
  const cert = read('tls-cert', certFile);
  const key = read('tls-key', keyFile);
  let parsed: X509Certificate;
  try {
    parsed = new X509Certificate(cert);
  } catch {
    return wrong('tls-cert', `${certFile} holds no PEM certificate`);
  }
  if (parsed.checkHost(AGENT_TLS_NAME) === undefined)
    wrong(
      'tls-cert',
      `${certFile} must carry the DNS name ${AGENT_TLS_NAME}, it has ${parsed.subjectAltName ?? 'none'}`,
    );
  try {
    // Made and thrown away: a pair that does not fit shows here.
    new TlsServer({ cert, key }).removeAllListeners();
  } catch (error) {
    wrong(
      'tls-key',
      `${keyFile} is no key for ${certFile}: ${(error as NodeJS.ErrnoException).code ?? error}`,
    );
  }
  return { cert, key, minVersion: 'TLSv1.2' };
}

/** PEM authorities of a file. @throws FIELD_INVALID naming the flag */
export function readAuthorities(file: string): string {
  const text = read('ca-file', file).toString('utf8');
  if (!text.includes('-----BEGIN CERTIFICATE-----')) wrong('ca-file', `${file} holds no PEM certificate`);
  return text;
}

/** Serves with new files once both are there and fit; until then with the ones before. */
export class TlsRenewal {
  readonly #files: TlsFiles;
  readonly #servers: readonly TlsServer[];
  readonly #log: Logger;
  #stamp: string;

  constructor(files: TlsFiles, servers: readonly HttpServer[], log: Logger) {
    this.#files = files;
    this.#servers = servers as unknown as readonly TlsServer[];
    this.#log = log;
    this.#stamp = this.#now();
  }

  #now(): string {
    return [this.#files.certFile, this.#files.keyFile]
      .map((file) => {
        const s = statSync(file, { throwIfNoEntry: false, bigint: true });
        return s ? `${s.ino}.${s.mtimeNs}` : '';
      })
      .join();
  }

  /** Cheap: two stat calls when nothing has changed. */
  look(): void {
    const now = this.#now();
    if (now === this.#stamp) return;
    try {
      const context = readTls(this.#files);
      for (const server of this.#servers) server.setSecureContext(context);
      this.#log.info({ cert: this.#files.certFile }, 'serves with the new certificate');
    } catch (error) {
      this.#log.warn(
        { error: (error as Error).message },
        'the new certificate is not usable; the old one stays',
      );
    }
    this.#stamp = now;
  }
}
