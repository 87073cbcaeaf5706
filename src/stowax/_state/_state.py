"""The step's state as candidates: which of its arrays could wait in host memory.

Optimizer state is read and written once a step, at its end; parameters are read by the
layers, too, forward and backward, and have gradients. `find_state` asks `_update._find`
of every array what the step does to it, and makes a body of the phase "update" of the
answers, to be planned beside the layers' bodies:

- what is worked on element by element streams through the device in blocks;
- parameters of repeated layers are fetched layer by layer besides, and their gradients
  written to host memory where all that reads these works on blocks; then they move
  together, and are one value;
- optimizer state that is needed as a whole (a matrix function) is brought in at its
  turn, one array after the other, and may be offloaded, too;
- what is small, cannot be cut, or is read outside of layers stays on the device.

Arrays that the step gives back in the same type, and that can be donated, are
candidates: they are updated where they lie. So are parameters that it only reads
(frozen weights, or all of them in a step that returns gradients): they stay where they
are, and nothing is donated. Arrays that are alike but for numbers in
their paths (the layers of an unrolled model) are one value: the solver need not tell
them apart, and a stack's loops fetch all layers' arrays or none.
"""

import collections
import dataclasses
import re
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import jax

from .._cost._cost import seconds
from .._cost._record import OperationCost
from .._layers._axis_order import Order, lying
from .._layers._host_layers import can_stream
from .._records._stages import (
    OFFLOAD_LEAST_BYTES,
    STATE,
    Body,
    Decision,
    HostUpdate,
    Passage,
    Value,
)
from .._step._trace import Argument, Step
from .._target._machine import Target
from .._update._blocks import BlockSize
from .._update._feed import emission_of
from .._update._find import stream_update
from .._update._record import Leaf, Streamed
from ._host_parts import host_parts
from ._layer_axes import (
    UNTILED,
    Lying,
    layer_axes,
    lying_orders,
    why_layers_do_not_cross,
)
from ._shards import device_bytes, mixes_axes, shard_shape

NO_HOST = "the target has no host memory of its own"


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class State:
    """The state's body; `leaves[value]` are the arrays of a value, by flat position.

    `reasons[value]` says why it is not streamed element by element, else it is empty.
    `read_only` are the values that the step reads and returns nothing for. `lying` has
    the arrays that would not lie in host memory as they are typed.
    """

    body: Body
    leaves: tuple[tuple[int, ...], ...]
    reasons: tuple[str, ...]
    read_only: frozenset[int]
    lying: Mapping[int, Lying]

    def hosted(self, chosen: Sequence[Decision | None]) -> tuple[int, ...]:
        """Flat positions of the arguments that live in host memory by a decision."""
        pairs = zip(self.leaves, chosen, strict=True)
        return tuple(sorted(i for own, how in pairs if how == "offload" for i in own))

    def orders(self, hosted: Collection[int]) -> dict[int, tuple[int, ...]]:
        """Of arrays in host memory, how those lie that do not lie as typed."""
        here = {i: self.lying[i] for i in hosted if i in self.lying}
        return {
            i: way.order
            for i, way in here.items()
            if not way.parameters.isdisjoint(hosted)
        }

    def leaves_of(self, parts: Sequence[HostUpdate]) -> tuple[int, ...]:
        """Flat positions of the arguments that parts of the update are made of."""
        values = [i for part in parts for i in part.values]
        return tuple(sorted(leaf for i in values for leaf in self.leaves[i]))


def search_state(
    step: Step,
    specs: Sequence[Any],
    target: Target,
    least_bytes: int = OFFLOAD_LEAST_BYTES,
    *,
    returned: bool = False,
) -> Streamed:
    """What `step` does to every array of its state that could be worth moving.

    **Arguments:** `specs` are the step's arguments, flat, with their shardings;
    `least_bytes` are worth a copy of their own (`_stages.least_bytes`); `returned` says
    whether gradients may be returned in host memory.
    """
    size = BlockSize.least(least_bytes, target.platform, target.device_kind)
    candidates = [
        i
        for i in range(len(step.arguments))
        if _movable(step, i)
        and getattr(specs[i], "sharding", None) is not None
        and not mixes_axes(specs[i])
        and device_bytes(specs[i]) >= least_bytes
    ]
    return _found(step, specs, candidates, size, returned=returned)


def find_state(
    step: Step,
    specs: Sequence[Any],
    target: Target,
    found: Streamed,
    least_bytes: int = OFFLOAD_LEAST_BYTES,
    *,
    returned: bool = False,
) -> State | None:
    """The state of `step`, or `None` if there is none worth a decision.

    **Arguments:** `specs`, `least_bytes` and `returned` as for `search_state`, `found`
    is what that gave.
    """
    size = BlockSize.least(least_bytes, target.platform, target.device_kind)
    candidates = [leaf.input for leaf in found.leaves]
    weights = {i for i in candidates if step.arguments[i].role == "parameter"}
    fed = _fed(found, step, specs, target) & weights
    orders, clashing = lying_orders(found, step, specs, target, fed)
    # All arrays of a value move together.
    groups = _alike(step, found, candidates)
    fed = {i for own in groups for i in own if (fed - clashing).issuperset(own)}
    orders = {i: o for i, o in orders.items() if not fed.isdisjoint(o.parameters)}
    if fed != weights or orders:
        candidates = [i for i in candidates if i not in weights - fed]
        found = _found(step, specs, candidates, size, orders, returned=returned)
        groups = _alike(step, found, candidates)
    if not candidates:
        return None
    traffic = _Traffic(step, found, specs)
    leaves = {leaf.input: leaf for leaf in found.leaves}
    for i in candidates:
        order = found.orders.get(i)
        if leaves[i].block and not _fills_tiles(leaves[i], specs[i], order, target):
            leaves[i] = dataclasses.replace(leaves[i], way="device", reason=UNTILED)
    values = tuple(
        _value(
            index,
            [step.arguments[i] for i in own],
            leaves[own[0]],
            has_host_memory(target),
            traffic.fields(own),
        )
        for index, own in enumerate(groups)
    )
    read_only = frozenset(k for k, own in enumerate(groups) if _only_read(step, own[0]))
    device_seconds = _update_seconds(
        [v for v in values if v.index not in read_only], target
    )
    body = Body(
        name=STATE,
        count=1,
        values=values,
        operations=(),
        forward_seconds=0.0,
        backward_seconds=device_seconds,
        points=(),
        phase="update",
        host_updates=host_parts(
            found, groups, specs, traffic.bytes, target, device_seconds
        ),
    )
    return State(
        body=body,
        leaves=tuple(tuple(own) for own in groups),
        reasons=tuple(leaves[own[0]].reason for own in groups),
        read_only=read_only,
        lying=orders,
    )


def _fills_tiles(leaf: Leaf, spec: Any, order: Order, target: Target) -> bool:
    """Whether blocks of a leaf cross the link; of its rest `_update._blocks` knows."""
    shard = lying(shard_shape(spec), order)
    if leaf.block:
        rows = min(leaf.block[-2], shard[-2])  # within a shard, where rows are cut
        shard = (*shard[:-2], rows, shard[-1])
    part = jax.ShapeDtypeStruct(shard, spec.dtype)
    return can_stream(part, platform=target.platform)


def has_host_memory(target: Target) -> bool:
    """Whether what is offloaded leaves the device's memory; a CPU has only one."""
    return target.host_bytes > 0 and target.platform != "cpu"


def _movable(step: Step, i: int) -> bool:
    """Whether an argument is state that is updated where it lies, or is only read."""
    argument = step.arguments[i]
    if argument.role not in ("optimizer state", "parameter"):
        return False
    if _only_read(step, i):
        return argument.role == "parameter"
    return argument.position in step.donate


def _only_read(step: Step, i: int) -> bool:
    """Whether no output of the step takes an argument's place."""
    return i not in step.updates


def _found(
    step: Step,
    specs: Sequence[Any],
    candidates: Sequence[int],
    size: BlockSize,
    orders: Mapping[int, Lying] | None = None,
    *,
    returned: bool,
) -> Streamed:
    return stream_update(
        step.jaxpr,
        {i: step.updates.get(i) for i in candidates},
        per_device={i: shard_shape(specs[i]) for i in candidates},
        orders={i: way.order for i, way in (orders or {}).items()},
        boundary=step.boundary,
        size=size,
        returned=returned,
    )


def _alike(
    step: Step, found: Streamed, candidates: Sequence[int]
) -> list[tuple[int, ...]]:
    """Arrays that are one value, in the order of the step's arguments.

    Of one role, too: parameters and their momentum may be `args[0]` and `args[1]`.
    """
    leaves = {leaf.input: leaf for leaf in found.leaves}
    alike: dict[Any, list[int]] = collections.defaultdict(list)
    for i in candidates:
        leaf = leaves[i]
        argument = step.arguments[i]
        kind = argument.role, _only_read(step, i)
        path = general(argument.path)
        alike[kind, path, leaf.shape, leaf.dtype, leaf.way].append(i)
    return [tuple(own) for own in alike.values()]


def _fed(found: Streamed, step: Step, specs: Sequence[Any], target: Target) -> set[int]:
    """Parameters that loops fetch, and of which nothing else needs all at once."""
    streamed = {leaf.input for leaf in found.leaves if leaf.way == "streamed"}
    returned = {o for o in found.program.outputs if isinstance(o, int)}
    for group in found.groups:
        if any(number not in returned for number, _ in group.gives):
            streamed -= {*group.reads}
        if group.gives:  # of what is only read, something whole is made on the device
            streamed -= {i for i in group.reads if _only_read(step, i)}
    fed = set()
    for position in found.feeds.served:
        for leaf, axis in layer_axes(found, position, step):
            refused = why_layers_do_not_cross(specs[leaf], axis, target.platform)
            if leaf in streamed and not refused:
                fed.add(leaf)
            else:
                streamed.discard(leaf)
                fed.discard(leaf)
    return fed


class _Traffic:
    """What crosses the link if state is in host memory, by leaf and place."""

    def __init__(self, step: Step, found: Streamed, specs: Sequence[Any]):
        self.bytes = {
            leaf.input: device_bytes(specs[leaf.input]) for leaf in found.leaves
        }
        self.gradients = {value.leaf for value in found.feeds.gradients.values()}
        self.into: Counter = collections.Counter()
        self.out: Counter = collections.Counter()
        self.layers: dict[str, dict[str, Counter]] = {}
        owner = {n: value.leaf for n, value in found.feeds.gradients.items()}
        for group in found.groups:
            for number in group.reads:
                leaf = owner.get(number, number)
                self.into[leaf] += self.bytes[leaf]
            for _, leaf in group.writes:
                self.out[leaf] += self.bytes[leaf]
        for position in found.feeds.served:
            emission = emission_of(found.program.nodes[position], step.boundary)
            if emission is None:
                continue
            ways = self.layers.setdefault(emission.stack.name, {})
            mine = ways.setdefault(emission.kind, collections.Counter())
            for leaf, _ in layer_axes(found, position, step):
                mine[leaf] += self.bytes[leaf] // emission.stack.count

    def fields(self, own: Sequence[int]) -> dict[str, Any]:
        """Bytes of a value made of these leaves, as `Value` has them."""

        def total(counted: Mapping[int, int]) -> int:
            return sum(counted[i] for i in own)

        gone = collections.Counter({i: self.bytes[i] for i in self.gradients})
        passages = []
        for stack, ways in self.layers.items():
            backward = ways.get("backward", collections.Counter())
            forward = ways.get("forward", collections.Counter())
            if total(forward) or total(backward):
                leaving = {i: n for i, n in backward.items() if i in self.gradients}
                passages.append(
                    Passage(
                        body=stack,
                        forward_in=total(forward),
                        backward_in=total(backward),
                        backward_out=total(collections.Counter(leaving)),
                    )
                )
        return {
            "bytes": total(self.bytes) + total(gone),
            "update_in": total(self.into),
            "update_out": total(self.out),
            "passages": tuple(passages),
        }


def _value(
    index: int,
    arguments: Sequence[Argument],
    leaf: Leaf,
    has_host: bool,
    traffic: Mapping[str, Any],
) -> Value:
    allowed: set[Decision] = {"keep"}
    if leaf.way != "device" and has_host:
        allowed.add("offload")
    stays = leaf.reason if leaf.way == "device" else "" if has_host else NO_HOST
    first = arguments[0]
    return Value(
        index=index,
        name=general(first.path) if len(arguments) > 1 else first.path,
        source="",
        shape=leaf.shape,
        dtype=leaf.dtype,
        operation=None,
        available=False,
        needed=True,
        allowed=frozenset(allowed),
        role=first.role,
        stays=stays,
        **traffic,
    )


def _update_seconds(values: Sequence[Value], target: Target) -> float:
    """Seconds that reading and writing the state takes on the device at the least."""
    moved = sum(value.bytes for value in values)
    return seconds(OperationCost(bytes_read=moved, bytes_written=moved), target.chip)


def general(path: str) -> str:
    """A path with all numbers alike: what arrays that are one value are called."""
    return re.sub(r"\d+", "*", path)
