"""What an inspection found, as plain records that can be printed and written as JSON.

`_inspect.inspect` makes an `Inspection`; `report` prints it. No JAX in here.
"""

import dataclasses
import json
import os
from typing import Any, Self

from .._errors import ArgumentError
from .._record_json import NotSuchARecord, json_of, record_of
from .._units import format_bytes
from . import _perfetto
from ._memory import MEMORY_ROLES, MemoryTimeline
from ._peak import MemoryPeak
from ._program import CopyCheck, Transfer
from ._timeline import Timeline

INSPECTION_VERSION = 1


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class MemoryUse:
    """Bytes per device in one kind of memory, from XLA's buffer assignment.

    `alias` is the part of the outputs that lies in donated arguments.
    """

    argument: int
    output: int
    alias: int
    temp: int

    @property
    def total(self) -> int:
        """`argument + output - alias + temp`: what the step needs while it runs."""
        return self.argument + self.output - self.alias + self.temp


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Memory:
    """Memory of a compiled program by kind."""

    device: MemoryUse
    host: MemoryUse


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Hazard:
    """Something in the compiled program that costs time or memory without a word.

    `kind` is one of `HAZARD_KINDS`, `what` says what that is. `where` is the user's
    source line and the name of the operation, as far as XLA kept them; `cost` and
    `remedy` are sentences.
    `instruction` is the (first) instruction in the compiled text, `count` how many
    there are or how often it happens per step, `seconds` what it is estimated to cost
    per step.
    """

    kind: str
    where: str
    cost: str
    remedy: str
    instruction: str
    count: float
    seconds: float
    what: str = ""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Omission:
    """What could not be read or looked for, and why: nothing is said about it."""

    what: str
    reason: str


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class Inspection:
    """What a compiled program really does on one device.

    `transfers` are all copies between device and host, `hazards` what a user should
    know, worst first. `timeline` is simulated from the compiled schedule. `flops`
    counts the operations of the device's matrix products per step, those of recomputed
    values too, and `nominal_seconds` is how long these take at the rates that the chip
    is sold with, for the types that they read (0: not known). `target` is the target's
    name. `omissions` says what this inspection says nothing about: hazards that could
    not be looked for, parts of the program that could not be read.
    `memory_timeline` is what lies in memory over the step, `None` where the compiler
    did not tell (then `omissions` says so).
    `copies` sets what a plan offloads beside what the program moves of it: of a planned
    step only.
    `capacity_bytes` is what the target allows of a device (0: not known). Where the
    step needs more, or more than its plan's budget, `peak` has the arrays at the
    predicted peak. If the compiler refused the program for that, `refusal` has its
    words, memory is predicted, and there is nothing else.
    """

    target: str
    program: str
    memory: Memory
    transfers: tuple[Transfer, ...]
    hazards: tuple[Hazard, ...]
    timeline: Timeline
    flops: float
    omissions: tuple[Omission, ...] = ()
    memory_timeline: MemoryTimeline | None = None
    copies: tuple[CopyCheck, ...] = ()
    capacity_bytes: int = 0
    refusal: str = ""
    peak: MemoryPeak | None = None
    nominal_seconds: float = 0.0

    @property
    def fits(self) -> bool | None:
        """Whether a device of the target has room for the step; `None`: not known."""
        if self.refusal:
            return False
        if not self.capacity_bytes:
            return None
        return self.memory.device.total <= self.capacity_bytes

    def __repr__(self) -> str:
        """One line: the timeline alone would fill pages of a notebook."""
        memory = ", ".join(
            f"{kind} {format_bytes(getattr(self.memory, kind).total)}"
            for kind in ("device", "host")
        )
        return (
            f"<{type(self).__name__} of {self.program} on {self.target}: {memory}, "
            f"{len(self.transfers)} transfers, {len(self.hazards)} hazards>"
        )

    def to_json(self) -> str:
        """The inspection as JSON text, totals included; `version` says which form.

        >>> json.loads(inspection.to_json())["version"]  # doctest: +SKIP
        1
        """
        record: dict[str, Any] = {
            "version": INSPECTION_VERSION,
            **dataclasses.asdict(self),
        }
        for kind in ("device", "host"):
            record["memory"][kind]["total"] = getattr(self.memory, kind).total
        for written, transfer in zip(record["transfers"], self.transfers, strict=True):
            written["total_bytes"] = transfer.total_bytes
        return json.dumps(record, indent=1)

    def to_perfetto(self, path: str | os.PathLike[str]) -> None:
        """Writes the timeline, and memory by role, for https://ui.perfetto.dev.

        Lanes are those of `Timeline.to_perfetto`; each role of device and host memory
        is a counter track below them, in bytes.

        **Raises:** `ArgumentError` for a path that cannot be written.
        """
        timelines = {self.timeline.origin: self.timeline}
        _perfetto.write(timelines, path, self.memory_timeline)

    @classmethod
    def from_json(cls, text: str) -> Self:
        """The inspection that `to_json` wrote.

        What `stowax inspect --measure --json` adds, the measured time, is left out.

        **Raises:** `ArgumentError` for text that is no inspection, or one of another
        version of stowax.
        """
        return cls._read(text, "text", "text")

    @classmethod
    def _read(cls, text: str, argument: str, got: str) -> Self:
        instead = "Give what Inspection.to_json or `stowax inspect --json` wrote."
        try:
            data = json_of(text)
        except ValueError as error:
            raise ArgumentError(
                argument, f"{got}, which is no whole JSON ({error})", instead
            ) from None
        if not isinstance(data, dict) or not {"version", "timeline"} <= data.keys():
            raise ArgumentError(argument, f"{got}, which is no inspection", instead)
        if data["version"] != INSPECTION_VERSION:
            raise ArgumentError(
                argument,
                f"{got}, an inspection of version {data['version']}",
                f"This stowax reads version {INSPECTION_VERSION}: inspect again, or "
                "install the stowax that wrote it.",
            )
        try:
            found = record_of(cls, _without_totals(data))
            _check(found)
            return found
        except NotSuchARecord as error:
            raise ArgumentError(
                argument, f"{got}, which is no whole inspection ({error})", instead
            ) from None


def _check(found: Inspection) -> None:
    """**Raises:** `NotSuchARecord` for a loop or a moment that no step has."""
    for k, interval in enumerate(found.timeline.intervals):
        if min(interval.count, *(turns for turns, _ in interval.around), 1) < 1:
            raise NotSuchARecord(f"timeline.intervals.{k} never is")
    memory = found.memory_timeline
    if memory is None:
        return
    if any(loop.trips < 1 for loop in memory.loops):
        raise NotSuchARecord("memory_timeline.loops has one that never runs")
    moments = (*memory.device.moments, *memory.host.moments)
    if any(len(moment.bytes) != len(MEMORY_ROLES) for moment in moments):
        raise NotSuchARecord("memory_timeline has a moment without a role")


def _without_totals(data: dict[str, Any]) -> dict[str, Any]:
    """The fields alone: totals are made of them, the version has been looked at."""
    found = {k: v for k, v in data.items() if k not in ("version", "measured")}
    for inner, derived in (
        (_values(data.get("memory")), "total"),
        (data.get("transfers"), "total_bytes"),
    ):
        for item in inner if isinstance(inner, list) else ():
            if isinstance(item, dict):
                item.pop(derived, None)
    return found


def _values(mapping: Any) -> list[Any]:
    return list(mapping.values()) if isinstance(mapping, dict) else []
