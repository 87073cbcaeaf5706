"""What is in the way of a plan that does not fit: arrays at the peak of its program.

The program is the one that needs the least of all that were found. So what is alive at
its peak is what no decision moves, or what moving does not help.
"""

import os

from .._inspect._peak_of import peak_of
from .._records._peak import MemoryPeak, PeakArray
from .._search._space import Attempt
from .._survey._survey import Survey, lowered
from .._units import format_bytes

_MOST_ROLES = 6
_WORTH_SAYING = 0.01  # of the peak


def peak_of_attempt(attempt: Attempt) -> MemoryPeak:
    """The arrays at the predicted peak of the program that was compiled for a plan."""
    survey, decisions = attempt.space.survey, attempt.decisions
    plan = None if decisions is None else survey.step_plan(decisions)
    program = lowered(survey, plan, donate=attempt.donated)
    roles = [argument.role for argument in survey.step.arguments]
    _, peak = peak_of(program, survey.target.platform, roles)
    return peak


def in_the_way(survey: Survey, peak: MemoryPeak) -> tuple[str, ...]:
    """The peak by role, the most first, each with its largest array.

    Of state with the reason of the largest part that stays.
    """
    state = [v for body in survey.bodies if body.phase == "update" for v in body.values]
    state += [staying.value for staying in survey.staying if not staying.small]
    why = {
        value.role: f", of which some stays: {value.stays}"
        for value in sorted(state, key=lambda value: value.bytes)
        if value.stays
    }
    roles = [
        (role, size)
        for role, size in peak.by_role().items()
        if size >= _WORTH_SAYING * peak.bytes
    ]
    return tuple(
        f"{role}: {format_bytes(size)}, {_largest(peak, role)}{why.get(role, '')}"
        for role, size in roles[:_MOST_ROLES]
    )


def _largest(peak: MemoryPeak, role: str) -> str:
    """The largest array of a role, or several that are alike."""
    array = next(array for array in peak.arrays if array.role == role)
    alone = len([a for a in peak.arrays if a.role == role]) == 1
    return f"{'' if alone else 'mostly '}{_what(array)}"


def _what(array: PeakArray) -> str:
    times = f"{array.count} × " if array.count > 1 else ""
    if not array.shape:
        return array.name
    line = os.path.basename(array.source)
    where = f"at {line}" if line else array.name
    return f"{times}{array.shape} {where}".rstrip()
