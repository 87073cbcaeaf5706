"""Layers that run as two parts, each with decisions of its own.

All layers of a stack store the same values, so memory that one more value of every
layer would not fit into stays empty. As two parts they fill it: those that run last,
and are read again soonest, keep more, those before them offload or compute again more.
The loops are then four and not two, and parameters that a scan reads stay on the
device: this is tried where a plan fits, its parameters stay, and the planner's model
promises something.

What the whole stack's programs taught holds for its parts: what copies are charged
with, what a program needs beyond its prediction.
"""

import dataclasses
from collections.abc import Collection, Iterator, Mapping

from .._layers._stack import can_run_as_parts
from .._planner import evaluate, solve
from .._records._stages import (
    Body,
    Decision,
    Decisions,
    Passage,
    Problem,
    Solution,
)
from .._step._trace import trace_step
from .._survey._survey import Survey, take_survey
from ._as_written import beside
from ._attempt import Attempt
from ._forms import Found
from ._loop import WORTH_ANOTHER_COMPILE, Search

_FRACTIONS = (0.125, 0.25, 0.375, 0.5, 0.625, 0.75, 0.875)
"""Parts of a stack's layers that the first part is tried with."""

_SOLVING_SECONDS = 3.0
_MOST_TRIES = 2
_MOST_DIVISIONS = 2

_SPARE = 0.02
"""Part of the budget that a division is to leave: programs in parts were seen to need
that much more than what was known of the whole."""


@dataclasses.dataclass(slots=True, kw_only=True)
class InParts:
    """Makes the search for the step with a stack in two parts."""

    pin: Mapping[str, str]
    forbid: Collection[str]

    def __call__(self, search: Search, name: str, first_part: int) -> Search:
        """The search for `search`'s step, the stack `name` in two parts."""
        whole = search.survey
        options = dataclasses.replace(
            whole.options, parts=((written_name(name), first_part),)
        )
        step, specs = whole.function, whole.specs
        traced = trace_step(whole.step.recording, specs, options)
        free = take_survey(
            step, specs, traced, whole.target, options, whole.least_bytes
        )
        return beside(search, free, self.pin, self.forbid)


def written_name(stack: str) -> str:
    """The name of a stack before it says which inputs are differentiated."""
    return stack.rpartition("-")[0]


def in_parts(found: Found, make: InParts, most: int) -> Found:
    """`found`, or a better plan with a stack in two parts, if there is one.

    Not where one compile is left and the whole stack has more use for it.

    **Arguments:** `most` is how many programs may be compiled in all.
    """
    search, best = found.search, found.best
    if best.decisions is None or not search.fits(best) or len(search.log) >= most:
        return found
    survey = search.survey
    if survey.tight or survey.gradients_on_host or survey.refused:
        return found
    if len(search.log) == most - 1 and search.is_unfinished():
        return found
    other = _most_promising(search, best, make)
    if other is None:
        return found
    for _ in range(_MOST_TRIES):
        solution = other.settle()
        if len(search.log) >= most or not _promises(other, solution):
            break
        if other.fits(other.compile(solution, most)):
            break
    fitting = [a for a in other.attempts if other.fits(a) and a.is_sound]
    mine = min(fitting, key=lambda a: a.measured.step_seconds, default=best)
    if mine.measured.step_seconds >= best.measured.step_seconds:
        return found
    other.other_bound = search.bound_seconds(best.solution) if best.solution else 0.0
    others = (search, *found.others)
    return Found(search=other, best=mine, rolled=found.rolled, others=others)


def _promises(other: Search, solution: Solution) -> bool:
    """Whether decisions are expected to be faster than those of the whole stack.

    Those are the first that `other` knew a program of (`_inherited`).
    """
    if any(a.decisions == solution.decisions for a in other.attempts):
        return False
    seconds = evaluate(other.problem(), next(iter(other.forecast.compiled))).seconds
    return solution.evaluation.seconds < seconds * (1 - WORTH_ANOTHER_COMPILE)


# --- where to divide ------------------------------------------------------------------


def _most_promising(search: Search, best: Attempt, make: InParts) -> Search | None:
    """The search for the division whose decisions settle on the fastest step.

    What the model promises the predictions may not hold, so it is asked of several.
    """
    promising: list[tuple[float, Search]] = []
    for name, first_part in _divisions(search, best)[:_MOST_DIVISIONS]:
        other = make(search, name, first_part)
        if _inherited(other, search, best):
            solution = other.settle()
            if _promises(other, solution):
                promising.append((solution.evaluation.seconds, other))
    return min(promising, key=lambda found: found[0], default=(0.0, None))[1]


def _divisions(search: Search, best: Attempt) -> list[tuple[str, int]]:
    """Stacks and lengths of their first parts, those first that promise most."""
    assert best.decisions is not None
    stacks = search.survey.step.stacks
    whole = evaluate(search.problem(), best.decisions)
    # The model of the very program that was compiled, and what is left beside it.
    room = int(search.budget * (1 - _SPARE)) - best.measured.compiled_bytes
    problem = search.problem(whole.device_bytes + max(0, room))
    most = whole.seconds * (1 - WORTH_ANOTHER_COMPILE)
    found: list[tuple[float, tuple[str, int]]] = []
    for k, body in enumerate(problem.bodies):
        traced = stacks.get(body.name)
        if traced is None or not can_run_as_parts(traced.stack):
            continue
        if _moves_parameters(problem, best.decisions) and not traced.stack.separate:
            continue
        for first_part in _lengths(body.count):
            divided = _divided(problem, best.decisions, k, first_part)
            solution = solve(divided, time_limit_seconds=_SOLVING_SECONDS)
            seconds = solution.evaluation.seconds
            if solution.outcome != "infeasible" and seconds < most:
                found.append((seconds, (body.name, first_part)))
    return [division for _, division in sorted(found)]


def _lengths(count: int) -> list[int]:
    found = {round(count * fraction) for fraction in _FRACTIONS}
    return sorted(n for n in found if 0 < n < count)


def _moves_parameters(problem: Problem, decisions: Decisions) -> bool:
    return any(
        bool(value.passages) and decision == "offload"
        for body, chosen in zip(problem.bodies, decisions, strict=True)
        for value, decision in zip(body.values, chosen, strict=True)
    )


def _divided(
    problem: Problem, decisions: Decisions, k: int, first_part: int
) -> Problem:
    """The question with body `k` as two, the state as it was decided."""
    bodies = []
    for number, (body, chosen) in enumerate(
        zip(problem.bodies, decisions, strict=True)
    ):
        if body.phase == "update":
            bodies.append(_decided(body, chosen, problem.bodies[k].name))
        elif number == k:
            rest = body.count - first_part
            bodies += [_part(body, "1", first_part), _part(body, "2", rest)]
        else:
            bodies.append(body)
    return dataclasses.replace(problem, bodies=tuple(bodies))


def _decided(body: Body, chosen: tuple[Decision | None, ...], divided: str) -> Body:
    """The state as it was decided, passing through both parts of a stack."""

    def through(passage: Passage) -> list[Passage]:
        if passage.body != divided:
            return [passage]
        return [dataclasses.replace(passage, body=f"{divided}_{k}") for k in "12"]

    values = tuple(
        dataclasses.replace(
            value,
            allowed=frozenset({decision}) if decision else value.allowed,
            passages=tuple(q for p in value.passages for q in through(p)),
        )
        for value, decision in zip(body.values, chosen, strict=True)
    )
    return dataclasses.replace(body, values=values)


def _part(body: Body, number: str, count: int) -> Body:
    share = count / body.count
    values = tuple(
        dataclasses.replace(
            value,
            keep_more=int(value.keep_more * share),
            offload_more=int(value.offload_more * share),
        )
        for value in body.values
    )
    return dataclasses.replace(
        body, name=f"{body.name}_{number}", count=count, values=values
    )


# --- what the whole stack taught ------------------------------------------------------


def _inherited(other: Search, search: Search, best: Attempt) -> bool:
    """Has `other` learn what is known of the best decisions, as those of the parts.

    False where the parts' bodies are not the whole's.
    """
    same = _same(other.survey, search.survey, best.decisions or ())
    if same is None:
        return False
    # What was needed beyond the prediction; what was not needed, its parts may need.
    known = search.forecast.predicted(best.decisions or ())
    excess = max(0, best.measured.compiled_bytes - known)
    other.forecast.learn(same, other.forecast.predicted(same) + excess)
    owners = dict(_owners(other.survey, search.survey))
    other.charges = {
        (part, index): seconds
        for part, whole in owners.items()
        for (name, index), seconds in search.charges.items()
        if name == whole
    }
    other.windows = {
        part: search.windows[whole]
        for part, whole in owners.items()
        if whole in search.windows
    }
    return True


def _owners(parts: Survey, whole: Survey) -> Iterator[tuple[str, str]]:
    """Every body's name, with that of the body of `whole` that it is, or a part of."""
    names = {body.name for body in whole.bodies}
    for body in parts.bodies:
        candidates = (body.name, body.name.rpartition("_")[0])
        yield from ((body.name, name) for name in candidates if name in names)


def _same(parts: Survey, whole: Survey, decisions: Decisions) -> Decisions | None:
    owners = dict(_owners(parts, whole))
    known = {
        body.name: (body, chosen)
        for body, chosen in zip(whole.bodies, decisions, strict=True)
    }
    found: list[tuple[Decision | None, ...]] = []
    for body in parts.bodies:
        if body.name not in owners:
            return None
        other, chosen = known[owners[body.name]]
        if body.phase == "update":
            found.append(_same_state(parts, whole, chosen))
        elif len(other.values) != len(body.values):
            return None
        else:
            found.append(chosen)
    return tuple(found)


def _same_state(
    parts: Survey, whole: Survey, chosen: tuple[Decision | None, ...]
) -> tuple[Decision | None, ...]:
    """Decisions on the state: arrays that are not in one value any more stay."""
    if parts.state is None or whole.state is None:
        return ()
    pairs = zip(whole.state.leaves, chosen, strict=True)
    decided: dict[frozenset[int], Decision | None] = {
        frozenset(leaves): decision for leaves, decision in pairs
    }
    return tuple(decided.get(frozenset(own), "keep") for own in parts.state.leaves)
