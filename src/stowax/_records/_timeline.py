"""When the device computes and when it waits: one record for guesses and for facts.

`_simulate` makes a `Timeline` from a compiled schedule, `_measure` makes one from a
trace; the report draws both in the same way. Times are seconds from the start of a
step, of one device. No JAX in here.
"""

import dataclasses
import os
from collections.abc import Iterator
from typing import Literal

from . import _perfetto

Lane = Literal["compute", "device-to-host", "host-to-device", "collective", "host"]

LANES: tuple[Lane, ...] = (
    "compute",
    "device-to-host",
    "host-to-device",
    "collective",
    "host",
)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Interval:
    """Something that occupies a lane from `start` to `end`, in seconds of the step.

    `count` is how often it happens in a step and `period` the seconds from one time to
    the next: a loop body that runs 40 times is not written out 40 times. `start` and
    `end` are of the first of these times. In a loop inside of loops, `around` has the
    turns and the period of each of those outside, from the inside out; `count` is the
    product of all, and `period` that of the innermost. `waits` marks a stretch of the
    compute lane in which the device does nothing because a copy or a collective has not
    arrived.
    """

    lane: Lane
    name: str
    start: float
    end: float
    count: int = 1
    period: float = 0.0
    waits: bool = False
    around: tuple[tuple[int, float], ...] = ()

    @property
    def seconds(self) -> float:
        """Seconds per step, all times together."""
        return (self.end - self.start) * self.count

    def starts(self) -> Iterator[float]:
        """When each of its times starts, in seconds of the step, in order."""
        turns = self.count
        for outside, _ in self.around:
            turns //= outside
        loops = ((turns, self.period), *self.around)
        for number in range(self.count):  # one by one: there may be very many
            later = 0.0
            for turns, period in loops:
                number, step = divmod(number, turns)
                later += step * period
            yield self.start + later


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Unpriced:
    """Something whose time nobody gave us, and what it was taken to cost instead.

    `count` is how often per step, `seconds` what it was taken to cost, all times
    together: its bytes over the rate of the memory or link that they cross, never zero
    bytes for free.
    """

    what: str
    reason: str
    count: float
    seconds: float


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class Timeline:
    """One step of one device.

    `step_seconds` is `compute_seconds` (the device works) plus `exposed_seconds` (it
    waits for a copy between device and host, or for the host) plus
    `collective_wait_seconds` (it waits for other devices) plus `idle_seconds` (it does
    nothing, and nothing says why: between two kernels, say; a simulation has none).
    `device_to_host_seconds` and `host_to_device_seconds` are how long each direction of
    the link is busy, hidden or not. `origin` says whether this was simulated or
    measured, `assumptions` what a simulation took for granted, or how it was measured.
    """

    origin: Literal["simulated", "measured"]
    step_seconds: float
    compute_seconds: float
    exposed_seconds: float
    collective_wait_seconds: float
    device_to_host_seconds: float
    host_to_device_seconds: float
    collective_seconds: float
    intervals: tuple[Interval, ...]
    unpriced: tuple[Unpriced, ...]
    assumptions: tuple[str, ...] = ()
    idle_seconds: float = 0.0

    def __repr__(self) -> str:
        """One line: the intervals alone would fill pages."""
        return (
            f"<Timeline, {self.origin}: step {self.step_seconds:.6g} s, compute "
            f"{self.compute_seconds:.6g} s, exposed {self.exposed_seconds:.6g} s, "
            f"{len(self.intervals)} intervals>"
        )

    def to_perfetto(self, path: str | os.PathLike[str]) -> None:
        """Writes a trace that https://ui.perfetto.dev opens, one track per lane.

        It is a JSON file of trace events, which chrome://tracing reads too. Loops are
        written out, at most the first `_perfetto.MOST_TIMES` times of each interval;
        where there are more, the event's arguments say so. Waiting stretches of the
        compute lane are named so, and have a colour of their own.

        **Raises:** `ArgumentError` for a path that cannot be written.

        >>> step = jax.jit(lambda x: x @ x)
        >>> found = stowax.inspect(step, jnp.ones((256, 256)), target="v5e-4")
        >>> found.timeline.to_perfetto("trace.json")
        """
        _perfetto.write({self.origin: self}, path)
