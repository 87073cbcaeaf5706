"""What the charts of the page of results show, from records alone."""

from collections.abc import Mapping
from typing import Any

from benchmarks._record import GIB, Records
from benchmarks.budgets_table import foretold_error
from benchmarks.comparison_cells import FULL_RECOMPUTE, cells_of, fits, series
from benchmarks.differential_table import OUTCOMES
from benchmarks.overhead import ROWS
from benchmarks.state import CASES
from benchmarks.unrolled import rows_of as unrolled_rows

Found = Mapping[str, Records]
"""The records of every benchmark, by its name."""


def gpu_seconds(found: Found) -> list[list[Any]]:
    """Per program its name, who moves its arrays, simulated and measured ms."""
    rows = []
    for cell, row in found["gpu"].cells.items():
        if row.get("measured_seconds") is None:
            continue
        seconds = 1e3 * row["simulated_seconds"], 1e3 * row["measured_seconds"]
        way = "by hand" if "by hand" in cell else "stowax" if "stowax" in cell else ""
        rows.append([cell.partition(": ")[2], way, *seconds])
    return rows


def random_steps(found: Found) -> list[list[Any]]:
    """Per run its name, programs, plans, and plans by outcome."""
    names = {
        "differential": "run on a CPU",
        "differential_newest": "CPU, JAX 0.12, Python 3.13",
        "differential_parts": "CPU, one unusual part each",
        "differential_gpu": "run on an H200",
        "differential_compiled": "compiled, v5p-8 and H200",
    }
    cells = found["differential"].cells
    return [
        [name, cells[cell]["programs"], cells[cell]["plans"]]
        + [cells[cell]["outcomes"][outcome] for outcome in OUTCOMES]
        for cell, name in names.items()
    ]


def errors_of_bytes(found: Found) -> list[list[Any]]:
    """Per stage and target the errors of predictions, in percent."""
    cells = [c for c in found["budgets"].cells.values() if c["cell"] != "ends"]
    return [
        [
            f"{name}, {target}",
            [
                100 * error(c)
                for c in cells
                if c["target"] == target and "error" not in c
            ],
        ]
        for name, error in (
            ("first program", lambda c: c["error_before"]),
            ("plan's own, before its compile", foretold_error),
            ("corrected, as the plan says", lambda c: c["error_after"]),
        )
        for target in ("h200", "v5p-8")
    ]


def unrolled(found: Found) -> list[list[Any]]:
    """Per pair of plans its name and ratio."""
    return [
        [
            f"{row['model'].replace('_', '–')}, {row['target']}, "
            f"{row['budget_bytes'] / GIB:.0f} GiB",
            row["ratio"],
        ]
        for row in unrolled_rows(found["unrolled"])
    ]


def rows_of(found: Found) -> dict[tuple[str, str], list[dict[str, Any]]]:
    """Lines of the comparison by workload and target."""
    return series(found["comparison"].cells.values())


def step_ratio(found: Found) -> list[list[Any]]:
    """Per row the ratios, in how many cells no policy fits, of how many."""
    rows = []
    for (workload, target), lines in rows_of(found).items():
        cells = cells_of(lines)
        if cells:
            ratios = [
                cell["plan"]["step_seconds"] / cell["best"]["step_seconds"]
                for cell in cells
                if cell["best"] and cell["plan"].get("fits")
            ]
            alone = sum(not c["best"] and bool(c["plan"].get("fits")) for c in cells)
            rows.append([f"{workload}, {target}", ratios, alone, len(cells)])
    return rows


def least_memory(found: Found) -> list[list[Any]]:
    """Per row the least GiB of a plan and of a policy, and the chip's."""
    rows = []
    for (workload, target), lines in rows_of(found).items():
        end = next((n for n in lines if n["kind"] == "ends"), {"error": ""})
        plans = [c["plan"] for c in cells_of(lines) if c["plan"].get("fits")]
        if "error" in end or not plans or workload == "tutorial-layers":
            continue  # its 7 MB would take half of the chart
        limits = end["chip_bytes"], end["host_bytes_allowed"]
        policies = [n for n in lines if n["kind"] == "policy" and fits(n, *limits)]
        least = [
            min((n["device_bytes"] / GIB for n in some), default=None)
            for some in (plans, policies)
        ]
        rows.append([f"{workload}, {target}", *least, end["chip_bytes"] / GIB])
    return rows


PANELS = (
    *(("llama2-13b", "v5p-8"), ("gemma2-27b", "v5p-8"), ("paligemma2-28b", "v5p-8")),
    *(("llama2-70b", "v5p-16"), ("mixtral-8x7b", "h200x8"), ("llama2-7b", "h200")),
)


def memory_time(found: Found) -> list[list[Any]]:
    """Per panel its name, plans, policies, full recomputation, and the most GiB."""
    known, panels = rows_of(found), []
    for key in PANELS:
        lines = known[key]
        cells = cells_of(lines)
        host = next(n for n in lines if n["kind"] == "ends")["host_bytes_allowed"]
        plans = [
            [c["plan"]["budget_bytes"] / GIB, c["plan"]["step_seconds"]]
            for c in cells
            if c["plan"].get("fits")
        ]
        most = max(c["plan"]["budget_bytes"] for c in cells)
        policies = [
            [n["device_bytes"] / GIB, n["step_seconds"]]
            for n in lines
            if n["kind"] == "policy" and fits(n, most, host)
        ]
        full = [
            [n["device_bytes"] / GIB, n["step_seconds"]]
            for n in lines
            if n["name"] == FULL_RECOMPUTE and fits(n, most, host)
        ]
        panels.append([", ".join(key), plans, sorted(policies), full, most / GIB])
    return panels


def planning(found: Found) -> list[list[Any]]:
    """Per plan its name, and seconds compiling, solving and in all."""
    return [
        [
            f"{p['step']}, {p['budget']}",
            *(p["compiling_seconds"], p["solving_seconds"], p["planning_seconds"]),
        ]
        for p in found["llama13b"].cells.values()
        if "step" in p
    ]


def overhead(found: Found) -> list[list[Any]]:
    """Per row what it is, its ratio, and the bar if there is one."""
    cells = found["overhead"].cells
    return [
        [what.rpartition(",")[0], cells[cell]["ratio"], bar]
        for cell, (what, _, _, bar) in ROWS.items()
    ]


def audit(found: Found) -> list[list[Any]]:
    """Per loop its name, and transfers and ratio of each way to write it."""
    rows = [r for r in found["audit"].cells.values() if "fix" in r]
    loops = dict.fromkeys(r["loop"] for r in rows)
    return [
        [
            loop,
            *([r["transfers"], r["ratio"]] for r in rows if r["loop"] == loop),
        ]
        for loop in loops
    ]


def state(found: Found) -> list[list[Any]]:
    """Per case its name, and GiB on the device, at most, and of the state."""
    cells = found["state"].cells
    return [
        [
            f"{case.removesuffix(', TPU')}, {cells[case]['target']}",
            cells[case]["device_bytes"] / GIB,
            cells[case]["bar_gib"],
            cells[case]["state_bytes"] / GIB,
        ]
        for case in CASES
        if "error" not in cells.get(case, {"error": ""})
    ]
