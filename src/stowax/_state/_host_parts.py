"""Which parts of an update the host's processor could do, and whether that is faster.

A part is everything that is updated together: a parameter, its gradient and its
moments. Streamed, all of that crosses the link; where it is all in host memory, the
host's processor can update it where it lies, at the rate that its memory gives each
device (`Chip.host_rate`: far below the peak, and shared by all chips of a host).
`_state` asks for the parts that win. Where the rate is unknown none does.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from .._records._stages import HostUpdate
from .._target._machine import Target
from .._update._host import PLATFORMS, can_run_on_host, host_bytes, written
from .._update._record import Group, Streamed


def host_parts(
    found: Streamed,
    values: Sequence[tuple[int, ...]],
    specs: Sequence[Any],
    sizes: Mapping[int, int],
    target: Target,
    device_seconds: float,
) -> tuple[HostUpdate, ...]:
    """The parts that are updated faster on the host than through the link.

    **Arguments:** `values` has the leaves of each value of the update's body, `sizes`
    the bytes of each leaf. `device_seconds` is the update's own time on the device,
    under which copies hide: a part has to win beyond that.
    """
    rate = target.chip.host_rate()
    if target.platform not in PLATFORMS or rate is None:
        return ()
    owner = {leaf: index for index, own in enumerate(values) for leaf in own}
    parts = []
    for own, groups in _together(found, owner):
        leaves = [leaf for index in own for leaf in values[index]]
        alone = all(len(specs[i].sharding.device_set) == 1 for i in leaves)
        if not alone or not all(can_run_on_host(group) for group in groups):
            continue
        into = sum(sizes[i] for group in groups for i in _read(group))
        out = sum(sizes[i] for group in groups for i in written(group))
        work = sum(host_bytes(found.program, group) for group in groups)
        link = target.link
        part = HostUpdate(
            values=own,
            update_in=into,
            update_out=out,
            seconds=work / rate,
            stream_seconds=max(into / link.host_to_device, out / link.device_to_host),
        )
        if part.seconds < part.stream_seconds - device_seconds:
            parts.append(part)
    return tuple(parts)


def _read(group: Group) -> list[int]:
    """The leaf of every block that a group fetches, of gradients their parameter's."""
    gradients = {value.number: value.leaf for value in group.gradients}
    return [gradients.get(number, number) for number in group.reads]


def _together(
    found: Streamed, owner: Mapping[int, int]
) -> list[tuple[tuple[int, ...], list[Group]]]:
    """Values that groups update together, with the groups that write them."""
    parts: list[tuple[set[int], list[Group]]] = []
    for group in found.groups:
        if not group.writes:
            continue
        leaves = {*_read(group), *written(group)}
        mine, groups = {owner[leaf] for leaf in leaves}, [group]
        rest = []
        for other in parts:
            if mine.isdisjoint(other[0]):
                rest.append(other)
            else:
                mine, groups = mine | other[0], [*other[1], *groups]
        parts = [*rest, (mine, groups)]
    return [(tuple(sorted(mine)), groups) for mine, groups in parts]
