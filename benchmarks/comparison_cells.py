"""The cells of `benchmarks.comparison`, read off its lines, and how each came out.

A cell is a budget of a workload on a target: stowax's plan there against the fastest
hand-written policy that fits it, XLA's own rematerialization included.
"""

import collections
from collections.abc import Iterable
from typing import Any

from benchmarks.comparison_workloads import WORKLOADS

FULL_RECOMPUTE = "nothing_saveable"
EVEN = 1e-4
"""Steps within this share of one another count as equally fast: the seconds are read
off schedules, and two compiles of one program may differ by a few instructions."""

Lines = list[dict[str, Any]]


def fits(line: dict[str, Any], budget: int, host_bytes: int) -> bool:
    """Whether a compiled program stays within both budgets."""
    if "error" in line or line.get("step_seconds") is None:
        return False
    return line["device_bytes"] <= budget and line["host_bytes"] <= host_bytes


def series(lines: Iterable[dict[str, Any]]) -> dict[tuple[str, str], Lines]:
    """Lines by workload and target."""
    found = collections.defaultdict(list)
    order = list(WORKLOADS)
    for line in sorted(lines, key=lambda n: order.index(n["workload"])):
        found[line["workload"], line["target"]].append(line)
    return dict(found)


def cells_of(lines: Lines) -> list[dict[str, Any]]:
    """One record per budget that was planned for: the plan, and the best by hand."""
    end = next((line for line in lines if line["kind"] == "ends"), None)
    if end is None or "error" in end:
        return []
    allowed = end["host_bytes_allowed"]
    policies = [line for line in lines if line["kind"] == "policy"]
    found = []
    for plan in sorted(
        (line for line in lines if line["kind"] == "plan"), key=lambda n: n["cell"]
    ):
        budget = plan.get("budget_bytes")
        if budget is None:
            found.append({"plan": plan, "best": None, "full": None, "xla": None})
            continue
        # What does not compile for a large chip is not tried for a smaller one.
        xla = next(
            (
                n
                for n in lines
                if n["kind"] == "xla"
                and (
                    n["cell"] == plan["cell"]
                    or (n["cell"] > plan["cell"] and n.get("step_seconds") is None)
                )
            ),
            None,
        )
        rivals = [
            line
            for line in (*policies, *([xla] if xla else []))
            if fits(line, budget, allowed)
        ]
        best = min(rivals, key=lambda line: line["step_seconds"], default=None)
        full = next((n for n in rivals if n["name"] == FULL_RECOMPUTE), None)
        found.append({"plan": plan, "best": best, "full": full, "xla": xla})
    return found


def outcome_of(cell: dict[str, Any]) -> str:
    """`faster`, `even`, `slower`, `alone`, `neither` or `error`."""
    plan, best = cell["plan"], cell["best"]
    if "error" in plan:
        return "error"
    if not plan["fits"]:
        return "slower" if best else "neither"
    if best is None:
        return "alone"
    ratio = plan["step_seconds"] / best["step_seconds"]
    if abs(ratio - 1) <= EVEN:
        return "even"
    return "faster" if ratio < 1 else "slower"
