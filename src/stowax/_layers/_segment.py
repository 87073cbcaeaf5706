"""A segment of straight-line code as a stack of one layer.

What it reads, be it a parameter or what another segment made, is a constant; what
others read of it is an output. Both are at hand in its backward pass. In between its
values are kept or computed again, as those of layers that run as they are written.
"""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

from .. import _jax
from .._jaxprs._jaxpr import Program, bind, spec_of, trace
from .._jaxprs._segments import find_segments
from ._stack import Stack


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class SegmentUnit:
    """Nodes of a call that run together; `inputs` and `outputs` are value numbers."""

    name: str
    source: str
    positions: tuple[int, ...]
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]
    body: Any

    def run(
        self, _program: Program, env: dict[int, Any], runner: Callable[..., Any]
    ) -> None:
        """Runs the segment on the values in `env`, and adds its own."""
        stack = Stack(
            name=self.name,
            source=self.source,
            count=1,
            body=self.body,
            const_count=len(self.inputs),
            carry_count=0,
            separate=True,
            segment=True,
        )
        _, made, passed = runner(stack, [env[i] for i in self.inputs], [], [])
        env.update(zip(self.inputs, passed, strict=True))
        env.update((n, v) for n, (v,) in zip(self.outputs, made, strict=True))


def segment_of(program: Program, name: str, positions: Sequence[int]) -> SegmentUnit:
    """The nodes at `positions`, in an order in which they can run, as one unit."""
    nodes = [program.nodes[k] for k in positions]
    made = {n for node in nodes for n in node.outputs}
    read = dict.fromkeys(i for node in nodes for i in node.inputs if i is not None)
    inputs = tuple(i for i in read if i not in made)
    own = {*positions}
    outside = {o for o in program.outputs if isinstance(o, int)}
    outside |= {
        i
        for k, node in enumerate(program.nodes)
        if k not in own
        for i in node.inputs
        if i in made
    }
    outputs = tuple(n for n in sorted(made) if n in outside)

    def body(*values: Any) -> list[Any]:
        env = dict(zip(inputs, values, strict=True))
        for node in nodes:
            out = bind(node.equation, node.read(env))
            env.update(zip(node.outputs, out, strict=True))
        return [env[n] for n in outputs]

    sources = (_jax.source_text(node.equation) for node in nodes)
    return SegmentUnit(
        name=name,
        source=next(filter(None, sources), "unknown source"),
        positions=tuple(positions),
        inputs=inputs,
        outputs=outputs,
        body=trace(body, *(spec_of(program.avals[i]) for i in inputs)),
    )


def in_segments(program: Program, order: list[Any]) -> list[Any]:
    """The units with what stands between stacks cut into segments.

    What has effects stands between segments, too: nothing of it runs twice.
    """
    order = _casts_late(program, order)
    runs: list[list[int]] = [[]]
    for unit in order:
        single = isinstance(unit, int)
        if single and not _jax.has_effects(program.nodes[unit].equation):
            runs[-1].append(unit)
        else:
            runs.append([])
    segments = find_segments(program, runs)
    first = {s[0]: s for run in segments for s in run}
    inside = {k for s in first.values() for k in s}
    found, units = 0, []
    for unit in order:
        if isinstance(unit, int) and unit in first:
            name = f"{program.fingerprint[:8]}.s{found}"
            units.append(segment_of(program, name, first[unit]))
            found += 1
        elif not isinstance(unit, int) or unit not in inside:
            units.append(unit)
    return units


def _casts_late(program: Program, order: list[Any]) -> list[Any]:
    """The units in another order: casts of parameters come where they are read.

    Written before the first layer, as `jax.tree.map` has them, they cross every cut.
    """
    made: set[int] = set()
    early: dict[int, int] = {}
    for unit in order:
        if isinstance(unit, int):
            node = program.nodes[unit]
            own = all(i is None or i not in made or i in early for i in node.inputs)
            if own and node.equation.primitive.name in _CASTS:
                early |= dict.fromkeys(node.outputs, unit)
            made.update(node.outputs)
        else:
            made.update(n for k in unit.positions for n in program.nodes[k].outputs)
    placed: set[int] = set()
    result: list[Any] = []

    def place(position: int) -> None:
        if position in placed:
            return
        placed.add(position)
        for number in program.nodes[position].inputs:
            if number in early:
                place(early[number])
        result.append(position)

    for unit in order:
        if isinstance(unit, int) and unit in early.values():
            continue
        for k in (unit,) if isinstance(unit, int) else unit.positions:
            for number in program.nodes[k].inputs:
                if number in early:
                    place(early[number])
        result.append(unit)
    for position in early.values():  # what only results read
        place(position)
    return result


_CASTS = frozenset({"broadcast_in_dim", "convert_element_type", "reshape", "transpose"})
