"""What an event of a trace is to the program that ran: work, a copy, a wait.

Events carry the names of instructions, and the compiled `Program` knows what those do.
`_xplane` reads the events and asks here.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any, Literal

from .._records._program import COLLECTIVES, Instruction, Program
from .._records._timeline import LANES

What = Literal[
    "compute",
    "device-to-host",
    "host-to-device",
    "collective",
    "host",
    "wait for host",
    "wait for devices",
]

_LOOPS = {"while", "conditional", "call"}


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Happening:
    """One event: what the device, or the link, did from `start` to `end` (seconds).

    `wait` is the name of the instruction that waits for it to end.
    """

    what: What
    name: str
    wait: str
    start: float
    end: float


@dataclasses.dataclass(frozen=True, slots=True)
class Event:
    """An event of the trace: `name` is the instruction's, `shown` what was written."""

    name: str
    shown: str
    start: float
    end: float
    stats: Mapping[str, Any]


class Roles:
    """What the instructions of a program do, by name."""

    def __init__(self, program: Program):
        self.program = program
        self.items: dict[str, Instruction] = {
            item.name: item
            for computation in program.computations.values()
            for item in computation.instructions
        }
        self.entry = {
            item.name: place
            for place, item in enumerate(
                program.computations[program.entry].instructions
            )
        }
        self.lanes: dict[str, What] = {}
        self.dones: dict[str, What] = {}
        self.starts: dict[str, str] = {}
        self.names: dict[str, str] = {}
        for copy in program.transfers:
            into = copy.direction == "host-to-device"
            self.lanes[copy.start] = "host-to-device" if into else "device-to-host"
            self.names[copy.start] = copy.op_name or copy.start
            self.dones[copy.done] = "wait for host"
            self.starts[copy.done] = copy.start
        for item in self.items.values():
            self._add(item)
        self.waiting = {start: done for done, start in self.starts.items()}

    def _add(self, item: Instruction) -> None:
        kind = (item.wrapped or item.opcode).removesuffix("-start")
        if item.opcode.endswith("-done"):
            start = self.items.get(item.operands[0]) if item.operands else None
            if start is not None and (role := self._lane(start)):
                host = role != "collective"
                self.starts[item.name] = start.name
                self.dones[item.name] = "wait for host" if host else "wait for devices"
        elif item.name not in self.lanes and (role := self._lane(item)):
            self.lanes[item.name] = role
            if not item.opcode.endswith("-start"):
                devices = kind in COLLECTIVES
                self.dones[item.name] = (
                    "wait for devices" if devices else "wait for host"
                )

    def _lane(self, item: Instruction) -> What | None:
        if item.name in self.lanes:
            return self.lanes[item.name]
        if item.execution_thread or (
            item.opcode == "async-start" and item.wrapped == "custom-call"
        ):
            return "host"
        if item.opcode == "fusion" and item.estimated_cycles is not None:
            return None  # compute with a collective inside
        kind = (item.wrapped or item.opcode).removesuffix("-start")
        return "collective" if kind in COLLECTIVES else None

    def is_loop(self, name: str) -> bool:
        """Whether the instruction only runs others."""
        item = self.items.get(name)
        return (item.opcode if item else name.split(".")[0]) in _LOOPS

    def has_run(self, event: Event) -> bool:
        """Whether an event names our program as its own."""
        return event.stats.get("hlo_module") == self.program.name


def happening(what: What, event: Event, roles: Roles) -> Happening:
    """What happened in an event.

    The device's own doings have the name of the instruction, copies that of the
    operation that they serve: as in a simulation.
    """
    beside = what in LANES and what != "compute"
    return Happening(
        what=what,
        name=roles.names.get(event.name, event.name) if beside else event.name,
        wait=roles.waiting.get(event.name, event.name),
        start=event.start,
        end=event.end,
    )
