"""Llama2-13B on a v5p-8 that is not there: how long planning takes, what comes out.

The train step of 40 layers, 32 sequences of 2048 tokens, fully sharded over 4 chips,
is planned for one or more budgets as a user would, and so are its loss and gradients
alone, without an optimizer. Apart from that, the time until the
first compile is taken for 40 and for 400 layers of a narrower model, whose 400 layers
fit the chips: a stack under scan is to cost the same to plan whatever its length.

    python -m benchmarks llama13b --budget 75GiB --gradients-budget 62GiB
    python -m benchmarks llama13b --fresh --depth-only
"""

import argparse
import statistics
from typing import Any

import jax

import stowax
from benchmarks import _record
from benchmarks._record import Stopwatch, cell_name, gib
from benchmarks.models import llama

TARGET = "v5p-8"
PLANNING_BAR, SOLVING_BAR, DEPTH_BAR, EXPOSED_BAR = 150.0, 2.0, 1.3, 0.03

BUDGETS = ("75GiB", "90GiB")
GRADIENTS_BUDGETS = ("58GiB", "62GiB")

NARROW: dict[str, Any] = {"width": 1536, "heads": 12, "key_value_heads": 12}
NARROW |= {"feed_forward": 4096}
DEPTHS = {40: "24GiB", 400: "85GiB"}
"""Layers, and a budget at which there is something to decide."""


def plan_13b(budget: str, *, update: bool) -> dict[str, Any]:
    """One plan of the step, and what the table needs of it."""
    step, args = llama.llama2_13b(stowax.target(TARGET), update=update)
    jax.clear_caches()
    watch = Stopwatch()

    def say(line: str) -> None:
        spent = watch.seconds()["wall_seconds"]
        _record.say(f"{spent:6.1f} s  {line}")

    plan = stowax.plan(step, *args, budget=budget, target=TARGET, progress=say)
    compiling = sum(t.seconds_to_compile for t in plan.search.trials)
    stack = plan.program.stacks[0] if plan.program.stacks else None
    fitting = [b for b in plan.baselines if b.fits]
    best = min(fitting, key=lambda b: b.seconds, default=None)
    return {
        "step": "train step" if update else "loss and gradients",
        "budget": budget,
        "budget_bytes": plan.budget_bytes,
        "fits": plan.fits,
        "outcome": plan.outcome,
        "compiled_bytes": plan.device_bytes,
        "host_bytes": plan.host_bytes,
        "predicted_bytes": plan.predicted_device_bytes,
        "smallest_budget": plan.smallest_budget,
        "simulated_seconds": plan.step_seconds,
        "exposed_seconds": plan.proof.exposed_seconds,
        "exposed_share": plan.proof.exposed_seconds / plan.step_seconds,
        "model_seconds": plan.search.model_seconds,
        "forward_window_used": stack.forward_window_used if stack else 0.0,
        "backward_window_used": stack.backward_window_used if stack else 0.0,
        "best_baseline": best.name if best else None,
        "best_baseline_seconds": best.seconds if best else None,
        "compiles": len(plan.search.trials),
        "trials": [
            [t.predicted_bytes, t.compiled_bytes, t.step_seconds, t.seconds_to_compile]
            for t in plan.search.trials
        ],
        "planning_seconds": plan.search.planning_seconds,
        "compiling_seconds": compiling,
        "solving_seconds": plan.search.solving_seconds,
        "decisions": [
            [d.decision, d.name, d.bytes * d.count]
            for d in plan.decisions
            if d.decision != "recompute"
        ],
        **watch.seconds(),
    }


class _Compiling(Exception):
    """Raised out of `stowax.plan` when it says that it compiles."""


def seconds_before_compiling(layers: int) -> dict[str, float]:
    """Time from the call of `stowax.plan` until its first compile."""
    step, args = llama.llama2_13b(stowax.target(TARGET), layers=layers, **NARROW)
    jax.clear_caches()

    def stop(line: str) -> None:
        if line.startswith("compiling"):
            raise _Compiling

    watch = Stopwatch()
    try:
        stowax.plan(step, *args, budget=DEPTHS[layers], target=TARGET, progress=stop)
    except _Compiling:
        return watch.seconds()
    raise RuntimeError("stowax.plan came back without saying that it compiles")


def depths(rounds: int) -> dict[str, Any]:
    """Both depths, alternately; processor time, which other work disturbs least."""
    pairs = []
    for i in range(rounds + 1):
        few, many = (seconds_before_compiling(n)["cpu_seconds"] for n in DEPTHS)
        _record.say(f"40 layers {few} s, 400 layers {many} s")
        if i:  # the first round loads the compiler
            pairs.append((few, many))
    return {
        "pairs": pairs,
        "few_seconds": statistics.median(few for few, _ in pairs),
        "many_seconds": statistics.median(many for _, many in pairs),
        "ratio": _record.median_ratio(pairs),
    }


def page(records: _record.Records) -> str:
    """What is broken first, then the tables."""
    cells = [cell for cell in records.cells.values() if "error" not in cell]
    plans = [cell for cell in cells if "step" in cell]
    broken = [
        f"- {plan['step']}, {plan['budget']}: {what}"
        for plan in plans
        for what in broken_bars(plan)
    ]
    told = "\n".join(["Bars that are broken:\n", *broken])
    depth = "".join(
        f"Processor seconds until the first compile, width {NARROW['width']}, "
        f"scan: {cell['few_seconds']:.2f} for 40 layers, "
        f"{cell['many_seconds']:.2f} for 400; ratio {cell['ratio']:.3f} (median "
        f"of {len(cell['pairs'])} pairs), to be at most {DEPTH_BAR}."
        for cell in cells
        if "pairs" in cell
    )
    return _record.page_text(
        records,
        broken=told if broken else "No bar is broken.",
        plans=_record.columns(_COLUMNS, plans),
        depth=depth,
    )


def broken_bars(plan: dict[str, Any]) -> list[str]:
    """What a plan does not reach, in words."""
    slow = plan["best_baseline_seconds"]
    windows = max(plan["forward_window_used"], plan["backward_window_used"])
    checks = {
        "does not fit": not plan["fits"],
        "compiled beyond the budget": plan["compiled_bytes"] > plan["budget_bytes"],
        f"planning over {PLANNING_BAR:.0f} s": plan["planning_seconds"] > PLANNING_BAR,
        f"solving over {SOLVING_BAR:.0f} s": plan["solving_seconds"] > SOLVING_BAR,
        "slower than a baseline": slow is not None and plan["model_seconds"] > slow,
        f"exposed over {EXPOSED_BAR:.0%} with windows at most 90 % full": (
            windows <= 0.9 and plan["exposed_share"] > EXPOSED_BAR
        ),
    }
    return [what for what, broken in checks.items() if broken]


_COLUMNS = {
    "step": lambda p: p["step"],
    "budget": lambda p: p["budget"],
    "fits": lambda p: f"{'yes' if p['fits'] else '**no**'}, {p['outcome']}",
    "compiled GiB": lambda p: gib(p["compiled_bytes"]),
    "predicted": lambda p: gib(p["predicted_bytes"]),
    "host": lambda p: gib(p["host_bytes"]),
    "step s, simulated": lambda p: f"{p['simulated_seconds']:.3f}",
    "exposed": lambda p: f"{p['exposed_seconds']:.3f} s ({p['exposed_share']:.1%})",
    "windows forward / backward": lambda p: (
        f"{p['forward_window_used']:.0%} / {p['backward_window_used']:.0%}"
    ),
    "model s": lambda p: f"{p['model_seconds']:.3f}",
    "best baseline that fits, s": lambda p: (
        f"{p['best_baseline']} {p['best_baseline_seconds']:.3f}"
        if p["best_baseline"]
        else "none"
    ),
    "compiles": lambda p: p["compiles"],
    "planning s": lambda p: f"{p['planning_seconds']:.0f}",
    "of it compiling": lambda p: f"{p['compiling_seconds']:.0f}",
    "solving": lambda p: f"{p['solving_seconds']:.2f}",
}


def options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--budget", action="append", help="per chip, train step")
    parser.add_argument("--gradients-budget", action="append", help="without update")
    parser.add_argument("--rounds", type=int, default=3, help="of 40 and 400 layers")
    parser.add_argument("--depth-only", action="store_true")
    parser.add_argument("--plans-only", action="store_true")


def run(asked: argparse.Namespace, records: _record.Records) -> None:
    """Both depths, and the plans."""
    if not asked.plans_only and records.known("depth") is None:
        records.add("depth", depths(asked.rounds), status="measured")
    if asked.depth_only:
        return
    for update, budgets in (
        (True, asked.budget or BUDGETS),
        (False, asked.gradients_budget or GRADIENTS_BUDGETS),
    ):
        for budget in budgets:
            step = "train step" if update else "loss and gradients"
            records.made(
                cell_name(step, budget),
                lambda b=budget, u=update: plan_13b(b, update=u),
            )
