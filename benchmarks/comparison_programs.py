"""Compiled programs by content: each is compiled once, on whatever day.

What is kept is the scheduled program itself with its memory figures, not what was read
from it: a better simulator reads old programs anew. The folder is `.comparison/` in the
checkout, which git ignores; plans keep theirs there, too.
"""

import pathlib
from typing import Any

from stowax._errors import CompileError
from stowax._hlo._program import read_program
from stowax._inspect._inspect import inspect_program
from stowax._records._program import Program
from stowax._target._program_cache import cache_in

FOLDER = pathlib.Path(__file__).resolve().parent.parent / ".comparison"


def figures(
    target: Any, jitted: Any, specs: tuple[Any, ...], options: dict[str, Any]
) -> dict[str, Any]:
    """Bytes and simulated seconds of a step compiled for `target`.

    A program that the compiler refuses for want of memory has bytes and no seconds; one
    that it refuses for another reason has neither, and `refused` says why.
    """
    lowered = target.lower(jitted, *specs)
    try:
        kept = cache_in(FOLDER).compiled(lowered, options, target)
    except CompileError as error:
        return {"refused": str(error)[:2000]}
    about = {"program": kept.key, "compiling_seconds": kept.seconds}
    if kept.refusal is not None:
        return about | {"device_bytes": kept.refusal.needed_bytes, "host_bytes": None}
    found = inspect_program(read_program(kept.module), kept.memory, target)
    return about | {
        "device_bytes": found.memory.device.total,
        "host_bytes": found.memory.host.total,
        "argument_bytes": kept.memory.argument_size_in_bytes,
        "step_seconds": found.timeline.step_seconds,
        "exposed_seconds": found.timeline.exposed_seconds,
        "compute_seconds": found.timeline.compute_seconds,
        "host_computations": sum(h.kind == "host-compute" for h in found.hazards),
    }


def program_of(line: dict[str, Any]) -> Program | None:
    """The compiled program of a line that `figures` made; `None` if it is not kept."""
    kept = cache_in(FOLDER).read(line["program"])
    return None if kept is None else read_program(kept.module)
