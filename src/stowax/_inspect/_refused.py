"""The inspection of a step that the compiler refused because it takes too much memory.

There is no program to read then, and the compiler has one line for it. What the step
needs, and for which arrays, is predicted from what was lowered.
"""

from collections.abc import Sequence

from .._errors import OutOfMemoryCompileError
from .._records._inspection import Memory, MemoryUse, Omission
from .._records._timeline import Timeline
from .._target._compiled import LoweredProgram
from .._target._machine import Target
from ._peak_of import peak_of

_NOTHING_TO_READ = (
    "the compiler refused the program, so there is none to read. Make it fit, or name "
    "a larger target"
)


def refused_inspection(
    lowered: LoweredProgram,
    machine: Target,
    error: OutOfMemoryCompileError,
    planned: Sequence[str] = (),
) -> dict[str, object]:
    """The fields of the inspection of a program that there is not.

    **Arguments:** `planned` as for `peak_of`; `error` has the compiler's words.
    """
    prediction, peak = peak_of(lowered, machine.platform, planned)
    nothing = MemoryUse(argument=0, output=0, alias=0, temp=0)
    device = MemoryUse(
        argument=prediction.argument,
        output=prediction.output,
        alias=prediction.alias,
        temp=prediction.temp,
    )
    on_host = prediction.host_total
    host = MemoryUse(argument=0, output=0, alias=0, temp=on_host)
    name = getattr(lowered.jitted, "__name__", "step")
    return {
        "target": machine.name,
        "program": f"jit_{name}",
        "memory": Memory(device=device, host=host if on_host else nothing),
        "transfers": (),
        "hazards": (),
        "timeline": _no_time(),
        "flops": 0.0,
        "omissions": (
            Omission(what="time, copies and hazards", reason=_NOTHING_TO_READ),
        ),
        "capacity_bytes": machine.device_bytes,
        "refusal": _in_one_line(error),
        "peak": peak,
    }


def _in_one_line(error: OutOfMemoryCompileError) -> str:
    """The compiler's own words, without ours in front of them."""
    return str(error).partition(": ")[2].strip().partition("\n")[0]


def _no_time() -> Timeline:
    return Timeline(
        origin="simulated",
        step_seconds=0.0,
        compute_seconds=0.0,
        exposed_seconds=0.0,
        collective_wait_seconds=0.0,
        device_to_host_seconds=0.0,
        host_to_device_seconds=0.0,
        collective_seconds=0.0,
        intervals=(),
        unpriced=(),
    )
