"""Arithmetic that the compiler moved to the host's processor.

Memory figures of such a program look splendid: what is computed on the host takes no
device memory. A TPU's compiler makes programs for a thread of their own, a GPU's marks
single instructions.
"""

from collections.abc import Iterator, Sequence

from .._hlo._host_calls import is_planned, work_on_host
from .._records._inspection import Hazard
from .._records._program import Instruction, Program
from .._units import format_bytes
from ._context import Context, hazard, where


def host_compute(context: Context) -> Iterator[Hazard]:
    """One hazard per call of the host, at the line of its largest product."""
    program = context.program
    for computation in context.on_device():
        for item in computation.instructions:
            work = _work(program, item)
            if not work or is_planned(work):
                continue
            named = [part for part in (item, *work) if part.op_name]
            # Without products all are alike, and the first that has a name is taken.
            worst = max(named, key=lambda part: part.flops, default=item)
            seconds = sum(
                interval.seconds
                for interval in context.timeline.intervals
                if interval.lane == "host" and interval.name == item.name
            )
            yield hazard(
                "host-compute",
                where(worst),
                _cost(work, computation.executions),
                instruction=item.name,
                count=computation.executions,
                seconds=seconds,
            )


def _work(program: Program, item: Instruction) -> list[Instruction]:
    """What one instruction has the host do; nothing for one of the device."""
    if item.execution_thread:
        return [item]
    called = program.computations
    return work_on_host(program, [n for n in item.called if called[n].execution_thread])


def _cost(work: Sequence[Instruction], times: float) -> str:
    flops = sum(part.flops for part in work)
    moved = format_bytes(sum(part.bytes_accessed for part in work))
    what = f"{flops / 1e9:.3g} GFLOP of matrix products, " if flops else ""
    return (
        f"{what}{moved} read and written on the host, {times:g} x per step"
        f"{_lines(work)}; "
        "a lower bound: the copies it needs, not the arithmetic, are in the step's time"
    )


def _lines(work: Sequence[Instruction]) -> str:
    """The user's lines behind it, if there are several: those with the most work."""
    lines: dict[str, float] = {}
    for part in work:
        if part.source:
            lines[part.source] = lines.get(part.source, 0.0) + part.flops
    if len(lines) < 2:
        return ""
    ordered = sorted(lines, key=lambda line: -lines[line])
    more = f" and {len(ordered) - 4} more" if len(ordered) > 4 else ""
    return f", from {', '.join(ordered[:4])}{more}"
