"""Along which axes of the state its layers lie, and in what order it lies for that.

A loop over layers fetches one layer's part of every stacked parameter. Whether that can
be copied by itself is a matter of the axis (`why_layers_do_not_cross`). On a TPU it may
take another order of the axes than the type's (`_axis_order`): `lying_orders` says
which arrays lie so. All that is updated together has to lie alike, since loops over
blocks cut it at the same places.
"""

import collections
import dataclasses
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any

import jax

from .._layers._axis_order import Order, host_order
from .._layers._host_layers import can_stream
from .._step._trace import Step
from .._target._machine import Target
from .._update._feed import emission_of
from .._update._record import Group, Streamed
from ._shards import partition_of, shard_shape

UNTILED = "its rows do not fill the tiles that a TPU copies"
SEVERAL_AXES = (
    "layers lie along several axes of it, or of what is updated with it, and a TPU "
    "copies layers along one of the last two only where these lie first in memory"
)
_SPREAD = "its layers themselves are spread over the devices"
_NO_PARTITION = "it is spread over devices without a NamedSharding"


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Lying:
    """How an array lies in host memory, for the sake of these parameters.

    It is one of them, or updated with them; where none of them is in host memory, it
    lies as it is typed.
    """

    order: tuple[int, ...]
    parameters: frozenset[int]


def layer_axes(
    found: Streamed, position: int, step: Step
) -> Iterator[tuple[int, int | None]]:
    """The leaves that a loop fetches, with the axis of each that counts the layers."""
    program = found.program
    node = program.nodes[position]
    emission = emission_of(node, step.boundary)
    for k in found.feeds.served[position]:
        number = node.inputs[k]
        if emission is None or number is None:
            continue
        leaf, nodes = found.feeds.chains[number]
        axis = 0
        for p in reversed(nodes):
            axis = program.nodes[p].equation.params.get("permutation", range(9))[axis]
        yield leaf, None if emission.stack.separate else axis


def why_layers_do_not_cross(spec: Any, axis: int | None, platform: str) -> str:
    """Why one layer's part of an array cannot be copied by itself; empty if it can.

    `axis` of the array counts the layers, if it holds more than one. Every device
    fetches what it holds of a layer: the layers themselves may not be spread.
    """
    shard = shard_shape(spec)
    if axis is not None and shard[axis] != spec.shape[axis]:
        return _SPREAD
    if len(spec.sharding.device_set) > 1 and partition_of(spec) is None:
        return _NO_PARTITION
    part = [n for k, n in enumerate(shard) if k != axis]
    part = jax.ShapeDtypeStruct(part, spec.dtype)
    return "" if can_stream(part, platform=platform) else UNTILED


def lying_orders(
    found: Streamed,
    step: Step,
    specs: Sequence[Any],
    target: Target,
    fed: Collection[int],
) -> tuple[Mapping[int, Lying], frozenset[int]]:
    """The arrays that do not lie as they are typed, and those that would have to twice.

    **Arguments:** `fed` are the parameters that loops could fetch.

    **Returns:** how arrays lie, by flat position; and those of `fed` that would have to
    lie in another order, and cannot: something with them lies otherwise, or devices
    stand in for the target's, whose arrays lie as they are typed.
    """
    asked: dict[int, set[Order]] = collections.defaultdict(set)
    for position in found.feeds.served:
        for leaf, axis in layer_axes(found, position, step):
            if leaf in fed:
                ndim = len(specs[leaf].shape)
                way = None if axis is None else host_order(ndim, axis, target.platform)
                asked[leaf].add(way)
    orders: dict[int, Lying] = {}
    clashing: set[int] = set()
    for own in _updated_together(found, asked):
        parameters = own & asked.keys()
        ways = {way for leaf in parameters for way in asked[leaf]}
        if len(ways) > 1 or (target.stood_in and ways != {None}):
            clashing |= {leaf for leaf in parameters if asked[leaf] != {None}}
        elif (order := next(iter(ways), None)) is not None:
            lying = Lying(order=order, parameters=frozenset(parameters))
            orders.update(dict.fromkeys(own, lying))
    return orders, frozenset(clashing)


def _updated_together(found: Streamed, leaves: Collection[int]) -> list[set[int]]:
    """`leaves` and whatever shares loops over blocks with them."""
    parts = [{leaf} for leaf in leaves]
    for group in found.groups:
        mine, rest = _leaves_of(group), []
        for part in parts:
            if mine.isdisjoint(part):
                rest.append(part)
            else:
                mine |= part
        parts = [*rest, mine]
    return parts


def _leaves_of(group: Group) -> set[int]:
    """What a group reads and writes, gradients by their parameters."""
    gradients = {value.number: value.leaf for value in group.gradients}
    leaves = {gradients.get(number, number) for number in group.reads}
    return leaves | {leaf for _, leaf in group.writes}
