"""Which part of a program may run in blocks of tokens (`_tiles`): it grows.

From a large product on, every operation joins that has a lane in which what it reads of
the region is cut as it was made. What little makes its other operands is run in there,
too. Numbers depend on this alone, so a region is checked once more when it is grown
(`_is_sound`).
"""

import dataclasses
import math
from collections.abc import Mapping, Sequence

from .. import _jax
from ._elementwise import ELEMENTWISE
from ._jaxpr import Program
from ._lanes import Axis, Lane, is_spread, lanes_of
from ._repeats import find_repeats
from ._wide import bytes_of, wide_sides

_SEEDS = 4
"""How many of the largest products are tried."""

ESCAPES = 1 / 8
"""Part of the product's bytes that may come out of the region, sums included."""

_ESCAPES_LAYER = 1 / 2
"""The same within a layer: what feeds forward is 2 to 4 times as wide as its result."""

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

    Every axis that is cut has so many `steps`, of one or more places; a block has a
    whole number of them. Those that blocks of equal size leave run by themselves.
    `lanes` has the region's nodes by their positions, in order, with the lane each is
    cut along; nodes that are not its `own` may run outside, too. `cut` are values from
    outside of which a block reads its part, each with the axis; `returned` those that
    come out in blocks, with theirs, and `summed` those that are the sums over all
    blocks. `bytes` are those of the product.
    """

    count: int
    steps: int
    lanes: Mapping[int, Lane]
    own: frozenset[int]
    bytes: int
    cut: tuple[tuple[int, int], ...]
    returned: tuple[tuple[int, int], ...]
    summed: tuple[int, ...]

    @property
    def left(self) -> int:
        """Steps that blocks of equal size leave."""
        return self.steps % self.count


def find_tiling(
    program: Program, most: int, least: int = 0, *, in_layer: bool = False
) -> Tiling | None:
    """The region around the largest product that may run in at most `most` blocks.

    Of products that make at least `least` bytes. One `in_layer` ends where all is
    narrow again: of attention, at what the scores make of the values.

    Over several devices the first axis of what is cut stays whole, and so do those that
    both operands have: examples, or heads, may be spread along them.

    >>> from stowax._jaxprs._jaxpr import Program, inline
    >>> from stowax._jaxprs._tile_region import find_tiling
    >>> def loss(x, head, labels):
    ...     logp = jax.nn.log_softmax(x @ head)
    ...     return -jnp.take_along_axis(logp, labels[:, None], 1).mean()
    >>> shapes = jnp.ones((4096, 64)), jnp.ones((64, 512)), jnp.ones(4096, int)
    >>> found = find_tiling(Program(inline(jax.make_jaxpr(loss)(*shapes))), 8)
    >>> found.count, found.returned, len(found.summed)
    (8, (), 1)
    """
    live = {*program.closure(program.outputs_read, (), effects=True)}
    escapes = _ESCAPES_LAYER if in_layer else ESCAPES
    repeats = () if in_layer else find_repeats(program.jaxpr)
    barred = {k for r in repeats for block in r.blocks for k in block}
    free = [k for k in range(len(program.nodes)) if k in live and k not in barred]
    wide = [k for k in free if wide_sides(program, k)]
    wide = [k for k in wide if bytes_of(program, program.nodes[k].outputs[0]) >= least]
    wide.sort(key=lambda k: -bytes_of(program, program.nodes[k].outputs[0]))
    for seed in wide[:_SEEDS]:
        found = [
            _grown(_Region(program, free, seed, side, escapes), lane, most, in_layer)
            for side in wide_sides(program, seed)
            for lane in lanes_of(program.nodes[seed].equation)
            if lane.ins[side] is not None
            and not lane.summed
            and not (_is_spread(program, seed) and _may_be_spread(lane, side))
        ]
        if any(found):
            return max(filter(None, found), key=lambda t: (t.count, -t.left))
    return None


def _grown(region: "_Region", lane: Lane, most: int, in_layer: bool) -> Tiling | None:
    """The whole region from a product on, or what of it is wide."""
    whole = region.grown(lane, most)
    return region.without_end().grown(lane, most) if in_layer else whole


def _may_be_spread(lane: Lane, side: int) -> bool:
    return lane.ins[side] == 0 or None not in lane.ins


def _is_spread(program: Program, position: int) -> bool:
    """Whether a node's operands are spread over devices, for all that is known."""
    operands = program.nodes[position].equation.invars
    return any(_jax.may_be_spread(v.aval) for v in operands)


def values_of(
    program: Program, lanes: Mapping[int, Lane]
) -> tuple[set[tuple[int, Axis]], set[tuple[int, Axis]]]:
    """What nodes read and what they make, each value with the axis it is cut along."""
    read: set[tuple[int, Axis]] = set()
    made: set[tuple[int, Axis]] = set()
    for position, lane in lanes.items():
        node = program.nodes[position]
        pairs = zip(node.inputs, lane.ins, strict=True)
        read |= {(i, axis) for i, axis in pairs if i is not None}
        made |= {*zip(node.outputs, lane.outs, strict=True)}
    return read, made


class _Region:
    """A region that grows from a product on: what is made in it, and along which axis.

    Only `free` nodes may be in it. `lent` are those that run in it beside where they
    stand. What depends on values that come out is `beyond`: nothing in the region may
    read it. `escapes` is the part of the product's bytes that may come out.
    """

    def __init__(
        self,
        program: Program,
        free: Sequence[int],
        seed: int,
        side: int,
        escapes: float,
    ):
        self.program, self.free = program, free
        self.seed, self.side, self.escapes = seed, side, escapes
        self.bytes = bytes_of(program, program.nodes[seed].outputs[0])
        self.large = int(self.bytes * ESCAPES)
        self.most_out = int(self.bytes * escapes)
        self.lanes: dict[int, Lane] = {}
        self.axes: dict[int, Axis] = {}
        self.own: dict[int, Axis] = {}
        self.lent: set[int] = set()
        self.beyond: set[int] = set()
        self.cut: dict[tuple[int, int], None] = {}
        self.moving = self._moving()

    def grown(self, lane: Lane, most: int) -> Tiling | None:
        """The whole region, if it is worth a loop."""
        nodes, free = self.program.nodes, {*self.free}
        self._add(self.seed, lane)
        for position in range(self.seed + 1, len(nodes)):
            node = nodes[position]
            if _jax.has_effects(node.equation):
                return None  # it would run before or after what it did not
            joins = position in free and position not in self.lanes
            own = self._lane_of(position) if joins else None
            if own is not None:
                self._add(position, own)
            elif any(i in self.own or i in self.beyond for i in node.inputs):
                self.beyond.update(node.outputs)
        return self._tiling(most)

    def without_end(self) -> "_Region":
        """One to grow anew, without the nodes at the end that touch nothing large."""
        ending, read = set[int](), set[int]()
        for position in sorted(self.lanes.keys() - self.lent, reverse=True):
            node = self.program.nodes[position]
            touched = (*node.outputs, *node.read_values)
            large = any(bytes_of(self.program, i) > self.most_out for i in touched)
            if large or not read.isdisjoint(node.outputs):
                read.update(node.read_values)
            else:
                ending.add(position)
        free = [k for k in self.free if k not in ending]
        return _Region(self.program, free, self.seed, self.side, self.escapes)

    def _lane_of(self, position: int) -> Lane | None:
        """Along which lane a node works on the region's blocks; none if it does not."""
        node, own = self.program.nodes[position], self.own
        inputs = list(enumerate(node.inputs))
        mine = {k: own[i] for k, i in inputs if i is not None and i in own}
        if not mine or None in mine.values():
            return None
        if any(i in self.beyond for i in node.inputs):
            return None
        for lane in lanes_of(node.equation):
            if all(lane.ins[k] == axis for k, axis in mine.items()):
                return lane
        return None

    def _add(self, position: int, lane: Lane) -> None:
        """A node joins the region; what makes its operands may run in there, too.

        A node has one lane. What it makes and another one wants cut otherwise, or
        whole, comes from outside.
        """
        waiting = [(position, lane)]
        outputs = self.program.nodes[position].outputs
        self.own.update(zip(outputs, lane.outs, strict=True))
        while waiting:
            position, lane = waiting.pop()
            node = self.program.nodes[position]
            self.lanes[position] = lane
            self.axes.update(zip(node.outputs, lane.outs, strict=True))
            for number, axis in zip(node.inputs, lane.ins, strict=True):
                if number is None or self.axes.get(number, -1) == axis:
                    continue
                maker = self.program.maker.get(number, -1)
                made = None if maker in self.lanes else self._lent(maker, axis)
                if made is not None:
                    self.lent.add(maker)
                    waiting.append((maker, made))
                elif axis is not None:
                    self.cut[number, axis] = None

    def _lent(self, maker: int, axis: Axis) -> Lane | None:
        """The lane of a node that makes an operand, if it runs in the region, too.

        It does if it is nothing much, and makes a large array or leads to one. So does
        the cast of a whole operand: its gradient is added up in the type that it had
        before.
        """
        if maker < 0:
            return None
        equation = self.program.nodes[maker].equation
        if axis is None:
            cast = equation.primitive.name == "convert_element_type"
            return Lane(ins=(None,), outs=(None,)) if cast else None
        if maker not in self.moving:
            return None
        return next((w for w in lanes_of(equation) if w.outs[0] == axis), None)

    def _moving(self) -> set[int]:
        """Positions of the nodes that run in the region rather than before it."""
        program, found = self.program, set()
        for position in self.free:
            node = program.nodes[position]
            name = node.equation.primitive.name
            touched = (*node.outputs, *node.read_values)
            large = any(bytes_of(program, i) > self.large for i in touched)
            leading = any(program.maker.get(i) in found for i in node.read_values)
            may_move = name in _FREE or wide_sides(program, position)
            if may_move and (large or leading):
                found.add(position)
        return found

    def _tiling(self, most: int) -> Tiling | None:
        program, own = self.program, self.lanes.keys() - self.lent
        live = program.closure(program.outputs_read, (), effects=True)
        outside = (program.nodes[k] for k in live if k not in own)
        read = {i for node in outside for i in node.inputs} | program.outputs_read
        out = [(i, axis) for i, axis in self.own.items() if i in read]
        returned = tuple((i, axis) for i, axis in out if axis is not None)
        escaping = sum(bytes_of(program, i) for i, _ in out)
        count, steps = self._count(most)
        if not count or not out or escaping > self.most_out or not self._is_sound():
            return None
        return Tiling(
            count=count,
            steps=steps,
            lanes=dict(sorted(self.lanes.items())),
            own=frozenset(own),
            bytes=self.bytes,
            cut=tuple(self.cut),
            returned=returned,
            summed=tuple(i for i, axis in out if axis is None),
        )

    def _is_sound(self) -> bool:
        """Whether every operand is there as its lane wants it, checked on its own.

        Cut operands are made so in the region or cut from outside, whole ones are made
        so or come from outside; of what the region alone makes nothing does.
        """
        reads, made = values_of(self.program, self.lanes)
        outside = reads - made
        return (
            self.own.keys().isdisjoint(i for i, _ in outside)
            and {value for value in outside if value[1] is not None} == {*self.cut}
            and self.beyond.isdisjoint(i for i, _ in reads)
            and not any(map(self._is_spread, reads | made))
        )

    def _is_spread(self, value: tuple[int, Axis]) -> bool:
        """Whether the axis that a value is cut along is spread over devices."""
        number, axis = value
        return is_spread(self.program.avals[number], axis)

    def _count(self, most: int) -> tuple[int, int]:
        """The most blocks of which none is smaller than what they leave, and the steps.

        The steps are what all axes can be cut in. No blocks are 0.
        """
        avals, equation = self.program.avals, self.program.nodes[self.seed].equation
        read, made = values_of(self.program, self.lanes)
        cut = [(i, axis) for i, axis in read | made if axis is not None]
        steps = math.gcd(*(avals[i].shape[axis] for i, axis in cut))
        over = equation.params["dimension_numbers"][0][self.side]
        shape = equation.invars[self.side].aval.shape
        rows = math.prod(n for k, n in enumerate(shape) if k not in over)
        most = min(most, rows // _LEAST_ROWS)
        counts = (n for n in range(most, 1, -1) if steps % n <= steps // n)
        return next(counts, 0), steps
