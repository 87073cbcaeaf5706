"""stowax's plans of one workload on one target, for several budgets at once.

`stowax.plans` makes them, so that a program compiled for one budget serves another. Its
programs are kept by content: a table that is made again, with a better simulator or for
one budget more, compiles what is new. What a budget that no step fits (`TINY`) has had
compiled is among them: it says what the smallest budget is, and a plan for exactly that
may come by other programs.
"""

from typing import Any

import stowax
from benchmarks import comparison_programs
from benchmarks.comparison_workloads import made

Line = dict[str, Any]

TINY = "1MiB"
"""A budget that no step fits: what needs the least is looked for."""


class PlansOf:
    """The plans of a workload's cells, all of them made when the first is asked for."""

    def __init__(
        self, name: str, target: Any, budgets: dict[int, int], most: int, say: Any
    ):
        """`budgets` by cell; a plan may compile `most` programs."""
        self._name, self._target, self._say = name, target, say
        self._budgets, self._most = budgets, most
        self._lines: dict[int, Line] | None = None
        self._error: Exception | None = None

    def line(self, cell: int) -> Line:
        """What the plan of one cell came to."""
        if self._error is not None:
            raise self._error
        if self._lines is None:
            try:
                self._lines = self._made()
            except Exception as error:
                self._error = error
                raise
        return self._lines[cell]

    def _made(self) -> dict[int, Line]:
        step, specs = made(self._name, self._target)
        _, *plans = stowax.plans(
            step,
            *specs,
            budgets=(TINY, *self._budgets.values()),
            target=self._target,
            compiles=self._most,
            cache=comparison_programs.FOLDER,
            progress=self._say,
        )
        made_together = sorted(self._budgets)
        return {
            cell: _line(plan, self._most) | {"made_with_cells": made_together}
            for cell, plan in zip(self._budgets, plans, strict=True)
        }


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
