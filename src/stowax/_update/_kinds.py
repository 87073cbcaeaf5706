"""What an equation does to arrays that are worked on in blocks: the kinds there are."""

from collections.abc import Sequence

from .. import _jax
from .._jaxprs._elementwise import ELEMENTWISE
from .._jaxprs._jaxpr import Node, Program

_REDUCTIONS = frozenset(
    {"reduce_sum", "reduce_max", "reduce_min", "reduce_and", "reduce_or"}
)


def shape_of(program: Program, number: int) -> tuple[int, ...]:
    """The shape of a value."""
    return tuple(program.avals[number].shape)


def inputs_of(program: Program, nodes: Sequence[int]) -> list[int]:
    """What nodes read and do not make, in order of first use."""
    made = {o for p in nodes for o in program.nodes[p].outputs}
    read = [i for p in nodes for i in program.nodes[p].inputs]
    return list(dict.fromkeys(i for i in read if i is not None and i not in made))


def reduction(program: Program, node: Node) -> bool:
    """Whether a node makes one number of all elements of an array."""
    name = node.equation.primitive.name
    if name not in _REDUCTIONS or len(node.inputs) != 1 or node.inputs[0] is None:
        return False
    kind = program.avals[node.inputs[0]]
    if name in ("reduce_and", "reduce_or") and kind.dtype != bool:
        return False
    axes = sorted(node.equation.params["axes"])
    return axes == list(range(kind.ndim)) and kind.ndim > 0


def worked_shape(program: Program, node: Node) -> tuple[int, ...]:
    """The shape of the arrays that a node in a loop works on."""
    first = node.inputs[0] if node.inputs else None
    if first is not None and reduction(program, node):
        return shape_of(program, first)
    return shape_of(program, node.outputs[0]) if node.outputs else ()


def elementwise(program: Program, node: Node) -> bool:
    """Whether every output element is made of the inputs' elements in its place."""
    shapes = {shape_of(program, o) for o in node.outputs}
    name = node.equation.primitive.name
    if len(shapes) != 1 or () in shapes or _jax.has_effects(node.equation):
        return False
    if name == "broadcast_in_dim":
        return len(node.inputs) == 1  # no sizes that are data
    if name == "sharding_constraint":
        return True  # of blocks it says nothing: they lie as the arrays they are of
    if name not in ELEMENTWISE:
        return False
    (shape,) = shapes
    return all(
        shape_of(program, i) == () or _spreads(shape_of(program, i), shape)
        for i in node.inputs
        if i is not None
    )


def _spreads(small: tuple[int, ...], shape: tuple[int, ...]) -> bool:
    """Whether an operand is of `shape`, but for axes of one element."""
    return len(small) == len(shape) and all(
        mine in (1, size) for mine, size in zip(small, shape, strict=True)
    )
