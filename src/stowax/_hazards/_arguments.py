"""What becomes of the arguments: donated or not, and where state comes back.

State is an argument that an output takes the place of (`ArgumentAsked.returned`, found
in the trace): new weights are made of the old ones element by element. A gradient has
the same type, but is no new state.
"""

from collections.abc import Iterator

from .._inspect_record import Hazard
from .._intent_record import ArgumentAsked
from .._units import format_bytes, format_seconds
from ._context import Context, hazard

_LARGE_BYTES = 1 << 20
_LARGE_PART = 0.01


def state_moved(context: Context) -> Iterator[Hazard]:
    """State that comes in one memory and leaves in the other."""
    outputs = context.intent.outputs or ()
    for argument in context.intent.arguments or ():
        if argument.returned is None or argument.parameter is None:
            continue
        output = outputs[argument.returned]
        if argument.on_host == output.on_host or lost_its_memory(context, argument):
            continue
        before, after = _memory(argument.on_host), _memory(output.on_host)
        rate = (
            context.link.host_to_device
            if argument.on_host
            else context.link.device_to_host
        )
        seconds = argument.bytes / rate
        yield hazard(
            "state-moved",
            _where(context, argument),
            f"{format_bytes(argument.bytes)} come in {before} memory and leave as "
            f"{output.path} in {after} memory: the next step gets them there, or is "
            f"compiled anew for it, and one crossing takes {format_seconds(seconds)}",
            seconds=seconds,
        )


def not_donated(context: Context) -> Iterator[Hazard]:
    """Large state whose successor gets memory of its own."""
    outputs = context.intent.outputs or ()
    for argument in _large(context):
        if argument.donated or argument.returned is None:
            continue
        output = outputs[argument.returned]
        if output.on_host != argument.on_host:
            continue  # that is state-moved
        yield hazard(
            "argument-not-donated",
            _where(context, argument),
            f"{format_bytes(argument.bytes)} of {_memory(argument.on_host)} memory: "
            f"{output.path} takes its place and could take its memory",
        )


def donated_in_vain(context: Context) -> Iterator[Hazard]:
    """Large donated arguments whose memory no output takes."""
    outputs = context.intent.outputs or ()
    for argument in _large(context):
        if not argument.donated or argument.parameter in context.program.aliased:
            continue
        if (
            argument.returned is not None
            and outputs
            and outputs[argument.returned].on_host != argument.on_host
        ):
            continue  # that is state-moved
        yield hazard(
            "donated-in-vain",
            _where(context, argument),
            f"{format_bytes(argument.bytes)} of {_memory(argument.on_host)} memory are "
            "given away, and no output of the same type takes them",
        )


def lost_its_memory(context: Context, argument: ArgumentAsked) -> bool:
    """Whether state on the device was to be in host memory.

    The step fetches it and returns it in host memory. A step that fetches it and
    returns it on the device is one that runs either way.
    """
    if argument.on_host or argument.returned is None or not context.intent.outputs:
        return False
    returned = context.intent.outputs[argument.returned]
    return argument.fetched_in_vain and returned.on_host


def _large(context: Context) -> Iterator[ArgumentAsked]:
    """Arguments that the program reads, and of a size that is worth a thought."""
    arguments = context.intent.arguments or ()
    total = sum(argument.bytes for argument in arguments)
    for argument in arguments:
        least = max(_LARGE_BYTES, _LARGE_PART * total)
        if argument.parameter is not None and argument.bytes >= least:
            yield argument


def _memory(on_host: bool) -> str:
    return "host" if on_host else "device"


def _where(context: Context, argument: ArgumentAsked) -> str:
    source = context.intent.source
    return f"{source} ({argument.path})" if source else argument.path
