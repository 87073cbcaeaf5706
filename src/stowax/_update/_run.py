"""Running a step with its state in host memory: loops over blocks, copies both ways.

How it is called (by `_state._stream`): the step is traced to a jaxpr on specs in device
memory, with marked functions rewritten. `stream_update` finds the loops. What is jitted
is then

    def step(*args):
        return run_streamed(streamed, args, in_turn=target.platform != "tpu")

with the arguments in `streamed.host_inputs` given in host memory (`pinned_host`) and
donated. The outputs in `streamed.host_outputs` are in host memory by their types, and
`jax.jit` leaves them there; `out_shardings` may say so, too, and has to under a mesh
where the outputs' partition is to be certain.

The loops themselves are in `_loop`.
"""

import functools
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from .._jaxprs._jaxpr import bind
from .._layers._axis_order import as_it_is_typed, as_it_lies, lying
from .._layers._boundary import Emission
from .._layers._host_layers import sharding_over
from ._awaited import after_all, can_wait_for
from ._fed import run_fed
from ._finished import finished_before
from ._host import run_on_host, runs_on_host
from ._loop import Loop
from ._order import unawaited_readers
from ._plain_types import in_plain_types
from ._proof import not_proven, prove
from ._record import Group, Streamed
from ._totals import last_total


def run_streamed(
    streamed: Streamed,
    args: Sequence[Any],
    *,
    in_turn: bool = True,
    boundary: Mapping[str, Emission] | None = None,
    lean: bool = False,
    on_host: Collection[int] = (),
    late: bool = True,
) -> list[Any]:
    """The step's flat outputs; those in `streamed.host_outputs` are in host memory.

    **Arguments:** `args` are the step's flat inputs, those in `streamed.host_inputs` in
    host memory. `in_turn` makes it a dependency that a block is written after another
    one of the same leaf is read. A GPU's compiler needs that (it would copy the whole
    buffer, in every iteration); a TPU's does not. `boundary` has the loops of stacks
    that `streamed` was found with, `lean` and `late` are how they fetch parameters and
    write gradients (`_passes.HostPlan`; what is best for the compiler comes first).
    `on_host` are the inputs that the host's processor updates, where the device has no
    part in it.

    **Raises:** `InternalError` for a schedule that is not proven (`_proof`).
    """
    if unproven := prove(streamed, on_host):
        raise not_proven(unproven)
    program, orders = streamed.program, streamed.orders
    args = [as_it_lies(a, orders.get(i)) for i, a in enumerate(args)]
    host = {i: args[i] for i in streamed.host_outputs.values()}
    env = {**program.constants(), **dict(enumerate(args))}
    for leaf in host:
        del env[leaf]
    signs: list[Any] = []  # when these are there, the loops before are done
    latest: list[Any] = []  # a number that no compiler knows, for the first loop
    passed: dict[int, Any] = {}  # a number that layers' loops make, by their position
    # A TPU's compiler minds memory itself.
    before = finished_before(streamed, boundary or {}) if in_turn else {}
    for item in streamed.schedule:
        if isinstance(item, Group) and runs_on_host(item, on_host):
            signs = run_on_host(program, item, env, host, signs or latest)
            continue
        if isinstance(item, Group):
            # An update may need nothing of this step's layers. Were it done before they
            # have read what it writes over, the compiler would copy that whole.
            readers = unawaited_readers(program, item, streamed.feeds)
            old = [passed[reader] for reader in readers if reader in passed]
            begin = [*(signs or latest), *old], bool(signs)
            run = functools.partial(_run_group, streamed, item, in_turn=in_turn)
            results, signs = in_plain_types(run, program, item, env, host, begin)
            env.update(results)
            continue
        node = program.nodes[item]
        if item in before:
            held = jax.lax.optimization_barrier([env[n] for n in before[item]])
            env.update(zip(before[item], held, strict=True))
        if item in streamed.feeds.served:
            how = in_turn, lean, late
            out = run_fed(streamed, item, args, env, boundary or {}, how)
            passed.update([(item, v) for v in out if can_wait_for(v)][:1])
        else:
            out = bind(node.equation, node.read(env))
        env.update(zip(node.outputs, out, strict=True))
        if signs and out and jnp.size(out[0]) > 1:  # a callback gives nothing
            signs = [signs[0], out[0]]
        latest = next(([v] for v in out if can_wait_for(v)), latest)
    return [
        as_it_is_typed(host[leaf], orders.get(leaf))
        if (leaf := streamed.host_outputs.get(k)) is not None
        else env[streamed.feeds.place(number)]
        if isinstance(number, int)
        else number.val
        for k, number in enumerate(program.outputs)
    ]


def _run_group(
    streamed: Streamed,
    group: Group,
    env: Mapping[int, Any],
    host: dict[int, Any],
    begin: tuple[Sequence[Any], bool],
    in_turn: bool,
) -> tuple[dict[int, Any], list[Any]]:
    """Runs one loop: device results by number, and a sign that it is done.

    `host` has the buffers by leaf, and gets what becomes of them. `begin` has signs to
    begin after, and whether they are those of the loop before.
    """
    program = streamed.program
    spread = _spread_over(streamed, group, host)
    loop = Loop(program, group, env, in_turn, spread)
    signs, follows = begin
    if group.gradients and not follows:
        # There when the backward pass is done: before that, blocks would be in its way.
        at = after_all([0] * len(group.cut.piece), signs)
        signs = [loop.fetch_gradient(group.gradients[0], at, group.cut.piece)]
    scalars, arrays = (
        [env[i] for i in numbers if i in program.maker]
        for numbers in (group.others, (*group.sliced, *(v.whole for v in group.views)))
    )
    carry = loop.start(host, [*signs, *(scalars or arrays)])
    carry = jax.lax.fori_loop(0, group.cut.count + 1, loop.step, carry)
    buffers, results, waiting, totals, _ = loop.end(carry)
    shape = program.avals
    for i, buffer in buffers.items():
        host[i] = jnp.reshape(buffer, lying(shape[i].shape, group.cut.order))
    results = {n: jnp.reshape(r, shape[n].shape) for n, r in results.items()}
    totals = {n: last_total(program, n, total) for n, total in totals.items()}
    totals = {n: total.astype(shape[n].dtype) for n, total in totals.items()}
    done = [*results.values(), *waiting.values(), *totals.values(), *buffers.values()]
    return {**results, **totals}, done[:1]


def _spread_over(
    streamed: Streamed, group: Group, host: Mapping[int, Any]
) -> dict[int, Any]:
    """How blocks of each leaf are spread over its mesh: as the leaf is.

    Else the compiler would spread parameters as their moments are, if these have a
    partition and those have none, and move every buffer to be so.
    """
    mine = {*group.reads, *(leaf for _, leaf in group.writes)}
    found: dict[int, Any] = {}
    for leaf in mine & host.keys() & streamed.partitions.keys():
        partition = lying(streamed.partitions[leaf], group.cut.order)
        found[leaf] = sharding_over(host[leaf], group.cut.spread(partition))
    return found
