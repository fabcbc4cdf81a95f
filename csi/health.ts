/** /healthz and /readyz for kubelet's probes: HTTP and nothing else, for a process that has no other port. */
import { createServer } from 'node:http';
import type { AddressInfo } from 'node:net';
import type { Address } from '../lib/agent/config.ts';

export interface Health {
  port: number;
  close(): Promise<void>;
}

/** @param notReady why /readyz answers 503; null: it answers 200 */
export async function serveHealth(address: Address, notReady: () => string | null): Promise<Health> {
  const server = createServer({ maxHeaderSize: 4096, requestTimeout: 5000 }, (request, response) => {
    const known = request.method === 'GET' && /^\/(healthz|readyz)$/.test(request.url ?? '');
    const problem = request.url === '/readyz' ? notReady() : null;
    response.writeHead(known ? (problem === null ? 200 : 503) : 404, {
      'content-type': 'text/plain',
      connection: 'close',
    });
    response.end(known ? `${problem ?? 'ok'}\n` : 'not found\n');
  });
  server.maxConnections = 16;
  await new Promise<void>((resolve, reject) => {
    server.once('error', reject).listen(address.port, address.host, resolve);
  });
  return {
    port: (server.address() as AddressInfo).port,
    close: () =>
      new Promise((resolve) => {
        server.close(() => resolve());
        server.closeAllConnections();
      }),
  };
}
