"""Settles ties that are below the solver's gap: fewer bytes moved, then fewer kept.

Called by `_solve` on decisions that fit. What goes silently wrong without it: a plan
that is optimal to 1e-6 of the step and still moves a gigabyte that could have stayed.
"""

from .._records._stages import Body, Decision, Decisions, Evaluation, Problem, Value
from ._baselines import tidy
from ._evaluate import STORED, priced
from ._tables import BodyTable, may_recompute, storing_decisions


def polish(
    problem: Problem,
    body_tables: tuple[BodyTable, ...],
    decisions: Decisions,
    evaluation: Evaluation,
) -> dict:
    """Tries each stored value the other ways, and takes what is better by `_rank`.

    One pass over the stored values, the largest first.

    **Returns:** `decisions` and `evaluation`, never slower than those given, and
    fitting.
    """
    stored = [
        (value.bytes * body.copies, k, value.index)
        for k, body in enumerate(problem.bodies)
        for value in body.values
        if decisions[k][value.index] in STORED
    ]
    for _, k, i in sorted(stored, reverse=True):
        body = problem.bodies[k]
        for other in _others(body, body.values[i], decisions[k][i]):
            tried = _with(problem, decisions, k, i, other)
            if tried is None:
                continue
            cost = priced(problem, body_tables, tried)
            if cost.fits(problem) and _rank(problem, tried, cost) < _rank(
                problem, decisions, evaluation
            ):
                decisions, evaluation = tried, cost
    return {"decisions": decisions, "evaluation": evaluation}


def _others(body: Body, value: Value, chosen: Decision | None) -> list[Decision | None]:
    others: list[Decision | None] = []
    if chosen == "offload" and "keep" in storing_decisions(body, value):
        others.append("keep")
    if chosen in STORED and (may_recompute(body, value) or not value.needed):
        others.append(None)
    return others


def _with(
    problem: Problem, decisions: Decisions, k: int, i: int, other: Decision | None
) -> Decisions | None:
    """`decisions` with one changed and its body tidied; `None` if that cannot be."""
    body = problem.bodies[k]
    chosen = (*decisions[k][:i], other, *decisions[k][i + 1 :])
    try:
        tidied = tidy(body, chosen)
    except ValueError:
        return None
    for value, decision in zip(body.values, tidied, strict=True):
        if decision == "recompute" and not may_recompute(body, value):
            return None
    return (*decisions[:k], tidied, *decisions[k + 1 :])


def _rank(
    problem: Problem, decisions: Decisions, cost: Evaluation
) -> tuple[float, int, int]:
    """Seconds to 9 digits, bytes moved, bytes kept."""
    kept = sum(
        body.copies * value.bytes
        for body, chosen in zip(problem.bodies, decisions, strict=True)
        for value, decision in zip(body.values, chosen, strict=True)
        if decision == "keep"
    )
    return float(f"{cost.seconds:.9g}"), cost.host_bytes, kept
