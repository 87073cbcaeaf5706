"""What is in the way of a step that does not fit, for a terminal.

The arrays at the predicted peak, what recomputing or offloading would leave of it, and
the smallest budget that a plan reaches.
"""

from collections.abc import Iterable, Sequence

from .._records._peak import MemoryPeak, PeakArray
from .._units import format_bytes, format_room
from ._layout import Align, cut, facts, lines_of, or_dash, short_source, table

_MOST_ARRAYS = 12
_LEAST = 1 / 1000  # of the peak: less is not worth a word
_LARGE = 0.2  # of the peak, from which logits are worth advice
LOGITS = (
    "of logits are made outside of repeated layers, where a plan moves nothing. "
    "Compute the loss in chunks of tokens (jax.lax.map with jax.checkpoint), or take a "
    "smaller batch"
)
_PHASES = {
    "forward": "in the forward pass",
    "backward": "in the backward pass",
    "again": "in the backward pass, where values are recomputed",
    "": "outside of what is differentiated",
}


def peak_text(peak: MemoryPeak, width: int, capacity: int = 0) -> list[str]:
    """The peak as lines of at most `width` columns; `capacity` is a device's."""
    return [
        *lines_of(peak_title(peak), width),
        "",
        *arrays_text(peak, width),
        "",
        *_ways(peak, width),
        *facts(_facts(peak, capacity), width),
    ]


def peak_title(peak: MemoryPeak) -> str:
    """How much is predicted at the peak, and where in the step that is."""
    line = short_source(peak.source)
    return (
        f"In the way: {format_bytes(peak.bytes)} predicted at the peak, "
        f"{_PHASES.get(peak.phase, peak.phase)}{f', at {line}' if line else ''}"
    )


def array_text(array: PeakArray) -> str:
    """What an array is: how many there are, shape, line and name."""
    named = array.name
    name = named.rpartition("/")[2] if ")/" in named else named
    times = f"{array.count} × " if array.count > 1 else ""
    shape = f"{times}{array.shape}" if array.shape else ""
    parts = (shape, short_source(array.source), name)
    return "  ".join(part for part in parts if part)


def in_order(peak: MemoryPeak) -> list[PeakArray]:
    """The arrays, largest first, and behind them what is no array."""
    return sorted(peak.arrays, key=lambda array: array.role == "fragmentation")


def advice(peak: MemoryPeak) -> str:
    """What helps where most of the peak is logits; empty where it is not."""
    logits = peak.by_role().get("logits", 0)
    if not peak.bytes or logits < _LARGE * peak.bytes:
        return ""
    return f"{format_bytes(logits)} {LOGITS}"


def smallest_text(peak: MemoryPeak, capacity: int = 0) -> str:
    """The smallest budget that a plan reaches; empty where nobody knows.

    **Arguments:** `capacity` is what a device has, if that is known.
    """
    if not peak.smallest_budget:
        return ""
    size = known_size(peak.smallest_budget, peak.smallest_budget_is)
    more = ", and more than a device has" if 0 < capacity < peak.smallest_budget else ""
    return f"{size}: the smallest budget that a plan reaches{more}"


def known_size(size: int, source: str) -> str:
    """A budget to be given, and that it is about so much where it is predicted.

    >>> known_size(43 * 2**30, "predicted"), known_size(43 * 2**30, "compiled")
    ('about 43.0 GiB, predicted', '43.0 GiB')
    """
    text = format_room(size)
    return f"about {text}, predicted" if source == "predicted" else text


def arrays_text(peak: MemoryPeak, width: int, most: int = _MOST_ARRAYS) -> list[str]:
    """The `most` largest arrays as a table, and how much the others are."""
    large = [a for a in in_order(peak) if a.bytes >= _LEAST * peak.bytes]
    last = [array for array in large if array.role == "fragmentation"]
    shown = [*large[: most - len(last)], *last]
    shown = list(dict.fromkeys(shown))
    padded = any(a.padding >= _LEAST * peak.bytes for a in shown)
    room = width - max((len(array.role) for array in shown), default=0)
    room -= 24 if padded else 13
    rows = [
        (
            format_bytes(array.bytes),
            or_dash(format_bytes, array.padding),
            array.role,
            cut(array_text(array), max(16, room)),
        )
        for array in shown
    ]
    headers = ("bytes", "padding", "role", "what")
    without = () if padded else ("padding",)
    sides: Sequence[Align] = ("right", "right", "left", "left")
    lines = lines_of(table(headers, rows, sides, without=without), width)
    if rest := [array for array in peak.arrays if array not in shown]:
        size = format_bytes(sum(array.bytes for array in rest))
        lines.append(f"and {sum(array.count for array in rest)} smaller, {size}")
    return lines


def _ways(peak: MemoryPeak, width: int) -> list[str]:
    rows = [
        (
            cut(way.what, width - 24),
            format_bytes(way.needs_bytes),
            format_bytes(way.frees_bytes),
        )
        for way in peak.treatments
    ]
    if not rows:
        return []
    headers = ("predicted, if you", "leaves", "frees")
    return [*lines_of(table(headers, rows), width), ""]


def _facts(peak: MemoryPeak, capacity: int) -> Iterable[tuple[str, str]]:
    roles = peak.by_role().items()
    parts = [
        f"{role} {format_bytes(much)}"
        for role, much in roles
        if much >= _LEAST * peak.bytes
    ]
    yield "by role", ", ".join(parts)
    if text := advice(peak):
        yield "logits", text
    if text := smallest_text(peak, capacity):
        yield "a plan", text
    if peak.unknown:
        yield "a plan", f"none can be made: {peak.unknown}"
