"""Whether a plan would be another one if the host's link were slower, or faster.

The link of a machine that is not there is an assumption, with a range (`_link_ranges`).
The planner's question is asked again at both ends of it, with the same costs and the
same memory, and nothing is compiled. Where the answer is another one, and faster there
by more than a plan is worth compiling for, the plan says so.

What is not asked: parts of the update that the host's processor could do only where the
link is slower than assumed are no candidates here. So silence is no promise; what is
said holds under the model, as the decisions that it rests on are priced.
"""

import dataclasses
from collections.abc import Sequence

from .._planner import evaluate, solve
from .._records._stages import Body, Decisions, Link, Problem
from .._search._propose import SOLVING_SECONDS, WORTH
from .._search._space import Attempt
from .._survey._survey import stored_bytes
from .._units import format_bytes, format_seconds


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Change:
    """What would be decided at another rate of the link.

    `seconds` is the step's then, by the model, `planned_seconds` that of the plan as it
    is at that rate. Bytes are per device: what is offloaded then, and by the plan.
    """

    link: Link
    seconds: float
    planned_seconds: float
    offloaded: int
    planned_offloaded: int


def link_notes(budget: int, best: Attempt) -> tuple[str, ...]:
    """A sentence about the range of the link, if the plan changes inside it."""
    target, decisions = best.space.survey.target, best.decisions
    if decisions is None or target.link_range is None:
        return ()
    # Without what was waited for: that was at the rate that is assumed.
    problem = best.space.without_stalls(budget)
    found = changes(problem, decisions, target.link_range)
    if not found:
        return ()
    slowest, fastest = target.link_range
    cases = [
        _case(change, end)
        for end in target.link_range
        for change in found
        if change.link == end
    ]
    return (
        f"the host link is assumed, at {_rate(target.link)} GB/s (from "
        f"{_rate(slowest)} to {_rate(fastest)}), and the answer depends on it: "
        f"{'; '.join(cases)}. stowax calibrate measures it where the plan is to run",
    )


def changes(
    problem: Problem, decisions: Decisions, ends: Sequence[Link]
) -> list[Change]:
    """What would be decided at each of `ends`, where that is not what was planned.

    **Arguments:** `decisions` are the plan's. Compiled programs have the last word, so
    they may not be what the model says at the problem's own link. What the model would
    gain there is no change of the link's, and is taken off.
    """
    found = []
    known: tuple[Decisions, float] | None = None
    for link in ends:
        if link == problem.link:
            continue
        known = known or _solved(problem, decisions)
        then = _at(problem, link)
        chosen, gain = _solved(then, decisions)
        if gain - max(known[1], 0.0) < WORTH:
            continue
        found.append(
            Change(
                link=link,
                seconds=evaluate(then, chosen).seconds,
                planned_seconds=evaluate(then, decisions).seconds,
                offloaded=stored_bytes(problem.bodies, chosen, "offload"),
                planned_offloaded=stored_bytes(problem.bodies, decisions, "offload"),
            )
        )
    return found


def _solved(problem: Problem, planned: Decisions) -> tuple[Decisions, float]:
    """The model's decisions, and the part of the planned step that they would save."""
    solution = solve(problem, time_limit_seconds=SOLVING_SECONDS)
    if solution.outcome == "infeasible":
        return planned, 0.0
    seconds = evaluate(problem, planned).seconds
    return solution.decisions, 1 - solution.evaluation.seconds / max(seconds, 1e-12)


def _at(problem: Problem, link: Link) -> Problem:
    """The same question with another link; the host updates only what is faster so."""

    def wins(body: Body) -> Body:
        parts = tuple(
            part
            for part in body.host_updates
            if part.seconds
            < max(
                part.update_in / link.host_to_device,
                part.update_out / link.device_to_host,
            )
        )
        return dataclasses.replace(body, host_updates=parts)

    bodies = tuple(wins(body) for body in problem.bodies)
    return dataclasses.replace(problem, bodies=bodies, link=link)


def _case(change: Change, end: Link) -> str:
    then, now = _size(change.offloaded), _size(change.planned_offloaded)
    what = f"{then} instead of {now}" if then != now else f"other values, {now} as well"
    return (
        f"at {_rate(end)} GB/s offloading {what} would take "
        f"{format_seconds(change.seconds)} a step instead of "
        f"{format_seconds(change.planned_seconds)}, by the model"
    )


def _size(count: int) -> str:
    return format_bytes(count) if count else "nothing"


def _rate(link: Link) -> str:
    out, into = link.device_to_host / 1e9, link.host_to_device / 1e9
    return f"{out:.3g}" if out == into else f"{out:.3g} out and {into:.3g} in"
