import { createHash } from 'node:crypto';
import { join } from 'node:path';
import { DatabaseSync } from 'node:sqlite';
import { fileURLToPath } from 'node:url';
import t from 'tap';
import {
  decide,
  first,
  generationsPass,
  killNode,
  Load,
  must,
  needs,
  promote,
  replicate,
  sleep,
  startCluster,
  waitFor,
} from './harness.ts';

t.setTimeout(280_000);
const VOLUME = { namespace: 'real', volume: 'bank' };
const ROUNDS = 5;

/** Number and time of the last commit that the writer reported. */
function lastCommit(load: Load): { n: number; at: number } {
  const lines = load.output.split('\n');
  lines.pop();
  const [n, at] = (lines.at(-1) ?? '0 0').split(' ').map(Number) as [number, number];
  return { n, at };
}

function faultsOf(file: string): { faults: string[]; n: number } {
  const database = new DatabaseSync(file);
  const faults: string[] = [];
  const total = database.prepare('SELECT sum(money) AS s FROM accounts').get() as { s: number };
  if (total.s !== 100_000) faults.push(`the accounts hold ${total.s}, not 100000`);
  let expected = 0;
  for (const row of database.prepare('SELECT * FROM moves ORDER BY n').iterate() as Iterable<
    Record<'n' | 'a' | 'b' | 'amount', number> & { sum: string }
  >) {
    expected += 1;
    const sum = createHash('sha256').update(`${row.n} ${row.a} ${row.b} ${row.amount}`).digest('hex');
    if (row.n !== expected || row.sum !== sum) faults.push(`move ${row.n} where ${expected} should be`);
  }
  for (const row of database.prepare('SELECT * FROM blobs').iterate() as Iterable<{
    n: number;
    data: Uint8Array;
    sum: string;
  }>) {
    if (createHash('sha256').update(row.data).digest('hex') !== row.sum)
      faults.push(`the blob of move ${row.n} is torn`);
    if (row.n > expected) faults.push(`a blob of move ${row.n}, but the journal ends at ${expected}`);
  }
  database.close();
  return { faults, n: expected };
}

t.test(
  'D45: a WAL database under constant load survives node after node dying, whole each time, with only the last moments lost',
  { skip: needs('sqlite3'), timeout: 240_000 },
  async (t) => {
    const cluster = await startCluster(t);
    const writer = fileURLToPath(new URL('sqlite-writer.ts', import.meta.url));
    let active = 'a';
    let epoch = 1;
    const lineage: [number, number][] = [[1, 1]];
    await replicate(cluster, VOLUME);
    for (let round = 1; round <= ROUNDS; round++) {
      const load = new Load(process.execPath, [writer, join(cluster.agent(active).live(VOLUME), 'bank.db')]);
      t.teardown(() => load.end());
      await waitFor('the writer', () => lastCommit(load).n > 0);
      const others = [...cluster.agents.keys()].filter((node) => node !== active);
      await generationsPass(cluster, VOLUME, 3, others);
      await sleep((round * 137) % 400);

      await killNode(cluster, active, load);
      const last = lastCommit(load);
      const decision = await decide(cluster, VOLUME, { active, epoch, lineage });
      const folder = await promote(cluster, VOLUME, decision);
      const file = join(folder, 'bank.db');
      t.equal(
        (await must('sqlite3', [file, 'pragma integrity_check'])).trim(),
        'ok',
        `round ${round}: ${active} died, ${decision.target} promoted with ${decision.dataLoss?.generation}: integrity_check`,
      );
      const found = faultsOf(file);
      t.same(found.faults, [], first(found.faults));
      t.ok(found.n <= last.n + 1, `the copy ends at ${found.n}, the writer had committed ${last.n}`);
      const promised = decision.dataLoss?.atMostMs ?? 0;
      const lastKept = timeOf(load, found.n);
      t.ok(
        last.at - lastKept <= promised,
        `${last.at - lastKept} ms of commits are lost, at most ${Math.round(promised)} ms were announced`,
      );

      // The dead node comes back with its old state and serves as a replica of the new line.
      await cluster.agent(active).start();
      epoch = decision.epoch;
      const held = await cluster.agent(decision.target).status(VOLUME);
      const back = active;
      active = decision.target;
      await promote(
        cluster,
        VOLUME,
        decision,
        [...cluster.agents.keys()].filter((node) => node !== active),
      );
      const generation = await cluster.settle(active, VOLUME);
      for (const node of cluster.agents.keys())
        if (node !== active) await cluster.reached(node, VOLUME, generation);
      t.match(generation, new RegExp(`^${epoch}-`), `${back} is a replica of epoch ${epoch}`);
      lineage.push([
        epoch,
        Number(held?.generation?.split('-')[1] ?? 0) + (held?.generation?.startsWith(`${epoch}-`) ? 0 : 1),
      ]);
    }
  },
);

/** When the writer reported commit `n`; the newest report before it when that one was never printed. */
function timeOf(load: Load, n: number): number {
  let best = 0;
  for (const line of load.output.split('\n').slice(0, -1)) {
    const [number, at] = line.split(' ').map(Number) as [number, number];
    if (number <= n) best = at;
  }
  return best;
}
