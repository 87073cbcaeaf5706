"""Of how many layers groups should be, if any (see `_layers._groups`).

The planner's own model says, for the step as it is surveyed without groups: what a
group runs again and keeps follows from what is known of its layers.
"""

import dataclasses

from .._planner import MISTAKEN, base_seconds, solve, turnover
from .._records._stages import GROUPED, Body, Problem, Solution, Value
from ._held import holding
from ._survey import Survey

_CLEARLY = 0.02
"""Part of the step's time by which groups have to be faster, or of its memory less."""

_WAITS = 0.05
"""Part of the step's time that the model has copies waited for, if groups are tried.

A program waits for more.
"""

_ROOM = 1.3
"""How far the model may be above the truth, of which it has learned nothing yet."""

_LEAST = 4
"""Layers of a loop that are worth groups."""

_MOST = 10
"""Sizes of groups that are tried."""


def best_group(survey: Survey, problem: Problem) -> int:
    """Layers in a group of the fastest plan in groups; 0 if groups gain nothing.

    **Arguments:** `problem` is that of the step without groups.
    """
    loops = {body.name: body for body in problem.bodies if _is_loop(survey, body)}
    most = max((body.count for body in loops.values()), default=0)
    if most < _LEAST or not all(map(is_open, loops.values())):
        return 0
    now = solve(problem)
    fits = now.outcome != "infeasible"
    again = sum(body.count * body.forward_seconds for body in loops.values())
    waits = now.evaluation.exposed_seconds > _WAITS * now.evaluation.seconds
    if fits and not waits and now.evaluation.seconds < base_seconds(problem) + again:
        return 0
    room = int(problem.device_bytes * _ROOM)
    roomy = dataclasses.replace(problem, device_bytes=room)
    found = {k: solve(grouped(survey, roomy, loops, k)) for k in _sizes(most)}
    best = min(found, key=lambda size: _rank(found[size]))
    mine, own = found[best].evaluation, now.evaluation
    if found[best].outcome == "infeasible":
        return best if mine.device_bytes < own.device_bytes * (1 - _CLEARLY) else 0
    hope = mine.seconds - MISTAKEN * turnover(mine, own)
    return best if not fits or hope < own.seconds * (1 - _CLEARLY) else 0


def _is_loop(survey: Survey, body: Body) -> bool:
    layers = body.phase == "layers" and body.in_loop
    return layers and not survey.step.stacks[body.name].stack.tiles


def is_open(body: Body) -> bool:
    """Whether all of a layer may run again: the user keeps none of what it computes.

    What is not read by the backward pass counts as well, but for effects of its own:
    these run once in any case.
    """

    def may_run(value: Value) -> bool:
        if value.operation is None or value.available or "recompute" in value.allowed:
            return True
        return not (value.needed or body.operations[value.operation].repeatable)

    return all(map(may_run, body.values))


def _sizes(count: int) -> list[int]:
    """Sizes of groups that are tried: all but the last group are as large."""
    even = [k for k in range(2, count // 2 + 1) if count % k == 0]
    near = sorted({*even, round(count**0.5)}, key=lambda k: abs(k - count**0.5))
    return near[:_MOST]


def grouped(
    survey: Survey, problem: Problem, loops: dict[str, Body], size: int
) -> Problem:
    """The question for layers in groups of `size`."""
    starts = {name: _starts(survey, body, size) for name, body in loops.items()}
    more = sum(starts.values())

    def stays(body: Body, value: Value) -> bool:
        return body.name in loops or any(p.body in loops for p in value.passages)

    bodies = tuple(
        dataclasses.replace(
            body,
            group=size if body.name in loops and body.count > size else 0,
            points=tuple(
                dataclasses.replace(p, reserved_bytes=p.reserved_bytes + more)
                for p in body.points
            ),
        )
        for body in holding(problem.bodies, stays, GROUPED)
    )
    reserved = problem.loss_reserved_bytes + more
    return dataclasses.replace(problem, bodies=bodies, loss_reserved_bytes=reserved)


def _starts(survey: Survey, body: Body, size: int) -> int:
    """Bytes of the inputs of all groups of a body."""
    carried = survey.step.stacks[body.name].stack.carry_inputs
    return (-(-body.count // size) + 1) * sum(body.values[i].bytes for i in carried)


def _rank(solution: Solution) -> tuple[bool, float, int]:
    """Fitting plans first, by seconds to a part in a thousand; then what needs less."""
    fits = solution.outcome != "infeasible"
    cost = solution.evaluation
    seconds = float(f"{cost.seconds:.3g}") if fits else 0.0
    return not fits, seconds, cost.device_bytes
