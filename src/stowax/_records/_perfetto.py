"""A timeline as a file for https://ui.perfetto.dev, to be zoomed and searched.

The form is the trace events that Chrome defined and Perfetto imports: complete events
(`ph: X`) with start and length in microseconds, and metadata (`ph: M`) that names
processes and threads. A lane is a thread, a timeline a process: two timelines of one
file stand under each other, on the same axis of time. Memory is counters (`ph: C`), a
track for each role of each memory.

`_timeline` calls it and hands its records in; there is no import in that direction.

What goes silently wrong: events of one thread that overlap without one lying inside of
the other are dropped by importers. Intervals of one lane follow each other, on the link
and on the device; `_spread` moves what does not to a second thread of the same name.
"""

import itertools
import json
import os
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Protocol, runtime_checkable

from .._files import write_whole
from ._memory import MEMORY_ROLES, MemoryTimeline

MOST_TIMES = 1000
"""Times of one interval that are written out: no stack of layers is deeper. A loop over
100,000 blocks would fill the browser's memory."""

_MICRO = 1e6
_WAITING = "terrible"  # the reserved colour that both viewers paint red


@runtime_checkable
class Interval(Protocol):
    """The fields of `_timeline.Interval` that are read here."""

    @property
    def lane(self) -> str: ...
    @property
    def name(self) -> str: ...
    @property
    def start(self) -> float: ...
    @property
    def end(self) -> float: ...
    @property
    def count(self) -> int: ...
    @property
    def waits(self) -> bool: ...
    def starts(self) -> Iterator[float]: ...


@runtime_checkable
class HasIntervals(Protocol):
    """A `_timeline.Timeline`."""

    @property
    def intervals(self) -> tuple[Any, ...]: ...


def write(
    timelines: Mapping[str, HasIntervals],
    path: str | os.PathLike[str],
    memory: MemoryTimeline | None = None,
) -> None:
    """Writes `timelines` (a name each) to one file; see `Timeline.to_perfetto`.

    **Arguments:** `memory` is over the time of the first of them.
    """
    events = [
        event
        for number, (name, timeline) in enumerate(timelines.items(), start=1)
        for event in trace_events(name, timeline.intervals, number)
    ]
    if memory is not None:
        events += memory_events(memory)
    text = json.dumps({"traceEvents": events, "displayTimeUnit": "ms"})
    write_whole(path, text)


def trace_events(
    name: str, intervals: Iterable[Interval], process: int = 1
) -> Iterator[dict[str, Any]]:
    """The trace events of one timeline, as process number `process`."""
    yield _named("process_name", process, 0, f"stowax: {name}")
    lanes: dict[str, list[Interval]] = {}
    for interval in intervals:
        lanes.setdefault(interval.lane, []).append(interval)
    thread = 0
    for lane in sorted(lanes, key=_place):
        times = [time for interval in lanes[lane] for time in _times(interval)]
        for track in _spread(times):
            thread += 1
            yield _named("thread_name", process, thread, lane)
            yield {
                "ph": "M",
                "name": "thread_sort_index",
                "pid": process,
                "tid": thread,
                "args": {"sort_index": thread},
            }
            for start, end, interval, turn in track:
                yield _event(process, thread, start, end, interval, turn)


def memory_events(memory: MemoryTimeline) -> Iterator[dict[str, Any]]:
    """Bytes by role over the step as counters of the first process."""
    for kind, curve in (("device", memory.device), ("host", memory.host)):
        used = [
            number
            for number in range(len(MEMORY_ROLES))
            if any(moment.bytes[number] for moment in curve.moments)
        ]
        at_a_time = itertools.groupby(curve.moments, key=lambda moment: moment.seconds)
        for seconds, moments in at_a_time if used else ():
            highest = max(moments, key=lambda moment: moment.total)
            yield {
                "ph": "C",
                "name": f"{kind} memory, bytes",
                "pid": 1,
                "ts": seconds * _MICRO,
                "args": {MEMORY_ROLES[n]: highest.bytes[n] for n in used},
            }


_ORDER = ("compute", "device-to-host", "host-to-device", "collective", "host")

_Time = tuple[float, float, Interval, int]


def _place(lane: str) -> int:
    return _ORDER.index(lane) if lane in _ORDER else len(_ORDER)


def _times(interval: Interval) -> Iterator[_Time]:
    """The times of an interval that are written, loops expanded up to the limit."""
    length = interval.end - interval.start
    for turn, start in enumerate(itertools.islice(interval.starts(), MOST_TIMES)):
        yield start, start + length, interval, turn


def _spread(times: list[_Time]) -> list[list[_Time]]:
    """`times` on as few tracks as it takes for none to overlap on one of them.

    Rounding is forgiven up to a nanosecond.
    """
    tracks: list[list[_Time]] = []
    for time in sorted(times, key=lambda time: (time[0], time[1])):
        for track in tracks:
            if track[-1][1] <= time[0] + 1e-9:
                track.append(time)
                break
        else:
            tracks.append([time])
    return tracks


def _named(what: str, process: int, thread: int, name: str) -> dict[str, Any]:
    return {
        "ph": "M",
        "name": what,
        "pid": process,
        "tid": thread,
        "args": {"name": name},
    }


def _event(
    process: int, thread: int, start: float, end: float, interval: Interval, turn: int
) -> dict[str, Any]:
    event: dict[str, Any] = {
        "ph": "X",
        "name": f"wait: {interval.name}" if interval.waits else interval.name,
        "cat": "wait" if interval.waits else interval.lane,
        "pid": process,
        "tid": thread,
        "ts": start * _MICRO,
        "dur": (end - start) * _MICRO,
        "args": {"waits": interval.waits},
    }
    if interval.waits:
        event["cname"] = _WAITING
    if interval.count > 1:
        event["args"] |= {"time": turn + 1, "times": interval.count}
        if interval.count > MOST_TIMES:
            event["args"]["written"] = MOST_TIMES
    return event
