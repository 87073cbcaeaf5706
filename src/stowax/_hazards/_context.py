"""What the searches look at, and the words and figures that several of them need."""

from collections.abc import Iterator, Mapping
from typing import NamedTuple

from .._records._inspection import Hazard, Memory
from .._records._intent import Intent
from .._records._program import (
    Computation,
    Instruction,
    Misplaced,
    Program,
    Transfer,
)
from .._records._stages import Link
from .._records._timeline import Timeline
from ._kinds import KINDS


class Machine(NamedTuple):
    """The machine, as far as hazards depend on it; bytes are per device.

    `pinned_bytes` is what may be pinned, `None` where there is no such limit.
    """

    platform: str
    device_bytes: int
    host_bytes: int
    pinned_bytes: int | None
    attached: bool


class Context(NamedTuple):
    """A compiled program, what it takes, what was asked for, and where it runs.

    `seconds` has the compute seconds of an instruction, one time.
    """

    program: Program
    timeline: Timeline
    link: Link
    memory: Memory
    machine: Machine
    intent: Intent
    seconds: Mapping[str, float]
    waits: Mapping[str, float]

    def work(self, item: Instruction) -> float:
        """Seconds of work; a loop counter that costs a GPU a launch is none."""
        return self.seconds.get(item.name, 0.0) if item.result_bytes > 8 else 0.0

    def on_device(self) -> Iterator[Computation]:
        """The computations that the device runs."""
        for computation in self.program.computations.values():
            if not computation.execution_thread:
                yield computation

    def link_seconds(self, transfer: Transfer) -> float:
        """Seconds of one copy on the link, one time."""
        into = transfer.direction == "host-to-device"
        rate = self.link.host_to_device if into else self.link.device_to_host
        return transfer.bytes / rate

    def exposed_seconds(self, transfer: Transfer) -> float:
        """Seconds per step in which the device waits for this copy."""
        return self.waits.get(transfer.done, 0.0)


def make_context(
    program: Program,
    timeline: Timeline,
    link: Link,
    memory: Memory,
    machine: Machine,
    intent: Intent,
) -> Context:
    """The context of one inspection."""
    seconds: dict[str, float] = {}
    waits: dict[str, float] = {}
    for interval in timeline.intervals:
        if interval.lane != "compute":
            continue
        if interval.waits:
            waits[interval.name] = waits.get(interval.name, 0.0) + interval.seconds
        else:
            seconds[interval.name] = interval.end - interval.start
    return Context(program, timeline, link, memory, machine, intent, seconds, waits)


def of_a_plan(name: str) -> bool:
    """Whether a plan of stowax put this copy there: it has weighed it, waits included.

    `name` is a scope, or a path of scopes.
    """
    return any(part.startswith("stowax.") for part in name.split("/"))


def where(item: Instruction | Transfer | Misplaced) -> str:
    """The user's line and the operation's name, as far as XLA kept them."""
    named = item.op_name or (item.start if isinstance(item, Transfer) else item.name)
    return f"{item.source} ({named})" if item.source else named


def hazard(
    kind: str,
    where: str,
    cost: str,
    *,
    instruction: str = "",
    count: float = 1,
    seconds: float = 0.0,
) -> Hazard:
    """A hazard of `kind`, with the remedy of its kind."""
    return Hazard(
        kind=kind,
        where=where,
        cost=cost,
        remedy=KINDS[kind].remedy,
        what=KINDS[kind].what,
        instruction=instruction,
        count=count,
        seconds=seconds,
    )


def listed(names: tuple[str, ...] | list[str]) -> str:
    """Names in quotes for a sentence, the first four of them."""
    shown = ", ".join(repr(name) for name in names[:4])
    more = len(names) - 4
    return f"{shown} and {more} more" if more > 0 else shown
