"""The tables of `benchmarks.comparison`, written from its cells.

First what came out in all (`comparison_summary`), then every workload on every target.
"""

from typing import Any

from benchmarks import _record
from benchmarks._record import gib, seconds_text
from benchmarks.comparison_cells import Lines, cells_of, outcome_of, series
from benchmarks.comparison_summary import summary
from benchmarks.comparison_workloads import WORKLOADS


def page(records: _record.Records) -> str:
    """What came out in all, then a section per workload and target."""
    found = series(records.cells.values())
    rows = "\n".join(_section(*key, own) for key, own in found.items())
    return _record.page_text(records, summary=summary(found), rows=rows)


def _section(workload: str, target: str, lines: Lines) -> str:
    text = f"## {workload}, {target}\n\n{WORKLOADS[workload].what}"
    sizes = WORKLOADS[workload].targets.get(target, {})
    batch = f", batch {sizes['batch']}" if "batch" in sizes else ""
    half = "; parameters and moments in bfloat16" if "weights" in sizes else ""
    text += f"{batch}{half}.\n"
    end = next((line for line in lines if line["kind"] == "ends"), None)
    if end is None or "error" in end:
        text += f"\n{end['error'] if end else 'No plans yet: the policies alone.'}\n"
        return text + _policies(lines)
    text += (
        f"\nAs written {gib(end['keep_all_bytes'])} GiB of the chip's "
        f"{gib(end['chip_bytes'])}; smallest budget {gib(end['smallest_budget'])} GiB "
        f"({end['smallest_budget_is']}).\n"
    )
    if rows := [_cell_row(cell) for cell in cells_of(lines)]:
        text += "\n" + _record.table(_CELL_HEAD, rows)
    return text + _policies(lines)


def _policies(lines: Lines) -> str:
    policies = [line for line in lines if line["kind"] == "policy"]
    rows = [_policy_row(line) for line in policies]
    return "\n" + _record.table(_POLICY_HEAD, rows) if rows else ""


_CELL_HEAD = (
    "budget GiB",
    "stowax fits",
    "device",
    "host",
    "step s",
    "exposed s",
    "best by hand that fits, step s",
    "stowax / best",
    "XLA's own, GiB: step s",
    "planning s",
)


def _cell_row(cell: dict[str, Any]) -> list[str]:
    plan, best, xla = cell["plan"], cell["best"], cell["xla"]
    if "error" in plan:
        return ["", "error", *[""] * (len(_CELL_HEAD) - 2)]
    ratio = ""
    if best and plan["fits"]:
        ratio = f"{plan['step_seconds'] / best['step_seconds']:.3f}"
        ratio = f"**{ratio}**" if outcome_of(cell) == "slower" else ratio
    return [
        gib(plan["budget_bytes"]),
        "yes" if plan["fits"] else "**no**",
        gib(plan["device_bytes"]),
        gib(plan["host_bytes"]),
        seconds_text(plan["step_seconds"]),
        seconds_text(plan["exposed_seconds"]),
        f"{best['name']} {seconds_text(best['step_seconds'])}" if best else "none fits",
        ratio,
        _taken(xla) if xla else "",
        f"{plan['planning_seconds']:.0f}",
    ]


def _taken(line: dict[str, Any]) -> str:
    if "error" in line or "refused" in line:
        return "refused"
    if line.get("step_seconds") is None:
        needed = line["device_bytes"]
        return f"does not compile ({gib(needed)})" if needed else "does not compile"
    return f"{gib(line['device_bytes'])}: {seconds_text(line['step_seconds'])}"


_POLICY_HEAD = (
    "policy",
    "device GiB",
    "host",
    "step s",
    "exposed s",
    "arithmetic on the host",
    "compiling s",
)


def _policy_row(line: dict[str, Any]) -> list[str]:
    blank = [""] * (len(_POLICY_HEAD) - 2)
    if "error" in line or "refused" in line:
        why = (line.get("error") or line["refused"]).splitlines()[0]
        return [line["name"], f"refused: {why:.80}", *blank]
    if line.get("step_seconds") is None:
        needed = line["device_bytes"]
        return [
            line["name"],
            f"beyond the chip{f': {gib(needed)}' if needed else ''}",
            *blank,
        ]
    return [
        line["name"],
        gib(line["device_bytes"]),
        gib(line["host_bytes"]),
        seconds_text(line["step_seconds"]),
        seconds_text(line["exposed_seconds"]),
        str(line["host_computations"]),
        f"{line['compiling_seconds']:.0f}",
    ]
