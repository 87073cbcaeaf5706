"""Ten budgets × six models × two chips: is the budget kept, and is the plan any good?

For every model and target the step is compiled once as it is written (what keeping
everything takes) and planned once for a budget that nothing can meet (what the smallest
budget is said to be). Ten budgets lie evenly between the two, both ends included. Each
cell is one `stowax.plan`, as a user calls it.

    python -m benchmarks.budgets                          everything; resumes
    python -m benchmarks.budgets --target h200 --model nnx_loop
    python -m benchmarks.budgets --effort default --cell 0 --cell 5
    python -m benchmarks.budgets --table                  only write the table again

Cells go to docs/results/budgets.jsonl as they come, the table to budgets.md beside it.
"""

import os

os.environ.setdefault("JAX_PLATFORMS", "cpu")

import argparse
import sys
from typing import Any

import jax

import stowax
from benchmarks import _record, budgets_table
from benchmarks._record import Stopwatch
from benchmarks.models import MODELS
from benchmarks.models.encoder_decoder import Config as TwoStacks
from benchmarks.models.scan_transformer import Config

CELLS = 10
LINES = _record.RESULTS / "budgets.jsonl"
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


def quiet(line: str) -> None:
    """Progress of a plan, indented below the cell's own line."""
    print(f"    {line}", file=sys.stderr, flush=True)


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
        progress=quiet,
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
    watch = Stopwatch()
    plan = stowax.plan(
        step,
        *args,
        budget=budget_of(found, cell),
        target=target,
        compiler_options=options_for(target, effort),
        compiles=4,
        progress=quiet,
    )
    spent = watch.seconds()
    fitting = [b for b in plan.baselines if b.fits]
    best = min(fitting, key=lambda b: b.seconds, default=None)
    first = plan.search.trials[0]
    return {
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


def key_of(record: dict[str, Any]) -> tuple[Any, ...]:
    """What makes a line one cell; `cell` is "ends" for the line with the two ends."""
    return tuple(record[k] for k in ("model", "target", "effort", "cell"))


def attempt(key: tuple[Any, ...], work: Any) -> dict[str, Any]:
    """The line for one cell; an error makes a line too, and is tried again later."""
    model, target, effort, cell = key
    print(f"{model} {target} {effort} {cell}", file=sys.stderr, flush=True)
    line = {"model": model, "target": target, "effort": effort, "cell": cell}
    try:
        line |= work()
    except Exception as error:
        line["error"] = f"{type(error).__name__}: {error}"[:2000]
        print(f"    {line['error']}", file=sys.stderr, flush=True)
    line |= {"date": _record.today(), "versions": _record.versions()}
    _record.append_line(LINES, line)
    return line


def run(arguments: argparse.Namespace) -> None:
    """Every cell that was asked for and is not there yet."""
    lines = [] if arguments.fresh else _record.read_lines(LINES)
    done = {key_of(line): line for line in lines if "error" not in line}
    for target in arguments.target or TARGETS:
        effort = arguments.effort if target.startswith("v") else "default"
        for model in arguments.model or MODEL_NAMES:
            jax.clear_caches()
            key = (model, target, effort, "ends")
            found = done.get(key) or attempt(
                key, lambda m=model, t=target, e=effort: ends(m, t, e)
            )
            if "error" in found:
                continue
            for cell in arguments.cell or range(CELLS):
                key = (model, target, effort, cell)
                if key in done:
                    continue
                budget = budget_of(found, cell)
                attempt(
                    key,
                    lambda k=key, f=found, b=budget: (
                        {"budget_bytes": b}
                        | run_cell(*k[:3], f, k[3], verify=k[3] == arguments.verify)
                    ),
                )
            budgets_table.write(LINES)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--target", action="append", choices=TARGETS)
    parser.add_argument("--model", action="append", choices=MODEL_NAMES)
    parser.add_argument("--cell", action="append", type=int, choices=range(CELLS))
    parser.add_argument("--effort", default="low", choices=("low", "default"))
    parser.add_argument("--verify", type=int, default=3, help="cell to compile again")
    parser.add_argument("--fresh", action="store_true", help="do what is there again")
    parser.add_argument("--table", action="store_true", help="only write the table")
    arguments = parser.parse_args()
    if not arguments.table:
        run(arguments)
    budgets_table.write(LINES)
    print(f"{LINES.with_suffix('.md')}", file=sys.stderr)


if __name__ == "__main__":
    main()
