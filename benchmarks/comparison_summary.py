"""All cells of `benchmarks.comparison` in one table, and after it those that are lost.

Each lost cell comes with what can be read off the lines about it.
"""

import collections
import math
from collections.abc import Iterable
from typing import Any

from benchmarks import _record
from benchmarks._record import gib, seconds_text
from benchmarks.comparison_cells import (
    FULL_RECOMPUTE,
    Lines,
    cells_of,
    fits,
    outcome_of,
)
from benchmarks.comparison_policies import PIPELINED

_IN_THE_MODEL = {
    "everything_saveable": "keep all",
    FULL_RECOMPUTE: "recompute all",
    "layer input offloaded": "offload layer inputs",
}
"""What a plan's own baselines are called."""

_HEAD = (
    "workload",
    "target",
    "cells",
    "faster",
    "even",
    "slower",
    "alone",
    "step / best by hand",
    "step / full recompute",
    "least GiB",
    "by hand",
    "minutes",
)


def summary(found: dict[tuple[str, str], Lines]) -> str:
    """What came out in all, workload by workload, and every cell that is lost."""
    total: collections.Counter[str] = collections.Counter()
    rows, lost, recomputing, below = [], [], [], 0
    for key, lines in found.items():
        cells = cells_of(lines)
        count = collections.Counter(map(outcome_of, cells))
        total += count
        below += count["alone"] > 0
        recomputing += ratios_of(cells, "full")
        rows.append((*key, *_row(lines, cells, count)))
        lost += [_lost(key, c) for c in cells if outcome_of(c) in ("slower", "error")]
    text = (
        f"**{total.total()} cells: stowax is faster in {total['faster']}, as "
        f"fast in {total['even']}, slower in {total['slower']}; in {total['alone']} "
        "only stowax's plan fits, in "
        f"{total['neither']} nothing does.** "
    )
    if recomputing:
        text += (
            f"Against full recomputation, where both fit: {mean_of(recomputing):.3f} × "
            f"its step (geometric mean of {len(recomputing)} cells). "
        )
    text += _bars(found)
    text += (
        f"{below} of {len(rows)} workloads have a budget that only stowax's plan "
        f"meets.\n\n{_EXPLAINED}\n" + _record.table(_HEAD, rows)
    )
    if lost:
        text += "\nCells that are lost:\n\n" + "\n".join(lost) + "\n"
    return text


LARGEST = ("llama2-13b", "gemma2-27b", "paligemma2-28b", "llama2-70b")
"""Models for which offloading is said to pay, by published point solutions."""


def _bars(found: dict[tuple[str, str], Lines]) -> str:
    """The same for whole training steps, and for the largest models on v5p."""
    steps = [
        cell
        for (workload, _), lines in found.items()
        for cell in cells_of(lines)
        if not workload.startswith("tutorial")
    ]
    large = [
        ratio
        for (workload, target), lines in found.items()
        if workload in LARGEST and target.startswith("v5p")
        for ratio in ratios_of(cells_of(lines), "full")
    ]
    rivals = collections.Counter(outcome_of(c) for c in steps if c["best"])
    text = ""
    if beside := ratios_of(steps, "best"):
        text = (
            f"Of {rivals.total()} cells of whole training steps (all but the "
            f"tutorial's) with a policy that fits {rivals['faster']} are faster; "
            f"beside the best {mean_of(beside):.3f} (geometric mean). "
        )
    if large:
        text += (
            f"Beside full recomputation on v5p, {', '.join(LARGEST)}: "
            f"{mean_of(large):.3f} ({len(large)} cells). "
        )
    return text


_EXPLAINED = """*Alone*: no policy by hand fits. *Step* ratios are those of cells where
a policy fits: to the best of them, from the best cell to the worst, and to full
recomputation, a geometric mean. *Least GiB* is the smallest program of a plan, and
beside it of a policy; *minutes* are those of all of a row's lines, on a machine that
was doing other things too.
"""


def _row(
    lines: Lines, cells: list[dict[str, Any]], count: collections.Counter[str]
) -> list[str]:
    beside = ratios_of(cells, "best")
    full = ratios_of(cells, "full")
    plans = [cell["plan"] for cell in cells if cell["plan"].get("fits")]
    policies = [
        line
        for end in lines
        if end["kind"] == "ends" and "error" not in end
        for line in lines
        if line["kind"] == "policy"
        and fits(line, end["chip_bytes"], end["host_bytes_allowed"])
    ]
    minutes = sum(n.get("wall_seconds", n.get("seconds", 0)) for n in lines) / 60
    return [
        str(len(cells)),
        *(str(count[name]) for name in ("faster", "even", "slower", "alone")),
        f"{min(beside):.3f} to {max(beside):.3f}" if beside else "",
        f"{mean_of(full):.3f}" if full else "",
        _least(plans),
        _least(policies),
        f"{minutes:.0f}",
    ]


def ratios_of(cells: list[dict[str, Any]], rival: str) -> list[float]:
    """Steps of plans beside those of a rival (`best`, `full`), where both fit."""
    return [
        cell["plan"]["step_seconds"] / cell[rival]["step_seconds"]
        for cell in cells
        if cell[rival] and cell["plan"].get("fits")
    ]


def mean_of(ratios: list[float]) -> float:
    """The geometric mean."""
    return math.exp(sum(map(math.log, ratios)) / len(ratios))


def _least(lines: Iterable[dict[str, Any]]) -> str:
    found = [line["device_bytes"] for line in lines]
    return gib(min(found)) if found else ""


def _lost(key: tuple[str, str], cell: dict[str, Any]) -> str:
    plan, best = cell["plan"], cell["best"]
    where = f"- {key[0]}, {key[1]}, cell {plan['cell']}"
    if "error" in plan:
        return f"{where}: {plan['error'].splitlines()[0]:.200}"
    ratio = (
        f"{plan['step_seconds'] / best['step_seconds'] - 1:+.1%} beside {best['name']}"
        if plan["fits"]
        else f"does not fit, and {best['name']} does"
    )
    return f"{where} ({gib(plan['budget_bytes'])} GiB): {ratio}; {reason(cell)}"


def reason(cell: dict[str, Any]) -> str:
    """What the lines say about why a cell was lost."""
    plan, best = cell["plan"], cell["best"]
    if not plan["fits"]:
        return f"the plan needs {gib(plan['device_bytes'])} GiB as compiled"
    known = {b[0]: b for b in plan["baselines"]}
    name = best["name"].removesuffix(PIPELINED)  # which the model does not know
    other = known.get(_IN_THE_MODEL.get(name, name))
    mine = seconds_text(plan["model_seconds"])
    model = f"the planner's model has the plan at {mine} s"
    if other is not None:
        _, device, _, seconds, fitting = other
        if math.isclose(seconds, plan["model_seconds"], rel_tol=1e-6):
            model += ", and the policy at the same"
        else:
            model += (
                f" and the policy at {seconds_text(seconds)} s in {gib(device)} GiB"
            )
            model += "" if fitting else ", which it takes for too much"
    exposed = plan["exposed_seconds"] - best["exposed_seconds"]
    rest = plan["step_seconds"] - best["step_seconds"] - exposed
    return f"{model}; waiting for copies {exposed:+.3g} s, all else {rest:+.3g} s"
