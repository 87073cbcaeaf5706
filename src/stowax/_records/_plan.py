"""The plan as pure data: what was asked, decided, predicted, compiled and proven.

No JAX in here. `_plan.Plan` adds the methods that need it (`apply`, `specs`, `place`);
the report reads these fields; JSON is the only form on disk, versioned, and written in
one piece.
"""

import dataclasses
import json
import os
import pathlib
from typing import Any, Literal, TypeVar

from .._errors import ArgumentError, PlanMismatchError
from .._files import write_whole
from .._record_json import NotSuchARecord, record_of
from ._stages import Decision, Outcome, Role

FORMAT_VERSION = 11

Source = Literal["compiled", "predicted"]
"""What a figure is of: a program that was compiled, or one that was not."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class DecisionRecord:
    """What happens to one value of a repeated body.

    `bytes` are of one layer, per device; `count` is the number of layers. `pinned` is
    the pattern of the user's that narrowed the choice, if one did.
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
    pinned: str | None = None


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class StackRecord:
    """One repeated body: where it is, and what it stores (value number → how).

    `stored` is `None` where the step runs as it is written. `fingerprint` is a digest
    of `outline`, the body's operations one a line: what a step is known by.
    """

    name: str
    source: str
    count: int
    unrolled: bool
    fingerprint: str
    stored: dict[int, str] | None
    forward_seconds: float
    backward_seconds: float
    forward_window_used: float
    backward_window_used: float
    outline: tuple[str, ...] = ()


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
class PlanRecord:
    """Everything about a plan. Bytes are per device, seconds per step.

    `device_bytes` and `host_bytes` are compiled figures (arguments + outputs − aliased
    + temporaries); `predicted_device_bytes` is what the prediction says of the same
    program once it is corrected by all that was compiled, and
    `first_predicted_device_bytes` what it said before anything was; `trials` has what
    it said of each program just before that was compiled.
    `step_seconds` is simulated from the compiled schedule, `exposed_seconds` its part
    spent waiting for host copies; `model_seconds` is what the planner expected. `gap`
    is the distance to the proven bound under the planner's model. `smallest_budget` is
    the least that any plan needs that the `pins` and `forbid` allow, of a program that
    was compiled or, by `smallest_budget_is`, only predicted. `keep_checkpoint`,
    `roll`, `as_written` and `row_major` are how the step is read and run
    (`_rewrite.Options`),
    `lean` and `late` are how parameters in host memory are fetched and their gradients
    written (`_passes.HostPlan`), `gradients_on_host` says that those which the step
    returns of such parameters come in host memory, `least_bytes` is what is worth a
    copy of its own (`_stages.least_bytes`). `taken_apart` says that the step takes more
    than pytrees of arrays (objects, functions, arguments by name): `arguments` are the
    arrays that are in them.
    """

    step: str
    target: str
    device_kind: str
    compile_only: bool
    budget_bytes: int
    host_budget_bytes: int
    fits: bool
    outcome: Outcome
    device_bytes: int
    host_bytes: int
    predicted_device_bytes: int
    first_predicted_device_bytes: int
    step_seconds: float
    exposed_seconds: float
    model_seconds: float
    bound_seconds: float
    gap: float
    binding: tuple[str, ...]
    seconds_per_gib: float
    smallest_budget: int
    smallest_budget_is: Source
    decisions: tuple[DecisionRecord, ...]
    stacks: tuple[StackRecord, ...]
    baselines: tuple[Baseline, ...]
    trials: tuple[Trial, ...]
    arguments: tuple[ArgumentRecord, ...]
    donate_argnums: tuple[int, ...]
    compiler_options: dict[str, str | bool | int | float]
    keep_checkpoint: bool
    roll: bool
    as_written: bool
    row_major: bool
    lean: bool
    late: bool
    gradients_on_host: bool
    least_bytes: int
    pins: tuple[PinPrice, ...]
    forbid: tuple[str, ...]
    unpriced: tuple[str, ...]
    notes: tuple[str, ...]
    versions: dict[str, str]
    planning_seconds: float
    solving_seconds: float
    in_the_way: tuple[str, ...] = ()
    taken_apart: bool = False

    def to_json(self) -> dict[str, Any]:
        """The plan as JSON types, `format` first."""
        return {"format": FORMAT_VERSION, **_plain(self)}

    def save(self, path: str | os.PathLike[str]) -> None:
        """Writes the plan as JSON; the file appears whole or not at all.

        **Raises:** `ArgumentError` if nothing can be written there.
        """
        text = json.dumps(self.to_json(), indent=1) + "\n"
        write_whole(path, text)


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


Record = TypeVar("Record", bound=PlanRecord)


def read_plan(kind: type[Record], path: str | os.PathLike[str]) -> Record:
    """The plan from a file that `save` wrote, as a record of the type `kind`.

    **Raises:** `ArgumentError` for a file that is not there or no plan;
    `PlanMismatchError` for one of another format.
    """
    try:
        data = json.loads(pathlib.Path(path).read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ArgumentError(
            "path", f"{os.fspath(path)!r}, which does not exist", _INSTEAD
        ) from None
    except (OSError, ValueError, RecursionError) as error:
        raise ArgumentError(
            "path", f"{os.fspath(path)!r}, which is no whole plan ({error})", _INSTEAD
        ) from None
    return plan_from(kind, data, os.fspath(path))


def plan_from(kind: type[Record], data: Any, path: str) -> Record:
    """The same from what `to_json` made; `path` is for messages."""
    if not isinstance(data, dict) or "format" not in data:
        raise ArgumentError("path", f"{path!r}, which is no plan", _INSTEAD)
    if data["format"] != FORMAT_VERSION:
        versions = data.get("versions")
        known = versions.get("stowax") if isinstance(versions, dict) else None
        raise PlanMismatchError(
            f"path: {path!r} has plan format {data['format']}; this stowax "
            f"reads format {FORMAT_VERSION}. Install the stowax that wrote it "
            f"({known or 'unknown'}) or plan again."
        )
    fields = {key: value for key, value in data.items() if key != "format"}
    try:
        plan: Record = record_of(kind, fields)
        _check_arguments(plan)
    except NotSuchARecord as error:
        raise ArgumentError(
            "path", f"{path!r}, which is no whole plan ({error})", _INSTEAD
        ) from None
    return plan


_INSTEAD = "Give a file that Plan.save or `stowax plan -o` wrote."


def _check_arguments(plan: PlanRecord) -> None:
    """**Raises:** `NotSuchARecord` for what no array can be like."""
    for number, argument in enumerate(plan.arguments):
        ndim = len(argument.shape)
        order, parts = argument.order, argument.partition
        right = {
            "shard": len(argument.shard) == ndim
            and all(
                0 <= part <= whole
                for part, whole in zip(argument.shard, argument.shape, strict=True)
            ),
            "output": argument.output is None or argument.output >= 0,
            "memory_kind": argument.memory_kind in ("device", "pinned_host"),
            "partition": parts is None or len(parts) == ndim,
            "order": order is None or sorted(order) == list(range(ndim)),
        }
        for field, is_right in right.items():
            if not is_right:
                value = getattr(argument, field)
                raise NotSuchARecord(f"arguments.{number}.{field} is {value!r:.60}")
    if any(number < 0 for number in plan.donate_argnums):
        raise NotSuchARecord(f"donate_argnums is {plan.donate_argnums!r:.60}")
