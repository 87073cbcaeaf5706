"""The records that travel between the stages, and nothing else.

No JAX in here: a plan made beside a TPU is read and reported on a laptop. Bytes are per
device, seconds are per execution of the thing named, unless a field says otherwise.
"""

import dataclasses
from collections.abc import Sequence
from typing import Literal

Decision = Literal["keep", "offload", "recompute"]
Role = Literal[
    "activation", "parameter", "gradient", "optimizer state", "batch", "other"
]
Phase = Literal["layers", "update"]
Outcome = Literal["unneeded", "optimal", "feasible", "infeasible"]

DECISIONS: tuple[Decision, ...] = ("keep", "offload", "recompute")

TILE = "tile"
"""Another wish of a user's: that what makes a value runs in blocks of tokens."""

STATE = "state"
"""The name of the body that the step's state makes."""

OFFLOAD_LEAST_BYTES = 1 << 20
"""Below this a copy's fixed cost dominates; assumed, not measured."""

_SMALLEST_PART = 256
"""A part of all there is that is worth a copy, whatever the copy's fixed cost."""


def least_bytes(budget: int, arguments: int) -> int:
    """The bytes of the smallest array that may be offloaded.

    A model of a few MiB has no array above `OFFLOAD_LEAST_BYTES`. Whoever gives it a
    budget of a few MiB wants to see it within that, and not the fastest step.

    **Arguments:** `budget` is that of a device, `arguments` the bytes per device of all
    arguments of the step.
    """
    return min(OFFLOAD_LEAST_BYTES, max(budget, arguments) // _SMALLEST_PART)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Passage:
    """What state in host memory adds to the copies of a body, in bytes per run.

    Parameters come in forward and backward, their gradients go out backward.
    """

    body: str
    forward_in: int
    backward_in: int
    backward_out: int

    @property
    def in_flight(self) -> int:
        """Bytes on the device while the body runs: a run's in use, one on its way."""
        return 2 * self.backward_in + self.backward_out


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Value:
    """One array of a repeated body: an input of the body or the output of an operation.

    `allowed` holds the decisions that are open for it. A value whose `operation` is
    `None` is an input of the body and cannot be recomputed. `available` values
    (weights, constants) are at hand in the backward pass anyway: they need no decision.
    `needed` says that the backward pass reads it. `keep_seconds` and `offload_seconds`
    are what the device spends on storing it either way, per run of the body: writing it
    to its place in a stack, moving it aside; copies over the host link are not in it.
    `keep_more` and `offload_more` are bytes of all runs together that programs were
    seen to need beyond the model's own where it is stored so; fewer, where negative.

    State in host memory crosses the link where it is used: `update_in` and `update_out`
    bytes at the update, and what `passages` say while layers run. `stays` says why it
    cannot be offloaded, where more is known than its type and size say.

    A `tiled` one is of a loss that runs in blocks of tokens. A `virtual` value takes no
    memory in straight-line code: the compiler computes it where it is read. What it is
    computed from is `needed` in its place.
    """

    index: int
    name: str
    source: str
    shape: tuple[int, ...]
    dtype: str
    bytes: int
    operation: int | None
    available: bool
    needed: bool
    allowed: frozenset[Decision]
    role: Role = "activation"
    keep_seconds: float = 0.0
    offload_seconds: float = 0.0
    keep_more: int = 0
    offload_more: int = 0
    update_in: int = 0
    update_out: int = 0
    passages: tuple[Passage, ...] = ()
    stays: str = ""
    tiled: bool = False
    virtual: bool = False


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class HostUpdate:
    """State that the host's processor updates, if all of it is in host memory.

    `values` are indices of the update's body. Where every one of them is offloaded,
    `update_in` and `update_out` of their bytes do not cross the link at the update;
    instead the host works for `seconds`, while the device waits. `stream_seconds` is
    what it stands in for: those bytes over the link. Only what is faster so is listed.
    """

    values: tuple[int, ...]
    update_in: int
    update_out: int
    seconds: float
    stream_seconds: float


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Operation:
    """One operation of the forward body; `inputs` and `outputs` are value indices.

    `repeatable` is false for what must not run twice (effects). `seconds` is the price
    of running it once more.
    """

    index: int
    primitive: str
    source: str
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]
    seconds: float
    repeatable: bool = True


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Point:
    """A moment of the backward pass of one body: what is alive besides stored stacks.

    `reserved_bytes` is alive whatever is decided; `live` lists the values that occupy
    working memory at this moment if they were recomputed or fetched from the host.
    """

    reserved_bytes: int
    live: tuple[int, ...]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Body:
    """A body that runs `count` times in a row, as the planner sees it.

    `values[i].index == i` and `operations[i].index == i`; operations stand in an order
    in which they can run. `forward_seconds` and `backward_seconds` are of one run of
    the body, the backward without any recomputation. Copies hide in these.
    `in_loop` is false for a body that runs once, in straight-line code: nothing can be
    offloaded there. Of layers in groups of `group` (0: none), values are stored for one
    group at a time: each runs forward once more before its backward pass.

    The body of the phase "update" runs once, at the end of the step; its values are
    the step's state, which nothing can compute again. What is kept of it is on the
    device throughout. What is offloaded streams in and out in blocks while the update
    runs, which takes `backward_seconds`; no more than a block is on the device.
    `host_updates` are the parts of it that the host's processor does instead, one part
    after the other, where all that they work on is offloaded; no two share a value.
    """

    name: str
    count: int
    values: tuple[Value, ...]
    operations: tuple[Operation, ...]
    forward_seconds: float
    backward_seconds: float
    points: tuple[Point, ...]
    in_loop: bool = True
    phase: Phase = "layers"
    host_updates: tuple[HostUpdate, ...] = ()
    group: int = 0

    @property
    def copies(self) -> int:
        """Of how many runs the values that are kept are there at once."""
        return self.group or self.count

    @property
    def run_seconds(self) -> float:
        """What one run takes, forward and backward, if nothing is computed again."""
        return self.forward_seconds * (1 + bool(self.group)) + self.backward_seconds


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Link:
    """Host link of one device with every device of the host busy, bytes per second."""

    device_to_host: float
    host_to_device: float


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Problem:
    """What the planner is asked: the bodies in forward order, and what there is.

    A body of the phase "update", if there is one, comes first: its values are on the
    device before anything runs.

    `device_bytes` is the whole budget of a device; `loss_reserved_bytes` is what is
    alive at the loss besides stored stacks; `host_bytes` what the host may hold per
    device. `other_seconds` is the part of the step outside the bodies. `prefetch_depth`
    is the number of layers' offloaded values in flight in the backward pass.
    """

    bodies: tuple[Body, ...]
    device_bytes: int
    host_bytes: int
    link: Link
    loss_reserved_bytes: int
    other_seconds: float
    prefetch_depth: int = 2


def updated_on_host(
    body: Body, chosen: Sequence[Decision | None]
) -> tuple[HostUpdate, ...]:
    """The parts of the update that the host's processor does under decisions."""
    return tuple(
        part
        for part in body.host_updates
        if all(chosen[i] == "offload" for i in part.values)
    )


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """How marked functions are read.

    `keep_checkpoint` leaves the user's own `jax.checkpoint` calls inside repeated
    bodies as they are; `roll` looks for the repeating blocks of unrolled loops, which
    become loops unless they run `as_written`; what stands outside of repeated bodies is
    planned in `segments` (see `_layers._segment`); a loss over a large vocabulary runs
    in at most so many `tiles`, if there are any (see `_jaxprs._tiles`); what wide
    products within layers make runs in at most so many `layer_blocks`, likewise; loops
    store the input of every `group`-th layer only, if that is not 0 (see
    `_layers._groups`);
    `row_major` fixes how stored values lie in memory (see `_stack.Stack.lay_out`);
    with `early_gradients` layers of which something moves compute those of weights
    where they arise (see `_layers._early_gradients`).
    """

    keep_checkpoint: bool = False
    roll: bool = True
    as_written: bool = False
    segments: bool = False
    tiles: int = 0
    layer_blocks: int = 0
    group: int = 0
    row_major: bool = False
    early_gradients: bool = False


GROUPED = "layers run in groups, which read their parameters more often"
"""Why a value stays on the device where they do."""

Decisions = tuple[tuple[Decision | None, ...], ...]
"""One entry per body, in it one per value; `None` is nothing decided (not stored)."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Evaluation:
    """What given decisions cost under a problem's model, whether or not they fit.

    `host_seconds` is what the host's processor updates of the state takes.
    """

    seconds: float
    device_bytes: int
    host_bytes: int
    recomputed: tuple[frozenset[int], ...]
    recompute_seconds: float
    transfer_seconds: float
    exposed_seconds: float
    forward_window_used: tuple[float, ...]
    backward_window_used: tuple[float, ...]
    host_seconds: float = 0.0

    def fits(self, problem: Problem) -> bool:
        """Whether both memories suffice."""
        return (
            self.device_bytes <= problem.device_bytes
            and self.host_bytes <= problem.host_bytes
        )


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Solution:
    """The planner's answer, with its certificate.

    `gap` is relative to `bound_seconds`, the proven lower bound. `binding` names the
    constraints that stop a faster plan; `seconds_per_byte` is what one more byte of
    device memory would buy (0 where memory does not bind), from the problem's linear
    relaxation.
    """

    outcome: Outcome
    decisions: Decisions
    evaluation: Evaluation
    bound_seconds: float
    gap: float
    binding: tuple[str, ...]
    seconds_per_byte: float
