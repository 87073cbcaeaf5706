"""Host memory: too much of it, or none where some was asked for."""

from collections.abc import Iterator

from .._hardware._pinned import beyond_the_pool
from .._records._inspection import Hazard
from .._units import format_bytes
from ._arguments import lost_its_memory
from ._context import Context, hazard


def host_memory(context: Context) -> Iterator[Hazard]:
    """A total over what the host has, or over what a process may pin."""
    total = context.memory.host.total
    machine = context.machine
    pool = machine.pinned_bytes
    over = None
    if total > machine.host_bytes:
        over = (
            f"{format_bytes(total)} of host memory per device, and the host has "
            f"{format_bytes(machine.host_bytes)} for each"
        )
    elif pool is not None:
        over = beyond_the_pool(total, pool, attached=machine.attached)
    if over:
        yield hazard("host-memory-exceeded", _program(context), over)


def kinds_dropped(context: Context) -> Iterator[Hazard]:
    """Host memory that was asked for, or that the step reckons with, and is not there.

    `jax.eval_shape` drops memory kinds, and so do devices that have no memories; then
    a step fetches its arguments from the device to the device.
    """
    memory = context.memory.host
    arguments = context.intent.arguments or ()
    if lost := [a for a in arguments if lost_its_memory(context, a)]:
        total = sum(argument.bytes for argument in lost)
        yield hazard(
            "memory-kinds-dropped",
            f"{context.intent.source} ({lost[0].path})".strip(),
            f"the step brings {len(lost)} argument(s), {format_bytes(total)}, to the "
            "device, where they are already, and returns them in host memory",
            count=len(lost),
        )
        return
    arguments = [a for a in arguments if a.parameter is not None]
    asked = [a for a in arguments if a.on_host]
    if asked and memory.argument == 0:
        total = sum(argument.bytes for argument in asked)
        yield hazard(
            "memory-kinds-dropped",
            f"{context.intent.source} ({asked[0].path})".strip(),
            f"{len(asked)} argument(s), {format_bytes(total)}, are to be in host "
            "memory, and the program has them all on the device",
            count=len(asked),
        )
        return
    results = [output for output in context.intent.outputs or () if output.on_host]
    if results and memory.output == 0 and memory.alias == 0:
        yield hazard(
            "memory-kinds-dropped",
            f"{context.intent.source} ({results[0].path})".strip(),
            f"{len(results)} result(s) are to be in host memory, and the program "
            "leaves them all on the device",
            count=len(results),
        )


def _program(context: Context) -> str:
    source = context.intent.source
    return f"{source} ({context.program.name})" if source else context.program.name
