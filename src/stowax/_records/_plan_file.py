"""Plans read back from what `PlanRecord.save` and `to_json` made, and checked."""

import dataclasses
import os
import pathlib
import re
from typing import Any, TypeVar

from .._errors import ArgumentError, PlanMismatchError
from .._record_json import NotSuchARecord, json_of, record_of
from ._plan import FORMAT_VERSION, PlanRecord, ProgramRecord
from ._stages import STATE

Record = TypeVar("Record", bound=PlanRecord)


def read_plan(kind: type[Record], path: str | os.PathLike[str]) -> Record:
    """The plan from a file that `save` wrote, as a record of the type `kind`.

    **Raises:** `ArgumentError` for a file that is not there or no plan;
    `PlanMismatchError` for one of another format.
    """
    try:
        data = json_of(pathlib.Path(path).read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ArgumentError(
            "path", f"{os.fspath(path)!r}, which does not exist", _INSTEAD
        ) from None
    except (OSError, ValueError) as error:
        # An operating system's words would have the path once more.
        words = error.strerror if isinstance(error, OSError) else error
        raise ArgumentError(
            "path", f"{os.fspath(path)!r}, which is no whole plan ({words})", _INSTEAD
        ) from None
    return plan_from(kind, data, os.fspath(path))


def plan_from(kind: type[Record], data: Any, path: str) -> Record:
    """The same from what `to_json` made; `path` is for messages."""
    if not isinstance(data, dict) or "format" not in data:
        raise ArgumentError("path", f"{path!r}, which is no plan", _INSTEAD)
    if data["format"] != FORMAT_VERSION:
        known = _written_by(data)
        raise PlanMismatchError(
            f"path: {path!r} has plan format {data['format']}; this stowax "
            f"reads format {FORMAT_VERSION}. Install the stowax that wrote it "
            f"({known or 'unknown'}) or plan again."
        )
    parts = {key: value for key, value in data.items() if key != "format"}
    try:
        plan: Record = record_of(kind, parts)
        _check_lines(plan.program, "program")
        for number, decision in enumerate(plan.decisions):
            _check_lines(decision, f"decisions.{number}")
        _check_counts(plan.program)
        _check_arguments(plan)
        _check_decisions(plan)
    except NotSuchARecord as error:
        raise ArgumentError(
            "path", f"{path!r}, which is no whole plan ({error})", _INSTEAD
        ) from None
    return plan


def _written_by(data: dict[str, Any]) -> str | None:
    """The stowax that wrote a file; before format 12 its version stood at the top."""
    program = data.get("program", data)
    versions = program.get("versions") if isinstance(program, dict) else None
    return versions.get("stowax") if isinstance(versions, dict) else None


_POSITION = re.compile(r"args\[(\d{1,9})\]")
_INSTEAD = "Give a file that Plan.save or `stowax plan -o` wrote."


def _check_lines(part: Any, at: str) -> None:
    """Names and places are one line: whoever prints them writes no second one.

    **Raises:** `NotSuchARecord`.
    """
    if isinstance(part, str):
        if len(part.splitlines()) > 1:
            raise NotSuchARecord(f"{at} is {part!r:.60}, and not one line")
    elif dataclasses.is_dataclass(part):
        for field in dataclasses.fields(part):
            _check_lines(getattr(part, field.name), f"{at}.{field.name}")
    elif isinstance(part, tuple):
        for number, item in enumerate(part):
            _check_lines(item, f"{at}.{number}")
    elif isinstance(part, dict):
        for key, item in part.items():
            _check_lines(key, at)
            _check_lines(item, f"{at}.{key}")


def _check_counts(program: ProgramRecord) -> None:
    """**Raises:** `NotSuchARecord` for numbers of layers or blocks that are none."""
    numbers = {
        "options.group": (program.options.group, 0),
        "options.tiles": (program.options.tiles, 0),
        "options.layer_blocks": (program.options.layer_blocks, 0),
    }
    for number, stack in enumerate(program.stacks):
        numbers[f"stacks.{number}.group"] = (stack.group, 0)
        numbers[f"stacks.{number}.count"] = (stack.count, 1)
    for name, (count, least) in numbers.items():
        if count < least:
            raise NotSuchARecord(f"program.{name} is {count}")


def _check_arguments(plan: PlanRecord) -> None:
    """**Raises:** `NotSuchARecord` for what no array can be like."""
    for number, argument in enumerate(plan.program.arguments):
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
            "path": "]" in argument.path,
            "partition": parts is None or len(parts) == ndim,
            "order": order is None or sorted(order) == list(range(ndim)),
        }
        for field, is_right in right.items():
            if not is_right:
                value = getattr(argument, field)
                raise NotSuchARecord(
                    f"program.arguments.{number}.{field} is {value!r:.60}"
                )
    donated = plan.program.donate_argnums
    found = (_POSITION.match(argument.path) for argument in plan.program.arguments)
    there = {int(path[1]) for path in found if path is not None}
    if not there.issuperset(donated) or len({*donated}) < len(donated):
        raise NotSuchARecord(f"program.donate_argnums is {donated!r:.60}")


def _check_decisions(plan: PlanRecord) -> None:
    """**Raises:** `NotSuchARecord` for decisions that the program does not carry out.

    Those of layers are what `apply` does. Those of the state are told again by where
    each argument is: a file that is edited in one place only says two things.
    """
    program, seen = plan.program, set()
    stacks = {stack.name for stack in program.stacks} | {STATE}
    for number, decision in enumerate(plan.decisions):
        at = f"decisions.{number}"
        if decision.stack not in stacks:
            raise NotSuchARecord(f"{at}.stack is {decision.stack!r:.60}")
        if (decision.stack, decision.value) in seen:
            raise NotSuchARecord(f"{at} is the second of value {decision.value}")
        seen.add((decision.stack, decision.value))
    of_layers = any(decision.stack != STATE for decision in plan.decisions)
    if of_layers and not program.rewritten:
        raise NotSuchARecord("program.rewritten is False, and there are decisions")
    moved = any(d.stack == STATE and d.decision == "offload" for d in plan.decisions)
    hosted = any(a.memory_kind != "device" for a in program.arguments)
    if moved != hosted:
        raise NotSuchARecord(
            f"state is {'' if moved else 'not '}offloaded by the decisions, and "
            f"{'' if hosted else 'not '}by the arguments' memory_kind"
        )
