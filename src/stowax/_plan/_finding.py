"""From what was asked to what was found: survey, search, budget after budget.

Every program is a fact, whichever budget it was compiled for: it may fit another, and
be faster there. So each budget is searched with the programs of all smaller ones known,
and then takes the fastest of all that fit it: more memory never makes a plan slower.
What copies were waited for under one budget is not believed under another.
"""

import dataclasses
import time
from collections.abc import Sequence

from .._errors import (
    CompileError,
    OffloadVanishedError,
    PlanMismatchError,
    StowaxError,
)
from .._records._stages import least_bytes
from .._search._loop import Search
from .._search._space import Attempt, plain, rolled_space, unsurveyed_space
from .._step._trace import reading_less
from .._survey._asked import Asked
from .._survey._programs import Programs
from .._units import format_bytes
from ._asked import RAISED


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """What was found for one budget, and the seconds that it took."""

    search: Search
    best: Attempt
    seconds: float


def find(asked: Asked) -> list[Found]:
    """What is best for each budget, in their order.

    What cannot be planned runs as it is written: first without what repeats in marked
    functions, then without anything. The plan's notes say why.
    """
    while True:
        try:
            budgets = _in_bytes(asked)
            found = _find(asked, sorted(set(budgets)))
            by_budget = {one.search.budget: one for one in found}
            return [by_budget[budget] for budget in budgets]
        except Exception as error:
            less = (
                None
                if _is_the_users(error)
                else reading_less(asked.step, asked.specs, asked.recording, error)
            )
            if less is None:
                raise
            asked.say(f"planning less: {less.left[-1]}")
            asked = dataclasses.replace(
                asked, recording=less, written={}, programs=Programs()
            )


def _in_bytes(asked: Asked) -> list[int]:
    """Each budget in bytes. For shares the step is compiled as it is: what it takes.

    More than the machine has is what it has.
    """
    if not any(isinstance(budget, float) for budget in asked.budgets):
        return [int(budget) for budget in asked.budgets]
    most = asked.machine.device_bytes
    space = unsurveyed_space(asked, most)
    written = plain(space, None, donate=space.may_donate)
    taken = written.measured.compiled_bytes

    def in_bytes(budget: int | float) -> int:
        if not isinstance(budget, float):
            return budget
        share = min(most, max(1, int(budget * taken)))
        what = f"{100 * budget:.4g}% of {format_bytes(taken)}"
        capped = ", all that a device has" if share == most else ""
        asked.say(f"a budget of {what} is {format_bytes(share)}{capped}")
        return share

    return [in_bytes(budget) for budget in asked.budgets]


def _is_the_users(error: Exception) -> bool:
    """Whether an error is about what the user gave, not about a program of ours."""
    if RAISED in getattr(error, "__notes__", ()):
        return True
    ours = CompileError, OffloadVanishedError, PlanMismatchError
    return isinstance(error, StowaxError) and not isinstance(error, ours)


def _find(asked: Asked, budgets: Sequence[int]) -> list[Found]:
    """What is best for each budget, the smallest first."""
    made: list[Found] = []
    started = asked.started
    for budget in budgets:
        if len(budgets) > 1:
            asked.say(f"a plan for {format_bytes(budget)}")
        search = search_for(asked, budget, made[-1].search if made else None)
        best = search.run()
        seconds = time.perf_counter() - started
        started += seconds
        made.append(Found(search=search, best=best, seconds=seconds))
    programs = [a for one in made for a in one.search.log]
    for number, one in enumerate(made):
        one.search.known = [a for a in programs if a not in one.search.log]
        best = one.search.best()
        if best not in one.search.log:
            space = best.space.for_budget(one.search.budget)
            best = dataclasses.replace(best, space=space)
        made[number] = dataclasses.replace(one, best=best)
    return made


def search_for(asked: Asked, budget: int, before: Search | None = None) -> Search:
    """A search for a budget; of what another one knows it has the programs."""
    least = least_bytes(budget, asked.given_bytes)
    known = [] if before is None else before.attempts
    if before is None or before.rolled.survey.least_bytes != least:
        rolled = rolled_space(asked, budget, least)
    else:
        rolled = before.rolled.for_budget(budget)
    return Search(asked=asked, budget=budget, rolled=rolled, known=known)
