"""The fastest decisions that fit both memories, with a certificate.

`solve` is what the plan calls; `smallest` answers "what is the least memory that
works". Both build the model (`_model`), let HiGHS solve it, round, and price what came
back with `_evaluate`: nothing leaves here that does not fit by that.
"""

import dataclasses
import time

import numpy as np

from .._errors import StepError
from .._records._stages import Decisions, Evaluation, Outcome, Problem, Solution
from ._baselines import baselines, tidy
from ._evaluate import priced
from ._highs import Answer, decisions_of, least_memory, marginals, minimise
from ._model import Model, build
from ._pins import check_problem
from ._polish import polish
from ._tables import BodyTable, base_seconds, tables
from ._windows import TIE_KEPT, TIE_MOVED

OPTIMAL_GAP = 1e-4
"""A plan is optimal if none can be faster by more than this part of the step."""

_SOLVER_GAP = 5e-5
_PATIENCE = 60.0
_MARGINS = (2e-6, 2e-5, 5e-4)
"""Parts of the budgets withheld, in turn, if what HiGHS returns exceeds them."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class _Found:
    decisions: Decisions
    evaluation: Evaluation


def solve(problem: Problem, *, time_limit_seconds: float = 2.0) -> Solution:
    """The fastest decisions within `problem.device_bytes` and `problem.host_bytes`.

    **Arguments:** `time_limit_seconds` bounds the search; past it the best plan found
    is returned with the gap it still has.

    **Returns:** a `Solution` whose `outcome` is `"unneeded"` (every needed value can
    stay on the device: all are kept, nothing moves), `"optimal"` (gap at most
    `OPTIMAL_GAP`), `"feasible"` (time ran out), or `"infeasible"` (the decisions are
    those that need the least device memory, and do not fit).

    **Raises:** `ArgumentError` where a needed value can be had in no allowed way at
    all, whatever the budget.
    """
    deadline = time.perf_counter() + 0.8 * time_limit_seconds
    check_problem(problem)
    body_tables = tables(problem)
    kept = _keep_all(problem, body_tables)
    if kept is not None and kept.evaluation.fits(problem):
        return _solution("unneeded", kept, base_seconds(problem))
    model = build(problem, body_tables)
    answer, found = _search(problem, body_tables, model, deadline)
    if found is None:
        least = _smallest(problem, body_tables, time_limit_seconds)
        if least.evaluation.fits(problem):
            found = least
        else:
            binding = tuple(
                name
                for name, much in (
                    ("device memory", _device_excess(problem, least)),
                    ("host memory", least.evaluation.host_bytes - problem.host_bytes),
                )
                if much > 0
            )
            bound = base_seconds(problem)
            return _solution("infeasible", least, bound, binding)
    bound = _bound_seconds(problem, model, answer, found)
    binding, seconds_per_byte = _certificate(problem, model, found)
    proven = _gap(found.evaluation.seconds, bound) <= OPTIMAL_GAP
    outcome: Outcome = "optimal" if proven else "feasible"
    return _solution(outcome, found, bound, binding, seconds_per_byte)


def smallest(problem: Problem, *, time_limit_seconds: float = 2.0) -> Solution:
    """The decisions that need the least device memory, and of those the fastest.

    The host budget holds (where it can: a pin may force more onto the host than it
    has); the device budget is not asked, except that `outcome` says `"infeasible"`
    where the result does not fit it. The smallest budget that works is
    `evaluation.device_bytes`.

    **Raises:** as `solve`.
    """
    check_problem(problem)
    found = _smallest(problem, tables(problem), time_limit_seconds)
    fits = found.evaluation.fits(problem)
    outcome: Outcome = "optimal" if fits else "infeasible"
    return _solution(outcome, found, found.evaluation.seconds)


def _gap(seconds: float, bound: float) -> float:
    return max(0.0, (seconds - bound) / bound) if bound > 0 else 0.0


def _keep_all(problem: Problem, body_tables: tuple[BodyTable, ...]) -> _Found | None:
    """Every needed value kept, or `None` where that is not the fastest.

    Where storing costs nothing, no plan is faster: nothing runs again and nothing is
    waited for. Else, and where a pin forbids to keep one of them, the solver is asked.
    """
    for body in problem.bodies:
        for value in body.values:
            if not value.needed or value.available:
                continue
            if value.keep_seconds or "keep" not in value.allowed:
                return None
    decisions = baselines(problem)["keep all"]
    return _Found(
        decisions=decisions, evaluation=priced(problem, body_tables, decisions)
    )


def _search(
    problem: Problem,
    body_tables: tuple[BodyTable, ...],
    model: Model,
    deadline: float,
) -> tuple[Answer, _Found | None]:
    """The best plan that really fits, and the first answer, whose bound is proof."""
    first = answer = _ask(model, deadline)
    for margin in _MARGINS:
        if answer.x is None:
            break
        found = _rounded(problem, body_tables, model, answer.x)
        if found.evaluation.fits(problem):
            polished = polish(problem, body_tables, found.decisions, found.evaluation)
            return first, _Found(**polished)
        if time.perf_counter() >= deadline:
            break
        answer = _ask(_tightened(model, margin), deadline)
    return first, _hand_written(problem, body_tables)


def _ask(model: Model, deadline: float) -> Answer:
    left = deadline - time.perf_counter()
    return minimise(model, seconds=left, relative_gap=_SOLVER_GAP)


def _tightened(model: Model, margin: float) -> Model:
    limit = model.limit.copy()
    rows = [*model.device_rows, model.host_row]
    limit[rows] -= margin
    return dataclasses.replace(model, limit=limit)


def _rounded(
    problem: Problem,
    body_tables: tuple[BodyTable, ...],
    model: Model,
    x: np.ndarray,
) -> _Found:
    decisions = tuple(
        tidy(body, tuple(chosen))
        for body, chosen in zip(
            problem.bodies, decisions_of(problem, model, x), strict=True
        )
    )
    return _Found(
        decisions=decisions, evaluation=priced(problem, body_tables, decisions)
    )


def _hand_written(
    problem: Problem, body_tables: tuple[BodyTable, ...]
) -> _Found | None:
    """The fastest baseline that fits and keeps to what is allowed."""
    best: _Found | None = None
    for decisions in baselines(problem).values():
        if not _allowed(problem, decisions):
            continue
        evaluation = priced(problem, body_tables, decisions)
        if evaluation.fits(problem) and (
            best is None or evaluation.seconds < best.evaluation.seconds
        ):
            best = _Found(decisions=decisions, evaluation=evaluation)
    return best


def _allowed(problem: Problem, decisions: Decisions) -> bool:
    return all(
        decision is None or decision in value.allowed or not value.allowed
        for body, chosen in zip(problem.bodies, decisions, strict=True)
        for value, decision in zip(body.values, chosen, strict=True)
    )


def _smallest(
    problem: Problem, body_tables: tuple[BodyTable, ...], seconds: float
) -> _Found:
    """Least device memory within the host's; then the least seconds at that memory."""
    # Rows are in units of the budget; one far above the answer drowns it in tolerance.
    rivals = baselines(problem).values()
    near = min(priced(problem, body_tables, d).device_bytes for d in rivals)
    model = build(dataclasses.replace(problem, device_bytes=near), body_tables)
    least = least_memory(model, rows=model.device_rows)
    answer = minimise(least, seconds=seconds / 2, relative_gap=0.0)
    if answer.infeasible:
        return _smallest(_with_enough_host(problem, body_tables), body_tables, seconds)
    if answer.x is None:  # a machine busy with other things: any plan will do
        answer = minimise(least, seconds=_PATIENCE, relative_gap=1.0)
    if answer.x is None:
        raise StepError(
            f"the solver found no plan in {_PATIENCE:.0f} s. Give it more time "
            "(time_limit_seconds), or pin some values to make the problem smaller."
        )
    found = _rounded(problem, body_tables, model, answer.x)
    tight = dataclasses.replace(problem, device_bytes=found.evaluation.device_bytes)
    deadline = time.perf_counter() + seconds / 2
    _, faster = _search(tight, body_tables, build(tight, body_tables), deadline)
    if faster is None or faster.evaluation.seconds > found.evaluation.seconds:
        return found
    return faster


def _with_enough_host(problem: Problem, body_tables: tuple[BodyTable, ...]) -> Problem:
    """`problem` with the least host memory that its pins can do with."""
    model = build(problem, body_tables)
    host = least_memory(model, rows=np.array([model.host_row]))
    host.limit[model.device_rows] = np.inf
    answer = minimise(host, seconds=_PATIENCE, relative_gap=0.0)
    if answer.x is None:
        raise StepError("the solver found no plan even with unlimited memory.")
    forced = _rounded(problem, body_tables, model, answer.x)
    return dataclasses.replace(
        problem,
        host_bytes=max(problem.host_bytes + 1, forced.evaluation.host_bytes),
    )


def _device_excess(problem: Problem, found: _Found) -> int:
    return found.evaluation.device_bytes - problem.device_bytes


def _bound_seconds(
    problem: Problem, model: Model, answer: Answer, found: _Found
) -> float:
    """A lower bound of the step's seconds from the solver's bound of its objective.

    The objective is seconds plus ties, and the ties add up to at most `TIE_MOVED +
    TIE_KEPT` (in units of `seconds_scale`): without them the bound is still one.
    """
    proven = (answer.bound - TIE_MOVED - TIE_KEPT) * model.seconds_scale
    floor = max(proven, base_seconds(problem))
    return min(floor, found.evaluation.seconds)


def _certificate(
    problem: Problem, model: Model, found: _Found
) -> tuple[tuple[str, ...], float]:
    """Names of the rows that stop a faster plan, and what a byte of memory buys.

    Both from the linear relaxation: a row is named if its limit is worth something
    there. None is where only pins, or the indivisibility of values, stand in the way.
    """
    saved = marginals(model)
    if saved is None or found.evaluation.seconds <= base_seconds(problem):
        return (), 0.0
    named = {
        name: None
        for name, much in zip(model.names, saved, strict=True)
        if name and much > 1e-7
    }
    per_unit = float(saved[model.device_rows].sum())
    per_byte = per_unit * model.seconds_scale / model.device_scale
    return tuple(named), max(per_byte, 0.0)


def _solution(
    outcome: Outcome,
    found: _Found,
    bound: float,
    binding: tuple[str, ...] = (),
    seconds_per_byte: float = 0.0,
) -> Solution:
    seconds = found.evaluation.seconds
    return Solution(
        outcome=outcome,
        decisions=found.decisions,
        evaluation=found.evaluation,
        bound_seconds=bound,
        gap=_gap(seconds, bound),
        binding=binding,
        seconds_per_byte=seconds_per_byte,
    )
