"""The ways out for a step that does not fit: surveyed, predicted, nothing compiled."""

import dataclasses
from collections.abc import Callable
from typing import Any

from .._calling._calling import explaining, flattened
from .._calling._known import known
from .._calling._objects import together
from .._explain._ways import treatments
from .._plan._finding import search_for
from .._plan._planning import asked_for
from .._records._peak import MemoryPeak
from .._target._machine import Target


def with_ways(
    peak: MemoryPeak,
    step: Callable[..., Any],
    args: tuple[Any, ...],
    target: Target | str | None,
) -> MemoryPeak:
    """The peak with what could be done about it, and the smallest budget of a plan.

    **Arguments:** `step`, `args` and `target` as for `stowax.plan`. A step that cannot
    be planned has none of these; `unknown` says why.
    """
    try:
        return _with_ways(peak, step, args, target)
    except Exception as error:  # what is in the way is still worth saying
        line = (str(error).strip().splitlines() or [type(error).__name__])[0]
        return dataclasses.replace(peak, unknown=line[:300])


def _with_ways(
    peak: MemoryPeak,
    step: Callable[..., Any],
    args: tuple[Any, ...],
    target: Target | str | None,
) -> MemoryPeak:
    with together():
        taken, _, flat = flattened(known(step), args, {})
        with explaining(taken):
            asked = asked_for(
                flat,
                taken.arrays,
                taken.donated,
                budgets=(None,),
                target=target,
                host_budget=None,
                pin=None,
                forbid=(),
                keep_checkpoint=False,
                roll=True,
                donate=None,
                compiler_options=None,
                compiles=None,
                cache=None,
                progress=None,
            )
            budget = asked.machine.device_bytes
            search = search_for(asked, budget)
            smallest, source = search.smallest_budget()
            return dataclasses.replace(
                peak,
                treatments=treatments(search.rolled, budget, peak.predicted_bytes),
                smallest_budget=smallest,
                smallest_budget_is=source,
            )
