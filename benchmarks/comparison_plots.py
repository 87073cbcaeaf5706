"""Step time over budget, one plot per workload and target, as SVG.

stowax's curve has a point per plan. A hand-written policy is a step: nothing below what
it takes, and its own time from there on.
"""

import pathlib
from typing import Any

GIB = 2**30


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

    figure = Figure(figsize=(8.0, 4.5), layout="constrained")
    axes = figure.subplots()
    last = max(plan["budget_bytes"] for plan in planned)
    policies = [n for n in lines if n["kind"] == "policy" and n.get("step_seconds")]
    for i, line in enumerate(policies):
        start = line["device_bytes"] / GIB
        if line["device_bytes"] > last:
            continue
        style = {
            "color": f"C{i % 9 + 1}",
            "linewidth": 1.2,
            "linestyle": (i % 3, (4, 2)),
        }
        seconds = [line["step_seconds"]] * 2
        axes.plot([start, last / GIB], seconds, label=line["name"], **style)
        axes.plot(start, line["step_seconds"], marker="o", ms=4, color=style["color"])
    xla = [cell["xla"] for cell in cells if cell["xla"]]
    xla = [n for n in xla if n.get("step_seconds")]
    xla = [n for n in xla if n["device_bytes"] <= n["budget_bytes"]]
    if xla:
        at = [n["budget_bytes"] / GIB for n in xla]
        seconds = [n["step_seconds"] for n in xla]
        axes.plot(at, seconds, "s:", color="0.5", label="XLA's own rematerialization")
    at = [plan["budget_bytes"] / GIB for plan in planned]
    seconds = [plan["step_seconds"] for plan in planned]
    axes.plot(at, seconds, "D-", color="black", linewidth=2, label="stowax")
    axes.set_xlabel("budget per device, GiB")
    axes.set_ylabel("simulated step, s")
    axes.set_title(f"{workload} on {target}")
    axes.grid(alpha=0.3)
    axes.legend(fontsize="x-small", ncols=2)
    figure.savefig(path, metadata={"Date": None})
    return path.name
