"""What was simulated beside what was measured, lane by lane, for a terminal.

The ratio says how far the simulation may be trusted; the rows below say where it went
wrong. Both timelines name instructions alike.
"""

from collections.abc import Iterable, Sequence

from .._records._timeline import Timeline
from .._units import format_seconds
from ._layout import Align, cut, facts, lines_of, table, text_width

_MOST_ROWS = 5
_LANES: Sequence[tuple[str, str]] = (
    ("step", "step_seconds"),
    ("  computing", "compute_seconds"),
    ("  waiting for the host", "exposed_seconds"),
    ("  waiting for other devices", "collective_wait_seconds"),
    ("  idle", "idle_seconds"),
    ("device to host, busy", "device_to_host_seconds"),
    ("host to device, busy", "host_to_device_seconds"),
    ("collectives, busy", "collective_seconds"),
)
_SIDES: tuple[Align, ...] = ("left", "right", "right", "right")


def comparison_text(first: Timeline, second: Timeline, width: int | None = None) -> str:
    """Two timelines of one step side by side, as text of at most `width` columns.

    **Arguments:** `first` is usually simulated (`Inspection.timeline`) and `second`
    measured (`stowax.measure`); the ratio is of the second to the first. `width` in
    columns, by default the terminal's; kept between 60 and 160.

    >>> step = jax.jit(lambda x: x @ x)
    >>> x = jnp.ones((256, 256))
    >>> found = stowax.inspect(step, x).timeline
    >>> print(comparison_text(found, stowax.measure(step, x), width=80).split()[:2])
    ['simulated', 'measured']
    """
    columns = text_width(width)
    names = _names(first, second)
    lanes = [
        _row(title, getattr(first, field), getattr(second, field))
        for title, field in _LANES
        if title == "step" or getattr(first, field) or getattr(second, field)
    ]
    parts = [lines_of(table(("", *names, "ratio"), lanes, _SIDES), columns)]
    if rows := list(_differences(first, second, columns - 34)):
        head = ("differ most", *names, "ratio")
        parts.append(lines_of(table(head, rows, _SIDES), columns))
    notes = [
        (name, note)
        for name, timeline in zip(names, (first, second), strict=True)
        for note in timeline.assumptions
    ]
    parts.append(facts(notes, columns))
    return "\n\n".join("\n".join(part) for part in parts if part)


def _names(first: Timeline, second: Timeline) -> tuple[str, str]:
    if first.origin != second.origin:
        return first.origin, second.origin
    return f"first {first.origin}", f"second {second.origin}"


def _row(title: str, first: float, second: float) -> tuple[str, str, str, str]:
    ratio = f"{second / first:.2f}" if first and second else "–"
    return title, _seconds(first), _seconds(second), ratio


def _seconds(seconds: float) -> str:
    return format_seconds(seconds) if seconds else "–"


def _differences(
    first: Timeline, second: Timeline, width: int
) -> Iterable[tuple[str, str, str, str]]:
    """The instructions of the compute lane that differ most, all their times added."""
    sums = [_by_name(first), _by_name(second)]
    both = {
        name: (sums[0].get(name, 0.0), sums[1].get(name, 0.0))
        for name in {*sums[0], *sums[1]}
    }
    ordered = sorted(
        both.items(), key=lambda item: (-abs(item[1][1] - item[1][0]), item[0])
    )
    for name, (one, other) in ordered[:_MOST_ROWS]:
        if one != other:
            yield _row(cut(name, width), one, other)


def _by_name(timeline: Timeline) -> dict[str, float]:
    sums: dict[str, float] = {}
    for interval in timeline.intervals:
        if interval.lane == "compute":
            name = f"{interval.name}, waiting" if interval.waits else interval.name
            sums[name] = sums.get(name, 0.0) + interval.seconds
    return sums
