"""Slices of what wide products make, taken of what the products read.

Language models shift their logits against the labels, after the product:
`(x @ head)[:, :-1]`. Axes of two lengths cannot be cut into the same blocks. Where
nothing else reads the product, or what is made of it on the way (a cast, a soft cap),
it may as well be that of `x[:, :-1]`: the same numbers, and one token less.

>>> from stowax._jaxprs._jaxpr import Program, inline
>>> from stowax._jaxprs._narrowed import narrowed
>>> shapes = jnp.ones((2, 64, 4)), jnp.ones((4, 8))
>>> jaxpr = jax.make_jaxpr(lambda x, w: jnp.tanh(x @ w)[:, :-1])(*shapes)
>>> [str(e.outvars[0].aval) for e in narrowed(Program(inline(jaxpr))).jaxpr.eqns]
['float32[2,63,4]', 'float32[2,63,8]', 'float32[2,63,8]']
"""

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax

from .. import _jax
from ._jaxpr import Program, bind, spec_of, trace
from ._lanes import Lane, is_spread, lanes_of, on_blocks
from ._wide import wide_sides


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class _Part:
    """The places from `start` to `limit` along one axis, of `size` places."""

    axis: int
    start: int
    limit: int
    size: int

    def of(self, value: Any) -> Any:
        return jax.lax.slice_in_dim(value, self.start, self.limit, axis=self.axis)

    def along(self, axis: int) -> "_Part":
        return dataclasses.replace(self, axis=axis)


def narrowed(program: Program) -> Program:
    """The program, with slices of its wide products taken before these."""
    live = program.closure(program.outputs_read, (), effects=True)
    parts = _from_products(program, _parts(program, live))
    if not parts:
        return program

    def run(*inputs: Any) -> list[Any]:
        env = {**program.constants(), **dict(enumerate(inputs))}
        narrow: dict[int, Any] = {}
        for position in live:
            node = program.nodes[position]
            with _jax.source_of(node.equation):
                if position in parts:
                    part, lane = parts[position]
                    read = _operands(node, part, lane, env, narrow)
                    places = part.limit - part.start
                    equation = on_blocks(node.equation, lane, places, part.size)
                    narrow[node.outputs[0]] = bind(equation, read)[0]
                elif any(i in narrow for i in node.read_values):
                    env[node.outputs[0]] = narrow[node.read_values[0]]
                else:
                    out = bind(node.equation, node.read(env))
                    env.update(zip(node.outputs, out, strict=True))
        return program.read_outputs(env, len(program.outputs))

    inputs = [spec_of(aval) for aval in program.avals[: program.input_count]]
    return narrowed(Program(trace(run, *inputs)))  # along another axis, too


def _operands(
    node: Any, part: _Part, lane: Lane, env: dict[int, Any], narrow: dict[int, Any]
) -> list[Any]:
    """What a node reads that makes a part of its result."""
    read = []
    for number, axis, atom in zip(
        node.inputs, lane.ins, node.equation.invars, strict=True
    ):
        if number is None:
            read.append(atom.val)
        elif number in narrow:
            read.append(narrow[number])
        else:
            read.append(
                env[number] if axis is None else part.along(axis).of(env[number])
            )
    return read


def _parts(program: Program, live: Sequence[int]) -> dict[int, tuple[_Part, Lane]]:
    """By position, the nodes of whose result only a part is read, and its lane."""
    wanted: dict[int, set[_Part | None]] = {i: {None} for i in program.outputs_read}
    found: dict[int, tuple[_Part, Lane]] = {}
    for position in reversed(live):
        node = program.nodes[position]
        mine = [wanted.get(o, {None}) for o in node.outputs]
        part = next(iter(mine[0])) if len(mine) == 1 and len(mine[0]) == 1 else None
        lane = part and _lane(node.equation, part)
        if part and lane:
            found[position] = part, lane
        own = _sliced(node.equation)
        for number, axis in zip(
            node.inputs, lane.ins if lane else [None] * len(node.inputs), strict=True
        ):
            if number is not None:
                more = part.along(axis) if part and lane and axis is not None else own
                wanted.setdefault(number, set()).add(more)
    return found


def _lane(equation: Any, part: _Part) -> Lane | None:
    """The lane along which an equation makes just a part of its only result.

    None where an operand is spread along it: its parts need not divide.
    """
    for lane in lanes_of(equation):
        cut = [
            (v.aval, axis)
            for v, axis in zip(equation.invars, lane.ins, strict=True)
            if axis is not None
        ]
        whole = {aval.shape[axis] for aval, axis in cut} == {part.size}
        if lane.outs == (part.axis,) and whole:
            return None if any(is_spread(*pair) for pair in cut) else lane
    return None


def _sliced(equation: Any) -> _Part | None:
    """What of its operand a slice reads, if it cuts one axis, and leaves no gaps."""
    if equation.primitive.name != "slice":
        return None
    if {*(equation.params["strides"] or ())} - {1}:
        return None
    (shape,) = (tuple(v.aval.shape) for v in equation.invars)
    starts, limits = (
        equation.params[key] for key in ("start_indices", "limit_indices")
    )
    cut = [
        _Part(axis=axis, start=start, limit=limit, size=size)
        for axis, (start, limit, size) in enumerate(
            zip(starts, limits, shape, strict=True)
        )
        if limit - start < size
    ]
    return cut[0] if len(cut) == 1 else None


def _from_products(
    program: Program, parts: dict[int, tuple[_Part, Lane]]
) -> dict[int, tuple[_Part, Lane]]:
    """Those that are wide products, or are made of these alone."""
    made: set[int] = set()
    found = {}
    for position in sorted(parts):
        node = program.nodes[position]
        if wide_sides(program, position) or not made.isdisjoint(node.read_values):
            found[position] = parts[position]
            made.update(node.outputs)
    return found
