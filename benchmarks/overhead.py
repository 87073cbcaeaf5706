"""What stowax costs a program that uses it: at import, at a restart, at every step.

Import: fresh processes, `import jax` and `import stowax` in turn; the median of the
pairwise ratios. Restart: a small transformer's script from its start to its first step,
by `jax.jit` and by `stowax.jit` with its plan kept, both with JAX's persistent cache
warm; the same median. Dispatch: a tiny step on the CPU, planned, by `stowax.jit`, and
under plain `jax.jit`, called in turn; the same median. Bars: 1.15 for the import, 1.1
for a restart, 1.05 for `stowax.jit`, and for what `apply` returns what two jitted
functions differ by anyway, which is measured too (`jax.jit` against itself).

    python -m benchmarks overhead --fresh
"""

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from typing import Any

import jax

import stowax
from benchmarks import _record
from benchmarks.models import scan_transformer
from stowax._records._plan import stored_by

IMPORT_BAR = 1.15
JIT_BAR = 1.05
RESTART_BAR = 1.1
_WARM_UP = 20

_SCRIPT = """
import sys, time
started = time.perf_counter()
import jax
from benchmarks.models import scan_transformer
config = scan_transformer.Config(layers=8, width=256, heads=8, key_value_heads=4,
    feed_forward=688, vocabulary=2048, sequence=128, batch=8)
step = scan_transformer.make_step(config)
state = jax.tree.map(jax.numpy.copy, scan_transformer.initial_state(config))
batch = scan_transformer.random_batch(config)
if sys.argv[1] == "jax":
    jitted = jax.jit(step, donate_argnums=0)
else:
    import stowax
    jitted = stowax.jit(step, donate_argnums=0, budget="60%", progress=False)
jax.block_until_ready(jitted(state, batch))
print(time.perf_counter() - started)
"""


def printed(arguments: list[str], environment: dict[str, str] | None = None) -> float:
    """The number that a fresh interpreter prints."""
    done = subprocess.run(
        [sys.executable, "-c", *arguments],
        env=environment,
        check=True,
        capture_output=True,
        text=True,
    )
    return float(done.stdout)


def import_seconds(module: str) -> float:
    """Seconds that a fresh interpreter takes for `import module`, by its own clock."""
    code = "import time; started = time.perf_counter()\n"
    code += f"import {module}\nprint(time.perf_counter() - started)"
    return printed([code])


def in_turn(count: int, seconds: Callable[[str], float]) -> list[tuple[float, float]]:
    """`(jax, stowax)` seconds, taken one after the other; the order alternates."""
    pairs = []
    for i in range(count):
        order = ("jax", "stowax") if i % 2 == 0 else ("stowax", "jax")
        found = {which: seconds(which) for which in order}
        pairs.append((found["jax"], found["stowax"]))
    return pairs


def import_pairs(count: int) -> list[tuple[float, float]]:
    """Seconds of both imports."""
    import_seconds("jax"), import_seconds("stowax")  # files into the page cache
    return in_turn(count, import_seconds)


def restart_pairs(count: int) -> list[tuple[float, float]]:
    """Seconds from a script's start to the end of its first step.

    Both have run before: the programs are in JAX's cache, the plan is in stowax's.
    """
    with tempfile.TemporaryDirectory() as folder:
        caches = {
            "JAX_COMPILATION_CACHE_DIR": f"{folder}/jax",
            "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
            "XDG_CACHE_HOME": folder,
        }

        def seconds(which: str) -> float:
            return printed([_SCRIPT, which], os.environ | caches)

        # Twice each: under its plan the second run is the first to read all of it.
        for which in ("jax", "stowax") * 2:
            seconds(which)
        return in_turn(count, seconds)


def call_seconds(
    left: Any, right: Any, args: tuple[Any, ...], calls: int
) -> list[tuple[float, float]]:
    """Seconds until each of two jitted steps returns, call by call in turn.

    The results are waited for outside of the time taken: this is dispatch. Every state
    is threaded through its own step.
    """
    state, batch = args
    states = [jax.tree.map(jax.numpy.copy, state) for _ in range(2)]
    pairs = []
    for i in range(calls + _WARM_UP):
        found = [0.0, 0.0]
        for which in (0, 1) if i % 2 == 0 else (1, 0):
            step, before = (left, right)[which], states[which]
            started = time.perf_counter()
            states[which], _ = step(before, batch)
            found[which] = time.perf_counter() - started
            jax.block_until_ready(states[which])
        if i >= _WARM_UP:
            pairs.append((found[0], found[1]))
    return pairs


def tiny_steps() -> tuple[Any, Any, Any, Any, tuple[Any, ...], Any]:
    """A tiny step under `jax.jit` twice, `stowax.jit`, a plan; its arguments; the plan.

    `stowax.jit` finds that it fits as it is, and runs the same program.
    """
    config = scan_transformer.Config(
        layers=2,
        width=16,
        heads=2,
        key_value_heads=1,
        feed_forward=16,
        vocabulary=16,
        sequence=16,
        batch=4,
    )
    step = scan_transformer.make_step(config)
    args = (
        scan_transformer.initial_state(config),
        scan_transformer.random_batch(config),
    )
    whole = stowax.plan(step, *args, budget=1 << 30, donate=True, progress=False)
    middle = (whole.device_bytes + whole.smallest_budget) // 2
    plan = stowax.plan(step, *args, budget=middle, progress=False)
    # Two functions, so that each has a cache of its own.
    plain, again = (
        jax.jit(lambda s, b: step(s, b), donate_argnums=plan.program.donate_argnums)
        for _ in range(2)
    )
    donated = plan.program.donate_argnums
    jitted = stowax.jit(step, donate_argnums=donated, progress=False)
    return plain, again, jitted, plan.apply(step), args, plan


def summary(pairs: list[tuple[float, float]]) -> dict[str, Any]:
    """Medians of pairs, and of their ratios."""
    return {
        "first_seconds": statistics.median(first for first, _ in pairs),
        "second_seconds": statistics.median(second for _, second in pairs),
        "ratio": _record.median_ratio(pairs),
        "pairs": len(pairs),
    }


def dispatches(calls: int) -> dict[str, dict[str, Any]]:
    """Calls of a tiny step: planned, by `stowax.jit`, and of `jax.jit` twice."""
    plain, again, jitted, planned, args, plan = tiny_steps()
    stored = [stored_by(plan.decisions, s.name) for s in plan.program.stacks]
    about = {"planned_outcome": plan.outcome, "planned_stored": stored}
    return {
        "dispatch": summary(call_seconds(plain, planned, args, calls)) | about,
        "dispatch_of_jit": summary(call_seconds(plain, jitted, args, calls)),
        "dispatch_of_itself": summary(call_seconds(plain, again, args, calls)),
    }


ROWS = {
    # Cell: what, its unit, the bar in words, the bar.
    "import": ("import stowax / import jax, ms", 1e3, f"≤ {IMPORT_BAR}", IMPORT_BAR),
    "restart": (
        *("restart, planned / jax.jit, s", 1.0),
        *(f"≤ {RESTART_BAR}", RESTART_BAR),
    ),
    "dispatch": ("planned step / jax.jit, µs per call", 1e6, "about 1", None),
    "dispatch_of_jit": (
        *("stowax.jit / jax.jit, µs per call", 1e6),
        *(f"≤ {JIT_BAR}", JIT_BAR),
    ),
    "dispatch_of_itself": ("jax.jit / jax.jit, µs per call", 1e6, "(noise)", None),
}


def page(records: _record.Records) -> str:
    """The table."""
    found = records.cells
    rows = [
        (
            what,
            f"{unit * found[cell]['first_seconds']:.3g}",
            f"{unit * found[cell]['second_seconds']:.3g}",
            f"{found[cell]['ratio']:.3f}",
            bar,
        )
        for cell, (what, unit, bar, _) in ROWS.items()
        if "ratio" in found.get(cell, {})
    ]
    return _record.page_text(
        records,
        processes=found["import"]["pairs"],
        calls=found["dispatch"]["pairs"],
        outcome=found["dispatch"]["planned_outcome"],
        table=_record.table(("what", "jax", "stowax", "ratio", "bar"), rows),
    )


def options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--imports", type=int, default=15, help="pairs of processes")
    parser.add_argument("--calls", type=int, default=3000, help="pairs of calls")


def run(asked: argparse.Namespace, records: _record.Records) -> None:
    """Everything that the table says."""
    records.made("import", lambda: summary(import_pairs(asked.imports)))
    records.made("restart", lambda: summary(restart_pairs(asked.imports)))
    if any(records.known(cell) is None for cell in ROWS if cell.startswith("dispatch")):
        for cell, figures in dispatches(asked.calls).items():
            records.add(cell, figures)
