"""A problem's bodies as arrays and lists, so that many decisions can be priced quickly.

`_evaluate` prices decisions with them, `_model` builds the solver's matrices from them.
Nothing here decides anything. What goes silently wrong without it: pricing straight
from the records walks every point's `live` tuple again for each of the solver's tries.
"""

import dataclasses
from typing import TYPE_CHECKING

import numpy as np

from .._records._stages import Body, Decision, Operation, Problem, Value

if TYPE_CHECKING:
    import scipy.sparse


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """What decisions for one body come to by themselves, whatever others decide.

    Seconds of a run that go into computing again, into storing, and of the host's
    processor; bytes that it keeps in all runs, and stages, and that one run offloads.
    `peak` are bytes alive beside stacks at the largest of its points, if it has any.
    """

    recomputed: frozenset[int]
    rerun: float
    storing: float
    hosting: float
    kept: float
    staged: float
    moved: float
    peak: float | None


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class BodyTable:
    """One body: `bytes` per value, `live[point, value]`, `reserved` per point.

    `kept` and `offloaded` are what storing a value either way takes for all runs,
    throughout, less what is staged of an offloaded one. `parts` has what decisions for
    it come to by themselves (`_evaluate`): a solver changes one body's at a time.
    """

    body: Body
    bytes: np.ndarray
    kept: np.ndarray
    offloaded: np.ndarray
    live: "scipy.sparse.csr_array"
    reserved: np.ndarray
    parts: dict[tuple[Decision | None, ...], Part] = dataclasses.field(
        default_factory=dict, compare=False, repr=False
    )


def body_table(body: Body) -> BodyTable:
    """The arrays of one body.

    **Arguments:** `body`, with `values[i].index == i` and `operations[i].index == i`.

    **Returns:** byte counts as float64 (exact up to 2**53), shapes (values,); liveness
    as a sparse matrix, shape (points, values); reserved bytes, shape (points,).
    """
    import scipy.sparse  # a third of a second: only for those who plan

    rows = [p for p, point in enumerate(body.points) for _ in set(point.live)]
    columns = [i for point in body.points for i in set(point.live)]
    live = scipy.sparse.csr_array(
        (np.ones(len(rows)), (rows, columns)),
        shape=(len(body.points), len(body.values)),
    )
    sizes = [0 if value.virtual else value.bytes for value in body.values]
    kept = [
        body.copies * size + value.keep_more
        for size, value in zip(sizes, body.values, strict=True)
    ]
    return BodyTable(
        body=body,
        bytes=np.array(sizes, dtype=np.float64),
        kept=np.array(kept, dtype=np.float64),
        offloaded=np.array([v.offload_more for v in body.values], dtype=np.float64),
        live=live,
        reserved=np.array([p.reserved_bytes for p in body.points], dtype=np.float64),
    )


def tables(problem: Problem) -> tuple[BodyTable, ...]:
    """The arrays of every body of `problem`, in forward order."""
    return tuple(body_table(body) for body in problem.bodies)


def cannot_run_again(body: Body, value: Value) -> str | None:
    """Why no operation can make `value` again, or `None` if one can.

    Only what the program itself forbids counts here; what a user forbade stands in
    `Value.allowed` and is not asked.
    """
    if value.operation is None:
        return "an input of the body"
    operation = body.operations[value.operation]
    if not operation.repeatable:
        return f"made by {operation.primitive}, which must not run twice"
    return None


def maker(body: Body, value: Value) -> Operation:
    """The operation that makes `value`, which must not be an input of the body."""
    if value.operation is None:
        raise ValueError(f"{value.name!r} is an input of the body")
    return body.operations[value.operation]


def may_recompute(body: Body, value: Value) -> bool:
    """Whether the solver may have `value` recomputed.

    A value that the backward pass does not read and for which no decision at all is
    open (an integer counter, say) is still recomputed where another recomputation reads
    it.
    """
    open_for_it = "recompute" in value.allowed or not (value.allowed or value.needed)
    return open_for_it and cannot_run_again(body, value) is None


def storing_decisions(body: Body, value: Value) -> frozenset[Decision]:
    """Which of keep and offload are open for `value`: no offload outside a loop."""
    if value.available:
        return frozenset()
    return value.allowed & ({"keep", "offload"} if body.in_loop else {"keep"})


def base_seconds(problem: Problem) -> float:
    """Seconds of the step when nothing is recomputed and no copy is waited for.

    No decision can be faster: every other term of the model is at least zero.
    """
    return problem.other_seconds + sum(
        body.count * body.run_seconds for body in problem.bodies
    )
