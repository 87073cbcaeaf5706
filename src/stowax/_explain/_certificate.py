"""What a plan may claim: how far it is from the fastest that fits, and what stops it.

The planner's model changes while the loop runs: programs correct its memory and the
time in which copies hide, and what was waited for is charged to what moved. So
everything is priced once more by the model as it stands at the end, and a bound that
was proven for one attempt yields to another attempt that fits and is faster. What goes
silently wrong without it: a plan that is called optimal, and a pinned one that is
faster.
"""

import dataclasses

from .._planner import OPTIMAL_GAP, WINDOW, base_seconds, evaluate, solve
from .._records._stages import Decisions, Outcome, Solution
from .._search._loop import Search
from .._search._propose import SOLVING_SECONDS
from .._search._space import Attempt
from ._describe import unplanned_seconds

_TIGHT = 0.02
"""Part of the budget up to which a smallest plan fills it."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Certificate:
    """Seconds are of the step, under the planner's model at the end of the loop.

    `binding` names what stops a faster plan, empty where nothing is known to.
    """

    outcome: Outcome
    model_seconds: float
    bound_seconds: float
    gap: float
    binding: tuple[str, ...]
    seconds_per_byte: float


def certify(search: Search, best: Attempt) -> Certificate:
    """The certificate of the attempt that became the plan."""
    space, fits = best.space, search.fits(best)
    problem = space.problem(search.budget)
    if best.decisions is None:
        bound = unplanned_seconds(space.survey, problem)
        return Certificate(
            outcome="unneeded" if fits else "infeasible",
            model_seconds=bound,
            bound_seconds=bound,
            gap=0.0,
            binding=(),
            seconds_per_byte=0.0,
        )
    seconds = evaluate(problem, best.decisions).seconds
    now = solve(problem, time_limit_seconds=SOLVING_SECONDS)
    bound = min(_bound(search, best, now), seconds)
    gap = (seconds - bound) / bound if bound > 0 else 0.0
    proven: Outcome = "optimal" if gap <= OPTIMAL_GAP else "feasible"
    own = any(attempt.measured is best.measured for attempt in search.log)
    said = now if now.decisions == best.decisions else best.solution if own else None
    return Certificate(
        outcome=proven if fits else "infeasible",
        model_seconds=seconds,
        bound_seconds=bound,
        gap=gap,
        binding=_limits(said.binding, best.decisions) if said else (),
        seconds_per_byte=said.seconds_per_byte if said else 0.0,
    )


def _limits(binding: tuple[str, ...], decisions: Decisions) -> tuple[str, ...]:
    """Without windows for copies where nothing moves: the relaxation moves parts."""
    moves = any("offload" in chosen for chosen in decisions)
    return tuple(name for name in binding if moves or WINDOW not in name)


def _bound(search: Search, best: Attempt, now: Solution) -> float:
    """Seconds below which no plan is known to be possible.

    The solver's bounds, of every variant that the plan stands beside, unless an attempt
    that fits is faster; and no more than what holds for every plan where the smallest
    one had to do, and leaves room.
    """
    space, budget = best.space, search.budget
    bounds = [now.bound_seconds] if now.outcome != "infeasible" else []
    for other in search.spaces:
        if other is not space and not other.survey.tight and other.survey.bodies:
            solved = solve(other.problem(budget), time_limit_seconds=SOLVING_SECONDS)
            if solved.outcome != "infeasible":
                bounds.append(solved.bound_seconds)
    problem = space.problem(budget)
    bounds += [
        evaluate(problem, attempt.decisions).seconds
        for attempt in search.attempts
        if attempt.decisions
        and attempt.space.survey is space.survey
        and search.fits(attempt)
    ]
    room = budget - best.measured.compiled_bytes
    least = best.decisions in space.least and room > _TIGHT * budget
    if least or not bounds:
        bounds.append(base_seconds(problem))
    return min(bounds)
