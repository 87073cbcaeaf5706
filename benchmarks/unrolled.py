"""Is an unrolled model planned as well as a scanned one?

The same model, with its layers under `lax.scan` and as a Python loop, planned for the
same budgets: the compiled total of the loop is to be at most 1.15 times the scan's.
Budgets lie evenly between the larger of the two smallest budgets and what the scanned
step takes as it is written.

    python -m benchmarks.unrolled
    python -m benchmarks.unrolled --target v5p-8 --budgets 3

Writes docs/results/unrolled.json and docs/results/unrolled.md.
"""

import os

os.environ.setdefault("JAX_PLATFORMS", "cpu")

import argparse
import dataclasses
import sys
from typing import Any

import jax

import stowax
from benchmarks import _record
from benchmarks._record import gib
from benchmarks.budgets import SIZES, TWO_STACKS, options_for, quiet
from benchmarks.models import encoder_decoder, loop_transformer, scan_transformer

COMMAND = "python -m benchmarks.unrolled"
RESULT = _record.RESULTS / "unrolled.json"
BAR = 1.15
TARGETS = ("h200", "v5p-8")


def pairs() -> dict[str, tuple[Any, Any]]:
    """Per model, the scanned and the unrolled step, each with its arguments."""
    unrolled = dataclasses.replace(TWO_STACKS, unrolled=True)
    return {
        "transformer": (scan_transformer.sized(SIZES), loop_transformer.sized(SIZES)),
        "encoder_decoder": (
            encoder_decoder.sized(TWO_STACKS),
            encoder_decoder.sized(unrolled),
        ),
    }


def plan_for(made: Any, target: str, budget: int) -> Any:
    """A plan for `(step, args)`."""
    step, args = made
    jax.clear_caches()
    return stowax.plan(
        step,
        *args,
        budget=budget,
        target=target,
        compiler_options=options_for(target, "low"),
        compiles=4,
        progress=quiet,
    )


def as_written(made: Any, target: str) -> Any:
    """XLA's memory figures of the step without a plan."""
    step, args = made
    jitted = jax.jit(step, donate_argnums=0)
    options = options_for(target, "low")
    return (
        stowax.target(target)
        .compile(jitted, *args, compiler_options=options)
        .memory_analysis()
    )


def compare(name: str, target: str, count: int) -> list[dict[str, Any]]:
    """Both forms of one model at `count` budgets."""
    scanned, looped = pairs()[name]
    plain = [as_written(made, target) for made in (scanned, looped)]
    keep_all, loop_keep_all = (_record.total_bytes(p) for p in plain)
    tight = int(1.01 * plain[0].argument_size_in_bytes)
    low = max(
        plan_for(made, target, tight).smallest_budget for made in (scanned, looped)
    )
    rows = []
    for i in range(count):
        budget = low + (keep_all - low) * i // count
        print(f"{name} {target} {gib(budget)} GiB", file=sys.stderr, flush=True)
        scan, loop = (plan_for(made, target, budget) for made in (scanned, looped))
        rows.append(
            {
                "model": name,
                "target": target,
                "budget_bytes": budget,
                "as_written_bytes": [keep_all, loop_keep_all],
                "fits": [scan.fits, loop.fits],
                "compiled_bytes": [scan.device_bytes, loop.device_bytes],
                "host_bytes": [scan.host_bytes, loop.host_bytes],
                "model_seconds": [scan.search.model_seconds, loop.search.model_seconds],
                "simulated_seconds": [scan.step_seconds, loop.step_seconds],
                "planning_seconds": [
                    scan.search.planning_seconds,
                    loop.search.planning_seconds,
                ],
                "ratio": loop.device_bytes / scan.device_bytes,
            }
        )
    return rows


def write(rows: list[dict[str, Any]]) -> None:
    """The JSON and the table."""
    _record.write_json(RESULT, _record.provenance(COMMAND) | {"rows": rows})
    worst = max((row["ratio"] for row in rows), default=0.0)
    broken = [r for r in rows if r["ratio"] > BAR or not all(r["fits"])]
    text = [
        "# The same model scanned and unrolled\n",
        _record.provenance_text(COMMAND),
        "v5p-8 with `exec_time_optimization_effort=-1.0`. Each pair of figures is "
        "scan / loop; the ratio is of the compiled totals.\n",
        f"**Worst ratio {worst:.3f}, to be at most {BAR}; {len(broken)} of {len(rows)} "
        "rows break a bar.**\n",
        _record.table(_HEAD, [_row(row) for row in rows]),
    ]
    RESULT.with_suffix(".md").write_text("\n".join(text))


_HEAD = (
    "model",
    "target",
    "budget GiB",
    "as written",
    "fits",
    "compiled",
    "host",
    "ratio",
    "model ms",
    "planning s",
)


def _row(row: dict[str, Any]) -> list[str]:
    def both(field: str, form: Any) -> str:
        return " / ".join(form(value) for value in row[field])

    return [
        row["model"],
        row["target"],
        gib(row["budget_bytes"]),
        both("as_written_bytes", gib),
        both("fits", lambda fits: "yes" if fits else "**no**"),
        both("compiled_bytes", gib),
        both("host_bytes", gib),
        f"{row['ratio']:.3f}" if row["ratio"] <= BAR else f"**{row['ratio']:.3f}**",
        both("model_seconds", lambda seconds: f"{1e3 * seconds:.1f}"),
        both("planning_seconds", lambda seconds: f"{seconds:.0f}"),
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--target", action="append", choices=TARGETS)
    parser.add_argument("--model", action="append", choices=sorted(pairs()))
    parser.add_argument("--budgets", type=int, default=4)
    arguments = parser.parse_args()
    rows: list[dict[str, Any]] = []
    for target in arguments.target or TARGETS:
        for name in arguments.model or pairs():
            rows += compare(name, target, arguments.budgets)
            write(rows)


if __name__ == "__main__":
    main()
