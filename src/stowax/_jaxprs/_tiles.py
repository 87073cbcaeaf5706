"""A loss over a large vocabulary, in blocks of tokens.

A model's last product makes an array far larger than what it reads: the logits. What is
made of them, a loss, a mask, a soft cap, works token by token, and ends in sums. So it
can run in a loop over blocks of tokens that never has all logits at once. No form of a
loss is looked for: what counts is that every operation has a lane (`_lanes`) along
which the blocks do not know of one another, and that little comes out whole.

`find_tiling` grows such a region from the product on. `tiled` writes the program with
the region as a scan; that is a stack like every other then, whose values are kept, or
computed again block by block. Numbers are those of the program but for the order of
sums over tokens: of scalars, and of gradients that all blocks add to.
"""

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from .. import _jax
from ._elementwise import ELEMENTWISE
from ._jaxpr import Program, bind, spec_of, trace, typed_as
from ._lanes import Axis, Lane, lanes_of, on_blocks
from ._repeats import find_repeats

SCOPE = "stowax.tiles"
"""Named scope of the loop over blocks."""

_WIDER = 2
"""How many times larger than the operand that is cut a product has to be."""

_SEEDS = 4
"""How many of the largest products are tried."""

_ESCAPES = 1 / 8
"""Part of the product's bytes that may come out of the region, sums included."""

_LEAST_ROWS = 128
"""Rows of a block's product: fewer would not fill a matrix unit."""

_FREE = ELEMENTWISE | {
    *("argmax", "broadcast_in_dim", "iota", "reduce_max", "reduce_sum", "reshape"),
    *("slice", "squeeze", "transpose"),
}
"""Operations that run in the region, too, where they make or read large arrays."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Tiling:
    """A region of a program that runs in `count` blocks.

    `lanes` has the region's nodes by their positions, in order, with the lane each is
    cut along; nodes that are not its `own` may run outside, too. `cut` are values from
    outside of which a block reads its part, each with the axis; `returned` those that
    come out in blocks, with theirs, and `summed` those that are the sums over all
    blocks.
    """

    count: int
    lanes: Mapping[int, Lane]
    own: frozenset[int]
    cut: tuple[tuple[int, int], ...]
    returned: tuple[tuple[int, int], ...]
    summed: tuple[int, ...]


def find_tiling(program: Program, most: int) -> Tiling | None:
    """The region around the largest product that may run in at most `most` blocks.

    Over several devices the first axis of what is cut stays whole: batches are spread
    along it.

    >>> from stowax._jaxprs._jaxpr import Program
    >>> from stowax._jaxprs._tiles import find_tiling
    >>> def loss(x, head, labels):
    ...     logp = jax.nn.log_softmax(x @ head)
    ...     return -jnp.take_along_axis(logp, labels[:, None], 1).mean()
    >>> shapes = jnp.ones((4096, 64)), jnp.ones((64, 512)), jnp.ones(4096, int)
    >>> found = find_tiling(Program(jax.make_jaxpr(loss)(*shapes)), 8)
    >>> found.count, found.returned, len(found.summed)
    (8, (), 1)
    """
    barred = {
        k for r in find_repeats(program.jaxpr) for block in r.blocks for k in block
    }
    wide = [(k, side) for k in range(len(program.nodes)) for side in (0, 1)]
    wide = [(k, side) for k, side in wide if _is_wide(program, k, side)]
    wide.sort(key=lambda one: -_bytes(program, program.nodes[one[0]].outputs[0]))
    for seed, side in wide[:_SEEDS]:
        lanes = lanes_of(program.nodes[seed].equation)
        found = [
            _Region(program, barred, seed, side).grown(lane, most)
            for lane in lanes
            if lane.ins[side] is not None
            and not lane.summed
            and not (lane.ins[side] == 0 and _is_spread(program, seed))
            and seed not in barred
        ]
        if any(found):
            return max(filter(None, found), key=lambda tiling: tiling.count)
    return None


def tiled(program: Program, tiling: Tiling) -> Program:
    """The program with its region as a scan over blocks."""
    nodes, beyond = program.nodes, _beyond(program, tiling)
    inside = {o for k in tiling.lanes for o in nodes[k].outputs}
    wanted = {i for k in beyond for i in nodes[k].read_values} | program.outputs_read
    wanted |= {i for k in tiling.lanes for i in nodes[k].read_values} - inside
    made = {*tiling.summed, *(i for i, _ in tiling.returned)}
    made |= {o for k in beyond for o in nodes[k].outputs}
    given = range(program.input_count + program.const_count)
    early = program.closure(wanted - made, given, effects=True)

    def run(*inputs: Any) -> list[Any]:
        env = {**program.constants(), **dict(enumerate(inputs))}

        def run_nodes(positions: Sequence[int]) -> None:
            for k in positions:
                out = bind(nodes[k].equation, nodes[k].read(env))
                env.update(zip(nodes[k].outputs, out, strict=True))

        run_nodes(early)
        with _jax.source_of(nodes[min(tiling.own)].equation), jax.named_scope(SCOPE):
            env.update(_run_blocks(program, tiling, env))
        run_nodes(sorted(beyond))
        return program.read_outputs(env, len(program.outputs))

    inputs = [spec_of(aval) for aval in program.avals[: program.input_count]]
    return Program(trace(run, *inputs))


def is_tiled(equation: Any) -> bool:
    """Whether a scan is a region that runs in blocks."""
    return SCOPE in str(equation.source_info.name_stack)


def _run_blocks(
    program: Program, tiling: Tiling, env: Mapping[int, Any]
) -> dict[int, Any]:
    """The values that come out of a region."""
    count = tiling.count
    starts = [_zero(program.avals[i]) for i in tiling.summed]
    blocks = [_in_blocks(env[i], axis, count) for i, axis in tiling.cut]

    def block(totals: list[Any], parts: list[Any]) -> tuple[list[Any], list[Any]]:
        own: dict[Any, Any] = dict(zip(tiling.cut, parts, strict=True))
        made: dict[int, Any] = {}
        for position, lane in tiling.lanes.items():
            node = program.nodes[position]
            read = [
                atom.val
                if number is None
                else made[number]
                if number in made
                else own.get((number, axis), env.get(number))
                for number, axis, atom in zip(
                    node.inputs, lane.ins, node.equation.invars, strict=True
                )
            ]
            out = bind(on_blocks(node.equation, lane, count), read)
            made.update(zip(node.outputs, out, strict=True))
        sums = [
            total + made[i].astype(total.dtype)
            for total, i in zip(totals, tiling.summed, strict=True)
        ]
        return sums, [made[i] for i, _ in tiling.returned]

    totals, returned = jax.lax.scan(block, starts, blocks, length=count)
    found = {
        i: _joined(value, axis)
        for (i, axis), value in zip(tiling.returned, returned, strict=True)
    }
    found |= dict(zip(tiling.summed, totals, strict=True))
    return {
        i: typed_as(value.astype(program.avals[i].dtype), program.avals[i])
        for i, value in found.items()
    }


def _zero(aval: Any) -> Any:
    """What a sum over blocks starts from: of narrow floats it is made in float32."""
    dtype = aval.dtype
    if jnp.issubdtype(dtype, jnp.floating):
        dtype = jnp.promote_types(dtype, jnp.float32)
    return jnp.zeros(aval.shape, dtype)


def _in_blocks(value: Any, axis: int, count: int) -> Any:
    """An array with its blocks along a first axis of their own."""
    shape = value.shape
    split = (*shape[:axis], count, shape[axis] // count, *shape[axis + 1 :])
    return jnp.moveaxis(jnp.reshape(value, split), axis, 0)


def _joined(blocks: Any, axis: int) -> Any:
    """The array that these are the blocks of."""
    value = jnp.moveaxis(blocks, 0, axis)
    shape = value.shape
    return jnp.reshape(value, (*shape[:axis], -1, *shape[axis + 2 :]))


def _beyond(program: Program, tiling: Tiling) -> set[int]:
    """Positions of the nodes that depend on what comes out of the region."""
    made = {i for i, _ in tiling.returned} | {*tiling.summed}
    found: set[int] = set()
    for position, node in enumerate(program.nodes):
        if position not in tiling.own and not made.isdisjoint(node.inputs):
            found.add(position)
            made.update(node.outputs)
    return found


def _bytes(program: Program, number: int) -> int:
    aval = program.avals[number]
    return math.prod(aval.shape) * int(getattr(aval.dtype, "itemsize", 0))


def _is_spread(program: Program, position: int) -> bool:
    """Whether a node's operands are spread over devices, for all that is known."""
    avals = (v.aval for v in program.nodes[position].equation.invars)
    return any(aval.sharding.mesh.size > 1 for aval in avals)


def _is_wide(program: Program, position: int, side: int) -> bool:
    """Whether a node is a product that is far larger than one of its operands."""
    node = program.nodes[position]
    if node.equation.primitive.name != "dot_general":
        return False
    operand, result = node.inputs[side], node.outputs[0]
    if operand is None:
        return False
    return _bytes(program, result) >= _WIDER * _bytes(program, operand)


class _Region:
    """A region that grows from a product on: what is made in it, and along which axis.

    `lent` are the nodes that run in it beside where they stand. What depends on values
    that come out is `beyond`: nothing in the region may read it.
    """

    def __init__(self, program: Program, barred: set[int], seed: int, side: int):
        self.program, self.barred = program, barred
        self.seed, self.side = seed, side
        self.large = int(_bytes(program, program.nodes[seed].outputs[0]) * _ESCAPES)
        self.lanes: dict[int, Lane] = {}
        self.lent: set[int] = set()
        self.axes: dict[int, Axis] = {}
        self.beyond: set[int] = set()
        self.cut: dict[tuple[int, int], None] = {}
        self.moving: dict[int, bool] = {}

    def grown(self, lane: Lane, most: int) -> Tiling | None:
        """The whole region, if it is worth a loop."""
        nodes = self.program.nodes
        self._add(self.seed, lane)
        for position in range(self.seed + 1, len(nodes)):
            node, own = nodes[position], self._lane_of(position)
            if node.equation.effects:
                return None  # it would run before or after what it did not
            if own is not None:
                self._add(position, own)
            elif any(i in self.axes or i in self.beyond for i in node.inputs):
                self.beyond.update(node.outputs)
        return self._tiling(most)

    def _lane_of(self, position: int) -> Lane | None:
        """Along which lane a node works on the region's blocks; none if it does not."""
        node, axes = self.program.nodes[position], self.axes
        inputs = list(enumerate(node.inputs))
        mine = {k: axes[i] for k, i in inputs if i is not None and i in axes}
        if position in self.barred or not mine or None in mine.values():
            return None
        if any(i in self.beyond for i in node.inputs):
            return None
        for lane in lanes_of(node.equation):
            if all(lane.ins[k] == axis for k, axis in mine.items()):
                return lane
        return None

    def _add(self, position: int, lane: Lane) -> None:
        """A node joins the region; what makes its operands may run in there, too."""
        node = self.program.nodes[position]
        for number, axis in zip(node.inputs, lane.ins, strict=True):
            if number is not None and number not in self.axes:
                self._read(number, axis)
        self.lanes[position] = lane
        self.axes.update(zip(node.outputs, lane.outs, strict=True))

    def _read(self, number: int, axis: Axis) -> None:
        """A value from outside: made in the region, cut, or read whole.

        The cast of a whole operand is made in there: its gradient is added up in the
        type that it had before.
        """
        maker = self.program.maker.get(number, -1)
        node = self.program.nodes[maker] if maker >= 0 else None
        if axis is None:
            if node and node.equation.primitive.name == "convert_element_type":
                self.lanes[maker] = Lane(ins=(None,), outs=(None,))
                self.lent.add(maker)
            return
        lane = None
        if node and self._moves(number):
            lanes = lanes_of(node.equation)
            lane = next((w for w in lanes if w.outs[0] == axis), None)
        if lane is None:
            self.cut[number, axis] = None
        else:
            self.lent.add(maker)
            self._add(maker, lane)

    def _moves(self, number: int) -> bool:
        """Whether what makes an operand runs in the region rather than before it.

        It does if it is nothing much, and it or what it reads makes a large array.
        """
        if number not in self.moving:
            maker = self.program.maker.get(number, -1)
            self.moving[number] = maker not in self.barred and self._makes(maker)
        return self.moving[number]

    def _makes(self, maker: int) -> bool:
        if maker < 0:
            return False
        node = self.program.nodes[maker]
        name = node.equation.primitive.name
        wide = any(_is_wide(self.program, maker, side) for side in (0, 1))
        if not (wide or name in _FREE):
            return False
        read = node.read_values
        large = any(
            _bytes(self.program, i) > self.large for i in (*node.outputs, *read)
        )
        return large or any(self._moves(i) for i in read)

    def _tiling(self, most: int) -> Tiling | None:
        program, own = self.program, self.lanes.keys() - self.lent
        made = [o for k in sorted(own) for o in program.nodes[k].outputs]
        outside = (n for k, n in enumerate(program.nodes) if k not in own)
        read = {i for node in outside for i in node.inputs} | program.outputs_read
        out = [(i, self.axes[i]) for i in made if i in read]
        returned = tuple((i, axis) for i, axis in out if axis is not None)
        escaping = sum(_bytes(program, i) for i, _ in out)
        count = self._count(most)
        if count is None or not out or escaping > self.large:
            return None
        return Tiling(
            count=count,
            lanes=dict(sorted(self.lanes.items())),
            own=frozenset(own),
            cut=tuple(self.cut),
            returned=returned,
            summed=tuple(i for i, axis in out if axis is None),
        )

    def _count(self, most: int) -> int | None:
        """The most blocks that all axes can be cut in."""
        avals, equation = self.program.avals, self.program.nodes[self.seed].equation
        cut = [(i, axis) for i, axis in self.axes.items() if axis is not None]
        size = math.gcd(*(avals[i].shape[axis] for i, axis in [*cut, *self.cut]))
        over = equation.params["dimension_numbers"][0][self.side]
        shape = equation.invars[self.side].aval.shape
        rows = math.prod(n for k, n in enumerate(shape) if k not in over)
        most = min(most, rows // _LEAST_ROWS)
        return next((n for n in range(most, 1, -1) if size % n == 0), None)
