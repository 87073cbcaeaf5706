"""Random training steps, planned for machines that are not there: compiled, not run.

For each target and budget: the compiler takes the plan's program; the program stays
within the budget where the plan says that it fits; the host does no arithmetic that the
plan does not name.
"""

import dataclasses
import time
import traceback
import warnings
from collections.abc import Iterator
from typing import Any

import jax

import stowax
from stowax._errors import CompileError, OutOfMemoryCompileError
from tests.differential.build import build, surroundings
from tests.differential.judge import failed, what_moves

PARTS = (0.75, 0.5, 0.9, 0.35)
_SCALE = 16
"""A width of 128, as a TPU's tiles want it."""


def compilable(program: Any) -> Any:
    """The program as a machine that is not there could run it: on one device."""
    changes = {"mesh": "none"}
    if program.arguments == "called by keyword":
        changes["arguments"] = "one state"
    if program.dtype == "x64":
        changes["dtype"] = "float32"
    return dataclasses.replace(program, **changes)


def specs_of(args: Any) -> Any:
    """Shapes and types of arrays; what is none stays as it is."""

    def spec(leaf: Any) -> Any:
        is_array = isinstance(leaf, jax.Array)
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype) if is_array else leaf

    return jax.tree.map(spec, args)


def judge_compiled(
    program: Any, targets: list[str], budgets: int
) -> list[dict[str, Any]]:
    """A verdict per target and budget, as `judge` gives one for the CPU."""
    program = compilable(program)
    with warnings.catch_warnings(), surroundings(program):
        warnings.simplefilter("ignore")
        return [
            {"target": target, "budget": part, **dataclasses.asdict(verdict)}
            for target in targets
            for part, verdict in _on_target(program, target, PARTS[:budgets])
        ]


def _plain_bytes(program: Any, machine: Any) -> int:
    """Bytes of the device that the step takes as it is written."""
    built = build(program, lambda function: function, _SCALE)
    compiled = machine.compile(jax.jit(built.step), *specs_of(built.args))
    return stowax.inspect(compiled).memory.device.total


def _on_target(
    program: Any, target: str, parts: tuple[float, ...]
) -> Iterator[tuple[float | None, Any]]:
    machine, error, taken = stowax.target(target), None, 0
    try:
        taken = _plain_bytes(program, machine)
    except Exception as raised:
        error = raised
    for part in parts if error is None else parts[:1]:
        started = time.perf_counter()
        verdict = _planned(program, machine, max(1, int(part * taken)), error)
        seconds = time.perf_counter() - started
        kind = f"{target}: {verdict.kind}" if verdict.kind else ""
        yield part, dataclasses.replace(verdict, seconds=seconds, kind=kind)


def _planned(program: Any, machine: Any, budget: int, error: Exception | None) -> Any:
    """One plan: the verdict on it, wrong where a promise is broken."""
    from tests.differential.judge import Verdict

    built = build(program, stowax.stow, _SCALE)
    args, stage = specs_of(built.args), "plan"
    try:
        plan = stowax.plan(
            built.step, *args, target=machine, budget=budget, progress=False
        )
        stage = "compile"
        specs = plan.specs(*args[: built.state])
        specs = (specs,) if built.state == 1 else specs
        seen = stowax.inspect(
            plan.apply(built.step), *specs, *args[built.state :], target=machine
        )
    except OutOfMemoryCompileError as raised:
        return failed(stage, raised, error)
    except CompileError as raised:
        if error is not None:
            return failed(stage, raised, error)
        words = str(raised)
        kind = f"the compiler refuses: {failed(stage, raised, None).kind}"
        return Verdict(outcome="wrong", kind=kind, message=words[:2000])
    except Exception as raised:
        verdict = failed(stage, raised, error)
        lines = "".join(traceback.format_exception(raised)[-6:])[-1500:]
        return dataclasses.replace(verdict, message=f"{verdict.message}\n{lines}")
    moved = what_moves(plan)
    broken = list(_broken(plan, seen, budget))
    if broken:
        kind, message = broken[0]
        return Verdict(outcome="wrong", kind=kind, message=message, moved=moved)
    return Verdict(outcome="planned" if moved else "as written", moved=moved)


def _broken(plan: Any, seen: Any, budget: int) -> Iterator[tuple[str, str]]:
    """Promises that the compiled program does not keep: `(kind, message)`."""
    used = seen.memory.device.total
    if plan.fits and used > budget:
        yield "over the budget", f"{used} bytes of {budget}, and the plan says it fits"
    for hazard in seen.hazards:
        if hazard.kind == "host-compute":
            message = f"{hazard.where}: {hazard.cost} ({', '.join(what_moves(plan))})"
            yield "arithmetic on the host that the plan does not name", message
