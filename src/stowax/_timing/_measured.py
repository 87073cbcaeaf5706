"""From what a trace saw to a `Timeline`: lanes, waiting, and what each adds up to.

`_xplane` says what each event was; here they become intervals of one step. The compute
lane is one device's time from beginning to end, so events on it that overlap (streams
of a GPU, threads of a CPU) are laid end to end, and what is left of the step is waiting
or idle.

Where waiting has no events of its own (a GPU), a gap of the compute lane is looked at:
compute goes on only when what it waited for has arrived. So a gap in which a copy ends
waited for that copy, up to its end; likewise a collective. A gap in which nothing ends
waited for neither: it is idle, whatever else was on its way.
"""

import dataclasses
import statistics
from collections.abc import Iterable, Sequence

from .._records._timeline import LANES, Interval, Lane, Timeline
from .._units import format_seconds
from ._xplane import Execution
from ._xplane_roles import Happening, What

_WAITS: dict[What, str] = {
    "wait for host": "exposed",
    "wait for devices": "collective wait",
}
_BESIDE: tuple[Lane, ...] = LANES[1:]  # all but "compute"


def timeline_of(runs: Sequence[Execution], device: str) -> Timeline:
    """The timeline of the median of `runs`, as `device` names them in the trace."""
    seconds = sorted(run.end - run.start for run in runs)
    median = statistics.median_low(seconds)
    run = next(run for run in runs if run.end - run.start == median)
    steps = "1 step" if len(runs) == 1 else f"{len(runs)} steps"
    notes = [
        f"{device}, the median of {steps} in the trace, "
        f"{format_seconds(seconds[0])} to {format_seconds(seconds[-1])}"
    ]
    if run.gaps_wait:
        notes.append("a gap between kernels in which a copy ends waited for that copy")
    if device == "/host:CPU":
        notes.append("on a CPU the host is the device: copies between them do not show")
    return _timeline(run, tuple(notes))


def _timeline(run: Execution, notes: tuple[str, ...]) -> Timeline:
    work = _in_a_row([h for h in run.happenings if h.what == "compute"])
    waits = _explicit_waits(run, work)
    if run.gaps_wait:
        waits += _gaps(run, _in_a_row([*work, *waits]))
    intervals = [_interval(run, "compute", h) for h in work]
    intervals += [_interval(run, "compute", h, waits=True) for h in waits]
    busy: dict[str, float] = {}
    for lane in _BESIDE:
        there = [h for h in run.happenings if h.what == lane]
        busy[lane] = _covered(there)
        intervals += [_interval(run, lane, h) for h in there]
    waited = dict.fromkeys(_WAITS.values(), 0.0)
    for wait in waits:
        waited[_WAITS[wait.what]] += wait.end - wait.start
    step, compute = run.end - run.start, _covered(work)
    return Timeline(
        origin="measured",
        step_seconds=step,
        compute_seconds=compute,
        exposed_seconds=waited["exposed"],
        collective_wait_seconds=waited["collective wait"],
        device_to_host_seconds=busy["device-to-host"],
        host_to_device_seconds=busy["host-to-device"],
        collective_seconds=busy["collective"],
        intervals=tuple(sorted(intervals, key=lambda i: (i.start, i.end))),
        unpriced=(),
        assumptions=notes,
        idle_seconds=max(0.0, step - compute - sum(waited.values())),
    )


def _interval(
    run: Execution, lane: Lane, happening: Happening, waits: bool = False
) -> Interval:
    return Interval(
        lane=lane,
        name=happening.name,
        start=happening.start - run.start,
        end=happening.end - run.start,
        waits=waits,
    )


def _in_a_row(happenings: Iterable[Happening]) -> list[Happening]:
    """Each from where the one before it ends; what is covered already is left out."""
    found: list[Happening] = []
    free = float("-inf")
    for happening in sorted(happenings, key=lambda h: (h.start, h.end)):
        start = max(happening.start, free)
        if happening.end > start:
            found.append(_part(happening, start, happening.end))
            free = happening.end
    return found


def _part(happening: Happening, start: float, end: float) -> Happening:
    return dataclasses.replace(happening, start=start, end=end)


def _explicit_waits(run: Execution, work: Sequence[Happening]) -> list[Happening]:
    """Events that wait, where the device does not compute at the same time."""
    waits = _in_a_row(h for h in run.happenings if h.what in _WAITS)
    left: list[Happening] = []
    place = 0
    for wait in waits:
        start = wait.start
        while place and work[place - 1].end > start:
            place -= 1
        while place < len(work) and work[place].start < wait.end:
            if work[place].start > start:
                left.append(_part(wait, start, work[place].start))
            start = max(start, work[place].end)
            place += 1
        if wait.end > start:
            left.append(_part(wait, start, wait.end))
    return left


def _gaps(run: Execution, work: Sequence[Happening]) -> list[Happening]:
    """Waiting where nothing runs: up to the end of the copy that ends last there."""
    arriving = sorted(
        (h for h in run.happenings if h.what in _BESIDE and h.what != "host"),
        key=lambda h: h.end,
    )
    ends = [h.start for h in work[1:]] + [run.end]
    begins = [h.end for h in work]
    if work and work[0].start > run.start:
        begins, ends = [run.start, *begins], [work[0].start, *ends]
    elif not work:
        begins, ends = [run.start], [run.end]
    waits: list[Happening] = []
    place = 0
    for begin, end in zip(begins, ends, strict=True):
        last = None
        while place < len(arriving) and arriving[place].end <= end:
            if arriving[place].end > begin:
                last = arriving[place]
            place += 1
        if last is not None:
            waits.append(
                Happening(
                    what="wait for devices"
                    if last.what == "collective"
                    else "wait for host",
                    name=last.wait,
                    wait=last.wait,
                    start=begin,
                    end=last.end,
                )
            )
    return waits


def _covered(happenings: Iterable[Happening]) -> float:
    """Seconds in which at least one of them goes on."""
    return sum(h.end - h.start for h in _in_a_row(happenings))
