"""Models that do not repeat: stowax's plans beside checkpoints by hand.

Eight models are lists of different blocks (`models/_blocks.py`). Each is compiled as it
is written ("none") and under three policies that people write: the whole loss under one
`jax.checkpoint` ("all"), every block ("blocks"), every group of about √n of n blocks
("sqrt"). Budgets are 60 and 40 % of what the step takes as it is written. Bytes are
XLA's, seconds are simulated from the compiled schedules, all by the same reader.

    python -m benchmarks straight --model unet --target h200
    python -m benchmarks straight --policies-only
    python -m benchmarks straight --plans-only --budget 60
"""

import argparse
from typing import Any

import jax

import stowax
from benchmarks import _record, comparison_policies, comparison_programs
from benchmarks._record import Figures, Records, cell_name, gib, say
from benchmarks.models import STRAIGHT
from benchmarks.models._blocks import POLICIES

TARGETS = ("h200", "v5p-8")
BUDGETS = (60, 40)
AS_WRITTEN = "none"
EVEN = 1e-3
"""Steps within this share of one another count as equally fast."""


def step_of(model: str, policy: str = AS_WRITTEN) -> tuple[Any, tuple[Any, ...]]:
    """The training step of a model in its large size, and its specs."""
    module = STRAIGHT[model]
    return module.model(module.LARGE).sized(policy)


def policy_cell(model: str, place: str, policy: str) -> Figures:
    """A policy's step, compiled, or read where it was compiled before."""
    step, specs = step_of(model, policy)
    target = stowax.target(place)
    written = policy == AS_WRITTEN
    options = {} if written else comparison_policies.options_for(policy, target)
    jitted = jax.jit(step, donate_argnums=0)
    found = comparison_programs.figures(target, jitted, specs, options)
    if "refused" in found:
        raise RuntimeError(found["refused"])
    return found


def plan_cell(model: str, place: str, budget: int) -> Figures:
    """A plan for `budget` bytes."""
    step, specs = step_of(model)
    plan = stowax.plan(
        step,
        *specs,
        budget=budget,
        target=place,
        donate=True,
        cache=comparison_programs.FOLDER,
        progress=say,
    )
    return {
        "budget_bytes": budget,
        "fits": plan.fits,
        "outcome": plan.outcome,
        "device_bytes": plan.device_bytes,
        "host_bytes": plan.host_bytes,
        "step_seconds": plan.step_seconds,
        "exposed_seconds": plan.proof.exposed_seconds,
        "smallest_budget": plan.smallest_budget,
        "trials": [
            [t.what, t.predicted_bytes, t.compiled_bytes, t.step_seconds]
            for t in plan.search.trials
        ],
        "compiling_seconds": sum(t.seconds_to_compile for t in plan.search.trials),
        "planning_seconds": plan.search.planning_seconds,
    }


def options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--model", action="append", choices=STRAIGHT)
    parser.add_argument("--target", action="append", choices=TARGETS)
    parser.add_argument("--budget", action="append", type=int, metavar="PERCENT")
    only = parser.add_mutually_exclusive_group()
    only.add_argument("--plans-only", action="store_true", help="and as written")
    only.add_argument("--policies-only", action="store_true")


def run(asked: argparse.Namespace, records: Records) -> None:
    """Every cell that was asked for."""
    for place in asked.target or TARGETS:
        for model in asked.model or STRAIGHT:
            _run_model(model, place, asked, records)


def _run_model(
    model: str, place: str, asked: argparse.Namespace, records: Records
) -> None:
    about = {"model": model, "target": place}
    for policy in POLICIES[:1] if asked.plans_only else POLICIES:
        jax.clear_caches()
        found = records.made(
            cell_name(model, place, policy),
            lambda p=policy: policy_cell(model, place, p),
            about | {"policy": policy},
        )
        if "error" not in found:
            say(f"= {gib(found['device_bytes'])} GiB, {_milliseconds(found)} ms")
    written = records.known(cell_name(model, place, AS_WRITTEN))
    if asked.policies_only or written is None:
        return
    for percent in asked.budget or BUDGETS:
        jax.clear_caches()
        budget = written["device_bytes"] * percent // 100
        records.made(
            cell_name(model, place, f"plan {percent}%"),
            lambda b=budget: plan_cell(model, place, b),
            about | {"percent": percent},
        )


def best_by_hand(cells: dict[str, Figures], model: str, place: str, budget: int) -> Any:
    """The fastest policy that fits a budget; `None` if none does."""
    found = [cells.get(cell_name(model, place, policy), {}) for policy in POLICIES]
    fitting = [
        line
        for line in found
        if line.get("step_seconds") and line["device_bytes"] <= budget
    ]
    return min(fitting, key=lambda line: line["step_seconds"], default=None)


def _milliseconds(line: Figures) -> str:
    seconds = line.get("step_seconds")
    return f"{1e3 * seconds:.1f}" if seconds else "does not fit the chip"


def _policy(line: Figures | None) -> str:
    if line is None:
        return ""
    if "error" in line:
        return "refused"
    return f"{gib(line['device_bytes'])} GiB, {_milliseconds(line)} ms"


def _policies(cells: dict[str, Figures]) -> str:
    """A row per model and target: bytes and seconds of every policy."""
    named = dict.fromkeys((line["model"], line["target"]) for line in cells.values())
    rows = []
    for model, place in named:
        lines = [cells.get(cell_name(model, place, policy)) for policy in POLICIES]
        spent = (line.get("compiling_seconds") for line in lines if line)
        compiling = " / ".join(f"{seconds:.0f}" for seconds in spent if seconds)
        rows.append((model, place, *map(_policy, lines), compiling))
    return _record.table(("model", "target", *POLICIES, "compiling s"), rows)


def _planned(line: Figures) -> str:
    if "error" in line:
        return f"error: {line['error'].splitlines()[0]:.120}"
    verb = "" if line["fits"] else "**does not fit**: "
    return f"{verb}{gib(line['device_bytes'])} GiB, {_milliseconds(line)} ms"


def outcome_of(line: Figures, best: Figures | None) -> str:
    """How a plan came out beside the best policy that fits its budget."""
    if "error" in line or not line["fits"]:
        return "**lost**" if best else "neither fits"
    if best is None:
        return "alone"
    ratio = line["step_seconds"] / best["step_seconds"]
    return f"{ratio:.3f}" if ratio <= 1 + EVEN else f"**{ratio:.3f}**"


def _plans(cells: dict[str, Figures]) -> str:
    """A row per plan, beside the best policy that fits the same budget."""
    rows = []
    for line in cells.values():
        if "percent" not in line:
            continue
        model, place = line["model"], line["target"]
        written = cells[cell_name(model, place, AS_WRITTEN)]["device_bytes"]
        budget = line.get("budget_bytes") or written * line["percent"] // 100
        best = best_by_hand(cells, model, place, budget)
        by_hand = f"{best['policy']}: {_policy(best)}" if best else "none"
        seconds = line.get("planning_seconds", 0.0)
        rows.append(
            (
                *(model, place, f"{gib(budget)} ({line['percent']} %)"),
                *(_planned(line), by_hand, outcome_of(line, best), f"{seconds:.0f}"),
            )
        )
    if not rows:
        return "No plan is kept here yet."
    head = ("model", "target", "budget GiB", "plan", "best by hand", "plan / by hand")
    return _record.table((*head, "planning s"), rows)


def page(records: Records) -> str:
    """Plans beside the best policy, and all policies."""
    cells = records.cells
    return _record.page_text(records, plans=_plans(cells), policies=_policies(cells))
