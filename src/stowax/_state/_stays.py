"""State that stays on the device whatever is decided, and why.

`find_state` has the arrays that can leave; a user who asks for another one wants to
know why not, and so does one who wonders what fills the device. `find_staying` gives
the rest of the state as values that allow nothing but "keep", each with its reason:
they take part in no decision, but patterns meet them, and plans list them.
"""

import collections
import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from .._records._stages import OFFLOAD_LEAST_BYTES, Value
from .._step._trace import Step
from .._target._machine import Target
from .._units import format_bytes
from .._update._blocks import BlockSize
from .._update._record import Leaf, Streamed
from ._layer_axes import (
    SEVERAL_AXES,
    layer_axes,
    lying_orders,
    why_layers_do_not_cross,
)
from ._shards import device_bytes, mixes_axes
from ._state import NO_HOST, State, general, has_host_memory

_ROLES = ("parameter", "optimizer state")
_WITHOUT_PLACE = "the step returns nothing in its type that takes its place"
_OUTSIDE = (
    "something outside of repeated layers needs it, or no repeated layer reads it"
)
_WHOLE = "what is made of it is needed whole on the device"
_TOGETHER = "arrays that are one value with it stay, and they move together"
_MIXED = (
    "its mesh has Explicit axes and Auto ones, and JAX forgets the memory of what a "
    "step returns over such a mesh"
)
_LEFT_OPEN = "it has no sharding, and others are spread over a mesh"


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Staying:
    """`count` arrays that are alike, as one value that stays; `why` is in `value`.

    `small` says that they are too small to be worth a line of their own.
    """

    value: Value
    count: int
    small: bool


def find_staying(
    step: Step,
    specs: Sequence[Any],
    target: Target,
    found: Streamed,
    state: State | None,
    least_bytes: int = OFFLOAD_LEAST_BYTES,
) -> tuple[Staying, ...]:
    """The arrays of the state that are no candidates, as values that stay.

    **Arguments:** `found` is what `search_state` gave, `state` what `find_state` made
    of it; `least_bytes` are worth a copy of their own.
    """
    moving = {i for own in state.leaves for i in own} if state else set()
    leaf_bytes = BlockSize.least(least_bytes).leaf_bytes
    reasons = _Reasons(step, specs, target, found, leaf_bytes)
    alike: dict[Any, list[int]] = collections.defaultdict(list)
    for i, argument in enumerate(step.arguments):
        if argument.role in _ROLES and i not in moving and device_bytes(specs[i]):
            spec = argument.spec
            kind = argument.role, general(argument.path), spec.shape, str(spec.dtype)
            alike[*kind, reasons.of(i)].append(i)
    first = len(state.body.values) if state else 0
    return tuple(
        Staying(
            count=len(own),
            small=reasons.small(own[0]),
            value=Value(
                index=index,
                name=path if len(own) > 1 else step.arguments[own[0]].path,
                source="",
                shape=tuple(shape),
                dtype=dtype,
                bytes=sum(device_bytes(specs[i]) for i in own),
                operation=None,
                available=False,
                needed=True,
                allowed=frozenset({"keep"}),
                role=role,
                stays=why,
            ),
        )
        for index, ((role, path, shape, dtype, why), own) in enumerate(
            alike.items(), start=first
        )
    )


class _Reasons:
    """Why each array stays: the first thing in its way."""

    def __init__(
        self,
        step: Step,
        specs: Sequence[Any],
        target: Target,
        found: Streamed,
        leaf_bytes: int,
    ):
        self.step, self.specs, self.target = step, specs, target
        self.leaf_bytes = leaf_bytes
        self.leaves: Mapping[int, Leaf] = {leaf.input: leaf for leaf in found.leaves}
        self.axes = {
            leaf: axis
            for position in found.feeds.served
            for leaf, axis in layer_axes(found, position, step)
        }
        crossing = {i for i in self.axes if not self._refused(i)}
        _, self.clashing = lying_orders(found, step, specs, target, crossing)
        self.given = {i for g in found.groups if g.gives for i in g.reads}

    def small(self, i: int) -> bool:
        """Whether no copy of the argument at flat position `i` would be worth it."""
        return device_bytes(self.specs[i]) < self.leaf_bytes

    def of(self, i: int) -> str:
        """The reason for the argument at flat position `i`."""
        argument, spec = self.step.arguments[i], self.specs[i]
        if self.small(i):
            return f"it is smaller than {format_bytes(self.leaf_bytes)} on a device"
        if not has_host_memory(self.target):
            return NO_HOST
        if getattr(spec, "sharding", None) is None:
            return _LEFT_OPEN
        if mixes_axes(spec):
            return _MIXED
        if i in self.step.updates and argument.position not in self.step.donate:
            return self._not_donated(argument.position)
        leaf = self.leaves.get(i)
        if leaf is None:
            return _WITHOUT_PLACE
        if leaf.way == "device":
            return leaf.reason
        if i not in self.axes:
            return _OUTSIDE
        if refused := self._refused(i):
            return refused
        if i in self.clashing:
            return SEVERAL_AXES
        if leaf.way != "streamed":
            return leaf.reason
        return _WHOLE if i in self.given else _TOGETHER

    def _not_donated(self, position: int) -> str:
        why = f"the step's own jit does not donate args[{position}]"
        if lost := self.step.lost.get(position):
            why = f"the step does not give back {lost}, so args[{position}] is not "
            why += "donated"
        return f"{why}, and what is updated lies in its place"

    def _refused(self, i: int) -> str:
        platform = self.target.platform
        return why_layers_do_not_cross(self.specs[i], self.axes[i], platform)
