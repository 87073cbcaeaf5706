"""The charts of the page of results: what each shows, and how it is drawn.

A chart's data come from records alone. Their digest is in the SVG, so that a test finds
a chart that is not of the records that are kept, with no matplotlib needed.
"""

import dataclasses
import hashlib
import json
import pathlib
from collections.abc import Callable
from typing import Any

from benchmarks import _chart_data, unrolled
from benchmarks._chart_data import Found
from benchmarks.budgets_table import AFTER, BEFORE
from benchmarks.differential_table import OUTCOMES
from benchmarks.llama13b import PLANNING_BAR

BLUE, ORANGE, GREEN, RED, GREY = "#1f77b4", "#e6862b", "#3a9a4c", "#c8373a", "0.55"
WIDTH = 8.0


@dataclasses.dataclass(frozen=True, slots=True)
class Chart:
    """A chart: its text for who does not see it, its data, its drawing, its height."""

    alt: str
    data: Callable[[Found], Any]
    draw: Callable[[Any, Any], None]
    height: float


def digest(data: Any) -> str:
    """What tells two charts' data apart."""

    def rounded(value: Any) -> Any:
        if isinstance(value, float):
            return f"{value:.6g}"
        if isinstance(value, list | tuple):
            return [rounded(item) for item in value]
        return value

    return hashlib.sha256(json.dumps(rounded(data)).encode()).hexdigest()[:16]


def path_of(name: str, folder: pathlib.Path) -> pathlib.Path:
    """Where a chart is."""
    return folder / f"chart-{name.replace('_', '-')}.svg"


def write(name: str, found: Found, folder: pathlib.Path, kind: str = "svg") -> None:
    """Draws one chart."""
    import matplotlib as mpl
    from matplotlib.figure import Figure

    mpl.rcParams.update({"svg.hashsalt": "stowax", "svg.fonttype": "none"})
    mpl.rcParams.update({"font.size": 9, "axes.axisbelow": True})
    chart = CHARTS[name]
    data = chart.data(found)
    figure = Figure(figsize=(WIDTH, chart.height), layout="constrained")
    chart.draw(figure, data)
    path = path_of(name, folder).with_suffix(f".{kind}")
    about = {"Date": None, "Description": digest(data)} if kind == "svg" else None
    figure.savefig(path, metadata=about, dpi=100)


def _lines(figure: Any, labels: list[str], label: str) -> Any:
    """Axes with a line per label, from the top down."""
    axes = figure.subplots()
    axes.set_yticks(range(len(labels)), labels)
    axes.set_ylim(len(labels) - 0.4, -0.6)
    axes.set_xlabel(label)
    axes.grid(axis="x", alpha=0.3)
    axes.spines[["top", "right", "left"]].set_visible(False)
    axes.tick_params(axis="y", length=0)
    return axes


def _draw_gpu_seconds(figure: Any, rows: Any) -> None:
    axes = _lines(figure, [r[0] for r in rows], "measured / simulated")
    colors = {"": GREY, "by hand": ORANGE, "stowax": BLUE}
    for y, (_, way, simulated, measured) in enumerate(rows):
        ratio = measured / simulated
        axes.barh(y, ratio, color=colors[way], height=0.6)
        text = f"{measured:.0f} ms for {simulated:.0f}"
        axes.text(max(ratio, 1) + 0.02, y, text, va="center", fontsize=8)
    axes.axvline(1, color="black", lw=1)
    axes.set_xlim(0, 1.9)
    for way, name in (("", "all on the device"), ("by hand", "moved by hand")):
        axes.barh(-9, 1, color=colors[way], label=name)
    axes.barh(-9, 1, color=BLUE, label="moved by a plan of stowax")
    figure.legend(loc="outside upper center", ncols=3, frameon=False)


def _draw_random_steps(figure: Any, rows: Any) -> None:
    axes = _lines(figure, [r[0] for r in rows], "share of the plans, %")
    colors = (GREEN, "#a9d5b0", ORANGE, RED, "#7b1fa2", GREY)
    for y, (_, programs, plans, *counts) in enumerate(rows):
        start = 0.0
        for name, count, color in zip(OUTCOMES, counts, colors, strict=True):
            label = name if not y else None
            axes.barh(y, 100 * count / plans, left=start, color=color, label=label)
            start += 100 * count / plans
        refused, wrong, foreign = counts[2:5]
        told = f"{programs:,} steps, {plans:,} plans\n"
        told += f"{refused} refused, {wrong} wrong, {foreign} foreign"
        axes.text(101, y, told, va="center", fontsize=7.5)
    axes.set_xlim(0, 138)
    axes.set_xticks(range(0, 101, 20))
    figure.legend(loc="outside upper center", ncols=len(OUTCOMES), frameon=False)


def _draw_bytes(figure: Any, rows: Any) -> None:
    axes = _lines(
        figure, [r[0] for r in rows], "compiled bytes beside those predicted, %"
    )
    for y, (name, errors) in enumerate(rows):
        bar = 100 * (BEFORE if y < 2 else AFTER)
        axes.fill_betweenx([y - 0.4, y + 0.4], -bar, bar, color=GREEN, alpha=0.15)
        at = [y + 0.3 * ((i * 7) % 11 / 5 - 1) for i in range(len(errors))]
        color = BLUE if "h200" in name else ORANGE
        axes.plot(errors, at, "o", ms=3, alpha=0.7, color=color)
    axes.axvline(0, color="black", lw=1)


def _draw_unrolled(figure: Any, rows: Any) -> None:
    label = "bytes of the Python loop's plan / the scan's"
    axes = _lines(figure, [r[0] for r in rows], label)
    for y, (_, ratio) in enumerate(rows):
        color = RED if ratio > unrolled.BAR else BLUE
        axes.plot([1, ratio], [y, y], color=color, lw=1.5)
        axes.plot(ratio, y, "o", color=color, ms=5)
    axes.axvline(1, color="black", lw=1)
    axes.axvline(unrolled.BAR, color=RED, lw=1, ls="--")
    axes.text(unrolled.BAR, -0.75, f"bar {unrolled.BAR}", color=RED, ha="center")


def _draw_step_ratio(figure: Any, rows: Any) -> None:
    label = "step of the plan / of the best hand-written policy that fits"
    axes = _lines(figure, [r[0] for r in rows], label)
    for y, (_, ratios, alone, count) in enumerate(rows):
        colors = [RED if ratio > 1.0001 else BLUE for ratio in ratios]
        axes.scatter(ratios, [y] * len(ratios), c=colors, s=22, alpha=0.8)
        if alone:
            told = f"no policy fits {alone} of {count}"
            axes.text(1.095, y, told, va="center", fontsize=8, color="0.35")
    axes.axvline(1, color="black", lw=1)
    axes.set_xlim(0.77, 1.24)
    axes.set_xticks([0.8, 0.85, 0.9, 0.95, 1.0, 1.05])


def _draw_least_memory(figure: Any, rows: Any) -> None:
    axes = _lines(figure, [r[0] for r in rows], "GiB per device, logarithmic")
    axes.set_xscale("log")
    for y, (_, plan, policy, chip) in enumerate(rows):
        axes.plot([plan, policy or chip], [y, y], color="0.8", lw=2, zorder=1)
        for value, marker, color, name in (
            (plan, "o", BLUE, "stowax"),
            (policy, "D", ORANGE, "hand-written policy"),
            (chip, "|", "black", "the chip"),
        ):
            if value is not None:
                label = name if not y else None
                axes.plot(value, y, marker, color=color, ms=6, ls="", label=label)
    ticks = [1, 2, 5, 10, 20, 50, 100]
    axes.set_xticks(ticks, [f"{tick:g}" for tick in ticks])
    axes.minorticks_off()
    figure.legend(loc="outside upper center", ncols=3, frameon=False)


def _draw_memory_time(figure: Any, panels: Any) -> None:
    for k, (name, plans, policies, full, most) in enumerate(panels):
        axes = figure.add_subplot(2, 3, k + 1)
        axes.plot(*zip(*plans, strict=True), "o-", color=BLUE, ms=4, label="stowax")
        best = [
            [at, min(s for other, s in policies if other <= at)] for at, _ in policies
        ]
        for points, color, style, label in (
            (best, ORANGE, "-", "the fastest hand-written policy that fits"),
            (full, "0.4", ":", "full recomputation"),
        ):
            if points:
                at, seconds = zip(*[*points, [most, points[-1][1]]], strict=True)
                drawn = {"where": "post", "color": color, "ls": style, "lw": 1.8}
                axes.step(at, seconds, label=label if not k else None, **drawn)
        slowest, fastest = (end(s for _, s in plans) for end in (max, min))
        top = max([min(slowest, 2.2 * fastest), *(s for _, s in best + full)])
        axes.set_ylim(0.95 * fastest, 1.05 * top)
        axes.set_xlim(0, 1.03 * most)
        axes.set_title(name, fontsize=9)
        axes.grid(alpha=0.3)
        axes.tick_params(labelsize=8)
        if not k:
            handles, labels = axes.get_legend_handles_labels()
    figure.supxlabel("budget per device, GiB", fontsize=9)
    figure.supylabel("simulated step, s", fontsize=9)
    figure.legend(handles, labels, loc="outside upper center", ncols=3, frameon=False)


def _draw_planning(figure: Any, rows: Any) -> None:
    axes = _lines(figure, [r[0] for r in rows], "seconds of planning, measured")
    for y, (_, compiling, solving, whole) in enumerate(rows):
        parts = (
            ("compiling", compiling, BLUE),
            ("solving", solving, RED),
            ("all else", whole - compiling - solving, "0.75"),
        )
        start = 0.0
        for name, seconds, color in parts:
            label = name if not y else None
            axes.barh(y, seconds, left=start, color=color, height=0.6, label=label)
            start += seconds
    bar = f"to be {PLANNING_BAR:.0f} s"
    axes.axvline(PLANNING_BAR, color="black", lw=1, ls="--", label=bar)
    figure.legend(loc="outside upper center", ncols=4, frameon=False)


def _draw_overhead(figure: Any, rows: Any) -> None:
    axes = _lines(figure, [r[0] for r in rows], "time, as a multiple")
    for y, (_, ratio, bar) in enumerate(rows):
        axes.barh(y, ratio, color=BLUE, height=0.55)
        inside = {"ha": "right", "color": "white"} if ratio > 0.1 else {}
        at = min(ratio, 1) - 0.01 if inside else ratio + 0.01
        axes.text(at, y, f"{ratio:.2f}", va="center", fontsize=8, **inside)
        if bar is not None:
            axes.plot([bar, bar], [y - 0.4, y + 0.4], color=RED, lw=2)
            axes.text(bar + 0.01, y, f"bar {bar}", va="center", color=RED, fontsize=8)
    axes.axvline(1, color="black", lw=1)
    axes.set_xlim(0, 1.3)


def _draw_audit(figure: Any, rows: Any) -> None:
    axes = _lines(figure, [r[0] for r in rows], "seconds a step / of the loop as it is")
    for y, (_, before, *single, (transfers, ratio)) in enumerate(rows):
        axes.barh(y, ratio, color=BLUE, height=0.55, label="" if y else "all remedies")
        told = f"{ratio:.2f}, {before[0]:g} → {transfers:g} transfers a step"
        axes.text(1.2, y, told, va="center", fontsize=8)
        at = [r for _, r in single]
        name = "" if y or not single else "one remedy alone"
        axes.plot(at, [y] * len(at), "D", color=ORANGE, ms=5, label=name)
    axes.axvline(1, color="black", lw=1)
    axes.set_xlim(0, 1.72)
    axes.set_xticks([0, 0.2, 0.4, 0.6, 0.8, 1.0])
    figure.legend(loc="outside upper center", ncols=2, frameon=False)


def _draw_state(figure: Any, rows: Any) -> None:
    axes = _lines(figure, [r[0] for r in rows], "GiB, logarithmic")
    axes.set_xscale("log")
    for y, (_, device, bar, state) in enumerate(rows):
        axes.plot([device, state], [y, y], color="0.8", lw=2, zorder=1)
        for value, marker, color, name in (
            (device, "o", BLUE, "device memory of the plan"),
            (bar, "|", RED, "to be at most"),
            (state, "s", GREY, "state and gradients"),
        ):
            label = name if not y else None
            axes.plot(value, y, marker, color=color, ms=7, mew=2, ls="", label=label)
    ticks = [0.5, 1, 2, 5, 10, 20, 50, 100, 200]
    axes.set_xticks(ticks, [f"{tick:g}" for tick in ticks])
    axes.minorticks_off()
    figure.legend(loc="outside upper center", ncols=3, frameon=False)


CHARTS = {
    "gpu_seconds": Chart(
        "Measured over simulated seconds of nine programs on one H200",
        *(_chart_data.gpu_seconds, _draw_gpu_seconds, 2.9),
    ),
    "random_steps": Chart(
        "Outcomes of random steps under plans, five runs, none wrong",
        *(_chart_data.random_steps, _draw_random_steps, 2.8),
    ),
    "bytes": Chart(
        "Compiled over predicted bytes of 120 plans, before and after correction",
        *(_chart_data.errors_of_bytes, _draw_bytes, 3.2),
    ),
    "unrolled": Chart(
        "Bytes of the plan of a Python loop beside those of the same model's scan",
        *(_chart_data.unrolled, _draw_unrolled, 3.1),
    ),
    "step_ratio": Chart(
        "Step of the plan beside the best hand-written policy that fits, cell by cell",
        *(_chart_data.step_ratio, _draw_step_ratio, 4.4),
    ),
    "least_memory": Chart(
        "The smallest program of a plan and of a policy, workload by workload",
        *(_chart_data.least_memory, _draw_least_memory, 4.6),
    ),
    "memory_time": Chart(
        "Step over budget for six workloads: plans, and the fastest policy that fits",
        *(_chart_data.memory_time, _draw_memory_time, 4.8),
    ),
    "planning": Chart(
        "Seconds of planning Llama2-13B: most of it is compiling",
        *(_chart_data.planning, _draw_planning, 1.9),
    ),
    "overhead": Chart(
        "Import, restart and dispatch as multiples of plain JAX, with their bars",
        *(_chart_data.overhead, _draw_overhead, 2.1),
    ),
    "audit": Chart(
        "Seconds a step of four loops with the audit's remedies",
        *(_chart_data.audit, _draw_audit, 2.1),
    ),
    "state": Chart(
        "Device memory of plans beside the state that they hold",
        *(_chart_data.state, _draw_state, 3.4),
    ),
}
