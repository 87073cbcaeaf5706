"""Ten budgets × six models × two chips: is the budget kept, and is the plan any good?

For every model and target the step is compiled once as it is written (what keeping
everything takes) and planned once for a budget that nothing can meet (what the smallest
budget is said to be). Ten budgets lie evenly between the two, both ends included. Each
cell is one `stowax.plan`, as a user calls it.

    python -m benchmarks budgets --target h200 --model nnx_loop
    python -m benchmarks budgets --effort default --cell 0 --cell 5
"""

import argparse
from typing import Any

import jax

import stowax
from benchmarks import _record, budgets_table
from benchmarks._record import Stopwatch, cell_name, say
from benchmarks.models import MODELS
from benchmarks.models.encoder_decoder import Config as TwoStacks
from benchmarks.models.scan_transformer import Config

CELLS = 10
TARGETS = ("h200", "v5p-8")
MODEL_NAMES = tuple(name for name in MODELS if name != "llama")

# Activations dominate the state here, and a compile takes seconds: a small vocabulary,
# and enough width that a layer computes long enough for a copy to hide behind it.
SIZES = Config(
    layers=8,
    width=2048,
    heads=16,
    key_value_heads=8,
    feed_forward=5632,
    vocabulary=2048,
    sequence=512,
    batch=64,
)
TWO_STACKS = TwoStacks(
    encoder_layers=6,
    decoder_layers=4,
    width=2048,
    heads=16,
    feed_forward=5632,
    vocabulary=2048,
    source=512,
    target=512,
    batch=48,
)
LOW_EFFORT = {"exec_time_optimization_effort": -1.0}
"""Several times faster to compile for a TPU, and a program several times slower: good
for bytes, not for seconds. It is part of the plan, and the table says so."""


def step_of(model: str) -> tuple[Any, tuple[Any, ...]]:
    """The training step of `model` in the sizes of this benchmark."""
    sizes = TWO_STACKS if model == "encoder_decoder" else SIZES
    return MODELS[model].sized(sizes)


def options_for(target: str, effort: str) -> dict[str, Any] | None:
    """The compiler options that a cell is planned with."""
    return dict(LOW_EFFORT) if target.startswith("v") and effort == "low" else None


def ends(model: str, target: str, effort: str) -> dict[str, Any]:
    """What keeping everything takes, and what the smallest budget is said to be."""
    step, args = step_of(model)
    machine, options = stowax.target(target), options_for(target, effort)
    jitted = jax.jit(step, donate_argnums=0)
    compiled = machine.compile(jitted, *args, compiler_options=options)
    keep_all = _record.total_bytes(compiled.memory_analysis())
    state = compiled.memory_analysis().argument_size_in_bytes
    plan = stowax.plan(
        step,
        *args,
        budget=int(1.01 * state),
        target=target,
        compiler_options=options,
        compiles=4,
        progress=say,
    )
    return {
        "keep_all_bytes": keep_all,
        "state_bytes": state,
        "smallest_budget": plan.smallest_budget,
        "smallest_outcome": plan.outcome,
    }


def budget_of(found: dict[str, Any], cell: int) -> int:
    """The budget of one cell: from the smallest (0) to keeping everything (9)."""
    low, high = found["smallest_budget"], found["keep_all_bytes"]
    return low + (high - low) * cell // (CELLS - 1)


def run_cell(
    model: str, target: str, effort: str, found: dict[str, Any], cell: int, verify: bool
) -> dict[str, Any]:
    """Plans one cell and writes down what the table needs of the plan."""
    step, args = step_of(model)
    budget, watch = budget_of(found, cell), Stopwatch()
    plan = stowax.plan(
        step,
        *args,
        budget=budget,
        target=target,
        compiler_options=options_for(target, effort),
        compiles=4,
        progress=say,
    )
    spent = watch.seconds()
    fitting = [b for b in plan.baselines if b.fits]
    best = min(fitting, key=lambda b: b.seconds, default=None)
    first = plan.search.trials[0]
    return {
        "budget_bytes": budget,
        "fits": plan.fits,
        "outcome": plan.outcome,
        "first_predicted_bytes": first.predicted_bytes,
        "first_compiled_bytes": first.compiled_bytes,
        "predicted_bytes": plan.predicted_device_bytes,
        "compiled_bytes": plan.device_bytes,
        "host_bytes": plan.host_bytes,
        "error_before": first.compiled_bytes / first.predicted_bytes - 1,
        "error_after": plan.device_bytes / plan.predicted_device_bytes - 1,
        "model_seconds": plan.search.model_seconds,
        "simulated_seconds": plan.step_seconds,
        "exposed_seconds": plan.proof.exposed_seconds,
        "gap": plan.gap,
        "best_baseline": best.name if best else None,
        "best_baseline_seconds": best.seconds if best else None,
        "compiles": len(plan.search.trials),
        "trials": [
            [t.predicted_bytes, t.compiled_bytes, t.step_seconds]
            for t in plan.search.trials
        ],
        "decisions": counted(plan),
        "smallest_budget_said": plan.smallest_budget,
        "solving_seconds": plan.search.solving_seconds,
        **spent,
        "verified_bytes": verified_bytes(plan, step, args) if verify else None,
    }


def counted(plan: Any) -> dict[str, int]:
    """How many values the plan keeps, offloads and recomputes."""
    names = [d.decision for d in plan.decisions]
    return {name: names.count(name) for name in ("keep", "offload", "recompute")}


def verified_bytes(plan: Any, step: Any, args: tuple[Any, ...]) -> int:
    """Compiles what the plan gives to a user, apart from the planner's own loop."""
    specs = plan.specs(*args)
    compiled = stowax.target(plan.target).compile(plan.apply(step), *specs)
    return _record.total_bytes(compiled.memory_analysis())


def options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--target", action="append", choices=TARGETS)
    parser.add_argument("--model", action="append", choices=MODEL_NAMES)
    parser.add_argument("--cell", action="append", type=int, choices=range(CELLS))
    parser.add_argument("--effort", default="low", choices=("low", "default"))
    parser.add_argument("--verify", type=int, default=3, help="cell to compile again")


def run(asked: argparse.Namespace, records: _record.Records) -> None:
    """Every cell that was asked for."""
    for target in asked.target or TARGETS:
        effort = asked.effort if target.startswith("v") else "default"
        for model in asked.model or MODEL_NAMES:
            jax.clear_caches()
            _run_series((model, target, effort), asked, records)


def _run_series(
    series: tuple[str, str, str], asked: argparse.Namespace, records: _record.Records
) -> None:
    about = dict(zip(("model", "target", "effort"), series, strict=True))
    found = records.made(
        cell_name(*series, "ends"), lambda: ends(*series), about | {"cell": "ends"}
    )
    if "error" in found:
        return
    for cell in asked.cell or range(CELLS):
        records.made(
            cell_name(*series, cell),
            lambda n=cell: run_cell(*series, found, n, verify=n == asked.verify),
            about | {"cell": cell},
        )


page = budgets_table.page
