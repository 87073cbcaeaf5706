"""What becomes of the arguments: donated or not, and where state comes back.

State is an argument that an output takes the place of (`ArgumentAsked.returned`, found
in the trace): new weights are made of the old ones element by element. A gradient has
the same type, but is no new state.
"""

from collections.abc import Iterator

from .._records._inspection import Hazard
from .._records._intent import ArgumentAsked
from .._units import format_bytes, format_seconds
from ._context import Context, hazard
from ._stacks import stacks_in_program

_LARGE_BYTES = 1 << 20
_LARGE_PART = 0.01


def state_moved(context: Context) -> Iterator[Hazard]:
    """State that comes in one memory and leaves in the other."""
    outputs = context.intent.outputs or ()
    moved = [
        argument
        for argument in context.intent.arguments or ()
        if argument.returned is not None
        and argument.parameter is not None
        and argument.on_host != outputs[argument.returned].on_host
        and not lost_its_memory(context, argument)
    ]
    for alike in _groups(moved):
        first, total = alike[0], sum(argument.bytes for argument in alike)
        into = first.on_host
        rate = context.link.host_to_device if into else context.link.device_to_host
        seconds = total / rate
        output = outputs[first.returned or 0]
        yield hazard(
            "state-moved",
            _where(context, first),
            f"{_what(alike)} come in {_memory(into)} memory and leave as {output.path} "
            f"in {_memory(not into)} memory: the next step gets them there, or is "
            f"compiled anew for it, and one crossing takes {format_seconds(seconds)}",
            count=len(alike),
            seconds=seconds,
        )


def not_donated(context: Context) -> Iterator[Hazard]:
    """Large state whose successor gets memory of its own."""
    outputs = context.intent.outputs or ()
    # Where a loop makes the copy, that is stacked-again.
    copied = {size for s, size in stacks_in_program(context) if s.kind == "own"}
    for new in (True, False):
        kept = [
            argument
            for argument in context.intent.arguments or ()
            if not argument.donated
            and (new or argument.bytes not in copied)
            and (output := _successor(argument, new)) is not None
            and argument.on_host == outputs[output].on_host
        ]
        for alike in _large(context, kept):
            first = alike[0]
            output = outputs[_successor(first, new) or 0]
            does = "takes its place" if new else "is the argument as it is,"
            yield hazard(
                "argument-not-donated",
                _where(context, first),
                f"{_what(alike)} of {_memory(first.on_host)} memory: {output.path} "
                f"{does} and could take its memory",
                count=len(alike),
            )


def _successor(argument: ArgumentAsked, new: bool) -> int | None:
    """The output that is made of the argument, or else that is the argument itself."""
    if new or argument.returned is not None:
        return argument.returned if new else None
    return argument.unchanged


def donated_in_vain(context: Context) -> Iterator[Hazard]:
    """Large donated arguments whose memory no output takes."""
    outputs = context.intent.outputs or ()
    lost = [
        argument
        for argument in context.intent.arguments or ()
        if argument.donated
        and argument.parameter not in context.program.aliased
        # Else that is state-moved.
        and not (
            argument.returned is not None
            and outputs
            and outputs[argument.returned].on_host != argument.on_host
        )
    ]
    for alike in _large(context, lost):
        yield hazard(
            "donated-in-vain",
            _where(context, alike[0]),
            f"{_what(alike)} of {_memory(alike[0].on_host)} memory are given away, and "
            "no output of the same type takes them",
            count=len(alike),
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


def _groups(arguments: list[ArgumentAsked]) -> list[list[ArgumentAsked]]:
    """Arrays of one argument in one memory: what one change of the code puts right."""
    groups: dict[tuple[str, bool], list[ArgumentAsked]] = {}
    for argument in arguments:
        position = argument.path.partition("]")[0]
        groups.setdefault((position, argument.on_host), []).append(argument)
    return list(groups.values())


def _large(
    context: Context, arguments: list[ArgumentAsked]
) -> Iterator[list[ArgumentAsked]]:
    """Groups that the program reads, of a size that is worth a thought."""
    read = [a for a in arguments if a.parameter is not None]
    total = sum(argument.bytes for argument in context.intent.arguments or ())
    for alike in _groups(read):
        size = sum(argument.bytes for argument in alike)
        if size >= max(_LARGE_BYTES, _LARGE_PART * total):
            yield sorted(alike, key=lambda argument: -argument.bytes)


def _memory(on_host: bool) -> str:
    return "host" if on_host else "device"


def _what(alike: list[ArgumentAsked]) -> str:
    total = format_bytes(sum(argument.bytes for argument in alike))
    return f"{total} in {len(alike)} arrays" if len(alike) > 1 else total


def _where(context: Context, argument: ArgumentAsked) -> str:
    source = context.intent.source
    return f"{source} ({argument.path})" if source else argument.path
