"""What a step asked for, before the compiler decided: plain records, no JAX.

`_intent` reads them off a traced and lowered function, or off a compiled one, which
remembers less. `_hazards` lays them beside the compiled program.
"""

import dataclasses
from collections.abc import Mapping
from typing import Literal

StackKind = Literal["own", "shared", "summed", "kept", ""]
"""What is wrong with a loop's stack: it is what the loop reads part by part, or what
it reads in every iteration; it is only summed; it is kept for the gradients of a loss
that is only summed; or nothing."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class CopyAsked:
    """A copy to host memory that the step asks for, by a policy or by `device_put`.

    `bytes` is the least that one device moves each time, `trips` how often per step
    (`None` where that is data). `returned` says that the step returns it, so that it
    does not come back. `shape` is of all devices together. `seconds_again` is
    what one device takes to make the value once more from what its layer reads; `None`
    where it is an input of the layer, or where nobody can say.
    """

    bytes: int
    trips: int | None
    shape: tuple[int, ...]
    item_bytes: int
    name: str
    source: str
    seconds_again: float | None
    returned: bool = False

    @property
    def total_bytes(self) -> int:
        """Bytes per step; a loop of unknown length counts once."""
        return self.bytes * (1 if self.trips is None else self.trips)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class PolicyAsked:
    """A checkpoint policy in the step, and the names that it mentions.

    `others` says that the policy may also store what has no name, `times` in how many
    places it stands.
    """

    names: tuple[str, ...]
    others: bool
    source: str
    times: int


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class StackAsked:
    """What a loop returns of every iteration, stacked.

    `bytes` is of all devices and all `trips` iterations together. `what` is its type in
    words. `source` is the user's line of the loop. Arrays that the step itself writes
    slice by slice are among them, of one trip and without a kind.
    """

    bytes: int
    trips: int
    what: str
    kind: StackKind
    source: str


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ArgumentAsked:
    """One array among the arguments.

    `bytes` is per device. `parameter` is its number in the compiled program, `None` if
    nothing reads it. `returned` is the output (a flat position) that takes its place:
    state; `None` for what is no state, or where the step was not traced.
    `fetched_in_vain` says that the step brings it to device memory, where it is.
    `unchanged` is the output that is the argument as it is.
    """

    path: str
    bytes: int
    parameter: int | None
    on_host: bool
    donated: bool
    returned: int | None = None
    fetched_in_vain: bool = False
    unchanged: int | None = None


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class OutputAsked:
    """One array that the step returns."""

    path: str
    on_host: bool


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Intent:
    """What is known of what was asked for; `None` is what nobody can say.

    `named` are the checkpoint names that the step gives, `opaque` says which
    policies cannot be read. `options` are XLA's, as far as they are known,
    `all_options` says whether that is all of them. `source` is the step's own line,
    `planned` says that a plan of stowax is in it, `without_memories` that the devices
    know no memory kinds, so that whatever specs said of them was lost.
    """

    copies: tuple[CopyAsked, ...] | None = None
    stacks: tuple[StackAsked, ...] | None = None
    policies: tuple[PolicyAsked, ...] | None = None
    named: frozenset[str] = frozenset()
    opaque: tuple[str, ...] = ()
    arguments: tuple[ArgumentAsked, ...] | None = None
    outputs: tuple[OutputAsked, ...] | None = None
    options: Mapping[str, str] = dataclasses.field(default_factory=dict)
    all_options: bool = False
    jaxlib: str = ""
    devices: int = 1
    source: str = ""
    planned: bool = False
    without_memories: bool = False
