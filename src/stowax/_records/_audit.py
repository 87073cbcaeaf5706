"""What an audit saw and what it found, as records; no JAX.

`Event`s are what `_audit._watch` notes while a program runs, in order. `Finding`s are
what `_audit._find` makes of them, and `AuditRecord` is what a user gets, in JSON, too.
"""

import dataclasses
from dataclasses import dataclass
from typing import Any, NamedTuple

from .._where import NOWHERE, Place

# Every kind with its meaning; docs/audit.md repeats them.
AUDIT_KINDS = {
    "implicit-transfer": "NumPy or Python values are handed to a jitted function",
    "repeated-constant": "the same value is sent to the device in every step",
    "moved-array": "an array goes to another device or memory in every step",
    "many-transfers": "several small transfers that could be one",
    "host-read": "a result of this step is read before the next is dispatched",
    "early-wait": "the loop waits for the device in every step",
    "recompilation": "a function is compiled again while the loop runs",
    "eager-dispatch": "operations are dispatched one by one, outside of jit",
    "eager-update": "an update outside of jit copies the whole array",
    "copied-update": "an update in jit copies an array that is not donated, or needed",
    "not-donated": "a buffer dies at once, and the step could have reused it",
    "unusable-donation": "donated buffers fit no result",
    "donated-reuse": "a donated buffer is used again",
    "growing-memory": "arrays or host memory are kept from every step",
    "starved-device": "the device is idle while the loop waits for its input",
    "recomputation": "the step computes all activations again; a plan could choose",
    "kept-activations": "the step keeps large activations; a plan could choose",
}


class SentValue(NamedTuple):
    """A value of the host's in one call; `same` as at this place the time before."""

    name: str
    described: str
    bytes: int
    same: bool


class Event(NamedTuple):
    """One thing that happened: call, operation, read, wait, put, step or pause.

    `made` is the number of the event that made what is read or waited for (-1: long
    before), `key` tells functions apart, `at` is a moment in seconds, `library` tells
    that what was called is an installed package's.
    """

    what: str
    place: Place
    name: str = ""
    key: Any = None
    thread: int = 0
    at: float = 0.0
    bytes: int = 0
    seconds: float = 0.0
    made: int = -1
    sent: tuple[SentValue, ...] = ()
    compiled_seconds: float = 0.0
    changed: str = ""
    elsewhere: tuple[str, ...] = ()
    moved: bool = False
    library: bool = False


class Unused(NamedTuple):
    """An argument that died unused after event `event`, and could have been donated."""

    event: int
    name: str
    bytes: int


class Reuse(NamedTuple):
    """A donated buffer that was used again at `place`, and the call that donated it."""

    place: Place
    message: str
    argument: str = ""
    function: str = ""
    donated_at: Place = NOWHERE


class Alive(NamedTuple):
    """An array that event `event` made, and that was alive at the end."""

    event: int
    bytes: int


class Grown(NamedTuple):
    """A line that allocates and keeps `bytes` of host memory a step."""

    place: Place
    bytes: int


class Resident(NamedTuple):
    """Memory of the process at event `event`; 0 bytes are unknown.

    `peak` is the most that was seen since the reading before.
    """

    event: int
    bytes: int
    peak: int = 0


class Sample(NamedTuple):
    """Where a thread stood at a moment, innermost first, the device being idle."""

    at: float
    seconds: float
    places: tuple[Place, ...]
    thread: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class CopiedUpdate:
    """An update in a jitted function that has to copy `bytes` of an argument.

    Or of a value of its own (`argument` is empty), since what comes after the update
    reads what was there before.
    """

    place: Place
    argument: str
    bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Facts:
    """What a function's jaxpr says: lines that recompute, updates that copy.

    `kept_bytes` are of activations that the backward pass reads, most of them made at
    `kept`. `arguments` are the names of the function's.
    """

    arguments: tuple[str, ...] = ()
    recomputed: Place | None = None
    kept: Place = NOWHERE
    kept_bytes: int = 0
    copied: tuple[CopiedUpdate, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Recording:
    """Everything that was seen, for `_audit._find.findings_of`.

    `passed_by` steps were not looked at; kept activations below `enough_bytes` are no
    matter. `devices` are how many the process has, and their platform.
    """

    events: tuple[Event, ...] = ()
    facts: dict[Any, Facts] = dataclasses.field(default_factory=dict)
    unused: tuple[Unused, ...] = ()
    alive: tuple[Alive, ...] = ()
    grown: tuple[Grown, ...] = ()
    resident: tuple[Resident, ...] = ()
    samples: tuple[Sample, ...] = ()
    warnings: tuple[tuple[Place, str], ...] = ()
    reused: tuple[Reuse, ...] = ()
    passed_by: int = 0
    failed: str = ""
    devices: tuple[int, str] = (1, "")
    enough_bytes: int = 1 << 30


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """One fault of a loop: what, where, how often and how much a step, and the remedy.

    `count`, `bytes` and `seconds` are per step; `seconds` are those that the loop lost,
    as far as they were measured.
    """

    kind: str
    file: str
    line: int
    count: float
    bytes: int
    seconds: float
    what: str
    remedy: str


@dataclass(frozen=True, slots=True, kw_only=True)
class AuditRecord:
    """The result of an audit: findings, worst first, and what was looked at.

    `staged_bytes` of the host's memory are taken after some of the steps only, as saves
    do; per process.
    """

    findings: tuple[Finding, ...] = ()
    allowed: tuple[Finding, ...] = ()
    steps: int = 0
    step_file: str = NOWHERE.file
    step_line: int = 0
    transfers: float = 0.0
    step_seconds: float = 0.0
    staged_bytes: int = 0
    notes: tuple[str, ...] = ()

    def to_json(self) -> dict[str, Any]:
        """The record in JSON types; `{"findings": [...], ...}`."""
        return dataclasses.asdict(self)
