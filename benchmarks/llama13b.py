"""Llama2-13B on a v5p-8 that is not there: how long planning takes, what comes out.

The train step of 40 layers, 32 sequences of 2048 tokens, fully sharded over 4 chips,
is planned for one or more budgets as a user would, and so are its loss and gradients
alone, without an optimizer. Apart from that, the time until the
first compile is taken for 40 and for 400 layers of a narrower model, whose 400 layers
fit the chips: a stack under scan is to cost the same to plan whatever its length.

    python -m benchmarks.llama13b
    python -m benchmarks.llama13b --budget 75GiB --gradients-budget 62GiB
    python -m benchmarks.llama13b --depth-only

Writes docs/results/llama13b.json and docs/results/llama13b.md.
"""

import os

os.environ.setdefault("JAX_PLATFORMS", "cpu")

import argparse
import json
import statistics
import sys
from typing import Any

import jax

import stowax
from benchmarks import _record
from benchmarks._record import Stopwatch, gib
from benchmarks.models import llama

COMMAND = "python -m benchmarks.llama13b"
RESULT = _record.RESULTS / "llama13b.json"
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
        print(f"    {spent:6.1f} s  {line}", file=sys.stderr, flush=True)

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
        print(
            f"    40 layers {few} s, 400 layers {many} s", file=sys.stderr, flush=True
        )
        if i:  # the first round loads the compiler
            pairs.append((few, many))
    return {
        "pairs": pairs,
        "few_seconds": statistics.median(few for few, _ in pairs),
        "many_seconds": statistics.median(many for _, many in pairs),
        "ratio": _record.median_ratio(pairs),
    }


def write(found: dict[str, Any]) -> None:
    """The JSON and the tables."""
    _record.write_json(RESULT, _record.provenance(COMMAND) | found)
    text = [
        "# Llama2-13B on v5p-8, planned without the chips\n",
        _record.provenance_text(COMMAND),
        "Train step with AdamW, and loss and gradients alone: 40 layers, 32 × 2048 "
        "tokens, 4 chips (FSDP). Bytes are "
        "per chip; seconds of planning on the wall. *exposed* is the time that the "
        "compiled schedule waits for host copies, *windows* the part of a layer's "
        "forward and backward time that its copies fill.\n",
    ]
    if found["plans"]:
        text += [_broken(found), _record.table(_HEAD, map(_row, found["plans"]))]
    if depth := found["depth"]:
        text.append(
            "## Planning time by depth\n\n"
            f"Processor seconds until the first compile, width {NARROW['width']}, "
            f"scan: {depth['few_seconds']:.2f} for 40 layers, "
            f"{depth['many_seconds']:.2f} for 400; ratio {depth['ratio']:.3f} (median "
            f"of {len(depth['pairs'])} pairs), to be at most {DEPTH_BAR}.\n"
        )
    RESULT.with_suffix(".md").write_text("\n".join(text))


def _broken(found: dict[str, Any]) -> str:
    bars = []
    for plan in found["plans"]:
        slow = plan["best_baseline_seconds"]
        windows = max(plan["forward_window_used"], plan["backward_window_used"])
        checks = {
            "does not fit": not plan["fits"],
            "compiled beyond the budget": plan["compiled_bytes"] > plan["budget_bytes"],
            f"planning over {PLANNING_BAR:.0f} s": plan["planning_seconds"]
            > PLANNING_BAR,
            f"solving over {SOLVING_BAR:.0f} s": plan["solving_seconds"] > SOLVING_BAR,
            "slower than a baseline": slow is not None and plan["model_seconds"] > slow,
            f"exposed over {EXPOSED_BAR:.0%} with windows at most 90 % full": windows
            <= 0.9
            and plan["exposed_share"] > EXPOSED_BAR,
        }
        bars += [
            f"- {plan['step']}, {plan['budget']}: {what}"
            for what, broken in checks.items()
            if broken
        ]
    return (
        "Bars that are broken:\n\n" + "\n".join(bars) + "\n"
        if bars
        else ("No bar is broken.\n")
    )


_HEAD = (
    "step",
    "budget",
    "fits",
    "compiled GiB",
    "predicted",
    "host",
    "step s, simulated",
    "exposed",
    "windows forward / backward",
    "model s",
    "best baseline that fits, s",
    "compiles",
    "planning s",
    "of it compiling",
    "solving",
)


def _row(plan: dict[str, Any]) -> list[str]:
    best = plan["best_baseline"]
    return [
        plan["step"],
        plan["budget"],
        f"{'yes' if plan['fits'] else '**no**'}, {plan['outcome']}",
        gib(plan["compiled_bytes"]),
        gib(plan["predicted_bytes"]),
        gib(plan["host_bytes"]),
        f"{plan['simulated_seconds']:.3f}",
        f"{plan['exposed_seconds']:.3f} s ({plan['exposed_share']:.1%})",
        f"{plan['forward_window_used']:.0%} / {plan['backward_window_used']:.0%}",
        f"{plan['model_seconds']:.3f}",
        f"{best} {plan['best_baseline_seconds']:.3f}" if best else "none",
        str(plan["compiles"]),
        f"{plan['planning_seconds']:.0f}",
        f"{plan['compiling_seconds']:.0f}",
        f"{plan['solving_seconds']:.2f}",
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--budget", action="append", help="per chip, train step")
    parser.add_argument("--gradients-budget", action="append", help="without update")
    parser.add_argument("--rounds", type=int, default=3, help="of 40 and 400 layers")
    parser.add_argument("--depth-only", action="store_true")
    parser.add_argument("--plans-only", action="store_true")
    arguments = parser.parse_args()
    # What is not measured this time is kept from the last.
    old = json.loads(RESULT.read_text()) if RESULT.exists() else {}
    plans = [plan for plan in old.get("plans", []) if "step" in plan]
    found = {"plans": plans, "depth": old.get("depth")}
    if not arguments.plans_only:
        found["depth"] = depths(arguments.rounds)
        write(found)
    if not arguments.depth_only:
        found["plans"] = []
        for update, budgets in (
            (True, arguments.budget or BUDGETS),
            (False, arguments.gradients_budget or GRADIENTS_BUDGETS),
        ):
            for budget in budgets:
                print(f"Llama2-13B, {budget}", file=sys.stderr, flush=True)
                found["plans"].append(plan_13b(budget, update=update))
                write(found)


if __name__ == "__main__":
    main()
