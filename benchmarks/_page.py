"""Makes the page of results from the records that are kept, and its charts.

    python -m benchmarks page                the page and its charts
    python -m benchmarks page --text         the page alone, without matplotlib

The sentences are in `benchmarks/pages/results.md`, with the names of figures and charts
in braces. Figures come from the records. Charts need matplotlib (`pip install --group
plots`, with pip 25.1 or newer).
"""

import argparse
import importlib.util
import pathlib
import re
import textwrap
from collections.abc import Iterator
from typing import Any

from benchmarks import (
    _charts,
    _record,
    budgets_table,
    llama13b,
    peaks,
    reliability,
    unrolled,
)
from benchmarks._chart_data import Found
from benchmarks._record import RESULTS, Records
from benchmarks._registry import BENCHMARKS
from benchmarks.comparison_cells import cells_of, outcome_of, series
from benchmarks.comparison_summary import LARGEST, mean_of, ratios_of

TEMPLATE = _record.PAGES / "results.md"
_NAMED = ("jax", "libtpu", "jax-cuda12-plugin", "jax-cuda13-plugin")


def found() -> dict[str, Records]:
    """The records that are kept, of every benchmark."""
    return {name: Records(name, one.status) for name, one in BENCHMARKS.items()}


def text(records: Found) -> str:
    """The page."""
    values = dict(_figures(records))
    charts = {
        f"chart_{name}": f"![{chart.alt}]({_charts.path_of(name, pathlib.Path()).name})"
        for name, chart in _charts.CHARTS.items()
    }
    made = {f"made_{name}": _made(own) for name, own in records.items() if own.lines}
    blocks = TEMPLATE.read_text().format_map(values | charts | made).split("\n\n")
    return "\n\n".join(map(_wrapped, blocks)).rstrip("\n") + "\n"


def _wrapped(block: str) -> str:
    """A paragraph or a list in lines of one length; a heading or an image as it is."""
    if block.startswith(("#", "!")):
        return block
    how: dict[str, Any] = {"break_long_words": False, "break_on_hyphens": False}
    lines = []
    for item in re.split(r"\n(?=- )", block):
        how["subsequent_indent"] = "  " * item.startswith("- ")
        lines.append(textwrap.fill(" ".join(item.split()), 96, **how))
    return "\n".join(lines)


def _made(records: Records) -> str:
    """Command, dates and versions, for a caption."""
    lines = records.lines.values()
    named = dict.fromkeys(
        f"{name} {version}"
        for line in lines
        for name, version in line["versions"].items()
        if name in _NAMED
    )
    command = f"`python -m benchmarks {records.name}`"
    return f"{command}, {_record.dates_text(lines)}; {', '.join(named)}"


def _figures(records: Found) -> Iterator[tuple[str, Any]]:
    """Every figure of the page: its name, and its text."""
    for section in (
        *(_numbers, _bytes, _gpu, _seconds, _planning, _costs),
        _reliability,
    ):
        yield from section(records)


def _numbers(records: Found) -> Iterator[tuple[str, Any]]:
    for cell, run in records["differential"].cells.items():
        yield f"{cell}_steps", f"{run['programs']:,}"
        yield f"{cell}_plans", f"{run['plans']:,}"
        for outcome in ("planned", "refused", "wrong", "foreign"):
            yield f"{cell}_{outcome}", run["outcomes"][outcome]


def _reliability(records: Found) -> Iterator[tuple[str, Any]]:
    rows = records["reliability"].cells.values()
    tries = dict.fromkeys(reliability.PARTS, 0)
    for row in rows:
        tries[row["part"]] += row.get("tries", 0)
    for part, count in tries.items():
        yield f"tried_{part}", f"{count:,}"
    yield "tried_faults", sum(map(reliability.faults_of, rows)) or "None"


def _bytes(records: Found) -> Iterator[tuple[str, Any]]:
    lines = records["budgets"].cells.values()
    cells = [c for c in lines if c["cell"] != "ends" and "error" not in c]
    kept = sum(c["fits"] and c["compiled_bytes"] <= c["budget_bytes"] for c in cells)
    tried = (
        ("before", lambda c: c["error_before"], budgets_table.BEFORE),
        ("foretold", budgets_table.foretold_error, budgets_table.AFTER),
        ("after", lambda c: c["error_after"], budgets_table.AFTER),
    )
    yield from (("budget_cells", len(cells)), ("budget_kept", kept))
    for name, error, bar in tried:
        yield f"budget_{name}", sum(abs(error(c)) <= bar for c in cells)
    slower = [
        c["model_seconds"] / c["best_baseline_seconds"] - 1
        for c in cells
        if c["best_baseline_seconds"] is not None
        and c["model_seconds"] > c["best_baseline_seconds"] * (1 + 1e-6)
    ]
    yield "model_slower", len(slower)
    yield (
        "model_slower_by",
        " and ".join(f"{s:.1g}" for s in sorted(s * 100 for s in slower)),
    )
    ratios = [row["ratio"] for row in unrolled.rows_of(records["unrolled"])]
    within = [ratio for ratio in ratios if ratio <= unrolled.BAR]
    yield from (("unrolled_rows", len(ratios)), ("unrolled_within", len(within)))
    yield "unrolled_most", f"{max(within):.2f}"
    yield "unrolled_worst", f"{max(ratios):.2f}"
    cases = records["state"].cells.values()
    reached = sum(c["device_bytes"] <= c["bar_gib"] * _record.GIB for c in cases)
    yield from (("state_cases", len(cases)), ("state_reached", reached))
    read = [c for c in records["inspection"].cells.values() if "model" in c]
    exact = [c for c in read if c["total_bytes"] == c["compiler_total_bytes"]]
    exact = [c for c in exact if c["peak_bytes"] == c["compiler_peak_bytes"]]
    yield from (("inspected", len(read)), ("inspected_exact", len(exact)))
    told = [c for c in records["peaks"].cells.values() if "error" not in c]
    near = sum(abs(peaks.ratio(row) - 1) <= peaks.NEAR for row in told)
    yield from (("peaks", len(told)), ("peaks_near", near))
    yield "inspected_origin", f"{100 * min(c['origin_share'] for c in read):.1f}"


def _gpu(records: Found) -> Iterator[tuple[str, Any]]:
    ran = {
        cell.removeprefix("tutorial: "): row
        for cell, row in records["gpu"].cells.items()
        if row.get("measured_seconds") is not None
    }
    peaks = [
        row["device_bytes"] / row["peak_bytes"] - 1
        for cell, row in ran.items()
        if row["peak_bytes"] > row["peak_before_bytes"]
        # Weights of 2 GiB are made on the device before they leave for the host.
        and not (cell.startswith("parameters") and row["in_bytes"])
    ]
    yield from (("gpu_peaks", len(peaks)), ("gpu_programs", len(ran)))
    yield "gpu_peaks_off", f"{100 * max(map(abs, peaks)):.1g}"
    for cell, row in ran.items():
        key = cell.replace(", ", "_").replace(" ", "_")
        yield f"ms_{key}", f"{1e3 * row['measured_seconds']:.0f}"
        yield f"simulated_{key}", f"{1e3 * row['simulated_seconds']:.0f}"
    # What moves nothing, or whole arrays: all but plans, and one short program.
    ratios = sorted(
        row["measured_seconds"] / row["simulated_seconds"]
        for cell, row in ran.items()
        if "stowax" not in cell
    )
    yield "gpu_least", f"{ratios[0]:.2f}"
    yield from (("gpu_most", f"{ratios[-2]:.2f}"), ("gpu_worst", f"{ratios[-1]:.2f}"))


def _seconds(records: Found) -> Iterator[tuple[str, Any]]:
    rows = series(records["comparison"].cells.values())
    cells = {key: cells_of(lines) for key, lines in rows.items()}
    steps = [
        cell
        for (workload, _), own in cells.items()
        for cell in own
        if not workload.startswith("tutorial")
    ]
    rivals = [outcome_of(cell) for cell in steps if cell["best"]]
    every = [cell for own in cells.values() for cell in own]
    faster = [1 - ratio for ratio in ratios_of(steps, "best") if ratio < 1 - 1e-4]
    large = [
        ratio
        for (workload, target), own in cells.items()
        if workload in LARGEST and target.startswith("v5p")
        for ratio in ratios_of(own, "full")
    ]
    full = ratios_of(every, "full")
    yield from (("rows", len(cells)), ("cells", len(every)))
    yield "cells_fit", sum(bool(cell["plan"].get("fits")) for cell in every)
    yield "rivals", len(rivals)
    yield "rivals_faster", rivals.count("faster")
    yield "faster_least", f"{100 * min(faster):.0f}"
    yield "faster_most", f"{100 * max(faster):.0f}"
    yield "beside_best", f"{100 * (1 - mean_of(ratios_of(steps, 'best'))):.0f}"
    yield from (("large", f"{mean_of(large):.3f}"), ("large_cells", len(large)))
    yield from (("full", f"{mean_of(full):.3f}"), ("full_cells", len(full)))
    yield "cells_lost", sum(outcome_of(cell) == "slower" for cell in every)
    yield "alone_cells", sum(outcome_of(cell) == "alone" for cell in every)
    alone = [any(outcome_of(cell) == "alone" for cell in own) for own in cells.values()]
    yield "alone_rows", sum(alone)


def _planning(records: Found) -> Iterator[tuple[str, Any]]:
    cells = records["llama13b"].cells.values()
    plans = [cell for cell in cells if "step" in cell]
    for name in ("planning", "compiling", "solving"):
        seconds = [plan[f"{name}_seconds"] for plan in plans]
        digits = 1 if name == "solving" else 0
        yield f"{name}_least", f"{min(seconds):.{digits}f}"
        yield f"{name}_most", f"{max(seconds):.{digits}f}"
    yield "planning_bar", f"{llama13b.PLANNING_BAR:.0f}"
    (depth,) = (cell for cell in cells if "pairs" in cell)
    yield "depth", f"{depth['ratio']:.2f}"


def _costs(records: Found) -> Iterator[tuple[str, Any]]:
    cells = records["overhead"].cells
    for name in ("import", "restart", "dispatch", "dispatch_of_jit"):
        yield f"{name}_ratio", f"{cells[name]['ratio']:.2f}"
    yield "import_ms", f"{1e3 * cells['import']['second_seconds']:.0f}"
    yield "restart_seconds", f"{cells['restart']['first_seconds']:.1f}"
    rows = records["audit"].cells.values()
    fixed = [r for r in rows if r.get("fix") == "all" and r["loop"] != "naive"]
    costs = sorted(row["ratio"] for row in rows if "leaves" in row)
    yield "audit_least", f"{min(r['ratio'] for r in fixed):.2f}"
    yield "audit_most", f"{max(r['ratio'] for r in fixed):.2f}"
    yield "audit_naive", f"{records['audit'].cells['naive, all']['ratio']:.2f}"
    yield from (("cost_least", f"{costs[0]:.2f}"), ("cost_most", f"{costs[-2]:.2f}"))
    yield "cost_worst", f"{costs[-1]:.2f}"


def main(given: list[str]) -> int:
    """Writes the page, and draws its charts."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks page",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--text", action="store_true", help="no charts")
    asked = parser.parse_args(given)
    if not asked.text and importlib.util.find_spec("matplotlib") is None:
        parser.error("charts need matplotlib: pip install --group plots, or --text")
    records = found()
    (RESULTS / "README.md").write_text(text(records))
    for name in () if asked.text else _charts.CHARTS:
        _charts.write(name, records, RESULTS)
    return 0
