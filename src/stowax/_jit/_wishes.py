"""What `stowax.jit`, `stowax.planning` and `stowax run` are asked for."""

import dataclasses
import os
from collections.abc import Collection, Mapping
from typing import Any, Literal

from .._errors import ArgumentError, did_you_mean
from .._plan import _asked
from .._plan._plan import Plan, load_plan
from .._target._machine import Target


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Wishes:
    """What `stowax.jit` was asked: the arguments of `stowax.plan` by these names."""

    budget: int | str | None = None
    host_budget: int | str | None = None
    host_reserve: int | str | None = None
    target: str | Target | None = None
    pin: Mapping[str, str] | None = None
    forbid: Collection[str] = ()
    keep_checkpoint: bool = False
    roll: bool = True
    compiler_options: Mapping[str, Any] | None = None
    compiles: int | None = None
    cache: str | os.PathLike[str] | Literal[False] | None = None
    progress: _asked.Progress = None


WISHES = [field.name for field in dataclasses.fields(Wishes)]


def wished(wishes: Mapping[str, Any]) -> Wishes:
    """The wishes of these names.

    **Raises:** `ArgumentError` for a name that is none.
    """
    for name, value in wishes.items():
        if name not in WISHES:
            near = did_you_mean(name, WISHES)
            raise ArgumentError(name, f"{value!r:.60}", f"{near}Write one of {WISHES}.")
    return Wishes(**wishes)


def given_plan(
    plan: Plan | str | os.PathLike[str] | None, options: Mapping[str, Any] | None
) -> Plan | None:
    """A plan, or that of a file, which may have these compiler options."""
    if plan is None or isinstance(plan, Plan):
        return plan
    return load_plan(plan, compiler_options=options)
