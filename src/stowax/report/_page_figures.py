"""The page's drawings as Bokeh models: memory over the step, lanes, budget and time.

Bokeh is the extra `[report]`, loaded when a page is asked for. The models come without
most of their data: the page's script fills in what a zoom shows (`step.js`), found by
the models' names. No callback is in them: the page forbids code from text.
"""

from collections.abc import Sequence
from typing import Any

from .._errors import MissingExtraError
from .._records._inspection import Inspection
from .._records._plan import PlanRecord
from .._units import format_bytes
from ._page_data import (
    STYLES,
    bands_of,
    curves_of,
    lanes_of,
    size_unit,
    step_end,
    time_unit,
)

COMPUTE, WAITS = "#0072B2", "#D55E00"
_LANE_TITLES = {
    "compute": "computing, waiting",
    "device-to-host": "device to host",
    "host-to-device": "host to device",
    "collective": "collectives",
    "host": "on the host",
}
_HIGHEST = 2.0  # a budget so many times over the peak is said, not drawn
_LEFT = 90  # pixels beside all plots alike, so that they stand under each other


def bokeh() -> Any:
    """The library that draws.

    **Raises:** `MissingExtraError` where it is not installed.
    """
    try:
        import bokeh.embed
        import bokeh.layouts
        import bokeh.models
        import bokeh.plotting
        import bokeh.resources
    except ImportError:
        raise MissingExtraError(
            "html: a page needs Bokeh, which is not installed. "
            "Run: pip install 'stowax[report]'"
        ) from None
    return bokeh


def check_page_library() -> None:
    """Says before minutes of compiling that no page could be drawn after them.

    **Raises:** `MissingExtraError` without the extra `[report]`.
    """
    bokeh()


def library_script() -> str:
    """Bokeh's own JavaScript, as it comes with the package."""
    resources = bokeh().resources.Resources(mode="inline", components=["bokeh"])
    return "\n".join(resources.js_raw)


def step_figures(inspection: Inspection, plan: PlanRecord | None) -> Any:
    """Memory and lanes over one axis of time, as JSON; `None` with nothing to draw."""
    library = bokeh()
    kinds, lanes = curves_of(inspection), lanes_of(inspection)
    if not kinds and not lanes:
        return None
    end = step_end(inspection) / time_unit(step_end(inspection))[0]
    axis = library.models.Range1d(0, end, bounds=(0, end), name="step")
    figures = [_memory_figure(inspection, plan, kind, axis) for kind in kinds]
    if lanes:
        figures.append(_lanes_figure(inspection, lanes, axis))
    figures[
        -1
    ].xaxis.axis_label = (
        f"{inspection.timeline.origin} time in {time_unit(step_end(inspection))[1]}"
    )
    figures[-1].height += 40
    layout = library.layouts.column(*figures, sizing_mode="stretch_width", spacing=0)
    return library.embed.json_item(layout)


def figure(name: str, height: int, tools: Sequence[Any] = (), **options: Any) -> Any:
    """A figure as wide as the page and on its own ground: Bokeh's white would stay."""
    drawn = bokeh().plotting.figure(
        name=name,
        height=height,
        sizing_mode="stretch_width",
        toolbar_location=None,
        tools=[*tools],
        **options,
    )
    drawn.background_fill_color = drawn.border_fill_color = None
    return drawn


def zooms_in_time() -> list[Any]:
    """The tools of a figure whose x-axis is the time of the step."""
    models = bokeh().models
    wheel = models.WheelZoomTool(dimensions="width", modifiers="ctrl")
    return [models.BoxZoomTool(dimensions="width"), wheel]


def _figure_in_time(name: str, height: int, axis: Any) -> Any:
    drawn = figure(
        name,
        height,
        zooms_in_time(),
        x_range=axis,
        min_border_left=_LEFT,
        min_border_right=24,
        min_border_top=6,
        lod_threshold=None,
    )
    drawn.xgrid.grid_line_alpha = drawn.ygrid.grid_line_alpha = 0.6
    return drawn


def legend_below(drawn: Any) -> None:
    """The legend where it hides no point."""
    legend = drawn.legend[0]
    drawn.add_layout(legend, "below")
    legend.ncols = 2
    legend.location = "center"
    legend.margin, legend.padding, legend.spacing = 0, 4, 16
    legend.border_line_alpha = 0


def _memory_figure(
    inspection: Inspection, plan: PlanRecord | None, kind: str, axis: Any
) -> Any:
    models = bokeh().models
    memory = inspection.memory_timeline
    assert memory is not None
    curve = getattr(memory, kind)
    unit, unit_name = size_unit(curve.peak_bytes)
    peak = curve.peak_bytes / unit
    budget = budget_of(plan, kind)
    shown = budget is not None and budget <= _HIGHEST * curve.peak_bytes
    top = max(peak, budget / unit) if budget is not None and shown else peak
    drawn = _figure_in_time(f"memory-{kind}", 320 if kind == "device" else 170, axis)
    drawn.y_range = models.Range1d(0, top * 1.12)
    drawn.yaxis.axis_label = f"{kind} memory, {unit_name}"
    bands = bands_of(curve)
    columns = {"x": [], **{f"c{k}": [] for k in range(len(bands) + 1)}}
    source = models.ColumnDataSource(columns, name=f"memory-{kind}-source")
    for k, band in enumerate(bands):
        colour, pattern = STYLES[band]
        drawn.varea(
            x="x",
            y1=f"c{k}",
            y2=f"c{k + 1}",
            source=source,
            fill_color=colour,
            hatch_pattern=pattern,
            hatch_color="#000000",
            hatch_alpha=0.35,
            hatch_scale=8,
            hatch_weight=0.7,
        )
    at = curve.peak_seconds / time_unit(step_end(inspection))[0]
    drawn.scatter([at], [peak], marker="inverted_triangle", size=11, name="peak")
    right = at > axis.end / 2
    drawn.add_layout(
        models.Label(
            x=at,
            y=peak,
            x_offset=-10 if right else 10,
            y_offset=2,
            text=f"peak {format_bytes(curve.peak_bytes)}",
            text_align="right" if right else "left",
            text_font_size="13px",
            text_font_style="bold",
        )
    )
    if budget is not None and shown:
        _budget_line(drawn, budget / unit, f"budget {format_bytes(budget)}", "width")
    return drawn


def budget_of(plan: PlanRecord | None, kind: str) -> int | None:
    """The plan's budget for a memory, if there is a plan."""
    if plan is None:
        return None
    return plan.budget_bytes if kind == "device" else plan.proof.host_budget_bytes


def _budget_line(drawn: Any, where: float, text: str, dimension: str) -> None:
    models = bokeh().models
    drawn.add_layout(
        models.Span(
            location=where,
            dimension=dimension,
            line_color=WAITS,
            line_dash="dashed",
            line_width=2,
            name="budget",
        )
    )
    place = {"x": 8, "x_units": "screen", "y": where, "y_offset": 3}
    if dimension == "height":
        place = {"x": where, "x_offset": 4, "y": 4, "y_units": "screen"}
    drawn.add_layout(models.Label(text=text, text_font_size="13px", **place))


def _lanes_figure(inspection: Inspection, lanes: Sequence[str], axis: Any) -> Any:
    models = bokeh().models
    loops = bool(inspection.memory_timeline and inspection.memory_timeline.loops)
    titles = [*(["loops"] if loops else []), *(_LANE_TITLES[lane] for lane in lanes)]
    drawn = _figure_in_time("lanes", 20 + 36 * len(titles), axis)
    drawn.y_range = models.Range1d(-len(titles) + 0.5, 0.5)
    rows = [-k for k in range(len(titles))]
    drawn.yaxis.ticker = models.FixedTicker(ticks=rows)
    drawn.yaxis.major_label_overrides = dict(zip(rows, titles, strict=True))
    drawn.ygrid.grid_line_color = None
    looks: dict[str, dict[str, Any]] = {
        "busy": {"fill_color": COMPUTE},
        "waits": {"fill_color": WAITS, "hatch_pattern": "x", "hatch_alpha": 0.6},
        "loops": {"fill_color": "#999999", "fill_alpha": 0.3, "line_color": "#777777"},
    }
    for name, look in looks.items():
        columns = {"left": [], "right": [], "top": [], "bottom": [], "text": []}
        source = models.ColumnDataSource(columns, name=f"{name}-source")
        drawn.quad(
            left="left",
            right="right",
            top="top",
            bottom="bottom",
            source=source,
            **{"line_color": None, **look},
        )
        if name == "loops":
            drawn.text(
                x="left",
                y="bottom",
                text="text",
                x_offset=4,
                y_offset=-5,
                source=source,
                text_font_size="12px",
                name="loop-titles",
            )
    return drawn


def budget_figure(plan: PlanRecord) -> Any:
    """Known points of step time over memory, as JSON: policies, trials, this plan."""
    library = bokeh()
    models = library.models
    (unit, unit_name), (rate, rate_name) = _budget_units(plan)
    drawn = figure("budget-figure", 400, [models.BoxZoomTool()], min_border_left=_LEFT)
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
    _budget_line(drawn, plan.budget_bytes / unit, text, "height")
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
