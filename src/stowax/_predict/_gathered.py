"""What passes between devices in a lowered program: gathered operands, partial sums.

Shardy says how every value lies over a mesh, and not what follows from it. XLA gathers
an operand of a product where the product cannot use an axis that it is spread over, and
sums results over the axes that the product contracts.
"""

import math
from collections.abc import Iterable, Iterator

from .._records._lowered import TensorValue
from ._flatten import Block, Flat, Node
from ._fusion import short_name

_SAME_ARRAY = frozenset(
    ("convert", "reshape", "reshard", "sharding_constraint", "transpose")
)


def gathered(node: Node, flat: Flat) -> Iterator[tuple[int, TensorValue, set[str]]]:
    """Operands of a product that XLA gathers: number, type, and the axes it does over.

    Nothing for what is no product.
    """
    if short_name(node.name) != "dot_general":
        return
    left, right = node.seen
    result = flat.values[node.results[0]]
    contracted = _contracted(node)
    kept = _axes(result, range(len(result.shape))) - contracted
    for k, operand in enumerate((left, right)):
        usable = contracted | kept
        own = _axes(operand, range(len(operand.shape)))
        contracting = node.contracting[k]
        lost = own - usable
        lost |= (_axes(operand, contracting) - contracted) & own
        if lost:
            yield node.operands[k], operand, lost


def communicated(node: Node, flat: Flat) -> int:
    """Bytes of operands gathered, and of results not yet summed, across devices."""
    if short_name(node.name) != "dot_general":
        return 0
    sizes = flat.axis_sizes
    extra = sum(
        operand.device_bytes * math.prod(sizes[axis] for axis in lost)
        for _, operand, lost in gathered(node, flat)
    )
    result = flat.values[node.results[0]]
    summed = _axes(result, range(len(result.shape))) & _contracted(node)
    if summed:
        extra += result.device_bytes * math.prod(sizes[axis] for axis in summed)
    return extra


def turned_stacks(body: Block, flat: Flat) -> frozenset[int]:
    """Stacks from outside whose layers the body gathers along an axis within rows.

    What is gathered has to lie together: a GPU's compiler wants that axis outermost,
    and turns the whole stack, before the loop.
    """
    captured = body.captured() - flat.host
    origin: dict[int, tuple[int, TensorValue]] = {}
    found = set()
    for node in body.nodes:
        short = short_name(node.name)
        if short == "dynamic_slice" and node.operands[0] in captured:
            layer = flat.values[node.results[0]]
            origin[node.results[0]] = node.operands[0], layer
        elif short in _SAME_ARRAY and node.operands[0] in origin:
            origin[node.results[0]] = origin[node.operands[0]]
        for number, _, lost in gathered(node, flat):
            if number in origin:
                stack, layer = origin[number]
                rows = range(2, len(layer.shape))
                if _axes(layer, rows) & lost:
                    found.add(stack)
    return frozenset(found)


def _contracted(node: Node) -> set[str]:
    left, right = node.seen
    of_left, of_right = node.contracting
    return _axes(left, of_left) & _axes(right, of_right)


def _axes(value: TensorValue, dimensions: Iterable[int]) -> set[str]:
    if len(value.axes) != len(value.shape):
        return set()
    return {axis for d in dimensions for axis in value.axes[d]}
