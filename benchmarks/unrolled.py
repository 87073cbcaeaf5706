"""Is an unrolled model planned as well as a scanned one?

The same model, with its layers under `lax.scan` and as a Python loop, planned for the
same budgets: the compiled total of the loop is to be at most 1.15 times the scan's.
Budgets lie evenly between the larger of the two smallest budgets and what the scanned
step takes as it is written.

    python -m benchmarks unrolled --target v5p-8 --budgets 3
"""

import argparse
import dataclasses
from typing import Any

import jax

import stowax
from benchmarks import _record
from benchmarks._record import cell_name, gib, say
from benchmarks.budgets import SIZES, TWO_STACKS, options_for
from benchmarks.models import encoder_decoder, loop_transformer, scan_transformer

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
        progress=say,
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


def ends(name: str, target: str) -> dict[str, Any]:
    """What the steps take as they are written, and the larger smallest budget."""
    both = pairs()[name]
    plain = [as_written(made, target) for made in both]
    tight = int(1.01 * plain[0].argument_size_in_bytes)
    return {
        "as_written_bytes": [_record.total_bytes(p) for p in plain],
        "smallest_budget": max(
            plan_for(made, target, tight).smallest_budget for made in both
        ),
    }


def compare(name: str, target: str, ends: dict[str, Any], part: float) -> Any:
    """Both forms of one model at a budget between the two ends."""
    low, keep_all = ends["smallest_budget"], ends["as_written_bytes"][0]
    budget = low + int((keep_all - low) * part)
    scan, loop = (plan_for(made, target, budget) for made in pairs()[name])
    return {
        "budget_bytes": budget,
        "as_written_bytes": ends["as_written_bytes"],
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


def rows_of(records: _record.Records) -> list[dict[str, Any]]:
    """The compared plans."""
    return [row for row in records.cells.values() if "ratio" in row]


def page(records: _record.Records) -> str:
    """The table."""
    rows = rows_of(records)
    worst = max((row["ratio"] for row in rows), default=0.0)
    broken = [r for r in rows if r["ratio"] > BAR or not all(r["fits"])]
    return _record.page_text(
        records,
        worst=f"{worst:.3f}",
        bar=BAR,
        broken=len(broken),
        count=len(rows),
        table=_record.columns(_COLUMNS, rows),
    )


def _both(field: str, form: Any) -> Any:
    return lambda row: " / ".join(form(value) for value in row[field])


_COLUMNS = {
    "model": lambda row: row["model"],
    "target": lambda row: row["target"],
    "budget GiB": lambda row: gib(row["budget_bytes"]),
    "as written": _both("as_written_bytes", gib),
    "fits": _both("fits", lambda fits: "yes" if fits else "**no**"),
    "compiled": _both("compiled_bytes", gib),
    "host": _both("host_bytes", gib),
    "ratio": lambda row: (
        f"{row['ratio']:.3f}" if row["ratio"] <= BAR else f"**{row['ratio']:.3f}**"
    ),
    "model ms": _both("model_seconds", lambda seconds: f"{1e3 * seconds:.1f}"),
    "planning s": _both("planning_seconds", lambda seconds: f"{seconds:.0f}"),
}


def options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--target", action="append", choices=TARGETS)
    parser.add_argument("--model", action="append", choices=sorted(pairs()))
    parser.add_argument("--budgets", type=int, default=3)


def run(asked: argparse.Namespace, records: _record.Records) -> None:
    """Every pair that was asked for."""
    for target in asked.target or TARGETS:
        for name in asked.model or pairs():
            about = {"model": name, "target": target}
            found = records.made(
                cell_name(name, target, "ends"),
                lambda n=name, t=target: ends(n, t),
                about,
            )
            if "error" in found:
                continue
            for i in range(asked.budgets):
                part = i / asked.budgets
                records.made(
                    cell_name(name, target, f"{part:.0%}"),
                    lambda n=name, t=target, e=found, p=part: compare(n, t, e, p),
                    about,
                )
