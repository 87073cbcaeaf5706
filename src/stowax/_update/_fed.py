"""Running a stack's loop with its parameters in host memory.

`_feed` has found what the loop reads of the step's arguments, `_boundary` knows
how to emit the loop once more: here the two meet.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from .._layers._axis_order import inverse, lying
from .._layers._boundary import Emission
from .._layers._host_layers import HostArray, Rows, Transpose, sharding_over
from ._feed import emission_of
from ._record import Streamed


def run_fed(
    streamed: Streamed,
    position: int,
    args: Sequence[Any],
    env: Mapping[int, Any],
    boundary: Mapping[str, Emission],
    how: tuple[bool, bool, bool],
) -> list[Any]:
    """The outputs of the loop at `position`, some of them in host memory.

    **Arguments:** `args` are the step's flat inputs as they lie, `env` values on the
    device by number; `how` are `in_turn`, `lean` and `late` of `run_streamed`.
    """
    program, feeds = streamed.program, streamed.feeds
    node = program.nodes[position]
    emission = emission_of(node, boundary)
    if emission is None:
        raise ValueError(f"{node.equation} is no loop of a stack")
    in_turn, lean, late = how
    fed = {
        number: _host_array(streamed, feeds.chains[number], args)
        for k in feeds.served[position]
        if (number := node.inputs[k]) is not None
    }
    gone = {
        k: _rows(streamed, node.outputs[k])
        for k in feeds.host_outputs(program, position)
    }
    # libtpu counts every place in memory: there, a gradient that waits is one more.
    late = late and (in_turn or emission.stack.separate)
    values = node.read({**env, **fed})
    return emission.emit(values, to_host=gone, lean=lean, late=late)


def _rows(streamed: Streamed, made: int) -> Rows | None:
    """How blocks are cut out of the buffer `made`, one layer after the other.

    `None` for gradients of stacked parameters: they lie as those do.
    """
    for group in streamed.groups:
        for value in group.gradients:
            if value.made == made and value.index is not None:
                cut, partition = group.cut, streamed.partitions.get(value.leaf)
                return Rows(
                    shape=cut.rows,
                    axis=cut.row_axis,
                    partition=None if partition is None else cut.spread(partition),
                )
    return None


def _host_array(
    streamed: Streamed, way: tuple[int, tuple[int, ...]], args: Sequence[Any]
) -> HostArray:
    """A leaf with what is done to it on its way to a loop."""
    leaf, nodes = way
    order, partition = streamed.orders.get(leaf), streamed.partitions.get(leaf)
    if partition is not None:
        partition = lying(partition, order)
    value = HostArray(
        array=args[leaf],
        chain=() if order is None else (Transpose(order=inverse(order)),),
        sharding=sharding_over(args[leaf], partition),
    )
    for position in nodes:
        equation = streamed.program.nodes[position].equation
        if equation.primitive.name != "name":
            following = value.then(equation)
            if following is None:
                raise ValueError(f"{equation} cannot be done layer by layer")
            value = following
    return value
