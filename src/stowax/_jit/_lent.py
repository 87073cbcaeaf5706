"""What a caller gives to a step that overwrites it, and never said that it may.

A script that donates nothing may keep what it gives: the model that training began
with, to compare with. Where a plan overwrites arguments all the same, since nothing
fits without, it is given copies of what the step did not return itself, if the device
has room for them. What the step returned is overwritten by the next call.

What is in host memory already was put there for a plan, and is overwritten.
"""

import functools
import weakref
from collections.abc import Callable, Collection, Sequence
from typing import Any

import jax

from .._errors import PlanMismatchError
from .._jax import is_tracer

Results = dict[int, Any]
"""What a step's programs returned, by identity, while somebody has it (weak)."""


class Lent:
    """What a program that overwrites the arguments at `donated` is given.

    A call needs `device_bytes` of each device. `results` are those of the step, by
    whichever of its programs; `say` is told, once, where there is no room for copies.
    """

    def __init__(
        self,
        donated: Collection[int],
        device_bytes: int,
        results: Results,
        say: Callable[[str], None],
    ):
        self.donated, self.device_bytes = frozenset(donated), device_bytes
        self.results, self._say, self._said = results, say, False

    def returned(self, out: Any) -> None:
        """Takes note of what a call returned: it is the step's own."""
        for number, result in list(self.results.items()):
            if result() is None:
                self.results.pop(number, None)  # another thread may have been faster
        for leaf in jax.tree.leaves(out):
            if isinstance(leaf, jax.Array) and not is_tracer(leaf):
                self.results[id(leaf)] = weakref.ref(leaf)

    def of(self, arrays: Sequence[Any]) -> frozenset[int]:
        """The arrays, by identity, that stay the caller's, if there is room."""
        found = self._callers(arrays)
        devices = {device for leaf in found for device in leaf.devices()}
        # A copy of what is spread over processes would be all of theirs to make.
        alone = all(leaf.is_fully_addressable for leaf in found)
        if alone and all(_room(device) >= self.device_bytes for device in devices):
            return frozenset(map(id, found))
        if not self._said:
            self._said = True
            self._say("there is no room for copies: what it was given is overwritten")
        return frozenset()

    def direct(self, run: Callable[..., Any]) -> Callable[..., Any]:
        """`run`, for calls that are given only what the step returned.

        **Raises:** `PlanMismatchError` in all others, before anything runs.
        """

        @functools.wraps(run)
        def guarded(*args: Any) -> Any:
            if self._callers(args):
                raise PlanMismatchError("step: arrays of the caller's own.")
            out = run(*args)
            self.returned(out)
            return out

        return guarded

    def _callers(self, arrays: Sequence[Any]) -> list[Any]:
        return [
            leaf
            for position in self.donated
            for leaf in jax.tree.leaves(arrays[position])
            if isinstance(leaf, jax.Array)
            and not self._is_result(leaf)
            and leaf.sharding.memory_kind != "pinned_host"
        ]

    def _is_result(self, leaf: Any) -> bool:
        result = self.results.get(id(leaf))
        return result is not None and result() is leaf


def copied(leaf: Any) -> Any:
    """A copy of an array, where it is."""
    return jax.device_put(leaf, leaf.sharding, may_alias=False)


def _room(device: Any) -> float:
    """Bytes of a device that nothing takes, as far as is known; a CPU has enough."""
    if device.platform == "cpu":
        return float("inf")
    stats = device.memory_stats() or {}
    return stats.get("bytes_limit", 0) - stats.get("bytes_in_use", 0)
