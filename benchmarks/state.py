"""State that does not fit: what a plan makes of it, by the compilers for real chips.

- The tutorial's Adam step (4 × 7168², clip and adam): with everything on the device,
  and the smallest budget that a plan meets.
- Sixteen layers of (4096, 16384) and back, bfloat16, updated by gradient descent, at
  the smallest budget: scanned, scanned over another axis, as a Python loop.
- Llama 2 with AdamW and float32 master weights on one H200, 8 sequences of 2048 tokens:
  7B within 70 GiB of device and 96 GiB of host memory; 13B within 125 GiB; and 13B at
  the smallest budget.

    python -m benchmarks state --case "Llama2-7B"
"""

import argparse
import contextlib
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

import stowax
from benchmarks import _record
from benchmarks._record import Stopwatch, gib, say
from benchmarks.models import adam_tutorial, host_layers, llama

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
            return jnp.mean(host_layers.FORMS[form](weights, x).astype(jnp.float32))

        def step(weights: Any, x: Any) -> Any:
            value, grads = jax.value_and_grad(loss)(weights, x)
            rate = jnp.bfloat16(0.01)
            return jax.tree.map(lambda w, g: w - rate * g, weights, grads), value

        return step, host_layers.specs_of(form)

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


def planned(case: str) -> dict[str, Any]:
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
        progress=say,
    )
    seconds = watch.seconds()
    with contextlib.suppress(UserWarning):
        compiled = target.compile(plan.apply(step), *plan.specs(*args))
    found = stowax.inspect(compiled)
    state = [d for d in plan.decisions if d.stack == "state"]
    moved = sum(d.count * d.bytes for d in state if d.decision == "offload")
    return {
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


_COLUMNS = {
    "case": lambda c: c["case"],
    "target": lambda c: c["target"],
    "budget": lambda c: c["budget"] or "smallest",
    "device GiB": lambda c: gib(c["device_bytes"]),
    "bar GiB (reached)": lambda c: f"{c['bar_gib']:g} ({reached(c)})",
    "host GiB": lambda c: gib(c["host_bytes"]),
    "state and gradients moved, GiB": lambda c: (
        f"{gib(c['state_moved_bytes'])} of {gib(c['state_bytes'])}"
    ),
    "host computations": lambda c: c["host_computations"],
    "step ms, simulated": lambda c: f"{c['step_seconds'] * 1e3:.0f}",
    "waiting ms": lambda c: f"{c['exposed_seconds'] * 1e3:.0f}",
    "compiles": lambda c: c["compiles"],
    "planning s": lambda c: f"{c['wall_seconds']:.0f}",
}


def reached(case: dict[str, Any]) -> str:
    """Whether a plan takes no more than its bar."""
    return "yes" if case["device_bytes"] <= case["bar_gib"] * 2**30 else "no"


def page(records: _record.Records) -> str:
    """The table of all cases."""
    found = [records.cells.get(case, {"error": ""}) for case in CASES]
    whole = [case for case in found if "error" not in case]
    return _record.page_text(records, table=_record.columns(_COLUMNS, whole))


def options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--case", action="append", choices=CASES)


def run(asked: argparse.Namespace, records: _record.Records) -> None:
    """The cases that were asked for."""
    for case in asked.case or CASES:
        records.made(case, lambda c=case: planned(c), {"case": case})
