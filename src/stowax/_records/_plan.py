"""The plan as pure data: the program, the decisions, the proof, and the search.

No JAX in here. `_plan.Plan` adds the methods that need it (`apply`, `specs`, `place`);
the report reads these records. JSON is the only form on disk, versioned, and written in
one piece; `_plan_file` reads it.
"""

import dataclasses
import json
import os
from collections.abc import Iterable
from typing import Any, Literal

from .._files import write_whole
from ._peak import MemoryPeak
from ._stages import Decision, Options, Outcome, Role

FORMAT_VERSION = 21

Source = Literal["compiled", "predicted"]
"""What a figure is of: a program that was compiled, or one that was not."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class DecisionRecord:
    """What happens to one value of a repeated body.

    `bytes` are of one layer, per device; `count` is the number of layers. `travel` is
    how copies of a layer's offloaded value are timed: `"early"` ones leave in the
    iteration that makes the value and come back in the one that reads it, `"ahead"`
    ones come back an iteration before; `None` is late, an iteration apart both ways.
    `pinned` is the pattern of the user's that narrowed the choice, if one did.
    """

    stack: str
    value: int
    name: str
    source: str
    role: Role
    shape: tuple[int, ...]
    dtype: str
    count: int
    bytes: int
    decision: Decision
    reason: str
    travel: Literal["early", "ahead"] | None = None
    pinned: str | None = None

    @property
    def way(self) -> str:
        """The decision with its travel: how the layers store the value, if they do."""
        return f"{self.decision} {self.travel}" if self.travel else self.decision


def stored_by(decisions: Iterable[DecisionRecord], stack: str) -> dict[int, str]:
    """What a repeated body stores under the decisions: value number → way."""
    mine = (d for d in decisions if d.stack == stack and d.decision != "recompute")
    return {d.value: d.way for d in mine}


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class StackRecord:
    """One repeated body: where it is, and what it takes by the planner's model.

    `fingerprint` is a digest of `outline`, the body's operations one a line: what a
    step is known by. The outline of a body that runs as it is written is empty. Seconds
    are of one layer; a window used is the part of them that copies take. A `segment` is
    straight-line code between layers, which runs once; layers that are `tiles` are
    blocks of tokens, which no loop of the user's runs. Of layers in groups of `group`
    (0: none), each group runs forward once more before its backward pass. What products
    at the lines of `blocks` make runs in blocks, each computed again for its gradient.
    """

    name: str
    source: str
    count: int
    unrolled: bool
    fingerprint: str
    forward_seconds: float
    backward_seconds: float
    forward_window_used: float
    backward_window_used: float
    outline: tuple[str, ...] = ()
    segment: bool = False
    tiles: bool = False
    group: int = 0
    blocks: tuple[str, ...] = ()


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Baseline:
    """A hand-written policy under the same cost model and memory prediction."""

    name: str
    device_bytes: int
    host_bytes: int
    seconds: float
    fits: bool


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Trial:
    """One turn of the closed loop: what was predicted and what the compiler made of it.

    `compiled_bytes` is what the program needs where it did not compile for want of
    memory.
    """

    what: str
    predicted_bytes: int
    compiled_bytes: int
    host_bytes: int
    step_seconds: float | None
    seconds_to_compile: float


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ArgumentRecord:
    """One array among the step's arguments, as it was planned for.

    `shard` is the shape of one device's part of it, `output` the step's output that
    takes its place, if one does (a flat position). `partition` says which axes of the
    mesh each axis of it is spread over, if there is a mesh. `on_host` says that
    the host's processor updates it, `order` how its axes lie in host memory, major
    first, where they do not lie as they are typed.
    """

    path: str
    shape: tuple[int, ...]
    shard: tuple[int, ...]
    dtype: str
    role: Role
    output: int | None = None
    memory_kind: str = "device"
    partition: tuple[str | tuple[str, ...] | None, ...] | None = None
    on_host: bool = False
    order: tuple[int, ...] | None = None


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class PinPrice:
    """What a pin costs: seconds per step against the plan without it."""

    pattern: str
    decision: str
    matched: int
    seconds: float


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Streaming:
    """How state in host memory comes and goes.

    `lean` and `late` are how parameters are fetched and their gradients written
    (`_passes.HostPlan`). With `gradients_on_host` those that the step returns of such
    parameters come in host memory. Below `least_bytes` an array is not worth a copy of
    its own (`_stages.least_bytes`).
    """

    lean: bool
    late: bool
    gradients_on_host: bool
    least_bytes: int


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ProgramRecord:
    """How the step is read, rewritten and compiled: what `apply` needs.

    - `step` is the step's name, `target` the machine's; `device_kind` is what JAX calls
      its devices. `compile_only` says that it was not there.
    - `arguments` are the arrays that the step takes, in flat order. `taken_apart` says
      that it takes more than pytrees of arrays (objects, functions, arguments by name)
      and that these arrays are in them.
    - `stacks` are the repeated bodies, in forward order. They store what the decisions
      say where they are `rewritten`, and run as they are written else.
    - `donate_argnums` and `compiler_options` are given to `jax.jit`.
    - `options` are how the step is read.
    - `streaming` is how state in host memory comes and goes.
    - `versions` are those of stowax, JAX and Python that made the plan.
    """

    step: str
    target: str
    device_kind: str
    compile_only: bool
    arguments: tuple[ArgumentRecord, ...]
    taken_apart: bool
    stacks: tuple[StackRecord, ...]
    rewritten: bool
    options: Options
    donate_argnums: tuple[int, ...]
    compiler_options: dict[str, str | bool | int | float]
    streaming: Streaming
    versions: dict[str, str]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ProofRecord:
    """What the compiled program shows, beside the budgets that it has to keep.

    - `fits`: both memories suffice, by the compiler's own figures.
    - `budget_bytes` and `host_budget_bytes` are the budgets, per device; what others
      need of the host, `host_reserve_bytes`, has come off.
    - `device_bytes` and `host_bytes` are what the program takes, per device: arguments
      + outputs − aliased + temporaries.
    - `step_seconds` is simulated from the compiled schedule, `exposed_seconds` its part
      spent waiting for host copies; both per step.
    - `in_the_way` says what is at the program's predicted peak, where it does not fit,
      role by role; `peak` has it array by array.
    - `notes` say what a user has to know: rates that were assumed, what the compiler
      refused, what runs as it is written.
    """

    fits: bool
    budget_bytes: int
    host_budget_bytes: int
    device_bytes: int
    host_bytes: int
    step_seconds: float
    exposed_seconds: float
    in_the_way: tuple[str, ...] = ()
    notes: tuple[str, ...]
    peak: MemoryPeak | None = None
    host_reserve_bytes: int = 0


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class SearchRecord:
    """What was predicted, tried and compared. Bytes per device, seconds per step.

    - `outcome`: `"unneeded"`, `"optimal"`, `"feasible"` or `"infeasible"`, under the
      planner's model.
    - `predicted_device_bytes` is what the prediction says of the plan's program, once
      it is corrected by all that was compiled.
    - `model_seconds` is what the planner expects, `bound_seconds` its proven lower
      bound, `gap` the distance between them relative to the bound.
    - `binding` names the constraints that stop a faster plan; `seconds_per_gib` is what
      one more GiB of device memory would save.
    - `smallest_budget` is the least, in bytes, that any plan needs that the pins and
      forbids allow. By `smallest_budget_is` that is of a program that was compiled, or
      only predicted.
    - `baselines` are hand-written policies under the same model.
    - `trials` are the compiled programs in order, each with what was predicted of it
      just before. The first prediction is made before anything is compiled.
    - `written` is the step as it is written, compiled; `None` where it is predicted to
      need so much more than there is that it was not, or where pins and forbids ask for
      another. Then `written_predicted_bytes` are what is predicted for it, and
      `written_model_seconds` what the planner expects of it; else these are 0, as the
      seconds are where the user's own `jax.checkpoint` computes layers again.
    - `pins` and `forbid` are the user's wishes, the pins with their prices.
    - `unpriced` lists operations that no cost rule knew.
    - `planning_seconds` is the wall time that the plan took, `solving_seconds` the
      solver's part of it.
    """

    outcome: Outcome
    predicted_device_bytes: int
    model_seconds: float
    bound_seconds: float
    gap: float
    binding: tuple[str, ...]
    seconds_per_gib: float
    smallest_budget: int
    smallest_budget_is: Source
    baselines: tuple[Baseline, ...]
    trials: tuple[Trial, ...]
    written: Trial | None
    written_predicted_bytes: int
    written_model_seconds: float
    pins: tuple[PinPrice, ...]
    forbid: tuple[str, ...]
    unpriced: tuple[str, ...]
    planning_seconds: float
    solving_seconds: float


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class PlanRecord:
    """A plan in four parts: what runs, what was decided, its proof, and the search.

    Everything is in the parts. The properties are the names of the public contract and
    of the guide, each read from its part.
    """

    program: ProgramRecord
    decisions: tuple[DecisionRecord, ...]
    proof: ProofRecord
    search: SearchRecord

    @property
    def target(self) -> str:
        """The name of the machine that the plan is for."""
        return self.program.target

    @property
    def fits(self) -> bool:
        """Whether the compiled program stays within both budgets."""
        return self.proof.fits

    @property
    def budget_bytes(self) -> int:
        """The budget of device memory, per device."""
        return self.proof.budget_bytes

    @property
    def device_bytes(self) -> int:
        """Device memory that the compiled program takes, per device."""
        return self.proof.device_bytes

    @property
    def host_bytes(self) -> int:
        """Host memory that the compiled program takes, per device."""
        return self.proof.host_bytes

    @property
    def step_seconds(self) -> float:
        """Seconds of a step, simulated from the compiled schedule."""
        return self.proof.step_seconds

    @property
    def outcome(self) -> Outcome:
        """`"unneeded"`, `"optimal"`, `"feasible"` or `"infeasible"`."""
        return self.search.outcome

    @property
    def predicted_device_bytes(self) -> int:
        """Device memory that was predicted for the program, per device."""
        return self.search.predicted_device_bytes

    @property
    def gap(self) -> float:
        """Distance to the proven bound under the planner's model, relative to it."""
        return self.search.gap

    @property
    def smallest_budget(self) -> int:
        """The least bytes of a device that any plan needs under the user's wishes."""
        return self.search.smallest_budget

    @property
    def baselines(self) -> tuple[Baseline, ...]:
        """Hand-written policies under the same model."""
        return self.search.baselines

    @property
    def pins(self) -> tuple[PinPrice, ...]:
        """The user's pins, with what each costs."""
        return self.search.pins

    def to_json(self) -> dict[str, Any]:
        """The plan as JSON types: `format` and the four parts."""
        return {"format": FORMAT_VERSION, **_plain(self)}

    def save(self, path: str | os.PathLike[str]) -> None:
        """Writes the plan as JSON; the file appears whole or not at all.

        **Raises:** `ArgumentError` if nothing can be written there.
        """
        write_whole(path, self.to_text())

    def to_text(self) -> str:
        """What `save` writes."""
        return json.dumps(self.to_json(), indent=1) + "\n"


def _plain(value: Any) -> Any:
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {
            f.name: _plain(getattr(value, f.name)) for f in dataclasses.fields(value)
        }
    if isinstance(value, dict):
        return {str(k): _plain(v) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(v) for v in value]
    return value
