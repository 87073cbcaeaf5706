"""What was simulated beside what was measured, lane by lane, for a terminal.

The ratio says how far the simulation may be trusted; the rows below say where it went
wrong. Both timelines name instructions alike.
"""

from collections.abc import Iterable

from .._records._timeline import Timeline
from .._units import format_seconds
from ._layout import cut, facts, lines_of, or_dash, table, text_width
from ._times import busy_in, parts_of

_MOST_ROWS = 5


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
    lanes = [_row("step", first.step_seconds, second.step_seconds)]
    for form, times in (("  {}", parts_of), ("{}, busy", busy_in)):
        for (title, one), (_, other) in zip(times(first), times(second), strict=True):
            if one or other:
                lanes.append(_row(form.format(title), one, other))
    parts = [lines_of(table(("", *names, "ratio"), lanes), columns)]
    if rows := list(_differences(first, second, columns - 34)):
        head = ("differ most", *names, "ratio")
        parts.append(lines_of(table(head, rows), columns))
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
    one, other = (or_dash(format_seconds, seconds) for seconds in (first, second))
    return title, one, other, ratio


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
