"""Weights' gradients computed where they arise, and not at the end of a layer.

Nothing in a layer waits for its weights' gradients, and XLA for GPUs, where it hides
copies, computes them as late as it can: a transformer's feed-forward part is held while
the backward pass of its attention runs. The gradient of a product's weight and that of
its input read the same cotangent; behind one barrier, both are there before anything
goes on. XLA has both as arrays anyway, but what reads them is no longer fused into the
products. What that brings: docs/notes.md, 2026-11-28.
"""

from collections.abc import Collection
from typing import Any

import jax

from .. import _jax
from .._jaxprs._jaxpr import Program, bind, inline, spec_of, trace
from .._jaxprs._wide import bytes_of

PRODUCTS = frozenset({"dot_general", "conv_general_dilated", "ragged_dot_general"})

# What a gradient goes through on its way out: it is turned, converted, and added to the
# shares of other layers.
_ON = frozenset(
    {"transpose", "convert_element_type", "reshape", "squeeze", "name", "add_any"}
)


def with_early_gradients(backward: Any, gradients: Collection[int]) -> Any:
    """The jaxpr of a layer's backward pass with such barriers.

    **Arguments:** `gradients` are the numbers of the outputs that are weights'.
    """
    program = Program(inline(backward, keep_checkpoint=lambda _: True))
    together = _together(program, gradients)
    if not together:
        return backward

    def run(*values: Any) -> list[Any]:
        env = {**program.constants(), **dict(enumerate(values))}
        for position, node in enumerate(program.nodes):
            out = bind(node.equation, node.read(env))
            env.update(zip(node.outputs, out, strict=True))
            for numbers in together.get(position, ()):
                held = jax.lax.optimization_barrier([env[n] for n in numbers])
                env.update(zip(numbers, held, strict=True))
        return program.read_outputs(env, len(program.outputs))

    return trace(run, *(spec_of(v.aval) for v in _jax.open_jaxpr(backward).invars))


def _together(
    program: Program, gradients: Collection[int]
) -> dict[int, list[list[int]]]:
    """By position of the last product, the results of those that read one value.

    One of them at least is a weight's gradient that is smaller than what it is made of.
    """
    ends = {n for k in gradients if isinstance(n := program.outputs[k], int)}
    for node in reversed(program.nodes):
        if node.equation.primitive.name in _ON and not ends.isdisjoint(node.outputs):
            ends |= {*node.read_values}
    readers: dict[int, list[int]] = {}
    for position, node in enumerate(program.nodes):
        if node.equation.primitive.name in PRODUCTS:
            for number in {*node.read_values}:
                readers.setdefault(number, []).append(position)

    def is_early(position: int) -> bool:
        node = program.nodes[position]
        (made,) = node.outputs
        read = sum(bytes_of(program, number) for number in {*node.read_values})
        return made in ends and bytes_of(program, made) < read

    found: dict[int, list[list[int]]] = {}
    for positions in readers.values():
        early = [is_early(k) for k in positions]
        if any(early) and not all(early):  # all: they read what a layer has made
            numbers = [program.nodes[k].outputs[0] for k in positions]
            found.setdefault(positions[-1], []).append(numbers)
    return found
