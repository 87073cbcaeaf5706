"""Batch size and throughput as a page with a picture: what `stowax.fit` found."""

from collections.abc import Callable
from typing import Any

from .._records._fit import BatchTrial, FitRecord
from .._units import format_bytes, format_seconds
from ._fit_text import FRONT, largest_of, title_of
from ._page_data import time_unit
from ._page_figures import COMPUTE, WAITS, bokeh, figure, legend_below, library_script
from ._page_html import (
    Columns,
    asset,
    document,
    escaped,
    json_in_script,
    section,
    sortable,
)
from ._page_tables import bytes_cell, number_cell, seconds_cell, text_cell

_LOOKS = {"as written": ("circle", WAITS), "plan": ("square", COMPUTE)}
_LEFT = 90


def fit_page(record: FitRecord) -> str:
    """The whole page: step time and throughput over the batch, all sizes as a table.

    **Raises:** `MissingExtraError` without the extra `[report]`.
    """
    drawings = {"front": step_figure(record), "rate": rate_figure(record)}
    drawings = {place: drawn for place, drawn in drawings.items() if drawn}
    call = json_in_script(
        {
            "step": None,
            "drawings": drawings,
            "ranges": None,
            "packed": None,
            "units": {},
        }
    )
    title = title_of(record)
    said = "".join(f"<p>{escaped(line)}</p>" for line in largest_of(record))
    soft = (
        '<p class="soft">Compiled programs that fit, seconds simulated from their '
        "schedules. The line joins the front: no batch is as large and takes as little "
        "time a step.</p>"
    )
    places = "".join(f'<div id="{place}"></div>' for place in drawings)
    body = [
        f"<h1>{escaped(title)}</h1>",
        said,
        section("Batch and time", f"{soft}{places}" if places else ""),
        section("Sizes that were looked at", _table(record)),
    ]
    scripts = [library_script(), asset("step.js"), asset("page.js"), f"start({call});"]
    return document(title, "\n".join(part for part in body if part), scripts)


def step_figure(record: FitRecord) -> Any:
    """Step time over the batch, as JSON; `None` where nothing that fits is known."""
    if not (front := record.front):
        return None
    unit, unit_name = time_unit(max(trial.step_seconds for trial in front))
    drawn = figure("front-figure", 340, [], min_border_left=_LEFT)
    drawn.yaxis.axis_label = f"step time in {unit_name}"
    drawn.line(
        [trial.batch for trial in front],
        [trial.step_seconds / unit for trial in front],
        line_color="#000000",
        line_dash="dashed",
        legend_label="front",
    )
    return _with_points(drawn, record, lambda trial: trial.step_seconds / unit)


def rate_figure(record: FitRecord) -> Any:
    """Items a second over the batch, as JSON; `None` as for `step_figure`."""
    if not record.front:
        return None
    drawn = figure("rate-figure", 340, [], min_border_left=_LEFT)
    drawn.yaxis.axis_label = "items a second"
    return _with_points(drawn, record, lambda trial: trial.per_second)


def _with_points(
    drawn: Any, record: FitRecord, height: Callable[[BatchTrial], float]
) -> Any:
    """A point for each compiled program that fits, told apart by its way."""
    library = bokeh()
    known = [t for t in record.trials if t.compiled and t.fits and t.step_seconds]
    for way, (marker, colour) in _LOOKS.items():
        mine = [trial for trial in known if trial.way == way]
        if not mine:
            continue
        source = library.models.ColumnDataSource(
            {
                "x": [trial.batch for trial in mine],
                "y": [height(trial) for trial in mine],
                "rate": [trial.per_second for trial in mine],
                "bytes": [format_bytes(trial.device_bytes) for trial in mine],
                "step": [format_seconds(trial.step_seconds) for trial in mine],
            }
        )
        drawn.scatter(
            "x",
            "y",
            source=source,
            marker=marker,
            size=12,
            fill_color=colour,
            line_color="#000000",
            legend_label=way,
            name=way,
        )
    tips = [
        ("batch", "@x"),
        ("items a second", "@rate{0,0.0}"),
        ("step", "@step"),
        ("device memory", "@bytes"),
    ]
    drawn.add_tools(library.models.HoverTool(tooltips=tips))
    drawn.xaxis.axis_label = "batch"
    drawn.x_range.start = drawn.y_range.start = 0
    legend_below(drawn)
    return library.embed.json_item(drawn)


def _table(record: FitRecord) -> str:
    front = record.front

    def verdict(trial: BatchTrial) -> str:
        word = "yes" if trial.fits else "no"
        return word if trial.compiled else f"{word}, predicted"

    columns: Columns = (
        ("front", "text", lambda t: text_cell(FRONT if t in front else "")),
        ("batch", "number", lambda t: number_cell(t.batch)),
        ("way", "text", lambda t: text_cell(t.way)),
        ("predicted", "number", lambda t: bytes_cell(t.predicted_bytes)),
        ("compiled", "number", lambda t: bytes_cell(t.device_bytes)),
        ("host", "number", lambda t: bytes_cell(t.host_bytes)),
        ("step time", "number", lambda t: seconds_cell(t.step_seconds)),
        ("predicted time", "number", lambda t: seconds_cell(t.predicted_seconds)),
        ("items a second", "number", lambda t: number_cell(round(t.per_second, 1))),
        ("fits", "text", lambda t: text_cell(verdict(t))),
    )
    return sortable("Batch sizes", columns, record.trials, name="batches", seen=False)
