"""The one place that calls HiGHS (through scipy): programs and their relaxations.

Called by `_solve`. What goes silently wrong: HiGHS may leave a row by 1e-6 and call it
feasible, so nothing read here is trusted until `_evaluate` has priced it.
"""

import dataclasses
from typing import Any

import numpy as np

from .._records._stages import Decision, Problem
from ._model import Model
from ._stdout import silent_stdout

_INFEASIBLE = 2  # scipy.optimize.milp's `status`

_MOST_NODES = 100
"""Nodes of the search tree after which the best found so far has to do.

Unlike a limit in seconds it gives the same plan on a machine that is busy. Layers of
the published models are solved to the gap within 75 (0.1 to 0.5 s), or close enough."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """`x` is `None` if nothing was found; `bound` is a lower bound of the objective."""

    x: np.ndarray | None
    bound: float
    infeasible: bool


def minimise(model: Model, *, seconds: float, relative_gap: float) -> Answer:
    """Solves `model`; gives up after `_MOST_NODES`, or `seconds` of a slow machine.

    Then it is the best found so far.
    """
    import scipy.optimize  # half a second: only for those who plan

    none = np.full(len(model.limit), -np.inf)
    # Bounds and limits are arrays; scipy's annotations know numbers only.
    bounds: Any = scipy.optimize.Bounds
    rows: Any = scipy.optimize.LinearConstraint
    with silent_stdout():
        result = scipy.optimize.milp(
            model.cost,
            integrality=model.integral,
            bounds=bounds(np.zeros(len(model.upper)), model.upper),
            constraints=rows(model.matrix, none, model.limit),
            options={
                "time_limit": max(seconds, 0.01),
                "node_limit": _MOST_NODES,
                "mip_rel_gap": relative_gap,
            },
        )
    bound = result.mip_dual_bound
    return Answer(
        x=result.x,
        bound=-np.inf if bound is None else float(bound),
        infeasible=result.status == _INFEASIBLE,
    )


def least_memory(model: Model, *, rows: np.ndarray) -> Model:
    """The program that minimises the largest excess over the limits of `rows`.

    One column M is added: `row @ x <= limit + M`. M may be below zero, which a shift of
    the limits by a constant makes a column that starts at zero.
    """
    import scipy.sparse

    lowest = float(model.limit[rows].max(initial=0.0)) + 1.0
    column = np.zeros(len(model.limit))
    column[rows] = -1.0
    limit = model.limit.copy()
    limit[rows] -= lowest
    matrix = scipy.sparse.hstack(
        [model.matrix, scipy.sparse.csr_array(column[:, None])], format="csr"
    )
    return dataclasses.replace(
        model,
        cost=np.append(np.zeros(len(model.cost)), 1.0),
        matrix=matrix,
        limit=limit,
        upper=np.append(model.upper, np.inf),
        integral=np.append(model.integral, 0),
    )


def marginals(model: Model) -> np.ndarray | None:
    """What one more unit of each row's limit saves in the linear relaxation, >= 0.

    `None` if the relaxation has no solution. Source: `scipy.optimize.linprog`'s
    `ineqlin.marginals`, the derivative of the objective by the limit (<= 0).
    """
    import scipy.optimize

    result: Any = scipy.optimize.linprog(
        model.cost,
        A_ub=model.matrix,
        b_ub=model.limit,
        bounds=np.column_stack([np.zeros(len(model.cost)), model.upper]),
        method="highs",
    )
    if result.status != 0:
        return None
    return -np.asarray(result.ineqlin.marginals)


def decisions_of(
    problem: Problem, model: Model, x: np.ndarray
) -> list[list[Decision | None]]:
    """Columns rounded to decisions; what is neither kept nor offloaded is `None`."""
    chosen: list[list[Decision | None]] = []
    for body, keep, offload in zip(
        problem.bodies, model.keep, model.offload, strict=True
    ):
        one: list[Decision | None] = [None] * len(body.values)
        for i, column in offload.items():
            if x[column] > 0.5:
                one[i] = "offload"
        for i, column in keep.items():
            if x[column] > 0.5:
                one[i] = "keep"
        chosen.append(one)
    return chosen
