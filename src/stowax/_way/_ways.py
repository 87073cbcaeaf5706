"""The ways out for a step that does not fit: surveyed, predicted, nothing compiled."""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

from .._explain._ways import treatments
from .._plan._finding import search_for
from .._plan._opened import opened
from .._records._peak import MemoryPeak
from .._target._machine import Target


def with_ways(
    peak: MemoryPeak,
    step: Callable[..., Any],
    args: tuple[Any, ...],
    target: Target | str | None,
    kwargs: Mapping[str, Any] | None = None,
) -> MemoryPeak:
    """The peak with what could be done about it, and the smallest budget of a plan.

    **Arguments:** `step`, `args`, `kwargs` and `target` as for `stowax.plan`. A step
    that cannot be planned has none of these; `unknown` says why.
    """
    try:
        return _with_ways(peak, step, args, kwargs or {}, target)
    except Exception as error:  # what is in the way is still worth saying
        line = (str(error).strip().splitlines() or [type(error).__name__])[0]
        return dataclasses.replace(peak, unknown=line[:300])


def _with_ways(
    peak: MemoryPeak,
    step: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    target: Target | str | None,
) -> MemoryPeak:
    with opened(step, args, None, kwargs, target=target).again() as asked:
        budget = asked.machine.device_bytes
        search = search_for(asked, budget)
        smallest, source = search.smallest_budget()
        return dataclasses.replace(
            peak,
            treatments=treatments(search.rolled, budget, peak.predicted_bytes),
            smallest_budget=smallest,
            smallest_budget_is=source,
        )
