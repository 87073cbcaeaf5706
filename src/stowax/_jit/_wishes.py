"""What `stowax.jit`, `stowax.planning` and `stowax run` are asked for."""

import dataclasses
import os
from collections.abc import Collection, Mapping
from typing import Any, Literal

from .._errors import ArgumentError, did_you_mean
from .._plan import _asked
from .._plan._plan import Plan, load_plan
from .._target._machine import Target
from .._units import format_bytes


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


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Given:
    """A plan that was made before, and the file that it comes from, if it does."""

    plan: Plan
    file: str = ""

    def said(self) -> str:
        """Which file was taken, and what it says, in a line; empty without one."""
        plan = self.plan
        device, budget = map(format_bytes, (plan.device_bytes, plan.budget_bytes))
        return self.file and (
            f"under the plan in {self.file}, made for {plan.program.target}: "
            f"{device} of {budget} per device"
        )


def given_plan(
    plan: Plan | str | os.PathLike[str] | None, options: Mapping[str, Any] | None
) -> Given | None:
    """A plan, or that of a file, which may have these compiler options."""
    if plan is None:
        return None
    if isinstance(plan, Plan):
        return Given(plan=plan)
    return Given(plan=load_plan(plan, compiler_options=options), file=os.fspath(plan))
