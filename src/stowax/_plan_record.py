"""The plan as pure data: what was asked, decided, predicted, compiled and proven.

No JAX in here. `_plan.Plan` adds the methods that need it (`apply`, `specs`, `place`);
the report reads these fields; JSON is the only form on disk, versioned, and written in
one piece.
"""

import contextlib
import dataclasses
import json
import os
import pathlib
import tempfile
from typing import Any

from ._errors import ArgumentError, PlanMismatchError
from ._stages import Decision, Outcome, Role

FORMAT_VERSION = 1


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class DecisionRecord:
    """What happens to one value of a repeated body.

    `bytes` are of one layer, per device; `count` is the number of layers. `pinned` is the
    pattern of the user's that narrowed the choice, if one did.
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
    """One repeated body: where it is, and what it stores (value number → how)."""

    name: str
    source: str
    count: int
    unrolled: bool
    fingerprint: str
    stored: dict[int, str]
    forward_seconds: float
    backward_seconds: float
    forward_window_used: float
    backward_window_used: float


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

    `compiled_bytes` is what the program needs where it did not compile for want of memory.
    """

    what: str
    predicted_bytes: int
    compiled_bytes: int
    host_bytes: int
    step_seconds: float | None
    seconds_to_compile: float


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ArgumentRecord:
    """One array among the step's arguments, as it was planned for."""

    path: str
    shape: tuple[int, ...]
    dtype: str
    role: Role
    memory_kind: str = "device"


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

    `device_bytes` and `host_bytes` are compiled figures (arguments + outputs − aliased +
    temporaries); `predicted_device_bytes` is the last prediction for the same program and
    `first_predicted_device_bytes` the one made before anything was compiled.
    `step_seconds` is simulated from the compiled schedule, `exposed_seconds` its part
    spent waiting for host copies; `model_seconds` is what the planner expected. `gap` is
    the distance to the proven bound under the planner's model.
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
    decisions: tuple[DecisionRecord, ...]
    stacks: tuple[StackRecord, ...]
    baselines: tuple[Baseline, ...]
    trials: tuple[Trial, ...]
    arguments: tuple[ArgumentRecord, ...]
    donate_argnums: tuple[int, ...]
    compiler_options: dict[str, str | bool]
    keep_checkpoint: bool
    roll: bool
    pins: tuple[PinPrice, ...]
    unpriced: tuple[str, ...]
    notes: tuple[str, ...]
    versions: dict[str, str]
    planning_seconds: float
    solving_seconds: float
    in_the_way: tuple[str, ...] = ()

    def to_json(self) -> dict[str, Any]:
        """The plan as JSON types, `format` first."""
        return {"format": FORMAT_VERSION, **_plain(self)}

    def save(self, path: str | os.PathLike[str]) -> None:
        """Writes the plan as JSON; the file appears whole or not at all."""
        text = json.dumps(self.to_json(), indent=1) + "\n"
        target = pathlib.Path(path)
        handle, temporary = tempfile.mkstemp(
            dir=target.parent or ".", prefix=f".{target.name}."
        )
        try:
            with os.fdopen(handle, "w") as file:
                file.write(text)
            os.replace(temporary, target)
        except BaseException:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(temporary)
            raise


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


def read_record(path: str | os.PathLike[str]) -> dict[str, Any]:
    """The keyword arguments of a `PlanRecord` from a file that `save` wrote.

    **Raises:** `ArgumentError` for a file that is not there or no plan;
    `PlanMismatchError` for one of a newer format.
    """
    instead = "Give a file that Plan.save or `stowax plan -o` wrote."
    try:
        data = json.loads(pathlib.Path(path).read_text())
    except FileNotFoundError:
        raise ArgumentError("path", f"{os.fspath(path)!r}, which does not exist", instead) from None
    except (OSError, ValueError) as error:
        raise ArgumentError(
            "path", f"{os.fspath(path)!r}, which is no whole plan ({error})", instead
        ) from None
    if not isinstance(data, dict) or "format" not in data:
        raise ArgumentError("path", f"{os.fspath(path)!r}, which is no plan", instead)
    if data["format"] != FORMAT_VERSION:
        raise PlanMismatchError(
            f"path: {os.fspath(path)!r} has plan format {data['format']}; this stowax "
            f"reads format {FORMAT_VERSION}. Install the stowax that wrote it "
            f"({data.get('versions', {}).get('stowax', 'unknown')}) or plan again."
        )
    data.pop("format")
    return _typed(data, os.fspath(path), instead)


_NESTED = {
    "decisions": DecisionRecord,
    "stacks": StackRecord,
    "baselines": Baseline,
    "trials": Trial,
    "arguments": ArgumentRecord,
    "pins": PinPrice,
}


def _typed(data: dict[str, Any], path: str, instead: str) -> dict[str, Any]:
    try:
        for field, kind in _NESTED.items():
            data[field] = tuple(
                kind(**{k: _tuple(v) for k, v in item.items()}) for item in data[field]
            )
        data["stacks"] = tuple(
            dataclasses.replace(s, stored={int(k): v for k, v in s.stored.items()})
            for s in data["stacks"]
        )
        expected = {f.name for f in dataclasses.fields(PlanRecord)}
        if missing := expected - data.keys():
            raise KeyError(f"no field {sorted(missing)[0]}")
        if extra := data.keys() - expected:
            raise KeyError(f"unknown field {sorted(extra)[0]}")
    except (KeyError, TypeError, AttributeError, ValueError) as error:
        raise ArgumentError(
            "path", f"{path!r}, which is no whole plan ({error})", instead
        ) from None
    return {k: _tuple(v) for k, v in data.items()}


def _tuple(value: Any) -> Any:
    return tuple(_tuple(v) for v in value) if isinstance(value, list) else value
