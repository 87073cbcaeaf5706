"""What passes between host memory and the loops of stacks: for `_proof`.

A loop fetches one layer's part of a leaf and casts or transposes only that; it leaves a
layer's gradient as the leaf lies. Here the way that the program takes is compared with
what the loop will do instead.
"""

from typing import Any

from .._jaxprs._jaxpr import Node, Program
from ._feed import Feeds, HostValue, View

_STEPS = frozenset({"convert_element_type", "name", "transpose"})


def why_no_view(program: Program, view: View) -> str | None:
    """Why a value is not the part of another that it is taken for."""
    found = _part_of(program, view.number)
    if found != (view.whole, view.index):
        return "a loop takes one part of a stacked array for another"
    return None


def why_no_chain(
    program: Program, number: int, chain: tuple[int, tuple[int, ...]]
) -> str | None:
    """Why a value is not made of a leaf by these casts and transpositions."""
    current, nodes = chain
    for position in nodes:
        node = program.nodes[position]
        if node.equation.primitive.name not in _STEPS or node.inputs != (current,):
            return "it is made otherwise than the layers' loop makes it"
        current = node.outputs[0]
    return None if current == number else "the layers' loop fetches another value"


def why_no_gradient(program: Program, feeds: Feeds, value: HostValue) -> str | None:
    """Why a gradient is not what the layers' loop leaves in host memory.

    What the program does to it afterwards has to undo what it did to the leaf before:
    then it lies as the leaf does.
    """
    steps: list[Node] = []
    number, parts = value.number, []
    while number != value.made:
        part = _part_of(program, number)
        position = program.maker.get(number)
        if part is not None and not parts:
            parts.append(part[1])
            number = part[0]
            continue
        node = None if position is None else program.nodes[position]
        if node is None or node.equation.primitive.name not in _STEPS:
            return "its gradient is made otherwise than the layers' loop leaves it"
        steps.append(node)
        number = node.inputs[0] if node.inputs[0] is not None else -1
    if parts != ([] if value.index is None else [value.index]):
        return "its gradient is taken for that of another layer"
    undone = [_undoes(program, node) for node in steps if _counts(node)]
    ways = [nodes for leaf, nodes in feeds.chains.values() if leaf == value.leaf]
    for nodes in ways:
        done = [program.nodes[p] for p in nodes]
        if undone == [_does(program, node) for node in done if _counts(node)]:
            return None
    return "its gradient does not lie as it does"


def _counts(node: Node) -> bool:
    return node.equation.primitive.name != "name"


def _does(program: Program, node: Node) -> Any:
    """What a cast or transposition does: from which type, or in which order."""
    if node.equation.primitive.name == "transpose":
        return tuple(node.equation.params["permutation"])
    return _dtype(program, node.inputs[0]), _dtype(program, node.outputs[0])


def _undoes(program: Program, node: Node) -> Any:
    """What a cast or transposition undoes."""
    if node.equation.primitive.name == "transpose":
        axes = tuple(node.equation.params["permutation"])
        return tuple(axes.index(k) for k in range(len(axes)))
    return _dtype(program, node.outputs[0]), _dtype(program, node.inputs[0])


def _dtype(program: Program, number: int | None) -> str:
    return "" if number is None else str(program.avals[number].dtype)


def _part_of(program: Program, number: int) -> tuple[int, int] | None:
    """The array that a value is one index of, and the index, if it is one."""
    squeezed = _maker(program, number, "squeeze")
    inner = squeezed.inputs[0] if squeezed else None
    sliced = None if inner is None else _maker(program, inner, "slice")
    if squeezed is None or sliced is None or sliced.inputs[0] is None:
        return None
    whole, params = sliced.inputs[0], sliced.equation.params
    shape = tuple(program.avals[whole].shape)
    start, limit = tuple(params["start_indices"]), tuple(params["limit_indices"])
    one = (
        tuple(squeezed.equation.params["dimensions"]) == (0,)
        and params["strides"] is None
        and limit[0] == start[0] + 1
        and start[1:] == (0,) * (len(shape) - 1)
        and limit[1:] == shape[1:]
    )
    return (whole, start[0]) if one else None


def _maker(program: Program, number: int, primitive: str) -> Node | None:
    position = program.maker.get(number)
    node = None if position is None else program.nodes[position]
    return node if node and node.equation.primitive.name == primitive else None
