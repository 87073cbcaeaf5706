"""What a compiled program is, as plain records: what runs, and what it moves.

`_program.read_program` makes them, `_simulate` puts times to them, `_inspect` looks for
hazards in them. They know neither JAX nor protobuf: an inspection made beside a TPU is
reported on a laptop.
"""

import dataclasses
from collections.abc import Mapping
from typing import Literal

Direction = Literal["device-to-host", "host-to-device", "host-to-host"]

HOST_SPACE = 5
"""XLA's number of the host memory space, on TPU and GPU (`S(5)` in a layout)."""

COLLECTIVES = frozenset(
    {
        "all-gather",
        "all-reduce",
        "all-to-all",
        "collective-broadcast",
        "collective-permute",
        "ragged-all-to-all",
        "reduce-scatter",
        "send",
        "recv",
    }
)
"""Opcodes that talk to other devices, without the `-start` of their asynchronous
form."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Instruction:
    """One instruction of a compiled program.

    For the start of an asynchronous operation `wrapped` is the opcode of what it does,
    for a fusion the collective inside, if there is one. `called` names computations.
    `flops` counts matrix products only, `dtype` is what they read, or the result's.
    `estimated_cycles` is the TPU compiler's own figure, where there is one. `trips` is
    the number of runs of a `while` body, `None` where it is not a `while` or depends on
    data. `execution_thread` is empty for the device and `host` for what the compiler
    moved to the host's processor. `source` reads `file:line`, empty where XLA kept
    none. `tuple_index` is which element a `get-tuple-element` takes. `reorders` says
    that it writes what it reads with its axes in another order in memory, and computes
    nothing.
    """

    name: str
    opcode: str
    wrapped: str
    target: str
    result_bytes: int
    operands: tuple[str, ...]
    called: tuple[str, ...]
    op_name: str
    source: str
    estimated_cycles: int | None
    flops: float
    dtype: str
    bytes_accessed: int
    execution_thread: str
    trips: int | None
    tuple_index: int | None = None
    reorders: bool = False


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Computation:
    """A scheduled computation: its instructions in the order in which they are issued.

    `executions` is how often it runs per step. It is whole, but for the branches of a
    `conditional`, which share the runs evenly. `execution_thread` is empty for the
    device.
    """

    name: str
    instructions: tuple[Instruction, ...]
    execution_thread: str
    executions: float


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Transfer:
    """One copy between memory spaces; `bytes` each time, `trips` times per step.

    `start` and `done` are instruction names, the same one for a synchronous copy.
    `device-to-host` and `host-to-device` cross the link. A fusion that reads or writes
    host memory directly is a synchronous transfer too. `tiled_bytes` is what the array
    takes in the chip's tiles, padding included.

    An inspection adds `seconds` on the link and `exposed_seconds` of waiting, all trips
    together, and the name of the plan's candidate that the copy serves.
    """

    direction: Direction
    bytes: int
    trips: float
    asynchronous: bool
    start: str
    done: str
    computation: str
    op_name: str
    source: str
    tiled_bytes: int = 0
    seconds: float = 0.0
    exposed_seconds: float = 0.0
    serves: str = ""

    @property
    def total_bytes(self) -> int:
        """Bytes per step."""
        return round(self.bytes * self.trips)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Misplaced:
    """A slice in a loop that the compiler copies from or to another place."""

    name: str
    op_name: str
    source: str


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Fill:
    """An array of `bytes` of which the program writes one slice at a time.

    It lies in the device's main memory.
    """

    name: str
    bytes: int


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class CopyCheck:
    """One value that a plan offloads: its bytes, and what of it the program moves.

    Bytes are per step and device, all layers together. State that streams in blocks
    moves a block or two more: the loop that keeps copies in flight runs once more.
    """

    name: str
    planned_bytes: int
    out_bytes: int
    in_bytes: int

    @property
    def as_planned(self) -> bool:
        """Whether all of it leaves and comes back, and not twice."""
        least, most = self.planned_bytes, 1.5 * self.planned_bytes
        return all(least <= moved < most for moved in (self.out_bytes, self.in_bytes))


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Program:
    """A compiled program of one device. `computations` holds what is scheduled."""

    name: str
    entry: str
    computations: Mapping[str, Computation]
    transfers: tuple[Transfer, ...]
    uncounted_loops: tuple[str, ...]
    """`while` instructions whose trips depend on data; they count as one trip."""
    aliased: frozenset[int] = frozenset()
    """Numbers of the entry's parameters whose memory an output takes: donated ones."""
    crossing: frozenset[int] = frozenset()
    """Those of them that lie in another memory than the output: no program has any."""
    scheduled: bool = True
    """Whether the compiler's own order is known, and not just what depends on what."""
    misplaced: tuple[Misplaced, ...] = ()
    fills: tuple[Fill, ...] = ()
    unread: tuple[str, ...] = ()
    """What the reader did not know, in words: it counts for less than it should."""
