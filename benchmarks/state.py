"""State that does not fit: what a plan makes of it, by the compilers for real chips.

- The tutorial's Adam step (4 × 7168², clip and adam): with everything on the device,
  and the smallest budget that a plan meets.
- Sixteen layers of (4096, 16384) and back, bfloat16, updated by gradient descent, at
  the smallest budget: scanned, scanned over another axis, as a Python loop.
- Llama 2 with AdamW and float32 master weights on one H200, 8 sequences of 2048 tokens:
  7B within 70 GiB of device and 96 GiB of host memory; 13B within 125 GiB; and 13B at
  the smallest budget.

    python -m benchmarks.state
    python -m benchmarks.state --case "Llama2-7B"

Writes docs/results/state.json and docs/results/state.md.
"""

import os

os.environ.setdefault("JAX_PLATFORMS", "cpu")

import argparse
import contextlib
import json
import sys
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

import stowax
from benchmarks import _record, host_weights
from benchmarks._record import Stopwatch, gib
from benchmarks.models import adam_tutorial, llama

COMMAND = "python -m benchmarks.state"
RESULT = _record.RESULTS / "state.json"
Made = tuple[Callable[..., Any], tuple[Any, ...]]


def adam(_target: Any) -> Made:
    """The tutorial's step, its loss marked."""
    adam_tutorial.compute_loss = stowax.stow(adam_tutorial.compute_loss)
    return adam_tutorial.step, adam_tutorial.arguments()


def layers(form: str) -> Callable[[Any], Made]:
    """Gradient descent on the benchmark's layers, written as `form` says."""

    def make(_target: Any) -> Made:
        @stowax.stow
        def loss(weights: Any, x: Any) -> Any:
            return jnp.mean(host_weights.FORMS[form](weights, x).astype(jnp.float32))

        def step(weights: Any, x: Any) -> Any:
            value, grads = jax.value_and_grad(loss)(weights, x)
            rate = jnp.bfloat16(0.01)
            return jax.tree.map(lambda w, g: w - rate * g, weights, grads), value

        return step, host_weights.specs_of(form)

    return make


def of_llama(size: str) -> Callable[[Any], Made]:
    """One of the published sizes, on one device."""
    return lambda target: getattr(llama, f"llama2_{size}")(target, batch=8)


CASES: dict[str, tuple[Callable[[Any], Made], str, str | None, str | None, float]] = {
    # case: the step, target, budget (None: the smallest), host budget, bar in GiB
    "tutorial's Adam, smallest": (adam, "h200", None, None, 2.35),
    "tutorial's Adam, smallest, TPU": (adam, "v5p-8", None, None, 2.45),
    "16 layers, scan": (layers("scan"), "h200", None, None, 0.51),
    "16 layers, scan over axis 1": (layers("scan, axis 1"), "h200", None, None, 0.60),
    "16 layers, loop": (layers("loop"), "h200", None, None, 0.60),
    "16 layers, scan, TPU": (layers("scan"), "v5p-8", None, None, 0.51),
    "16 layers, scan over axis 1, TPU": (
        *(layers("scan, axis 1"), "v5p-8", None, None, 0.60),
    ),
    "16 layers, loop, TPU": (layers("loop"), "v5p-8", None, None, 0.60),
    "Llama2-7B": (of_llama("7b"), "h200", "70GiB", "96GiB", 70.0),
    "Llama2-13B": (of_llama("13b"), "h200", "125GiB", None, 125.0),
    "Llama2-13B, smallest": (of_llama("13b"), "h200", None, None, 125.0),
}


def run(case: str) -> dict[str, Any]:
    """Plans one case as a user would, and writes down what the table needs."""
    make, name, budget, host_budget, bar = CASES[case]
    target = stowax.target(name)
    step, args = make(target)
    jax.clear_caches()
    watch = Stopwatch()
    plan = stowax.plan(
        step,
        *args,
        budget=budget or "64MiB",
        host_budget=host_budget,
        target=target,
        compiles=4,
        progress=lambda line: print(f"    {line}", file=sys.stderr, flush=True),
    )
    seconds = watch.seconds()
    with contextlib.suppress(UserWarning):
        compiled = target.compile(plan.apply(step), *plan.specs(*args))
    found = stowax.inspect(compiled)
    state = [d for d in plan.decisions if d.stack == "state"]
    moved = sum(d.count * d.bytes for d in state if d.decision == "offload")
    return {
        "case": case,
        "target": name,
        "budget": budget,
        "host_budget": host_budget,
        "bar_gib": bar,
        "device_bytes": plan.device_bytes,
        "again_bytes": found.memory.device.total,
        "host_bytes": plan.host_bytes,
        "state_bytes": sum(d.count * d.bytes for d in state),
        "state_moved_bytes": moved,
        "fits": plan.fits,
        "smallest_bytes": plan.smallest_budget,
        "predicted_bytes": plan.search.trials[-1].predicted_bytes,
        "step_seconds": plan.step_seconds,
        "exposed_seconds": plan.proof.exposed_seconds,
        "model_seconds": plan.search.model_seconds,
        "host_computations": sum(h.kind == "host-compute" for h in found.hazards),
        "compiles": len(plan.search.trials),
        "solving_seconds": plan.search.solving_seconds,
        **seconds,
    }


def row(line: dict[str, Any]) -> tuple[Any, ...]:
    """One row of the table."""
    reached = line["device_bytes"] <= line["bar_gib"] * 2**30
    return (
        line["case"],
        line["target"],
        line["budget"] or "smallest",
        gib(line["device_bytes"]),
        f"{line['bar_gib']:g} ({'yes' if reached else 'no'})",
        gib(line["host_bytes"]),
        f"{gib(line['state_moved_bytes'])} of {gib(line['state_bytes'])}",
        line["host_computations"],
        f"{line['step_seconds'] * 1e3:.0f}",
        f"{line['exposed_seconds'] * 1e3:.0f}",
        line["compiles"],
        f"{line['wall_seconds']:.0f}",
    )


HEAD = (
    "case",
    "target",
    "budget",
    "device GiB",
    "bar GiB (reached)",
    "host GiB",
    "state and gradients moved, GiB",
    "host computations",
    "step ms, simulated",
    "waiting ms",
    "compiles",
    "planning s",
)


def main() -> None:
    """Runs the cases that were asked for and writes the table of all."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--case", action="append", choices=CASES)
    chosen = parser.parse_args().case or list(CASES)
    known = json.loads(RESULT.read_text())["cases"] if RESULT.exists() else {}
    for case in chosen:
        print(case, file=sys.stderr, flush=True)
        known[case] = run(case)
        made = {"provenance": _record.provenance(COMMAND), "cases": known}
        _record.write_json(RESULT, made)
    rows = [row(known[case]) for case in CASES if case in known]
    text = (
        "# State in host memory: parameters, gradients, optimizer state\n\n"
        f"{_record.provenance_text(COMMAND)}\n\n"
        "*device* and *host* are compiled totals per device; *state and gradients "
        "moved* is what the plan keeps in host memory of what it could. Seconds of a "
        "step are simulated from the compiled schedule. Of Llama2-7B, parameters, "
        "gradients and moments alone are 100 GiB, of 13B 194.\n\n"
        f"{_record.table(HEAD, rows)}"
    )
    RESULT.with_suffix(".md").write_text(text)
    print(text)


if __name__ == "__main__":
    main()
