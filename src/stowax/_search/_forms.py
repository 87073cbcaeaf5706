"""The forms that a step can run in, and which of them a plan takes.

- *As it is*: `jax.jit(step)`, perhaps with its state donated.
- *Rolled*: the layers of a Python loop run as a loop again. So what they compute can be
  offloaded or computed again, and their parameters fetched. It has a price: weights are
  picked for one layer at a time, values and gradients are stacked, and the compiler
  fuses nothing across layers. On a TPU that can take more memory than it saves.
- *Layers as written*: no loop is rolled, and what can leave is optimizer state.
- *As it is, for a smaller chip*: the compiler is told of the budget, and computes
  values again by itself. It cannot inside of a loop; in straight-line code it finds a
  few.
- *Gradients in host memory*: rolled, and what the step returns of gradients comes where
  their parameters are (`_as_written.Returned`). Only where nothing else fits.

A step whose layers are scans has neither the third nor the fourth. `find_plan` lets the
planner's model say which form comes first, and believes what was compiled.
"""

import dataclasses
from collections.abc import Callable

from .._planner import evaluate, smallest
from .._records._plan import Source
from .._records._stages import Decisions, Solution
from .._survey._apply import StepPlan
from .._survey._options import smaller_chip
from .._survey._survey import Survey
from ._attempt import Attempt
from ._loop import MOST_COMPILES, SLACK, WORTH_ANOTHER_COMPILE, Search
from ._plain import (
    compile_plain,
    doubt,
    is_straight,
    plain_bytes,
    seen_beyond,
    try_plain,
)

_COMPILER_SAVES = 0.2
"""Most of a straight-line step's memory that XLA was seen to save by itself.

On an H200, told of less and less: four layers with Adam 4.59 → 3.83 GiB for 10 % more
time, a transformer's 16 layers 28.9 → 24.4 GiB for 7 %.
"""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """The plan's attempt, and the search that it belongs to.

    `rolled` is the search among rolled layers, `others` are searches without success.
    """

    search: Search
    best: Attempt
    rolled: Search
    others: tuple[Search, ...] = ()

    @property
    def as_written(self) -> bool:
        """Whether the layers of a Python loop run as they are written."""
        return self.search is not self.rolled

    def smallest_budget(self) -> tuple[int, Source]:
        """Device bytes below which no plan in any form is known to fit; who says so."""
        return min(_smallest_budget(s) for s in (self.search, *self.others))


def _smallest_budget(search: Search) -> tuple[int, Source]:
    """Device bytes below which no plan is known to fit, and who says so.

    What was compiled counts; else the planner's smallest plan, with what the
    compiler has needed beyond the predictions so far, unless it should have been found.
    """
    compiled = [
        a.measured.compiled_bytes
        for a in search.attempts
        if a.measured.host_bytes <= search.host_budget
    ]
    if search.as_written and search.may_donate in search.written:
        compiled.append(search.written[search.may_donate].measured.compiled_bytes)
    if not search.survey.bodies and not compiled:
        return search.survey.reserved_bytes, "predicted"
    if not search.survey.bodies:
        return min(compiled), "compiled"
    expected = search.forecast.credible(search.needing_least().decisions)
    predicted = int(expected * (1 + SLACK))
    refuted = predicted <= search.budget and not any(map(search.fits, search.attempts))
    if compiled and (refuted or min(compiled) <= predicted):
        return min(compiled), "compiled"
    return predicted, "predicted"


def find_plan(
    rolled: Search,
    as_written: Callable[[], Search | None],
    returned: Callable[[], Search | None],
) -> Found:
    """The best attempt in any form.

    **Arguments:** `as_written` makes a search that shares `rolled.log`, for the step
    with its layers as they are written; `None` if that is not what the user wants.
    `returned` makes one for gradients returned in host memory; `None` if there are
    none.
    """
    elsewhere = returned()
    if elsewhere is not None and not _may_fit_at_all(rolled):
        found = _tightened(_loop(elsewhere))
        return dataclasses.replace(found, others=(rolled, *found.others))
    found = _left_to_the_compiler(_tightened(_find(rolled, as_written)), rolled)
    if elsewhere is None:
        return found
    if found.search.fits(found.best):
        return dataclasses.replace(found, others=(elsewhere, *found.others))
    elsewhere.log = []  # nothing else is left to try: it gets compiles of its own
    last = _tightened(_loop(elsewhere))
    rolled.log.extend(elsewhere.log)
    elsewhere.log[:] = rolled.log
    first, second = (last, found) if last.search.fits(last.best) else (found, last)
    others = (second.search, *found.others, *last.others)
    return dataclasses.replace(first, others=others)


def _loop(search: Search) -> Found:
    """What comes of the layers as a loop; a fitting one leaves a compile to others."""
    search.plan(spare=1, least_last=False)
    return Found(search=search, best=search.best(), rolled=search)


def _may_fit_at_all(rolled: Search) -> bool:
    """Whether the step as it is, or what needs least of it, is predicted to fit."""
    least = rolled.forecast.predicted(rolled.needing_least().decisions)
    plain = plain_bytes(rolled, donate=rolled.may_donate)
    return min(least, plain / doubt(rolled)) <= rolled.budget


def _find(rolled: Search, as_written: Callable[[], Search | None]) -> Found:
    plain = try_plain(rolled) if rolled.as_written else None
    if plain is None and not rolled.survey.bodies:
        if not any(a.donated == rolled.may_donate for a in rolled.attempts):
            compile_plain(rolled, donate=rolled.may_donate)
        plain = rolled.best()
    if plain is not None:
        return Found(search=rolled, best=plain, rolled=rolled)
    written = as_written() if _could_fit_unrolled(rolled) else None
    if written is None or not _may_fit(written, rolled):
        return _loop(rolled)
    return _better_of(written, rolled)


def _better_of(written: Search, rolled: Search) -> Found:
    """The better of the two; with the same state on the host, layers as written win."""
    plain, loop = written.settle(), rolled.settle()
    moves_less = _state_moved(rolled, loop) < _state_moved(written, plain)
    rolled_first = moves_less and loop.evaluation.seconds < plain.evaluation.seconds
    first, second = (rolled, written) if rolled_first else (written, rolled)
    first.plan(leave=1)
    other = plain if rolled_first else loop
    if not first.fits(first.best()) or (moves_less and _is_faster(other, first)):
        second.plan(least_last=False)
    written.other_bound, rolled.other_bound = _bound(loop), _bound(plain)
    search = min((s for s in (first, second) if s.attempts), key=_rank)
    other_search = second if search is first else first
    return Found(
        search=search, best=search.best(), rolled=rolled, others=(other_search,)
    )


def _state_moved(search: Search, solution: Solution) -> int:
    """Bytes of state that a solution has in host memory."""
    pairs = zip(search.survey.bodies, solution.decisions, strict=True)
    return sum(
        value.bytes
        for body, chosen in pairs
        if body.phase == "update"
        for value, how in zip(body.values, chosen, strict=True)
        if how == "offload"
    )


def _tightened(found: Found) -> Found:
    """What did not fit once more, with copies waited for that take memory ahead.

    Gradients are written before the next layer begins, and what is offloaded early in a
    layer is written in it, and fetched when it is read. It can be slower, and needs up
    to two layers' gradients and one layer's values less.
    """
    search, decisions = found.search, found.best.decisions
    if decisions is None or search.fits(found.best):
        return found
    if not _can_be_tighter(search, decisions):
        search.plan()
        return dataclasses.replace(found, best=search.best())
    survey = dataclasses.replace(search.survey, tight=True)
    tight = dataclasses.replace(
        search, survey=survey, attempts=[], proposed={}, least=set()
    )
    tight.plan()
    if not tight.attempts or _rank(search) <= _rank(tight):
        return found
    others = search, *found.others
    return Found(search=tight, best=tight.best(), rolled=tight, others=others)


def _can_be_tighter(search: Search, decisions: Decisions) -> bool:
    """Whether a compile is left, and a plan has copies that could wait."""
    if len(search.log) >= MOST_COMPILES or search.survey.tight:
        return False
    survey = dataclasses.replace(search.survey, tight=True)
    plan = search.survey.step_plan(decisions)
    same = survey.step_plan(decisions).stacks == plan.stacks
    return not same or _gradients_wait(search.survey, plan)


def _gradients_wait(survey: Survey, plan: StepPlan) -> bool:
    """Whether gradients under `plan` are written later than memory would have it.

    See `run_fed`: on a GPU, and where loops fetch their weights by `switch`.
    """
    if not plan.hosted:
        return False
    roles = {survey.step.arguments[i].role for i in plan.hosted.shards}
    unrolled = any(t.stack.separate for t in survey.step.stacks.values())
    return (plan.hosted.in_turn or unrolled) and "parameter" in roles


def _rank(search: Search) -> tuple[bool, float]:
    best = search.best()
    fits, measured = search.fits(best), best.measured
    return not fits, measured.step_seconds if fits else measured.compiled_bytes


def _bound(solution: Solution) -> float:
    """Seconds below which no plan of the form is known to be possible."""
    infeasible = solution.outcome == "infeasible"
    return float("inf") if infeasible else solution.bound_seconds


def _is_faster(solution: Solution, search: Search) -> bool:
    """Whether the model takes a solution of another form for faster than the best."""
    best = search.best()
    if best.decisions is None:
        return False
    seconds = evaluate(search.problem(), best.decisions).seconds
    return solution.evaluation.seconds < seconds * (1 - WORTH_ANOTHER_COMPILE)


# --- layers as they are written -------------------------------------------------------


def _could_fit_unrolled(rolled: Search) -> bool:
    """Whether the step with unrolled layers may fit if all that can leave it leaves."""
    if not is_straight(rolled):
        return False
    movable = sum(
        value.bytes
        for body in rolled.survey.bodies
        for value in body.values
        if value.role == "optimizer state" and "offload" in value.allowed
    )
    needed = plain_bytes(rolled, donate=rolled.may_donate) - movable
    return movable > 0 and needed <= rolled.budget * doubt(rolled)


def _may_fit(written: Search, rolled: Search) -> bool:
    """The same by a prediction for the very program."""
    if not written.survey.bodies:
        return False
    needed = written.forecast.predicted(smallest(written.problem()).decisions)
    return needed + seen_beyond(rolled) <= rolled.budget * doubt(rolled)


# --- the step as it is ----------------------------------------------------------------


def _left_to_the_compiler(found: Found, search: Search) -> Found:
    """The step as it is where it nearly fits, and the compiler can do the rest.

    Where a compile is left: the compiler may well miss what it is told.
    """
    seen = [a for a in search.attempts if a.decisions is None]
    nearly = [a for a in seen if _nearly_fits(search, a)]
    stays = found.best in seen and search.fits(found.best)
    if stays or not nearly or len(search.log) >= MOST_COMPILES:
        return found
    plain = nearly[-1]
    inspection = plain.measured.inspection
    arguments = inspection.memory.device.argument if inspection else 0
    options = smaller_chip(search.survey.target, search.budget, arguments)
    if not options or options.keys() & search.user_options:
        return found
    attempt = compile_plain(search, donate=plain.donated, options=options)
    rival = found.best.measured.step_seconds
    beaten = not found.search.fits(found.best) or attempt.measured.step_seconds < rival
    if not search.fits(attempt) or not beaten:
        return found
    others = () if found.search is search else (found.search,)
    others += tuple(s for s in found.others if s is not search)
    return Found(search=search, best=attempt, rolled=search, others=others)


def _nearly_fits(search: Search, plain: Attempt) -> bool:
    """Whether straight-line code takes a little more than the budget."""
    if not is_straight(search):
        return False
    least = plain.measured.compiled_bytes * (1 - _COMPILER_SAVES)
    return least <= search.budget < plain.measured.compiled_bytes
