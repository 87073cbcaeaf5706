"""What lies in memory while a compiled program runs, as plain records.

`_buffers` reads `Block`s from the compiler's buffer assignment, `_memory_roles` says
what each is for, `_memory_curve` puts them over the time of a step. No JAX in here.
"""

import dataclasses
import itertools
from collections.abc import Iterator, Mapping
from typing import Literal, get_args

MemoryRole = Literal[
    "parameter",
    "optimizer state",
    "batch",
    "argument",
    "output",
    "kept activation",
    "offloaded",
    "offload in flight",
    "recomputed",
    "gradient",
    "workspace",
]

MEMORY_ROLES: tuple[MemoryRole, ...] = get_args(MemoryRole)
"""What bytes may be for, in the order in which they are drawn, from the bottom up.

An `argument` is one whose role nobody could tell. What waits in host memory is
`offloaded`; on the device it is an `offload in flight`, before it leaves or after it
came back. `workspace` is everything that a step makes and drops on its way.
"""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Block:
    """A place in memory, with the arrays that share it without being moved.

    A loop's carry, say, with what its body writes into it. `bytes` is what the compiler
    reserves, `array_bytes` the largest array in it: the difference is padding. `name`
    is the instruction that says most about it, `framework_name` its name in the user's
    framework (scopes and the operation), `source` reads `file:line`. `shape` is that
    of the largest array, such as `bfloat16[40,8,2048,5120]`.

    `first` and `last` are positions in the flat schedule between which it is alive,
    both included. A stack is written layer by layer in the loop `filled_in` and read
    layer by layer in `emptied_in` (names of loop bodies; empty for what is no stack).
    """

    name: str
    bytes: int
    array_bytes: int
    shape: str
    role: MemoryRole
    framework_name: str
    source: str
    first: int
    last: int
    filled_in: str = ""
    emptied_in: str = ""

    @property
    def padding(self) -> int:
        """Bytes that no array needs: rows filled up to the chip's tiles."""
        return max(0, self.bytes - self.array_bytes)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Moment:
    """What is in memory at one time of the step.

    `seconds` is on the simulated timeline, `position` in the flat schedule. `bytes` has
    an entry per role of `MEMORY_ROLES`. `empty` is the part of it in stacks that holds
    nothing yet, or nothing any more. `loop` and `trip` say where in a loop this is.
    """

    seconds: float
    position: int
    bytes: tuple[int, ...]
    empty: int
    loop: str = ""
    trip: int = 0

    @property
    def total(self) -> int:
        """All roles together."""
        return sum(self.bytes)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Loop:
    """A loop of the program: its body's name, how often it runs, where it stands.

    `first` and `last` are positions in the flat schedule; `framework_name` and `source`
    are those of the loop itself.
    """

    body: str
    trips: int
    first: int
    last: int
    framework_name: str
    source: str


def held_part(
    block: Block, position: int, loop: str, trip: int, loops: Mapping[str, Loop]
) -> float:
    """The part of a stack that holds a layer's value which is still to be read.

    **Arguments:** `position`, `loop` and `trip` are those of a `Moment`, `loops` has
    each by its body's name. What is no stack holds something all of the time.
    """
    fill, drain = loops.get(block.filled_in), loops.get(block.emptied_in)
    if fill is not None and position <= fill.last:
        if position < fill.first:
            return 0.0
        return (trip + 1) / fill.trips if loop == fill.body else 1.0
    if drain is not None and position >= drain.first:
        if position > drain.last:
            return 0.0
        return 1 - trip / drain.trips if loop == drain.body else 1.0
    return 1.0


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class MemoryCurve:
    """One memory of one device over a step, rebuilt from the buffer assignment.

    `peak_bytes` is the most that is alive at a time, `peak_position` where in the flat
    schedule, `peak_instruction` its name. `blocks` are all places, largest first;
    `moments` follow the time of the step, loops written out.
    """

    peak_bytes: int
    peak_position: int
    peak_instruction: str
    peak_seconds: float
    blocks: tuple[Block, ...]
    moments: tuple[Moment, ...]

    def at(self, position: int) -> Iterator[Block]:
        """The blocks that are alive at a position, largest first."""
        return (b for b in self.blocks if b.first <= position <= b.last)

    def top(self, count: int = 10) -> tuple[Block, ...]:
        """The largest contributors to the peak."""
        return tuple(itertools.islice(self.at(self.peak_position), count))

    def by_role(self) -> dict[MemoryRole, int]:
        """Bytes at the peak by role, without the roles that have none."""
        found = dict.fromkeys(MEMORY_ROLES, 0)
        for block in self.at(self.peak_position):
            found[block.role] += block.bytes
        return {role: much for role, much in found.items() if much}


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class MemoryTimeline:
    """Device and host memory over a step.

    `compiler_peak_bytes` is the peak as XLA itself reports it, and `peak_bytes` what
    that would count of these places: arguments in host memory are in it.
    `loops` are those that both curves have written out.
    """

    device: MemoryCurve
    host: MemoryCurve
    loops: tuple[Loop, ...]
    peak_bytes: int
    compiler_peak_bytes: int
