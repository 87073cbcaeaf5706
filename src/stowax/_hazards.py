"""What goes wrong in a compiled program without a word: the closed list.

Each hazard is found in the program itself, not in the way it was written, so it is
found whoever wrote it. `_inspect` is the caller. Knows no JAX.
"""

import re
from collections.abc import Callable, Iterator, Mapping
from typing import NamedTuple

from ._inspect_record import Hazard
from ._program_record import Computation, Instruction, Program, Transfer
from ._stages import Link
from ._timeline import Timeline
from ._units import format_bytes, format_seconds

HAZARD_KINDS: Mapping[str, str] = {
    "host-compute": "Arithmetic runs on the host's processor instead of the device.",
    "synchronous-copy": "The device stands still while a copy crosses the link.",
    "rematerialization": "The compiler computes values again to save memory.",
}
"""Every kind of hazard with what it is, worst first."""

# Smaller copies are loop counters and scalars: the latency of a copy, not its bytes.
_NOTABLE_BYTES = 64 * 1024
# A copy that takes less than this part of the step is not worth anybody's time either.
_NOTABLE_PART = 0.01
# Under less than this part of the work that there is, a copy is not overlapped at all.
_OVERLAPPED = 0.1
# From this part of a loop's time on, a direction of the link is busy all the time: the
# loop waits for the link, however its copies are arranged.
_BUSY = 0.8
# XLA's rematerialization pass names its clones `x.remat`, `x.remat2`,
# `x.remat_compressed`. JAX's own `remat2` tuples begin with the word and carry no dot
# before it.
_REMATERIALIZED = re.compile(r"\.remat\d*(_(un)?compressed)?(\.|$)")

_REMEDIES = {
    "host-compute": (
        "Bring the operands to the device before the arithmetic: "
        "jax.device_put(x, jax.memory.Space.Device), inside a scan over layers rather "
        "than a Python loop. On TPU the compiler option "
        "xla_disable_automatic_host_compute_offload=True turns this into an error."
    ),
    "synchronous-copy": (
        "Start the copy an iteration early and use it an iteration late, so that a "
        "whole layer's work hides it (stowax's own plans do); or keep the array on "
        "the device."
    ),
    "rematerialization": (
        "The program is above the memory that the compiler allows itself: plan with a "
        "smaller budget, so that the cheapest values are computed again and not "
        "whichever the compiler finds; on a GPU set "
        "xla_gpu_enable_host_memory_offloading=true if host buffers are counted."
    ),
}


class Context(NamedTuple):
    """What the searches look at."""

    program: Program
    timeline: Timeline
    link: Link
    seconds: Mapping[str, float]  # instruction -> compute seconds, one time


def find_hazards(
    program: Program, timeline: Timeline, link: Link
) -> tuple[Hazard, ...]:
    """Every hazard in `program`, by kind, and within a kind the costliest first.

    **Arguments:** `timeline` is the simulated one of `program`; `link` as it was
    simulated with.
    """
    seconds = {
        interval.name: interval.end - interval.start
        for interval in timeline.intervals
        if interval.lane == "compute" and not interval.waits
    }
    context = Context(program, timeline, link, seconds)
    found: list[Hazard] = []
    for kind in HAZARD_KINDS:
        found += sorted(_SEARCHES[kind](context), key=lambda hazard: -hazard.seconds)
    return tuple(found)


def _host_compute(context: Context) -> Iterator[Hazard]:
    program = context.program
    for computation in program.computations.values():
        if computation.execution_thread:
            continue
        for item in computation.instructions:
            bodies = [
                program.computations[name]
                for name in item.called
                if program.computations[name].execution_thread
            ]
            if item.execution_thread:
                work = [item]
            elif bodies:
                work = _everything(program, bodies)
            else:
                continue
            flops = sum(part.flops for part in work)
            named = next((part for part in (item, *work) if part.op_name), item)
            seconds = sum(
                interval.seconds
                for interval in context.timeline.intervals
                if interval.lane == "host" and interval.name == item.name
            )
            yield Hazard(
                kind="host-compute",
                where=_where(named),
                cost=_host_cost(flops, work, computation.executions),
                remedy=_REMEDIES["host-compute"],
                instruction=item.name,
                count=computation.executions,
                seconds=seconds,
            )


def _everything(program: Program, bodies: list[Computation]) -> list[Instruction]:
    """The instructions of computations and of those that they call in turn."""
    found: list[Instruction] = []
    for body in bodies:
        for item in body.instructions:
            inner = [program.computations[name] for name in item.called]
            found += _everything(program, inner) if inner else [item]
    return found


def _host_cost(flops: float, work: list[Instruction], times: float) -> str:
    moved = format_bytes(sum(item.bytes_accessed for item in work))
    what = f"{flops / 1e9:.3g} GFLOP of matrix products, " if flops else ""
    return (
        f"{what}{moved} read and written on the host, {times:g} x per step; "
        "a lower bound: the copies it needs, not the arithmetic, are in the step's time"
    )


def _synchronous_copy(context: Context) -> Iterator[Hazard]:
    for transfer in context.program.transfers:
        if transfer.total_bytes < _NOTABLE_BYTES:
            continue
        once = _link_seconds(transfer, context.link)
        if once * transfer.trips < _NOTABLE_PART * context.timeline.step_seconds:
            continue
        computation = context.program.computations[transfer.computation]
        if transfer.asynchronous:
            # At the two ends of a step there is nothing to hide a copy under; inside a
            # loop there is the rest of the body, and the wait is paid in every trip.
            if transfer.trips <= 1:
                continue
            work = sum(_work(context, item) for item in computation.instructions)
            if _busy(context, transfer) >= _BUSY:
                continue
            hidden = _hidden(context, computation, transfer)
            # A copy longer than the body cannot be hidden entirely, however early it
            # starts: what counts is the part of the possible.
            if hidden > 0 and hidden >= _OVERLAPPED * min(once, work):
                continue
            manner = "starts and is waited for with hardly any work in between"
        else:
            item = next(i for i in computation.instructions if i.name == transfer.start)
            if item.execution_thread:
                continue  # that is host-compute
            manner = f"is a synchronous {item.opcode}"
        yield Hazard(
            kind="synchronous-copy",
            where=_where(transfer),
            cost=(
                f"{format_bytes(transfer.bytes)} {transfer.direction}, "
                f"{transfer.trips:g} x per step, {manner}: "
                f"{format_seconds(once * transfer.trips)} of waiting"
            ),
            remedy=_REMEDIES["synchronous-copy"],
            instruction=transfer.start,
            count=transfer.trips,
            seconds=once * transfer.trips,
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
        sum(_link_seconds(t, context.link) for t in found if t.direction == direction)
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
    return sum(_work(context, item) for item in between)


def _work(context: Context, item: Instruction) -> float:
    """Seconds of work; a loop counter that costs a GPU a launch is none."""
    return context.seconds.get(item.name, 0.0) if item.result_bytes > 8 else 0.0


def _link_seconds(transfer: Transfer, link: Link) -> float:
    into = transfer.direction == "host-to-device"
    return transfer.bytes / (link.host_to_device if into else link.device_to_host)


def _rematerialization(context: Context) -> Iterator[Hazard]:
    for computation in context.program.computations.values():
        clones = [
            item
            for item in computation.instructions
            if _REMATERIALIZED.search(item.name) and item.bytes_accessed > 0
        ]
        if not clones:
            continue
        costs = {item.name: context.seconds.get(item.name, 0.0) for item in clones}
        worst = max(clones, key=lambda item: costs[item.name])
        seconds = sum(costs.values()) * computation.executions
        yield Hazard(
            kind="rematerialization",
            where=_where(worst),
            cost=(
                f"{len(clones)} recomputed operations, "
                f"{sum(item.flops for item in clones) / 1e9:.3g} GFLOP of matrix "
                f"products, {computation.executions:g} x per step: "
                f"{format_seconds(seconds)}"
            ),
            remedy=_REMEDIES["rematerialization"],
            instruction=worst.name,
            count=len(clones),
            seconds=seconds,
        )


def _where(item: Instruction | Transfer) -> str:
    named = item.op_name or (item.name if isinstance(item, Instruction) else item.start)
    return f"{item.source} ({named})" if item.source else named


_SEARCHES: Mapping[str, Callable[[Context], Iterator[Hazard]]] = {
    "host-compute": _host_compute,
    "synchronous-copy": _synchronous_copy,
    "rematerialization": _rematerialization,
}
