"""One turn of the closed loop: compile a program, and read what it really does.

The prediction is an opinion, the compiled program the fact: bytes from XLA's own memory
figures, seconds from its schedule, and every planned copy looked for in it.
"""

import dataclasses
import time
from collections.abc import Mapping
from typing import Any

from .._hlo._program import read_program
from .._inspect._inspect import inspect_program
from .._records._plan import Trial
from .._survey._apply import StepPlan
from .._survey._survey import Survey, lowered, predict
from .._target._program_cache import ProgramCache
from .._units import format_bytes, format_seconds
from ._copies import check_copies


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """A compiled program: its figures, and the record of the trial.

    `inspection` is `None` where the compiler refused for want of memory; `was_kept`
    says that nothing was compiled. `misplaced` has the scope of each slice that goes
    from or to another place than the program says; "" for one that has no name.
    """

    trial: Trial
    inspection: Any | None
    was_kept: bool = False
    misplaced: tuple[str, ...] = ()

    @property
    def predicted_bytes(self) -> int:
        """What the device was to need, before this program was compiled."""
        return self.trial.predicted_bytes

    @property
    def compiled_bytes(self) -> int:
        """What it needs."""
        return self.trial.compiled_bytes

    @property
    def host_bytes(self) -> int:
        """What the host needs."""
        return self.trial.host_bytes

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
    cache: ProgramCache,
    donate: bool = True,
    correction: int = 0,
) -> Measured:
    """Compiles the step under `plan` and reads the result.

    **Arguments:** `cache` has what was compiled before; `correction` is added to the
    predicted bytes: what earlier trials of the same step needed beyond their own
    prediction.

    **Raises:** `CompileError` for anything but a want of memory; `OffloadVanishedError`
    where a planned copy is not in the program.
    """
    prediction = predict(survey, plan, donate=donate)
    program = lowered(survey, plan, donate=donate)
    predicted = prediction.device_total + correction
    started = time.perf_counter()

    def tried(device: int, host: int, seconds: float | None) -> Trial:
        return Trial(
            what=what,
            predicted_bytes=predicted,
            compiled_bytes=device,
            host_bytes=host,
            step_seconds=seconds,
            seconds_to_compile=time.perf_counter() - started,
        )

    compiled = cache.compiled(program, compiler_options, survey.target)
    if compiled.refusal is not None:
        needed = compiled.refusal.needed_bytes or predicted
        needed = max(needed, survey.target.device_bytes + 1)
        trial = tried(needed, prediction.host_total, None)
        return Measured(trial=trial, inspection=None, was_kept=compiled.was_kept)
    module = read_program(compiled.module)
    inspection = inspect_program(module, compiled.memory, survey.target)
    memory = inspection.memory
    seconds = inspection.timeline.step_seconds
    trial = tried(memory.device.total, memory.host.total, seconds)
    if plan is not None:
        check_copies(survey, plan, program, module, inspection)
    return Measured(
        trial=trial,
        inspection=inspection,
        was_kept=compiled.was_kept,
        misplaced=tuple(item.op_name for item in module.misplaced),
    )


def outcome(measured: Measured, budget: int | None, host_budget: int) -> str:
    """What a compiled program came to, in a line, beside its budget if it has one."""
    device, host = map(format_bytes, (measured.compiled_bytes, measured.host_bytes))
    fits = ""
    if budget is not None:
        within = measured.inspection is not None and measured.compiled_bytes <= budget
        fits = "fits" if within else "does not fit"
        fits = f" ({fits} the budget of {format_bytes(budget)})"
    too_much = f" (does not fit the host budget of {format_bytes(host_budget)})"
    seconds = f", {format_seconds(measured.step_seconds)} a step"
    took = format_seconds(measured.trial.seconds_to_compile)
    return (
        f"{'read from the cache' if measured.was_kept else f'compiled in {took}'}: "
        f"{device} on the device{fits}, "
        f"{host} on the host{too_much if measured.host_bytes > host_budget else ''}"
        f"{seconds if measured.inspection else ''}"
    )
