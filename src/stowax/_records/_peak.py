"""What is in the way of a step that does not fit: the arrays at its predicted peak.

`_predict._peak` fills a `MemoryPeak` from the lowered program, before anything is
compiled; inspections and plans carry it, `report` prints it. No JAX in here.
"""

import dataclasses
from typing import Literal, get_args

PeakRole = Literal[
    "parameter",
    "optimizer state",
    "batch",
    "argument",
    "output",
    "logits",
    "activation",
    "recomputed",
    "activation gradient",
    "gradient",
    "workspace",
    "fragmentation",
]

PEAK_ROLES: tuple[PeakRole, ...] = get_args(PeakRole)
"""What an array at the peak may be for.

An `argument` is one whose role nobody could tell, an `output` a result that no donated
argument makes room for. `logits` are products with a parameter whose softmax is taken,
with what is computed from them item by item, their gradients too. An
`activation gradient` is what the backward pass hands from layer to layer. `workspace`
is what the rest of the step makes, `fragmentation` what the compiler adds for arrays
that loops carry.
"""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class PeakArray:
    """Arrays at the peak that are alike: `count` of one role, shape and source line.

    `name` is the argument's path, or the operation with its scopes, of the first one;
    `source` reads `file:line`. `shape` is one device's part, such as
    `bfloat16[8,2048,5120]`. `bytes` are those of all of them on one device, as the
    chip lays them out; `padding` is the part of it that no array needs.
    """

    role: PeakRole
    name: str
    shape: str
    source: str
    count: int
    bytes: int
    padding: int


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Treatment:
    """What one way of treating arrays leaves of the peak, as predicted.

    `what` says it, such as `recompute every layer`; the step then needs `needs_bytes`
    of a device, `frees_bytes` less than as it is written. Negative: more.
    """

    what: str
    needs_bytes: int
    frees_bytes: int


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class MemoryPeak:
    """The most that a step needs of a device at once, array by array, as predicted.

    `predicted_bytes` is what the planner expects, without padding. `phase` and `source`
    say where in the step that is. `arrays` are the largest first. `treatments` are what
    could be done about them; `smallest_budget` is the least that any plan needs, in
    bytes, `smallest_budget_is` whether a program was compiled that needs it (0 and
    empty: not known, and `unknown` says why).
    """

    predicted_bytes: int
    phase: str
    source: str
    arrays: tuple[PeakArray, ...]
    treatments: tuple[Treatment, ...] = ()
    smallest_budget: int = 0
    smallest_budget_is: Literal["compiled", "predicted", ""] = ""
    unknown: str = ""

    @property
    def bytes(self) -> int:
        """All arrays together, padding included."""
        return sum(array.bytes for array in self.arrays)

    @property
    def padding(self) -> int:
        """Bytes of padding in all arrays."""
        return sum(array.padding for array in self.arrays)

    @property
    def named_bytes(self) -> int:
        """Bytes of arrays with an argument's path or a source line to look at."""
        return sum(array.bytes for array in self.arrays if is_named(array))

    def by_role(self) -> dict[PeakRole, int]:
        """Bytes by role, the most first, without the roles that have none."""
        found = dict.fromkeys(PEAK_ROLES, 0)
        for array in self.arrays:
            found[array.role] += array.bytes
        ordered = sorted(found.items(), key=lambda item: -item[1])
        return {role: much for role, much in ordered if much}


def is_named(array: PeakArray) -> bool:
    """Whether a user can find the array: it is an argument, or a line makes it."""
    given = ("parameter", "optimizer state", "batch", "argument", "output")
    return bool(array.source) or (array.role in given and bool(array.name))
