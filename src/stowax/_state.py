"""The step's state as candidates: which of its arrays could wait in host memory.

Optimizer state is read and written once a step, at its end. `find_state` asks
`_update_find` of every array what the step does to it, and makes a body of the phase
"update" of the answers, to be planned beside the layers' bodies:

- what is worked on element by element streams through the device in blocks;
- what is needed as a whole (a matrix function) is brought in at its turn, one array
  after the other, and may be offloaded, too;
- what is small, or cannot be cut, stays on the device.

Only arrays that the step gives back in the same type, and that can be donated, are
candidates: they are updated where they lie. Arrays that are alike but for numbers in
their paths (the layers of an unrolled model) are one value: the solver need not tell
them apart.
"""

import collections
import dataclasses
import math
import re
from collections.abc import Sequence
from typing import Any

from ._cost import seconds
from ._cost_record import OperationCost
from ._machine import Target
from ._stages import OFFLOAD_LEAST_BYTES, Body, Decision, Value
from ._trace import Argument, Step
from ._update_find import stream_update
from ._update_record import Leaf

NAME = "state"
"""Name of the body that the state makes."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class State:
    """The state's body; `leaves[value]` are the arrays of a value, by flat position.

    `reasons[value]` says why it is not streamed element by element, else it is empty.
    """

    body: Body
    leaves: tuple[tuple[int, ...], ...]
    reasons: tuple[str, ...]

    def hosted(self, chosen: Sequence[Decision | None]) -> tuple[int, ...]:
        """Flat positions of the arguments that live in host memory by a decision."""
        pairs = zip(self.leaves, chosen, strict=True)
        return tuple(sorted(i for own, how in pairs if how == "offload" for i in own))


def shard_shape(spec: Any) -> tuple[int, ...]:
    """The shape of one device's part of an array."""
    sharding = spec.sharding
    whole = tuple(spec.shape)
    return whole if sharding is None else tuple(sharding.shard_shape(whole))


def find_state(step: Step, specs: Sequence[Any], target: Target) -> State | None:
    """The optimizer state of `step`, or `None` if there is none worth a decision.

    **Arguments:** `specs` are the step's arguments, flat, with their shardings.
    """
    candidates = [
        i
        for i, argument in enumerate(step.arguments)
        if argument.role == "optimizer state"
        and i in step.updates
        and argument.position in step.donate
        and specs[i].sharding is not None
        and device_bytes(specs[i]) >= OFFLOAD_LEAST_BYTES
    ]
    if not candidates:
        return None
    found = stream_update(
        step.jaxpr,
        {i: step.updates[i] for i in candidates},
        per_device={i: shard_shape(specs[i]) for i in candidates},
    )
    leaves = {leaf.input: leaf for leaf in found.leaves}
    alike: dict[Any, list[int]] = collections.defaultdict(list)
    for i in candidates:
        argument, leaf = step.arguments[i], leaves[i]
        kind = (_general(argument.path), leaf.shape, leaf.dtype, leaf.way)
        alike[kind].append(i)
    groups = list(alike.values())
    values = tuple(
        _value(k, [step.arguments[i] for i in own], leaves[own[0]], specs, own, target)
        for k, own in enumerate(groups)
    )
    body = Body(
        name=NAME,
        count=1,
        values=values,
        operations=(),
        forward_seconds=0.0,
        backward_seconds=_update_seconds(values, target),
        points=(),
        phase="update",
    )
    return State(
        body=body,
        leaves=tuple(tuple(own) for own in groups),
        reasons=tuple(leaves[own[0]].reason for own in groups),
    )


def _value(
    index: int,
    arguments: Sequence[Argument],
    leaf: Leaf,
    specs: Sequence[Any],
    own: Sequence[int],
    target: Target,
) -> Value:
    allowed: set[Decision] = {"keep"}
    if leaf.way != "device" and target.host_bytes > 0:
        allowed.add("offload")
    first = arguments[0]
    several = len(arguments) > 1
    return Value(
        index=index,
        name=_general(first.path) if several else first.path,
        source="",
        shape=leaf.shape,
        dtype=leaf.dtype,
        bytes=sum(device_bytes(specs[i]) for i in own),
        operation=None,
        available=False,
        needed=True,
        allowed=frozenset(allowed),
        role=first.role,
    )


def _update_seconds(values: Sequence[Value], target: Target) -> float:
    """Seconds that reading and writing the state takes on the device at the least."""
    moved = sum(value.bytes for value in values)
    return seconds(OperationCost(bytes_read=moved, bytes_written=moved), target.chip)


def _general(path: str) -> str:
    return re.sub(r"\d+", "*", path)


def device_bytes(spec: Any) -> int:
    """Bytes of one device's part of an array."""
    return math.prod(shard_shape(spec)) * spec.dtype.itemsize
