"""What the page's script draws, as plain lists: curves, places, lanes, loops.

A column per field and every name once: a program of 100,000 places makes a page of a
few megabytes. All moments and all places are there; how many of them are drawn at a
zoom is the script's business (`step.js`).
"""

import dataclasses
from collections.abc import Iterable, Sequence
from typing import Any

from .._records._inspection import Inspection
from .._records._memory import (
    MEMORY_ROLES,
    Loop,
    MemoryCurve,
    MemoryRole,
    MemoryTimeline,
)
from .._records._timeline import LANES, Interval
from ._largest import short_name
from ._layout import short_source
from ._looks import STYLES, ink_on
from ._memory_bands import RESERVED, filled

_PLANNED = "stowax.layers"  # the scope of the loops over layers that a plan writes
_UNITS_OF_TIME = ((1.0, "s"), (1e-3, "ms"), (1e-6, "µs"))
_UNITS_OF_SIZE = ((2**40, "TiB"), (2**30, "GiB"), (2**20, "MiB"), (2**10, "KiB"))


def time_unit(seconds: float) -> tuple[float, str]:
    """The unit for an axis that ends at `seconds`: its seconds and its name.

    >>> time_unit(0.018)
    (0.001, 'ms')
    """
    fitting = (unit for unit in _UNITS_OF_TIME if seconds >= unit[0])
    return next(fitting, _UNITS_OF_TIME[-1])


def size_unit(count: float) -> tuple[int, str]:
    """The unit for an axis that ends at `count` bytes.

    >>> size_unit(5 * 2**30)
    (1073741824, 'GiB')
    """
    fitting = (unit for unit in _UNITS_OF_SIZE if count >= unit[0])
    return next(fitting, (1, "B"))


class _Names:
    """Texts by number, each of them once."""

    def __init__(self) -> None:
        self._numbers: dict[str, int] = {}

    def __call__(self, text: str) -> int:
        return self._numbers.setdefault(text, len(self._numbers))

    def all(self) -> list[str]:
        return list(self._numbers)


def page_data(inspection: Inspection) -> dict[str, Any]:
    """The data of an inspection's page, of JSON types only."""
    names = _Names()
    memory = inspection.memory_timeline
    data: dict[str, Any] = {
        "end": step_end(inspection),
        "roles": list(MEMORY_ROLES),
        "looks": {band: (look[0], ink_on(look[0])) for band, look in STYLES.items()},
        "curves": {},
        "loops": [],
        "lanes": [
            _lane([i for i in inspection.timeline.intervals if i.lane == lane], names)
            for lane in lanes_of(inspection)
        ],
    }
    if memory is not None:
        for kind in curves_of(inspection):
            data["curves"][kind] = _curve(memory, kind, names)
        data["loops"] = list(_loops(memory, data["end"]))
    return {**data, "names": names.all()}


def step_end(inspection: Inspection) -> float:
    """Where the axis of time ends."""
    ends = [inspection.timeline.step_seconds]
    if memory := inspection.memory_timeline:
        ends += [
            c.moments[-1].seconds for c in (memory.device, memory.host) if c.moments
        ]
    return max(ends) or 1e-6


def curves_of(inspection: Inspection) -> list[str]:
    """Which memories there is something to draw of: `device`, `host`."""
    memory = inspection.memory_timeline
    if memory is None:
        return []
    curves = {"device": memory.device, "host": memory.host}
    return [kind for kind, c in curves.items() if c.moments and c.peak_bytes]


def lanes_of(inspection: Inspection) -> list[str]:
    """The lanes in which something happens."""
    used = {interval.lane for interval in inspection.timeline.intervals}
    return [lane for lane in LANES if lane in used]


def roles_of(curve: MemoryCurve) -> list[MemoryRole]:
    """The roles that have bytes at any time, in the order in which they are drawn."""
    sums = [
        max(column) for column in zip(*(m.bytes for m in curve.moments), strict=True)
    ]
    return [role for role, most in zip(MEMORY_ROLES, sums, strict=True) if most]


def bands_of(curve: MemoryCurve) -> list[str]:
    """The bands of a curve from the bottom up: roles, and what stacks reserve."""
    bands: list[str] = list(roles_of(curve))
    if any(moment.empty for moment in curve.moments):
        stacks = {b.role for b in curve.blocks if b.filled_in or b.emptied_in}
        first = next((role for role in bands if role in stacks), bands[-1])
        bands.insert(bands.index(first) + 1, RESERVED)
    return bands


def _curve(memory: MemoryTimeline, kind: str, names: _Names) -> dict[str, Any]:
    curve: MemoryCurve = getattr(memory, kind)
    titles = _titles(memory)
    bands = bands_of(curve)
    amounts = filled(curve, memory.loops)
    moments, blocks = curve.moments, curve.blocks
    return {
        "peak": curve.peak_bytes,
        "peakSeconds": _short(curve.peak_seconds),
        "bands": bands,
        "seconds": [_short(m.seconds) for m in moments],
        "position": [m.position for m in moments],
        "values": [[amount[band] for amount in amounts] for band in bands],
        "loop": [names(titles[m.loop]) if m.loop in titles else -1 for m in moments],
        "trip": [m.trip + 1 for m in moments],
        "blocks": {
            "bytes": [b.bytes for b in blocks],
            "padding": [b.padding for b in blocks],
            "role": [MEMORY_ROLES.index(b.role) for b in blocks],
            "first": [b.first for b in blocks],
            "last": [b.last for b in blocks],
            "name": [names(b.name) for b in blocks],
            "short": [names(short_name(b)) for b in blocks],
            "shape": [names(b.shape) for b in blocks],
            "framework": [names(b.framework_name) for b in blocks],
            "source": [names(b.source) for b in blocks],
        },
    }


def _titles(memory: MemoryTimeline) -> dict[str, str]:
    """What each loop is called, by its body's name."""
    stacks = [
        block
        for curve in (memory.device, memory.host)
        for block in curve.blocks
        if block.role in ("kept activation", "offloaded")
    ]
    ways = {
        **dict.fromkeys((block.filled_in for block in stacks), "forward"),
        **dict.fromkeys((block.emptied_in for block in stacks), "backward"),
    }
    return {loop.body: _title(loop, ways.get(loop.body, "")) for loop in memory.loops}


def _title(loop: Loop, way: str) -> str:
    """`40 × model.py:7, forward`: the trips, and what the loop is or where it is.

    **Arguments:** `way` is what its stacks say of a loop that a plan wrote, whose name
    does not.
    """
    name = loop.framework_name
    ours = _PLANNED in name
    words = [w for w in name.split("/") if w not in ("while", "body", "")]
    what = words[-1] if words and "(" not in words[-1] else short_source(loop.source)
    if not ours:
        forward = "forward" if "jvp(" in name else ""
        way = "backward" if "transpose(" in name else forward
    parts = ("layers" if ours else what, way)
    return f"{loop.trips} × {', '.join(part for part in parts if part)}".rstrip()


def _loops(memory: MemoryTimeline, end: float) -> Iterable[list[Any]]:
    """Stretches of time in which a loop runs: start, end, title."""
    moments, titles = memory.device.moments, _titles(memory)
    start = 0
    for k in range(1, len(moments) + 1):
        if k < len(moments) and moments[k].loop == moments[start].loop:
            continue
        until = moments[k].seconds if k < len(moments) else end
        if title := titles.get(moments[start].loop):
            yield [moments[start].seconds, until, title]
        start = k


def _lane(intervals: Sequence[Interval], names: _Names) -> dict[str, Any]:
    record = {
        field.name: [getattr(interval, field.name) for interval in intervals]
        for field in dataclasses.fields(Interval)
        if field.name not in ("lane", "name")
    }
    return {**record, "name": [names(interval.name) for interval in intervals]}


def _short(seconds: float) -> float:
    """A billionth of what is drawn is no pixel."""
    return float(f"{seconds:.9g}")
