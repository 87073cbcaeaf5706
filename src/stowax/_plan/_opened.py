"""A step, traced and checked for planning, with nothing planned yet.

For who wants to know something of a step before a plan, or of many steps: what is in
the way, how large a batch may be.
"""

import contextlib
import dataclasses
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from .._calling._calling import Taken, explaining, flattened
from .._calling._known import NO_PROGRAM, known
from .._calling._objects import together
from .._errors import ArgumentError
from .._survey._asked import Asked
from ._asking import asked_for

_DEFAULTS: dict[str, Any] = {
    "target": None,
    "host_budget": None,
    "host_reserve": None,
    "pin": None,
    "forbid": (),
    "keep_checkpoint": False,
    "roll": True,
    "donate": None,
    "compiler_options": None,
    "compiles": None,
    "cache": None,
    "progress": None,
}


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Opened:
    """What planning of a step begins with; `taken_apart` as in `ProgramRecord`."""

    asked: Asked
    taken: Taken
    taken_apart: bool

    @contextlib.contextmanager
    def again(self) -> Iterator[Asked]:
        """What is asked, where programs of the step may be made."""
        with together(), explaining(self.taken):
            yield self.asked


def opened(
    step: Callable[..., Any],
    args: tuple[Any, ...],
    budget: Any,
    kwargs: Mapping[str, Any] | None = None,
    **wishes: Any,
) -> Opened:
    """A step as `stowax.plan` takes it, for one budget.

    **Arguments:** `kwargs` are the step's, `wishes` those of `stowax.plan`, by name.

    **Raises:** what `stowax.plan` does before it plans.
    """
    what = known(step)
    if what.pmapped:
        raise ArgumentError("step", f"{what.function!r:.60}", NO_PROGRAM)
    with together():
        taken, own, flat = flattened(what, args, kwargs or {})
        with explaining(taken):
            asked = asked_for(
                flat,
                taken.arrays,
                taken.donated,
                budgets=(budget,),
                **{**_DEFAULTS, **wishes},
            )
    return Opened(asked=asked, taken=taken, taken_apart=own is None)
