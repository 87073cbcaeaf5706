"""What a plan's last program brings on TPUs, and what it would bring by hand.

On a TPU the last of a plan's programs is the best one with more of the chip's fast
memory for each kernel. Policies gain by that option, too. For each workload and
target one plan, and the best hand-written policy of `comparison` that fits, compiled
with the option and without.

    python -m benchmarks fast_memory --fresh --case "llama2-13b, v5p-8"

`comparison` has to have the policies of a case.
"""

import argparse
from typing import Any

import jax

import stowax
from benchmarks import _record, comparison_cells
from benchmarks._record import cell_name, say
from benchmarks.comparison import policy_cell
from benchmarks.comparison_programs import FOLDER
from benchmarks.comparison_workloads import made
from stowax._survey._options import fast_memory_kib, more_fast_memory

CASES = {
    ("llama2-13b", "v5p-8"): None,
    ("paligemma2-3b", "v5p-8"): "60GiB",
    ("llama2-7b", "v6e-8"): None,
    ("llama2-7b", "v5e-16"): None,
}
"""The budget of each; `None` is all of the device, where a step does not fit it as it
is: what fits is left alone."""


def best_by_hand(name: str, target: Any, budget: int) -> str:
    """The policy of `comparison` that is the fastest of those that fit."""
    known = _record.Records("comparison", "simulated").cells.values()
    lines = comparison_cells.series(known)[name, target.name]
    limits = budget, target.host_bytes
    fitting = [
        line
        for line in lines
        if line["kind"] == "policy" and comparison_cells.fits(line, *limits)
    ]
    return min(fitting, key=lambda line: line["step_seconds"])["name"]


def case(name: str, place: str) -> dict[str, Any]:
    """Both programs of the plan, and both of the best policy."""
    target = stowax.target(place)
    jax.clear_caches()
    watch = _record.Stopwatch()
    step, specs = made(name, target)
    options = {"target": target, "cache": FOLDER, "progress": say}
    plan = stowax.plan(step, *specs, budget=CASES[name, place], **options)
    *usual, more = plan.search.trials
    before = min(
        (t for t in usual if t.step_seconds and t.compiled_bytes <= plan.budget_bytes),
        key=lambda t: t.step_seconds or 0.0,
    )
    policy = best_by_hand(name, target, plan.budget_bytes)
    by_hand = [
        policy_cell(name, target, policy, more_options)
        for more_options in ({}, more_fast_memory(target))
    ]
    kib = fast_memory_kib(target)
    assert kib is not None, f"{place} has no such option"
    return {
        "workload": name,
        "target": place,
        "budget_bytes": plan.budget_bytes,
        "fast_memory_kib": kib,
        "plan_seconds": [before.step_seconds, more.step_seconds],
        "plan_bytes": [before.compiled_bytes, more.compiled_bytes],
        "plan_compiling_seconds": [before.seconds_to_compile, more.seconds_to_compile],
        "planning_seconds": plan.search.planning_seconds,
        "policy": policy,
        "policy_seconds": [line["step_seconds"] for line in by_hand],
        "policy_bytes": [line["device_bytes"] for line in by_hand],
        "policy_compiling_seconds": [line["compiling_seconds"] for line in by_hand],
        **watch.seconds(),
    }


def _pair(values: list[Any], text: Any) -> str:
    return " → ".join(map(text, values))


def _ratio(values: list[float]) -> float:
    return values[1] / values[0]


_COLUMNS = {
    "workload": lambda c: c["workload"],
    "target": lambda c: c["target"],
    "budget GiB": lambda c: _record.gib(c["budget_bytes"]),
    "fast memory of a kernel, MiB": lambda c: _pair(
        c["fast_memory_kib"], lambda kib: f"{kib // 1024}"
    ),
    "plan, step s": lambda c: _pair(c["plan_seconds"], _record.seconds_text),
    "ratio": lambda c: f"{_ratio(c['plan_seconds']):.3f}",
    "GiB": lambda c: _pair(c["plan_bytes"], _record.gib),
    "best policy by hand": lambda c: c["policy"],
    "its step s": lambda c: _pair(c["policy_seconds"], _record.seconds_text),
    "its ratio": lambda c: f"{_ratio(c['policy_seconds']):.3f}",
    "its GiB": lambda c: _pair(c["policy_bytes"], _record.gib),
    "plan / policy": lambda c: " → ".join(
        f"{a / b:.3f}"
        for a, b in zip(c["plan_seconds"], c["policy_seconds"], strict=True)
    ),
    "compiling s, plan": lambda c: _pair(
        c["plan_compiling_seconds"], lambda seconds: f"{seconds:.0f}"
    ),
}


def page(records: _record.Records) -> str:
    """The table."""
    whole = [found for found in records.cells.values() if "error" not in found]
    return _record.page_text(records, table=_record.columns(_COLUMNS, whole))


def options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--case", action="append", choices=[cell_name(*c) for c in CASES]
    )


def run(asked: argparse.Namespace, records: _record.Records) -> None:
    """The cases that were asked for."""
    for one in CASES:
        if cell_name(*one) in (asked.case or [cell_name(*one)]):
            records.made(cell_name(*one), lambda c=one: case(*c))
