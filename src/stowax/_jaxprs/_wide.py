"""Products that make far more than they read: logits, scores."""

import math

from ._jaxpr import Program

_WIDER = 2
"""How many times larger than the operand that is cut a product has to be."""


def bytes_of(program: Program, number: int) -> int:
    """The bytes of a value; 0 for what has no size."""
    aval = program.avals[number]
    return math.prod(aval.shape) * int(getattr(aval.dtype, "itemsize", 0))


def wide_sides(program: Program, position: int) -> list[int]:
    """The operands of a product that it is far larger than."""
    node = program.nodes[position]
    if node.equation.primitive.name != "dot_general":
        return []
    made = bytes_of(program, node.outputs[0])
    operands = enumerate(node.inputs)
    sizes = {k: bytes_of(program, i) for k, i in operands if i is not None}
    return [k for k, size in sizes.items() if made >= _WIDER * size]
