"""What the planner's memory model leaves out, learned from lowered programs.

The model is linear, and adds up what is alive; what a program needs besides (values
that are moved aside, layers' working memory that overlaps, what fusion saves) depends
on what it stores. Every prediction that was made says by how much the model was off for
those decisions; `learned` lays that to the values (`_regression`), and `taught` gives
it to the solver as bytes of theirs, so that it looks for decisions that will fit, and
not only for those that the model takes to be small.
"""

import dataclasses
from collections.abc import Mapping, Sequence

import numpy as np

from .._records._stages import Body, Decisions, Problem, Value
from ._regression import WAYS, stored_parts

# Standard deviations: of the part of every program, relative to the budget; of a stored
# value's part, relative to its bytes; of what no part explains, relative to the budget.
# Models of the benchmarks were off by up to a tenth of the budget.
_EVERYWHERE = 0.1
_STORED = 0.5
_REST = 0.002


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Lessons:
    """Bytes beyond the model's: of every program, and per body one pair per value.

    A pair is for keeping and for offloading it, of all runs together.
    """

    everywhere: int = 0
    stored: Mapping[str, Sequence[tuple[int, int]]] = dataclasses.field(
        default_factory=dict
    )


def learned(
    bodies: Sequence[Body], off_by: Mapping[Decisions, int], scale: int
) -> Lessons:
    """Lessons that explain by how many bytes the model was off for some decisions.

    **Arguments:** `scale` is the size of the programs in question, roughly: the budget.
    """
    if not off_by:
        return Lessons()
    from scipy.optimize import lsq_linear  # a third of a second: for those who plan

    parts = np.array(
        [
            [_EVERYWHERE * scale, *stored_parts(bodies, decisions, _STORED)]
            for decisions in off_by
        ]
    )
    seen = np.array(list(off_by.values()), dtype=np.float64)
    # The same as `_regression` does, but with a least size for every part. What no
    # program stores nothing is learned of: of a thousand parts a tenth is left.
    rest = _REST * scale
    least = np.array([-np.inf, *(size for body in bodies for size in _least(body))])
    told = parts.any(axis=0)
    found = np.zeros(parts.shape[1])
    # Far from a bound scipy multiplies infinity by zero, and then takes another way.
    # Its warning would stand among the lines of the user's plan.
    with np.errstate(invalid="ignore"):
        found[told] = lsq_linear(
            np.vstack([parts[:, told] / rest, np.eye(told.sum())]),
            np.concatenate([seen / rest, np.zeros(told.sum())]),
            bounds=(least[told], np.inf),
        ).x
    whole = np.array([[body.count * v.bytes] for body in bodies for v in body.values])
    more = _STORED * whole * found[1:].reshape(-1, len(WAYS))
    stored, start = {}, 0
    for body in bodies:
        mine = more[start : start + len(body.values)]
        stored[body.name] = [(int(keep), int(offload)) for keep, offload in mine]
        start += len(body.values)
    return Lessons(everywhere=int(_EVERYWHERE * scale * found[0]), stored=stored)


def _least(body: Body) -> list[float]:
    """How little the parts of a body may be: storing never gives memory back.

    Half of what keeping a value takes is believed to be saved, and of what offloading
    takes, one layer's.
    """
    keep, offload = -0.5 / _STORED, -1.0 / body.count / _STORED
    return [keep, offload] * len(body.values)


def taught(problem: Problem, lessons: Lessons) -> Problem:
    """The problem, its values with the bytes that they were seen to need besides."""

    def value_of(value: Value, more: tuple[int, int]) -> Value:
        return dataclasses.replace(value, keep_more=more[0], offload_more=more[1])

    bodies = tuple(
        dataclasses.replace(
            body,
            values=tuple(map(value_of, body.values, lessons.stored[body.name])),
        )
        if body.name in lessons.stored
        else body
        for body in problem.bodies
    )
    return dataclasses.replace(problem, bodies=bodies)
