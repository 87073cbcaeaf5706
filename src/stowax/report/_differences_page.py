"""Two inspections on one page: memory over the step drawn together, tables of figures.

`stowax inspect --compare a.json b.json --html page.html` writes it. The tables have all
that the drawings have, for those who cannot see them.
"""

from collections.abc import Sequence
from typing import Any

from .._records._inspection import Inspection
from .._records._memory import MemoryCurve
from ._differences import Difference, differences
from ._page_data import size_unit, step_end, time_unit
from ._page_figures import bokeh, figure, legend_below, library_script, zooms_in_time
from ._page_html import (
    Columns,
    asset,
    document,
    escaped,
    facts_html,
    json_in_script,
    section,
    sortable,
)

_MOST_POINTS = 2000
_LOOKS = (("#0072B2", "solid", " "), ("#D55E00", "dashed", "/"))


def differences_page(
    first: Inspection, second: Inspection, names: tuple[str, str] = ("first", "second")
) -> str:
    """The whole page.

    **Arguments:** `names` are what to call the two.

    **Raises:** `MissingExtraError` without the extra `[report]`.
    """
    both = (first, second)
    drawings: dict[str, Any] = {}
    if all(each.memory_timeline for each in both):
        drawings["over-time"] = _curves(both, names)
    groups = differences(*both)
    roles = next((rows for title, rows in groups if "at the peak" in title), [])
    if roles:
        drawings["by-role"] = _bars(roles, names)
    who = [
        (name, f"{each.program} on {each.target}")
        for name, each in zip(names, both, strict=True)
    ]
    body = [
        f"<h1>{escaped(names[0])} and {escaped(names[1])}</h1>",
        '<p class="soft">Two compiled steps side by side; the difference is what the '
        "second has more.</p>",
        facts_html(who),
    ]
    if drawings:
        places = "".join(f'<div id="{name}"></div>' for name in drawings)
        body.append(section("Device memory", places))
    body += [
        section(title.capitalize(), _table(title, rows, names, k))
        for k, (title, rows) in enumerate(groups)
    ]
    call = json_in_script({"drawings": drawings})
    scripts = [library_script(), asset("page.js"), f"start({call});"]
    return document(f"{names[0]} and {names[1]}", "\n".join(body), scripts)


def _table(
    title: str, rows: Sequence[Difference], names: tuple[str, str], number: int
) -> str:
    columns: Columns = (
        ("figure", "long", lambda r: (r.title, r.title)),
        (names[0], "number", lambda r: (r.first, r.text(r.first))),
        (names[1], "number", lambda r: (r.second, r.text(r.second))),
        ("difference", "number", lambda r: (r.second - r.first, r.change)),
    )
    return sortable(
        title.capitalize(), columns, rows, name=f"group-{number}", seen=False
    )


def _curves(both: Sequence[Inspection], names: tuple[str, str]) -> Any:
    """Device memory of both over the same axis of time."""
    library = bokeh()
    curves = [e.memory_timeline.device for e in both if e.memory_timeline]
    unit, unit_name = size_unit(max(curve.peak_bytes for curve in curves))
    end = max(map(step_end, both))
    rate, rate_name = time_unit(end)
    axis = library.models.Range1d(0, end / rate, bounds=(0, end / rate))
    drawn = figure("over-time-figure", 340, zooms_in_time(), x_range=axis)
    for each, name, curve, (colour, dash, _) in zip(
        both, names, curves, _LOOKS, strict=True
    ):
        seconds, totals = _highest(curve, step_end(each))
        drawn.step(
            [at / rate for at in seconds],
            [total / unit for total in totals],
            mode="after",
            line_color=colour,
            line_dash=dash,
            line_width=2,
            legend_label=name,
        )
    hover = library.models.HoverTool(
        tooltips=[("time", f"@x {rate_name}"), ("memory", f"@y{{0.00}} {unit_name}")],
        line_policy="prev",
    )
    drawn.add_tools(hover)
    drawn.y_range.start = 0
    drawn.xaxis.axis_label = f"time in {rate_name}"
    drawn.yaxis.axis_label = f"device memory in {unit_name}"
    legend_below(drawn)
    return library.embed.json_item(drawn)


def _highest(curve: MemoryCurve, end: float) -> tuple[list[float], list[int]]:
    """The curve in so many steps as a screen is wide, the highest of each stretch."""
    seconds: list[float] = []
    totals: list[int] = []
    stretch = -1
    for moment in curve.moments:
        here = int(moment.seconds / end * _MOST_POINTS)
        if here != stretch:
            seconds.append(moment.seconds)
            totals.append(moment.total)
            stretch = here
        else:
            totals[-1] = max(totals[-1], moment.total)
    return [*seconds, end], [*totals, totals[-1] if totals else 0]


def _bars(roles: Sequence[Difference], names: tuple[str, str]) -> Any:
    """Memory at the peak by role, two bars for each."""
    library = bokeh()
    unit, unit_name = size_unit(max(max(row.first, row.second) for row in roles))
    titles = [row.title for row in roles][::-1]
    drawn = figure("by-role-figure", 90 + 46 * len(titles), y_range=titles)
    sides = [[row.first for row in roles], [row.second for row in roles]]
    for name, values, shift, (colour, _, pattern) in zip(
        names, sides, (0.19, -0.19), _LOOKS, strict=True
    ):
        drawn.hbar(
            y=[(title, shift) for title in titles],
            right=[value / unit for value in values[::-1]],
            height=0.34,
            fill_color=colour,
            line_color=None,
            hatch_pattern=pattern,
            hatch_color="#000000",
            hatch_alpha=0.5,
            legend_label=name,
        )
    drawn.x_range.start = 0
    drawn.ygrid.grid_line_color = None
    drawn.xaxis.axis_label = f"device memory at the peak in {unit_name}"
    legend_below(drawn)
    return library.embed.json_item(drawn)
