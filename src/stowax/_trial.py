"""One turn of the closed loop: compile a program, and read what it really does.

The prediction is an opinion, the compiled program the fact: bytes from XLA's own memory
figures, seconds from its schedule, and every planned copy looked for in it.
"""

import dataclasses
import time
from collections.abc import Mapping
from typing import Any

import jax

from ._apply import StepPlan
from ._errors import OffloadVanishedError, OutOfMemoryCompileError
from ._inspect import inspect_program
from ._plan_record import Trial
from ._program import read_program, transfers_named
from ._state import device_bytes
from ._survey import Survey, predict


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """A compiled program: its figures, and the record of the trial.

    `inspection` is `None` where the compiler refused for want of memory.
    """

    trial: Trial
    predicted_bytes: int
    compiled_bytes: int
    host_bytes: int
    inspection: Any | None
    vanished: tuple[str, ...]

    @property
    def excess(self) -> int:
        """Bytes that were needed beyond the prediction."""
        return self.compiled_bytes - self.predicted_bytes

    @property
    def step_seconds(self) -> float:
        """Seconds of one step, simulated from the compiled schedule."""
        return self.inspection.timeline.step_seconds if self.inspection else 0.0


def compile_and_read(
    survey: Survey,
    what: str,
    plan: StepPlan | None,
    compiler_options: Mapping[str, Any],
    *,
    donate: bool = True,
    correction: int = 0,
) -> Measured:
    """Compiles the step under `plan` and reads the result.

    **Arguments:** `correction` is added to the predicted bytes: what earlier trials of
    the same step needed beyond their own prediction.

    **Raises:** `CompileError` for anything but a want of memory.
    """
    lowered, prediction = predict(survey, plan, donate=donate)
    predicted = prediction.device_total + correction
    started = time.perf_counter()
    try:
        compiled = lowered.compile(dict(compiler_options) or None)
    except OutOfMemoryCompileError as error:
        needed = error.needed_bytes or predicted
        needed = max(needed, survey.target.device_bytes + 1)
        return _measured(what, started, predicted, needed, prediction.host_total, None)
    program = read_program(compiled.hlo_module_protos()[0])
    inspection = inspect_program(program, compiled.memory_analysis(), survey.target)
    measured = _measured(
        what,
        started,
        predicted,
        inspection.memory.device.total,
        inspection.memory.host.total,
        inspection,
    )
    lost = _vanished(survey, inspection, plan) if plan else ()
    return dataclasses.replace(measured, vanished=lost)


def _measured(
    what: str,
    started: float,
    predicted: int,
    compiled: int,
    host: int,
    inspection: Any | None,
) -> Measured:
    trial = Trial(
        what=what,
        predicted_bytes=predicted,
        compiled_bytes=compiled,
        host_bytes=host,
        step_seconds=inspection.timeline.step_seconds if inspection else None,
        seconds_to_compile=time.perf_counter() - started,
    )
    return Measured(
        trial=trial,
        predicted_bytes=predicted,
        compiled_bytes=compiled,
        host_bytes=host,
        inspection=inspection,
        vanished=(),
    )


def _vanished(survey: Survey, inspection: Any, plan: StepPlan) -> tuple[str, ...]:
    """Planned copies that the compiled program does not hold, by value name.

    XLA may join copies or rename them, so a value counts as lost only if its own scope
    is nowhere and the bytes that do move fall short as well.
    """
    bodies = {body.name: body for body in survey.bodies}
    specs = jax.tree.leaves(survey.specs)
    planned, lost = 0, []
    for name, stack in plan.stacks.items():
        body = bodies[name]
        for number, how in stack.stored.items():
            if not how.startswith("offload"):
                continue
            value = body.values[number]
            planned += body.count * value.bytes
            if not transfers_named(inspection, f"stowax.offload.{name}.{number}"):
                lost.append(f"{value.name} ({value.source})")
    for i in plan.hosted.shards if plan.hosted else ():
        planned += device_bytes(specs[i])
        if not transfers_named(inspection, f"stowax.state.{i}"):
            lost.append(survey.step.arguments[i].path)
    moved = sum(
        t.bytes * t.trips
        for t in inspection.transfers
        if t.direction == "device-to-host"
    )
    return tuple(lost) if moved < 0.9 * planned else ()


def check_offloads(measured: Measured) -> None:
    """**Raises:** `OffloadVanishedError` where a planned copy is not in the program."""
    if measured.vanished:
        raise OffloadVanishedError(
            "The compiled program does not copy these values to the host, although the "
            f"plan offloads them: {', '.join(measured.vanished)}. Pin them to 'keep' "
            "or 'recompute', and please report it with the step: it is stowax's fault."
        )
