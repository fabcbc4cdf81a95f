import t from 'tap';
import type { Kube } from '../../controller/cluster/types.ts';
import { NodesNow } from '../../controller/confirm.ts';
import { atRest } from './plan-world.ts';

function asked(status: 'True' | 'Unknown' | null) {
  const state = { calls: 0, at: 0, fails: false, status };
  const find = async () => {
    state.calls++;
    if (state.fails) throw new Error('no answer');
    return state.status === null
      ? null
      : { metadata: { name: 'a' }, status: { conditions: [{ type: 'Ready', status: state.status }] } };
  };
  return { state, nodes: new NodesNow({ find: find as unknown as Kube['find'] }, { boot: () => state.at }) };
}
const seen = (ready: boolean) => {
  const world = atRest();
  world.on('a').ready = ready;
  const observed = world.observed();
  return { observed, ready: () => observed.nodes.find((one) => one.name === 'a')?.ready };
};

t.test('a node that a late copy calls NotReady is Ready when the API server says so', async (t) => {
  const { nodes, state } = asked('True');
  const late = seen(false);
  await nodes.confirm(late.observed);
  t.equal(late.ready(), true);
  t.equal(state.calls, 1);
});

t.test('a node that is lost stays lost, a Ready one is not asked for', async (t) => {
  const { nodes, state } = asked('Unknown');
  const lost = seen(false);
  await nodes.confirm(lost.observed);
  t.equal(lost.ready(), false);
  await nodes.confirm(seen(true).observed);
  t.equal(state.calls, 1);
  const gone = asked(null);
  const other = seen(false);
  await gone.nodes.confirm(other.observed);
  t.equal(other.ready(), false);
});

t.test('a hundred volumes of a lost node cost one question a second', async (t) => {
  const { nodes, state } = asked('Unknown');
  await Promise.all(Array.from({ length: 100 }, () => nodes.confirm(seen(false).observed)));
  t.equal(state.calls, 1);
  state.at = 1000;
  state.status = 'True';
  const back = seen(false);
  await nodes.confirm(back.observed);
  t.equal(back.ready(), true);
});

t.test('without an answer nothing is decided, and the next look asks again', async (t) => {
  const { nodes, state } = asked('Unknown');
  state.fails = true;
  await t.rejects(nodes.confirm(seen(false).observed), /no answer/);
  state.fails = false;
  await nodes.confirm(seen(false).observed);
  t.equal(state.calls, 2);
});
