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

A loop's iteration fetches the block of each leaf, computes, and writes what the
iteration *before* it computed. So blocks go in and out at once, which takes two leaves:
a buffer that is read and written in one iteration is either read first or written
first, or the compiler copies it whole. The largest leaf is written first and then read,
the others are read first and then written; while the one goes out, the others come in.
`_after` makes the order a dependency. Nothing is left over after a loop: copies outside
of loops would be moved, some to the very beginning of the step, and hold memory.
"""

import functools
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from .. import _jax
from .._jaxprs._jaxpr import Node, Program, bind
from .._layers._axis_order import as_it_is_typed, as_it_lies, lying
from .._layers._boundary import Emission
from .._layers._host_layers import sharding_over, split
from .._layers._host_slots import empty_array, to_device, to_host
from ._awaited import after_all, can_wait_for, in_turn, zero_after
from ._fed import run_fed
from ._feed import HostValue
from ._host import run_on_host, runs_on_host
from ._order import unawaited_readers
from ._pieces import (
    as_typed,
    block_of,
    cut_out,
    put_in,
    starts_in_rows,
    typed_starts,
    view_starts,
)
from ._plain_types import in_plain_types
from ._proof import not_proven, prove
from ._record import Group, Streamed
from ._totals import first_total, last_total, next_total


def scope_name(leaf: int) -> str:
    """Named scope of the copies of the leaf that is the step's input `leaf`."""
    return f"stowax.state.{leaf}"


def gradient_scope(leaf: int) -> str:
    """Named scope of the copies of a gradient in host memory, by its parameter."""
    return f"stowax.gradient.{leaf}"


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
    loop = _Loop(program, group, env, in_turn, spread)
    signs, follows = begin
    if group.gradients and not follows:
        # There when the backward pass is done: before that, blocks would be in its way.
        at = after_all([0] * len(group.cut.piece), signs)
        signs = [loop.fetch_gradient(group.gradients[0], at)]
    scalars, arrays = (
        [env[i] for i in numbers if i in program.maker]
        for numbers in (group.others, (*group.sliced, *(v.whole for v in group.views)))
    )
    carry = loop.start(host, [*signs, *(scalars or arrays)])
    buffers, results, waiting, totals, _ = jax.lax.fori_loop(
        0, group.cut.count + 1, loop.step, carry
    )
    shape = program.avals
    for i, buffer in buffers.items():
        host[i] = jnp.reshape(buffer, lying(shape[i].shape, group.cut.order))
    results = {n: jnp.reshape(r, shape[n].shape) for n, r in results.items()}
    totals = {n: last_total(program, n, total) for n, total in totals.items()}
    totals = {n: total.astype(shape[n].dtype) for n, total in totals.items()}
    done = [*results.values(), *waiting.values(), *totals.values(), *buffers.values()]
    return {**results, **totals}, done[:1]


class _Loop:
    """One group's loop.

    Its carry: host buffers by leaf, results by number, blocks that wait to be written
    by leaf, totals by number, and a number that is zero, which no compiler knows. Every
    place in host memory is computed with it: a GPU's compiler is wrong about places
    that it works out beforehand (`_hlo._offsets`).
    """

    def __init__(
        self,
        program: Program,
        group: Group,
        env: Mapping[int, Any],
        in_turn: bool,
        spread: Mapping[int, Any],
    ):
        self.in_turn, self.spread = in_turn, spread
        self.program, self.group, cut = program, group, group.cut
        self.scalars = {i: env[i] for i in group.others}
        self.sliced = {i: jnp.reshape(env[i], cut.typed_rows) for i in group.sliced}
        self.views = {
            v: jnp.reshape(env[v.whole], (-1, *cut.typed_rows)) for v in group.views
        }
        self.env = env
        self.makes = {leaf: value for value, leaf in group.writes}
        avals = program.avals
        both = [leaf for leaf in group.reads if leaf in self.makes]
        weight = {leaf: avals[leaf].dtype.itemsize for leaf in both}
        self.first = max(both, key=weight.__getitem__, default=None)
        """The leaf that is written before it is read."""

    def start(self, host: Mapping[int, Any], signs: Sequence[Any]) -> Any:
        """The carry of the first iteration, which begins after `signs` are there."""
        group, avals = self.group, self.program.avals
        leaves = dict.fromkeys([i for i in group.reads if i in host] + [*self.makes])
        buffers = {leaf: jnp.reshape(host[leaf], group.cut.rows) for leaf in leaves}
        results = {
            number: empty_array(group.cut.typed_rows, avals[number])
            if place is None
            else self.sliced[place]
            for number, place in group.gives
        }
        waiting, piece = {}, group.cut.piece
        # Written over by the next iteration; there when the loop may begin.
        (blank,) = after_all([0], signs if self.first is None else ())
        for leaf in self.makes:
            if leaf == self.first:
                # Its first block goes back as it came, before it is read.
                at = after_all([0] * len(piece), signs)
                waiting[leaf] = self._fetch(buffers[leaf], leaf, at)
            else:
                waiting[leaf] = jnp.full(piece, blank, avals[leaf].dtype)
        # Signs may be constants: a compiler knows those.
        data = [waiting[self.first]] if self.first is not None else []
        data = data or [*self.sliced.values(), *self.views.values()][:1]
        zero = zero_after([*data, *signs])
        totals = {n: first_total(self.program, n, piece) for n in group.totals}
        return buffers, results, waiting, totals, zero

    def step(self, i: Any, carry: Any) -> Any:
        """Iteration `i`: writes block `i - 1`, fetches and computes block `i`.

        The last one, `i == count`, only writes: what it computes is dropped.
        """
        buffers, results, waiting, totals, zero = carry
        buffers, totals, cut = dict(buffers), dict(totals), self.group.cut
        i = jnp.int32(i)
        now = jnp.minimum(jnp.maximum(i, zero), cut.count - 1)
        here, typed = starts_in_rows(cut, now), typed_starts(cut, now)
        # Two ways to the same place: were the index of the first write the other
        # writes' too, a GPU's compiler would compute both at once, after the fetch.
        first, before = (
            starts_in_rows(cut, jnp.maximum(i - 1, zero)),
            starts_in_rows(cut, jnp.maximum(jnp.maximum(i, zero) - 1, 0)),
        )
        fetched = {}
        for leaf in sorted(buffers, key=lambda leaf: leaf != self.first):
            block = waiting.get(leaf)
            if leaf == self.first:
                buffers[leaf] = self._write(buffers[leaf], block, leaf, first)
                fetched[leaf] = self._fetch(buffers[leaf], leaf, here)
                continue
            if leaf in self.group.reads:
                fetched[leaf] = self._fetch(buffers[leaf], leaf, here)
            if block is not None:
                at = before
                if leaf in fetched and self.in_turn:
                    at, block = in_turn(at, block, fetched[leaf], zero)
                buffers[leaf] = self._write(buffers[leaf], block, leaf, at)
        # What is written in an input's place is read from there, too: the input itself
        # beside it would be a second array.
        places = {place: number for number, place in self.group.gives}
        sliced = {
            i: block_of(cut, results.get(places.get(i), array), typed)
            for i, array in self.sliced.items()
        }
        parts = {
            v.number: block_of(cut, whole, typed, v.index)
            for v, whole in self.views.items()
        }
        for value in self.group.gradients:
            parts[value.number] = self.fetch_gradient(value, here)
        for leaf in self.group.reads:
            if leaf not in fetched and leaf not in parts:  # nothing takes its place
                whole = jnp.reshape(self.env[leaf], cut.rows)
                parts[leaf] = self._fetch(whole, leaf, here)
        values = self._compute({**fetched, **sliced, **parts}, now)
        written = {}
        for number, place in self.group.gives:
            whole = results[number]
            old = block_of(cut, whole, typed) if place is None else sliced[place]
            last = jax.lax.broadcast(i >= cut.count, cut.piece)
            new = jax.lax.select(last, old, values[number])
            written[number] = put_in(whole, as_typed(cut, new), typed)
        made = {leaf: values[value] for leaf, value in self.makes.items()}
        for number, total in totals.items():
            more = next_total(self.program, number, total, values)
            last = jax.lax.broadcast(i >= cut.count, total.shape)
            totals[number] = jax.lax.select(last, total, more)
        return buffers, written, made, totals, zero

    def _fetch(self, buffer: Any, leaf: int, at: Sequence[Any]) -> Any:
        with jax.named_scope(scope_name(leaf)):
            block = to_device(cut_out(buffer, at, self.group.cut.piece))
            return split(block, self.spread.get(leaf))

    def fetch_gradient(self, value: HostValue, at: Sequence[Any]) -> Any:
        """The block at `at` of a gradient that a stack's loop left in host memory."""
        cut, shape, at = self.group.cut, [*self.group.cut.rows], [*at]
        if value.index is not None:
            axis = cut.row_axis  # where the layers are, too (`_fed`)
            at[axis] += value.index * shape[axis]
            shape[axis] = -1
        with jax.named_scope(gradient_scope(value.leaf)):
            whole = jnp.reshape(self.env[value.made], shape)
            return to_device(cut_out(whole, at, cut.piece))

    def _write(self, buffer: Any, block: Any, leaf: int, at: Sequence[Any]) -> Any:
        with jax.named_scope(scope_name(leaf)):
            block = split(block, self.spread.get(leaf))
            return put_in(buffer, to_host(block), at)

    def _compute(self, blocks: Mapping[int, Any], index: Any) -> dict[int, Any]:
        """Every value of the group, of block `index`."""
        group = self.group
        values = {**blocks, **self.scalars}
        for position in group.nodes:
            node = self.program.nodes[position]
            if node.outputs[0] in group.totals:
                continue  # made of all blocks
            operands = [
                atom.val
                if number is None
                else values[number]
                if number in values
                else self._spread(node, number, index)
                for number, atom in zip(node.inputs, node.equation.invars, strict=True)
            ]
            if node.equation.primitive.name == "broadcast_in_dim":
                # A literal is a number of Python's; the equation says of which type.
                small = jnp.asarray(operands[0], node.equation.outvars[0].aval.dtype)
                axes = range(small.ndim)
                out = [jax.lax.broadcast_in_dim(small, group.cut.piece, axes)]
            elif node.equation.primitive.name == "sharding_constraint":
                out = operands
            else:
                out = _jax.bind_here(node.equation, operands)
            values.update(zip(node.outputs, out, strict=True))
        return values

    def _spread(self, node: Node, number: int, index: Any) -> Any:
        """Of an array that is broadcast, the part that belongs to block `index`."""
        cut, whole = self.group.cut, self.env[number]
        axes = node.equation.params.get("broadcast_dimensions", range(whole.ndim))
        shape = [1] * len(cut.view)
        for axis, size in zip(axes, whole.shape, strict=True):
            shape[axis] = size
        whole = as_it_lies(jnp.reshape(whole, shape), cut.order)
        whole = jnp.reshape(whole, cut.viewed(whole.shape))
        cuts = [mine == size for mine, size in zip(whole.shape, cut.shape, strict=True)]
        at = view_starts(cut, index)
        starts = [a if c else 0 for a, c in zip(at, cuts, strict=True)]
        block = [b if c else 1 for b, c in zip(cut.block, cuts, strict=True)]
        return jnp.reshape(cut_out(whole, starts, block), block[cut.merged :])


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
