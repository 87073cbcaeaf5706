"""Step time over device memory: policies, trials and the plan, as one drawing."""

from collections.abc import Sequence
from typing import Any

from .._records._plan import PlanRecord
from .._units import format_bytes
from ._page_data import size_unit, time_unit
from ._page_figures import LEFT, WAITS, bokeh, figure, legend_below


def budget_figure(plan: PlanRecord) -> Any:
    """Known points of step time over memory, as JSON: policies, trials, this plan."""
    library = bokeh()
    models = library.models
    (unit, unit_name), (rate, rate_name) = _budget_units(plan)
    drawn = figure("budget-figure", 400, [models.BoxZoomTool()], min_border_left=LEFT)
    drawn.xaxis.axis_label = f"device memory in {unit_name}"
    drawn.yaxis.axis_label = f"step time in {rate_name}"
    for title, marker, colour, points in budget_points(plan):
        if not points:
            continue
        source = models.ColumnDataSource(
            {
                "x": [point[1] / unit for point in points],
                "y": [point[2] / rate for point in points],
                "name": [point[0] for point in points],
            }
        )
        drawn.scatter(
            "x",
            "y",
            source=source,
            marker=marker,
            size=16 if marker == "star" else 12,
            fill_color=colour,
            line_color="#000000",
            legend_label=title,
        )
        mine = title in (_PREDICTED, _COMPILED)
        drawn.text(
            x="x",
            y="y",
            text="name",
            source=source,
            x_offset=-9 if mine else 9,
            y_offset=4,
            text_align="right" if mine else "left",
            text_font_size="12px",
            text_font_style="bold" if mine else "normal",
        )
    text = f"budget {format_bytes(plan.budget_bytes)}"
    where = plan.budget_bytes / unit
    drawn.add_layout(
        models.Span(
            location=where,
            dimension="height",
            line_color=WAITS,
            line_dash="dashed",
            line_width=2,
            name="budget",
        )
    )
    place = {"x": where, "x_offset": 4, "y": 4, "y_units": "screen"}
    drawn.add_layout(models.Label(text=text, text_font_size="13px", **place))
    x_low, x_high, y_low, y_high = budget_ranges(plan)["near"]
    drawn.x_range = models.Range1d(x_low, x_high, name="budget-x")
    drawn.y_range = models.Range1d(y_low, y_high, name="budget-y")
    legend_below(drawn)
    return library.embed.json_item(drawn)


def _budget_units(plan: PlanRecord) -> tuple[tuple[int, str], tuple[float, str]]:
    return size_unit(plan.budget_bytes), time_unit(
        max(plan.step_seconds, plan.search.model_seconds, 1e-6)
    )


def budget_ranges(plan: PlanRecord) -> dict[str, list[float]]:
    """The ends of both axes, for all points and for those near the budget.

    A policy that keeps everything needs many times the budget: beside it all others
    would lie on one another.
    """
    (unit, _), (rate, _) = _budget_units(plan)
    points = [point for _, _, _, some in budget_points(plan) for point in some]
    seconds = max(plan.search.model_seconds, plan.step_seconds)
    near = [
        point
        for point in points
        if point[1] <= 1.5 * plan.budget_bytes and point[2] <= 1.5 * seconds
    ]
    ranges = {}
    for name, chosen in (("near", near or points), ("all", points)):
        sizes = [point[1] / unit for point in chosen] + [plan.budget_bytes / unit]
        times = [point[2] / rate for point in chosen] or [0.0, 1.0]
        ranges[name] = [*_with_room(sizes, 0.25), *_with_room(times, 0.15)]
    return ranges


def _with_room(values: Sequence[float], share: float) -> list[float]:
    low, high = min(values), max(values)
    room = share * (high - low) or 0.05 * high
    return [max(0.0, low - room), high + room]


Point = tuple[str, int, float]
_PREDICTED, _COMPILED = "this plan, predicted", "this plan, compiled"


def budget_points(
    plan: PlanRecord,
) -> list[tuple[str, str, str, list[Point]]]:
    """What is known of time over memory: title, marker, colour, points."""
    policies: list[Point] = [
        (b.name, b.device_bytes, b.seconds) for b in plan.baselines if b.seconds
    ]
    trials: list[Point] = [
        (t.what, t.compiled_bytes, t.step_seconds)
        for t in plan.search.trials
        if t.step_seconds and t.compiled_bytes != plan.device_bytes
    ]
    predicted: list[Point] = []
    if plan.search.model_seconds:
        predicted.append(
            ("predicted", plan.predicted_device_bytes, plan.search.model_seconds)
        )
    compiled: list[Point] = []
    if plan.step_seconds:
        compiled.append(("this plan", plan.device_bytes, plan.step_seconds))
    return [
        ("hand-written policies, predicted", "circle", "#56B4E9", policies),
        (_PREDICTED, "triangle", "#009E73", predicted),
        ("other trials, compiled", "square", "#E69F00", trials),
        (_COMPILED, "star", "#D55E00", compiled),
    ]
