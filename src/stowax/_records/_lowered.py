"""A lowered program as plain records: what is computed, of which size, in which memory.

`_mlir.read_graph` fills them from the StableHLO that JAX lowers to, after Shardy has
propagated the shardings; `_predict` walks them. No MLIR and no JAX in here: the walk
can be tested on graphs written by hand.

A global shape says nothing about the bytes of a device: every value carries the mesh
axes that split each of its dimensions. What has no axes is whole on every device.
"""

import dataclasses
import math
import re
from collections.abc import Iterator, Mapping
from typing import Literal

Memory = Literal["device", "host"]
Axes = tuple[tuple[str, ...], ...]

DTYPE_BYTES = {"i1": 1, "i4": 1, "ui4": 1, "f4E2M1FN": 1}


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class TensorValue:
    """One array of the program.

    `number` is unique in the graph. `shape` is global; `axes` has the names of the mesh
    axes that split each dimension, `splits` into how many parts that is. `memory` is
    set where the program says it (arguments, results, placements), else `None`.
    """

    number: int
    shape: tuple[int, ...]
    dtype: str
    item_bytes: int
    axes: Axes
    splits: tuple[int, ...]
    memory: Memory | None = None

    @property
    def bytes(self) -> int:
        """Bytes of the whole array."""
        return math.prod(self.shape) * self.item_bytes

    @property
    def local_shape(self) -> tuple[int, ...]:
        """Shape of the part that one device holds: each dimension is rounded up."""
        if not self.splits:
            return self.shape
        return tuple(-(-n // k) for n, k in zip(self.shape, self.splits, strict=True))

    @property
    def device_bytes(self) -> int:
        """Bytes that one device holds, without padding."""
        return math.prod(self.local_shape) * self.item_bytes

    @property
    def shards(self) -> int:
        """Number of different parts that the array is split into."""
        return math.prod(self.splits)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class TensorOperation:
    """One operation; `operands` are value numbers.

    `scope` is JAX's name stack (`jit(f)/while/body/my_scope/dot_general`), from the
    root of the function it stands in. `source` is the user's line that it comes from
    (`file:line`), empty where it was not asked for or is unknown. `target` is the
    callee of a call, the target of a custom call. `contracting` holds, for
    `dot_general`, the contracting dimensions of left and right.
    """

    name: str
    operands: tuple[int, ...]
    results: tuple[TensorValue, ...]
    scope: str = ""
    source: str = ""
    target: str = ""
    contracting: tuple[tuple[int, ...], ...] = ()
    regions: tuple["Region", ...] = ()


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Region:
    """Straight-line code: arguments, operations in order, and what it hands out."""

    arguments: tuple[TensorValue, ...]
    operations: tuple[TensorOperation, ...]
    results: tuple[int, ...]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Donation:
    """An argument whose buffer an output may have; `output` is `None` for any."""

    argument: int
    output: int | None


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Graph:
    """A lowered program. `functions["main"]` is the entry.

    `result_memory` has one entry per output of the entry. `axis_sizes` are the mesh's.
    `argument_names` and `result_names` are what JAX calls the entry's, such as
    `state['w']` and `result[0]['w']`; empty where it kept none.
    """

    functions: Mapping[str, Region]
    donations: tuple[Donation, ...]
    result_memory: tuple[Memory, ...]
    axis_sizes: Mapping[str, int]
    argument_names: tuple[str, ...] = ()
    result_names: tuple[str, ...] = ()

    @property
    def main(self) -> Region:
        """The entry function."""
        return self.functions["main"]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ScopedSharding:
    """How the result of a named scope is spread: bytes per device, number of parts."""

    device_bytes: int
    shards: int
    shape: tuple[int, ...]
    dtype: str


def walk(region: Region) -> Iterator[TensorOperation]:
    """Every operation, those of inner regions before the one they belong to."""
    for operation in region.operations:
        for inner in operation.regions:
            yield from walk(inner)
        yield operation


def shards_by_scope(graph: Graph, prefix: str) -> dict[str, ScopedSharding]:
    """The sharding of what each `jax.named_scope` that begins with `prefix` computes.

    A scope's value is the first result of the last operation that stands in it: JAX
    lowers one operation to several, the last of which has the result. Scopes within
    loop bodies and called functions are found; what the backward pass derived from a
    scope (its name stack has `transpose(`) is passed over unless there is nothing else.

    **Arguments:** `prefix` is the beginning of one component of the name stack, such as
    `"stowax.value.0."`. **Returns:** scope name → sharding.
    """
    pattern = re.compile(rf"(?:^|[/(])({re.escape(prefix)}[^/()]*)")
    forward: dict[str, ScopedSharding] = {}
    transposed: dict[str, ScopedSharding] = {}
    for function in graph.functions.values():
        for operation in walk(function):
            if not operation.results:
                continue
            value = operation.results[0]
            for match in pattern.finditer(operation.scope):
                before = operation.scope[: match.start(1)]
                into = transposed if "transpose(" in before else forward
                into[match.group(1)] = ScopedSharding(
                    device_bytes=value.device_bytes,
                    shards=value.shards,
                    shape=value.shape,
                    dtype=value.dtype,
                )
    return transposed | forward
