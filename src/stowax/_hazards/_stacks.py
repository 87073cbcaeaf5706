"""Stacks that a loop makes and that need not be there.

What the step asked for says which (`_inspect._intent_stacks`). Whether they are in the
compiled program is told by the sizes of the arrays that it writes slice by slice.
Stacks of the same size that nothing is wrong with come first, so that none of them is
taken for another. Lines say nothing here: JAX lowers equal loops once, with the line of
the first one.
"""

import collections
from collections.abc import Iterator, Sequence

from .._records._inspection import Hazard
from .._records._intent import StackAsked
from .._units import format_bytes
from ._context import Context, hazard

_LARGE_BYTES = 1 << 20
_LARGE_PART = 0.01

_COSTS = {
    "own": "the loop returns what it reads, and it is there a second time",
    "shared": "the loop returns in each of {trips} iterations what is the same in all",
    "summed": "of each of {trips} iterations this is kept, until it is summed",
    "kept": "the loss is differentiated as a whole, and of each of {trips} iterations "
    "this is kept for the backward pass",
}


def stacked_again(context: Context) -> Iterator[Hazard]:
    """Weights that a loop returns as it was given them."""
    yield from _hazards(context, "stacked-again", ("own", "shared"))


def kept_to_be_summed(context: Context) -> Iterator[Hazard]:
    """Gradients, or what they need, of all microbatches at once."""
    yield from _hazards(context, "kept-to-be-summed", ("summed", "kept"))


def _hazards(context: Context, name: str, kinds: Sequence[str]) -> Iterator[Hazard]:
    if context.intent.planned:
        return  # its loops are the plan's
    groups: dict[tuple[str, str, int], list[tuple[StackAsked, int]]] = {}
    for stack, size in stacks_in_program(context):
        if stack.kind in kinds:
            key = stack.source, stack.kind, stack.trips
            groups.setdefault(key, []).append((stack, size))
    for (source, kind, trips), alike in groups.items():
        total = sum(size for _, size in alike)
        if total < max(_LARGE_BYTES, _LARGE_PART * context.memory.device.total):
            continue
        largest, _ = max(alike, key=lambda pair: pair[1])
        arrays = f"{len(alike)} arrays, the largest " if len(alike) > 1 else ""
        yield hazard(
            name,
            f"{source} (scan)",
            f"{format_bytes(total)}, {arrays}{largest.what}: "
            + _COSTS[kind].format(trips=trips),
            count=len(alike),
        )


def stacks_in_program(context: Context) -> Iterator[tuple[StackAsked, int]]:
    """The suspicious stacks that the compiled program has, with bytes per device."""
    left = collections.Counter(fill.bytes for fill in context.program.fills)
    asked = context.intent.stacks or ()
    for stack in asked:
        if not stack.kind:
            for size in _sizes(stack, context.intent.devices):
                left[size] -= 1
    for stack in asked:
        for size in _sizes(stack, context.intent.devices) if stack.kind else ():
            if left[size] > 0:
                left[size] -= 1
                yield stack, size
                break


def _sizes(stack: StackAsked, devices: int) -> list[int]:
    """What a device may have of it, the least first: it may be spread over any part."""
    parts = [n for n in range(devices, 0, -1) if devices % n == 0]
    return [stack.bytes // n for n in parts if stack.bytes % n == 0]
