"""What a caller gives to a step that overwrites it, and never said that it may.

A script that donates nothing may keep what it gives: the model that training began
with, to compare with. Where a plan overwrites arguments all the same, since nothing
fits without, it is given copies of what the step did not return itself, if the device
has room for them. What the step returned is overwritten by the next call.
"""

import dataclasses
import weakref
from collections.abc import Sequence
from typing import Any

import jax

from .._jax import is_tracer


@dataclasses.dataclass(frozen=True, slots=True)
class Lent:
    """The results of a step that overwrites the arguments at `donated`.

    A call needs `device_bytes` of each device.
    """

    donated: frozenset[int]
    device_bytes: int
    results: dict[int, Any] = dataclasses.field(default_factory=dict)

    def returned(self, out: Any) -> None:
        """Takes note of what a call returned: it is the step's own."""
        for number in [n for n, result in self.results.items() if result() is None]:
            del self.results[number]
        for leaf in jax.tree.leaves(out):
            if isinstance(leaf, jax.Array) and not is_tracer(leaf):
                self.results[id(leaf)] = weakref.ref(leaf)

    def of(self, arrays: Sequence[Any]) -> frozenset[int]:
        """The arrays, by identity, that stay the caller's, if there is room."""
        found = [
            leaf
            for position in self.donated
            for leaf in jax.tree.leaves(arrays[position])
            if isinstance(leaf, jax.Array) and not self._is_result(leaf)
        ]
        if not all(leaf.is_fully_addressable for leaf in found):
            return frozenset()  # a copy would be every process's to make
        devices = {device for leaf in found for device in leaf.devices()}
        if not all(_room(device) >= self.device_bytes for device in devices):
            return frozenset()
        return frozenset(map(id, found))

    def _is_result(self, leaf: Any) -> bool:
        result = self.results.get(id(leaf))
        return result is not None and result() is leaf


def copied(leaf: Any) -> Any:
    """A copy of an array, where it is."""
    return jax.device_put(leaf, leaf.sharding, may_alias=False)


def _room(device: Any) -> float:
    """Bytes of a device that nothing takes; on a CPU nobody counts them."""
    stats = device.memory_stats() or {}
    if "bytes_limit" not in stats:
        return float("inf")
    return stats["bytes_limit"] - stats.get("bytes_in_use", 0)
