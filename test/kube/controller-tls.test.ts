/** Agents that serve TLS: the controller speaks to them by the authority that it was given, and to nobody else. */
import { once } from 'node:events';
import { readFileSync } from 'node:fs';
import http from 'node:http';
import https from 'node:https';
import type { AddressInfo } from 'node:net';
import tap from 'tap';
import { Agents } from '../../controller/act/agents.ts';
import { PODS } from '../../controller/cluster/index.ts';
import { PREFIX } from '../../controller/plan/types.ts';
import { authority, certificate } from '../certificates.ts';
import { noKube } from './harness/programs.ts';
import { clock } from './helpers.ts';
import { SYSTEM, TestCluster } from './test-cluster.ts';

tap.test('agents that serve TLS', { skip: noKube(), timeout: 60_000 }, async (t) => {
  const cluster = await TestCluster.start({ nodes: [] });
  const { folder } = cluster.server;
  const ca = readFileSync(authority(folder), 'utf8');
  const pair = (dns?: string): { cert: Buffer; key: Buffer } => {
    const files = certificate(folder, dns ?? 'agent', dns === undefined ? {} : { dns });
    return { cert: readFileSync(files.cert), key: readFileSync(files.key) };
  };
  const fronts: https.Server[] = [];
  for (const node of ['a', 'b']) {
    const agent = await cluster.agents.add(node);
    const front = https.createServer(pair(), (request, response) => {
      const onward = http.request(
        agent.url + request.url,
        { method: request.method, headers: request.headers },
        (answer) => {
          response.writeHead(answer.statusCode ?? 502, answer.headers);
          answer.pipe(response);
        },
      );
      onward.on('error', () => response.destroy());
      request.pipe(onward);
    });
    front.listen(0, '127.0.0.1');
    await once(front, 'listening');
    fronts.push(front);
    const { port } = front.address() as AddressInfo;
    await cluster.node(node);
    await cluster.agentPod({ node, http: port, webdav: port });
    await cluster.kube.merge(
      PODS,
      { namespace: SYSTEM, name: `agent-${node}` },
      { metadata: { annotations: { [`${PREFIX}scheme`]: 'https' } } },
    );
  }
  const controller = await cluster.controller('one', { ca });
  t.teardown(async () => {
    await controller.stop();
    for (const one of fronts) {
      one.closeAllConnections();
      one.close();
    }
    await cluster.stop();
  });

  await t.test('with the authority a volume is replicated and moved', async (t) => {
    await cluster.claim('saves', { 'failover-enabled': 'true', 'failover-grace-period': '1s' });
    await cluster.workload('saves', 'a');
    const { status } = await cluster.settled('saves', 1);
    t.equal(status?.activeNode, 'a');
    const [start] = cluster.agents.calls('/watch/start', 'a');
    t.match(start?.body, { source: { url: /^https:/ }, targets: [{ node: 'b', url: /^https:/ }] });
    await cluster.cordon('a', true);
    await cluster.waitFor('saves', 'has moved', (one) => one.status?.epoch === 2, 25_000);
  });

  await t.test('without it, and to a certificate of another name, no token is sent', async (t) => {
    const { port } = (fronts[0] as https.Server).address() as AddressInfo;
    const place = { node: 'a', pool: 'default', webdavUrl: '', ready: true, uid: 'x', pod: 'x' };
    let asked = 0;
    const call = async (url: string, ca?: string) => {
      const agents = new Agents({ clock, token: () => cluster.agents.token, ca });
      agents.set([{ ...place, url }]);
      try {
        return await agents.call('default', 'a', { path: `/replication/check-${++asked}` });
      } finally {
        agents.close();
      }
    };
    await t.rejects(call(`https://127.0.0.1:${port}`), /SELF_SIGNED_CERT|UNABLE_TO_(VERIFY|GET)/);
    const named = https.createServer(pair('example.org'), (_request, response) => response.end('{}'));
    named.listen(0, '127.0.0.1');
    await once(named, 'listening');
    fronts.push(named);
    const elsewhere = (named.address() as AddressInfo).port;
    const other = await call(`https://127.0.0.1:${elsewhere}`, ca).catch((error: Error) => error);
    t.match((other as Error).message, /ALTNAME/);
    t.equal(cluster.agents.calls('/replication/check-').length, 0, 'nothing has reached the agent');
    const known = await call(`https://127.0.0.1:${port}`, ca).catch(
      (error: Error & { code?: string }) => error,
    );
    t.match(known, { code: 'NOT_FOUND' }, 'with the authority it is reached');
  });
});
