"""stowax's plans beside hand-written checkpoint policies, workload by workload.

For every workload and target: what the step takes as it is written and the smallest
budget there is give eight budgets; for them `stowax.plans` as a user calls it, and
XLA's own rematerialization told of a chip that small. Each hand-written policy is
compiled once. Bytes are XLA's, seconds are simulated from the compiled schedules, all
by the same reader.

    python -m benchmarks comparison --workload llama2-13b --target v5p-8
    python -m benchmarks comparison --workload vit-g --kind policy
    python -m benchmarks comparison --fresh --kind plan --cell 3
"""

import argparse
import time
from collections.abc import Callable
from typing import Any

import jax

import stowax
from benchmarks import comparison_policies, comparison_programs, comparison_table
from benchmarks._record import Records, cell_name, gib, say
from benchmarks.comparison_plans import TINY, plans_of
from benchmarks.comparison_policies import PLAN, XLA
from benchmarks.comparison_workloads import WORKLOADS, made
from stowax._hardware._gpu_targets import GPU_CHIPS, gpu_memory_bytes

BUDGETS = 8
KINDS = ("ends", "policy", "plan", "xla")
Work = Callable[[], dict[str, Any]]


def jitted(name: str, step: Any) -> Any:
    """A hand-written step under `jax.jit`, its state donated."""
    if hasattr(step, "lower"):
        return step
    return jax.jit(step, donate_argnums=WORKLOADS[name].donated)


def compiled(
    name: str, target: Any, what: tuple[Any, ...], options: dict[str, Any]
) -> dict[str, Any]:
    """Figures of a step and its specs, from the cache where it was compiled before."""
    step, specs = what
    started = time.perf_counter()
    found = comparison_programs.figures(target, jitted(name, step), specs, options)
    return found | {"options": options, "seconds": time.perf_counter() - started}


def ends(name: str, target: Any) -> dict[str, Any]:
    """What keeping everything takes, and what the smallest budget is said to be.

    The largest budget is the chip's own where keeping everything does not fit it.
    """
    step, specs = made(name, target)
    written = compiled(name, target, (step, specs), {})
    if "refused" in written:
        raise RuntimeError(written["refused"])
    smallest, planning_seconds = smallest_budget(step, specs, target)
    keep_all = written.get("device_bytes") or target.device_bytes + 1
    return written | {
        "keep_all_bytes": keep_all,
        "largest_budget": min(keep_all, target.device_bytes),
        "smallest_budget": smallest,
        "smallest_budget_is": "compiled",
        "chip_bytes": target.device_bytes,
        "host_bytes_allowed": target.host_bytes,
        "planning_seconds": planning_seconds,
    }


def smallest_budget(
    step: Any, specs: tuple[Any, ...], target: Any
) -> tuple[int, float]:
    """Bytes of the smallest program that was compiled, and the seconds that it took.

    What a plan only predicts to be the smallest budget is planned for.
    """
    cache = comparison_programs.FOLDER
    asking: dict[str, Any] = {"target": target, "cache": cache, "progress": say}
    asking["compiles"] = 4  # bytes are asked for, not seconds
    plan = stowax.plan(step, *specs, budget=TINY, **asking)
    seconds = plan.search.planning_seconds
    if plan.search.smallest_budget_is == "predicted":
        plan = stowax.plan(step, *specs, budget=plan.smallest_budget, **asking)
        seconds += plan.search.planning_seconds
    if plan.search.smallest_budget_is == "compiled":
        return plan.smallest_budget, seconds
    return plan.budget_bytes if plan.fits else plan.device_bytes, seconds


def budget_of(found: dict[str, Any], cell: int) -> int:
    """The budget of one cell: from the smallest (0) to keeping everything (7)."""
    low, high = found["smallest_budget"], found["largest_budget"]
    return low + max(0, high - low) * cell // (BUDGETS - 1)


def policy_cell(
    name: str, target: Any, policy: str, more: dict[str, Any] | None = None
) -> dict[str, Any]:
    """One hand-written policy, compiled, with `more` options than a plan would get."""
    workload = WORKLOADS[name]
    if policy in workload.by_hand:
        what = workload.by_hand[policy](target)
    else:
        known = comparison_policies.policies(workload.layer_input)
        plain = policy.removesuffix(comparison_policies.PIPELINED)
        what = made(name, target, known[plain]())
    options = comparison_policies.options_for(policy, target) | (more or {})
    return compiled(name, target, what, options)


_ALLOWED = 0.8
"""Part of a GPU's memory that XLA's rematerialization takes for the whole."""


def smaller_chip(target: Any, budget: int, arguments: int) -> dict[str, str] | None:
    """Options that make XLA believe in a chip with `budget` bytes, and rematerialize.

    A GPU's compiler takes a percentage of four fifths of the memory less the step's
    `arguments` (bytes). `None` where they leave nothing, and for chips without figures.
    """
    if target.platform == "tpu":
        reserved = max(0, target.device_bytes - budget)
        return {"xla_tpu_user_reserved_hbm_bytes": str(reserved)}
    if target.platform != "gpu" or target.chip.key not in GPU_CHIPS:
        return None
    room = _ALLOWED * gpu_memory_bytes(target.chip.key) - arguments
    percent = int(100 * (budget - arguments) / room)
    return {"xla_gpu_memory_limit_slop_factor": str(percent)} if percent > 0 else None


def xla_cell(
    name: str, target: Any, found: dict[str, Any], budget: int
) -> dict[str, Any]:
    """The step as it is written, for a chip that has no more than `budget`."""
    if found["keep_all_bytes"] <= budget:
        return {"budget_bytes": budget} | compiled(name, target, made(name, target), {})
    arguments = found.get("argument_bytes") or 0
    options = smaller_chip(target, budget, arguments)
    if options is None:
        return {"budget_bytes": budget, "refused": "the arguments alone take more"}
    return {"budget_bytes": budget} | compiled(
        name, target, made(name, target), options
    )


KEY = ("workload", "target", "kind", "name", "cell")


def key_of(line: dict[str, Any]) -> tuple[Any, ...]:
    """What makes a line one cell."""
    return tuple(line[k] for k in KEY)


def attempt(records: Records, key: tuple[Any, ...], work: Work) -> dict[str, Any]:
    """The figures of one cell, from the records or from `work`."""
    jax.clear_caches()
    about = dict(zip(KEY, key, strict=True))
    known = records.known(cell_name(*key))
    line = known or records.made(cell_name(*key), work, about)
    if known is None and line.get("step_seconds") is not None:
        device, host = (gib(line[f"{k}_bytes"]) for k in ("device", "host"))
        seconds = f"{line['step_seconds']:.3f} s, {line['exposed_seconds']:.3f} exposed"
        say(f"= {device} GiB, {host} on the host, {seconds}")
    return line


def hopeless(key: tuple[Any, ...], done: dict[tuple[Any, ...], Any]) -> bool:
    """Whether the step as it is written did not compile for a larger chip already."""
    larger = [done.get((*key[:-1], cell)) for cell in range(key[-1] + 1, BUDGETS)]
    return any(
        line is not None and "error" not in line and line.get("step_seconds") is None
        for line in larger
    )


def cells(
    name: str, target: Any, found: dict[str, Any] | None, most: int, plans: list[int]
) -> dict[tuple[Any, ...], Work]:
    """Every cell of a workload on a target but its ends, in the order of the run.

    Without the ends, `found`, there are no budgets. A plan may compile `most` programs;
    `plans` are the budgets that are planned for in one go, of those that are asked for.
    """
    workload, to_do = WORKLOADS[name], {}
    known = comparison_policies.names(workload.layer_input, target)
    for policy in (*known, *workload.by_hand):
        key = (name, target.name, "policy", policy, None)
        to_do[key] = lambda p=policy: policy_cell(name, target, p)
    if found is None:
        return to_do
    budgets = {cell: budget_of(found, cell) for cell in plans}
    together = plans_of(name, target, budgets, most, say)
    for cell in plans:
        key = (name, target.name, "plan", PLAN, cell)
        to_do[key] = lambda c=cell: together(c)
    # Large budgets first: where the step does not fit, it will not fit a smaller one.
    for cell in reversed(range(BUDGETS)):
        budget = budget_of(found, cell)
        key = (name, target.name, "xla", XLA, cell)
        to_do[key] = lambda b=budget: xla_cell(name, target, found, b)
    return to_do


def options(parser: argparse.ArgumentParser) -> None:
    places = sorted({t for w in WORKLOADS.values() for t in w.targets})
    parser.add_argument("--workload", action="append", choices=WORKLOADS)
    parser.add_argument("--target", action="append", choices=places)
    parser.add_argument("--kind", action="append", choices=KINDS)
    parser.add_argument("--policy", action="append", help="a name, of kind policy")
    parser.add_argument("--cell", action="append", type=int, choices=range(BUDGETS))
    parser.add_argument("--compiles", type=int, default=4, help="at most, per plan")


def run(asked: argparse.Namespace, records: Records) -> None:
    """Every cell that was asked for."""
    for name in asked.workload or WORKLOADS:
        for place in asked.target or WORKLOADS[name].targets:
            if place in WORKLOADS[name].targets:
                _run_row(name, place, asked, records)


def _run_row(
    name: str, place: str, asked: argparse.Namespace, records: Records
) -> None:
    target, kinds = stowax.target(place), asked.kind or KINDS
    key = (name, place, "ends", "", None)
    found = records.cells.get(cell_name(*key))
    if "ends" in kinds or (found is None and {*kinds} != {"policy"}):
        found = attempt(records, key, lambda: ends(name, target))
    if found is not None and "error" in found:
        return
    budgets = asked.cell or range(BUDGETS)
    plans = [
        cell
        for cell in budgets
        if records.known(cell_name(name, place, "plan", PLAN, cell)) is None
    ]
    for key, work in cells(name, target, found, asked.compiles, plans).items():
        done = {key_of(line): line for line in records.cells.values()}
        if key[2] == "xla" and hopeless(key, done):
            continue
        chosen = (
            key[3] in (asked.policy or [key[3]])
            if key[2] == "policy"
            else key[4] in budgets
        )
        if chosen and key[2] in kinds:
            attempt(records, key, work)


page = comparison_table.page
