"""What a number is made of, one unknown part for each thing that a program stores.

A number of bytes that nobody can derive (what a compiler needs beyond a prediction, or
a prediction beyond the planner's linear model) is taken for a sum of parts: one of
every program, and one for each way to store each value, in proportion to its bytes.
Each part is a random number with mean zero. What was seen then gives every other
program its expected sum, and says how far off that may be: Gaussian process regression
with a linear kernel (Rasmussen and Williams, *Gaussian Processes for Machine Learning*,
2006, equations 2.25 and 2.26).
"""

from collections.abc import Sequence

import numpy as np

from .._records._stages import Body, Decision, Decisions

WAYS: tuple[Decision, ...] = ("keep", "offload")


def stored_parts(
    bodies: Sequence[Body], decisions: Decisions, spread: float
) -> list[float]:
    """One number per value and way to store it; 0 where it is not stored so.

    **Arguments:** `spread` is the standard deviation of a stored value's part, relative
    to its bytes.

    **Returns:** standard deviations in bytes, in the order of bodies, values, `WAYS`.
    """
    return [
        spread * body.count * value.bytes * (decision == way)
        for body, chosen in zip(bodies, decisions, strict=True)
        for value, decision in zip(body.values, chosen, strict=True)
        for way in WAYS
    ]


def explained(known: np.ndarray, rest: float, right: np.ndarray) -> np.ndarray:
    """Solves for what explains `right`, of what was seen.

    **Arguments:** `known` has the parts of what was seen, shape (seen, parts); `rest`
    is the variance of what no part explains; `right` has shape (seen,).

    **Returns:** shape (seen,). For `known @ parts` of another program: what each number
    that was seen counts for in the expected one. For the numbers themselves: what
    `known.T` makes the expected size of every part of.
    """
    return np.linalg.solve(known @ known.T + np.eye(len(known)) * rest, right)
