"""What a plan's last program brings on TPUs, and what it would bring by hand.

On a TPU the last of a plan's programs is the best one with more of the chip's fast
memory for each kernel. Policies gain by that option, too. For each workload and
target one plan, and the best hand-written policy of `comparison` that fits, compiled
with the option and without.

    python -m benchmarks.fast_memory                           all cases
    python -m benchmarks.fast_memory --case llama2-13b v5p-8   one of them, again

Writes docs/results/fast_memory.json and docs/results/fast_memory.md. `comparison` has
to have the policies of a case.
"""

import os

os.environ.setdefault("JAX_PLATFORMS", "cpu")

import argparse
import json
import sys
from typing import Any

import jax

import stowax
from benchmarks import _record, comparison_cells
from benchmarks.comparison import LINES, policy_cell
from benchmarks.comparison_programs import FOLDER
from benchmarks.comparison_workloads import made
from stowax._survey._options import fast_memory_kib, more_fast_memory

COMMAND = "python -m benchmarks.fast_memory"
RESULT = _record.RESULTS / "fast_memory.json"
CASES = {
    ("llama2-13b", "v5p-8"): None,
    ("paligemma2-3b", "v5p-8"): "60GiB",
    ("llama2-7b", "v6e-8"): None,
    ("llama2-7b", "v5e-16"): None,
}
"""The budget of each; `None` is all of the device, where a step does not fit it as it
is: what fits is left alone."""


def quiet(line: str) -> None:
    print(f"    {line}", file=sys.stderr, flush=True)


def best_by_hand(name: str, target: Any, budget: int) -> str:
    """The policy of `comparison` that is the fastest of those that fit."""
    lines = comparison_cells.series(_record.read_lines(LINES))[name, target.name]
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
    options = {"target": target, "cache": FOLDER, "progress": quiet}
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
        "date": _record.today(),
        **watch.seconds(),
    }


_HEAD = (
    "workload",
    "target",
    "budget GiB",
    "fast memory of a kernel, MiB",
    "plan, step s",
    "ratio",
    "GiB",
    "best policy by hand",
    "its step s",
    "ratio",
    "GiB",
    "plan / policy",
    "compiling s, plan",
)


def _pair(values: list[Any], text: Any) -> str:
    return " → ".join(map(text, values))


def _ratio(values: list[float]) -> float:
    return values[1] / values[0]


def _row(found: dict[str, Any]) -> list[str]:
    plan, policy = found["plan_seconds"], found["policy_seconds"]
    return [
        found["workload"],
        found["target"],
        _record.gib(found["budget_bytes"]),
        _pair(found["fast_memory_kib"], lambda kib: f"{kib // 1024}"),
        _pair(plan, _record.seconds_text),
        f"{_ratio(plan):.3f}",
        _pair(found["plan_bytes"], _record.gib),
        found["policy"],
        _pair(policy, _record.seconds_text),
        f"{_ratio(policy):.3f}",
        _pair(found["policy_bytes"], _record.gib),
        " → ".join(f"{a / b:.3f}" for a, b in zip(plan, policy, strict=True)),
        _pair(found["plan_compiling_seconds"], lambda seconds: f"{seconds:.0f}"),
    ]


def write(cases: list[dict[str, Any]]) -> None:
    """The JSON and the table."""
    _record.write_json(RESULT, _record.provenance(COMMAND) | {"cases": cases})
    dates = [found["date"] for found in cases]
    text = [
        "# More of a TPU's fast memory, the last program of a plan\n",
        _record.provenance_text(COMMAND, dates=dates),
        "Before the arrow what libtpu gives a "
        "kernel by default, behind it what the last program of a plan has. Bytes are "
        "per chip, seconds simulated from the compiled schedules; compiling is of the "
        "wall, 0 where a program was kept.\n",
        _record.table(_HEAD, map(_row, cases)),
    ]
    RESULT.with_suffix(".md").write_text("\n".join(text))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument(
        "--case", action="append", nargs=2, metavar=("WORKLOAD", "TARGET")
    )
    asked = [tuple(one) for one in parser.parse_args().case or ()]
    if unknown := [one for one in asked if one not in CASES]:
        known_names = ", ".join(map(" ".join, CASES))
        parser.error(f"--case {' '.join(unknown[0])}: not one of {known_names}")
    old = json.loads(RESULT.read_text())["cases"] if RESULT.exists() else []
    known = {(found["workload"], found["target"]): found for found in old}
    for one in asked or CASES:
        print(" ".join(one), file=sys.stderr, flush=True)
        known[one] = case(*one)
        write(list(known.values()))


if __name__ == "__main__":
    main()
