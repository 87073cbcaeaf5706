"""What stowax costs a program that uses it: at import, at a restart, at every step.

Import: fresh processes, `import jax` and `import stowax` in turn; the median of the
pairwise ratios. Restart: a small transformer's script from its start to its first step,
by `jax.jit` and by `stowax.jit` with its plan kept, both with JAX's persistent cache
warm; the same median. Dispatch: a tiny step on the CPU, planned, by `stowax.jit`, and
under plain `jax.jit`, called in turn; the same median. Bars: 1.15 for the import, 1.1
for a restart, 1.05 for `stowax.jit`, and for what `apply` returns what two jitted
functions differ by anyway, which is measured too (`jax.jit` against itself).

    python -m benchmarks.overhead

Writes docs/results/overhead.json and docs/results/overhead.md.
"""

import os

os.environ.setdefault("JAX_PLATFORMS", "cpu")

import argparse
import statistics
import subprocess
import sys
import tempfile
import time
from typing import Any

import jax

import stowax
from benchmarks import _record
from benchmarks.models import scan_transformer
from stowax._records._plan import stored_by

COMMAND = "python -m benchmarks.overhead"
RESULT = _record.RESULTS / "overhead.json"
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


def import_seconds(module: str) -> float:
    """Seconds that a fresh interpreter takes for `import module`, by its own clock."""
    code = (
        "import time; started = time.perf_counter()\n"
        f"import {module}\n"
        "print(time.perf_counter() - started)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], check=True, capture_output=True, text=True
    )
    return float(done.stdout)


def import_pairs(count: int) -> list[tuple[float, float]]:
    """`(jax, stowax)` seconds, taken one after the other; the order alternates."""
    pairs = []
    import_seconds("jax"), import_seconds("stowax")  # files into the page cache
    for i in range(count):
        order = ("jax", "stowax") if i % 2 == 0 else ("stowax", "jax")
        found = {module: import_seconds(module) for module in order}
        pairs.append((found["jax"], found["stowax"]))
    return pairs


def restart_pairs(count: int) -> list[tuple[float, float]]:
    """`(jax, stowax)` seconds from a script's start to the end of its first step.

    Both have run before: the programs are in JAX's cache, the plan is in stowax's.
    """
    with tempfile.TemporaryDirectory() as folder:
        caches = {
            "JAX_COMPILATION_CACHE_DIR": f"{folder}/jax",
            "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
            "XDG_CACHE_HOME": folder,
        }

        def seconds(which: str) -> float:
            done = subprocess.run(
                [sys.executable, "-c", _SCRIPT, which],
                env=os.environ | caches,
                check=True,
                capture_output=True,
                text=True,
            )
            return float(done.stdout)

        # Twice each: under its plan the second run is the first to read all of it.
        for which in ("jax", "stowax") * 2:
            seconds(which)
        pairs = []
        for i in range(count):
            order = ("jax", "stowax") if i % 2 == 0 else ("stowax", "jax")
            found = {which: seconds(which) for which in order}
            pairs.append((found["jax"], found["stowax"]))
        return pairs


def slowest_imports(count: int) -> list[tuple[str, float]]:
    """The modules outside jax that `import stowax` spends most on, by `-X importtime`.

    Own seconds, grouped by top-level package; what jax itself imports is left out.
    """

    def own_seconds(statement: str) -> dict[str, float]:
        done = subprocess.run(
            [sys.executable, "-X", "importtime", "-c", statement],
            check=True,
            capture_output=True,
            text=True,
        )
        seconds: dict[str, float] = {}
        for line in done.stderr.splitlines():
            parts = line.removeprefix("import time:").split("|")
            if len(parts) == 3 and parts[0].strip().isdigit():
                seconds[parts[2].strip()] = int(parts[0]) / 1e6
        return seconds

    base, extra = own_seconds("import jax"), own_seconds("import stowax")
    packages: dict[str, float] = {}
    for module, seconds in extra.items():
        if module not in base:
            package = module.split(".")[0]
            packages[package] = packages.get(package, 0.0) + seconds
    return sorted(packages.items(), key=lambda item: -item[1])[:count]


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


def measure(imports: int, calls: int) -> dict[str, Any]:
    """Everything that the table says."""
    loaded, restarted = import_pairs(imports), restart_pairs(imports)
    plain, again, jitted, planned, args, plan = tiny_steps()
    dispatched = call_seconds(plain, planned, args, calls)
    by_jit = call_seconds(plain, jitted, args, calls)
    against_itself = call_seconds(plain, again, args, calls)

    def summary(pairs: list[tuple[float, float]]) -> dict[str, Any]:
        return {
            "first_seconds": statistics.median(first for first, _ in pairs),
            "second_seconds": statistics.median(second for _, second in pairs),
            "ratio": _record.median_ratio(pairs),
            "pairs": len(pairs),
        }

    return {
        "import": summary(loaded),
        "restart": summary(restarted),
        "slowest_imports": slowest_imports(8),
        "dispatch": summary(dispatched),
        "dispatch_of_jit": summary(by_jit),
        "dispatch_of_itself": summary(against_itself),
        "planned_outcome": plan.outcome,
        "planned_stored": [
            stored_by(plan.decisions, s.name) for s in plan.program.stacks
        ],
    }


def write(found: dict[str, Any]) -> None:
    """The JSON and the table."""
    _record.write_json(RESULT, _record.provenance(COMMAND) | found)
    extra = ", ".join(
        f"{name} {1e3 * s:.0f} ms" for name, s in found["slowest_imports"]
    )

    def row(what: str, field: str, unit: float, bar: str) -> list[str]:
        one = found[field]
        return [
            what,
            f"{unit * one['first_seconds']:.3g}",
            f"{unit * one['second_seconds']:.3g}",
            f"{one['ratio']:.3f}",
            bar,
        ]

    rows = [
        row("import stowax / import jax, ms", "import", 1e3, f"≤ {IMPORT_BAR}"),
        row("restart, planned / jax.jit, s", "restart", 1.0, f"≤ {RESTART_BAR}"),
        row("planned step / jax.jit, µs per call", "dispatch", 1e6, "about 1"),
        row(
            "stowax.jit / jax.jit, µs per call", "dispatch_of_jit", 1e6, f"≤ {JIT_BAR}"
        ),
        row("jax.jit / jax.jit, µs per call", "dispatch_of_itself", 1e6, "(noise)"),
    ]
    text = [
        "# What stowax costs a program that uses it\n",
        _record.provenance_text(COMMAND),
        f"Medians of {found['import']['pairs']} pairs of fresh processes and of "
        f"{found['dispatch']['pairs']} pairs of calls, each timed until it returns; "
        "the ratio is the median of the pairwise ratios. Outcome of the planned step: "
        f"{found['planned_outcome']}.\n",
        _record.table(("what", "jax", "stowax", "ratio", "bar"), rows),
        "What `import stowax` brings that `import jax` does not, own time under "
        f"`-X importtime`, which slows imports down: {extra}.\n",
    ]
    RESULT.with_suffix(".md").write_text("\n".join(text))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--imports", type=int, default=15, help="pairs of processes")
    parser.add_argument("--calls", type=int, default=3000, help="pairs of calls")
    arguments = parser.parse_args()
    write(measure(arguments.imports, arguments.calls))


if __name__ == "__main__":
    main()
