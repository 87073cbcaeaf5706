"""Step time over budget, one plot per workload and target, as SVG.

stowax's curve has a point per plan. A hand-written policy is a step: nothing below what
it takes, and its own time from there on. One is drawn alike in all plots.
"""

import pathlib
from typing import Any

from benchmarks.comparison_policies import PIPELINED, XLA, policies

GIB = 2**30

_HIGHER = 1.25
"""How far above stowax's slowest plan a policy may be and be drawn: others stand in the
legend, or they would leave the curve no room."""

_STYLES = {
    name: {"color": f"C{i}", "linestyle": "-" if i % 2 else "--"}
    for i, name in enumerate(policies(""))
}
_STYLES |= {
    name + PIPELINED: {**style, "linestyle": ":"} for name, style in _STYLES.items()
}
_RECIPE = {"color": "C0", "linestyle": "-."}
"""Of a workload's own recipe."""


def write(
    lines_path: pathlib.Path,
    workload: str,
    target: str,
    lines: list[dict[str, Any]],
    cells: list[dict[str, Any]],
) -> str | None:
    """Draws the plot beside `lines_path`.

    **Returns:** its file name; that of the last one where matplotlib is not installed,
    `None` where there is nothing to draw or no plot yet.
    """
    path = lines_path.with_name(f"{lines_path.stem}-{workload}-{target}.svg")
    planned = [cell["plan"] for cell in cells if cell["plan"].get("fits")]
    if not planned:
        return None
    try:
        import matplotlib as mpl
    except ImportError:
        return path.name if path.exists() else None
    mpl.use("svg")
    mpl.rcParams.update({"svg.hashsalt": "stowax", "svg.fonttype": "none"})
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8.0, 5.5), layout="constrained")
    axes = figure.subplots()
    at = [plan["budget_bytes"] / GIB for plan in planned]
    seconds = [plan["step_seconds"] for plan in planned]
    axes.plot(at, seconds, "D-", color="black", lw=2, zorder=3, label="stowax")
    for line in lines:
        if line["kind"] == "policy" and line.get("step_seconds"):
            _draw_policy(axes, line, max(at), _HIGHER * max(seconds))
    _draw_compilers_own(axes, cells)
    axes.set_xlabel("budget per device, GiB")
    axes.set_ylabel("simulated step, s")
    axes.set_title(f"{workload} on {target}")
    axes.grid(alpha=0.3)
    # Two columns: three of the longest names are wider than the plot.
    figure.legend(loc="outside lower center", fontsize="x-small", ncols=2)
    figure.savefig(path, metadata={"Date": None})
    return path.name


def _draw_policy(axes: Any, line: dict[str, Any], last: float, top: float) -> None:
    start, seconds = line["device_bytes"] / GIB, line["step_seconds"]
    if start > last:
        return
    style = _STYLES.get(line["name"], _RECIPE)
    if seconds > top:
        axes.plot([], [], label=f"above: {line['name']}, {seconds:.3g} s", **style)
        return
    axes.plot([start, last], [seconds] * 2, label=line["name"], lw=1.2, **style)
    axes.plot(start, seconds, marker="o", ms=4, color=style["color"])


def _draw_compilers_own(axes: Any, cells: list[dict[str, Any]]) -> None:
    found = [cell["xla"] for cell in cells if cell["xla"]]
    found = [n for n in found if n.get("step_seconds")]
    found = [n for n in found if n["device_bytes"] <= n["budget_bytes"]]
    if found:
        at = [n["budget_bytes"] / GIB for n in found]
        seconds = [n["step_seconds"] for n in found]
        axes.plot(at, seconds, "s:", color="0.5", label=XLA)
