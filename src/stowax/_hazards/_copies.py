"""Copies that cost time, or go elsewhere than the program says.

Nothing hides them, or they are too small to be worth it.
"""

from collections.abc import Iterator

from .._records._inspection import Hazard
from .._records._program import Computation, Transfer
from .._units import format_bytes, format_seconds
from ._context import Context, hazard, of_a_plan, where

# Smaller copies are loop counters and scalars: the latency of a copy, not its bytes.
NOTABLE_BYTES = 64 * 1024
# A copy that takes less than this part of the step is not worth anybody's time either.
NOTABLE_PART = 0.01
# Under less than this part of the work that there is, a copy is not overlapped at all.
_OVERLAPPED = 0.1
# From this part of a loop's time on, a direction of the link is busy all the time: the
# loop waits for the link, however its copies are arranged.
_BUSY = 0.8

# What padding may add to a copy before it is worth a word.
_PADDED = 1.5

COPY_SECONDS = 10e-6
"""What starting a copy takes, whatever its bytes: assumed (the order of magnitude of a
DMA over PCIe, its descriptor and its completion included)."""


def misplaced_copies(context: Context) -> Iterator[Hazard]:
    """Slices that are copied from or to another place than said (`_hlo._offsets`)."""
    for item in context.program.misplaced:
        yield hazard(
            "misplaced-copy",
            where(item),
            "the compiler's note of where it begins is not, or cannot be seen to be, "
            "what the program says",
            instruction=item.name,
        )


def synchronous_copies(context: Context) -> Iterator[Hazard]:
    """Copies that the device performs itself, and waits for."""
    for transfer in _notable(context):
        if transfer.asynchronous:
            continue
        computation = context.program.computations[transfer.computation]
        item = next(i for i in computation.instructions if i.name == transfer.start)
        if not item.execution_thread:  # that is host-compute
            yield _waiting(
                context, "synchronous-copy", transfer, f"is a synchronous {item.opcode}"
            )


def unhidden_copies(context: Context) -> Iterator[Hazard]:
    """Asynchronous copies in loops with hardly any work between start and done.

    At the two ends of a step there is nothing to hide a copy under; inside a loop there
    is the rest of the body, and the wait is paid in every trip. A plan's own copies are
    left out: their waits are in the plan's figures, and it found nothing better.
    """
    for transfer in _notable(context):
        if not transfer.asynchronous or transfer.trips <= 1:
            continue
        if of_a_plan(transfer.op_name):
            continue
        if _busy(context, transfer) >= _BUSY:
            continue
        computation = context.program.computations[transfer.computation]
        once = context.link_seconds(transfer)
        work = sum(context.work(item) for item in computation.instructions)
        hidden = _hidden(context, computation, transfer)
        # A copy longer than the body cannot be hidden entirely, however early it
        # starts: what counts is the part of the possible.
        if hidden > 0 and hidden >= _OVERLAPPED * min(once, work):
            continue
        yield _waiting(
            context,
            "unhidden-copy",
            transfer,
            "starts and is waited for with hardly any work in between",
        )


def _notable(context: Context) -> Iterator[Transfer]:
    for transfer in context.program.transfers:
        if transfer.bytes * transfer.trips < NOTABLE_BYTES:
            continue
        seconds = context.link_seconds(transfer) * transfer.trips
        if seconds >= NOTABLE_PART * context.timeline.step_seconds:
            yield transfer


def _waiting(context: Context, kind: str, transfer: Transfer, manner: str) -> Hazard:
    seconds = context.link_seconds(transfer) * transfer.trips
    return hazard(
        kind,
        where(transfer),
        f"{format_bytes(transfer.bytes)} {transfer.direction}, "
        f"{transfer.trips:g} x per step, {manner}: "
        f"{format_seconds(seconds)} of waiting",
        instruction=transfer.start,
        count=transfer.trips,
        seconds=seconds,
    )


def _busy(context: Context, transfer: Transfer) -> float:
    """The part of a trip of a copy's loop in which the busier direction is busy."""
    found = [
        t for t in context.program.transfers if t.computation == transfer.computation
    ]
    names = {name for t in found for name in (t.start, t.done)}
    trip = max(
        (i.period for i in context.timeline.intervals if i.name in names), default=0.0
    )
    busiest = max(
        sum(context.link_seconds(t) for t in found if t.direction == direction)
        for direction in ("host-to-device", "device-to-host")
    )
    return busiest / trip if trip else 0.0


def _hidden(context: Context, computation: Computation, transfer: Transfer) -> float:
    """Seconds of work that the schedule puts between a copy's start and its done."""
    names = [item.name for item in computation.instructions]
    between = computation.instructions[
        names.index(transfer.start) + 1 : names.index(transfer.done)
    ]
    if any(item.opcode in ("while", "conditional", "call") for item in between):
        return float("inf")
    return sum(context.work(item) for item in between)


def small_copies(context: Context) -> Iterator[Hazard]:
    """Copies of one source line whose starts take a notable part of the step."""
    groups: dict[tuple[str, str], list[Transfer]] = {}
    for transfer in context.program.transfers:
        if transfer.bytes < NOTABLE_BYTES and not of_a_plan(transfer.op_name):
            place = transfer.source or transfer.op_name
            groups.setdefault((transfer.direction, place), []).append(transfer)
    for (direction, _), alike in groups.items():
        count = sum(transfer.trips for transfer in alike)
        seconds = count * COPY_SECONDS
        if count < 2 or seconds < NOTABLE_PART * context.timeline.step_seconds:
            continue
        largest = max(alike, key=lambda transfer: transfer.bytes)
        yield hazard(
            "small-copy",
            where(largest),
            f"{count:g} copies per step {direction} of at most "
            f"{format_bytes(largest.bytes)}, each with about "
            f"{format_seconds(COPY_SECONDS)} for its start: {format_seconds(seconds)}",
            instruction=largest.start,
            count=count,
            seconds=seconds,
        )


def unaligned_offloads(context: Context) -> Iterator[Hazard]:
    """Copies of arrays that do not fill the chip's tiles: the padding crosses, too."""
    for transfer in _notable(context):
        if transfer.tiled_bytes < _PADDED * transfer.bytes:
            continue
        tiled = transfer.tiled_bytes / transfer.bytes
        seconds = context.link_seconds(transfer) * transfer.trips * (tiled - 1)
        yield hazard(
            "unaligned-offload",
            where(transfer),
            f"{format_bytes(transfer.bytes)} {transfer.direction}, "
            f"{transfer.trips:g} x per step, are {format_bytes(transfer.tiled_bytes)} "
            f"in tiles: {format_seconds(seconds)} more of the link",
            instruction=transfer.start,
            count=transfer.trips,
            seconds=seconds,
        )
