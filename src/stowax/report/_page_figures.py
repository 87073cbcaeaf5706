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
from ._looks import STYLES
from ._page_data import (
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
LEFT = 78  # pixels beside all plots alike, so that they stand under each other


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
    if lanes:  # below the device's memory, which what runs explains
        figures.insert(1, _lanes_figure(inspection, lanes, axis))
    for drawn in figures[:-1]:
        drawn.xaxis.visible = False
    last = figures[-1]
    unit_name = time_unit(step_end(inspection))[1]
    last.xaxis.axis_label = f"{inspection.timeline.origin} time in {unit_name}"
    last.height += 44
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
        min_border_left=LEFT,
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
    rooms = _rooms(inspection, plan, kind, curve.peak_bytes)
    top = max(peak, *(room / unit for _, room, _ in rooms)) if rooms else peak
    alone = len(curves_of(inspection)) == 1  # the first screen has room for so much
    height = (270 if alone else 230) if kind == "device" else 80
    drawn = _figure_in_time(f"memory-{kind}", height, axis)
    drawn.y_range = models.Range1d(0, top * 1.14)
    drawn.yaxis.axis_label = f"{kind}, {unit_name}"
    if kind == "host":
        drawn.yaxis.ticker.desired_num_ticks = 3
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
    _band_names(drawn, kind)
    at = curve.peak_seconds / time_unit(step_end(inspection))[0]
    right = at > axis.end / 2
    for title, room, dash in rooms:
        _room_line(drawn, room / unit, title, dash, right=not right)
    drawn.scatter([at], [peak], marker="inverted_triangle", size=11, name="peak")
    _peak_label(drawn, at, peak, format_bytes(curve.peak_bytes), right=right)
    return drawn


def _rooms(
    inspection: Inspection, plan: PlanRecord | None, kind: str, peak: int
) -> list[tuple[str, int, str]]:
    """The lines that the memory has to stay below: title, bytes, dash.

    One that is far above the peak would press the bands flat: the verdict has it.
    """
    rooms = []
    if (budget := budget_of(plan, kind)) is not None:
        rooms.append((f"budget {format_bytes(budget)}", budget, "dashed"))
    if kind == "device" and (has := inspection.capacity_bytes):
        rooms.append((f"a device has {format_bytes(has)}", has, "solid"))
    return [room for room in rooms if room[1] <= _HIGHEST * peak]


def _band_names(drawn: Any, kind: str) -> None:
    """Names inside of the bands; the script finds where there is room (`bands.js`)."""
    columns = {"x": [], "y": [], "text": [], "ink": [], "ground": []}
    source = bokeh().models.ColumnDataSource(columns, name=f"memory-{kind}-names")
    drawn.text(
        x="x",
        y="y",
        text="text",
        source=source,
        text_color="ink",
        background_fill_color="ground",
        text_align="center",
        text_baseline="middle",
        text_font_size="12px",
        padding=2,
        name="band-names",
    )


def _peak_label(drawn: Any, at: float, peak: float, size: str, *, right: bool) -> None:
    """The peak's figure beside its sign, below the lines that may lie on it."""
    drawn.add_layout(
        bokeh().models.Label(
            x=at,
            y=peak,
            x_offset=-10 if right else 10,
            y_offset=-4,
            text=f"peak {size}",
            text_align="right" if right else "left",
            text_baseline="top",
            text_font_size="13px",
            text_font_style="bold",
            background_fill_alpha=0.85,
            padding=2,
            name="label",
        )
    )


def _room_line(drawn: Any, where: float, text: str, dash: str, *, right: bool) -> None:
    """A line across the drawing with its name above it, away from the peak."""
    models = bokeh().models
    drawn.add_layout(
        models.Span(
            location=where,
            dimension="width",
            line_color=WAITS,
            line_dash=dash,
            line_width=2,
            name="budget",
        )
    )
    axis = drawn.x_range
    drawn.add_layout(
        models.Label(
            text=text,
            text_font_size="13px",
            text_align="right" if right else "left",
            x=axis.end if right else axis.start,
            x_offset=-8 if right else 8,
            y=where,
            y_offset=2,
            background_fill_alpha=0.85,
            name="label",
        )
    )


def budget_of(plan: PlanRecord | None, kind: str) -> int | None:
    """The plan's budget for a memory, if there is a plan."""
    if plan is None:
        return None
    return plan.budget_bytes if kind == "device" else plan.proof.host_budget_bytes


def _lanes_figure(inspection: Inspection, lanes: Sequence[str], axis: Any) -> Any:
    models = bokeh().models
    loops = bool(inspection.memory_timeline and inspection.memory_timeline.loops)
    titles = [*(["loops"] if loops else []), *(_LANE_TITLES[lane] for lane in lanes)]
    drawn = _figure_in_time("lanes", 10 + 24 * len(titles), axis)
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
