"""The arrays at the predicted peak of a lowered program: what is in the way.

`predict_memory` says how many bytes; this says whose. It is the same walk, stopped
where the most is alive, in the loop that runs there, in the loop inside of that.
Nothing is compiled: so it is there for programs, too, that a compiler refuses.
"""

import dataclasses
import math
from collections.abc import Iterable, Iterator, Mapping
from typing import cast

from .._records._lowered import Graph, TensorValue
from .._records._peak import PEAK_ROLES, MemoryPeak, PeakArray, PeakRole
from .._records._scopes import phase_of
from ._flatten import Node
from ._fusion import short_name
from ._gathered import communicated
from ._liveness import BlockWalk, Buffer
from ._padding import padded_bytes
from ._peak_roles import Roles
from ._predict import MemoryPrediction, entry_of, predict_memory

_TYPES = {
    "i1": "bool",
    "bf16": "bfloat16",
    "f16": "float16",
    "f32": "float32",
    "f64": "float64",
    "complex<f32>": "complex64",
    "complex<f64>": "complex128",
}
_MADE_AGAIN = {"constant": "held for a loop", "turned": "turned for a loop"}
_CARRIED = "what libtpu adds for arrays that loops carry"


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class _Found:
    """One array at the peak, before those that are alike are counted together."""

    role: PeakRole
    name: str
    source: str
    shape: str
    bytes: int
    padding: int


def predict_peak(
    graph: Graph,
    platform: str,
    roles: Mapping[str, str] | None = None,
    layers: str = "",
) -> tuple[MemoryPrediction, MemoryPeak]:
    """What a program will need, and the arrays that it needs it for.

    **Arguments:** `graph` and `platform` as for `predict_memory`; read the graph with
    its sources. `roles` has what arguments are for, by name; `layers` is the named
    scope that planned layers are under.

    **Returns:** the prediction, and the peak. Its arrays, without padding, add up to
    the prediction's `device_total`.
    """
    prediction = predict_memory(graph, platform)
    walk, aliases = entry_of(graph, platform)
    entry, flat = walk.block, walk.flat
    names = dict(zip(entry.arguments, graph.argument_names, strict=False))
    given: dict[int, PeakRole] = {}
    for n in entry.arguments:
        role = (roles or {}).get(names.get(n, ""))
        given[n] = cast("PeakRole", role) if role in PEAK_ROLES else "argument"
    maker = _Maker(walk, Roles(flat, given, names, layers), platform)
    found = [
        maker.array(n, given[n], names.get(n, ""), "")
        for n in entry.arguments
        if n not in flat.host
    ]
    results = zip(entry.results, range(len(entry.results)), strict=True)
    for n, i in results:
        if i not in aliases and n not in flat.host:
            label = graph.result_names[i] if i < len(graph.result_names) else ""
            found.append(maker.result(n, label))
    temp, _ = walk.peak()
    at = _at_peak(walk)
    found += maker.temporaries(walk, at)
    if (again := prediction.temp - temp) > 0:
        found.append(_bytes_of("fragmentation", _CARRIED, again, maker.carried(walk)))
    last = maker.innermost
    return prediction, MemoryPeak(
        predicted_bytes=prediction.device_total,
        phase=phase_of(f"{last.within}/{last.scope}") if last else "",
        source=last.source if last else "",
        arrays=_counted(found),
    )


def _at_peak(walk: BlockWalk) -> int:
    """The operation of a walked block at which the most is alive."""
    return max(range(len(walk.alive)), key=walk.alive.__getitem__, default=0)


class _Maker:
    """Makes arrays of a program's values; `innermost` is the operation at the peak."""

    def __init__(self, walk: BlockWalk, roles: Roles, platform: str):
        self.flat, self.roles, self.platform = walk.flat, roles, platform
        self.innermost: Node | None = None

    def temporaries(self, walk: BlockWalk, at: int) -> Iterator[_Found]:
        """What is alive at an operation of a walked block, and inside of it."""
        if not walk.nodes:
            return
        for buffer in walk.alive_at(at):
            yield self.temporary(walk, buffer, at)
        node = walk.nodes[at]
        self.innermost = node
        if moved := communicated(node, self.flat):
            name, source = node.scope, node.source
            text = f"operands and sums of {name or 'a product'} from other devices"
            yield _bytes_of("workspace", text, moved, source)
        inner = list(walk.inner_walks(node))
        if inner:
            most = max(inner, key=lambda one: one.peak()[0])
            # `peak` was called twice on it: what is alive is there twice, too.
            del most.alive[len(most.nodes) :]
            yield from self.temporaries(most, _at_peak(most))

    def temporary(self, walk: BlockWalk, buffer: Buffer, at: int) -> _Found:
        """What lies in a buffer while an operation runs."""
        maker = walk.fusion.maker
        there = [n for n in buffer.values if maker.get(n, -1) <= at]
        value = (there or buffer.values)[-1]
        name, source = self.roles.named(value)
        role = self.roles.role_of(value)
        if not buffer.copy:
            return self.array(value, role, name, source)
        kind = self.flat.values[value]
        what = _MADE_AGAIN.get(buffer.copy) or f"cast to {_type(buffer.copy)}"
        item = kind.item_bytes * buffer.bytes // max(kind.device_bytes, 1)
        shape = kind if what in _MADE_AGAIN.values() else None
        padded = padded_bytes(kind.local_shape, item, self.platform)
        return _Found(
            role=role,
            name=f"{name.removeprefix('copy of ') or role}, {what}",
            source=source,
            shape=_shape(kind, shape.dtype if shape else buffer.copy),
            bytes=padded,
            padding=padded - buffer.bytes,
        )

    def carried(self, walk: BlockWalk) -> str:
        """The line of the largest array of a walked block that a loop carries."""
        loops = (node for node in walk.nodes if short_name(node.name) == "while")
        made = [n for node in loops for n in node.results if n not in self.flat.host]
        largest = max(made, key=walk.size, default=None)
        return "" if largest is None else self.roles.named(largest)[1]

    def array(self, value: int, role: str, name: str, source: str) -> _Found:
        """A value as an array on one device."""
        kind = self.flat.values[value]
        padded = padded_bytes(kind.local_shape, kind.item_bytes, self.platform)
        return _Found(
            role=role,  # pyright: ignore[reportArgumentType]
            name=name,
            source=source,
            shape=_shape(kind, kind.dtype),
            bytes=padded,
            padding=padded - kind.device_bytes,
        )

    def result(self, value: int, label: str) -> _Found:
        """A result that has a buffer of its own."""
        role = self.roles.role_of(value)
        _, source = self.roles.named(value)
        role = "gradient" if role == "gradient" else "output"
        return self.array(value, role, label, source)


def _bytes_of(role: PeakRole, name: str, count: int, source: str = "") -> _Found:
    """Bytes that are no array of the program's own."""
    return _Found(role=role, name=name, source=source, shape="", bytes=count, padding=0)


def _counted(found: Iterable[_Found]) -> tuple[PeakArray, ...]:
    """Arrays of one role, shape and line together, the most bytes first."""
    alike: dict[tuple[str, str, str], list[_Found]] = {}
    for one in found:
        if one.bytes:
            alike.setdefault((one.role, one.shape, one.source), []).append(one)
    arrays = [
        PeakArray(
            role=group[0].role,
            name=group[0].name,
            shape=group[0].shape,
            source=group[0].source,
            count=len(group),
            bytes=sum(one.bytes for one in group),
            padding=sum(one.padding for one in group),
        )
        for group in alike.values()
    ]
    return tuple(sorted(arrays, key=lambda array: -array.bytes))


def _type(dtype: str) -> str:
    """A type as NumPy calls it."""
    if dtype in _TYPES:
        return _TYPES[dtype]
    for short, long in (("ui", "uint"), ("i", "int")):
        if dtype.startswith(short) and dtype[len(short) :].isdigit():
            return f"{long}{dtype[len(short) :]}"
    return dtype.replace("f8", "float8_").lower() if dtype[:2] == "f8" else dtype


def _shape(value: TensorValue, dtype: str) -> str:
    if not math.prod(value.shape):
        return ""
    return f"{_type(dtype)}[{','.join(map(str, value.local_shape))}]"
