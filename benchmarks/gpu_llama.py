"""Llama2-7B's layers, six of them, with AdamW in float32: plans beside policies.

What the step takes as it is written and the smallest budget there is give six budgets.
At each `stowax.plan`; each hand-written policy of `benchmarks.comparison` is run once,
since what it takes does not depend on a budget, only whether it fits does.
"""

import dataclasses
from typing import Any

from benchmarks import comparison_policies
from benchmarks.gpu_cells import (
    Cell,
    Context,
    OneDevice,
    Row,
    Workload,
    compile_by_hand,
    compiled_figures,
    each,
    gate,
    plan_of,
    run_and_measure,
    run_plan,
)
from benchmarks.models import _named, llama, scan_transformer

PART = "llama"
BUDGETS = 6
WRITTEN = "as it is written"
SMALLEST = "smallest budget"
LEAST = "1KiB"
LAYERS, BATCH = 6, 8
CONFIG = dataclasses.replace(llama.LLAMA2_7B, layers=LAYERS, batch=BATCH)
SMALL = dataclasses.replace(scan_transformer.SMALL, layers=2)
STEPS = 8
GATE_STEPS = 2
"""Of a state of 18 GB, which the gate keeps and compares on the host."""


def workload(context: Context, policy: Any = None) -> Workload:
    """The step on one device, under a policy or as it is written."""
    config = SMALL if context.tiny else CONFIG
    step, specs = llama.on_target(config, OneDevice(), policy=policy)
    return Workload(step=step, specs=specs, tokens=config.vocabulary)


def steps(context: Context) -> int:
    """How many steps are made; all but the first are timed."""
    return 3 if context.tiny else STEPS


def by_hand(policy: str | None, context: Context, row: Row) -> None:
    """One hand-written policy, or none."""
    if policy is None:
        work, options = workload(context), {}
    else:
        import stowax

        known = comparison_policies.policies(_named.LAYER_INPUT)
        work = workload(context, known[policy]())
        options = comparison_policies.options_for(policy, stowax.target())
    row["compiler_options"] = options
    compiled = compile_by_hand(work, work.specs, options)
    compiled_figures(compiled, row)
    run_and_measure(compiled, work, work.specs, steps(context), row)


def smallest(context: Context, row: Row) -> None:
    """The least that any plan needs."""
    plan = plan_of(context, f"{PART} smallest", workload(context), budget=LEAST)
    row |= {
        "smallest_budget": plan.smallest_budget,
        "smallest_budget_is": plan.search.smallest_budget_is,
        "planning_seconds": round(plan.search.planning_seconds, 2),
    }


def budget_of(context: Context, cell: int) -> int:
    """One of the budgets: from the smallest (0) to keeping everything, or the device.

    The step as it is written has its bytes even where it did not run for want of them.
    """
    import stowax

    written = context.found.get(f"{PART}: {WRITTEN}", {}).get("device_bytes")
    low = context.row(PART, SMALLEST).get("smallest_budget")
    if written is None or low is None:
        raise LookupError(f"budgets come from {WRITTEN!r} and {SMALLEST!r}: run those")
    high = min(written, stowax.target().device_bytes)
    return low + max(0, high - low) * cell // (BUDGETS - 1)


def planned(cell: int, context: Context, row: Row) -> None:
    """stowax's plan for one budget."""
    work, budget = workload(context), budget_of(context, cell)
    plan = plan_of(context, f"{PART} {cell}", work, budget=budget)
    run_plan(plan, work, steps(context), row)


def gated(cell: int, context: Context, row: Row) -> None:
    """The gate on the same plan."""
    work, budget = workload(context), budget_of(context, cell)
    plan = plan_of(context, f"{PART} {cell}", work, budget=budget)
    gate(plan, work, GATE_STEPS, row)


def plan_name(cell: int) -> str:
    """What a plan's cell is called."""
    return f"stowax, budget {cell + 1} of {BUDGETS}"


TINY_POLICIES = ("nothing_saveable", "layer input offloaded")
TINY_BUDGETS = (3,)


def cells(tiny: bool) -> list[Cell]:
    """The ends, the policies, the plans."""
    policies = comparison_policies.policies(_named.LAYER_INPUT)
    names = [None, *(TINY_POLICIES if tiny else policies)]
    budgets = TINY_BUDGETS if tiny else range(BUDGETS)
    return [
        Cell(part=PART, name=SMALLEST, work=smallest, seconds=120),
        *each(PART, 75, lambda name: name or WRITTEN, by_hand, names),
        *each(PART, 150, plan_name, planned, budgets),
    ]


def gate_cells(tiny: bool) -> list[Cell]:
    """The gate on every plan; last of all, as they take longest."""
    named = lambda cell: f"{PART}, {plan_name(cell)}"
    return each("gate", 300, named, gated, () if tiny else range(BUDGETS))
