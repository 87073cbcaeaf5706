"""Host memory that is taken between some steps only, as saves of a checkpoint take it.

A save copies the state to host memory and writes it from there. What the process takes
more between those steps than between others is what a plan has to leave free. No JAX.
"""

import itertools
import math
import statistics
from collections.abc import Iterator
from typing import NamedTuple

from .._records._audit import Recording
from .._units import format_bytes
from ._steps import Steps

_WARM_STEPS = 2  # a loop's first steps compile, and allocators fill up
_FEW_STEPS = 4
# Allocators and caches take less now and then.
_LEAST_BYTES = 32 << 20
_MIB, _GIB = 1 << 20, 1 << 30


class Staging(NamedTuple):
    """`bytes` more than usual after `steps`, and whether they stay."""

    bytes: int
    steps: tuple[int, ...]
    stays: bool


class _Interval(NamedTuple):
    """From the beginning of a step to the next one's: memory at first, and at most."""

    step: int
    low: int
    high: int


def staging(recording: Recording, steps: Steps) -> Staging | None:
    """What is taken after less than half of the steps; `None` where nothing is."""
    intervals = list(_intervals(recording, steps))
    if len(intervals) < _FEW_STEPS:
        return None
    usual = max(0, round(statistics.median(high - low for _, low, high in intervals)))
    large = [
        interval
        for interval in intervals
        if interval.high - interval.low - usual >= _LEAST_BYTES
    ]
    if not large or 2 * len(large) > len(intervals):
        return None
    most, stays = 0, False
    for run in _runs(large):
        size = max(interval.high for interval in run) - run[0].low - usual
        later = [i.low for i in intervals if i.step > run[-1].step]
        if size > most:
            most = size
            stays = bool(later) and 2 * (min(later) - run[0].low) >= size
    return Staging(most, tuple(interval.step for interval in large), stays)


def staging_note(recording: Recording, steps: Steps) -> str:
    """The same in a sentence, with the argument for a plan; empty where nothing is."""
    found = staging(recording, steps)
    if found is None:
        return ""
    count, platform = recording.devices
    named = ", ".join(map(str, found.steps[:3]))
    more = len(found.steps) - 3
    named += f" and {more} more" if more > 0 else ""
    after = f"after step{'s' * (len(found.steps) > 1)} {named}"
    each = f", for each of its {count} devices" if count > 1 else ""
    text = (
        f"The process takes {format_bytes(found.bytes)} more of the host's memory "
        f"{after} than after others, as saves do that stage the state there. Plan with "
        f"host_reserve={_rounded_up(found.bytes / max(count, 1))!r}{each}."
    )
    if found.stays:
        text += " It is not given back: the next save may take as much again."
    if platform == "cpu":
        text += " On a CPU arrays of JAX's are in it, too."
    return text


def _rounded_up(size: float) -> str:
    if size >= _GIB:
        return f"{math.ceil(10 * size / _GIB) / 10:g}GiB"
    return f"{math.ceil(size / _MIB)}MiB"


def _intervals(recording: Recording, steps: Steps) -> Iterator[_Interval]:
    """Those in which nothing compiles, and memory is known.

    What comes after the last step may be anything, so it is not among them.
    """
    readings = {reading.event: reading for reading in recording.resident}
    compiling = set(_compiling(steps))
    for number, (start, end) in enumerate(itertools.pairwise(steps.starts), 1):
        inside = [readings[k] for k in range(start + 1, end + 1) if k in readings]
        if start not in readings or not inside or not readings[start].bytes:
            continue
        if number > _WARM_STEPS and compiling.isdisjoint(range(start, end)):
            high = max(max(reading.bytes, reading.peak) for reading in inside)
            yield _Interval(number, readings[start].bytes, high)


def _compiling(steps: Steps) -> Iterator[int]:
    """Events that compile: the first ones of each function, and again."""
    seen = set()
    for number, event in enumerate(steps.events):
        if event.what not in ("call", "operation"):
            continue
        if event.compiled_seconds or (event.name, event.key) not in seen:
            seen.add((event.name, event.key))
            yield number


def _runs(intervals: list[_Interval]) -> Iterator[list[_Interval]]:
    """Intervals that follow one another, together: a copy may take several steps."""
    pairs = enumerate(intervals)
    for _, run in itertools.groupby(pairs, key=lambda pair: pair[1].step - pair[0]):
        yield [interval for _, interval in run]
