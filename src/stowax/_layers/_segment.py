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
