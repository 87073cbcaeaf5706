"""Weights' gradients computed where they arise, and not at the end of a layer.

Nothing in a layer waits for its weights' gradients, and XLA for GPUs, where it hides
copies, computes them as late as it can: a transformer's feed-forward part is held while
the backward pass of its attention runs. The gradient of a product's weight and that of
its input read the same cotangent: the second gets it from behind a barrier that the
first stands behind, too. What that brings: docs/notes.md, 2026-11-28.
"""

from collections.abc import Collection
from typing import Any

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
    first = _first(program, gradients)
    if not first:
        return backward

    def run(*values: Any) -> list[Any]:
        env = {**program.constants(), **dict(enumerate(values))}

        def compute(position: int) -> None:
            node = program.nodes[position]
            if not env.keys() >= {*node.outputs}:
                out = bind(node.equation, node.read(env))
                env.update(zip(node.outputs, out, strict=True))

        for position in range(len(program.nodes)):
            for number, early in first.get(position, ()):
                reads = {k: program.nodes[k].read_values for k in early}
                ready = [k for k in early if env.keys() >= {*reads[k]}]
                for k in ready:
                    compute(k)
                if ready:
                    held = [number, *(program.nodes[k].outputs[0] for k in ready)]
                    behind = _jax.barrier([env[n] for n in held])
                    env.update(zip(held, behind, strict=True))
            compute(position)
        return program.read_outputs(env, len(program.outputs))

    return trace(run, *(spec_of(v.aval) for v in _jax.open_jaxpr(backward).invars))


def _first(
    program: Program, gradients: Collection[int]
) -> dict[int, list[tuple[int, list[int]]]]:
    """What stands behind a barrier before a position: a value, and products of it.

    The products are weights' gradients that are smaller than what they are made of, and
    at the position is one of the same value that is none. The last products of all may
    wait: nothing follows for which something would be held, and copies for the next
    layer hide behind them.
    """
    ends = {n for k in gradients if isinstance(n := program.outputs[k], int)}
    for node in reversed(program.nodes):
        if node.equation.primitive.name in _ON and not ends.isdisjoint(node.outputs):
            ends |= {*node.read_values}
    readers: dict[int, tuple[list[int], list[int]]] = {}
    last = 0
    for position, node in enumerate(program.nodes):
        if node.equation.primitive.name in PRODUCTS:
            last = position
            (made,), read = node.outputs, {*node.read_values}
            less = bytes_of(program, made) < sum(bytes_of(program, n) for n in read)
            for number in read:
                kinds = readers.setdefault(number, ([], []))
                kinds[not (made in ends and less)].append(position)
    found: dict[int, list[tuple[int, list[int]]]] = {}
    for number, (early, others) in readers.items():
        if early and others and last not in (*early, *others):
            found.setdefault(others[0], []).append((number, early))
    return found
