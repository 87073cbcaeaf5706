"""Memory over a step, for a terminal: a curve in characters, and what peaks."""

from collections.abc import Iterator, Mapping, Sequence

from .._records._memory import (
    MEMORY_ROLES,
    Loop,
    MemoryCurve,
    MemoryTimeline,
    Moment,
)
from .._units import format_bytes, format_seconds
from ._largest import largest
from ._layout import Align, cut, facts, lines_of, or_dash, table
from ._memory_bands import RESERVED, filled

_HEIGHT = 9
_MARGIN = 11  # what stands left of the curve
_MOST_BLOCKS = 10

# What is drawn in one character, from the bottom up. Shades differ without colours.
_BANDS: tuple[tuple[str, str, tuple[str, ...]], ...] = (
    ("█", "state and batch", MEMORY_ROLES[: MEMORY_ROLES.index("output") + 1]),
    ("▓", "kept activations", ("kept activation",)),
    ("▞", "offloads in flight", ("offloaded", "offload in flight")),
    ("▒", "gradients, recomputed values", ("gradient", "recomputed")),
    ("░", "workspace", ("workspace",)),
)
_EMPTY = "·"


def memory_text(memory: MemoryTimeline, width: int) -> list[str]:
    """The device's curve over the step, its peak by role, and the largest places."""
    curve = memory.device
    if not curve.moments or not curve.peak_bytes:
        return []
    return [
        f"Device memory over the step, peak {format_bytes(curve.peak_bytes)} at "
        f"{format_seconds(curve.peak_seconds)}",
        *_drawn(curve, memory.loops, width),
        "",
        *facts(_roles(curve), width),
        "",
        *_largest(curve, width),
    ]


def _drawn(curve: MemoryCurve, loops: Sequence[Loop], width: int) -> Iterator[str]:
    columns = max(20, width - _MARGIN - 1)
    held = dict(zip(map(id, curve.moments), filled(curve, loops), strict=True))
    chosen = list(_columns(curve.moments, columns))
    top = curve.peak_bytes
    for row in range(_HEIGHT, 0, -1):
        label = format_bytes(top) if row == _HEIGHT else ""
        cells = "".join(_cell(held[id(moment)], row, top) for moment in chosen)
        yield f"{label:>{_MARGIN - 2}} ┤{cells}".rstrip()
    end = format_seconds(curve.moments[-1].seconds)
    yield f"{'0':>{_MARGIN - 2}} └{'─' * (columns - len(end) - 1)} {end}"
    named = {loop.body: loop for loop in loops}
    if marks := _marks(chosen, named):
        yield f"{'':{_MARGIN}}{marks}".rstrip()
    amounts = [held[id(moment)] for moment in chosen]
    used = [band for band in _BANDS if any(_band(a, band) for a in amounts)]
    legend = [f"{sign} {title}" for sign, title, _ in used]
    if any(m.empty for m in chosen):
        legend.append(f"{_EMPTY} reserved, nothing in it")
    for line in lines_of("   ".join(legend), width - _MARGIN):
        yield f"{'':{_MARGIN}}{line}"


def _columns(moments: Sequence[Moment], columns: int) -> Iterator[Moment]:
    """The highest moment of each column's part of the step."""
    end = moments[-1].seconds or 1.0
    k = 0
    last = moments[0]
    for column in range(columns):
        until = end * (column + 1) / columns
        best = None
        while k < len(moments) and (
            moments[k].seconds <= until or column == columns - 1
        ):
            if best is None or moments[k].total > best.total:
                best = moments[k]
            last = moments[k]
            k += 1
        yield best or last


def _band(held: Mapping[str, int], band: tuple[str, str, tuple[str, ...]]) -> int:
    return sum(held[role] for role in band[2])


def _cell(held: Mapping[str, int], row: int, top: int) -> str:
    """What a column shows at a height; half of a cell at least has to be full."""
    height = top * (row - 0.5) / _HEIGHT
    reached = 0
    for band in _BANDS:
        reached += _band(held, band)
        if height <= reached:
            return band[0]
    return _EMPTY if height <= reached + held[RESERVED] else " "


def _marks(moments: Sequence[Moment], loops: dict[str, Loop]) -> str:
    """Where loops run, below the axis: `├ 40 × ┤`."""
    line, start = "", 0
    while start < len(moments):
        end = start
        while end < len(moments) and moments[end].loop == moments[start].loop:
            end += 1
        loop, room = loops.get(moments[start].loop), end - start
        text = f" {loop.trips} × " if loop else ""
        if loop and room >= len(text) + 2:
            line += f"├{text.center(room - 2, '─')}┤"
        else:
            line += ("─" if loop else " ") * room
        start = end
    return line.rstrip()


def _roles(curve: MemoryCurve) -> Iterator[tuple[str, str]]:
    found = sorted(curve.by_role().items(), key=lambda item: -item[1])
    parts = [
        f"{role} {format_bytes(much)}"
        for role, much in found
        if much >= curve.peak_bytes / 1000
    ]
    yield "at the peak", ", ".join(parts)


def _largest(curve: MemoryCurve, width: int) -> list[str]:
    """The largest places, with their bytes together."""
    shown = largest(curve)[:_MOST_BLOCKS]
    padded = any(row.padding for row in shown)
    room = max(16, width - (46 if padded else 37))
    rows = [
        (
            format_bytes(row.bytes),
            or_dash(format_bytes, row.padding),
            row.first.role,
            cut(row.text(), room),
        )
        for row in shown
    ]
    headers = ("largest", "padding", "role", "what")
    sides: Sequence[Align] = ("right", "right", "left", "left")
    without = () if padded else ("padding",)
    return lines_of(table(headers, rows, sides, without=without), width)
