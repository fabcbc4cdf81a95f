/**
 * rclone checks a certificate against the host of the URL alone, and an agent's certificate names no address. So it is
 * given a URL with the name that the certificate has and a unix socket to dial; what it sends there goes to the
 * source's address as it is: TLS is between rclone and the source.
 */
import { mkdtemp, rm } from 'node:fs/promises';
import { connect, createServer, type Socket } from 'node:net';
import { tmpdir } from 'node:os';
import path from 'node:path';

export interface Relay {
  /** absolute path of the unix socket, in a folder that only this user can enter */
  socket: string;
  close(): Promise<void>;
}

/** @param to host and port that every connection is passed on to */
export async function openRelay(to: { host: string; port: number }): Promise<Relay> {
  const folder = await mkdtemp(path.join(tmpdir(), 'sv-relay-')); // mode 0700 by itself
  const socket = path.join(folder, 's');
  const open = new Set<Socket>();
  const server = createServer({ allowHalfOpen: true }, (near) => {
    const far = connect({ ...to, allowHalfOpen: true, noDelay: true });
    for (const [one, other] of [
      [near, far],
      [far, near],
    ] as const) {
      open.add(one);
      one.on('error', () => other.destroy());
      one.on('close', () => {
        open.delete(one);
        other.destroy();
      });
      one.pipe(other);
    }
  });
  try {
    await new Promise<void>((resolve, reject) => {
      server.once('error', reject);
      server.listen(socket, resolve);
    });
  } catch (error) {
    await rm(folder, { recursive: true, force: true });
    throw error;
  }
  return {
    socket,
    async close() {
      const closed = new Promise<void>((resolve) => server.close(() => resolve()));
      for (const one of open) one.destroy();
      await closed;
      await rm(folder, { recursive: true, force: true });
    },
  };
}
