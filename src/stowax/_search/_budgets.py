"""One step under several budgets: every program may be the plan for each of them.

What compiles for one budget is not what its model promised: it may be smaller, so that
it fits another budget too, or a plan with more memory may wait longer for its copies.
So each budget is searched for itself (`unknowing`: what was learned under another one
misleads; copies that waited there need not wait here), and then takes the fastest of
all programs that fit it (`best_known`): more memory never makes a plan slower. What was
taken is changed further, in a search that knows all that its own did.

What goes silently wrong: a bound that was proven for less memory bounds nothing with
more. So every solution gets the bound of its new budget.
"""

import dataclasses
import math
from collections.abc import Sequence

from .._planner import solve
from .._records._stages import Solution
from ._as_written import anew
from ._attempt import Attempt
from ._forms import Found
from ._loop import WORTH_ANOTHER_COMPILE, Search


def unknowing(known: Search, budget: int) -> Search:
    """A search for another budget; of what `known` learned it has the predictions.

    Those are the same under any budget, and take a second each.
    """
    search = anew(
        known, budget=budget, log=[], other_bound=math.inf, solving_seconds=0.0
    )
    search.forecast.predictions.update(known.forecast.predictions)
    return search


def best_known(found: Found, known: Sequence[Found]) -> Found:
    """`found`, or the fastest program of `known` that fits its budget, if it is faster.

    **Arguments:** `known` has what was found for the other budgets.
    """
    budget, fastest = found.search.budget, _least_seconds(found)
    chosen: tuple[Found, Search, int] | None = None
    for other in known:
        for owner in (other.search, *other.others):
            for number, attempt in enumerate(owner.attempts):
                seconds = attempt.measured.step_seconds
                fits = attempt.fits(budget, owner.host_budget)
                if fits and attempt.is_sound and seconds < fastest:
                    fastest, chosen = seconds, (other, owner, number)
    if chosen is None:
        return found
    other, owner, number = chosen
    search = _with_budget(owner, budget, found.search)
    rolled = search
    if owner.survey.options != other.rolled.survey.options:
        rolled = _with_budget(other.rolled, budget, found.search)
    return Found(
        search=search,
        best=search.attempts[number],
        rolled=rolled,
        others=(found.search, *found.others),
    )


def _least_seconds(found: Found) -> float:
    """Seconds below which another program is better than the one that was found.

    A step that fits as it is stays so, unless another is faster by what is worth a
    compile.
    """
    if not found.search.fits(found.best):
        return math.inf
    seconds = found.best.measured.step_seconds
    as_it_is = found.best.decisions is None
    return seconds * (1 - WORTH_ANOTHER_COMPILE) if as_it_is else seconds


def _with_budget(known: Search, budget: int, own: Search) -> Search:
    """A search of another budget with all that it knows, as if made for this one.

    **Arguments:** `own` is this budget's own search: what was compiled for it counts.
    """
    search = dataclasses.replace(
        known,
        budget=budget,
        log=own.log,
        solving_seconds=own.solving_seconds,
        charges=dict(known.charges),
        proposed=dict(known.proposed),
        least=set(known.least),
    )
    search.forecast.predictions.update(known.forecast.predictions)
    search.forecast.compiled.update(known.forecast.compiled)
    if search.survey.bodies:
        now = solve(search.problem())
        search.attempts = [_bounded(attempt, now) for attempt in known.attempts]
    if own.survey is known.survey:  # decisions of one step: none is made again
        search.attempts = [*search.attempts, *own.attempts]
        search.forecast.compiled.update(own.forecast.compiled)
    return search


def _bounded(attempt: Attempt, now: Solution) -> Attempt:
    """An attempt of another budget's search, with the bound of this one's problem.

    What stopped it there is not what stops a faster one here.
    """
    solution = attempt.solution
    if solution is None:
        return attempt
    if solution.decisions == now.decisions:
        return dataclasses.replace(attempt, solution=now)
    solution = dataclasses.replace(
        solution,
        outcome="feasible",
        bound_seconds=now.bound_seconds,
        binding=(),
        seconds_per_byte=0.0,
    )
    return dataclasses.replace(attempt, solution=solution)
