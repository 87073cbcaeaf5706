"""What an audit's remedies bring a training loop, and what the audit itself costs it.

Remedies: three loops as the documentation of JAX libraries writes them, each with every
fix by itself and with all of them, and a naive loop; in turns, so that the machine's
noise is shared. A ratio is the median over rounds of seconds a step with the fix over
those without. Cost: a step of an MLP with Adam by itself and under `stowax.audit()`,
in turns; the bar is 1.3.

    python -m benchmarks audit --fresh
"""

import argparse
import statistics
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

import stowax
from benchmarks import _record
from benchmarks.models.training_loops import FIXES, LOOPS, Run, Sizes

BAR = 1.3
SIZES = {"MLP, optax": Sizes(64, 256, 3), "naive": Sizes(8, 256)}
_LEAST_BYTES = 1 << 14  # buffers of these models are smaller than those worth the care
_WHAT = {
    "donate": "state donated",
    "prefetch": "batches by stowax.prefetch",
    "late": "losses read at the end",
}


def seconds_a_step(run: Run, steps: int) -> float:
    """Of one call: what it dispatched is done, as the losses are read."""
    started = time.perf_counter()
    run(steps)
    return (time.perf_counter() - started) / steps


def in_turns(
    runs: dict[str, Callable[[], float]], rounds: int
) -> dict[str, list[float]]:
    """Every one of `runs` in every round, the order reversed every other time."""
    found: dict[str, list[float]] = {name: [] for name in runs}
    for k in range(rounds):
        for name in list(runs)[:: 1 if k % 2 == 0 else -1]:
            found[name].append(runs[name]())
    return found


def remedies(name: str, rounds: int, steps: int) -> list[dict[str, Any]]:
    """A row per fix of one loop: transfers and seconds a step, and the ratio."""
    sizes = SIZES.get(name, SIZES["MLP, optax"])
    variants: dict[str, tuple[str, ...]] = {"as it is": ()}
    if name != "naive":
        variants |= {_WHAT[fix]: (fix,) for fix in FIXES}
    variants["all"] = FIXES
    runs = {what: LOOPS[name](fixes, sizes) for what, fixes in variants.items()}
    rows = []
    for run in runs.values():
        run(3)
    seconds = in_turns(
        {w: lambda run=run: seconds_a_step(run, steps) for w, run in runs.items()},
        rounds,
    )
    for what, run in runs.items():
        with stowax.audit(least_bytes=_LEAST_BYTES) as audit:
            run(steps)
        pairs = [*zip(seconds["as it is"], seconds[what], strict=True)]
        rows.append(
            {
                "loop": name,
                "fix": what,
                "transfers": round(audit.record.transfers, 2),
                "findings": sorted({f.kind for f in audit.findings}),
                "seconds": statistics.median(seconds[what]),
                "ratio": _record.median_ratio(pairs),
            }
        )
    return rows


def _adam_loop(width: int, layers: int, rows: int) -> tuple[Run, int]:
    """A loop that hands over NumPy and reads its loss, and its number of leaves."""
    tx = optax.adam(1e-3)
    params: Any = [
        {"w": jnp.ones((width, width)) * 0.01, "b": jnp.zeros(width)}
        for _ in range(layers)
    ]
    state = tx.init(params)

    def loss_fn(params: Any, x: Any) -> Any:
        for layer in params:
            x = jnp.tanh(x @ layer["w"] + layer["b"])
        return (x**2).mean()

    @jax.jit
    def step(params: Any, state: Any, x: Any) -> Any:
        loss, grads = jax.value_and_grad(loss_fn)(params, x)
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state, loss

    random = np.random.default_rng(0)
    batches = [random.normal(size=(rows, width)).astype(np.float32) for _ in range(4)]

    def run(steps: int) -> list[Any]:
        nonlocal params, state
        losses = []
        for k in range(steps):
            params, state, loss = step(params, state, batches[k % 4])
            losses.append(float(loss))
        return losses

    return run, len(jax.tree.leaves((params, state)))


def _eager_loop(operations: int) -> tuple[Run, int]:
    """A jitted step, and as many operations that are dispatched by themselves."""
    step = jax.jit(lambda w, x: (w - x, jnp.sum(w)))
    x = jnp.ones((64, 64))
    w = x

    def run(steps: int) -> list[Any]:
        nonlocal w
        losses = []
        for _ in range(steps):
            w, loss = step(w, x)
            for _ in range(operations // 2):
                w = w * 1.0 + x
            losses.append(float(loss))
        return losses

    return run, 1


def costs(rounds: int) -> list[dict[str, Any]]:
    """A row per loop: seconds a step, and how many times as long under an audit."""
    cases = {
        "4 layers of 64": (_adam_loop(64, 4, 64), 400),
        "10 layers of 256": (_adam_loop(256, 10, 256), 40),
        "20 layers of 512": (_adam_loop(512, 20, 128), 12),
        "20 operations outside of jit": (_eager_loop(20), 400),
    }
    rows = []
    for name, ((run, leaves), steps) in cases.items():

        def audited(run: Run = run, steps: int = steps) -> float:
            with stowax.audit(steps=steps + 1):
                return seconds_a_step(run, steps)

        def alone(run: Run = run, steps: int = steps) -> float:
            return seconds_a_step(run, steps)

        run(5)
        found = in_turns({"alone": alone, "audited": audited}, rounds)
        pairs = [*zip(found["alone"], found["audited"], strict=True)]
        rows.append(
            {
                "loop": name,
                "leaves": leaves,
                "steps": steps,
                "seconds": statistics.median(found["alone"]),
                "ratio": _record.median_ratio(pairs),
                "bar": BAR,
            }
        )
    return rows


_FIXES = {
    "loop": lambda row: row["loop"],
    "fix": lambda row: row["fix"],
    "transfers a step": lambda row: f"{row['transfers']:g}",
    "findings": lambda row: ", ".join(row["findings"]) or "none",
    "ms a step": lambda row: f"{1e3 * row['seconds']:.2f}",
    "ratio": lambda row: f"{row['ratio']:.2f}",
}
_COSTS = {
    "loop": lambda row: row["loop"],
    "arrays of state": lambda row: row["leaves"],
    "ms a step": lambda row: f"{1e3 * row['seconds']:.2f}",
    "audited": lambda row: f"{row['ratio']:.2f}",
    "bar": lambda row: f"≤ {row['bar']}",
}


def rows_of(records: _record.Records, column: str) -> list[dict[str, Any]]:
    """The rows that have `column`: `fix` of the remedies, `leaves` of the costs."""
    return [row for row in records.cells.values() if column in row]


def page(records: _record.Records) -> str:
    """The tables."""
    fixes = rows_of(records, "fix")
    return _record.page_text(
        records,
        steps=fixes[0]["steps"],
        rounds=fixes[0]["rounds"],
        fixes=_record.columns(_FIXES, fixes),
        costs=_record.columns(_COSTS, rows_of(records, "leaves")),
    )


def options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--rounds", type=int, default=15, help="rounds in turns")
    parser.add_argument("--steps", type=int, default=60, help="steps in each")


def run(asked: argparse.Namespace, records: _record.Records) -> None:
    """Every loop that is not there yet, and what an audit costs."""
    about = {"rounds": asked.rounds, "steps": asked.steps}
    for name in LOOPS:
        if records.known(_record.cell_name(name, "all")) is None:
            for row in remedies(name, asked.rounds, asked.steps):
                records.add(_record.cell_name(name, row["fix"]), row | about)
    if not rows_of(records, "leaves") or asked.fresh:
        for row in costs(asked.rounds):
            cell = _record.cell_name("cost", row["loop"])
            records.add(cell, row | {"rounds": asked.rounds})
