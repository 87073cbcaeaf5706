"""When the device computes and when it waits: one record for guesses and for facts.

`_simulate` makes a `Timeline` from a compiled schedule, `_measure` makes one from a
trace; the report draws both in the same way. Times are seconds from the start of a
step, of one device. No JAX in here.
"""

import dataclasses
from typing import Literal

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
    `end` are of the first of these times. `waits` marks a stretch of the compute lane
    in which the device does nothing because a copy or a collective has not arrived.
    """

    lane: Lane
    name: str
    start: float
    end: float
    count: int = 1
    period: float = 0.0
    waits: bool = False

    @property
    def seconds(self) -> float:
        """Seconds per step, all times together."""
        return (self.end - self.start) * self.count


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


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Timeline:
    """One step of one device.

    `step_seconds` is `compute_seconds` (the device works) plus `exposed_seconds` (it
    waits for a copy between device and host, or for the host) plus
    `collective_wait_seconds` (it waits for other devices). `device_to_host_seconds` and
    `host_to_device_seconds` are how long each direction of the link is busy, hidden or
    not. `origin` says whether this was simulated or measured, `assumptions` what a
    simulation took for granted.
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
