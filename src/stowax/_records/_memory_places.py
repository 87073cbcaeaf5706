"""Places in memory as the compiler hands them out: the records of `_buffers`.

No JAX and no protobuf in here: `_memory_roles` and `_memory_curve` work on these.
"""

import dataclasses
from collections.abc import Mapping

# Instructions that hand on what others made: their own names say nothing about it.
HANDED_ON = {
    "parameter",
    "get-tuple-element",
    "tuple",
    "while",
    "bitcast",
    "reshape",
    "copy",
    "copy-start",
    "copy-done",
    "async-done",
    "opt-barrier",
    "conditional",
    "call",
}


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Member:
    """One array of a place: the instruction that makes it, and what is known of it.

    `updates` says that it writes into a part of the place (a stack's slot).
    """

    instruction: str
    computation: str
    opcode: str
    position: int
    framework_name: str
    source: str
    dimensions: tuple[int, ...]
    dtype: str
    array_bytes: int
    updates: bool


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """A place in memory and its members, in the order of the schedule.

    `kind` says whose it is: `argument` (of that name, first read at `source`),
    `output`, `constant` or `temporary`. `space` is XLA's number of the memory.
    """

    kind: str
    argument: str
    source: str
    bytes: int
    space: int
    first: int
    last: int
    members: tuple[Member, ...]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """All places of a program, and its flat schedule: (computation, instruction).

    `spans` has the first and last position of every computation, with all that runs
    inside of it.
    """

    places: tuple[Place, ...]
    schedule: tuple[tuple[str, str], ...]
    spans: Mapping[str, tuple[int, int]]


def says_something(member: Member) -> bool:
    """Whether a member's own name tells what lies there."""
    return member.opcode not in HANDED_ON and bool(member.framework_name)
