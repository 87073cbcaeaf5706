"""What a plan depends on, in one short text: equal for equal questions.

Two questions with one key get one plan. So all goes into it that a plan is made from:
the step as it was traced, its arguments with their names and shardings, the machine
with its measured rates, what was wished, the versions, and what compilers are told by
the environment and by JAX's settings. Not in it: the values of numbers, and of Python's
own objects, which decide nothing. Should two steps differ in what the trace does not
say, their repeated bodies do, and the plan is refused when it is applied.
"""

import dataclasses
import hashlib
import json
from collections.abc import Iterable, Iterator

import jax

from .. import _jax
from .._jaxprs._canonical import (
    all_equations,
    outline_with_places,
    place_of,
    without_addresses,
)
from .._records._plan import FORMAT_VERSION
from .._step._recording import Recording
from .._survey._asked import Asked
from .._target._machine import Target
from .._target._program_cache import told_compilers
from .._versions import versions


def step_key(asked: Asked) -> str:
    """Stands for the step and its arguments, in every process and on every day."""
    said = [
        f"format {FORMAT_VERSION}",
        *(f"{name} {version}" for name, version in sorted(versions().items())),
        *_arguments(asked),
        *_recorded(asked.recording, named=bool(asked.pin or asked.forbid)),
    ]
    return _digest(said)


def plan_key(asked: Asked) -> str:
    """Stands for all that a plan is made from."""
    told = told_compilers()
    said = [step_key(asked), *told, *_wished(asked), *_machine(asked.machine)]
    return _digest(said)


def _digest(said: Iterable[str]) -> str:
    return hashlib.sha256("\n".join(said).encode()).hexdigest()[:32]


def _wished(asked: Asked) -> Iterator[str]:
    yield json.dumps(
        {
            "budgets": list(asked.budgets),
            "host": _about(asked.host_budget),
            "reserve": _about(asked.host_reserve),
            "pin": list(asked.pin.items()),
            "forbid": sorted(
                [asked.forbid] if isinstance(asked.forbid, str) else asked.forbid
            ),
            "keep_checkpoint": asked.keep_checkpoint,
            "roll": asked.roll,
            "donate": asked.donate,
            "options": sorted(asked.compiler_options.items()),
            "compiles": asked.compiles,
        }
    )


def _machine(machine: Target) -> Iterator[str]:
    """The target's figures; those of a host vary a little from one to the next."""
    for field in dataclasses.fields(machine):
        value = getattr(machine, field.name)
        if field.name in ("host_bytes", "memory_bytes", "device_bytes", "pinned_bytes"):
            value = value and _about(value)
        if field.name in ("devices", "compile_devices", "notes"):
            value = [getattr(d, "device_kind", "") for d in value or ()]
        yield f"{field.name} {value}"


def _about(amount: int) -> str:
    return f"{amount:.2e}"


def _arguments(asked: Asked) -> Iterator[str]:
    variables = _jax.open_jaxpr(asked.recording.jaxpr).invars
    leaves = jax.tree.leaves_with_path(asked.specs)
    for (path, leaf), variable in zip(leaves, variables, strict=True):
        place = place_of(getattr(leaf, "sharding", None))
        yield f"{jax.tree_util.keystr(path)} {variable.aval} {place}"


def _recorded(recording: Recording, *, named: bool) -> Iterator[str]:
    yield without_addresses(recording.outputs)
    told = recording.donated  # nothing said of it is not the same as none
    yield f"{recording.changed} {recording.names}"
    yield f"donated {None if told is None else sorted(told)}"
    yield f"{recording.left} {recording.bare}"
    for jaxpr in (recording.jaxpr, *(call.jaxpr for call in recording.calls)):
        yield from outline_with_places(jaxpr)
        for equation in all_equations(jaxpr) if named else ():
            # What patterns are matched with.
            name = equation.params.get("name", "")
            yield f"{_jax.source_line(equation)} {_jax.name_stack(equation)} {name}"
