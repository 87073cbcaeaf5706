"""What an equation may be to run on blocks: for `_proof`, from the equation alone."""

from collections.abc import Collection

from .. import _jax
from .._jaxprs._elementwise import ELEMENTWISE
from .._jaxprs._jaxpr import Node, Program

_TOTALS = frozenset(
    {"reduce_sum", "reduce_max", "reduce_min", "reduce_and", "reduce_or"}
)


def why_not_on_blocks(
    program: Program, node: Node, shape: tuple[int, ...], blocks: Collection[int]
) -> str | None:
    """Why a node's blocks are not made of blocks alone; `None` if they are.

    **Arguments:** `shape` is that of the arrays that are cut; `blocks` are the values
    of which there is a block, or which are single numbers.
    """
    equation = node.equation
    name = equation.primitive.name
    if _jax.has_effects(equation):
        return "has effects, and would run once for every block"
    if any(_shape(program, number) != shape for number in node.outputs):
        return "makes an array of another shape than its loop's"
    if name == "broadcast_in_dim":
        return _broadcast(program, node, shape)
    if name not in ELEMENTWISE and name != "sharding_constraint":
        return "does not work element by element"
    for number, atom in zip(node.inputs, equation.invars, strict=True):
        mine = tuple(atom.aval.shape) if number is None else _shape(program, number)
        if mine in ((), shape) if number in blocks or number is None else False:
            continue
        alike = len(mine) == len(shape) and mine != shape
        if not alike or any(a not in (1, b) for a, b in zip(mine, shape, strict=True)):
            return "reads an array that is not cut as its loop's are"
    return None


def _broadcast(program: Program, node: Node, shape: tuple[int, ...]) -> str | None:
    """Why a broadcast has no blocks: its axes have to keep their places."""
    if len(node.inputs) != 1:
        return "makes an array of a size that is not known"
    number, (atom,) = node.inputs[0], node.equation.invars
    mine = tuple(atom.aval.shape) if number is None else _shape(program, number)
    axes = tuple(node.equation.params["broadcast_dimensions"])
    if len(axes) != len(mine) or list(axes) != sorted(set(axes)):
        return "moves axes about"
    if any(size not in (1, shape[axis]) for axis, size in zip(axes, mine, strict=True)):
        return "reads an array that is not cut as its loop's are"
    return None


def why_not_total(
    program: Program, node: Node, shape: tuple[int, ...], blocks: Collection[int]
) -> str | None:
    """Why a number cannot be made block by block; `None` if it can."""
    name = node.equation.primitive.name
    if name not in _TOTALS or len(node.inputs) != 1:
        return "is no sum, maximum or the like of one array"
    (number,) = node.inputs
    if number is None or number not in blocks or _shape(program, number) != shape:
        return "reads in a loop a value that is not there"
    if sorted(node.equation.params["axes"]) != list(range(len(shape))):
        return "makes more than one number of an array"
    if name in ("reduce_and", "reduce_or") and program.avals[number].dtype != bool:
        return "combines the bits of numbers"
    return None


def _shape(program: Program, number: int) -> tuple[int, ...]:
    return tuple(program.avals[number].shape)
