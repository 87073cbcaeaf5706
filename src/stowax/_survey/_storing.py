"""What storing a value costs the device, besides its memory and its copy's time."""

import dataclasses
from typing import NamedTuple

from .._cost._cost import seconds
from .._cost._record import OperationCost
from .._records._stages import Body, Value
from .._target._machine import Target
from ._travel import is_early


class _Passes(NamedTuple):
    """How often a stored value's bytes are read and written at the memory's full speed.

    For one that is kept, that is offloaded as soon as it is there, and later.
    """

    keep: int = 1
    early: int = 0
    late: int = 2


# A TPU's schedule moves slices and layouts at half of the speed of sums and less: 0.9
# to 1.5 TB/s of 2.3 on a v5p, 0.3 to 0.8 of 1.4 on a v6e; what is offloaded early is
# written to a place of its own first. Seconds a step of first plans priced as above and
# as here, by the compiled schedules: Llama2-7B on eight v6e 1.481 and 1.255, Llama2-13B
# on v5p 5.849 both times; PaliGemma2-3B 1.423 and 1.339, the second with products that
# are not fused, too.
_PASSES = {"tpu": _Passes(keep=2, early=2, late=4)}

_SMALL_COPY, _IN_LINE = 0.02, 0.1
"""A copy that takes less than the first part of a layer's forward pass is waited for,
for the second: assumed.

Schedulers give a short copy a short time, and it stands in line behind long ones. In
Llama2-13B on a v5p a statistic of the softmax, 2.5 MiB a layer beside four values of
160, was waited for 27 ms in each layer of 46 ms, a seventh of the step, for 0.1 GiB.
In Gemma2-27B two of 16 MiB beside two of 576, 1.5 % of a layer each: 31 ms each way.
"""


def with_storing(body: Body, target: Target) -> Body:
    """The body with the seconds that the device spends on storing each value.

    A kept value is read where it was made and written to its place in the stack. One
    that is offloaded late is moved aside twice, before its copy leaves and after its
    copy came back; one that is offloaded early is copied from where it was made
    (`_Passes`). A small one is waited for, see `_IN_LINE`.
    """
    passes = _PASSES.get(target.platform, _Passes())
    small = _SMALL_COPY * body.forward_seconds
    link = target.link

    def written(value: Value) -> float:
        return seconds(OperationCost(bytes_written=value.bytes), target.chip)

    def waiting(value: Value) -> float:
        rate = min(link.device_to_host, link.host_to_device)
        return _IN_LINE * body.forward_seconds if value.bytes / rate < small else 0.0

    if not body.in_loop:  # made and read at its own place: it is only written
        return dataclasses.replace(
            body,
            values=tuple(
                dataclasses.replace(value, keep_seconds=written(value))
                for value in body.values
            ),
        )

    def moving(value: Value, count: int) -> float:
        moved = OperationCost(bytes_read=value.bytes, bytes_written=value.bytes)
        return count * (seconds(moved, target.chip) + target.chip.launch_seconds)

    values = tuple(
        dataclasses.replace(
            value,
            keep_seconds=moving(value, passes.keep),
            offload_seconds=moving(value, passes.early if early else passes.late)
            + waiting(value),
        )
        for value in body.values
        for early in [is_early(body, value.index)]
    )
    return dataclasses.replace(body, values=values)
