"""A loop of a call as one unit of it: the user's scan, or a Python loop's blocks.

`_rewrite` puts a call's units in order; here is how each becomes a `Stack`, and what
comes of it goes to where the call's own equations read it.
"""

import dataclasses
import itertools
from collections.abc import Callable
from typing import Any

from .. import _jax
from .._jaxprs._jaxpr import Program, evaluate, spec_of, trace
from .._jaxprs._repeats import Repeat
from .._jaxprs._tiles import is_tiled
from ._stack import Stack


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ScanUnit:
    """A scan of the user's as one unit of a call."""

    name: str
    position: int

    @property
    def positions(self) -> tuple[int, ...]:
        return (self.position,)

    def run(
        self, program: Program, env: dict[int, Any], runner: Callable[..., Any]
    ) -> None:
        node = program.nodes[self.position]
        params = node.equation.params
        consts, carried = _jax.scan_counts(node.equation)
        stack = Stack(
            name=self.name,
            source=_jax.source_text(node.equation) or "unknown source",
            count=params["length"],
            body=params["jaxpr"],
            const_count=consts,
            carry_count=carried,
            reverse=params["reverse"],
            tiles=is_tiled(node.equation),
        )
        values = node.read(env)
        a, b = stack.const_count, stack.const_count + stack.carry_count
        with _jax.source_of(node.equation):
            carry, ys, passed = runner(stack, values[:a], values[a:b], values[b:])
        env.update(zip(node.outputs, [*carry, *ys], strict=True))
        for number, value in zip(node.inputs[:a], passed, strict=True):
            if number is not None:
                env[number] = value


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class LoopUnit:
    """The repeating blocks of an unrolled loop as one unit of a call."""

    name: str
    repeat: Repeat
    body: Any

    @property
    def positions(self) -> tuple[int, ...]:
        return tuple(itertools.chain.from_iterable(self.repeat.blocks))

    def run(
        self, program: Program, env: dict[int, Any], runner: Callable[..., Any]
    ) -> None:
        repeat = self.repeat

        def read(atom: Any) -> Any:
            if isinstance(atom, _jax.Literal):
                return atom.val
            return env[program.numbers[atom]]

        first = program.nodes[repeat.blocks[0][0]].equation
        stack = Stack(
            name=self.name,
            source=_jax.source_text(first) or "unknown source",
            count=repeat.count,
            body=self.body,
            const_count=len(repeat.constants),
            carry_count=len(repeat.carry),
            separate=True,
        )
        carry, outputs, passed = runner(
            stack,
            [read(v) for v in repeat.constants],
            [read(c.initial) for c in repeat.carry],
            [[read(v) for v in layers] for layers in repeat.per_layer],
        )
        for constant, value in zip(repeat.constants, passed, strict=True):
            env[program.numbers[constant]] = value
        for handed_on, value in zip(repeat.carry, carry, strict=True):
            env[program.numbers[handed_on.final]] = value
        for output, values in zip(repeat.outputs, outputs, strict=True):
            for layer, variable in enumerate(output.variables):
                if variable is not None:
                    env[program.numbers[variable]] = values[layer]


def constants_first(repeat: Repeat) -> Any:
    """The body with its inputs in a stack's order: constants, carry, per layer."""
    inputs = _jax.open_jaxpr(repeat.body).invars
    carried, constant = len(repeat.carry), len(repeat.constants)
    carry, consts = inputs[:carried], inputs[carried : carried + constant]
    order = [*consts, *carry, *inputs[carried + constant :]]

    def body(*values: Any) -> list[Any]:
        given = dict(zip(order, values, strict=True))
        return evaluate(
            repeat.body, [given[v] for v in inputs], keep_checkpoint=lambda e: True
        )

    return trace(body, *[spec_of(v.aval) for v in order])
