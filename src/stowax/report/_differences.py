"""Two inspections beside each other, as rows of figures: what text and page show.

Places in memory are matched by what they are for, their shape and source line: names of
instructions change with every compilation.
"""

import collections
import dataclasses
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Literal

from .._records._inspection import Inspection
from .._records._memory import MEMORY_ROLES, Block
from .._records._program import Transfer
from .._units import format_bytes, format_seconds
from ._layout import or_dash, short_source
from ._times import busy_in, parts_of

_MOST_PLACES = 10  # largest of each at its peak

Measure = Literal["bytes", "seconds", "number"]
_FORMS: Mapping[Measure, Callable[[float], str]] = {
    "bytes": format_bytes,
    "seconds": format_seconds,
    "number": "{:g}".format,
}


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Difference:
    """One figure of both inspections."""

    title: str
    measure: Measure
    first: float
    second: float

    def text(self, value: float) -> str:
        """A value of this figure, as it is written."""
        return or_dash(_FORMS[self.measure], value)

    @property
    def change(self) -> str:
        """What the second has more (+) or less (−) than the first."""
        more = self.second - self.first
        if not more:
            return "same"
        sign = "+" if more > 0 else "−"
        both = self.first and self.second
        share = f" ({sign}{abs(more) / self.first:.1%})" if both else ""
        return f"{sign}{self.text(abs(more))}{share}"


def differences(
    first: Inspection, second: Inspection
) -> list[tuple[str, list[Difference]]]:
    """The figures of both in groups, each with its title; empty ones are left out."""
    groups: list[tuple[str, Iterable[Difference]]] = [
        ("memory per device", _memory(first, second)),
        ("device memory at the peak", _roles(first, second)),
        ("time", _times(first, second)),
        ("copies between device and host", _copies(first, second)),
        ("hazards", _hazards(first, second)),
        ("largest places at the peak", _places(first, second)),
    ]
    shown = [
        (title, [row for row in rows if row.first or row.second])
        for title, rows in groups
    ]
    return [(title, rows) for title, rows in shown if rows]


def _pair(title: str, measure: Measure, one: float, other: float) -> Difference:
    return Difference(title=title, measure=measure, first=one, second=other)


def _memory(first: Inspection, second: Inspection) -> Iterator[Difference]:
    for kind in ("device", "host"):
        one, other = (getattr(each.memory, kind).total for each in (first, second))
        yield _pair(f"{kind}, XLA's total", "bytes", one, other)
    for kind in ("device", "host"):
        one, other = (
            getattr(each.memory_timeline, kind).peak_bytes
            if each.memory_timeline
            else 0
            for each in (first, second)
        )
        yield _pair(f"{kind}, peak", "bytes", one, other)


def _roles(first: Inspection, second: Inspection) -> Iterator[Difference]:
    one, other = (
        each.memory_timeline.device.by_role() if each.memory_timeline else {}
        for each in (first, second)
    )
    for role in MEMORY_ROLES:
        yield _pair(role, "bytes", one.get(role, 0), other.get(role, 0))


def _times(first: Inspection, second: Inspection) -> Iterator[Difference]:
    both = (first.timeline, second.timeline)
    one, other = (
        [
            ("step", each.step_seconds),
            *parts_of(each),
            *((f"{title}, busy", seconds) for title, seconds in busy_in(each)),
        ]
        for each in both
    )
    for (title, before), (_, after) in zip(one, other, strict=True):
        yield _pair(title, "seconds", before, after)


def _copies(first: Inspection, second: Inspection) -> Iterator[Difference]:
    both = (first.transfers, second.transfers)
    for direction in dict.fromkeys(t.direction for each in both for t in each):
        one, other = ([t for t in each if t.direction == direction] for each in both)
        way = direction.replace("-", " ")
        sums: tuple[tuple[str, Measure, Callable[[Transfer], float]], ...] = (
            ("a step", "bytes", lambda t: t.total_bytes),
            ("number", "number", lambda t: t.trips),
            ("waited for", "seconds", lambda t: t.exposed_seconds),
        )
        for title, measure, value in sums:
            yield _pair(
                f"{way}, {title}", measure, sum(map(value, one)), sum(map(value, other))
            )


def _hazards(first: Inspection, second: Inspection) -> Iterator[Difference]:
    one, other = (
        collections.Counter(hazard.kind for hazard in each.hazards)
        for each in (first, second)
    )
    for kind in dict.fromkeys((*one, *other)):
        yield _pair(kind, "number", one[kind], other[kind])


def _places(first: Inspection, second: Inspection) -> Iterator[Difference]:
    one, other = (_largest(each) for each in (first, second))
    chosen = dict.fromkeys(
        key for each in (one, other) for key, _ in each.most_common(_MOST_PLACES)
    )
    for key in sorted(chosen, key=lambda key: -max(one[key], other[key])):
        yield _pair(key, "bytes", one[key], other[key])


def _largest(inspection: Inspection) -> collections.Counter[str]:
    found: collections.Counter[str] = collections.Counter()
    if inspection.memory_timeline:
        curve = inspection.memory_timeline.device
        for block in curve.at(curve.peak_position):
            found[_kind_of(block)] += block.bytes
    return found


def _kind_of(block: Block) -> str:
    parts = (short_source(block.source) or block.name, block.role, block.shape)
    return "  ".join(part for part in parts if part)
