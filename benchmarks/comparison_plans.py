"""stowax's plans of one workload on one target, for several budgets at once.

`stowax.plans` makes them, so that a program compiled for one budget serves another. Its
programs are kept by content: a table that is made again, with a better simulator or for
one budget more, compiles what is new. What a budget that no step fits (`TINY`) has had
compiled is among them: it says what the smallest budget is, and a plan for exactly that
may come by other programs.
"""

import functools
from collections.abc import Callable
from typing import Any

import stowax
from benchmarks import comparison_programs
from benchmarks.comparison_workloads import made

Line = dict[str, Any]

TINY = "1MiB"
"""A budget that no step fits: what needs the least is looked for."""


def plans_of(
    name: str, target: Any, budgets: dict[int, int], most: int, say: Any
) -> Callable[[int], Line]:
    """What the plan of each cell came to; all are made when the first is asked for.

    `budgets` by cell; a plan may compile `most` programs.
    """

    def lines() -> dict[int, Line]:
        step, specs = made(name, target)
        _, *plans = stowax.plans(
            step,
            *specs,
            budgets=(TINY, *budgets.values()),
            target=target,
            compiles=most,
            cache=comparison_programs.FOLDER,
            progress=say,
        )
        together = {"made_with_cells": sorted(budgets)}
        found = zip(budgets, plans, strict=True)
        return {cell: _line(plan, most) | together for cell, plan in found}

    @functools.cache
    def outcome() -> dict[int, Line] | Exception:
        try:
            return lines()
        except Exception as error:
            return error

    def line(cell: int) -> Line:
        found = outcome()
        if isinstance(found, Exception):
            raise found
        return found[cell]

    return line


def _line(plan: Any, most: int) -> Line:
    return {
        "budget_bytes": plan.budget_bytes,
        "most_compiles": most,
        "fits": plan.fits,
        "outcome": plan.outcome,
        "device_bytes": plan.device_bytes,
        "host_bytes": plan.host_bytes,
        "step_seconds": plan.step_seconds,
        "exposed_seconds": plan.proof.exposed_seconds,
        "model_seconds": plan.search.model_seconds,
        "gap": plan.gap,
        "baselines": [
            [b.name, b.device_bytes, b.host_bytes, b.seconds, b.fits]
            for b in plan.baselines
        ],
        "trials": [
            [t.what, t.predicted_bytes, t.compiled_bytes, t.step_seconds]
            for t in plan.search.trials
        ],
        "compiling_seconds": sum(t.seconds_to_compile for t in plan.search.trials),
        "stored": [
            [d.decision, d.name, d.count * d.bytes]
            for d in plan.decisions
            if d.decision != "recompute" and d.role == "activation"
        ],
        "state_moved_bytes": sum(
            d.count * d.bytes
            for d in plan.decisions
            if d.decision == "offload" and d.role != "activation"
        ),
        "compiler_options": plan.program.compiler_options,
        "planning_seconds": plan.search.planning_seconds,
        "wall_seconds": plan.search.planning_seconds,
    }
